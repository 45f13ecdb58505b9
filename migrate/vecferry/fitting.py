"""The verb `fit`: from a paired sample to a map with its card and its hold-out."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

import vecferry
from vecferry.auto import EFFORTS, Chosen, choose
from vecferry.batch import Floats
from vecferry.errors import IncompatibleError, UsageError
from vecferry.heldout import Retrieval, measure
from vecferry.learning import learning_curve, to_json
from vecferry.likeness import measure_likeness
from vecferry.linear import Card, Direction, LinearMap, Post, Pre, Side, normalize
from vecferry.mapfile import seal
from vecferry.norms import METRICS, Norms, metric_of, metric_warnings
from vecferry.pairs import BadRows, join, read_queries, with_roles
from vecferry.qrels import read_qrels
from vecferry.rank import rank
from vecferry.recall import Metric
from vecferry.solvers import SOLVERS, Solution
from vecferry.split import split
from vecferry.store import Reader, StoreInfo, Uri, opened

Objective = Literal["mse", "rank"]
DIRECTIONS: tuple[Direction, ...] = ("document", "query")
OBJECTIVES: tuple[Objective, ...] = ("mse", "rank")
NO_BETTER = 0.98
"""Held-out error, as a part of the mean vector's, from which a map is said to have learned next to nothing."""


