"""Damage valid files many times, have them read in processes of their own, and count what became of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing.kinds import KINDS, a_map, vectors

BYTES = 1 << 30
"""Address space beside what the process has before the first case."""
SECONDS = 20.0
BATCH = 250
HERE = Path(__file__).parent


@dataclass
class Counts:
    """Count the outcomes of one kind; `failures` holds those that must not be, by the number of the case.

    commands  how many of the inputs were read by a command line
    """

    inputs: int = 0
    commands: int = 0
    read: int = 0
    refused: int = 0
    crashed: int = 0
    hung: int = 0
    failures: dict[int, str] = field(default_factory=dict)

    def note(self, number: int, found: str, why: str) -> None:
        self.inputs += 1
        if found in ("read", "refused"):
            setattr(self, found, getattr(self, found) + 1)
            return
        self.crashed += found != "hung"
        self.hung += found == "hung"
        self.failures[number] = f"{found}: {why}"


def campaign(name: str, folder: Path, cases: range) -> Counts:
    """Run numbered cases of a kind; case N is the same damage to the same file whenever it is run."""
    valid = folder / f"valid-{name}"
    if not valid.exists():
        valid.mkdir(parents=True)
        KINDS[name].make(valid)
        if not (folder / "a-map").exists():
            np.save(folder / "x.npy", vectors())
            a_map(folder / "a-map")
    counts, left, round_ = Counts(), list(cases), 0
    while left:
        round_ += 1
        work = folder / f"work-{name}-{cases.start}-{round_}"
        work.mkdir()
        job = {"kind": name, "valid": str(valid), "work": str(work), "cases": left[:BATCH]}
        left = left[len(_child(job, counts)) :]
        shutil.rmtree(work)
    return counts


def _child(job: dict[str, Any], counts: Counts) -> list[int]:
    """Run a batch in a process of its own; return the numbers of the cases that came to an end, one way or another."""
    paths = [str(HERE.parent), *filter(None, sys.path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    job = job | {"bytes": BYTES, "seconds": SECONDS}
    done = subprocess.run(
        [sys.executable, "-m", "fuzzing.child", json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        errors="replace",
        timeout=SECONDS * (len(job["cases"]) + 3),
    )
    ended, begun = [], None
    for line in done.stdout.splitlines():
        said = json.loads(line)
        if "begun" in said:
            begun = said["begun"]
        else:
            counts.note(said["case"], said["found"], said["why"])
            counts.commands += said["command"]
            ended.append(said["case"])
    if done.returncode != 0:
        if begun is None or begun in ended:
            raise RuntimeError(f"the process ended with {done.returncode} outside of a case: {done.stderr[-3000:]}")
        found = "hung" if done.returncode == -14 else "crashed"
        counts.note(begun, found, f"return code {done.returncode}: {done.stderr[-1500:]}")
        ended.append(begun)
    return ended
