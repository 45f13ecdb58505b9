"""FAISS: the memory that reading takes does not grow with the rows, but for what an index keeps in memory itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

faiss = pytest.importorskip("faiss")

DIM, COUNTS = 64, (20_000, 80_000)
OWN = {
    "IVF32,PQ8x4": 0,
    "IVF32,SQ8,RFlat": 0,
    "RR,Flat": 0,
    "PCA64,IVF32,Flat": 0,
    "IDMap2,IVF32,SQ8": 0,
    "SQfp16": 0,
    "PQ16x4fs": 8,  # FAISS copies its codes
    "IVF32,PQ16x4fs": 16,  # and ids
    "HNSW4,Flat": 12 + 4 * 9,  # levels and starts of links; the links themselves are looked at, to be safe
}
"""Types, and the bytes of a row that FAISS or a check of ours holds in memory."""
USUAL = ("SQfp16", "IDMap2,IVF32,SQ8")
"""Types that are tested each time."""
SLACK = 16
"""Bytes of a row that pages of the file take which are open at one time; a row of these types has up to 256."""
READ = """if True:
    import sys
    from vecferry import store
    with store.open_reader("faiss:" + sys.argv[1]) as reader:
        rows = sum(len(b) for b in reader.read(4096)) + sum(len(i) for i in reader.ids(4096))
        assert rows == 2 * reader.info.count
    status = dict(line.split(":") for line in open("/proc/self/status"))
    print(int(status["VmHWM"].split()[0]) * 1024)
"""


def peak(path: Path) -> int:
    done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("factory", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in OWN])
def test_reading_takes_no_more_memory_for_more_rows(factory: str, tmp_path: Path) -> None:
    peaks = []
    for count in COUNTS:
        rows = np.random.default_rng(0).standard_normal((count, DIM), dtype=np.float32)
        index = faiss.index_factory(DIM, factory)
        index.train(rows[:4000])
        index.add_with_ids(rows, np.arange(count)) if factory.startswith("IDMap") else index.add(rows)
        faiss.write_index(index, str(tmp_path / "t"))
        del index, rows
        peaks.append(peak(tmp_path / "t"))
    # ids are listed whole: twice, as FAISS's and as Arrow's
    assert peaks[1] - peaks[0] < (SLACK + OWN[factory]) * (COUNTS[1] - COUNTS[0]) + 2 * 2**20
