"""The one value that flows from reader to writer, and the hashing of ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.errors import DataError
from vecferry.linear import Floats as Floats
from vecferry.linear import faulty as faulty

Cursor = Any  # whatever JSON value a reader resumes after; opaque to everybody else


@dataclass(frozen=True, slots=True, eq=False)
class VectorBatch:
    """Hold some rows of a store: ids, float32 vectors `[n, d]`, payload columns, and where they end.

    `ids` keeps the store's own type. `payload` is None for a store without payload. `cursor` is what
    `Reader.read(after=...)` takes to continue behind the last row.
    """

    ids: pa.Array
    vectors: Floats
    payload: pa.Table | None = None
    cursor: Cursor = None

    def __post_init__(self) -> None:
        v = self.vectors
        if v.ndim != 2 or v.dtype != np.float32 or not v.flags.c_contiguous:
            raise TypeError(f"vectors must be C-contiguous float32 [n, d], not {v.dtype} {v.shape}")
        rows = {len(self.ids), len(v)} | ({self.payload.num_rows} if self.payload is not None else set())
        if len(rows) != 1:
            raise ValueError(f"ids, vectors and payload differ in rows: {sorted(rows)}")

    def __len__(self) -> int:
        return len(self.vectors)

    def take(self, rows: NDArray[np.int64]) -> VectorBatch:
        """Return the rows at these positions, in this order; the cursor stays that of the whole batch."""
        index = pa.array(rows)
        payload = self.payload.take(index) if self.payload is not None else None
        return replace(self, ids=self.ids.take(index), vectors=self.vectors[rows], payload=payload)


def concat(batches: Iterable[VectorBatch]) -> VectorBatch:
    """Join batches of one store into one; raise ValueError when there are none."""
    parts = list(batches)
    if not parts:
        raise ValueError("no batches to join")
    payloads = [b.payload for b in parts if b.payload is not None]
    return VectorBatch(
        ids=pa.concat_arrays([b.ids for b in parts]),
        vectors=np.ascontiguousarray(np.concatenate([b.vectors for b in parts])),
        payload=pa.concat_tables(payloads) if payloads else None,
        cursor=parts[-1].cursor,
    )


def in_one_piece(column: pa.ChunkedArray) -> pa.Array:
    """Join a column's chunks; dictionaries are made anew, or bytes would depend on how rows came in batches.

    Raises DataError for more categories than the type of the codes can tell apart.
    """
    kind = column.type
    if not pa.types.is_dictionary(kind):
        return column.combine_chunks()
    plain = pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], kind.value_type)
    coded = plain.combine_chunks().dictionary_encode()
    try:
        indices = coded.indices.cast(kind.index_type)
    except pa.ArrowInvalid as error:
        raise DataError(f"{len(coded.dictionary)} categories are too many for {kind}") from error
    return pa.DictionaryArray.from_arrays(indices, coded.dictionary, ordered=kind.ordered)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers one to one (the finaliser of splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _wide(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Return integers of any width as 64 bits, one to one for each type.

    Negative ones permute the upper half among themselves, or -1 would be 2**64 - 1.
    """
    if values.dtype.kind == "u":
        return values.astype(np.uint64)
    bits = values.astype(np.int64).view(np.uint64)
    permuted = (bits * np.uint64(0xD1B54A32D192ED03)) ^ np.uint64(0x9E3779B97F4A7C15)
    return np.where(values < 0, permuted | np.uint64(1 << 63), bits)


def id_keys(ids: pa.Array) -> NDArray[np.uint64]:
    """Return a 64-bit key for each id: one to one for integers of a type, a hash for strings and binary.

    The key of a value doesn't depend on the width of its type (int32, int64 and uint64 agree, string and
    large_string agree), so that ids from two stores can be compared; negative integers are other ids than those of
    2**63 and above. Raises TypeError for other types.
    """
    kind = ids.type
    if pa.types.is_integer(kind):
        return _mix(_wide(ids.to_numpy(zero_copy_only=False)))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        ids = ids.cast(pa.large_string()).cast(pa.large_binary())
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        ids = ids.cast(pa.large_binary())
    else:
        raise TypeError(f"ids of type {kind} are not supported: use integers, strings or binary")
    if len(ids) == 0:
        return np.empty(0, np.uint64)
    _, offsets_buffer, data = ids.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[ids.offset : ids.offset + len(ids) + 1]
    raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.empty(0, np.uint8)
    starts = offsets[:-1] - offsets[0]
    lengths = np.diff(offsets)
    # A sum of bytes weighted by their place: vectorised over all ids at once, no Python loop per row.
    place = np.arange(len(raw), dtype=np.int64) - np.repeat(starts, lengths)
    weights = _mix(np.arange(int(lengths.max()) or 1, dtype=np.uint64)) | np.uint64(1)
    terms = _mix(raw.astype(np.uint64)) * weights[place]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    totals = sums[starts + lengths] - sums[starts]
    return _mix(totals ^ lengths.astype(np.uint64))


@dataclass(slots=True)
class IdDigest:
    """Summarise a stream of ids so that two streams can be compared without keeping either.

    `ordered` changes when ids change places, `unordered` doesn't; both are sums modulo 2**64, so the
    digest can be stored as three numbers and continued after a restart.
    """

    count: int = 0
    ordered: int = 0
    unordered: int = 0

    def update(self, ids: pa.Array) -> None:
        """Add ids behind those already seen."""
        keys = id_keys(ids)
        places = _mix(np.arange(self.count, self.count + len(keys), dtype=np.uint64))
        self.ordered = (self.ordered + int(_mix(keys ^ places).sum(dtype=np.uint64))) % 2**64
        self.unordered = (self.unordered + int(_mix(keys).sum(dtype=np.uint64))) % 2**64
        self.count += len(keys)


@dataclass(slots=True)
class Positions:
    """Find at which places of a stream of ids some wanted ids stand; feed the stream to `update`.

    `found` holds a place for each wanted id, -1 where it hasn't come by; the first place of an id counts.
    """

    wanted: pa.Array
    found: NDArray[np.int64] = field(init=False)
    _keys: NDArray[np.uint64] = field(init=False)
    _order: NDArray[np.int64] = field(init=False)
    _seen: int = 0

    def __post_init__(self) -> None:
        keys = id_keys(self.wanted)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        self.found = np.full(len(keys), -1, np.int64)

    def update(self, ids: pa.Array) -> None:
        """Look for the wanted ids among the next ids of the stream."""
        stream = id_keys(ids)
        if len(self._keys):
            at = np.searchsorted(self._keys, stream)
            at[at == len(self._keys)] = 0
            hit = np.flatnonzero(self._keys[at] == stream)
            slots = self._order[at[hit]]
            new = self.found[slots] < 0
            # backwards, so that of an id that stands twice in this piece the first place is written last
            self.found[slots[new][::-1]] = (hit[new] + self._seen)[::-1]
        self._seen += len(ids)
