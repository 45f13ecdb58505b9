"""What a store is to vecferry: its description, its reader, its writer, and how an adapter is found.

An adapter is a module behind the entry point group `vecferry.adapters`. It offers

    KIND: str                                       the scheme of its URIs, the entry point's name
    def sniff(path: Path) -> bool                   is this file or folder one of mine? By content.
    def open_reader(uri: Uri) -> Reader
    def open_writer(uri: Uri, info: StoreInfo, *, resume: bool, overwrite: bool, threads: int) -> Writer
    def rollback(uri: Uri) -> str                   swap a store with its backup; return where the newer one is now

and nothing else is asked of it. vecferry's own adapters come in by the same door.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict, runtime_checkable
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.batch import Cursor, Floats, Positions, VectorBatch
from vecferry.errors import BadRowsError, DataError, UnsupportedError, UsageError

GROUP = "vecferry.adapters"
SUFFIXES = {".faiss": "faiss", ".index": "faiss", ".npy": "npy", ".parquet": "parquet"}
"""What a new store is where the address has no scheme; existing ones are told by their content."""


@dataclass(frozen=True, slots=True)
class Uri:
    """Hold a parsed store address: `kind:path?key=value&...`; `kind` is "" where it must be sniffed."""

    kind: str
    path: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Uri:
        """Split an address; a scheme counts only if an adapter of that name is installed."""
        kind, colon, rest = text.partition(":")
        if not colon or kind not in adapters():
            if colon and kind.isidentifier() and len(kind) > 1 and not Path(text).exists():
                known = ", ".join(sorted(adapters()))
                raise UsageError(f"{text}: no adapter named {kind!r}; installed adapters: {known}")
            kind, rest = "", text
        path, question, query = rest.partition("?")
        if question and Path(rest).exists():
            path, query = rest, ""  # a file with a question mark in its name
        try:
            pairs = parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
        except ValueError as error:
            if not kind and Path(path).suffix == "" and Path(rest).suffix in SUFFIXES:
                return cls("", rest)  # a new one, such as what?.faiss
            raise UsageError(f"{text}: options after '?' must be key=value joined by '&'") from error
        if len(options := dict(pairs)) < len(pairs):
            raise UsageError(f"{text}: an option is given twice")
        return cls(kind, path, options)

    def require(self, *allowed: str) -> None:
        """Raise UsageError if the address has an option that its adapter doesn't know."""
        unknown = sorted(set(self.options) - set(allowed))
        if unknown:
            options = ", ".join(allowed) or "none"
            raise UsageError(f"{self}: unknown option {', '.join(unknown)}; {self.kind} takes: {options}")

    def as_new(self, kind: str) -> Uri:
        """Return the address with the kind of a store that doesn't exist yet: its scheme's, its suffix's, or `kind`."""
        chosen = self.kind or SUFFIXES.get(Path(self.path).suffix, kind)
        return Uri(chosen, self.path, self.options)

    def __str__(self) -> str:
        query = "&".join(f"{k}={v}" for k, v in self.options.items())
        return (f"{self.kind}:" if self.kind else "") + self.path + (f"?{query}" if query else "")


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """Describe a store, or the store that a writer is to make.

    count       rows, None if not known before the work (a target's may shrink when rows are skipped)
    metric      "ip", "l2", "cosine", or None where the store doesn't say
    id_type     Arrow type of the ids, None where rows are numbered from 0 and no ids are stored
    payload     the other columns; None or without fields where there are none
    index       a description of the index structure (a FAISS factory string), "" where there is none
    parameters  search and build parameters (nprobe, efSearch, efConstruction)
    lossy       the vectors read back are not those that went in (quantised codes)
    space       the identity of the embedding space, None where nobody recorded it
    ordered     reading gives the rows in the order they were written
    dtype       how elements are stored: "float32", "float16", "float64", or the name of a code
    provenance  what a migration recorded beside the store: models, map hash, plan
    columns     a table's columns in order, each with its role: "id", "vector" or "payload"
    """

    kind: str
    uri: str
    count: int | None
    dim: int
    metric: str | None = None
    id_type: pa.DataType | None = None
    payload: pa.Schema | None = None
    nbytes: int = 0
    index: str = ""
    parameters: Mapping[str, int] = field(default_factory=dict)
    lossy: bool = False
    space: str | None = None
    ordered: bool = True
    dtype: str = "float32"
    provenance: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)


