"""The stage: its lock, its state, and a publication that is stopped at every one of its steps."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from vecferry import store
from vecferry.batch import VectorBatch
from vecferry.errors import DataError, StoppedError, UnsupportedError, UsageError
from vecferry.store import StoreInfo
from vecferry.testing import contents
from vecferry_adapters import _staging
from vecferry_adapters._durable import exchange, write_json
from vecferry_adapters._staging import Stage, backup_of, resumable, swap_back


def stage(target: Path, plan: str = "p", *, resume: bool = False, overwrite: bool = False) -> Stage:
    return Stage(target, plan, resume=resume, overwrite=overwrite)


def fill(target: Path, text: str, *, folder: bool) -> None:
    """Make a store that is a file, or a folder with a file."""
    if folder:
        target.mkdir()
        (target / "x").write_text(text)
    else:
        target.write_text(text)


def text_of(target: Path) -> str:
    return (target / "x").read_text() if target.is_dir() else target.read_text()


def publish(s: Stage, *, folder: bool) -> Path | None:
    return s.publish_folder() if folder else s.publish_file(s.folder / "file")


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("existing", [False, True])
def test_publication_keeps_what_was_there(tmp_path: Path, folder: bool, existing: bool) -> None:
    target = tmp_path / "t"
    if existing:
        fill(target, "old", folder=folder)
    s = stage(target, overwrite=True)
    fill(s.folder / ("new" if folder else "file"), "new", folder=folder)
    backup = publish(s, folder=folder)
    s.discard()
    assert text_of(target) == "new"
    assert backup == (backup_of(target) if existing else None)
    if existing:
        assert text_of(backup_of(target)) == "old"
        assert swap_back(target) == backup_of(target)
        assert (text_of(target), text_of(backup_of(target))) == ("old", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == (["t", "t.bak"] if existing else ["t"])


def test_a_folder_may_take_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("old")
    s = stage(tmp_path / "t", overwrite=True)
    fill(s.folder / "new", "new", folder=True)
    s.publish_folder()
    assert (text_of(tmp_path / "t"), text_of(tmp_path / "t.bak")) == ("new", "old")
    s.close()


class Killed(Exception):
    """Stands for the end of the process: nothing after it is done."""


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.case("16", "17")
def test_publication_stopped_at_every_step_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool, existing: bool
) -> None:
    """Count the calls that change the disk, then stop before and after each of them in turn."""

    def run(where: Path, stop: int) -> int:
        where.mkdir()
        target = where / "t"
        if existing:
            fill(target, "old", folder=folder)
        s = stage(target, overwrite=existing)
        fill(s.folder / ("new" if folder else "file"), "new", folder=folder)
        s.save(rows=3)
        calls = 0

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object) -> object:
                nonlocal calls
                calls += 1
                if stop == 2 * calls - 1:
                    raise Killed
                result = real(*args)
                if stop == 2 * calls:
                    raise Killed
                return result

            return call

        with monkeypatch.context() as patched:
            for name in ("rename", "replace", "hardlink_to"):
                patched.setattr(Path, name, counted(getattr(Path, name)))
            patched.setattr(_staging, "exchange", counted(exchange))
            try:
                publish(s, folder=folder)
                return calls
            except Killed:
                pass
            finally:
                s.close()
        if target.exists() and text_of(target) == "new":  # published to the end: a rerun has nothing left to do
            with pytest.raises(UsageError, match=r"t\.bak" if existing else "exists"):
                stage(target, resume=True, overwrite=existing)
        else:
            assert existing == target.exists()  # the old store, whole
            again = stage(target, resume=True, overwrite=existing)
            assert again.state["rows"] == 3
            publish(again, folder=folder)
            again.discard()
        assert text_of(target) == "new"
        if existing:
            assert text_of(backup_of(target)) == "old"
        assert not (where / ".t.vecferry").exists()
        return calls

    total = run(tmp_path / "whole", stop=10**9)
    assert total == {(False, False): 2, (False, True): 3, (True, False): 2, (True, True): 3}[folder, existing]
    for stop in range(1, 2 * total + 1):
        run(tmp_path / f"{stop}", stop)


def test_what_a_stage_refuses(tmp_path: Path) -> None:
    for name in (".", "absent/t"):
        with pytest.raises(UsageError):
            stage(tmp_path / name if name != "." else Path())
    (tmp_path / "t").write_text("old")
    with pytest.raises(UsageError, match="exists"):
        stage(tmp_path / "t")
    (tmp_path / "t.bak").write_text("older")
    with pytest.raises(UsageError, match=r"t\.bak.*move it away"):
        stage(tmp_path / "t", overwrite=True)
    assert contents(tmp_path) == {"t": b"old", "t.bak": b"older"}


def test_a_stage_is_continued_only_on_purpose_and_with_its_plan(tmp_path: Path) -> None:
    s = stage(tmp_path / "t")
    s.save(rows=7)
    s.close()
    with pytest.raises(UsageError, match="--resume"):
        stage(tmp_path / "t")
    with pytest.raises(UsageError, match="another source, map or option"):
        stage(tmp_path / "t", "q", resume=True)
    again = stage(tmp_path / "t", resume=True)
    assert again.state == {"plan": "p", "rows": 7}
    again.close()
    for broken in ("{", "[]", "7", "null"):
        (tmp_path / ".t.vecferry" / "state.json").write_text(broken)
        with pytest.raises(DataError, match="damaged: delete"):
            stage(tmp_path / "t", resume=True)


def test_a_file_in_the_stage_s_place_is_named(tmp_path: Path) -> None:
    (tmp_path / ".t.vecferry").write_text("mine")
    with pytest.raises(UsageError, match=r"\.t\.vecferry.*no folder: move it away"):
        stage(tmp_path / "t")
    assert contents(tmp_path) == {".t.vecferry": b"mine"}


def test_rubbish_of_a_start_that_crashed_is_cleared(tmp_path: Path) -> None:
    rubbish = tmp_path / ".t.vecferry"
    (rubbish / "new").mkdir(parents=True)
    (rubbish / "state.json.tmp").write_text("{")
    s = stage(tmp_path / "t")
    assert sorted(p.name for p in rubbish.iterdir()) == ["lock", "state.json"]
    s.discard()
    assert list(tmp_path.iterdir()) == []


HOLD = """
import sys
from pathlib import Path
from vecferry_adapters._staging import Stage
stage = Stage(Path(sys.argv[1]), "p", resume=False, overwrite=False)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.case("16")
def test_a_stage_belongs_to_one_process_until_it_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "t")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        now = datetime.now(UTC)
        with pytest.raises(UsageError) as refused:
            stage(tmp_path / "t", resume=True)
        told = re.search(r"written by process (\d+) on (\S+) since (.*) UTC: wait for it", str(refused.value))
        assert told is not None
        assert (int(told[1]), told[2]) == (other.pid, socket.gethostname())
        assert abs(datetime.strptime(told[3], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) - now) < timedelta(minutes=1)
        other.send_signal(signal.SIGKILL)
        other.wait()
    stage(tmp_path / "t", resume=True).discard()
    assert list(tmp_path.iterdir()) == []


