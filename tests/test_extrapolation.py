"""Agreement at another size: against searching real parts and real larger corpora, and against known laws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vecferry.errors import UsageError
from vecferry.extrapolation import LEAST, SizeCurve, depth
from vecferry.recall import Truth, interval, topk

N, HELD, QUERIES, D = 8000, 1000, 300, 16


def unit(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)


class Corpus:
    """True and translated vectors of N documents, and queries."""

    def __init__(self, noise: float = 0.6, seed: int = 0, n: int = N, queries: int = QUERIES) -> None:
        rng = np.random.default_rng(seed)
        documents = rng.standard_normal((n, D))
        self.true = unit(documents)
        self.translated = unit(documents + noise * rng.standard_normal((n, D)))
        self.queries = unit(rng.standard_normal((queries, D)))

    def search(self, rows: np.ndarray | slice, places: int) -> tuple[Truth, np.ndarray]:
        truth = Truth.of(self.queries, self.true[rows], places, "cosine")
        return truth, topk(self.queries, self.translated[rows], places, "cosine")[0]

    def agreement(self, rows: np.ndarray | slice, k: int) -> np.ndarray:
        truth, found = self.search(rows, k)
        return truth.agreement(found, k)

    def curve(self, held: int, k: int) -> SizeCurve:
        return SizeCurve.of(*self.search(slice(held), depth(k, held)), k)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus()


def test_at_its_own_size_it_is_what_was_measured(corpus):
    got = corpus.curve(HELD, 10).at(HELD)
    assert (got.value, got.low, got.high) == interval(corpus.agreement(slice(HELD), 10))
    assert (got.documents, got.held_out, got.verified) == (HELD, HELD, True)


@pytest.mark.parametrize("k", [1, 10])
def test_the_points_are_searches_of_parts_of_the_hold_out(corpus, k):
    """Ranks of the whole, thinned, must give what searching the parts anew gives, on average over parts."""
    curve = corpus.curve(HELD, k)
    rng = np.random.default_rng(7)
    for size in np.unique(curve.sizes).astype(int):
        parts = [rng.permutation(HELD)[:size] for _ in range(1 if size == HELD else 12)]
        searched = [corpus.agreement(rows, k).mean() for rows in parts]
        at = (curve.sizes == size) & (curve.ks == k)
        tolerance = 1e-12 if size == HELD else 4 * np.std(searched) * np.sqrt(1 / 12 + 1 / 4)
        assert curve.values[at].mean() == pytest.approx(np.mean(searched), abs=tolerance)


def test_every_part_of_a_small_hold_out_is_searched_exactly():
    """Left out one group after another, every query, by sets."""
    small = Corpus(n=LEAST * 10, queries=5)
    n = len(small.true)
    truth, found = small.search(slice(n), n)
    curve = SizeCurve.of(truth, found, 10, seed=3)
    rng = np.random.default_rng(3)
    orders = [rng.permutation(n) for _ in range(4)]
    group = rng.permutation(n) % len(curve.without)
    for g, row in itertools.product((0, 9), range(len(curve.ks))):
        k, size = int(curve.ks[row]), int(curve.sizes[row])
        parts = [order[start : start + size] for order in orders for start in range(0, n - size + 1, size)]
        expected = []
        for part in parts:
            rows = np.sort(part[group[part] != g])
            expected.append(
                [
                    len(set(t.tolist()) & set(f.tolist())) / k
                    for t, f in zip(
                        np.argsort(-(small.queries @ small.true[rows].T), axis=1)[:, :k],
                        np.argsort(-(small.queries @ small.translated[rows].T), axis=1)[:, :k],
                        strict=True,
                    )
                ]
            )
        np.testing.assert_allclose(curve.without[g, row], np.mean(expected, axis=0), atol=1e-12)


@pytest.mark.parametrize(("noise", "k"), [(0.3, 10), (0.6, 1), (0.6, 10), (0.6, 30), (1.2, 10)])
def test_eight_times_the_hold_out_is_foretold(noise, k):
    corpus = Corpus(noise, seed=1, queries=1000)
    true = corpus.agreement(slice(N), k).mean()
    measured = corpus.agreement(slice(HELD), k).mean()
    got = corpus.curve(HELD, k).at(N)
    assert got.low <= true <= got.high
    assert abs(got.value - true) < 0.03
    assert abs(got.value - true) < (measured - true) / 2  # what the hold-out flatters by
    assert got.high - got.low < 0.13


def test_farther_is_lower_and_less_certain(corpus):
    curve = corpus.curve(HELD, 10)
    told = [curve.at(size) for size in (500, HELD, 2 * HELD, 16 * HELD, 16 * HELD + 1, 1000 * HELD)]
    assert [t.verified for t in told] == [True] * 4 + [False] * 2
    values = [t.value for t in told]
    assert values == sorted(values, reverse=True)
    logit = [np.log(t.high / (1 - t.high)) - np.log(t.low / (1 - t.low)) for t in told[2:]]
    assert logit == sorted(logit)
    assert all(0 < t.low < t.value < t.high < 1 for t in told)


def test_documents_that_many_queries_share_widen_the_interval():
    """All queries ask about one thing: which of its documents were held out moves them all together."""
    corpus = Corpus(seed=2)
    rng = np.random.default_rng(2)
    corpus.queries = unit(3 * rng.standard_normal(D) / 4 + 0.3 * rng.standard_normal((QUERIES, D)))
    told, half = [], []
    for _ in range(12):
        rows = rng.permutation(N)[:HELD]
        told.append(SizeCurve.of(*corpus.search(rows, depth(10, HELD)), 10).at(N))
        _, low, high = interval(corpus.agreement(rows, 10))
        half.append((high - low) / 2)
    spread = np.std([t.value for t in told], ddof=1)
    claimed = np.mean([t.high - t.low for t in told]) / 2 / 1.96
    assert spread > 2 * np.mean(half) / 1.96  # the interval over queries alone knows nothing of it
    assert 0.7 < claimed / spread < 2


@pytest.mark.parametrize(("noise", "value"), [(0.0, 1.0), (1e6, 0.0)])
def test_a_perfect_and_a_random_map_stay_what_they_are(noise, value):
    got = Corpus(noise).curve(HELD, 10).at(N)
    assert got.value == pytest.approx(value, abs=0.01)
    assert 0 <= got.low <= got.value <= got.high <= 1


def test_duplicates_do_not_pull_a_perfect_map_below_1():
    """Every document eight times, in other orders: a true neighbour's copy is as good as the neighbour."""
    corpus = Corpus(0, n=100)
    corpus.true = np.repeat(corpus.true, 8, axis=0)
    order = np.random.default_rng(0).permutation(800)
    truth = Truth.of(corpus.queries, corpus.true, depth(10, 800), "cosine")
    found = order[topk(corpus.queries, corpus.true[order], depth(10, 800), "cosine")[0]]
    assert not np.array_equal(found, truth.places)
    curve = SizeCurve.of(truth, found, 10)
    assert (curve.values == 1).all()
    assert curve.at(8000).low > 0.999


