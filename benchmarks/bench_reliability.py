"""Kill migrations at random instants of every phase, resume them, and count what became of the rows.

    python benchmarks/bench_reliability.py [--kills 50] [--kinds flat ivf hnsw npy parquet] [--rows 10000]

Half of the runs go into an empty folder, half over an old target. After every kill the target must be the old store,
or none, to the last byte, or the new one with the old kept beside it; after --resume everything must be what a run
leaves that nobody disturbs, to the last byte. The counts go into results/reliability.json under "kills"; a kill counts
for every phase that it struck, since some lie inside others (training in building) and reading goes on beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from kill_harness import KINDS, Campaign, Job, Server  # noqa: E402 - the tests' own

RESULTS = HERE / "results" / "reliability.json"


def total_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counts of all kinds."""
    phases: Counter[str] = Counter()
    for row in rows:
        phases.update(row["kills_by_phase"])
    sums = {name: sum(row[name] for row in rows) for name in rows[0] if name != "kills_by_phase"}
    return sums | {"kills_by_phase": dict(sorted(phases.items()))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="of each kind of target, at least")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="other instants")
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(folder / "job", args.rows)
        with Server(folder) as server:
            for kind in args.kinds:
                outcome = Campaign(server, job, kind, folder / kind).run(args.kills, seed=args.seed)
                results[kind] = row = outcome.to_json()
                print(f"{kind:8} {json.dumps(row)}", flush=True)
    total = total_of(list(results.values()))
    parameters = {
        "kills": args.kills,
        "rows": args.rows,
        "seed": args.seed,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "faiss-cpu": version("faiss-cpu"),
    }
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    held["kills"] = {"parameters": parameters, "kinds": results, "total": total}  # what stands under other keys stays
    RESULTS.write_text(json.dumps(held, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    whole = total["checks_of_what_stands_at_the_target"] == total["found_complete"]
    same = total["resumed"] == total["resumed_to_the_same_bytes"]
    return 0 if whole and same and not total["rows_lost"] and not total["rows_doubled"] else 1


if __name__ == "__main__":
    sys.exit(main())
