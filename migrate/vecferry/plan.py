"""Decide what a migration will do, and tell whether it was done before."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vecferry.compressing import provenance as filter_provenance
from vecferry.encoded import TrueRows
from vecferry.errors import UsageError
from vecferry.linear import Card, LinearMap
from vecferry.store import Reader, StoreInfo, Uri, resolve

log = logging.getLogger("vecferry")


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold what a migration is to do: the target's address and description, and an identity of the whole work."""

    destination: Uri
    target: StoreInfo
    identity: str
    nbytes: int
    warnings: tuple[str, ...] = ()


def make_plan(
    source: Reader,
    destination: str | Path | Uri,
    m: LinearMap,
    card: Card,
    *,
    index: str | None = None,
    dtype: str = "float32",
    bad_rows: str = "fail",
    duplicates: str = "fail",
    payload: str = "keep",
    true: TrueRows | None = None,
    seed: int = 0,
) -> Plan:
    """Describe the target and identify the work.

    `index` None means the source's own structure. The identity is a hash of everything that the target's bytes
    depend on: the source's content, the map, and the options.
    """
    info = source.info
    address = destination if isinstance(destination, Uri) else Uri.parse(str(destination))
    address = address.as_new(info.kind)
    kind = address.kind
    same_kind = kind == info.kind
    structure = index if index is not None else (info.index if same_kind else "")
    keeps_numbers = info.id_type is None and bad_rows == "fail" and duplicates == "fail"
    target = StoreInfo(
        kind=kind,
        uri=str(address),
        count=info.count,
        dim=m.d_out,
        metric=card.metric,
        # rows numbered by place would change their numbers when one before them is left out
        id_type=None if keeps_numbers else (info.id_type or pa.int64()),
        payload=info.payload if payload == "keep" else None,
        index=structure,
        parameters=info.parameters if same_kind and structure == info.index else {},
        space=card.space,
        columns=info.columns,
        dtype=dtype,
    )
    facts: dict[str, Any] = {
        "source": {"kind": info.kind, "dim": info.dim, "count": info.count, "nbytes": info.nbytes, "index": info.index},
        "head": _head(source),
        "map": card.sha256,
        "target": [kind, dict(address.options), structure, dtype, str(target.id_type), card.space, card.metric],
        "rules": [bad_rows, duplicates, payload, seed],
    }
    if true is not None:
        facts["encoded"] = true.identity()
    identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    provenance: dict[str, Any] = {
        "plan": identity,
        "map": card.sha256,
        "source_model": card.source.model,
        "target_model": card.target.model,
        "source_metric": info.metric,
        "source_lossy": info.lossy,
    }
    provenance |= filter_provenance(m)
    if true is not None:
        provenance["encoded"] = dict(true.held_in.provenance) | {"rows": len(true)}
    rows = info.count or 0
    width = 2 if dtype == "float16" else 4
    vectors = rows * (m.d_out * width + (0 if target.id_type is None else 8))
    others = max(
        0, info.nbytes - rows * info.dim * np.dtype(info.dtype if info.dtype.startswith("float") else "uint8").itemsize
    )
    # a structure that FAISS builds in memory is written from a stage of raw vectors that stands beside it
    staged = vectors if is_built_in_memory(target) else 0
    nbytes = vectors + staged + _links(target) + (others if target.payload is not None else 0)
    return Plan(address, replace(target, provenance=provenance), identity, nbytes)


def _links(target: StoreInfo) -> int:
    """Return the bytes that a graph's links take: 2 M of 4 bytes for each row on the lowest level, M above it."""
    graph = re.search(r"HNSW(\d*)", target.index)
    return 0 if graph is None else (target.count or 0) * 4 * (2 * int(graph[1] or 32) + 8)


def is_built_in_memory(target: StoreInfo) -> bool:
    """Say whether FAISS has to hold the target in memory to build it; flat ones are streamed to disk."""
    return target.kind == "faiss" and target.index not in ("", "Flat", "IDMap,Flat", "IDMap2,Flat")


def _head(source: Reader) -> str:
    """Hash the first rows of a store: a cheap part of its identity."""
    digest = hashlib.sha256()
    for batch in source.read(64):
        digest.update(batch.vectors.tobytes())
        digest.update(repr(batch.ids.to_pylist()).encode())
        break
    return digest.hexdigest()


def source_files(source: StoreInfo) -> list[Path]:
    """Return the files that a store consists of; none for a store that is no file."""
    try:
        address = Uri.parse(source.uri)
    except UsageError:
        return []
    root = Path(address.path)
    if root.is_dir():
        files = sorted(p for p in root.rglob("*") if p.is_file())
    elif root.exists():
        files = [root]
    else:
        files = [Path(p) for p in sorted(glob(address.path))]  # noqa: PTH207 - an absolute pattern
    return files + [Path(v) for v in address.options.values() if Path(v).is_file()]


def stamp_of(source: StoreInfo) -> str:
    """Hash names, sizes and times of a store's files: it changes when somebody writes to them, or replaces them.

    The time of the last change of status is among them, since tools that copy set the other one back.
    """
    digest = hashlib.sha256()
    for path in source_files(source):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\0".encode())
    return digest.hexdigest()


def finished(plan: Plan, source: StoreInfo) -> StoreInfo | None:
    """Return the description of the target if this very migration has published it, and the source is as it was."""
    if not os.path.lexists(plan.destination.path):
        return None
    try:
        adapter, address = resolve(plan.destination)
        with adapter.open_reader(replace(address, options={})) as reader:
            info = reader.info
    except Exception as error:
        log.debug("%s is not a store of this kind: %s", plan.destination, error)
        return None
    published = Path(plan.destination.path).stat().st_ctime_ns
    changed = any(path.stat().st_ctime_ns > published for path in source_files(source))
    return info if info.provenance.get("plan") == plan.identity and not changed else None
