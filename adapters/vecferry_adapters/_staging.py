"""What the file adapters share to lose nothing: a locked, durable stage beside the target, and its publication.

The stage of `DIR/NAME` is the folder `DIR/.NAME.vecferry`, on the same filesystem, so that publishing is a rename.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from vecferry.errors import DataError, UnsupportedError, UsageError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def fsync(path: Path) -> None:
    """Make a file's bytes, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically and durably."""
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    fsync(path.parent)


def exchange(a: Path, b: Path) -> None:
    """Swap two names in one atomic step (renameat2, Linux); raise UnsupportedError where the filesystem can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise UnsupportedError(f"this system has no renameat2, so {b} can't be swapped atomically: publish to a new name")
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS):
            raise UnsupportedError(f"the filesystem of {b} can't swap two names atomically: publish to a new name")
        raise OSError(code, os.strerror(code), str(a), None, str(b))
    fsync(a.parent)
    if b.parent != a.parent:
        fsync(b.parent)


def backup_of(target: Path) -> Path:
    """Return where the old store is kept when a target is overwritten."""
    return target.with_name(target.name + ".bak")


class Stage:
    """Hold the locked stage of a target, with a small JSON state that is replaced atomically.

    Raises UsageError when another process holds it, when it exists without `resume`, when its plan is another, and
    when the target exists without `overwrite` or its backup name is taken.
    """

    def __init__(self, target: Path, plan: str, *, resume: bool, overwrite: bool) -> None:
        self.target = target
        self.plan = plan
        self.overwrite = overwrite
        self.folder = target.with_name(f".{target.name}.vecferry")
        if not target.parent.is_dir():
            raise UsageError(f"{target.parent} is not a folder: make it first")
        fresh = not self.folder.exists()
        self.folder.mkdir(exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._acquire()
        except BaseException:
            self.close()
            raise
        try:
            self.state = self._open(resume)
            self._check_target()
        except BaseException:
            self.discard() if fresh else self.close()
            raise

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "another process"
            raise UsageError(f"{self.target} is being written by {holder}: wait for it, or stop it") from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _open(self, resume: bool) -> dict[str, Any]:
        path = self.folder / "state.json"
        if not path.exists():  # nothing durable was ever staged here
            for leftover in self.folder.iterdir():
                if leftover.name != "lock":
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            write_json(path, {"plan": self.plan})
            fsync(self.folder.parent)
        elif not resume:
            raise UsageError(
                f"an unfinished migration to {self.target} is staged in {self.folder}: continue it with --resume, "
                "or delete that folder to start again"
            )
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is damaged: delete {self.folder} and start again") from error
        if state.get("plan") != self.plan:
            raise UsageError(
                f"the migration staged in {self.folder} was started with another source, map or option: repeat the "
                "first command with --resume, or delete that folder to start again"
            )
        return state

    def _check_target(self) -> None:
        if not os.path.lexists(self.target):
            return
        if not self.overwrite:
            raise UsageError(f"{self.target} exists: choose another name, or --overwrite to swap it and keep a backup")
        backup = backup_of(self.target)
        if os.path.lexists(backup) and not self.state.get("publishing"):
            raise UsageError(f"{backup}, where the old store would be kept, exists: move it away first")

    def save(self, **state: Any) -> None:
        """Replace the state durably; call it after the data that it speaks of were fsynced."""
        self.state = {"plan": self.plan} | state
        write_json(self.folder / "state.json", self.state)

    def publish_file(self, staged: Path) -> Path | None:
        """Move a staged, fsynced file onto the target in one step; return where the old one is kept.

        Called again after a crash between its steps, it finishes them.
        """
        self.save(**{k: v for k, v in self.state.items() if k != "plan"} | {"publishing": True})
        backup = None
        if os.path.lexists(self.target):
            backup = backup_of(self.target)
            if not os.path.lexists(backup):
                backup.hardlink_to(self.target)
                fsync(self.target.parent)
        staged.replace(self.target)
        fsync(self.target.parent)
        return backup

    def publish_folder(self, staged: Path) -> Path | None:
        """Move a staged folder, whose files were fsynced, onto the target; return where the old one is kept.

        The new folder goes to the backup's name and is then swapped with the target, so that at every instant
        both are whole; called again after a crash between the two steps, it finishes them.
        """
        self.save(**{k: v for k, v in self.state.items() if k != "plan"} | {"publishing": True})
        backup = None
        if staged.exists():
            fsync(staged)
        if os.path.lexists(self.target):
            backup = backup_of(self.target)
            if staged.exists():
                staged.rename(backup)
            exchange(backup, self.target)
        else:
            staged.rename(self.target)
        fsync(self.target.parent)
        return backup

    def discard(self) -> None:
        """Delete the stage and release its lock."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the lock and keep the stage."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def swap_back(target: Path) -> Path:
    """Swap a published target and its backup, atomically; return the backup's path, which now holds the newer one."""
    backup = backup_of(target)
    for path in (target, backup):
        if not os.path.lexists(path):
            raise UsageError(f"{path} doesn't exist: there is nothing to roll {target} back to")
    exchange(target, backup)
    return backup
