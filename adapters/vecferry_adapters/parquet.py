"""Parquet: a file, a folder or a glob of files to read; a folder of equal parts to write.

    parquet:PATH?vector=NAME&id=NAME&dtype=float32

`vector` names the column with the vectors (`a.b` for field b of struct a), `id` the one with the ids; both are
found where there is no doubt (see `_parquet_columns`). `dtype` says what a binary vector column holds. All other
columns are payload. Where there is no id column, or with `id=` and no name, rows are numbered from 0. Views
(string_view, binary_view) are read as string and binary, which Parquet stores alike.

A written folder holds `part-00000.parquet`, ... and `_vecferry.json`, which says what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.batch import Cursor, Floats, VectorBatch, concat
from vecferry.errors import BadRowsError, DataError, UnsupportedError, UsageError
from vecferry.store import StoreInfo, Uri, find, require_all
from vecferry_adapters._parquet_columns import find_ids, find_vectors, plain_batch, plain_schema, without
from vecferry_adapters._parquet_file import check_codes, check_ends, find_files, has_magic, reading
from vecferry_adapters._parquet_writer import ParquetWriter
from vecferry_adapters._rows import MANIFEST, Manifest, read_manifest, speaks_of
from vecferry_adapters._staging import swap_back

KIND = "parquet"


def sniff(path: Path) -> bool:
    """Say whether a file starts as Parquet files do, or a folder or glob has such files."""
    return any(has_magic(p) for p in find_files(str(path)))


def open_reader(uri: Uri) -> ParquetReader:
    """Open Parquet files that have one schema; raise DataError for files that can't be read as such."""
    return ParquetReader(uri)


def open_writer(uri: Uri, info: StoreInfo, *, resume: bool, overwrite: bool, threads: int) -> ParquetWriter:
    """Stage a folder of Parquet files; raise UnsupportedError for ids that aren't integers, strings or binary."""
    return ParquetWriter(uri, info, resume=resume, overwrite=overwrite, open_staged=open_reader)


def rollback(uri: Uri) -> str:
    """Swap a store with its backup; each folder has its own manifest."""
    return str(swap_back(Path(uri.path)))


