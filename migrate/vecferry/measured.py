"""What was measured: cells with intervals or reasons, in rows, one for each way of searching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vecferry.recall import Metric, Values, interval

STATUS_QUO, NAIVE_SWAP, TRANSLATED = "status quo", "naive swap", "translated"
AS_INDEXED, CASCADE, RE_EMBEDDED = "as indexed", "cascade", "re-embedded"


@dataclass(frozen=True, slots=True)
class Cell:
    """Hold one number with its 95 % interval over queries, or the reason why there is none.

    metric     agreement, doc-agreement, identity, recall, ndcg, retention.recall, retention.ndcg, index-overlap
    documents  among how many documents it was measured, and with how many `queries`
    among      what the documents are: "held-out documents", or "documents" at full size
    """

    metric: str
    k: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    documents: int = 0
    queries: int = 0
    among: str = "held-out documents"
    reason: str | None = None

    @property
    def name(self) -> str:
        """The metric as a gate names it."""
        return f"{self.metric}@{self.k}"

    @property
    def asked(self) -> str:
        """What the queries are."""
        if self.metric in ("doc-agreement", "identity"):
            return "documents as queries"
        return "queries" if self.metric in ("agreement", "index-overlap") else "labelled queries"

    @classmethod
    def of(
        cls,
        metric: str,
        k: int,
        values: Values,
        documents: int,
        *,
        seed: int,
        over: Values | None = None,
        full_size: bool = False,
    ) -> Cell:
        """Take the mean of values per query, or the ratio of the means of two; NaN is a query without labels."""
        known = ~np.isnan(values)
        over = None if over is None else over[known]
        if over is not None and not over.any():
            return cls(metric, k, reason="re-embedding finds no relevant document either")
        value, low, high = interval(values[known], over, seed=seed)
        among = "documents" if full_size else "held-out documents"
        return cls(metric, k, value, low, high, documents, int(known.sum()), among)


@dataclass(frozen=True, slots=True)
class Row:
    """Hold what was measured of one way of searching."""

    name: str
    cells: tuple[Cell, ...]

    def cell(self, metric: str, k: int) -> Cell | None:
        """Return the cell of a metric, None where it makes no sense for this way of searching."""
        return next((c for c in self.cells if (c.metric, c.k) == (metric, k)), None)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Hold all rows, the rule by which documents were ranked, and what else there is to know about the numbers."""

    rows: tuple[Row, ...]
    metric: Metric
    k: int
    notes: tuple[str, ...] = ()

    def cell(self, row: str, metric: str, k: int) -> Cell | None:
        """Return one cell; rows are found by the beginning of their names."""
        return next((r.cell(metric, k) for r in self.rows if r.name.startswith(row)), None)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Evaluation:
        """Rebuild what `dataclasses.asdict` made of an evaluation."""
        rows = tuple(Row(r["name"], tuple(Cell(**c) for c in r["cells"])) for r in value["rows"])
        return cls(rows, value["metric"], value["k"], tuple(value["notes"]))
