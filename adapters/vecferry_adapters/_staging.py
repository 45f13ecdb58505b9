"""What the file adapters share to lose nothing: a locked, durable stage beside the target, and its publication.

The stage of `DIR/NAME` is the folder `DIR/.NAME.vecferry`, on the same filesystem, so that publishing is a rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vecferry.errors import DataError, StoppedError, UnsupportedError, UsageError
from vecferry.jsonfile import read_json
from vecferry_adapters._durable import exchange, fsync, write_json

SEAL = "sha256"
"""Key under which a state holds a hash of the rest of it."""


@contextlib.contextmanager
def resumable(target: Path, rows: int) -> Iterator[None]:
    """Turn what goes wrong while a stage is written into StoppedError, which says how many rows are safe."""
    try:
        yield
    except OSError as error:
        fault, cure = _fault(target, error)
        raise StoppedError(
            f"{fault}; {rows:,} rows are staged safely, and what was there before is untouched: {cure}, then repeat "
            "the command (a migration with --resume)"
        ) from error


def _fault(target: Path, error: OSError) -> tuple[str, str]:
    """Say what is wrong with the place of a target, and the cure."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):  # a folder that has vanished
            return (
                f"the disk of {target} is full ({shutil.disk_usage(target.parent).free:,} bytes are free)",
                "make room",
            )
    reason = os.strerror(error.errno) if error.errno else str(error)
    path = "" if error.filename is None else f" ({os.fsdecode(error.filename)})"
    return f"{target} can't be written: {reason}{path}", "put that right"


def backup_of(target: Path) -> Path:
    """Return where the old store is kept when a target is overwritten."""
    return target.with_name(target.name + ".bak")


