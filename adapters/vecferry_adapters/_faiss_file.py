"""Open FAISS files by memory map: recognised by content, checked for damage, never loaded whole."""

from __future__ import annotations

import ctypes
import glob
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecferry.errors import DataError, MissingDependencyError, UnsupportedError, UsageError
from vecferry_adapters._faiss_cursor import ListsFile
from vecferry_adapters._faiss_layout import TABLES, measure
from vecferry_adapters._faiss_probe import probe

Ints = NDArray[np.int64]

HEADER = struct.Struct("<4siqqqBi")
"""What every index starts with: four characters for its type, dimension, rows, two fixed numbers, trained, metric."""
FIXED = 1 << 20
_LIBC = ctypes.CDLL(None)
ID_MAPS = {b"IxMp": "IDMap", b"IxM2": "IDMap2"}
UNREADABLE = {b"IxFP": "IndexFlatPanorama", b"IxLa": "IndexLattice"}
"""Types with a header of their own whose rows can't be read."""
BINARY = (b"IBxF", b"IBwF", b"IBFf", b"IBHf", b"IBHc", b"IBMp", b"IBM2", b"IBHh", b"IBHm", b"IBSp")


def load_faiss() -> Any:
    """Import faiss; raise MissingDependencyError where it isn't installed, UsageError where it is broken."""
    try:
        import faiss
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != "faiss":
            raise UsageError(f"faiss is installed, but broken ({error}): vecferry doctor says what to do") from error
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
    return floats or kind in BINARY or kind in UNREADABLE


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


def unreadable_type(where: str, name: str) -> UnsupportedError:
    """Return the error for a type whose rows can't be read, with the cure."""
    return UnsupportedError(
        f"{where} is an {name}, whose rows can't be read: rebuild it as another type, or start from the vectors that "
        "it was made of"
    )


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


def open_index(path: Path, *, probed: bool = False) -> OpenIndex:
    """Map a file and let FAISS build its structure over the map, in which vectors, codes and ids stay.

    A file of a type whose sizes can't be checked here is read in a process of its own first, unless it was `probed`.
    Raises UnsupportedError for an index of binary codes, and DataError for a file that is damaged, cut short, longer
    than its index, or none of FAISS's, and for one whose inverted lists are in a file that isn't beside it.
    """
    faiss = load_faiss()
    if is_binary(path):
        raise UnsupportedError(f"{path} is an index of binary codes: a linear map does not apply to binary codes")
    if (kind := _head(path)[:4]) in UNREADABLE:
        raise unreadable_type(str(path), UNREADABLE[kind])
    if not is_index(path):
        raise DataError(f"{path} is not a FAISS index of a known type, or was cut short")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    data = np.frombuffer(mapped, np.uint8)
    kind, dim, rows, *_, metric = HEADER.unpack(data[: HEADER.size].tobytes())
    outer = ID_MAPS.get(kind, "")
    # FAISS would copy an id map, and an IDMap2 would also build a hash table of it: over 50 bytes a row
    start = HEADER.size + (4 if metric > 1 else 0) if outer else 0
    measured = measure(data, start, str(path))
    if measured is None and not probed:
        probe(path)
    mapped_rows = rows if outer else None
    if measured is not None:
        _ids_behind(path, data, measured.end, mapped_rows)
        if measured.files:
            return _open_with_lists(faiss, path, measured.files)
    try:
        index, after = _read(faiss, data, start)
    except (RuntimeError, MemoryError) as error:
        raise _unreadable(path, error) from error
    id_map = _ids_behind(path, data, after, mapped_rows)
    if outer and (index.d != dim or index.ntotal != rows):
        raise DataError(
            f"{path} is damaged: {rows} rows of {dim} dimensions, of which {index.ntotal} of {index.d} are there"
        )
    if measured is None:
        _check_lists(faiss, path, index)
    regions = ((data.ctypes.data, len(data)), *_on_disk(faiss, index))
    return OpenIndex(path, index, id_map, outer, regions, data)


