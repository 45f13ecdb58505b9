"""Which column of a table holds the vectors and which the ids, and how a vector column becomes a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vecferry.batch import Floats
from vecferry.errors import DataError, UsageError
from vecferry.store import Uri

ID_NAMES = ("id", "_id", "ids", "doc_id", "docid", "document_id")
"""Where nobody says which column holds the ids: the first of these that exists and can hold ids."""

MEASURED = 100
"""Rows whose most frequent length is the dimension, where the type doesn't say it."""

BLOB_DTYPES = ("float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class VectorColumn:
    """Say where the vectors are: a column's name, the steps into nested structs, and its elements' type.

    `dim` is None where only the rows tell it.
    """

    name: str
    path: tuple[str, ...]
    dtype: str
    dim: int | None

    def matrix(self, column: pa.Array, dim: int) -> Floats:
        """Return the vectors of one column piece `[n, dim]`, without a copy where they are float32 without nulls.

        Rows that are null or of another length come out as NaN, and so do null elements: no row is ever left out.
        """
        for step in self.path[1:]:
            column = pc.struct_field(column, step)  # null where the struct is
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        data, starts, lengths = _pieces(column)
        width = dim if data.dtype != np.uint8 else dim * np.dtype(self.dtype).itemsize
        good = lengths == width
        if column.null_count:
            good &= column.is_valid().to_numpy(zero_copy_only=False)
        if good.all():
            return _float32(data.reshape(len(column), width), self.dtype)
        out = np.full((len(column), dim), np.nan, np.float32)
        out[good] = _float32(data[starts[good][:, None] + np.arange(width)], self.dtype)
        return out

    def measure(self, column: pa.Array) -> int | None:
        """Return the dimension of most of the first rows that aren't null or empty, None if there are none."""
        for step in self.path[1:]:
            column = pc.struct_field(column, step)
        _, _, lengths = _pieces(column)
        if column.null_count:
            lengths = lengths[column.is_valid().to_numpy(zero_copy_only=False)]
        lengths = lengths[lengths > 0][:MEASURED]
        if not len(lengths):
            return None
        found, first, times = np.unique(lengths, return_index=True, return_counts=True)
        width = int(found[np.lexsort((first, -times))[0]])  # of several that are as frequent the one that comes first
        if not _is_binary(column.type):
            return width
        dim, rest = divmod(width, np.dtype(self.dtype).itemsize)
        if rest:
            raise DataError(f"column {self.name} holds blobs of {width} bytes, which is no number of {self.dtype}")
        return dim


def _float32(rows: NDArray[Any], dtype: str) -> Floats:
    if rows.dtype == np.uint8:
        rows = np.ascontiguousarray(rows).view(np.dtype(dtype).newbyteorder("<"))
    with np.errstate(over="ignore"):  # a double too large for a float becomes infinite, which makes it a bad row
        return np.ascontiguousarray(rows, np.float32)


def _pieces(column: pa.Array) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Return all elements (or bytes) of a column, and where each row starts among them and how long it is."""
    n = len(column)
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        values = column.values.slice(column.offset * size, n * size)  # flatten() would drop the null rows
        return values.to_numpy(zero_copy_only=False), np.arange(n) * size, np.full(n, size)
    if _is_binary(column.type):
        column = column.cast(pa.large_binary())
        _, buffer, data = column.buffers()
        offsets = np.frombuffer(buffer, np.int64)[column.offset : column.offset + n + 1] if n else np.zeros(1, np.int64)
        raw = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        return raw[offsets[0] : offsets[-1]], offsets[:-1] - offsets[0], np.diff(offsets)
    offsets = column.offsets.to_numpy().astype(np.int64, copy=False)
    values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    return values.to_numpy(zero_copy_only=False), offsets[:-1] - offsets[0], np.diff(offsets)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _describe(kind: pa.DataType) -> tuple[str, int | None] | None:
    """Return element type and dimension of a type that holds vectors, None for another type."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return (np.dtype(kind.value_type.to_pandas_dtype()).name, kind.shape[0]) if len(kind.shape) == 1 else None
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_floating(kind.value_type):
        return None
    dim = kind.list_size if pa.types.is_fixed_size_list(kind) else None
    return np.dtype(kind.value_type.to_pandas_dtype()).name, dim


def _fields(parent: Any, steps: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    for field in parent:
        yield (*steps, field.name), field.type
        if pa.types.is_struct(field.type):
            yield from _fields(field.type, (*steps, field.name))


def find_vectors(schema: pa.Schema, where: str, asked: str | None, dtype: str | None) -> VectorColumn:
    """Find the vector column, the one asked for or the only one there is.

    Raises UsageError for several candidates and for a name that isn't there, DataError where no column can be it.
    """
    fields = list(_fields(schema))
    if asked is None:
        if dtype is not None:
            named = _with(where, vector="NAME")
            raise UsageError(f"{where}: dtype says what a binary column holds: name the column, as in {named}")
        found = [(path, held) for path, kind in fields if (held := _describe(kind))]
        if len(found) == 1:
            path, held = found[0]
            return VectorColumn(".".join(path), path, *held)
        if found:
            names = ", ".join(".".join(path) for path, _ in found)
            named = _with(where, vector="NAME")
            raise UsageError(f"{where}: columns {names} hold vectors: say which, as in {named}")
        columns = ", ".join(f"{'.'.join(path)} ({kind})" for path, kind in fields)
        raise DataError(
            f"{where}: no column holds vectors (lists of float16, float or double) among {columns}; for vectors in a "
            f"binary column say so, as in {_with(where, vector='NAME', dtype='float32')}"
        )
    # a column may have a dot in its own name; that one comes before a field of a struct
    matches = sorted((m for m in fields if ".".join(m[0]) == asked), key=lambda m: len(m[0]))
    if not matches:
        names = ", ".join(".".join(path) for path, _ in fields)
        named = _with(where, vector="NAME")
        raise UsageError(f"{where}: no column {asked!r} among {names}: name the one with the vectors, as in {named}")
    path, kind = matches[0]
    if _is_binary(kind):
        if dtype not in BLOB_DTYPES:
            raise UsageError(
                f"{where}: column {asked} is binary, say what it holds with &dtype= one of {', '.join(BLOB_DTYPES)}"
            )
        return VectorColumn(asked, path, dtype, None)
    if (described := _describe(kind)) is None:
        raise UsageError(f"{where}: column {asked} holds {kind}, not vectors (lists of float16, float or double)")
    if dtype is not None:
        raise UsageError(f"{where}: column {asked} holds {kind} and needs no dtype: leave out &dtype={dtype}")
    return VectorColumn(asked, path, *described)


def find_ids(schema: pa.Schema, where: str, asked: str | None) -> str | None:
    """Find the id column, the one asked for or one of the usual names; None where rows are only numbered, as "" asks.

    Raises UsageError for a name that isn't there and for a column that can't hold ids, even if nobody asked for it:
    who has ids doesn't mean his rows to be matched by their numbers.
    """
    if asked == "":
        return None
    if asked is not None:
        if asked not in schema.names:
            named = _with(where, id="COLUMN")
            raise UsageError(
                f"{where}: no column {asked!r} for the ids among {', '.join(schema.names)}: name one, as in {named}"
            )
        if not is_id_type(schema.field(asked).type):
            raise UsageError(
                f"{where}: column {asked} holds {schema.field(asked).type}; ids are integers, strings or binary"
            )
        return asked
    usual = [name for name in ID_NAMES if name in schema.names and _describe(schema.field(name).type) is None]
    for name in usual:
        if is_id_type(schema.field(name).type):
            return name
    if usual:
        raise UsageError(
            f"{where}: column {usual[0]} holds {schema.field(usual[0]).type}, and ids are integers, strings or binary: "
            f"cast it, name another of {', '.join(schema.names)}, as in {_with(where, id='COLUMN')}, or number the "
            f"rows from 0: {_with(where, id='')}"
        )
    return None


def _with(where: str, **options: str) -> str:
    """Return the address of a Parquet store with some options changed, for the user to copy."""
    address = Uri.parse(where)
    return str(Uri("parquet", address.path, {**address.options, **options}))


def is_id_type(kind: pa.DataType) -> bool:
    """Say whether values of this type can be ids; a dictionary of such values can too."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pa.types.is_string, pa.types.is_large_string)
    return bool(pa.types.is_integer(kind) or _is_binary(kind) or any(of(kind) for of in texts))


def without(column: pa.StructArray, path: tuple[str, ...]) -> pa.Array | None:
    """Return a struct column without one field somewhere inside it, None if nothing else is left of it."""
    fields, children = [], []
    for number, field in enumerate(column.type):
        child = column.field(number)
        if field.name == path[0]:
            child = without(child, path[1:]) if len(path) > 1 else None
        if child is not None:
            fields.append(field.with_type(child.type))
            children.append(child)
    return pa.StructArray.from_arrays(children, fields=fields, mask=column.is_null()) if children else None


def plain(kind: pa.DataType) -> pa.DataType:
    """Return a type with strings and binary in the place of their views, rows of which pyarrow can't select."""
    made = kind
    if pa.types.is_string_view(kind):
        made = pa.string()
    elif pa.types.is_binary_view(kind):
        made = pa.binary()
    elif pa.types.is_struct(kind):
        made = pa.struct([f.with_type(plain(f.type)) for f in kind])
    elif pa.types.is_list(kind):
        made = pa.list_(_plain_field(kind.value_field))
    elif pa.types.is_large_list(kind):
        made = pa.large_list(_plain_field(kind.value_field))
    elif pa.types.is_fixed_size_list(kind):
        if kind.list_size < 0:  # as only a damaged footer has it
            raise pa.ArrowInvalid(f"lists of {kind.list_size} elements")
        field = _plain_field(kind.value_field)
        made = kind if field == kind.value_field else pa.list_(field, kind.list_size)
    elif pa.types.is_map(kind):
        made = pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field), kind.keys_sorted)
    elif pa.types.is_dictionary(kind):
        made = pa.dictionary(kind.index_type, plain(kind.value_type), kind.ordered)
    return made if made != kind else kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain(field.type))


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema whose types are all `plain`."""
    return pa.schema([_plain_field(field) for field in schema], schema.metadata)


def plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with every column cast to its `plain` type; the same batch where nothing has to be."""
    schema = plain_schema(batch.schema)
    if schema == batch.schema:
        return batch
    arrays = [column.cast(kind) for column, kind in zip(batch.columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
