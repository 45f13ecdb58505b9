"""FAISS: every structure against FAISS's own decoding, and what goes wrong in real files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import VectorBatch, concat
from vecferry.errors import (
    BadRowsError,
    DataError,
    IncompatibleError,
    MissingDependencyError,
    UnsupportedError,
)

faiss = pytest.importorskip("faiss")

D, N = 16, 700
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, D)).astype(np.float32)
X /= np.linalg.norm(X, axis=1, keepdims=True)
IDS = np.random.default_rng(1).permutation(N) * 2**33 - 5  # in no order, negative, above 2**32
QUERIES = np.random.default_rng(2).standard_normal((9, D)).astype(np.float32)


def made(factory: str, metric: int = 0, ids: np.ndarray | None = None, rows: np.ndarray = X) -> Any:
    """Make an index of the rows, with ids where it takes them or they are given."""
    index = faiss.index_factory(rows.shape[1], factory, metric)
    index.train(rows)
    if ids is None:
        index.add(rows)
    else:
        index.add_with_ids(rows, ids)
    return index


def saved(index: Any, path: Path) -> str:
    faiss.write_index(index, str(path))
    return f"faiss:{path}"


def everything(uri: Any, size: int = 100) -> VectorBatch:
    with store.open_reader(uri) as reader:
        return concat(reader.read(size))


# What is read

EXACT = ["Flat", "IDMap,Flat", "IDMap2,Flat", "IVF16,Flat", "IDMap2,IVF16,Flat", "HNSW8,Flat", "IDMap2,HNSW8,Flat"]
EXACT += ["NSG8,Flat", "IVF16,PQ4x4,RFlat", "IDMap2,SQ8,RFlat", "IVF16_HNSW4,Flat", "IVF16(PQ4x4),Flat", "Pad40,Flat"]
ROTATED = ["RR,Flat", "RR24,Flat", "PCA16,IVF16,Flat", "PCAR16,Flat"]
CODED = ["SQ8", "SQ6", "SQ4", "SQfp16", "SQbf16", "PQ4x4", "PQ8x4fs", "RQ2x2", "RaBitQ", "LSH"]
LISTED = ["IVF16,SQ8", "IVF16,SQfp16", "IVF16,PQ4x4", "IVF16,RaBitQ", "IVF16,RQ2x2"]


def takes_ids(factory: str) -> bool:
    return factory.startswith("IDMap") or ("IVF" in factory and "RFlat" not in factory)


@pytest.mark.parametrize("where", ["file", "memory"])
@pytest.mark.parametrize("factory", EXACT + ROTATED)
@pytest.mark.case("6", "7")
def test_exact_structures_give_back_what_was_added(factory: str, where: str, tmp_path: Path) -> None:
    index = made(factory, ids=IDS if takes_ids(factory) else None)
    uri = saved(index, tmp_path / "a.bin") if where == "file" else index
    with store.open_reader(uri) as reader:
        info, rows = reader.info, concat(reader.read(100))
        assert (info.count, info.dim, info.metric, info.lossy, info.dtype) == (N, D, "ip", False, "float32")
        assert info.index == factory
        assert info.id_type == (pa.int64() if takes_ids(factory) else None)
    numbers = rows.ids.to_numpy()
    order = np.argsort(IDS)[np.searchsorted(np.sort(IDS), numbers)] if takes_ids(factory) else numbers
    assert sorted(order.tolist()) == list(range(N))
    assert info.ordered == ("IVF" not in factory or "RFlat" in factory)
    if info.ordered:
        assert order.tolist() == list(range(N))
    if factory in EXACT:
        np.testing.assert_array_equal(rows.vectors, X[order])
    else:
        np.testing.assert_allclose(rows.vectors, X[order], atol=2e-6)


@pytest.mark.parametrize("factory", CODED)
def test_codes_are_decoded_as_faiss_does(factory: str, tmp_path: Path) -> None:
    index = made(factory, metric=1)
    rows = everything(saved(index, tmp_path / "a"))
    with store.open_reader(f"faiss:{tmp_path / 'a'}") as reader:
        assert reader.info.lossy
        assert reader.info.index in (factory, type(index).__name__)
        assert reader.info.dtype == {"SQfp16": "float16"}.get(factory, reader.info.index)
        assert reader.info.metric == "l2"
    np.testing.assert_array_equal(rows.vectors, np.stack([index.reconstruct(i) for i in range(N)]))
    assert rows.ids.to_pylist() == list(range(N))


@pytest.mark.parametrize("factory", LISTED)
def test_inverted_lists_are_decoded_as_faiss_does(factory: str, tmp_path: Path) -> None:
    index = made(factory, ids=IDS)
    rows = everything(saved(index, tmp_path / "a"))
    expected, ids, one = [], [], np.empty(D, np.float32)
    for number in range(index.nlist):
        for place in range(index.invlists.list_size(number)):
            index.reconstruct_from_offset(number, place, faiss.swig_ptr(one))
            expected.append(one.copy())
            ids.append(index.invlists.get_single_id(number, place))
    assert rows.ids.to_pylist() == ids
    np.testing.assert_array_equal(rows.vectors, np.stack(expected))


@pytest.mark.parametrize("factory", ["IVF16,PQ8x4fs", "IVF16,PQ8x4fsr"])
def test_fastscan_lists_are_decoded_as_their_plain_twin(factory: str, tmp_path: Path) -> None:
    index = made(factory, ids=IDS)
    rows = everything(saved(index, tmp_path / "a"))
    with store.open_reader(f"faiss:{tmp_path / 'a'}") as reader:
        assert reader.info.index == factory
    order = np.argsort(IDS)[np.searchsorted(np.sort(IDS), rows.ids.to_numpy())]
    codes = index.pq.compute_codes(X)
    decoded = index.pq.decode(codes)
    if index.by_residual:
        centroids = index.quantizer.reconstruct_n(0, 16)
        owner = index.quantizer.search(X, 1)[1][:, 0]
        decoded = index.pq.decode(index.pq.compute_codes(X - centroids[owner])) + centroids[owner]
    np.testing.assert_allclose(rows.vectors, decoded[order], atol=1e-6)


def test_opq_and_pca_are_undone(tmp_path: Path) -> None:
    opq = faiss.OPQMatrix(D, 4, 8)
    opq.pq, opq.niter, opq.verbose = faiss.ProductQuantizer(8, 4, 4), 2, False  # 16 centroids instead of 256
    with_opq = faiss.IndexPreTransform(opq, made("IVF16,PQ4x4", metric=1, rows=np.ascontiguousarray(X[:, :8])))
    with_opq.index.reset()
    with_opq.is_trained = False
    with_opq.train(X)
    with_opq.add_with_ids(X, IDS)
    for factory, index in [("OPQ4_8,IVF16,PQ4x4", with_opq), ("PCA8,Flat", made("PCA8,Flat", metric=1))]:
        with store.open_reader(saved(index, tmp_path / "a")) as reader:
            assert reader.info.index == factory
            assert reader.info.lossy
            rows = concat(reader.read(64))
        inner, chain = index.index, index.chain.at(0)
        decoded = everything(inner).vectors if "IVF" in factory else inner.reconstruct_n(0, N)
        linear = faiss.downcast_VectorTransform(chain)
        matrix = faiss.vector_to_array(linear.A).reshape(linear.d_out, linear.d_in).astype(np.float64)
        bias = faiss.vector_to_array(linear.b) if linear.have_bias else 0.0
        np.testing.assert_allclose(rows.vectors, (decoded - bias) @ matrix, atol=1e-5)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    for factory, name in [("ITQ8,LSH", "ITQ"), ("PCAW8,Flat", "PCAMatrix"), ("IVF16,FlatDedup", "Dedup")]:
        # a spectrum that isn't flat, or whitening would be a rotation
        index = made(factory, metric=1, rows=X * np.linspace(0.1, 3, D, dtype=np.float32))
        for uri in (saved(index, tmp_path / "a"), index):
            with pytest.raises(UnsupportedError, match=name):
                store.open_reader(uri)
    with pytest.raises(UnsupportedError, match="Panorama"):
        store.open_reader(made("FlatL2Panorama4", metric=1))


@pytest.mark.parametrize("factory", ["IVF8,Flat", "IDMap,IVF8,PQ4x4", "PCA8,Flat", "SQ8"])
def test_an_index_that_was_never_trained_is_not_called_damaged(factory: str, tmp_path: Path) -> None:
    faiss.write_index(faiss.index_factory(D, factory, faiss.METRIC_L2), str(tmp_path / "t"))
    with pytest.raises(DataError, match="never trained, and no rows"):
        store.open_reader(f"faiss:{tmp_path / 't'}")


@pytest.mark.parametrize("factory", ["PCA8,Flat", "RR8,Flat", "PCA8,SQfp16"])
def test_vectors_of_fewer_dimensions_are_lossy_codes(factory: str, tmp_path: Path) -> None:
    index = faiss.index_factory(D, factory, faiss.METRIC_L2)
    index.train(X)
    index.add(X)
    faiss.write_index(index, str(tmp_path / "t"))
    with store.open_reader(f"faiss:{tmp_path / 't'}") as reader:
        assert (reader.info.lossy, reader.info.dtype) == (True, factory)
        found = next(reader.read(len(X))).vectors
    # the best approximation in as many directions: what is left has no part in the space of what was kept
    assert np.linalg.matrix_rank(found - found.mean(0), tol=1e-2 * np.linalg.norm(found)) == 8
    assert np.abs(((X - found) * (found - found.mean(0))).sum(1)).max() < 0.02 * (X**2).sum(1).max()


def test_binary_codes_are_refused(tmp_path: Path) -> None:
    index = faiss.IndexBinaryFlat(64)
    index.add(np.random.default_rng(0).integers(0, 256, (10, 8), dtype=np.uint8))
    faiss.write_index_binary(index, str(tmp_path / "b"))
    with pytest.raises(UnsupportedError, match="linear map does not apply"):
        store.open_reader(str(tmp_path / "b"))
    with pytest.raises(UnsupportedError, match="linear map does not apply"):
        store.open_reader(index)


def test_other_metrics_are_refused_by_name(tmp_path: Path) -> None:
    index = faiss.IndexFlat(D, faiss.METRIC_L1)
    index.add(X)
    with pytest.raises(UnsupportedError, match="METRIC_L1"):
        store.open_reader(saved(index, tmp_path / "a"))


def test_inverted_lists_on_disk(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    index = made("IVF8,Flat", ids=IDS)
    lists = faiss.OnDiskInvertedLists(8, index.code_size, str(tmp_path / "here" / "lists"))
    for number in range(8):
        size = index.invlists.list_size(number)
        ids = faiss.rev_swig_ptr(index.invlists.get_ids(number), size)
        codes = faiss.rev_swig_ptr(index.invlists.get_codes(number), size * index.code_size)
        lists.add_entries(number, size, faiss.swig_ptr(ids), faiss.swig_ptr(codes))
    want = everything(index)
    index.replace_invlists(lists)
    uri = saved(index, tmp_path / "here" / "a")
    del index, lists
    for _ in ("where it was made", "moved"):
        got = everything(uri)
        assert got.ids.equals(want.ids)
        np.testing.assert_array_equal(got.vectors, want.vectors)
        if (tmp_path / "here").exists():
            (tmp_path / "here").rename(tmp_path / "there")
            uri = f"faiss:{tmp_path / 'there' / 'a'}"
    (tmp_path / "there" / "lists").unlink()
    with pytest.raises(DataError, match="another file"):
        store.open_reader(uri)


def test_rows_that_faiss_lost_are_counted(tmp_path: Path) -> None:
    rows = X.copy()
    rows[[3, 99]] = np.nan
    index = faiss.index_factory(D, "IVF8,Flat")
    index.train(X)
    index.add(rows)
    uri = saved(index, tmp_path / "a")
    with pytest.raises(DataError, match=rf"{N} rows, but only {N - 2}"):
        store.open_reader(uri)
    got = everything(uri + "?missing=skip")
    assert sorted(got.ids.to_pylist()) == sorted(set(range(N)) - {3, 99})


def test_nan_rows_of_a_flat_index_are_read(tmp_path: Path) -> None:
    rows = X.copy()
    rows[7] = np.nan
    np.testing.assert_array_equal(everything(saved(made("Flat", rows=rows), tmp_path / "a")).vectors, rows)


# Shards


@pytest.mark.parametrize("address", ["folder", "glob"])
@pytest.mark.case("9")
def test_files_are_read_as_shards_in_sorted_order(address: str, tmp_path: Path) -> None:
    for number, (low, high) in enumerate([(0, 300), (300, 310), (310, N)]):
        saved(made("Flat", rows=X[low:high]), tmp_path / f"part{number}.index")
    (tmp_path / "notes.txt").write_text("no index")
    (tmp_path / "part0.index.vecferry.json").write_text("{}")
    saved(made("Flat"), tmp_path / ".hidden")
    uri = str(tmp_path) if address == "folder" else str(tmp_path / "part*.index")
    with store.open_reader(uri if address == "folder" else f"faiss:{uri}") as reader:
        rows = concat(reader.read(64))
        assert rows.ids.to_pylist() == list(range(N))
        np.testing.assert_array_equal(rows.vectors, X)
        places, _ = reader.search(QUERIES, 7)
        np.testing.assert_array_equal(places, np.argsort(-(QUERIES @ X.T), axis=1)[:, :7])
        rest = concat(reader.read(1000, after=305))
        assert rest.ids.to_pylist() == list(range(305, N))
        np.testing.assert_array_equal(reader.take(pa.array([309, 0, 699])).vectors, X[[309, 0, 699]])
        places, _ = reader.search(QUERIES, 3, among=pa.array([309, 0, 699, 310]))
        np.testing.assert_array_equal(places, np.argsort(-(QUERIES @ X[[309, 0, 699, 310]].T), axis=1)[:, :3])


def test_shards_must_agree(tmp_path: Path) -> None:
    saved(made("Flat"), tmp_path / "a")
    for other, fault in [
        (made("Flat", rows=np.ascontiguousarray(X[:, :8])), r"dimension.*16.*8"),
        (made("Flat", metric=1), "metric.*ip.*l2"),
        (made("IDMap,Flat", ids=IDS), "id type.*None.*int64"),
    ]:
        saved(other, tmp_path / "b")
        with pytest.raises(DataError, match=fault):
            store.open_reader(f"faiss:{tmp_path}")


@pytest.mark.case("9")
def test_shards_in_memory() -> None:
    shards = faiss.IndexShards(D)
    for low, high in [(0, 300), (300, N)]:
        shards.add_shard(made("Flat", metric=1, rows=X[low:high]))
    rows = everything(shards)
    assert rows.ids.to_pylist() == list(range(N))
    np.testing.assert_array_equal(rows.vectors, X)


# Damage


def small(factory: str, path: Path) -> bytes:
    """Save an index of 60 rows of 8 elements; return its bytes."""
    index = faiss.index_factory(8, factory)
    index.train(np.ascontiguousarray(X[:, :8]))
    rows = np.ascontiguousarray(X[:60, :8])
    index.add_with_ids(rows, np.arange(60)) if "IDMap" in factory else index.add(rows)
    saved(index, path)
    return path.read_bytes()


DAMAGED = ["Flat", "IDMap2,Flat", "IVF4,SQ8", "HNSW4,Flat", "PCA4,IVF4,PQ2x4", "IVF4,PQ2x4,RFlat", "PQ4x4fs"]


@pytest.mark.parametrize("factory", DAMAGED)
@pytest.mark.case("q4")
def test_cut_and_lengthened_files_are_refused(factory: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    good = small(factory, path)
    for size in [*range(0, 120, 3), *range(120, len(good), max(1, len(good) // 40)), len(good) - 1]:
        path.write_bytes(good[:size])
        with pytest.raises(DataError):
            store.open_reader(f"faiss:{path}")
    for junk in (b"\0", b"junk" * 30):
        path.write_bytes(good + junk)
        with pytest.raises(DataError):
            store.open_reader(f"faiss:{path}")
    path.write_bytes(good)
    assert len(everything(f"faiss:{path}")) == 60


@pytest.mark.parametrize("factory", DAMAGED)
@pytest.mark.case("q4")
def test_changed_bytes_never_end_the_process(factory: str, tmp_path: Path) -> None:
    code = """if True:
        import sys, numpy as np
        from vecferry import store
        from vecferry.errors import VecferryError
        path, seed = sys.argv[1:]
        good, rng = open(path, "rb").read(), np.random.default_rng(int(seed))
        for _ in range(30):
            bad = bytearray(good)
            for _ in range(rng.integers(1, 4)):
                bad[rng.integers(0, min(len(good), 600))] = rng.choice([0, 1, 127, 128, 255, rng.integers(256)])
            open(path, "wb").write(bad)
            try:
                with store.open_reader("faiss:" + path) as reader:
                    for _ in reader.read(17):
                        pass
            except VecferryError:
                pass
    """
    small(factory, tmp_path / "a")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a"), "1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_missing_faiss_names_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = saved(made("Flat"), tmp_path / "a")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'vecferry\[cpu\]'"):
        store.open_reader(uri)


# Searching


@pytest.mark.parametrize(
    "factory",
    [
        "Flat",
        "IDMap2,Flat",
        "SQ8",
        "PQ4x4",
        "PQ8x4fs",
        "HNSW8,Flat",
        "RR,SQ8",
        "PCA8,IVF4,Flat",
        "IVF16,Flat",
        "IVF16,PQ8x4fs",
        "IVF16,PQ4x4,RFlat",
        "IDMap2,IVF16,Flat",
        "IDMap2,HNSW8,SQ8",
        "IVF16,RaBitQ",
    ],
)
def test_search_is_the_index_s_own(factory: str, tmp_path: Path) -> None:
    index = made(factory, metric=1, ids=IDS if takes_ids(factory) else None)
    distances, labels = index.search(QUERIES, 20)
    with store.open_reader(saved(index, tmp_path / "a")) as reader:
        places, scores = reader.search(QUERIES, 20)
        ids = pa.concat_arrays(list(reader.ids(1000))).to_numpy()
    np.testing.assert_array_equal(np.where(places == -1, -1, ids[places]), labels)
    np.testing.assert_allclose(scores[places >= 0], -distances[labels != -1], atol=1e-5)
    assert np.isneginf(scores[places == -1]).all()


@pytest.mark.parametrize(
    "factory",
    [
        "Flat",
        "SQ8",
        "PQ4x4",
        "PQ8x4fs",
        "HNSW8,Flat",
        "HNSW8,SQ8",
        "RR,SQ8",
        "RR,PQ4x4",
        "RR,IVF4,Flat",
        "IVF16,Flat",
        "IVF16,SQ8",
        "IVF16,PQ4x4,RFlat",
        "SQ8,RFlat",
        "IDMap2,IVF16,Flat",
        "IDMap2,HNSW8,SQ8",
    ],
)
@pytest.mark.parametrize("metric", [0, 1])
def test_search_among_chosen_rows(factory: str, metric: int, tmp_path: Path) -> None:
    index = made(factory, metric, ids=IDS if takes_ids(factory) else None)
    if "RFlat" in factory:
        index.k_factor = 8.0
    wide = "?nprobe=16" if "IVF16" in factory else "?nprobe=4" if "IVF4" in factory else ""
    with store.open_reader(saved(index, tmp_path / "a") + wide) as reader:
        rows = concat(reader.read(1000))
        chosen = np.random.default_rng(3).permutation(N)[:40]
        places, scores = reader.search(QUERIES, 5, among=rows.ids.take(pa.array(chosen)))
        some = rows.vectors[chosen].astype(np.float64)
        exact = QUERIES @ some.T if metric == 0 else -((QUERIES[:, None] - some) ** 2).sum(2)
    order = np.argsort(-exact, axis=1)[:, :5]
    if "HNSW" in factory:  # a walk that may miss some
        assert (places == order).mean() > 0.9
    else:
        np.testing.assert_array_equal(places, order)
    assert (np.diff(scores, axis=1) <= 0).all()


def test_what_cannot_be_searched_among_says_so() -> None:
    with store.open_reader(made("NSG8,Flat", metric=1)) as reader, pytest.raises(UnsupportedError, match="NSG"):
        reader.search(QUERIES, 3, among=pa.array([1, 2, 3, 4]))


def test_an_address_sets_search_parameters(tmp_path: Path) -> None:
    uri = saved(made("IVF16,Flat", ids=IDS), tmp_path / "a")
    exact = np.argsort(-(QUERIES @ X.T), axis=1)[:, :5]
    hits = []
    for nprobe in (1, 4, 16):
        with store.open_reader(f"{uri}?nprobe={nprobe}") as reader:
            assert reader.info.parameters == {"nprobe": nprobe}
            ids = pa.concat_arrays(list(reader.ids(1000))).to_numpy()
            hits.append((IDS[exact] == ids[reader.search(QUERIES, 5)[0]]).mean())
    assert hits[0] < hits[1] < hits[2] == 1
    for wrong in ("?nprobe=0", "?efSearch=64", "?nprobe=x"):
        with pytest.raises(store.UsageError):
            store.open_reader(uri + wrong)


@pytest.mark.case("5")
def test_wrong_queries_are_refused() -> None:
    with store.open_reader(made("Flat")) as reader, pytest.raises(IncompatibleError, match=r"16.*8"):
        reader.search(QUERIES[:, :8], 3)


def test_missing_ids_are_named() -> None:
    with store.open_reader(made("IVF16,Flat", ids=IDS)) as reader, pytest.raises(BadRowsError, match="12345"):
        reader.take(pa.array([int(IDS[0]), 12345]))


# Memory

MEMORY = """if True:
    import sys
    from vecferry import store
    with store.open_reader("faiss:" + sys.argv[1]) as reader:
        rows = sum(len(b) for b in reader.read(4096)) + sum(len(i) for i in reader.ids(4096))
        assert rows == 2 * reader.info.count
    status = dict(line.split(":") for line in open("/proc/self/status"))
    print(int(status["VmHWM"].split()[0]) * 1024)  # ru_maxrss would be at least that of the parent process
"""


def peak(code: str, *arguments: str) -> int:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("factory", ["Flat", "IDMap2,Flat", "IVF32,Flat", "SQ8"])
@pytest.mark.case("10", "11")
def test_reading_takes_no_more_memory_for_more_rows(factory: str, tmp_path: Path) -> None:
    peaks, dim, counts = [], 128, (30_000, 120_000)
    for count in counts:
        rows = np.random.default_rng(0).standard_normal((count, dim), dtype=np.float32)
        index = faiss.index_factory(dim, factory, faiss.METRIC_L2)
        index.train(rows[:2000])
        index.add_with_ids(rows, np.arange(count)) if "ID" in factory else index.add(rows)
        path = tmp_path / str(count)
        saved(index, path)
        del index, rows
        peaks.append(peak(MEMORY, str(path)))
        path.unlink()
    assert peaks[1] - peaks[0] < 16 * (counts[1] - counts[0]) + 2 * 2**20
