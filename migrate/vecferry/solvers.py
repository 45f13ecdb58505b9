"""Learning a map from pairs: pure functions `(X, Y) -> Solution` over rows of the same texts in both spaces.

Every solver works in float64 on one BLAS thread, because LAPACK's bits change with the number of threads: the same
pairs and seed give the same bytes. Formulas and their sources are in the docstrings; "paper" is arXiv 2608.05980.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from vecferry.batch import Floats
from vecferry.errors import DataError
from vecferry.linear import normalize
from vecferry.sgd import descend

Doubles = NDArray[np.float64]

LOO_ROWS = 4000
_ROWS = 1024  # of each piece in which sums over all pairs are taken, so that float64 copies stay small


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Hold a learned `y = x @ weight + bias`: float32 `[d_source, d_target]` and `[d_target]` (None for no bias).

    `mean` is what is subtracted from rows before they are normalised, None where they are taken as they are.
    `parameters` say how it was found (JSON values), `warnings` what looked suspicious, for people to read.
    """

    weight: Floats
    bias: Floats | None
    parameters: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    mean: Floats | None = None

    def predict(self, x: Floats) -> Floats:
        """Return `[n, d_target]` for rows `[n, d_source]`, not normalised."""
        y: Floats = prepare(x, self.mean) @ self.weight
        return y if self.bias is None else y + self.bias


class Solver(Protocol):
    """What every solver is."""

    def __call__(self, X: Floats, Y: Floats, *, seed: int = 0) -> Solution:
        """Learn a map from rows `X [n, d_source]` to rows `Y [n, d_target]`; raise DataError if they can't give one."""


def pinv(X: Floats, Y: Floats, *, seed: int = 0) -> Solution:
    """Solve `W = X^+ Y`, the literal Linear(pinv) of the paper: no centring, no bias.

    It is the least-squares map of least norm. Near n = d it interpolates noise and is at its worst (double descent);
    it warns below n = 2 d. Singular values below `max(n, d)` float64 rounding errors of the largest count as zero.
    """
    n, d = check(X, Y)
    with threadpool_limits(1, "blas"):
        weight, _, rank, _ = np.linalg.lstsq(X.astype(np.float64), Y.astype(np.float64), rcond=None)
    warnings = []
    if n < 2 * d:
        warnings.append(
            f"pinv on {n} pairs of {d} dimensions: below {2 * d} pairs it fits noise; use ridge, or more pairs"
        )
    if rank < min(n, d):
        warnings.append(f"the source vectors span {rank} of {min(n, d)} dimensions")
    return _solution(weight, None, {"rank": int(rank)}, warnings)


def ridge(X: Floats, Y: Floats, *, seed: int = 0, rows: int = LOO_ROWS) -> Solution:
    """Solve centred ridge regression with a bias, lambda by exact leave-one-out on at most `rows` seeded rows.

    `W = (Xc'Xc + lambda I)^-1 Xc'Yc`, `bias = mean(Y) - mean(X) W`. Lambda is searched from 1e-6 to 100 times the
    mean squared singular value of those rows, down to half decades around the best, and used unchanged for all rows:
    the noise it stands for doesn't grow with their number.
    """
    n, _ = check(X, Y)
    chosen = np.sort(np.random.default_rng(seed).permutation(n)[:rows]) if n > rows else slice(None)
    with threadpool_limits(1, "blas"):
        search = LeaveOneOut(X[chosen], Y[chosen])
        errors = {k: search.error(_half_decades(k) * search.scale) for k in range(-12, 5, 4)}
        for step in (2, 1):
            best = _best(errors)
            errors |= {k: search.error(_half_decades(k) * search.scale) for k in (best - step, best + step)}
        best = _best(errors)
        penalty = _half_decades(best) * search.scale
        mean_x, mean_y, gram, cross = moments(X, Y)
        weight = shrunken(gram, cross, penalty)
    parameters = {
        "lambda": penalty,
        "lambda_relative": _half_decades(best),
        "loo_rows": min(n, rows),
        "loo_error": errors[best],
    }
    return _solution(weight, mean_y - mean_x @ weight, parameters, [])


def procrustes(X: Floats, Y: Floats, *, seed: int = 0, scaled: bool = True) -> Solution:
    """Solve the centred orthogonal Procrustes problem, scaled to least squares (`scaled=False`: a pure rotation).

    `R = U V'` of `Xc'Yc = U S V'`, `c = tr(S) / ||Xc R||^2`, `y = c (x - mean(X)) R + mean(Y)`. Dimensions that differ
    give the rectangular `U V'`, which is what zero-padding the smaller space gives.
    """
    check(X, Y)
    with threadpool_limits(1, "blas"):
        mean_x, mean_y, gram, cross = moments(X, Y)
        scale, rotation = turned(gram, cross)
    scale = scale if scaled else 1.0
    weight = scale * rotation
    return _solution(weight, mean_y - mean_x @ weight, {"scale": scale}, [])


def sgd(X: Floats, Y: Floats, *, seed: int = 0, steps: int = 2000, batch: int = 256, rate: float = 1e-2) -> Solution:
    """Solve centred least squares with a bias by minibatches in torch (the paper's Linear(SGD)).

    The loss is the mean squared error; more `steps` lead to the least-squares map. The paper gives no settings: these
    are ours. Raises MissingDependencyError without torch.
    """
    check(X, Y)
    mean_x, mean_y = X.mean(0, dtype=np.float64), Y.mean(0, dtype=np.float64)
    x, y = X - mean_x, Y - mean_y
    size_x, size_y = (float(np.sqrt(np.mean(a * a))) or 1.0 for a in (x, y))
    scaled = (x / size_x).astype(np.float32), (y / size_y).astype(np.float32)
    weight = descend(*scaled, seed=seed, steps=steps, batch=batch, rate=rate).astype(np.float64) * (size_y / size_x)
    parameters = {"steps": steps, "batch": batch, "rate": rate, "optimizer": "adam"}
    return _solution(weight, mean_y - mean_x @ weight, parameters, [])