class Provenance(TypedDict, total=False):
    """Name what is taken from what a migration recorded beside a store, with its types; it holds more."""

    plan: str
    map: str
    source_metric: str | None
    source_lossy: bool | None
    encoded: dict[str, int]
    filter: dict[str, Any]


class Reader(Protocol):
    """Read a store; a context manager."""

    @property
    def info(self) -> StoreInfo:
        """Describe the store from its header, without reading its vectors."""

    def read(self, batch_size: int, after: Cursor = None) -> Iterator[VectorBatch]:
        """Yield all rows in a stable order, at most `batch_size` at a time, in bounded memory.

        `after` is the cursor of an earlier batch (of any batch size): reading goes on behind it. Rows that
        can't be vectors (null, of another length) come as rows of NaN, so that no id ever shifts and the caller
        treats every bad row by one rule.
        """

    def ids(self, batch_size: int) -> Iterator[pa.Array]:
        """Yield all ids in reading order, without reading vectors where the store allows it."""

    def take(self, ids: pa.Array) -> VectorBatch:
        """Return the rows of these distinct ids, in this order; raise BadRowsError naming those missing."""

    def search(self, queries: Floats, k: int, among: pa.Array | None = None) -> tuple[NDArray[np.int64], Floats]:
        """Search with the store's own index and its recorded parameters: (places, scores), both `[q, k]`.

        Places are positions in reading order, or positions in `among` where given (then only those ids are
        found); -1 where the index returned fewer than k. Scores are larger for nearer. Raises UnsupportedError
        for a store that has no index of its own.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Tunable(Protocol):
    """What a reader may offer besides `Reader`: searches with other parameters than the recorded ones."""

    @property
    def tunable(self) -> Mapping[str, int]:
        """Name the search parameters, each with the largest value that makes a difference."""

    def search_with(
        self, queries: Floats, k: int, parameters: Mapping[str, int]
    ) -> tuple[NDArray[np.int64], Floats, int]:
        """Search as `search` does, this once with other parameters; return also how many distances that took."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Say what a writer can do: stage (be searched before it is published), publish atomically, hold payload."""

    stages: bool = True
    atomic_publish: bool = True
    payload: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Say what is durably staged.

    `rows` are on disk. `cursor` is the cursor of the last batch that is on disk whole, and `rows_at_cursor`
    the number of rows written up to its end; rows - rows_at_cursor rows of what follows are on disk too.
    """

    rows: int = 0
    cursor: Cursor = None
    rows_at_cursor: int = 0


class Writer(Protocol):
    """Write a new store that is invisible until `commit`; a context manager whose exit keeps the stage."""

    @property
    def capabilities(self) -> Capabilities:
        """Say what this store can do."""

    @property
    def progress(self) -> Progress:
        """Say what is durably staged, so that the caller can continue behind it."""

    def write(self, batch: VectorBatch) -> None:
        """Stage the rows of a batch. Same rows, same bytes, however they are cut into batches."""

    def staged(self) -> Reader:
        """Finish the stage (flush, train, build) and open it, exactly as it would be published."""

    def commit(self) -> str | None:
        """Publish the stage in one atomic, durable step; return where the old store was kept, if any."""

    def abort(self) -> None:
        """Delete the stage."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Adapter(Protocol):
    """The functions an adapter module offers (see the top of this file)."""

    KIND: str

    def sniff(self, path: Path) -> bool:
        """Say whether this file or folder is one of this adapter's stores, by its content."""

    def open_reader(self, uri: Uri) -> Reader:
        """Open a store for reading."""

    def open_writer(self, uri: Uri, info: StoreInfo, *, resume: bool, overwrite: bool, threads: int) -> Writer:
        """Open a new store for writing."""

    def rollback(self, uri: Uri) -> str:
        """Swap a store with its backup in one atomic step; return where the newer one is now."""


