"""Numbers at full size: a store's own search judged by one pass over vectors that don't fit in memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from vecferry.batch import Floats
from vecferry.errors import UnsupportedError
from vecferry.linear import normalize
from vecferry.recall import Metric, Places, TopK, Values, paired_scores, require_k, share_right, topk
from vecferry.store import Reader

BATCH = 8192


def search(reader: Reader, queries: Floats, k: int, metric: Metric, among: pa.Array | None = None) -> Places:
    """Search a store through its own index, which holds unit vectors where the metric is cosine.

    Raises UnsupportedError for a store without an index, or whose index can't search `among` some ids.
    """
    asked = np.array(queries, np.float32)
    if metric == "cosine":
        normalize(asked)
    places, _ = reader.search(asked, k, among)
    return places.astype(np.int64)


def search_or_scan(reader: Reader, queries: Floats, k: int, metric: Metric) -> tuple[Places, bool]:
    """Return the places of a store's own search and True; of an exact scan and False where it has no index."""
    try:
        return search(reader, queries, k, metric), True
    except UnsupportedError:
        return topk(queries, (batch.vectors for batch in reader.read(BATCH)), k, metric)[0], False


def ids_at(reader: Reader, places: Places) -> pa.Array:
    """Return the ids at these places of the reading order `[m]`, in ascending order of distinct places."""
    pieces, seen = [], 0
    for piece in reader.ids(1 << 18):
        inside = places[np.searchsorted(places, seen) : np.searchsorted(places, seen + len(piece))]
        pieces.append(piece.take(pa.array(inside - seen)))
        seen += len(piece)
    return pa.concat_arrays(pieces)


def judge(blocks: Iterable[Floats], queries: Floats, found: Places, k: int, metric: Metric) -> tuple[TopK, Values]:
    """Return the exact k nearest of all blocks, and the scores `[q, m]` of `found` there, slack included.

    `found` are positions in the order in which documents come; -1 scores -inf. Held in memory are one block and
    the vectors found.
    """
    exact = TopK(queries, k, metric)
    scores = np.full(found.shape, -np.inf)
    for block in blocks:
        rows, columns = np.nonzero((found >= exact.seen) & (found < exact.seen + len(block)))
        documents = block[found[rows, columns] - exact.seen]
        scores[rows, columns] = np.sum(paired_scores(queries[rows], documents, metric), axis=0)
        exact.update(block)
    require_k(k, exact.seen)
    return exact, scores


def index_overlap(reader: Reader, queries: Floats, ks: tuple[int, ...], metric: Metric) -> dict[int, Values]:
    """Return index overlap@k `[q]` for each k: how much of exact search the store's own index finds.

    Both search the vectors as the store gives them back, all of them: what approximate search loses is in the
    number, what codes lost before isn't. Raises UnsupportedError for a store without an index.
    """
    found = search(reader, queries, max(ks), metric)
    exact, scores = judge((b.vectors for b in reader.read(BATCH)), queries, found, max(ks), metric)
    return {k: share_right(scores, exact.scores, k) for k in ks}
