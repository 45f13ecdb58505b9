"""The ways in which FAISS indexes keep their rows, each read in its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vecferry.batch import Floats
from vecferry_adapters._faiss_file import Ints, bytes_at, load_faiss

BLOCK = 256
Where = slice | Ints
"""Rows to read: a slice of places, or places in any order."""


class Rows(Protocol):
    """Offer the rows of an index in their reading order.

    `lossy` says that they aren't what was added; `code` names how elements are stored; `ordered` that they come in
    the order they were added in; `width` is the bytes of one row.
    """

    @property
    def count(self) -> int: ...
    @property
    def lossy(self) -> bool: ...
    @property
    def code(self) -> str: ...
    @property
    def ordered(self) -> bool: ...
    @property
    def width(self) -> int: ...

    def vectors(self, where: Where) -> Floats:
        """Return the vectors of these rows as fresh C-contiguous float32 `[n, d]`."""

    def labels(self, where: Where) -> Ints | None:
        """Return what FAISS's own search calls these rows; None where that is their place."""


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """Rows that lie one behind the other as float32."""

    data: Floats
    index: Any
    lossy: bool = False
    code: str = "float32"
    ordered: bool = True

    @property
    def count(self) -> int:
        """The rows."""
        return len(self.data)

    @property
    def width(self) -> int:
        """The bytes of a row."""
        return int(4 * self.data.shape[1])

    def vectors(self, where: Where) -> Floats:
        """Copy the rows."""
        return np.array(self.data[where], np.float32, order="C")

    def labels(self, where: Where) -> None:
        """Return None: rows are called by their place."""


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Rows that lie one behind the other as codes of `width` bytes, which the index decodes."""

    data: NDArray[np.uint8]
    index: Any
    code: str
    lossy: bool = True
    ordered: bool = True

    @property
    def count(self) -> int:
        """The rows."""
        return len(self.data)

    @property
    def width(self) -> int:
        """The bytes of a row."""
        return int(self.data.shape[1])

    def vectors(self, where: Where) -> Floats:
        """Decode the rows."""
        vectors: Floats = self.index.sa_decode(np.array(self.data[where], order="C"))
        return vectors

    def labels(self, where: Where) -> None:
        """Return None: rows are called by their place."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Rows of a FastScan index, whose codes are interleaved in blocks that only the index can take apart."""

    index: Any
    code: str
    lossy: bool = True
    ordered: bool = True

    @property
    def count(self) -> int:
        """The rows."""
        return int(self.index.ntotal)

    @property
    def width(self) -> int:
        """The bytes of a row."""
        return int(self.index.code_size)

    def vectors(self, where: Where) -> Floats:
        """Decode the rows; safe here, because this is no wrapper."""
        if isinstance(where, slice):
            block: Floats = self.index.reconstruct_n(where.start, where.stop - where.start)
            return block
        return self.index.reconstruct_batch(where) if len(where) else np.empty((0, self.index.d), np.float32)

    def labels(self, where: Where) -> None:
        """Return None: rows are called by their place."""


