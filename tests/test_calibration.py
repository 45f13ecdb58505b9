"""Do 95 % intervals cover, and does the gate err, as often as they say? On simulated corpora whose truth is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from vecferry.extrapolation import Extrapolated, SizeCurve, depth
from vecferry.gate import Condition, Gate, decide
from vecferry.measured import AS_INDEXED, Cell, Evaluation, Row
from vecferry.recall import Truth, topk

CORPORA, DOCUMENTS, HELD, QUERIES, K = 200, 3000, 400, 150, 10
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
    covered = sum(c.cell.low <= c.among_held <= c.cell.high for c in corpora)
    assert 0.92 <= covered / CORPORA <= 0.98


@pytest.mark.slow
def test_intervals_at_full_size_cover(corpora):
    covered = sum(c.told.low <= c.among_all <= c.told.high for c in corpora)
    assert 0.92 <= covered / CORPORA <= 0.98
    errors = np.array([c.told.value - c.among_all for c in corpora])
    assert abs(errors.mean()) < 3 * errors.std() / np.sqrt(CORPORA) + 0.005  # no lean to one side that matters
    flattery = np.array([c.cell.value - c.among_all for c in corpora])
    assert np.median(np.abs(errors)) < np.median(flattery) / 3


@pytest.mark.slow
def test_a_gate_at_the_truth_lets_one_in_forty_through(corpora):
    """The lower end of a 95 % interval claims 2.5 %; more than 6 % of 100 or more happens once in fifty times."""
    usable = [c for c in corpora if c.among_held >= 0.25]  # below, chance among 400 documents makes it inconclusive
    assert len(usable) > 100
    assert sum(passes(c.cell, c.among_held) for c in usable) / len(usable) <= 0.06
    assert sum(c.told.low >= c.among_all for c in corpora) / CORPORA <= 0.06


def test_the_gate_errs_as_often_as_it_says():
    """Agreement@10 of queries of differing difficulty (beta-binomial), with the true mean as the threshold."""
    rng = np.random.default_rng(0)
    trials, n, p = 1000, 200, 0.35
    values = rng.binomial(K, rng.beta(2 * p, 2 * (1 - p), (trials, n))) / K
    cells = [Cell.of("agreement", K, v, 2000, seed=seed) for seed, v in enumerate(values)]
    wrong = sum(passes(cell, p) for cell in cells) / trials
    assert 0.015 <= wrong <= 0.04  # 25 of 1,000 with a standard deviation of 5, and the percentile bootstrap's own
    standard_error = values.std() / np.sqrt(n)
    assert sum(passes(cell, p - 4 * standard_error) for cell in cells) / trials > 0.95
    assert not any(passes(cell, p + 3 * standard_error) for cell in cells)
