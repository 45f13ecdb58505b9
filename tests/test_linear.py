"""The map: its numbers against float64, its bits against batches, threads and BLAS kernels, and the folding of two."""

import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from vecferry import linear
from vecferry.errors import IncompatibleError, UsageError
from vecferry.linear import BLOCK, LinearMap, equal_rows_agree, exactly, in_blocks, normalize

KINDS = [(pre, post, biased) for pre in ("none", "l2", "center_l2") for post in ("none", "l2") for biased in (0, 1)]


@pytest.fixture(params=["by trying", "exact"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the product this machine chooses, and with the exact one that others may choose."""
    if request.param == "exact":
        monkeypatch.setattr(linear, "equal_rows_agree", lambda d_in, d_out: False)
    return str(request.param)


def some_map(d_in: int, d_out: int, pre: Any = "none", post: Any = "none", biased: object = True) -> LinearMap:
    rng = np.random.default_rng(d_in * 1000 + d_out)
    return LinearMap(
        rng.standard_normal((d_in, d_out), dtype=np.float32) / np.sqrt(d_in),
        rng.standard_normal(d_out, dtype=np.float32) if biased else None,
        pre,
        post,
        rng.standard_normal(d_in, dtype=np.float32) if pre == "center_l2" else None,
    )


def some_rows(n: int, d: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, d), dtype=np.float32)


def reference(m: LinearMap, x: Any) -> Any:
    """Map in float64, as the formula says it."""
    x = x.astype(np.float64)
    if m.mean is not None:
        x = x - m.mean
    if m.pre != "none":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    y = x @ m.weight.astype(np.float64) + (0 if m.bias is None else m.bias)
    return y / np.linalg.norm(y, axis=1, keepdims=True) if m.post == "l2" else y


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(("pre", "post", "biased"), KINDS)
@pytest.mark.parametrize("shape", [(128, 96), (50, 33)])
def test_it_computes_what_the_formula_says(pre: str, post: str, biased: int, shape: tuple[int, int]) -> None:
    m, x = some_map(*shape, pre, post, biased), some_rows(600, shape[0])
    y, expected = m.apply(x), reference(m, x)
    assert y.dtype == np.float32
    # a sum of d float32 products, and a norm of d_out, are off by no more than this (Higham 2002, section 3.1)
    bound = (shape[0] + shape[1]) * np.finfo(np.float32).eps
    assert np.abs(y - expected).max() < bound * np.abs(expected).max()


def test_the_exact_product_is_as_near_as_a_float32_one() -> None:
    m, x = some_map(768, 96, biased=False), some_rows(500, 768)
    true = x.astype(np.float64) @ m.weight.astype(np.float64)
    single, exact = x @ m.weight, exactly(m.weight)(x).astype(np.float32)
    assert np.abs(exact - true).max() < 3 * np.abs(single - true).max()
    assert np.abs(exact - true).max() < 1e-5


def test_the_exact_product_has_no_rounding_to_disagree_about() -> None:
    # integers: every order of adding gives these very float64 numbers, as Python's own integers do
    rng = np.random.default_rng(3)
    weight, x = (rng.integers(-(2**20), 2**20, shape).astype(np.float32) for shape in ((64, 5), (7, 64)))
    true = [[sum(int(a) * int(b) for a, b in zip(row, column, strict=True)) for column in weight.T] for row in x]
    assert exactly(weight)(x).tolist() == true


@pytest.mark.parametrize("d_in", [1, 2, 64, 65, 500, 1024])
def test_the_order_of_adding_does_not_matter_to_the_exact_product(d_in: int) -> None:
    # no sum is larger than one of numbers that are all near the largest: it takes every bit that there is
    rng = np.random.default_rng(4)
    weight, x = (rng.uniform(0.99, 1, shape).astype(np.float32) for shape in ((d_in, 40), (50, d_in)))
    order = rng.permutation(d_in)
    assert exactly(weight)(x).tobytes() == exactly(weight[order])(x[:, order]).tobytes()
    assert exactly(weight)(x).tobytes() == exactly(weight[::-1])(x[:, ::-1]).tobytes()


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize(("pre", "post", "biased"), KINDS)
@pytest.mark.case("p5")
def test_the_bits_of_a_row_do_not_depend_on_the_batch(pre: str, post: str, biased: int) -> None:
    m, x = some_map(192, 70, pre, post, biased), some_rows(1100, 192)
    whole = m.apply(x)
    for size in (1, 7, 1000):
        parts = [m.apply(x[start : start + size]) for start in range(0, 60 if size == 1 else len(x), size)]
        together = np.concatenate(parts)
        assert together.tobytes() == whole[: len(together)].tobytes()


@given(data=st.data())
@pytest.mark.case("p5")
def test_the_bits_of_a_row_depend_on_nothing_around_it(data: st.DataObject) -> None:
    d_in, d_out = data.draw(st.sampled_from([(1, 3), (3, 1), (17, 40), (64, 2), (100, 100), (128, 64), (320, 48)]))
    m = some_map(d_in, d_out, data.draw(st.sampled_from(["none", "l2", "center_l2"])), "l2")
    x = some_rows(2 * BLOCK + 30, d_in)
    expected = m.apply(x)
    start = data.draw(st.integers(0, len(x) - 1))
    stop = data.draw(st.integers(start + 1, len(x)))
    # the same numbers at an address that no allocator gives
    offset = data.draw(st.integers(0, 15))
    memory = np.zeros(4 * (stop - start) * d_in + offset + 64, np.uint8)
    rows = memory[offset : offset + 4 * (stop - start) * d_in].view(np.float32).reshape(-1, d_in)
    rows[:] = x[start:stop]
    form = data.draw(st.sampled_from(["plain", "fortran", "strided", "backwards", "double"]))
    rows = {
        "plain": lambda: rows,
        "fortran": lambda: np.asfortranarray(rows),
        "strided": lambda: np.repeat(rows, 2, axis=1)[:, ::2],
        "backwards": lambda: rows[::-1].copy()[::-1],
        "double": lambda: rows.astype(np.float64),
    }[form]()
    assert m.apply(rows).tobytes() == expected[start:stop].tobytes()
    multiply = exactly(m.weight)
    assert multiply(x)[start:stop].tobytes() == multiply(x[start:stop]).tobytes()


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("d_in", [64, 300, 384, 500, 1000, 1024])  # 500 and 1000: cut elsewhere by many threads
@pytest.mark.parametrize("d_out", [1, 64, 257])
def test_the_bits_do_not_depend_on_blas_threads(d_in: int, d_out: int) -> None:
    m, x = some_map(d_in, d_out), some_rows(300, d_in)
    found = []
    for threads in (1, 2, 3):
        with threadpool_limits(threads, user_api="blas"):
            found.append(m.apply(x).tobytes())
    assert len(set(found)) == 1


def has_openblas() -> bool:
    return any(pool["internal_api"] == "openblas" for pool in threadpool_info())


KERNELS = """
    import numpy as np
    from threadpoolctl import threadpool_info, threadpool_limits
    from vecferry.linear import LinearMap

    rng = np.random.default_rng(0)
    for d_in, d_out in ((17, 40), (384, 64), (500, 48), (1024, 17), (768, 1)):
        m = LinearMap(rng.standard_normal((d_in, d_out)), rng.standard_normal(d_out), post="l2")
        x = rng.standard_normal((520, d_in), dtype=np.float32)
        with threadpool_limits(1):
            whole = m.apply(x)
        with threadpool_limits(2):
            parts = np.concatenate([m.apply(x[i : i + 13]) for i in range(0, 520, 13)])
        assert whole.tobytes() == parts.tobytes(), (d_in, d_out)
    print(threadpool_info()[0]["architecture"])
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or not has_openblas(), reason="chooses among OpenBLAS's x86 kernels")
@pytest.mark.parametrize("core", ["Haswell", "Sandybridge"])
def test_the_bits_keep_on_kernels_of_other_processors(core: str) -> None:
    env = os.environ | {"OPENBLAS_CORETYPE": core}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KERNELS)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [core]


