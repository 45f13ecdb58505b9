"""Addresses, the look-up of adapters by scheme and by content, and the errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vecferry import store
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.store import StoreInfo, Uri


@pytest.mark.parametrize(
    ("text", "kind", "path", "options"),
    [
        ("parquet:a/b.parquet", "parquet", "a/b.parquet", {}),
        ("parquet:/a b/*.parquet?vector=emb&id=doc_id", "parquet", "/a b/*.parquet", {"vector": "emb", "id": "doc_id"}),
        ("npy:x.npy?ids=/data/i%26d.npy", "npy", "x.npy", {"ids": "/data/i&d.npy"}),
        ("faiss:x", "faiss", "x", {}),
        ("/plain/path", "", "/plain/path", {}),
        ("plain?vector=a.b", "", "plain", {"vector": "a.b"}),
        ("C:/windows", "", "C:/windows", {}),
        ("./x:y", "", "./x:y", {}),
    ],
)
def test_addresses(text: str, kind: str, path: str, options: dict[str, str]) -> None:
    uri = Uri.parse(text)
    assert (uri.kind, uri.path, uri.options) == (kind, path, options)
    if "%" not in text:
        assert str(uri) == text


def test_an_unknown_scheme_lists_the_installed_ones() -> None:
    with pytest.raises(UsageError, match=r"no adapter named 'qdrant'; installed adapters: .*faiss, npy, parquet"):
        Uri.parse("qdrant:collection")
    with pytest.raises(UsageError, match="no adapter named 'qdrant'"):
        store.open_reader(Uri("qdrant", "x"))


def test_bad_options() -> None:
    for text in ("parquet:x?vector", "parquet:x?a=1&b"):
        with pytest.raises(UsageError, match="key=value"):
            Uri.parse(text)
    with pytest.raises(UsageError, match="twice"):
        Uri.parse("parquet:x?id=a&id=b")
    assert Uri.parse("parquet:x?id=").options == {"id": ""}  # not the same as no option
    with pytest.raises(UsageError, match="unknown option b, c; parquet takes: a"):
        Uri("parquet", "x", {"a": "1", "c": "2", "b": "3"}).require("a")
    with pytest.raises(UsageError, match="npy takes: none"):
        Uri("npy", "x", {"a": "1"}).require()


def test_names_of_files_that_look_like_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("what?", "backup:2024", "x?y=z"):
        np.save(tmp_path / "x.npy", np.ones((2, 2), np.float32))
        (tmp_path / "x.npy").rename(tmp_path / name)
        with store.open_reader(name) as reader:
            assert reader.info.kind == "npy"


@pytest.mark.case("q4")
def test_content_decides_not_the_name(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 2), np.float32))
    (tmp_path / "a.npy").rename(tmp_path / "a.parquet")
    pq.write_table(pa.table({"v": [[1.0], [2.0]]}), tmp_path / "b.index")
    for path, kind in ((tmp_path / "a.parquet", "npy"), (tmp_path / "b.index", "parquet")):
        for address in (path, str(path)):  # the API takes paths too
            with store.open_reader(address) as reader:
                assert reader.info.kind == kind
                assert reader.info.uri == f"{kind}:{path}"


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("text")
    with pytest.raises(DataError, match=r"notes: not a store .*faiss, npy, parquet"):
        store.open_reader(str(tmp_path / "notes"))
    with pytest.raises(UsageError, match="absent: no such file or folder"):
        store.open_reader(str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="dict is neither"):
        store.open_reader({"a": 1})


def test_what_two_adapters_claim_is_asked_back(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", np.ones((2, 2), np.float32))
    pq.write_table(pa.table({"v": [[1.0], [2.0]]}), tmp_path / "x.parquet")
    with pytest.raises(UsageError, match=r"could be npy or parquet; say which, as in npy:"):
        store.open_reader(str(tmp_path))
    with store.open_reader(f"parquet:{tmp_path}") as reader:
        assert reader.info.dim == 1


def test_two_distributions_may_not_claim_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = EntryPoint("parquet", "vecferry_adapters.parquet", store.GROUP)
    other = EntryPoint("parquet", "other.parquet", store.GROUP)

    def points(group: str) -> EntryPoints:
        assert group == store.GROUP
        return EntryPoints([ours, ours, other][:count])

    monkeypatch.setattr(store, "entry_points", points)
    count = 2
    assert store.adapters() == {"parquet": ours}  # one distribution seen twice on the path is no conflict
    count = 3
    with pytest.raises(
        UsageError, match=r"two adapters are named 'parquet': .*vecferry_adapters.parquet and other.parquet"
    ):
        store.adapters()


def test_an_open_reader_passes_through_and_stays_open(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 2), np.float32))
    closed = []
    reader = store.open_reader(str(tmp_path / "x.npy"))
    assert store.open_reader(reader) is reader

    class Watched:
        info = reader.info
        read = reader.read

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            closed.append(1)

    watched = Watched()
    with store.opened(watched) as same:
        assert same is watched
    assert closed == []
    with store.opened(tmp_path / "x.npy") as fresh:
        assert fresh.info.count == 2


def test_a_plain_target_is_of_the_kind_of_its_description(tmp_path: Path) -> None:
    for kind, inside in (("npy", "vectors.npy"), ("parquet", "part-00000.parquet")):
        info = StoreInfo(kind=kind, uri="", count=0, dim=2)
        with store.open_writer(str(tmp_path / kind), info) as writer:
            writer.commit()
        assert (tmp_path / kind / inside).exists()


def test_find_and_require_all(tmp_path: Path) -> None:
    ids = np.array([30, 10, 20])
    np.save(tmp_path / "vectors.npy", np.eye(3, dtype=np.float32))
    np.save(tmp_path / "ids.npy", ids)
    wanted = pa.array([20, 99, 30, 98], pa.int32())
    with store.open_reader(f"npy:{tmp_path}") as reader:
        places = store.find(reader, wanted, batch_size=2)
    assert places.tolist() == [2, -1, 0, -1]
    with pytest.raises(BadRowsError, match="2 of 4 ids are not in this store: 99, 98") as caught:
        store.require_all("here", wanted, places)
    assert caught.value.ids == [99, 98]
    store.require_all("here", wanted, np.array([0, 1, 2, 3]))


def test_importing_the_core_loads_no_adapter() -> None:
    unwanted = ("vecferry_adapters", "faiss", "torch")
    code = f"import sys, vecferry.store; print([m for m in sys.modules if m.split('.')[0] in {unwanted}])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_a_question_mark_in_a_file_name_is_no_option(tmp_path: Path) -> None:
    (tmp_path / "we?ird.faiss").write_bytes(b"x")
    for text in (f"{tmp_path}/we?ird.faiss", f"faiss:{tmp_path}/we?ird.faiss"):
        address = Uri.parse(text)
        assert (address.path, dict(address.options)) == (f"{tmp_path}/we?ird.faiss", {})
        assert Uri.parse(str(address)) == address
    assert Uri.parse(f"{tmp_path}/new?.faiss").path == f"{tmp_path}/new?.faiss"
    assert Uri.parse("parquet:x?vector=v").options == {"vector": "v"}
