"""The ways from one model to another, searched side by side on the same documents with the same queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vecferry.batch import Floats
from vecferry.crossfit import FOLDS, Folds, Recipe, folds_of, search_mapped, set_apart, translate
from vecferry.extrapolation import LEAST, SizeCurve, depth
from vecferry.measured import Cell
from vecferry.norms import Norms
from vecferry.pairs import Pairs, Queries
from vecferry.recall import Metric, Places, Truth, rerank, topk, without
from vecferry.verdict import CASCADE, MAP_QUERIES, NOTHING, RE_EMBED, TRANSLATE

K = 10
CANDIDATES = (50, 100, 200, 500)
STAND_INS = 1000
APART = 10
"""A tenth of the documents stands in as queries, at most STAND_INS of them, where there are none."""
DEEP = 30 * K
"""Places found by mapped queries, of which those in a part of the documents are taken where only it is searched."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Hold what was found for each way by the same queries, or the reason why it wasn't tried.

    pairs       the documents in both spaces
    half        `[q]` to which half of the queries each belongs
    translated  for each half, the documents carried by maps that saw neither them nor that half
    own         where documents stand in as queries, which they are; None for real queries
    mapped      `[q, DEEP]` what mapped queries find, or a reason
    """

    pairs: Pairs
    asked: Floats
    asked_old: Floats | None
    half: Folds
    translated: tuple[Floats, ...]
    mapped: Places | str
    own: Places | None
    metric: Metric

    @classmethod
    def of(
        cls, given: Pairs, queries: Queries | None, relevant: Places, solver: str, metric: Metric, seed: int
    ) -> Trial:
        """Learn maps without each fold of the documents and each half of the queries in turn, and carry both by them.

        Pairs that choose hyperparameters, none of the `relevant` ones, are left out of `pairs`. Documents that stand in
        as queries take part in no map.
        """
        recipe = Recipe(solver, metric, not Norms.of(given.source).agree, seed)
        chooser, pairs = set_apart(given, relevant, seed, solver == "auto")
        fold = folds_of(pairs.ids, FOLDS, seed, pairs.source, pairs.target)

        def carried(asked: Floats | None, apart: NDArray[np.bool_]) -> Floats:
            learn = recipe.for_documents(chooser.source, chooser.target, asked)
            return translate(pairs, fold, learn, chooser, apart)

        if queries is None:
            apart = folds_of(pairs.ids, APART, seed + 1, pairs.source, pairs.target) == 0
            own = np.flatnonzero(apart)[:STAND_INS]
            half, reason = np.zeros(len(own), np.int64), "no queries: pass --queries"
            both: tuple[Floats, ...] = (carried(None, apart),)
            return cls(pairs, pairs.target[own], pairs.source[own], half, both, reason, own, metric)
        half = folds_of(queries.ids, 2, seed, queries.vectors)
        none = np.zeros(len(pairs), np.bool_)
        both = tuple(carried(queries.vectors[half != h], none) for h in (0, 1))
        mapped = search_mapped(pairs, queries, fold, half, recipe.for_queries(), min(DEEP, len(pairs)), metric)
        return cls(pairs, queries.vectors, queries.source, half, both, mapped, None, metric)

    def among(self, rows: NDArray[np.int64] | None = None, k: int = K) -> dict[str, Places | str]:
        """Search all documents each way, or with real queries those at `rows`; return places `[q, k]` among all.

        Cascades return at most as many as they rank.
        """
        n = len(self.pairs)
        chosen = np.arange(n) if rows is None else rows
        old, new = self.pairs.source[chosen], self.pairs.target[chosen]
        found: dict[str, Places | str] = {}
        unasked = "no source queries: pass --source-queries"
        found[NOTHING] = unasked if self.asked_old is None else chosen[self._nearest(self.asked_old, old, k)]
        deepest = max((c for c in CANDIDATES if c < n / 5), default=0)
        candidates = self.translations(chosen, max(k, deepest))
        found[TRANSLATE] = chosen[candidates[:, :k]]
        found[MAP_QUERIES] = self.mapped if isinstance(self.mapped, str) else _first_in(self.mapped, chosen, n, k)
        for c in CANDIDATES:
            if c > deepest:
                found[cascade(c)] = f"needs more than {5 * c:,} pairs, there are {n:,}"
            else:
                found[cascade(c)] = chosen[rerank(self.asked, new, candidates[:, :c], self.metric)[:, :k]]
        found[RE_EMBED] = chosen[self._nearest(self.asked, new, k)]
        return found

    def translations(self, rows: NDArray[np.int64], k: int) -> Places:
        """Return which translations at `rows` are nearest `[q, k]`: for each query of those that it had no part in."""
        near: Places = np.empty((len(self.asked), k), np.int64)
        for h, documents in enumerate(self.translated):
            mine = self.half == h
            near[mine] = self._nearest(self.asked[mine], documents[rows], k, mine)
        return near

    def _nearest(self, asked: Floats, documents: Floats, k: int, mine: NDArray[np.bool_] | None = None) -> Places:
        """Search without finding the document that asks; `mine` says which of all queries these are."""
        if self.own is None:
            return topk(asked, documents, k, self.metric)[0]
        own = self.own if mine is None else self.own[mine]
        return without(topk(asked, documents, k + 1, self.metric)[0], own)

    def truth(self, rows: NDArray[np.int64] | None = None, k: int = K) -> Truth:
        """Return what re-embedding finds, among all documents or those at `rows`, with places among these."""
        documents = self.pairs.target if rows is None else self.pairs.target[rows]
        if self.own is not None:
            return Truth.of_documents(self.own, documents, k, self.metric)
        return Truth.of(self.asked, documents, k, self.metric)


def cascade(c: int) -> str:
    """Name the cascade with c candidates."""
    return f"{CASCADE}, c = {c}"


def foretell(trial: Trial, rows: NDArray[np.int64], size: int, seed: int) -> dict[str, Cell | None]:
    """Foretell each way's agreement@K among `size` documents from those at `rows`, which resemble a uniform draw.

    A cascade's is not, since it depends on how c grows with the number of documents too. All ways are None for an
    index that isn't larger.
    """
    n = len(rows)
    names = [NOTHING, TRANSLATE, MAP_QUERIES, *map(cascade, CANDIDATES), RE_EMBED]
    if size <= n:
        return dict.fromkeys(names)
    metric = "agreement" if trial.own is None else "doc-agreement"
    empty = Cell(metric, K, documents=size, held_out=n)
    if n < LEAST * K:
        return dict.fromkeys(names, replace(empty, reason=f"foretold from at least {LEAST * K:,} pairs, not {n:,}"))
    deep = depth(K, n)
    truth, found = trial.truth(rows, deep), trial.among(rows, deep)
    at = np.full(len(trial.pairs) + 1, -1)  # the last for a place of -1
    at[rows] = np.arange(n)
    cells: dict[str, Cell | None] = {}
    for name in (NOTHING, TRANSLATE, MAP_QUERIES):
        places = found[name]
        if isinstance(places, str) or (places < 0).any():
            cells[name] = replace(empty, reason=places if isinstance(places, str) else "too few uniform pairs")
        else:
            told = SizeCurve.of(truth, at[places], K, seed=seed).at(size)
            cells[name] = replace(empty, value=told.value, low=told.low, high=told.high, queries=len(places))
    unknown = replace(empty, reason="not foretold for cascades: retention says what they keep")
    cells |= dict.fromkeys(map(cascade, CANDIDATES), unknown)
    return cells | {RE_EMBED: replace(empty, value=1.0, low=1.0, high=1.0, queries=len(trial.asked))}


def resembling(n: int, relevant: NDArray[np.int64], size: int, seed: int) -> NDArray[np.int64]:
    """Return which of n documents resemble a uniform draw of an index of `size`.

    Relevant documents were paired all, the others by chance: of the relevant as large a part stays.
    """
    others = np.setdiff1d(np.arange(n), relevant)
    part = len(others) / max(1, size - len(relevant))
    kept = np.random.default_rng(seed).permutation(relevant)[: round(min(1.0, part) * len(relevant))]
    return np.sort(np.concatenate([others, kept]))


def _first_in(found: Places, rows: NDArray[np.int64], n: int, k: int) -> Places:
    """Return the first k of each line that are among `rows`; -1 where there are fewer."""
    inside = np.zeros(n + 1, np.bool_)  # the last for a place of -1
    inside[rows] = True
    order = np.argsort(~inside[found], axis=1, kind="stable")[:, :k]
    first = np.take_along_axis(found, order, axis=1)
    return np.where(inside[first], first, -1)
