"""The suite for `.npy` files, and the files that must be refused or read with care."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import VectorBatch, concat
from vecferry.errors import BadRowsError, DataError, StoppedError, UnsupportedError, UsageError
from vecferry.testing import AdapterSuite, ReaderSuite, contents, cut
from vecferry_adapters import _numpy_writer


class NumpySuite(AdapterSuite):
    kind = "npy"
    id_types = (pa.int64(), pa.int32(), pa.uint64())
    dtypes = ("float32", "float16")
    no_payload = "an array holds vectors only"
    no_search = "an array has no index"

    def make(self, folder: Path, rows: VectorBatch) -> str:
        np.save(folder / "vectors.npy", rows.vectors)
        np.save(folder / "ids.npy", rows.ids.to_numpy())
        return f"npy:{folder}"

    def target(self, folder: Path) -> str:
        return f"npy:{folder / 'target.npy'}"


class TestFolder(NumpySuite):
    pass


class TestFortranOrderWithIdsElsewhere(ReaderSuite):
    kind = "npy"
    no_payload = "an array holds vectors only"
    no_search = "an array has no index"

    def make(self, folder: Path, rows: VectorBatch) -> str:
        np.save(folder / "x.bin.npy", np.asfortranarray(rows.vectors.astype(">f8")))
        np.save(folder / "keys.npy", rows.ids.to_numpy().astype(">i8"))
        return f"npy:{folder / 'x.bin.npy'}?ids={folder / 'keys.npy'}"


class TestRowNumbers(NumpySuite):
    id_types = ()

    def make(self, folder: Path, rows: VectorBatch) -> str:
        np.save(folder / "x.npy", rows.vectors)
        return f"npy:{folder / 'x.npy'}"

    def test_ids_it_cannot_hold_are_refused_before_any_work(self, tmp_path: Path) -> None:
        pytest.skip("other classes here test ids")


class TestOftenDurable(NumpySuite):
    """The stage is made durable at every batch of 30 rows or more."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_numpy_writer, "SYNC_BYTES", 30 * 8 * 4)

    def test_a_crash_costs_no_more_than_the_rows_not_yet_durable(self, tmp_path: Path) -> None:
        rows = self.rows()
        with store.open_writer(self.target(tmp_path), self.info(rows)) as writer:
            for batch in cut(rows.take(np.arange(100)), 20):
                writer.write(batch)
        with store.open_writer(self.target(tmp_path), self.info(rows), resume=True) as writer:
            assert writer.progress == store.Progress(80, {"row": 80}, 80)


def rows_of(uri: str) -> VectorBatch:
    with store.open_reader(uri) as reader:
        return concat(reader.read(3))


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_element_type_and_order(tmp_path: Path, dtype: str, order: str) -> None:
    x = np.arange(35).reshape(7, 5) / 4
    np.save(tmp_path / "x", np.asarray(x, dtype, order=order))  # type: ignore[call-overload]
    with store.open_reader(f"npy:{tmp_path / 'x.npy'}") as reader:
        assert reader.info.dtype == np.dtype(dtype).name
        assert concat(reader.read(3)).vectors.tolist() == x.tolist()
        assert reader.take(pa.array([6, 0, 5])).vectors.tolist() == x[[6, 0, 5]].tolist()


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (np.array(["a", "", "dök"]), pa.string()),
        (np.array([b"a", b"", b"\xff\x01"]), pa.binary()),
        (np.array([3, 1, 2], "u1"), pa.uint8()),
        (np.array([-3, 2**62, 0], ">i8"), pa.int64()),
    ],
)
def test_ids_of_every_type(tmp_path: Path, ids: np.ndarray, kind: pa.DataType) -> None:
    np.save(tmp_path / "x", np.eye(3, dtype=np.float32))
    np.save(tmp_path / "i", ids)
    with store.open_reader(f"npy:{tmp_path / 'x.npy'}?ids={tmp_path / 'i.npy'}") as reader:
        assert reader.info.id_type == kind
        assert concat(reader.read(2)).ids.equals(pa.array(ids.tolist(), kind))
        assert reader.take(pa.array(ids[[2, 0]].tolist(), kind)).vectors.tolist() == np.eye(3)[[2, 0]].tolist()


@pytest.mark.case("32")
def test_what_is_no_matrix_of_floats_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for array, said in (
        (np.ones(4, np.float32), r"shape \[4\]"),
        (np.ones((4, 2, 2), np.float32), r"shape \[4, 2, 2\]"),
        (np.ones((4, 0), np.float32), r"shape \[4, 0\]"),
        (np.ones((4, 2), np.int8), "int8"),
        (np.ones((4, 2), np.complex64), "complex64"),
    ):
        np.save(path, array)
        with pytest.raises(DataError, match=said):
            store.open_reader(f"npy:{path}")
    np.save(path, np.array([[None, "x"]], object), allow_pickle=True)
    with pytest.raises(DataError, match="object"):
        store.open_reader(f"npy:{path}")


@pytest.mark.case("q4")
def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones((40, 8), np.float32))
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:10], whole[:20] + b"\xff" * 60 + whole[80:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.npy can't be read"):
            store.open_reader(f"npy:{path}")
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError, match="1409 bytes, its header speaks of 1408"):
        store.open_reader(f"npy:{path}")
    path.write_bytes(b"1,2,3")
    with pytest.raises(DataError, match=r"not a \.npy file"):
        store.open_reader(f"npy:{path}")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x", np.ones((40, 8), np.float32))
    with store.open_reader(f"npy:{tmp_path / 'x.npy'}") as reader:
        stream = reader.read(20)
        next(stream)
        with (tmp_path / "x.npy").open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(DataError, match="shorter"):
            next(stream)


