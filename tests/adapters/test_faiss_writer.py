"""FAISS as a target: its bytes against FAISS's own, and what can happen while it is written."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import VectorBatch, concat
from vecferry.errors import BadRowsError, DataError, IncompatibleError, StoppedError, UnsupportedError, UsageError
from vecferry.rewrite import Tally
from vecferry.store import StoreInfo
from vecferry.testing import contents, cut
from vecferry.verify import verify
from vecferry_adapters import _faiss_sidecar, _faiss_writer
from vecferry_adapters._staging import Stage

faiss = pytest.importorskip("faiss")

D, N = 16, 2000
X = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
X /= np.linalg.norm(X, axis=1, keepdims=True)
IDS = np.random.default_rng(1).permutation(N) * 2**33 - 5
ROWS = VectorBatch(pa.array(IDS), X)
METRICS = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2, "cosine": faiss.METRIC_INNER_PRODUCT}


def info(index: str = "Flat", **changes: Any) -> StoreInfo:
    facts: dict[str, Any] = {"count": N, "dim": D, "metric": "ip", "id_type": pa.int64(), "space": "model-b"}
    facts |= {"provenance": {"plan": "plan-1"}} | changes
    return StoreInfo(kind="faiss", uri="", index=index, **facts)


def written(path: Path, described: StoreInfo, rows: VectorBatch = ROWS, options: str = "", **how: Any) -> bytes:
    with store.open_writer(f"faiss:{path}{options}", described, **how) as writer:
        for batch in cut(rows, 300):
            writer.write(batch)
        writer.staged().__exit__(None, None, None)
        writer.commit()
    return path.read_bytes()


def by_faiss(factory: str, metric: str, ids: np.ndarray | None, nprobe: int | None = None) -> bytes:
    """Build the same in memory with nothing but FAISS, on one thread."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        index = faiss.index_factory(D, factory, METRICS[metric])
        if nprobe is not None:
            faiss.ParameterSpace().set_index_parameter(index, "nprobe", nprobe)
        index.train(X)
        index.add(X) if ids is None else index.add_with_ids(X, ids)
        found: bytes = faiss.serialize_index(index).tobytes()
        return found
    finally:
        faiss.omp_set_num_threads(before)


# The bytes


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
@pytest.mark.parametrize("factory", ["Flat", "IDMap,Flat", "IDMap2,Flat"])
def test_a_streamed_flat_file_has_faiss_s_own_bytes(factory: str, metric: str, tmp_path: Path) -> None:
    got = written(tmp_path / "t", info(factory, metric=metric))
    assert got == by_faiss("IDMap2,Flat" if factory == "Flat" else factory, metric, IDS)
    if factory == "Flat":
        rows = VectorBatch(pa.array(np.arange(N)), X)
        got = written(tmp_path / "u", info(factory, metric=metric, id_type=None), rows)
        assert got == by_faiss("Flat", metric, None)


@pytest.mark.parametrize(
    ("factory", "kept_as", "nprobe"),
    [
        ("IVF8,Flat", "IVF8,Flat", 8),
        ("IVF256,SQ8", "IVF256,SQ8", 16),
        pytest.param("OPQ4_8,IVF8,PQ4x4", "OPQ4_8,IVF8,PQ4x4", 8, marks=pytest.mark.slow),
        ("PCAR8,SQ8", "IDMap2,PCAR8,SQ8", None),
        ("SQfp16", "IDMap2,SQfp16", None),
        ("IDMap,PQ4x4", "IDMap,PQ4x4", None),
        ("HNSW8,SQ8", "IDMap2,HNSW8,SQ8", None),
        ("IVF8,PQ4x4,RFlat", "IDMap2,IVF8,PQ4x4,RFlat", 8),
        ("IVF8,PQ8x4fs", "IVF8,PQ8x4fs", 8),
    ],
)
def test_built_indexes_have_faiss_s_own_bytes(factory: str, kept_as: str, nprobe: int | None, tmp_path: Path) -> None:
    assert written(tmp_path / "t", info(factory)) == by_faiss(kept_as, "ip", IDS, nprobe)
    with store.open_reader(f"faiss:{tmp_path / 't'}") as reader:
        assert reader.info.index == kept_as
        assert reader.info.parameters.get("nprobe") == nprobe
        assert sorted(pa.concat_arrays(list(reader.ids(1000))).to_pylist()) == sorted(IDS.tolist())


