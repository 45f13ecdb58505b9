"""Make the index files of this folder; run with faiss-cpu 1.7.3 and numpy 1.26 (Python 3.11), from this folder.

expected.npz holds, for each file, its ids and the vectors that FAISS 1.7.3 itself reconstructs for them.
"""

from __future__ import annotations

from contextlib import suppress

import faiss
import numpy as np

D, N = 8, 160
SAMPLE = np.random.default_rng(0).standard_normal((600, D)).astype(np.float32)
X = SAMPLE[:N]
IDS = 2**40 + np.random.default_rng(1).permutation(N) * 2**21 + 7
GONE = IDS[::9]
FILES = {
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


def reconstruct(index: faiss.Index, ids: np.ndarray) -> np.ndarray:
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIDMap) and not isinstance(index, faiss.IndexIDMap2):
        place = {i: n for n, i in enumerate(faiss.vector_to_array(index.id_map).tolist())}
        inner = faiss.downcast_index(index.index)
        return np.stack([inner.reconstruct(place[i]) for i in ids.tolist()])
    with suppress(RuntimeError):  # no inverted file: ids are row numbers, or in a map
        faiss.extract_index_ivf(index).set_direct_map_type(faiss.DirectMap.Hashtable)
    return np.stack([index.reconstruct(int(i)) for i in ids])


faiss.omp_set_num_threads(1)  # or a graph is another one each time
assert faiss.__version__ == "1.7.3", faiss.__version__
expected = {}
for name, factory in FILES.items():
    index = faiss.index_factory(D, factory, faiss.METRIC_L2)
    index.train(SAMPLE)
    numbered = factory in ("Flat", "HNSW4,Flat", "IVF4,PQ4x4,RFlat")
    if numbered:
        index.add(X)
        ids = np.arange(N)
    else:
        index.add_with_ids(X, IDS)
        ids = IDS
        if "fs" not in factory:
            assert index.remove_ids(GONE) == len(GONE)
            ids = np.setdiff1d(IDS, GONE)
    faiss.write_index(index, f"{name}.index")
    expected[f"{name}.ids"] = ids
    expected[f"{name}.vectors"] = reconstruct(index, ids)
np.savez_compressed("expected.npz", **expected)
