"""Search FAISS indexes with other parameters for a while, and count the distances that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vecferry_adapters._faiss_describe import tuned
from vecferry_adapters._faiss_file import load_faiss


def limits(indexes: Sequence[Any]) -> dict[str, int]:
    """Return the search parameters of indexes, each with the largest value that makes a difference."""
    found: dict[str, int] = {}
    for index in indexes:
        for owner, name in tuned(index):
            if name == "nprobe":
                found[name] = max(found.get(name, 1), int(owner.nlist))
            elif name == "efSearch":
                found[name] = max(found.get(name, 1), int(index.ntotal))
    return found


@contextmanager
def searching_with(indexes: Sequence[Any], parameters: Mapping[str, int]) -> Iterator[None]:
    """Give the indexes other search parameters for the length of a block."""
    before: list[tuple[Any, str, int]] = []
    try:
        for index in indexes:
            for owner, name in tuned(index):
                if name in parameters:
                    before.append((owner, name, int(getattr(owner, name))))
                    setattr(owner, name, parameters[name])
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def distances() -> int:
    """Return how many distances to rows this process has computed in inverted files and graphs so far."""
    counters = load_faiss().cvar
    return int(counters.indexIVF_stats.ndis) + int(counters.hnsw_stats.ndis)


def centroids(indexes: Sequence[Any]) -> int:
    """Return how many centroids each query is compared with, where that is not counted among the distances."""
    faiss = load_faiss()
    owners = [owner for index in indexes for owner, name in tuned(index) if name == "nprobe"]
    return sum(int(o.nlist) for o in owners if isinstance(faiss.downcast_index(o.quantizer), faiss.IndexFlatCodes))
