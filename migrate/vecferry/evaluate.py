"""Measure, on what was held out of the fit, every way of searching that a migration is to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from vecferry.batch import Floats
from vecferry.errors import IncompatibleError, UnsupportedError
from vecferry.fullsize import index_overlap, search
from vecferry.gate import Gate
from vecferry.holdout import Holdout, Qrels
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
    Row,
)
from vecferry.recall import (
    Metric,
    Places,
    Truth,
    Values,
    identity_recall,
    label_recall,
    ndcg,
    rerank,
    topk,
    without,
)
from vecferry.store import Reader, find

STAND_INS = 1000
"""Documents that stand in as queries; more of them narrow an interval that is narrow already."""
OVERLAP_QUERIES = 250
"""Queries of index overlap, each of which is compared with every vector of the store."""
CANDIDATES = (200, 100, 50, 20)
"""Sizes of a cascade's first stage, of which the largest below a fifth of the hold-out is measured."""
FLAT = ("Flat", "IDMap,Flat", "IDMap2,Flat")

Find = Callable[[Floats, int], Places]


def evaluate(
    holdout: Holdout,
    m: LinearMap,
    *,
    staged: Reader | None = None,
    gate: Gate | None = None,
    k: int = 10,
    seed: int = 0,
) -> Evaluation:
    """Measure the rows of every report on the same held-out documents and queries.

    `staged` is searched among the held-out ids for the row "as indexed", and at full size for index overlap.
    Measured are `k` and whatever k a gate names. Documents that are not in `staged` (skipped rows) are left out of
    every row, and counted in a note. What can't be measured says why. Raises IncompatibleError when hold-out,
    map and store differ in dimensions, or the map carries queries.
    """
    _require(holdout, m, staged)
    metric: Metric = m.card.metric if m.card is not None else "cosine"
    ks = tuple(sorted({k} | (gate.ks if gate is not None else set())))
    notes: list[str] = []
    held, absent = _present(holdout, staged, notes)
    indexed = absent or (_index(staged, held, metric, notes) if staged is not None else "nothing is indexed yet")
    translated = m.apply(held.source)
    bench = _Bench.of(held, metric, ks, seed)
    rows = [
        bench.row(STATUS_QUO, _exact(held.source, metric), held.source_queries, held.source),
        bench.row(NAIVE_SWAP, _swap(held, metric), held.queries, held.target, identities=held.source),
        bench.row(TRANSLATED, _exact(translated, metric), held.queries, held.target, identities=translated),
        bench.row(AS_INDEXED, indexed, held.queries, held.target),
        bench.row(*_cascade(translated, held.target, metric, max(ks)), held.queries, held.target),
        bench.row(RE_EMBEDDED, _exact(held.target, metric), held.queries, held.target),
    ]
    if staged is not None:
        wanted = gate is not None and "index-overlap" in gate.metrics
        cells = _overlap(staged, held, metric, ks, seed, wanted)
        rows = [replace(r, cells=r.cells + cells) if r.name == AS_INDEXED else r for r in rows]
        if staged.info.lossy and cells[0].value is not None:
            notes.append("index overlap compares with exact search of what the index's codes give back")
    return Evaluation(tuple(rows), metric, k, tuple(notes))


@dataclass(frozen=True, slots=True, eq=False)
class _Bench:
    """Hold what all rows are compared with: true neighbours of the queries, and of documents standing in."""

    held: Holdout
    metric: Metric
    ks: tuple[int, ...]
    seed: int
    stand_ins: Places
    asked: Truth | None
    by_documents: Truth | None

    @classmethod
    def of(cls, held: Holdout, metric: Metric, ks: tuple[int, ...], seed: int) -> _Bench:
        n = len(held.ids)
        chosen = np.random.default_rng(seed).permutation(n)[:STAND_INS]
        chosen.sort()
        top = max((k for k in ks if k < n), default=0)
        asked = Truth.of(held.queries, held.target, top, metric) if held.queries is not None and top else None
        by_documents = Truth.of_documents(chosen, held.target, top, metric) if top else None
        return cls(held, metric, ks, seed, chosen, asked, by_documents)

    def row(
        self, name: str, way: Find | str, queries: Floats | None, documents: Floats, identities: Floats | None = None
    ) -> Row:
        """Measure one way of searching, or give the reason why it can't be tried.

        A user of this way asks with `queries`; `documents` holds what to ask with where documents stand in.
        """
        cells: list[Cell] = []
        n, asked, by_documents = len(self.held.ids), self.asked, self.by_documents
        usable = tuple(k for k in self.ks if k < n)
        found = own = None
        unasked = (
            "no queries: pass --queries" if self.held.queries is None else "no source queries: pass --source-queries"
        )
        if not isinstance(way, str) and usable:
            found = way(queries, usable[-1]) if queries is not None else None
            own = without(way(documents[self.stand_ins], usable[-1] + 1), self.stand_ins)
        for k in self.ks:
            few = f"k = {k} needs more than {k} documents, {n} are held out" if k >= n else None
            why = way if isinstance(way, str) else few
            if found is not None and asked is not None and why is None:
                cells.append(self._cell("agreement", k, asked.agreement(found, k)))
            else:
                cells.append(Cell("agreement", k, reason=why or unasked))
            if own is not None and by_documents is not None and why is None:
                cells.append(self._cell("doc-agreement", k, by_documents.agreement(own, k)))
            else:
                cells.append(Cell("doc-agreement", k, reason=why))
            cells += self._labelled(name, k, found if why is None else None, why or unasked)
        if identities is not None and not isinstance(way, str) and usable:
            nearest = tuple(sorted({1, *usable}))
            recalls = identity_recall(
                identities[self.stand_ins], self.stand_ins, self.held.target, nearest, self.metric
            )
            cells += [self._cell("identity", k, values) for k, values in recalls.items()]
        return Row(name, tuple(cells))

    def _cell(self, metric: str, k: int, values: Values, over: Values | None = None) -> Cell:
        return Cell.of(metric, k, values, len(self.held.ids), seed=self.seed, over=over)

    def _labelled(self, name: str, k: int, found: Places | None, why: str) -> Iterator[Cell]:
        qrels: Qrels | None = self.held.qrels
        for metric, score in (("recall", label_recall), ("ndcg", ndcg)):
            if qrels is None or found is None or self.asked is None:
                reason = "no labels: pass --qrels" if qrels is None else why
                yield Cell(metric, k, reason=reason)
                continue
            values = score(found, qrels, k)
            yield self._cell(metric, k, values)
            if name != RE_EMBEDDED:
                yield self._cell(f"retention.{metric}", k, values, score(self.asked.places, qrels, k))


