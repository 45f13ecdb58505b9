"""Drawing the documents that are to be encoded with the new model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from vecferry.batch import Floats, VectorBatch, concat, faulty, id_keys
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.linear import normalize
from vecferry.pairs import FIT, HOLDOUT, PIECE, ROLE, occurrences
from vecferry.qrels import as_ids, read_qrels
from vecferry.split import MIN_FIT, SHARE
from vecferry.store import Reader, find, opened

STRATEGIES = ("random", "spread")
RESERVOIR = 20
"""`spread` chooses each fit row among this many random ones."""
USUAL = 5000
"""Documents that are drawn where nobody says how many: half of the index at most."""
SPARE = 1000
"""Rows drawn beyond those needed, to stand in for unusable ones; SPARE or a tenth, whichever is more."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Report how many rows were drawn for what, `relevant` ones beyond the uniform draw, and passed over.

    unusable    rows drawn that are zero or not finite, others took their place
    unknown     documents of the qrels that the index doesn't have, or has no usable vector of
    lossy       the index holds codes, which a fit has to be allowed to read
    rows        of the index, if they were too few for the usual number
    """

    path: Path
    fit: int
    holdout: int
    relevant: int
    unusable: int
    unknown: int
    lossy: bool = False
    rows: int | None = None

    def table(self) -> str:
        """Write the numbers for people."""
        lines = [
            f"{self.path}: {self.fit + self.holdout + self.relevant} documents",
            f"  {self.fit:>8} to fit the map on",
            f"  {self.holdout:>8} held out, drawn uniformly from the index",
        ]
        if self.relevant:
            lines.append(f"  {self.relevant:>8} held out too, because they are relevant to queries")
        if self.unusable:
            lines.append(f"  {self.unusable:>8} passed over, because they are zero or not finite")
        if self.unknown:
            lines.append(f"  {self.unknown:>8} named by the qrels, but not in the index")
        if self.rows is not None:
            drawn = f"half of the {self.rows:,} rows were drawn, which are too few for the usual {USUAL:,}"
            lines.append(
                f"warning: {drawn}; -n draws another number. So small an index is soon encoded again as a whole"
            )
        return "\n".join(lines)


def sample(
    source: Any,
    n: int | None = None,
    *,
    strategy: Literal["random", "spread"] = "random",
    qrels: str | Path | None = None,
    seed: int = 0,
    output: str | Path,
) -> Sample:
    """Draw n documents of an index and write their ids, payload and `role` ("fit" or "holdout") as Parquet.

    Without n these are 5,000, or half of a smaller index, of which the result warns. The hold-out, a fifth of n, is a
    uniform draw from the whole index; the relevant documents of `qrels` that it lacks join it beyond n. `spread` takes
    fit rows that lie far from each other, instead of uniform ones.
    Memory grows with n only. Raises UsageError for a file that exists, an index with fewer rows, or a payload
    column named `id` or `role`, and BadRowsError for drawn ids that the index has twice.
    """
    path = Path(output)
    if strategy not in STRATEGIES:
        raise UsageError(f"unknown strategy {strategy!r}: choose {' or '.join(STRATEGIES)}")
    if path.exists():
        raise UsageError(f"{path} exists: choose another name for the sample, or delete it first")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder: make it first")
    labels = None if qrels is None else read_qrels(qrels)
    with opened(source) as reader:
        info = reader.info
        taken = {"id", ROLE} & set(info.payload.names if info.payload is not None else ())
        if taken:
            raise UsageError(f"{info.uri} has a payload column {min(taken)!r}, a name the sample needs: rename it")
        count = rows_of(reader)
        usual = n is None
        n = min(USUAL, count // 2) if n is None else n
        held = round(SHARE * n)
        if n - held < MIN_FIT:
            where = f"{info.uri} has {count} rows; " if usual else ""
            raise UsageError(
                f"{where}{n} documents leave {n - held} to fit on, at least {MIN_FIT} are needed: ask for more with -n"
            )
        if n > count:
            raise UsageError(f"{info.uri} has {count} rows, {n} were asked for: ask for at most {count}")
        kind = info.id_type or pa.int64()
        wanted = pa.array([], kind) if labels is None else as_ids(labels.documents, kind)
        relevant = wanted.filter(pa.array(find(reader, wanted) >= 0))
        reserve = RESERVOIR * (n - held) if strategy == "spread" else n - held
        need = held + len(relevant) + reserve
        drawn, unusable = draw(reader, need + max(SPARE, need // 10), np.random.default_rng(seed))
        uniform = drawn.take(np.arange(min(held, len(drawn))))
        extra = reader.take(relevant.filter(pa.array(~np.isin(id_keys(relevant), id_keys(uniform.ids)))))
        extra = extra.take(np.flatnonzero(~faulty(extra.vectors)))
        others = np.arange(held, len(drawn))
        others = others[~np.isin(id_keys(drawn.ids)[held:], id_keys(relevant))]
        if len(others) < n - held:
            raise DataError(
                f"{info.uri}: {len(drawn) + unusable} rows looked at, {unusable} of them zero or not finite, leave "
                f"{len(others)} to fit on beside {len(uniform) + len(extra)} held out; {n - held} are needed"
            )
        if strategy == "spread":
            others = others[:reserve]
            others = others[farthest(drawn.vectors[others], n - held)]
        rows = concat([uniform, extra, drawn.take(others[: n - held])])
        repeated = occurrences(reader.ids(PIECE), rows.ids) > 1
        if repeated.any():
            names = rows.ids.filter(pa.array(repeated)).to_pylist()
            raise BadRowsError(info.uri, "ids stand more than once", names, "Make ids unique: pairs join by id.")
        order = np.argsort(find(reader, rows.ids))
    roles = np.repeat([HOLDOUT, FIT], [held + len(extra), n - held])
    _write(rows.take(order), roles[order], path)
    few = count if usual and n < USUAL else None
    return Sample(path, n - held, held, len(extra), unusable, len(wanted) - len(relevant), info.lossy, few)


def rows_of(reader: Reader) -> int:
    """Return the number of rows of a store, counting them where its header doesn't say."""
    return sum(len(piece) for piece in reader.ids(PIECE)) if reader.info.count is None else reader.info.count


