"""Write a folder with vectors and ids as `.npy` files."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa

from vecferry.batch import Cursor, VectorBatch
from vecferry.errors import DataError, UnsupportedError, UsageError
from vecferry.store import Capabilities, Progress, Reader, StoreInfo, Uri
from vecferry_adapters._durable import write_json
from vecferry_adapters._rows import MANIFEST, check_dtype, checked_ids, elements, manifest
from vecferry_adapters._staging import Stage, resumable

VECTORS, IDS = "vectors.npy", "ids.npy"
SYNC_BYTES = 256 << 20
"""After so many bytes of vectors the stage is made durable: what a crash costs at most."""


def _header(dtype: np.dtype[Any], *shape: int) -> bytes:
    """Return the header of a `.npy` file; NumPy pads it so that its length is the same for any number of rows."""
    out = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, described)
    return out.getvalue()


class NumpyWriter:
    """Stage a folder with `vectors.npy` and, where rows have ids, `ids.npy`; one rename publishes it."""

    capabilities = Capabilities()

    def __init__(
        self, uri: Uri, info: StoreInfo, *, resume: bool, overwrite: bool, open_staged: Callable[[Uri], Reader]
    ) -> None:
        uri.require()
        check_dtype(info.dtype, str(uri))
        if info.id_type is not None and not pa.types.is_integer(info.id_type):
            raise UnsupportedError(
                f"{uri}: ids of type {info.id_type} can't be written to .npy, only integers: write to parquet: instead"
            )
        if info.payload is not None and len(info.payload):
            names = ", ".join(info.payload.names)
            raise UnsupportedError(
                f"{uri}: .npy can't hold the payload columns {names}: write to parquet: instead, or leave them out"
            )
        self._uri = uri
        self._info = info
        self._open_staged = open_staged
        self._stage = Stage(Path(uri.path), str(info.provenance.get("plan", "")), resume=resume, overwrite=overwrite)
        self._folder = self._stage.staged_folder()
        state = self._stage.state
        self._finished = bool(state.get("finished"))
        self._rows = int(state.get("rows", 0))
        self._cursor: Cursor = state.get("cursor")
        self._durable = Progress(self._rows, self._cursor, self._rows)
        self._shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {VECTORS: (np.dtype(info.dtype), (info.dim,))}
        if info.id_type is not None:
            self._shapes[IDS] = (np.dtype(info.id_type.to_pandas_dtype()), ())
        self._files: dict[str, BinaryIO] = {}
        if not self._finished:
            with self._stage.opening():
                self._folder.mkdir(exist_ok=True)
                try:
                    for name, (dtype, shape) in self._shapes.items():
                        self._files[name] = self._open(name, dtype, shape)
                except BaseException:
                    self._close_files()
                    raise

    def _open(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> BinaryIO:
        """Open a file of the stage behind its last durable row; rows that follow are written again."""
        path = self._folder / name
        end = len(_header(dtype, 0, *shape)) + self._rows * dtype.itemsize * int(np.prod(shape))
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        held = os.fstat(file.fileno()).st_size
        if self._rows and held < end:  # zeros would stand in for what is gone
            file.close()
            raise DataError(
                f"{path} has {held} bytes, {end} are on record: delete {self._stage.folder} and start again"
            )
        file.truncate(end)
        file.seek(end)
        return file

    @property
    def progress(self) -> Progress:
        """Say what is durable; always up to the end of a batch."""
        return self._durable

    def write(self, batch: VectorBatch) -> None:
        """Stage rows; make them durable every SYNC_BYTES."""
        if self._finished and len(batch):
            raise UsageError(f"{self._uri} is staged to its end: no more rows can be added")
        ids = checked_ids(batch, self._info, self._rows, str(self._uri))
        rows = {VECTORS: elements(batch.vectors, self._info.dtype, ids, str(self._uri)), IDS: ids.to_numpy()}
        with resumable(self._stage.target, self._durable.rows):
            for name, file in self._files.items():
                file.write(np.ascontiguousarray(rows[name]).data)
        self._rows += len(batch)
        self._cursor = batch.cursor
        width = self._info.dim * np.dtype(self._info.dtype).itemsize
        if (self._rows - self._durable.rows) * width >= SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        with resumable(self._stage.target, self._durable.rows):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            self._stage.save(rows=self._rows, cursor=self._cursor, finished=self._finished)
        self._durable = Progress(self._rows, self._cursor, self._rows)

    def _finish(self) -> None:
        if self._finished:
            return
        with resumable(self._stage.target, self._durable.rows):
            for name, file in self._files.items():
                dtype, shape = self._shapes[name]
                file.seek(0)
                file.write(_header(dtype, self._rows, *shape))
                file.flush()
            files = [self._folder / name for name in self._files]
            write_json(self._folder / MANIFEST, manifest(self._info, self._rows, files))
        self._finished = True
        self._sync()
        self._close_files()

    def staged(self) -> Reader:
        """Finish the headers and read the folder as it would be published."""
        self._finish()
        return self._open_staged(Uri("npy", str(self._folder)))

    def commit(self) -> str | None:
        """Rename the folder onto the target, swapping it with an old one."""
        self._finish()
        with resumable(self._stage.target, self._durable.rows):
            backup = self._stage.publish_folder()
        self._stage.discard()
        return None if backup is None else str(backup)

    def abort(self) -> None:
        """Delete the stage."""
        self._close_files()
        self._stage.discard()

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk; what isn't durable yet is written again
                file.close()
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_files()
        self._stage.close()
