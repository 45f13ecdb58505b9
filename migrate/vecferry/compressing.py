"""A filter behind a map, or by itself: what an index is made with, and what its queries go through."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from vecferry.batch import id_keys
from vecferry.encoders.contract import is_identity
from vecferry.errors import IncompatibleError, UsageError
from vecferry.holdout import Holdout, holdout_of
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapfile import HOLDOUT
from vecferry.sampling import draw
from vecferry.store import Reader, StoreInfo

FILTER = "filter"
"""Key of what an index records of the filter that its queries need."""
HELD = 2000
"""Rows that are held out of an index to measure a filter that was fitted on no vectors."""


def filter_of(given: LinearMap | str | Path) -> LinearMap:
    """Return a filter, from its folder where that is given; raise IncompatibleError for any other map."""
    f = given if isinstance(given, LinearMap) else LinearMap.load(given)
    if f.card is None or f.card.direction != "filter":
        raise IncompatibleError(
            f"{f.path or 'the map'} is no filter: `vecferry filter` makes one; pass a map with --map"
        )
    return f


def compress(m: LinearMap, f: LinearMap) -> LinearMap:
    """Put a filter behind a map: one matrix where the two fold, both in sequence where a mean is between them.

    The result measures with the map's hold-out, whose true vectors keep all their dimensions, and asks through the
    filter (`LinearMap.ask`). Raises IncompatibleError for a filter of another space, dimension or ranking.
    """
    card, own = _cards(m, f)
    f = _in_space(f, own, card.target.space, f"the map {m.path or ''}".strip())
    assert f.card is not None
    if m.d_out != f.d_in:
        raise IncompatibleError(f"the filter takes vectors of {f.d_in} dimensions, the map leads to {m.d_out}")
    if card.metric != own.metric:
        raise IncompatibleError(
            f"the filter is for a space that ranks by {own.metric}, the map's ranks by {card.metric}"
        )
    try:
        with threadpool_limits(1, "blas"):  # the same bits whatever the number of threads
            both = m.then(f)
    except IncompatibleError:
        both = replace(m, after=f)
    digest = hashlib.sha256(f"{card.sha256} {own.sha256}".encode()).hexdigest()
    joined = replace(
        card,
        target=f.card.target,
        solver=f"{card.solver}, {own.solver}",
        parameters={**card.parameters, "map": card.sha256, FILTER: own.sha256},
        sha256=digest,
    )
    held = m.holdout
    if held is None and m.path is not None and (m.path / HOLDOUT).is_file():
        held = holdout_of(m)
    if held is not None:
        _require_unseen(held, m, f)
    return replace(both, card=joined, holdout=held, path=m.path, ask=f)


def alone(f: LinearMap, source: Reader, seed: int) -> LinearMap:
    """Return a filter as the map of an index into fewer dimensions of its own space.

    Where the filter has no hold-out it was fitted on no vectors, so that any rows of the source can measure it.
    """
    m = unmapped(of_space(f, source.info))
    if f.holdout is None and (f.path is None or not (f.path / HOLDOUT).is_file()) and f.d_in == source.info.dim:
        drawn, _ = draw(source, HELD, np.random.default_rng(seed))
        m = replace(m, holdout=Holdout(drawn.ids, drawn.vectors, drawn.vectors))
    return m


def unmapped(f: LinearMap) -> LinearMap:
    """Return a filter as a map of documents that is asked through itself."""
    assert f.card is not None
    return replace(f, card=replace(f.card, direction="document"), ask=f)


def of_space(f: LinearMap, info: StoreInfo) -> LinearMap:
    """Return a filter with the card for a store's space: one made of a head alone is for all spaces of its model."""
    assert f.card is not None
    return _in_space(f, f.card, info.space, info.uri)


def require_filter(info: StoreInfo, f: LinearMap | None) -> None:
    """Refuse to ask an index otherwise than through the very filter that it was made with."""
    recorded = info.provenance.get(FILTER)
    if recorded is None and f is None:
        return
    if recorded is None:
        raise IncompatibleError(f"{info.uri} was made without a filter: leave out --filter")
    needed = str(dict(recorded).get("sha256", "?")) if isinstance(recorded, dict) else "?"
    if f is None:
        raise IncompatibleError(
            f"{info.uri} holds filtered vectors, and its queries have to be filtered too: pass --filter, the one with "
            f"sha256 {needed[:16]}…"
        )
    given = "" if f.card is None else f.card.sha256
    if given != needed:
        raise IncompatibleError(f"{info.uri} was made with the filter {needed[:16]}…, this one is {given[:16]}…")


def recorded(f: LinearMap, index: StoreInfo) -> LinearMap:
    """Return the filter of an index with the card for the space that its vectors came from."""
    assert f.card is not None
    return _in_space(f, f.card, dict(index.provenance[FILTER]).get("queries"), index.uri)


def provenance(m: LinearMap) -> dict[str, dict[str, object]]:
    """Return what an index records of its filter: whose queries it takes, and which filter they need; or nothing."""
    if m.ask is None or m.ask.card is None:
        return {}
    card = m.ask.card
    return {FILTER: {"sha256": card.sha256, "kind": card.solver, "queries": card.source.space, "dim": m.ask.d_in}}


def _require_unseen(held: Holdout, m: LinearMap, f: LinearMap) -> None:
    """Refuse a filter that was fitted on what measures the map."""
    if f.holdout is None and (f.path is None or not (f.path / HOLDOUT).is_file()):
        return
    seen = int(np.isin(id_keys(held.ids), holdout_of(f).fit_keys).sum())
    if seen:
        raise IncompatibleError(
            f"the filter was fitted on {seen:,} of the {len(held.ids):,} documents that the map holds out, so what is "
            f"measured would flatter: make it with vecferry filter --map {m.path or 'MAP'}"
        )


def _cards(m: LinearMap, f: LinearMap) -> tuple[Card, Card]:
    if m.card is None or f.card is None:
        raise UsageError("map and filter each need a card: give them one with with_card()")
    return m.card, f.card


def _in_space(f: LinearMap, card: Card, space: str | None, where: str) -> LinearMap:
    """Name the spaces that a filter leads from and to, where it is used; refuse one that is of another model."""
    own = card.source.space
    if space is None or space == own:
        return f
    of_model = own is not None and is_identity(space) and space.rpartition("@")[0] == own
    if own is not None and not of_model:
        raise IncompatibleError(
            f"the filter is for the space {own!r}, {where} is in {space!r}: make one for it (vecferry filter --space)"
        )
    name = str(card.target.model).rpartition(" | ")[2]
    return f.with_card(replace(card, source=Side(f.d_in, space), target=Side(f.d_out, f"{space} | {name}")))