@pytest.mark.parametrize("factory", ["IVF8,Flat", "PCAR8,IVF8,PQ4x4", "IVF8,PQ8x4fs"])
def test_bytes_do_not_depend_on_threads(factory: str, tmp_path: Path) -> None:
    assert written(tmp_path / "a", info(factory), threads=1) == written(tmp_path / "b", info(factory), threads=3)


@pytest.mark.case("15")
def test_rows_are_added_and_sampled_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vecferry_adapters import _faiss_train

    whole = written(tmp_path / "a", info("IVF8,Flat"))
    monkeypatch.setattr(_faiss_train, "CHUNK_BYTES", 4 * D * 130)
    assert written(tmp_path / "b", info("IVF8,Flat")) == whole
    monkeypatch.setattr(_faiss_train, "SAMPLE_LEAST", 700)
    monkeypatch.setattr(_faiss_train, "PER_CENTROID", 1)
    sampled = written(tmp_path / "c", info("SQ8"))
    assert sampled == written(tmp_path / "d", info("SQ8"))
    owner = faiss.deserialize_index(np.frombuffer(sampled, np.uint8))
    index = faiss.downcast_index(owner.index)
    low = faiss.vector_to_array(index.sq.trained)[:D]
    places = np.sort(np.random.default_rng(1234).choice(N, 700, replace=False))
    np.testing.assert_array_equal(low, X[places].min(0))


def test_nsg_takes_all_rows_at_once(tmp_path: Path) -> None:
    written(tmp_path / "t", info("NSG8,Flat", metric="l2"))
    with store.open_reader(f"faiss:{tmp_path / 't'}") as reader:
        rows = concat(reader.read(1000))
        assert rows.ids.to_pylist() == IDS.tolist()
        np.testing.assert_array_equal(rows.vectors, X)


def test_an_id_map_without_ids_numbers_the_rows(tmp_path: Path) -> None:
    written(tmp_path / "t", info("IDMap2,SQ8", id_type=None), VectorBatch(pa.array(np.arange(N)), X))
    with store.open_reader(f"faiss:{tmp_path / 't'}") as reader:
        assert pa.concat_arrays(list(reader.ids(999))).to_pylist() == list(range(N))


# Search parameters


def test_search_parameters_are_recorded(tmp_path: Path) -> None:
    for options, parameters, expected in [
        ("", {}, {"nprobe": 8}),
        ("", {"nprobe": 3, "efSearch": 9}, {"nprobe": 3}),
        ("?nprobe=5", {"nprobe": 3}, {"nprobe": 5}),
        ("?nprobe=500", {}, {"nprobe": 16}),
    ]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        written(path, info("IVF16,Flat", parameters=parameters), options=options)
        with store.open_reader(f"faiss:{path}") as reader:
            assert reader.info.parameters == expected
    written(tmp_path / "h", info("HNSW8", parameters={"efSearch": 77}), options="?efConstruction=21")
    with store.open_reader(f"faiss:{tmp_path / 'h'}") as reader:
        assert reader.info.parameters == {"efSearch": 77, "efConstruction": 21}


# What is refused before any work