def test_a_dead_owner_s_lock_is_taken_over_though_another_process_has_its_number(tmp_path: Path) -> None:
    """What counts is the lock that the kernel holds; the number in the file is for the message only."""
    before = stage(tmp_path / "t")
    before.save(rows=7)
    before.close()  # as the kernel does when a process dies
    for number in (os.getpid(), os.getppid(), 1):
        (tmp_path / ".t.vecferry" / "lock").write_text(f"process {number} on {socket.gethostname()} since yesterday")
        again = stage(tmp_path / "t", resume=True)
        assert again.state["rows"] == 7
        again.close()


def test_a_filesystem_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UnsupportedError, match=r"can't lock files \(No locks available\), so two runs could meet"):
        stage(tmp_path / "t")


def test_a_lock_on_a_deleted_stage_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process opens the lock file just before the holder deletes its stage."""
    first = stage(tmp_path / "t")
    real = os.open
    opened: list[int] = []

    def late(path: Path, *args: int) -> int:
        lock = real(path, *args)
        if Path(path).name == "lock" and not opened:
            opened.append(lock)
            first.discard()
        return lock

    monkeypatch.setattr(os, "open", late)
    second = stage(tmp_path / "t")
    assert opened
    monkeypatch.undo()
    with pytest.raises(UsageError, match="process"):
        stage(tmp_path / "t")
    second.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": "ö"})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ö"}


@pytest.mark.case("18")
def test_what_is_not_whole_yet_stands_in_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise Killed

    (tmp_path / "stage").mkdir()
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Killed):
        write_json(tmp_path / "x.json", {"a": 1}, stage=tmp_path / "stage")
    assert list(contents(tmp_path)) == ["stage/x.json.tmp"]


def test_a_signal_just_behind_the_closing_of_a_lock_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stage(tmp_path / "t")
    real = os.close

    def interrupted(descriptor: int) -> None:
        real(descriptor)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            s.close()
    s.close()  # as the end of a `with` block does; the descriptor may be another file's by now
    stage(tmp_path / "t", resume=True).discard()


def test_a_full_disk_is_a_resumable_stop(tmp_path: Path) -> None:
    with (
        pytest.raises(StoppedError, match=r"full \([0-9,]+ bytes are free\); 1,234 rows"),
        resumable(tmp_path / "t", 1234),
    ):
        Path("/dev/full").write_bytes(b"x")


def test_whatever_else_keeps_a_stage_from_being_written_is_a_resumable_stop(tmp_path: Path) -> None:
    with (
        pytest.raises(StoppedError, match=r"t can't be written: No such file or directory \(.*absent\); 7 rows are"),
        resumable(tmp_path / "t", 7),
    ):
        (tmp_path / "absent").read_bytes()
    with (
        pytest.raises(StoppedError, match=r"t can't be written: File too large; 7 rows are staged safely"),
        resumable(tmp_path / "t", 7),
    ):
        raise OSError(errno.EFBIG, "[Errno 27] Error writing bytes to file. Detail: [errno 27] File too large")


@pytest.mark.parametrize("full_at", ["mkdir", "open", "write_json", "later"])
@pytest.mark.parametrize("begun_before", [False, True])
def test_a_disk_too_full_to_begin_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: str, begun_before: bool
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def begin() -> None:
        with stage(tmp_path / "t", resume=True).opening():
            full()

    if begun_before:
        before = stage(tmp_path / "t")
        before.save(rows=7)
        before.close()
    with monkeypatch.context() as patched:
        if full_at != "later":
            patched.setattr(*{"mkdir": (Path, "mkdir"), "open": (os, "open")}.get(full_at, (_staging, full_at)), full)
        with pytest.raises(UsageError, match=r"full \([0-9,]+ bytes are free\), so nothing could be begun"):
            begin()
    assert (tmp_path / ".t.vecferry").exists() == begun_before
    again = stage(tmp_path / "t", resume=True)  # and nothing is locked
    assert again.state.get("rows") == (7 if begun_before else None)
    again.discard()


def test_exchange_and_roll_back_need_both_sides(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("x")
    with pytest.raises(UsageError, match=r"t\.bak doesn't exist"):
        swap_back(tmp_path / "t")
    with pytest.raises(OSError, match="No such file") as caught:
        exchange(tmp_path / "t", tmp_path / "u")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("kind", ["npy", "parquet"])
@pytest.mark.case("p12")
def test_a_folder_is_rolled_back_to_what_it_was(tmp_path: Path, kind: str) -> None:
    for sign in (1, -1):
        x = np.full((5, 2), sign, np.float32)
        with store.open_writer(f"{kind}:{tmp_path / 't'}", StoreInfo(kind, "", 5, 2), overwrite=True) as writer:
            writer.write(VectorBatch(pa.array(range(5)), x))
            writer.commit()
    new = contents(tmp_path / "t")
    assert store.rollback(str(tmp_path / "t")) == str(tmp_path / "t.bak")
    with store.open_reader(str(tmp_path / "t")) as reader:
        assert (next(reader.read(5)).vectors == 1).all()
    assert contents(tmp_path / "t.bak") == new
    shutil.rmtree(tmp_path / "t.bak")
    with pytest.raises(UsageError, match=r"t\.bak doesn't exist: there is nothing to roll"):
        store.rollback(str(tmp_path / "t"))


def test_a_folder_is_not_swapped_for_a_faiss_file(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    fill(tmp_path / "t", "old", folder=True)
    with pytest.raises(UsageError, match=r"is a folder.*choose another name, or move the folder away"):
        store.open_writer(f"faiss:{tmp_path / 't'}", StoreInfo("faiss", "", 5, 2, "ip"), overwrite=True)
    assert contents(tmp_path) == {"t/x": b"old"}


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("kind", ["npy", "parquet", "faiss"])
def test_a_store_that_may_not_be_read_says_so(tmp_path: Path, kind: str) -> None:
    if kind == "faiss":
        pytest.importorskip("faiss")
    command = [sys.executable, "-c", SNIFF, str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "Permission denied\n", done.stderr


SNIFF = """
import os, sys
from pathlib import Path
from vecferry import store
adapter = store.load(sys.argv[2])
os.chdir(sys.argv[1])
Path("t").write_bytes(b"x")
Path("t").chmod(0)
os.seteuid(65534)
try:
    adapter.sniff(Path("/proc/self/cwd/t"))
except PermissionError as error:
    print(error.strerror)
"""
