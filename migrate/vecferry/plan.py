"""Decide what a migration will do, and refuse what can't work, before anything is written."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vecferry.errors import IncompatibleError, UnsupportedError, UsageError
from vecferry.holdout import Holdout, holdout_of
from vecferry.linear import Card, LinearMap
from vecferry.mapfile import HOLDOUT
from vecferry.store import Capabilities, Reader, StoreInfo, Uri, find, resolve

log = logging.getLogger("vecferry")

PROBED = 200
"""Held-out rows compared with the source to see that it is the store the map was fitted on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold what a migration is to do: the target's address and description, and an identity of the whole work."""

    destination: Uri
    target: StoreInfo
    identity: str
    nbytes: int
    warnings: tuple[str, ...] = ()


def card_of(m: LinearMap, direction: str) -> Card:
    """Return a map's card; raise IncompatibleError when there is none or the map goes the other way."""
    if m.card is None:
        raise IncompatibleError("the map has no card: make it with vecferry.fit, or give it one with with_card()")
    if m.card.direction != direction:
        ways = {"document": "old documents into the new space", "query": "new queries into the old space"}
        raise IncompatibleError(
            f"the map carries {ways[m.card.direction]}; this needs one that carries {ways[direction]}: "
            f"fit it with --direction {direction}"
        )
    return m.card


def check_source(
    source: Reader, m: LinearMap, card: Card, holdout: Holdout | None, *, allow_lossy: bool
) -> tuple[str, ...]:
    """Refuse a source that the map isn't for; return warnings about one that may not be.

    Names and dimensions are no proof (two models may share both), so the rows that were held out of the fit are
    looked up in the source, and must hold the vectors that they held then.
    """
    info = source.info
    if info.dim != m.d_in:
        raise IncompatibleError(
            f"{info.uri} holds vectors of {info.dim} dimensions, the map takes {m.d_in}: use a map fitted on it"
        )
    if info.space is not None and info.space == card.space:
        raise IncompatibleError(
            f"{info.uri} is in the space {card.space!r} already, where the map leads: nothing to migrate"
        )
    if info.space is not None and card.source.space is not None and info.space != card.source.space:
        raise IncompatibleError(
            f"{info.uri} is in the space {info.space!r}, the map was fitted on {card.source.space!r}"
        )
    if info.lossy and not allow_lossy:
        raise UsageError(
            f"{info.uri} holds quantised codes ({info.index or info.dtype}), so what is translated is not what was "
            "encoded: use the exact vectors if you have them, or accept the loss with --allow-lossy"
        )
    if holdout is None or not len(holdout.ids):
        return ()
    try:
        ids = holdout.ids.slice(0, PROBED).cast(info.id_type or pa.int64())
    except pa.ArrowInvalid:
        raise IncompatibleError(
            f"{info.uri} has ids of type {info.id_type or 'int64'}, the map was fitted on {holdout.ids.type}"
        ) from None
    known = np.flatnonzero(find(source, ids) >= 0)
    if not len(known):
        return (
            f"{info.uri}: none of {len(ids)} held-out ids of the map is in it, so nothing shows that the map is for it",
        )
    here = source.take(ids.take(pa.array(known))).vectors
    then = holdout.source[:PROBED][known]
    apart = np.linalg.norm(here - then, axis=1) > 1e-2 * np.linalg.norm(then, axis=1)
    if apart.mean() > 0.5:
        raise IncompatibleError(
            f"{info.uri}: {int(apart.sum())} of {len(known)} held-out ids have other vectors than when the map was "
            "fitted: it belongs to another store, or its source and target were swapped"
        )
    if apart.any():
        return (f"{info.uri}: {int(apart.sum())} of {len(known)} held-out ids have changed since the map was fitted",)
    return ()


