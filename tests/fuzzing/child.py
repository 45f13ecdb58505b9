"""Run some cases of a kind, one after the other, and say of each what became of it: python -m fuzzing.child JOB.

JOB is a JSON object: kind, valid (folder of the variants), work (empty folder), cases (numbers), bytes, and seconds.
Every COMMANDth case is read by a command line. A line of JSON is printed before each case and after it, so that
whoever reads them knows which one was under way when the process died.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from fuzzing.kinds import KINDS, Kind
from vecferry.errors import VecferryError


def outcome(kind: Kind, folder: Path, sound: bytes) -> tuple[str, str]:
    """Read a damaged variant; return "read", "refused", or "wrong" or "raised", which must not be, and why."""
    try:
        found = kind.read(folder)
    except VecferryError as error:
        named = any(p.name in str(error) for p in (folder, *folder.rglob("*")))
        return ("refused" if named else "wrong"), str(error)
    except Exception:
        return "raised", traceback.format_exc()
    return ("read" if found == sound or not kind.exact(folder) else "wrong"), "something else was read"


def on_the_command_line(arguments: list[str]) -> tuple[str, str]:
    """Run a command in this process; return what became of it as `outcome` does."""
    from vecferry.cli import cli

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(arguments, prog_name="vecferry")
        except SystemExit as end:
            code = end.code
        except BaseException:
            return "raised", traceback.format_exc()
    text = err.getvalue()
    if "Traceback" in text or code not in (0, 1, 2, 3, 4, None):
        return "raised", f"{arguments} ended with {code}: {text}"
    out.getvalue().encode()
    lines = [line for line in text.splitlines() if not line.endswith(" says is ignored")]  # of a sidecar
    if code in (0, 1, None):
        return "read", ""
    return ("refused" if len(lines) == 1 and lines[0].startswith("vecferry: ") else "raised"), text


def variant_of(kind: Kind, valid: Path, work: Path, number: int, name: str) -> tuple[Path, str]:
    """Copy a variant and damage it, always in the same way for one number."""
    luck = random.Random(f"{name} {number}")
    variant = luck.choice(
        sorted(p for p in valid.iterdir() if p.is_dir() and p.name not in ("map" * (name in STAGED),))
    )
    folder = work / f"{variant.name}-{number}"
    shutil.copytree(variant, folder)
    kind.harm(folder, luck)
    (folder / "origin").write_text(str(valid))
    return folder, variant.name


COMMAND = 5
STAGED = ("checkpoint", "stage", "report")
"""Kinds of which the map beside the variants is no variant."""


def main(job: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    kind, valid, work = KINDS[job["kind"]], Path(job["valid"]), Path(job["work"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))
    sound: dict[str, bytes] = {}
    for variant in sorted(p for p in valid.iterdir() if p.is_dir()):
        if variant.name == "map" and job["kind"] in STAGED:
            continue
        folder = work / f"{variant.name}-sound"
        shutil.copytree(variant, folder)
        (folder / "origin").write_text(str(valid))
        sound[variant.name] = kind.read(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + job["bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in job["cases"]:
        print(json.dumps({"begun": number}), flush=True)
        folder, variant = variant_of(kind, valid, work, number, job["kind"])
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        if on_command := number % COMMAND == 0:
            commands = kind.commands(folder)
            found, why = on_the_command_line(commands[number // COMMAND % len(commands)])
        else:
            found, why = outcome(kind, folder, sound[variant])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(
            json.dumps({"case": number, "found": found, "why": f"{variant}: {why}", "command": on_command}), flush=True
        )
        if found in ("read", "refused"):
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.stdout = os.fdopen(os.dup(1), "w")  # what C++ prints to the standard output isn't to stand between the lines
    os.dup2(2, 1)
    main(json.loads(sys.argv[1]))