def _ids_behind(path: Path, data: NDArray[np.uint8], end: int, rows: int | None) -> Ints | None:
    """Return the ids behind an index that ends at a byte, if it has an id map of some rows; nothing may follow."""
    id_map = None
    if rows is not None:
        count = int(np.frombuffer(data[end : end + 8].tobytes(), np.int64)[0]) if len(data) >= end + 8 else -1
        if count != rows:
            raise DataError(f"{path} is damaged: {rows} rows, {count} of them with ids")
        if len(data) < end + 8 + 8 * count:
            raise DataError(f"{path} was cut short: {len(data)} bytes, {end + 8 + 8 * count} are needed")
        id_map = np.frombuffer(data, np.int64, count, end + 8) if count else np.empty(0, np.int64)
        end += 8 + 8 * count
    if end != len(data):
        raise DataError(f"{path} is damaged: its index ends after {end} bytes, the file has {len(data)}")
    return id_map


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


def _flags(faiss: Any) -> int:
    """Return FAISS's flags: nothing is written, and tables that only building a graph needs aren't made."""
    return int(faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_PQ_SKIP_SDC_TABLE)


def _read(faiss: Any, data: NDArray[np.uint8], start: int) -> tuple[Any, int]:
    """Read the index that starts at a byte; return it and the byte behind it."""
    limit = getattr(faiss, "set_deserialization_vector_byte_limit", None)
    before = faiss.get_deserialization_vector_byte_limit() if limit else 0
    if limit:
        # a damaged length mustn't make FAISS fill all memory before it notices; some tables are made, not stored
        limit(len(data) + TABLES)
    try:
        reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(data[start:]), len(data) - start)
        index = faiss.read_index(reader, _flags(faiss))
        return index, start + int(reader.rp_)
    finally:
        if limit:
            limit(before)


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = str(error).split("Error: ")[-1]
    return DataError(f"{path} can't be read by FAISS, it is damaged or cut short: {reason}")


def _open_with_lists(faiss: Any, path: Path, files: Sequence[ListsFile]) -> OpenIndex:
    """Open an index whose inverted lists are in a file beside it; where it was when it was made doesn't matter."""
    for file in files:
        beside = path.parent / Path(file.name).name
        if not beside.is_file():
            raise DataError(
                f"{path} keeps its inverted lists in another file, {file.name}, and there is no {beside}: put the "
                "file, or a link to it, beside the index; it is looked for nowhere else"
            )
        if (size := beside.stat().st_size) < file.size:
            raise DataError(f"{beside} was cut short: {size} bytes, {file.size} are needed by {path}")
    try:
        index = faiss.read_index(str(path), _flags(faiss) | faiss.IO_FLAG_ONDISK_SAME_DIR)
    except (RuntimeError, MemoryError) as error:
        raise _unreadable(path, error) from error
    return unwrap(index, path)


def _check_lists(faiss: Any, path: Path, index: Any) -> None:
    """Refuse inverted lists of a type whose layout isn't known that are in a file of their own."""
    if _on_disk(faiss, index):
        raise UnsupportedError(
            f"{path} is an {type(index).__name__} with inverted lists in another file, which is read for common types "
            "only: put the lists back into the index (replace_invlists)"
        )


def _on_disk(faiss: Any, index: Any) -> tuple[tuple[int, int], ...]:
    """Return the memory maps of inverted lists that are in a file of their own."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexRefine):
        return _on_disk(faiss, index.base_index) + _on_disk(faiss, index.refine_index)
    if isinstance(index, (faiss.IndexPreTransform, faiss.IndexIDMap)):
        return _on_disk(faiss, index.index)
    if isinstance(index, faiss.IndexIVF):
        lists = faiss.downcast_InvertedLists(index.invlists)
        if isinstance(lists, faiss.OnDiskInvertedLists):
            return ((int(lists.ptr), int(lists.totsize)),)
    return ()
