"""The ways from one model to another, searched side by side on the same documents with the same queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vecferry.batch import Floats
from vecferry.crossfit import FOLDS, folds_of, learner, search_mapped, translate
from vecferry.holdout import Qrels
from vecferry.measured import Cell
from vecferry.pairs import Pairs, Queries
from vecferry.recall import RESAMPLES, Metric, Places, Truth, Values, ndcg, rerank, topk, without
from vecferry.verdict import CASCADE, MAP_QUERIES, NOTHING, RE_EMBED, TRANSLATE

K = 10
CANDIDATES = (50, 100, 200, 500)
STAND_INS = 1000
FARTHEST = 16
"""How many times the documents measured among a number is projected to at most."""
PARTS = 4
"""Into which the documents are cut to see how ratios change with their number."""
DEEP = 12 * K
"""Places found by mapped queries, of which those in a part of the documents are taken where only it is searched."""

Places_ = Mapping[str, Places | str]


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Hold what was found for each way by the same queries, or the reason why it wasn't tried.

    pairs, translated   the documents in both spaces, and carried by maps that never saw them
    own                 where documents stand in as queries, which they are; None for real queries
    mapped              `[q, DEEP]` what mapped queries find, or a reason
    """

    pairs: Pairs
    translated: Floats
    asked: Floats
    asked_old: Floats | None
    mapped: Places | str
    own: Places | None
    metric: Metric

    @classmethod
    def of(cls, pairs: Pairs, queries: Queries | None, solver: str, metric: Metric, seed: int) -> Trial:
        """Learn maps without each fifth of the documents in turn, and carry documents and queries by them."""
        fold = folds_of(pairs.ids, FOLDS, seed, pairs.source, pairs.target)
        learn = learner(solver, metric, seed)
        translated = translate(pairs, fold, learn)
        if queries is None:
            own = np.sort(np.random.default_rng(seed).permutation(len(pairs))[:STAND_INS])
            reason = "no queries: pass --queries"
            return cls(pairs, translated, pairs.target[own], pairs.source[own], reason, own, metric)
        mapped = search_mapped(pairs, queries, fold, learn, min(DEEP, len(pairs)), metric, seed)
        return cls(pairs, translated, queries.vectors, queries.source, mapped, None, metric)

    def among(self, rows: NDArray[np.int64] | None = None) -> dict[str, Places | str]:
        """Search all documents each way, or with real queries those at `rows`; return places `[q, K]` among all."""
        n = len(self.pairs)
        chosen = np.arange(n) if rows is None else rows
        old, new, moved = self.pairs.source[chosen], self.pairs.target[chosen], self.translated[chosen]

        def nearest(asked: Floats, documents: Floats, k: int) -> Places:
            if self.own is None:
                return topk(asked, documents, k, self.metric)[0]
            return without(topk(asked, documents, k + 1, self.metric)[0], self.own)

        found: dict[str, Places | str] = {}
        unasked = "no source queries: pass --source-queries"
        found[NOTHING] = unasked if self.asked_old is None else chosen[nearest(self.asked_old, old, K)]
        found[TRANSLATE] = chosen[nearest(self.asked, moved, K)]
        found[MAP_QUERIES] = self.mapped if isinstance(self.mapped, str) else _first_in(self.mapped, chosen, n)
        deepest = max((c for c in CANDIDATES if c < n / 5), default=0)  # n also where a part is searched: the same ways
        candidates = nearest(self.asked, moved, deepest) if deepest else None
        for c in CANDIDATES:
            if candidates is None or c > deepest:
                found[cascade(c)] = f"needs more than {5 * c:,} pairs, there are {n:,}"
            else:
                found[cascade(c)] = chosen[rerank(self.asked, new, candidates[:, :c], self.metric)[:, :K]]
        found[RE_EMBED] = chosen[nearest(self.asked, new, K)]
        return found

    def truth(self) -> Truth:
        """Return what re-embedding finds."""
        if self.own is not None:
            return Truth.of_documents(self.own, self.pairs.target, K, self.metric)
        return Truth.of(self.asked, self.pairs.target, K, self.metric)


