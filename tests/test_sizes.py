"""Agreement foretold in an evaluation: against searching the whole index, and what a gate and a report make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from vecferry.errors import UsageError
from vecferry.evaluate import evaluate
from vecferry.gate import Gate, decide
from vecferry.holdout import Holdout
from vecferry.jsonfile import typed
from vecferry.linear import Card, LinearMap, Side
from vecferry.measured import Cell, Evaluation
from vecferry.prechecks import check_gate
from vecferry.report import Report
from vecferry.sizes import Sizes
from vecferry.store import open_reader

N, HELD, QUERIES, D = 6000, 1000, 400, 16


def unit(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)


class World:
    """An index of N translated documents, of which HELD are held out, and their true vectors."""

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        self.true = unit(rng.standard_normal((N, D)))
        self.translated = unit(self.true + 0.15 * rng.standard_normal((N, D)))
        self.queries = unit(rng.standard_normal((QUERIES, D)))
        self.held_rows = np.sort(rng.permutation(N)[:HELD])
        self.ids = pa.array(np.arange(N))
        names = pa.array([f"q{i}" for i in range(QUERIES)])
        rows = self.held_rows
        self.held = Holdout(self.ids.take(pa.array(rows)), self.translated[rows], self.true[rows], names, self.queries)
        self.m = LinearMap(np.eye(D), post="l2", card=Card(Side(D), Side(D), "by hand"))

    def truth(self, queries: np.ndarray, own: np.ndarray | None = None, k: int = 10) -> float:
        """Agreement among all N documents, by sets."""
        found = []
        for documents in (self.true, self.translated):
            scores = queries @ documents.T
            if own is not None:
                scores[np.arange(len(own)), own] = -np.inf
            found.append(np.argsort(-scores, axis=1)[:, :k])
        return float(np.mean([len(set(a) & set(b)) / k for a, b in zip(*map(np.ndarray.tolist, found), strict=True)]))


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture
def evaluation(world: World, rows: Any) -> Evaluation:
    return evaluate(world.held, world.m, staged=rows(world.ids, world.translated))


def cell(evaluation: Evaluation, row: str, metric: str, size: int | None = None) -> Cell:
    found = evaluation.cell(row, metric, 10, size)
    assert found is not None
    assert found.value is not None, found.reason
    return found


@pytest.mark.parametrize("metric", ["agreement", "doc-agreement"])
def test_the_whole_index_is_foretold(world: World, evaluation: Evaluation, metric: str) -> None:
    own = None if metric == "agreement" else world.held_rows
    truth = world.truth(world.queries if own is None else world.true[own], own)
    for row in ("translated", "as indexed"):
        told, measured = cell(evaluation, row, metric, N), cell(evaluation, row, metric)
        assert told.low <= truth <= told.high
        assert abs(told.value - truth) < (measured.value - truth) / 3  # what the hold-out flatters by
        assert (told.documents, told.held_out, told.queries) == (N, HELD, measured.queries)
        assert (told.name, told.verified) == (f"{metric}@10@{N}", True)


def test_what_is_measured_stays_as_it_is(world: World, evaluation: Evaluation, rows: Any) -> None:
    part = np.flatnonzero(np.isin(np.arange(N), world.held_rows))
    alone = evaluate(world.held, world.m, staged=rows(world.ids.take(pa.array(part)), world.translated[part]))
    assert (alone.acting, alone.sizes) == (None, ())
    for row in alone.rows:
        for one in row.cells:
            assert evaluation.cell(row.name, one.metric, one.k) == one
            assert one.size is None
    assert evaluation.acting == N


def test_a_gate_acts_at_the_size_of_the_index(world: World, evaluation: Evaluation, rows: Any) -> None:
    truth, measured = world.truth(world.queries), cell(evaluation, "as indexed", "agreement")
    between = f"agreement@10>={(truth + measured.low) / 2:.3f}"
    assert measured.low > truth + 0.05
    decision = decide(Gate.parse(between), evaluation)
    assert decision.outcome == "fail"
    assert f"agreement@10@{N} is" in decision.judgements[0].message
    assert decide(Gate.parse(between.replace("@10>", f"@10@{HELD}>")), evaluation).passed


def test_a_gate_may_name_any_size(world: World, rows: Any) -> None:
    staged = rows(world.ids, world.translated)
    gate = Gate.parse("agreement@10@500>=0.2 and agreement@5@100000>=0.05 and doc-agreement@10@3000>=0.1")
    evaluation = evaluate(world.held, world.m, staged=staged, gate=gate)
    values = [cell(evaluation, "as indexed", "agreement", size).value for size in (500, None, N)]
    assert values == sorted(values, reverse=True)
    far = evaluation.cell("as indexed", "agreement", 5, 100_000)
    assert far is not None
    assert not far.verified
    decision = decide(gate, evaluation)
    assert [j.outcome for j in decision.judgements] == ["pass"] * 3
    assert "unverified, from 1,000 held-out documents" in decision.judgements[1].message


@pytest.mark.parametrize(
    ("count", "acting", "wanted"),
    [
        (None, None, set()),
        (HELD, None, set()),
        (8 * HELD, 8 * HELD, {(10, 8 * HELD)}),
        (16 * HELD, 16 * HELD, {(10, 16 * HELD)}),
        (20 * HELD, 16 * HELD, {(10, 16 * HELD), (10, 20 * HELD)}),
    ],
)
def test_a_gate_without_a_size_acts_no_farther_than_is_verified(count, acting, wanted):
    sizes = Sizes.of(HELD, count, 10, None)
    assert (sizes.acting, sizes.wanted) == (acting, wanted)
    gate = Gate.parse("agreement@5>=0.3 and ndcg@3>=0.2 and agreement@7@300>=0.1")
    more = {(5, acting), (7, 300)} if acting else {(7, 300)}
    assert Sizes.of(HELD, count, 10, gate).wanted == wanted | more


def test_what_is_foretold_of_an_index_is_lowered_by_what_its_own_search_misses(world: World, rows: Any) -> None:
    """A search for k places misses every fourth of them; one for more places misses nothing."""

    class Hasty(rows):  # type: ignore[misc]
        def search(self, queries: Any, k: int, among: Any = None) -> Any:
            vectors = self.rows.vectors if among is None else self.take(among).vectors
            scores = queries @ vectors.T
            order = np.argsort(-scores, axis=1, kind="stable")
            if k <= 11:
                order = np.delete(order, np.s_[:16:4], axis=1)
            order = order[:, :k]
            return order, np.take_along_axis(scores, order, axis=1)

    plain = evaluate(world.held, world.m, staged=rows(world.ids, world.translated))
    hasty = evaluate(world.held, world.m, staged=Hasty(world.ids, world.translated))
    overlap = cell(hasty, "as indexed", "index-overlap")
    assert overlap.value == pytest.approx(0.7)  # 0, 4 and 8 of the first ten are missed
    told = [cell(e, "as indexed", "agreement", N) for e in (plain, hasty)]
    nearest, found = (
        np.argsort(-(world.queries @ documents[world.held_rows].T), axis=1)[:, :20]
        for documents in (world.true, world.translated)
    )
    in_time, late = (
        np.mean([len(set(a[:10]) & set(b[part])) for a, b in zip(nearest.tolist(), found.tolist(), strict=True)])
        for part in (slice(10), slice(10, 20))
    )  # what comes in the places of what is missed was k places late, and is right less often
    assert 0.2 < late / in_time < 0.8
    for value, share in ((told[1].value / told[0].value, overlap.value), (told[1].low / told[0].low, overlap.low)):
        assert value == pytest.approx(share + (1 - share) * late / in_time)


def test_inverted_lists_with_few_held_out_documents_are_not_taken_for_the_index(rows: Any, tmp_path: Any) -> None:
    """One of 64 lists is probed: among those held out it has about 5 documents, fewer than k, of all 3,000 47."""
    faiss = pytest.importorskip("faiss")
    rng = np.random.default_rng(0)
    n, d, held = 3000, 24, 300
    true = unit(rng.standard_normal((n, 6)) @ rng.standard_normal((6, d)))
    translated = unit(true + 0.05 * rng.standard_normal((n, d)))
    queries = unit(true[rng.integers(0, n, 200)] + 0.02 * rng.standard_normal((200, d)))
    index = faiss.index_factory(d, "IVF64,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(translated)
    index.add(translated)
    faiss.write_index(index, str(tmp_path / "index.faiss"))
    chosen = np.sort(rng.permutation(n)[:held])
    names = pa.array([f"q{i}" for i in range(len(queries))])
    hold_out = Holdout(pa.array(chosen), translated[chosen], true[chosen], names, queries)
    m = LinearMap(np.eye(d), post="l2", card=Card(Side(d), Side(d), "by hand"))
    with open_reader(str(tmp_path / "index.faiss")) as staged:
        evaluation = evaluate(hold_out, m, staged=staged)
    _, found = index.search(queries, 10)
    best = np.argsort(-(queries @ true.T), axis=1)[:, :10]
    truth = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), best.tolist(), strict=True)])
    told, exact = (cell(evaluation, row, "agreement", n) for row in ("as indexed", "translated"))
    assert told.low <= truth <= told.high
    assert told.value <= exact.value
    values = [p.value for p in evaluation.sizes[0].points]
    assert values == sorted(values, reverse=True)


def test_too_small_a_hold_out_says_so_and_is_refused_before_any_work(world: World, rows: Any) -> None:
    few = world.held.take(np.arange(150))
    gate = Gate.parse("agreement@10>=0.9")
    evaluation = evaluate(few, world.m, staged=rows(world.ids, world.translated), gate=gate)
    told = evaluation.cell("as indexed", "agreement", 10, 16 * 150)
    assert told is not None
    assert told.reason == "at least 200 held-out documents are needed, not 150"
    assert decide(gate, evaluation).outcome == "inconclusive"
    with pytest.raises(UsageError, match=r"for 6,000 documents: .* at least 200 held-out ones.* hold-out has 150"):
        check_gate(gate, few, N)
    check_gate(gate, few, 150)
    check_gate(gate, world.held, N)
    with pytest.raises(UsageError, match=r"agreement@10@9000>=0.9 can't be decided for 9,000 documents"):
        check_gate(Gate.parse("agreement@10@9000>=0.9"), few, 150)
    with pytest.raises(UsageError, match=r"chance alone finds 0.010 among 1,000 .*; 2,000 are needed: .*sample -n"):
        check_gate(Gate.parse("agreement@10>=0.05"), world.held, N)
    with pytest.raises(UsageError, match=r"chance alone finds 0.020 among 500 "):
        check_gate(Gate.parse("agreement@10@500>=0.1"), world.held, N)
    check_gate(Gate.parse("index-overlap@10>=0.05"), world.held, N)  # measured among all 6,000


def test_the_curve_leads_from_parts_of_the_hold_out_to_the_index(world: World, evaluation: Evaluation) -> None:
    (curve,) = evaluation.sizes
    assert (curve.metric, curve.against) == ("agreement@10", "documents")
    assert [p.x for p in curve.points] == [250, 500, 1000, 2000, 4000, N]
    assert [p.predicted for p in curve.points] == [False] * 3 + [True] * 3
    assert curve.points[2].value == cell(evaluation, "as indexed", "agreement").value
    assert curve.points[-1].value == cell(evaluation, "as indexed", "agreement", N).value
    values = [p.value for p in curve.points]
    assert values == sorted(values, reverse=True)


def test_the_report_shows_both_numbers(evaluation: Evaluation) -> None:
    report = Report({"destination": "faiss:new"}, evaluation)
    table = report.table()
    assert "agreement@10 among 1,000 held-out documents, 400 queries; 95 % interval" in table
    assert "agreement@10@6000 extrapolated from 1,000 held-out documents, 400 queries; 95 % interval" in table
    told = cell(evaluation, "as indexed", "agreement", N)
    assert f"{told.value:.3f}  [{told.low:.3f}, {told.high:.3f}]" in table
    assert "agreement@10 against documents" in table
    assert typed(Evaluation, report.to_json()["evaluation"], "evaluation") == replace(evaluation)


def test_named_sizes_far_below_the_hold_out_are_measured_in_parts_of_it(world: World) -> None:
    sizes = (12, 100, 250)
    gate = Gate.parse(" and ".join(f"agreement@10@{size}>=0.1" for size in sizes))
    evaluation = evaluate(world.held, world.m, gate=gate)
    for size in sizes:
        cell = evaluation.cell("translated", "agreement", 10, size)
        assert cell is not None
        assert cell.value == pytest.approx(np.mean([part_agreement(world, size, seed) for seed in range(12)]), abs=0.02)


def part_agreement(world: World, size: int, seed: int) -> float:
    """Agreement among a random part of the held-out documents, by sets."""
    part = np.random.default_rng(seed).permutation(world.held_rows)[:size]
    sets = [np.argsort(-(world.queries @ d[part].T), axis=1)[:, :10].tolist() for d in (world.true, world.translated)]
    return float(np.mean([len(set(a) & set(b)) / 10 for a, b in zip(*sets, strict=True)]))