@pytest.mark.parametrize(
    ("factory", "changes", "fault", "better"),
    [
        ("PQ5x4", {}, "16 dimensions", "PQ4x4"),
        ("IVF8,PQ10", {}, "16 dimensions", "IVF8,PQ8"),
        ("PCA32,IVF8,Flat", {}, "16 dimensions", "PCA16,IVF8,Flat"),
        ("OPQ5_32,PQ5x4", {}, "16 dimensions", "OPQ4_16,PQ4x4"),
        ("IVF4096,Flat", {}, r"4096 rows.*2000", "IVF51,Flat"),
        ("PQ4", {"count": 100}, r"256 rows.*100", "PQ4x6"),
        ("IVF8,PQ4x4", {"count": 10}, r"16 rows.*10", "IVF1,PQ4x3"),
        ("OPQ4,PQ4x4", {"count": 100}, r"256 rows.*100", "Flat"),
        ("nonsense", {}, "16 dimensions", "Flat"),
        ("HNSW8,PQ4x4", {}, "L2 only", "Flat"),
        ("HNSW0", {}, "size of 0", "HNSW32"),
        ("HNSW1,SQ8", {}, "HNSW needs at least 2 links, not 1", "HNSW32,SQ8"),
        ("NSG4,Flat", {}, "NSG needs at least 8 links, not 4", "NSG32,Flat"),
        ("IVF8(HNSW1),Flat", {}, "HNSW needs at least 2 links", "Flat"),
        ("IVF0,Flat", {}, "size of 0", "IVF1,Flat"),
        ("PCA0,Flat", {}, "size of 0", "Flat"),
        ("PQ4x0", {}, "size of 0", "Flat"),
        ("RQ4x0", {}, "size of 0", "Flat"),
    ],
)
def test_structures_that_cannot_be(
    factory: str, changes: dict[str, Any], fault: str, better: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=fault) as caught:
        store.open_writer(f"faiss:{tmp_path / 't'}", info(factory, **changes))
    assert f"--index '{better}'" in str(caught.value)
    assert faiss.index_factory(D, better, faiss.METRIC_INNER_PRODUCT).d == D
    assert list(tmp_path.iterdir()) == []


def test_a_structure_that_knows_l2_only_ranks_unit_vectors_by_it(tmp_path: Path) -> None:
    written(tmp_path / "t", info("HNSW8,PQ8x4", metric="cosine"))
    with store.open_reader(f"faiss:{tmp_path / 't'}") as reader:
        assert reader.info.metric == "cosine"
        codes = concat(reader.read(5000)).vectors
        places, _ = reader.search(X[:50], 1)
        near = np.argmin(((X[:50, None] - codes) ** 2).sum(2), axis=1)
        assert (places[:, 0] == near).mean() > 0.9


@pytest.mark.parametrize(
    ("changes", "error", "fault"),
    [
        ({"id_type": pa.string()}, UnsupportedError, "parquet"),
        ({"dtype": "float16"}, UnsupportedError, "SQfp16"),
        ({"payload": pa.schema([("text", pa.string())])}, UnsupportedError, "text.*--drop-payload"),
        ({"metric": None}, UsageError, "ip, cosine or l2"),
        ({"index": "ITQ8,SQ8"}, UnsupportedError, "ITQ"),
        ({"index": "IVF8,FlatDedup"}, UnsupportedError, "read back"),
    ],
)
def test_what_a_file_cannot_hold(changes: dict[str, Any], error: type[Exception], fault: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=fault):
        store.open_writer(f"faiss:{tmp_path / 't'}", info(**({"index": "Flat"} | changes)))
    assert list(tmp_path.iterdir()) == []


def test_options_must_fit_the_structure(tmp_path: Path) -> None:
    for options, fault in [("?nprobe=4", "nprobe"), ("?colour=red", "colour"), ("?efSearch=-1", "efSearch")]:
        with pytest.raises(UsageError, match=fault):
            store.open_writer(f"faiss:{tmp_path / 't'}{options}", info("Flat"))


def test_ids_beyond_int64_are_named(tmp_path: Path) -> None:
    rows = VectorBatch(pa.array(np.array([1, 2**63, 5], np.uint64)), X[:3])
    with store.open_writer(f"faiss:{tmp_path / 't'}", info(id_type=pa.uint64())) as writer:
        with pytest.raises(BadRowsError, match=rf"{2**63}\. Write to parquet: instead\.$"):
            writer.write(rows)
        writer.abort()


def test_rows_that_were_skipped_can_leave_too_few(tmp_path: Path) -> None:
    with store.open_writer(f"faiss:{tmp_path / 't'}", info("IVF64,Flat")) as writer:
        writer.write(ROWS.take(np.arange(60)))
        with pytest.raises(UsageError, match=r"64 rows.*60"):
            writer.staged()


@pytest.mark.parametrize("factory", ["PCA8,Flat", "RR8,Flat", "L2norm,Flat"])
def test_what_loses_dimensions_is_verified_as_codes_are(factory: str, tmp_path: Path) -> None:
    written(tmp_path / "source", info())
    written(tmp_path / "t", info(factory))
    tally = Tally(read=N)
    tally.digest.update(ROWS.ids)
    with store.open_reader(f"faiss:{tmp_path / 'source'}") as source:
        with store.open_reader(f"faiss:{tmp_path / 't'}") as staged:
            error = verify(source, staged, tally, lambda x: x, seed=0)
            found = staged.take(ROWS.ids).vectors
        # a seeded sample's mean is that of all rows but for chance
        assert error == pytest.approx(np.linalg.norm(found - X, axis=1).mean(), abs=0.03)


