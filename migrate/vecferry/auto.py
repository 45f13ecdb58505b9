"""The choice of a map by what it retrieves: closed-form maps by leave-one-out, then rank distillation by folds.

A small validation set chooses badly: with few documents all maps look good, and the best of many candidates is the
luckiest one. So every closed-form candidate is judged by all pairs at once, each document as predicted without itself:
for the fit part's queries, agreement@10 of a search among those predictions with a search among the true vectors.
The best of them replaces the better of ridge and Procrustes only when it is better by more than one standard error of
the paired difference. Rank distillation has no leave-one-out: it is judged on folds in which both documents and
queries are held out, from its gentlest strength upward, as long as that pays. What is chosen is fitted to all pairs.

For inner product and l2 the candidates are ridge, Procrustes and their blends: the rest of the family, and rank
distillation, are about what normalisation does to a ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from threadpoolctl import threadpool_limits

from vecferry.batch import Floats
from vecferry.errors import MissingDependencyError
from vecferry.family import PROCRUSTES, RIDGE, Family, Setting, least_asked
from vecferry.rank import STRENGTHS, Strength, distil, load_torch, one_thread
from vecferry.recall import Metric, Places, Truth, Values, topk, without
from vecferry.solvers import Solution, check, ridge

LEAST_PAIRS = 500
"""Below which there is too little to choose by."""
LEAST_QUERIES = 100
"""Below which documents stand in for queries."""
ROWS, QUERIES = 5000, 1000
"""Pairs and queries that are chosen by at most."""
K = 10
FOLDS = 4
"""Of documents and of queries; a quarter is held out to judge rank distillation."""
K_OF_FOLD = 3
"""For agreement within a fold: about the same share of its documents as K of all. Deeper it prefers what over-fits."""
FEW = 10.0
"""Numbers in the weight for each pair, above which only the gentlest distillation is tried: stronger ones over-fit."""
ROUNDS = 2
EFFORTS = (0, 1, 2)
JUDGED = {1: 2, 2: 4}
"""Folds on which rank distillation is judged, by effort."""

PENALTIES = (0.1, 0.3, 1.0)
TILTS = (0.0, 0.5, 1.0, 2.0, 4.0)
UNSHRUNK = (0.0, 0.5, 1.0)
TURNED = (0.0, 0.3, 0.6, 0.8)
NEARBY = (1.41, 0.71)
"""Factors by which the tilt is changed; FIRST_TILT is what it starts from."""
FIRST_TILT = 0.35
MEANS = (1.0, 0.8, 1.25)

Move = Callable[[Setting], list[Setting]]


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """Say for each query what a search among translations finds of what a search among the true vectors finds.

    own  where documents ask: which they are; none is its own neighbour
    """

    truth: Truth
    own: Places | None
    k: int

    @classmethod
    def of(cls, queries: Floats, own: Places | None, documents: Floats, k: int, metric: Metric) -> Judge:
        """Search the true vectors."""
        if own is None:
            return cls(Truth.of(queries, documents, k, metric), None, k)
        return cls(Truth.of_documents(own, documents, k, metric), own, k)

    def __call__(self, translated: Floats) -> Values:
        """Return agreement@k `[q]`."""
        more = 0 if self.own is None else 1
        found, _ = topk(self.truth.queries, translated, self.k + more, self.truth.metric)
        return self.truth.agreement(found if self.own is None else without(found, self.own), self.k)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Hold the map that was chosen, and by what: "auto", or "ridge" where there was too little to choose by.

    closed, refit  its closed form, without rank distillation, and how to fit that to other pairs
    """

    by: str
    solution: Solution
    closed: Solution
    refit: Callable[[Floats, Floats], Solution]


def choose(
    X: Floats,
    Y: Floats,
    *,
    queries: Floats | None = None,
    metric: Metric = "cosine",
    centring: bool = True,
    seed: int = 0,
    effort: int = 1,
) -> Chosen:
    """Choose among maps from rows `X [n, d_source]` to `Y [n, d_target]` by what `queries [q, d_target]` retrieve.

    For cosine, Y and the queries are of length 1. `centring=False` leaves out what must subtract a mean before
    normalising. `effort` 0 leaves out rank distillation, 1 judges it on two folds, 2 on four. At most 5,000 pairs and
    1,000 queries take part in choosing. Below 500 pairs it is ridge; without 100 queries, documents stand in; without
    torch there is no rank distillation: the solution's warnings say so. Its parameters hold all candidates.
    """
    check(X, Y)
    if len(X) < LEAST_PAIRS:
        warning = f"{len(X)} pairs are too few to choose among maps (from {LEAST_PAIRS}): this is ridge"
        plain = ridge(X, Y, seed=seed)
        return Chosen("ridge", replace(plain, warnings=(warning,)), plain, partial(ridge, seed=seed))
    warnings = []
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(len(X))[:ROWS])
    x, y = X[rows], Y[rows]
    own = None
    if queries is None or len(queries) < LEAST_QUERIES:
        warnings.append(
            f"{0 if queries is None else len(queries)} queries to choose by: documents stood in, which ask differently;"
            f" give some hundred with --queries"
        )
        queries, own = None, np.sort(rng.permutation(len(x))[:QUERIES])
        asked = y[own]
    else:
        asked = queries[np.sort(rng.permutation(len(queries))[:QUERIES])]
    with threadpool_limits(1, "blas"):
        family = Family(x, y, least_asked(asked), seed=seed)
        judge = Judge.of(asked, own, y, K, metric)
        scores: dict[Setting, Values] = {}

        def score(setting: Setting) -> float:
            if setting not in scores:
                scores[setting] = judge(family.predict(setting))
            return float(scores[setting].mean())

        simple = max((RIDGE, PROCRUSTES), key=score)
        grids, moves = members(centring) if metric == "cosine" else blends()
        best = max((search(score, grid, moves) for grid in grids), key=score)
        gain = scores[best] - scores[simple]
        error = float(gain.std(ddof=1) / np.sqrt(len(gain)))
        setting = best if gain.mean() > error else simple
        solution = closed = family.fit(setting, X, Y)
        strength: str | None = None
        steps: dict[str, float] = {}
        if effort and metric == "cosine":
            try:
                strength, steps = climb(x, y, asked, own, partial(family.fit, setting), JUDGED[effort], seed)
            except MissingDependencyError as missing:
                warnings.append(str(missing))
        if strength is not None:
            solution = distil(X, Y, queries, solution, STRENGTHS[strength], seed=seed)
    chosen = asdict(setting) | {"lambda": family.penalty(setting), "rank": strength}
    names = {setting: "chosen", RIDGE: "ridge", PROCRUSTES: "procrustes"}
    by_gain = sorted(scores, key=score, reverse=True)
    parameters = {
        "chosen": chosen,
        "judged": {"by": "documents" if queries is None else "queries", "queries": len(asked), "pairs": len(x)},
        "gain": {"over": names[simple], f"agreement@{K}": _round(gain), "standard_error": round(error, 4)},
        "rank": steps,
        "candidates": [{"name": names.get(s, ""), f"agreement@{K}": _round(scores[s])} | asdict(s) for s in by_gain],
    }
    solution = replace(solution, parameters=parameters, warnings=tuple(warnings))
    return Chosen("auto", solution, closed, partial(family.fit, setting))


