"""Damage valid files of every kind, read them, and count what became of it: merged into results/reliability.json.

python benchmarks/fuzz.py --cases 3000 [--kinds faiss parquet]

A case is a number: it is the same damage to the same file whenever it is run, so a failure is repeated by
`--kinds KIND --first NUMBER --cases 1`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
RESULTS = HERE / "results" / "reliability.json"
SLOW = {"faiss-probed": 8, "stage": 6, "checkpoint": 3}
"""Kinds of which a case takes so many times as long as others: as many fewer are run."""


def run(kind: str, cases: range, folder: Path) -> dict[str, int]:
    from fuzzing.campaign import campaign

    counts = campaign(kind, folder / kind, cases)
    for number, why in counts.failures.items():
        print(f"{kind} case {number}: {why}", file=sys.stderr)
    names = ("inputs", "commands", "read", "refused", "crashed", "hung")
    row = {name: getattr(counts, name) for name in names}
    print(f"{kind:<14}" + "".join(f"{name} {row[name]:>6,}  " for name in names), flush=True)
    return row


def merge(rows: dict[str, Any], first: int) -> None:
    """Put the rows of kinds under the key "fuzz" of the file; leave all else that stands there."""
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    kinds = held.get("fuzz", {}).get("kinds", {}) | {kind: row | {"first": first} for kind, row in rows.items()}
    names = ("inputs", "commands", "read", "refused", "crashed", "hung")
    held["fuzz"] = {"kinds": kinds, "total": {name: sum(row[name] for row in kinds.values()) for name in names}}
    RESULTS.write_text(json.dumps(held, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    from fuzzing.kinds import KINDS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000, help="of each kind; of slow ones fewer")
    parser.add_argument("--first", type=int, default=0, help="number of the first case: others are other damages")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.workers) as pool:
        jobs = {
            kind: pool.submit(
                run, kind, range(asked.first, asked.first + asked.cases // SLOW.get(kind, 1)), Path(folder)
            )
            for kind in asked.kinds
        }
        rows = {kind: job.result() for kind, job in jobs.items()}
    merge(rows, asked.first)
    return 1 if any(row["crashed"] or row["hung"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