# The sidecar


def described(path: Path) -> tuple[Any, ...]:
    with store.open_reader(f"faiss:{path}") as reader:
        return reader.info.space, reader.info.metric, reader.info.provenance.get("plan")


def test_old_and_new_stay_described_through_overwriting_and_rollback(tmp_path: Path) -> None:
    path = tmp_path / "t.index"
    written(path, info(space="a", metric="cosine", provenance={"plan": "p"}))
    old = path.read_bytes()
    other = VectorBatch(ROWS.ids, -X)
    written(path, info(space="b", metric="l2", provenance={"plan": "q"}), other, overwrite=True)
    backup = tmp_path / "t.index.bak"
    assert (described(path), described(backup)) == (("b", "l2", "q"), ("a", "cosine", "p"))
    assert backup.read_bytes() == old
    assert store.rollback(f"faiss:{path}") == str(backup)
    assert path.read_bytes() == old
    assert (described(path), described(backup)) == (("a", "cosine", "p"), ("b", "l2", "q"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.index", "t.index.bak", "t.index.vecferry.json"]


def test_a_sidecar_of_another_file_is_ignored_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t"
    written(path, info(metric="cosine"))
    assert described(path) == ("model-b", "cosine", "plan-1")
    index = faiss.index_factory(D, "Flat", faiss.METRIC_INNER_PRODUCT)
    index.add(X)
    faiss.write_index(index, str(path))
    with caplog.at_level(logging.WARNING):
        assert described(path) == (None, "ip", None)
    assert "another file" in caplog.text
    for broken in ("{", "[]", '{"format": 2, "files": {}}', '{"format": 1, "files": {"x": 1}}'):
        path.with_name("t.vecferry.json").write_text(broken)
        assert described(path) == (None, "ip", None)


def test_the_sidecar_says_what_queries_need(tmp_path: Path) -> None:
    written(tmp_path / "t", info(metric="cosine", id_type=pa.int32()), VectorBatch(pa.array(range(N), pa.int32()), X))
    (entry,) = json.loads((tmp_path / "t.vecferry.json").read_text())["files"].values()
    assert (entry["queries"], entry["metric"], entry["id_type"]) == ("normalised", "cosine", "int32")


def test_fingerprints_tell_files_apart(tmp_path: Path) -> None:
    path = tmp_path / "f"
    content = bytearray(np.random.default_rng(0).bytes(3 << 20))
    path.write_bytes(content)
    seen = {_faiss_sidecar.fingerprint(path)}
    for place in (0, 70_000 // 4096 * 4096, len(content) * 17 // 64, len(content) - 1):
        content[place] ^= 1
        path.write_bytes(content)
        seen.add(_faiss_sidecar.fingerprint(path))
    path.write_bytes(content + b"x")
    seen.add(_faiss_sidecar.fingerprint(path))
    assert len(seen) >= 5


# Stopping at any instant


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat"])
@pytest.mark.parametrize("step", ["fingerprint", "publish", "trim"])
@pytest.mark.case("17")
def test_a_stop_while_publishing_is_finished_later(
    factory: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "t", info(space="old"), VectorBatch(ROWS.ids, -X))
    fresh = info(factory, provenance={"plan": "new"})
    written(tmp_path / "a" / "t", fresh, overwrite=True)

    class Stop(BaseException):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Stop

    path = tmp_path / "b" / "t"
    with monkeypatch.context() as patched:
        patched.setattr(
            *{
                "fingerprint": (_faiss_writer, "add_entry"),
                "trim": (_faiss_writer, "trim_entries"),
                "publish": (Stage, "publish_file"),
            }[step],
            stop,
        )
        with pytest.raises(Stop):
            written(path, fresh, overwrite=True)
    assert described(path)[0] == ("model-b" if step == "trim" else "old")
    if step == "trim":  # published; the same command again would start afresh, the migration finds itself finished
        return
    with store.open_writer(f"faiss:{path}", fresh, resume=True, overwrite=True) as writer:
        for batch in cut(ROWS, 300, start=writer.progress.rows):
            writer.write(batch)
        with writer.staged():
            pass
        writer.commit()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


WRITE = """if True:
    import sys
    import numpy as np, pyarrow as pa
    from vecferry import store
    from vecferry.batch import VectorBatch
    from vecferry.testing import cut
    from vecferry_adapters import _faiss_writer
    path, index, checkpoint = sys.argv[1:]
    _faiss_writer.CHECKPOINT = int(checkpoint)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20000, 32), dtype=np.float32)
    rows = VectorBatch(pa.array(rng.permutation(20000) * 2**33), x)
    info = store.StoreInfo("faiss", "", 20000, 32, "l2", pa.int64(), index=index, provenance={"plan": "p"})
    with store.open_writer("faiss:" + path, info, resume=True) as writer:
        print("ready", flush=True)
        for batch in cut(rows, 97, start=writer.progress.rows):
            writer.write(batch)
        with writer.staged():
            pass
        writer.commit()
"""


def start(path: Path, factory: str, checkpoint: int = 1 << 18) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITE, str(path), factory, str(checkpoint)], stdout=subprocess.PIPE)


def kill_and_resume(folder: Path, factory: str, times: int, seed: int) -> None:
    """Kill a writer again and again, then let it finish; compare with one that nothing happened to."""
    (folder / "calm").mkdir()
    begun = time.monotonic()
    process = start(folder / "calm" / "t", factory)
    assert process.stdout is not None
    process.stdout.readline()
    loaded = time.monotonic() - begun
    assert process.wait() == 0
    process.stdout.close()
    work = time.monotonic() - begun - loaded
    rng = np.random.default_rng(seed)
    for number in range(times):
        folder_of_this = folder / str(number)
        folder_of_this.mkdir()
        while True:
            process = start(folder_of_this / "t", factory)
            assert process.stdout is not None
            process.stdout.readline()
            try:
                code = process.wait(timeout=rng.uniform(0, 1.2 * work))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                code = process.wait()
            process.stdout.close()
            assert code in (0, -signal.SIGKILL)
            if code == 0 or (folder_of_this / "t").exists():
                break
        assert (folder_of_this / "t").read_bytes() == (folder / "calm" / "t").read_bytes()
        with store.open_reader(f"faiss:{folder_of_this / 't'}") as reader:
            assert reader.info.provenance == {"plan": "p"}


@pytest.mark.parametrize("factory", ["Flat", "IVF16,SQ8"])
@pytest.mark.case("16", "p8")
def test_a_killed_writer_is_continued_to_the_same_bytes(factory: str, tmp_path: Path) -> None:
    kill_and_resume(tmp_path, factory, times=2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "times"),
    [("Flat", 50), ("IVF16,Flat", 50), ("OPQ4_8,IVF16,PQ4x4", 10), ("HNSW8", 10)],  # the last two take long to build
)
def test_a_writer_killed_many_times(factory: str, times: int, tmp_path: Path) -> None:
    kill_and_resume(tmp_path, factory, times=times, seed=1)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=420k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat"])
