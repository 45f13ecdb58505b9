"""Rows to test stores with, and their comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from vecferry.batch import VectorBatch

ID_TYPES = (pa.int32(), pa.int64(), pa.uint64(), pa.string(), pa.large_string(), pa.binary())


def sample_ids(n: int, kind: pa.DataType | None, seed: int = 0) -> pa.Array:
    """Make n distinct ids of a type in no order, above 2**32 where they fit; None gives row numbers."""
    if kind is None:
        return pa.array(np.arange(n))
    numbers = np.random.default_rng(seed).permutation(n)
    if pa.types.is_integer(kind):
        return pa.array(numbers * (2**33 if kind.bit_width == 64 else 2**10) + 5).cast(kind)
    texts = [f"dök-{i:x}" if i % 3 else f"d{i}" for i in numbers]
    return pa.array([t.encode() for t in texts] if kind == pa.binary() else texts, kind)


def sample_payload(n: int, seed: int = 0) -> pa.Table:
    """Make payload columns that easily get lost: nulls, nesting, time zones, categories, metadata."""
    rng = np.random.default_rng(seed + 1)
    words = [None if i % 11 == 0 else f"wörd {i} " * int(rng.integers(1, 4)) for i in range(n)]
    fields = [
        pa.field("text", pa.string(), metadata={"unit": "words"}),
        pa.field("year", pa.int16(), nullable=False),
        pa.field("tags", pa.list_(pa.field("element", pa.string()))),
        pa.field("nested", pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.bool_())])),
        pa.field("when", pa.timestamp("ms", "Europe/Berlin")),
        pa.field("class", pa.dictionary(pa.int32(), pa.string())),
    ]
    columns = [
        pa.array(words),
        pa.array(rng.integers(1900, 2030, n), pa.int16()),
        pa.array([["x"] * (i % 3) if i % 5 else None for i in range(n)], fields[2].type),
        pa.array([{"a": i, "b": i % 2 == 0} if i % 7 else None for i in range(n)], fields[3].type),
        pa.array(rng.integers(0, 2**40, n), fields[4].type),
        pa.array([f"class {c}" for c in rng.integers(0, 5, n)]).dictionary_encode(),
    ]
    return pa.table(columns, schema=pa.schema(fields, metadata={"made by": "vecferry.testing"}))


def cut(rows: VectorBatch, size: int, start: int = 0) -> Iterator[VectorBatch]:
    """Cut rows into batches of a size, each with the number of rows up to its end as its cursor."""
    for at in range(start, len(rows), size):
        part = rows.take(np.arange(at, min(at + size, len(rows))))
        yield dataclasses.replace(part, cursor={"row": at + len(part)})


def assert_same(got: VectorBatch, want: VectorBatch, *, ordered: bool = True, bits: bool = True) -> None:
    """Fail unless ids, vectors (bit by bit) and payload are the same; in another order if not `ordered`."""
    if not ordered:
        got, want = (b.take(np.argsort(np.array(b.ids.to_pylist(), object))) for b in (got, want))
    assert got.ids.type == want.ids.type
    assert got.ids.to_pylist() == want.ids.to_pylist()
    if bits:
        np.testing.assert_array_equal(got.vectors.view(np.uint32), want.vectors.view(np.uint32))
    assert (got.payload is None) == (want.payload is None)
    if got.payload is not None and want.payload is not None:
        assert got.payload.schema.equals(want.payload.schema, check_metadata=True), got.payload.schema
        assert got.payload.to_pylist() == want.payload.to_pylist()


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, by its path in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
