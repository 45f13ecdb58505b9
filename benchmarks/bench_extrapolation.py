"""Foretell agreement@10 among 15,000 documents from 1,000 or 2,000, and look.

    python benchmarks/bench_extrapolation.py [--data ../shared/data] [--held-out 2000 1000] [--seeds 5]

All ordered pairs of five encoders, two maps each, fitted on rows 15,000 to 19,999; each seed holds out other rows of 0
to 14,999. The truth is measured among those 15,000, for the 1,000 queries that the hold-out has, and for 1,000 others.
The form and the priors of `vecferry.extrapolation` were chosen on the pairs marked "chosen on", by hold-outs of seeds 0
to 4; the figures are of later seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from vecferry.batch import Floats
from vecferry.extrapolation import BEND, ROUGH, TWIST, SizeCurve, depth
from vecferry.linear import LinearMap, normalize
from vecferry.recall import Truth, topk
from vecferry.solvers import procrustes, ridge

MODELS = ("minilm", "e5", "smollm2_eol", "smollm2_mean", "glove")
MAPS = {"ridge": ridge, "procrustes": procrustes}
SEARCHED, QUERIES, K = 15_000, 1000, 10
FRESH = 5  # the first seed that nothing was chosen by
PAIRS = sorted(itertools.permutations(MODELS, 2), key="-".join)
CHOSEN_ON = set(PAIRS[::2])
RESULTS = Path(__file__).parent / "results" / "bench_extrapolation.json"


def unit(path: Path) -> Floats:
    x = np.load(path).astype(np.float32)
    normalize(x)
    return x


def simple(curve: SizeCurve, power: bool) -> float:
    """Draw a straight line through agreement@K, or its logarithm, against log size: what a size curve alone says."""
    points = curve.ks == K
    values = curve.values[points].mean(axis=1)
    line = np.polyfit(np.log(curve.sizes[points]), np.log(values) if power else values, 1)
    value = float(np.polyval(line, np.log(SEARCHED)))
    return float(np.exp(value)) if power else value


def measure(data: Path, held_out: list[int], seeds: int) -> list[dict[str, Any]]:
    docs = {m: unit(data / f"{m}_docs.npy") for m in MODELS}
    asked = np.random.default_rng(1).permutation(2000)
    queries = {m: unit(data / f"{m}_queries.npy")[asked] for m in MODELS}
    rows = []
    for target in MODELS:
        index = docs[target][:SEARCHED]
        full = Truth.of(queries[target], index, K, "cosine")
        draws = {
            (n, seed): np.random.default_rng((n, seed)).permutation(SEARCHED)[:n]
            for n in held_out
            for seed in range(FRESH, FRESH + seeds)
        }
        ours = queries[target][:QUERIES]
        truths = {key: Truth.of(ours, index[held], depth(K, key[0]), "cosine") for key, held in draws.items()}
        for source, name in itertools.product([m for m in MODELS if m != target], MAPS):
            solution = MAPS[name](docs[source][SEARCHED:], docs[target][SEARCHED:])
            translated = LinearMap(solution.weight, solution.bias, post="l2").apply(docs[source][:SEARCHED])
            values = full.agreement(topk(queries[target], translated, K, "cosine")[0], K)
            true, others = float(values[:QUERIES].mean()), float(values[QUERIES:].mean())
            for (n, seed), held in draws.items():
                truth = truths[n, seed]
                found, _ = topk(ours, translated[held], depth(K, n), "cosine")
                start = time.perf_counter()
                curve = SizeCurve.of(truth, found, K, seed=seed)
                told = curve.at(SEARCHED)
                rows.append(
                    {
                        "pair": f"{source}-{target}",
                        "map": name,
                        "held_out": n,
                        "seed": seed,
                        "chosen_on": (source, target) in CHOSEN_ON,
                        "measured": float(truth.agreement(found, K).mean()),
                        "foretold": told.value,
                        "low": told.low,
                        "high": told.high,
                        "seconds": time.perf_counter() - start,
                        "power_law": simple(curve, power=True),
                        "straight_line": simple(curve, power=False),
                        "true": true,
                        "true_other_queries": others,
                    }
                )
            print(
                f"{source}-{target} {name}: {rows[-seeds * len(held_out)]['foretold']:.3f}, true {true:.3f}", flush=True
            )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    def column(name: str) -> Any:
        return np.array([row[name] for row in rows])

    true, low, high = column("true"), column("low"), column("high")
    forms = {name: np.abs(column(name) - true) for name in ("foretold", "power_law", "straight_line", "measured")}
    return {
        "forecasts": len(rows),
        **{f"{name}_median_error": float(np.median(e)) for name, e in forms.items()},
        **{f"{name}_worst_error": float(e.max()) for name, e in forms.items()},
        "bias": float((column("foretold") - true).mean()),
        "covered": float(((low <= true) & (true <= high)).mean()),
        "covered_other_queries": float(
            ((low <= column("true_other_queries")) & (column("true_other_queries") <= high)).mean()
        ),
        "median_width": float(np.median(high - low)),
        "seconds": float(np.median(column("seconds"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--held-out", type=int, nargs="+", default=[2000, 1000])
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    with threadpool_limits(1):
        rows = measure(args.data, args.held_out, args.seeds)
    table = []
    for n in args.held_out:
        for name, part in (
            ("all", rows),
            ("chosen on", [r for r in rows if r["chosen_on"]]),
            ("others", [r for r in rows if not r["chosen_on"]]),
        ):
            table.append({"held_out": n, "pairs": name} | summary([r for r in part if r["held_out"] == n]))
    print(f"\n{'held out':>8} {'pairs':>9}  median  worst | power law | line        | covered  other queries  width")
    for line in table:
        errors = [
            f"{line[f'{f}_median_error']:.4f} {line[f'{f}_worst_error']:.3f}"
            for f in ("foretold", "power_law", "straight_line")
        ]
        print(
            f"{line['held_out']:8,} {line['pairs']:>9}  {' | '.join(errors)} | {line['covered']:.3f}    "
            f"{line['covered_other_queries']:.3f}          {line['median_width']:.3f}"
        )
    parameters = {
        "searched": SEARCHED,
        "fitted_on": 5000,
        "queries": QUERIES,
        "k": K,
        "seeds": [FRESH, FRESH + args.seeds - 1],
        "bend": BEND,
        "twist": TWIST,
        "rough": ROUGH,
    }
    rounded = [{k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    RESULTS.parent.mkdir(exist_ok=True)
    text = json.dumps({"parameters": parameters, "summary": table, "results": rounded}, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
