"""The choice of a map: by what it retrieves, with a margin, told in full, and never to the harm of held-out queries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from vecferry import auto
from vecferry.auto import Chosen, Judge, choose, climb, search
from vecferry.family import Setting
from vecferry.recall import topk
from vecferry.solvers import Solution, procrustes, ridge

FIT, ASKED = 2500, 250


def unit(x: Any) -> Any:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def spaces(n: int = 800, q: int = 200, noise: float = 0.5) -> tuple[Any, Any, Any]:
    """Return rows of two spaces that share 10 of their directions, and queries of the second; not centred."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((10, 16)), rng.standard_normal((10, 12))
    meaning, asked = rng.standard_normal((n, 10)) + 0.5, rng.standard_normal((q, 10)) + 0.5
    x = meaning @ a + noise * rng.standard_normal((n, 16))
    return unit(x), unit(meaning @ b), unit(asked @ b)


def sample(model: str) -> tuple[Any, Any]:
    """Return the package's sample as a model encodes it: documents and queries."""
    tables = (pq.read_table(str(files("vecferry") / "data" / f"{name}.parquet")) for name in ("documents", "queries"))
    flat = ((t, t[model].combine_chunks().flatten().to_numpy()) for t in tables)
    documents, queries = (unit(x.reshape(len(t), -1).astype(np.float32)) for t, x in flat)
    return documents, queries


@pytest.fixture(scope="module", params=["e5 minilm", "minilm e5"])
def real(request: Any) -> tuple[str, Chosen, dict[str, Any]]:
    """Choose between two real models; return agreement@10 with the other 2,000 documents and 250 queries, in float64.

    For the chosen map, its closed form, ridge and Procrustes.
    """
    old, new = request.param.split()
    (x, _), (y, queries) = sample(old), sample(new)
    chosen = choose(x[:FIT], y[:FIT], queries=queries[:ASKED])
    maps = {"auto": chosen.solution, "closed": chosen.closed}
    maps |= {"ridge": ridge(x[:FIT], y[:FIT]), "procrustes": procrustes(x[:FIT], y[:FIT])}
    true = np.argsort(-(queries[ASKED:].astype(np.float64) @ y[FIT:].T), axis=1)[:, :10]
    values = {}
    for name, s in maps.items():
        rows = x[FIT:].astype(np.float64)
        rows = rows if s.mean is None else unit(rows - s.mean).astype(np.float64)
        translated = rows @ s.weight + (0 if s.bias is None else s.bias)
        translated /= np.linalg.norm(translated, axis=1, keepdims=True)
        found = np.argsort(-(queries[ASKED:] @ translated.T), axis=1)[:, :10]
        values[name] = np.array([len(set(a) & set(b)) / 10 for a, b in zip(true, found, strict=True)])
    return request.param, chosen, values


def test_it_finds_more_than_the_simple_maps_for_what_it_never_saw(real: Any) -> None:
    pair, chosen, values = real
    simple = max((values["ridge"], values["procrustes"]), key=np.mean)
    for name in ("closed", "auto"):
        assert values[name].mean() > simple.mean() - 0.005
    assert chosen.by == "auto"
    assert chosen.solution.warnings == ()
    if pair == "minilm e5":  # where the tilt and rank distillation help most
        gain = values["auto"] - simple
        assert gain.mean() > 2 * gain.std() / np.sqrt(len(gain))
        assert values["auto"].mean() > 1.2 * values["ridge"].mean()
        assert chosen.solution.parameters["chosen"]["tilt"] > 0


def test_it_reports_every_candidate_and_why_it_chose(real: Any) -> None:
    _, chosen, _ = real
    told = chosen.solution.parameters
    json.dumps(told, allow_nan=False)
    assert told["judged"] == {"by": "queries", "queries": ASKED, "pairs": FIT}
    names = {c["name"]: c for c in told["candidates"] if c["name"]}
    assert set(names) == {"ridge", "procrustes", "chosen"}
    values = [c["agreement@10"] for c in told["candidates"]]
    assert values == sorted(values, reverse=True)
    simple = max(names["ridge"]["agreement@10"], names["procrustes"]["agreement@10"])
    assert names[told["gain"]["over"]]["agreement@10"] == simple
    assert told["gain"]["agreement@10"] == pytest.approx(values[0] - simple, abs=2e-4)
    assert told["gain"]["agreement@10"] > told["gain"]["standard_error"]
    assert names["chosen"]["agreement@10"] == values[0]
    assert {k: v for k, v in told["chosen"].items() if k not in ("lambda", "rank")} == {
        k: v for k, v in names["chosen"].items() if k not in ("name", "agreement@10")
    }
    tried = {(c["centred"], c["penalty"], c["tilt"]) for c in told["candidates"]}
    assert len(tried) >= 30
    assert list(told["rank"]) == ["start", "gentle"]  # 384 x 384 numbers are too many for stronger distillation