def test_equal_rows_are_tried_and_odd_lengths_are_not_trusted() -> None:
    assert not equal_rows_agree(500, 64)
    assert not equal_rows_agree(384, 1)
    rows = np.tile(some_rows(1, 384), (BLOCK, 1))
    product = in_blocks(np.random.default_rng(0).standard_normal((384, 96), dtype=np.float32))(rows)
    assert equal_rows_agree(384, 96) == bool((product == product[0]).all())


@pytest.mark.usefixtures("product")
def test_blocks_may_run_side_by_side() -> None:
    m, x = some_map(128, 64, "l2", "l2"), some_rows(5 * BLOCK + 3, 128)
    with ThreadPoolExecutor(4) as pool:
        y = m.apply(x, run=lambda task, starts: list(pool.map(task, starts)))
    assert y.tobytes() == m.apply(x).tobytes()


@pytest.mark.usefixtures("product")
def test_it_writes_where_it_is_told_to() -> None:
    m, x = some_map(128, 64, "l2", "l2"), some_rows(BLOCK + 9, 128)
    expected = m.apply(x)
    wide = np.full((len(x), 2 * 64), 7, np.float32)
    out = wide[:, ::2]
    assert m.apply(x, out=out) is out
    assert (out == expected).all()
    assert (wide[:, 1::2] == 7).all()
    with pytest.raises(UsageError, match=r"float32 \[265, 64\], not float64 \[265, 64\]"):
        m.apply(x, out=np.empty((265, 64)))
    with pytest.raises(UsageError, match=r"not float32 \[264, 64\]"):
        m.apply(x, out=np.empty((264, 64), np.float32))


