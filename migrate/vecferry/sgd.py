"""Least squares by minibatches in torch: the Linear(SGD) of arXiv 2608.05980, whose settings weren't published."""

from __future__ import annotations

import numpy as np

from vecferry.batch import Floats
from vecferry.errors import MissingDependencyError


def descend(X: Floats, Y: Floats, *, seed: int, steps: int, batch: int, rate: float) -> Floats:
    """Minimise `mean((X W - Y)^2)` by Adam with a cosine-decayed rate from W = 0, and return W `[d_source, d_target]`.

    X and Y should be centred and of unit mean square, which is what `rate` is relative to. Each epoch is a seeded
    permutation; its last rows are left out where they don't fill a batch. One torch thread and the CPU, so that the
    same rows and seed give the same bytes. Raises MissingDependencyError without torch.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "torch", "the sgd solver") from error
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, y = torch.from_numpy(X), torch.from_numpy(Y)
        batch = min(batch, len(x))
        weight = torch.zeros(x.shape[1], y.shape[1])
        optimizer = torch.optim.Adam([weight], lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        order = torch.Generator().manual_seed(seed)
        step = 0
        while step < steps:
            rows = torch.randperm(len(x), generator=order)
            for start in range(0, len(x) - batch + 1, batch)[: steps - step]:
                chosen = rows[start : start + batch]
                weight.grad = x[chosen].T @ (x[chosen] @ weight - y[chosen]) * (2 / batch)
                optimizer.step()
                schedule.step()
                step += 1
        found: Floats = weight.numpy().astype(np.float32)
        return found
    finally:
        torch.set_num_threads(threads)
