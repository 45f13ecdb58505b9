"""Refuse what can't work before anything is written: a map for something else, a target in the way, a full disk."""

from __future__ import annotations

import fnmatch
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa

from vecferry.batch import Floats
from vecferry.errors import IncompatibleError, UnsupportedError, UsageError
from vecferry.extrapolation import LEAST
from vecferry.gate import SIZED, WORST, Gate
from vecferry.holdout import Holdout, holdout_of
from vecferry.linear import Card, LinearMap
from vecferry.mapfile import HOLDOUT
from vecferry.pairs import BadRows, naming_ids
from vecferry.plan import Plan, source_files
from vecferry.store import Capabilities, Reader, StoreInfo, Uri, find

MORE = "fit it again with a larger sample (vecferry sample -n), of which a fifth is held out"
PROBED = 200
"""Held-out rows compared with the source to see that it is the store the map was fitted on."""


def card_of(m: LinearMap, direction: str) -> Card:
    """Return a map's card; raise IncompatibleError when there is none or the map goes the other way."""
    if m.card is None:
        raise IncompatibleError("the map has no card: make it with vecferry.fit, or give it one with with_card()")
    if m.card.direction == "filter":
        raise IncompatibleError(
            f"{m.path or 'the map'} is a filter, which carries vectors of one model into fewer dimensions: pass it "
            "with --filter"
        )
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
    distance = np.linalg.norm(here - then, axis=1)
    # codes give back other vectors than those the map was fitted on; they are still nearer to them than to others'
    near = np.linalg.norm(here - np.roll(then, 1, axis=0), axis=1) if info.lossy and len(known) > 1 else 0
    apart = distance > np.maximum(near, 1e-2 * np.linalg.norm(then, axis=1))
    if apart.mean() > 0.5 and len(known) < len(ids) / 2:
        raise IncompatibleError(
            f"{info.uri}: only {len(known)} of {len(ids)} held-out ids of the map are in it, and {int(apart.sum())} of "
            "these have other vectors than when the map was fitted: it has other ids than the store the map was "
            "fitted on"
            + (f", since it only numbers its rows: {naming_ids(info)}" if info.id_type is None else ", or is another")
        )
    if apart.mean() > 0.5:
        raise IncompatibleError(
            f"{info.uri}: {int(apart.sum())} of {len(known)} held-out ids have other vectors than when the map was "
            "fitted: it belongs to another store, or its source and target were swapped"
        )
    if apart.any():
        return (f"{info.uri}: {int(apart.sum())} of {len(known)} held-out ids have changed since the map was fitted",)
    return ()


def check_exact(exact: Reader, m: LinearMap, holdout: Holdout | None) -> None:
    """Refuse exact source vectors that aren't: of another space, lossy themselves, or other than was held out.

    What codes gave back of a document lies nearer to its exact vector than to those of others.
    """
    info, space = exact.info, None if m.card is None else m.card.source.space
    if holdout is None:
        raise UsageError(f"{info.uri}: exact vectors are compared on a hold-out, which the map doesn't have")
    if info.dim != m.d_in:
        raise IncompatibleError(f"{info.uri} holds vectors of {info.dim} dimensions, the map takes {m.d_in}")
    if None not in (info.space, space) and info.space != space:
        raise IncompatibleError(f"{info.uri} is in the space {info.space!r}, the map was fitted on {space!r}")
    if info.lossy:
        raise UsageError(f"{info.uri} holds quantised codes ({info.index or info.dtype}) itself: give exact vectors")
    try:
        ids = holdout.ids.cast(info.id_type or pa.int64())
    except pa.ArrowInvalid:
        raise IncompatibleError(f"{info.uri} has ids of type {info.id_type}, held out are {holdout.ids.type}") from None
    there, here = BadRows().take(exact, ids).vectors[:PROBED], holdout.source[:PROBED]
    if len(here) < 2:
        return
    own, other = (np.linalg.norm(here - x, axis=1).mean() for x in (there, np.roll(there, 1, axis=0)))
    if own >= 0.9 * other:
        raise IncompatibleError(
            f"{info.uri} holds other vectors than the map was fitted on: {len(here)} held-out ids lie no nearer to "
            "their own rows than to those of others"
        )


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
    if card.direction == "filter" or m.d_in != m.d_out:
        return
    if m.holdout is None and (m.path is None or not (m.path / HOLDOUT).is_file()):
        return
    held = holdout_of(m)
    to_old = card.direction == "query"
    wrong_documents, wrong_queries = (held.source, held.source_queries) if to_old else (held.target, held.queries)
    for ids, wrong in ((held.ids, wrong_documents), (held.query_ids, wrong_queries)):
        same, known = _alike(vectors, ids, wrong)
        if same > known / 2:
            ways = {"document": "old vectors into the new space", "query": "new queries into the old space"}
            raise IncompatibleError(
                f"{info.uri}: {same} of {known} held-out ids have vectors of the space where the map "
                f"leads: it carries {ways[card.direction]}, fit one with the other --direction"
            )


