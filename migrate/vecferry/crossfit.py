"""Every document held out once: what a map would do, measured on all pairs, by maps that never saw what they carry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.batch import Floats, id_keys
from vecferry.linear import LinearMap, Post, normalize
from vecferry.pairs import Pairs, Queries
from vecferry.recall import Metric, Places, topk
from vecferry.solvers import SOLVERS

FOLDS = 5

Learn = Callable[[Floats, Floats], LinearMap]
Folds = NDArray[np.int64]


def learner(solver: str, metric: Metric, seed: int) -> Learn:
    """Return a function from rows of two spaces to the map that `fit` would make of them."""

    def learn(x: Floats, y: Floats) -> LinearMap:
        if metric == "cosine":
            x, y = x.copy(), y.copy()
            normalize(x)
            normalize(y)
        solution = SOLVERS[solver](x, y, seed=seed)
        ends: Post = "l2" if metric == "cosine" else "none"
        return LinearMap(solution.weight, solution.bias, pre=ends, post=ends)

    return learn


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


def translate(pairs: Pairs, fold: Folds, learn: Learn) -> Floats:
    """Return the documents `[n, d_target]` in the new space, each carried by a map learned without its fold."""
    out = np.empty(pairs.target.shape, np.float32)
    for f in np.unique(fold):
        held = fold == f
        out[held] = learn(pairs.source[~held], pairs.target[~held]).apply(pairs.source[held])
    return out


def search_mapped(
    pairs: Pairs, queries: Queries, fold: Folds, learn: Learn, k: int, metric: Metric, seed: int
) -> Places:
    """Return what new queries `[q, k]` find among the old documents, carried into their space.

    A document is compared with the query as a map carries it that was learned without the document's fold and without
    the query's half of the queries; the scores of all folds are then merged.
    """
    half = np.zeros(len(queries), np.int64)
    if queries.source is not None:  # without the old model's queries none is learned from
        half = folds_of(queries.ids, 2, seed, queries.vectors)
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


def _first_equal(rows: Floats) -> NDArray[np.int64]:
    """Return for each row the position of the first that equals it; 0.0 and -0.0 are one number."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), i) for i, row in enumerate(rows + np.float32(0))], np.int64)
