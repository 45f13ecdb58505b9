"""The payload that a target can't hold, in a Parquet file of its own that appears together with the target."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vecferry.batch import VectorBatch, in_one_piece
from vecferry.rewrite import Tally, sound
from vecferry.store import Reader

GROUP = 8192
"""Rows of a row group; payload may be long texts, and a group is held in memory."""


def stage_payload(reader: Reader, path: Path, batch_size: int, *, skip: bool, drop: NDArray[np.int64]) -> None:
    """Write ids and payload of the rows that are kept, in their order and durably, under a staging name.

    Raises OSError, which names the file, where it can't be written.
    """
    fresh = _staged(path)
    writer: pq.ParquetWriter | None = None
    for group in _groups(_table(batch) for batch in sound(reader, batch_size, Tally(), skip=skip, drop=drop)):
        with _named(fresh):
            writer = writer or pq.ParquetWriter(fresh, group.schema)
            writer.write_table(group)
    if writer is not None:
        with _named(fresh):
            writer.close()
        _fsync(fresh)
        _fsync(fresh.parent)


def _table(batch: VectorBatch) -> pa.Table:
    columns = {} if batch.payload is None else {name: batch.payload[name] for name in batch.payload.column_names}
    return pa.table({"id": batch.ids, **columns})


def _groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Cut a stream of rows into tables of GROUP of them, and a last one: bytes mustn't depend on the batches."""
    held: list[pa.Table] = []
    room = GROUP
    for table in tables:
        while len(table) >= room:
            yield _in_one_piece([*held, table.slice(0, room)])
            held, table, room = [], table.slice(room), GROUP
        held.append(table)
        room -= len(table)
    if room < GROUP:
        yield _in_one_piece(held)


def _in_one_piece(tables: list[pa.Table]) -> pa.Table:
    whole = pa.concat_tables(tables)
    return pa.table([in_one_piece(column) for column in whole.columns], schema=whole.schema)


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