def check_new(vectors: Reader, m: LinearMap) -> None:
    """Refuse the old model's documents or queries where the new one's are compared, by rows that were held out."""
    if m.d_in != m.d_asked or not m.changes_model:
        return
    if m.holdout is None and (m.path is None or not (m.path / HOLDOUT).is_file()):
        return
    held = holdout_of(m)
    for ids, old in ((held.ids, held.source), (held.query_ids, held.source_queries)):
        same, known = _alike(vectors, ids, old)
        if same > known / 2:
            raise IncompatibleError(
                f"{vectors.info.uri}: {same} of {known} held-out ids have the old model's vectors: "
                "give those of the new model"
            )


def _alike(vectors: Reader, ids: pa.Array, held: Floats | None) -> tuple[int, int]:
    """Count the held-out ids that a store gives these vectors, rounding aside, and those that it has at all."""
    if held is None:
        return 0, 0
    try:
        probes = ids.slice(0, PROBED).cast(vectors.info.id_type or pa.int64())
    except pa.ArrowInvalid:
        return 0, 0
    known = np.flatnonzero(find(vectors, probes) >= 0)
    if not len(known):
        return 0, 0
    here, there = vectors.take(probes.take(pa.array(known))).vectors, held[:PROBED][known]
    with np.errstate(over="ignore", invalid="ignore"):  # what can't be used is refused by whoever reads it for use
        same = np.linalg.norm(here - there, axis=1) <= 1e-2 * np.linalg.norm(there, axis=1)
    return int(same.sum()), len(known)


def check_truth(index: Reader, truth: Reader, m: LinearMap | None) -> None:
    """Refuse as truth what the new model didn't encode: the index itself, translated vectors, the old model's."""
    here, there = (Path(Uri.parse(store.info.uri).path) for store in (index, truth))
    if index is truth or (here.exists() and there.exists() and here.samefile(there) and _same_head(index, truth)):
        raise IncompatibleError(
            f"{truth.info.uri} is the index itself, which agrees with itself whatever it holds: give a store of the "
            "documents' vectors as the new model encodes them"
        )
    if (used := truth.info.provenance.get("map")) is not None:
        raise IncompatibleError(
            f"{truth.info.uri} holds vectors that the map {str(used)[:16]}… translated, which is no truth to compare "
            "with: give a store of the documents' vectors as the new model encodes them"
        )
    if m is not None:
        check_new(truth, m)


def _same_head(one: Reader, other: Reader) -> bool:
    """Say whether two addresses of one file lead to the same vectors: a file may hold two columns of them."""
    heads = [next(iter(store.read(PROBED)), None) for store in (one, other)]
    return heads[0] is None or heads[1] is None or np.array_equal(heads[0].vectors, heads[1].vectors)


def check_gate(gate: Gate | None, holdout: Holdout | None, count: int | None) -> None:
    """Refuse conditions that the hold-out can't decide, whatever the index of `count` documents will be like."""
    if gate is None or holdout is None:
        return
    held_out = len(holdout.ids)
    for condition in gate.conditions:
        least = LEAST * max(condition.k, 10)
        elsewhere = (condition.size or count) not in (None, held_out)
        if condition.metric in SIZED and elsewhere and held_out < least:
            raise UsageError(
                f"{condition} can't be decided for {condition.size or count:,} documents: that needs at least "
                f"{least:,} held-out ones, and the map's hold-out has {held_out:,}; {MORE}"
            )
        searched = (count or held_out) if condition.metric == "index-overlap" else held_out
        searched = min(searched, condition.size or searched)
        if searched < condition.least:
            raise UsageError(
                f"{condition} can't be decided: chance alone finds {condition.k / searched:.3f} among {searched:,} "
                f"documents, where it may find a tenth of the threshold; {condition.least:,} are needed: {MORE}"
            )
    for metric in sorted(gate.metrics):
        if holdout.qrels is None and metric.endswith(("recall", "ndcg")):
            raise UsageError(f"{metric} can't be gated: the map's hold-out has no labels; fit it again with --qrels")
        if holdout.queries is None and metric.removeprefix(WORST) == "agreement":
            raise UsageError(
                f"{metric} can't be gated: the map's hold-out has no queries; fit it again with --queries, or gate "
                "doc-agreement, which flatters"
            )


def check_apart(source: StoreInfo, plan: Plan, m: LinearMap, payload: Path | None) -> None:
    """Refuse to write over what is read, into it or around it; a payload file must be new and stand by itself."""
    target = Path(plan.destination.path)
    read = source_files(source) + ([m.path] if m.path is not None else [])
    place = target.resolve()
    for path in read:
        if (target.exists() and path.samefile(target)) or place == path.resolve():
            raise UsageError(
                f"{target} is the source itself, or the map: neither is ever overwritten, name a new target"
            )
        if place in path.resolve().parents:
            raise UsageError(f"{target} is a folder around {path}, which is read: name a new target")
    pattern = Path(Uri.parse(source.uri).path).resolve()
    inside = pattern.is_dir() and pattern in place.parents
    if inside or (not pattern.exists() and fnmatch.fnmatch(str(place), str(pattern))):
        raise UsageError(f"{target} lies inside the source {source.uri}: name a target outside it")
    if payload is None:
        return
    if payload.exists() or payload.resolve() == place:
        raise UsageError(f"{payload} exists or is the target: choose another name for the payload")
    if not payload.parent.is_dir():
        raise UsageError(f"{payload}: there is no folder {payload.parent}, make it first")
    if not os.access(payload.parent, os.W_OK):
        raise UsageError(f"{payload}: the folder {payload.parent} can't be written to")


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
