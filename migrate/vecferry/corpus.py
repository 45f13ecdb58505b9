"""Texts with their ids, from Parquet, JSON lines or plain lines, a few at a time and as often as needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vecferry.errors import DataError, UsageError
from vecferry.jsonfile import parse_json
from vecferry.lookup import reading

ID_NAMES = ("id", "_id", "ids", "doc_id", "docid", "document_id", "query_id", "qid")
TEXT_NAMES = ("text", "texts", "passage", "content", "document", "body", "query", "sentence")
LONGEST_LINE = 16 << 20
INT64, STRING = pa.int64(), pa.string()

Piece = tuple[pa.Array, list[Any]]
"""Ids, and for each a text, a list of wordings, or None."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Read a file of texts: Parquet (or a folder of it), JSON lines (`.jsonl`, `.ndjson`, `.json`), or a text a line.

    `id` and `text` name the columns or keys; by default those of the usual names. Where there are no ids, rows are
    numbered from 0. A column of lists of strings holds several wordings of each text.
    """

    path: Path
    id: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise UsageError(f"{self.path}: no such file or folder")
        if self.path.suffix in (".csv", ".tsv"):  # whose every line would be taken for a text, ids and all
            raise UsageError(f"{self.path}: tables of texts are read as Parquet or .jsonl: convert it")
        if self._lines and (self.id is not None or self.text is not None):
            raise UsageError(f"{self.path} is read as one text a line, which has no columns: leave out --id and --text")

    @property
    def _lines(self) -> bool:
        return not self._parquet and self.path.suffix not in (".jsonl", ".ndjson", ".json")

    @property
    def _parquet(self) -> bool:
        if self.path.is_dir():
            return True
        with self.path.open("rb") as file:
            return file.read(4) == b"PAR1"

    def read(self, size: int) -> Iterator[Piece]:
        """Yield `size` texts at a time with their ids; raise DataError, which names the line, for what is no text."""
        if self._parquet:
            return self._read_parquet(size)
        return self._read_lines(size) if self._lines else self._read_json(size)

    def _read_parquet(self, size: int) -> Iterator[Piece]:
        paths = [self.path]
        if self.path.is_dir():
            paths = sorted(p for p in self.path.glob("*.parquet") if p.name[0] not in "_.")
            if not paths:
                raise UsageError(f"{self.path}: no Parquet files there")
        done = 0
        for path in paths:
            with reading(path) as file:
                schema = file.schema_arrow
                strings = [f.name for f in schema if _is_text(f.type)]
                identifier = _chosen(path, schema.names, schema.names, self.id, ID_NAMES, "--id", needed=False)
                text = _chosen(path, schema.names, strings, self.text, TEXT_NAMES, "--text", needed=True)
                columns = [text] if identifier is None else [identifier, text]
                for batch in file.iter_batches(size, columns=columns):
                    if identifier is None:
                        ids = pa.array(np.arange(done, done + len(batch)))
                    else:
                        ids = _ids(batch.column(identifier), path, identifier)
                    done += len(batch)
                    yield ids, batch.column(text).to_pylist()

    def _read_json(self, size: int) -> Iterator[Piece]:
        identifier: str | None = None
        text = ""
        ids: list[Any] = []
        texts: list[Any] = []
        for number, line in enumerate(_lines_of(self.path)):
            where = f"{self.path}, line {number + 1}"
            try:
                held = parse_json(line)
            except ValueError as error:
                raise DataError(f"{where}: {error}") from error
            if not number:
                names = list(held)
                strings = [name for name in names if isinstance(held[name], (str, list))]
                identifier = _chosen(self.path, names, names, self.id, ID_NAMES, "--id", needed=False)
                text = _chosen(self.path, names, strings, self.text, TEXT_NAMES, "--text", needed=True) or ""
            ids.append(number if identifier is None else held.get(identifier))
            if type(ids[-1]) not in (int, str) or type(ids[-1]) is not type(ids[0]):
                raise DataError(f"{where}: the id {ids[-1]!r} is no {_of(ids[0])}: ids are all numbers or all strings")
            if isinstance(ids[-1], int) and ids[-1] >= 1 << 63:
                raise DataError(f"{where}: the id {ids[-1]} is beyond 64 bits with a sign: write ids as strings")
            texts.append(_wordings(held.get(text), f"{where}, {text!r}"))
            if len(ids) == size:
                yield pa.array(ids, _of(ids[0])), texts
                ids, texts = [], []
        if ids:
            yield pa.array(ids, _of(ids[0])), texts

    def _read_lines(self, size: int) -> Iterator[Piece]:
        texts: list[Any] = []
        start = 0
        for number, line in enumerate(_lines_of(self.path)):
            try:
                texts.append(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self.path}, line {number + 1}: no UTF-8 text ({error.reason}); a file of texts is Parquet, "
                    ".jsonl, or one text a line"
                ) from error
            if len(texts) == size:
                yield pa.array(np.arange(start, number + 1)), texts
                texts, start = [], number + 1
        if texts:
            yield pa.array(np.arange(start, start + len(texts))), texts


def _lines_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise DataError(f"{path}, line {number} has more than {LONGEST_LINE:,} bytes, which is no text")
            yield line.rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf" if number == 1 else b"")


def _chosen(
    path: Path,
    names: Sequence[str],
    fitting: Sequence[str],
    asked: str | None,
    usual: Sequence[str],
    option: str,
    *,
    needed: bool,
) -> str | None:
    """Return the column that was asked for, or the first of the usual names, or the only one that fits."""
    if asked is not None:
        if asked not in fitting:
            kind = "no column of texts" if asked in names else "no column"
            raise UsageError(f"{path} has {kind} {asked!r} among {', '.join(names)}: name another with {option}")
        return asked
    for name in usual:
        if name in fitting:
            return name
    if not needed:
        return None
    if len(fitting) != 1:
        raise UsageError(f"{path}: which of {', '.join(names)} holds the texts can't be told: name it with {option}")
    return fitting[0]


def _is_text(kind: Any) -> bool:
    """Say whether a column holds strings, or lists of them."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _ids(column: pa.Array, path: Path, name: str) -> pa.Array:
    if column.null_count:
        raise DataError(f"{path}: rows have no id in column {name!r}: give them ids")
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string_view(kind):
        kind = STRING
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UsageError(f"{path}: column {name!r} holds {kind}; ids are integers or strings: name another with --id")
    return column.cast(kind)


def _of(example: Any) -> pa.DataType:
    return INT64 if isinstance(example, int) else STRING


def _wordings(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise DataError(f"{where} is {str(value)[:40]!r}: a text is a string, or a list of strings for several wordings")
