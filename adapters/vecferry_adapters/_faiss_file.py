"""Open FAISS files by memory map: recognised by content, checked for damage, never loaded whole."""

from __future__ import annotations

import ctypes
import glob
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecferry.errors import DataError, MissingDependencyError, UnsupportedError

Ints = NDArray[np.int64]

HEADER = struct.Struct("<4siqqqBi")
"""What every index starts with: four characters for its type, dimension, rows, two fixed numbers, trained, metric."""
FIXED = 1 << 20
TABLES = 1 << 28
"""Bytes that FAISS may take for a table it makes while it reads, whatever the size of the file."""
_LIBC = ctypes.CDLL(None)
ID_MAPS = {b"IxMp": "IDMap", b"IxM2": "IDMap2"}
BINARY = (b"IBxF", b"IBwF", b"IBFf", b"IBHf", b"IBHc", b"IBMp", b"IBM2", b"IBHh", b"IBHm", b"IBSp")


def load_faiss() -> Any:
    """Import faiss; raise MissingDependencyError where it isn't installed."""
    try:
        import faiss
    except ImportError as error:
        raise MissingDependencyError("faiss", "cpu", "reading and writing FAISS indexes") from error
    return faiss


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEADER.size)
    except PermissionError:
        raise  # to be told: not being allowed to look is no answer
    except OSError:
        return b""


def is_binary(path: Path) -> bool:
    """Say whether a file starts as FAISS indexes of binary codes do."""
    return _head(path)[:4] in BINARY


def is_index(path: Path) -> bool:
    """Say whether a file starts as FAISS indexes do, of whatever type; binary ones count, to be refused by name."""
    head = _head(path)
    if len(head) < HEADER.size:
        return False
    kind, dim, rows, *fixed, trained, _ = HEADER.unpack(head)
    floats = kind[:1] == b"I" and fixed == [FIXED, FIXED] and dim > 0 and rows >= 0 and trained in (0, 1)
    return floats or kind in BINARY


def find_files(path: str) -> list[Path]:
    """Return the FAISS files at a path, a folder or a glob, sorted; hidden ones and backups are no part."""
    root = Path(path)
    if root.is_dir():
        found = list(root.iterdir())
    elif root.exists() or not glob.has_magic(path):
        return [root]
    else:
        found = [Path(p) for p in glob.glob(path, recursive=True)]  # noqa: PTH207 (Path.glob takes no absolute pattern)
    return sorted(p for p in found if p.name[0] != "." and p.suffix != ".bak" and p.is_file() and is_index(p))


def bytes_at(address: Any, size: int) -> NDArray[np.uint8]:
    """View memory that FAISS owns; the caller keeps its owner alive."""
    if size == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(address)))


