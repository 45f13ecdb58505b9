"""The rows of the report on synthetic corpora, against sets and sorts written out here."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from vecferry.errors import IncompatibleError, UnsupportedError
from vecferry.evaluate import evaluate
from vecferry.fullsize import ids_at, index_overlap, judge
from vecferry.gate import Gate
from vecferry.holdout import Holdout, Qrels
from vecferry.jsonfile import typed
from vecferry.linear import Card, LinearMap, Side
from vecferry.measured import Evaluation
from vecferry.store import find, open_reader

N, Q, D_IN, D_OUT = 400, 60, 24, 32


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def corpus(n: int = N, q: int = Q, d_in: int = D_IN, d_out: int = D_OUT, seed: int = 0) -> tuple[Holdout, LinearMap]:
    """Two views of clustered topics, each with noise of its own, and the least-squares map fitted on other rows."""
    rng = np.random.default_rng(seed)
    topics = rng.standard_normal((20, 16))
    z = topics[rng.integers(0, 20, 3 * n)] + 0.7 * rng.standard_normal((3 * n, 16))
    source = unit(z @ rng.standard_normal((16, d_in)) + 0.8 * rng.standard_normal((3 * n, d_in)))
    target = unit(z @ rng.standard_normal((16, d_out)) + 0.8 * rng.standard_normal((3 * n, d_out)))
    weight = np.linalg.lstsq(source[n:], target[n:], rcond=None)[0]
    relevant = rng.integers(0, n, q)
    noise = 0.15 * rng.standard_normal((2, q, max(d_in, d_out)))
    holdout = Holdout(
        ids=pa.array(np.arange(n) * 7 + 3),
        source=source[:n],
        target=target[:n],
        query_ids=pa.array([f"q{i}" for i in range(q)]),
        queries=unit(target[relevant] + noise[0, :, :d_out]),
        source_queries=unit(source[relevant] + noise[1, :, :d_in]),
        qrels=Qrels(np.arange(q), relevant, rng.integers(1, 3, q)),
    )
    card = Card(Side(d_in, "old"), Side(d_out, "new"), "by hand")
    return holdout, LinearMap(weight.astype(np.float32), post="l2", card=card)


@pytest.fixture
def indexed(rows: Any) -> Any:
    """A store in memory whose own search sorts all products, and never finds what is at the places `blind`."""

    class Indexed(rows):
        def __init__(self, *args: Any, blind: Any = (), **info: Any) -> None:
            super().__init__(*args, **info)
            self.blind = np.array(blind, int)

        def search(self, queries: Any, k: int, among: Any = None) -> Any:
            np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, rtol=1e-5)  # it holds unit vectors
            vectors = self.rows.vectors.copy()
            vectors[self.blind] = np.nan
            if among is not None:
                vectors = vectors[find(self, among)]
            scores = np.nan_to_num(queries @ vectors.T, nan=-np.inf)
            places = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            best = np.take_along_axis(scores, places, axis=1)
            return np.where(np.isinf(best), -1, places), best

    return Indexed


def nearest(queries: np.ndarray, documents: np.ndarray, k: int, own: np.ndarray | None = None) -> list[set[int]]:
    scores = unit(queries).astype(float) @ unit(documents).astype(float).T
    if own is not None:
        scores[np.arange(len(own)), own] = -np.inf
    return [set(row[:k].tolist()) for row in np.argsort(-scores, axis=1)]


def overlap(a: list[set[int]], b: list[set[int]], k: int) -> float:
    return float(np.mean([len(x & y) / k for x, y in zip(a, b, strict=True)]))


def value(evaluation: Evaluation, row: str, metric: str, k: int = 10) -> float:
    cell = evaluation.cell(row, metric, k)
    assert cell is not None
    assert cell.value is not None, cell.reason
    assert cell.low <= cell.value <= cell.high
    return cell.value


@pytest.mark.case("45")
def test_every_row_is_the_overlap_that_its_name_says(indexed):
    h, m = corpus(d_in=D_OUT)
    translated = m.apply(h.source)
    staged = indexed(h.ids, translated, index="IVF4,SQ8", lossy=True, blind=np.arange(0, N, 5))
    e = evaluate(h, m, staged=staged)
    assert e.notes == ("index overlap compares with exact search of what the index's codes give back",)
    seen = unit(translated)
    seen[::5] = -unit(h.queries.mean(axis=0, keepdims=True))  # behind everything
    ways = {
        "status quo": (h.source_queries, h.source, h.source),
        "naive swap": (h.queries, h.source, h.target),
        "translated": (h.queries, translated, h.target),
        "as indexed": (h.queries, seen, h.target),
        "re-embedded": (h.queries, h.target, h.target),
    }
    assert [r.name for r in e.rows] == [
        "status quo",
        "naive swap",
        "translated",
        "as indexed",
        "cascade (top-50 re-ranked with true vectors)",
        "re-embedded",
    ]
    everyone = np.arange(N)
    truth, among_documents = nearest(h.queries, h.target, 10), nearest(h.target, h.target, 10, everyone)
    for name, (queries, documents, stand_ins) in ways.items():
        expected = overlap(nearest(queries, documents, 10), truth, 10)
        assert value(e, name, "agreement") == pytest.approx(expected, abs=1e-9), name
        if name != "as indexed":  # documents of which the index is blind have no stand-in that is unseen too
            expected = overlap(nearest(stand_ins, documents, 10, everyone), among_documents, 10)
            assert value(e, name, "doc-agreement") == pytest.approx(expected, abs=1e-9), name
    assert value(e, "naive swap", "agreement") < 0.1 < value(e, "as indexed", "agreement")
    assert value(e, "as indexed", "agreement") < value(e, "translated", "agreement") < 1
    assert value(e, "re-embedded", "agreement") == value(e, "re-embedded", "doc-agreement") == 1
    candidates = nearest(h.queries, translated, 50)
    expected = np.mean([len(t & c) / 10 for t, c in zip(truth, candidates, strict=True)])
    assert value(e, "cascade", "agreement") == pytest.approx(expected)
    expected = overlap(nearest(h.queries, seen, 10), nearest(h.queries, translated, 10), 10)
    assert value(e, "as indexed", "index-overlap") == pytest.approx(expected)
    cell = e.cell("translated", "doc-agreement", 10)
    assert (cell.documents, cell.queries, cell.k) == (N, N, 10)


def test_identity_and_labels(indexed):
    h, m = corpus()
    e = evaluate(h, m)
    translated = unit(m.apply(h.source)).astype(float)
    scores = translated @ h.target.astype(float).T
    rank = (scores > np.diag(scores)[:, None]).sum(axis=1)
    assert value(e, "translated", "identity", 1) == pytest.approx((rank < 1).mean())
    assert value(e, "translated", "identity", 10) == pytest.approx((rank < 10).mean())
    assert e.cell("as indexed", "identity", 1) is None
    found = {}
    for name, documents, queries in (
        ("translated", translated, h.queries),
        ("re-embedded", h.target, h.queries),
        ("status quo", h.source, h.source_queries),
    ):
        order = np.argsort(-(queries.astype(float) @ documents.astype(float).T), axis=1)
        at = np.array([np.flatnonzero(row == d)[0] for row, d in zip(order, h.qrels.document, strict=True)])
        found[name] = (at < 10).mean(), np.where(at < 10, 1 / np.log2(at + 2), 0).mean()
        assert (value(e, name, "recall"), value(e, name, "ndcg")) == pytest.approx(found[name])
    kept = found["translated"][1] / found["re-embedded"][1]
    assert value(e, "translated", "retention.ndcg") == pytest.approx(kept)
    assert e.cell("re-embedded", "retention.ndcg", 10) is None
    assert 0 < kept < 1


def test_queries_without_labels_do_not_count_for_labels():
    h, m = corpus()
    kept = h.qrels.query < 45
    few = replace(h, qrels=Qrels(h.qrels.query[kept], h.qrels.document[kept], h.qrels.grade[kept]))
    cell = evaluate(few, m).cell("translated", "ndcg", 10)
    assert cell.queries == 45
    assert evaluate(few, m).cell("translated", "agreement", 10).queries == Q


def test_what_cannot_be_measured_says_why():
    h, m = corpus()
    e = evaluate(replace(h, source_queries=None, qrels=None), m)
    reasons = {(r.name, c.metric): c.reason for r in e.rows for c in r.cells if c.value is None}
    assert reasons["status quo", "agreement"] == "no source queries: fit with --source-queries"
    assert reasons["naive swap", "agreement"] == "dimensions differ: 24 and 32"
    assert reasons["as indexed", "agreement"] == "nothing is indexed yet"
    assert reasons["translated", "ndcg"] == "no labels: fit with --qrels"
    assert ("status quo", "doc-agreement") not in reasons
    e = evaluate(replace(h, queries=None, source_queries=None, qrels=None), m)
    reasons = {(r.name, c.metric): c.reason for r in e.rows for c in r.cells if c.value is None}
    assert reasons["re-embedded", "agreement"] == "no queries: fit with --queries"
    assert ("translated", "doc-agreement") not in reasons


def test_a_hold_out_of_hardly_any_rows_gives_reasons_not_numbers():
    h, m = corpus(n=9, q=4)
    e = evaluate(h, m)
    assert {c.value for r in e.rows for c in r.cells} == {None}
    assert e.cell("translated", "agreement", 10).reason == "k = 10 needs more than 10 documents, 9 are held out"
    assert e.cell("cascade", "agreement", 10).reason.startswith("needs at least 101 held-out documents")


def test_a_gate_has_its_k_measured(indexed):
    h, m = corpus()
    staged = indexed(h.ids, m.apply(h.source), index="Flat")
    e = evaluate(h, m, staged=staged, gate=Gate.parse("agreement@3>=.1 and index-overlap@5>=.9"))
    assert value(e, "as indexed", "agreement", 3) == value(e, "translated", "agreement", 3)
    assert value(e, "as indexed", "index-overlap", 5) == 1
    assert value(e, "as indexed", "agreement", 10)
    assert (
        evaluate(h, m, staged=staged).cell("as indexed", "index-overlap", 10).reason == "a flat index searches exactly"
    )


def test_the_index_is_searched_among_the_held_out_rows_of_a_larger_store(indexed):
    h, m = corpus()
    others = unit(np.random.default_rng(5).standard_normal((500, D_OUT)))
    ids = np.concatenate([np.arange(500) * 7, h.ids.to_numpy()[::-1]])
    vectors = np.concatenate([others, m.apply(h.source)[::-1]])
    e = evaluate(h, m, staged=indexed(ids, vectors, index="Flat"))
    for metric in ("agreement", "doc-agreement", "recall", "ndcg"):
        assert value(e, "as indexed", metric) == value(e, "translated", metric)


def test_a_faiss_index_is_searched_with_its_lists():
    """Two of 16 inverted lists are probed: what lies in others isn't found, here worked out from the lists."""
    faiss = pytest.importorskip("faiss")
    h, m = corpus()
    translated = m.apply(h.source)
    others = unit(np.random.default_rng(5).standard_normal((500, D_OUT)))
    index = faiss.index_factory(D_OUT, "IVF16,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(np.concatenate([translated, others, translated]))
    index.add_with_ids(np.concatenate([others, translated]), np.concatenate([np.arange(500) * 7, h.ids.to_numpy()]))
    index.nprobe = 2
    with open_reader(index) as staged:
        e = evaluate(h, m, staged=staged)
    _, own = index.quantizer.search(translated, 1)
    _, probed = index.quantizer.search(h.queries, 2)
    scores = h.queries.astype(float) @ translated.astype(float).T
    scores[~(own[:, 0] == probed[:, :, None]).any(axis=1)] = -np.inf
    found = [{d for d in np.argsort(-row)[:10].tolist() if np.isfinite(row[d])} for row in scores]
    expected = overlap(found, nearest(h.queries, h.target, 10), 10)
    assert value(e, "as indexed", "agreement") == pytest.approx(expected)
    assert expected < value(e, "translated", "agreement")
    assert 0.3 < value(e, "as indexed", "index-overlap") < 1


def test_a_store_without_an_index_is_searched_exactly(rows):
    h, m = corpus()
    coarse = np.round(m.apply(h.source) * 8) / 8
    e = evaluate(h, m, staged=rows(h.ids, coarse))
    expected = overlap(nearest(h.queries, coarse, 10), nearest(h.queries, h.target, 10), 10)
    assert value(e, "as indexed", "agreement") == pytest.approx(expected, abs=0.02)  # coarse rows tie
    assert any("searched exactly" in note for note in e.notes)
    assert e.cell("as indexed", "index-overlap", 10).reason == "the store has no index of its own"


def test_rows_that_were_skipped_are_left_out_of_all_rows_and_counted(indexed):
    h, m = corpus()
    here = np.ones(N, bool)
    here[[5, 17, 200]] = False
    staged = indexed(h.ids.to_numpy()[here], m.apply(h.source)[here], index="Flat")
    e = evaluate(h, m, staged=staged)
    assert {c.documents for r in e.rows for c in r.cells if c.value is not None} == {N - 3}
    assert e.notes == ("3 of 400 held-out documents are not in the index and left out of all rows: 38, 122, 1403",)
    expected = overlap(nearest(h.queries, m.apply(h.source)[here], 10), nearest(h.queries, h.target[here], 10), 10)
    assert value(e, "as indexed", "agreement") == pytest.approx(expected)
    place = np.cumsum(here) - 1
    at = [
        np.flatnonzero(np.argsort(-(query @ h.target[here].T)) == place[document])[0]
        for query, document in zip(h.queries, h.qrels.document, strict=True)
        if here[document]
    ]
    assert value(e, "re-embedded", "recall") == pytest.approx(np.mean(np.array(at) < 10))


def test_a_store_that_has_none_of_the_rows_is_not_measured(indexed):
    h, m = corpus()
    e = evaluate(h, m, staged=indexed(np.arange(N) * 7, m.apply(h.source), index="Flat"))
    assert "none of the 400 held-out ids" in e.cell("as indexed", "agreement", 10).reason
    assert value(e, "translated", "agreement") > 0
    e = evaluate(h, m, staged=indexed([f"x{i}" for i in range(N)], m.apply(h.source), index="Flat"))
    assert "none of the 400 held-out ids" in e.cell("as indexed", "agreement", 10).reason


@pytest.mark.case("p2")
def test_duplicates_do_not_pull_a_perfect_map_below_1(indexed):
    """Field case p2, through the whole evaluation: every document eight times, ids shuffled."""
    h, _ = corpus(n=50, d_in=D_OUT)
    ids = pa.array(np.random.default_rng(0).permutation(400))
    target = np.repeat(h.target, 8, axis=0)
    doubled = replace(h, ids=ids, source=target, target=target, qrels=None)
    perfect = LinearMap(np.eye(D_OUT, dtype=np.float32), post="l2", card=Card(Side(D_OUT), Side(D_OUT), "none"))
    order = np.random.default_rng(1).permutation(400)
    staged = indexed(ids.take(pa.array(order)), target[order], index="Flat")
    e = evaluate(doubled, perfect, staged=staged)
    for metric in ("agreement", "doc-agreement"):
        cell = e.cell("as indexed", metric, 10)
        assert (cell.value, cell.low, cell.high) == (1, 1, 1)


def test_the_metric_of_the_card_ranks():
    h, m = corpus()
    lengths = np.exp(np.random.default_rng(0).standard_normal((N, 1))).astype(np.float32)
    stretched = replace(h, target=h.target * lengths)
    ranks = {}
    for metric in ("cosine", "ip", "l2"):
        e = evaluate(stretched, m.with_card(replace(m.card, metric=metric)))
        q, d = h.queries.astype(float), stretched.target.astype(float)
        scores = {"cosine": q @ unit(d).T, "ip": q @ d.T, "l2": 2 * q @ d.T - (d**2).sum(axis=1)}[metric]
        true = [set(row[:10].tolist()) for row in np.argsort(-scores, axis=1)]
        t = m.apply(h.source).astype(float)
        found = [set(row[:10].tolist()) for row in np.argsort(-(q @ t.T), axis=1)]  # unit: one order by all three
        assert value(e, "translated", "agreement") == pytest.approx(overlap(found, true, 10))
        ranks[metric] = value(e, "translated", "agreement")
    assert len(set(ranks.values())) == 3


def test_things_that_do_not_belong_together_are_refused(rows):
    h, m = corpus()
    with pytest.raises(IncompatibleError, match="24 -> 32 dimensions, its hold-out 24 -> 31"):
        evaluate(replace(h, target=np.ascontiguousarray(h.target[:, 1:]), queries=None), m)
    with pytest.raises(IncompatibleError, match="24 dimensions, the map leads to 32"):
        evaluate(h, m, staged=rows(h.ids, h.source))
    with pytest.raises(IncompatibleError, match="queries into the old space"):
        evaluate(h, m.with_card(replace(m.card, direction="query")))


def test_an_evaluation_survives_json_and_is_reproducible():
    h, m = corpus()
    e = evaluate(h, m, seed=3)
    assert evaluate(h, m, seed=3) == e
    assert typed(Evaluation, json.loads(json.dumps(asdict(e))), "evaluation") == e


def test_index_overlap_is_what_exact_search_finds(indexed):
    h, _ = corpus()
    store = indexed(h.ids, h.target, index="IVF", blind=np.arange(0, N, 2))
    got = index_overlap(store, h.queries, (1, 10), "cosine")
    for k in (1, 10):
        expected = [np.mean([d % 2 for d in t]) for t in nearest(h.queries, h.target, k)]
        assert got.values[k] == pytest.approx(expected)
        assert 0.2 < got.values[k].mean() < 0.8


def test_index_overlap_of_a_store_without_an_index_is_refused(rows):
    h, _ = corpus()
    with pytest.raises(UnsupportedError):
        index_overlap(rows(h.ids, h.target), h.queries, (10,), "cosine")


def test_judging_by_one_pass_is_judging_in_memory():
    h, m = corpus()
    found = np.argsort(-(h.queries @ m.apply(h.source).T), axis=1)[:, :10]
    found[3, 4] = -1
    exact, scores = judge(iter(np.split(h.target, [50, 51, 300])), h.queries, found, 10, "cosine")
    assert [set(p.tolist()) for p in exact.places] == nearest(h.queries, h.target, 10)
    expected = np.take_along_axis(h.queries.astype(float) @ h.target.astype(float).T, found, axis=1)
    expected[3, 4] = -np.inf
    np.testing.assert_allclose(scores, expected, atol=2e-6)


def test_ids_are_found_by_place(rows):
    store = rows([f"d{i}" for i in range(20)], np.ones((20, 2)))
    assert ids_at(store, np.array([0, 7, 19])).to_pylist() == ["d0", "d7", "d19"]
