"""Rows of an index inside another one that gives them other ids: an id map, or shards."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vecferry.batch import Floats
from vecferry_adapters._faiss_file import Ints
from vecferry_adapters._faiss_rows import Rows, Where


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """Rows that an id map inside an index gives their ids."""

    inner: Rows
    id_map: Ints

    @property
    def count(self) -> int:
        """The rows."""
        return self.inner.count

    @property
    def lossy(self) -> bool:
        """Whether they are other rows than those that were added."""
        return self.inner.lossy

    @property
    def code(self) -> str:
        """How elements are stored."""
        return self.inner.code

    @property
    def ordered(self) -> bool:
        """Whether rows come in the order they were added in."""
        return self.inner.ordered

    @property
    def width(self) -> int:
        """The bytes of a row and its id."""
        return self.inner.width + 8

    def vectors(self, where: Where) -> Floats:
        """Read the rows."""
        return self.inner.vectors(where)

    def labels(self, where: Where) -> Ints:
        """Return the ids of the map."""
        inside = self.inner.labels(where)
        return np.array(self.id_map[where if inside is None else inside])


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Rows of shards, one shard behind the other.

    `successive` says that FAISS calls a row by its label in the shard and the number of rows in the shards before;
    otherwise by its label alone.
    """

    shards: tuple[Rows, ...]
    successive: bool
    starts: Ints = field(init=False)

    def __post_init__(self) -> None:
        counts = [shard.count for shard in self.shards]
        object.__setattr__(self, "starts", np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))

    @property
    def count(self) -> int:
        """The rows of all shards."""
        return int(self.starts[-1])

    @property
    def lossy(self) -> bool:
        """Whether a shard has other rows than those that were added."""
        return any(shard.lossy for shard in self.shards)

    @property
    def code(self) -> str:
        """How the first shard stores elements."""
        return self.shards[0].code

    @property
    def ordered(self) -> bool:
        """Whether each shard has its rows in the order they were added in."""
        return all(shard.ordered for shard in self.shards)

    @property
    def width(self) -> int:
        """The bytes of a row of the first shard."""
        return self.shards[0].width

    def _pieces(self, where: Where) -> list[tuple[int, Ints, Ints]]:
        """Cut rows into those of one shard each: (the shard, places in the result, places in the shard)."""
        places = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        owner = np.searchsorted(self.starts, places, side="right") - 1
        members = [(number, np.flatnonzero(owner == number)) for number in np.unique(owner).tolist()]
        return [(number, inside, places[inside] - self.starts[number]) for number, inside in members]

    def vectors(self, where: Where) -> Floats:
        """Read the rows, shard by shard."""
        parts = [(inside, self.shards[number].vectors(places)) for number, inside, places in self._pieces(where)]
        if not parts:
            return self.shards[0].vectors(slice(0, 0))
        out = np.empty((sum(len(inside) for inside, _ in parts), parts[0][1].shape[1]), np.float32)
        for inside, vectors in parts:
            out[inside] = vectors
        return out

    def labels(self, where: Where) -> Ints | None:
        """Return what the shards call the rows; None where that is their place among all."""
        if self.successive and all(shard.labels(slice(0, 0)) is None for shard in self.shards):
            return None
        pieces = self._pieces(where)
        out = np.empty(sum(len(inside) for _, inside, _ in pieces), np.int64)
        for number, inside, places in pieces:
            labels = self.shards[number].labels(places)
            out[inside] = places if labels is None else labels
            if self.successive:
                out[inside] += self.starts[number]
        return out
