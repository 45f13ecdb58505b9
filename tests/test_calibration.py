"""Do 95 % intervals cover, and does the gate err, as often as they say? On simulated corpora whose truth is known.

A count among so many trials varies: it is held against the binomial law of the rate that is claimed. Of 100 corpora, a
right interval covers 92 to 98 nine times in ten; so the corpora are those of the seeds 0 to 99, which nobody chose, and
more trials of what is quick to draw stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from vecferry.extrapolation import Extrapolated, SizeCurve, depth
from vecferry.gate import Condition, Gate, decide
from vecferry.measured import AS_INDEXED, Cell, Evaluation, Row
from vecferry.recall import Truth, interval, interval_ends, topk

CORPORA, DOCUMENTS, HELD, QUERIES, K = 100, 3000, 400, 150, 10
OTHERS = 10_000  # queries that make the truth among the held-out documents, and a fifth of them that among all


def unit(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)


def agreement(queries: np.ndarray, true: np.ndarray, translated: np.ndarray) -> float:
    """Agreement@K by sets: of the documents among the K best of both."""
    both = np.ones((len(queries), len(true)), bool)
    for documents in (true, translated):
        scores = queries @ documents.T
        both &= scores >= np.partition(scores, -K, axis=1)[:, -K, None]
    return float(both.sum() / (K * len(queries)))


@dataclass
class Simulated:
    """What was said of one corpus, and what is true of it."""

    cell: Cell
    among_held: float
    told: Extrapolated
    among_all: float


def simulate(seed: int) -> Simulated:
    """Draw a corpus of random dimension, spectrum, anisotropy and map; hold some out and ask a few queries."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(6, 25))
    spectrum = np.arange(1, d + 1) ** -rng.uniform(0, 0.7)
    common = rng.uniform(0, 1) * rng.standard_normal(d)
    documents = rng.standard_normal((DOCUMENTS, d)) * spectrum + common
    error = rng.standard_normal((DOCUMENTS, d)) * rng.uniform(0.5, 1.5, (DOCUMENTS, 1))
    translated = unit(documents + error * rng.uniform(0.2, 1.2) * np.sqrt(np.mean(spectrum**2)))
    true = unit(documents)
    queries = unit(rng.standard_normal((QUERIES + OTHERS, d)) * spectrum + common)
    ours, others = queries[:QUERIES], queries[QUERIES:]
    held = rng.permutation(DOCUMENTS)[:HELD]
    truth = Truth.of(ours, true[held], depth(K, HELD), "cosine")
    found, _ = topk(ours, translated[held], depth(K, HELD), "cosine")
    return Simulated(
        Cell.of("agreement", K, truth.agreement(found, K), HELD, seed=seed),
        agreement(others, true[held], translated[held]),
        SizeCurve.of(truth, found, K, seed=seed).at(DOCUMENTS),
        agreement(others[::5], true, translated),
    )


def passes(cell: Cell, threshold: float) -> bool:
    """Let the gate decide; a cell at full size is judged as one of the hold-out is."""
    gate = Gate((Condition("agreement", K, ">=", threshold),))
    return decide(gate, Evaluation((Row(AS_INDEXED, (cell,)),), "cosine", K)).passed


@pytest.fixture(scope="module")
def corpora() -> list[Simulated]:
    return [simulate(seed) for seed in range(CORPORA)]


@pytest.mark.slow
def test_intervals_over_queries_cover(corpora):
    assert 92 <= sum(c.cell.low <= c.among_held <= c.cell.high for c in corpora) <= 98


@pytest.mark.slow
def test_intervals_at_full_size_cover(corpora):
    assert 92 <= sum(c.told.low <= c.among_all <= c.told.high for c in corpora) <= 98
    errors = np.array([c.told.value - c.among_all for c in corpora])
    assert abs(errors.mean()) < 3 * errors.std() / np.sqrt(CORPORA) + 0.005  # no lean to one side that matters
    flattery = np.array([c.cell.value - c.among_all for c in corpora])
    assert np.median(np.abs(errors)) < np.median(flattery) / 3


@pytest.mark.slow
def test_a_gate_at_the_truth_lets_one_in_forty_through(corpora):
    """The lower end of a 95 % interval claims 2.5 %; more than 6 of 100 happens once in a hundred times."""
    usable = [c for c in corpora if c.among_held >= 0.25]  # below, chance among 400 documents makes it inconclusive
    assert len(usable) > CORPORA / 2
    assert sum(passes(c.cell, c.among_held) for c in usable) <= 6
    assert sum(c.told.low >= c.among_all for c in corpora) <= 6


def likely(count: int, trials: int, rate: float) -> bool:
    """Say whether a count is among the 998 of 1,000 that the binomial law has for this rate."""
    low, high = stats.binom.ppf([0.001, 0.999], trials, rate)
    return bool(low <= count <= high)


Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray | None]]