def draw(reader: Reader, n: int, rng: np.random.Generator) -> tuple[VectorBatch, int]:
    """Draw up to n rows uniformly without repeats, in random order; leave out unusable ones and count them.

    Only ids are read from the whole store.
    """
    count = rows_of(reader)
    places = rng.choice(count, min(n, count), replace=False)
    ids = _ids_at(reader, places)
    _, first = np.unique(id_keys(ids), return_index=True)
    batch = reader.take(ids.take(pa.array(np.sort(first))))
    usable = np.flatnonzero(~faulty(batch.vectors))
    return batch.take(usable), len(batch) - len(usable)


def farthest(x: Floats, n: int) -> NDArray[np.int64]:
    """Choose n rows, the first and then always the farthest by angle from those chosen before (Gonzalez 1985)."""
    unit = x.copy()
    normalize(unit)
    chosen = np.zeros(n, np.int64)
    # one thread: the bits of a product depend on the number of threads, and near ties on the bits
    with threadpool_limits(limits=1):
        nearest = unit @ unit[0]
        for i in range(1, n):
            nearest[chosen[i - 1]] = np.inf
            chosen[i] = nearest.argmin()
            np.maximum(nearest, unit @ unit[chosen[i]], out=nearest)
    return chosen


def _ids_at(reader: Reader, places: NDArray[np.int64]) -> pa.Array:
    """Return the ids at these places of the reading order, in the order of `places`."""
    order = np.argsort(places)
    ordered = places[order]
    found, start, done = [], 0, 0
    for piece in reader.ids(PIECE):
        end = int(np.searchsorted(ordered, start + len(piece)))
        found.append(piece.take(pa.array(ordered[done:end] - start)))
        start, done = start + len(piece), end
    if done < len(places):
        raise DataError(f"{reader.info.uri} claims {reader.info.count} rows but holds {start}: it is damaged")
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return pa.concat_arrays(found).take(pa.array(back))


def _write(rows: VectorBatch, roles: NDArray[np.str_], path: Path) -> None:
    columns = {"id": rows.ids}
    if rows.payload is not None:
        columns |= dict(zip(rows.payload.column_names, rows.payload.columns, strict=True))
    table = pa.table(columns | {ROLE: pa.array(roles, pa.string())})
    stage = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, stage, compression="zstd")
        stage.replace(path)
    finally:
        stage.unlink(missing_ok=True)
