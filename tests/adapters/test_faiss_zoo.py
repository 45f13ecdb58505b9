"""FAISS: every type and nesting that it can write, with ids above 2**40 in no order and rows deleted, read back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import VectorBatch, concat
from vecferry.errors import DataError, UnsupportedError

faiss = pytest.importorskip("faiss")

D, N = 16, 600
X = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
IDS = 2**40 + np.random.default_rng(1).permutation(N) * 2**21 + 7
GONE = np.random.default_rng(2).choice(N, 90, replace=False)
HALF_STEP = {8: np.ptp(X) / 255 / 2, 6: np.ptp(X) / 63 / 2, 4: np.ptp(X) / 15 / 2}
"""Half a step of a scalar code; no dimension's range is larger than that of all."""
FP16, BF16 = np.abs(X).max() * 2**-11, np.abs(X).max() * 2**-8

EXACT = ["Flat", "RR,Flat", "Pad24,Flat", "SQ8,RFlat", "HNSW8,Flat", "NSG8,Flat", "PCA16,HNSW8,Flat", "IVF8,Flat"]
EXACT += ["IVF8_HNSW4,Flat", "IVF8(SQ8),Flat", "RR,IVF8,Flat", "IMI2x2,Flat", "IVF8,PQ4x4,RFlat"]
"""Types that hold what was added; the rotations do up to rounding."""
SCALAR = {"SQ8": HALF_STEP[8], "SQ6": HALF_STEP[6], "SQ4": HALF_STEP[4], "SQfp16": FP16, "SQbf16": BF16}
SCALAR |= {"IVF8,SQfp16": FP16, "HNSW8,SQ8": HALF_STEP[8], "NSG8,SQ8": HALF_STEP[8], "PQ4x4,Refine(SQ8)": HALF_STEP[8]}
"""Types whose largest error in an element follows from their code."""
CODED = ["PQ4x4", "PQ8x4fs", "LSH", "RaBitQ", "RaBitQ4", "RaBitQfs", "RQ2x4", "LSQ2x4", "PRQ2x2x4", "PLSQ2x2x4"]
CODED += ["EDEN4", "Residual8,PQ4x4", "IVF8,SQ8", "IVF8,PQ4x4", "IVF8,PQ8x4fs", "IVF8,PQ8x4fsr", "IVF8,RaBitQ"]
CODED += ["IVF8,RQ2x4", "IVF8,LSQ2x4", "IVF8,PRQ2x2x4", "IVF8,EDEN4", "HNSW8,PQ4x4", "HNSW8,RaBitQ", "NSG8,PQ4x4"]
CODED += ["OPQ4,PQ4x4", "OPQ4,IVF8,PQ4x4", "PCA8,Flat", "PCAR8,SQ8", "L2norm,Flat", "RR,IVF8,SQ8"]
REFUSED = {
    "ITQ16,LSH": "ITQTransform",
    "PCAW8,Flat": "PCAMatrix",
    "IVF8,FlatDedup": "IndexIVFFlatDedup",
    "IVF8,ITQ,SH": "IndexIVFSpectralHash",
    "IVF8,RaBitQfs": "IndexIVFRaBitQFastScan",
    "IVF8,FlatPanorama4": "IndexIVFFlatPanorama",
    "FlatL2Panorama4": "IndexFlatPanorama",
    "ZnLattice2x16_4": "IndexLattice",
}
"""Types whose rows can't be read, and what the error must name."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let FAISS work on one thread: on more it waits for them longer than it works."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


def built(factory: str, metric: int, outer: str) -> Any:
    """Build an index of X with IDS: in an id map, or in inverted lists, which keep ids themselves."""
    index = faiss.index_factory(D, f"{outer}{factory}", metric)
    index.train(X)
    index.add_with_ids(X, IDS)
    return index


def outer_of(factory: str) -> str:
    keeps_ids = "IVF" in factory or "IMI" in factory
    return "" if keeps_ids and "RFlat" not in factory else "IDMap2,"


def deletes(factory: str) -> bool:
    """Say whether FAISS can delete rows of this type."""
    return not any(part in factory for part in ("HNSW8", "NSG", "RFlat", "Refine"))


def by_faiss(index: Any, ids: np.ndarray) -> np.ndarray:
    """Let FAISS decode rows by their ids, one by one, from the index in memory."""
    if not isinstance(index, faiss.IndexIDMap):
        faiss.extract_index_ivf(index).set_direct_map_type(faiss.DirectMap.Hashtable)
    return np.stack([index.reconstruct(int(i)) for i in ids])


def read_back(uri: Any, size: int = 64) -> tuple[store.StoreInfo, VectorBatch]:
    with store.open_reader(uri) as reader:
        rows = concat(reader.read(size))
        assert pa.concat_arrays(list(reader.ids(100))).equals(rows.ids)
        some = rows.ids.take(pa.array([len(rows) - 1, 0, len(rows) // 2]))
        np.testing.assert_array_equal(reader.take(some).vectors, rows.vectors[[-1, 0, len(rows) // 2]])
        return reader.info, rows


@pytest.mark.parametrize("factory", [*EXACT, *SCALAR, *CODED])
@pytest.mark.case("6", "7", "9")
def test_what_an_index_holds_is_read(factory: str, tmp_path: Path) -> None:
    index = built(factory, faiss.METRIC_L2, outer_of(factory))
    left = np.ones(N, bool)
    if deletes(factory):
        assert index.remove_ids(faiss.IDSelectorBatch(IDS[GONE])) == len(GONE)
        left[GONE] = False
    else:
        with pytest.raises(RuntimeError, match="not implemented"):
            index.remove_ids(faiss.IDSelectorBatch(IDS[GONE]))
    faiss.write_index(index, str(tmp_path / "t"))
    info, rows = read_back(f"faiss:{tmp_path / 't'}")
    assert (info.count, info.dim, info.metric, info.id_type) == (left.sum(), D, "l2", pa.int64())
    ids = rows.ids.to_numpy()
    assert sorted(ids) == sorted(IDS[left])
    if info.ordered:
        assert ids.tolist() == IDS[left].tolist()
    added = X[np.argsort(IDS)[np.searchsorted(np.sort(IDS), ids)]]
    np.testing.assert_allclose(rows.vectors, by_faiss(index, ids), atol=2e-6, rtol=1e-6)
    assert info.lossy == (factory not in EXACT)
    if factory in EXACT:
        np.testing.assert_allclose(rows.vectors, added, atol=2e-6)
    elif factory in SCALAR:
        assert np.abs(rows.vectors - added).max() <= SCALAR[factory] * 1.001
    elif factory != "L2norm,Flat":  # less is lost than if every row were the mean
        assert ((rows.vectors - added) ** 2).sum() < ((added - added.mean(0)) ** 2).sum()


PRODUCTS = ["Flat", "SQ8", "IVF8,Flat", "IVF8,PQ4x4", "HNSW8,Flat", "RaBitQ", "PQ8x4fs", "RR,IVF8,SQ8", "OPQ4,PQ4x4"]


@pytest.mark.parametrize("factory", PRODUCTS)
def test_bits_do_not_depend_on_the_batch(factory: str, tmp_path: Path) -> None:
    """An inner-product index, in an id map of the older kind or none, read in batches of several sizes."""
    index = built(factory, faiss.METRIC_INNER_PRODUCT, "" if "IVF" in factory else "IDMap,")
    faiss.write_index(index, str(tmp_path / "t"))
    info, rows = read_back(f"faiss:{tmp_path / 't'}")
    assert info.metric == "ip"
    for size in (1, 77, 10_000):
        again = read_back(f"faiss:{tmp_path / 't'}", size)[1]
        assert again.ids.equals(rows.ids)
        np.testing.assert_array_equal(again.vectors, rows.vectors)
    assert sorted(rows.ids.to_pylist()) == sorted(IDS.tolist())


@pytest.mark.parametrize("factory", ["PCA16,IDMap,Flat", "PCA16,IDMap2,IVF8,Flat", "PCA16,IDMap,HNSW8,Flat"])
def test_an_id_map_inside(factory: str, tmp_path: Path) -> None:
    index = faiss.index_factory(D, factory)
    index.train(X)
    index.add_with_ids(X, IDS)
    faiss.write_index(index, str(tmp_path / "t"))
    info, rows = read_back(f"faiss:{tmp_path / 't'}")
    assert (info.index, info.count, info.id_type) == (factory, N, pa.int64())
    added = X[np.argsort(IDS)[np.searchsorted(np.sort(IDS), rows.ids.to_numpy())]]
    np.testing.assert_allclose(rows.vectors, added, atol=2e-6)
    assert sorted(rows.ids.to_pylist()) == sorted(IDS.tolist())
    with store.open_reader(f"faiss:{tmp_path / 't'}") as reader:
        places, scores = reader.search(X[:20], 1)
        np.testing.assert_array_equal(rows.ids.to_numpy()[places[:, 0]], IDS[:20])
        assert (scores > -1e-6).all()
        among = pa.array(IDS[5:25])
        np.testing.assert_array_equal(reader.search(X[10:15], 1, among=among)[0][:, 0], np.arange(5, 10))


def test_an_id_map_in_an_id_map(tmp_path: Path) -> None:
    inner = faiss.index_factory(D, "IDMap,Flat")
    inner.add_with_ids(X, np.arange(N)[::-1].copy())
    outer = faiss.IndexIDMap2(faiss.IndexFlatL2(D))
    outer.add_with_ids(X, IDS)
    outer.index = inner
    faiss.write_index(outer, str(tmp_path / "t"))
    rows = read_back(f"faiss:{tmp_path / 't'}")[1]
    assert rows.ids.to_pylist() == IDS[::-1].tolist()
    np.testing.assert_array_equal(rows.vectors, X)


def to_disk(index: Any, path: Path) -> None:
    """Move the inverted lists of an index into a file of their own."""
    ivf = faiss.extract_index_ivf(index)
    lists = faiss.OnDiskInvertedLists(ivf.nlist, ivf.code_size, str(path))
    for number in range(ivf.nlist):
        size = ivf.invlists.list_size(number)
        lists.add_entries(number, size, ivf.invlists.get_ids(number), ivf.invlists.get_codes(number))
    ivf.replace_invlists(lists, True)
    lists.this.disown()


@pytest.mark.parametrize("factory", ["IVF8,Flat", "IVF8,SQ8", "IVF8,PQ4x4", "RR,IVF8,Flat", "IDMap2,IVF8,Flat"])
def test_lists_on_disk(factory: str, tmp_path: Path) -> None:
    index = built(factory, faiss.METRIC_L2, "")
    left = np.ones(N, bool)
    if not factory.startswith("IDMap"):
        index.remove_ids(faiss.IDSelectorBatch(IDS[GONE]))
        left[GONE] = False
    want = read_back(index)[1]
    to_disk(index, tmp_path / "lists")
    faiss.write_index(index, str(tmp_path / "t"))
    del index
    got = read_back(f"faiss:{tmp_path / 't'}")[1]
    assert got.ids.equals(want.ids)
    np.testing.assert_array_equal(got.vectors, want.vectors)
    assert sorted(got.ids.to_pylist()) == sorted(IDS[left].tolist())


def test_rows_deleted_through_an_id_map_from_inverted_lists_left_wrong_ids(tmp_path: Path) -> None:
    index = built("IVF8,Flat", faiss.METRIC_L2, "IDMap2,")
    index.remove_ids(faiss.IDSelectorBatch(IDS[GONE]))
    faiss.write_index(index, str(tmp_path / "t"))
    with pytest.raises(DataError, match=r"beyond its 510 ids.*deleted.*wrong ids"):
        store.open_reader(f"faiss:{tmp_path / 't'}")
    with pytest.raises(DataError, match="beyond its 510 ids"):
        store.open_reader(index)


@pytest.mark.parametrize("successive", [True, False])
@pytest.mark.parametrize("kind", ["Flat", "IVF8,SQ8"])
def test_an_id_map_over_shards(kind: str, successive: bool) -> None:
    """They can't be written; in memory an id map gives the shards' rows their ids."""
    shards = faiss.IndexShards(D, False, successive)
    for _ in range(3):
        shard = faiss.index_factory(D, kind if successive or "IVF" in kind else f"IDMap2,{kind}")
        shard.train(X)
        shards.add_shard(shard)
        shard.this.disown()
    shards.own_indices = True
    index = faiss.IndexIDMap2(shards)
    index.add_with_ids(X, IDS)
    info, rows = read_back(index)
    assert (info.count, info.id_type) == (N, pa.int64())
    assert sorted(rows.ids.to_pylist()) == sorted(IDS.tolist())
    added = X[np.argsort(IDS)[np.searchsorted(np.sort(IDS), rows.ids.to_numpy())]]
    assert np.abs(rows.vectors - added).max() <= (0 if kind == "Flat" else 2 * HALF_STEP[8])
    with store.open_reader(index) as reader:
        places, _ = reader.search(X[:20], 1)
    np.testing.assert_array_equal(rows.ids.to_numpy()[places[:, 0]], IDS[:20])


def test_replicas_are_read_once() -> None:
    replicas = faiss.IndexReplicas(D)
    copies = [faiss.index_factory(D, "IVF8,Flat") for _ in range(2)]
    for copy in copies:
        copy.train(X)
        replicas.addIndex(copy)
    replicas.add(X)
    rows = read_back(replicas)[1]
    assert sorted(rows.ids.to_pylist()) == list(range(N))
    np.testing.assert_array_equal(rows.vectors, X[rows.ids.to_numpy()])


@pytest.mark.parametrize("factory", REFUSED)
def test_what_cannot_be_read_says_so(factory: str, tmp_path: Path) -> None:
    index = faiss.index_factory(D, factory)
    rows = X * np.linspace(0.1, 3, D, dtype=np.float32)  # or whitening would be a rotation
    index.train(rows)
    index.add(rows)
    faiss.write_index(index, str(tmp_path / "t"))
    with pytest.raises(UnsupportedError, match=rf"{REFUSED[factory]}.*start from the vectors"):
        store.open_reader(f"faiss:{tmp_path / 't'}")


def test_binary_indexes_are_refused(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(0, 256, (N, 4), dtype=np.uint8)
    for factory in ("BFlat", "BHNSW8", "BIVF8", "IDMap2,BFlat"):
        index = faiss.index_binary_factory(32, factory)
        index.train(codes)
        index.add_with_ids(codes, IDS) if factory.startswith("IDMap") else index.add(codes)
        faiss.write_index_binary(index, str(tmp_path / "t"))
        with pytest.raises(UnsupportedError, match="linear map does not apply to binary codes"):
            store.open_reader(str(tmp_path / "t"))


def test_what_was_written_without_its_vectors_says_so(tmp_path: Path) -> None:
    graph = faiss.index_factory(D, "HNSW8,Flat")
    graph.add(X)
    faiss.write_index(graph, str(tmp_path / "graph"), faiss.IO_FLAG_SKIP_STORAGE)
    with pytest.raises(DataError, match="written without the storage of a graph"):
        store.open_reader(f"faiss:{tmp_path / 'graph'}")
    inverted = built("IVF8,Flat", faiss.METRIC_L2, "")
    inverted.replace_invlists(None, False)
    faiss.write_index(inverted, str(tmp_path / "lists"))
    with pytest.raises(DataError, match="written without its inverted lists"):
        store.open_reader(f"faiss:{tmp_path / 'lists'}")
