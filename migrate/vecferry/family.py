"""Linear maps in closed form around ridge and Procrustes, each with predictions that leave out the row predicted.

What least squares minimises isn't what a search needs. A member of the family is ridge regression changed in up to six
ways (see `Setting`), each of which pays between some pairs of models. Unchanged it is `solvers.ridge`, fully turned it
is `solvers.procrustes`. All are linear maps, as quick as any.

The *tilt* is the one that matters most. Ridge predicts uncertain rows near the mean, that is, short. Cosine divides by
the length, so that short rows come out as near to a query as sure ones: noise floats up. Adding one constant vector
`t u` to all predictions, along a direction u in which queries have next to nothing, leaves every inner product with a
query as it is (up to a constant for each query) but makes short rows end up near u, far from all queries. As t grows
the ranking goes from that of the cosine to that of the inner product, in which an uncertain row counts for less. [own]

Everything is numpy in float64 on one BLAS thread: the same pairs give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from threadpoolctl import threadpool_limits

from vecferry.batch import Floats
from vecferry.solvers import Doubles, Solution, moments, prepare, ridge, shrunken, turned

FOLDS = 4
"""In which rotations are predicted out of fold: Procrustes has no closed form for leaving one row out."""
RATIOS = (0.1, 100.0)
"""Limits of true to predicted variance, beyond which a direction is scaled no further."""
TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Setting:
    """Name one member of the family.

    centred   subtract the mean of the source vectors, then normalise them, before anything else: what is common to all
              texts takes no part in their length. Not where vectors are of many lengths (a map normalises once)
    penalty   lambda, as a part of the one with the least squared error left out
    unshrunk  to which power (0 to 1) the variance that ridge took from each principal direction of the target is given
              back
    turned    the part of Procrustes in the weight, from 0 (none) to 1 (nothing else)
    tilt      length of a constant vector along the direction in which no query looks, in units of the predictions'
              spread (the root of their total variance); see the module
    mean      factor of the target's mean vector
    """

    centred: bool = False
    penalty: float = 1.0
    unshrunk: float = 0.0
    turned: float = 0.0
    tilt: float = 0.0
    mean: float = 1.0


RIDGE = Setting()
PROCRUSTES = Setting(turned=1.0)


class Family:
    """Fit members of the family, and predict every row by each of them from the other rows.

    X, Y   rows `[n, d_source]`, `[n, d_target]` of the same texts
    away   `[d_target]` of length 1, along which no query looks (see `least_asked`)
    seed   for the folds of rotations, and the rows on which lambda is searched
    """

    def __init__(self, X: Floats, Y: Floats, away: Doubles, *, seed: int = 0) -> None:
        self._x, self._y, self._away, self._seed = X, Y, away, seed
        self._mean = Y.mean(0, dtype=np.float64)
        self._rows: dict[bool, _Rows] = {}
        self._left_out: dict[tuple[bool, float], Doubles] = {}

    def predict(self, setting: Setting) -> Floats:
        """Return `[n, d_target]`, not normalised: each row as the member predicts it that is fitted without that row.

        Of ridge that is exact. Rotations are predicted in four folds, and the few numbers by which whole directions
        are scaled, or all rows moved, are taken from all rows.
        """
        with threadpool_limits(1, "blas"):
            z = self._deviations(setting)
            predicted: Floats = (z + (setting.mean * self._mean + self._tilt(setting, z))).astype(np.float32)
        return predicted

    def fit(self, setting: Setting, X: Floats | None = None, Y: Floats | None = None) -> Solution:
        """Fit a member, on other rows than the family's where given: a part of them, or more of their kind.

        Lambda and the numbers that scale and move stay those found on the family's rows.
        """
        x, y = (self._x if X is None else X), (self._y if Y is None else Y)
        mean = x.mean(0, dtype=np.float64).astype(np.float32) if setting.centred else None
        with threadpool_limits(1, "blas"):
            mean_x, mean_y, gram, cross = moments(prepare(x, mean), y)
            weight = np.zeros(cross.shape)
            if setting.turned < 1:
                shrunk = shrunken(gram, cross, self.penalty(setting))
                weight += (1 - setting.turned) * (shrunk @ self._gain(setting) if setting.unshrunk else shrunk)
            if setting.turned > 0:
                scale, rotation = turned(gram, cross)
                weight += setting.turned * scale * rotation
            tilt = self._tilt(setting, self._deviations(setting)) if setting.tilt else 0.0
            bias = setting.mean * mean_y + tilt - mean_x @ weight
        return Solution(
            np.ascontiguousarray(weight, np.float32),
            bias.astype(np.float32),
            mean=mean,
        )

    def penalty(self, setting: Setting) -> float:
        """Return a member's lambda."""
        return setting.penalty * self._prepared(setting.centred).penalty

    def _deviations(self, setting: Setting) -> Doubles:
        """Return predictions less the target's mean, before they are moved."""
        z = np.zeros(self._y.shape)
        if setting.turned < 1:
            shrunk = self._ridge(setting)
            z += (1 - setting.turned) * (shrunk @ self._gain(setting) if setting.unshrunk else shrunk)
        if setting.turned > 0:
            z += setting.turned * self._prepared(setting.centred).rotated
        return z

    def _tilt(self, setting: Setting, deviations: Doubles) -> Doubles:
        spread = float(np.sqrt(deviations.var(0).sum()))
        return setting.tilt * spread * self._away

    def _gain(self, setting: Setting) -> Doubles:
        """Return what gives back variance along the target's principal directions `[d_target, d_target]`."""
        axes, variance = self._principal
        left = (self._ridge(setting) @ axes).var(0)
        ratio = np.divide(variance, left, out=np.ones_like(left), where=left > TINY * left.max())
        gain: Doubles = (axes * ratio.clip(*RATIOS) ** (setting.unshrunk / 2)) @ axes.T
        return gain

    @cached_property
    def _principal(self) -> tuple[Doubles, Doubles]:
        """The target's principal directions, as columns, and the variance along each."""
        y = self._y - self._mean
        variance, axes = np.linalg.eigh(y.T @ y / len(y))
        return axes, variance.clip(0)

    def _ridge(self, setting: Setting) -> Doubles:
        key = setting.centred, setting.penalty
        if key not in self._left_out:
            self._left_out[key] = self._prepared(setting.centred).without_each(self.penalty(setting))
        return self._left_out[key]

    def _prepared(self, centred: bool) -> _Rows:
        if centred not in self._rows:
            mean = self._x.mean(0, dtype=np.float64).astype(np.float32) if centred else None
            self._rows[centred] = _Rows(prepare(self._x, mean), self._y, self._seed)
        return self._rows[centred]