def test_ridge_is_judged_by_what_it_predicts_of_rows_left_out() -> None:
    x, y, queries = spaces(500)
    told = choose(x, y, queries=queries, effort=0).solution.parameters
    penalty = ridge(x, y).parameters["lambda"]
    left_out = np.empty(y.shape)
    for i in range(500):
        rest = np.arange(500) != i
        a, b = x[rest].astype(np.float64), y[rest].astype(np.float64)
        ac = a - a.mean(0)
        weight = np.linalg.solve(ac.T @ ac + penalty * np.eye(16), ac.T @ (b - b.mean(0)))
        left_out[i] = (x[i] - a.mean(0)) @ weight + b.mean(0)
    true = np.argsort(-(queries.astype(np.float64) @ y.T), axis=1)[:, :10]
    found = np.argsort(-(queries @ (left_out / np.linalg.norm(left_out, axis=1, keepdims=True)).T), axis=1)[:, :10]
    agreement = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(true, found, strict=True)])
    [judged] = [c for c in told["candidates"] if c["name"] == "ridge"]
    assert judged["agreement@10"] == pytest.approx(agreement, abs=1e-3)


def test_what_is_no_better_than_a_simple_map_does_not_replace_it() -> None:
    x, y, queries = spaces(noise=0)
    chosen = choose(x, y, queries=queries, effort=0)
    told = chosen.solution.parameters
    assert told["gain"]["agreement@10"] <= told["gain"]["standard_error"]
    assert {k: told["chosen"][k] for k in ("centred", "penalty", "unshrunk", "tilt", "mean")} == {
        "centred": False,
        "penalty": 1.0,
        "unshrunk": 0.0,
        "tilt": 0.0,
        "mean": 1.0,
    }
    assert chosen.solution.weight.tobytes() == ridge(x, y).weight.tobytes()


def test_the_search_climbs_and_stops() -> None:
    asked: list[Setting] = []

    def score(s: Setting) -> float:
        asked.append(s)
        return -abs(s.tilt - 3) - abs(s.penalty - 2)

    def further(s: Setting) -> list[Setting]:
        return [replace(s, tilt=s.tilt + 1), replace(s, penalty=s.penalty + 1)]

    assert search(score, [Setting(tilt=1.5)], ()) == Setting(tilt=1.5)
    found = search(score, [Setting(), Setting(tilt=2.0)], (further,))
    assert found == Setting(tilt=3.0, penalty=2.0)


@pytest.mark.parametrize("given", ["none", "few"])
def test_without_enough_queries_documents_stand_in(given: str) -> None:
    x, y, queries = spaces(1200)
    chosen = choose(x, y, queries=None if given == "none" else queries[:99], effort=0)
    assert chosen.solution.parameters["judged"] == {"by": "documents", "queries": 1000, "pairs": 1200}
    [warning] = chosen.solution.warnings
    assert f"{0 if given == 'none' else 99} queries to choose by: documents stood in" in warning


def test_below_500_pairs_it_is_ridge_and_says_so() -> None:
    x, y, queries = spaces(499)
    chosen = choose(x, y, queries=queries)
    assert chosen.by == "ridge"
    assert chosen.solution.weight.tobytes() == ridge(x, y).weight.tobytes()
    assert chosen.refit(x, y).weight.tobytes() == chosen.solution.weight.tobytes()
    assert "499 pairs are too few to choose among maps" in chosen.solution.warnings[0]


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_other_metrics_choose_among_ridge_procrustes_and_their_blends(metric: Any) -> None:
    x, y, queries = spaces()
    y = y * np.linspace(0.5, 2, len(y), dtype=np.float32)[:, None]
    chosen = choose(x, y, queries=queries, metric=metric)
    told = chosen.solution.parameters
    assert len(told["candidates"]) == 15
    assert {(c["centred"], c["unshrunk"], c["tilt"], c["mean"]) for c in told["candidates"]} == {(False, 0.0, 0.0, 1.0)}
    assert told["rank"] == {}
    [judged] = [c for c in told["candidates"] if c["name"] == "procrustes"]
    fold = np.random.default_rng(0).permutation(800) % 4
    predicted = np.empty(y.shape, np.float32)
    for f in range(4):
        predicted[fold == f] = procrustes(x[fold != f], y[fold != f]).predict(x[fold == f])
    found, true = (topk(queries, rows, 10, metric)[0] for rows in (predicted, y))
    shared = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, true, strict=True)])
    assert judged["agreement@10"] == pytest.approx(shared, abs=1e-3)


def test_nothing_is_centred_where_it_must_not_be() -> None:
    x, y, queries = spaces()
    told = choose(x, y, queries=queries, centring=False, effort=0).solution.parameters
    assert not any(c["centred"] for c in told["candidates"])


