"""The order of system calls, which decides what is left after a power failure; a kill can't show it.

A migration runs under strace, and a model of a disk that keeps only what was synced follows its calls: the bytes of a
file last once it was synced, a name once its folder was.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest
from kill_harness import KINDS, Job

pytest.importorskip("faiss", reason="one of the targets")

CALLS = "openat,creat,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,rename,renameat,renameat2,link,linkat,"
CALLS += "unlink,unlinkat,mkdir,mkdirat,rmdir,ftruncate,copy_file_range,sendfile,splice"
SMALL = """
import vecferry_adapters._faiss_writer as f
import vecferry_adapters._parquet_writer as p
from vecferry.cli import cli
f.CHECKPOINT, p.GROUP_ROWS, p.PART_GROUPS = 1 << 17, 128, 4
cli()
"""
LINE = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(?: resumed>|\()(.*)")
BEHIND = re.compile(r"^\d+<([^>]+)>")
QUOTED = re.compile(r'"([^"]*)"')


@dataclass
class Call:
    """One system call that succeeded: its name and the paths it is about."""

    name: str
    paths: list[str]
    text: str


def calls_of(lines: Iterable[str], within: Path) -> Iterator[Call]:
    """Parse what strace wrote; a call that others interrupted counts from its end, a sync from its beginning."""
    begun: dict[str, str] = {}
    for line in lines:
        matched = LINE.match(line)
        if matched is None:
            continue
        pid, name, rest = matched.groups()
        if rest.endswith("<unfinished ...>"):
            begun[pid] = rest.removesuffix("<unfinished ...>")
            if name not in ("fsync", "fdatasync"):
                continue
            text = begun[pid]
        elif "resumed>" in line:
            assert "= -1 EIO" not in rest
            if name in ("fsync", "fdatasync"):
                continue
            text = begun.pop(pid) + rest
        else:
            text = rest
        if re.search(r"= -1 E", text):
            continue
        behind = BEHIND.match(text)
        paths = [behind[1]] if behind else QUOTED.findall(text)
        if name == "openat":
            if not re.search(r"O_WRONLY|O_RDWR|O_CREAT", text):
                continue
            name = "create" if "O_CREAT" in text else "open"
            paths = QUOTED.findall(text)
        paths = [p for p in paths if p.startswith(f"{within}/") or p == str(within)]
        if paths:
            yield Call("exchange" if "RENAME_EXCHANGE" in text else name, paths, line)


@dataclass
class Disk:
    """What would be lost if the power failed now: bytes of files and entries of folders that weren't synced."""

    target: str
    dirty: set[str] = field(default_factory=set)
    loose: dict[str, set[str]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)

    def follow(self, calls: Iterable[Call]) -> "Disk":
        for call in calls:
            self._follow(call)
        for path in self.dirty:
            self.faults.append(f"the bytes of {path} were never synced")
        for folder, names in self.loose.items():
            self.faults += [f"the name {folder}/{name} was never synced" for name in names]
        return self

    def _follow(self, call: Call) -> None:
        first, last = call.paths[0], call.paths[-1]
        if call.name in ("fsync", "fdatasync"):
            self.dirty.discard(first)
            self.loose.pop(first, None)
        elif call.name in ("create", "mkdir"):
            if first not in self.known:
                self._enter(first)
        elif call.name in ("rename", "renameat", "renameat2", "exchange"):
            self._rename(call, first, last)
        elif call.name in ("link", "linkat"):
            self._enter(last)
        elif call.name in ("unlink", "unlinkat", "rmdir"):
            self._forget(call, first)
        elif not first.endswith("/lock"):  # who holds it is for a message only
            self.dirty.add(first)

    def _enter(self, path: str) -> None:
        self.known.add(path)
        folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
        if name != "lock":
            self.loose.setdefault(folder, set()).add(name)

    def _below(self, path: str) -> list[str]:
        lost = [f"bytes of {p}" for p in self.dirty if p == path or p.startswith(f"{path}/")]
        return lost + [f"names in {p}" for p in self.loose if p == path or p.startswith(f"{path}/")]

    def _rename(self, call: Call, source: str, to: str) -> None:
        for lost in self._below(source):
            self.faults.append(f"{lost} not synced before {call.text}")
        stage = str(PurePosixPath(source).parent)
        if to.endswith("/state.json"):  # it speaks of everything else in the stage
            others = [lost for lost in self._below(stage) if not lost.endswith((stage, "/state.json.tmp"))]
            self.faults += [f"{lost} not synced before {call.text}" for lost in others]
        if to == self.target:  # its sidecar, the state that says so, and the backup's name come first
            folders = {
                str(PurePosixPath(to).parent),
                str(PurePosixPath(to).parent / f".{PurePosixPath(to).name}.vecferry"),
            }
            self.faults += [f"names in {f} not synced before {call.text}" for f in folders & set(self.loose)]
        if source == self.target and call.name != "exchange":
            self.faults.append(f"the target is moved away: {call.text}")
        if call.name == "exchange":
            self._enter(source)
        self._leave(source)
        if call.name == "exchange":
            self._enter(source)
        self._enter(to)
        self.renamed.append(to)

    def _leave(self, path: str) -> None:
        self.known.discard(path)
        folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
        names = self.loose.get(folder, set())
        names.discard(name)
        if not names:
            self.loose.pop(folder, None)

    def _forget(self, call: Call, path: str) -> None:
        if path == self.target:
            self.faults.append(f"the target is deleted: {call.text}")
        if PurePosixPath(path).name == "state.json" and PurePosixPath(self.target).name in self.loose.get(
            str(PurePosixPath(self.target).parent), set()
        ):
            self.faults.append(f"the target's name isn't synced before its stage is deleted: {call.text}")
        self.dirty.discard(path)
        self._leave(path)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"), 2000)


def traced(job: Job, folder: Path, kind: str, *more: str, log: Path) -> list[str]:
    """Run a migration under strace; return what that wrote."""
    arguments = [a for a in job.arguments(folder, kind, *more) if "--payload" not in more or a != "--drop-payload"]
    command = [sys.executable, "-c", SMALL, *arguments]
    strace = ["strace", "-f", "-y", "-qq", "-s", "0", "-e", f"trace={CALLS}", "-e", "signal=none", "-o", str(log)]
    done = subprocess.run([*strace, *command], capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"strace may not trace here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return log.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace isn't installed: apt-get install strace")
@pytest.mark.parametrize("kind", ["flat", "ivf", "parquet"])
def test_bytes_and_names_are_synced_before_anything_relies_on_them(kind: str, job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    target = str(folder / KINDS[kind].name)
    for over in (False, True):
        more = ["--overwrite", "--seed", "1"] if over else []
        if kind == "ivf":
            more += ["--payload", str(folder / f"texts-{over}.parquet")]
        lines = traced(job, folder, kind, *more, log=tmp_path / f"log-{over}")
        disk = Disk(target).follow(calls_of(lines, folder))
        assert disk.faults == []
        assert target in disk.renamed  # it was followed to the publication,
        assert sum(path.endswith("/state.json") for path in disk.renamed) >= 4  # with some checkpoints on the way
        # and the model sees what is missing: each of these alone would be a fault
        for pattern in (r"state\.json\.tmp", r"/(vectors|part-00000\.parquet\.tmp)", rf"{folder}", r"\.vecferry"):
            fewer = [line for line in lines if not re.search(rf"fsync\(\d+<[^>]*{pattern}>", line)]
            assert len(fewer) < len(lines)
            assert Disk(target).follow(calls_of(fewer, folder)).faults, pattern
