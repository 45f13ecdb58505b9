"""NumPy: a `.npy` file of vectors, with a file of ids beside it or without; a folder of both to write.

    npy:VECTORS.npy?ids=IDS.npy
    npy:FOLDER                        vectors.npy, ids.npy where rows have ids, _vecferry.json

Vectors are float16, float32 or float64 `[n, d]`, in C or Fortran order; ids are integers or strings of fixed width
`[n]`. One folder instead of two files is written because one rename publishes it. There is no payload.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.batch import Cursor, Floats, VectorBatch
from vecferry.errors import DataError, UnsupportedError, UsageError
from vecferry.store import StoreInfo, Uri, find, require_all
from vecferry_adapters._numpy_writer import IDS, VECTORS, NumpyWriter
from vecferry_adapters._rows import MANIFEST, read_manifest, speaks_of
from vecferry_adapters._staging import swap_back

KIND = "npy"
MAGIC = b"\x93NUMPY"


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except PermissionError:
        raise  # to be told: not being allowed to look is no answer
    except OSError:
        return False


def _is_npz(path: Path) -> bool:
    if not _starts_with(path, b"PK"):
        return False
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith(".npy") for name in file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def sniff(path: Path) -> bool:
    """Say whether a file starts as `.npy` files do, or a folder has such vectors; `.npz` too, to refuse it by name."""
    return _starts_with(path / VECTORS if path.is_dir() else path, MAGIC) or _is_npz(path)


def open_reader(uri: Uri) -> NumpyReader:
    """Open vectors and ids; raise DataError for files that don't hold them or don't belong together."""
    return NumpyReader(uri)


def open_writer(uri: Uri, info: StoreInfo, *, resume: bool, overwrite: bool, threads: int) -> NumpyWriter:
    """Stage a folder of vectors and ids; raise UnsupportedError for payload and for ids that aren't integers."""
    return NumpyWriter(uri, info, resume=resume, overwrite=overwrite, open_staged=open_reader)


def rollback(uri: Uri) -> str:
    """Swap a store with its backup; each folder has its own manifest."""
    return str(swap_back(Path(uri.path)))


