"""Every document held out once: what a map would do, measured on all pairs, by maps that never saw what they carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.auto import LEAST_PAIRS, choose
from vecferry.batch import Floats, id_keys
from vecferry.linear import LinearMap, Pre, normalize
from vecferry.pairs import Pairs, Queries
from vecferry.recall import Metric, Places, topk
from vecferry.solvers import SOLVERS, Solution

FOLDS = 5
LEAST_LEFT = 200
"""Documents that no query is labelled with, which must be left to measure with beside those that choose."""

Learn = Callable[[Floats, Floats], LinearMap]
Folds = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Say how maps are made: as `fit` makes them by this solver, but "auto" without rank distillation.

    That takes longer than all the rest for each map, of which there are a dozen here. `lengths` says whether the
    documents of the old model differ in length.
    """

    solver: str
    metric: Metric
    lengths: bool
    seed: int

    def for_documents(self, x: Floats, y: Floats, queries: Floats | None) -> Learn:
        """Return a function from pairs to a map whose hyperparameters, if it has any, these pairs and queries chose.

        From too few pairs nothing is chosen: "auto" is ridge then.
        """
        scale_free = self.metric == "cosine" and self.lengths
        if self.solver != "auto" or len(x) < LEAST_PAIRS:
            solver = SOLVERS["ridge" if self.solver == "auto" else self.solver]
            return partial(self._learn, partial(solver, seed=self.seed), scale_free)
        chosen = choose(
            *self._prepared(x, y, scale_free),
            queries=None if queries is None else self._ranked(queries),
            metric=self.metric,
            centring=not scale_free,
            seed=self.seed,
            effort=0,
        )
        return partial(self._learn, chosen.refit, scale_free)

    def for_queries(self) -> Learn:
        """Return a function from pairs to a map of queries; `auto` is ridge for these."""
        solver = SOLVERS["ridge" if self.solver == "auto" else self.solver]
        return partial(self._learn, partial(solver, seed=self.seed), self.metric == "cosine")

    def _learn(self, fit: Callable[[Floats, Floats], Solution], scale_free: bool, x: Floats, y: Floats) -> LinearMap:
        s = fit(*self._prepared(x, y, scale_free))
        pre: Pre = "center_l2" if s.mean is not None else "l2" if scale_free else "none"
        return LinearMap(s.weight, s.bias, pre, "l2" if self.metric == "cosine" else "none", s.mean)

    def _prepared(self, x: Floats, y: Floats, scale_free: bool) -> tuple[Floats, Floats]:
        return (_unit(x) if scale_free else x), self._ranked(y)

    def _ranked(self, y: Floats) -> Floats:
        return _unit(y) if self.metric == "cosine" else y


def folds_of(ids: pa.Array, n: int, seed: int, *sides: Floats) -> Folds:
    """Give each row one of n folds of nearly one size, by seeded hash of its id; rows equal on a side share theirs."""
    salt = id_keys(pa.array([seed]))[0]
    fold = np.empty(len(ids), np.int64)
    fold[np.argsort(id_keys(pa.array(id_keys(ids) ^ salt)), kind="stable")] = np.arange(len(ids)) % n
    firsts = [_first_equal(side) for side in sides]
    while any((fold != fold[first]).any() for first in firsts):
        for first in firsts:
            lowest = np.full(len(fold), n)
            np.minimum.at(lowest, first, fold)
            fold = lowest[first]
    return fold


def set_apart(pairs: Pairs, relevant: NDArray[np.int64], seed: int, any_chosen: bool) -> tuple[Pairs, Pairs]:
    """Divide pairs into those that choose hyperparameters, and those that are measured and may be learned from.

    All maps need the same hyperparameters, or what one carries couldn't be ranked among what another does. So a third
    of the pairs chooses, none of the `relevant` among them; none at all if too few would be left for either, or
    nothing is chosen.
    """
    others = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(len(pairs)), relevant))
    size = max(LEAST_PAIRS, len(pairs) // 3)
    if not any_chosen or len(others) < size + LEAST_LEFT:
        return _take(pairs, others[:0]), pairs
    choose = np.zeros(len(pairs), np.bool_)
    choose[others[:size]] = True
    measured = np.flatnonzero(~choose)
    for side in (pairs.source, pairs.target):
        first = _first_equal(side)
        choose &= ~np.isin(first, first[measured])
    return _take(pairs, np.flatnonzero(choose)), _take(pairs, measured)


def translate(pairs: Pairs, fold: Folds, learn: Learn, also: Pairs, apart: Mask) -> Floats:
    """Return the documents `[n, d_target]` in the new space, each carried by a map learned without its fold.

    Maps learn from `also` too, and not from documents `apart`.
    """
    out = np.empty(pairs.target.shape, np.float32)
    for f in np.unique(fold):
        held, seen = fold == f, (fold != f) & ~apart
        x, y = (
            np.concatenate(sides) for sides in ((also.source, pairs.source[seen]), (also.target, pairs.target[seen]))
        )
        out[held] = learn(x, y).apply(pairs.source[held])
    return out


def search_mapped(
    pairs: Pairs, queries: Queries, fold: Folds, half: Folds, learn: Learn, k: int, metric: Metric
) -> Places:
    """Return what new queries `[q, k]` find among the old documents, carried into their space.

    A document is compared with the query as a map carries it that was learned without the document's fold and without
    the query's half of the queries; the scores of all folds are then merged.
    """
    places: Places = np.full((len(queries), k), -1, np.int64)
    for h in np.unique(half):
        asked = half == h
        found, scores = [], []
        for f in np.unique(fold):
            held = fold == f
            x, y = pairs.target[~held], pairs.source[~held]
            if queries.source is not None:
                x, y = np.concatenate([x, queries.vectors[~asked]]), np.concatenate([y, queries.source[~asked]])
            inside = np.flatnonzero(held)
            mapped = learn(x, y).apply(queries.vectors[asked])
            near, score = topk(mapped, pairs.source[inside], min(k, len(inside)), metric)
            found.append(inside[near])
            scores.append(score)
        merged, by = np.concatenate(found, axis=1), np.concatenate(scores, axis=1)
        order = np.lexsort((merged, -by), axis=1)[:, :k]
        places[asked] = np.take_along_axis(merged, order, axis=1)
    return places


def _take(pairs: Pairs, rows: NDArray[np.int64]) -> Pairs:
    return Pairs(pairs.ids.take(pa.array(rows)), pairs.source[rows], pairs.target[rows])


def _unit(rows: Floats) -> Floats:
    unit = rows.copy()
    normalize(unit)
    return unit


def _first_equal(rows: Floats) -> NDArray[np.int64]:
    """Return for each row the position of the first that equals it; 0.0 and -0.0 are one number."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), i) for i, row in enumerate(rows + np.float32(0))], np.int64)
