"""Write a folder of Parquet parts whose bytes depend on nothing but the rows."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vecferry.batch import Cursor, VectorBatch, in_one_piece
from vecferry.errors import UnsupportedError, UsageError
from vecferry.store import Capabilities, Progress, Reader, StoreInfo, Uri
from vecferry_adapters._durable import fsync, write_json
from vecferry_adapters._parquet_columns import is_id_type
from vecferry_adapters._rows import MANIFEST, check_dtype, checked_ids, elements, manifest
from vecferry_adapters._staging import Stage, resumable

GROUP_BYTES = 32 << 20
GROUP_ROWS = 32768
PART_GROUPS = 16
"""A row group has the largest power of two of rows with at most GROUP_BYTES of vectors, and at most GROUP_ROWS; a
part has PART_GROUPS of them. So bytes follow from the rows alone, and a crash costs at most one part."""


def group_rows(dim: int, dtype: str) -> int:
    """Return the rows of every row group but the last."""
    most = max(1, min(GROUP_ROWS, GROUP_BYTES // (dim * np.dtype(dtype).itemsize)))
    return 1 << (most.bit_length() - 1)


def target_schema(uri: Uri, info: StoreInfo) -> tuple[pa.Schema, str, str | None]:
    """Lay out the columns as the source had them; return schema, vector column's name and id column's name."""
    roles = {role: name for name, role in info.columns.items() if role != "payload"}
    vector = uri.options.get("vector", roles.get("vector", "vector"))
    identifier = (uri.options.get("id") or roles.get("id", "id")) if info.id_type is not None else None
    fields: dict[str, pa.Field] = {}

    def place(field: pa.Field) -> None:
        if fields.setdefault(field.name, field) is not field:
            raise UsageError(f"{uri}: two columns would be named {field.name}: name others with ?vector=NAME&id=NAME")

    vectors = pa.field(vector, pa.list_(pa.field("element", pa.from_numpy_dtype(info.dtype)), info.dim))
    ids = [pa.field(identifier, info.id_type)] if identifier is not None else []
    payload = {f.name: f for f in info.payload or ()}
    if "id" not in roles:
        for field in ids:
            place(field)
    for name, role in info.columns.items():
        if role == "vector":
            place(vectors)
        elif role == "id":
            for field in ids:
                place(field)
        elif name in payload:
            place(payload.pop(name))
    for field in payload.values():
        place(field)
    if "vector" not in roles:
        place(vectors)
    metadata = info.payload.metadata if info.payload is not None else None
    return pa.schema(list(fields.values()), metadata), vector, identifier


class ParquetWriter:
    """Stage Parquet parts of constant size, which one rename of their folder publishes."""

    capabilities = Capabilities(payload=True)

    def __init__(
        self, uri: Uri, info: StoreInfo, *, resume: bool, overwrite: bool, open_staged: Callable[[Uri], Reader]
    ) -> None:
        uri.require("vector", "id")
        if info.id_type is not None and not is_id_type(info.id_type):
            raise UnsupportedError(
                f"{uri}: ids of type {info.id_type} can't be written; ids are integers, strings or binary"
            )
        check_dtype(info.dtype, str(uri))
        self._uri = uri
        self._info = info
        self._open_staged = open_staged
        self._schema, self._vector, self._id = target_schema(uri, info)
        self._options = _encoding(self._schema, self._vector, self._id)
        self._stage = Stage(Path(uri.path), str(info.provenance.get("plan", "")), resume=resume, overwrite=overwrite)
        state = self._stage.state
        self._finished = bool(state.get("finished"))
        self._parts: list[int] = list(state.get("parts", []))
        self._durable = Progress(sum(self._parts), state.get("cursor"), state.get("rows_at_cursor", 0))
        self._rows = self._durable.rows
        self._at = self._durable.cursor, self._durable.rows_at_cursor  # the end of the last batch
        self._buffer = np.empty((group_rows(info.dim, info.dtype), info.dim), info.dtype)
        self._filled = 0
        self._ids: list[pa.Array] = []
        self._payload: list[pa.Table] = []
        self._file: pq.ParquetWriter | None = None
        self._in_part = 0
        self._folder = self._stage.staged_folder()
        if not self._finished:
            with self._stage.opening():
                self._folder.mkdir(exist_ok=True)
                names = {_part_name(i) for i in range(len(self._parts))}
                for path in self._folder.iterdir():
                    if path.name not in names:
                        path.unlink()

    @property
    def progress(self) -> Progress:
        """Say what is in whole parts; rows of an unfinished part are read again after a crash."""
        return self._durable

    def write(self, batch: VectorBatch) -> None:
        """Stage rows; every full row group is encoded at once, every full part is made durable."""
        if self._finished and len(batch):
            raise UsageError(f"{self._uri} is staged to its end: no more rows can be added")
        ids = checked_ids(batch, self._info, self._rows, str(self._uri))
        vectors = elements(batch.vectors, self._info.dtype, ids, str(self._uri))
        done = 0
        while done < len(batch):
            n = min(len(batch) - done, len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + n] = vectors[done : done + n]
            if self._id is not None:
                self._ids.append(ids.slice(done, n))
            if batch.payload is not None:
                self._payload.append(batch.payload.slice(done, n))
            self._filled += n
            self._rows += n
            done += n
            if self._filled == len(self._buffer):
                self._flush()
                if self._in_part == PART_GROUPS * len(self._buffer):
                    cursor, rows = (batch.cursor, self._rows) if done == len(batch) else self._at
                    self._end_part(cursor, rows)
        self._at = batch.cursor, self._rows

    def _flush(self) -> None:
        """Encode the buffered rows as one row group."""
        values = pa.array(self._buffer[: self._filled].reshape(-1))  # no copy
        payload = pa.concat_tables(self._payload) if self._payload else None
        arrays = []
        for field in self._schema:
            if field.name == self._vector:
                arrays.append(pa.FixedSizeListArray.from_arrays(values, type=field.type))
            elif field.name == self._id:
                arrays.append(pa.concat_arrays(self._ids) if self._ids else pa.array([], field.type))
            elif payload is not None:
                arrays.append(in_one_piece(payload.column(field.name)))
            else:
                arrays.append(pa.array([], field.type))
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        with resumable(self._stage.target, self._durable.rows):
            if self._file is None:
                path = self._folder / (_part_name(len(self._parts)) + ".tmp")
                self._file = pq.ParquetWriter(path, self._schema, **self._options)
            self._file.write_table(table, row_group_size=len(self._buffer))
        self._in_part += self._filled
        self._filled = 0
        self._ids, self._payload = [], []

    def _end_part(self, cursor: Cursor, rows_at_cursor: int) -> None:
        """Make the part durable, then say so in the state."""
        assert self._file is not None
        path = self._folder / _part_name(len(self._parts))
        with resumable(self._stage.target, self._durable.rows):
            self._file.close()
            self._file = None
            unfinished = path.with_name(path.name + ".tmp")
            fsync(unfinished)
            unfinished.rename(path)
            fsync(self._folder)
            self._parts.append(self._in_part)
            self._in_part = 0
            self._save(cursor, rows_at_cursor)

    def _save(self, cursor: Cursor, rows_at_cursor: int) -> None:
        self._stage.save(parts=self._parts, cursor=cursor, rows_at_cursor=rows_at_cursor, finished=self._finished)
        self._durable = Progress(sum(self._parts), cursor, rows_at_cursor)

    def _finish(self) -> None:
        if self._finished:
            return
        if self._filled or not self._rows:
            self._flush()
        if self._in_part or not self._rows:
            self._end_part(*self._at)
        files = [self._folder / _part_name(i) for i in range(len(self._parts))]
        with resumable(self._stage.target, self._durable.rows):
            described = manifest(self._info, self._rows, files, parts=self._parts, vector=self._vector, id=self._id)
            write_json(self._folder / MANIFEST, described)
            self._finished = True
            self._save(*self._at)

    def staged(self) -> Reader:
        """Finish the last part and read the folder as it would be published."""
        self._finish()
        return self._open_staged(Uri("parquet", str(self._folder)))

    def commit(self) -> str | None:
        """Rename the folder onto the target, swapping it with an old one."""
        self._finish()
        with resumable(self._stage.target, self._durable.rows):
            backup = self._stage.publish_folder()
        self._stage.discard()
        return None if backup is None else str(backup)

    def abort(self) -> None:
        """Delete the stage."""
        self._close_file()
        self._stage.discard()

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # a full disk; the part is unfinished in any case
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_file()
        self._stage.close()


def _part_name(number: int) -> str:
    return f"part-{number:05}.parquet"


def _encoding(schema: pa.Schema, vector: str, identifier: str | None) -> dict[str, Any]:
    """Choose for each leaf column: vectors and ids as they are, dictionaries and compression for payload."""
    empty = io.BytesIO()
    pq.write_metadata(schema, empty)
    leaves = pq.read_metadata(io.BytesIO(empty.getvalue())).schema
    paths = [leaves.column(i).path for i in range(len(leaves))]
    # vectors don't compress, and leaving them as they are is what makes writing as fast as the disk
    others = [p for p in paths if p != vector and not p.startswith(vector + ".list.")]
    return {
        "use_dictionary": [p for p in others if p != identifier],
        "write_statistics": others,
        "write_page_checksum": True,
        "compression": {p: "zstd" if p in others else "none" for p in paths},
        "use_compliant_nested_type": False,  # which would rename what lists of the payload call their elements
    }
