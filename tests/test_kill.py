"""Pull the plug at random instants: after --resume the target is the same to the byte, the old one is never hurt."""

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vecferry.linear import Card, LinearMap, Side

ROWS, D_IN, D_OUT = 20_000, 24, 40
CHILD = Path(__file__).with_name("kill_child.py")
TARGETS = {
    "flat": ("new.faiss", ["--drop-payload"]),
    "ivf": ("new.faiss", ["--drop-payload", "--index", "IVF16,Flat"]),
    "hnsw": ("new.faiss", ["--drop-payload", "--index", "HNSW8", "--threads", "1"]),
    "parquet": ("new.parquet", []),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Parquet source with integer ids and texts, and a map."""
    folder = tmp_path_factory.mktemp("job")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, D_IN), dtype=np.float32)
    ids = rng.permutation(10**9)[:ROWS] if ROWS < 1000 else rng.choice(10**9, ROWS, replace=False)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), D_IN)
    table = pa.table({"id": pa.array(ids), "text": [f"text {i}" for i in ids], "emb": vectors})
    pq.write_table(table, folder / "source.parquet", row_group_size=3000)
    card = Card(Side(D_IN, "old"), Side(D_OUT, "new"), "by hand")
    LinearMap(rng.standard_normal((D_IN, D_OUT)), rng.standard_normal(D_OUT), post="l2", card=card).save(folder / "map")
    return folder


def command(job: Path, folder: Path, kind: str, *more: str) -> list[str]:
    name, options = TARGETS[kind]
    fixed = ["--map", str(job / "map"), "--batch-size", "500"]
    arguments = ["migrate", str(job / "source.parquet"), str(folder / name), *fixed, *options, *more]
    return [sys.executable, str(CHILD), *arguments]


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def run_to_the_end(job: Path, folder: Path, kind: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(job, folder, kind, *more), capture_output=True, text=True, check=False)


def kill_after(job: Path, folder: Path, kind: str, seconds: float, *more: str) -> bool:
    """Start the command, kill it so long after its stage has appeared; return whether it was still running."""
    stage = folder / f".{TARGETS[kind][0]}.vecferry"
    process = subprocess.Popen(command(job, folder, kind, *more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not stage.exists():
        time.sleep(0.001)
    time.sleep(seconds)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running


@pytest.fixture(scope="module")
def uninterrupted(job: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, str], float]]:
    """Run every kind once without disturbance: what it leaves, and how long it works from its stage's appearance."""
    results = {}
    for kind in TARGETS:
        folder = tmp_path_factory.mktemp(kind)
        process = subprocess.Popen(command(job, folder, kind), stdout=subprocess.DEVNULL)
        while process.poll() is None and not (folder / f".{TARGETS[kind][0]}.vecferry").exists():
            time.sleep(0.001)
        started = time.perf_counter()
        assert process.wait() == 0
        results[kind] = contents(folder), time.perf_counter() - started
    return results


def kill_and_resume(
    job: Path, folder: Path, kind: str, expected: dict[str, str], span: float, luck: random.Random
) -> bool:
    """Kill a run once or more, then let it finish; return whether a kill struck work under way."""
    struck = kill_after(job, folder, kind, luck.uniform(0, span))
    while luck.random() < 0.4:
        struck |= kill_after(job, folder, kind, luck.uniform(0, span), "--resume")
    done = run_to_the_end(job, folder, kind, "--resume")
    assert done.returncode == 0, done.stderr
    assert contents(folder) == expected
    return struck


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_a_killed_run_resumes_to_the_same_bytes(
    kind: str, job: Path, uninterrupted: dict[str, tuple[dict[str, str], float]], tmp_path: Path
) -> None:
    expected, span = uninterrupted[kind]
    luck = random.Random(kind)
    struck = 0
    for n in range(3):
        folder = tmp_path / str(n)
        folder.mkdir()
        hit = kill_and_resume(job, folder, kind, expected, span, luck)
        struck += hit
        span *= 1 if hit else 0.3  # it came too late: the machine is faster than when the span was taken
    assert struck  # or nothing was tested


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "ivf", "parquet"])
def test_fifty_kills(
    kind: str, job: Path, uninterrupted: dict[str, tuple[dict[str, str], float]], tmp_path: Path
) -> None:
    expected, span = uninterrupted[kind]
    luck = random.Random(f"fifty {kind}")
    struck = 0
    for n in range(50):
        folder = tmp_path / str(n)
        folder.mkdir()
        hit = kill_and_resume(job, folder, kind, expected, span, luck)
        struck += hit
        span *= 1 if hit else 0.8
    assert struck >= 25


@pytest.mark.parametrize("kind", ["flat", "parquet"])
def test_an_overwritten_target_is_whole_at_every_instant(
    kind: str, job: Path, uninterrupted: dict[str, tuple[dict[str, str], float]], tmp_path: Path
) -> None:
    expected, span = uninterrupted[kind]
    name = TARGETS[kind][0]
    luck = random.Random(f"overwrite {kind}")
    first = run_to_the_end(job, tmp_path, kind, "--seed", "1")  # another plan, so that a later run isn't a repetition
    assert first.returncode == 0, first.stderr
    data = "" if kind == "parquet" else name
    old = {k: v for k, v in contents(tmp_path).items() if not data or k == data}
    for _ in range(4):
        kill_after(job, tmp_path, kind, luck.uniform(0, span), "--overwrite", "--resume")
        now = contents(tmp_path)
        backup = {k.replace(f"{name}.bak", name, 1): v for k, v in now.items() if k.startswith(f"{name}.bak")}
        for path, digest in old.items():
            if now[path] != digest:  # the new one is in place, then the old one is whole beside it
                assert backup[path] == digest
    done = run_to_the_end(job, tmp_path, kind, "--overwrite", "--resume")
    assert done.returncode == 0, done.stderr
    now = contents(tmp_path)
    vectors = [p for p in expected if p.startswith(name) and not p.endswith(".json")]
    assert vectors
    assert {p: now[p] for p in vectors} == {p: expected[p] for p in vectors}
    assert all(now[p.replace(name, f"{name}.bak", 1)] == digest for p, digest in old.items())
    assert not list(tmp_path.glob(".*"))


def test_ctrl_c_leaves_a_resumable_stage_and_exits_5(
    job: Path, uninterrupted: dict[str, tuple[dict[str, str], float]], tmp_path: Path
) -> None:
    expected, span = uninterrupted["flat"]
    stage = tmp_path / f".{TARGETS['flat'][0]}.vecferry"
    process = subprocess.Popen(command(job, tmp_path, "flat"), stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not stage.exists():
        time.sleep(0.001)
    time.sleep(0.05 * span)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 5, err
    assert "of 20,000 rows are safe in the stage: the same command with --resume continues" in err
    done = run_to_the_end(job, tmp_path, "flat", "--resume")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == expected
