"""Measure, on what was held out of the fit, every way of searching that a migration is to be compared with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from vecferry.batch import Floats, IdDigest
from vecferry.bench import Bench
from vecferry.errors import IncompatibleError, UnsupportedError
from vecferry.fullsize import Overlap, as_asked, index_overlap, own_metric, search
from vecferry.gate import Gate
from vecferry.holdout import Holdout
from vecferry.linear import LinearMap
from vecferry.measured import (
    AS_INDEXED,
    CASCADE,
    NAIVE_SWAP,
    RE_EMBEDDED,
    STATUS_QUO,
    TRANSLATED,
    Cell,
    Evaluation,
    PerQuery,
)
from vecferry.recall import (
    Metric,
    Places,
    require_apart,
    rerank,
    topk,
)
from vecferry.sizes import Find, Ground, Sizes
from vecferry.slices import Slicing
from vecferry.store import Reader, find

OVERLAP_QUERIES = 250
"""Queries of index overlap, each of which is compared with every vector of the store."""
CANDIDATES = (200, 100, 50, 20)
"""Sizes of a cascade's first stage, of which the largest below a fifth of the hold-out is measured."""
SAME_MODEL = "the model stays the same"
FLAT = ("Flat", "IDMap,Flat", "IDMap2,Flat")


def evaluate(
    holdout: Holdout,
    m: LinearMap,
    *,
    staged: Reader | None = None,
    gate: Gate | None = None,
    slicing: Slicing | None = None,
    k: int = 10,
    seed: int = 0,
) -> Evaluation:
    """Measure the rows of every report on the same held-out documents and queries.

    `staged` is searched among the held-out ids for the row "as indexed", and at full size for index overlap.
    Agreement at its size, and at sizes that a gate names, is foretold (see `extrapolation`).
    Measured are `k` and whatever k a gate names; with `slicing` each slice by itself too. Documents that are not in
    `staged` (skipped rows) are left out of every row, and counted in a note. What can't be measured says why.
    Raises IncompatibleError when hold-out, map and store differ in dimensions, or the map carries queries.
    """
    _require(holdout, m, staged)
    metric: Metric = m.card.metric if m.card is not None else "cosine"
    ks = tuple(sorted({k} | (gate.ks if gate is not None else set())))
    notes: list[str] = []
    held, absent = present(holdout, staged, notes)
    asked = None if held.queries is None else m.asking(held.queries)
    documents = m.asking(held.target)  # where they stand in for queries
    if m.ask is not None:
        notes.append(
            f"{TRANSLATED} and {AS_INDEXED} are vectors of {m.d_out} dimensions, asked through the filter and compared "
            f"with re-embedding in all {m.d_asked}"
        )
    indexed = absent or (
        index_way(staged, held.ids, documents[:1], metric, notes) if staged is not None else "nothing is indexed yet"
    )
    if len(held.ids) > 1:
        require_apart(as_asked(held.target, "cosine").mean(axis=0, dtype=np.float64), "the hold-out")
    translated = m.apply(held.source)
    overlap_cells: tuple[Cell, ...] = ()
    overlap: Overlap | None = None
    overlaps: tuple[PerQuery, ...] = ()
    stored: Find | str = indexed if isinstance(indexed, str) else ""
    if staged is not None:
        wanted = gate is not None and "index-overlap" in gate.metrics
        overlap_cells, overlap, overlaps = _overlap(staged, held, m, metric, ks, seed, wanted)
        stored = stored or stored_way(staged, held.ids, metric)
    sizes = Sizes.of(len(held.ids), None if staged is None else staged.info.count, k, gate)
    bench = Bench.of(held, metric, ks, seed, sizes)
    of_translated = exactly(translated, metric)
    identities = translated if m.ask is None else None
    shares = {cell.k: cell for cell in overlap_cells if cell.value is not None}
    rows = [
        bench.row(STATUS_QUO, _quo(held, m, metric), held.source_queries, held.source),
        bench.row(NAIVE_SWAP, _swap(held, m, metric), held.queries, held.target, identities=held.source),
        bench.row(TRANSLATED, of_translated, asked, documents, identities=identities, ground=Ground(of_translated, {})),
        bench.row(AS_INDEXED, indexed, asked, documents, ground=Ground(stored, shares)),
        bench.row(*_cascade(translated, held.target, m, metric, max(ks)), held.queries, held.target),
        bench.row(RE_EMBEDDED, exactly(held.target, metric), held.queries, held.target),
    ]
    per_query = bench.per_query() + overlaps
    sweep = () if overlap is None else overlap.curves(k, seed=seed)
    rows = [replace(r, cells=r.cells + overlap_cells) if r.name == AS_INDEXED else r for r in rows]
    if overlap is not None and staged is not None and staged.info.lossy:
        notes.append("index overlap compares with exact search of what the index's codes give back")
    if overlap is not None and sizes.wanted:
        notes.append(
            f"{AS_INDEXED} at sizes that weren't measured: foretold of exact search over what the index stores, and "
            "lowered by index overlap"
        )
    slices = None if slicing is None else bench.slices(slicing)
    digest = IdDigest()
    digest.update(held.ids)
    held_out = f"{digest.unordered:016x}"
    curves = bench.size_curves(k)
    return Evaluation(tuple(rows), metric, k, tuple(notes), slices, per_query, held_out, sweep, sizes.acting, curves)