def fit(
    source: Any,
    target: Any,
    *,
    queries: Any = None,
    source_queries: Any = None,
    qrels: str | Path | None = None,
    sample: str | Path | None = None,
    direction: Direction = "document",
    solver: str = "auto",
    objective: Objective = "mse",
    effort: int = 1,
    metric: Metric | None = None,
    source_model: str | None = None,
    target_model: str | None = None,
    source_prompt: str | None = None,
    target_prompt: str | None = None,
    seed: int = 0,
    bad_rows: Literal["fail", "skip"] = "fail",
    allow_lossy: bool = False,
) -> LinearMap:
    """Learn the map from the index `source` to the new model's space from `target`, its vectors of some documents.

    With `direction="query"` the map goes the other way: it carries the new model's queries into the space of the
    index, which stays as it is (Drift-Adapter, arXiv 2509.23471). It learns from the queries too that both models
    encoded, and is measured on those held out. Stores and models are given the same for both directions.

    `solver="auto"` fits several maps and takes the one by which the fit half of the queries finds most (see `auto`):
    `effort` 0 is quick, 2 is slow. "sgd" with `objective="rank"` is rank distillation from ridge (see `rank`).

    The map's card records what it is for and everything suspicious (`card.warnings`); its hold-out is what a gate
    measures with. `sample` is the file of `vecferry sample`, needed where `target` has no `role` column to say what
    is held out. Raises UsageError for options that can't be right, IncompatibleError when a store is in another
    space or dimension than it should be, BadRowsError for rows that don't fit together unless `bad_rows="skip"`,
    and DataError when too little is left.
    """
    _check_options(direction, solver, objective, effort, metric, queries, source_queries, qrels, sample)
    labels = None if qrels is None else read_qrels(qrels)
    bad = BadRows.of(bad_rows)
    with ExitStack() as stack:
        old, new = (stack.enter_context(opened(store)) for store in (source, target))
        asked, asked_old = (
            None if store is None else stack.enter_context(opened(store)) for store in (queries, source_queries)
        )
        check_lossy([r for r in (old, new, asked, asked_old) if r is not None], allow_lossy)
        _check_apart(old, new)
        sides = check_sides(old.info, new.info, (source_model, target_model), (source_prompt, target_prompt))
        pairs = join(old, new, bad)
        if sample is not None:
            pairs = with_roles(pairs, sample)
        questions = None
        if asked is not None:
            questions = read_queries(asked, asked_old, (old.info.dim, new.info.dim), bad)
        norms = Norms.of(pairs.source), Norms.of(pairs.target)
        likeness = measure_likeness(pairs, old, seed)
        parts = split(pairs, questions, labels, seed=seed, fingerprint=_fingerprint(old.info, norms[0], pairs.source))
        ends = old.info, new.info
        if direction == "query":
            ends, norms, sides = ends[::-1], norms[::-1], sides[::-1]
        metric = metric or metric_of(norms[1], ends[1])
        warnings = [f"{n} rows left out: {fault}" for fault, n in bad.skipped.items()]
        warnings += metric_warnings(metric, norms, *ends)
    if objective == "rank" and metric != "cosine":
        raise UsageError(f"--objective rank trains a ranking by cosine, and this space ranks by {metric}")
    x, y = parts.pairs(direction)
    scale_free = metric == "cosine" and (direction == "query" or not norms[0].agree)  # a query's length ranks nothing
    if scale_free:
        normalize(x)
    if metric == "cosine":
        normalize(y)
    learned = parts.queries if parts.queries is not None and len(parts.queries) else None
    if learned is not None and metric == "cosine":
        learned = learned.copy()
        normalize(learned)
    chosen = learn(
        x,
        y,
        learned,
        solver=solver,
        objective=objective,
        direction=direction,
        metric=metric,
        centring=not scale_free,
        seed=seed,
        effort=effort,
    )
    solution = chosen.solution

    def map_of(s: Solution) -> LinearMap:
        pre: Pre = "center_l2" if s.mean is not None else "l2" if scale_free else "none"
        post: Post = "l2" if metric == "cosine" else "none"
        return LinearMap(s.weight, s.bias, pre, post, s.mean, holdout=parts.holdout)

    m = map_of(solution)
    measured = measure(m, x, y, parts.holdout, direction)
    retrieval = Retrieval.of(parts.holdout, direction, metric)
    if retrieval is not None:
        measured[retrieval.name] = round(float(retrieval(m).mean()), 4)
        curve = learning_curve(
            lambda rows: map_of(chosen.closed if len(rows) == len(x) else chosen.refit(x[rows], y[rows])),
            retrieval,
            len(x),
            retrieval.name,
            seed=seed,
        )
        if curve is not None:
            measured["learning_curve"] = to_json(curve)
    warnings += [*parts.warnings, *solution.warnings]
    if likeness is not None and likeness.warning is not None:
        warnings.append(likeness.warning)
    if not measured["relative_error"] < NO_BETTER:
        warnings.append(
            f"the held-out error is {measured['relative_error']:.2f} of the mean vector's: the map predicts next to "
            "nothing. Are the ids the same texts on both sides, the models those declared, and the pairs enough?"
        )
    parameters = dict(solution.parameters) | {
        "source_norms": list(dataclasses.astuple(norms[0])),
        "target_norms": list(dataclasses.astuple(norms[1])),
        "likeness": None if likeness is None else dataclasses.asdict(likeness),
        "skipped": bad.skipped,
    }
    return seal(
        m.with_card(
            Card(
                source=sides[0],
                target=sides[1],
                solver=chosen.by,
                parameters=parameters,
                direction=direction,
                metric=metric,
                pairs=len(x),
                seed=seed,
                measured=measured,
                warnings=tuple(warnings),
                version=vecferry.__version__,
            )
        )
    )


def check_sides(
    old: StoreInfo,
    new: StoreInfo,
    models: tuple[str | None, str | None],
    prompts: tuple[str | None, str | None],
) -> tuple[Side, Side]:
    """Identify both sides, from what the caller declares and what the stores record; the two must not contradict.

    Raises IncompatibleError for a contradiction, and for an index that is in the target space already.
    """
    target = Side(new.dim, models[1], prompts[1])
    goal = new.space if target.space is None else target.space
    if old.space is not None and old.space == goal:
        raise IncompatibleError(f"{old.uri} is in the target space {goal!r} already: there is nothing to translate")
    sides = tuple(_side(*given) for given in zip((old, new), models, prompts, ("source", "target"), strict=True))
    if sides[0].space is not None and sides[0].space == sides[1].space:
        raise IncompatibleError(f"source and target are both {goal!r}: there is nothing to translate")
    return sides[0], sides[1]