def test_a_full_disk_stops_resumably(
    factory: str, tiny_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_faiss_writer, "CHECKPOINT", 1 << 14)
    path = tiny_disk / "t"
    old = written(path, info(), ROWS.take(np.arange(500)))
    filler = tiny_disk / "filler"
    # too little room for the rows, or for the index beside them
    filler.write_bytes(bytes(250 << 10 if factory == "Flat" else 100 << 10))
    fresh = info(factory, provenance={"plan": "new"})

    def run(resume: bool) -> None:
        with store.open_writer(f"faiss:{path}", fresh, resume=resume, overwrite=True) as writer:
            for batch in cut(ROWS, 300, start=writer.progress.rows):
                writer.write(batch)
            with writer.staged():
                pass
            writer.commit()

    with pytest.raises(StoppedError, match="bytes are free"):
        run(resume=False)
    assert path.read_bytes() == old
    assert described(path)[2] == "plan-1"
    filler.unlink()
    run(resume=True)
    assert path.read_bytes() == written(tmp_path / "calm", fresh)
    assert (tiny_disk / "t.bak").read_bytes() == old


def test_a_disk_that_is_full_during_the_build_leaves_all_rows_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def run(resume: bool) -> None:
        with store.open_writer(f"faiss:{tmp_path / 't'}", info("IVF8,Flat"), resume=resume) as writer:
            for batch in cut(ROWS, 300, start=writer.progress.rows):
                writer.write(batch)
            writer.commit()

    with monkeypatch.context() as patched:
        patched.setattr(_faiss_writer, "build", full)
        with pytest.raises(StoppedError, match="2,000 rows are staged safely"):
            run(resume=False)
    assert json.loads((tmp_path / ".t.vecferry" / "state.json").read_text())["rows"] == N
    run(resume=True)
    assert (tmp_path / "t").read_bytes() == by_faiss("IVF8,Flat", "ip", IDS, 8)


