"""Slices: the same numbers for each value of a payload column, so that a good mean can't hide a bad part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.batch import Positions
from vecferry.errors import DataError, UsageError
from vecferry.gate import MIN_QUERIES, Gate
from vecferry.holdout import Qrels
from vecferry.lookup import read_table, reading
from vecferry.measured import Cell, Row, Slices
from vecferry.recall import Places, Values
from vecferry.store import Reader, find

NO_VALUE = "(no value)"
SHOWN_SMALL = 20
"""Slices that are too small to measure and named all the same; of the others the number is given."""
METRICS = {"agreement": "queries", "recall": "queries", "ndcg": "queries", "doc-agreement": "documents as queries"}

Names = NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class Slicing:
    """Hold a column whose values name slices, and the stores or the Parquet file it can be looked up in."""

    column: str
    stores: tuple[Reader, ...] = ()
    file: Path | None = None

    @classmethod
    def of(
        cls, column: str | None, file: str | Path | None, stores: tuple[Reader | None, ...], gate: Gate | None
    ) -> Slicing | None:
        """Find the column in a Parquet file with an `id` column, else in the first store whose payload has it.

        Raises UsageError where none has it, and for a gate on the worst slice without a column.
        """
        if column is None:
            if file is not None:
                raise UsageError("a file of slices (--slice-file) goes with the name of its column (--slice)")
            if gate is not None and gate.sliced:
                raise UsageError(f"the gate {gate} asks for the worst slice: name the payload column with --slice")
            return None
        if file is not None:
            kinds = _schema(Path(file))
            if "id" not in kinds.names or column not in kinds.names:
                raise UsageError(f"{file} has the columns {', '.join(kinds.names)}: slices need id and {column}")
            _check_kind(kinds.field(column), str(file))
            return cls(column, file=Path(file))
        known = [s for s in stores if s is not None]
        having = tuple(s for s in known if s.info.payload is not None and column in s.info.payload.names)
        if not having:
            columns = [
                f"{s.info.uri}: {', '.join(s.info.payload.names if s.info.payload else []) or 'none'}" for s in known
            ]
            raise UsageError(
                f"no payload column {column!r} (columns of {'; '.join(columns)}): name another, or pass a Parquet "
                f"file with the columns id and {column} as --slice-file"
            )
        for store in having:
            _check_kind(store.info.payload.field(column), store.info.uri)  # type: ignore[union-attr]
        return cls(column, having)

    def names(self, ids: pa.Array) -> Names:
        """Return the slice of each document `[n]` as text; documents without a value are a slice of their own.

        Raises DataError where no document has a value: a gate on a worst slice of all would say nothing of slices.
        """
        names = np.full(len(ids), None, np.object_)
        where = str(self.file) if self.file is not None else " and ".join(s.info.uri for s in self.stores)
        kinds = ""
        if self.file is not None:
            table = read_table(self.file, list({"id": None, self.column: None}))
            kinds = f" (their ids are of type {ids.type}, those in the file {table['id'].type})"
            if table["id"].null_count:
                raise DataError(f"{self.file}: {table['id'].null_count:,} rows have no id: give them ids")
            places = Positions(ids)
            try:
                places.update(table["id"].combine_chunks())
            except TypeError as error:
                raise DataError(f"{self.file}, column 'id': {error}") from error
            _fill(names, table[self.column], places.found)
        for store in self.stores:
            here = find(store, ids) >= 0
            if here.any():
                part = store.take(ids.filter(pa.array(here)).cast(store.info.id_type or pa.int64())).payload
                assert part is not None
                rows = np.full(len(ids), -1, np.int64)
                rows[here] = np.arange(part.num_rows)
                unnamed = np.array([name is None for name in names], np.bool_)
                _fill(names, part[self.column], np.where(unnamed, rows, -1))
        if all(name is None for name in names):
            raise DataError(f"{where}: none of {len(ids):,} documents has a value in the column {self.column!r}{kinds}")
        return np.array([NO_VALUE if name is None else name for name in names], np.object_)


def documents_of(queries: int, qrels: Qrels | None, nearest: Places) -> tuple[Places, Places]:
    """Return pairs of query and document that say where queries belong: labels, else the true nearest `[q]`."""
    query, document = (np.empty(0, np.int64),) * 2 if qrels is None else (qrels.query, qrels.document)
    rest = np.setdiff1d(np.arange(queries), query)
    return np.concatenate([query, rest]), np.concatenate([document, nearest[rest]])


def measure_slices(
    column: str,
    asked: tuple[Places, Names] | None,
    stand_ins: Names | None,
    values: Mapping[tuple[str, int], Values],
    documents: int,
    *,
    seed: int,
    full_size: bool = False,
) -> Slices:
    """Take means over the slices of values per query by metric and k.

    asked      queries and the names of the slices they belong to, in parallel; a query may belong to several
    stand_ins  the slice of each document that stood in as a query
    """
    members: dict[str, tuple[Places, Names]] = {}
    if asked is not None:
        members["queries"] = asked
    if stand_ins is not None:
        members["documents as queries"] = (np.arange(len(stand_ins)), stand_ins)
    wanted = {(metric, k): v for (metric, k), v in values.items() if METRICS.get(metric) in members}
    sizes: Counter[str] = Counter()
    for _, names in members.values():
        sizes |= Counter(names.tolist())
    rows, small = [], 0
    for name, _ in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        cells = []
        for (metric, k), all_values in wanted.items():
            queries, names = members[METRICS[metric]]
            some = all_values[np.unique(queries[names == name])]
            count = int((~np.isnan(some)).sum())
            if count < MIN_QUERIES:
                empty = Cell(metric, k, documents=documents, queries=count)
                cells.append(Cell(metric, k, reason=f"too few: {count} {empty.asked}, {MIN_QUERIES} are needed"))
            else:
                cells.append(Cell.of(metric, k, some, documents, seed=seed, full_size=full_size))
        if all(cell.value is None for cell in cells):
            small += 1
            if small > SHOWN_SMALL:
                continue
        rows.append(Row(name, tuple(cells)))
    return Slices(column, tuple(rows), max(0, small - SHOWN_SMALL))


def _fill(names: Names, column: Any, rows: Places) -> None:
    """Put the text of a column's values at the places that have a row (not -1)."""
    there = np.flatnonzero(rows >= 0)
    values = column.take(pa.array(rows[there])).combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    try:
        names[there] = np.array(values.cast(pa.string()).to_pylist(), np.object_)
    except UnicodeDecodeError as error:
        raise DataError(f"a value of the column to slice by is no text in Unicode: {error}") from error


def _schema(file: Path) -> pa.Schema:
    with reading(file) as opened:
        return opened.schema_arrow


def _check_kind(field: pa.Field, where: str) -> None:
    if pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
        raise UsageError(
            f"{where}: the column {field.name!r} is of type {field.type}: slices need text, numbers or dates"
        )
