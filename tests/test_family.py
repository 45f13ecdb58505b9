"""The closed-form family: what it predicts for a row is what a fit without that row predicts, and what a tilt does."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vecferry.family import PROCRUSTES, RIDGE, Family, Setting, least_asked
from vecferry.recall import Truth, topk
from vecferry.solvers import procrustes, ridge


def pairs(n: int = 60, d_source: int = 8, d_target: int = 6, noise: float = 0.5) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((n, d_source)) * np.linspace(0.3, 2, d_source) + 0.7
    y = x @ rng.standard_normal((d_source, d_target)) + noise * rng.standard_normal((n, d_target)) - 1
    return x.astype(np.float32), y.astype(np.float32)


def unit(x: Any) -> Any:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


AWAY = np.eye(6)[2]


def stacked_ridge(x: Any, y: Any, penalty: float) -> tuple[Any, Any]:
    """Solve ridge with a free bias by rows sqrt(penalty) I below the others: another way than the family's."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    rows = np.vstack([x - x.mean(0), np.sqrt(penalty) * np.eye(x.shape[1])])
    weight = np.linalg.lstsq(rows, np.vstack([y - y.mean(0), np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]
    return weight, y.mean(0) - x.mean(0) @ weight


@pytest.mark.parametrize("n", [7, 25, 60])
@pytest.mark.parametrize("penalty", [0.1, 1.0, 10.0])
def test_each_row_is_predicted_as_if_it_had_been_left_out(n: int, penalty: float) -> None:
    x, y = pairs(n)
    family = Family(x, y, AWAY)
    setting = Setting(penalty=penalty)
    expected = np.empty(y.shape)
    for i in range(n):
        others = np.arange(n) != i
        weight, bias = stacked_ridge(x[others], y[others], family.penalty(setting))
        expected[i] = x[i] @ weight + bias
    np.testing.assert_allclose(family.predict(setting), expected, rtol=1e-5, atol=1e-5)
    # in which it differs from the fit to all rows
    assert np.abs(family.fit(setting).predict(x) - expected).max() > 1e-3


def test_rotations_are_predicted_out_of_fold() -> None:
    x, y = pairs()
    fold = np.random.default_rng(5).permutation(60) % 4
    expected = np.empty(y.shape)
    for f in range(4):
        s = procrustes(x[fold != f], y[fold != f])
        expected[fold == f] = s.predict(x[fold == f])
    np.testing.assert_allclose(Family(x, y, AWAY, seed=5).predict(PROCRUSTES), expected, atol=1e-5)


def test_its_ends_are_ridge_and_procrustes() -> None:
    x, y = pairs()
    family = Family(x, y, AWAY)
    for setting, solver in ((RIDGE, ridge), (PROCRUSTES, procrustes)):
        ours, theirs = family.fit(setting), solver(x, y)
        assert ours.weight.tobytes() == theirs.weight.tobytes()
        assert ours.bias is not None
        assert theirs.bias is not None
        assert ours.bias.tobytes() == theirs.bias.tobytes()
    between = family.fit(Setting(turned=0.3)).weight
    assert between == pytest.approx(0.7 * ridge(x, y).weight + 0.3 * procrustes(x, y).weight, abs=1e-6)


def test_centred_rows_are_those_of_a_map_that_centres_and_normalises() -> None:
    from vecferry.linear import LinearMap

    x, y = pairs()
    setting = Setting(centred=True, mean=1.25)
    s = Family(x, y, AWAY).fit(setting)
    assert s.mean == pytest.approx(x.mean(0), abs=1e-6)
    prepared = unit(x - x.mean(0))
    plain = ridge(prepared, y)
    assert s.weight == pytest.approx(plain.weight, abs=1e-4)
    assert s.bias == pytest.approx(plain.bias + 0.25 * y.mean(0), abs=1e-4)
    m = LinearMap(s.weight, s.bias, pre="center_l2", mean=s.mean)
    np.testing.assert_allclose(m.apply(x), s.predict(x), atol=1e-4)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_unshrunk_predictions_vary_as_much_as_the_target(power: float) -> None:
    x, y = pairs(noise=4)
    family = Family(x, y, AWAY)
    variance, axes = np.linalg.eigh(np.cov(y.T, bias=True))
    before, after = ((family.predict(Setting(unshrunk=u)) @ axes).var(0) for u in (0, power))
    assert (before < variance).all()
    assert after == pytest.approx(variance**power * before ** (1 - power), rel=1e-4)


def test_the_tilt_is_one_vector_that_no_query_sees() -> None:
    x, y = pairs()
    family = Family(x, y, AWAY)
    plain, tilted = family.predict(RIDGE), family.predict(replace(RIDGE, tilt=2.0))
    spread = np.sqrt(plain.var(0).sum())
    assert tilted - plain == pytest.approx(np.tile(2 * spread * AWAY, (60, 1)), abs=1e-4)
    far, near = (family.fit(s).predict(x[:1])[0] for s in (replace(RIDGE, tilt=2.0), RIDGE))
    assert far - near == pytest.approx(2 * spread * AWAY, abs=1e-4)
    queries = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
    queries[:, 2] = 0
    assert np.abs(least_asked(queries)) == pytest.approx(AWAY, abs=1e-6)
    assert queries @ tilted.T == pytest.approx(queries @ plain.T, abs=1e-4)
    # far out, cosine ranks as the inner product of what was predicted (but for ties in float32)
    by_product, _ = topk(queries, plain, 10, "ip")
    by_cosine, _ = topk(queries, plain, 10, "cosine")
    assert (by_product == by_cosine).mean() < 0.7
    found, _ = topk(queries, family.predict(replace(RIDGE, tilt=1000.0)), 10, "cosine")
    assert (found == by_product).mean() > 0.97


def test_a_tilt_lets_uncertain_rows_count_for_less() -> None:
    """Half of the texts are ones that the old model hardly understands: their vectors there are short noise."""
    rng = np.random.default_rng(3)
    meaning = rng.standard_normal((1200, 30))
    y = unit(np.hstack([meaning, np.zeros((1200, 1))])).astype(np.float32)
    x = meaning @ rng.standard_normal((30, 30)) + 0.1 * rng.standard_normal((1200, 30))
    x[::2] = 0.2 * rng.standard_normal((600, 30))
    queries = unit(np.hstack([rng.standard_normal((100, 30)), np.zeros((100, 1))])).astype(np.float32)
    family = Family(x.astype(np.float32), y, least_asked(queries))
    truth = Truth.of(queries, y, 10, "cosine")

    def found(tilt: float) -> Any:
        return topk(queries, family.predict(Setting(tilt=tilt)), 10, "cosine")[0]

    agreement = [truth.agreement(found(t), 10).mean() for t in (0, 0.5, 1, 2)]
    assert min(agreement[1:3]) > agreement[0] + 0.05  # of .45, with a standard error of .015
    noise = [(found(t) % 2 == 0).mean() for t in (0, 0.5, 1, 2)]
    assert noise == sorted(noise, reverse=True)
    assert noise[0] > 2 * noise[-1]


def test_other_rows_are_fitted_with_the_same_lambda_and_tilt() -> None:
    x, y = pairs(200)
    family = Family(x[:100], y[:100], AWAY)
    setting = Setting(penalty=0.3, tilt=1.0)
    s = family.fit(setting, x, y)
    weight, bias = stacked_ridge(x, y, family.penalty(setting))
    assert s.weight == pytest.approx(weight, abs=1e-4)
    spread = np.sqrt(family.predict(replace(setting, tilt=0.0)).var(0).sum())
    assert s.bias == pytest.approx(bias + spread * AWAY, abs=1e-3)