@pytest.mark.parametrize("kind", ["faiss", "parquet", "npy"])
@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.case("18")
def test_a_disk_too_full_to_begin_is_left_as_it_was(kind: str, left: int, tiny_disk: Path) -> None:
    """With room for a few pages what begins may fail at its first file or at its last."""
    free = shutil.disk_usage(tiny_disk).free
    (tiny_disk / "filler").write_bytes(bytes(free - left * 4096))

    def attempt(resume: bool) -> None:
        with store.open_writer(f"{kind}:{tiny_disk / 't'}", info(), resume=resume) as writer:
            writer.write(ROWS)
            writer.commit()

    for resume in (False, True):
        with pytest.raises((UsageError, StoppedError)) as caught:
            attempt(resume)
        if caught.type is StoppedError:
            assert left > 0
            assert "0 rows are staged safely" in str(caught.value)
        else:
            assert "bytes are free), so nothing could be begun" in str(caught.value)
            assert [p.name for p in tiny_disk.iterdir()] == ["filler"]
    (tiny_disk / "filler").unlink()
    attempt(resume=True)
    with store.open_reader(f"{kind}:{tiny_disk / 't'}") as reader:
        np.testing.assert_array_equal(concat(reader.read(5000)).vectors, X)


def test_a_damaged_stage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_faiss_writer, "CHECKPOINT", 1 << 12)
    with store.open_writer(f"faiss:{tmp_path / 't'}", info()) as writer:
        for batch in cut(ROWS, 300):
            writer.write(batch)
    os.truncate(tmp_path / ".t.vecferry" / "vectors", 1000)
    with pytest.raises(DataError, match="1000 bytes"):
        store.open_writer(f"faiss:{tmp_path / 't'}", info(), resume=True)


@pytest.mark.case("4", "5")
def test_the_wrong_dimension_is_named(tmp_path: Path) -> None:
    with store.open_writer(f"faiss:{tmp_path / 't'}", info()) as writer:
        with pytest.raises(IncompatibleError, match=r"16.*8"):
            writer.write(VectorBatch(pa.array([1]), np.zeros((1, 8), np.float32)))
        writer.abort()


# Memory

MEMORY = """if True:
    import sys
    import numpy as np, pyarrow as pa
    from vecferry import store
    from vecferry.batch import VectorBatch
    count = int(sys.argv[2])
    info = store.StoreInfo("faiss", "", count, 128, "l2", pa.int64(), index="Flat", provenance={"plan": "p"})
    x = np.random.default_rng(0).standard_normal((4000, 128), dtype=np.float32)
    with store.open_writer("faiss:" + sys.argv[1], info) as writer:
        for at in range(0, count, 4000):
            writer.write(VectorBatch(pa.array(np.arange(at, at + 4000)), x))
        with writer.staged() as reader:
            assert (reader.search(x[:2], 1)[1] == 0).all()
        writer.commit()
    status = dict(line.split(":") for line in open("/proc/self/status"))
    print(int(status["VmHWM"].split()[0]) * 1024)
"""


def test_writing_and_searching_a_flat_file_takes_no_more_memory_for_more_rows(tmp_path: Path) -> None:
    peaks, counts = [], (40_000, 160_000)
    for count in counts:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tmp_path / "t"), str(count)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
        (tmp_path / "t").unlink()
    assert peaks[1] - peaks[0] < 16 * (counts[1] - counts[0]) + 2 * 2**20
