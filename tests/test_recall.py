"""Every number called recall, against brute force, closed forms and ir-measures."""

from __future__ import annotations

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_measures import R, nDCG

from vecferry.errors import DataError, IncompatibleError, UsageError
from vecferry.holdout import Qrels
from vecferry.recall import (
    TopK,
    Truth,
    identity_recall,
    interval,
    label_recall,
    ndcg,
    rerank,
    share_right,
    topk,
    without,
)

METRICS = ("cosine", "ip", "l2")


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def brute(queries: np.ndarray, documents: np.ndarray, metric: str) -> np.ndarray:
    """All scores, in float64, by the textbook formula."""
    q, d = queries.astype(np.float64), documents.astype(np.float64)
    if metric == "l2":
        return np.stack([-((row - d) ** 2).sum(axis=1) for row in q])
    if metric == "cosine":
        q, d = q / np.linalg.norm(q, axis=1)[:, None], d / np.linalg.norm(d, axis=1)[:, None]
    return q @ d.T


def ranked(scores: np.ndarray) -> np.ndarray:
    """Positions by falling score, equal scores by position."""
    return np.argsort(-scores, axis=1, kind="stable")


@pytest.mark.parametrize("metric", METRICS)
def test_topk_is_the_whole_sorted_matrix_whatever_the_blocks(metric):
    queries, documents = gaussian(600, 12), gaussian(9000, 12, seed=1) * 3
    scores = brute(queries, documents, metric)
    places, best = topk(queries, documents, 7, metric)
    assert (places == ranked(scores)[:, :7]).all()
    np.testing.assert_allclose(best, np.take_along_axis(scores, places, axis=1), rtol=1e-12)
    cuts = np.split(documents, [1, 3, 4100, 4100, 8999])
    in_blocks, best_in_blocks = topk(queries, iter(cuts), 7, metric)
    assert (in_blocks == places).all()
    assert (best_in_blocks == best).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 10**6), st.sampled_from(METRICS))
