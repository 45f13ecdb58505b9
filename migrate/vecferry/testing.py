# ruff: noqa: D102 (the names of the tests say what they test)
"""The conformance suite that every adapter must pass, vecferry's own and a third party's. Needs pytest.

Subclass `AdapterSuite` in a test module, say how a store of this kind is made by other means than the adapter,
and give a reason for everything that the store can't do:

    class TestMyStore(AdapterSuite):
        kind = "mystore"
        no_payload = "a .my file holds vectors and ids only"

        def make(self, folder, rows):
            my_library.write(folder / "source.my", rows.vectors, rows.ids)
            return f"mystore:{folder / 'source.my'}"

        def target(self, folder):
            return f"mystore:{folder / 'target.my'}"
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import VectorBatch, concat
from vecferry.errors import BadRowsError, IncompatibleError, UnsupportedError, UsageError

ID_TYPES = (pa.int32(), pa.int64(), pa.uint64(), pa.string(), pa.large_string(), pa.binary())


def sample_ids(n: int, kind: pa.DataType | None, seed: int = 0) -> pa.Array:
    """Make n distinct ids of a type in no order, above 2**32 where they fit; None gives row numbers."""
    if kind is None:
        return pa.array(np.arange(n))
    numbers = np.random.default_rng(seed).permutation(n)
    if pa.types.is_integer(kind):
        return pa.array(numbers * (2**33 if kind.bit_width == 64 else 2**10) + 5).cast(kind)
    texts = [f"dök-{i:x}" if i % 3 else f"d{i}" for i in numbers]
    return pa.array([t.encode() for t in texts] if kind == pa.binary() else texts, kind)


def sample_payload(n: int, seed: int = 0) -> pa.Table:
    """Make payload columns that easily get lost: nulls, nesting, time zones, categories, metadata."""
    rng = np.random.default_rng(seed + 1)
    words = [None if i % 11 == 0 else f"wörd {i} " * int(rng.integers(1, 4)) for i in range(n)]
    fields = [
        pa.field("text", pa.string(), metadata={"unit": "words"}),
        pa.field("year", pa.int16(), nullable=False),
        pa.field("tags", pa.list_(pa.field("element", pa.string()))),
        pa.field("nested", pa.struct([pa.field("a", pa.int64()), pa.field("b", pa.bool_())])),
        pa.field("when", pa.timestamp("ms", "Europe/Berlin")),
        pa.field("class", pa.dictionary(pa.int32(), pa.string())),
    ]
    columns = [
        pa.array(words),
        pa.array(rng.integers(1900, 2030, n), pa.int16()),
        pa.array([["x"] * (i % 3) if i % 5 else None for i in range(n)], fields[2].type),
        pa.array([{"a": i, "b": i % 2 == 0} if i % 7 else None for i in range(n)], fields[3].type),
        pa.array(rng.integers(0, 2**40, n), fields[4].type),
        pa.array([f"class {c}" for c in rng.integers(0, 5, n)]).dictionary_encode(),
    ]
    return pa.table(columns, schema=pa.schema(fields, metadata={"made by": "vecferry.testing"}))


def cut(rows: VectorBatch, size: int, start: int = 0) -> Iterator[VectorBatch]:
    """Cut rows into batches of a size, each with the number of rows up to its end as its cursor."""
    for at in range(start, len(rows), size):
        part = rows.take(np.arange(at, min(at + size, len(rows))))
        yield dataclasses.replace(part, cursor={"row": at + len(part)})


def assert_same(got: VectorBatch, want: VectorBatch, *, ordered: bool = True, bits: bool = True) -> None:
    """Fail unless ids, vectors (bit by bit) and payload are the same; in another order if not `ordered`."""
    if not ordered:
        got, want = (b.take(np.argsort(np.array(b.ids.to_pylist(), object))) for b in (got, want))
    assert got.ids.type == want.ids.type
    assert got.ids.to_pylist() == want.ids.to_pylist()
    if bits:
        np.testing.assert_array_equal(got.vectors.view(np.uint32), want.vectors.view(np.uint32))
    assert (got.payload is None) == (want.payload is None)
    if got.payload is not None and want.payload is not None:
        assert got.payload.schema.equals(want.payload.schema, check_metadata=True), got.payload.schema
        assert got.payload.to_pylist() == want.payload.to_pylist()


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, by its path in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class AdapterSuite:
    """Test one adapter through the interface of `vecferry.store` alone.

    A `no_...` attribute holds the reason why the store can't do something; "" says that it can.

    dim, count    of the stores that are made; an index that needs training may need more rows
    id_types      Arrow types of ids it stores, the usual one first; () if it only numbers rows
    dtypes        element types it can be told to store
    metric        a metric that the store records, None if it records none
    inexact       why vectors read back may differ from those written
    """

    kind: ClassVar[str]
    dim: ClassVar[int] = 8
    count: ClassVar[int] = 1100
    id_types: ClassVar[tuple[pa.DataType, ...]] = (pa.int64(), pa.string())
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    metric: ClassVar[str | None] = "l2"
    inexact: ClassVar[str] = ""
    no_writer: ClassVar[str] = ""
    no_payload: ClassVar[str] = ""
    no_search: ClassVar[str] = ""
    no_sniff: ClassVar[str] = ""

    def make(self, folder: Path, rows: VectorBatch) -> str:
        """Make a store of these rows in a folder, without the adapter under test; return its address."""
        raise NotImplementedError

    def target(self, folder: Path) -> str:
        """Return the address of a store to be written in a folder."""
        raise NotImplementedError

    def info(self, rows: VectorBatch, **changes: Any) -> store.StoreInfo:
        """Describe the store to write; override it to name an index structure."""
        described = store.StoreInfo(
            kind=self.kind,
            uri="",
            count=len(rows),
            dim=rows.vectors.shape[1],
            metric=self.metric,
            id_type=rows.ids.type if self.id_types else None,
            payload=rows.payload.schema if rows.payload is not None else None,
            space="model-b",
            provenance={"plan": "plan-1", "models": ["model-a", "model-b"], "map": "0123"},
        )
        return dataclasses.replace(described, **changes)

    def rows(self, n: int | None = None, kind: pa.DataType | None = None, seed: int = 0) -> VectorBatch:
        """Make rows of this store's dimension, with its usual ids, and with payload if it takes any."""
        n = self.count if n is None else n
        vectors = np.random.default_rng(seed).standard_normal((n, self.dim)).astype(np.float32)
        vectors[: n // 50, 0] = -0.0
        vectors[n // 50 : n // 25, 0] = 1e-42  # denormal
        vectors[n // 25 : n // 20, 0] = 1e9
        ids = sample_ids(n, kind or (self.id_types[0] if self.id_types else None), seed)
        return VectorBatch(ids, vectors, None if self.no_payload else sample_payload(n, seed))

    def write(self, folder: Path, rows: VectorBatch, size: int = 1000, **changes: Any) -> str | None:
        """Write and publish rows in batches of a size; return what `commit` returned."""
        overwrite = changes.pop("overwrite", False)
        with store.open_writer(
            self.target(folder), self.info(rows, **changes), overwrite=overwrite
        ) as writer:
            for batch in cut(rows, size):
                writer.write(batch)
            with writer.staged():
                pass
            return writer.commit()

    def check(self, uri: str, rows: VectorBatch) -> None:
        """Fail unless the store at an address holds exactly these rows."""
        with store.open_reader(uri) as reader:
            assert reader.info.count == len(rows)
            self.same(reader, rows)

    def same(self, reader: store.Reader, rows: VectorBatch) -> None:
        """Fail unless a reader gives exactly these rows."""
        got = concat(reader.read(333))
        assert_same(got, rows, ordered=reader.info.ordered, bits=not self.inexact)

    # Reading

    def test_info(self, tmp_path: Path) -> None:
        rows = self.rows()
        with store.open_reader(self.make(tmp_path, rows)) as reader:
            info = reader.info
            assert (info.kind, info.count, info.dim) == (self.kind, len(rows), self.dim)
            assert info.id_type == (rows.ids.type if self.id_types else None)
            assert info.nbytes > 0
            assert info.lossy == bool(self.inexact)
            if rows.payload is None:
                assert info.payload is None
            else:
                assert rows.payload.schema.equals(info.payload, check_metadata=True), info.payload
            self.same(reader, rows)

    def test_is_recognised_by_content(self, tmp_path: Path) -> None:
        if self.no_sniff:
            pytest.skip(self.no_sniff)
        address = store.Uri.parse(self.make(tmp_path, self.rows()))
        adapter = store.load(self.kind)
        other = tmp_path / "notes.txt"
        other.write_text("not a store")
        (tmp_path / "empty").mkdir()
        (tmp_path / "nothing").touch()
        assert adapter.sniff(Path(address.path))
        assert not any(
            adapter.sniff(p) for p in (other, tmp_path / "empty", tmp_path / "nothing", tmp_path / "absent")
        )

    def test_unknown_option_is_refused(self, tmp_path: Path) -> None:
        uri = self.make(tmp_path, self.rows())
        with pytest.raises(UsageError, match="colour"):
            store.open_reader(uri + ("&" if "?" in uri else "?") + "colour=red")

    def test_reads_the_same_rows_whatever_the_batch_size(self, tmp_path: Path) -> None:
        rows = self.rows()
        with store.open_reader(self.make(tmp_path, rows)) as reader:
            whole = concat(reader.read(len(rows) + 1))
            for size in (1, 64, 1000):
                batches = list(reader.read(size))
                assert max(len(b) for b in batches) <= size
                assert_same(concat(batches), whole)

    def test_reads_on_behind_any_cursor(self, tmp_path: Path) -> None:
        rows = self.rows()
        with store.open_reader(self.make(tmp_path, rows)) as reader:
            batches = list(reader.read(97))
            whole = concat(batches)
            done = 0
            for batch in batches[:-1]:
                done += len(batch)
                cursor = json.loads(json.dumps(batch.cursor))  # a cursor is kept in a JSON file
                rest = concat(reader.read(300, after=cursor))
                assert_same(rest, whole.take(np.arange(done, len(whole))))
            assert sum(len(b) for b in reader.read(300, after=batches[-1].cursor)) == 0

    def test_ids_are_those_of_read(self, tmp_path: Path) -> None:
        with store.open_reader(self.make(tmp_path, self.rows())) as reader:
            pieces = list(reader.ids(100))
            assert max(len(p) for p in pieces) <= 100
            assert pa.concat_arrays(pieces).equals(concat(reader.read(1000)).ids)

    def test_take_gives_the_asked_order_and_names_missing_ids(self, tmp_path: Path) -> None:
        rows = self.rows()
        with store.open_reader(self.make(tmp_path, rows)) as reader:
            whole = concat(reader.read(1000))
            places = np.random.default_rng(3).permutation(len(rows))[:50]
            wanted = whole.take(places)
            assert_same(reader.take(wanted.ids), wanted)
            assert len(reader.take(wanted.ids.slice(0, 0))) == 0
            absent = (
                pa.array([7]).cast(rows.ids.type)
                if pa.types.is_integer(rows.ids.type)
                else pa.array(["7"], rows.ids.type)
            )
            if not self.id_types:
                absent = pa.array([len(rows)])
            with pytest.raises(BadRowsError) as caught:
                reader.take(pa.concat_arrays([wanted.ids.slice(0, 2), absent]))
            assert caught.value.ids == absent.to_pylist()

    def test_search_finds_what_brute_force_finds(self, tmp_path: Path) -> None:
        rows = self.rows()
        queries = np.random.default_rng(5).standard_normal((20, self.dim)).astype(np.float32)
        with store.open_reader(self.make(tmp_path, rows)) as reader:
            if self.no_search:
                with pytest.raises(UnsupportedError):
                    reader.search(queries, 5)
                return
            whole = concat(reader.read(1000))
            corpus, asked = whole.vectors.astype(np.float64), queries.astype(np.float64)
            if reader.info.metric == "l2":
                exact = -((asked[:, None] - corpus[None]) ** 2).sum(2)
            else:
                exact = asked @ corpus.T
                if reader.info.metric == "cosine":
                    exact /= np.linalg.norm(asked, axis=1)[:, None] * np.linalg.norm(corpus, axis=1)
            places, scores = reader.search(queries, 5)
            np.testing.assert_array_equal(places, np.argsort(-exact, axis=1)[:, :5])
            assert (np.diff(scores, axis=1) <= 0).all()
            some = np.random.default_rng(6).permutation(len(rows))[:100]
            places, scores = reader.search(queries, 5, among=whole.ids.take(pa.array(some)))
            np.testing.assert_array_equal(places, np.argsort(-exact[:, some], axis=1)[:, :5])
            places, _ = reader.search(queries, 5, among=whole.ids.slice(0, 3))
            assert (places >= 0).sum(axis=1).tolist() == [3] * 20
            assert (places[:, 3:] == -1).all()

    # Writing

    def needs_writer(self) -> None:
        """Skip a test where the store can only be read."""
        if self.no_writer:
            pytest.skip(self.no_writer)

    def test_read_only_store_refuses_to_write(self, tmp_path: Path) -> None:
        if not self.no_writer:
            pytest.skip("this store can be written")
        with pytest.raises(UnsupportedError):
            store.open_writer(self.target(tmp_path), self.info(self.rows()))

    def test_everything_survives_for_every_id_type(self, tmp_path: Path) -> None:
        self.needs_writer()
        for number, kind in enumerate(self.id_types or (None,)):
            folder = tmp_path / str(number)
            folder.mkdir()
            rows = self.rows(kind=kind)
            assert self.write(folder, rows) is None
            self.check(self.target(folder), rows)
            with store.open_reader(self.target(folder)) as reader:
                info = reader.info
                assert info.id_type == (kind if self.id_types else None)
                assert (info.metric, info.space, info.dtype) == (
                    self.metric,
                    "model-b",
                    self.info(rows).dtype,
                )
                assert self.info(rows).provenance.items() <= info.provenance.items()
                if rows.payload is not None:
                    assert rows.payload.schema.equals(info.payload, check_metadata=True), info.payload

    def test_ids_it_cannot_hold_are_refused_before_any_work(self, tmp_path: Path) -> None:
        self.needs_writer()
        for kind in set(ID_TYPES) - set(self.id_types):
            rows = self.rows(10)
            with pytest.raises(UnsupportedError):
                store.open_writer(self.target(tmp_path), self.info(rows, id_type=kind))
            assert contents(tmp_path) == {}

    def test_row_numbers_stay_row_numbers(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = dataclasses.replace(self.rows(), ids=sample_ids(self.count, None))
        self.write(tmp_path, rows, id_type=None)
        with store.open_reader(self.target(tmp_path)) as reader:
            assert reader.info.id_type is None
            self.same(reader, rows)

    def test_element_types(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows()
        rows.vectors[:, 0] = 1.0  # every value fits in float16
        for dtype in self.dtypes:
            folder = tmp_path / dtype
            folder.mkdir()
            self.write(folder, rows, dtype=dtype)
            rounded = np.ascontiguousarray(rows.vectors.astype(dtype), np.float32)
            with store.open_reader(self.target(folder)) as reader:
                assert reader.info.dtype == dtype
                self.same(reader, dataclasses.replace(rows, vectors=rounded))

    def test_payload_it_cannot_hold_is_refused_before_any_work(self, tmp_path: Path) -> None:
        self.needs_writer()
        if not self.no_payload:
            pytest.skip("this store holds payload")
        rows = self.rows(10)
        with pytest.raises(UnsupportedError):
            store.open_writer(self.target(tmp_path), self.info(rows, payload=sample_payload(10).schema))
        assert contents(tmp_path) == {}

    def test_vectors_of_another_dimension_are_refused(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows(10)
        wide = dataclasses.replace(rows, vectors=np.zeros((10, self.dim + 1), np.float32))
        with store.open_writer(self.target(tmp_path), self.info(rows)) as writer:
            with pytest.raises(
                IncompatibleError, match=rf"(?s){self.dim}\D.*{self.dim + 1}|{self.dim + 1}\D.*{self.dim}"
            ):
                writer.write(wide)
            writer.abort()

    def test_bytes_do_not_depend_on_batches(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows()
        written = []
        for size in (1, 7, 1000):
            folder = tmp_path / str(size) / "x"
            folder.mkdir(parents=True)
            self.write(folder, rows, size)
            written.append(contents(folder))
        assert written[0] == written[1] == written[2]

    def test_an_abandoned_writer_is_continued_to_the_same_bytes(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows()
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        self.write(tmp_path / "a", rows)
        target = self.target(tmp_path / "b")
        with store.open_writer(target, self.info(rows)) as writer:
            for batch in cut(rows.take(np.arange(int(self.count * 0.9))), 90):
                writer.write(batch)
        for size in (77, 130):  # abandoned once more, then finished
            with store.open_writer(target, self.info(rows), resume=True) as writer:
                done = writer.progress
                assert done.rows_at_cursor <= done.rows <= self.count * 0.95
                assert (done.cursor or {"row": 0})["row"] == done.rows_at_cursor
                for batch in cut(rows.take(np.arange(int(self.count * 0.95))), size, start=done.rows):
                    writer.write(batch)
        with store.open_writer(target, self.info(rows), resume=True) as writer:
            for batch in cut(rows, 50, start=writer.progress.rows):
                writer.write(batch)
            with writer.staged() as reader:
                self.same(reader, rows)
        with store.open_writer(target, self.info(rows), resume=True) as writer:  # staged, not yet published
            for batch in cut(rows, 50, start=writer.progress.rows):
                writer.write(batch)
            with writer.staged() as reader:
                self.same(reader, rows)
            writer.commit()
        assert contents(tmp_path / "a") == contents(tmp_path / "b")

    def test_nothing_is_visible_before_commit(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows()
        path = Path(store.Uri.parse(self.target(tmp_path)).path)
        with store.open_writer(self.target(tmp_path), self.info(rows)) as writer:
            for batch in cut(rows, 1000):
                writer.write(batch)
                assert not path.exists()
            with writer.staged() as reader:
                assert not path.exists()
                assert reader.info.count == len(rows)
                self.same(reader, rows)
                before = concat(reader.read(100))
            writer.commit()
        assert path.exists()
        with store.open_reader(self.target(tmp_path)) as reader:
            assert_same(concat(reader.read(100)), before)

    def test_an_existing_target_is_refused(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows()
        self.write(tmp_path, rows)
        before = contents(tmp_path)
        with pytest.raises(UsageError, match="exists"):
            self.write(tmp_path, self.rows(seed=1))
        assert contents(tmp_path) == before

    def test_overwriting_keeps_the_old_store(self, tmp_path: Path) -> None:
        self.needs_writer()
        old, new = self.rows(), self.rows(seed=1)
        self.write(tmp_path, old)
        with store.open_writer(self.target(tmp_path), self.info(new), overwrite=True) as writer:
            for batch in cut(new, 1000):
                writer.write(batch)
            with writer.staged():
                self.check(self.target(tmp_path), old)
            backup = writer.commit()
        self.check(self.target(tmp_path), new)
        assert backup is not None
        self.check(backup if ":" in backup else f"{self.kind}:{backup}", old)

    def test_an_unfinished_stage_is_not_continued_by_accident(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows()
        with store.open_writer(self.target(tmp_path), self.info(rows)) as writer:
            writer.write(next(cut(rows, 100)))
        with pytest.raises(UsageError, match="resume"):
            store.open_writer(self.target(tmp_path), self.info(rows))
        with pytest.raises(UsageError, match="another"):
            store.open_writer(
                self.target(tmp_path), self.info(rows, provenance={"plan": "plan-2"}), resume=True
            )

    def test_a_second_writer_is_refused(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows()
        with store.open_writer(self.target(tmp_path), self.info(rows)) as writer:
            writer.write(next(cut(rows, 100)))
            for resume in (False, True):
                with pytest.raises(UsageError, match="process"):
                    store.open_writer(self.target(tmp_path), self.info(rows), resume=resume)
            for batch in cut(rows, 1000, start=100):
                writer.write(batch)
            with writer.staged():
                pass
            writer.commit()
        self.check(self.target(tmp_path), rows)

    def test_abort_leaves_nothing(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows()
        with store.open_writer(self.target(tmp_path), self.info(rows)) as writer:
            for batch in cut(rows, 100):
                writer.write(batch)
            writer.abort()
        assert list(tmp_path.iterdir()) == []

    def test_commit_leaves_nothing_but_the_target(self, tmp_path: Path) -> None:
        self.needs_writer()
        self.write(tmp_path, self.rows())
        assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]

    def test_an_empty_store(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = self.rows(0)
        self.write(tmp_path, rows)
        with store.open_reader(self.target(tmp_path)) as reader:
            assert (reader.info.count, reader.info.dim) == (0, self.dim)
            assert sum(len(b) for b in reader.read(10)) == 0
            assert sum(len(p) for p in reader.ids(10)) == 0
