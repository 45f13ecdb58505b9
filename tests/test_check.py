"""The verb `check`, by a map's hold-out and at full size, against sets written out here."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vecferry.checking import check
from vecferry.errors import BadRowsError, DataError, IncompatibleError, UsageError
from vecferry.evaluate import evaluate
from vecferry.fullsize import judge
from vecferry.holdout import Holdout, Qrels
from vecferry.linear import Card, LinearMap, Side
from vecferry.store import find

N, Q, D_IN, D = 500, 40, 12, 16


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def world(rows: Any) -> Any:
    """A corpus in both spaces, a map with a hold-out, an index that searches, the truth in another order."""

    class Indexed(rows):
        def search(self, queries: Any, k: int, among: Any = None) -> Any:
            vectors = self.rows.vectors if among is None else self.rows.vectors[find(self, among)]
            scores = queries @ vectors.T
            places = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            return places, np.take_along_axis(scores, places, axis=1)

    class World:
        rng = np.random.default_rng(0)
        z = rng.standard_normal((2 * N, 8))
        source = unit(z @ rng.standard_normal((8, D_IN)) + 0.5 * rng.standard_normal((2 * N, D_IN)))
        target = unit(z @ rng.standard_normal((8, D)) + 0.5 * rng.standard_normal((2 * N, D)))
        weight = np.linalg.lstsq(source[N:], target[N:], rcond=None)[0]
        relevant = rng.integers(0, 150, Q)  # held out too
        queries = unit(target[relevant] + 0.1 * rng.standard_normal((Q, D)))
        ids = pa.array([f"d{i}" for i in range(N)])
        names = pa.array([f"q{i}" for i in range(Q)])
        held = Holdout(
            ids.slice(0, 150),
            source[:150],
            target[:150],
            names,
            queries,
            qrels=Qrels(np.arange(Q), relevant, np.ones(Q, int)),
        )
        m = LinearMap(weight, post="l2", card=Card(Side(D_IN, "old"), Side(D, "new"), "by hand"), holdout=held)
        translated = m.apply(source[:N])
        shuffle = rng.permutation(N)

        def index(self, **info: Any) -> Any:
            return Indexed(self.ids, self.translated, uri="the index", **({"space": "new", "metric": "cosine"} | info))

        def truth(self, **info: Any) -> Any:
            ids = self.ids.take(pa.array(self.shuffle)).cast(pa.large_string())
            return rows(ids, self.target[self.shuffle], uri="the truth", **({"space": "new"} | info))

        def store(self, vectors: Any, ids: Any, **info: Any) -> Any:
            return rows(ids, vectors, uri="the queries", **info)

    return World()


def nearest(queries: np.ndarray, documents: np.ndarray, k: int, own: np.ndarray | None = None) -> np.ndarray:
    scores = queries.astype(float) @ documents.astype(float).T
    if own is not None:
        scores[np.arange(len(own)), own] = -np.inf
    return np.argsort(-scores, axis=1)[:, :k]


def overlap(found: np.ndarray, true: np.ndarray) -> float:
    return float(np.mean([len(set(f) & set(t)) / len(t) for f, t in zip(found.tolist(), true.tolist(), strict=True)]))


def value(report: Any, row: str, metric: str, k: int = 10) -> float:
    cell = report.evaluation.cell(row, metric, k)
    assert cell.value is not None, cell.reason
    return cell.value


def test_a_map_measures_with_its_hold_out(world):
    report = check(world.index(), map=world.m, gate="agreement@10>=0.7", seed=4)
    assert report.evaluation.cell("translated", "agreement", 10) == evaluate(world.held, world.m, seed=4).cell(
        "translated", "agreement", 10
    )
    expected = overlap(
        nearest(world.queries, world.translated[:150], 10), nearest(world.queries, world.target[:150], 10)
    )
    assert value(report, "as indexed", "agreement") == pytest.approx(expected)
    assert (report.passed, report.exit_code) == (False, 1)
    assert report.facts["destination"] == "the index"
    assert check(world.index(), map=world.m).exit_code == 0


def test_truth_measures_at_full_size_whatever_its_order(world):
    report = check(world.index(), truth=world.truth(), map=world.m, gate="agreement@10>=0.2 and agreement@3>0.2")
    for k in (3, 10):
        found, true = nearest(world.queries, world.translated, k), nearest(world.queries, world.target[:N], k)
        assert value(report, "as indexed", "agreement", k) == pytest.approx(overlap(found, true))
    assert 0.2 < value(report, "as indexed", "agreement") < 0.9
    assert value(report, "re-embedded", "agreement") == 1
    assert value(report, "as indexed", "index-overlap") == 1
    cell = report.evaluation.cell("as indexed", "agreement", 10)
    assert (cell.documents, cell.among, cell.queries) == (N, "documents", Q)
    assert report.passed
    hit = [r in row for r, row in zip(world.relevant, nearest(world.queries, world.translated, 10), strict=True)]
    ideal = [r in row for r, row in zip(world.relevant, nearest(world.queries, world.target[:N], 10), strict=True)]
    assert value(report, "as indexed", "recall") == pytest.approx(np.mean(hit))
    assert value(report, "re-embedded", "recall") == pytest.approx(np.mean(ideal))
    assert value(report, "as indexed", "retention.recall") == pytest.approx(np.mean(hit) / np.mean(ideal))


def test_without_queries_documents_stand_in_under_their_own_name(world):
    with pytest.raises(UsageError, match=r"among all [0-9,]+ documents, not foretold for 99,999"):
        check(world.index(), truth=world.truth(), map=world.m, gate="agreement@10@99999>=0.1")
    report = check(world.index(), truth=world.truth(), gate="agreement@10>=0.1")
    everyone = np.arange(N)
    found = nearest(world.target[:N], world.translated, 10, everyone)
    true = nearest(world.target[:N], world.target[:N], 10, everyone)
    assert value(report, "as indexed", "doc-agreement") == pytest.approx(overlap(found, true))
    assert not report.passed
    assert "only doc-agreement@k can be gated" in report.decision.judgements[0].message
    assert check(world.index(), truth=world.truth(), gate="doc-agreement@10>=0.2").passed


def test_a_store_without_an_index_is_scanned(world):
    plain = world.store(world.translated, world.ids, metric="ip")
    report = check(plain, truth=world.truth(), map=world.m)
    indexed = check(world.index(), truth=world.truth(), map=world.m)
    assert value(report, "as indexed", "agreement") == value(indexed, "as indexed", "agreement")
    assert report.evaluation.cell("as indexed", "index-overlap", 10).reason == "the store has no index of its own"


def test_given_queries_and_labels_replace_those_of_the_map(world, tmp_path):
    asked = unit(np.random.default_rng(9).standard_normal((35, D)))
    old = unit(np.random.default_rng(8).standard_normal((35, D_IN)))
    names = [f"new{i}" for i in range(35)]
    labels = tmp_path / "qrels.tsv"
    true = nearest(asked, world.target[:150], 1)[:, 0]
    labels.write_text("".join(f"{name}\td{d}\t1\n" for name, d in zip(names, true, strict=True)))
    given = {
        "queries": world.store(asked, names),
        "source_queries": world.store(old[::-1], names[::-1]),
        "qrels": labels,
    }
    report = check(world.index(), map=world.m, **given)
    found, truth = nearest(asked, world.translated[:150], 10), nearest(asked, world.target[:150], 10)
    assert value(report, "as indexed", "agreement") == pytest.approx(overlap(found, truth))
    found = nearest(old, world.source[:150], 10)
    assert value(report, "status quo", "agreement") == pytest.approx(overlap(found, truth))
    assert value(report, "re-embedded", "recall") == 1
    del given["source_queries"]
    report = check(world.index(), truth=world.truth(), **given)
    found = nearest(asked, world.translated, 10)
    assert value(report, "as indexed", "agreement") == pytest.approx(
        overlap(found, nearest(asked, world.target[:N], 10))
    )
    assert value(report, "as indexed", "recall") == pytest.approx(
        np.mean([t in f for t, f in zip(true, found, strict=True)])
    )


@pytest.mark.parametrize("truth", [False, True])
def test_labels_of_other_queries_or_documents_are_refused(world, truth, tmp_path):
    labels = tmp_path / "qrels.tsv"
    against = {"truth": world.truth()} if truth else {}
    for name, document in (("q0", "nobody"), ("nobody", "d0")):
        labels.write_text(f"{name}\t{document}\t1\n")
        with pytest.raises(
            DataError, match=rf"qrels.tsv: none of its 1 labels joins one of the {Q} queries and one of"
        ):
            check(world.index(), map=world.m, qrels=labels, **against)


def test_queries_of_which_only_a_part_was_held_out_are_warned_of(world):
    fitted = unit(np.random.default_rng(9).standard_normal((35, D)))
    names = world.names.to_pylist()
    both = world.store(np.concatenate([world.queries, fitted]), names + [f"fit{i}" for i in range(35)])
    for truth in (None, world.truth()):
        (warning,) = check(world.index(), map=world.m, truth=truth, queries=both).warnings
        assert f"{Q} of the {Q + 35} queries were held out" in warning
    for store in (world.store(world.queries, names), world.store(fitted, [f"new{i}" for i in range(35)])):
        assert check(world.index(), map=world.m, queries=store).warnings == ()


def test_true_vectors_that_are_all_alike_are_refused(world):
    same = np.repeat(world.target[:1], N, axis=0) + 1e-5 * np.arange(N)[:, None].astype(np.float32) / N
    with pytest.raises(DataError, match="the queries: all true vectors are alike"):
        check(world.index(), map=world.m, truth=world.store(same, world.ids.to_pylist()))
    with pytest.raises(DataError, match="the hold-out: all true vectors are alike"):
        evaluate(replace(world.held, target=same[:150]), world.m)


def test_many_places_of_many_queries_are_judged_in_little_memory():
    rng = np.random.default_rng(0)
    queries, documents = (unit(rng.standard_normal((n, 64))) for n in (500, 1000))
    found = np.tile(np.arange(1000), (500, 1))
    tracemalloc.start()
    exact, scores = judge([documents[:600], documents[600:]], queries, found, 5, "cosine")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.allclose(scores, queries @ documents.T, atol=1e-5)
    assert (np.sort(exact.places) == np.sort(np.argsort(-(queries @ documents.T))[:, :5])).all()
    assert peak < 500 * 600 * 64 * 4  # the vectors of all pairs in a block


def test_stores_of_other_documents_are_refused_with_numbers(world, rows):
    short = rows(world.ids.slice(0, 490), world.target[:490], uri="the truth")
    with pytest.raises(DataError, match=r"500 rows, the truth has 490: 10 ids are only in the first, 0 only"):
        check(world.index(), truth=short)
    other = rows(pa.array([f"d{i + 3}" for i in range(N)]), world.target[:N], uri="the truth")
    with pytest.raises(DataError, match=r"500 rows, the truth has 500: 3 ids are only in the first, 3 only"):
        check(world.index(), truth=other)
    numbers = rows(np.arange(N), world.target[:N], uri="the truth")
    with pytest.raises(DataError, match=r"500 ids are only in the first, 500 only .* string and int64"):
        check(world.index(), truth=numbers)
    twice = rows(pa.array(["d1", *world.ids.to_pylist()[1:]]), world.target[:N], uri="the truth")
    with pytest.raises(DataError, match=r"the truth: 1 of 500 rows repeat an id"):
        check(world.index(), truth=twice)


@pytest.mark.case("1")
def test_another_space_or_dimension_is_refused(world):
    asked = world.store(world.queries, world.names, space="old")
    with pytest.raises(IncompatibleError, match=r"the index is in the space 'new', the queries the queries in 'old'"):
        check(world.index(), map=world.m, queries=asked)
    with pytest.raises(IncompatibleError, match=r"16 dimensions, the queries the queries has 12"):
        check(world.index(), map=world.m, queries=world.store(world.source[:Q], world.names))
    with pytest.raises(IncompatibleError, match="'new', the truth the truth in 'old'"):
        check(world.index(), truth=world.truth(space="old"))
    with pytest.raises(IncompatibleError, match="'newer', the map in 'new'"):
        check(world.index(space="newer"), map=world.m)
    for_queries = Card(Side(D_IN, "old"), Side(D, "new"), "by hand", direction="query")
    with pytest.raises(IncompatibleError, match="new queries into the old space; this needs one"):
        check(world.index(), map=LinearMap(world.weight, card=for_queries), truth=world.truth())
    narrow = LinearMap(world.weight[:, :9], card=Card(Side(D_IN), Side(9), "by hand"))
    with pytest.raises(IncompatibleError, match="16 dimensions, the map has 9"):
        check(world.index(), map=narrow)


@pytest.mark.parametrize("bad", [0, 1e30, np.nan, np.inf])
@pytest.mark.parametrize("way", ["map", "truth"])
def test_queries_that_cannot_be_asked_are_refused_by_id(world, way, bad):
    against = {"map": world.m} if way == "map" else {"truth": world.truth()}
    asked = world.queries.copy()
    asked[[3, 7]] = bad
    with pytest.raises(BadRowsError, match=r"the queries: 2 .*: q3, q7\. Mend them\.$") as caught:
        check(world.index(), queries=world.store(asked, world.names), gate="agreement@10>=0.1", **against)
    assert (caught.value.ids, caught.value.exit_code) == (["q3", "q7"], 3)


@pytest.mark.parametrize("bad", [0, 1e30, np.nan])
def test_source_queries_that_cannot_be_asked_are_refused_by_id(world, bad):
    old = unit(np.random.default_rng(8).standard_normal((Q, D_IN)))
    old[5] = bad
    given = {"queries": world.store(world.queries, world.names), "source_queries": world.store(old, world.names)}
    with pytest.raises(BadRowsError) as caught:
        check(world.index(), map=world.m, **given)
    assert caught.value.ids == ["q5"]
    given["source_queries"] = world.store(np.delete(old, 5, axis=0), [f"q{i}" for i in range(Q) if i != 5])
    with pytest.raises(BadRowsError, match="not in it: q5"):
        check(world.index(), map=world.m, **given)


def test_queries_of_one_id_are_refused(world):
    twice = world.store(world.queries, ["a", "b", "a", *(f"q{i}" for i in range(Q - 3))])
    for against in ({"map": world.m}, {"truth": world.truth()}):
        with pytest.raises(BadRowsError, match=r"2 rows share their id with another: a, a\."):
            check(world.index(), queries=twice, **against)
    with pytest.raises(DataError, match="the queries is empty"):
        check(world.index(), map=world.m, queries=world.store(world.queries[:0], world.names.slice(0, 0)))


@pytest.mark.parametrize("bad", [0, 1e30, np.nan])
@pytest.mark.parametrize("queries", [True, False])
def test_true_vectors_that_are_none_are_refused_by_id(world, bad, queries):
    target = world.target[:N].copy()
    target[[2, 410]] = bad
    asked = {"queries": world.store(world.queries, world.names)} if queries else {}
    with pytest.raises(BadRowsError) as caught:
        check(world.index(), truth=world.store(target, world.ids), **asked)
    assert caught.value.ids == ["d2", "d410"]


def test_the_index_and_translations_are_no_truth(world, tmp_path):
    index = world.index()
    with pytest.raises(IncompatibleError, match="the index itself, which agrees with itself") as caught:
        check(index, truth=index)
    assert caught.value.exit_code == 4
    for map in (None, world.m):
        with pytest.raises(IncompatibleError, match="that the map abc… translated"):
            check(world.index(), truth=world.truth(provenance={"map": "abc"}), map=map)
    check(world.index(provenance={"map": "abc"}), truth=world.truth(provenance={"plan": "x"}))
    path = tmp_path / "both.parquet"
    columns = {name: list(x[:N]) for name, x in {"one": world.translated, "two": world.target}.items()}
    pq.write_table(pa.table({"id": world.ids} | columns), path)
    for same in (f"{path}?vector=one", f"parquet:{tmp_path}/./both.parquet?id=id&vector=one"):
        with pytest.raises(IncompatibleError, match="the index itself"):
            check(f"parquet:{path}?vector=one", truth=same)
    report = check(f"parquet:{path}?vector=one", truth=f"parquet:{path}?vector=two")
    everyone = np.arange(N)
    found = nearest(world.target[:N], world.translated, 10, everyone)
    expected = overlap(found, nearest(world.target[:N], world.target[:N], 10, everyone))
    assert value(report, "as indexed", "doc-agreement") == pytest.approx(expected)


@pytest.mark.case("1", "44")
def test_vectors_of_the_old_model_are_refused_where_dimensions_are_equal(world, rows):
    turn = np.linalg.qr(np.random.default_rng(3).standard_normal((D, D)))[0]
    old, old_asked = unit(world.target @ turn), unit(world.queries @ turn)
    held = replace(world.held, source=old[:150], source_queries=old_asked)
    m = LinearMap(turn.T, card=Card(Side(D), Side(D), "by hand"), holdout=held)
    index, names = rows(world.ids, world.target[:N], uri="the index"), world.names
    new = {"queries": world.store(world.queries, names), "source_queries": world.store(old_asked, names)}
    assert value(check(index, map=m, **new), "translated", "agreement") > 0.99
    truth = rows(world.ids, world.target[:N], uri="the truth")
    for given in ({}, {"truth": truth}):
        with pytest.raises(IncompatibleError, match="queries: 40 of 40 held-out ids have the old model's") as caught:
            check(index, map=m, queries=world.store(old_asked, names), **given)
        assert caught.value.exit_code == 4
    with pytest.raises(IncompatibleError, match="150 of 150 held-out ids have the old model's"):
        check(index, map=m, truth=rows(world.ids, old[:N], uri="the truth"))
    with pytest.raises(IncompatibleError, match="40 of 40 held-out ids have vectors of the space where the map leads"):
        check(index, map=m, queries=new["queries"], source_queries=new["queries"])


def test_calls_that_cannot_be_right(world):
    with pytest.raises(UsageError, match="text or a Gate, not 5"):
        check(world.index(), map=world.m, gate=5)
    with pytest.raises(UsageError, match="a map is a LinearMap or the path of its folder, not 5"):
        check(world.index(), map=5)
    with pytest.raises(UsageError, match="--map"):
        check(world.index())
    with pytest.raises(UsageError, match="can't read"):
        check(world.index(), map=world.m, gate="agreement")
    with pytest.raises(UsageError, match="--source-queries goes with --map and --queries"):
        check(world.index(), map=world.m, source_queries=world.store(world.source[:Q], world.names))
    with pytest.raises(UsageError, match="at full size there is no status quo") as caught:
        check(
            world.index(),
            map=world.m,
            truth=world.truth(),
            queries=world.store(world.queries, world.names),
            source_queries=world.store(world.source[:Q], world.names),
        )
    assert caught.value.exit_code == 2
    exact = world.store(world.source[:N], world.ids)
    for given in ({"truth": world.truth()}, {"truth": world.truth(), "map": world.m}):
        with pytest.raises(UsageError, match="--source-exact goes with --map and without --truth"):
            check(world.index(), source_exact=exact, **given)
    with pytest.raises(UsageError, match="no hold-out"):
        check(world.index(), map=replace(world.m, holdout=None))
    with pytest.raises(UsageError, match=r"k = 501 .* 500 documents"):
        check(world.index(), truth=world.truth(), k=500)
