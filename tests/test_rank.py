"""Rank distillation: its loss is a divergence, lowering it brings the right documents in front, bytes are kept."""

import math
import sys
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.special import softmax  # type: ignore[import-untyped]
from scipy.stats import entropy  # type: ignore[import-untyped]

from vecferry.errors import MissingDependencyError
from vecferry.rank import STRENGTHS, Strength, distil, divergence, rank
from vecferry.recall import Truth, topk
from vecferry.solvers import Solution, ridge

torch = pytest.importorskip("torch", reason="torch is an optional dependency")


def unit(x: Any) -> Any:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def spaces(n: int = 1500, q: int = 200) -> tuple[Any, Any, Any]:
    """Return rows of two spaces, and queries of the second; the first knows little of what the second ranks by."""
    rng = np.random.default_rng(0)
    meaning, asked = rng.standard_normal((n, 12)), rng.standard_normal((q, 12))
    basis = rng.standard_normal((12, 24))
    x = np.tanh(meaning @ rng.standard_normal((12, 20))) + 0.3 * rng.standard_normal((n, 20))
    return unit(x), unit(meaning @ basis + 1), unit(asked @ basis + 1)


def test_the_loss_is_scipys_divergence() -> None:
    rng = np.random.default_rng(2)
    scores, truth = rng.standard_normal((5, 9)), rng.standard_normal((5, 9))
    scores[2, 4] = truth[2, 4] = -np.inf  # left out
    nearest = np.argsort(-truth, axis=1)[:, :3]
    p = np.zeros((5, 9))
    np.put_along_axis(p, nearest, 1 / 3, axis=1)
    expected = entropy(p, softmax(scores, axis=1), axis=1).mean()
    found = divergence(torch.from_numpy(scores), torch.from_numpy(truth), 3)
    assert float(found) == pytest.approx(expected)
    same = torch.from_numpy(np.where(p > 0, 0.0, -np.inf))
    assert float(divergence(same, torch.from_numpy(truth), 3)) == pytest.approx(0, abs=1e-12)


def loss(x: Any, y: Any, queries: Any, s: Solution) -> float:
    """Return the least divergence over sharpness, in float64 by scipy, of these queries over all documents."""
    nearest = np.argsort(-(queries @ y.T), axis=1)[:, :3]
    scores = queries @ unit(s.predict(x)).T
    logs = [np.take_along_axis(np.log(softmax(t * scores, axis=1)), nearest, axis=1).mean() for t in range(2, 60, 2)]
    return -float(max(logs)) - math.log(3)


def test_it_lowers_the_loss() -> None:
    x, y, queries = spaces()
    start = ridge(x, y)
    further = [distil(x, y, queries, start, Strength(3e-4, steps)) for steps in (30, 100, 300)]
    losses = [loss(x, y, queries, s) for s in (start, *further)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.02


def test_queries_and_documents_that_it_did_not_see_profit() -> None:
    """MiniLM to e5, of which 2,000 documents and 250 queries are held out."""
    folder = files("vecferry") / "data"
    documents, questions = (pq.read_table(str(folder / f"{name}.parquet")) for name in ("documents", "queries"))

    def vectors(table: Any, model: str) -> Any:
        return unit(table[model].combine_chunks().flatten().to_numpy().reshape(len(table), -1).astype(np.float32))

    x, y, queries = vectors(documents, "minilm"), vectors(documents, "e5"), vectors(questions, "e5")
    start = ridge(x[:2500], y[:2500])
    s = distil(x[:2500], y[:2500], queries[:250], start, STRENGTHS["gentle"])
    truth = Truth.of(queries[250:], y[2500:], 10, "cosine")
    before, after = (truth.agreement(topk(truth.queries, m.predict(x[2500:]), 10, "cosine")[0], 10) for m in (start, s))
    assert (after - before).mean() > 3 * (after - before).std() / np.sqrt(250)


@pytest.mark.parametrize("asked", ["queries", "documents"])
def test_it_takes_rows_as_the_start_did_and_says_what_it_did(asked: str) -> None:
    x, y, queries = spaces(600)
    mean = x.mean(0)
    start = replace(ridge(unit(x - mean), y), mean=mean)
    s = distil(x, y, queries if asked == "queries" else None, start, STRENGTHS["gentle"], seed=3)
    assert s.mean is mean
    assert s.bias is not None
    assert s.parameters == {
        "objective": "rank",
        "rate": 3e-5,
        "steps": 120,
        "batch": [256, 1000],
        "nearest": 3,
        "queries": 200 if asked == "queries" else 0,
    }
    changed = np.linalg.norm(s.weight - start.weight) / np.linalg.norm(start.weight)
    assert 1e-4 < changed < 0.05  # Adam moves a number by its rate in a step at most, less as it decays
    assert np.abs(s.weight - start.weight).max() < 120 * 3e-5
    np.testing.assert_allclose(s.predict(x), unit(x - mean) @ s.weight + s.bias, atol=1e-6)


def test_no_steps_change_nothing_but_rounding() -> None:
    x, y, queries = spaces(300)
    start = ridge(x, y)
    s = distil(x, y, queries, start, Strength(1e-3, 0))
    assert s.weight.tobytes() == start.weight.tobytes()
    assert s.bias == pytest.approx(start.bias, abs=1e-6)


def test_the_solver_starts_from_ridge() -> None:
    x, y, queries = spaces(600)
    s = rank(x, y, queries=queries, seed=4)
    again = distil(x, y, queries, ridge(x, y, seed=4), STRENGTHS["gentle"], seed=4)
    assert s.weight.tobytes() == again.weight.tobytes()
    assert s.parameters["lambda"] == ridge(x, y, seed=4).parameters["lambda"]
    assert s.parameters["objective"] == "rank"
    better = Truth.of(queries, y, 10, "cosine")
    values = [better.agreement(topk(queries, m.predict(x), 10, "cosine")[0], 10).mean() for m in (ridge(x, y), s)]
    assert values[1] > values[0]


def test_the_bytes_depend_on_the_seed_alone_and_threads_stay_as_they_were() -> None:
    x, y, queries = spaces(600)
    start, before = ridge(x, y), torch.get_num_threads()
    found = []
    try:
        for threads, seed in ((1, 0), (2, 0), (2, 1)):
            torch.set_num_threads(threads)
            s = distil(x, y, queries, start, Strength(1e-4, 20), seed=seed)
            found.append(s.weight.tobytes())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] != found[2]


def test_few_rows_and_queries_do() -> None:
    x, y, queries = spaces(12, 3)
    s = distil(x, y, queries, ridge(x, y), Strength(1e-3, 10))
    assert np.isfinite(s.weight).all()


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    x, y, queries = spaces(100)
    with pytest.raises(MissingDependencyError, match=r"rank distillation needs torch.*pip install 'vecferry\[torch\]'"):
        rank(x, y, queries=queries)
