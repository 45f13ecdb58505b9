"""The verb `check`: the numbers and the gate alone, on any index, by a map's hold-out or at full size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.asking import Asked, same_space
from vecferry.attribution import attribute
from vecferry.baseline import MAX_DROP, compare, load_baseline
from vecferry.batch import Floats, faulty, id_keys
from vecferry.bench import STAND_INS
from vecferry.encoded import TrueRows
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.evaluate import OVERLAP_QUERIES, evaluate
from vecferry.fullsize import BATCH, ids_at, index_overlap, judge, search_or_scan
from vecferry.gate import Gate, decide, join
from vecferry.holdout import Qrels, holdout_of
from vecferry.linear import LinearMap
from vecferry.measured import AS_INDEXED, RE_EMBEDDED, Cell, Curve, Evaluation, Loss, PerQuery, Row, Slices
from vecferry.pairs import BadRows
from vecferry.prechecks import card_of, check_truth
from vecferry.recall import Metric, Places, Values, label_recall, ndcg, others_than, require_k, share_right
from vecferry.report import Report
from vecferry.slices import Slicing, documents_of, measure_slices
from vecferry.store import Reader, Uri, find, opened


def check(
    destination: str | Uri | Reader | Any,
    *,
    map: LinearMap | str | Path | None = None,
    truth: str | Uri | Reader | Any | None = None,
    queries: str | Uri | Reader | Any | None = None,
    source_queries: str | Uri | Reader | Any | None = None,
    qrels: str | Path | None = None,
    gate: str | Gate | None = None,
    slice: str | None = None,
    slice_file: str | Path | None = None,
    baseline: Report | str | Path | None = None,
    max_drop: float = MAX_DROP,
    k: int = 10,
    seed: int = 0,
) -> Report:
    """Compare an index with true re-embedding, and apply a gate.

    map       measure on its hold-out: every row of the report, at the size of the hold-out
    truth     a store of all documents encoded by the new model: measure at full size instead, joined by id
    queries   a store of the new model's query vectors, in place of the hold-out's; `source_queries` the old model's
              for the same ids; `qrels` labels by query and document id
    slice     a payload column of the index or of `truth`, or of `slice_file`, a Parquet file with ids in the column
              `id`: measure each of its values by itself too
    baseline  an earlier report, or its file: the metrics of the gate, or else agreement, must not have dropped by more
              than `max_drop` on the same queries (see `baseline.compare`)

    With `truth` and neither `queries` nor a map that has some, documents stand in as queries. Raises UsageError
    with neither map nor truth, IncompatibleError where spaces or dimensions differ or `truth` is none (see
    `prechecks.check_truth`), DataError where `truth` and the index don't hold the same ids, and BadRowsError for
    queries and true vectors that can't be used.
    """
    if map is None and truth is None:
        raise UsageError("nothing to compare with: pass a map (--map) or a store of true vectors (--truth)")
    wanted = Gate.of(gate)
    before = None if baseline is None else load_baseline(baseline, max_drop)
    m = map if map is None or isinstance(map, LinearMap) else LinearMap.load(map)
    if m is not None and m.card is not None:
        card_of(m, "document")
    if source_queries is not None and (m is None or queries is None):
        raise UsageError("source queries go with a map and queries, to which they are matched by id")
    with opened(destination) as index, nullcontext() if truth is None else opened(truth) as true:
        if m is not None:
            space = m.card.space if m.card is not None else None
            same_space(index, space, m.d_out, f"the map {m.path or ''}".strip())
        if true is not None:
            check_truth(index, true, m)
        slicing = Slicing.of(slice, slice_file, (index, true), wanted)
        asked = Asked.read(index, m, queries, source_queries, qrels)
        if true is not None:
            evaluation = _at_full_size(index, true, m, asked, wanted, slicing, k, seed)
            losses: tuple[Loss, ...] = ()
        else:
            assert m is not None
            holdout = holdout_of(m)
            mixed = TrueRows.recorded(index.info.provenance, holdout, m.card)
            held = asked.of(holdout if mixed is None else holdout.take(mixed.held_in.measured))
            evaluation = evaluate(held, m, staged=index, gate=wanted, slicing=slicing, k=k, seed=seed)
            lossy = index.info.provenance.get("source_lossy")
            losses = attribute(held, m, index, evaluation, lossy=lossy, true=mixed, seed=seed)
        facts = {
            "destination": index.info.uri,
            "rows": index.info.count,
            "index": index.info.index,
            "parameters": dict(index.info.parameters),
            "lossy": index.info.lossy,
            "space": index.info.space,
            "map": m.card.sha256 if m is not None and m.card is not None else None,
            "truth": true.info.uri if true is not None else None,
            "baseline": str(baseline) if isinstance(baseline, (str, Path)) else None,
        }
    decisions = [] if wanted is None else [decide(wanted, evaluation)]
    if before is not None:
        decisions.append(compare(evaluation, before, wanted, max_drop=max_drop, seed=seed))
    return Report(facts, evaluation, join(decisions), attribution=losses)


def _keys(store: Reader) -> NDArray[np.uint64]:
    keys = np.sort(np.concatenate([np.empty(0, np.uint64), *(id_keys(piece) for piece in store.ids(1 << 18))]))
    doubled = int((keys[1:] == keys[:-1]).sum())
    if doubled:
        raise DataError(
            f"{store.info.uri}: {doubled:,} of {len(keys):,} rows repeat an id, so it can't be joined by id"
        )
    return keys


def _sound(truth: Reader) -> Iterator[Floats]:
    """Yield true vectors; raise BadRowsError at the first block with rows that nothing can be compared with."""
    for batch in truth.read(BATCH):
        if (bad := faulty(batch.vectors)).any():
            fault = "true vectors hold NaN, infinite or too large numbers, or nothing but zeros"
            raise BadRowsError(truth.info.uri, fault, batch.ids.filter(pa.array(bad)).to_pylist(), "Mend them.")
        yield batch.vectors


def _same_ids(index: Reader, truth: Reader) -> int:
    """Return the number of rows; refuse two stores of different documents before any vectors are compared."""
    ours, theirs = _keys(index), _keys(truth)
    if np.array_equal(ours, theirs):
        return len(ours)
    here, there = (len(np.setdiff1d(a, b, assume_unique=True)) for a, b in ((ours, theirs), (theirs, ours)))
    types = [store.info.id_type or pa.int64() for store in (index, truth)]
    raise DataError(
        f"{index.info.uri} has {len(ours):,} rows, {truth.info.uri} has {len(theirs):,}: {here:,} ids are only in "
        f"the first, {there:,} only in the second (types {types[0]} and {types[1]}); compare stores of the same "
        "documents"
    )


def _metric(index: Reader, truth: Reader, m: LinearMap | None, notes: list[str]) -> Metric:
    """Return the rule by which documents are ranked: the map's, else what a store says of itself."""
    if m is not None and m.card is not None:
        return m.card.metric
    for store in (index, truth):
        if store.info.metric in ("cosine", "ip", "l2"):
            metric: Metric = store.info.metric  # type: ignore[assignment]
            return metric
    notes.append("neither store says how it ranks: cosine was used")
    return "cosine"


