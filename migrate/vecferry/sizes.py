"""Agreement where nothing can be measured: at the size of the whole index, and at sizes that a gate names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from vecferry.batch import Floats
from vecferry.extrapolation import LEAST, VERIFIED, SizeCurve, depth
from vecferry.gate import SIZED, Gate
from vecferry.measured import Cell, Curve, Point
from vecferry.recall import Places, Truth

QUARTER = 4
"""The first point of a curve is measured in such parts of the hold-out."""

Find = Callable[[Floats, int], Places]


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


@dataclass(frozen=True, slots=True)
class Ground:
    """Hold what a way of searching is foretold from: exact search of its vectors, and what its own search finds of it.

    A search by an index can't be foretold from one among few documents: inverted lists then hold fewer than k of them,
    and a graph that is asked for more places looks further.

    find    exact search of the vectors; a reason where they aren't to be had
    shares  by k how much of exact search the own search finds at full size: index overlap; all of it without one
    """

    find: Find | str
    shares: Mapping[int, Cell]


@dataclass(frozen=True, slots=True, eq=False)
class Foretold:
    """Hold agreement@k of one way of searching as it goes with the number of documents.

    own     what was measured among all that were held out
    share   the index overlap of the way's own search; None where it finds all that exact search does
    spare   how often a document that is found k places late is right, as a share of how often one in time is:
            that is what a search has in the places of documents that it misses
    """

    own: Cell
    curve: SizeCurve
    share: Cell | None
    spare: float

    @classmethod
    def of(cls, truth: Truth, found: Places, own: Cell, ground: Ground, seed: int) -> Foretold:
        """Fit the curve to what exact search `found`, `[q, depth]`, depth being 2 k or more."""
        k = own.k
        in_time, late = (float(truth.agreement(part, k).mean()) for part in (found, found[:, k : 2 * k]))
        spare = min(1.0, late / in_time) if in_time else 1.0
        return cls(own, SizeCurve.of(truth, found, k, seed=seed), ground.shares.get(k), spare)

    def at(self, size: int) -> Cell:
        """Return the number for `size` documents, which is measured in parts of the hold-out where it is smaller."""
        told = self.curve.at(size)
        value, low, high = told.value, told.low, told.high
        if self.share is not None:
            overlaps = (self.share.value or 0.0, self.share.low or 0.0, self.share.high or 0.0)
            value, low, high = (
                number * (overlap + (1 - overlap) * self.spare)
                for number, overlap in zip((value, low, high), overlaps, strict=True)
            )
        return replace(
            self.own, value=value, low=low, high=high, documents=size, among="documents", held_out=told.held_out
        )

    def against_documents(self, count: int) -> Curve:
        """Return the curve from a quarter of the hold-out, by doubling, to the `count` documents of the index."""
        n = self.own.documents
        beyond = [n << i for i in range(1, 64) if n << i < count] + ([count] if count > n else [])
        cells = [self.at(size) for size in (n // QUARTER, n // 2, n, *beyond)]
        points = [Point(c.documents, c.value or 0.0, c.low, c.high, predicted=c.documents > n) for c in cells]
        return Curve(self.own.name, "documents", tuple(points))
