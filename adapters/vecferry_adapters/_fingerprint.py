"""Tell whether a file is the one that something was recorded of, without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

ENDS = 1 << 16
BLOCKS, BLOCK = 64, 4096


def fingerprint(path: Path) -> str:
    """Hash a file's size, its two ends, and blocks at even distances between them; cheap however large it is."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(ENDS))
        for i in range(1, BLOCKS):
            file.seek(size * i // BLOCKS)
            digest.update(file.read(BLOCK))
        file.seek(max(0, size - ENDS))
        digest.update(file.read(ENDS))
    return digest.hexdigest()