def shares(p: float) -> Draw:
    """Agreement@10 of queries of differing difficulty: beta-binomial, most of them 0 or 1 where p is."""
    return lambda rng, n: (rng.binomial(K, rng.beta(2 * p, 2 * (1 - p), n)) / K, None)


def retained(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """nDCG of which .75 is kept, and a third of the queries that had none get some: what is retained is 0.75 + 0.03."""
    before = np.where(rng.random(n) < 0.3, 0, rng.random(n))
    kept = rng.binomial(4, 0.75, n) / 4
    return np.where(before > 0, before * kept, np.where(rng.random(n) < 0.35, 0.1, 0)), before


def changed(rng: np.random.Generator, n: int) -> tuple[np.ndarray, None]:
    """Changes of agreement@10 where three of ten queries were affected at all, by .05 to the worse."""
    return np.where(rng.random(n) < 0.3, rng.binomial(K, 0.45, n) - rng.binomial(K, 0.5, n), 0) / K, None


@pytest.mark.parametrize(
    ("draw", "truth", "n"),
    [
        (shares(0.3), 0.3, 30),
        (shares(0.3), 0.3, 150),
        (shares(0.6), 0.6, 60),
        (shares(0.06), 0.06, 150),
        (shares(0.95), 0.95, 150),
        (retained, 0.75 + 0.3 * 0.35 * 0.1 / 0.35, 150),
        (changed, -0.3 * 0.05, 150),
    ],
    ids=["hard, few", "hard", "middling", "nearly 0", "nearly 1", "retention", "change"],
)
def test_intervals_cover_values_of_every_kind(draw: Draw, truth: float, n: int) -> None:
    trials = 400
    too_high = too_low = 0
    for trial in range(trials):
        values, over = draw(np.random.default_rng([trial, n]), n)
        _, low, high = interval(values, over, seed=trial)
        too_high += low > truth
        too_low += high < truth
    assert 0.92 <= 1 - (too_high + too_low) / trials <= 0.985  # 95 %, three standard deviations down and up
    bound = stats.binom.ppf(0.999, trials, 0.025)
    assert max(too_high, too_low) <= bound, (too_high, too_low)


@pytest.mark.parametrize("p", [0.35, 0.9])
def test_the_gate_errs_as_often_as_it_says(p: float) -> None:
    """With the true mean as the threshold one in forty passes, and one in forty has even the upper end below."""
    rng = np.random.default_rng(0)
    trials, n = 600, 150
    values = rng.binomial(K, rng.beta(2 * p, 2 * (1 - p), (trials, n))) / K
    cells = [Cell.of("agreement", K, v, 2000, seed=seed) for seed, v in enumerate(values)]
    assert likely(sum(passes(cell, p) for cell in cells), trials, 0.025)
    assert likely(sum(cell.high < p for cell in cells), trials, 0.025)
    standard_error = values.std() / np.sqrt(n)
    assert sum(passes(cell, p - 5 * standard_error) for cell in cells) / trials > 0.95
    assert not any(passes(cell, p + 3 * standard_error) for cell in cells)


@pytest.mark.parametrize("n", [30, 60, 150, 1000])
def test_the_ends_are_those_of_students_t(n: int) -> None:
    """Hesterberg's expanded percentiles, with scipy's quantiles of t; skewness as Efron's acceleration has it."""
    z = stats.t.ppf(0.975, n - 1) * np.sqrt(n / (n - 1))
    even = np.repeat([-1.0, 1.0], n // 2)
    assert interval_ends(even) == pytest.approx(tuple(stats.norm.cdf([-z, z])), rel=1e-3)
    skewed = stats.expon.ppf((np.arange(n) + 0.5) / n)
    a = stats.skew(skewed) / (6 * np.sqrt(n))
    low, high = interval_ends(skewed - skewed.mean())
    assert low == pytest.approx(stats.norm.cdf(-z), rel=1e-3)
    assert high == pytest.approx(stats.norm.cdf(a + (a + z) / (1 - a * (a + z))), rel=1e-4)
    assert interval_ends(skewed.mean() - skewed) == pytest.approx((1 - high, 1 - low))


def test_the_interval_is_about_bca_where_values_are_skewed() -> None:
    """The end of the long tail is that of scipy's BCa interval, which has no expansion; the other is farther out."""
    values = np.random.default_rng(5).binomial(K, np.random.default_rng(6).beta(0.1, 1.9, 400)) / K
    theirs = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(0))
    value, low, high = interval(values)
    assert high == pytest.approx(theirs.confidence_interval.high, rel=0.02)
    assert value - low > 1.03 * (value - theirs.confidence_interval.low)
