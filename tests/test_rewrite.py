"""The streaming loop's own parts: running ahead, marking bad rows, counting, finding duplicates."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecferry.batch import VectorBatch
from vecferry.errors import BadRowsError
from vecferry.rewrite import Tally, ahead, duplicates, sound
from vecferry.store import StoreInfo


class Rows:
    """A reader over arrays in memory, complete enough for the loop."""

    def __init__(self, ids: pa.Array, vectors: np.ndarray, *, numbered: bool = False) -> None:
        self.rows, self.vectors = ids, np.ascontiguousarray(vectors, dtype=np.float32)
        kind = None if numbered else ids.type
        self.info = StoreInfo("memory", "memory", len(ids), vectors.shape[1], id_type=kind)

    def read(self, batch_size: int, after: int | None = None) -> Iterator[VectorBatch]:
        for start in range(after or 0, len(self.rows), batch_size):
            stop = min(start + batch_size, len(self.rows))
            yield VectorBatch(self.rows.slice(start, stop - start), self.vectors[start:stop], cursor=stop)

    def ids(self, batch_size: int) -> Iterator[pa.Array]:
        for start in range(0, len(self.rows), batch_size):
            yield self.rows.slice(start, batch_size)


def test_ahead_passes_everything_in_order() -> None:
    assert list(ahead(iter(range(1000)))) == list(range(1000))


def test_ahead_hands_over_the_error_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise BadRowsError("store", "bad rows", [7], "Mend them.")

    stream = ahead(items())
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(BadRowsError, match="7"):
        next(stream)


def test_ahead_stops_its_thread_when_the_consumer_stops() -> None:
    produced = []

    def items() -> Iterator[int]:
        try:
            for i in range(10**9):
                produced.append(i)
                yield i
        finally:
            produced.append("closed")

    before = threading.active_count()
    stream = ahead(items(), depth=2)
    assert next(stream) == 0
    stream.close()
    assert produced[-1] == "closed"
    assert len(produced) < 10
    assert threading.active_count() == before


def test_ahead_overlaps_producer_and_consumer() -> None:
    entered = threading.Event()

    def items() -> Iterator[int]:
        yield 0
        entered.set()
        yield 1

    stream = ahead(items())
    next(stream)
    assert entered.wait(5)  # the second item is made while the first is still in use
    stream.close()


def test_bad_rows_are_named_and_stop_the_stream() -> None:
    x = np.ones((10, 4), np.float32)
    x[3, 1], x[7] = np.nan, 0
    reader = Rows(pa.array([f"d{i}" for i in range(10)]), x)
    stream = sound(reader, 4, Tally(), skip=False, drop=np.empty(0, np.int64))
    with pytest.raises(BadRowsError, match=r"1 bad rows .* in rows 0 to 3: d3"):
        next(stream)


@given(st.integers(1, 12), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
@pytest.mark.case("28", "29")
def test_skipping_reconciles_for_every_batch_size(batch_size: int, bad: set[int], drop: set[int]) -> None:
    x = np.ones((12, 3), np.float32)
    x[list(bad), 0] = np.inf
    reader = Rows(pa.array(range(100, 112)), x)
    tally = Tally()
    dropped = np.array(sorted(drop), np.int64)
    batches = list(sound(reader, batch_size, tally, skip=True, drop=dropped))
    kept = [i for b in batches for i in b.ids.to_pylist()]
    assert kept == [100 + i for i in range(12) if i not in bad | drop]
    assert tally.read == 12 == tally.written + tally.skipped
    assert tally.written == len(kept)
    # a run resumed at any batch's cursor yields the rest, and counts as if it had never stopped
    for n, batch in enumerate(batches):
        again = Tally.from_cursor(batch.cursor)
        rest = list(sound(reader, 5, again, skip=True, drop=dropped))
        assert [i for b in rest for i in b.ids.to_pylist()] == [i for b in batches[n + 1 :] for i in b.ids.to_pylist()]
        assert (again.digest, again.skipped, again.skipped_ids) == (tally.digest, tally.skipped, tally.skipped_ids)


@pytest.mark.case("30")
def test_duplicates_are_found_with_the_rows_that_lose() -> None:
    ids = ["a", "b", "a", "c", "b", "a", ""]
    names, earlier = duplicates(Rows(pa.array(ids), np.ones((7, 2))), batch_size=2)
    assert sorted(names) == ["a", "b"]
    assert earlier.tolist() == [0, 1, 2]
    names, earlier = duplicates(Rows(pa.array([5, 2**40, -1, 7]), np.ones((4, 2))))
    assert (names, len(earlier)) == ([], 0)
    assert duplicates(Rows(pa.array([0, 1]), np.ones((2, 2)), numbered=True))[0] == []


def test_the_loop_runs_in_bounded_memory_ahead_of_a_slow_consumer() -> None:
    alive = [0, 0]

    def items() -> Iterator[int]:
        for i in range(50):
            alive[0] += 1
            alive[1] = max(alive)
            yield i

    for _ in ahead(items(), depth=2):
        time.sleep(0.001)
        alive[0] -= 1
    assert alive[1] <= 5
