"""Write one FAISS file: rows go to a stage; a flat file is that stage, others are built from it at the end."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.batch import VectorBatch
from vecferry.errors import BadRowsError, DataError, IncompatibleError, UnsupportedError, UsageError
from vecferry.store import Capabilities, Progress, Reader, StoreInfo, Uri
from vecferry_adapters._durable import fsync
from vecferry_adapters._faiss_factory import Structure, design
from vecferry_adapters._faiss_file import HEADER, load_faiss
from vecferry_adapters._faiss_sidecar import add_entry, trim_entries
from vecferry_adapters._faiss_train import Staged, build
from vecferry_adapters._staging import Stage, resumable

CHECKPOINT = 128 << 20
"""Bytes of vectors after which the stage is made durable: what a crash costs at most."""
COPY_ROWS = 1 << 20
ROWS_AT = 8
"""Where a header says how many rows there are."""


def flat_head(structure: Structure) -> bytes:
    """Return what stands before the rows in a flat file: FAISS's own bytes of an empty one."""
    faiss = load_faiss()
    head: bytes = faiss.serialize_index(structure.whole).tobytes()
    return head[:-8] if structure.has_map else head  # an id map's ids come behind the rows, their number first


class FaissWriter:
    """Stage rows as raw float32 and int64 files, and make one FAISS file of them, which one rename publishes."""

    capabilities = Capabilities()

    def __init__(
        self,
        uri: Uri,
        info: StoreInfo,
        *,
        resume: bool,
        overwrite: bool,
        threads: int,
        open_staged: Callable[[Path, Mapping[str, Any]], Reader],
    ) -> None:
        uri.require("nprobe", "efSearch", "efConstruction")
        _check(uri, info)
        if overwrite and Path(uri.path).is_dir():
            raise UsageError(
                f"{uri.path} is a folder, which can't be swapped for a FAISS file: choose another name, or move the "
                "folder away"
            )
        self._uri = uri
        self._info = info
        self._threads = threads
        self._open_staged = open_staged
        self._structure = design(uri, info)
        self._has_ids = info.id_type is not None or self._structure.has_map
        self._head = flat_head(self._structure) if self._structure.is_flat else b""
        self._stage = Stage(Path(uri.path), str(info.provenance.get("plan", "")), resume=resume, overwrite=overwrite)
        state = self._stage.state
        self._durable = Progress(state.get("rows", 0), state.get("cursor"), state.get("rows", 0))
        self._rows, self._cursor = self._durable.rows, self._durable.cursor
        self._built = bool(state.get("built"))
        self._files: list[int] = []
        with self._stage.opening():
            try:
                self._vectors = self._open("vectors", len(self._head) + self._rows * 4 * info.dim)
                self._ids = self._open("ids", 8 * self._rows) if self._has_ids else None
                _write(self._vectors, self._head, 0)
            except BaseException:
                self._close_files()
                raise

    def _open(self, name: str, size: int) -> int:
        """Open a file of the stage, and cut off what was written after it was last made durable."""
        path = self._stage.folder / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._files.append(descriptor)
        held = os.fstat(descriptor).st_size
        if self._rows and held < size:
            raise DataError(f"{path} has {held} bytes, {size} are on record: delete {path.parent} and start again")
        os.ftruncate(descriptor, size)
        return descriptor

    def _resumable(self) -> Any:
        return resumable(self._stage.target, self._durable.rows)

    @property
    def progress(self) -> Progress:
        """Say what is durably staged; always whole batches."""
        return self._durable

    def write(self, batch: VectorBatch) -> None:
        """Append rows to the stage, and make it durable from time to time."""
        ids = self._checked_ids(batch)
        width = 4 * self._info.dim
        with self._resumable():
            _write(self._vectors, batch.vectors, len(self._head) + self._rows * width)
            if self._ids is not None:
                _write(self._ids, ids, 8 * self._rows)
            self._rows += len(batch)
            self._cursor = batch.cursor
            if (self._rows - self._durable.rows) * width >= CHECKPOINT:
                self._checkpoint()

    def _checked_ids(self, batch: VectorBatch) -> NDArray[np.int64]:
        info = self._info
        ids: NDArray[np.int64]
        if batch.vectors.shape[1] != info.dim:
            raise IncompatibleError(
                f"{self._uri} takes vectors of {info.dim} dimensions, these have {batch.vectors.shape[1]}"
            )
        if info.id_type is None:
            ids = np.arange(self._rows, self._rows + len(batch))
            if not np.array_equal(batch.ids.to_numpy(zero_copy_only=False), ids):
                raise UsageError(
                    f"{self._uri} stores no ids, so its rows must be those numbered {self._rows} and on: give it an "
                    "id type"
                )
            return ids
        numbers = batch.ids.cast(info.id_type).to_numpy(zero_copy_only=False)
        if numbers.dtype == np.uint64 and len(over := numbers[numbers >= 2**63]):
            fault = "ids are 2**63 or more, beyond what FAISS stores"
            raise BadRowsError(str(self._uri), fault, over.tolist(), "Write to parquet: instead.")
        ids = numbers.astype(np.int64)
        return ids

    def _checkpoint(self) -> None:
        """Make the stage durable, then say so in the state."""
        if self._rows == self._durable.rows and self._cursor == self._durable.cursor:
            return
        for descriptor in self._files:
            os.fsync(descriptor)
        self._built = False
        self._stage.save(rows=self._rows, cursor=self._cursor)
        self._durable = Progress(self._rows, self._cursor, self._rows)

    def _finish(self) -> Path:
        """Make the file that is to be published, unless that was done; return its path."""
        with self._resumable():
            self._checkpoint()
        with self._resumable():  # once more: it says how many rows are safe by now
            if self._head:
                if not self._built:
                    self._finish_flat()
                    self._built = True  # as long as it is open: a stage that is opened again is cut back to its rows
                return self._stage.folder / "vectors"
            path = self._stage.folder / "index"
            if not (self._built and path.exists()):
                staged = Staged(self._vectors, 0, self._ids, self._rows, self._info.dim)
                fresh = path.with_name("index.tmp")
                build(self._structure, staged, fresh, threads=self._threads)
                # filled and written: what is in memory isn't needed any more, and mustn't be filled again
                self._structure = design(self._uri, self._info)
                self._check_built(fresh)
                fresh.replace(path)
                fsync(self._stage.folder)
                self._built = True
                self._stage.save(**{k: v for k, v in self._stage.state.items() if k != "plan"} | {"built": True})
            return path

    def _finish_flat(self) -> None:
        """Write the row count into the header, and the ids behind the rows."""
        rows, dim, outer = self._rows, self._info.dim, self._structure.has_map
        head = bytearray(self._head)
        struct.pack_into("<q", head, ROWS_AT, rows)
        if outer:
            struct.pack_into("<q", head, HEADER.size + ROWS_AT, rows)
        struct.pack_into("<Q", head, len(head) - 8, rows * dim)
        _write(self._vectors, bytes(head), 0)
        end = len(head) + rows * 4 * dim
        os.ftruncate(self._vectors, end)
        if outer:
            assert self._ids is not None
            _write(self._vectors, struct.pack("<Q", rows), end)
            staged = Staged(self._vectors, len(head), self._ids, rows, dim)
            for start in range(0, rows, COPY_ROWS):
                part = staged.ids_of(start, min(start + COPY_ROWS, rows))
                _write(self._vectors, part, end + 8 + 8 * start)
        os.fsync(self._vectors)

    def _check_built(self, path: Path) -> None:
        with self._open_staged(path, self._entry()) as reader:
            if reader.info.count != self._rows:
                raise DataError(f"{path} has {reader.info.count} rows, {self._rows} were staged")

    def _entry(self) -> dict[str, Any]:
        """Return what the sidecar says of the file."""
        info = self._info
        return {
            "space": info.space,
            "metric": info.metric,
            "queries": "normalised" if info.metric == "cosine" else "as they are",
            "id_type": None if info.id_type is None else str(info.id_type),
            "index": info.index or "Flat",
            "parameters": dict(self._structure.parameters),
            "provenance": dict(info.provenance),
        }

    def staged(self) -> Reader:
        """Finish the file and open it."""
        return self._open_staged(self._finish(), self._entry())

    def commit(self) -> str | None:
        """Publish the file; its sidecar goes first, and speaks of the old file too."""
        path = self._finish()
        with self._resumable():
            add_entry(self._stage.target, path, self._entry())
            backup = self._stage.publish_file(path)
            trim_entries(self._stage.target, self._stage.folder)
        self._close_files()
        self._stage.discard()
        return None if backup is None else str(backup)

    def abort(self) -> None:
        """Delete the stage."""
        self._close_files()
        self._stage.discard()

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _close(self) -> None:
        self._close_files()
        self._stage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def _check(uri: Uri, info: StoreInfo) -> None:
    """Refuse what a FAISS file can't hold."""
    if info.id_type is not None and not pa.types.is_integer(info.id_type):
        raise UnsupportedError(
            f"{uri}: FAISS stores integer ids only, these are {info.id_type}: write to parquet, or give the source "
            "integer ids"
        )
    if info.payload is not None and len(info.payload):
        raise UnsupportedError(
            f"{uri}: FAISS can't hold the payload columns {', '.join(info.payload.names)}: leave them behind with "
            "--drop-payload, or write them to a file of their own with --payload OUT.parquet"
        )
    if info.dtype == "float16":
        raise UnsupportedError(f"{uri}: FAISS stores float16 as --index SQfp16, not as a --dtype")
    if info.dtype == "float64":
        raise UnsupportedError(f"{uri}: FAISS stores float32, not float64")


def _write(descriptor: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while len(view):
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done
