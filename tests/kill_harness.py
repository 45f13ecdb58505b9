"""Migrations that are killed at a random instant of a chosen phase, resumed, and compared with undisturbed ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vecferry.holdout import Holdout
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapfile import seal
from vecferry.store import open_reader

D_IN, D_OUT, HELD, ASKED = 24, 40, 100, 40
CHILD = Path(__file__).with_name("kill_child.py")
COMMON = ("read", "stage", "checkpoint", "finish", "verify", "gate", "publish")
MISSES = 12
"""How often a kill may come too early or too late for its phase before that is called impossible."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Describe a kind of target: its name on disk, its options, and the phases that a migration to it has."""

    name: str
    options: tuple[str, ...]
    phases: tuple[str, ...]


KINDS = {
    "flat": Kind("new.faiss", ("--drop-payload",), COMMON),
    "ivf": Kind("new.faiss", ("--drop-payload", "--index", "IVF16,Flat"), (*COMMON, "build", "train")),
    "hnsw": Kind("new.faiss", ("--drop-payload", "--index", "HNSW8", "--threads", "1"), (*COMMON, "build")),
    "npy": Kind("new.npy", ("--drop-payload",), COMMON),
    "parquet": Kind("new.parquet", (), COMMON),
}


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


class Job:
    """A Parquet source with integer ids and texts, a map with its hold-out, and another for the old targets."""

    def __init__(self, folder: Path, rows: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows = folder, rows
        self.source = folder / "source.parquet"
        rng = np.random.default_rng(0)
        x = rng.standard_normal((rows, D_IN), dtype=np.float32)
        self.ids = rng.choice(10**9, rows, replace=False)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), D_IN)
        table = pa.table({"id": pa.array(self.ids), "text": [f"text {i}" for i in self.ids], "emb": vectors})
        pq.write_table(table, self.source, row_group_size=3000)
        card = Card(Side(D_IN, "old"), Side(D_OUT, "new"), "by hand")
        for name in ("map", "old-map"):
            m = LinearMap(rng.standard_normal((D_IN, D_OUT)), rng.standard_normal(D_OUT), post="l2", card=card)
            y = m.apply(x[:HELD])
            queries = pa.array([f"q{i}" for i in range(ASKED)])
            asked = y[:ASKED] + rng.normal(0, 0.02, (ASKED, D_OUT)).astype(np.float32)
            held = Holdout(pa.array(self.ids[:HELD]), x[:HELD], y, queries, asked)
            seal(LinearMap(m.weight, m.bias, post="l2", card=card, holdout=held)).save(folder / name)

    def arguments(self, folder: Path, kind: str, *more: str, map: str = "map") -> list[str]:
        """Return the arguments of the command that makes a target in a folder."""
        target = KINDS[kind]
        fixed = ["--map", str(self.folder / map), "--batch-size", "500"]
        return ["migrate", str(self.source), str(folder / target.name), *fixed, *target.options, *more]


@dataclass(slots=True)
class Run:
    """A running command; what it tells of its phases is read by `events`, to its end."""

    server: Server
    errors: Path
    pid: int = 0
    code: int | None = None
    open: Counter[str] = field(default_factory=Counter)
    begun: Counter[str] = field(default_factory=Counter)

    def events(self) -> Iterator[tuple[str, str, float]]:
        """Yield "+" or "-", the phase, and the time, as phases begin and end."""
        while self.code is None:
            word, _, value = self.server.line().partition(" ")
            if word == "pid":
                self.pid = int(value)
            elif word == "exit":
                self.code = int(value)
            else:
                sign, phase = word[0], word[1:]
                self.open[phase] += 1 if sign == "+" else -1
                self.begun[phase] += sign == "+"
                yield sign, phase, float(value)

    def until(self, phase: str, number: int) -> bool:
        """Wait for the begin of the phase's `number`th time; return whether it came."""
        return any(p == phase and sign == "+" and self.begun[p] == number for sign, p, _ in self.events())

    def end(self) -> int:
        """Read to the end; return the exit code, negative for a signal."""
        for _ in self.events():
            pass
        assert self.code is not None
        return self.code

    def signal(self, number: int = signal.SIGKILL) -> tuple[str, ...]:
        """Send a signal, wait for the end; return the phases that a kill found open."""
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(self.pid, number)
        self.end()
        return tuple(sorted(+self.open))

    @property
    def held(self) -> Path:
        """The file that holds it."""
        return self.errors.with_name(f"{self.errors.name}.hold")

    def wait_held(self, phase: str) -> None:
        """Wait until it stands at the phase that it was told to hold at."""
        assert self.until(phase, 1), self.stderr

    def release(self) -> None:
        """Let it go on."""
        self.held.unlink()

    @property
    def stderr(self) -> str:
        return self.errors.read_text(encoding="utf-8")


class Server:
    """The process that forks commands, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def start(
        self, arguments: list[str], *, largest: int | None = None, powers: bool = True, hold: str | None = None
    ) -> Run:
        """Begin a command: with files of at most `largest` bytes, without root's `powers` over permissions.

        It waits at the begin of the phase `hold`, until `release`.
        """
        self._count += 1
        run = Run(self, self._folder / f"stderr-{os.getpid()}-{self._count}")
        if hold is not None:
            run.held.touch()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([arguments, str(run.errors), largest, powers, hold]) + "\n")
        self._process.stdin.flush()
        return run

    def finish(self, arguments: list[str], *, largest: int | None = None, powers: bool = True) -> Run:
        """Run a command to its end."""
        run = self.start(arguments, largest=largest, powers=powers)
        run.end()
        return run

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks commands has ended")
        return line.rstrip("\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a run that nobody disturbs leaves, and how long each of its phases takes each time."""

    files: dict[str, str]
    spans: dict[str, list[float]]


