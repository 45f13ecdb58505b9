"""How good a map is by the number of its pairs: nested parts, and what twice as many would give."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from vecferry.learning import foretell, learning_curve, to_json
from vecferry.linear import LinearMap


def counting(values: Any) -> tuple[list[Any], Any, Any]:
    """Return the rows that maps were asked for, a learner that notes them, and a measure that depends on their number.

    A map's bias holds how many pairs it saw.
    """
    seen: list[Any] = []

    def learn(rows: Any) -> LinearMap:
        seen.append(rows)
        return LinearMap(np.eye(2, dtype=np.float32), np.full(2, len(rows), np.float32))

    def measure(m: LinearMap) -> Any:
        assert m.bias is not None
        return values(float(m.bias[0]))

    return seen, learn, measure


@pytest.mark.parametrize("decay", [0.1, 0.5, 1.0])
def test_a_power_law_is_continued(decay: float) -> None:
    sizes = np.array([500.0, 1000, 2000, 4000])
    values = np.stack([0.6 - 2 * sizes**-decay, 0.4 - 1 * sizes**-decay], axis=1)
    expected = np.array([0.6 - 2 * 8000.0**-decay, 0.4 - 8000.0**-decay])
    assert foretell(sizes, values, 8000) == pytest.approx(expected, abs=5e-3)


def test_what_falls_is_not_foretold_to_rise_or_fall() -> None:
    sizes = np.array([500.0, 1000, 2000, 4000])
    assert foretell(sizes, np.array([[0.4], [0.3], [0.3], [0.2]]), 8000) == pytest.approx([0.3])


def test_parts_are_nested_and_the_last_is_all() -> None:
    spread = np.random.default_rng(0).standard_normal(400) * 0.1
    seen, learn, measure = counting(lambda n: 0.5 - 3 * n**-0.5 + spread)
    curve = learning_curve(learn, measure, 4000, "agreement@10", seed=3)
    assert curve is not None
    assert [len(rows) for rows in seen] == [500, 1000, 2000, 4000]
    for small, large in itertools.pairwise(seen):
        assert np.isin(small, large).all()
    np.testing.assert_array_equal(seen[-1], np.arange(4000))
    told = to_json(curve)
    expected = [0.5 - 3 * n**-0.5 + spread.mean() for n in (500, 1000, 2000, 4000, 8000)]
    assert told["pairs"] == [500, 1000, 2000, 4000]
    assert told["values"] == pytest.approx(expected[:4], abs=1e-4)
    assert told["doubled"]["pairs"] == 8000
    assert told["doubled"]["value"] == pytest.approx(expected[4], abs=2e-3)
    # the queries' spread is the same at all sizes: what is foretold is as uncertain as their mean
    width = told["doubled"]["high"] - told["doubled"]["low"]
    assert width == pytest.approx(2 * 1.96 * spread.std() / 20, rel=0.1)
    again = learning_curve(learn, measure, 4000, "agreement@10", seed=3)
    assert again == curve


def test_few_pairs_make_no_curve() -> None:
    seen, learn, measure = counting(lambda n: np.full(5, 0.5))
    assert learning_curve(learn, measure, 390, "agreement@10", seed=0) is None
    assert seen == []
    curve = learning_curve(learn, measure, 400, "agreement@10", seed=0)
    assert curve is not None
    assert [p.x for p in curve.points] == [100, 200, 400, 800]
    assert [p.value for p in curve.points] == [0.5] * 4