@dataclass(frozen=True, slots=True, eq=False)
class OpenIndex:
    """Hold an index whose outer id map is taken off: the index proper, and the ids of its rows.

    `id_map` is None without one. `outer` is the id map's factory name, "" without one. `regions` are memory maps of
    files, by address and size; whatever lies in them can be dropped from memory at any time.
    """

    path: Path | None
    index: Any
    id_map: Ints | None
    outer: str
    regions: tuple[tuple[int, int], ...]
    keep: Any = None

    def release(self) -> None:
        """Let the system take the pages back that were read so far: mapped pages count as this process's memory."""
        for address, size in self.regions:
            _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def open_index(path: Path) -> OpenIndex:
    """Map a file and let FAISS build its structure over the map, in which vectors, codes and ids stay.

    Raises UnsupportedError for an index of binary codes, and DataError for a file that is damaged, cut short, longer
    than its index, or none of FAISS's.
    """
    faiss = load_faiss()
    if is_binary(path):
        raise UnsupportedError(f"{path} is an index of binary codes: a linear map does not apply to binary codes")
    if not is_index(path):
        raise DataError(f"{path} is not a FAISS index of a known type, or was cut short")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    data = np.frombuffer(mapped, np.uint8)
    kind, dim, rows, *_, metric = HEADER.unpack(data[: HEADER.size].tobytes())
    outer = ID_MAPS.get(kind, "")
    # FAISS would copy an id map, and an IDMap2 would also build a hash table of it: over 50 bytes a row
    start = HEADER.size + (4 if metric > 1 else 0) if outer else 0
    try:
        index, end = _read(faiss, data, start)
    except (RuntimeError, MemoryError) as error:
        if "OnDiskInvertedLists" in str(error):
            return _open_moved(faiss, path)
        reason = str(error).split("Error: ")[-1]
        raise DataError(f"{path} can't be read by FAISS, it is damaged or cut short: {reason}") from error
    id_map = None
    if outer:
        count = int(np.frombuffer(data[end : end + 8].tobytes(), np.int64)[0]) if len(data) >= end + 8 else -1
        if not count == rows == index.ntotal or index.d != dim:
            raise DataError(f"{path} is damaged: {rows} rows, {index.ntotal} of them with vectors and {count} with ids")
        if len(data) < end + 8 + 8 * count:
            raise DataError(f"{path} was cut short: {len(data)} bytes, {end + 8 + 8 * count} are needed")
        id_map = np.frombuffer(data, np.int64, count, end + 8) if count else np.empty(0, np.int64)
        end += 8 + 8 * count
    if end != len(data):
        raise DataError(f"{path} is damaged: its index ends after {end} bytes, the file has {len(data)}")
    regions = ((data.ctypes.data, len(data)), *_on_disk(faiss, index))
    return OpenIndex(path, index, id_map, outer, regions, data)


def unwrap(index: Any, path: Path | None = None) -> OpenIndex:
    """Take the outer id map off an index that FAISS holds itself."""
    faiss = load_faiss()
    owner, index = index, faiss.downcast_index(index)  # what downcast_index returns doesn't own the index
    if not isinstance(index, faiss.IndexIDMap):
        return OpenIndex(path, index, None, "", _on_disk(faiss, index), owner)
    outer = "IDMap2" if isinstance(index, faiss.IndexIDMap2) else "IDMap"
    inner = faiss.downcast_index(index.index)
    id_map = bytes_at(index.id_map.data(), 8 * index.id_map.size()).view(np.int64)
    if not len(id_map) == index.ntotal == inner.ntotal:
        raise DataError(f"{path or 'the index'} is damaged: {inner.ntotal} rows with vectors, {len(id_map)} with ids")
    return OpenIndex(path, inner, id_map, outer, _on_disk(faiss, inner), owner)


def _read(faiss: Any, data: NDArray[np.uint8], start: int) -> tuple[Any, int]:
    """Read the index that starts at a byte; return it and the byte behind it."""
    limit = getattr(faiss, "set_deserialization_vector_byte_limit", None)
    before = faiss.get_deserialization_vector_byte_limit() if limit else 0
    if limit:
        # a damaged length mustn't make FAISS fill all memory before it notices; some tables are made, not stored
        limit(len(data) + TABLES)
    try:
        reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(data[start:]), len(data) - start)
        index = faiss.read_index(reader, faiss.IO_FLAG_READ_ONLY)
        return index, start + int(reader.rp_)
    finally:
        if limit:
            limit(before)


def _open_moved(faiss: Any, path: Path) -> OpenIndex:
    """Open an index whose inverted lists are in a file of their own that isn't where it was made: look beside it."""
    try:
        flags = faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR
        return unwrap(faiss.read_index(str(path), flags), path)
    except RuntimeError as error:
        reason = str(error).split("Error: ")[-1]
        raise DataError(f"{path} keeps its inverted lists in another file, which can't be read: {reason}") from error


def _on_disk(faiss: Any, index: Any) -> tuple[tuple[int, int], ...]:
    """Return the memory map of inverted lists that are in a file of their own."""
    while isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
    if isinstance(index, faiss.IndexIVF):
        lists = faiss.downcast_InvertedLists(index.invlists)
        if isinstance(lists, faiss.OnDiskInvertedLists):
            return ((int(lists.ptr), int(lists.totsize)),)
    return ()