def test_many_pairs_are_chosen_by_a_part_and_fitted_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "ROWS", 600)
    monkeypatch.setattr(auto, "QUERIES", 150)
    x, y, queries = spaces()
    chosen = choose(x, y, queries=queries, effort=0)
    assert chosen.solution.parameters["judged"] == {"by": "queries", "queries": 150, "pairs": 600}
    assert chosen.refit(x, y).weight.tobytes() == chosen.solution.weight.tobytes()
    assert chosen.refit(x[:600], y[:600]).weight.tobytes() != chosen.solution.weight.tobytes()


def test_documents_that_ask_are_not_their_own_neighbours() -> None:
    x, y, _ = spaces(60)
    own = np.array([3, 10, 41])
    other = ridge(x, y).predict(x)
    judge = Judge.of(y[own], own, y, 5, "cosine")
    expected = []
    for i in own:
        rest = np.delete(np.arange(60), i)
        sets = [set(rest[np.argsort(-(unit(rows[rest]) @ y[i]))[:5]]) for rows in (y, other)]
        expected.append(len(sets[0] & sets[1]) / 5)
    assert judge(other) == pytest.approx(expected)


# Rank distillation: how far it goes


def test_without_torch_it_does_without_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    x, y, queries = spaces()
    chosen = choose(x, y, queries=queries)
    assert chosen.solution.weight.tobytes() == chosen.closed.weight.tobytes()
    assert "rank distillation needs torch" in chosen.solution.warnings[0]
    assert chosen.solution.parameters["rank"] == {}
    assert chosen.solution.parameters["chosen"]["rank"] is None


@pytest.mark.parametrize(
    ("goodness", "reached", "told"),
    [
        ({}, None, ["start", "gentle"]),
        ({3e-5: 0.3}, "gentle", ["start", "gentle", "firm"]),
        ({3e-5: 0.3, 1e-4: 0.6}, "firm", ["start", "gentle", "firm", "strong"]),
        ({3e-5: 0.3, 1e-4: 0.6, 3e-4: 1.0}, "strong", ["start", "gentle", "firm", "strong"]),
        ({1e-4: 1.0, 3e-4: 1.0}, None, ["start", "gentle"]),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_it_goes_on_as_long_as_it_pays(
    goodness: dict[float, float], reached: str | None, told: list[str], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distillation is replaced by steps of known effect: from a bad map towards the best one, or to a worse one."""
    pytest.importorskip("torch", reason="torch is an optional dependency")
    x, y, queries = spaces(noise=0.05)
    best = ridge(x, y)
    noise = np.random.default_rng(1).standard_normal(best.weight.shape).astype(np.float32)
    bad = replace(best, weight=best.weight + 0.1 * noise)
    seen = []

    def step(x: Any, y: Any, queries: Any, start: Solution, strength: Any, *, seed: int) -> Solution:
        seen.append((len(x), None if queries is None else len(queries)))
        part = goodness.get(strength.rate, -2.0)
        return replace(start, weight=bad.weight + part * (best.weight - bad.weight))

    monkeypatch.setattr(auto, "distil", step)
    mine = np.arange(0, 800, 4) if own else None
    asked = y[mine] if own else queries
    name, agreement = climb(x, y, asked, mine, lambda x, y: bad, 2, 0)
    assert (name, list(agreement)) == (reached, told)
    assert set(seen) == {(600, None if own else 150)}  # a quarter of documents and of queries is held out
    if reached is not None:
        assert agreement[reached] > agreement["start"]


def test_a_weight_of_many_numbers_is_only_distilled_gently(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is an optional dependency")
    x, y, queries = spaces()
    monkeypatch.setattr(auto, "distil", lambda x, y, queries, start, strength, *, seed: ridge(x, y))
    few = climb(x, y, queries, None, lambda x, y: ridge(x, y), 2, 0)
    monkeypatch.setattr(auto, "FEW", 16 * 12 / 800 - 0.01)
    many = climb(x, y, queries, None, lambda x, y: ridge(x, y), 2, 0)
    assert list(few[1])[:3] == ["start", "gentle", "firm"]
    assert list(many[1]) == ["start", "gentle"]


BYTES = """
    import hashlib
    import numpy as np
    from vecferry.auto import choose

    rng = np.random.default_rng(5)
    x = rng.standard_normal((700, 40), dtype=np.float32)
    y = np.tanh(x @ rng.standard_normal((40, 50), dtype=np.float32)) + rng.standard_normal((700, 50), dtype=np.float32)
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    s = choose(x, y, queries=y[:120] + 0.01).solution
    mean = b"" if s.mean is None else s.mean.tobytes()
    print(hashlib.sha256(s.weight.tobytes() + s.bias.tobytes() + mean + repr(s.parameters).encode()).hexdigest())
"""


def test_the_same_pairs_queries_and_seed_give_the_same_bytes_in_any_process() -> None:
    found = set()
    for threads in ("1", "2"):
        limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        command = [sys.executable, "-c", textwrap.dedent(BYTES)]
        found.add(subprocess.run(command, env=os.environ | limits, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1