def learn(
    x: Floats,
    y: Floats,
    queries: Floats | None,
    *,
    solver: str,
    objective: Objective,
    direction: Direction,
    metric: Metric,
    centring: bool,
    seed: int,
    effort: int,
) -> Chosen:
    """Fit by the solver of that name; with the cheaper one that shows how it goes with the number of pairs."""
    if solver == "auto" and direction == "document":
        return choose(x, y, queries=queries, metric=metric, centring=centring, seed=seed, effort=effort)
    plain = partial(SOLVERS["ridge" if solver in ("auto", "sgd") else solver], seed=seed)
    closed = plain(x, y)
    if solver == "auto":
        warning = "auto chooses among maps that carry documents; for queries this is ridge"
        return Chosen("ridge", dataclasses.replace(closed, warnings=(warning,)), closed, plain)
    if objective == "rank":
        return Chosen(solver, rank(x, y, queries=queries, seed=seed), closed, plain)
    return Chosen(solver, SOLVERS[solver](x, y, seed=seed) if solver == "sgd" else closed, closed, plain)


def _check_options(
    direction: str,
    solver: str,
    objective: str,
    effort: int,
    metric: str | None,
    queries: Any,
    source_queries: Any,
    qrels: Any,
    sample: Any,
) -> None:
    for name, value, known in (
        ("direction", direction, DIRECTIONS),
        ("solver", solver, ("auto", *SOLVERS)),
        ("objective", objective, OBJECTIVES),
        ("effort", effort, EFFORTS),
        ("metric", metric or METRICS[0], METRICS),
    ):
        if value not in known:
            raise UsageError(f"unknown {name} {value!r}: choose one of {', '.join(map(str, known))}")
    for name, given in (("--source-queries", source_queries), ("--qrels", qrels)):
        if given is not None and queries is None:
            raise UsageError(f"{name} needs --queries, the new model's vectors of the same queries")
    if objective == "rank" and solver != "sgd":
        raise UsageError(f"--objective rank goes with --solver sgd, not {solver}; auto tries it by itself")
    if objective == "rank" and direction != "document":
        raise UsageError("--objective rank is for maps of --direction document: it trains what queries find")
    if sample is not None and not Path(sample).is_file():
        raise UsageError(f"{sample}: no such file; `vecferry sample` writes it")


def check_lossy(readers: list[Reader], allowed: bool) -> None:
    """Refuse quantised codes unless they are allowed."""
    for info in (reader.info for reader in readers):
        if info.lossy and not allowed:
            raise UsageError(
                f"{info.uri} holds quantised codes ({info.index or info.dtype}), from which vectors come back only "
                "roughly: --allow-lossy accepts that"
            )


def _check_apart(old: Reader, new: Reader) -> None:
    """Refuse one store as both sides before all of it is read."""
    uri = old.info.uri
    if old is new or (uri == new.info.uri and Path(Uri.parse(uri).path).exists()):
        raise UsageError(f"{uri} is both source and target: the target must hold the new model's vectors")


def _side(info: StoreInfo, model: str | None, prompt: str | None, name: str) -> Side:
    suffix = f" [{prompt}]" if prompt else ""
    if info.space is not None and model is None and info.space.endswith(suffix):
        return Side(info.dim, info.space.removesuffix(suffix), prompt)
    side = Side(info.dim, model, prompt)
    if info.space is not None and side.space != info.space:
        given = repr(side.space) if model else f"prompt {prompt!r}"
        raise IncompatibleError(
            f"{info.uri} records that it is in the space {info.space!r}, the {name} was declared as {given}: "
            "declare what it is, or give another store"
        )
    return side


def _fingerprint(info: StoreInfo, norms: Norms, vectors: Floats) -> dict[str, Any]:
    """Describe the source so that another index can be told from it."""
    mean = np.linalg.norm(vectors.mean(axis=0, dtype=np.float64))
    header = {"uri": info.uri, "kind": info.kind, "count": info.count, "dim": info.dim, "metric": info.metric}
    return header | {"median_norm": norms.median, "norm_of_mean": float(f"{mean:.6g}")}
