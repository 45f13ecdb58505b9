"""The paired sample: two stores joined by id, with everything that doesn't fit together found and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vecferry.batch import Floats, VectorBatch, faulty, id_keys
from vecferry.errors import BadRowsError, DataError, IncompatibleError, UsageError
from vecferry.lookup import read_table
from vecferry.qrels import as_strings
from vecferry.store import Reader, StoreInfo, Uri

ROLE = "role"
FIT, HOLDOUT = "fit", "holdout"
PIECE = 1 << 20
"""Ids that are looked at together."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Hold documents that have a vector in both spaces: `[n, d_source]` and `[n, d_target]`.

    `ids` are of the source's type. `marked` says which rows `vecferry sample` drew for the hold-out, None
    where nothing says so.
    """

    ids: pa.Array
    source: Floats
    target: Floats
    marked: Mask | None = None

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Hold queries: ids as strings, vectors of the new model `[q, d_target]`, and of the old one or None."""

    ids: pa.Array
    vectors: Floats
    source: Floats | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    def take(self, rows: NDArray[np.int64]) -> Queries:
        """Return the queries at these positions, in this order."""
        source = None if self.source is None else self.source[rows]
        return Queries(self.ids.take(pa.array(rows)), self.vectors[rows], source)


@dataclass(frozen=True, slots=True)
class BadRows:
    """Decide about rows that can't be used: they raise, or are left out and counted by their fault.

    `optional` says that the verb can leave them out, with --bad-rows skip.
    """

    skip: bool = False
    optional: bool = True
    skipped: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rule: str) -> BadRows:
        """Return the rule of this name, "fail" or "skip"; raise UsageError for others, and for "keep" say why."""
        if rule == "keep":
            raise UsageError(
                "bad rows can't be kept: NaN disappears from inverted lists and breaks graphs, and a zero row is found "
                "before every document whose score is below zero. Leave them out with --bad-rows skip, which names "
                "and counts them, or mend the source"
            )
        if rule not in ("fail", "skip"):
            raise UsageError(f"unknown bad_rows {rule!r}: choose one of fail, skip")
        return cls(skip=rule == "skip")

    def drop(self, bad: Mask, ids: pa.Array, where: str, fault: str, cure: str) -> Mask:
        """Return which rows stay; raise BadRowsError when there are bad ones and none may be left out."""
        if bad.any():
            if not self.skip:
                names = ids.filter(pa.array(bad)).to_pylist()
                otherwise = ", or leave them out with --bad-rows skip." if self.optional else "."
                raise BadRowsError(where, fault, names, cure + otherwise)
            key = f"{where}: {fault}"
            self.skipped[key] = self.skipped.get(key, 0) + int(bad.sum())
        return ~bad

    def take(self, reader: Reader, ids: pa.Array) -> VectorBatch:
        """Take the usable rows of a store by id."""
        batch = reader.take(ids)
        uri, bad = reader.info.uri, faulty(batch.vectors)
        zero = bad & ~batch.vectors.any(axis=1)
        cure = "Mend them"
        keep = self.drop(zero, batch.ids, uri, "vectors are all zeros", cure)
        fault = "vectors are null, of another length, or hold NaN, infinite or too large numbers"
        keep &= self.drop(bad & ~zero, batch.ids, uri, fault, cure)
        return batch if keep.all() else batch.take(np.flatnonzero(keep))

    def whole(self, reader: Reader, drawn: Callable[[pa.Array], Mask] | None = None) -> VectorBatch:
        """Read all usable rows of a small store; every copy of an id that stands more than once is bad.

        `drawn` says of all ids which of them to read.
        """
        ids = pa.concat_arrays(list(reader.ids(PIECE)) or [pa.array([], reader.info.id_type or pa.int64())])
        if drawn is not None:
            ids = ids.filter(pa.array(drawn(ids)))
        _, where, copies = np.unique(id_keys(ids), return_inverse=True, return_counts=True)
        once = self.drop(copies[where] > 1, ids, reader.info.uri, "rows share their id with another", "Make ids unique")
        return self.take(reader, ids.filter(pa.array(once)))


