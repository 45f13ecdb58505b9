"""Every compressor against numpy's SVD and its defining identity."""

import numpy as np
import pytest
import tiny_llm

from vecferry.errors import UsageError
from vecferry.filters import (
    KINDS,
    Given,
    edges,
    embed_filter,
    ideal,
    kept,
    make,
    pca,
    possible,
    ranked_by,
    whitening,
    without_head,
    without_tail,
)
from vecferry.linear import LinearMap
from vecferry.spectrum import Spectrum

HEAD = tiny_llm.head()
X = np.random.default_rng(3).standard_normal((300, 16), dtype=np.float32) + np.linspace(0, 2, 16, dtype=np.float32)
SPECTRUM = Spectrum.of(HEAD)
V = np.linalg.svd(HEAD.astype(np.float64), full_matrices=False)[2]
GIVEN = Given(16, "cosine", SPECTRUM, Spectrum.of(HEAD, center=True), np.arange(16.0), X, 0)


def same_span(m: LinearMap, rows: np.ndarray) -> None:
    """Check that a map projects orthogonally on the span of some orthonormal rows."""
    np.testing.assert_allclose(m.weight.astype(np.float64) @ m.weight.T, rows.T @ rows, atol=1e-6)
    np.testing.assert_allclose(m.weight.T @ m.weight, np.eye(m.d_out), atol=1e-6)


@pytest.mark.parametrize("tau", [2, 3, 4, 8])
def test_embed_filter_keeps_the_middle(tau: int) -> None:
    n = 16 // tau
    first = (16 - n) // 2
    m = embed_filter(HEAD, tau)
    assert (m.d_in, m.d_out, m.bias, m.post) == (16, n, None, "none")
    same_span(m, V[first : first + n])


@pytest.mark.parametrize("tau", [2, 4])
def test_inner_products_are_those_of_the_projected_full_space(tau: int) -> None:
    m = embed_filter(HEAD, tau)
    n = 16 // tau
    middle = V[(16 - n) // 2 : (16 - n) // 2 + n]
    projected = X.astype(np.float64) @ (middle.T @ middle)
    reduced = m.apply(X).astype(np.float64)
    np.testing.assert_allclose(reduced @ reduced.T, projected @ projected.T, atol=1e-3)
    apart = [np.linalg.norm(a[:, None] - a[None], axis=2) for a in (reduced[:50], projected[:50])]
    np.testing.assert_allclose(*apart, atol=1e-4)


def test_filtering_and_pooling_change_places() -> None:
    m = embed_filter(HEAD, 4)
    tokens = X.reshape(30, 10, 16)
    first = m.apply(tokens.reshape(-1, 16)).reshape(30, 10, -1).mean(axis=1)
    np.testing.assert_allclose(m.apply(tokens.mean(axis=1)), first, atol=1e-5)


def test_with_tau_1_nothing_is_filtered() -> None:
    m = embed_filter(HEAD, 1)
    np.testing.assert_array_equal(m.weight, np.eye(16))
    np.testing.assert_allclose(m.apply(X), X, rtol=1e-4)


def test_other_bands() -> None:
    same_span(embed_filter(HEAD, 4, offset=1), V[1:5])
    same_span(kept(SPECTRUM, 3, 14), V[3:14])
    same_span(without_head(SPECTRUM, 4), V[12:])
    same_span(without_tail(SPECTRUM, 4), V[:4])
    same_span(edges(SPECTRUM, 4), V[[0, 1, 14, 15]])
    same_span(edges(SPECTRUM, 5), V[[0, 1, 15]])
    changes = np.array([5.0, 1, 9, 0, 9, 9, 9, 9, 9, 9, 2, 9, 9, 9, 9, 9])
    same_span(ideal(SPECTRUM, changes, 4), V[[0, 1, 3, 10]])
    centred = HEAD.astype(np.float64) - HEAD.mean(0, dtype=np.float64)
    same_span(embed_filter(HEAD, 4, center=True), np.linalg.svd(centred)[2][6:10])
    with pytest.raises(UsageError, match="directions 3 to 17 can't be kept"):
        kept(SPECTRUM, 3, 17)


def test_pca_loses_least_of_the_deviations() -> None:
    m = pca(X, 4)
    deviations = X.astype(np.float64) - X.mean(0, dtype=np.float64)
    rows = np.linalg.svd(deviations, full_matrices=False)[2][:4]
    same_span(m, rows)
    np.testing.assert_allclose(np.abs(m.apply(X)), np.abs(deviations @ rows.T), atol=1e-4)
    without_mean = pca(X, 4, center=False)
    assert without_mean.bias is None
    same_span(without_mean, np.linalg.svd(X.astype(np.float64), full_matrices=False)[2][:4])


def test_whitened_vectors_have_unit_covariance() -> None:
    y = whitening(X, 2).apply(X).astype(np.float64)
    np.testing.assert_allclose(np.cov(y, rowvar=False), np.eye(8), atol=1e-4)
    np.testing.assert_allclose(y.mean(0), 0, atol=1e-4)


def test_a_corpus_that_cannot_teach_as_many_directions_is_refused() -> None:
    with pytest.raises(UsageError, match="8 principal components can't be learned from 8"):
        pca(X[:8], 2)
    flat = X.copy()
    flat[:, 3:] = 0
    with pytest.raises(UsageError, match="fewer than 4 directions"):
        pca(flat, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tau", [1, 3, 4])
def test_every_kind_has_the_width_asked_for_and_the_same_bytes_again(kind: str, tau: int) -> None:
    m = make(kind, GIVEN, tau)
    assert (m.d_in, m.d_out, m.post) == (16, 16 // tau, "l2")
    assert m.weight.tobytes() == make(kind, GIVEN, tau).weight.tobytes()
    np.testing.assert_allclose(np.linalg.norm(m.apply(X), axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["random", "random-directions", "random-orthonormal"])
def test_seeds_draw_others_and_all_are_orthonormal(kind: str) -> None:
    m, other = (make(kind, Given(16, spectrum=SPECTRUM, seed=s), 2).weight for s in (0, 1))
    assert not np.array_equal(m, other)
    np.testing.assert_allclose(m.T @ m, np.eye(8), atol=1e-6)


def test_kinds_are_possible_where_their_needs_are_met() -> None:
    assert set(possible(Given(16))) == {"first", "random", "random-orthonormal"}
    assert "ideal" not in possible(Given(16, spectrum=SPECTRUM))
    assert possible(GIVEN) == list(KINDS)
    with pytest.raises(UsageError, match="--kind pca has none"):
        make("pca", GIVEN, 2, offset=3)


def test_by_inner_product_no_mean_is_subtracted() -> None:
    given = Given(16, "ip", vectors=X)
    for kind in ("pca", "whiten"):
        m = make(kind, given, 2)
        assert (m.bias, m.pre, m.post) == (None, "none", "none")


def test_a_filter_folds_into_a_map_where_no_mean_is_between() -> None:
    rng = np.random.default_rng(4)
    first = LinearMap(rng.standard_normal((10, 16)), rng.standard_normal(16), post="l2")
    second = ranked_by(embed_filter(HEAD, 4), "cosine")
    x = rng.standard_normal((40, 10), dtype=np.float32)
    np.testing.assert_allclose(first.then(second).apply(x), second.apply(first.apply(x)), atol=1e-5)
