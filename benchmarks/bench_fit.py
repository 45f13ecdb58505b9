"""Time the solvers against plain float64 normal equations on the same pairs, in CPU seconds of the same process.

    python benchmarks/bench_fit.py [--pairs 20000] [--repeats 7] [--sgd]

Ridge is to cost at most 2.5 times as much (exit 1 otherwise). The normal equations run on one BLAS thread, as the
solvers do, and again on as many as BLAS likes: threads that wait for each other cost CPU time too. Each repeat runs
everything in turn; figures are medians, ratios medians of the ratios within a repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from vecferry.solvers import SOLVERS

D_SOURCE, D_TARGET, LIMIT = 384, 768, 2.5
RESULTS = Path(__file__).parent / "results" / "bench_fit.json"


def make_pairs(n: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, D_SOURCE), dtype=np.float32) * np.geomspace(1, 0.05, D_SOURCE, dtype=np.float32)
    y = x @ rng.standard_normal((D_SOURCE, D_TARGET), dtype=np.float32)
    return x, y + rng.standard_normal((n, D_TARGET), dtype=np.float32)


def normal_equations(x: Any, y: Any) -> Any:
    a, b = x.astype(np.float64), y.astype(np.float64)
    lower = np.linalg.cholesky(a.T @ a + 1e-6 * np.eye(D_SOURCE))
    return np.linalg.solve(lower.T, np.linalg.solve(lower, a.T @ b))


def on_one_thread(x: Any, y: Any) -> Any:
    with threadpool_limits(1, "blas"):
        return normal_equations(x, y)


def cpu_seconds(job: Callable[[], Any]) -> float:
    started = time.process_time()
    job()
    return time.process_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sgd", action="store_true", help="time sgd as well, which takes many times as long")
    args = parser.parse_args()
    x, y = make_pairs(args.pairs)
    jobs: dict[str, Callable[[], Any]] = {
        "normal equations, one thread": lambda: on_one_thread(x, y),
        "normal equations, all threads": lambda: normal_equations(x, y),
    }
    for name, solver in SOLVERS.items():
        if name != "sgd" or args.sgd:
            jobs[name] = lambda solver=solver: solver(x, y, seed=0)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(args.repeats + 1):
        for name, job in jobs.items():
            spent = cpu_seconds(job)
            if repeat:  # the first is for the caches
                seconds[name].append(spent)
    base, threaded = (seconds[name] for name in list(jobs)[:2])
    table = []
    print(f"{'':30} {'CPU s':>7} {'x one thread':>13} {'x all threads':>14}")
    for name, spent in seconds.items():
        row = {
            "job": name,
            "cpu_s": statistics.median(spent),
            "ratio": statistics.median(a / b for a, b in zip(spent, base, strict=True)),
            "ratio_to_all_threads": statistics.median(a / b for a, b in zip(spent, threaded, strict=True)),
        }
        table.append(row)
        print(f"{name:30} {row['cpu_s']:>7.3f} {row['ratio']:>13.2f} {row['ratio_to_all_threads']:>14.2f}")
    blas = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    parameters = {
        "pairs": args.pairs,
        "d_source": D_SOURCE,
        "d_target": D_TARGET,
        "repeats": args.repeats,
        "limit": LIMIT,
        "cores": os.cpu_count(),
        "blas": [f"{pool['internal_api']} {pool['version']} {pool.get('architecture', '')}".strip() for pool in blas],
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"parameters": parameters, "results": table}, indent=2) + "\n")
    ratio = next(row["ratio"] for row in table if row["job"] == "ridge")
    print(f"ridge costs {ratio:.2f} times the normal equations; the limit is {LIMIT}")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
