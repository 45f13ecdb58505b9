"""Search a FAISS index among all of its rows or among some, whatever its types allow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecferry.batch import Floats
from vecferry.errors import UnsupportedError
from vecferry_adapters._faiss_file import Ints, OpenIndex, load_faiss
from vecferry_adapters._faiss_rows import Flat, Rows, Transformed
from vecferry_adapters._faiss_walk import rows_of

Found = tuple[NDArray[np.int64], Floats]
"""(labels or places, scores), both `[q, k]`: larger scores are nearer, -1 where fewer than k were found."""

BLOCK_BYTES = 16 << 20
EF_MOST = 1 << 14
"""HNSW visits about efSearch nodes whatever is asked for; to find k of m rows among n it must visit n / m times as
many. Beyond EF_MOST that would be slower than reading every row."""


def search(opened: OpenIndex, rows: Rows, queries: Floats, k: int) -> Found:
    """Return the labels that the index's own search gives, with its own parameters.

    Raises UnsupportedError where FAISS refuses to search it.
    """
    queries = np.ascontiguousarray(queries, np.float32)
    if isinstance(rows, Flat) and isinstance(opened.index, load_faiss().IndexFlat):
        return _scan(opened, rows, queries, k)
    try:
        distances, labels = opened.index.search(queries, k)
    except (RuntimeError, MemoryError) as error:
        where, name = opened.path or "in memory", type(opened.index).__name__
        reason = str(error).split("Error: ")[-1]
        raise UnsupportedError(f"{where}: FAISS can't search this {name} as it is: {reason}") from error
    return labels, _scores(opened.index, distances, labels)


def search_among(opened: OpenIndex, rows: Rows, queries: Floats, k: int, places: Ints) -> Found:
    """Return, as positions in `places`, what the index's own search finds among the rows at these places.

    Raises UnsupportedError for a type that can't be told which rows to search.
    """
    queries = np.ascontiguousarray(queries, np.float32)
    labels = rows.labels(places)
    labels = places if labels is None else labels
    try:
        found, scores = _among(opened.index, rows, queries, k, labels)
    except (RuntimeError, MemoryError) as error:
        where, name = opened.path or "in memory", type(opened.index).__name__
        raise UnsupportedError(f"{where}: an {name} can't be searched among chosen rows: {error}") from error
    order = np.argsort(labels, kind="stable")
    at = np.minimum(np.searchsorted(labels[order], found), len(labels) - 1)
    return np.where(np.isneginf(scores), -1, order[at]), scores


def _scores(index: Any, distances: Floats, labels: Ints) -> Floats:
    faiss = load_faiss()
    scores = distances if index.metric_type == faiss.METRIC_INNER_PRODUCT else -distances
    return np.where(labels == -1, np.float32(-np.inf), scores)


def _exact(index: Any, vectors: Floats, queries: Floats, k: int) -> Found:
    faiss = load_faiss()
    distances, labels = faiss.knn(queries, vectors, k, metric=index.metric_type)
    return labels, _scores(index, distances, labels)


def _scan(opened: OpenIndex, rows: Flat, queries: Floats, k: int) -> Found:
    """Search a flat index block by block, so that it never has to be in memory whole."""
    best = np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), -np.inf, np.float32)
    step = max(1, BLOCK_BYTES // rows.width)
    for start in range(0, rows.count, step):
        stop = min(start + step, rows.count)
        labels, scores = _exact(opened.index, rows.vectors(slice(start, stop)), queries, k)
        best = merge([best, (np.where(labels == -1, -1, labels + start), scores)], k)
        opened.release()
    return best


def merge(parts: list[Found], k: int) -> Found:
    """Join what was found in several places; of equal scores the earlier part's comes first."""
    labels = np.concatenate([labels for labels, _ in parts], axis=1)
    scores = np.concatenate([scores for _, scores in parts], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(labels, order, axis=1), np.take_along_axis(scores, order, axis=1)


def _among(index: Any, rows: Rows, queries: Floats, k: int, labels: Ints) -> Found:
    """Search among the rows with these labels; return labels."""
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        assert isinstance(rows, Transformed)
        for transform in rows.chain:
            queries = transform.apply(queries)
        return _among(index.index, rows.inner, queries, k, labels)
    if isinstance(index, faiss.IndexRefine):
        wide = min(len(labels), max(k, math.ceil(k * index.k_factor)))
        base = rows_of(index.base_index, "the base index")
        return _refined(index, rows, queries, k, _among(index.base_index, base, queries, wide, labels)[0])
    by_bits = (faiss.IndexLSH, faiss.IndexRaBitQ)  # whose distances aren't those of decoded rows
    if isinstance(index, (faiss.IndexFlatCodes, faiss.IndexFastScan)) and not isinstance(index, by_bits):
        places, scores = _exact(index, rows.vectors(labels), queries, k)
        return np.where(places == -1, -1, labels[places]), scores
    selector = faiss.IDSelectorBatch(labels)
    inside = index
    while isinstance(inside, faiss.IndexIDMap):  # which translates a selector
        inside = faiss.downcast_index(inside.index)
    if isinstance(inside, faiss.IndexIVF):
        parameters = faiss.SearchParametersIVF(sel=selector, nprobe=inside.nprobe)
    elif isinstance(inside, faiss.IndexHNSW):
        own, share = inside.hnsw.efSearch, inside.ntotal / max(1, len(labels))
        wider = min(math.ceil(own * share), EF_MOST, inside.ntotal)
        parameters = faiss.SearchParametersHNSW(sel=selector, efSearch=max(own, wider))
    else:
        parameters = faiss.SearchParameters(sel=selector)
    distances, found = index.search(queries, k, params=parameters)
    return found, _scores(index, distances, found)


def _refined(index: Any, rows: Rows, queries: Floats, k: int, candidates: Ints) -> Found:
    """Rank each query's candidates `[q, c]` by their refined vectors, as IndexRefine does."""
    labels = np.full((len(queries), k), -1, np.int64)
    scores = np.full((len(queries), k), -np.inf, np.float32)
    for query, chosen, out, values in zip(queries, candidates, labels, scores, strict=True):
        chosen = chosen[chosen != -1]
        if len(chosen):
            places, found = _exact(index, rows.vectors(chosen), query[None], k)
            out[:] = np.where(places[0] == -1, -1, chosen[places[0]])
            values[:] = found[0]
    return labels, scores
