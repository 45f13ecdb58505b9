"""Fit and measure on real paired vectors, and compare with the figures published for them.

    python benchmarks/reproduce_figures.py [--data ../shared/data]

Protocol: rows 10,000 to 10,000 + n - 1 fit, rows 0 to 9,999 are searched with all 2,000 queries of the target encoder,
by cosine; all vectors are scaled to unit length first. A cell holds mean cosine of translated and true documents,
agreement@10, recall@10 and nDCG@10 (one relevant document a query). Exit 1 if one differs by more than 0.005.

The Procrustes figures are those of the map without a scale (`scaled=False`); the solver's default, scaled, is shown
beside them. Not reproduced: Procrustes without centring, which isn't a solver here.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from vecferry.linear import LinearMap, normalize
from vecferry.recall import TopK
from vecferry.solvers import SOLVERS, Solver, procrustes

SEARCHED, K, TOLERANCE = 10_000, 10, 0.005
SIZES = (850, 2000, 5000, 10_000)
COLUMNS = ("mean_cosine", "agreement@10", "recall@10", "ndcg@10")
RESULTS = Path(__file__).parent / "results" / "reproduce_figures.json"
ROTATION = "procrustes, not scaled"
PUBLISHED: dict[tuple[str, str, str], list[tuple[float, ...]]] = {
    ("e5", "minilm", "pinv"): [
        (0.533, 0.259, 0.177, 0.107),
        (0.644, 0.352, 0.230, 0.138),
        (0.686, 0.382, 0.245, 0.145),
        (0.699, 0.391, 0.255, 0.149),
    ],
    ("e5", "minilm", "ridge"): [
        (0.620, 0.293, 0.208, 0.119),
        (0.665, 0.349, 0.228, 0.134),
        (0.690, 0.379, 0.246, 0.145),
        (0.700, 0.385, 0.251, 0.148),
    ],
    ("e5", "minilm", ROTATION): [
        (0.525, 0.262, 0.183, 0.104),
        (0.565, 0.302, 0.204, 0.118),
        (0.588, 0.322, 0.219, 0.125),
        (0.597, 0.330, 0.230, 0.130),
    ],
    ("minilm", "e5", "pinv"): [
        (0.880, 0.046, 0.025, 0.013),
        (0.926, 0.105, 0.055, 0.031),
        (0.937, 0.126, 0.070, 0.040),
        (0.940, 0.133, 0.071, 0.042),
    ],
    ("minilm", "e5", "ridge"): [
        (0.935, 0.145, 0.078, 0.042),
        (0.941, 0.179, 0.090, 0.050),
        (0.945, 0.194, 0.097, 0.053),
        (0.947, 0.197, 0.092, 0.050),
    ],
    ("minilm", "e5", ROTATION): [
        (0.766, 0.139, 0.127, 0.069),
        (0.780, 0.176, 0.158, 0.087),
        (0.789, 0.191, 0.173, 0.101),
        (0.792, 0.201, 0.180, 0.106),
    ],
    ("smollm2_eol", "minilm", "ridge"): [
        (0.598, 0.278, 0.259, 0.160),
        (0.644, 0.324, 0.280, 0.171),
        (0.670, 0.342, 0.293, 0.179),
        (0.685, 0.356, 0.301, 0.187),
    ],
    ("minilm", "smollm2_eol", "ridge"): [
        (0.955, 0.173, 0.225, 0.133),
        (0.959, 0.196, 0.262, 0.161),
        (0.961, 0.209, 0.281, 0.174),
    ],
}
SQUARE = 384  # pairs, as many as dimensions: the worst place for pinv
PUBLISHED_SQUARE = {"pinv": (0.007, 0.004), "ridge": (0.567, 0.237)}
PUBLISHED_NORM = 109_619
"""Frobenius norm of the pinv weight there; to be met within the tolerance as a part of it."""

METHODS: dict[str, Solver] = {**SOLVERS, ROTATION: functools.partial(procrustes, scaled=False)}


class Data:
    """Read the vectors and labels of a folder, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ids = pq.read_table(folder / "texts.parquet")["id"].to_pylist()
        documents = {str(name): row for row, name in enumerate(ids)}
        # line i labels query i; a few ids stand twice, so queries are told by their place, not by their id
        lines = (folder / "qrels.tsv").read_text(encoding="utf-8").splitlines()
        self.relevant = np.array([documents[line.split("\t")[1]] for line in lines])

    @functools.cache  # noqa: B019  one object lives as long as the process
    def vectors(self, name: str) -> Any:
        x = np.load(self.folder / f"{name}.npy").astype(np.float32)
        normalize(x)
        return x

    @functools.cache  # noqa: B019
    def true_neighbours(self, model: str) -> Any:
        return nearest(self.vectors(f"{model}_queries"), self.vectors(f"{model}_docs")[:SEARCHED])