def _at_full_size(
    index: Reader,
    true: Reader,
    m: LinearMap | None,
    asked: Asked,
    gate: Gate | None,
    slicing: Slicing | None,
    k: int,
    seed: int,
) -> Evaluation:
    """Search the index for all its documents, and judge what it finds by one pass over the true vectors."""
    notes: list[str] = []
    ks = tuple(sorted({k} | (gate.ks if gate is not None else set())))
    same_space(index, true.info.space, true.info.dim, f"the truth {true.info.uri}")
    count = _same_ids(index, true)
    metric = _metric(index, true, m, notes)
    own = None
    vectors = asked.vectors
    if vectors is None:
        chosen = np.sort(np.random.default_rng(seed).permutation(count)[:STAND_INS])
        own = ids_at(index, chosen).cast(true.info.id_type or pa.int64())
        vectors = BadRows(optional=False).take(true, own).vectors
    top = ks[-1] + (own is not None)
    require_k(top, count)
    found, indexed = search_or_scan(index, vectors, top, metric)
    some = found >= 0
    places, which = np.unique(found[some], return_inverse=True)
    in_truth = np.full(found.shape, -1, np.int64)
    in_truth[some] = find(true, ids_at(index, places))[which]
    exact, scores = judge(_sound(true), vectors, in_truth, top, metric)
    best, nearest = exact.scores, exact.places
    if own is not None:
        itself = find(true, own)
        scores = np.take_along_axis(scores, others_than(in_truth, itself), axis=1)
        best = np.take_along_axis(best, others_than(nearest, itself), axis=1)

    size = _Size(ks, count, seed, stand_ins=own is not None)
    ideal = nearest, asked.found_in(true)
    as_indexed = size.row(AS_INDEXED, scores, best, (found, asked.found_in(index)), ideal)
    names = asked.ids if own is None else own
    per_query = [PerQuery.of(names, vectors, size.kept)]
    slices = None if slicing is None else size.slices(slicing, true, len(vectors), ideal, own)
    sweep: tuple[Curve, ...] = ()
    if indexed:
        rows = np.sort(np.random.default_rng(seed).permutation(len(vectors))[:OVERLAP_QUERIES])
        overlap = index_overlap(index, vectors[rows], ks, metric)
        values = {("index-overlap", k): v for k, v in overlap.values.items()}
        sweep = overlap.curves(k, seed=seed)
        per_query.append(PerQuery.of(names.take(pa.array(rows)), vectors[rows], values))
        cells = tuple(size.cell(name, k, v) for (name, k), v in values.items())
    else:
        cells = tuple(Cell("index-overlap", k, reason="the store has no index of its own") for k in ks)
        notes.append("as indexed: the stored vectors, searched exactly")
    as_indexed = replace(as_indexed, cells=as_indexed.cells + cells)
    rows_measured = (as_indexed, size.row(RE_EMBEDDED, best, best, ideal))
    return Evaluation(rows_measured, metric, k, tuple(notes), slices, tuple(per_query), sweep=sweep)