class Stage:
    """Hold the locked stage of a target, with a small JSON state that is replaced atomically.

    Raises UsageError when another process holds it, when it exists without `resume`, when its plan is another, and
    when the target exists without `overwrite` or its backup name is taken, and when the disk is too full to begin;
    UnsupportedError when the target is a folder that the filesystem couldn't swap.
    """

    def __init__(self, target: Path, plan: str, *, resume: bool, overwrite: bool) -> None:
        if not target.name or target.name == "..":
            raise UsageError(f"{target} can't be the name of a new store")
        if not target.parent.is_dir():
            raise UsageError(f"{target.parent} is not a folder: make it first")
        self.target = target
        self.plan = plan
        self.overwrite = overwrite
        self.folder = target.with_name(f".{target.name}.vecferry")
        self._lock = -1
        self._fresh = False
        with self.opening():
            self._lock = self._acquire()
            self.state = self._open(resume)
            self._check_target()

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Close the stage if the block that opens it, or what is in it, fails; one begun just now leaves nothing."""
        try:
            yield
        except BaseException as error:
            if self._fresh:
                self.discard()
            elif self._lock >= 0:
                self.close()
            else:
                with contextlib.suppress(OSError):  # somebody else's, or none
                    self.folder.rmdir()
            if isinstance(error, OSError):
                fault, cure = _fault(self.target, error)
                raise UsageError(
                    f"{fault}, so nothing could be begun or continued, and all is as it was before: {cure}"
                ) from error
            raise

    def _acquire(self) -> int:
        while True:
            try:
                self.folder.mkdir(exist_ok=True)
            except FileExistsError as error:
                raise UsageError(
                    f"{self.folder}, where {self.target} is to be staged, is no folder: move it away"
                ) from error
            path = self.folder / "lock"
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # the holder has just deleted the folder
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = _holder(lock)
                os.close(lock)
                raise UsageError(f"{self.target} is being written by {holder}: wait for it, or stop it") from error
            except OSError as error:
                os.close(lock)
                raise UnsupportedError(
                    f"the filesystem of {self.target} can't lock files ({error.strerror}), so two runs could meet: "
                    "write to another one, and copy the result"
                ) from error
            if _inode(path) == os.fstat(lock).st_ino:
                break
            os.close(lock)  # the holder finished and deleted its stage between our open and our lock
        with contextlib.suppress(OSError):  # a full disk; who holds it is only for the message to others
            os.ftruncate(lock, 0)
            now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)
        return lock

    def _open(self, resume: bool) -> dict[str, Any]:
        path = self.folder / "state.json"
        state = self._load(path) if path.exists() else None
        published = state is not None and state.get("publishing") is not None
        if state is None or (published and _inode(self.target) == state["publishing"]):
            # nothing durable was ever staged here, or all of it was published and only this folder was left behind
            self._fresh = True
            self._clear()
            write_json(path, _sealed({"plan": self.plan}))
            fsync(self.folder.parent)
            return {"plan": self.plan}
        if not resume:
            raise UsageError(
                f"a migration to {self.target} is staged in {self.folder}, and was stopped or failed its gate: "
                "continue it with --resume (another --gate is allowed), or delete that folder to start again"
            )
        if state.get("plan") != self.plan:
            raise UsageError(
                f"the migration staged in {self.folder} was started with another source, map or option: repeat the "
                "first command with --resume, or delete that folder to start again"
            )
        return state

    def _load(self, path: Path) -> dict[str, Any]:
        damaged = f"{path} is damaged: delete {self.folder} and start again"
        try:
            held = read_json(path)
        except DataError as error:
            raise DataError(damaged) from error
        state = {name: value for name, value in held.items() if name != SEAL}
        if held != _sealed(state):  # counts that don't belong to what is staged would shift ids
            raise DataError(damaged)
        return state

    def _check_target(self) -> None:
        if not os.path.lexists(self.target):
            return
        if not self.overwrite:
            raise UsageError(
                f"{self.target} exists: choose another name, or --overwrite (of a migration) to swap it and keep a "
                "backup"
            )
        backup = backup_of(self.target)
        # after a crash while publishing, the backup's name holds the old file (linked) or the new folder
        if os.path.lexists(backup) and _inode(backup) not in (_inode(self.target), self.state.get("publishing")):
            raise UsageError(f"{backup}, where the old store would be kept, exists: move it away first")
        if self.target.is_dir():
            pair = self.folder / "swap-a", self.folder / "swap-b"
            for path in pair:
                path.mkdir(exist_ok=True)
            exchange(*pair)  # refuses now, not after hours of work
            for path in pair:
                path.rmdir()

    def save(self, **state: Any) -> None:
        """Replace the state durably; call it after the data that it speaks of were fsynced."""
        self.state = {"plan": self.plan} | state
        write_json(self.folder / "state.json", _sealed(self.state))

    def _publishing(self, staged: Path) -> None:
        """Record which file or folder is being published: it keeps its inode while it changes its name."""
        inode = self.state.get("publishing") or _inode(staged)
        self.save(**{k: v for k, v in self.state.items() if k != "plan"} | {"publishing": inode})

    def publish_file(self, staged: Path) -> Path | None:
        """Move a staged, fsynced file onto the target in one step; return where the old one is kept.

        A stage that is opened again after a crash between the steps finishes them here.
        """
        self._publishing(staged)
        backup = None
        if os.path.lexists(self.target):
            backup = backup_of(self.target)
            if not os.path.lexists(backup):
                try:
                    backup.hardlink_to(self.target)
                except PermissionError as error:  # what link(2) says on a filesystem without hard links
                    raise UnsupportedError(
                        f"{backup} can't be made, its filesystem has no hard links: publish to a new name"
                    ) from error
                fsync(self.target.parent)
        staged.replace(self.target)
        fsync(self.target.parent)
        return backup

    def staged_folder(self) -> Path:
        """Return where the folder to be published is: in the stage, or at the backup's name after a crash there."""
        backup = backup_of(self.target)
        publishing = self.state.get("publishing")
        return backup if publishing is not None and _inode(backup) == publishing else self.folder / "new"

    def publish_folder(self) -> Path | None:
        """Move the folder `new` of the stage, its files fsynced, onto the target; return where the old one is kept.

        It goes to the backup's name and is then swapped with the target, so that at every instant both are whole.
        A stage that is opened again after a crash between the two steps finishes them here.
        """
        staged = self.staged_folder()
        self._publishing(staged)
        fsync(staged)
        backup = None
        if os.path.lexists(self.target):
            backup = backup_of(self.target)
            if staged != backup:
                staged.rename(backup)
                fsync(backup.parent)
            exchange(backup, self.target)
        else:
            staged.rename(self.target)
        fsync(self.target.parent)
        return backup

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def discard(self) -> None:
        """Delete the stage and release its lock."""
        self._clear()
        (self.folder / "lock").unlink()  # last: from here on another process may make the stage its own
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        self.close()

    def close(self) -> None:
        """Release the lock and keep the stage."""
        lock, self._lock = self._lock, -1  # first, or a signal just behind os.close would have it closed again
        if lock >= 0:
            os.close(lock)


def _holder(lock: int) -> str:
    """Read who holds a lock; whoever took it a moment ago may not have written its name yet."""
    for _ in range(100):
        if name := os.pread(lock, 200, 0).decode(errors="replace").strip():
            return name
        time.sleep(0.01)
    return "another process"


def _sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with a hash of what it says."""
    return state | {SEAL: hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()}


def _inode(path: Path) -> int | None:
    """Return the inode behind a name, None where there is none; a link counts as itself."""
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


def swap_back(target: Path) -> Path:
    """Swap a published target and its backup, atomically; return the backup's path, which now holds the newer one."""
    backup = backup_of(target)
    for path in (target, backup):
        if not os.path.lexists(path):
            raise UsageError(f"{path} doesn't exist: there is nothing to roll {target} back to")
    exchange(target, backup)
    return backup