def nearest(queries: Any, documents: Any) -> Any:
    search = TopK(queries, K, "cosine")
    search.update(documents)
    return search.places


def measure(data: Data, source: str, target: str, solver: str, n: int) -> tuple[list[float], float]:
    """Return the four figures, and the Frobenius norm of the weight."""
    old, new = data.vectors(f"{source}_docs"), data.vectors(f"{target}_docs")
    fit = slice(SEARCHED, SEARCHED + n)
    solution = METHODS[solver](old[fit], new[fit], seed=0)
    translated = LinearMap(solution.weight, solution.bias, post="l2").apply(old[:SEARCHED])
    cosine = float(np.mean(np.sum(translated * new[:SEARCHED], axis=1)))
    found = nearest(data.vectors(f"{target}_queries"), translated)
    true = data.true_neighbours(target)
    agreement = np.mean([len(np.intersect1d(a, b)) / K for a, b in zip(found, true, strict=True)])
    hits = found == data.relevant[:, None]
    ndcg = np.mean(hits @ (1 / np.log2(np.arange(2, K + 2))))
    norm = float(np.linalg.norm(solution.weight.astype(np.float64)))
    return [cosine, float(agreement), float(np.mean(hits.any(axis=1))), float(ndcg)], norm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    args = parser.parse_args()
    if not (args.data / "texts.parquet").is_file():
        parser.error(f"{args.data} holds no texts.parquet: say with --data where the paired vectors are")
    data = Data(args.data)
    table, worst = [], 0.0

    def report(pair: str, solver: str, n: int, found: list[float], told: tuple[float, ...]) -> None:
        nonlocal worst
        off = max((abs(a - b) for a, b in zip(found, told, strict=False)), default=0.0)
        worst = max(worst, off)
        cells = [" / ".join(f"{v:.4f}" for v in found), " / ".join(f"{v:.3f}" for v in told) or "(not published)"]
        print(f"{pair:20} {solver:24} {n:>6}  {cells[0]:34} {cells[1]:30} {off:.4f}", flush=True)
        figures = dict(zip(COLUMNS, (round(v, 4) for v in found), strict=False))
        published = dict(zip(COLUMNS, told, strict=False))
        row = {"pair": pair, "solver": solver, "n": n, "measured": figures, "published": published}
        table.append(row | {"off": round(off, 4)})

    print(f"{'pair':20} {'map':24} {'n':>6}  {'measured':34} {'published':30} off")
    for (source, target, solver), cells in PUBLISHED.items():
        for n, told in zip(SIZES, cells, strict=False):
            report(f"{source} -> {target}", solver, n, measure(data, source, target, solver, n)[0], told)
    for source, target in (("e5", "minilm"), ("minilm", "e5")):
        for n in SIZES:
            found = measure(data, source, target, "procrustes", n)[0]
            report(f"{source} -> {target}", "procrustes", n, found, ())
    norms = {}
    for solver, told in PUBLISHED_SQUARE.items():
        found, norms[solver] = measure(data, "e5", "minilm", solver, SQUARE)
        report("e5 -> minilm", solver, SQUARE, found, told)
    off = abs(norms["pinv"] / PUBLISHED_NORM - 1)
    print(f"norm of the pinv weight at n = d = {SQUARE}: {norms['pinv']:,.0f}, published {PUBLISHED_NORM:,}")
    parameters = {
        "searched": SEARCHED,
        "queries": len(data.relevant),
        "k": K,
        "tolerance": TOLERANCE,
        "seed": 0,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    square = {"norm": round(norms["pinv"], 1), "published": PUBLISHED_NORM, "ridge_norm": round(norms["ridge"], 2)}
    result = {"parameters": parameters, "results": table, "pinv_at_n_equals_d": square}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    passed = max(worst, off) <= TOLERANCE
    print(f"largest difference {worst:.4f}, of the norm {off:.4f} of itself; {TOLERANCE} is granted")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
