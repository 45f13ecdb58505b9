"""Rows of Parquet files by id, a few at a time: texts to encode, and true vectors that were encoded before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vecferry.batch import id_keys
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.store import Uri

IDS = 1 << 18
ROWS = 4096
BUFFER = 1 << 20
"""Bytes read at a time from a column: unless told so, pyarrow reads whole column chunks, however large."""

Texts = str | Path | Mapping[Any, str] | Callable[[Any], str]


class Lookup:
    """Find rows of Parquet files by id. In memory are 16 bytes a row; of an id that stands twice one row counts.

    `identifier` and `column` name the columns with the ids and with what is looked up, `kind` is the latter's type
    where there is but one.
    """

    def __init__(self, identifier: str, column: str, kind: pa.DataType = None) -> None:
        self._columns = identifier, column
        self._kind = kind
        self._files: list[Path] = []
        self._starts: list[int] = []
        self._keys = np.empty(0, np.uint64)  # ascending, and the row of each; rows are counted over all files
        self._rows = np.empty(0, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, paths: Sequence[Path]) -> None:
        """Take in more files; raise DataError for one that can't be read, UsageError for one without the columns."""
        pieces = [np.empty(0, np.uint64)]
        starts: list[int] = []
        count = self._count
        for path in paths:
            starts.append(count)
            with reading(path) as file:
                if missing := [name for name in self._columns if name not in file.schema_arrow.names]:
                    raise UsageError(f"{path} has no column {missing[0]!r} among {', '.join(file.schema_arrow.names)}")
                found = file.schema_arrow.field(self._columns[1]).type
                if self._kind is not None and found != self._kind:
                    raise DataError(f"{path}: column {self._columns[1]!r} holds {found}, not {self._kind}")
                for batch in file.iter_batches(IDS, columns=[self._columns[0]]):
                    if batch.column(0).null_count:
                        raise DataError(f"{path}: rows have no id in column {self._columns[0]!r}: give them ids")
                    try:
                        pieces.append(id_keys(batch.column(0)))
                    except TypeError as error:
                        raise DataError(f"{path}, column {self._columns[0]!r}: {error}") from error
                    count += len(batch)
                if count - starts[-1] != file.metadata.num_rows:
                    raise DataError(f"{path} is damaged: it counts {file.metadata.num_rows:,} rows, and holds others")
        keys = np.concatenate(pieces)
        new, first = np.unique(keys, return_index=True)
        at = np.searchsorted(self._keys, new)
        fresh = np.append(self._keys, np.uint64(0))[at] != new
        fresh |= at == len(self._keys)
        self._keys = np.insert(self._keys, at[fresh], new[fresh])
        self._rows = np.insert(self._rows, at[fresh], first[fresh] + self._count)
        self._files += paths
        self._starts += starts
        self._count = count

    def find(self, ids: pa.Array) -> NDArray[np.int64]:
        """Return the row of each id, -1 where none has it."""
        if not len(self._keys):
            return np.full(len(ids), -1, np.int64)
        keys = id_keys(ids)
        at = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._rows[at], -1)

    def take(self, rows: NDArray[np.int64]) -> pa.Array:
        """Return the column at these rows, in this order; read only the row groups that hold one."""
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        owner = np.searchsorted(self._starts, wanted, side="right") - 1
        pieces: list[pa.Array] = []
        for number in np.unique(owner).tolist():
            before = sum(map(len, pieces))
            inside = wanted[owner == number] - self._starts[number]
            with reading(self._files[number]) as file:
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                ends = np.cumsum(sizes, dtype=np.int64)
                group = np.searchsorted(ends, inside, side="right")
                for g in np.unique(group).tolist():
                    pieces += self._pick(file, g, inside[group == g] - (ends[g] - sizes[g]))
            if sum(map(len, pieces)) - before != len(inside):
                raise DataError(f"{self._files[number]} is damaged: rows that have ids are missing in other columns")
        if not pieces:
            raise ValueError("no rows to take")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pa.concat_arrays(pieces).take(pa.array(back))

    def _pick(self, file: pq.ParquetFile, group: int, rows: NDArray[np.int64]) -> Iterator[pa.Array]:
        done = 0
        for batch in file.iter_batches(ROWS, row_groups=[group], columns=[self._columns[1]]):
            here = rows[(rows >= done) & (rows < done + len(batch))] - done
            if len(here):
                yield batch.column(0).take(pa.array(here))
            done += len(batch)
            if done > rows[-1]:
                break


def texts_of(texts: Texts) -> Callable[[pa.Array], list[str]]:
    """Return a function from ids to their texts, which raises BadRowsError for those that have none."""

    def require(ids: pa.Array, texts: list[Any], where: str) -> list[str]:
        missing = [i for i, text in zip(ids.to_pylist(), texts, strict=True) if not isinstance(text, str)]
        if missing:
            raise BadRowsError(
                where, "documents have no text", missing, "Give them one, or remove them from the index."
            )
        return texts

    if isinstance(texts, Mapping):
        return lambda ids: require(ids, [texts.get(i) for i in ids.to_pylist()], "texts")
    if callable(texts):
        return lambda ids: require(ids, [texts(i) for i in ids.to_pylist()], "texts")
    uri = Uri.parse(str(texts))
    path, names = Path(uri.path), dict(uri.options)
    column = names.pop("text", "text")
    files = Lookup(names.pop("id", "id"), column)
    if names or uri.kind not in ("", "parquet"):
        raise UsageError(f"{texts}: texts are Parquet files, with the options id and text")
    files.add(sorted(p for p in path.glob("*.parquet") if p.name[0] not in "_.") if path.is_dir() else [path])

    def look_up(ids: pa.Array) -> list[str]:
        rows = files.find(ids)
        found = np.flatnonzero(rows >= 0)
        texts = np.full(len(ids), None, object)
        if len(found):
            try:
                texts[found] = files.take(rows[found]).to_pylist()
            except UnicodeDecodeError as error:
                raise DataError(f"column {column!r} of {path} holds texts that aren't Unicode: {error}") from error
        return require(ids, texts.tolist(), f"column {column!r} of {path}")

    return look_up


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a small Parquet file whole; raise what `reading` does, also for texts that aren't Unicode."""
    with reading(path) as file:
        table = file.read(columns=None if columns is None else list(columns))
        table.validate(full=True)
        return table


@contextlib.contextmanager
def reading(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file to read it in pieces; raise UsageError where there is none, DataError for a damaged one."""
    try:
        with pq.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file") from error
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as Parquet, it is damaged or incomplete: {error}") from error