def _require(holdout: Holdout, m: LinearMap, staged: Reader | None) -> None:
    """Refuse what can't be measured together."""
    if m.card is not None and m.card.direction != "document":
        raise IncompatibleError("the map carries new queries into the old space; this measures document maps")
    if (m.d_in, m.d_out) != (holdout.source.shape[1], holdout.target.shape[1]):
        dims = f"{holdout.source.shape[1]} -> {holdout.target.shape[1]}"
        raise IncompatibleError(f"the map leads {m.d_in} -> {m.d_out} dimensions, its hold-out {dims}")
    if staged is not None and staged.info.dim != m.d_out:
        raise IncompatibleError(
            f"{staged.info.uri} holds vectors of {staged.info.dim} dimensions, the map leads to {m.d_out}"
        )


def _present(holdout: Holdout, staged: Reader | None, notes: list[str]) -> tuple[Holdout, str | None]:
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
    rows = np.flatnonzero(here)
    qrels = holdout.qrels
    if qrels is not None:
        kept = here[qrels.document]
        place = np.cumsum(here) - 1
        qrels = Qrels(qrels.query[kept], place[qrels.document[kept]], qrels.grade[kept]) if kept.any() else None
    part = {"ids": holdout.ids.take(pa.array(rows)), "source": holdout.source[rows], "target": holdout.target[rows]}
    return replace(holdout, **part, qrels=qrels), None


def _exact(documents: Floats, metric: Metric) -> Find:
    return lambda queries, k: topk(queries, documents, k, metric)[0]


def _swap(held: Holdout, metric: Metric) -> Find | str:
    dims = held.source.shape[1], held.target.shape[1]
    return _exact(held.source, metric) if dims[0] == dims[1] else f"dimensions differ: {dims[0]} and {dims[1]}"


def _cascade(translated: Floats, target: Floats, metric: Metric, k: int) -> tuple[str, Find | str]:
    """Search translated vectors, and order the candidates by their true ones."""
    c = next((c for c in CANDIDATES if k < c < len(target) / 5), None)
    if c is None:
        least = next((c for c in reversed(CANDIDATES) if c > k), k + 1) * 5 + 1
        return CASCADE, f"needs at least {least} held-out documents for k = {k}, there are {len(target)}"

    def way(queries: Floats, k: int) -> Places:
        candidates, _ = topk(queries, translated, c, metric)
        return rerank(queries, target, candidates, metric)[:, :k]

    return f"{CASCADE} (top-{c} re-ranked with true vectors)", way


def _index(staged: Reader, held: Holdout, metric: Metric, notes: list[str]) -> Find | str:
    """Search the staged store among the held-out ids; its vectors, exactly, where its index can't do that."""
    try:
        search(staged, held.target[:1], 1, metric, held.ids)
    except UnsupportedError as error:
        try:
            vectors = staged.take(held.ids).vectors
        except UnsupportedError as other:
            return str(other)
        notes.append(f"as indexed: the stored vectors, searched exactly ({error})")
        return _exact(vectors, metric)
    return lambda queries, k: search(staged, queries, k, metric, held.ids)


def _overlap(
    staged: Reader, held: Holdout, metric: Metric, ks: tuple[int, ...], seed: int, wanted: bool
) -> tuple[Cell, ...]:
    """Compare the index with exact search at full size, unless it is one that searches exactly by its nature."""
    count = staged.info.count or 0
    reason = None
    if staged.info.index in FLAT and not wanted:
        reason = "a flat index searches exactly"
    elif max(ks) > count:
        reason = f"k = {max(ks)} can't be found among {count} documents"
    if reason is None:
        queries = held.queries if held.queries is not None else held.target
        rows = np.random.default_rng(seed).permutation(len(queries))[:OVERLAP_QUERIES]
        rows.sort()
        try:
            overlaps = index_overlap(staged, queries[rows], ks, metric)
            return tuple(
                Cell.of("index-overlap", k, values, count, seed=seed, full_size=True) for k, values in overlaps.items()
            )
        except UnsupportedError:
            reason = "the store has no index of its own"
    return tuple(Cell("index-overlap", k, reason=reason) for k in ks)
