"""True vectors beside a translated index, never in it: a folder that grows, or any store, which is only read.

A cache folder holds `_cache.json`, which says in what space its vectors are, and parts in Parquet, none of which is
ever changed. A part appears by a rename, so a crash leaves the parts that were there; its name is its own hash, so
processes that add at the same time don't meet. `parquet:FOLDER` is a store like any other, to fit or check with.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vecferry.batch import Floats, id_keys
from vecferry.errors import DataError, IncompatibleError, UsageError
from vecferry.jsonfile import read_json, typed
from vecferry.lookup import Lookup
from vecferry.store import Reader

DESCRIPTION = "_cache.json"
FORMAT = 1
GROUP = 64
"""Rows of a row group, the least that can be read: rows are looked up here and there."""


class _Description(TypedDict):
    format: int
    space: str
    dim: int
    id_type: str


class Cache:
    """Keep the true vectors of documents, in a folder that is made when the first of them comes.

    space, dim  of the vectors; IncompatibleError is raised for a folder of another space, dimension or type of ids
    id_type     that of the documents' ids
    """

    def __init__(self, folder: Path, space: str, dim: int, id_type: pa.DataType) -> None:
        self.folder = folder
        self.dim = dim
        self._wanted = {"format": FORMAT, "space": space, "dim": dim, "id_type": str(id_type)}
        self._id_type = id_type
        self._rows = Lookup("id", "vector", pa.list_(pa.float32(), dim))
        self._seen: set[str] = set()
        self._changed: int | None = None
        self.refresh()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def exists(self) -> bool:
        """Say whether the folder has been made."""
        return self._changed is not None

    def refresh(self) -> None:
        """Take in the parts that other processes have added."""
        try:
            changed = self.folder.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed == self._changed:
            return
        if self._changed is None:
            self._check()
        names = {p.name for p in self.folder.iterdir() if p.name.startswith("part-") and p.suffix == ".parquet"}
        new = sorted(names - self._seen)
        try:
            self._rows.add([self.folder / name for name in new])
        except DataError as error:
            raise DataError(f"{error}; delete that file: only its texts need encoding again") from error
        self._seen |= names
        self._changed = changed

    def _check(self) -> None:
        """Refuse a folder that is no cache, or one for other vectors."""
        path = self.folder / DESCRIPTION
        try:
            held: _Description = typed(_Description, read_json(path), DESCRIPTION)
            version, space, dim = held["format"], held["space"], held["dim"]
            id_type = pa.type_for_alias(held["id_type"])
        except FileNotFoundError as error:
            raise UsageError(f"{self.folder} is no cache, it has no {DESCRIPTION}: name a new folder") from error
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}") from error
        if version != FORMAT:
            raise DataError(f"{path} is of format {version}, this vecferry reads format {FORMAT}: update it")
        wanted = self._wanted
        if (space, dim) != (wanted["space"], wanted["dim"]):
            raise IncompatibleError(
                f"{self.folder} holds vectors of the space {space!r} ({dim} dimensions), the map leads to "
                f"{wanted['space']!r} ({wanted['dim']}): use a cache of its own for each space"
            )
        if pa.types.is_integer(id_type) != pa.types.is_integer(self._id_type):
            raise IncompatibleError(
                f"{self.folder} has ids of type {id_type}, the index of type {self._id_type}: it is another index's"
            )
        self._id_type = id_type

    def has(self, ids: pa.Array) -> NDArray[np.bool_]:
        """Say of which ids there is a vector."""
        known: NDArray[np.bool_] = self._rows.find(ids) >= 0
        return known

    def take(self, ids: pa.Array) -> Floats:
        """Return the vectors of ids that it has, `[n, dim]`."""
        if not len(ids):
            return np.empty((0, self.dim), np.float32)
        flat = self._rows.take(self._rows.find(ids)).flatten()
        if flat.null_count or len(flat) != len(ids) * self.dim:
            raise DataError(
                f"{self.folder} is damaged: vectors are missing in a part: delete it, and encode them again"
            )
        vectors: Floats = flat.to_numpy().reshape(len(ids), self.dim)
        return vectors

    def add(self, ids: pa.Array, vectors: Floats) -> int:
        """Keep vectors `[n, dim]` of ids it doesn't have yet, durably; return their number."""
        new = np.flatnonzero(~self.has(ids))
        if not len(new):
            return 0
        if not self.exists:
            self._create()
        kept = np.ascontiguousarray(vectors[new], np.float32)
        values = pa.FixedSizeListArray.from_arrays(pa.array(kept.reshape(-1)), self.dim)
        table = pa.table({"id": ids.take(pa.array(new)).cast(self._id_type), "vector": values})
        sink = pa.BufferOutputStream()
        pq.write_table(
            table, sink, row_group_size=GROUP, use_dictionary=False, compression="none", write_page_checksum=True
        )
        data = sink.getvalue()
        name = f"part-{hashlib.sha256(data).hexdigest()[:32]}.parquet"
        stage = self.folder / f".{name}.{os.getpid()}.tmp"
        try:
            with stage.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            stage.replace(self.folder / name)
        finally:
            stage.unlink(missing_ok=True)
        _fsync(self.folder)
        self._rows.add([self.folder / name])
        self._seen.add(name)
        return len(new)

    def _create(self) -> None:
        """Make the folder with its description in one step; it may be another process that makes it."""
        stage = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.tmp")
        stage.mkdir(parents=True)
        try:
            path = stage / DESCRIPTION
            path.write_text(json.dumps(self._wanted, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            with path.open("rb") as file:
                os.fsync(file.fileno())
            try:
                stage.rename(self.folder)
            except OSError:
                if not (self.folder / DESCRIPTION).exists():
                    raise
            _fsync(self.folder.parent)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        self.refresh()


class Stored:
    """Read the true vectors of a store of any kind, such as a FAISS index of re-embedded documents.

    In memory are 8 bytes a row. A FAISS file gives single rows fast; of a Parquet file large parts are read.
    """

    exists = True

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._keys = np.sort(np.concatenate([np.empty(0, np.uint64), *map(id_keys, reader.ids(1 << 18))]))

    def __len__(self) -> int:
        return len(self._keys)

    def refresh(self) -> None:
        """Do nothing: a published store doesn't change."""

    def has(self, ids: pa.Array) -> NDArray[np.bool_]:
        """Say of which ids there is a vector."""
        if not len(self._keys):
            return np.zeros(len(ids), np.bool_)
        keys = id_keys(ids)
        known: NDArray[np.bool_] = self._keys[np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)] == keys
        return known

    def take(self, ids: pa.Array) -> Floats:
        """Return the vectors of ids that it has, `[n, dim]`."""
        return self._reader.take(ids).vectors


def _fsync(folder: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