class _Array:
    """Read rows of one `.npy` file. Not through a memory map: the pages read would count as this process's memory."""

    def __init__(self, path: Path) -> None:
        if _is_npz(path):
            raise UnsupportedError(
                f"{path} is an .npz archive, which can't be read in pieces: make it one array with "
                "np.save('vectors.npy', np.load(PATH)[NAME])"
            )
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
        if not _starts_with(path, MAGIC):
            raise DataError(f"{path} is not a .npy file")
        try:
            mapped = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # object arrays, too few bytes; of a damaged header whatever Python's parser says
            raise DataError(f"{path} can't be read as an array of numbers or fixed-width strings: {error}") from error
        self.path = path
        self.shape, self.dtype, self._offset = mapped.shape, mapped.dtype, mapped.offset
        self._by_column = mapped.ndim == 2 and mapped.flags.f_contiguous and not mapped.flags.c_contiguous
        whole, size = mapped.offset + mapped.nbytes, path.stat().st_size
        if size != whole:
            raise DataError(
                f"{path} has {size} bytes, its header speaks of {whole}: something was added behind the array"
            )

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows as they are stored, `[stop - start, ...]`."""
        with self.path.open("rb") as file:
            if self._by_column:
                columns = [self._piece(file, j * self.shape[0] + start, stop - start) for j in range(self.shape[1])]
                return np.stack(columns, axis=1)
            width = 1 if len(self.shape) == 1 else self.shape[1]
            return self._piece(file, start * width, (stop - start) * width).reshape(stop - start, *self.shape[1:])

    def _piece(self, file: BinaryIO, start: int, count: int) -> NDArray[Any]:
        file.seek(self._offset + start * self.dtype.itemsize)
        piece = np.fromfile(file, self.dtype, count)
        if len(piece) < count:
            raise DataError(f"{self.path} became shorter while it was read")
        return piece

    def take(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows at these places, in this order."""
        out = np.empty((len(places), *self.shape[1:]), self.dtype)
        # a row in one piece is read alone; where it lies in d pieces, the rows around it cost nothing more
        block = 4096 if self._by_column else 1
        order = np.argsort(places, kind="stable")
        blocks, starts = np.unique(places[order] // block, return_index=True)
        ends = np.append(starts[1:], len(order))
        for first, a, b in zip(blocks * block, starts, ends, strict=False):
            slots = order[a:b]
            out[slots] = self.rows(first, min(first + block, self.shape[0]))[places[slots] - first]
        return out


class NumpyReader:
    """Read vectors and ids from `.npy` files in bounded memory."""

    def __init__(self, uri: Uri) -> None:
        uri.require("ids")
        self._uri = uri
        path = Path(uri.path)
        manifest = read_manifest(path) if path.is_dir() else None
        beside = path / IDS if path.is_dir() and (path / IDS).exists() else None
        ids_path = Path(uri.options["ids"]) if "ids" in uri.options else beside
        self._vectors = vectors = _Array(path / VECTORS if path.is_dir() else path)
        if len(vectors.shape) != 2 or vectors.shape[1] == 0:
            raise DataError(f"{vectors.path} has shape {list(vectors.shape)}; vectors are [rows, dimensions]")
        if vectors.dtype.name not in ("float16", "float32", "float64"):
            raise DataError(f"{vectors.path} holds {vectors.dtype.name}; vectors are float16, float32 or float64")
        self._ids = None if ids_path is None else _Array(ids_path)
        id_type = None
        if self._ids is not None:
            id_type = _id_type(self._ids)
            if self._ids.shape[0] != vectors.shape[0]:
                raise DataError(
                    f"{self._ids.path} holds {self._ids.shape[0]} ids, {vectors.path} {vectors.shape[0]} vectors"
                )
        if manifest and manifest["count"] != vectors.shape[0]:
            raise DataError(
                f"{vectors.path} holds {vectors.shape[0]} vectors, {MANIFEST} beside it says {manifest['count']}"
            )
        known = manifest is not None and speaks_of(manifest, (path / VECTORS, path / IDS))
        held: Mapping[str, Any] = manifest if manifest and known else {}
        self.info = StoreInfo(
            kind=KIND,
            uri=str(uri),
            count=vectors.shape[0],
            dim=vectors.shape[1],
            metric=held.get("metric"),
            id_type=id_type,
            nbytes=sum(a.path.stat().st_size for a in (vectors, self._ids) if a is not None),
            space=held.get("space"),
            dtype=vectors.dtype.name,
            provenance=held.get("provenance", {}),
        )

    def read(self, batch_size: int, after: Cursor = None) -> Iterator[VectorBatch]:
        """Yield all rows; a cursor is the number of rows up to the batch's end."""
        count = self._vectors.shape[0]
        for start in range(after or 0, count, batch_size):
            stop = min(start + batch_size, count)
            yield VectorBatch(self._ids_of(start, stop), _float32(self._vectors.rows(start, stop)), None, stop)

    def ids(self, batch_size: int) -> Iterator[pa.Array]:
        """Yield the ids, or row numbers where there are none."""
        count = self._vectors.shape[0]
        for start in range(0, count, batch_size):
            yield self._ids_of(start, min(start + batch_size, count))

    def _ids_of(self, start: int, stop: int) -> pa.Array:
        if self._ids is None:
            return pa.array(np.arange(start, stop))
        return self._arrow(self._ids.rows(start, stop))

    def _arrow(self, ids: NDArray[Any]) -> pa.Array:
        try:
            return pa.array(ids.astype(ids.dtype.newbyteorder("="), copy=False), self.info.id_type)
        except (UnicodeError, pa.ArrowInvalid) as error:
            where = self._uri if self._ids is None else self._ids.path
            raise DataError(f"{where} holds ids that are no text in Unicode: {error}") from error

    def take(self, ids: pa.Array) -> VectorBatch:
        """Return the rows of these ids, read one by one."""
        places = find(self, ids)
        require_all(str(self._uri), ids, places)
        held = pa.array(places) if self._ids is None else self._arrow(self._ids.take(places))
        return VectorBatch(held, _float32(self._vectors.take(places)))

    def search(self, queries: Floats, k: int, among: pa.Array | None = None) -> tuple[NDArray[np.int64], Floats]:
        """Raise UnsupportedError: an array has no index."""
        raise UnsupportedError(
            f"{self._uri}: a .npy file has no index to search with; search exactly over what is read"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _float32(rows: NDArray[Any]) -> Floats:
    with np.errstate(over="ignore"):  # a double too large for a float becomes infinite, which makes it a bad row
        return np.ascontiguousarray(rows, np.float32)


def _id_type(ids: _Array) -> pa.DataType:
    if len(ids.shape) != 1:
        raise DataError(f"{ids.path} has shape {list(ids.shape)}; ids are [rows]")
    if ids.dtype.kind in "iu":
        return pa.from_numpy_dtype(ids.dtype.newbyteorder("="))
    if ids.dtype.kind not in "US":
        raise DataError(f"{ids.path} holds {ids.dtype.name}; ids are integers or strings of fixed width")
    return pa.string() if ids.dtype.kind == "U" else pa.binary()