def check_taken(vectors: Reader, m: LinearMap, card: Card) -> None:
    """Refuse documents or queries in the space where the map leads: by its name, or by rows that were held out.

    Two models may share dimensions and have no names, but a row that was held out is known by the vectors that both
    gave it.
    """
    info = vectors.info
    if info.dim != m.d_in:
        raise IncompatibleError(f"{info.uri} holds vectors of {info.dim} dimensions, the map takes {m.d_in}")
    if info.space is not None and info.space == card.space:
        raise IncompatibleError(f"{info.uri} is in the space {card.space!r} already, where the map leads")
    if info.space is not None and card.source.space is not None and info.space != card.source.space:
        raise IncompatibleError(f"{info.uri} is in the space {info.space!r}, the map takes {card.source.space!r}")
    if m.d_in != m.d_out or (m.holdout is None and (m.path is None or not (m.path / HOLDOUT).is_file())):
        return
    held = holdout_of(m)
    to_old = card.direction == "query"
    wrong_documents, wrong_queries = (held.source, held.source_queries) if to_old else (held.target, held.queries)
    for ids, wrong in ((held.ids, wrong_documents), (held.query_ids, wrong_queries)):
        if wrong is None:
            continue
        try:
            probes = ids.slice(0, PROBED).cast(info.id_type or pa.int64())
        except pa.ArrowInvalid:
            continue
        known = np.flatnonzero(find(vectors, probes) >= 0)
        if not len(known):
            continue
        here, there = vectors.take(probes.take(pa.array(known))).vectors, wrong[:PROBED][known]
        same = np.linalg.norm(here - there, axis=1) <= 1e-2 * np.linalg.norm(there, axis=1)
        if same.mean() > 0.5:
            ways = {"document": "old vectors into the new space", "query": "new queries into the old space"}
            raise IncompatibleError(
                f"{info.uri}: {int(same.sum())} of {len(known)} held-out ids have vectors of the space where the map "
                f"leads: it carries {ways[card.direction]}, fit one with the other --direction"
            )


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
    identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    provenance: dict[str, Any] = {
        "plan": identity,
        "map": card.sha256,
        "source_model": card.source.model,
        "target_model": card.target.model,
        "source_metric": info.metric,
    }
    rows = info.count or 0
    width = 2 if dtype == "float16" else 4
    vectors = rows * (m.d_out * width + (0 if target.id_type is None else 8))
    others = max(
        0, info.nbytes - rows * info.dim * np.dtype(info.dtype if info.dtype.startswith("float") else "uint8").itemsize
    )
    # a structure that FAISS builds in memory is written from a stage of raw vectors that stands beside it
    staged = vectors if is_built_in_memory(target) else 0
    nbytes = vectors + staged + (others if target.payload is not None else 0)
    return Plan(address, replace(target, provenance=provenance), identity, nbytes)


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


def check_apart(source: StoreInfo, destination: Uri) -> None:
    """Refuse to write a store over the one that is read, or inside it."""
    try:
        origin = Path(Uri.parse(source.uri).path)
    except UsageError:
        return
    target = Path(destination.path)
    if not origin.exists():
        return
    if (target.exists() and origin.samefile(target)) or target.resolve() == origin.resolve():
        raise UsageError(
            f"{destination.path} is the source itself: a live index is never overwritten, name a new target"
        )
    if origin.is_dir() and origin.resolve() in target.resolve().parents:
        raise UsageError(f"{destination.path} lies inside the source {origin}: name a target outside it")


def finished(plan: Plan) -> StoreInfo | None:
    """Return the description of the target if this very migration has published it already."""
    if not os.path.lexists(plan.destination.path):
        return None
    try:
        adapter, address = resolve(plan.destination)
        with adapter.open_reader(replace(address, options={})) as reader:
            info = reader.info
    except Exception as error:
        log.debug("%s is not a store of this kind: %s", plan.destination, error)
        return None
    return info if info.provenance.get("plan") == plan.identity else None


def free_bytes(destination: Uri) -> int | None:
    """Return the free space where a target is to be, None where that is no folder."""
    parent = Path(destination.path).resolve().parent
    return shutil.disk_usage(parent).free if parent.is_dir() else None


def check_space(plan: Plan, rows_staged: int = 0) -> None:
    """Raise UsageError when the target and its stage don't fit on the disk beside the rows staged already."""
    free = free_bytes(plan.destination)
    width = plan.target.dim * (2 if plan.target.dtype == "float16" else 4)
    needed = plan.nbytes - rows_staged * width
    if free is not None and needed > free:
        raise UsageError(
            f"{plan.destination.path} needs about {needed:,} bytes, its stage included, and {free:,} are free: "
            "make room, or choose a smaller --dtype or --index"
        )


def check_payload(source: StoreInfo, kind: str, capabilities: Capabilities, payload: str) -> None:
    """Refuse to lose payload silently: the target must hold it, or the user say what becomes of it."""
    if source.payload is not None and len(source.payload) and payload == "keep" and not capabilities.payload:
        names = ", ".join(source.payload.names)
        raise UnsupportedError(
            f"a {kind} store can't hold the payload columns {names}: leave them behind with --drop-payload, "
            "or write them to a file of their own with --payload OUT.parquet"
        )
