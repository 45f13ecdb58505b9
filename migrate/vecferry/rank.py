"""Rank distillation in torch: a map trained to order documents for queries as the new model does.

Least squares brings every vector near its true one; a search only needs the right documents in front. Each step takes
some queries and some documents, and lowers the listwise divergence (ListNet, Cao et al. 2007)

    KL(p || softmax(s cos(q, y_j)))    over documents j,  y_j = x_j W + b,

with p uniform over the few documents that are nearest to q in truth, and s a number learned along. [own: with p the
softmax of the true scores, or more steps at a higher rate, maps over-fit between some pairs of models]
It starts from another map, and how far it goes is a matter of few and small steps, which must be judged on rows and
queries held out (`auto` does). Documents stand in for a part of the queries, moved to where queries are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vecferry.batch import Floats
from vecferry.errors import MissingDependencyError
from vecferry.solvers import Solution, prepare, ridge

DOCUMENTS, QUERIES = 1000, 256
"""Of one step."""
REAL = 0.6
"""The part of a step's queries that are queries, and not documents."""
NEAREST = 3
"""Documents of a step that count as right for a query."""
SHARPNESS = 3.2
"""Standard deviation of the scores from which the softmax is taken, at the start."""
BIAS_RATE, SHARPNESS_RATE = 0.5, 0.02
"""Learning rates: of the bias, as a part of the weight's, and of log s."""
BETAS = (0.9, 0.98)


@dataclass(frozen=True, slots=True)
class Strength:
    """Say how far distillation goes: Adam's rate, decayed by a cosine, and the number of steps."""

    rate: float
    steps: int


STRENGTHS = {"gentle": Strength(3e-5, 120), "firm": Strength(1e-4, 300), "strong": Strength(3e-4, 300)}


def rank(X: Floats, Y: Floats, *, queries: Floats | None = None, seed: int = 0) -> Solution:
    """Distil gently from ridge, with `queries [q, d_target]` of the target space where given; for cosine.

    Raises MissingDependencyError without torch, and DataError as every solver does.
    """
    start = ridge(X, Y, seed=seed)
    solution = distil(X, Y, queries, start, STRENGTHS["gentle"], seed=seed)
    return replace(solution, parameters=start.parameters | solution.parameters)


def distil(
    X: Floats, Y: Floats, queries: Floats | None, start: Solution, strength: Strength, *, seed: int = 0
) -> Solution:
    """Train on from a map of rows `X` to rows `Y` of length 1; without queries, documents are all that ask.

    One torch thread and the CPU, so that the same rows and seed give the same bytes. Raises MissingDependencyError
    without torch.
    """
    torch = load_torch()
    rng = np.random.default_rng(seed)
    n, unit = len(X), torch.nn.functional.normalize
    x = prepare(X, start.mean)
    mean = x.mean(0, dtype=np.float64).astype(np.float32)
    bias = 0 if start.bias is None else start.bias
    with one_thread(torch):
        rows, true = torch.from_numpy(x - mean), torch.from_numpy(Y)
        asked = true if queries is None else unit(torch.from_numpy(queries), dim=1)
        stand_ins = true if queries is None else unit(true - true.mean(0) + asked.mean(0), dim=1)
        real = 0 if queries is None else round(REAL * QUERIES)
        weight = torch.from_numpy(start.weight.copy()).requires_grad_()
        centre = torch.from_numpy(np.float32(bias + mean @ start.weight)).requires_grad_()
        with torch.no_grad():
            spread = (asked[:QUERIES] @ unit(rows @ weight + centre, dim=1).T).std(1).mean().item()
        sharpness = torch.tensor(math.log(SHARPNESS / max(spread, 1e-6))).requires_grad_()
        rates = strength.rate, strength.rate * BIAS_RATE, SHARPNESS_RATE
        groups = [{"params": [p], "lr": r} for p, r in zip((weight, centre, sharpness), rates, strict=True)]
        adam = torch.optim.Adam(groups, betas=BETAS)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, strength.steps)
        for _ in range(strength.steps):
            askers = rng.choice(len(asked), real, replace=real > len(asked))
            inner = rng.choice(n, min(QUERIES - real, n), replace=False)
            among = rng.choice(n, min(DOCUMENTS, n), replace=False)
            q = torch.cat([asked[askers], stand_ins[inner]])
            own = torch.from_numpy(np.r_[np.full(real, -1), inner][:, None] == among)  # none is its own neighbour
            truth = (q @ true[among].T).masked_fill(own, -math.inf)
            scores = sharpness.exp() * (q @ unit(rows[among] @ weight + centre, dim=1).T)
            loss = divergence(scores.masked_fill(own, -math.inf), truth, min(NEAREST, len(among) - 1))
            adam.zero_grad()
            loss.backward()
            adam.step()
            schedule.step()
        found, moved = weight.detach().numpy(), centre.detach().numpy()
    given = {"rate": strength.rate, "steps": strength.steps, "batch": [QUERIES, DOCUMENTS], "nearest": NEAREST}
    return replace(
        start,
        weight=found,
        bias=(moved - mean @ found).astype(np.float32),
        parameters={"objective": "rank", **given, "queries": 0 if queries is None else len(queries)},
    )


def divergence(scores: Any, truth: Any, nearest: int) -> Any:
    """Return the mean over queries of `KL(p || softmax(scores))`, p uniform over the `nearest` best by `truth`.

    Tensors `[q, m]`; a score of -inf leaves a document out.
    """
    right = truth.topk(nearest, dim=1).indices
    return -scores.log_softmax(dim=1).gather(1, right).mean() - math.log(nearest)


def load_torch() -> Any:
    """Import torch; raise MissingDependencyError without it."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "torch", "rank distillation") from error
    return torch


@contextmanager
def one_thread(torch: Any) -> Iterator[None]:
    """Let torch use one thread, then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
