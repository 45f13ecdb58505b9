"""The regression gate: pairs by query, against closed forms and simulations with a known drop."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from vecferry.baseline import compare, load_baseline
from vecferry.checking import check
from vecferry.errors import DataError, UsageError
from vecferry.gate import Gate, Judgement
from vecferry.holdout import Holdout, Qrels
from vecferry.linear import Card, LinearMap, Side
from vecferry.measured import AS_INDEXED, Cell, Evaluation, PerQuery, Row
from vecferry.report import Report

VECTORS = np.random.default_rng(0).standard_normal((1000, 24)).astype(np.float32)
VALUES = np.random.default_rng(1).integers(1, 11, 250) / 10


def measured(
    values: np.ndarray, ids: Any = None, documents: int = 900, metric: str = "agreement", vectors: Any = VECTORS
) -> Evaluation:
    n = len(values)
    kept = {(metric, 10): np.asarray(values, float)}
    cell = Cell.of(metric, 10, kept[metric, 10], documents, seed=0)
    per_query = PerQuery.of(pa.array(np.arange(n) if ids is None else ids), vectors[:n], kept)
    return Evaluation((Row(AS_INDEXED, (cell,)),), "cosine", 10, per_query=(per_query,), held_out="0f")


def judge(before: Evaluation, now: Evaluation, max_drop: float = 0.01, gate: str | None = None) -> Judgement:
    decision = compare(now, Report({}, before), Gate.parse(gate) if gate else None, max_drop=max_drop)
    (judgement,) = decision.judgements
    assert decision.gate == judgement.condition
    return judgement


def test_the_same_index_passes_whatever_the_margin() -> None:
    judgement = judge(measured(VALUES), measured(VALUES), max_drop=0)
    assert judgement.condition == "drop.agreement@10<=0"
    assert judgement.outcome == "pass"
    assert f"went from {VALUES.mean():.3f} to {VALUES.mean():.3f}: +0.0000 [+0.0000, +0.0000]" in judgement.message
    assert "on 250 common queries (250 in the baseline, 250 now)" in judgement.message


def test_an_equal_drop_of_every_query_is_seen_to_the_digit() -> None:
    now = measured(VALUES - 0.1)
    assert judge(measured(VALUES), now, 0.1).outcome == "pass"  # as much as was allowed, and no noise
    assert judge(measured(VALUES), now, 0.0999).outcome == "fail"
    assert judge(now, measured(VALUES)).outcome == "pass"


def test_queries_are_paired_by_id_not_by_place() -> None:
    order = np.random.default_rng(2).permutation(250)
    now = measured(VALUES[order], ids=order, vectors=VECTORS[order])
    assert judge(measured(VALUES), now).outcome == "pass"
    assert "[+0.0000, +0.0000]" in judge(measured(VALUES), now).message
    assert judge(measured(VALUES), measured(VALUES[order])).outcome == "inconclusive"


def test_a_pair_tells_what_two_samples_cannot() -> None:
    """Spread over queries .12, spread of the change .05: the interval is that of the change, 1.96 sd / sqrt(n)."""
    rng = np.random.default_rng(3)
    before, z = rng.uniform(0.3, 0.7, 1000), rng.standard_normal(1000)
    change = -0.005 + 0.05 * (z - z.mean()) / z.std()
    judgement = judge(measured(before), measured(before + change), max_drop=0.01)
    low, high = change.mean() - 1.96 * change.std() / 1000**0.5, change.mean() + 1.96 * change.std() / 1000**0.5
    given = [float(x) for x in judgement.message.split("[")[1].split("]")[0].split(",")]
    assert given == pytest.approx([low, high], abs=5e-4)
    assert judgement.outcome == "pass"
    tight = judge(measured(before), measured(before + change), max_drop=0.006)
    assert tight.outcome == "inconclusive"
    queries = int(tight.message.split("about ")[1].split()[0].replace(",", ""))
    assert queries == pytest.approx(1000 * ((change.mean() - given[0]) / (change.mean() + 0.006)) ** 2, rel=0.1)


def test_an_index_that_dropped_by_just_the_margin_passes_as_rarely_as_promised() -> None:
    """One-sided: 2.5 %, within what 400 simulated query logs can tell (binomial, five standard errors)."""
    passed = 0
    rng = np.random.default_rng(1)
    for _ in range(400):
        before = rng.integers(2, 11, 200) / 10
        now = before - rng.choice([0, 0.1, 0.2], 200, p=[0.7, 0.2, 0.1])  # by .04 on average
        passed += judge(measured(before), measured(now), max_drop=0.04).outcome == "pass"
    assert abs(passed / 400 - 0.025) < 5 * (0.025 * 0.975 / 400) ** 0.5


def test_too_few_common_queries_are_inconclusive_with_numbers() -> None:
    now = measured(VALUES, ids=np.arange(225, 475), vectors=np.roll(VECTORS, -225, axis=0))
    judgement = judge(measured(VALUES), now)
    assert judgement.outcome == "inconclusive"
    assert "on 25 common queries (250 in the baseline, 250 now): at least 30 are needed" in judgement.message
    now = measured(VALUES, ids=np.arange(200, 450), vectors=np.roll(VECTORS, -200, axis=0))
    assert "on 50 common queries" in judge(measured(VALUES), now).message


def test_other_queries_under_the_same_numbers_are_not_paired() -> None:
    other = measured(VALUES, vectors=VECTORS[500:])
    judgement = judge(measured(VALUES), other)
    assert judgement.outcome == "inconclusive"
    assert "have other vectors under the same ids" in judgement.message
    labelled = [measured(VALUES, metric="ndcg", vectors=v) for v in (VECTORS, VECTORS[500:])]
    assert judge(*labelled, gate="ndcg@10>=.1").outcome == "pass"  # labels belong to the id, whatever the model


def test_other_documents_are_no_baseline() -> None:
    judgement = judge(measured(VALUES), measured(VALUES, documents=4500))
    assert (judgement.outcome, "among 900 documents and now among 4,500" in judgement.message) == ("inconclusive", True)
    assert judge(measured(VALUES), measured(VALUES, documents=910)).outcome == "pass"
    judgement = judge(measured(VALUES), replace(measured(VALUES), held_out="f0"))
    assert (judgement.outcome, "among other held-out documents" in judgement.message) == ("inconclusive", True)


def test_the_metrics_of_the_gate_are_compared_each_once() -> None:
    gate = Gate.parse("ndcg@10>=.1 and retention.ndcg@10>=.9 and worst-slice.agreement@10>=.1 and recall@5>=.1")
    decision = compare(measured(VALUES, metric="ndcg"), Report({}, measured(VALUES, metric="ndcg")), gate)
    names = ["drop.ndcg@10<=0.01", "drop.agreement@10<=0.01", "drop.recall@5<=0.01"]
    assert [j.condition for j in decision.judgements] == names
    assert [j.outcome for j in decision.judgements] == ["pass", "inconclusive", "inconclusive"]
    assert "can't be compared: in the baseline not measured with k = 10" in decision.judgements[1].message
    by_documents = measured(VALUES, metric="doc-agreement")
    assert judge(by_documents, by_documents).condition == "drop.doc-agreement@10<=0.01"


def test_what_is_no_baseline_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(Report({}).to_json()))
    with pytest.raises(DataError, match=r"report.json holds no values per query"):
        load_baseline(path, 0.01)
    with pytest.raises(UsageError, match="no such file"):
        load_baseline(tmp_path / "nothing", 0.01)
    for impossible in ("nan", "-1e308", "1.5"):
        value = Report({}, measured(np.ones(50))).to_json()
        values = value["evaluation"]["per_query"][0]["values"]
        values["agreement@10"] = " ".join([impossible] * 50)
        path.write_text(json.dumps(value))
        with pytest.raises(DataError, match=r"agreement@10 of some query doesn't lie between 0 and 1"):
            load_baseline(path, 0.01)
    with pytest.raises(UsageError, match=r"--max-drop is 1.5: it is a share"):
        load_baseline(Report({}, measured(np.ones(50))), 1.5)


@pytest.mark.parametrize("truth", [False, True])
def test_check_tells_a_worse_index_from_the_same_one(truth: bool, rows: Any, tmp_path: Any) -> None:
    rng = np.random.default_rng(5)
    n, q, d = 600, 150, 16
    target = rng.standard_normal((n, d)).astype(np.float32)
    target /= np.linalg.norm(target, axis=1, keepdims=True)
    queries = target[:q] + 0.1 * rng.standard_normal((q, d)).astype(np.float32)
    ids, names = pa.array(np.arange(n)), pa.array([f"q{i}" for i in range(q)])
    source = target + 0.1 * rng.standard_normal((n, d)).astype(np.float32)
    labels = Qrels(np.arange(q), np.arange(q), np.ones(q, np.int64))
    held = Holdout(ids, source, target, names, queries, qrels=labels)
    m = LinearMap(np.eye(d), post="l2", card=Card(Side(d, "old"), Side(d, "new"), "by hand"), holdout=held)

    def run(noise: float, **options: Any) -> Report:
        vectors = source + noise * np.random.default_rng(6).standard_normal((n, d)).astype(np.float32)
        true = rows(ids, target, uri="the truth") if truth else None
        gate = "agreement@10>=0.2 and ndcg@10>=0.2"
        return check(rows(ids, vectors, uri="the index"), map=m, truth=true, gate=gate, **options)

    path = tmp_path / "report.json"
    path.write_text(json.dumps(run(0).to_json(), indent=2))
    assert path.stat().st_size < 45_000
    with pytest.raises(UsageError, match="--max-drop goes with --baseline"):
        run(0, max_drop=0.001)
    again = run(0, baseline=path, max_drop=0.001)
    assert again.passed
    assert again.decision is not None
    assert [j.condition for j in again.decision.judgements[2:]] == ["drop.agreement@10<=0.001", "drop.ndcg@10<=0.001"]
    assert again.facts["baseline"] == str(path)
    worse = run(0.1, baseline=path)
    assert worse.decision is not None
    assert [j.outcome for j in worse.decision.judgements[:3]] == ["pass", "pass", "fail"]
    assert worse.exit_code == 1
    assert "and drop.agreement@10<=0.01" in worse.decision.gate
