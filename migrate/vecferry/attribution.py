"""What is lost to what: differences of agreement from stage to stage, from re-embedding to the index as searched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from vecferry.batch import Floats
from vecferry.bench import Bench
from vecferry.encoded import TrueRows
from vecferry.errors import UnsupportedError
from vecferry.evaluate import exactly, present, stored_way
from vecferry.fullsize import search
from vecferry.holdout import Holdout
from vecferry.linear import LinearMap
from vecferry.measured import AS_INDEXED, Evaluation, Loss
from vecferry.recall import Metric, Values, without
from vecferry.sizes import Find
from vecferry.store import Reader

MAP = "the map"
FILTER, MAP_AND_FILTER = "the filter", "the map and the filter"
MAP_AND_CODES = "the map and the source's codes"
SOURCE_CODES = "the source's codes"
MAP_AND_ALL_CODES = "the map and the codes"
VECTORS = "the vectors that the index holds"
MIXING = "true vectors among translated ones"
TARGET_CODES = "the target's codes"
ANN = "ANN search"
ANN_FULL_SIZE = "ANN search at full size"

SAME = 1e-5
"""Relative difference up to which vectors are the same, rounding aside; codes lie farther from what they stand for."""
UNSEEN = (
    "unknown: the map's hold-out has the exact vectors, not what the source's codes gave back, so what those lost is "
    "counted with the target's codes; `vecferry migrate --source-exact` measures it"
)


def attribute(
    holdout: Holdout,
    m: LinearMap,
    staged: Reader,
    evaluation: Evaluation,
    *,
    source: Reader | None = None,
    exact: Reader | None = None,
    lossy: bool | None = None,
    true: TrueRows | None = None,
    seed: int = 0,
) -> tuple[Loss, ...]:
    """Return what each step loses of agreement@k, as paired differences over the same held-out queries.

    The steps: re-embedding, the map applied to `exact` source vectors, to those of `source` as it stores them (None
    for the hold-out's), `true` vectors in the place of some, the vectors of `staged` searched exactly, its own search.
    Without `exact` what `lossy` codes of the source lost is unknown (None for lossy: so is whether there are any), and
    counted with the map; so it is where neither `source` nor the hold-out has what its codes gave back, and then it
    is counted with the target's codes. Without queries documents stand in, and it is doc-agreement. Last comes index
    overlap, which is measured at full size.
    """
    metric: Metric = m.card.metric if m.card is not None else "cosine"
    k = evaluation.k
    held, absent = present(holdout, staged, [])
    bench = Bench.of(held, metric, (k,), seed)
    name = f"agreement@{k}" if bench.asked is not None else f"doc-agreement@{k}"
    map_name = MAP if m.ask is None else MAP_AND_FILTER if m.changes_model else FILTER
    if absent is not None or bench.by_documents is None:
        return (Loss(map_name, name, reason=absent or f"k = {k} needs more than {k} documents"),)

    def agreement(way: Find) -> Values:
        if bench.asked is not None:
            return bench.asked.agreement(way(m.asking(bench.asked.queries), k), k)
        assert bench.by_documents is not None
        own = bench.stand_ins
        return bench.by_documents.agreement(without(way(m.asking(held.target[own]), k + 1), own), k)

    def of(documents: Floats) -> Values:
        return agreement(exactly(documents, metric))

    translated = m.apply(held.source if source is None else source.take(held.ids).vectors)
    as_stored = of(translated)
    before = np.ones_like(as_stored)
    losses: list[Loss] = []
    if exact is not None:
        vectors = exact.take(held.ids.cast(exact.info.id_type or held.ids.type)).vectors
        from_exact = of(m.apply(vectors))
        losses.append(Loss.of(map_name, name, before - from_exact, seed=seed))
        if (
            source is None
            and lossy is not False
            and np.allclose(vectors, held.source, rtol=0, atol=SAME * np.abs(vectors).max())
        ):
            losses.append(Loss(SOURCE_CODES, name, reason=UNSEEN))
        else:
            losses.append(Loss.of(SOURCE_CODES, name, from_exact - as_stored, seed=seed))
    elif lossy is False:
        losses.append(Loss.of(map_name, name, before - as_stored, seed=seed))
        losses.append(Loss(SOURCE_CODES, name, 0.0, 0.0, 0.0))
    else:
        with_codes = MAP_AND_CODES if m.ask is None else f"{map_name} and the source's codes"
        losses.append(Loss.of(with_codes, name, before - as_stored, seed=seed))
        whether = "" if lossy else "whether the source holds codes isn't recorded; "
        losses.append(Loss(SOURCE_CODES, name, reason=f"unknown: {whether}pass its exact vectors by --source-exact"))
    if true is not None:
        mixed = translated.copy()
        true.put(held.ids, mixed)
        with_true = of(mixed)
        losses.append(Loss.of(MIXING, name, as_stored - with_true, seed=seed))
        as_stored = with_true
    losses += _of_target(staged, held, as_stored, agreement, metric, name, seed)
    return (*losses, *_of_overlap(evaluation))


def attribute_at_full_size(
    index: Reader,
    evaluation: Evaluation,
    stored: Values,
    found: Values,
    *,
    mapped: bool,
    searched: bool,
    asked: bool,
    seed: int,
) -> tuple[Loss, ...]:
    """Return what is lost of agreement@k among all documents, as far as the index and true vectors can tell.

    stored, found  agreement `[q]` of exact search over the vectors that the index gives back, and of its own search
    mapped         whether a map is given; an index may say itself that one made it
    searched       whether it has an index of its own
    asked          whether there are queries; otherwise documents stood in

    The source isn't here: what can't be told apart without it is one loss, and says how a hold-out tells it apart.
    """
    info, k = index.info, evaluation.k
    name = f"agreement@{k}" if asked else f"doc-agreement@{k}"
    lossy, mapped = info.provenance.get("source_lossy"), mapped or "map" in info.provenance
    apart = "unknown at full size, where it isn't told apart: check with --map and without --truth"
    losses: list[Loss] = []

    def add(cause: str, value: Values) -> None:
        losses.append(Loss.of(cause, name, value, seed=seed))

    if not mapped:
        add(VECTORS, 1 - stored)
    elif info.lossy:
        add(MAP_AND_ALL_CODES, 1 - stored)
    else:
        add(MAP if lossy is False else MAP_AND_CODES, 1 - stored)
    if mapped:
        exact = Loss(SOURCE_CODES, name, 0.0, 0.0, 0.0)
        losses.append(exact if lossy is False else Loss(SOURCE_CODES, name, reason=f"{apart}, with --source-exact"))
        if "encoded" in info.provenance:
            losses.append(Loss(MIXING, name, reason=apart))
    losses.append(Loss(TARGET_CODES, name, reason=apart) if info.lossy else Loss(TARGET_CODES, name, 0.0, 0.0, 0.0))
    if searched:
        add(ANN, stored - found)
    else:
        losses.append(Loss(ANN, name, reason="the store has no index of its own"))
    return (*losses, *_of_overlap(evaluation))


def _of_overlap(evaluation: Evaluation) -> Iterator[Loss]:
    """Yield what ANN search misses among all documents of what exact search over the same vectors finds."""
    overlap = evaluation.cell(AS_INDEXED, "index-overlap", evaluation.k)
    if overlap is not None and overlap.value is not None:
        assert overlap.low is not None
        assert overlap.high is not None
        yield Loss(ANN_FULL_SIZE, overlap.name, 1 - overlap.value, 1 - overlap.high, 1 - overlap.low)
    elif overlap is not None:
        yield Loss(ANN_FULL_SIZE, overlap.name, reason=overlap.reason)


def _of_target(
    staged: Reader,
    held: Holdout,
    before: Values,
    agreement: Callable[[Find], Values],
    metric: Metric,
    name: str,
    seed: int,
) -> Iterator[Loss]:
    """Yield what the target's codes lose, and its search among the held-out documents."""
    way = stored_way(staged, held.ids, metric)
    if isinstance(way, str):
        yield from (Loss(cause, name, reason=way) for cause in (TARGET_CODES, ANN))
        return
    stored = agreement(way)
    yield Loss.of(TARGET_CODES, name, before - stored, seed=seed)
    try:
        searched = agreement(lambda queries, k: search(staged, queries, k, metric, held.ids))
    except UnsupportedError:
        yield Loss(ANN, name, reason="the store has no index of its own, or none that can be searched among some rows")
        return
    yield Loss.of(ANN, name, stored - searched, seed=seed)
