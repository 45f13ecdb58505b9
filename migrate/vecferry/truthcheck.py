"""An index at full size, judged by a store of all its documents' true vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.asking import Asked, same_space
from vecferry.attribution import attribute_at_full_size
from vecferry.batch import Floats, faulty, id_keys
from vecferry.bench import STAND_INS
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.evaluate import FLAT, OVERLAP_QUERIES
from vecferry.fullsize import BATCH, as_asked, ids_at, index_overlap, judge, own_metric, search_or_scan
from vecferry.gate import Gate
from vecferry.holdout import Qrels
from vecferry.linear import LinearMap
from vecferry.measured import AS_INDEXED, RE_EMBEDDED, Cell, Curve, Evaluation, Loss, PerQuery, Row, Slices
from vecferry.pairs import BadRows
from vecferry.recall import (
    Metric,
    Places,
    Values,
    label_recall,
    ndcg,
    others_than,
    require_apart,
    require_k,
    share_right,
    topk,
)
from vecferry.slices import Slicing, documents_of, measure_slices
from vecferry.store import Reader, find


def _keys(store: Reader) -> NDArray[np.uint64]:
    keys = np.sort(np.concatenate([np.empty(0, np.uint64), *(id_keys(piece) for piece in store.ids(1 << 18))]))
    doubled = int((keys[1:] == keys[:-1]).sum())
    if doubled:
        raise DataError(
            f"{store.info.uri}: {doubled:,} of {len(keys):,} rows repeat an id, so it can't be joined by id"
        )
    return keys


def _sound(truth: Reader) -> Iterator[Floats]:
    """Yield true vectors; raise BadRowsError at the first block with rows that nothing can be compared with.

    Raises DataError in the end if all were alike.
    """
    total, count = np.zeros(truth.info.dim), 0
    for batch in truth.read(BATCH):
        if (bad := faulty(batch.vectors)).any():
            fault = "true vectors hold NaN, infinite or too large numbers, or nothing but zeros"
            raise BadRowsError(truth.info.uri, fault, batch.ids.filter(pa.array(bad)).to_pylist(), "Mend them.")
        total += as_asked(batch.vectors, "cosine").sum(axis=0, dtype=np.float64)
        count += len(batch.vectors)
        yield batch.vectors
    require_apart(total / max(1, count), truth.info.uri)


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


def evaluate_with_truth(
    index: Reader,
    true: Reader,
    m: LinearMap | None,
    asked: Asked,
    gate: Gate | None,
    slicing: Slicing | None,
    k: int,
    seed: int,
    ask: LinearMap | None = None,
) -> tuple[Evaluation, tuple[Loss, ...]]:
    """Search the index among all its documents, and judge what it finds by one pass over the `true` vectors.

    Returns the rows "as indexed" and "re-embedded", and what is lost to what, as far as that can be told without the
    source. Without queries, `STAND_INS` documents stand in. An index of filtered vectors is asked through the filter
    `ask`, and compared with true vectors that aren't filtered. Raises IncompatibleError for stores of other spaces,
    DataError for stores of other documents, BadRowsError for true vectors that can't be used.
    """
    notes: list[str] = []
    ks = tuple(sorted({k} | (gate.ks if gate is not None else set())))
    same_space(index, true.info.space, true.info.dim, f"the truth {true.info.uri}", ask)
    count = _same_ids(index, true)
    for condition in gate.conditions if gate is not None else ():
        if condition.size not in (None, count):
            raise UsageError(
                f"{condition}: with --truth everything is measured among all {count:,} documents, not foretold for "
                f"{condition.size:,}; leave the size out"
            )
    metric = _metric(index, true, m, notes)
    own = None
    vectors = asked.vectors
    if vectors is None:
        chosen = np.sort(np.random.default_rng(seed).permutation(count)[:STAND_INS])
        own = ids_at(index, chosen).cast(true.info.id_type or pa.int64())
        vectors = BadRows(optional=False).take(true, own).vectors
    top = ks[-1] + (own is not None)
    require_k(top, count)
    through = vectors if ask is None else ask.apply(vectors)
    found, indexed = search_or_scan(index, through, top, metric)
    ways = [_in_truth(index, true, found)]
    if indexed and index.info.index not in FLAT:
        blocks, ranking = (batch.vectors for batch in index.read(BATCH)), own_metric(index.info, metric)
        ways.append(_in_truth(index, true, topk(as_asked(through, metric), blocks, top, ranking)[0]))
    exact, scores = judge(_sound(true), vectors, np.concatenate(ways, axis=1), top, metric)
    best, nearest = exact.scores, exact.places
    judged = np.split(scores, len(ways), axis=1)
    if own is not None:
        itself = find(true, own)
        judged = [
            np.take_along_axis(part, others_than(places, itself), axis=1)
            for part, places in zip(judged, ways, strict=True)
        ]
        best = np.take_along_axis(best, others_than(nearest, itself), axis=1)
    scores, stored = judged[0], judged[-1]

    size = _Size(ks, count, seed, stand_ins=own is not None)
    ideal = nearest, asked.found_in(true)
    as_indexed = size.row(AS_INDEXED, scores, best, (found, asked.found_in(index)), ideal)
    names = asked.ids if own is None else own
    per_query = [PerQuery.of(names, vectors, size.kept)]
    slices = None if slicing is None else size.slices(slicing, true, len(vectors), ideal, own)
    sweep: tuple[Curve, ...] = ()
    if indexed:
        rows = np.sort(np.random.default_rng(seed).permutation(len(vectors))[:OVERLAP_QUERIES])
        overlap = index_overlap(index, through[rows], ks, metric)
        values = {("index-overlap", k): v for k, v in overlap.values.items()}
        sweep = overlap.curves(k, seed=seed)
        per_query.append(PerQuery.of(names.take(pa.array(rows)), vectors[rows], values))
        cells = tuple(size.cell(name, k, v) for (name, k), v in values.items())
    else:
        cells = tuple(Cell("index-overlap", k, reason="the store has no index of its own") for k in ks)
        notes.append("as indexed: the stored vectors, searched exactly")
    as_indexed = replace(as_indexed, cells=as_indexed.cells + cells)
    rows_measured = (as_indexed, size.row(RE_EMBEDDED, best, best, ideal))
    evaluation = Evaluation(rows_measured, metric, k, tuple(notes), slices, tuple(per_query), sweep=sweep)
    agreement = share_right(stored, best, k), share_right(scores, best, k)
    losses = attribute_at_full_size(
        index, evaluation, *agreement, mapped=m is not None, searched=indexed, asked=own is None, seed=seed
    )
    return evaluation, losses


def _in_truth(index: Reader, true: Reader, found: Places) -> Places:
    """Return where the documents found in the index stand among the true vectors; -1 stays -1."""
    some = found >= 0
    places, which = np.unique(found[some], return_inverse=True)
    there = np.full(found.shape, -1, np.int64)
    there[some] = find(true, ids_at(index, places))[which]
    return there


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
