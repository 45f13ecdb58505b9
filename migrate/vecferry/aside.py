"""The payload that a target can't hold, in a Parquet file of its own that appears together with the target."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vecferry.rewrite import Tally, sound
from vecferry.store import Reader


def stage_payload(reader: Reader, path: Path, batch_size: int, *, skip: bool, drop: NDArray[np.int64]) -> None:
    """Write ids and payload of the rows that are kept, in their order and durably, under a staging name.

    Raises OSError, which names the file, where it can't be written.
    """
    fresh = _staged(path)
    writer: pq.ParquetWriter | None = None
    for batch in sound(reader, batch_size, Tally(), skip=skip, drop=drop):
        columns = {} if batch.payload is None else {name: batch.payload[name] for name in batch.payload.column_names}
        table = pa.table({"id": batch.ids, **columns})
        with _named(fresh):
            writer = writer or pq.ParquetWriter(fresh, table.schema)
            writer.write_table(table)
    if writer is not None:
        with _named(fresh):
            writer.close()
        _fsync(fresh)
        _fsync(fresh.parent)


def publish_payload(path: Path) -> None:
    """Give a staged payload file its name, durably, unless that was done; call it when the target is published."""
    fresh = _staged(path)
    if fresh.exists() and not path.exists():
        fresh.rename(path)
        _fsync(path.parent)


def _staged(path: Path) -> Path:
    return path.with_name(f".{path.name}.vecferry")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let errors of Arrow, which say only what they were doing, name the file."""
    try:
        yield
    except OSError as error:
        if not error.errno:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
