"""The one streaming loop: read, check, translate, write, each overlapping the others, in bounded memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.batch import IdDigest, VectorBatch, faulty, id_keys
from vecferry.encoded import TrueRows
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.kernel import Kernel
from vecferry.store import Reader, Writer

T = TypeVar("T")
NOTHING: NDArray[np.int64] = np.empty(0, np.int64)
SHOWN = 20
"""Ids of skipped rows that a report names; the others are counted."""


@dataclass(slots=True)
class Tally:
    """Count what the loop has done; travels with every batch as its cursor, so that a resumed run goes on counting."""

    source: Any = None
    stamp: str = ""
    read: int = 0
    skipped: int = 0
    skipped_ids: list[Any] = field(default_factory=list)
    digest: IdDigest = field(default_factory=IdDigest)

    @property
    def written(self) -> int:
        """The rows that went on to the writer."""
        return self.digest.count

    def to_cursor(self) -> dict[str, Any]:
        """Return the JSON value that `from_cursor` continues from."""
        d = self.digest
        ids = [i.hex() if isinstance(i, bytes) else i for i in self.skipped_ids]
        counts = {"source": self.source, "stamp": self.stamp, "read": self.read, "skipped": self.skipped}
        return counts | {"skipped_ids": ids, "digest": [d.count, d.ordered, d.unordered]}

    @classmethod
    def from_cursor(cls, cursor: Any) -> Tally:
        """Return the tally at a cursor, or an empty one for None."""
        if cursor is None:
            return cls()
        return cls(**(cursor | {"digest": IdDigest(*cursor["digest"]), "skipped_ids": list(cursor["skipped_ids"])}))


def sound(
    reader: Reader, batch_size: int, tally: Tally, *, skip: bool, drop: NDArray[np.int64]
) -> Iterator[VectorBatch]:
    """Yield the source's batches behind `tally`, without the rows at positions `drop` and without bad rows.

    Each batch's cursor is the tally at its end. Raises BadRowsError at the first batch with bad rows unless `skip`.
    """
    for batch in reader.read(batch_size, after=tally.source):
        bad = faulty(batch.vectors)
        if bad.any() and not skip:
            ids = batch.ids.filter(pa.array(bad)).to_pylist()
            raise BadRowsError(
                reader.info.uri,
                f"bad rows (NaN, infinite, zero or malformed) in rows {tally.read} to {tally.read + len(batch) - 1}",
                ids,
                "Mend them, or leave them out with --bad-rows skip; `vecferry inspect --scan` finds them all.",
            )
        inside = drop[np.searchsorted(drop, tally.read) : np.searchsorted(drop, tally.read + len(batch))]
        bad[inside - tally.read] = True
        if bad.any():
            ids = batch.ids.filter(pa.array(bad)).to_pylist()
            tally.skipped += len(ids)
            tally.skipped_ids += ids[: SHOWN - len(tally.skipped_ids)]
        tally.read += len(batch)
        tally.source = batch.cursor
        kept = batch.take(np.flatnonzero(~bad)) if bad.any() else batch
        tally.digest.update(kept.ids)
        yield replace(kept, cursor=tally.to_cursor())


def rewrite(
    reader: Reader,
    writer: Writer,
    translate: Kernel,
    *,
    batch_size: int,
    stamp: str = "",
    skip: bool = False,
    drop: NDArray[np.int64] = NOTHING,
    payload: bool = True,
    true: TrueRows | None = None,
    advance: Callable[[int], object] = lambda rows: None,
) -> Tally:
    """Stream everything that isn't staged yet through `translate` into `writer`; return the tally of the whole job.

    `stamp` identifies the state of the source; a stage that was begun in another state is refused with UsageError.
    The vectors of `true` take the place of their ids' translations. `advance(n)` is told of every n rows read. Raises
    BadRowsError (see `sound`).
    """
    progress = writer.progress
    tally = Tally.from_cursor(progress.cursor)
    if progress.cursor is not None and tally.stamp != stamp:
        raise UsageError(
            f"{reader.info.uri} was written to, touched or copied since its first {tally.read:,} rows were translated, "
            "so old and new rows could be mixed: start again without --resume, which names the stage to delete first"
        )
    tally.stamp = stamp
    advance(tally.read)
    # rows behind the cursor that are durable already: they are read again, counted again, but not written again
    behind = progress.rows - progress.rows_at_cursor

    def translated() -> Iterator[tuple[int, VectorBatch]]:
        nonlocal behind
        for batch in ahead(sound(reader, batch_size, tally, skip=skip, drop=drop)):
            known = min(behind, len(batch))
            behind -= known
            new = batch.take(np.arange(known, len(batch))) if known else batch
            vectors = translate(new.vectors)
            if true is not None:
                true.put(new.ids, vectors)
            yield len(batch), replace(new, vectors=vectors, payload=new.payload if payload else None)

    for rows, batch in ahead(translated()):
        writer.write(batch)
        advance(rows)
    return tally


def ahead(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Run an iterator in a thread of its own, at most `depth` items ahead of its consumer.

    Its exceptions come out here; when the consumer stops early, so does the thread.
    """
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stop = threading.Event()

    def offer(item: tuple[bool, Any]) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not offer((True, item)):
                    return
            offer((False, None))
        except BaseException as error:  # handed to the consumer, whatever it is
            offer((False, error))
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            more, item = ready.get()
            if more:
                yield item
            elif item is None:
                return
            else:
                raise item
    finally:
        stop.set()
        thread.join()


def duplicates(reader: Reader, batch_size: int = 1 << 16) -> tuple[list[Any], NDArray[np.int64]]:
    """Find ids that occur more than once: (the ids, the positions of all but the last row of each).

    Takes 8 bytes of memory per row; stores that number their rows themselves have no duplicates.
    """
    if reader.info.id_type is None:
        return [], NOTHING
    try:
        keys = np.empty(reader.info.count or 0, np.uint64)
    except (MemoryError, ValueError) as error:
        raise DataError(
            f"{reader.info.uri}: there is no memory for the ids of {reader.info.count:,} rows, 8 bytes each; if these "
            "are more than it should have, it is damaged"
        ) from error
    n = 0
    for ids in reader.ids(batch_size):
        keys[n : n + len(ids)] = id_keys(ids)
        n += len(ids)
    keys = keys[:n]
    keys.sort()
    repeated = np.unique(keys[1:][keys[1:] == keys[:-1]])
    if not len(repeated):
        return [], NOTHING
    del keys
    last: dict[Any, int] = {}
    doubled: dict[Any, None] = {}
    earlier: list[int] = []
    at = 0
    for ids in reader.ids(batch_size):
        for place in np.flatnonzero(np.isin(id_keys(ids), repeated)).tolist():
            name = ids[place].as_py()
            if name in last:
                doubled[name] = None
                earlier.append(last[name])
            last[name] = at + place
        at += len(ids)
    return list(doubled), np.array(sorted(earlier), np.int64)
