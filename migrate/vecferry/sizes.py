"""Agreement where nothing can be measured: at the size of the whole index, and at sizes that a gate names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vecferry.extrapolation import LEAST, VERIFIED, SizeCurve, depth
from vecferry.gate import SIZED, Gate
from vecferry.measured import Cell, Curve, Point
from vecferry.recall import Places, Truth

QUARTER = 4
"""The first point of a curve is measured in such parts of the hold-out."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Hold the sizes at which agreement is to be foretold from `held_out` documents.

    count   documents of the index, None before there is one
    acting  where a condition acts that names no size: at the index's own size, or as far as numbers count as
            verified; None where that is what was measured
    wanted  pairs of k and a size
    """

    held_out: int
    count: int | None = None
    acting: int | None = None
    wanted: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def of(cls, held_out: int, count: int | None, k: int, gate: Gate | None) -> Sizes:
        """Choose sizes for an index, by its number of documents and by what a gate names."""
        acting = None if count is None or count <= held_out else min(count, VERIFIED * held_out)
        wanted = {(k, acting), (k, None if acting is None else count)}
        if gate is not None:
            wanted |= {(c.k, c.size or acting) for c in gate.conditions if c.metric in SIZED}
        return cls(held_out, count, acting, frozenset((k, s) for k, s in wanted if s not in (None, held_out)))

    @property
    def depth(self) -> int:
        """How many places of each query a search must return; 0 where nothing can be foretold."""
        n = self.held_out
        smallest = [(k, min(size, n // QUARTER)) for k, size in self.wanted if n >= LEAST * max(k, 10)]
        return max((min(depth(k, n, size), n - 1) for k, size in smallest), default=0)  # a document isn't its own

    def at(self, k: int) -> list[int]:
        """Return the sizes wanted for one k, smallest first."""
        return sorted(size for own, size in self.wanted if own == k)

    def cells(self, metric: str, k: int, reason: str) -> Iterator[Cell]:
        """Yield a cell without a number for every size wanted."""
        for size in self.at(k):
            yield Cell(metric, k, documents=size, held_out=self.held_out, reason=reason)


@dataclass(frozen=True, slots=True, eq=False)
class Foretold:
    """Hold agreement@k of one way of searching as it goes with the number of documents.

    own     what was measured among all that were held out
    factor  lowers what is foretold: a curve needs a search that looks deeper, and an approximate search that is asked
            for more places finds more of the first k than one that is asked for k
    """

    own: Cell
    curve: SizeCurve
    factor: float

    @classmethod
    def of(cls, truth: Truth, found: Places, own: Cell, seed: int) -> Foretold:
        """Fit the curve to a search `[q, depth]`."""
        deep = float(truth.agreement(found, own.k).mean())
        factor = min(1.0, (own.value or 0.0) / deep) if deep else 1.0
        return cls(own, SizeCurve.of(truth, found, own.k, seed=seed), factor)

    def at(self, size: int) -> Cell:
        """Return the number for `size` documents, which is measured in parts of the hold-out where it is smaller."""
        told = self.curve.at(size)
        value, low, high = (self.factor * x for x in (told.value, told.low, told.high))
        return replace(
            self.own, value=value, low=low, high=high, documents=size, among="documents", held_out=told.held_out
        )

    def against_documents(self, count: int) -> Curve:
        """Return the curve from a quarter of the hold-out, by doubling, to the `count` documents of the index."""
        n = self.own.documents
        beyond = [n << i for i in range(1, 64) if n << i < count] + ([count] if count > n else [])
        cells = [self.at(n // QUARTER), self.at(n // 2), self.own, *(self.at(size) for size in beyond)]
        points = [Point(c.documents, c.value or 0.0, c.low, c.high, predicted=c.documents > n) for c in cells]
        return Curve(self.own.name, "documents", tuple(points))
