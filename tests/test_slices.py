"""Slices and hubness against loops and sets written out here; the gate on the worst slice."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from vecferry.checking import check
from vecferry.errors import DataError, UsageError
from vecferry.evaluate import evaluate
from vecferry.gate import Gate, decide
from vecferry.holdout import Holdout, Qrels
from vecferry.hubness import hubness
from vecferry.jsonfile import typed
from vecferry.linear import Card, LinearMap, Side
from vecferry.measured import AS_INDEXED, Cell, Evaluation, PerQuery, Row, Slices
from vecferry.report import Report
from vecferry.slices import NO_VALUE, Slicing, measure_slices

N, Q, D = 400, 200, 12


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


class World:
    """A map that works for topics a and b and is noise for c; d is small; half of the queries have labels."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.topic = rng.choice(["a", "b", "c", "d"], N, p=[0.4, 0.3, 0.25, 0.05])
        centre = dict(zip("abcd", 2 * rng.standard_normal((4, D)), strict=True))
        self.target = unit(np.stack([centre[name] for name in self.topic]) + rng.standard_normal((N, D)))
        self.source = unit(self.target + np.where(self.topic == "c", 2.0, 0.1)[:, None] * rng.standard_normal((N, D)))
        self.relevant = rng.integers(0, N, Q)
        self.queries = unit(self.target[self.relevant] + 0.1 * rng.standard_normal((Q, D)))
        self.ids = pa.array([f"d{i}" for i in range(N)])
        labelled = np.arange(Q // 2)
        other = rng.integers(0, N, Q // 2)
        other[: Q // 4] = self.relevant[: Q // 4]  # the others have a second one, often of another slice
        labels = Qrels(np.tile(labelled, 2), np.concatenate([self.relevant[: Q // 2], other]), np.ones(Q, np.int64))
        names = pa.array([f"q{i}" for i in range(Q)])
        self.held = Holdout(self.ids, self.source, self.target, names, self.queries, qrels=labels)
        self.m = LinearMap(
            np.eye(D), post="l2", card=Card(Side(D, "old"), Side(D, "new"), "by hand"), holdout=self.held
        )
        self.places = {q: {self.relevant[q], other[q]} for q in labelled}
        for q in range(Q // 2, Q):
            self.places[q] = {int(np.argmax(self.target.astype(float) @ self.queries[q].astype(float)))}

    def payload(self) -> pa.Table:
        return pa.table({"topic": pa.array(self.topic).dictionary_encode(), "tags": pa.array([["x"]] * N)})

    def asked(self, name: str) -> list[int]:
        """The queries that belong to a slice."""
        return [q for q, places in self.places.items() if any(self.topic[p] == name for p in places)]

    def agreement(self, queries: np.ndarray, k: int = 10, own: bool = False) -> np.ndarray:
        truth, found = (cosines(queries, x) for x in (self.target, self.source))
        if own:
            np.fill_diagonal(truth, -np.inf)
            np.fill_diagonal(found, -np.inf)
        bar = np.sort(truth, axis=1)[:, -k] - 1e-6
        return np.array(
            [np.mean([t[p] >= b for p in np.argsort(-f)[:k]]) for t, f, b in zip(truth, found, bar, strict=True)]
        )


def cosines(queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
    q, d = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries.astype(float), documents.astype(float)))
    return q @ d.T


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def value(slices: Slices | None, name: str, metric: str) -> Cell:
    assert slices is not None
    cell = next(row for row in slices.rows if row.name == name).cell(metric, 10)
    assert cell is not None
    return cell


@pytest.mark.parametrize("truth", [False, True])
def test_a_slice_is_the_queries_whose_documents_are_in_it(world: World, rows: Any, truth: bool) -> None:
    index = rows(world.ids, world.source, world.payload(), uri="the index", space="new")
    true = rows(world.ids, world.target, uri="the truth", space="new") if truth else None
    report = check(index, map=world.m, truth=true, slice="topic")
    assert report.evaluation is not None
    slices, per_query = report.evaluation.slices, world.agreement(world.queries)
    assert slices is not None
    assert (slices.column, [row.name for row in slices.rows]) == ("topic", ["a", "b", "c", "d"])
    for name in "abc":
        cell, members = value(slices, name, "agreement"), world.asked(name)
        assert cell.value == pytest.approx(per_query[members].mean())
        assert (cell.queries, cell.documents) == (len(members), N)
    labelled = [q for q in world.asked("a") if q < Q // 2]
    assert value(slices, "a", "ndcg").queries == len(labelled)
    few = value(slices, "d", "agreement")
    assert few.value is None
    assert few.reason == f"too few: {len(world.asked('d'))} queries, 30 are needed"


def test_without_queries_a_slice_is_its_documents(world: World, rows: Any) -> None:
    held = replace(world.held, queries=None, query_ids=pa.array([], pa.string()), qrels=None)
    slicing = Slicing.of("topic", None, (rows(world.ids, world.source, world.payload()),), None)
    slices = evaluate(held, world.m, staged=rows(world.ids, world.source), slicing=slicing).slices
    expected = world.agreement(world.target, own=True)
    for name in "abc":
        cell = value(slices, name, "doc-agreement")
        assert cell.value == pytest.approx(expected[world.topic == name].mean())
        assert cell.queries == (world.topic == name).sum()


def test_the_gate_acts_on_the_worst_slice(world: World, rows: Any) -> None:
    index = rows(world.ids, world.source, world.payload(), uri="the index", space="new")
    report = check(index, map=world.m, slice="topic", gate="agreement@10>=0.3 and worst-slice.agreement@10>=0.3")
    assert report.decision is not None
    overall, worst = report.decision.judgements
    bad = world.agreement(world.queries)[world.asked("c")].mean()
    assert bad < 0.3
    assert (overall.outcome, worst.outcome) == ("pass", "fail")
    assert f"of 3 slices by topic the worst is 'c': agreement@10 is {bad:.3f}" in worst.message
    assert worst.message.endswith("below 0.3; 1 more of fewer than 30 queries say nothing")
    with pytest.raises(UsageError, match="asks for the worst slice: name the payload column with --slice"):
        check(index, map=world.m, gate="worst-slice.agreement@10>=0.3")


def judged(*cells: Cell, gate: str = "worst-slice.agreement@10>=0.3") -> Any:
    slices = Slices("topic", tuple(Row(f"s{i}", (cell,)) for i, cell in enumerate(cells)))
    return decide(Gate.parse(gate), Evaluation((Row(AS_INDEXED, ()),), "cosine", 10, slices=slices)).judgements[0]


def test_a_clear_fail_is_worse_than_an_unclear_slice_with_a_lower_end() -> None:
    wide = Cell("agreement", 10, 0.35, 0.1, 0.6, 900, 40)
    clear = Cell("agreement", 10, 0.29, 0.28, 0.3, 900, 400)
    good = Cell("agreement", 10, 0.9, 0.8, 1.0, 900, 40)
    assert judged(good, wide, clear).outcome == "fail"
    assert "'s2'" in judged(good, wide, clear).message
    assert judged(good, wide).outcome == "inconclusive"
    assert judged(good).outcome == "pass"
    none = Cell("agreement", 10, 0.0, 0.0, 0.0, 900, 40)
    assert judged(good, none).outcome == "fail"


def test_slices_that_nobody_could_measure_do_not_pass() -> None:
    few = Cell("agreement", 10, reason="too few: 3 queries, 30 are needed")
    assert (judged(few).outcome, judged(few).message) == (
        "inconclusive",
        "none of the 1 slices by topic has 30 queries",
    )
    other = judged(Cell("doc-agreement", 10, 0.9, 0.9, 0.9, 900, 40))
    assert (other.outcome, "can't be measured" in other.message) == ("inconclusive", True)


def test_a_file_of_slices_and_documents_that_it_lacks(world: World, rows: Any, tmp_path: Any) -> None:
    path = tmp_path / "topics.parquet"
    some = np.random.default_rng(0).permutation(N)[:300]
    years = pa.array([2000 + int(i) % 2 if i % 7 else None for i in some])
    pq.write_table(pa.table({"year": years, "id": world.ids.take(pa.array(some))}), path)
    slicing = Slicing.of("year", path, (), None)
    assert slicing is not None
    names = slicing.names(world.ids)
    known = {int(i): str(2000 + int(i) % 2) if i % 7 else NO_VALUE for i in some}
    assert names.tolist() == [known.get(i, NO_VALUE) for i in range(N)]
    with pytest.raises(UsageError, match=r"has the columns year, id: slices need id and topic"):
        Slicing.of("topic", path, (), None)
    with pytest.raises(UsageError, match="no such file"):
        Slicing.of("topic", tmp_path / "nothing", (), None)
    with pytest.raises(UsageError, match="goes with the name of its column"):
        Slicing.of(None, path, (), None)


def test_a_file_that_names_no_slice_is_refused(world: World, tmp_path: Any) -> None:
    """A gate on the worst slice would pass by the one slice of documents without a value, which are all."""
    path = tmp_path / "topics.parquet"
    numbers, topics = pa.array(np.arange(N)), pa.array(["a"] * N)
    for ids, column, complaint in (
        (
            numbers,
            topics,
            rf"none of {N:,} documents has a value .*type string, those in the file int64",
        ),
        (world.ids, pa.nulls(N), "has a value in the column 'topic'"),
        (pa.array([None, *world.ids.to_pylist()[1:]]), topics, "1 rows have no id"),
        (numbers.cast(pa.float64()), topics, "ids of type double are not supported"),
    ):
        pq.write_table(pa.table({"id": ids, "topic": column}), path)
        slicing = Slicing.of("topic", path, (), None)
        assert slicing is not None
        with pytest.raises(DataError, match=complaint):
            slicing.names(world.ids)
    pq.write_table(pa.table({"id": world.ids}), path)
    by_id = Slicing.of("id", path, (), None)
    assert by_id is not None
    assert by_id.names(world.ids).tolist() == world.ids.to_pylist()


def test_the_name_of_a_slice_cannot_pass_for_a_line_of_the_report() -> None:
    names = np.array(["en\ngate agreement@10>=0.9: PASS"] * 40 + ["x" * 5000] * 40, np.object_)
    slices = measure_slices("title", None, names, {("doc-agreement", 10): np.ones(80)}, 80, seed=0)
    rows = (Row(AS_INDEXED, (Cell("doc-agreement", 10, 1.0, 1.0, 1.0, 80, 80),)),)
    evaluation = Evaluation(rows, "cosine", 10, slices=slices)
    decision = decide(Gate.parse("worst-slice.doc-agreement@10>=0.99"), evaluation)
    lines = Report({}, evaluation, decision).table().splitlines()
    assert [line for line in lines if line.startswith("gate")] == [lines[-1]]
    assert max(map(len, lines)) < 300


def test_columns_that_cannot_be_slices_are_refused(world: World, rows: Any) -> None:
    index = rows(world.ids, world.source, world.payload(), uri="the index")
    with pytest.raises(
        UsageError, match=r"no payload column 'colour' \(columns of the index: topic, tags; bare: none\)"
    ):
        Slicing.of("colour", None, (index, rows(world.ids, world.source, uri="bare")), None)
    with pytest.raises(UsageError, match=r"'tags' is of type list<.*>: slices need text"):
        Slicing.of("tags", None, (index,), None)


def test_of_many_small_slices_some_are_named_and_all_counted() -> None:
    names = np.array(["big"] * 40 + [f"s{i:02}" for i in range(50)], np.object_)
    slices = measure_slices("title", None, names, {("doc-agreement", 10): np.ones(90)}, 90, seed=0)
    assert [row.name for row in slices.rows] == ["big", *(f"s{i:02}" for i in range(20))]
    assert slices.left_out == 30


def test_hubness_is_the_skew_of_how_often_documents_are_found(world: World) -> None:
    rng = np.random.default_rng(1)
    found = np.minimum(rng.geometric(0.05, (200, 10)) - 1, 99)
    found[0, 5:] = -1
    times = [int((found == place).sum()) for place in range(100)]
    skew, never = hubness(found, 100)
    assert skew == pytest.approx(stats.skew(times))
    assert never == np.mean([t == 0 for t in times])
    assert hubness(np.arange(20).reshape(10, 2), 20) == (0.0, 0.0)
    assert hubness(np.zeros((10, 1), np.int64), 20)[1] == 0.95


def test_every_row_tells_its_hubness_before_and_after(world: World) -> None:
    evaluation = evaluate(world.held, world.m)
    for row, vectors in (("translated", world.source), ("re-embedded", world.target)):
        scores = cosines(world.target, vectors)
        np.fill_diagonal(scores, -np.inf)
        times = np.bincount(np.argsort(-scores, axis=1)[:, :10].ravel(), minlength=N)
        skew, never = (evaluation.cell(row, metric, 10) for metric in ("hub-skew", "never-found"))
        assert skew is not None
        assert never is not None
        assert skew.value == pytest.approx(stats.skew(times))
        assert never.value == (times == 0).mean()
        assert (skew.documents, skew.queries) == (N, N)


def test_values_per_query_and_slices_survive_json(world: World, rows: Any) -> None:
    index = rows(world.ids, world.source, world.payload(), uri="the index", space="new")
    evaluation = check(index, map=world.m, slice="topic").evaluation
    assert evaluation is not None
    assert typed(Evaluation, json.loads(json.dumps(asdict(evaluation))), "evaluation") == evaluation
    asked = evaluation.per_query[0].read("agreement@10")
    assert [v for v, _ in asked.values()] == pytest.approx(world.agreement(world.queries))
    assert len(evaluation.per_query[0].read("ndcg@10")) == Q // 2
    by_documents = evaluation.per_query[1].read("doc-agreement@10")
    assert [v for v, _ in by_documents.values()] == pytest.approx(world.agreement(world.target, own=True))
    assert len(json.dumps(asdict(evaluation.per_query[0]))) < 50 * Q


def test_a_report_names_no_query_by_its_id_and_tells_other_vectors() -> None:
    vectors = unit(np.random.default_rng(0).standard_normal((3, 50)))
    values = {("agreement", 10): np.array([0.4, np.nan, 1 / 3])}
    ids = pa.array(["who am I?", "b", "c"])
    kept = PerQuery.of(ids, vectors, values)
    assert "who" not in json.dumps(asdict(kept))
    assert kept.values == {"agreement@10": "0.4 - 0.3333"}
    rounded = PerQuery.of(ids, vectors.astype(np.float16).astype(np.float32), values).read("agreement@10")
    others = PerQuery.of(ids, vectors[::-1].copy(), values).read("agreement@10")
    for key, (_, probe) in kept.read("agreement@10").items():
        assert abs(rounded[key][1] - probe) < 0.01 < abs(others[key][1] - probe)