@pytest.mark.parametrize(("pre", "post", "biased"), KINDS)
def test_it_leaves_its_input_alone(pre: str, post: str, biased: int) -> None:
    m, x = some_map(64, 64, pre, post, biased), some_rows(BLOCK, 64)
    before = x.copy()
    x.flags.writeable = False
    m.apply(x)
    assert (x == before).all()


@pytest.mark.usefixtures("product")
def test_half_floats_map_as_the_numbers_they_are() -> None:
    m = some_map(64, 32, "l2")
    x = some_rows(300, 64).astype(np.float16)
    assert m.apply(x).tobytes() == m.apply(x.astype(np.float32)).tobytes()


@pytest.mark.usefixtures("product")
def test_zero_rows_stay_zero_and_no_rows_are_no_rows() -> None:
    m = some_map(64, 32, "l2", "l2", biased=False)
    x = some_rows(5, 64)
    x[2] = 0
    y = m.apply(x)
    assert (y[2] == 0).all()
    assert np.linalg.norm(y, axis=1)[[0, 1, 3, 4]] == pytest.approx(1)
    assert m.apply(x[:0]).shape == (0, 32)


@pytest.mark.usefixtures("product")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_that_is_no_vector_spoils_no_other() -> None:
    m, x = some_map(64, 32, "none", "l2"), some_rows(300, 64)
    expected = m.apply(x)
    x[7, 3] = np.nan
    y = m.apply(x)
    assert np.isnan(y[7]).all()
    assert np.delete(y, 7, axis=0).tobytes() == np.delete(expected, 7, axis=0).tobytes()


@pytest.mark.parametrize("shape", [(5, 63), (5, 65), (64,), (1, 5, 64)])
def test_rows_of_another_dimension_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(IncompatibleError, match="takes vectors of 64 dimensions"):
        some_map(64, 32).apply(np.zeros(shape, np.float32))


def faults() -> Iterator[tuple[dict[str, Any], str]]:
    weight, bias, mean = np.ones((3, 2)), np.ones(2), np.ones(3)
    yield {"weight": np.ones(3)}, r"weight must be \[d_in, d_out\], not \[3\]"
    yield {"weight": np.ones((3, 0))}, r"not \[3, 0\]"
    yield {"weight": weight, "bias": np.ones(3)}, r"bias has shape \[3\], weight leads to 2"
    yield {"weight": weight, "pre": "l1"}, "pre='l1'"
    yield {"weight": weight, "post": "center_l2"}, "post='center_l2'"
    yield {"weight": weight, "pre": "center_l2"}, "mean goes with"
    yield {"weight": weight, "mean": mean}, "mean goes with"
    yield {"weight": weight, "pre": "center_l2", "mean": bias}, r"mean has shape \[2\], weight takes 3"
    yield {"weight": weight, "bias": np.array([1, np.nan])}, "NaN or infinite"
    yield {"weight": weight * np.inf}, "NaN or infinite"


@pytest.mark.parametrize(("fields", "message"), list(faults()))
def test_numbers_that_make_no_map_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LinearMap(**fields)


def test_normalize_works_in_place() -> None:
    x = np.array([[3, 4], [0, 0], [-5, 12]], np.float32)
    normalize(x)
    assert x == pytest.approx(np.array([[0.6, 0.8], [0, 0], [-5 / 13, 12 / 13]]))


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_two_maps_fold_into_what_they_do_in_turn(first: tuple[str, str, int], second: tuple[str, str, int]) -> None:
    a, b = some_map(20, 30, *first), some_map(30, 12, *second)
    x = some_rows(50, 20)
    between = a.post == "l2" or b.pre == "l2"
    if b.pre == "center_l2" or (between and (b.bias is not None or b.post == "none")):
        with pytest.raises(IncompatibleError, match="normalisation between the two"):
            a.then(b)
        return
    folded = a.then(b)
    in_turn = reference(b, reference(a, x))
    assert folded.card is None
    assert np.abs(folded.apply(x) - in_turn).max() < 1e-5 * np.abs(in_turn).max()


def test_maps_that_do_not_meet_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="gives 30 dimensions, the second takes 31"):
        some_map(20, 30).then(some_map(31, 5))
