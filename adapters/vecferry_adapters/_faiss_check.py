"""Check that the numbers in an index agree, before FAISS computes addresses with them: it doesn't, and would crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vecferry.errors import DataError
from vecferry_adapters._faiss_file import bytes_at, load_faiss
from vecferry_adapters._faiss_graph import Fact, graph_facts

MOST = 1000
"""Times as many rows as are asked for that a refined search may look at; FAISS allocates memory for all."""


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
    if "Panorama" in type(index).__name__:
        pass  # it stores its rows otherwise than the type it derives from, and they aren't read
    elif isinstance(index, faiss.IndexPreTransform):
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
        yield "labels that are no rows", labels_outside(index.base_index, index.ntotal), 0
        yield "factors of refinement below 1 or absurd", int(not 1 <= index.k_factor <= MOST), 0
    elif isinstance(index, faiss.IndexIDMap):
        yield from _within(index.index, index.d, index.ntotal)
        yield "the number of ids", index.id_map.size(), index.ntotal
        yield "labels that are no rows", labels_outside(index.index, index.ntotal), 0
    elif isinstance(index, faiss.IndexHNSW):
        yield from _within(index.storage, index.d, index.ntotal)
        yield from graph_facts(index)
    elif isinstance(index, (faiss.IndexNSG, faiss.IndexNNDescent)):
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
    elif type(index).__name__ == "IndexRaBitQFastScan":  # which FAISS has had since 1.13
        pass  # its codes hold more than the bits; a process of its own has read such a file before
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


def _width(aq: Any) -> int:
    """Return the dimensions of an entry of an additive quantizer's codebooks."""
    return int(aq.d) // max(1, int(getattr(aq, "nsplits", 1)))


def labels_outside(index: Any, rows: int) -> int:
    """Count labels in inverted lists that aren't numbers of rows, though what is around the index takes them for such.

    A search would compute addresses from them. FAISS itself makes them where rows are deleted through an id map: the
    map moves up, the labels in the lists don't.
    """
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return labels_outside(index.index, rows)
    if not isinstance(index, faiss.IndexIVF):
        return 0
    lists, wrong = faiss.downcast_InvertedLists(index.invlists), 0
    for number in range(lists.nlist):
        labels = bytes_at(lists.get_ids(number), 8 * lists.list_size(number)).view(np.int64)
        if len(labels) and not (labels.min() >= 0 and labels.max() < rows):
            wrong += int(((labels < 0) | (labels >= rows)).sum())
    return wrong


def _transform(faiss: Any, transform: Any) -> Iterator[Fact]:
    if isinstance(transform, faiss.LinearTransform):
        yield "the size of a matrix", transform.A.size(), transform.d_in * transform.d_out
        if transform.have_bias:
            yield "the size of a bias", transform.b.size(), transform.d_out
    elif isinstance(transform, faiss.RemapDimensionsTransform):
        yield "the size of a remapping", transform.map.size(), transform.d_out
        to = bytes_at(transform.map.data(), 4 * transform.map.size()).view(np.int32)
        yield "remapped dimensions that don't exist", int(((to < -1) | (to >= transform.d_in)).sum()), 0
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
        elif isinstance(index, faiss.Index2Layer):
            yield "the bytes of a code", index.code_size, index.code_size_1 + index.code_size_2
            yield "the bytes of the second part of a code", index.code_size_2, pq.code_size
            yield from _within(index.q1.quantizer, index.d, index.q1.nlist)
        else:
            yield "the bytes of a code", index.code_size, pq.code_size
        yield "the bytes of a code", pq.code_size, (pq.M * pq.nbits + 7) // 8
    if isinstance(sq := getattr(index, "sq", None), faiss.ScalarQuantizer):
        yield "the dimension of the scalar quantizer", sq.d, index.d
        if "EDEN" not in type(index).__name__:  # whose codes have factors behind them
            yield "the bytes of a code", index.code_size, sq.code_size
        each = {faiss.ScalarQuantizer.QT_8bit: 8, faiss.ScalarQuantizer.QT_6bit: 6, faiss.ScalarQuantizer.QT_4bit: 4}
        if (bits := each.get(sq.qtype)) is not None:
            yield "the bytes of a code", sq.code_size, (index.d * bits + 7) // 8
            if index.is_trained:
                yield "the ranges of the scalar quantizer", sq.trained.size(), 2 * index.d
        elif sq.qtype in (faiss.ScalarQuantizer.QT_fp16, faiss.ScalarQuantizer.QT_bf16):
            yield "the bytes of a code", sq.code_size, 2 * index.d
    for name in ("rq", "lsq", "prq", "plsq"):
        if (aq := getattr(index, name, None)) is not None:
            yield "the dimension of the additive quantizer", aq.d, index.d
            # each part of a product has codebooks of its own dimensions only
            yield "the size of its codebooks", aq.codebooks.size(), _width(aq) * aq.total_codebook_size
            if not isinstance(index, faiss.IndexFastScan):
                yield "the bytes of a code", index.code_size, aq.code_size
    if isinstance(index, faiss.IndexLSH):
        yield "the bytes of a code", index.code_size, (index.nbits + 7) // 8
        if index.train_thresholds and index.is_trained:
            yield "the number of thresholds", index.thresholds.size(), index.nbits
        if index.rotate_data:
            yield "the input dimension of a rotation", index.rrot.d_in, index.d
            yield "the output dimension of a rotation", index.rrot.d_out, index.nbits
            yield from _transform(faiss, index.rrot)
    if (bits := getattr(index, "rabitq", None)) is not None:
        yield "the dimension of RaBitQ", bits.d, index.d