def test_what_was_not_found_is_wrong_at_every_size(corpus):
    truth, found = corpus.search(slice(HELD), depth(10, HELD))
    found = found.copy()
    found[:, 4:] = -1
    curve = SizeCurve.of(truth, found, 10)
    assert curve.at(HELD).value == truth.agreement(found, 10).mean()
    assert curve.values[curve.ks == 10].max() <= 0.4


def test_too_little_is_refused_with_both_numbers(corpus):
    truth, found = corpus.search(slice(199), depth(10, 199))
    with pytest.raises(UsageError, match="at least 200 held-out documents, not 199"):
        SizeCurve.of(truth, found, 10)
    truth, found = corpus.search(slice(HELD), 20)
    with pytest.raises(UsageError, match=f"{depth(10, HELD)} places deep, not 300 queries, 20 places"):
        SizeCurve.of(truth, found, 10)
    with pytest.raises(UsageError, match=r"k = 10 .* 9 documents"):
        corpus.curve(HELD, 10).at(9)


def test_the_same_seed_gives_the_same_numbers(corpus):
    assert corpus.curve(HELD, 10).at(N) == corpus.curve(HELD, 10).at(N)


def test_tight_clusters_do_not_make_it_claim_too_much():
    """Held out are 7 of the 40 documents of a cluster: they show whether clusters are found, hardly which document is.

    A form with the priors of texts alone, `LOOSE = (1,)`, claims too much in 10 of these 12 corpora.
    """
    too_high = covered = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        centres, d = rng.standard_normal((60, 24)), 24
        true = unit(centres[rng.integers(0, 60, 4000)] + 0.3 * rng.standard_normal((4000, d)))
        old = np.tanh(2 * true @ rng.standard_normal((d, d))) + 0.5 * rng.standard_normal((4000, d))
        with_one = np.hstack([old, np.ones((4000, 1))])
        weight = np.linalg.lstsq(with_one[2400:], true[2400:], rcond=None)[0]
        translated = unit(with_one[:2400] @ weight)
        queries = unit(true[rng.integers(0, 2400, 240)] + 0.25 * rng.standard_normal((240, d)))
        held = rng.permutation(2400)[:400]
        among_held = Truth.of(queries, true[held], depth(10, 400), "cosine")
        found, _ = topk(queries, translated[held], depth(10, 400), "cosine")
        told = SizeCurve.of(among_held, found, 10, seed=seed).at(2400)
        among_all = Truth.of(queries, true[:2400], 10, "cosine")
        value = among_all.agreement(topk(queries, translated, 10, "cosine")[0], 10).mean()
        too_high += told.low > value
        covered += told.low <= value <= told.high
    assert too_high <= 2
    assert covered >= 10
