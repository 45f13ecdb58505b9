"""FAISS: a file, a folder or a glob of files read as shards, or an index in memory; one file to write.

    faiss:PATH?nprobe=32&efSearch=64&missing=skip

`nprobe` and `efSearch` (and `efConstruction` when writing) set search parameters. `missing=skip` reads an inverted
file of which FAISS lost rows, because they were NaN when they were added.

Rows are read where they lie (see `_faiss_walk`): those of an inverted file come list by list, all others in the
order they were added in. Ids are int64, or what the sidecar says they were. Inverted lists in a file of their own are
looked for beside the index only. A file whose layout isn't known here is opened in a child process first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from vecferry.batch import Cursor, Floats, Positions, VectorBatch
from vecferry.errors import DataError, IncompatibleError, UnsupportedError, UsageError
from vecferry.store import StoreInfo, Uri, find, require_all
from vecferry_adapters._faiss_check import labels_outside
from vecferry_adapters._faiss_describe import describe, tuned
from vecferry_adapters._faiss_factory import integer
from vecferry_adapters._faiss_file import Ints, OpenIndex, find_files, is_index, load_faiss, open_index, unwrap
from vecferry_adapters._faiss_rows import Rows
from vecferry_adapters._faiss_search import Found, merge, search, search_among
from vecferry_adapters._faiss_sidecar import read_entry
from vecferry_adapters._faiss_tuning import centroids, distances, limits, searching_with
from vecferry_adapters._faiss_walk import walk
from vecferry_adapters._faiss_writer import FaissWriter
from vecferry_adapters._staging import swap_back

KIND = "faiss"
LABELS = 1 << 20


def sniff(path: Path) -> bool:
    """Say whether a file starts as FAISS indexes do, or a folder or glob has such files."""
    return any(is_index(p) for p in find_files(str(path)) if p.is_file())


def open_reader(uri: Uri) -> FaissReader:
    """Open FAISS files as shards of one store; raise DataError for damaged ones, UnsupportedError for binary codes."""
    load_faiss()
    files = find_files(uri.path)
    for path in files:
        if not path.is_file():
            raise UsageError(f"{uri}: {path} is no file")
    if not files:
        raise UsageError(f"{uri}: no FAISS files there")
    return FaissReader(uri, [open_index(p) for p in files], [read_entry(p) for p in files])


def open_writer(uri: Uri, info: StoreInfo, *, resume: bool, overwrite: bool, threads: int) -> FaissWriter:
    """Stage a FAISS file; raise UsageError for a structure that can't be built, UnsupportedError for ids or types."""
    load_faiss()

    def open_staged(path: Path, entry: Mapping[str, Any]) -> FaissReader:
        return FaissReader(Uri(KIND, str(path)), [open_index(path)], [entry])

    return FaissWriter(uri, info, resume=resume, overwrite=overwrite, threads=threads, open_staged=open_staged)


def rollback(uri: Uri) -> str:
    """Swap a file with its backup; the sidecar describes both."""
    return str(swap_back(Path(uri.path)))


def wrap(index: Any) -> FaissReader | None:
    """Read an index that is in memory, one on a GPU through a copy; return None for anything else."""
    if not any(cls.__module__.split(".")[0] == "faiss" for cls in type(index).__mro__):
        return None
    faiss = load_faiss()
    if isinstance(index, faiss.IndexBinary):
        raise UnsupportedError(f"{type(index).__name__}: a linear map does not apply to binary codes")
    if not isinstance(index, faiss.Index):
        return None
    if hasattr(faiss, "GpuIndex") and isinstance(index, faiss.GpuIndex):
        index = faiss.index_gpu_to_cpu(index)
    shards = [index]
    whole = faiss.downcast_index(index)
    if isinstance(whole, faiss.IndexShards):
        shards = [whole.at(i) for i in range(whole.count())]
    elif isinstance(whole, faiss.IndexReplicas):
        shards = [whole.at(0)]
    reader = FaissReader(Uri("", f"in-memory {type(index).__name__}"), [unwrap(i) for i in shards], [{}] * len(shards))
    reader.keep = index
    return reader


