"""Put the tables of benchmarks/results/*.json into README.md and docs/*.md.

    python benchmarks/readme_tables.py [--check]

Each stands there between `<!-- table: NAME -->` and `<!-- end -->`. With --check nothing is written; files that hold
something else than the results say are named, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def grid(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(row: dict[str, Any], metric: str) -> str:
    found = next((c for c in row["cells"] if (c["metric"], c["k"]) == (metric, 10)), None)
    if found is None or found["value"] is None:
        return "–"
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def demo(result: dict[str, Any]) -> str:
    metrics = ["agreement", "recall", "ndcg"]
    head = ["", *(f"{m}@10" for m in metrics)]
    return grid(head, ([r["name"], *(cell(r, m) for m in metrics)] for r in result["evaluation"]["rows"]))


def rewrite(result: dict[str, Any]) -> str:
    head = [
        "store",
        "rows",
        "bare loop, rows/s",
        "vecferry, rows/s",
        "ratio",
        "verify, s",
        "peak RSS, bare / vecferry, MB",
    ]
    return grid(
        head,
        (
            [
                r["store"],
                f"{r['rows']:,}",
                f"{r['bare_rows_per_s']:,.0f}",
                f"{r['ours_rows_per_s']:,.0f}",
                f"{r['ratio']:.2f}",
                f"{r['verify_s']:.1f}",
                f"{r['bare_peak_rss_mb']:.0f} / {r['ours_peak_rss_mb']:.0f}",
            ]
            for r in result["results"]
        ),
    )


def cascade(result: dict[str, Any]) -> str:
    """Show agreement@10 for each way of choosing the texts, of the larger data where they were measured."""
    ways = ["warm by the log", "on demand", "random"]
    rows = []
    for pair in result["data" if "data" in result else "sample"]["results"]:
        at = {(r["way"], round(r["texts"])): r for r in pair["curve"]}
        alone = at["translate only", 0]["agreement@10"]
        rows.append([pair["pair"], "0 (translation)", *[f"{alone:.3f}"] * len(ways)])
        for share in (0.02, 0.05, 0.1, 0.2, 0.5):
            texts = round(share * pair["documents"])
            found = [at.get((way, texts)) for way in ways]
            rows.append(["", f"{texts:,}", *("" if r is None else f"{r['agreement@10']:.3f}" for r in found)])
        full = max((r for r in pair["curve"] if r["way"] == "random"), key=lambda r: r["texts"])
        rows.append(["", f"{full['texts']:,.0f} (all)", *[f"{full['agreement@10']:.3f}"] * len(ways)])
    return grid(["agreement@10", "texts encoded", *ways], rows)


def maps(result: dict[str, Any]) -> str:
    """Show each pair of models, simple maps beside the chosen one, over the seeds that were run; and the summary."""
    at, ndcg = "agreement@10", "ndcg@10"
    rows, gains, lost, seeds = [], [], [], set()
    for (old, new), group in itertools.groupby(result["runs"], key=lambda r: (r["old"], r["new"])):
        runs = list(group)
        mean = {
            (name, metric): statistics.fmean(r["maps"][name][metric] for r in runs)
            for name, metric in itertools.product(("ridge", "procrustes", "auto"), (at, ndcg))
        }
        simple = max("ridge", "procrustes", key=lambda name, mean=mean: mean[name, at])
        gains.append(mean["auto", at] / mean[simple, at])
        lost.append(mean[simple, ndcg] - mean["auto", ndcg])
        seeds |= {r["seed"] for r in runs}
        found = [f"{mean[name, at]:.3f}" for name in ("ridge", "procrustes", "auto")]
        labels = f"{mean[simple, ndcg]:.3f} → {mean['auto', ndcg]:.3f}"
        rows.append([f"{old} → {new}", *found, f"{gains[-1] - 1:+.0%}", labels, str(len(runs))])
    geometric = math.exp(statistics.fmean(map(math.log, gains)))
    summary = (
        f"{len(gains)} pairs; means over the seeds run ({', '.join(map(str, sorted(seeds)))}). auto finds "
        f"{geometric - 1:+.1%} in the geometric mean over the better simple map, from {min(gains) - 1:+.1%} to "
        f"{max(gains) - 1:+.1%}; its nDCG is lower on {sum(d > 0 for d in lost)} pairs, by {max(lost):.3f} at most."
    )
    head = ["", "ridge", "procrustes", "auto", "gain", "ndcg@10, simple → auto", "seeds"]
    return f"{grid(head, rows)}\n\n{summary}"


def reliability(result: dict[str, Any]) -> str:
    """Sum up what the kills and the damaged files came to."""
    kills, fuzz = result["kills"]["total"], result["fuzz"]["total"]
    targets, kinds = len(result["kills"]["kinds"]), len(result["fuzz"]["kinds"])
    counts = {
        f"runs killed at a random instant of every phase, of {targets} kinds of target": [kills["kills"]],
        "runs resumed after a kill; to the same bytes": [kills["resumed"], kills["resumed_to_the_same_bytes"]],
        "rows lost; doubled": [kills["rows_lost"], kills["rows_doubled"]],
        "looks at the target after a kill; found it whole": [
            kills["checks_of_what_stands_at_the_target"],
            kills["found_complete"],
        ],
        f"damaged files opened, of {kinds} kinds": [fuzz["inputs"]],
        "of these read; refused with a message; crashed; hung": [
            fuzz[name] for name in ("read", "refused", "crashed", "hung")
        ],
    }
    return grid(["", "times"], ([name, "; ".join(f"{v:,}" for v in found)] for name, found in counts.items()))


def embedfilter(result: dict[str, Any]) -> str:
    """Show nDCG@10 of each filter on each kind of vectors, with half, a quarter and an eighth of the dimensions."""
    at = {(r["vectors"], r["kind"], r["tau"]): r["ndcg@10"] for r in result["runs"]}
    sets = list(dict.fromkeys(vectors for vectors, _, _ in at))
    kinds = list(dict.fromkeys(kind for _, kind, _ in at))
    taus = sorted({tau for _, _, tau in at if tau > 1})

    def found(vectors: str, kind: str) -> str:
        if (vectors, kind, 1) in at:
            return f"{at[vectors, kind, 1]:.3f}"
        return " / ".join(f"{at[vectors, kind, tau]:.3f}" for tau in taus)

    head = [f"nDCG@10 at tau {', '.join(map(str, taus))}", *sets]
    return grid(head, ([kind, *(found(vectors, kind) for vectors in sets)] for kind in kinds))


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "demo": demo,
    "bench_rewrite": rewrite,
    "bench_cascade": cascade,
    "bench_maps": maps,
    "bench_embedfilter": embedfilter,
    "reliability": reliability,
}


def fill(text: str) -> str:
    """Return a page with every table made anew; raise KeyError for a table that nothing makes."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        return f"<!-- table: {name} -->\n{TABLES[name](result)}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    filled = {path: fill(path.read_text(encoding="utf-8")) for path in pages}
    stale = {path: text for path, text in filled.items() if text != path.read_text(encoding="utf-8")}
    if check and stale:
        sys.exit("not what benchmarks/results says: " + ", ".join(str(path.relative_to(ROOT)) for path in stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
