"""The verb `transform` on arrays: what it refuses, and by which row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vecferry import transform
from vecferry.errors import BadRowsError, UsageError
from vecferry.linear import LinearMap

M = LinearMap(np.diag([1.0, 2.0, 3.0]).astype(np.float32), post="l2")


def test_rows_are_mapped_and_one_vector_stays_one() -> None:
    expected = np.array([3, 2 * 4, 0]) / np.sqrt(9 + 64)
    for given in ([3, 4, 0], np.array([3.0, 4.0, 0.0]), np.array([3, 4, 0], np.float16)):
        np.testing.assert_allclose(transform(given, M), expected, rtol=1e-6)
    np.testing.assert_allclose(transform([[3, 4, 0], [0, 0, 1]], M), [expected, [0, 0, 1]], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, 1e30, 1e300])
def test_rows_that_have_no_translation_are_refused_by_number(bad: float) -> None:
    x = np.ones((5, 3))
    x[[1, 4]] = bad
    with pytest.raises(BadRowsError, match=r"the vectors: 2 rows hold .*: 1, 4\.") as caught:
        transform(x, M)
    assert caught.value.ids == [1, 4]
    with pytest.raises(BadRowsError, match="1 rows"):
        transform(x[1], M)


def test_a_row_that_overflows_on_its_way_is_refused() -> None:
    weight = np.full((3, 3), 1e15, np.float32)
    for post in ("none", "l2"):  # of a length that overflows, normalisation makes zeros
        steep = LinearMap(weight, post=post)
        with pytest.raises(BadRowsError, match="beyond what float32 holds: 1"):
            transform([[1, 1, 1], [1e10, 1, 1]], steep)


@pytest.mark.parametrize(
    "given",
    [["1", "2", "3"], "text", np.ones(3, complex), np.ones((1, 3), object), [[1, 2], [3]], None, 5, np.ones((1, 1, 3))],
)
def test_what_is_no_array_of_real_numbers_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="the vectors"):
        transform(given, M)


@pytest.mark.parametrize("given", [None, 5, np.eye(3)])
def test_what_is_no_map_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="a map is a LinearMap or the path of its folder"):
        transform(np.eye(3), given)
