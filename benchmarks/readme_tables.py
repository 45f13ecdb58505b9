"""Put the tables of benchmarks/results/*.json into README.md, between its `<!-- table: NAME -->` and `<!-- end -->`.

    python benchmarks/readme_tables.py [--check]

With --check nothing is written, and the exit status says whether the README holds what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
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


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "demo": demo,
    "bench_rewrite": rewrite,
    "bench_cascade": cascade,
}


def fill(text: str) -> str:
    """Return the README with every table made anew; raise KeyError for a table that nothing makes."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        return f"<!-- table: {name} -->\n{TABLES[name](result)}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = fill(before)
    if check:
        sys.exit(before != after)
    path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
