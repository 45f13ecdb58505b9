"""The same inputs, seed and threads give the same bytes, in whatever batches rows come; other threads the same rows.

Each run is a process of its own, with a hash seed of its own, in a folder of its own under relative paths, so that
nothing but the inputs can be the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vecferry import aside
from vecferry.aside import publish_payload, stage_payload
from vecferry.batch import concat
from vecferry.store import open_reader
from vecferry.testing import contents

pytest.importorskip("faiss")

ROWS, PAIRS, D_IN, D_OUT = 1200, 300, 16, 24
TARGETS = {"new.parquet": None, "new.npy": None, "flat.faiss": None, "ivf.faiss": "IVF8,Flat", "hnsw.faiss": "HNSW8"}
"""Every target with its index; FAISS links an HNSW graph in another order on many threads."""

CHILD = """
import json, sys
import vecferry
batch, threads, targets = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
m = vecferry.fit("source.parquet", "pairs.parquet", queries="queries.parquet", metric="cosine", effort=0, seed=3)
m.save("map")
reports = {}
for name, index in targets.items():
    options = dict(index=index, batch_size=batch, threads=threads, seed=3, device="cpu")
    keep = {} if name.endswith(".parquet") else {"payload": name + ".payload.parquet"}
    report = vecferry.migrate("source.parquet", name, "map", **options, **keep)
    report.save(name + ".report.json")
vecferry.check("flat.faiss", map="map", seed=3).save("check.report.json")
"""


def inputs(folder: Path) -> None:
    """Write documents of an old model, some of them by a new one too, and queries by the new one."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((ROWS, D_IN), dtype=np.float32)
    y = x @ rng.standard_normal((D_IN, D_OUT), dtype=np.float32)
    y += 0.2 * rng.standard_normal(y.shape, dtype=np.float32)
    q = y[:80] + 0.2 * rng.standard_normal((80, D_OUT), dtype=np.float32)
    ids = rng.choice(10**12, ROWS, replace=False)

    def write(name: str, ids: Any, vectors: np.ndarray, **more: Any) -> None:
        lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
        pq.write_table(pa.table({"id": ids, "emb": lists} | more), folder / name, row_group_size=333)

    write("source.parquet", ids, x, kind=pa.array([f"kind {i % 5}" for i in range(ROWS)]).dictionary_encode())
    write("pairs.parquet", ids[:PAIRS], y[:PAIRS])
    write("queries.parquet", [f"q{i}" for i in range(80)], q)


def run(folder: Path, *, batch: int, threads: int, targets: dict[str, str | None], hash_seed: int) -> Path:
    folder.mkdir()
    inputs(folder)
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(threads)) | {"PYTHONHASHSEED": str(hash_seed)}
    paths = [p for p in sys.path if p]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-P", "-c", CHILD, str(batch), str(threads), json.dumps(targets)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def results(folder: Path) -> dict[str, Any]:
    """Return all that a run has made: bytes, and reports without their timing."""
    made: dict[str, Any] = dict(contents(folder))
    for name in list(made):
        if name.endswith(".report.json"):
            made[name] = json.loads(made[name])
            made[name].pop("timing")
        elif name in ("source.parquet", "pairs.parquet", "queries.parquet"):
            del made[name]
    return made


@pytest.fixture(scope="module")
def on_one_thread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    return run(folder, batch=500, threads=1, targets=TARGETS, hash_seed=1)


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert sorted(a) == sorted(b)
    assert [name for name in a if a[name] != b[name]] == []


def test_the_same_run_gives_the_same_bytes_in_other_batches(on_one_thread: Path, tmp_path: Path) -> None:
    again = run(tmp_path / "run", batch=77, threads=1, targets=TARGETS, hash_seed=2)
    first, second = results(on_one_thread), results(again)
    expected = {"map/card.json", "map/map.safetensors", "map/holdout.parquet", "map/README.md", "check.report.json"}
    expected |= {"ivf.faiss", "ivf.faiss.vecferry.json", "new.npy/vectors.npy", "new.parquet/part-00000.parquet"}
    assert expected <= set(first)
    assert_equal(first, second)


def test_the_same_threads_give_the_same_bytes_and_others_the_same_rows(on_one_thread: Path, tmp_path: Path) -> None:
    steady = {name: index for name, index in TARGETS.items() if index != "HNSW8"}
    two = [
        run(tmp_path / str(n), batch=batch, threads=2, targets=steady, hash_seed=n) for n, batch in ((3, 77), (4, 500))
    ]
    assert_equal(*map(results, two))
    for name in steady:
        rows = []
        for folder in (on_one_thread, two[0]):
            with open_reader(str(folder / name)) as reader:
                rows.append(concat(reader.read(400)))
        if name == "ivf.faiss":  # lists are filled in the order of the centroids, which clustering numbers
            order = [np.argsort(r.ids.to_numpy()) for r in rows]
            rows = [r.take(o) for r, o in zip(rows, order, strict=True)]
        assert rows[0].ids.equals(rows[1].ids)
        lengths = np.linalg.norm(rows[0].vectors, axis=1)
        assert (np.linalg.norm(rows[0].vectors - rows[1].vectors, axis=1) / lengths).max() <= 1e-6


def test_payload_put_aside_is_cut_alike_whatever_the_batches(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aside, "GROUP", 64)
    kinds = pa.array([f"kind {i * i % 7}" for i in range(200)]).dictionary_encode()
    payload = pa.table({"kind": kinds, "text": [None if i % 5 else f"text {i}" for i in range(200)]})
    reader = rows(np.arange(200)[::-1].copy(), np.ones((200, 2)), payload)
    made = []
    for size in (7, 64, 100, 1000):
        path = tmp_path / f"{size}.parquet"
        stage_payload(reader, path, size, skip=False, drop=np.array([3, 150]))
        publish_payload(path)
        made.append(path.read_bytes())
    assert len(set(made)) == 1
    meta = pq.read_metadata(path)
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [64, 64, 64, 6]
    kept = np.delete(np.arange(200), [3, 150])
    held = pq.read_table(path)
    assert held["id"].to_pylist() == (199 - kept).tolist()
    assert held.drop_columns(["id"]).to_pylist() == payload.take(pa.array(kept)).to_pylist()
