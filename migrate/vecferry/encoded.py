"""True vectors of the paired sample, put into the new index in the place of their translations (--encoded)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.batch import Floats, id_keys
from vecferry.errors import DataError, IncompatibleError, UsageError
from vecferry.holdout import Holdout
from vecferry.linear import Card, normalize
from vecferry.pairs import BadRows, join
from vecferry.store import Reader

LEAST = 0.1
"""The share of the hold-out that is held in at least, or too little would be seen of how true vectors fare."""
FAR = 1e-2
"""Relative distance from which on two vectors of one text aren't the same."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldIn:
    """Say which held-out documents stand in the index with their true vectors.

    rows      their positions in the hold-out: as large a share as of the whole index, and LEAST at the least
    measured  positions of the documents that the gate measures with: among them the share is that of the whole index,
              so that its numbers are those of the index, and not of one with more true vectors
    """

    rows: NDArray[np.int64]
    measured: NDArray[np.int64]
    provenance: Mapping[str, int]

    @classmethod
    def draw(cls, held: int, share: float, seed: int) -> HeldIn:
        """Draw from a hold-out of `held` documents, for an index of which `share` of all others are true vectors."""
        count = max(round(share * held), int(np.ceil(LEAST * held)))
        left_out = round((count - share * held) / (1 - share)) if share < 1 else 0
        return cls.again({"held_out": held, "held_in": count, "left_out": max(0, left_out), "seed": seed})

    @classmethod
    def again(cls, provenance: Mapping[str, int]) -> HeldIn:
        """Repeat a draw from what an index recorded of it."""
        order = np.random.default_rng(provenance["seed"]).permutation(provenance["held_out"])
        rows, left_out = order[: provenance["held_in"]], order[: provenance["left_out"]]
        return cls(np.sort(rows), np.setdiff1d(order, left_out), dict(provenance))


@dataclass(frozen=True, slots=True, eq=False)
class TrueRows:
    """Hold the true vectors `[n, d]` that stand in the index, by id, as it holds them: unit ones for cosine."""

    ids: pa.Array
    vectors: Floats
    held_in: HeldIn
    _keys: NDArray[np.uint64] = field(init=False)
    _order: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        keys = id_keys(self.ids)
        order = np.argsort(keys)
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_keys", keys[order])

    @classmethod
    def read(
        cls, encoded: Reader, source: Reader, holdout: Holdout | None, card: Card, seed: int, bad: BadRows
    ) -> Self:
        """Read a store of the new model's vectors for some ids of the source; all of it is held in memory.

        The held-out ones keep their translations, but for a part that is held in: a gate that met their true vectors
        would measure re-embedding with itself. Raises UsageError without a hold-out, IncompatibleError for another
        dimension or space, or other vectors than the hold-out's, and what `pairs.join` raises of the ids.
        """
        info = encoded.info
        if holdout is None:
            raise UsageError(
                f"{info.uri}: true vectors may be unfindable among translated ones, and without a hold-out that can't "
                "be measured: fit the map with `vecferry fit`"
            )
        dim = holdout.target.shape[1]
        if info.dim != dim:
            raise IncompatibleError(f"{info.uri} holds vectors of {info.dim} dimensions, the map leads to {dim}")
        if info.space is not None and card.space is not None and info.space != card.space:
            raise IncompatibleError(f"{info.uri} is in the space {info.space!r}, the map leads to {card.space!r}")
        pairs = join(source, encoded, bad)
        keys, held = id_keys(pairs.ids), id_keys(holdout.ids)
        order = np.argsort(held)
        at = order[np.searchsorted(held, keys, sorter=order).clip(max=len(held) - 1)]
        known = held[at] == keys
        if known.any():
            here, there = pairs.target[known], holdout.target[at[known]]
            other = np.linalg.norm(here - there, axis=1) > FAR * np.linalg.norm(there, axis=1)
            if other.any():
                names = ", ".join(
                    str(i) for i in pairs.ids.filter(pa.array(known)).filter(pa.array(other))[:5].to_pylist()
                )
                raise IncompatibleError(
                    f"{info.uri}: {int(other.sum())} of {int(known.sum())} held-out ids ({names}) have other vectors "
                    "than in the map's hold-out: it must hold what the map was fitted on"
                )
        others = (source.info.count or 0) - len(held)
        share = int((~known).sum()) / others if others > 0 else 1.0
        held_in = HeldIn.draw(len(held), min(1.0, share), seed)
        return cls.of(pairs.ids.filter(pa.array(~known)), pairs.target[~known], holdout, held_in, card)

    @classmethod
    def of(cls, ids: pa.Array, vectors: Floats, holdout: Holdout, held_in: HeldIn, card: Card) -> Self:
        """Join what was encoded and isn't held out with the part of the hold-out that is held in."""
        inside = holdout.ids.take(pa.array(held_in.rows)).cast(ids.type)
        rows = np.ascontiguousarray(np.concatenate([vectors, holdout.target[held_in.rows]]), np.float32)
        if card.metric == "cosine":
            normalize(rows)
        return cls(pa.concat_arrays([ids, inside]), rows, held_in)

    @classmethod
    def recorded(cls, provenance: Mapping[str, Any], holdout: Holdout, card: Card | None) -> Self | None:
        """Return the held-in rows of an index that says that it has some, None for any other index.

        Raises DataError where they are of another hold-out than this.
        """
        noted = provenance.get("encoded")
        if noted is None or card is None or provenance.get("map") != card.sha256:
            return None
        if not all(0 <= noted.get(name, -1) < 2**63 for name in ("held_out", "held_in", "left_out", "seed")):
            raise DataError(f"what the index says of its true vectors, {dict(noted)}, is damaged")
        if noted["held_out"] != len(holdout.ids):
            raise DataError(
                f"the index was made with {noted['held_out']} held-out documents, here are {len(holdout.ids)}"
            )
        nothing = holdout.ids.slice(0, 0), np.empty((0, holdout.target.shape[1]), np.float32)
        return cls.of(*nothing, holdout, HeldIn.again(noted), card)

    def __len__(self) -> int:
        return len(self.vectors)

    def find(self, ids: pa.Array) -> NDArray[np.int64]:
        """Return the row of each id, -1 for those that stay translated."""
        keys = id_keys(ids)
        at = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._order[at], -1)

    def put(self, ids: pa.Array, translated: Floats) -> None:
        """Write the true vectors over the translations of their ids `[n, d]`, in place."""
        rows = self.find(ids)
        translated[rows >= 0] = self.vectors[rows[rows >= 0]]

    def identity(self) -> str:
        """Hash ids and vectors, whatever their order."""
        digest = hashlib.sha256(self._keys.tobytes())
        digest.update(self.vectors[self._order].tobytes())
        return digest.hexdigest()
