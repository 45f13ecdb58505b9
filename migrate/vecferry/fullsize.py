"""Numbers at full size: a store's own search judged by one pass over vectors that don't fit in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from vecferry.batch import Floats
from vecferry.errors import UnsupportedError
from vecferry.linear import normalize
from vecferry.measured import Curve, Point
from vecferry.recall import Metric, Places, TopK, Values, interval, require_k, scores_at, share_right, topk
from vecferry.store import Reader, StoreInfo, Tunable

BATCH = 8192
TRIALS = 6
"""Settings of a search parameter that are tried, each twice the one before, the one in use first."""
ENOUGH = 0.99
"""Index overlap from which on there is nothing to buy back."""


def search(reader: Reader, queries: Floats, k: int, metric: Metric, among: pa.Array | None = None) -> Places:
    """Search a store through its own index, which holds unit vectors where the metric is cosine.

    Raises UnsupportedError for a store without an index, or whose index can't search `among` some ids.
    """
    places, _ = reader.search(as_asked(queries, metric), k, among)
    return places.astype(np.int64)


def as_asked(queries: Floats, metric: Metric) -> Floats:
    """Return queries as a store's own search takes them: of unit length where the metric is cosine."""
    asked = np.array(queries, np.float32)
    if metric == "cosine":
        normalize(asked)
    return asked


def own_metric(store: StoreInfo, metric: Metric) -> Metric:
    """Return how a store's own search ranks the vectors that it gives back.

    It holds unit vectors where the metric is cosine, but what codes give back isn't of unit length any more, and is
    ranked by products, or by distances in an L2 index.
    """
    if metric != "cosine" or not store.lossy:
        return metric
    return "l2" if "l2" in (store.metric, store.provenance.get("source_metric")) else "ip"


def search_or_scan(reader: Reader, queries: Floats, k: int, metric: Metric) -> tuple[Places, bool]:
    """Return the places of a store's own search and True; of an exact scan and False where it has no index."""
    try:
        return search(reader, queries, k, metric), True
    except UnsupportedError:
        return topk(queries, (batch.vectors for batch in reader.read(BATCH)), k, metric)[0], False


def ids_at(reader: Reader, places: Places) -> pa.Array:
    """Return the ids at these places of the reading order `[m]`, in ascending order of distinct places."""
    pieces, seen = [], 0
    for piece in reader.ids(1 << 16):
        inside = places[np.searchsorted(places, seen) : np.searchsorted(places, seen + len(piece))]
        pieces.append(piece.take(pa.array(inside - seen)))
        seen += len(piece)
    return pa.concat_arrays(pieces)


def judge(blocks: Iterable[Floats], queries: Floats, found: Places, k: int, metric: Metric) -> tuple[TopK, Values]:
    """Return the exact k nearest of all blocks, and the scores `[q, m]` of `found` there, slack included.

    `found` are positions in the order in which documents come; -1 scores -inf. Held in memory are one block and
    the vectors found.
    """
    exact = TopK(queries, k, metric)
    scores = np.full(found.shape, -np.inf)
    for block in blocks:
        inside = (found >= exact.seen) & (found < exact.seen + len(block))
        own, slack = scores_at(queries, block, np.where(inside, found - exact.seen, -1), metric)
        scores = np.where(inside, own + slack, scores)
        exact.update(block)
    require_k(k, exact.seen)
    return exact, scores


@dataclass(frozen=True, slots=True)
class Trial:
    """Hold a setting of a search parameter: its index overlap `[q]` by k, and the distances that it took."""

    parameter: str
    setting: int
    distances: int
    values: dict[int, Values]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Hold index overlap `[q]` by k, and what other settings of the search parameters would give."""

    values: dict[int, Values]
    trials: tuple[Trial, ...] = ()

    def curves(self, k: int, *, seed: int) -> tuple[Curve, ...]:
        """Return index overlap@k, and its cost, against each parameter, up to the first setting that is enough.

        Nothing where the setting in use is enough. The cost is in distances computed, as a multiple of now.
        """
        found: list[Curve] = []
        for name in dict.fromkeys(trial.parameter for trial in self.trials):
            trials = [trial for trial in self.trials if trial.parameter == name]
            enough = (i for i, trial in enumerate(trials) if trial.values[k].mean() >= ENOUGH)
            trials = trials[: next(enough, len(trials)) + 1]
            if len(trials) < 2:
                continue
            points = [Point(trial.setting, *interval(trial.values[k], seed=seed)) for trial in trials]
            found.append(Curve(f"index-overlap@{k}", name, tuple(points)))
            costs = [Point(trial.setting, trial.distances / max(1, trials[0].distances)) for trial in trials]
            found.append(Curve("distances computed, as a multiple of now,", name, tuple(costs)))
        return tuple(found)


def index_overlap(reader: Reader, queries: Floats, ks: tuple[int, ...], metric: Metric) -> Overlap:
    """Return index overlap@k for each k: how much of exact search the store's own index finds.

    Both search the vectors as the store gives them back, all of them, in one pass: what approximate search loses is
    in the number, what codes lost before isn't. A store that is `Tunable` is searched with other settings too.
    Raises UnsupportedError for a store without an index.
    """
    top = max(ks)
    found = [search(reader, queries, top, metric)]
    tried: list[tuple[str, int, int]] = []
    for name, setting in _settings(reader):
        assert isinstance(reader, Tunable)
        places, _, distances = reader.search_with(as_asked(queries, metric), top, {name: setting})
        found.append(places.astype(np.int64))
        tried.append((name, setting, distances))
    blocks = (batch.vectors for batch in reader.read(BATCH))
    asked, ranking = as_asked(queries, metric), own_metric(reader.info, metric)
    exact, scores = judge(blocks, asked, np.concatenate(found, axis=1), top, ranking)
    own, *others = (
        {k: share_right(part, exact.scores, k) for k in ks} for part in np.split(scores, len(found), axis=1)
    )
    trials = (Trial(*what, values) for what, values in zip(tried, others, strict=True))
    return Overlap(own, tuple(trials))


def _settings(reader: Reader) -> list[tuple[str, int]]:
    """Return what to try: each search parameter at its setting in use, twice that, and so on to its largest."""
    if not isinstance(reader, Tunable):
        return []
    chosen: list[tuple[str, int]] = []
    for name, most in reader.tunable.items():
        now = reader.info.parameters[name]
        settings = dict.fromkeys(min(now << i, max(now, most)) for i in range(TRIALS))
        chosen += [(name, setting) for setting in settings]
    return chosen
