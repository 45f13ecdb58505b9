"""FAISS: files that version 1.7.3 wrote, which is what Debian 12 ships."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import concat

faiss = pytest.importorskip("faiss")

FOLDER = Path(__file__).parents[1] / "data" / "faiss-1.7.3"
INDEXES = {
    "flat": "Flat",
    "idmap2-flat": "IDMap2,Flat",
    "idmap-sq8": "IDMap,SQ8",
    "ivf-flat": "IVF4,Flat",
    "ivf-pq": "IVF4,PQ4x4",
    "ivf-pq-fastscan": "IVF4,PQ4x4fs",
    "hnsw-flat": "HNSW4,Flat",
    "opq-ivf-sq8": "OPQ2,IVF4,SQ8",
    "rflat": "IVF4,PQ4x4,RFlat",
}


def test_each_file_of_the_old_version_is_tested() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.index")) == sorted(INDEXES)


@pytest.mark.parametrize("name", INDEXES)
def test_files_of_an_old_version_are_read(name: str) -> None:
    with np.load(FOLDER / "expected.npz") as expected:
        ids, vectors = expected[f"{name}.ids"], expected[f"{name}.vectors"]
    with store.open_reader(f"faiss:{FOLDER / name}.index") as reader:
        info, rows = reader.info, concat(reader.read(37))
        taken = reader.take(pa.array(ids))
        places, _ = reader.search(vectors, 1)
    exact = name in ("flat", "idmap2-flat", "ivf-flat", "hnsw-flat", "rflat")
    assert (info.count, info.dim, info.metric, info.lossy) == (len(ids), 8, "l2", not exact)
    # a file says of an OPQ only that it is linear; of scalar codes nothing says how many parts it was made for
    assert info.index == (INDEXES[name] if name != "opq-ivf-sq8" else "LinearTransform,IVF4,SQ8")
    assert sorted(rows.ids.to_pylist()) == sorted(ids.tolist())
    np.testing.assert_allclose(taken.vectors, vectors, atol=1e-6)
    by_id = dict(zip(rows.ids.to_pylist(), rows.vectors, strict=True))
    np.testing.assert_array_equal(taken.vectors, np.stack([by_id[i] for i in ids.tolist()]))
    if exact:
        added = np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)[:160]
        numbers = 2**40 + np.random.default_rng(1).permutation(160) * 2**21 + 7 if info.id_type else np.arange(160)
        place = {number: i for i, number in enumerate(numbers.tolist())}
        np.testing.assert_array_equal(taken.vectors, added[[place[i] for i in ids.tolist()]])
        assert (rows.ids.to_numpy()[places[:, 0]] == ids).mean() > 0.95  # a walk over a graph, or one list, may miss
