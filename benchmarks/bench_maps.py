"""How much better than ridge and centred Procrustes do chosen maps retrieve? Twenty ordered pairs of five encoders.

    python benchmarks/bench_maps.py --data ../shared/data [--effort 1] [--seeds 3] [--only OLD NEW]

Maps are fitted on documents 10,000 to 14,999, searches are among documents 0 to 9,999. A seed deals 1,000 queries to
the fit, and the other 1,000 measure. All is cosine. The simple maps have all the pairs too. Resumable: a pair and seed
that is in the results is not run again; the table is printed after each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from threadpoolctl import threadpool_limits

import vecferry
from vecferry.auto import choose
from vecferry.holdout import Qrels
from vecferry.linear import normalize
from vecferry.recall import Truth, ndcg, topk
from vecferry.solvers import Solution, procrustes, ridge

RESULTS = Path(__file__).parent / "results" / "bench_maps.json"
MODELS = ("minilm", "e5", "smollm2_eol", "smollm2_mean", "glove")
SEARCHED, FIT = slice(0, 10_000), slice(10_000, 15_000)
K, CASCADE = 10, 200
METRICS = (f"agreement@{K}", f"top-{CASCADE} has top-{K}", f"ndcg@{K}")


def unit(path: Path) -> Any:
    x = np.load(path).astype(np.float32)
    normalize(x)
    return x


class Data:
    def __init__(self, folder: Path) -> None:
        self.documents = {m: unit(folder / f"{m}_docs.npy") for m in MODELS}
        self.queries = {m: unit(folder / f"{m}_queries.npy") for m in MODELS}
        at: dict[str, int] = {}
        for i, name in enumerate(pq.read_table(folder / "texts.parquet")["id"].to_pylist()):
            at.setdefault(name, i)
        labels = dict(line.split("\t")[:2] for line in (folder / "qrels.tsv").read_text().splitlines())
        self.relevant = np.array([at[labels[q]] for q in pq.read_table(folder / "queries.parquet")["id"].to_pylist()])


def measure(solution: Solution, rows: Any, truth: Truth, qrels: Qrels) -> dict[str, float]:
    found, _ = topk(truth.queries, solution.predict(rows), CASCADE, "cosine")
    shared = (found[:, :, None] == truth.places[:, None, :]).any(axis=1)
    values = truth.agreement(found, K), shared, ndcg(found, qrels, K)
    return {name: round(float(v.mean()), 5) for name, v in zip(METRICS, values, strict=True)}


def run(data: Data, old: str, new: str, seed: int, effort: int) -> dict[str, Any]:
    order = np.random.default_rng(seed).permutation(len(data.relevant))
    fit, asked = order[:1000], order[1000:]
    x, y = data.documents[old][FIT], data.documents[new][FIT]
    wall, cpu = time.perf_counter(), time.process_time()
    chosen = choose(x, y, queries=data.queries[new][fit], seed=seed, effort=effort)
    seconds = {"wall": round(time.perf_counter() - wall, 1), "cpu": round(time.process_time() - cpu, 1)}
    truth = Truth.of(data.queries[new][asked], data.documents[new][SEARCHED], K, "cosine")
    qrels = Qrels(np.arange(len(asked)), data.relevant[asked], np.ones(len(asked), np.int64))
    maps = {
        "ridge": ridge(x, y, seed=seed),
        "procrustes": procrustes(x, y),
        "closed form": chosen.closed,
        "auto": chosen.solution,
    }
    told = {k: v for k, v in chosen.solution.parameters.items() if k != "candidates"}
    measured = {name: measure(s, data.documents[old][SEARCHED], truth, qrels) for name, s in maps.items()}
    return {"old": old, "new": new, "seed": seed, "seconds": seconds, "maps": measured, "choice": told}


def table(runs: list[dict[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """Return lines for people, and what the issue asks for."""
    lines = [
        f"{'':30}{'ridge':>8}{'procr.':>8}{'closed':>8}{'auto':>8}{'gain':>8}{METRICS[1]:>24}{METRICS[2]:>18}{'s':>6}"
    ]
    gains, closed, lost, seconds = [], [], [], []
    for (old, new), group in itertools.groupby(runs, key=lambda r: (r["old"], r["new"])):
        rows = list(group)

        def mean(name: str, metric: str, rows: list[dict[str, Any]] = rows) -> float:
            return statistics.fmean(r["maps"][name][metric] for r in rows)

        first = {name: mean(name, METRICS[0]) for name in rows[0]["maps"]}
        simple = max("ridge", "procrustes", key=lambda name: first[name])
        gains.append(first["auto"] / first[simple])
        closed.append(first["closed form"] / first[simple])
        lost.append(first[simple] - first["auto"])
        seconds.append(max(r["seconds"]["wall"] for r in rows))
        pairs = "".join(
            f"{mean(simple, m):.3f} -> {mean('auto', m):.3f}".rjust(w)
            for m, w in zip(METRICS[1:], (24, 18), strict=True)
        )
        numbers = "".join(f"{value:8.3f}" for value in first.values())
        lines.append(f"{old + ' -> ' + new:30}{numbers}{gains[-1] - 1:+8.1%}{pairs}{seconds[-1]:6.0f}")
    summary = {
        "pairs": len(gains),
        "seeds": sorted({r["seed"] for r in runs}),
        "gain in geometric mean": round(math.exp(statistics.fmean(map(math.log, gains))) - 1, 4),
        "of it by the closed form": round(math.exp(statistics.fmean(map(math.log, closed))) - 1, 4),
        "worst difference": round(-max(lost), 4),
        "slowest fit, seconds": max(seconds),
    }
    return [*lines, *(f"{name}: {value}" for name, value in summary.items())], summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--effort", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs=2, choices=MODELS, metavar=("OLD", "NEW"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    data = Data(args.data)
    parameters = {
        "effort": args.effort,
        "pairs": FIT.stop - FIT.start,
        "documents": SEARCHED.stop,
        "queries": [1000, 1000],
    }
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "vecferry": vecferry.__version__}
    known = json.loads(args.output.read_text()) if args.output.exists() else {}
    kept = known["runs"] if known.get("parameters") == parameters else []
    runs = {(r["old"], r["new"], r["seed"]): r for r in kept}
    order = list(itertools.permutations(MODELS, 2))
    for seed, (old, new) in itertools.product(range(args.seeds), order):
        if (old, new, seed) in runs or (args.only and tuple(args.only) != (old, new)):
            continue
        with threadpool_limits(1, "blas"):
            runs[old, new, seed] = run(data, old, new, seed, args.effort)
        done = sorted(runs.values(), key=lambda r: (order.index((r["old"], r["new"])), r["seed"]))
        lines, summary = table(done)
        print("\n".join(lines), flush=True)
        content = {"parameters": parameters, "machine": machine, "summary": summary, "runs": done}
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
