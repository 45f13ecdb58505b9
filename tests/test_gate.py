"""The gate: what it reads, what it decides, and that a perfect, a random and a constant map get what they deserve."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest

from vecferry.errors import UsageError
from vecferry.evaluate import evaluate
from vecferry.gate import Condition, Decision, Gate, decide
from vecferry.holdout import Holdout
from vecferry.jsonfile import typed
from vecferry.linear import Card, LinearMap, Side
from vecferry.measured import AS_INDEXED, Cell, Evaluation, Row


def test_a_gate_is_text_or_a_gate():
    gate = Gate.parse("agreement@10>=0.35")
    assert (Gate.of("agreement@10>=0.35"), Gate.of(gate), Gate.of(None)) == (gate, gate, None)
    with pytest.raises(UsageError, match=r"text or a Gate, not 5: write METRIC@K>=VALUE"):
        Gate.of(5)


def test_a_gate_is_read():
    gate = Gate.parse(" agreement@10>=0.35 and nDCG@5 > .2 AND index-overlap@100>=1")
    assert gate.conditions == (
        Condition("agreement", 10, ">=", 0.35),
        Condition("ndcg", 5, ">", 0.2),
        Condition("index-overlap", 100, ">=", 1.0),
    )
    assert (gate.ks, gate.metrics) == ({5, 10, 100}, {"agreement", "ndcg", "index-overlap"})
    assert str(gate) == "agreement@10>=0.35 and ndcg@5>0.2 and index-overlap@100>=1"
    assert Gate.parse(str(gate)) == gate


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "can't read ''"),
        ("agreement>=0.3", "can't read 'agreement>=0.3'"),
        ("agreement@10", "can't read 'agreement@10'"),
        ("agreement@10>=0.3 or ndcg@10>=0.2", "can't read 'agreement@10>=0.3 or ndcg@10>=0.2'"),
        ("agreement@10>=0.3 and", "can't read 'agreement@10>=0.3 and'"),
        ("agreement@10>=nan", "can't read"),
        ("agreement@10>=-0.1", "can't read"),
        ("agreement@10<=0.3", "'agreement@10<=0.3': a gate asks how good the new index is at least"),
        ("agreement@10<0.3", "a gate asks how good"),
        ("cosine@10>=0.9", "no metric 'cosine'"),
        ("identity@1>=0.9", "identity recall saturates"),
        ("retention.agreement@10>=0.9", "what is retained of it is agreement itself"),
        ("agreement@0>=0.3", "k must be at least 1"),
        ("agreement@10>=35", "metrics lie between 0 and 1"),
        ("agreement@10>=0", "metrics lie between 0 and 1"),
        ("agreement@10>1", "metrics lie between 0 and 1"),
        ("agreement@10@>=0.3", "can't read"),
        ("agreement@10@9999999999999999999999>=0.3", "no index has more than 1,000,000,000,000 documents"),
        ("agreement@10@10>=0.3", "10 documents are to be found among 10: name a larger size"),
        ("ndcg@10@5000>=0.3", "only agreement and doc-agreement are foretold for a corpus of another size"),
        ("worst-slice.agreement@10@5000>=0.3", "only agreement and doc-agreement are foretold"),
    ],
)
@pytest.mark.case("p3")
def test_what_is_no_gate_is_quoted_beside_an_example(text, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)) as caught:
        Gate.parse(text)
    assert '--gate "agreement@10>=0.35 and ndcg@10>=0.2"' in str(caught.value)


def measured(value=0.4, low=0.37, high=0.43, documents=900, queries=250, metric="agreement", **other) -> Evaluation:
    """An evaluation with one cell as indexed."""
    cell = Cell(metric, 10, value, low, high, documents, queries, **other)
    return Evaluation((Row(AS_INDEXED, (cell,)),), "cosine", 10)


@pytest.mark.parametrize(
    ("gate", "outcome", "message"),
    [
        (
            "agreement@10>=0.35",
            "pass",
            "agreement@10 is 0.400 [0.370, 0.430] among 900 held-out documents, 250 queries",
        ),
        ("agreement@10>=0.37", "pass", "the lower end reaches 0.37"),
        ("agreement@10>0.37", "inconclusive", "the lower end is below 0.37; if the value stays, about 250 queries"),
        (
            "agreement@10>=0.385",
            "inconclusive",
            "about 1,000 queries decide",
        ),  # half the margin, four times the queries
        ("agreement@10>=0.4", "inconclusive", "more queries wouldn't decide"),
        ("agreement@10>=0.42", "fail", "below 0.42"),
        ("agreement@10>=0.5", "fail", "below 0.5"),
    ],
)
def test_the_lower_end_decides(gate, outcome, message):
    decision = decide(Gate.parse(gate), measured())
    assert (decision.outcome, decision.passed) == (outcome, outcome == "pass")
    assert message in decision.judgements[0].message


def test_a_condition_may_be_relative_to_re_embedding():
    gate = Gate.parse("retention.nDCG@10>=0.95")
    assert gate.conditions == (Condition("retention.ndcg", 10, ">=", 0.95),)
    assert decide(gate, measured(0.97, 0.955, 0.99, metric="retention.ndcg")).passed
    decision = decide(gate, measured(0.97, 0.94, 0.99, metric="retention.ndcg"))
    assert decision.outcome == "inconclusive"
    assert "retention.ndcg@10 is 0.970 [0.940, 0.990] among 900 held-out documents, 250 labelled queries" in (
        decision.judgements[0].message
    )
    assert decide(gate, measured(0.9, 0.88, 0.92, metric="retention.ndcg")).outcome == "fail"
    assert decide(gate, measured(1, 1, 1, metric="ndcg")).outcome == "inconclusive"


def test_too_few_queries_or_documents_are_inconclusive_and_counted():
    gate = Gate.parse("agreement@10>=0.2")
    few = decide(gate, measured(1, 1, 1, queries=29))
    assert few.outcome == "inconclusive"
    assert "at least 30 queries are needed" in few.judgements[0].message
    assert decide(gate, measured(1, 1, 1, queries=30)).passed
    small = decide(gate, measured(1, 1, 1, documents=499))
    assert small.outcome == "inconclusive"
    message = small.judgements[0].message
    assert "chance alone finds 0.020 among 499; at least 500 held-out documents are needed" in message
    assert decide(gate, measured(1, 1, 1, documents=500)).passed


def test_a_condition_may_name_a_size():
    gate = Gate.parse("agreement@10@15000>=0.35 and doc-agreement@5 @ 15,000 > .2")
    assert gate.conditions == (
        Condition("agreement", 10, ">=", 0.35, 15_000),
        Condition("doc-agreement", 5, ">", 0.2, 15_000),
    )
    assert str(gate) == "agreement@10@15000>=0.35 and doc-agreement@5@15000>0.2"
    assert Gate.parse(str(gate)) == gate


def foretold(acting: int | None = 9000, **at_9000) -> Evaluation:
    """Agreement@10 measured among 900 documents, and foretold for ten and for a hundred times as many."""
    cell = Cell("agreement", 10, 0.4, 0.37, 0.43, 900, 250)
    more = replace(cell, value=0.2, low=0.15, high=0.25, documents=9000, among="documents", held_out=900)
    most = replace(more, value=0.1, low=0.05, high=0.2, documents=90_000)
    return Evaluation((Row(AS_INDEXED, (cell, replace(more, **at_9000), most)),), "cosine", 10, acting=acting)


@pytest.mark.parametrize(
    ("gate", "acting", "outcome", "message"),
    [
        ("agreement@10>=0.35", None, "pass", "agreement@10 is 0.400 [0.370, 0.430] among 900 held-out documents"),
        (
            "agreement@10>=0.35",
            9000,
            "fail",
            "agreement@10@9000 is 0.200 [0.150, 0.250] extrapolated from 900 held-out documents, 250 queries: below",
        ),
        ("agreement@10@900>=0.35", 9000, "pass", "among 900 held-out documents"),
        ("agreement@10>=0.14", 9000, "pass", "the lower end reaches 0.14"),
        ("agreement@10>=0.16", 9000, "inconclusive", "more queries and more held-out documents narrow the interval"),
        (
            "agreement@10@90000>=0.15",
            9000,
            "fail",
            "agreement@10@90000 is 0.100 [0.050, 0.200] extrapolated, unverified, from 900 held-out documents",
        ),
        (
            "agreement@10@5000>=0.1",
            9000,
            "inconclusive",
            "agreement@10@5000 can't be foretold: not measured with k = 10",
        ),
        ("agreement@10>=0.11", 9000, "inconclusive", "chance alone finds 0.011 among 900; at least 910 held-out"),
    ],
)
def test_agreement_is_held_to_the_gate_at_the_size_of_the_index(gate, acting, outcome, message):
    decision = decide(Gate.parse(gate), foretold(acting))
    assert decision.outcome == outcome
    assert message in decision.judgements[0].message


@pytest.mark.parametrize(("acting", "among", "said"), [(9000, "held-out documents", True), (None, "documents", False)])
def test_a_verdict_by_labels_says_that_the_whole_index_has_less(acting, among, said):
    evaluation = replace(measured(metric="ndcg", among=among), acting=acting)
    (judgement,) = decide(Gate.parse("ndcg@10>=0.3"), evaluation).judgements
    assert ("labels aren't foretold: the whole index has less" in judgement.message) is said


def test_what_cannot_be_foretold_does_not_pass():
    evaluation = foretold(value=None, low=None, high=None, reason="at least 1,000 are needed, not 900")
    decision = decide(Gate.parse("agreement@10>=0.1"), evaluation)
    assert decision.outcome == "inconclusive"
    assert "agreement@10@9000 can't be foretold: at least 1,000 are needed, not 900" in decision.judgements[0].message


def test_all_conditions_must_hold_and_a_fail_outweighs():
    both = Gate.parse("agreement@10>=0.35 and ndcg@10>=0.1")
    assert decide(both, measured()).outcome == "inconclusive"
    assert decide(Gate.parse("agreement@10>=0.9 and ndcg@10>=0.1"), measured()).outcome == "fail"
    assert decide(Gate.parse("agreement@10>=0.12 and agreement@10>=0.35"), measured()).passed


def test_a_metric_that_was_not_measured_does_not_pass():
    decision = decide(Gate.parse("agreement@5>=0.1"), measured())
    assert not decision.passed
    assert "not measured with k = 5" in decision.judgements[0].message


def test_documents_as_queries_do_not_pass_for_queries():
    without = measured(0.9, 0.89, 0.91, metric="doc-agreement")
    missing = Cell("agreement", 10, reason="no queries: pass --queries")
    evaluation = replace(without, rows=(Row(AS_INDEXED, (missing, *without.rows[0].cells)),))
    decision = decide(Gate.parse("agreement@10>=0.35"), evaluation)
    assert decision.outcome == "inconclusive"
    message = decision.judgements[0].message
    assert "no queries: pass --queries" in message
    assert "only doc-agreement@k can be gated" in message
    assert decide(Gate.parse("doc-agreement@10>=0.35"), evaluation).passed


def test_a_decision_survives_json():
    decision = decide(Gate.parse("agreement@10>=0.35 and ndcg@10>=0.1"), measured())
    assert typed(Decision, json.loads(json.dumps(asdict(decision))), "decision") == decision


@pytest.mark.parametrize(
    ("name", "outcome"), [("perfect", "pass"), ("fitted", "pass"), ("random", "fail"), ("constant", "fail")]
)
@pytest.mark.parametrize("asked", ["agreement@10>=0.2", "doc-agreement@10>=0.2"])
@pytest.mark.case("p1")
def test_a_perfect_map_passes_a_random_and_a_constant_one_fail(name, outcome, asked, rows):
    """Field case p1. Topics of different sizes, a target with a large common mean, one document in ten twice."""
    rng = np.random.default_rng(0)
    n, d = 1000, 24
    z = rng.standard_normal((30, 12))[rng.zipf(1.6, 3 * n) % 30] + 0.8 * rng.standard_normal((3 * n, 12))
    source = (z @ rng.standard_normal((12, d)) + 0.7 * rng.standard_normal((3 * n, d))).astype(np.float32)
    target = (z @ rng.standard_normal((12, d)) + 0.7 * rng.standard_normal((3 * n, d)) + 4).astype(np.float32)
    source[: n // 10], target[: n // 10] = source[n // 10 : n // 5], target[n // 10 : n // 5]
    target /= np.linalg.norm(target, axis=1, keepdims=True)
    queries = target[rng.integers(0, n, 200)] + 0.02 * rng.standard_normal((200, d)).astype(np.float32)
    held = target[:n] if name == "perfect" else source[:n]
    holdout = Holdout(pa.array(np.arange(n)), held, target[:n], pa.array([f"q{i}" for i in range(200)]), queries)
    card = Card(Side(d), Side(d), name)
    with_one = np.hstack([source[n:], np.ones((2 * n, 1), np.float32)])
    fitted = np.linalg.lstsq(with_one, target[n:], rcond=None)[0].astype(np.float32)
    maps = {
        "perfect": LinearMap(np.eye(d), post="l2", card=card),
        "fitted": LinearMap(fitted[:d], fitted[d], post="l2", card=card),
        "random": LinearMap(rng.standard_normal((d, d)), post="l2", card=card),
        "constant": LinearMap(np.zeros((d, d)), np.ones(d), post="l2", card=card),
    }
    m = maps[name]
    evaluation = evaluate(holdout, m, staged=rows(holdout.ids, m.apply(holdout.source)))
    decision = decide(Gate.parse(asked), evaluation)
    assert decision.outcome == outcome, decision.judgements
    if name == "perfect":
        assert "is 1.000 [1.000, 1.000]" in decision.judgements[0].message
