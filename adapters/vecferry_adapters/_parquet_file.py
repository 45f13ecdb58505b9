"""Parquet files as they are found and opened: by content, from end to end, and without trust in what they say."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vecferry.errors import DataError

MAGIC = b"PAR1"
BUFFER = 1 << 20
"""Bytes read at a time from a column: unless told so, pyarrow reads whole column chunks, however large."""


def has_magic(path: Path) -> bool:
    """Say whether a file starts as Parquet files do."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except PermissionError:
        raise  # to be told: not being allowed to look is no answer
    except OSError:
        return False


def find_files(path: str) -> list[Path]:
    """Return the Parquet files at a path, a folder or a glob, sorted; what is hidden or starts with _ is no part."""
    root = Path(path)
    if root.is_dir():
        found = list(root.iterdir())
    elif root.exists():
        return [root]
    else:
        found = [Path(p) for p in glob.glob(path, recursive=True)] if glob.has_magic(path) else []  # noqa: PTH207
    shown = sorted(p for p in found if p.name[0] not in "_." and p.is_file())
    return [p for p in shown if p.suffix == ".parquet" or has_magic(p)]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file to read it in pieces, its checksums compared; raise DataError for a damaged one."""
    try:
        with pq.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True) as file:
            yield file
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # the last for names that are no text
        if isinstance(error, OSError) and error.errno:  # of the system, not of what is in the file: it may come back
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path} can't be read as Parquet, it is damaged or incomplete: {reason}") from error


def check_codes(batch: pa.RecordBatch, path: Path) -> None:
    """Raise DataError for a column with a dictionary whose codes lead out of it; pyarrow itself doesn't look."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if "dictionary<" in str(column.type):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise DataError(f"{path} is damaged: its column {name} holds {error}") from error


def check_ends(path: Path) -> None:
    """Raise DataError for what isn't Parquet from end to end: truncated, something behind it, another type."""
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(max(0, path.stat().st_size - 4))
        tail = file.read(4)
    if tail == b"PARE":
        raise DataError(f"{path} is encrypted, which vecferry can't read: decrypt it first")
    if head != MAGIC:
        raise DataError(f"{path} is not a Parquet file: it doesn't start with {MAGIC.decode()}")
    if tail != MAGIC:
        raise DataError(f"{path} is cut short or has something behind its end: it doesn't end with {MAGIC.decode()}")
