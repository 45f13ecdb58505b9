"""What was measured: cells with intervals or reasons, in rows, one for each way of searching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from vecferry.batch import Floats, id_keys
from vecferry.extrapolation import VERIFIED
from vecferry.recall import Metric, Values, interval

STATUS_QUO, NAIVE_SWAP, TRANSLATED = "status quo", "naive swap", "translated"
AS_INDEXED, CASCADE, RE_EMBEDDED = "as indexed", "cascade", "re-embedded"
HELD_OUT = "held-out documents"

LONGEST = 60
"""Characters of a slice's name that are shown."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Hold one number with its 95 % interval over queries, or the reason why there is none.

    metric     agreement, doc-agreement, identity, recall, ndcg, retention.recall, retention.ndcg, index-overlap,
               true-share and doc-true-share (how much of what is found are true vectors put into the index),
               hub-skew and never-found (see `hubness`; without intervals)
    documents  among how many documents it was measured, or is foretold for, and with how many `queries`
    among      what the documents are: "held-out documents", or "documents" at full size
    held_out   from how many held-out documents it is foretold; None where it was measured
    """

    metric: str
    k: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    documents: int = 0
    queries: int = 0
    among: str = HELD_OUT
    reason: str | None = None
    held_out: int | None = None

    @property
    def name(self) -> str:
        """The metric as a gate names it."""
        return f"{self.metric}@{self.k}" if self.size is None else f"{self.metric}@{self.k}@{self.size}"

    @property
    def size(self) -> int | None:
        """The number of documents that it is foretold for; None where it was measured."""
        return None if self.held_out is None else self.documents

    @property
    def verified(self) -> bool:
        """Whether it was measured, or foretold no farther than `VERIFIED` times the hold-out."""
        return self.held_out is None or self.documents <= VERIFIED * self.held_out

    @property
    def basis(self) -> str:
        """What it was measured with, or is foretold from, in words."""
        asked = f"{self.queries:,} {self.asked}"
        if self.held_out is None:
            return f"among {self.documents:,} {self.among}, {asked}"
        if self.documents < self.held_out:
            return f"in parts of {self.held_out:,} held-out documents, {asked}"
        how = "extrapolated" if self.verified else "extrapolated, unverified,"
        return f"{how} from {self.held_out:,} held-out documents, {asked}"

    @property
    def asked(self) -> str:
        """What the queries are."""
        if self.metric in ("doc-agreement", "identity", "doc-true-share", "hub-skew", "never-found"):
            return "documents as queries"
        return "queries" if self.metric in ("agreement", "index-overlap", "true-share") else "labelled queries"

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
        among = "documents" if full_size else HELD_OUT
        return cls(metric, k, value, low, high, documents, int(known.sum()), among)


@dataclass(frozen=True, slots=True)
class Row:
    """Hold what was measured of one way of searching."""

    name: str
    cells: tuple[Cell, ...]

    def cell(self, metric: str, k: int, size: int | None = None) -> Cell | None:
        """Return what was measured, or foretold for a `size`; None where it makes no sense for this way."""
        return next((c for c in self.cells if (c.metric, c.k, c.size) == (metric, k, size)), None)


@dataclass(frozen=True, slots=True)
class Slices:
    """Hold what was measured of the row "as indexed" for each value of a payload column, most queries first.

    A slice's rows hold a reason where it has too few queries. Agreement, recall and nDCG are over the queries with
    a relevant document in the slice; a query without labels belongs where its nearest document by re-embedding is.
    Doc-agreement is over the documents of the slice. All documents are searched, those of other slices too.
    """

    column: str
    rows: tuple[Row, ...]
    left_out: int = 0


def one_line(name: str) -> str:
    """Write the name of a slice, which comes from anywhere, so that it can't pass for a line of the report."""
    text = " ".join(name.split()) or repr(name)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


@dataclass(frozen=True, slots=True)
class Point:
    """Hold one point of a curve: a number with its interval, `predicted` where nothing was measured."""

    x: float
    value: float
    low: float | None = None
    high: float | None = None
    predicted: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """Hold how a metric, such as "agreement@10", goes with something else, such as "pairs"; points by rising x."""

    metric: str
    against: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """Hold what of a metric is lost to one cause, such as "the map"; without a value, the reason why."""

    cause: str
    metric: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = None

    @classmethod
    def of(cls, cause: str, metric: str, lost: Values, *, seed: int) -> Loss:
        """Take the mean of what each query loses, with the interval of paired differences."""
        return cls(cause, metric, *interval(lost, seed=seed))


@dataclass(frozen=True, slots=True)
class PerQuery:
    """Hold what was measured of the row "as indexed" query by query, in texts that stay short as JSON.

    keys    a hash of each query's id in hexadecimal; ids aren't kept, since they may be texts
    probes  each query's vector seen from one fixed direction: other vectors under the same ids show there
    values  by metric, such as "agreement@10", in the order of the keys; "-" where a query has none
    """

    keys: str
    probes: str
    values: Mapping[str, str]

    @classmethod
    def of(cls, ids: pa.Array, vectors: Floats, values: Mapping[tuple[str, int], Values]) -> PerQuery:
        """Write down values `[q]` by metric and k, rounded to four decimals, for queries `[q, d]`."""
        direction = np.cos(np.pi * (1 + 5**0.5) / 2 * np.arange(1, vectors.shape[1] + 1) ** 2)
        seen = vectors.astype(np.float64) @ direction / np.linalg.norm(vectors, axis=1).clip(1e-30)
        return cls(
            " ".join(f"{key:016x}" for key in id_keys(ids)),
            " ".join(f"{x:.3f}" for x in seen),
            {
                f"{m}@{k}": " ".join("-" if np.isnan(x) else f"{round(x, 4):g}" for x in v)
                for (m, k), v in values.items()
            },
        )

    def read(self, name: str) -> dict[str, tuple[float, float]]:
        """Return the value and the probe of each query that has a value, by the query's key."""
        columns = self.keys.split(), self.values[name].split(), self.probes.split()
        found = {key: (float(v), float(probe)) for key, v, probe in zip(*columns, strict=True) if v != "-"}
        if not all(0 <= v <= 1 for v, _ in found.values()):
            raise ValueError(f"{name} of some query doesn't lie between 0 and 1")
        return found


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Hold all rows, the rule by which documents were ranked, and what else there is to know about the numbers.

    held_out  a hash of the held-out ids, in any order; None at full size
    sweep     index overlap, and its cost, against the index's search parameters, where more of them would help
    acting    the size at which a gate holds agreement that names none; None where that is what was measured
    sizes     how agreement goes with the number of documents
    """

    rows: tuple[Row, ...]
    metric: Metric
    k: int
    notes: tuple[str, ...] = ()
    slices: Slices | None = None
    per_query: tuple[PerQuery, ...] = ()
    held_out: str | None = None
    sweep: tuple[Curve, ...] = ()
    acting: int | None = None
    sizes: tuple[Curve, ...] = ()

    def cell(self, row: str, metric: str, k: int, size: int | None = None) -> Cell | None:
        """Return one cell; rows are found by the beginning of their names."""
        return next((r.cell(metric, k, size) for r in self.rows if r.name.startswith(row)), None)

    def joined(self, rows: tuple[Row, ...]) -> Evaluation:
        """Return the evaluation with more cells in its rows of the same names."""
        more = {row.name: row.cells for row in rows}
        return replace(self, rows=tuple(replace(r, cells=r.cells + more.get(r.name, ())) for r in self.rows))