def test_equal_scores_go_by_position(n, k, seed, metric):
    """Small whole numbers tie all the time, and their arithmetic is exact; by cosine only duplicates tie."""
    k = min(k, n)
    rng = np.random.default_rng(seed)
    queries = rng.integers(-2, 3, (5, 3)).astype(np.float32)
    documents = rng.integers(-2, 3, (n, 3)).astype(np.float32)
    queries[:, 0], documents[:, 0] = 1, 1  # no zero vectors
    if metric == "cosine":
        documents = gaussian(n // 3 + 1, 3, seed=seed)[rng.integers(0, n // 3 + 1, n)]
    got, _ = topk(queries, documents, k, metric)
    scores = np.round(brute(queries, documents, metric), 12)
    assert (got == ranked(scores)[:, :k]).all()


def test_l2_survives_data_far_from_the_origin():
    """|q|^2 - 2 q.d + |d|^2 in float32 has no correct digit here."""
    queries, documents = gaussian(50, 16) + 3000, gaussian(2000, 16, seed=1) + 3000
    places, _ = topk(queries, documents, 10, "l2")
    assert (places == ranked(brute(queries, documents, "l2"))[:, :10]).all()


def test_zero_vectors_score_zero_by_cosine():
    documents = np.array([[0, 0], [-1, 0], [1, 0]], np.float32)
    places, scores = topk(np.array([[2, 0]], np.float32), documents, 3, "cosine")
    assert places.tolist() == [[2, 0, 1]]
    assert scores.tolist() == [[1, 0, -1]]


def test_k_and_dimensions_that_cannot_be_are_refused_with_both_numbers():
    with pytest.raises(UsageError, match=r"k = 11 .* 10 documents"):
        topk(gaussian(2, 4), gaussian(10, 4), 11, "ip")
    with pytest.raises(UsageError, match=r"k = 11 .* 10 documents"):
        topk(gaussian(2, 4), iter([gaussian(4, 4), gaussian(6, 4)]), 11, "ip")
    with pytest.raises(IncompatibleError, match="5 and 4"):
        topk(gaussian(2, 4), gaussian(10, 5), 1, "ip")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_numbers_that_are_none_are_refused_not_passed_over(metric, bad):
    documents = gaussian(5000, 4)
    documents[4321, 2] = bad
    with pytest.raises(DataError, match="document 4321"):
        topk(gaussian(2, 4), documents, 1, metric)
    with pytest.raises(DataError, match="queries"):
        topk(documents[4321:4322], gaussian(9, 4), 1, metric)


def test_a_search_says_what_it_has_not_found_yet():
    search = TopK(gaussian(1, 4), 3, "ip")
    search.update(gaussian(2, 4))
    assert search.places[0, 2] == -1
    assert search.scores[0, 2] == -np.inf


def sets_agreement(found: np.ndarray, true: np.ndarray, k: int) -> np.ndarray:
    return np.array([len(set(f[:k]) & set(t[:k])) / k for f, t in zip(found, true, strict=True)])


@pytest.mark.parametrize("metric", METRICS)
def test_agreement_without_ties_is_the_intersection(metric):
    queries, documents = gaussian(40, 8), gaussian(500, 8, seed=1)
    worse = documents + 0.7 * gaussian(500, 8, seed=2)
    found, _ = topk(queries, worse, 10, metric)
    truth = Truth.of(queries, documents, 10, metric)
    for k in (1, 5, 10):
        expected = sets_agreement(found, ranked(brute(queries, documents, metric)), k)
        assert (truth.agreement(found, k) == expected).all()
        assert 0 < expected.mean() < 1


def test_what_was_not_found_is_not_right():
    truth = Truth.of(gaussian(3, 4), gaussian(20, 4, seed=1), 4, "cosine")
    found = truth.places.copy()
    found[:, 2:] = -1
    assert (truth.agreement(found, 4) == 0.5).all()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.case("p2")
def test_any_order_of_duplicates_is_perfect(metric):
    """Field case p2: every document stands there 12 times; which of them an index returns is chance."""
    documents = np.repeat(gaussian(30, 8), 12, axis=0)
    queries = gaussian(50, 8, seed=1)
    shuffle = np.random.default_rng(2).permutation(len(documents))
    found, _ = topk(queries, documents[shuffle], 10, metric)
    found = shuffle[found]
    true, _ = topk(queries, documents, 10, metric)
    assert sets_agreement(found, true, 10).mean() < 0.9  # what comparing positions would have said
    values = Truth.of(queries, documents, 10, metric).agreement(found, 10)
    assert interval(values) == (1, 1, 1)


def test_a_constant_map_is_right_by_chance_only():
    documents, queries = gaussian(400, 8), gaussian(300, 8, seed=1)
    found, _ = topk(queries, np.ones((400, 8), np.float32), 10, "cosine")
    value, low, high = interval(Truth.of(queries, documents, 10, "cosine").agreement(found, 10))
    assert low <= 10 / 400 <= high
    assert value < 0.05


def test_documents_as_queries_are_not_their_own_neighbours():
    documents = gaussian(200, 8)
    rows = np.array([3, 50, 199])
    truth = Truth.of_documents(rows, documents, 5, "l2")
    scores = brute(documents[rows], documents, "l2")
    scores[np.arange(3), rows] = -np.inf
    assert (truth.places == ranked(scores)[:, :5]).all()
    assert not (truth.places == rows[:, None]).any()
    found, _ = topk(documents[rows], documents, 6, "l2")
    assert (without(found, rows) == truth.places).all()


def test_a_query_document_that_is_not_found_costs_the_last_place():
    assert without(np.array([[4, 7, 9], [7, 5, 1]]), np.array([3, 5])).tolist() == [[4, 7], [7, 1]]


def test_cascade_orders_candidates_by_true_score():
    queries, documents = gaussian(40, 8), gaussian(500, 8, seed=1)
    found, _ = topk(queries, documents + gaussian(500, 8, seed=2), 50, "cosine")
    truth = Truth.of(queries, documents, 10, "cosine")
    again = rerank(queries, documents, found, "cosine")
    scores = brute(queries, documents, "cosine")
    for row, candidates, reranked in zip(scores, found, again, strict=True):
        assert reranked.tolist() == sorted(candidates.tolist(), key=lambda d: -row[d])
    in_candidates = [len(set(t) & set(c)) / 10 for t, c in zip(truth.places, found, strict=True)]
    assert (truth.agreement(again, 10) == in_candidates).all()


def test_identity_recall_is_the_rank_of_the_own_row():
    target = gaussian(300, 8)
    translated = target + 1.5 * gaussian(300, 8, seed=1)
    rows = np.arange(0, 300, 3)
    scores = brute(translated[rows], target, "cosine")
    rank = (scores > scores[np.arange(100), rows, None]).sum(axis=1)
    got = identity_recall(translated[rows], rows, target, (1, 10), "cosine")
    for k in (1, 10):
        assert (got[k] == (rank < k)).all()
        assert 0.05 < got[k].mean() < 0.95


def trec(found: np.ndarray, qrels: Qrels, measure: object, scores: np.ndarray) -> np.ndarray:
    labels = [
        ir_measures.Qrel(f"q{q}", f"{d:05}", int(g))
        for q, d, g in zip(qrels.query, qrels.document, qrels.grade, strict=True)
    ]
    run = [
        ir_measures.ScoredDoc(f"q{q}", f"{d:05}", float(s))
        for q in range(len(found))
        for d, s in zip(found[q], scores[q], strict=True)
        if d >= 0
    ]
    got = {m.query_id: m.value for m in ir_measures.iter_calc([measure], labels, run)}
    return np.array([got.get(f"q{q}", np.nan) for q in range(len(found))])


def graded(rng: np.random.Generator, queries: int, documents: int, labels: int) -> Qrels:
    pairs = rng.choice(queries * documents, labels, replace=False)
    return Qrels(pairs // documents, pairs % documents, rng.integers(1, 4, labels))


@pytest.mark.parametrize("k", [1, 3, 10])
def test_label_recall_and_ndcg_are_those_of_trec_eval(k):
    """Graded labels, more and fewer than k of them or none, and searches that found less or nothing."""
    rng = np.random.default_rng(0)
    found = np.stack([rng.permutation(60)[:12] for _ in range(80)])
    found[5, 4:], found[6] = -1, -1
    qrels = graded(rng, 70, 60, 600)
    keep = (qrels.query % 10 != 7) & ((qrels.query != 3) | (qrels.document < 6))
    qrels = Qrels(qrels.query[keep], qrels.document[keep], qrels.grade[keep])
    scores = -np.arange(12) * np.ones((80, 1))
    # trec_eval leaves a query of which nothing was found out of its table, we score it 0
    for ours, measure in ((label_recall, R @ k), (ndcg, nDCG @ k)):
        got, theirs = ours(found, qrels, k), trec(found, qrels, measure, scores)
        assert got[6] == 0
        np.testing.assert_allclose(np.delete(got, 6), np.delete(theirs, 6), atol=1e-12)
        assert np.isnan(got).sum() == len(set(range(80)) - set(qrels.query.tolist()))
        assert np.isnan(got[7])


def test_ndcg_of_tied_scores_is_that_of_trec_eval_under_the_same_rule():
    """We break ties by the lowest position, trec_eval by the last name: with names backwards both agree."""
    rng = np.random.default_rng(1)
    documents = rng.integers(0, 3, (40, 2)).astype(np.float32)
    queries = rng.integers(1, 3, (30, 2)).astype(np.float32)
    found, scores = topk(queries, documents, 10, "ip")
    qrels = graded(rng, 30, 40, 200)
    backwards = Qrels(qrels.query, 39 - qrels.document, qrels.grade)
    theirs = trec(39 - found, backwards, nDCG @ 10, scores)
    np.testing.assert_allclose(ndcg(found, qrels, 10), theirs, atol=1e-12)


def test_ndcg_by_hand():
    """Grades 3, 2, 1; found: grade 2, nothing, grade 3."""
    qrels = Qrels(np.zeros(3, np.int64), np.array([4, 8, 2]), np.array([3, 1, 2]))
    got = ndcg(np.array([[2, 7, 4]]), qrels, 3)
    assert got[0] == pytest.approx((2 + 3 / 2) / (3 + 2 / np.log2(3) + 1 / 2))
    assert label_recall(np.array([[2, 7, 4]]), qrels, 3)[0] == pytest.approx(2 / 3)


def test_share_right_refuses_a_k_that_is_not_there():
    with pytest.raises(UsageError, match=r"k = 4 .* 3 documents"):
        share_right(np.zeros((1, 9)), np.zeros((1, 3)), 4)


def test_the_interval_of_a_mean_is_that_of_the_normal_law():
    values = np.random.default_rng(0).normal(0.5, 0.1, 2000)
    value, low, high = interval(values)
    assert value == pytest.approx(values.mean())
    half = 1.96 * values.std() / np.sqrt(2000)
    assert (value - low, high - value) == pytest.approx((half, half), rel=0.1)


def test_a_ratio_is_resampled_in_pairs():
    """Retention of .5 for every query has no width although both means vary; unpaired it would."""
    whole = np.random.default_rng(0).random(200)
    assert interval(whole / 2, whole) == pytest.approx((0.5, 0.5, 0.5))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0]), min_size=1, max_size=30), st.integers(0, 100))
@pytest.mark.case("p2")
def test_the_interval_contains_its_value_and_is_reproducible(values, seed):
    value, low, high = interval(np.array(values), seed=seed)
    assert 0 <= low <= value <= high <= 1 + 1e-12
    assert interval(np.array(values), seed=seed) == (value, low, high)
