"""Agreement at the size of the real index, foretold from a hold-out that is many times smaller.

A small corpus flatters: the more documents compete, the fewer true neighbours a translated search finds. What counts
is how deep in the ranking one looks, so agreement@k depends on the *share* k / m of the corpus that is returned, and
besides only weakly on k. The ten nearest of 15,000 are the same share as 1.3 of 2,000: agreement@1 and agreement@2 of
the hold-out speak of a corpus eight times its size, which no curve through sizes alone does. Hence the form, for a
corpus of m documents, fitted to all k up to the one asked for and to random parts of the hold-out:

    logit agreement@k = a + b x + c x^2 + (1/k - 1/K)(d + e x) + (1/k^2 - 1/K^2) f,    x = log(k / m) - log(K / N)

of which `a` is what is asked for: K of N documents. In a - f the fit is generalised least squares with the covariance
of what was measured. How far `c` and `e` may be from 0, and what was measured from the form, is held by `BEND`, `TWIST`
and `ROUGH`: priors (Gelman et al. 2013, section 14.8), so that the interval knows that the form is uncertain, and grows
with the distance. `benchmarks/bench_extrapolation.py` chose them on half of its pairs of models. A corpus of tight
clusters or near duplicates bends more than those do, so looser priors are tried too, and averaged by how well they
explain the points (Hoeting et al. 1999): texts pay for it with intervals that are a tenth wider, clusters are told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vecferry.errors import UsageError
from vecferry.recall import Places, Truth, Values, interval, scores_at

VERIFIED = 16
"""How many times the hold-out an index may be for a number to count as verified."""
LEAST = 20
"""Held-out documents needed for each of k, or of 10 where k is less."""

BEND, TWIST, ROUGH = 0.02, 0.03, 0.02
"""Standard deviations on the scale of logits: of c, of e, and of a measured point from the form."""
LOOSE = (1, 2, 4, 8, 16)
"""Factors of the first two, for corpora of another build; each is half as likely beforehand as the one before."""
PARTS = (1.0, math.sqrt(0.5), 0.5)
"""Parts of the hold-out that stand for smaller corpora."""
DRAWS = 4  # of parts
GROUPS = 16  # of documents, left out in turn

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """Hold an agreement foretold for a corpus of `documents`, from `held_out` of them, with its 95 % interval."""

    value: float
    low: float
    high: float
    documents: int
    held_out: int

    @property
    def verified(self) -> bool:
        """Whether the corpus is at most `VERIFIED` times the hold-out; beyond that it is extrapolated, unverified."""
        return self.documents <= VERIFIED * self.held_out


def depth(k: int, documents: int, size: int | None = None) -> int:
    """Return how many places of each query `SizeCurve.of` needs, so that a random half of them still holds k.

    To measure in parts of `size`, too, where that is less than half, those must hold k.
    """
    top, part = max(k, 10), min(PARTS)
    if size is not None:
        part = min(part, size / documents)
    return min(documents, math.ceil((top + 3 * math.sqrt(top) + 5) / part))


@dataclass(frozen=True, slots=True, eq=False)
class SizeCurve:
    """Hold agreement@k of one way of searching as it depends on the number of documents.

    k, held_out  what is asked for, and the number of held-out documents
    ks, sizes    `[c]` k and number of documents of each measured point
    values       `[c, q]` their agreement for each query, the mean over parts of that size
    without      `[g, c, q]` the same without one group of documents after another
    """

    k: int
    held_out: int
    ks: Values
    sizes: Values
    values: Values
    without: Values
    ranks: _Ranks
    seed: int

    @classmethod
    def of(cls, truth: Truth, found: Places, k: int, *, seed: int = 0) -> SizeCurve:
        """Measure the points of the curve; `truth` and `found` `[q, depth]` must be `depth(k, n)` places deep.

        Raises UsageError for fewer documents than `LEAST` allows, or fewer than two queries.
        """
        n, (queries, places) = len(truth.documents), found.shape
        if n < LEAST * max(k, 10):
            least = LEAST * max(k, 10)
            raise UsageError(f"agreement@{k} at another size needs at least {least:,} held-out documents, not {n:,}")
        if queries < 2 or min(places, truth.places.shape[1]) < depth(k, n):
            have = f"{queries:,} queries, {min(places, truth.places.shape[1])} places"
            raise UsageError(f"agreement@{k} at another size needs 2 queries, {depth(k, n)} places deep, not {have}")
        ranks = _Ranks.of(truth, found)
        ks = np.unique([k, *np.geomspace(1, max(k, 10), 6).round()]).astype(np.int64)
        sizes = np.array([round(part * n) for part in PARTS])
        rng = np.random.default_rng(seed)
        orders = [rng.permutation(n) for _ in range(DRAWS)]
        group = rng.permutation(n) % GROUPS
        values = ranks.points(ks, sizes, orders, np.ones(n, bool))
        without = np.stack([ranks.points(ks, sizes, orders, group != g) for g in range(GROUPS)])
        points = np.tile(ks, len(sizes)).astype(np.float64), np.repeat(sizes, len(ks)).astype(np.float64)
        return cls(k, n, *points, values, without, ranks, seed)

    def at(self, size: int) -> Extrapolated:
        """Return agreement@k among `size` documents: measured up to the size of the hold-out, foretold beyond it.

        The interval is for other queries and another draw of held-out documents, and for a form that isn't exact.
        """
        if size <= self.held_out:
            return Extrapolated(*self._measured(size), size, self.held_out)
        queries = self.values.shape[1]
        trials = self.ks * queries
        share = (self.values.mean(axis=1) * trials + 0.5) / (trials + 1)  # keeps 0 and 1 off the ends of the logit
        slope = 1 / (share * (1 - share))
        sampling = np.cov(self.values * slope[:, None]) / queries
        x = np.log(self.ks / self.sizes) - math.log(self.k / size)
        few, fewer = 1 / self.ks - 1 / self.k, 1 / self.ks**2 - 1 / self.k**2
        form = _Form(
            np.log(share / (1 - share)),
            sampling + ROUGH**2 * np.eye(len(slope)),
            self._shared(slope),
            np.stack([np.ones_like(x), x, few, fewer], axis=1),
            np.stack([BEND * x * x, TWIST * x * few], axis=1),
        )
        fits = [form.fit(factor) for factor in LOOSE]
        likelihood = np.array([fit.likelihood - math.log(factor) for fit, factor in zip(fits, LOOSE, strict=True)])
        belief = np.exp(likelihood - likelihood.max())
        belief /= belief.sum()
        logits = np.array([fit.weights @ form.points for fit in fits])
        variances = np.array([fit.variance for fit in fits])
        logit = float(belief @ logits)
        error = math.sqrt(belief @ (variances + (logits - logit) ** 2))
        low, value, high = (1 / (1 + math.exp(-(logit + z * error))) for z in (-1.96, 0, 1.96))
        return Extrapolated(value, low, high, size, self.held_out)

    def _measured(self, size: int) -> tuple[float, float, float]:
        if size < self.k:
            raise UsageError(f"k = {self.k} can't be found among {size} documents")
        rng = np.random.default_rng(self.seed)
        orders = [rng.permutation(self.held_out) for _ in range(DRAWS)]
        values = self.ranks.points(np.array([self.k]), np.array([size]), orders, np.ones(self.held_out, bool))
        return interval(values[0], seed=self.seed)

    def _shared(self, slope: Values) -> Values:
        """Return the covariance `[c, c]` of the points from documents that many queries share, such as hubs.

        By the delete-a-group jackknife (Shao and Tu 1995, section 2.3): what leaving documents out does to the points,
        less what it would do if it moved each query on its own, which the covariance over queries knows of. Half of
        it, since for each document that leaves the first k another enters, so that a difference varies twice as much.
        """
        moved = self.without * slope[:, None]
        moved -= moved.mean(axis=0)
        together = moved.mean(axis=2)
        own = np.einsum("gcq,gdq->cd", moved, moved) / moved.shape[2] ** 2
        values, vectors = np.linalg.eigh((together.T @ together - own) / 2 * (GROUPS - 1) / GROUPS)
        covariance: Values = (vectors * values.clip(0)) @ vectors.T
        return covariance


@dataclass(frozen=True, slots=True)
class _Fit:
    """Hold how a fit weights the points for the number asked for, its variance, and its log marginal likelihood."""

    weights: Values
    variance: float
    likelihood: float


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """Hold points and what is fitted to them.

    points, covariance  `[c]` logits and their covariance `[c, c]` over queries
    shared              that over documents, which is too rough an estimate to weight the points by
    free, small         terms `[c, 4]` that are fitted freely, and `[c, 2]` that should be small
    """

    points: Values
    covariance: Values
    shared: Values
    free: Values
    small: Values

    def fit(self, factor: float) -> _Fit:
        """Fit by generalised least squares, with a prior of N(0, factor^2) on the coefficients of the small terms."""
        prior = factor**2 * self.small @ self.small.T
        scaled = np.linalg.solve(self.covariance + prior, self.free)
        posterior = np.linalg.inv(self.free.T @ scaled)
        weights = posterior[0] @ scaled.T
        variance = float(posterior[0, 0] + weights @ self.shared @ weights)
        return _Fit(weights, variance, self._likelihood(self.covariance + self.shared + prior))

    def _likelihood(self, spread: Values) -> float:
        """Return the logarithm of the marginal likelihood, but for a constant, with a flat prior on the free terms."""
        scaled = np.linalg.solve(spread, self.free)
        precision = self.free.T @ scaled
        residual = self.points - self.free @ np.linalg.solve(precision, scaled.T @ self.points)
        determinants = np.linalg.slogdet(spread)[1] + np.linalg.slogdet(precision)[1]
        return float(-(determinants + residual @ np.linalg.solve(spread, residual)) / 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Ranks:
    """Hold what is needed to search any part of the documents anew: places and ranks `[q, m]` of both searches.

    better  for each document found, how many documents have a better true score; m for m and more
    """

    true: Places
    found: Places
    better: Places

    @classmethod
    def of(cls, truth: Truth, found: Places) -> _Ranks:
        scores, slack = scores_at(truth.queries, truth.documents, found, truth.metric)
        rows = zip(truth.scores, scores + slack, strict=True)
        return cls(truth.places, found, np.stack([np.searchsorted(-true, -own) for true, own in rows]))

    def points(self, ks: Places, sizes: Places, orders: list[Places], among: Mask) -> Values:
        """Return agreement `[s * k, q]`: the mean over disjoint parts of each size, `among` the documents."""
        rows = []
        for size in sizes:
            parts = [self._agreement(ks, part & among) for part in _parts(size, orders)]
            rows.append(np.mean(parts, axis=0))
        return np.concatenate(rows)

    def _agreement(self, ks: Places, keep: Mask) -> Values:
        """Return agreement `[k, q]` of a search of some documents only, for every k."""
        inside = np.pad(np.cumsum(keep[self.true], axis=1), ((0, 0), (1, 0)))
        kept = keep[self.found] & (self.better < self.true.shape[1])
        rank = np.cumsum(keep[self.found], axis=1) - 1
        worse = np.maximum(rank, np.take_along_axis(inside, self.better, axis=1))
        values: Values = np.stack([(kept & (worse < k)).sum(axis=1) / k for k in ks])
        return values


def _parts(size: int, orders: list[Places]) -> Iterator[Mask]:
    """Cut each order of the documents into disjoint parts of this size; all documents are one part."""
    n = len(orders[0])
    for order in orders if size < n else orders[:1]:
        for start in range(0, n - size + 1, size):
            part = np.zeros(n, bool)
            part[order[start : start + size]] = True
            yield part
