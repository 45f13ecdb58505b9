"""The held-out part of a paired sample: what the gate measures with. It travels inside the map folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vecferry.batch import Floats, faulty, id_keys
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.jsonfile import parse_json
from vecferry.linear import LinearMap
from vecferry.mapfile import HOLDOUT

CONTENT = "content"
"""Key of the file's metadata that holds a hash of all that it holds; the first files have none."""


@dataclass(frozen=True, slots=True, eq=False)
class Qrels:
    """Hold relevance labels in parallel arrays: rows of `queries`, rows of the held-out documents, grades > 0."""

    query: NDArray[np.int64]
    document: NDArray[np.int64]
    grade: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Holdout:
    """Hold documents and queries that no map was fitted on.

    ids             the documents' ids, in the source's type
    source, target  their vectors in both spaces, `[n, d_source]` and `[n, d_target]`
    query_ids       strings; `queries` `[q, d_target]`; `source_queries` `[q, d_source]` or None
    qrels           labels among these documents and queries, or None
    fit_keys        `id_keys` of the documents that the map was fitted on
    fingerprint     what the source looked like (uri, kind, count), and in a map's folder the sha256 of that map
    """

    ids: pa.Array
    source: Floats
    target: Floats
    query_ids: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))
    queries: Floats | None = None
    source_queries: Floats | None = None
    qrels: Qrels | None = None
    fit_keys: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen = np.intersect1d(id_keys(self.ids), self.fit_keys)
        if len(seen):
            raise DataError(f"{len(seen)} of {len(self.ids)} held-out documents were fitted on: measure with others")

    def take(self, rows: NDArray[np.int64]) -> Holdout:
        """Return the part with the documents at these ascending positions, and all queries."""
        qrels = self.qrels
        if qrels is not None:
            place = np.full(len(self.ids), -1, np.int64)
            place[rows] = np.arange(len(rows))
            document = place[qrels.document]
            here = document >= 0
            qrels = Qrels(qrels.query[here], document[here], qrels.grade[here]) if here.any() else None
        ids = self.ids.take(pa.array(rows))
        return replace(self, ids=ids, source=self.source[rows], target=self.target[rows], qrels=qrels)

    def save(self, path: Path) -> None:
        """Write one Parquet file: a row for each document, query and label, `kind` says which."""
        vector = pa.list_(pa.float32())
        names = [("kind", pa.string()), ("id", self.ids.type), ("query", pa.string())]
        schema = pa.schema(
            [*names, ("source", vector), ("target", vector), ("grade", pa.int64()), ("key", pa.uint64())]
        )

        def rows(kind: str, n: int, **columns: Any) -> pa.Table:
            held = {"kind": pa.array([kind] * n, pa.string())} | columns
            arrays = [held[f.name] if f.name in held else pa.nulls(n, f.type) for f in schema]
            return pa.table(arrays, schema=schema)

        tables = [rows("document", len(self.ids), id=self.ids, source=_lists(self.source), target=_lists(self.target))]
        if self.queries is not None:
            n = len(self.queries)
            source = pa.nulls(n, vector) if self.source_queries is None else _lists(self.source_queries)
            tables.append(rows("query", n, query=self.query_ids, source=source, target=_lists(self.queries)))
        if self.qrels is not None:
            ids, names = self.ids.take(pa.array(self.qrels.document)), self.query_ids.take(pa.array(self.qrels.query))
            tables.append(rows("label", len(ids), id=ids, query=names, grade=pa.array(self.qrels.grade)))
        tables.append(rows("fit", len(self.fit_keys), key=pa.array(self.fit_keys)))
        metadata = {"vecferry": json.dumps(dict(self.fingerprint)), CONTENT: self._content()}
        table = pa.concat_tables(tables).replace_schema_metadata(metadata)
        pq.write_table(table, path, compression="zstd", use_dictionary=["kind", "query"])

    def _content(self) -> str:
        """Hash everything that is held: Parquet has no checksum that pyarrow writes or looks at by itself."""
        digest = hashlib.sha256(json.dumps(dict(self.fingerprint), sort_keys=True).encode())
        arrays: list[NDArray[Any]] = [id_keys(self.ids), self.source, self.target, id_keys(self.query_ids)]
        arrays += [a for a in (self.queries, self.source_queries) if a is not None]
        if self.qrels is not None:
            arrays += [self.qrels.query, self.qrels.document, self.qrels.grade]
        for array in (*arrays, self.fit_keys):
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @classmethod
    def load(cls, path: Path) -> Holdout:
        """Read what `save` wrote; raise DataError for anything else, and for vectors that nothing is measured with."""
        try:
            with pq.ParquetFile(path) as file:
                _check_schema(file.schema_arrow)
                table = file.read()
            documents, asked, labels, fitted = (
                table.filter(pc.equal(table["kind"], kind)) for kind in ("document", "query", "label", "fit")
            )
            ids = documents["id"].combine_chunks()
            names = asked["query"].combine_chunks()
            qrels = None
            if labels.num_rows:
                at = {name: i for i, name in enumerate(names.to_pylist())}
                places = {name: i for i, name in enumerate(ids.to_pylist())}
                qrels = Qrels(
                    np.array([at[q] for q in labels["query"].to_pylist()], np.int64),
                    np.array([places[d] for d in labels["id"].to_pylist()], np.int64),
                    labels["grade"].to_numpy(),
                )
            has_source = asked.num_rows > 0 and asked["source"].null_count == 0
            held = cls(
                ids=ids,
                source=_matrix(documents["source"]),
                target=_matrix(documents["target"]),
                query_ids=names,
                queries=_matrix(asked["target"]) if asked.num_rows else None,
                source_queries=_matrix(asked["source"]) if has_source else None,
                qrels=qrels,
                fit_keys=fitted["key"].to_numpy(),
                fingerprint=parse_json(table.schema.metadata[b"vecferry"]),
            )
            content = table.schema.metadata.get(CONTENT.encode())
            if content is not None and content.decode() != held._content():
                raise DataError(f"{path} is damaged: it holds something else than was written")
        except (OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
            raise DataError(f"{path} can't be read as a hold-out: {error}") from error
        for vectors, named in (
            (held.source, held.ids),
            (held.target, held.ids),
            (held.queries, held.query_ids),
            (held.source_queries, held.query_ids),
        ):
            if vectors is not None and (bad := faulty(vectors)).any():
                fault = "held-out vectors hold NaN, infinite or too large numbers, or nothing but zeros"
                raise BadRowsError(str(path), fault, named.filter(pa.array(bad)).to_pylist(), "Fit the map again.")
        return held


def holdout_of(m: LinearMap) -> Holdout:
    """Return the hold-out of a map, from memory or from its folder; raise UsageError if it has none."""
    if m.holdout is not None:
        return m.holdout
    if m.path is None or not (m.path / HOLDOUT).is_file():
        raise UsageError(f"the map {m.path or ''} has no hold-out: fit it with `vecferry fit`")
    held = Holdout.load(m.path / HOLDOUT)
    made_for = held.fingerprint.get("map")
    if m.card is not None and made_for != m.card.sha256:
        raise DataError(
            f"{m.path / HOLDOUT} was held out of another map (sha256 {str(made_for)[:16]}…, not {m.card.sha256[:16]}…)"
            ": what it holds may be what this one was fitted on"
        )
    return held


def _check_schema(schema: pa.Schema) -> None:
    """Raise ValueError for other columns than `save` writes; the ids may be of any type that ids can have."""
    vector = pa.list_(pa.float32())
    wanted = {"kind": pa.string(), "query": pa.string(), "source": vector, "target": vector}
    wanted |= {"grade": pa.int64(), "key": pa.uint64()}
    for name, kind in wanted.items():
        if schema.field(name).type != kind:
            raise ValueError(f"its column {name} holds {schema.field(name).type}, not {kind}")


def _lists(x: Floats) -> pa.Array:
    offsets = np.arange(0, x.size + 1, x.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(x).reshape(-1)))


def _matrix(column: pa.ChunkedArray) -> Floats:
    lists = column.combine_chunks()
    if lists.null_count or len(pc.list_value_length(lists).unique()) > 1:
        raise ValueError("its vectors differ in length, or some are missing")
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(flat.reshape(len(column), -1), dtype=np.float32)
