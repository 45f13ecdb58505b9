"""A toy store: a text file with a JSON header and a line `[id, [element, ...]]` for each row.

It is small on purpose, and reads the whole file; everything else is as an adapter has to be.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from vecferry.batch import VectorBatch
from vecferry.errors import DataError, IncompatibleError, UnsupportedError, UsageError
from vecferry.store import Capabilities, Progress, StoreInfo, Uri, find, require_all

KIND = "toy"
ID_TYPES = {"int64": pa.int64(), "string": pa.string(), None: None}


def sniff(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(8) == b'{"toy": '
    except OSError:
        return False


def open_reader(uri: Uri) -> Reader:
    return Reader(uri)


def open_writer(uri: Uri, info: StoreInfo, *, resume: bool, overwrite: bool, threads: int) -> Writer:
    return Writer(uri, info, resume, overwrite)


def header(info: StoreInfo) -> bytes:
    kind = None if info.id_type is None else str(info.id_type)
    held = {"toy": 1, "dim": info.dim, "ids": kind, "metric": info.metric, "space": info.space}
    return json.dumps(held | {"provenance": dict(info.provenance)}).encode() + b"\n"


class Reader:
    def __init__(self, uri: Uri) -> None:
        uri.require()
        path = Path(uri.path)
        if not sniff(path):
            raise DataError(f"{uri}: not a toy store")
        head, *lines = path.read_bytes().splitlines()
        held = json.loads(head)
        rows = [json.loads(line) for line in lines]
        id_type = ID_TYPES[held["ids"]]
        self._ids = pa.array([row[0] for row in rows], id_type or pa.int64())
        self._vectors = np.array([row[1] for row in rows], np.float32).reshape(len(rows), held["dim"])
        self.info = StoreInfo(
            kind=KIND,
            uri=str(uri),
            count=len(rows),
            dim=held["dim"],
            metric=held["metric"],
            id_type=id_type,
            nbytes=path.stat().st_size,
            space=held["space"],
            provenance=held["provenance"],
        )

    def read(self, batch_size: int, after: Any = None) -> Iterator[VectorBatch]:
        for start in range(after or 0, len(self._ids), batch_size):
            stop = min(start + batch_size, len(self._ids))
            yield VectorBatch(self._ids.slice(start, stop - start), self._vectors[start:stop], None, stop)

    def ids(self, batch_size: int) -> Iterator[pa.Array]:
        for start in range(0, len(self._ids), batch_size):
            yield self._ids.slice(start, batch_size)

    def take(self, ids: pa.Array) -> VectorBatch:
        places = find(self, ids)
        require_all(self.info.uri, ids, places)
        return VectorBatch(self._ids.take(pa.array(places)), self._vectors[places])

    def search(self, queries: Any, k: int, among: Any = None) -> Any:
        raise UnsupportedError(f"{self.info.uri}: a toy store has no index")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Writer:
    """Append to a file in a hidden folder beside the target; one rename publishes it."""

    capabilities = Capabilities()

    def __init__(self, uri: Uri, info: StoreInfo, resume: bool, overwrite: bool) -> None:
        uri.require()
        if info.id_type not in ID_TYPES.values():
            raise UnsupportedError(f"{uri}: ids of type {info.id_type} can't be held, only int64 and string")
        if info.payload is not None and len(info.payload):
            raise UnsupportedError(f"{uri}: payload can't be held")
        self._uri, self._info = uri, info
        self._target = Path(uri.path)
        self._folder = self._target.with_name(f".{self._target.name}.toystage")
        fresh = not self._folder.exists()
        self._folder.mkdir(exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            self._open(resume, overwrite)
        except BaseException:
            if fresh:
                shutil.rmtree(self._folder)
            os.close(self._lock)
            raise

    def _open(self, resume: bool, overwrite: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self._target} is being written by another process") from None
        if self._target.exists() and not overwrite:
            raise UsageError(f"{self._target} exists")
        plan = self._info.provenance.get("plan")
        path = self._folder / "state.json"
        state = {"plan": plan, "rows": 0, "cursor": None}
        if path.exists():
            if not resume:
                raise UsageError(f"{self._target} is unfinished: continue it with --resume")
            state = json.loads(path.read_text())
            if state["plan"] != plan:
                raise UsageError(f"{self._target} was begun with another plan")
        self._file = (self._folder / "rows").open("ab")
        self._file.truncate(state["bytes"] if state["rows"] else 0)
        if not state["rows"]:
            self._file.write(header(self._info))
        self._rows, self._cursor = state["rows"], state["cursor"]
        self._save()

    def _save(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        state = {"plan": self._info.provenance.get("plan"), "bytes": self._file.tell()}
        fresh = self._folder / "state.tmp"
        fresh.write_text(json.dumps(state | {"rows": self._rows, "cursor": self._cursor}))
        fresh.replace(self._folder / "state.json")

    @property
    def progress(self) -> Progress:
        return Progress(self._rows, self._cursor, self._rows)

    def write(self, batch: VectorBatch) -> None:
        if batch.vectors.shape[1] != self._info.dim:
            raise IncompatibleError(f"{self._uri} takes {self._info.dim} dimensions, not {batch.vectors.shape[1]}")
        for name, vector in zip(batch.ids.to_pylist(), batch.vectors.tolist(), strict=True):
            self._file.write(json.dumps([name, vector]).encode() + b"\n")
        self._rows += len(batch)
        self._cursor = batch.cursor
        self._save()

    def staged(self) -> Reader:
        return Reader(Uri(KIND, str(self._folder / "rows")))

    def commit(self) -> str | None:
        backup = None
        if self._target.exists():
            backup = self._target.with_name(self._target.name + ".bak")
            backup.hardlink_to(self._target)
        (self._folder / "rows").replace(self._target)
        self.abort()
        return None if backup is None else str(backup)

    def abort(self) -> None:
        self._file.close()
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        os.close(self._lock)
