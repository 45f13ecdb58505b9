"""What a FAISS file has no place for, in `NAME.vecferry.json` beside it: the space, the metric, the id type, the past.

It holds an entry for each file that it may belong to, by the file's fingerprint. So it can be written before the file
is published, and stays right when the file is swapped with its backup: at every instant whatever stands under the
name finds its own entry.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from vecferry.errors import DataError
from vecferry.jsonfile import read_json, typed
from vecferry.store import Provenance
from vecferry_adapters._durable import write_json
from vecferry_adapters._fingerprint import fingerprint
from vecferry_adapters._staging import backup_of

log = logging.getLogger("vecferry")

SUFFIX = ".vecferry.json"


class Entry(TypedDict, total=False):
    """Name what is taken from the entry of a file, with its types."""

    space: str | None
    metric: Literal["ip", "l2", "cosine"]
    id_type: Literal["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"] | None
    provenance: Provenance


class _Sidecar(TypedDict):
    format: Literal[1]
    files: dict[str, Entry]


def _sidecar_of(path: Path) -> Path:
    """Return the sidecar's path; a backup shares that of the file it is the backup of."""
    return path.with_name(path.name.removesuffix(".bak") + SUFFIX)


def _entries(sidecar: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        held: _Sidecar = typed(_Sidecar, read_json(sidecar), sidecar.name)
        return held["files"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, DataError):
        pass
    log.warning("%s is damaged or of another version, so what it says is ignored", sidecar)
    return {}


def read_entry(path: Path) -> Mapping[str, Any]:
    """Return what was recorded of a file, nothing where nobody did or where it was replaced since."""
    sidecar = _sidecar_of(path)
    entries = _entries(sidecar)
    if not entries:
        return {}
    entry = entries.get(fingerprint(path))
    if entry is None:
        log.warning("%s speaks of another file than %s, so what it says is ignored", sidecar, path)
    return entry or {}


def add_entry(target: Path, staged: Path, entry: Mapping[str, Any]) -> None:
    """Record what a file that is about to become `target` is, beside what is recorded of the present one."""
    sidecar = _sidecar_of(target)
    entries = dict(_entries(sidecar)) | {fingerprint(staged): dict(entry)}
    write_json(sidecar, {"format": 1, "files": entries}, stage=staged.parent)


def trim_entries(target: Path, stage: Path) -> None:
    """Forget files that are neither the target nor its backup; `stage` is where the sidecar is written."""
    sidecar = _sidecar_of(target)
    present = {fingerprint(path) for path in (target, backup_of(target)) if path.is_file()}
    entries = {k: v for k, v in _entries(sidecar).items() if k in present}
    write_json(sidecar, {"format": 1, "files": entries}, stage=stage)