def search(score: Callable[[Setting], float], grid: Iterable[Setting], moves: Sequence[Move]) -> Setting:
    """Return the best of a grid, improved by one move after another while that helps, at most `ROUNDS` times."""
    best = max(grid, key=score)
    for _ in range(ROUNDS):
        before = best
        for move in moves:
            best = max([best, *move(best)], key=score)
        if best == before:
            break
    return best


def members(centring: bool) -> tuple[list[list[Setting]], tuple[Move, ...]]:
    """Return the family's grids and moves for cosine: the tilt matters most, the rest is searched around it.

    There is a grid for each way to take rows, since the best of one is often not reached from the other.
    """
    centred = (False, True) if centring else (False,)
    grids = [[Setting(c, p, tilt=t) for p, t in product(PENALTIES, TILTS)] for c in centred]

    def shrinkage(s: Setting) -> list[Setting]:
        return [replace(s, unshrunk=u, turned=t) for u, t in product(UNSHRUNK, TURNED)]

    def levels(s: Setting) -> list[Setting]:
        tilts = [s.tilt, *(s.tilt * factor for factor in NEARBY)] if s.tilt else [0.0, FIRST_TILT]
        return [replace(s, tilt=t, mean=s.mean * m) for t, m in product(tilts, MEANS)]

    def penalties(s: Setting) -> list[Setting]:
        return [replace(s, centred=c, penalty=p) for c, p in product(centred, PENALTIES)]

    return grids, (shrinkage, levels, penalties)


def blends() -> tuple[list[list[Setting]], tuple[Move, ...]]:
    """Return ridge, Procrustes and what lies between them."""
    return [[Setting(penalty=p, turned=t) for p, t in product(PENALTIES, (*TURNED, 1.0))]], ()


def climb(
    X: Floats,
    Y: Floats,
    asked: Floats,
    own: Places | None,
    fit: Callable[[Floats, Floats], Solution],
    judged: int,
    seed: int,
) -> tuple[str | None, dict[str, float]]:
    """Return the strength of distillation that pays where documents and queries are held out, and agreement at each.

    Each strength in turn, from `fit`'s map without a fold, must be better than the one before by a standard error; the
    gentlest, which rarely does harm, must only not be worse by two of them. `judged` of four folds are tried, two at a
    time.
    """
    torch = load_torch()
    rng = np.random.default_rng(seed + 1)
    fold = rng.permutation(len(X)) % FOLDS
    asked_fold = rng.permutation(len(asked)) % FOLDS if own is None else fold[own]
    starts, judges = [], []
    for f in range(judged):
        held, now = fold == f, asked_fold == f
        inside = None if own is None else np.cumsum(held)[own[now]] - 1
        starts.append(fit(X[~held], Y[~held]))
        judges.append(Judge.of(asked[now], inside, Y[held], K_OF_FOLD, "cosine"))

    def values(strength: Strength | None) -> Values:
        def on_fold(f: int) -> Values:
            held, s = fold == f, starts[f]
            if strength is not None:
                others = None if own is not None else asked[asked_fold != f]
                s = distil(X[~held], Y[~held], others, s, strength, seed=seed)
            return judges[f](s.predict(X[held]))

        return np.concatenate(list(pool.map(on_fold, range(judged))))

    with one_thread(torch), ThreadPoolExecutor(2) as pool:
        before = values(None)
        reached, agreement = None, {"start": _round(before)}
        many = starts[0].weight.size > FEW * len(X)
        for name, strength in list(STRENGTHS.items())[: 1 if many else None]:
            after = values(strength)
            agreement[name] = _round(after)
            gain = after - before
            if gain.mean() < (1 if reached else -2) * gain.std(ddof=1) / np.sqrt(len(gain)):
                break
            reached, before = name, after
    return reached, agreement


def _round(values: Values) -> float:
    return round(float(values.mean()), 4)
