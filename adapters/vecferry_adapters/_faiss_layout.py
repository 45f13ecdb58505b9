"""Measure a FAISS file before FAISS reads it: every length in it is compared with the bytes that are there.

FAISS allocates, and computes addresses, from numbers in the file. `measure` follows the file's structure as FAISS
would, and vouches for the sizes of the types that it knows; what the parts say of each other is checked afterwards,
by `_faiss_check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vecferry.errors import DataError
from vecferry_adapters._faiss_cursor import Bytes, Cursor, ListsFile, UnknownTypeError
from vecferry_adapters._faiss_layout_parts import (
    check_blocks,
    pass_lists,
    pass_neighbours,
    pass_product,
    pass_rabitq,
    pass_scalar,
    pass_transform,
)

TABLES = 1 << 28
"""Bytes that FAISS may take for tables that it makes while it reads, whatever the size of the file."""
DIMENSIONS = 1 << 20
"""More than any model makes; from a longer number in a damaged file a single row would fill all memory."""
DEPTH = 16
"""Indexes inside indexes: more than anyone builds, few enough for the stack."""
WIDE = 1 << 24
"""Nodes that a search of a graph may keep in mind; FAISS allocates memory for all."""
LIST_BYTES = 64
"""What FAISS keeps in memory of an inverted list that is empty."""


@dataclass(slots=True)
class Measured:
    """Say where an index ends, and which files of inverted lists belong to it."""

    end: int
    files: list[ListsFile] = field(default_factory=list)


def measure(data: Bytes, start: int, where: str) -> Measured | None:
    """Follow the index that starts at a byte; return None where a part's layout isn't known.

    Raises DataError where a length doesn't fit the file, or a part that is needed isn't there.
    """
    file = Cursor(data, start, where)
    try:
        _index(file, 0)
    except UnknownTypeError:
        return None
    return Measured(file.at, file.lists_files)


@dataclass(frozen=True, slots=True)
class _Head:
    """What every index starts with."""

    dim: int
    rows: int


Parser = Callable[[Cursor, int], _Head]


def _index(file: Cursor, depth: int, what: str = "the index", dim: int | None = None, rows: int | None = None) -> _Head:
    """Pass over one index; it must have these dimensions and rows, where they are given."""
    file.between("the depth of indexes in indexes", depth, 0, DEPTH)
    kind = file.kind(what)
    if kind == b"null":
        raise DataError(f"{file.where} was written without {what}: write it again, whole")
    if kind not in _PARSERS:
        if kind[:1] == b"I" and kind.isalnum():
            raise UnknownTypeError(kind)
        raise file.damaged(f"no index starts with {kind!r}")
    head = _PARSERS[kind](file, depth + 1)
    file.equal(f"the dimension of {what}", head.dim, dim)
    file.equal(f"the number of rows of {what}", head.rows, rows)
    return head


def _head(file: Cursor) -> _Head:
    dim, rows, _, _, trained, metric = file.take("iqqqBi", "a header")
    file.between("the dimension", dim, 1, DIMENSIONS)
    file.between("the number of rows", rows, 0, 2**62)
    file.between("whether it is trained", trained, 0, 1)
    if metric > 1:
        file.skip(4, "an argument of the metric")
    return _Head(dim, rows)


def _flat(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    file.vector(1, "the vectors", 4 * head.dim * head.rows, unit=4)
    return head


def _codes(file: Cursor, head: _Head, width: int) -> _Head:
    if head.rows and not width:
        raise DataError(f"{file.where} has codes of no bytes: nothing of its vectors is in it")
    file.vector(1, "the codes", head.rows * width)
    return head


def _pq(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    _codes(file, head, pass_product(file, head.dim)[1])
    file.take("iBi", "search parameters")
    return head


def _pq_fastscan(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    parts, _ = pass_product(file, head.dim)
    _, block, _, padded, even = file.take("iiiQQ", "FastScan's parameters")
    check_blocks(file, block, even, parts)
    file.equal("the rows that codes are padded to", padded, -(-head.rows // block) * block)
    _codes(file, _Head(head.dim, padded), even // 2)
    return head


def _sq(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    return _codes(file, head, pass_scalar(file, head.dim))


def _lsh(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    bits, _, _ = file.take("iBB", "the parameters of an LSH")
    file.vector(4, "the thresholds")
    (width,) = file.take("i", "the bytes of a code")
    file.equal("the bytes of a code", width, (bits + 7) // 8)
    file.equal("the dimensions that a rotation makes", pass_transform(file), bits)
    return _codes(file, head, width)


def _rabitq(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    _codes(file, head, pass_rabitq(file))
    file.vector(4, "the centre", head.dim)
    file.take("B", "the bits of a query")
    return head


# Indexes around indexes


def _transformed(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    (count,) = file.take("i", "the number of transforms")
    file.between("the number of transforms", count, 0, DEPTH)
    dim = head.dim
    for _ in range(count):
        dim = pass_transform(file)
    _index(file, depth, "the index behind the transforms", dim, head.rows)
    return head


def _refined(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    _index(file, depth, "the index that is refined", head.dim, head.rows)
    _index(file, depth, "the index that refines", head.dim, head.rows)
    file.take("i", "a parameter")
    return head


def _id_map(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    _index(file, depth, "the index behind the ids", head.dim, head.rows)
    file.vector(8, "the ids", head.rows)
    return head


def _hnsw(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    file.vector(8, "the probabilities of levels")
    file.vector(4, "the neighbours of levels")
    file.vector(4, "the levels of rows", head.rows)
    file.vector(8, "where each row's neighbours start", head.rows + 1)
    file.vector(4, "the neighbours")
    file.take("iiiii", "the parameters of a graph")
    _index(file, depth, "the storage of a graph", head.dim, head.rows)
    return head


def _nsg(file: Cursor, depth: int) -> _Head:
    head = _head(file)
    file.take("iBiiii", "the parameters of building a graph")
    rows, degree, _, _, wide, entry, built = file.take("iiiiiiB", "the parameters of a graph")
    file.between("the number of nodes that a search keeps in mind", wide, 1, WIDE)
    if built:
        file.equal("the number of nodes", rows, head.rows)
        file.between("the degree of a graph", degree, 1, (TABLES + 64 * len(file.data)) // (4 * max(1, rows)))
        file.between("the entry point of a graph", entry, 0, max(0, rows - 1))
        pass_neighbours(file, rows, degree)
    _index(file, depth, "the storage of a graph", head.dim, head.rows)
    return head


# Inverted files


def _inverted(file: Cursor, depth: int) -> tuple[_Head, int]:
    """Pass over what all inverted files start with; return also the number of lists."""
    head = _head(file)
    lists, _ = file.take("QQ", "the parameters of an inverted file")
    known = len(file.lists_files)
    quantizer = _index(file, depth, "the coarse quantizer", head.dim)
    if len(file.lists_files) > known:
        raise file.damaged("the coarse quantizer has lists in another file")
    if quantizer.rows or head.rows:
        file.equal("the number of lists", lists, quantizer.rows)
    file.between("the number of lists", lists, 0, (TABLES + LIST_BYTES * len(file.data)) // LIST_BYTES)
    (kind,) = file.take("B", "the type of a direct map")
    file.between("the type of a direct map", kind, 0, 2)
    file.vector(8, "a direct map")
    if kind == 2:
        file.vector(16, "a direct map")
    return head, lists


def _ivf_flat(file: Cursor, depth: int) -> _Head:
    head, lists = _inverted(file, depth)
    pass_lists(file, lists, 4 * head.dim)
    return head


def _ivf_sq(file: Cursor, depth: int) -> _Head:
    head, lists = _inverted(file, depth)
    pass_scalar(file, head.dim)
    width, _ = file.take("QB", "the bytes of a code")
    pass_lists(file, lists, width)
    return head


def _ivf_pq(file: Cursor, depth: int) -> _Head:
    head, lists = _inverted(file, depth)
    _, width = file.take("BQ", "the bytes of a code")
    file.equal("the bytes of a product code", pass_product(file, head.dim)[1], width)
    pass_lists(file, lists, width)
    return head


def _ivf_pq_fastscan(file: Cursor, depth: int) -> _Head:
    head, lists = _inverted(file, depth)
    _, width, block, even, _, _ = file.take("BQiQiQ", "FastScan's parameters")
    parts, bytes_of_code = pass_product(file, head.dim)
    file.equal("the bytes of a product code", bytes_of_code, width)
    check_blocks(file, block, even, parts)
    pass_lists(file, lists, width, (block, block * even // 2))
    return head


def _ivf_rabitq(file: Cursor, depth: int) -> _Head:
    head, lists = _inverted(file, depth)
    pass_rabitq(file)
    width, _, _ = file.take("QBB", "the bytes of a code")
    pass_lists(file, lists, width)
    return head


_PARSERS: dict[bytes, Parser] = {
    **dict.fromkeys((b"IxFI", b"IxF2", b"IxFl"), _flat),
    b"IxPq": _pq,
    b"IPfs": _pq_fastscan,
    b"IxSQ": _sq,
    b"IxHe": _lsh,
    b"Ixrq": _rabitq,
    b"IxPT": _transformed,
    b"IxRF": _refined,
    **dict.fromkeys((b"IxMp", b"IxM2"), _id_map),
    **dict.fromkeys((b"IHNf", b"IHNs", b"IHNp"), _hnsw),
    **dict.fromkeys((b"INSf", b"INSs", b"INSp"), _nsg),
    b"IwFl": _ivf_flat,
    b"IwSq": _ivf_sq,
    b"IwPQ": _ivf_pq,
    b"IwPf": _ivf_pq_fastscan,
    b"Iwrq": _ivf_rabitq,
}
