# ruff: noqa: D102 (the names of the tests say what they test)
"""What every reader must do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import VectorBatch, concat
from vecferry.errors import BadRowsError, UnsupportedError, UsageError
from vecferry.testing.rows import assert_same, sample_ids, sample_payload


class ReaderSuite:
    """Test a reader through the interface of `vecferry.store` alone. Attributes: see AdapterSuite."""

    kind: ClassVar[str]
    dim: ClassVar[int] = 8
    count: ClassVar[int] = 1100
    id_types: ClassVar[tuple[pa.DataType, ...]] = (pa.int64(), pa.string())
    inexact: ClassVar[str] = ""
    no_payload: ClassVar[str] = ""
    no_search: ClassVar[str] = ""
    no_sniff: ClassVar[str] = ""

    def make(self, folder: Path, rows: VectorBatch) -> str:
        """Make a store of these rows in a folder, without the adapter under test; return its address."""
        raise NotImplementedError

    def rows(self, n: int | None = None, kind: pa.DataType | None = None, seed: int = 0) -> VectorBatch:
        """Make rows of this store's dimension, with its usual ids, and with payload if it takes any."""
        n = self.count if n is None else n
        vectors = np.random.default_rng(seed).standard_normal((n, self.dim)).astype(np.float32)
        vectors[: n // 50, 0] = -0.0
        vectors[n // 50 : n // 25, 0] = 1e-42  # denormal
        vectors[n // 25 : n // 20, 0] = 1e9
        ids = sample_ids(n, kind or (self.id_types[0] if self.id_types else None), seed)
        return VectorBatch(ids, vectors, None if self.no_payload else sample_payload(n, seed))

    def check(self, uri: str, rows: VectorBatch) -> None:
        """Fail unless the store at an address holds exactly these rows."""
        with store.open_reader(uri) as reader:
            assert reader.info.count == len(rows)
            self.same(reader, rows)

    def same(self, reader: store.Reader, rows: VectorBatch) -> None:
        """Fail unless a reader gives exactly these rows."""
        got = concat(reader.read(333))
        assert_same(got, rows, ordered=reader.info.ordered, bits=not self.inexact)

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
        assert not any(adapter.sniff(p) for p in (other, tmp_path / "empty", tmp_path / "nothing", tmp_path / "absent"))

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