def occurrences(pieces: Iterator[pa.Array], wanted: pa.Array) -> NDArray[np.int64]:
    """Count how often each of some distinct ids stands in a stream of ids."""
    keys = id_keys(wanted)
    order = np.argsort(keys)
    ordered = keys[order]
    counts = np.zeros(len(keys), np.int64)
    for piece in pieces:
        stream = id_keys(piece)
        at = np.searchsorted(ordered, stream)
        at[at == len(ordered)] = 0
        if len(ordered):
            counts += np.bincount(at[ordered[at] == stream], minlength=len(counts))
    result = np.empty_like(counts)
    result[order] = counts
    return result


def join(source: Reader, target: Reader, bad: BadRows, drawn: Callable[[pa.Array], Mask] | None = None) -> Pairs:
    """Join the new model's vectors of some documents with the index by id; ids only in the index are normal.

    Of a target too large to be read whole, `drawn` says which of all its ids to take.
    Raises UsageError where ids can't be compared, BadRowsError (see `BadRows`) for ids of the target that
    the index lacks or has twice and for unusable vectors on either side, IncompatibleError when both sides
    hold the same vectors, and DataError when nothing is left.
    """
    _check_numbering(source.info, target.info)
    _check_kinds(source.info, target.info)
    rows = bad.whole(target, drawn)
    where = source.info.uri
    counts = occurrences(source.ids(PIECE), rows.ids)
    if len(rows) and not counts.any():
        shown = [
            [str(i) for i in ids.slice(0, 3).to_pylist()]
            for ids in (rows.ids, next(source.ids(3), rows.ids.slice(0, 0)))
        ]
        raise DataError(
            f"none of the {len(rows)} ids of {target.info.uri} ({', '.join(shown[0])}, ...) is in {where} "
            f"({', '.join(shown[1])}, ...): give both stores the same ids"
            + (f"; {where} only numbers its rows: {naming_ids(source.info)}" if source.info.id_type is None else "")
        )
    keep = bad.drop(counts == 0, rows.ids, where, f"ids of {target.info.uri} are not in it", "Give both the same ids")
    keep &= bad.drop(counts > 1, rows.ids, where, "ids of the pairs stand in it more than once", "Make ids unique")
    rows = rows.take(np.flatnonzero(keep))
    old = bad.take(source, rows.ids.cast(source.info.id_type or pa.int64()))
    if len(old) < len(rows):
        rows = rows.take(np.flatnonzero(np.isin(id_keys(rows.ids), id_keys(old.ids))))
    if not len(rows):
        why = ", ".join(f"{count:,} {fault}" for fault, count in bad.skipped.items()) or "there are no rows"
        raise DataError(f"no usable pair is left between {where} and {target.info.uri}: {why}")
    if source.info.dim == target.info.dim:
        same = int((old.vectors == rows.vectors).all(axis=1).sum())
        if same > len(rows) / 2:
            raise IncompatibleError(
                f"{same} of {len(rows)} vectors are the same in {where} and {target.info.uri}: "
                "the target must hold those of the new model"
            )
    return Pairs(old.ids, old.vectors, rows.vectors, _marks(rows, target.info.uri))