def adapters() -> dict[str, EntryPoint]:
    """Return the installed adapters by name; raise UsageError when two distributions claim one name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UsageError(f"two adapters are named {point.name!r}: {other.value} and {point.value}; uninstall one")
    return found


def load(kind: str) -> Adapter:
    """Import the adapter of this name."""
    points = adapters()
    if kind not in points:
        raise UsageError(f"no adapter named {kind!r}; installed adapters: {', '.join(sorted(points))}")
    adapter: Adapter = points[kind].load()
    return adapter


def resolve(uri: str | Uri) -> tuple[Adapter, Uri]:
    """Find the adapter of an existing store, by its scheme or else by its content."""
    address = Uri.parse(uri) if isinstance(uri, str) else uri
    if address.kind:
        return load(address.kind), address
    path = Path(address.path)
    names = sorted(adapters())
    takers = [name for name in names if load(name).sniff(path)]
    if len(takers) == 1:
        return load(takers[0]), Uri(takers[0], address.path, address.options)
    if not path.exists() and not takers:
        raise UsageError(f"{address.path}: no such file or folder")
    if takers:
        raise UsageError(f"{address.path}: could be {' or '.join(takers)}; say which, as in {takers[0]}:{address.path}")
    raise DataError(f"{address.path}: not a store that any installed adapter knows ({', '.join(names)})")


def open_reader(uri: str | Uri | Reader | Any) -> Reader:
    """Open a store for reading: an address, an open reader, or an index object that an adapter takes.

    Raises UsageError for an unknown address, DataError for a store that can't be read.
    """
    if isinstance(uri, (str, Uri)):
        adapter, address = resolve(uri)
        return adapter.open_reader(address)
    if isinstance(uri, Path):
        return open_reader(str(uri))
    if hasattr(uri, "read") and hasattr(uri, "info"):
        reader: Reader = uri
        return reader
    for name in sorted(adapters()):
        wrap = getattr(load(name), "wrap", None)
        if wrap is not None and (wrapped := wrap(uri)) is not None:
            found: Reader = wrapped
            return found
    raise UsageError(f"{type(uri).__name__} is neither a store's address nor an index that an adapter takes")


def open_writer(
    uri: str | Uri, info: StoreInfo, *, resume: bool = False, overwrite: bool = False, threads: int = 1
) -> Writer:
    """Open a new store for writing, in the kind that the address or else `info.kind` names.

    `info.provenance["plan"]` identifies the work: an unfinished stage is continued with `resume` only if its plan
    is the same. Raises UsageError for an existing target without `overwrite`, an unfinished stage without `resume`,
    a changed plan, and a stage that another process holds.
    """
    address = Uri.parse(uri) if isinstance(uri, str) else uri
    address = address.as_new(info.kind)
    return load(address.kind).open_writer(address, info, resume=resume, overwrite=overwrite, threads=threads)


def rollback(uri: str | Uri) -> str:
    """Swap a store that a migration overwrote with its backup; return where the newer one is now.

    The old store was never touched, so this restores it to the bit; no map is inverted. Raises UsageError where there
    is no backup.
    """
    adapter, address = resolve(uri)
    if not hasattr(adapter, "rollback"):
        raise UnsupportedError(f"{address.kind} stores can't be rolled back: switch to the old one where it is kept")
    return adapter.rollback(address)


def find(reader: Reader, ids: pa.Array, batch_size: int = 1 << 16) -> NDArray[np.int64]:
    """Return the places of these ids in reading order, -1 where the store doesn't have one."""
    positions = Positions(ids)
    for piece in reader.ids(batch_size):
        positions.update(piece)
    return positions.found


def require_all(reader_uri: str, ids: pa.Array, places: NDArray[np.int64]) -> None:
    """Raise BadRowsError naming the ids whose place is -1."""
    missing = np.flatnonzero(places < 0)
    if len(missing):
        names = ids.take(pa.array(missing)).to_pylist()
        raise BadRowsError(
            reader_uri, f"of {len(ids)} ids are not in this store", names, "Check that both sides use the same ids."
        )


@contextlib.contextmanager
def opened(uri: str | Uri | Reader | Any) -> Iterator[Reader]:
    """Open a store for the length of a block; a reader that was open already stays open."""
    reader = open_reader(uri)
    if reader is uri:
        yield reader
    else:
        with reader:
            yield reader
