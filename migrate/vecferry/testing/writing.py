# ruff: noqa: D102 (the names of the tests say what they test)
"""What every writer must do, on top of what every reader must."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import VectorBatch, concat
from vecferry.errors import IncompatibleError, UnsupportedError, UsageError
from vecferry.testing.reading import ReaderSuite
from vecferry.testing.rows import ID_TYPES, assert_same, contents, cut, sample_ids, sample_payload


class AdapterSuite(ReaderSuite):
    """Test an adapter through the interface of `vecferry.store` alone.

    A `no_...` attribute holds the reason why the store can't do something; "" says that it can.

    dim, count    of the stores that are made; an index that needs training may need more rows
    id_types      Arrow types of ids it stores, the usual one first; () if it only numbers rows
    inexact       why vectors read back may differ from those written
    dtypes        element types it can be told to store
    metric        a metric that the store records, None if it records none
    """

    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    metric: ClassVar[str | None] = "l2"
    no_writer: ClassVar[str] = ""

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

    def write(self, folder: Path, rows: VectorBatch, size: int = 1000, **changes: Any) -> str | None:
        """Write and publish rows in batches of a size; return what `commit` returned."""
        overwrite = changes.pop("overwrite", False)
        with store.open_writer(self.target(folder), self.info(rows, **changes), overwrite=overwrite) as writer:
            for batch in cut(rows, size):
                writer.write(batch)
            with writer.staged():
                pass
            return writer.commit()

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

    def test_payload_without_columns_is_no_payload(self, tmp_path: Path) -> None:
        self.needs_writer()
        rows = dataclasses.replace(self.rows(), payload=None)
        self.write(tmp_path, rows, payload=pa.schema([], metadata={"made by": "vecferry.testing"}))
        self.check(self.target(tmp_path), rows)

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
            store.open_writer(self.target(tmp_path), self.info(rows, provenance={"plan": "plan-2"}), resume=True)

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
