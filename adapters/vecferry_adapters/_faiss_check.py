"""Check that the numbers in an index agree, before FAISS computes addresses with them: it doesn't, and would crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vecferry.errors import DataError
from vecferry_adapters._faiss_file import load_faiss

Fact = tuple[str, int, int]
"""(what it is, how much it is, how much it must be)."""


def check(index: Any, where: str) -> None:
    """Raise DataError where an index, or a part that it uses to read rows, contradicts itself or was never trained."""
    if not index.is_trained and not index.ntotal:
        raise DataError(f"{where} holds an index that was never trained, and no rows: train it and add rows first")
    for name, found, expected in _facts(index):
        if found != expected:
            raise DataError(f"{where} is damaged: {name} is {found}, {expected} would fit the rest of it")


def _facts(index: Any) -> Iterator[Fact]:
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        d = index.d
        for i in range(index.chain.size()):
            transform = faiss.downcast_VectorTransform(index.chain.at(i))
            yield f"the input dimension of {type(transform).__name__}", transform.d_in, d
            d = transform.d_out
            yield from _transform(faiss, transform)
        yield from _within(index.index, d, index.ntotal)
    elif isinstance(index, faiss.IndexRefine):
        yield from _within(index.base_index, index.d, index.ntotal)
        yield from _within(index.refine_index, index.d, index.ntotal)
    elif isinstance(index, (faiss.IndexHNSW, faiss.IndexNSG, faiss.IndexNNDescent)):
        yield from _within(index.storage, index.d, index.ntotal)
    elif isinstance(index, faiss.IndexIVF):
        quantizer = faiss.downcast_index(index.quantizer)
        yield from _within(quantizer, index.d, index.nlist)
        yield "the number of inverted lists", index.invlists.nlist, index.nlist
        if isinstance(index, faiss.IndexIVFFlat):
            yield "the bytes of a vector", index.code_size, 4 * index.d
        yield from _codec(faiss, index)
    elif isinstance(index, faiss.IndexFlatCodes):
        yield "the bytes of all codes", index.codes.size(), index.ntotal * index.code_size
        if isinstance(index, faiss.IndexFlat):
            yield "the bytes of a vector", index.code_size, 4 * index.d
        yield from _codec(faiss, index)
    elif isinstance(index, faiss.IndexFastScan):
        rows = -(-index.ntotal // index.bbs) * index.bbs if index.bbs else -1
        yield "the rows that codes are padded to", index.ntotal2, rows
        yield "the bytes of all codes", index.codes.size(), rows * index.M2 // 2
        yield from _codec(faiss, index)


def _within(index: Any, d: int, rows: int) -> Iterator[Fact]:
    """State what an inner index must have, and what must be true inside it."""
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    yield f"the dimension of {type(index).__name__}", index.d, d
    yield f"the number of rows of {type(index).__name__}", index.ntotal, rows
    yield from _facts(index)


def _transform(faiss: Any, transform: Any) -> Iterator[Fact]:
    if isinstance(transform, faiss.LinearTransform):
        yield "the size of a matrix", transform.A.size(), transform.d_in * transform.d_out
        if transform.have_bias:
            yield "the size of a bias", transform.b.size(), transform.d_out
    elif isinstance(transform, faiss.RemapDimensionsTransform):
        yield "the size of a remapping", transform.map.size(), transform.d_out
    elif isinstance(transform, faiss.CenteringTransform):
        yield "the size of a mean", transform.mean.size(), transform.d_in


def _codec(faiss: Any, index: Any) -> Iterator[Fact]:
    """State what must be true of the codebooks behind an index's codes."""
    if (pq := getattr(index, "pq", None)) is not None:
        yield "the dimension of the product quantizer", pq.d, index.d
        yield "the parts of the product quantizer times their size", pq.M * pq.dsub, index.d
        yield "the size of the product quantizer's centroids", pq.centroids.size(), pq.d * pq.ksub
        if isinstance(index, (faiss.IndexFastScan, faiss.IndexIVFPQFastScan)):
            yield "the parts of the FastScan code", index.M, pq.M
            yield "the bits of the FastScan code", pq.nbits, 4
            yield "the padded parts of the FastScan code", index.M2, -(-pq.M // 2) * 2
            yield "the centroids of the FastScan code", index.ksub, pq.ksub
        else:
            yield "the bytes of a code", index.code_size, pq.code_size
        yield "the bytes of a code", pq.code_size, (pq.M * pq.nbits + 7) // 8
    if isinstance(sq := getattr(index, "sq", None), faiss.ScalarQuantizer):
        yield "the dimension of the scalar quantizer", sq.d, index.d
        yield "the bytes of a code", index.code_size, sq.code_size
        each = {faiss.ScalarQuantizer.QT_8bit: 8, faiss.ScalarQuantizer.QT_6bit: 6, faiss.ScalarQuantizer.QT_4bit: 4}
        if (bits := each.get(sq.qtype)) is not None:
            yield "the bytes of a code", sq.code_size, (index.d * bits + 7) // 8
            if index.is_trained:
                yield "the ranges of the scalar quantizer", sq.trained.size(), 2 * index.d
        elif sq.qtype in (faiss.ScalarQuantizer.QT_fp16, faiss.ScalarQuantizer.QT_bf16):
            yield "the bytes of a code", sq.code_size, 2 * index.d
    if (aq := getattr(index, "rq", None) or getattr(index, "lsq", None)) is not None:
        yield "the dimension of the additive quantizer", aq.d, index.d
        yield "the bytes of a code", index.code_size, aq.code_size
    if (bits := getattr(index, "rabitq", None)) is not None:
        yield "the dimension of RaBitQ", bits.d, index.d