class ParquetReader:
    """Read Parquet files, one after the other, in bounded memory."""

    def __init__(self, uri: Uri) -> None:
        uri.require("vector", "id", "dtype")
        self._uri = uri
        self._files = find_files(uri.path)
        if not self._files:
            raise UsageError(f"{uri}: no Parquet files there; for files in subfolders say '{uri.path}/**/*.parquet'")
        self._groups: list[list[int]] = []  # rows of each row group of each file
        schema = self._schemas()
        manifest: Mapping[str, Any] = self._manifest() or {}
        self._vector = find_vectors(
            schema, str(uri), uri.options.get("vector", manifest.get("vector")), uri.options.get("dtype")
        )
        recorded = (manifest["id"] or "") if "id" in manifest else None
        self._id = find_ids(schema, str(uri), uri.options.get("id", recorded))
        if self._id == self._vector.path[0]:
            raise UsageError(f"{uri}: {self._id} can't be both the ids and the vectors: say ?vector=NAME&id=NAME")
        self._dim = self._vector.dim or self._measure()
        payload, columns = self._roles(schema)
        id_type = None if self._id is None else schema.field(self._id).type
        if id_type is not None and pa.types.is_dictionary(id_type):
            id_type = id_type.value_type
        self.info = StoreInfo(
            kind=KIND,
            uri=str(uri),
            count=sum(map(sum, self._groups)),
            dim=self._dim,
            metric=manifest.get("metric"),
            id_type=id_type,
            payload=pa.schema(payload, schema.metadata) if payload or schema.metadata else None,
            nbytes=sum(f.stat().st_size for f in self._files),
            space=manifest.get("space"),
            dtype=self._vector.dtype,
            provenance=manifest.get("provenance", {}),
            columns=columns,
        )

    def _schemas(self) -> pa.Schema:
        """Return the schema that all files share, and note their row groups."""
        first: pa.Schema = None
        for path in self._files:
            check_ends(path)
            with reading(path) as file:
                meta, schema = file.metadata, plain_schema(file.schema_arrow)
                groups = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
            if min(groups, default=0) < 0 or sum(groups) != meta.num_rows:
                raise DataError(
                    f"{path} is damaged: its footer speaks of {meta.num_rows:,} rows, in groups of {groups[:9]}"
                )
            self._groups.append(groups)
            if len(set(schema.names)) < len(schema.names):
                raise DataError(f"{path} has two columns of one name: {', '.join(schema.names)}")
            first = first or schema
            for a, b in zip(first, schema, strict=False):
                if (a.name, a.type) != (b.name, b.type):
                    raise DataError(f"{path} has {b.name} ({b.type}) where {self._files[0]} has {a.name} ({a.type})")
            if len(first) != len(schema):
                raise DataError(f"{path} has {len(schema)} columns, {self._files[0]} has {len(first)}")
        return first

    def _manifest(self) -> Manifest | None:
        """Return what a migration recorded beside the files, None where it didn't."""
        folder = self._files[0].parent
        held = read_manifest(folder) if all(f.parent == folder for f in self._files) else None
        rows = sum(map(sum, self._groups))
        if held and Path(self._uri.path).is_dir() and rows != held["count"]:
            raise DataError(
                f"{folder} holds {rows} rows, its {MANIFEST} says {held['count']}: parts are missing or added"
            )
        return held if held and speaks_of(held, self._files) else None

    def _measure(self) -> int:
        for batch in self._batches(1024, [self._vector.name]):
            dim = self._vector.measure(batch.column(self._vector.path[0]))
            if dim is not None:
                return dim
        raise DataError(
            f"{self._uri}: no row of column {self._vector.name} holds a vector, so its dimension is unknown"
        )

    def _roles(self, schema: pa.Schema) -> tuple[list[pa.Field], dict[str, str]]:
        """Return the payload's fields, and every column with its role."""
        payload: list[pa.Field] = []
        columns: dict[str, str] = {}
        for field in schema:
            if field.name == self._id:
                columns[field.name] = "id"
                continue
            if field.name == self._vector.path[0]:
                columns[self._vector.name] = "vector"
                rest = without(pa.array([], field.type), self._vector.path[1:]) if len(self._vector.path) > 1 else None
                if rest is None:
                    continue
                field = field.with_type(rest.type)
            columns[field.name] = "payload"
            payload.append(field)
        return payload, columns

    def _batches(self, size: int, columns: Sequence[str] | None = None, start: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield the rows from number `start` on, of the columns named."""
        for path, groups in zip(self._files, self._groups, strict=True):
            ends = np.cumsum(groups, dtype=np.int64)
            rows = int(ends[-1]) if len(ends) else 0
            if start >= rows:
                start -= rows
                continue
            first = int(np.searchsorted(ends, start, side="right"))
            skip = start - (int(ends[first - 1]) if first else 0)
            start = 0
            with reading(path) as file:
                wanted = range(first, len(groups))
                told, found = sum(groups[first:]), 0
                for batch in file.iter_batches(batch_size=size, row_groups=wanted, columns=columns):
                    found += len(batch)
                    if found > told:
                        break
                    check_codes(batch, path)
                    if skip < len(batch):
                        yield plain_batch(batch.slice(skip) if skip else batch)
                    skip = max(0, skip - len(batch))
                if found != told:
                    more = "more" if found > told else f"{found:,}"
                    raise DataError(f"{path} is damaged: its footer speaks of {told:,} rows, its pages hold {more}")

    def _ids_of(self, batch: pa.RecordBatch, start: int) -> pa.Array:
        if self._id is None:
            return pa.array(np.arange(start, start + len(batch)))
        ids = batch.column(self._id)
        if ids.null_count:
            places = start + np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))
            raise BadRowsError(
                str(self._uri), f"rows have no id in column {self._id} (row numbers)", places, "Give them ids."
            )
        ids = ids.cast(self.info.id_type)
        if ids.type in (pa.string(), pa.large_string()):
            try:
                ids.validate(full=True)
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"{self._uri}: column {self._id} holds ids that are no text in Unicode: {error}"
                ) from error
        return ids

    def read(self, batch_size: int, after: Cursor = None) -> Iterator[VectorBatch]:
        """Yield all rows in the files' order; a cursor is the number of rows up to the batch's end."""
        done = after or 0
        path = self._vector.path
        for batch in self._batches(batch_size, start=done):
            ids = self._ids_of(batch, done)
            done += len(batch)
            vectors = self._vector.matrix(batch.column(path[0]), self._dim)
            yield VectorBatch(ids, vectors, self._payload_of(batch), done)

    def _payload_of(self, batch: pa.RecordBatch) -> pa.Table | None:
        schema = self.info.payload
        if not schema:
            return None
        inside = self._vector.path[1:]
        top = self._vector.path[0]
        arrays = [without(batch.column(n), inside) if n == top else batch.column(n) for n in schema.names]
        return pa.Table.from_arrays(arrays, schema=schema)

    def ids(self, batch_size: int) -> Iterator[pa.Array]:
        """Yield the id column, or row numbers where there is none."""
        if self._id is None:
            count = self.info.count or 0
            for start in range(0, count, batch_size):
                yield pa.array(np.arange(start, min(start + batch_size, count)))
            return
        done = 0
        for batch in self._batches(batch_size, [self._id]):
            yield self._ids_of(batch, done)
            done += len(batch)

    def take(self, ids: pa.Array) -> VectorBatch:
        """Return the rows of these ids; read only the row groups that hold one."""
        places = find(self, ids)
        require_all(str(self._uri), ids, places)
        order = np.argsort(places, kind="stable")
        wanted = places[order]
        ends = np.cumsum([rows for groups in self._groups for rows in groups], dtype=np.int64)
        parts: list[VectorBatch] = []
        for start, end in zip(np.concatenate([[0], ends[:-1]]), ends, strict=True):
            inside = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, end)]
            if not len(inside):
                continue
            at = int(start)
            for batch in self.read(4096, after=at):
                here = inside[(inside >= at) & (inside < at + len(batch))]
                parts.append(batch.take(here - at))
                at += len(batch)
                if at > inside[-1]:
                    break
        if not parts:
            payload = self.info.payload.empty_table() if self.info.payload else None
            return VectorBatch(
                pa.array([], self.info.id_type or pa.int64()), np.empty((0, self._dim), np.float32), payload
            )
        return concat(parts).take(np.argsort(order))

    def search(self, queries: Floats, k: int, among: pa.Array | None = None) -> tuple[NDArray[np.int64], Floats]:
        """Raise UnsupportedError: a Parquet file has no index."""
        raise UnsupportedError(
            f"{self._uri}: Parquet files have no index to search with; search exactly over what is read"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