@dataclass(frozen=True, slots=True)
class _Size:
    """Hold what all cells at full size share; `kept` the values of the row "as indexed", by metric and k."""

    ks: tuple[int, ...]
    count: int
    seed: int
    stand_ins: bool
    kept: dict[tuple[str, int], Values] = field(default_factory=dict)

    def slices(
        self, slicing: Slicing, true: Reader, queries: int, ideal: tuple[Places, Qrels | None], own: pa.Array | None
    ) -> Slices:
        if own is not None:
            return measure_slices(
                slicing.column, None, slicing.names(own), self.kept, self.count, seed=self.seed, full_size=True
            )
        rows, documents = documents_of(queries, ideal[1], ideal[0][:, 0])
        places, which = np.unique(documents, return_inverse=True)
        asked = rows, slicing.names(ids_at(true, places))[which]
        return measure_slices(slicing.column, asked, None, self.kept, self.count, seed=self.seed, full_size=True)

    def cell(self, metric: str, k: int, values: Values, over: Values | None = None) -> Cell:
        return Cell.of(metric, k, values, self.count, seed=self.seed, over=over, full_size=True)

    def row(
        self,
        name: str,
        scores: Values,
        best: Values,
        found: tuple[Places, Qrels | None],
        ideal: tuple[Places, Qrels | None] | None = None,
    ) -> Row:
        """Measure what was `found`, with its true `scores`, against the `best`, and its labels against `ideal`."""
        cells: list[Cell] = []
        for k in self.ks:
            metric = "doc-agreement" if self.stand_ins else "agreement"
            right = share_right(scores, best, k)
            cells.append(self.cell(metric, k, right))
            if name == AS_INDEXED:
                self.kept[metric, k] = right
            if self.stand_ins:
                reason = "no queries: pass --queries, or a map that holds some"
                cells += [Cell(metric, k, reason=reason) for metric in ("agreement", "recall", "ndcg")]
                continue
            for metric, score in (("recall", label_recall), ("ndcg", ndcg)):
                if found[1] is None:
                    cells.append(Cell(metric, k, reason="no labels: pass --qrels"))
                    continue
                values = score(found[0], found[1], k)
                cells.append(self.cell(metric, k, values))
                if name == AS_INDEXED:
                    self.kept[metric, k] = values
                if ideal is not None and ideal[1] is not None:
                    cells.append(self.cell(f"retention.{metric}", k, values, score(ideal[0], ideal[1], k)))
        return Row(name, tuple(cells))
