"""What must be true of an HNSW graph for a walk over it to stay within it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecferry_adapters._faiss_file import bytes_at

Fact = tuple[str, int, int]
"""(what it is, how much it is, how much it must be)."""
Int32s = NDArray[np.int32]

WIDE = 1 << 24
"""The largest efSearch; FAISS allocates memory for as many nodes."""
LINKS = 1 << 22
NODES = 1 << 16


def graph_facts(index: Any) -> Iterator[Fact]:
    """State what keeps a search of an HNSW index within its arrays; each is looked at if those before hold."""
    hnsw, rows = index.hnsw, int(index.ntotal)
    levels = _view(hnsw.levels, np.int32)
    starts = _view(hnsw.offsets, np.uint64)
    ends = _view(hnsw.cum_nneighbor_per_level, np.int32)  # of each level's links, from where a node's links start
    links = _view(hnsw.neighbors, np.int32)
    yield "nodes to keep in mind in a search, fewer than one or absurdly many", int(not 1 <= hnsw.efSearch <= WIDE), 0
    yield "the number of levels of nodes", len(levels), rows
    yield "the number of starts of links", len(starts), rows + 1
    if not rows:
        return
    yield "nodes of an impossible level", int(((levels < 1) | (levels >= len(ends))).sum()), 0
    yield "levels of fewer links than none", int((np.diff(ends) < 0).sum() + (ends[0] != 0)), 0
    yield "the end of the links", int(starts[-1]), len(links)
    wrong = sum(
        int((starts[i + 1 : i + 1 + len(part)] - starts[i : i + len(part)] != ends[part].astype(np.uint64)).sum())
        for i, part in _blocks(levels, LINKS)
    )
    yield "nodes whose links end elsewhere than the next node's begin", wrong, 0
    wrong = sum(int(((part < -1) | (part >= rows)).sum()) for _, part in _blocks(links, LINKS))
    yield "links to nodes that don't exist", wrong, 0
    yield "whether the entry point is no node", int(not 0 <= hnsw.entry_point < rows), 0
    yield "levels above the entry point's", max(0, hnsw.max_level + 1 - int(levels[hnsw.entry_point])), 0
    for level in range(1, int(levels.max())):
        yield f"links to nodes that aren't in level {level}", _too_high(level, levels, starts, ends, links), 0


def _too_high(level: int, levels: Int32s, starts: NDArray[np.uint64], ends: Int32s, links: Int32s) -> int:
    """Count the links in a level to nodes that aren't in it: such a node has no links there to go on with."""
    nodes = np.flatnonzero(levels > level)
    wrong = 0
    for _, some in _blocks(nodes, NODES):
        at = starts[some].astype(np.int64)[:, None] + np.arange(ends[level], ends[level + 1])
        to = links[at]
        wrong += int(((to >= 0) & (levels[to] <= level)).sum())
    return wrong


def _view(vector: Any, dtype: type[Any]) -> NDArray[Any]:
    return bytes_at(vector.data(), vector.size() * np.dtype(dtype).itemsize).view(dtype)


def _blocks(values: NDArray[Any], size: int) -> Iterator[tuple[int, NDArray[Any]]]:
    return ((i, values[i : i + size]) for i in range(0, len(values), size))