@dataclass(slots=True)
class Outcome:
    """Count what a campaign of kills saw."""

    kills: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    equal: int = 0
    lost: int = 0
    doubled: int = 0
    checks: int = 0
    whole: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the counts by name."""
        return {
            "kills": self.kills,
            "kills_by_phase": dict(sorted(self.phases.items())),
            "resumed": self.resumed,
            "resumed_to_the_same_bytes": self.equal,
            "rows_lost": self.lost,
            "rows_doubled": self.doubled,
            "checks_of_what_stands_at_the_target": self.checks,
            "found_complete": self.whole,
        }


class Campaign:
    """Kill migrations to one kind of target: every second one into an empty folder, the others over an old target."""

    def __init__(self, server: Server, job: Job, kind: str, folder: Path) -> None:
        self.server, self.job, self.kind, self.folder = server, job, kind, folder
        self.target = KINDS[kind]
        self.old = folder / "old"
        self.old.mkdir(parents=True)
        made = server.finish(job.arguments(self.old, kind, map="old-map"))
        assert made.code == 0, made.stderr
        self.undisturbed = {over: self._undisturbed(over) for over in (False, True)}

    def fresh(self, folder: Path, over: bool) -> Path:
        """Make a folder for one run: empty, or with the old target in it."""
        if over:
            shutil.copytree(self.old, folder)
        else:
            folder.mkdir()
        return folder

    def command(self, folder: Path, over: bool, *more: str) -> list[str]:
        return self.job.arguments(folder, self.kind, *(["--overwrite"] if over else []), *more)

    def _undisturbed(self, over: bool) -> Undisturbed:
        folder = self.fresh(self.folder / f"undisturbed-{over}", over)
        run = self.server.start(self.command(folder, over))
        spans: dict[str, list[float]] = {}
        began: dict[str, float] = {}
        for sign, phase, when in run.events():
            if sign == "+":
                began[phase] = when
            else:
                spans.setdefault(phase, []).append(when - began[phase])
        assert run.code == 0, run.stderr
        assert set(spans) == set(self.target.phases), spans.keys()
        return Undisturbed(contents(folder), spans)

    def strike(self, folder: Path, over: bool, phase: str, luck: random.Random, *more: str) -> tuple[str, ...] | None:
        """Kill a run at a random instant of a phase; return the phases it was in, None where it ended before."""
        spans = self.undisturbed[over].spans[phase]
        number = luck.randrange(len(spans))
        run = self.server.start(self.command(folder, over, *more))
        if not run.until(phase, number + 1):
            assert run.code == 0, run.stderr
            return None
        time.sleep(luck.random() * spans[number] * 0.8)  # the signal takes a while to arrive too
        if run.code is not None:
            return None
        hit = run.signal()
        return hit if run.code == -signal.SIGKILL else None

    def is_whole(self, folder: Path, over: bool) -> bool:
        """Say whether the old store, or none, stands at the target to the last byte; or the new, the old kept by it."""

        def store(files: dict[str, str], name: str) -> dict[str, str]:
            return {k[len(name) :]: v for k, v in files.items() if k == name or k.startswith(f"{name}/")}

        name = self.target.name
        now, new = contents(folder), store(self.undisturbed[over].files, name)
        old = store(contents(self.old), name) if over else {}
        target, backup = store(now, name), store(now, f"{name}.bak")
        if target == new:
            known = backup == old
        else:
            known = target == old
        if target and known:
            with open_reader(str(folder / name)) as reader:
                known = reader.info.count == self.job.rows and reader.info.space is not None
        return known

    def is_undisturbed(self, folder: Path, over: bool) -> bool:
        """Say whether a folder holds what a run that nobody disturbs leaves, to the byte."""
        return contents(folder) == self.undisturbed[over].files

    def once(self, outcome: Outcome, phase: str, over: bool, luck: random.Random) -> bool:
        """Kill one migration in a phase, and sometimes its resumption elsewhere; finish and check it."""
        folder = self.fresh(self.folder / f"run-{outcome.resumed}", over)
        wanted, hit, more = phase, False, []
        while True:
            phases = self.strike(folder, over, wanted, luck, *more)
            if phases is not None:
                outcome.kills += 1
                outcome.phases.update(phases or ["between phases"])
                hit |= phase in phases
            outcome.checks += 1
            outcome.whole += self.is_whole(folder, over)
            wanted, more = luck.choice(self.target.phases), ["--resume"]
            if phases is None or luck.random() > 0.3:
                break
        done = self.server.finish(self.command(folder, over, "--resume"))
        assert done.code == 0, done.stderr
        outcome.resumed += 1
        outcome.equal += self.is_undisturbed(folder, over)
        with open_reader(str(folder / self.target.name)) as reader:
            found = np.concatenate([ids.to_numpy() for ids in reader.ids(1 << 16)])
        outcome.lost += len(np.setdiff1d(self.job.ids, found))
        outcome.doubled += len(found) - len(np.unique(found))
        shutil.rmtree(folder)
        return hit

    def run(self, kills: int, phases: Sequence[str] | None = None, seed: int = 0) -> Outcome:
        """Kill at least so many times, the phases in turn, each until a kill has really struck it at least once."""
        outcome, luck = Outcome(), random.Random(f"{self.kind} {seed}")
        phases = phases or self.target.phases
        turn = 0
        while outcome.kills < kills or turn < len(phases):
            phase, over = phases[turn % len(phases)], luck.random() < 0.5
            if not any(self.once(outcome, phase, over, luck) for _ in range(MISSES)):
                raise AssertionError(f"no kill struck {self.kind} while it was in {phase}: {outcome}")
            turn += 1
        return outcome
