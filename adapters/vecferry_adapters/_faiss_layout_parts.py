"""The layout of what FAISS indexes are made of: quantizers, transforms, graphs, inverted lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vecferry.errors import DataError
from vecferry_adapters._faiss_cursor import Cursor, ListsFile, UnknownTypeError

BITS = 16
"""Bits for one part of a product code; more would make tables beyond all memory."""
INTS = 1 << 20


# Quantizers


def pass_product(file: Cursor, dim: int | None = None) -> tuple[int, int]:
    """Pass over a product quantizer; return its parts, and the bytes of a code."""
    d, parts, bits = file.take("QQQ", "a product quantizer")
    file.equal("the dimension of a product quantizer", d, dim)
    file.between("the bits of a product quantizer", bits, 1, BITS)
    file.between("the parts of a product quantizer", parts, 1, max(d, 1))
    file.equal("what is left of the dimension after the parts of a product quantizer", d % parts, 0)
    file.vector(4, "the centroids", d << bits)
    return parts, (parts * bits + 7) // 8


def check_blocks(file: Cursor, block: int, even: int, parts: int) -> None:
    file.between("the rows of a FastScan block", block, 32, INTS)
    file.equal("what is left of a FastScan block after groups of 32", block % 32, 0)
    file.equal("the padded parts of a FastScan code", even, -(-parts // 2) * 2)


def pass_scalar(file: Cursor, dim: int) -> int:
    """Pass over a scalar quantizer; return the bytes of a code."""
    kind, _, _, d, width = file.take("iiiQQ", "a scalar quantizer")
    file.between("the kind of a scalar quantizer", kind, 0, 255)
    file.equal("the dimension of a scalar quantizer", d, dim)
    file.vector(4, "the ranges")
    return width


def pass_rabitq(file: Cursor) -> int:
    """Pass over a RaBitQ quantizer; return the bytes of a code."""
    return file.take("QQi", "RaBitQ's parameters")[1]


# Transforms


def pass_transform(file: Cursor, depth: int = 0) -> int:
    """Pass over a transform; return the number of dimensions that it makes."""
    file.between("the depth of transforms in transforms", depth, 0, 2)
    kind = file.kind("a transform")
    size = None
    if kind in _LINEAR:
        size = _linear(file, kind)
    elif kind == b"RmDT":
        file.vector(4, "a remapping")
    elif kind == b"VNrm":
        file.take("i", "a norm")
    elif kind == b"VCnt":
        file.vector(4, "a mean")
    elif kind == b"Viqt":
        file.vector(4, "a mean")
        file.take("B", "whether a PCA comes first")
        pass_transform(file, depth + 1)
        pass_transform(file, depth + 1)
    elif kind.isalnum():
        raise UnknownTypeError(kind)
    else:
        raise file.damaged(f"no transform starts with {kind!r}")
    d_in, d_out, _ = file.take("iiB", "the dimensions of a transform")
    file.between("the input dimension of a transform", d_in, 1, 2**31 - 1)
    file.between("the output dimension of a transform", d_out, 1, 2**31 - 1)
    if size:  # an untrained one has no matrix yet
        file.equal("the size of a matrix", size, d_in * d_out)
    return d_out


def _linear(file: Cursor, kind: bytes) -> int:
    if kind in (b"PCAm", b"PcAm", b"Pcam"):
        file.take({b"PCAm": "iB", b"PcAm": "iBi", b"Pcam": "iiBi"}[kind], "the parameters of a PCA")
        for what in ("the mean of a PCA", "the eigenvalues of a PCA", "the matrix of a PCA"):
            file.vector(4, what)
    elif kind == b"Viqm":
        file.take("ii", "the parameters of an ITQ")
    file.take("B", "whether there is a bias")
    _, size = file.vector(4, "a matrix")
    file.vector(4, "a bias")
    return size


_LINEAR = (b"rrot", b"LTra", b"PCAm", b"PcAm", b"Pcam", b"Viqm")


# Graphs


def pass_neighbours(file: Cursor, rows: int, degree: int) -> None:
    """Pass over the neighbours of each node: at most `degree` of them, then -1."""
    done, run = 0, 0
    while done < rows:
        used = min(INTS, (len(file.data) - file.at) // 4)
        if not used:
            raise file.damaged(f"a graph ends after {done} of {rows} nodes")
        block = file.values(file.at, used, np.int32)
        ends = np.flatnonzero(block == -1)[: rows - done]
        done += len(ends)
        if done == rows:
            used = int(ends[-1]) + 1
        file.between("a neighbour", int(block[:used].min()), -1, rows - 1)
        file.between("a neighbour", int(block[:used].max()), -1, rows - 1)
        lengths = np.diff(ends, prepend=-1 - run, append=used) - 1
        file.between("the number of a node's neighbours", int(lengths.max()), 0, degree)
        run = int(lengths[-1])  # of the node that the block cuts in two
        file.at += 4 * used


# Inverted lists


def pass_lists(file: Cursor, count: int, width: int, block: tuple[int, int] | None = None) -> None:
    """Pass over inverted lists with codes of `width` bytes; `block` is the rows and bytes of a FastScan block."""
    kind = file.kind("inverted lists")
    if kind == b"il00":
        raise DataError(f"{file.where} was written without its inverted lists: write it again, whole")
    if kind not in (b"ilar", b"ilod", b"ilbl"):
        if kind.isalnum():
            raise UnknownTypeError(kind)
        raise file.damaged(f"no inverted lists start with {kind!r}")
    lists, held = file.take("QQ", "the size of inverted lists")
    file.equal("the number of inverted lists", lists, count)
    if (kind == b"ilbl") != (block is not None):
        raise file.damaged(f"the inverted lists are {kind!r}, which doesn't go with the type of the index")
    if block is None:
        file.equal("the bytes of a code in the lists", held, width)
    if kind == b"ilar":
        file.skip(sum(_sizes(file, count)) * (width + 8), "the inverted lists")
    elif kind == b"ilbl":
        _block_lists(file, count, block or (0, 0))
    else:
        _lists_elsewhere(file, count, width)


def _sizes(file: Cursor, count: int) -> Sequence[int]:
    kind = file.kind("the sizes of the lists")
    if kind == b"full":
        start, _ = file.vector(8, "the sizes of the lists", count)
        sizes: list[int] = file.values(start, count, np.uint64).tolist()
        return sizes
    if kind != b"sprs":
        raise file.damaged(f"no sizes start with {kind!r}")
    start, length = file.vector(8, "the sizes of the lists")
    file.equal("what is left of the sizes after pairs", length % 2, 0)
    pairs = file.values(start, length, np.uint64).reshape(-1, 2).tolist()
    for number, _ in pairs:
        file.between("the number of a list", number, 0, count - 1)
    return list(dict(pairs).values())


def _block_lists(file: Cursor, count: int, block: tuple[int, int]) -> None:
    rows, size = file.take("QQ", "the size of blocks")
    file.equal("the rows of a block", rows, block[0])
    file.equal("the bytes of a block", size, block[1])
    for _ in range(count):
        _, ids = file.vector(8, "the ids of a list")
        file.vector(1, "the codes of a list", -(-ids // rows) * size)


def _lists_elsewhere(file: Cursor, count: int, width: int) -> None:
    start, _ = file.vector(24, "the table of lists", count)
    table = file.values(start, 3 * count, np.uint64).reshape(-1, 3).tolist()
    file.vector(16, "the free places of the lists' file")
    start, length = file.vector(1, "the name of the lists' file")
    (total,) = file.take("Q", "the size of the lists' file")
    for size, capacity, offset in table:
        file.between("the rows of a list", size, 0, capacity)
        if capacity:
            file.between("the end of a list in its file", offset + capacity * (width + 8), 0, total)
    name = file.data[start : start + length].tobytes().decode("utf-8", "surrogateescape")
    file.lists_files.append(ListsFile(name, total))