class FaissReader:
    """Read FAISS indexes, one after the other, without loading what is in files."""

    keep: Any = None

    def __init__(self, uri: Uri, parts: Sequence[OpenIndex], entries: Sequence[Mapping[str, Any]]) -> None:
        uri.require("nprobe", "efSearch", "missing")
        self._uri = uri
        self._parts = list(parts)
        self._rows = [walk(p.index, str(p.path or uri)) for p in parts]
        for part, rows in zip(self._parts, self._rows, strict=True):
            self._check(part, rows)
        self._starts = np.concatenate([[0], np.cumsum([r.count for r in self._rows], dtype=np.int64)])
        self._tune()
        self.info = self._describe(entries)

    def _check(self, part: OpenIndex, rows: Rows) -> None:
        where, missing = part.path or self._uri, self._uri.options.get("missing", "fail")
        if missing not in ("fail", "skip"):
            raise UsageError(f"{self._uri}: missing is fail or skip, not {missing}")
        if part.id_map is not None and labels_outside(part.index, len(part.id_map)):
            raise DataError(
                f"{where} has an {part.outer} around inverted lists that refer to rows beyond its {len(part.id_map)} "
                "ids: FAISS leaves that behind when rows are deleted from such an index, and it gives wrong ids since "
                "then. Build it again, without the id map: inverted lists keep ids themselves"
            )
        if rows.count > part.index.ntotal:
            raise DataError(f"{where} is damaged: it counts {part.index.ntotal} rows, and holds {rows.count}")
        if rows.count != part.index.ntotal and missing == "fail":
            raise DataError(
                f"{where} counts {part.index.ntotal} rows, but only {rows.count} are in its inverted lists: FAISS "
                "drops rows that are NaN when they are added. Read it without them by ?missing=skip"
            )

    def _tune(self) -> None:
        """Give the indexes the search parameters of the address."""
        for name in ("nprobe", "efSearch"):
            if name in self._uri.options:
                value = integer(self._uri, name)
                for part in self._parts:
                    owners = [owner for owner, has in tuned(part.index) if has == name]
                    if not owners:
                        raise UsageError(f"{self._uri}: an {describe(part.index)} index has no {name}")
                    setattr(owners[0], name, value)

    def _describe(self, entries: Sequence[Mapping[str, Any]]) -> StoreInfo:
        faiss = load_faiss()
        metrics = {faiss.METRIC_INNER_PRODUCT: "ip", faiss.METRIC_L2: "l2"}
        names = {getattr(faiss, n): n for n in dir(faiss) if n.startswith("METRIC_")}
        facts = []
        for part, rows, entry in zip(self._parts, self._rows, entries, strict=True):
            index, kind = part.index, part.index.metric_type
            if kind not in metrics:
                name = names.get(kind, str(kind))
                raise UnsupportedError(
                    f"{part.path or self._uri}: {name}; use an index with METRIC_INNER_PRODUCT or L2"
                )
            explicit = part.id_map is not None or rows.labels(slice(0, 0)) is not None
            metric = entry.get("metric", metrics[kind])
            id_type = _integer_type(entry.get("id_type")) if explicit else None
            facts.append({"dimension": index.d, "metric": metric, "id type": id_type, "space": entry.get("space")})
            for name, value in facts[0].items():
                if facts[-1][name] != value:
                    raise (DataError if name != "space" else IncompatibleError)(
                        f"shards differ in {name}: {self._parts[0].path or self._uri} has {value}, "
                        f"{part.path or self._uri} has {facts[-1][name]}"
                    )
        first, common = self._parts[0], facts[0]
        outer = f"{first.outer}," if first.outer else ""
        return StoreInfo(
            kind=KIND,
            uri=str(self._uri),
            count=int(self._starts[-1]),
            dim=common["dimension"],
            metric=common["metric"],
            id_type=common["id type"],
            nbytes=sum(map(_nbytes, self._parts, self._rows)),
            index=outer + describe(first.index),
            parameters={name: int(getattr(owner, name)) for owner, name in tuned(first.index)},
            lossy=any(r.lossy for r in self._rows),
            space=common["space"],
            ordered=all(r.ordered for r in self._rows),
            dtype=self._rows[0].code,
            provenance=entries[0].get("provenance", {}),
        )

    def read(self, batch_size: int, after: Cursor = None) -> Iterator[VectorBatch]:
        """Yield rows in reading order; a cursor is the number of rows up to the end of its batch."""
        for number, where in self._slices(batch_size, int(after or 0)):
            vectors = self._vectors(number, where)
            ids = self._ids(number, where)
            self._parts[number].release()
            yield VectorBatch(ids, vectors, cursor=int(self._starts[number]) + where.stop)

    def _slices(self, size: int, start: int = 0) -> Iterator[tuple[int, slice]]:
        """Cut all rows behind `start` into slices of one shard each."""
        for number, (low, high) in enumerate(zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True)):
            for at in range(max(low, start), high, size):
                yield number, slice(at - low, min(at + size, high) - low)

    def _vectors(self, number: int, where: slice | Ints) -> Floats:
        try:
            return self._rows[number].vectors(where)
        except RuntimeError as error:
            where_from = self._parts[number].path or self._uri
            raise DataError(f"{where_from} is damaged: FAISS can't decode its rows: {error}") from error

    def _ids(self, number: int, where: slice | Ints) -> pa.Array:
        """Return the ids of these rows of a shard."""
        part, rows = self._parts[number], self._rows[number]
        places = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        labels = rows.labels(where)
        if labels is None:
            labels = places
        if part.id_map is not None:
            if len(labels) and not (labels.min() >= 0 and labels.max() < len(part.id_map)):
                raise DataError(f"{part.path or self._uri} is damaged: its rows don't have the ids of its id map")
            return pa.array(np.array(part.id_map[labels])).cast(self.info.id_type)
        if self.info.id_type is None:
            return pa.array(labels + self._starts[number])
        return pa.array(labels).cast(self.info.id_type)

    def ids(self, batch_size: int) -> Iterator[pa.Array]:
        """Yield the ids in reading order; no vector is read."""
        for number, where in self._slices(batch_size):
            ids = self._ids(number, where)
            self._parts[number].release()
            yield ids

    def take(self, ids: pa.Array) -> VectorBatch:
        """Return the rows of these ids, in this order."""
        places = find(self, ids)
        require_all(str(self._uri), ids, places)
        vectors = np.empty((len(places), self.info.dim), np.float32)
        found = np.empty(len(places), np.int64 if self.info.id_type is None else self.info.id_type.to_pandas_dtype())
        for number, members, inside in self._by_shard(places):
            vectors[members] = self._vectors(number, inside)
            found[members] = self._ids(number, inside).to_numpy()
            self._parts[number].release()
        return VectorBatch(pa.array(found), vectors)

    def _by_shard(self, places: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """Sort places by their shard: (the shard, where they stand in `places`, their places in the shard)."""
        owner = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(owner).tolist():
            members = np.flatnonzero(owner == number)
            yield number, members, places[members] - self._starts[number]

    def search(self, queries: Floats, k: int, among: pa.Array | None = None) -> Found:
        """Search every shard's own index; of an inner-product index scores are products, of an L2 one -distance**2."""
        if queries.ndim != 2 or queries.shape[1] != self.info.dim:
            raise IncompatibleError(f"{self._uri} holds {self.info.dim} dimensions, the queries are {queries.shape}")
        parts = [(np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf, np.float32))]
        if among is None:
            for number, (part, rows) in enumerate(zip(self._parts, self._rows, strict=True)):
                labels, scores = search(part, rows, queries, k)
                places = self._places(rows, labels)
                parts.append((np.where(places == -1, -1, places + self._starts[number]), scores))
                part.release()
        else:
            wanted = find(self, among)
            require_all(str(self._uri), among, wanted)
            for number, members, inside in self._by_shard(wanted):
                places, scores = search_among(self._parts[number], self._rows[number], queries, k, inside)
                parts.append((np.where(places == -1, -1, members[places]), scores))
                self._parts[number].release()
        return merge(parts, k)

    @property
    def tunable(self) -> Mapping[str, int]:
        """Name nprobe or efSearch, where the index has it, with the largest value that makes a difference."""
        return limits([part.index for part in self._parts])

    def search_with(self, queries: Floats, k: int, parameters: Mapping[str, int]) -> tuple[Ints, Floats, int]:
        """Search with other parameters, this once; return also the number of distances, those to centroids included."""
        indexes = [part.index for part in self._parts]
        before = distances()
        with searching_with(indexes, parameters):
            places, scores = self.search(queries, k)
        return places, scores, distances() - before + centroids(indexes) * len(queries)

    def _places(self, rows: Rows, labels: Ints) -> Ints:
        """Find at which places of a shard's reading order rows stand that a search called by these labels."""
        if rows.labels(slice(0, 0)) is None:
            return labels
        distinct, back = np.unique(labels, return_inverse=True)
        positions = Positions(pa.array(distinct))
        for at in range(0, rows.count, LABELS):
            positions.update(pa.array(rows.labels(slice(at, min(at + LABELS, rows.count)))))
        return np.where(labels == -1, -1, positions.found[back.reshape(labels.shape)])

    def close(self) -> None:
        """Let go of the indexes; a map ends when the last view into it does."""
        self._parts, self._rows, self.keep = [], [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _integer_type(name: str | None) -> pa.DataType:
    """Return the Arrow type that the ids had before FAISS made them int64."""
    return pa.int64() if name is None else pa.type_for_alias(name)


def _nbytes(part: OpenIndex, rows: Rows) -> int:
    return part.path.stat().st_size if part.path is not None else rows.count * rows.width
