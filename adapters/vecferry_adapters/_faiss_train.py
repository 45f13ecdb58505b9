"""Train an index on a seeded sample of staged rows, fill it with all of them, and write it: the same rows, the same
bytes. BLAS gives other bits on other numbers of threads, so whatever multiplies matrices runs on one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vecferry.batch import Floats
from vecferry.errors import DataError, UsageError
from vecferry_adapters._faiss_describe import describe
from vecferry_adapters._faiss_factory import Structure, chain_of, least_rows
from vecferry_adapters._faiss_file import Ints, load_faiss

CHUNK_BYTES = 64 << 20
SAMPLE_LEAST, SAMPLE_MOST = 1 << 16, 1 << 20
PER_CENTROID = 256
"""FAISS uses no more rows for each centroid than this."""
SEED = 1234


@dataclass(frozen=True, slots=True)
class Staged:
    """Read staged rows by their place: float32 vectors behind `offset` bytes of a file, ids of another, if any."""

    vectors: int
    offset: int
    ids: int | None
    count: int
    dim: int

    def rows(self, start: int, stop: int) -> Floats:
        """Read neighbouring rows."""
        out = np.empty((stop - start, self.dim), np.float32)
        _fill(self.vectors, out, self.offset + start * 4 * self.dim)
        return out

    def sample(self, most: int) -> Floats:
        """Read a seeded uniform sample of rows, in their order."""
        if most >= self.count:
            return self.rows(0, self.count)
        out = np.empty((most, self.dim), np.float32)
        places = np.sort(np.random.default_rng(SEED).choice(self.count, most, replace=False))
        for row, place in zip(out, places.tolist(), strict=True):
            _fill(self.vectors, row, self.offset + place * 4 * self.dim)
        return out

    def ids_of(self, start: int, stop: int) -> Ints:
        """Read neighbouring rows' ids."""
        out = np.empty(stop - start, np.int64)
        assert self.ids is not None
        _fill(self.ids, out, 8 * start)
        return out


def _fill(descriptor: int, out: Any, offset: int) -> None:
    view = memoryview(out).cast("B")
    while len(view):
        done = os.preadv(descriptor, [view], offset)
        if done == 0:
            raise DataError("the stage is shorter than its own record: delete it and start again")
        view, offset = view[done:], offset + done


def build(structure: Structure, staged: Staged, out: Path, *, threads: int) -> None:
    """Train, fill and write an index; raise UsageError for too few rows, DataError for rows that FAISS can't take."""
    faiss = load_faiss()
    index = structure.index
    least = least_rows(index)
    if staged.count < least:
        raise UsageError(f"{describe(index)} needs at least {least} rows to be trained, there are {staged.count}")
    with _threads(threads):
        try:
            if not index.is_trained:
                most = max(SAMPLE_LEAST, min(PER_CENTROID * least, max(SAMPLE_MOST, 39 * least)))
                _train(index, staged.sample(most), threads)
            step = staged.count if _takes_one_add(index) else max(1, CHUNK_BYTES // (4 * staged.dim))
            for start in range(0, staged.count, step or 1):
                stop = min(start + step, staged.count)
                ids = staged.ids_of(start, stop) if staged.ids is not None and structure.native_ids else None
                _add(index, staged.rows(start, stop), ids, threads)
        except RuntimeError as error:
            raise DataError(f"FAISS can't build {describe(index)}: {error}") from error
    with out.open("wb") as file:
        faiss.write_index(_outermost(structure, staged), faiss.PyCallbackIOWriter(file.write))
        file.flush()
        os.fsync(file.fileno())


def _train(index: Any, x: Floats, threads: int) -> None:
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        for transform in chain_of(index):
            with _threads(1):
                if not transform.is_trained:
                    transform.train(x)
                x = transform.apply(x)
        _train(index.index, x, threads)
        index.is_trained = True
    elif isinstance(index, faiss.IndexRefine):
        _train(index.base_index, x, threads)
        _train(index.refine_index, x, threads)
        index.is_trained = True
    elif not index.is_trained:
        index.train(x)


def _add(index: Any, x: Floats, ids: Ints | None, threads: int) -> None:
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        with _threads(1):
            for transform in chain_of(index):
                x = transform.apply(x)
        _add(index.index, x, ids, threads)
        index.ntotal = index.index.ntotal
    elif isinstance(index, faiss.IndexRefine):
        _add(index.base_index, x, ids, threads)
        _add(index.refine_index, x, ids, threads)
        index.ntotal = index.refine_index.ntotal
    elif ids is not None:
        index.add_with_ids(x, ids)
    else:
        index.add(x)


def _takes_one_add(index: Any) -> bool:
    """Say whether an index takes all rows at once or not at all: graphs that are made when they are added."""
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return _takes_one_add(index.index)
    if isinstance(index, faiss.IndexRefine):
        return _takes_one_add(index.base_index)
    return isinstance(index, (faiss.IndexNSG, faiss.IndexNNDescent))


def _outermost(structure: Structure, staged: Staged) -> Any:
    """Fill the id map around a filled index; at the end and at once, which spares its hash table."""
    faiss = load_faiss()
    if structure.has_map:
        faiss.copy_array_to_vector(staged.ids_of(0, staged.count), structure.whole.id_map)
        structure.whole.ntotal = staged.count
        structure.whole.is_trained = True
    return structure.whole


@contextmanager
def _threads(count: int) -> Iterator[None]:
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
