"""Relevance labels: reading a qrels file, and finding its documents and queries in stores by their ids."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vecferry.errors import DataError, UsageError
from vecferry.holdout import Qrels

_COLUMNS = {
    3: (0, 1, 2),
    4: (0, 2, 3),
}  # where query, document and grade stand; TREC has an unused second column
_WHOLE = re.compile(r"0|-?[1-9][0-9]*")  # an integer as an integer id is written: "007" is another name


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Hold the labels of a qrels file that say "relevant" (grade > 0), in parallel columns."""

    path: str
    queries: pa.Array
    documents: pa.Array
    grades: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.grades)

    def match(self, query_ids: pa.Array, ids: pa.Array) -> Qrels | None:
        """Return the labels among these queries (strings) and documents, None where there are none."""
        query = pc.index_in(self.queries, value_set=query_ids)
        document = pc.index_in(self.documents, value_set=as_strings(ids))
        known = pc.and_(pc.is_valid(query), pc.is_valid(document)).to_numpy(zero_copy_only=False)
        if not known.any():
            return None
        rows = [a.filter(pa.array(known)).to_numpy().astype(np.int64) for a in (query, document)]
        return Qrels(rows[0], rows[1], self.grades[known])


def read_qrels(path: str | Path) -> Labels:
    """Read labels: query, an unused column that may be missing (TREC has it), document, grade; no header.

    Columns are separated by tabs, or by spaces in a file without tabs. Raises DataError naming file and
    line, and UsageError when there is no such file.
    """
    grades: dict[tuple[str, str], int] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as qrels: {error}") from error
    separator = "\t" if any("\t" in line for line in lines) else None
    width = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(separator)]
        width = width or len(cells)
        if len(cells) != width or width not in _COLUMNS:
            wanted = f"the lines above have {width}" if width in _COLUMNS else "qrels have 3, or 4 in TREC's format"
            raise DataError(f"{path}, line {number}: {len(cells)} columns, {wanted}")
        query, document, grade = (cells[i] for i in _COLUMNS[width])
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", grade):
            cure = ": qrels have no header, delete this line" if not grades else ""
            raise DataError(f"{path}, line {number}: the grade {grade!r} is not a whole number{cure}")
        if grades.setdefault((query, document), int(grade)) != int(grade):
            before = grades[query, document]
            raise DataError(f"{path}, line {number}: {query} {document} has grade {grade}, and {before} above")
    relevant = {pair: grade for pair, grade in grades.items() if grade > 0}
    if not relevant:
        raise DataError(f"{path}: none of its {len(grades)} labels has a grade above 0")
    return Labels(
        path=str(path),
        queries=pa.array([q for q, _ in relevant], pa.string()),
        documents=pa.array([d for _, d in relevant], pa.string()),
        grades=np.array(list(relevant.values()), np.int64),
    )


def as_strings(ids: pa.Array) -> pa.Array:
    """Write ids as the strings that stand in qrels; raise DataError for binary ids that aren't UTF-8."""
    try:
        return ids.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise DataError(f"ids of type {ids.type} can't be compared with text: {error}") from error


def as_ids(names: pa.Array, kind: pa.DataType) -> pa.Array:
    """Turn ids that stand in qrels into a store's own type, without repeats and what can't be its ids."""
    names = pc.unique(names)
    if not pa.types.is_integer(kind):
        return names.cast(kind)
    limits = np.iinfo(kind.to_pandas_dtype())
    numbers = [int(name) for name in names.to_pylist() if _WHOLE.fullmatch(name)]
    return pa.array([n for n in numbers if limits.min <= n <= limits.max], kind)