def cascade(c: int) -> str:
    """Name the cascade with c candidates."""
    return f"{CASCADE}, c = {c}"


@dataclass(frozen=True, slots=True, eq=False)
class Gains:
    """Hold nDCG per query of each way among all documents and among parts of them, and compare two ways by both.

    whole   `[q]`, among `documents`
    parts   `[PARTS, q]`, among `size`: the relevant documents are in each part, the others in one

    What a ratio loses from `size` to `documents` it loses again with each such step to the number of rows: a power
    law in the number of documents. Parts are drawn anew too for the interval.
    """

    whole: Mapping[str, Values]
    parts: Mapping[str, Values]
    documents: int
    size: int
    rows: int
    seed: int

    @classmethod
    def of(cls, trial: Trial, found: Places_, qrels: Qrels, rows: int, seed: int) -> Gains:
        """Score all ways, also among random parts."""
        n = len(trial.pairs)
        relevant = np.unique(qrels.document)
        others = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(n), relevant))
        parts = [np.sort(np.concatenate([relevant, part])) for part in np.array_split(others, PARTS)]
        score: Callable[[Places_], dict[str, Values]] = lambda ways: {  # noqa: E731
            name: ndcg(places, qrels, K) for name, places in ways.items() if not isinstance(places, str)
        }
        apart = [score(trial.among(part)) for part in parts]
        return cls(
            score(found), {name: np.stack([a[name] for a in apart]) for name in apart[0]}, n, len(parts[0]), rows, seed
        )

    @property
    def target(self) -> int:
        """The number of documents that ratios are projected to: the index's, if it isn't too far away."""
        reached = self.documents if self.size > 0.75 * self.documents else FARTHEST * self.documents
        return max(self.documents, min(self.rows, reached))

    def ratio(self, metric: str, way: str, base: str) -> Cell:
        """Return nDCG of a way over that of another, projected, with a 95 % interval over queries (see `interval`)."""
        for name in (base, way):
            if name not in self.whole:
                return Cell(metric, K, reason=f"{name} wasn't measured")
        known = ~np.isnan(self.whole[way])
        whole = [self.whole[name][known] for name in (way, base)]
        parts = [self.parts[name][:, known] for name in (way, base)]
        q = int(known.sum())
        if not whole[1].any():
            return Cell(metric, K, reason=f"{base} finds no relevant document")
        rng = np.random.default_rng(self.seed)
        rows = np.stack([np.arange(q), *rng.integers(0, q, (RESAMPLES, q))])
        drawn = np.stack([np.ones(PARTS), *rng.multinomial(PARTS, np.full(PARTS, 1 / PARTS), RESAMPLES)]) / PARTS
        now = [values[rows].mean(axis=1) for values in whole]
        before = [sum(w * v[rows].mean(axis=1) for w, v in zip(drawn.T, values, strict=True)) for values in parts]
        ratios = self._projected(*now, *before)
        value, usable = float(ratios[0]), ratios[np.isfinite(ratios)]
        low, high = (float(x) for x in np.quantile(usable, [0.025, 0.975]))
        among = "held-out documents" if self.target == self.documents else "documents, projected"
        return Cell(metric, K, value, min(value, low), max(value, high), self.target, q, among)

    def _projected(self, way: Values, base: Values, way_before: Values, base_before: Values) -> Values:
        """Carry ratios on by what they lost from a part of the documents to all."""
        with np.errstate(divide="ignore", invalid="ignore"):
            now, before = way / base, way_before / base_before
            if self.target == self.documents:
                return now
            steps = np.log(self.target / self.documents) / np.log(self.documents / self.size)
            projected: Values = np.where(now > 0, now * (now / before) ** steps, now)
        return projected


def _first_in(found: Places, rows: NDArray[np.int64], n: int) -> Places:
    """Return the first K of each line that are among `rows`; -1 where there are fewer."""
    inside = np.zeros(n + 1, np.bool_)  # the last for a place of -1
    inside[rows] = True
    order = np.argsort(~inside[found], axis=1, kind="stable")[:, :K]
    first = np.take_along_axis(found, order, axis=1)
    return np.where(inside[first], first, -1)
