"""Walk the structure of a FAISS index down to where its rows are.

`reconstruct_n` on a wrapper aborts the process or returns uninitialised memory, so it is never called on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vecferry.batch import Floats
from vecferry.errors import UnsupportedError
from vecferry_adapters._faiss_check import check
from vecferry_adapters._faiss_describe import code_name, describe
from vecferry_adapters._faiss_file import bytes_at, load_faiss, unreadable_type
from vecferry_adapters._faiss_nested import Joined, Named
from vecferry_adapters._faiss_rows import Coded, Flat, Lists, Packed, Rows, Transformed, reverse_of


def walk(index: Any, where: str) -> Rows:
    """Check an index and find its rows; raise UnsupportedError for a type whose rows can't be read, naming it.

    Raises DataError where the index contradicts itself.
    """
    check(index, where)
    return rows_of(index, where)


def rows_of(index: Any, where: str) -> Rows:
    """Find the rows of an index, or of one inside it, that was checked."""
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    name = type(index).__name__
    if isinstance(index, faiss.IndexPreTransform):
        return _transformed(faiss, index, where)
    if isinstance(index, faiss.IndexRefine):
        return rows_of(index.refine_index, where)
    if isinstance(index, faiss.IndexIDMap):
        return Named(rows_of(index.index, where), bytes_at(index.id_map.data(), 8 * index.id_map.size()).view(np.int64))
    if isinstance(index, faiss.IndexShards):
        shards = tuple(rows_of(index.at(i), where) for i in range(index.count()))
        return Joined(shards, index.successive_ids)
    if isinstance(index, faiss.IndexReplicas):
        return rows_of(index.at(0), where)
    unlike = (faiss.IndexIVFFlatDedup, faiss.IndexIVFSpectralHash)
    if "Panorama" in name or isinstance(index, unlike):
        pass  # their rows are stored in other ways than those of the types they derive from
    elif isinstance(index, (faiss.IndexHNSW, faiss.IndexNSG, faiss.IndexNNDescent)):
        return rows_of(index.storage, where)
    elif isinstance(index, faiss.IndexFlatCodes):
        codes = bytes_at(index.codes.data(), int(index.codes.size())).reshape(index.ntotal, index.code_size)
        if isinstance(index, faiss.IndexFlat):
            return Flat(codes.view(np.float32), index)
        return Coded(codes, index, code_name(index))
    elif isinstance(index, faiss.IndexFastScan):
        return Packed(index, code_name(index))
    elif isinstance(index, faiss.IndexIVF):
        lists = faiss.downcast_InvertedLists(index.invlists)
        plain = isinstance(lists, (faiss.ArrayInvertedLists, faiss.OnDiskInvertedLists))
        if plain or isinstance(index, faiss.IndexIVFPQFastScan):
            flat = isinstance(index, faiss.IndexIVFFlat)
            return Lists(index, lists, "float32" if flat else code_name(index), not flat)
        name = f"{name} with {type(lists).__name__}"
    raise unreadable_type(where, name)


def _transformed(faiss: Any, index: Any, where: str) -> Transformed:
    chain = tuple(faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size()))
    lossy, reverses = False, []
    for transform in chain:
        name = type(transform).__name__
        lossy |= transform.d_out < transform.d_in or isinstance(transform, faiss.NormalizationTransform)
        reverse = reverse_of(transform)
        if not _can_undo(transform, reverse):
            raise UnsupportedError(
                f"{where} went through an {name}, which can't be undone: start from the vectors that it was made of"
            )
        reverses.append(reverse)
    inner = rows_of(index.index, where)
    # floats behind a transform that loses something are a code too: no float of the right size gives the row back
    code = describe(index) if lossy and inner.code.startswith("float") else inner.code
    return Transformed(inner, chain, tuple(reverses), code, lossy or inner.lossy)


def _can_undo(transform: Any, reverse: Callable[[Floats], Floats]) -> bool:
    """Say whether the reverse of a transform is one; that of whitening, which is no rotation, isn't."""
    if isinstance(transform, load_faiss().ITQTransform):
        return False
    narrow = min(transform.d_in, transform.d_out)
    x = np.random.default_rng(0).standard_normal((4, narrow)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    try:
        if transform.d_out == narrow:
            again = transform.apply(reverse(x))
        else:
            again = reverse(transform.apply(x))
    except RuntimeError:
        return False
    return bool(np.allclose(again, x, atol=1e-3))
