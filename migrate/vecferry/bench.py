"""The bench that every way of searching a hold-out is put on: one set of true neighbours, one set of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from vecferry.batch import Floats
from vecferry.extrapolation import LEAST
from vecferry.holdout import Holdout, Qrels
from vecferry.hubness import hubness
from vecferry.measured import AS_INDEXED, RE_EMBEDDED, TRANSLATED, Cell, Curve, PerQuery, Row, Slices
from vecferry.recall import Metric, Places, Truth, Values, identity_recall, label_recall, ndcg, without
from vecferry.sizes import Find, Foretold, Ground, Sizes
from vecferry.slices import Slicing, documents_of, measure_slices

STAND_INS = 1000
"""Documents that stand in as queries; more of them narrow an interval that is narrow already."""


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """Hold what all rows are compared with: true neighbours of the queries, and of documents standing in.

    sizes     at which sizes agreement is foretold, of the rows that have a ground for it
    kept      the values behind the cells of the row "as indexed", by metric and k
    foretold  the curves behind its foretold cells, by row, metric and k
    """

    held: Holdout
    metric: Metric
    ks: tuple[int, ...]
    seed: int
    stand_ins: Places
    asked: Truth | None
    by_documents: Truth | None
    sizes: Sizes
    kept: dict[tuple[str, int], Values] = field(default_factory=dict)
    foretold: dict[tuple[str, str, int], Foretold] = field(default_factory=dict)

    @classmethod
    def of(cls, held: Holdout, metric: Metric, ks: tuple[int, ...], seed: int, sizes: Sizes | None = None) -> Bench:
        """Search the true vectors exactly, for as many as the largest k that there are documents for."""
        n = len(held.ids)
        chosen = np.random.default_rng(seed).permutation(n)[:STAND_INS]
        chosen.sort()
        sizes = sizes or Sizes(n)
        top = max([k for k in ks if k < n] + [sizes.depth])
        asked = Truth.of(held.queries, held.target, top, metric) if held.queries is not None and top else None
        by_documents = Truth.of_documents(chosen, held.target, top, metric) if top else None
        return cls(held, metric, ks, seed, chosen, asked, by_documents, sizes)

    def row(
        self,
        name: str,
        way: Find | str,
        queries: Floats | None,
        documents: Floats,
        *,
        identities: Floats | None = None,
        ground: Ground | None = None,
    ) -> Row:
        """Measure one way of searching, or give the reason why it can't be tried.

        A user of this way asks with `queries`; `documents` holds what to ask with where documents stand in. With
        `ground` agreement at other sizes is foretold.
        """
        cells: list[Cell] = []
        n, asked, by_documents = len(self.held.ids), self.asked, self.by_documents
        usable = tuple(k for k in self.ks if k < n)
        found = own = None
        unasked = (
            "no queries: fit with --queries"
            if self.held.queries is None
            else "no source queries: fit with --source-queries"
        )
        if not isinstance(way, str) and usable:
            found = way(queries, usable[-1]) if queries is not None else None
            own = without(way(documents[self.stand_ins], usable[-1] + 1), self.stand_ins)
        for k in self.ks:
            few = f"k = {k} needs more than {k} documents, {n} are held out" if k >= n else None
            why = way if isinstance(way, str) else few
            if found is not None and asked is not None and why is None:
                cells.append(self._cell(name, "agreement", k, asked.agreement(found, k)))
            else:
                cells.append(Cell("agreement", k, reason=why or unasked))
            if own is not None and by_documents is not None and why is None:
                cells.append(self._cell(name, "doc-agreement", k, by_documents.agreement(own, k)))
                skew, never = hubness(own[:, :k], n)
                for metric, value in (("hub-skew", skew), ("never-found", never)):
                    cells.append(Cell(metric, k, value, documents=n, queries=len(own)))
            else:
                cells.append(Cell("doc-agreement", k, reason=why))
            cells += self._labelled(name, k, found if why is None else None, why or unasked)
        if ground is not None:
            cells += self._at_sizes(name, ground, queries, documents[self.stand_ins], {c.name: c for c in cells})
        if identities is not None and not isinstance(way, str) and usable:
            nearest = tuple(sorted({1, *usable}))
            recalls = identity_recall(
                identities[self.stand_ins], self.stand_ins, self.held.target, nearest, self.metric
            )
            cells += [self._cell(name, "identity", k, values) for k, values in recalls.items()]
        return Row(name, tuple(cells))

    def per_query(self) -> tuple[PerQuery, ...]:
        """Return what was measured as indexed, query by query, and of each document that stood in for one."""
        by_documents = {name: values for name, values in self.kept.items() if name[0] == "doc-agreement"}
        by_queries = {name: values for name, values in self.kept.items() if name not in by_documents}
        found = []
        if by_queries and self.held.queries is not None:
            found.append(PerQuery.of(self.held.query_ids, self.held.queries, by_queries))
        if by_documents:
            ids = self.held.ids.take(pa.array(self.stand_ins))
            found.append(PerQuery.of(ids, self.held.target[self.stand_ins], by_documents))
        return tuple(found)

    def slices(self, slicing: Slicing) -> Slices:
        """Return what was measured as indexed, slice by slice."""
        names = slicing.names(self.held.ids)
        asked = None
        if self.asked is not None:
            queries, documents = documents_of(len(self.asked.queries), self.held.qrels, self.asked.places[:, 0])
            asked = queries, names[documents]
        return measure_slices(slicing.column, asked, names[self.stand_ins], self.kept, len(names), seed=self.seed)

    def _at_sizes(
        self, name: str, ground: Ground, queries: Floats | None, documents: Floats, measured: Mapping[str, Cell]
    ) -> Iterator[Cell]:
        """Yield what is foretold of one way of searching, or the reason where it can't be."""
        top, way = self.sizes.depth, ground.find
        for metric, truth, asked in (
            ("agreement", self.asked, queries),
            ("doc-agreement", self.by_documents, documents),
        ):
            found: Places | None = None
            for k in self.ks:
                own, n = measured[f"{metric}@{k}"], len(self.held.ids)
                reason = own.reason or (way if isinstance(way, str) else None)
                if reason is None and n < LEAST * max(k, 10):
                    reason = f"at least {LEAST * max(k, 10):,} held-out documents are needed, not {n:,}"
                if reason is None and own.queries < 2:
                    reason = f"at least 2 {own.asked} are needed, not {own.queries}"
                if reason is not None or not self.sizes.at(k):
                    yield from self.sizes.cells(metric, k, reason or "")
                    continue
                assert not isinstance(way, str)
                assert truth is not None
                assert asked is not None
                if found is None and metric == "agreement":
                    found = way(asked, top)
                elif found is None:
                    found = without(way(asked, top + 1), self.stand_ins)
                told = Foretold.of(truth, found, own, ground, self.seed)
                self.foretold[name, metric, k] = told
                yield from (told.at(size) for size in self.sizes.at(k))

    def size_curves(self, k: int) -> tuple[Curve, ...]:
        """Return how agreement goes with size: as indexed or else as translated, with queries or else documents."""
        for row in (AS_INDEXED, TRANSLATED):
            for metric in ("agreement", "doc-agreement"):
                if (told := self.foretold.get((row, metric, k))) is not None:
                    return (told.against_documents(self.sizes.count or 0),)
        return ()

    def _cell(self, row: str, metric: str, k: int, values: Values, over: Values | None = None) -> Cell:
        if row == AS_INDEXED and over is None:
            self.kept[metric, k] = values
        return Cell.of(metric, k, values, len(self.held.ids), seed=self.seed, over=over)

    def _labelled(self, name: str, k: int, found: Places | None, why: str) -> Iterator[Cell]:
        qrels: Qrels | None = self.held.qrels
        for metric, score in (("recall", label_recall), ("ndcg", ndcg)):
            if qrels is None or found is None or self.asked is None:
                reason = "no labels: fit with --qrels" if qrels is None else why
                yield Cell(metric, k, reason=reason)
                continue
            values = score(found, qrels, k)
            yield self._cell(name, metric, k, values)
            if name != RE_EMBEDDED:
                yield self._cell(name, f"retention.{metric}", k, values, score(self.asked.places, qrels, k))