SOLVERS: Mapping[str, Solver] = MappingProxyType({"ridge": ridge, "pinv": pinv, "procrustes": procrustes, "sgd": sgd})
"""The solvers by name; the first is the default."""


class LeaveOneOut:
    """Give the exact leave-one-out error of centred ridge regression for any lambda, from one decomposition.

    With `Xc = U S V'`, leaving row i out leaves the residual `e_i / (1 - h_ii)`, `h_ii = 1/m + sum_j U_ij^2 f_j`,
    `f = S^2 / (S^2 + lambda)`. Residuals are written as `r_i + U_i (1 - f) U'Yc`, where r is what no lambda explains,
    so that nothing cancels where ridge nearly interpolates; their squares then need d x d sums only.
    """

    def __init__(self, X: Floats, Y: Floats) -> None:
        m = len(X)
        x, y = (a - a.mean(0, dtype=np.float64) for a in (X, Y))
        self._u, s, _ = np.linalg.svd(x, full_matrices=False)
        self._s2: Doubles = s * s
        self.scale = float(self._s2.mean()) or 1.0
        z = self._u.T @ y
        y -= self._u @ z
        self._rest: Doubles = np.einsum("ij,ij->i", y, y)
        self._cross: Doubles = y @ z.T * self._u
        self._outer: Doubles = z @ z.T
        self._u2: Doubles = self._u * self._u
        self._free: Doubles = 1 - 1 / m - self._u2.sum(1)  # of 1 - h_ii, what no direction takes
        self._buffer = np.empty_like(self._u)

    def error(self, penalty: float) -> float:
        """Return the mean squared length of the left-out residuals at this lambda."""
        kept = penalty / (self._s2 + penalty)  # 1 - f
        weights = 1 / (self._free + self._u2 @ kept) ** 2
        scaled = np.multiply(self._u, np.sqrt(weights)[:, None], out=self._buffer)
        total = weights @ (self._rest + 2 * (self._cross @ kept))
        total += np.sum(kept[:, None] * self._outer * kept * (scaled.T @ scaled))
        return float(total / len(weights))


def _half_decades(k: int) -> float:
    return float(10 ** (k / 2))


def _best(errors: dict[int, float]) -> int:
    return min(errors, key=lambda k: (errors[k], -k))  # of equals, which constant vectors give, the largest


def check(X: Floats, Y: Floats) -> tuple[int, int]:
    """Return (n, d_source) of pairs that a map can be learned from; raise DataError for others."""
    if X.ndim != 2 or Y.ndim != 2 or len(X) != len(Y):
        raise DataError(f"pairs must be two matrices of as many rows, not {list(X.shape)} and {list(Y.shape)}")
    if len(X) < 2:
        raise DataError(f"{len(X)} pairs: a map can't be learned from fewer than 2, and a good one takes thousands")
    for side, rows in (("source", X), ("target", Y)):
        if not np.isfinite(rows).all():
            raise DataError(f"the {side} vectors of the pairs hold NaN or infinite numbers: leave those rows out")
    return len(X), X.shape[1]


def prepare(x: Floats, mean: Floats | None) -> Floats:
    """Return rows less `mean`, of length 1, as `LinearMap` makes them with `pre="center_l2"`; as they are for None."""
    if mean is None:
        return x
    y = x - mean
    normalize(y)
    return y


def shrunken(gram: Doubles, cross: Doubles, penalty: float) -> Doubles:
    """Return the ridge weight `(Xc'Xc + penalty I)^-1 Xc'Yc`."""
    weight: Doubles = np.linalg.solve(gram + penalty * np.eye(len(gram)), cross).astype(np.float64, copy=False)
    return weight


def turned(gram: Doubles, cross: Doubles) -> tuple[float, Doubles]:
    """Return the scale of least squares, and the orthogonal `R = U V'` of `Xc'Yc = U S V'`."""
    u, s, vt = np.linalg.svd(cross, full_matrices=False)
    rotation: Doubles = (u @ vt).astype(np.float64, copy=False)
    spread = float(np.sum(rotation * (gram @ rotation)))  # ||Xc R||^2
    return float(s.sum()) / spread if spread > 0 else 0.0, rotation


def moments(X: Floats, Y: Floats) -> tuple[Doubles, Doubles, Doubles, Doubles]:
    """Return both means, `Xc'Xc` and `Xc'Yc` in float64."""
    mean_x, mean_y = X.mean(0, dtype=np.float64), Y.mean(0, dtype=np.float64)
    gram = np.zeros((X.shape[1], X.shape[1]))
    cross = np.zeros((X.shape[1], Y.shape[1]))
    for start in range(0, len(X), _ROWS):
        x = X[start : start + _ROWS] - mean_x
        y = Y[start : start + _ROWS] - mean_y
        gram += x.T @ x
        cross += x.T @ y
    return mean_x, mean_y, gram, cross


def _solution(
    weight: NDArray[np.floating[Any]],
    bias: NDArray[np.floating[Any]] | None,
    parameters: dict[str, Any],
    warnings: list[str],
) -> Solution:
    return Solution(
        weight=np.ascontiguousarray(weight, np.float32),
        bias=None if bias is None else bias.astype(np.float32),
        parameters=parameters,
        warnings=tuple(warnings),
    )