def _require(holdout: Holdout, m: LinearMap, staged: Reader | None) -> None:
    """Refuse what can't be measured together."""
    if m.card is not None and m.card.direction != "document":
        raise IncompatibleError("the map carries new queries into the old space; this measures document maps")
    if (m.d_in, m.d_asked) != (holdout.source.shape[1], holdout.target.shape[1]):
        dims = f"{holdout.source.shape[1]} -> {holdout.target.shape[1]}"
        raise IncompatibleError(f"the map leads {m.d_in} -> {m.d_asked} dimensions, its hold-out {dims}")
    if staged is not None and staged.info.dim != m.d_out:
        raise IncompatibleError(
            f"{staged.info.uri} holds vectors of {staged.info.dim} dimensions, the map leads to {m.d_out}"
        )


def present(holdout: Holdout, staged: Reader | None, notes: list[str]) -> tuple[Holdout, str | None]:
    """Return the part of the hold-out that the store has; all of it, and a reason, where it has none."""
    if staged is None:
        return holdout, None
    kind = staged.info.id_type or pa.int64()
    try:
        holdout = replace(holdout, ids=holdout.ids.cast(kind))
    except pa.ArrowInvalid:
        return holdout, f"held-out ids are of type {holdout.ids.type}, {staged.info.uri} has {kind}"
    here = find(staged, holdout.ids) >= 0
    if here.all():
        return holdout, None
    if not here.any():
        return holdout, f"none of the {len(here)} held-out ids is in {staged.info.uri}"
    names = holdout.ids.filter(pa.array(~here)).to_pylist()
    shown = ", ".join(str(i) for i in names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    notes.append(
        f"{len(names)} of {len(here)} held-out documents are not in the index and left out of all rows: {shown}"
    )
    return holdout.take(np.flatnonzero(here)), None


def exactly(documents: Floats, metric: Metric) -> Find:
    """Return the way of searching these documents exactly."""
    return lambda queries, k: topk(queries, documents, k, metric)[0]


def _quo(held: Holdout, m: LinearMap, metric: Metric) -> Find | str:
    return exactly(held.source, metric) if m.changes_model else SAME_MODEL


def _swap(held: Holdout, m: LinearMap, metric: Metric) -> Find | str:
    if not m.changes_model:
        return SAME_MODEL
    dims = held.source.shape[1], held.target.shape[1]
    return exactly(held.source, metric) if dims[0] == dims[1] else f"dimensions differ: {dims[0]} and {dims[1]}"


def _cascade(translated: Floats, target: Floats, m: LinearMap, metric: Metric, k: int) -> tuple[str, Find | str]:
    """Search translated vectors, and order the candidates by their true ones."""
    c = next((c for c in CANDIDATES if k < c < len(target) / 5), None)
    if c is None:
        least = next((c for c in reversed(CANDIDATES) if c > k), k + 1) * 5 + 1
        return CASCADE, f"needs at least {least} held-out documents for k = {k}, there are {len(target)}"

    def way(queries: Floats, k: int) -> Places:
        candidates, _ = topk(m.asking(queries), translated, c, metric)
        return rerank(queries, target, candidates, metric)[:, :k]

    return f"{CASCADE} (top-{c} re-ranked with true vectors)", way


def index_way(staged: Reader, ids: pa.Array, probe: Floats, metric: Metric, notes: list[str]) -> Find | str:
    """Search the staged store among these ids; its vectors, exactly, where its index can't do that with a `probe`."""
    try:
        search(staged, probe, 1, metric, ids)
    except UnsupportedError as error:
        try:
            vectors = staged.take(ids).vectors
        except UnsupportedError as other:
            return str(other)
        notes.append(f"as indexed: the stored vectors, searched exactly ({error})")
        return exactly(vectors, metric)
    return lambda queries, k: search(staged, queries, k, metric, ids)


def stored_way(staged: Reader, ids: pa.Array, metric: Metric) -> Find | str:
    """Search the vectors that a store gives back, exactly and ranked as its own search does, or say why it can't."""
    try:
        vectors, ranking = staged.take(ids).vectors, own_metric(staged.info, metric)
    except UnsupportedError as error:
        return str(error)
    return lambda queries, k: topk(as_asked(queries, metric), vectors, k, ranking)[0]


def _overlap(
    staged: Reader, held: Holdout, m: LinearMap, metric: Metric, ks: tuple[int, ...], seed: int, wanted: bool
) -> tuple[tuple[Cell, ...], Overlap | None, tuple[PerQuery, ...]]:
    """Compare the index with exact search at full size, unless it is one that searches exactly by its nature."""
    count = staged.info.count or 0
    reason = None
    if staged.info.index in FLAT and not wanted:
        reason = "a flat index searches exactly"
    elif max(ks) > count:
        reason = f"k = {max(ks)} can't be found among {count} documents"
    if reason is None:
        ids, queries = (held.query_ids, held.queries) if held.queries is not None else (held.ids, held.target)
        rows = np.random.default_rng(seed).permutation(len(queries))[:OVERLAP_QUERIES]
        rows.sort()
        try:
            overlap = index_overlap(staged, m.asking(queries[rows]), ks, metric)
            values = {("index-overlap", k): v for k, v in overlap.values.items()}
            cells = [Cell.of(name, k, v, count, seed=seed, full_size=True) for (name, k), v in values.items()]
            return tuple(cells), overlap, (PerQuery.of(ids.take(pa.array(rows)), queries[rows], values),)
        except UnsupportedError:
            reason = "the store has no index of its own"
    return tuple(Cell("index-overlap", k, reason=reason) for k in ks), None, ()
