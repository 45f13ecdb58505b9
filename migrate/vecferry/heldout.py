"""What a fit measures on its hold-out: how near translations come, and what they retrieve."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from vecferry.auto import Judge
from vecferry.batch import Floats
from vecferry.holdout import Holdout
from vecferry.linear import Direction, LinearMap, normalize
from vecferry.recall import Metric, Values, topk

K = 10
QUERIES = 1000
"""Held-out queries, or documents that stand in for them, by which a fit measures at most; a gate takes all."""


def measure(m: LinearMap, x: Floats, y: Floats, holdout: Holdout, direction: Direction) -> dict[str, Any]:
    """Compare held-out rows as the map carries them with their true vectors; it was fitted on rows `x` and `y`.

    For direction "query" those are the held-out queries, or documents where the old model's queries aren't known.
    `relative_error` is how much of the rows' deviation from the mean is not predicted, `sqrt(1 - r^2)`, r being the
    correlation of all deviations before `post`: 1 is no better than the mean vector. A constant that is added to all,
    or a factor, doesn't change it, as neither need change what is found.
    """
    taken, true = holdout.source, holdout.target.copy()
    if direction == "query" and holdout.queries is not None and holdout.source_queries is not None:
        taken, true = holdout.queries, holdout.source_queries.copy()
    elif direction == "query":
        taken, true = holdout.target, holdout.source.copy()
    if m.post == "l2":
        normalize(true)
    plain = dataclasses.replace(m, post="none")
    truth, mean = true.astype(np.float64), y.mean(0, dtype=np.float64)
    guess = plain.apply(taken).astype(np.float64)
    length = np.linalg.norm(truth, axis=1)
    cosine = (guess * truth).sum(axis=1) / (np.linalg.norm(guess, axis=1) * length).clip(1e-300)
    constant = truth @ mean / (np.linalg.norm(mean) * length).clip(1e-300)
    guess -= plain.apply(x).mean(0, dtype=np.float64)
    truth -= mean
    sizes = np.linalg.norm(guess) * np.linalg.norm(truth)
    r = max(0.0, float((guess * truth).sum() / sizes)) if sizes else 0.0
    return {
        "documents": len(holdout.ids),
        "queries": 0 if holdout.queries is None else len(holdout.queries),
        "mean_cosine": round(float(cosine.mean()), 4),
        "mean_cosine_of_mean_vector": round(float(constant.mean()), 4),
        "relative_error": round(float(np.sqrt(max(0.0, 1 - r * r))), 4),
    }


@dataclass(frozen=True, slots=True, eq=False)
class Retrieval:
    """Measure maps by what held-out queries find among held-out documents of what re-embedding finds.

    name  "agreement@10", or "doc-agreement@10" where documents ask; of fewer than ten where there are few documents
    """

    name: str
    judge: Judge
    holdout: Holdout
    direction: Direction

    @classmethod
    def of(cls, holdout: Holdout, direction: Direction, metric: Metric) -> Retrieval | None:
        """Search the true vectors; return None where nothing can be searched, or no query be carried."""
        own, queries, n = None, holdout.queries, len(holdout.ids)
        random = np.random.default_rng(0)
        if queries is not None and len(queries):
            queries = queries[np.sort(random.permutation(len(queries))[:QUERIES])]
        elif direction == "query" or n < 2:
            return None
        else:
            own = np.sort(random.permutation(n)[:QUERIES])
            queries = holdout.target[own]
        k = min(K, n if own is None else n - 1)
        judge = Judge.of(queries, own, holdout.target, k, metric)
        return cls(f"{'agreement' if own is None else 'doc-agreement'}@{k}", judge, holdout, direction)

    def __call__(self, m: LinearMap) -> Values:
        """Return agreement `[q]`."""
        if self.direction == "document":
            return self.judge(m.apply(self.holdout.source))
        truth = self.judge.truth
        found, _ = topk(m.apply(truth.queries), self.holdout.source, self.judge.k, truth.metric)
        return truth.agreement(found, self.judge.k)