def with_roles(pairs: Pairs, sample: str | Path) -> Pairs:
    """Mark the hold-out as a file of `vecferry sample` says; raise DataError if it is about other rows."""
    try:
        table = read_table(Path(sample))
        ids = table.column("id").combine_chunks()
        held = _held(table.column(ROLE), str(sample))
        keys = id_keys(ids)
    except (OSError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{sample} is not a sample as `vecferry sample` writes it: {error}") from error
    if held is None:
        raise DataError(f"{sample}: none of its {len(ids)} rows has the role {HOLDOUT!r}")
    mine = id_keys(pairs.ids)
    unknown = ~np.isin(mine, keys)
    if unknown.any():
        names = pairs.ids.filter(pa.array(unknown)).to_pylist()
        raise BadRowsError(
            str(sample), "pairs are not in this sample", names, "Give the sample that these pairs were made of."
        )
    return Pairs(pairs.ids, pairs.source, pairs.target, np.isin(mine, keys[held]))


def read_queries(queries: Reader, source_queries: Reader | None, dims: tuple[int, int], bad: BadRows) -> Queries:
    """Read the new model's queries and the old model's same ones; `dims` are those of source and target.

    Raises IncompatibleError for another dimension, BadRowsError (see `BadRows`) for unusable rows and for
    queries that the old model's store lacks.
    """
    for reader, dim, side in ((queries, dims[1], "target"), (source_queries, dims[0], "source")):
        if reader is not None and reader.info.dim != dim:
            raise IncompatibleError(
                f"{reader.info.uri} has {reader.info.dim} dimensions, the {side} vectors have {dim}"
            )
    rows = bad.whole(queries)
    if source_queries is None:
        return Queries(as_strings(rows.ids), rows.vectors)
    _check_numbering(source_queries.info, queries.info)
    old = bad.whole(source_queries)
    places = pc.index_in(as_strings(rows.ids), value_set=as_strings(old.ids)).fill_null(-1).to_numpy()
    where, fault = source_queries.info.uri, f"queries of {queries.info.uri} are not in it"
    keep = np.flatnonzero(bad.drop(places < 0, rows.ids, where, fault, "Give both the same ids"))
    rows = rows.take(keep)
    return Queries(as_strings(rows.ids), rows.vectors, old.vectors[places[keep]])


def _check_numbering(source: StoreInfo, target: StoreInfo) -> None:
    """Refuse row numbers as ids unless they must mean the same rows on both sides."""
    if target.id_type is None and (source.id_type is not None or source.count != target.count):
        other = "stores ids" if source.id_type is not None else f"numbers {source.count}"
        raise UsageError(
            f"{target.uri} numbers its {target.count} rows and {source.uri} {other}: which belong together "
            f"can't be known; {naming_ids(target)}"
        )


def _check_kinds(source: StoreInfo, target: StoreInfo) -> None:
    kinds = [info.id_type or pa.int64() for info in (source, target)]
    if pa.types.is_integer(kinds[0]) != pa.types.is_integer(kinds[1]):
        cure = f"store the target's ids as {kinds[0]}" if source.id_type is not None else naming_ids(source)
        raise UsageError(f"ids of {source.uri} are {_kind(source)}, those of {target.uri} are {_kind(target)}: {cure}")


def _kind(info: StoreInfo) -> str:
    return "row numbers" if info.id_type is None else str(info.id_type)


def naming_ids(info: StoreInfo) -> str:
    """Say how a store whose rows are only numbered gets ids: from the right one of its columns, if it has some."""
    if info.kind == "faiss":
        return "add the vectors to it with their ids, in an IndexIDMap2"
    if info.kind != "parquet":
        return "store the ids beside the vectors, as in npy:VECTORS.npy?ids=IDS.npy"
    others = [name for name, role in info.columns.items() if role == "payload"]
    if not others:
        return "add a column of ids, called id"
    address = Uri.parse(info.uri)
    named = Uri("parquet", address.path, {**address.options, "id": "COLUMN"})
    return f"of its columns {', '.join(others)} name the one with the ids, as in {named}"


def _marks(rows: VectorBatch, where: str) -> Mask | None:
    if rows.payload is None or ROLE not in rows.payload.column_names:
        return None
    return _held(rows.payload.column(ROLE), where)


def _held(roles: pa.ChunkedArray, where: str) -> Mask | None:
    """Return which rows a role column marks as held out; None if none, as in one of another meaning."""
    values = roles.to_pylist()
    if set(values) == {FIT}:
        raise DataError(
            f"{where}: all {len(values)} rows have the role {FIT!r}: encode the sample's {HOLDOUT!r} rows with the new "
            "model too, or nothing can be measured"
        )
    if HOLDOUT not in values:
        return None
    other = sorted({str(v) for v in values} - {FIT, HOLDOUT})
    if other:
        raise DataError(f"{where}: the column {ROLE!r} holds {', '.join(other[:5])} beside {FIT!r} and {HOLDOUT!r}")
    return np.array([v == HOLDOUT for v in values], np.bool_)
