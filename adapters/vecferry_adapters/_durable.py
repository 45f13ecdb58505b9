"""Steps on a filesystem that are whole or not at all, and last when the power fails."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from pathlib import Path
from typing import Any

from vecferry.errors import UnsupportedError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def fsync(path: Path) -> None:
    """Make a file's bytes, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, *, stage: Path | None = None) -> None:
    """Replace a JSON file atomically and durably; until it is whole, it stands in a stage, or beside its name."""
    fresh = (stage or path.parent) / (path.name + ".tmp")
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
        raise UnsupportedError(
            f"this system has no renameat2, so {b} can't be swapped atomically: publish to a new name"
        )
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS):
            raise UnsupportedError(f"the filesystem of {b} can't swap two names atomically: publish to a new name")
        raise OSError(code, os.strerror(code), str(a), None, str(b))
    fsync(a.parent)
    if b.parent != a.parent:
        fsync(b.parent)
