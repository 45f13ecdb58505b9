"""How good a map is by the number of pairs it was learned from, and what twice as many would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecferry.linear import LinearMap
from vecferry.measured import Curve, Point
from vecferry.recall import RESAMPLES, Values, interval_ends

PARTS = (1 / 8, 1 / 4, 1 / 2, 1.0)
LEAST = 100
"""Pairs of the smallest part at least."""
DECAYS = np.linspace(0.05, 1.5, 30)
"""Exponents c that are tried: a curve is fitted as `a - b n^-c`, b at least 0."""

Rows = NDArray[np.int64]


def learning_curve(
    learn: Callable[[Rows], LinearMap], measure: Callable[[LinearMap], Values], pairs: int, metric: str, *, seed: int
) -> Curve | None:
    """Return a metric against the number of pairs, on nested parts of them, and as predicted for twice as many.

    `learn` makes a map from some of the pairs; `measure` gives its value for each held-out query `[q]`. None where
    fewer than three parts are large enough to tell a curve from a line.

    Learning curves follow power laws (Hestness et al. 2017), so the prediction is that of `a - b n^-c`. Its interval is
    a 95 % bootstrap over queries, as in `recall.interval`; it doesn't know which pairs would come.
    """
    sizes = [n for part in PARTS if (n := round(part * pairs)) >= LEAST]
    if len(sizes) < 3:
        return None
    order = np.random.default_rng(seed).permutation(pairs)
    values = np.stack([measure(learn(np.sort(order[:n]))) for n in sizes])
    drawn = np.random.default_rng(seed).integers(0, values.shape[1], (RESAMPLES, values.shape[1]))
    means = np.concatenate([values.mean(axis=1, keepdims=True), values[:, drawn].mean(axis=2)], axis=1)
    doubled = foretell(np.array(sizes, np.float64), means, 2.0 * pairs).clip(0, 1)
    columns = np.concatenate([means, doubled[None]]).round(4)
    ends = interval_ends(values[-1] - values[-1].mean())
    lows, highs = np.quantile(columns[:, 1:], ends, axis=1).round(4)
    points = [
        Point(float(n), float(value), float(low), float(high), predicted=n > pairs)
        for n, value, low, high in zip([*sizes, 2 * pairs], columns[:, 0], lows, highs, strict=True)
    ]
    return Curve(metric, "pairs", tuple(points))


def foretell(sizes: Values, values: Values, size: float) -> Values:
    """Fit `a - b n^-c` to each column of `values [len(sizes), m]` by least squares; return what it gives at a size."""
    best = np.full(values.shape[1], np.inf)
    found: Values = values[-1].copy()
    centred = values - values.mean(axis=0)
    for decay in DECAYS:
        x = -(sizes**-decay)
        spread = x - x.mean()
        slope = (spread @ centred / (spread @ spread)).clip(0)
        error = ((centred - np.outer(spread, slope)) ** 2).sum(axis=0)
        better = error < best
        best[better] = error[better]
        found[better] = (values.mean(axis=0) + slope * (-(size**-decay) - x.mean()))[better]
    return found


def to_json(curve: Curve) -> dict[str, Any]:
    """Return what a card keeps of a curve."""
    *measured, last = curve.points
    return {
        "metric": curve.metric,
        "pairs": [int(p.x) for p in measured],
        "values": [p.value for p in measured],
        "doubled": {"pairs": int(last.x), "value": last.value, "low": last.low, "high": last.high},
    }