def test_an_archive_is_refused_with_the_cure(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones((2, 2)))
    for uri in (f"npy:{tmp_path / 'x.npz'}", store.Uri("npy", str(tmp_path / "x.npz"))):
        with pytest.raises(UnsupportedError, match=r"np\.save"):
            store.open_reader(uri)
    assert store.load("npy").sniff(tmp_path / "x.npz")


def test_ids_must_fit_the_vectors(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors", np.ones((3, 2), np.float32))
    for ids, said in (
        (np.arange(4), "4 ids.*3 vectors"),
        (np.arange(3.0), "float64"),
        (np.arange(3)[:, None], r"shape \[3, 1\]"),
        (np.array([1, 2, None], object), "object"),
    ):
        np.save(tmp_path / "ids", ids, allow_pickle=True)
        with pytest.raises(DataError, match=said):
            store.open_reader(f"npy:{tmp_path}")
    with pytest.raises(UsageError, match="no such file"):
        store.open_reader(f"npy:{tmp_path}?ids=absent.npy")


def test_written_files_are_what_numpy_reads(tmp_path: Path) -> None:
    suite = NumpySuite()
    rows = suite.rows(50)
    suite.write(tmp_path, rows)
    np.testing.assert_array_equal(np.load(tmp_path / "target.npy" / "vectors.npy"), rows.vectors)
    np.testing.assert_array_equal(np.load(tmp_path / "target.npy" / "ids.npy"), rows.ids.to_numpy())
    assert sorted(p.name for p in (tmp_path / "target.npy").iterdir()) == ["_vecferry.json", "ids.npy", "vectors.npy"]
    (tmp_path / "target.npy" / "ids.npy").unlink()  # and with other vectors in its place the folder is refused
    np.save(tmp_path / "target.npy" / "vectors.npy", rows.vectors[:9])
    with pytest.raises(DataError, match=r"9 vectors.*says 50"):
        store.open_reader(suite.target(tmp_path))


def test_float16_that_would_overflow_is_refused(tmp_path: Path) -> None:
    suite = NumpySuite()
    rows = suite.rows(20)
    rows.vectors[:, 0] = -65504  # the largest float16
    rows.vectors[3, 5] = 7e4
    rows.vectors[4, 5] = np.inf
    with store.open_writer(suite.target(tmp_path), suite.info(rows, dtype="float16")) as writer:
        with pytest.raises(BadRowsError) as caught:
            writer.write(rows)
        writer.abort()
    assert caught.value.ids == [rows.ids[3].as_py()]


def test_a_full_disk_stops_resumably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The open file of the ids is exchanged for /dev/full, which says what a full disk says."""
    suite = NumpySuite()
    rows = suite.rows(100)
    monkeypatch.setattr(_numpy_writer, "SYNC_BYTES", 1)
    rest = dataclasses.replace(rows, cursor={"row": 100}).take(np.arange(60, 100))
    with store.open_writer(suite.target(tmp_path), suite.info(rows)) as writer:
        writer.write(next(cut(rows, 60)))
        (number,) = [n for n in Path("/proc/self/fd").iterdir() if n.is_symlink() and n.readlink().name == "ids.npy"]
        with Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), int(number.name))
        with pytest.raises(StoppedError, match="60 rows are staged safely"):
            writer.write(rest)
    with _opened(suite, tmp_path, rows) as writer:
        assert writer.progress.rows == 60
        writer.write(rest)
        writer.commit()
    suite.check(suite.target(tmp_path), rows)


def _opened(suite: NumpySuite, folder: Path, rows: VectorBatch) -> store.Writer:
    return store.open_writer(suite.target(folder), suite.info(rows), resume=True)


STREAM = """
import sys, pathlib
import vecferry.store as store, dataclasses
with store.open_reader("npy:" + sys.argv[1]) as reader:
    info = dataclasses.replace(reader.info, dtype="float32", provenance={"plan": "p"})
    with store.open_writer("npy:" + sys.argv[2], info) as writer:
        for batch in reader.read(4096):
            writer.write(batch)
        writer.commit()
status = pathlib.Path("/proc/self/status").read_text()  # getrusage would count what the parent used
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_does_not_grow_with_rows(tmp_path: Path, order: str) -> None:
    peaks = []
    for n in (20_000, 120_000):
        np.save(tmp_path / f"{n}", np.ones((n, 128), np.float32, order=order))  # type: ignore[call-overload]
        run = [sys.executable, "-c", STREAM, str(tmp_path / f"{n}.npy"), str(tmp_path / f"{n}")]
        peaks.append(int(subprocess.run(run, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] - peaks[0] < 16 * 100_000 + 4e6  # 51 MB of vectors came to it


def test_a_stage_may_hold_nothing_yet(tmp_path: Path) -> None:
    suite = NumpySuite()
    rows = suite.rows(10)
    with store.open_writer(suite.target(tmp_path), suite.info(rows)):
        pass
    with _opened(suite, tmp_path, rows) as writer:
        assert writer.progress == store.Progress()
        writer.abort()
    assert contents(tmp_path) == {}
