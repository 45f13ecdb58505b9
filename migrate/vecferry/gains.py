"""What a way is worth by labels: ratios of nDCG at the size of the index, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vecferry.holdout import Qrels
from vecferry.measured import Cell
from vecferry.recall import Places, Values, rerank
from vecferry.ways import CANDIDATES, K, Trial, cascade

FARTHEST = K
"""How many times the documents measured among a number is projected to at most: there one stands for all K found."""
FORM = 0.03
"""Standard deviation of a projected ratio's logarithm for each e-fold of documents, since sizes aren't quite alike:
cascades of few candidates come out somewhat low."""
STEPS = 64  # at which what stands between two documents is summed
SHIFTS = (1 / 8, 3 / 8, 5 / 8, 7 / 8)


@dataclass(frozen=True, slots=True, eq=False)
class Gains:
    """Hold nDCG@K per query `[q]` of each way, as it would be among `target` documents, measured among `documents`.

    The relevant documents were paired all, so that each stands for itself, and each other one for as many as there are
    to it in the index: what counts is which share of the corpus is returned (see `extrapolation`). A cascade has as
    many fewer candidates.
    """

    values: Mapping[str, Values]
    documents: int
    target: int

    @classmethod
    def of(cls, trial: Trial, qrels: Qrels, rows: int) -> Gains:
        """Search all ways, and score them for an index of that many rows, if it isn't too far away."""
        n, relevant = len(trial.pairs), np.unique(qrels.document)
        others = n - len(relevant)
        reached = len(relevant) + FARTHEST * others if others > n / 4 else n
        target = max(n, min(rows, reached))
        stands_for = (target - len(relevant)) / max(1, others)
        weights = np.full(n, stands_for)
        weights[relevant] = 1
        found = {way: places for way, places in trial.among().items() if not isinstance(places, str)}
        values = {way: weighted_ndcg(places, qrels, weights, stands_for) for way, places in found.items()}
        near = trial.translations(np.arange(n), min(n, max(CANDIDATES)))
        before = np.cumsum(weights[near], axis=1) - weights[near]
        for c in CANDIDATES:
            if c >= target / 5:
                continue
            scores = []
            for between in SHIFTS:  # as the first of those behind a document may come anywhere up to the next
                inside = before + between * stands_for < c
                candidates = np.where(inside, near, -1)[:, : inside.sum(axis=1).max()]
                ranked = rerank(trial.asked, trial.pairs.target, candidates, trial.metric)[:, :K]
                scores.append(weighted_ndcg(ranked, qrels, weights, stands_for))
            values[cascade(c)] = np.mean(scores, axis=0)
        return cls(values, n, target)

    def ratio(self, metric: str, way: str, base: str) -> Cell:
        """Return nDCG of a way over that of another, with a 95 % interval.

        The interval is for other queries, on the scale of logarithms by the delta method (Efron and Tibshirani 1993,
        section 21.5), and for sizes that aren't quite alike. Where a way finds nothing in q queries, its nDCG may still
        be 3 / q (the rule of three, Hanley and Lippman-Hand 1983).
        """
        for name in (base, way):
            if name not in self.values:
                return Cell(metric, K, reason=f"{name} wasn't measured")
        known = ~np.isnan(self.values[way])
        own, over = (self.values[name][known] for name in (way, base))
        q = int(known.sum())
        among = "held-out documents" if self.target == self.documents else "documents, projected"
        if q < 2:
            return Cell(metric, K, reason=f"{q} labelled queries")
        if not over.any():
            return Cell(metric, K, reason=f"{base} finds no relevant document")
        if not own.any():
            return Cell(metric, K, 0.0, 0.0, 3 / q / float(over.mean()), self.target, q, among)
        moves = own / own.mean() - over / over.mean()  # of the logarithm, by each query
        form = 0.0 if way == base else FORM * math.log(self.target / self.documents)
        error = 1.96 * math.sqrt(moves.var(ddof=1) / q + form**2)
        low, value, high = (math.exp(math.log(own.mean() / over.mean()) + e) for e in (-error, 0, error))
        return Cell(metric, K, value, low, high, self.target, q, among)


def weighted_ndcg(found: Places, qrels: Qrels, weights: Values, stands_for: float) -> Values:
    """Return nDCG@K `[q]` of places `[q, K]` if each document stood for `weights` `[n]` of them; NaN without labels.

    A query's own relevant documents stand for themselves. Behind documents that weigh w the next has its rank between
    1 + w and 1 + w + `stands_for`, all of which are as likely. With weights of 1 it is `recall.ndcg`.
    """
    between = stands_for * (np.arange(STEPS) + 0.5) / STEPS
    first = 1 / np.log2(np.arange(2, K + 2))
    grades: dict[int, dict[int, int]] = {}
    for query, document, grade in zip(qrels.query.tolist(), qrels.document.tolist(), qrels.grade.tolist(), strict=True):
        grades.setdefault(query, {})[document] = grade
    values = np.full(len(found), np.nan)
    for query, graded in grades.items():
        best = sorted(graded.values(), reverse=True)[:K]
        above = gained = 0.0
        for place in found[query][found[query] >= 0].tolist():
            if place in graded:
                rank = 1 + np.floor(above + between)
                gained += graded[place] * float(np.where(rank <= K, 1 / np.log2(rank + 1), 0).mean())
            above += 1 if place in graded else float(weights[place])
        values[query] = gained / float(np.dot(best, first[: len(best)]))
    return values