class _Rows:
    """Decompose rows prepared in one way, once for all members that take them so."""

    def __init__(self, x: Floats, y: Floats, seed: int) -> None:
        self._x, self._y, self._seed = x, y, seed
        self.penalty: float = ridge(x, y, seed=seed).parameters["lambda"]
        mean_x, mean_y, gram, cross = moments(x, y)
        values, axes = np.linalg.eigh(gram)
        self._values: Doubles = values.clip(0)
        self._projected: Doubles = (x - mean_x) @ axes
        self._squares: Doubles = self._projected**2
        self._cross: Doubles = axes.T @ cross
        self._deviations: Doubles = y - mean_y

    def without_each(self, penalty: float) -> Doubles:
        """Return ridge predictions less the mean of all rows, each row left out: `y - e / (1 - h)`.

        e and h are residual and leverage of the fit to all rows, as in `solvers.LeaveOneOut`.
        """
        kept = 1 / (self._values + penalty)
        leverage = 1 / len(self._projected) + self._squares @ kept
        residual = self._deviations - self._projected @ (self._cross * kept[:, None])
        predicted: Doubles = self._deviations - residual / (1 - leverage).clip(TINY)[:, None]
        return predicted

    @cached_property
    def rotated(self) -> Doubles:
        """Predictions of centred, scaled Procrustes less the mean of all rows, out of fold."""
        fold = np.random.default_rng(self._seed).permutation(len(self._x)) % FOLDS
        out = np.empty(self._deviations.shape)
        mean = self._y.mean(0, dtype=np.float64)
        for f in range(FOLDS):
            held = fold == f
            mean_x, mean_y, gram, cross = moments(self._x[~held], self._y[~held])
            scale, rotation = turned(gram, cross)
            out[held] = (self._x[held] - mean_x) @ (scale * rotation) + (mean_y - mean)
        return out


def least_asked(queries: Floats) -> Doubles:
    """Return the direction `[d]` with the least of queries `[q, d]` in it: the last one of their second moment."""
    with threadpool_limits(1, "blas"):
        q = queries.astype(np.float64)
        direction: Doubles = np.linalg.eigh(q.T @ q)[1][:, 0]
    return direction
