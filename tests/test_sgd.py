"""Minibatch SGD: it leads to least squares, depends on the seed alone, and leaves torch as it was."""

import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from vecferry.errors import MissingDependencyError
from vecferry.solvers import sgd

torch = pytest.importorskip("torch", reason="torch is an optional dependency")


def pairs(n: int = 1500, scale: float = 1.0) -> tuple[Any, Any, Any, Any]:
    """Return noisy pairs off centre, and their least-squares weight and bias by numpy."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 24)) * np.linspace(0.3, 2, 24) + 1
    y = x @ rng.standard_normal((24, 16)) + 0.5 * rng.standard_normal((n, 16)) + 2
    x, y = (x * scale).astype(np.float32), (y * scale).astype(np.float32)
    ones = np.column_stack([x.astype(np.float64), np.ones(n)])
    found = np.linalg.lstsq(ones, y.astype(np.float64), rcond=None)[0]
    return x, y, found[:-1], found[-1]


def excess(x: Any, y: Any, weight: Any, bias: Any, s: Any) -> float:
    """Return by what part the mean squared error is above the least one."""
    least = np.mean((y - x @ weight - bias) ** 2)
    return float(np.mean((y - x @ s.weight.astype(np.float64) - s.bias) ** 2) / least - 1)


@pytest.mark.parametrize("scale", [1, 1e-3, 1e4])
def test_it_converges_to_least_squares(scale: float) -> None:
    x, y, weight, bias = pairs(scale=scale)
    excesses = [excess(x, y, weight, bias, sgd(x, y, seed=0, steps=steps)) for steps in (30, 100, 300, 2000)]
    assert excesses == sorted(excesses, reverse=True)
    assert excesses[-1] < 2e-4
    s = sgd(x, y, seed=0)
    assert np.linalg.norm(s.weight - weight) < 2e-3 * np.linalg.norm(weight)
    assert s.bias is not None
    assert np.linalg.norm(s.bias - bias) < 2e-2 * np.linalg.norm(bias)
    assert s.parameters == {"steps": 2000, "batch": 256, "rate": 0.01, "optimizer": "adam"}


def test_without_noise_it_finds_the_map_itself() -> None:
    x, _, weight, _ = pairs()
    s = sgd(x, (x @ weight - 1).astype(np.float32), seed=0)
    assert s.weight == pytest.approx(weight, abs=1e-4)
    assert s.bias == pytest.approx(np.full(16, -1), abs=1e-3)


def test_the_seed_orders_the_batches() -> None:
    x, y, *_ = pairs()
    first, again, other = (sgd(x, y, seed=seed, steps=50).weight for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


def test_the_bytes_do_not_depend_on_threads_which_stay_as_they_were() -> None:
    x, y, *_ = pairs()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(sgd(x, y, seed=1, steps=50).weight.tobytes())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_fewer_rows_than_a_batch_are_one_batch() -> None:
    x, y, *_ = pairs(100)
    whole = sgd(x, y, seed=0, steps=300)
    ones = np.column_stack([x.astype(np.float64), np.ones(100)])
    found = np.linalg.lstsq(ones, y.astype(np.float64), rcond=None)[0]
    assert excess(x, y, found[:-1], found[-1], whole) < 1e-2


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    x, y, *_ = pairs(100)
    with pytest.raises(MissingDependencyError, match=r"the sgd solver needs torch.*pip install 'vecferry\[torch\]'"):
        sgd(x, y, seed=0)


BYTES = """
    import hashlib
    import numpy as np
    from vecferry.solvers import sgd

    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((900, d), dtype=np.float32) for d in (130, 150))
    s = sgd(x, y, seed=9, steps=40)
    print(hashlib.sha256(s.weight.tobytes() + s.bias.tobytes()).hexdigest())
"""


def test_the_bytes_are_the_same_in_processes_with_other_threads() -> None:
    found = set()
    for threads in ("1", "2"):
        limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        command = [sys.executable, "-c", textwrap.dedent(BYTES)]
        found.add(subprocess.run(command, env=os.environ | limits, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1
