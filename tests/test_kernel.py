"""The kernel: the same bits for any number of threads, and torch agrees with numpy."""

import numpy as np
import pytest

from vecferry.errors import UsageError
from vecferry.kernel import choose_device, kernel, torch_kernel
from vecferry.linear import LinearMap


def some_map(pre: str = "none", post: str = "l2", d_in: int = 48, d_out: int = 80) -> LinearMap:
    rng = np.random.default_rng(1)
    mean = rng.standard_normal(d_in, dtype=np.float32) / 10 if pre == "center_l2" else None
    weight, bias = rng.standard_normal((d_in, d_out), dtype=np.float32), rng.standard_normal(d_out, dtype=np.float32)
    return LinearMap(weight, bias, pre, post, mean)  # type: ignore[arg-type]


@pytest.mark.parametrize("pre", ["none", "l2", "center_l2"])
def test_the_bits_do_not_depend_on_threads(pre: str) -> None:
    m = some_map(pre)
    x = np.random.default_rng(0).standard_normal((3001, m.d_in), dtype=np.float32)
    with kernel(m, threads=1) as one, kernel(m, threads=3) as three:
        a, b = one(x), three(x)
    assert a.tobytes() == b.tobytes() == m.apply(x).tobytes()


@pytest.mark.parametrize(("pre", "post"), [("none", "none"), ("none", "l2"), ("l2", "l2"), ("center_l2", "none")])
def test_torch_agrees_with_a_float64_product(pre: str, post: str) -> None:
    pytest.importorskip("torch", reason="torch is an optional dependency")
    m = some_map(pre, post)
    x = np.random.default_rng(0).standard_normal((9000, m.d_in), dtype=np.float32)
    x[5] = 0
    rows = x.astype(np.float64) - (m.mean if m.mean is not None else 0)
    if pre != "none":
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    expected = rows @ m.weight.astype(np.float64) + m.bias
    if post == "l2":
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    run = torch_kernel(m, "cpu")
    assert np.abs(run(x) - expected).max() < 2e-6 * np.abs(expected).max() * m.d_in
    # one row and many give the same bits here too
    assert run(x[:1]).tobytes() == run(x)[:1].tobytes()


def test_an_unknown_or_absent_device_is_refused() -> None:
    assert choose_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        choose_device("tpu")