@dataclass(frozen=True, slots=True, eq=False)
class Lists:
    """Rows of an inverted file, list by list; their labels are the ids that were given when they were added."""

    index: Any
    lists: Any
    code: str
    lossy: bool
    starts: Ints = field(init=False)
    ordered: bool = False

    def __post_init__(self) -> None:
        sizes = [self.lists.list_size(i) for i in range(self.lists.nlist)]
        object.__setattr__(self, "starts", np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @property
    def count(self) -> int:
        """The rows that are in a list."""
        return int(self.starts[-1])

    @property
    def width(self) -> int:
        """The bytes of a row, its label included."""
        return int(self.index.code_size) + 8

    def _pieces(self, where: Where) -> Iterator[tuple[int, Where, Where]]:
        """Cut rows into those of one list each: (the list, rows in the list, places in the result)."""
        if isinstance(where, slice):
            first = int(np.searchsorted(self.starts, where.start, side="right")) - 1
            at = where.start
            while at < where.stop:
                low, high = int(self.starts[first]), int(self.starts[first + 1])
                end = min(high, where.stop)
                if end > at:
                    yield first, slice(at - low, end - low), slice(at - where.start, end - where.start)
                    at = end
                first += 1
        else:
            owner = np.searchsorted(self.starts, where, side="right") - 1
            order = np.argsort(owner, kind="stable")
            cuts = np.flatnonzero(np.diff(owner[order])) + 1
            for members in np.split(order, cuts) if len(order) else []:
                one = int(owner[members[0]])
                yield one, where[members] - self.starts[one], members

    def vectors(self, where: Where) -> Floats:
        """Decode the rows, a whole list or as much of it as is asked for at once."""
        out = np.empty((_length(where), self.index.d), np.float32)
        for one, inside, places in self._pieces(where):
            out[places] = self._decode(one, inside)
        return out

    def _decode(self, one: int, inside: Where) -> Floats:
        faiss = load_faiss()
        if isinstance(self.lists, faiss.BlockInvertedLists):
            return self._unpack(one)[inside]
        size, width = self.lists.list_size(one), int(self.index.code_size)
        codes = bytes_at(self.lists.get_codes(one), size * width).reshape(size, width)[inside]
        codes = np.array(codes, order="C")
        if self.code == "float32":
            return codes.view(np.float32)
        if isinstance(self.index, faiss.IndexIVFScalarQuantizer):
            # decode_vectors of FAISS 1.12 forgets the centroids
            return self._whole(one, self.index.sq.decode(codes))
        out = np.empty((len(codes), self.index.d), np.float32)
        owner = np.full(len(codes), one, np.int64)
        self.index.decode_vectors(len(codes), faiss.swig_ptr(codes), faiss.swig_ptr(owner), faiss.swig_ptr(out))
        return out

    def _unpack(self, one: int) -> Floats:
        """Take the interleaved codes of a FastScan list apart, and decode them."""
        faiss = load_faiss()
        packer, size = self.lists.packer, self.lists.list_size(one)
        blocks = -(-size // packer.nvec)
        packed = bytes_at(self.lists.get_codes(one), blocks * packer.block_size).reshape(blocks, packer.block_size)
        codes = np.empty((blocks, packer.nvec, packer.code_size), np.uint8)
        for block, out in zip(packed, codes, strict=True):
            packer.unpack_all(faiss.swig_ptr(block), faiss.swig_ptr(out))
        # reconstruct_from_offset crashes on an index that was read from a file, which has no fine_quantizer
        return self._whole(one, self.index.pq.decode(codes.reshape(-1, packer.code_size)[:size]))

    def _whole(self, one: int, decoded: Floats) -> Floats:
        """Add a list's centroid to decoded rows, where they are what is left without it."""
        if self.index.by_residual:
            decoded += load_faiss().downcast_index(self.index.quantizer).reconstruct(one)
        return decoded

    def labels(self, where: Where) -> Ints:
        """Return the ids that the lists hold."""
        out = np.empty(_length(where), np.int64)
        for one, inside, places in self._pieces(where):
            out[places] = bytes_at(self.lists.get_ids(one), 8 * self.lists.list_size(one)).view(np.int64)[inside]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Transformed:
    """Rows that went through a chain of transforms, which are undone from last to first."""

    inner: Rows
    chain: tuple[Any, ...]
    reverses: tuple[Callable[[Floats], Floats], ...]
    code: str
    lossy: bool

    @property
    def count(self) -> int:
        """The rows."""
        return self.inner.count

    @property
    def ordered(self) -> bool:
        """Whether rows come in the order they were added in."""
        return self.inner.ordered

    @property
    def width(self) -> int:
        """The bytes of a row."""
        return self.inner.width

    def vectors(self, where: Where) -> Floats:
        """Decode the rows and undo the transforms."""
        vectors = self.inner.vectors(where)
        for reverse in reversed(self.reverses):
            vectors = reverse(vectors)
        return vectors

    def labels(self, where: Where) -> Ints | None:
        """Return what the index inside calls the rows."""
        return self.inner.labels(where)


def reverse_of(transform: Any) -> Callable[[Floats], Floats]:
    """Return the function that undoes a transform; a row's bits don't depend on the rows around it.

    FAISS's own product gives a row other bits at another place among the rows. This one is rounded once, from float64.
    """
    faiss = load_faiss()
    if not isinstance(transform, faiss.LinearTransform):
        reverse: Callable[[Floats], Floats] = transform.reverse_transform
        return reverse
    matrix = faiss.vector_to_array(transform.A).reshape(transform.d_out, transform.d_in)
    bias = faiss.vector_to_array(transform.b) if transform.have_bias else np.zeros(transform.d_out, np.float32)

    def undo(x: Floats) -> Floats:
        out = np.empty((len(x), transform.d_in), np.float32)
        block = np.zeros((BLOCK, transform.d_out))
        with np.errstate(all="ignore"):  # what isn't finite is found by those who read the rows
            wide = matrix.astype(np.float64)
            for start in range(0, len(x), BLOCK):
                part = x[start : start + BLOCK]
                block[: len(part)] = part
                block[: len(part)] -= bias
                out[start : start + BLOCK] = (block @ wide)[: len(part)]
        return out

    return undo


def _length(where: Where) -> int:
    return where.stop - where.start if isinstance(where, slice) else len(where)
