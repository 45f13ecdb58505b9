"""The spectrum against numpy's SVD and pseudo-inverse, and every closed form against its definition."""

import numpy as np
import pytest
import tiny_llm

from vecferry.errors import DataError, UsageError
from vecferry.spectrum import Spectrum, band, frequent, infrequent, smoothed, top_tokens

HEAD = tiny_llm.head()
COUNTS = (1e5 / np.arange(1, 121) ** 1.1).astype(np.int64)
COUNTS[110:] = 0


@pytest.mark.parametrize("center", [False, True])
def test_values_and_directions_are_those_of_the_svd(center: bool) -> None:
    spectrum = Spectrum.of(HEAD, center=center)
    x = HEAD.astype(np.float64)
    _, values, rows = np.linalg.svd(x - x.mean(0) if center else x, full_matrices=False)
    np.testing.assert_allclose(spectrum.values, values, rtol=1e-10)
    np.testing.assert_allclose(np.abs((spectrum.directions * rows).sum(1)), 1, rtol=1e-10)
    assert (spectrum.directions.max(1) == np.abs(spectrum.directions).max(1)).all()


def test_more_rows_than_are_held_at_once_make_the_same_spectrum() -> None:
    tall = tiny_llm.head(tokens=20_000, dim=8)
    expected = np.linalg.svd(tall.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(Spectrum.of(tall).values, expected, rtol=1e-9)


@pytest.mark.parametrize("center_log", [False, True])
def test_the_average_token_is_that_of_the_pseudo_inverse(center_log: bool) -> None:
    p = smoothed(COUNTS)
    wanted = np.log(p) - (np.log(p).mean() if center_log else 0)
    expected = wanted @ np.linalg.pinv(HEAD.astype(np.float64).T)
    found = Spectrum.of(HEAD).average_token(HEAD, 7 * p, center_log=center_log)  # of any scale
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_the_average_token_of_a_softmax_is_its_state() -> None:
    state = np.random.default_rng(1).standard_normal(16)
    logits = HEAD.astype(np.float64) @ state
    p = np.exp(logits - logits.max())
    # log p is the logits less one constant: where the ones vector isn't in the head's range it shifts the state
    x = HEAD.astype(np.float64)
    shift = np.log(p.sum()) + logits.max()
    expected = state - shift * np.linalg.lstsq(x, np.ones(len(x)), rcond=None)[0]
    np.testing.assert_allclose(Spectrum.of(HEAD).average_token(HEAD, p), expected, rtol=1e-6)


def test_delta_pi_is_what_its_definition_says() -> None:
    spectrum, x = Spectrum.of(HEAD), HEAD.astype(np.float64)
    state = spectrum.average_token(HEAD, smoothed(COUNTS))
    for tokens in (frequent(COUNTS, 10), infrequent(COUNTS, 10), np.array([3, 50, 117])):
        expected = []
        for v in spectrum.directions:
            removed = state @ (np.eye(16) - np.outer(v, v))
            expected.append(np.abs((x @ removed - x @ state)[tokens]).sum() / np.abs((x @ state)[tokens]).sum())
        np.testing.assert_allclose(spectrum.delta_pi(HEAD, state, tokens), expected, rtol=1e-8)


def test_frequent_and_infrequent_tokens() -> None:
    assert frequent(COUNTS, 3).tolist() == [0, 1, 2]
    assert infrequent(COUNTS, 3).tolist() == [110, 111, 112]
    with pytest.raises(UsageError, match="121 tokens can't be taken of 120"):
        frequent(COUNTS, 121)


def test_smoothing_gives_a_distribution_without_zeros() -> None:
    p = smoothed(np.array([3, 0, 1]), 0.5)
    np.testing.assert_allclose(p, [3.5 / 5.5, 0.5 / 5.5, 1.5 / 5.5])
    with pytest.raises(UsageError, match="above 0"):
        smoothed(COUNTS, 0.0)


def test_the_logit_lens_is_the_largest_logits() -> None:
    states = np.random.default_rng(2).standard_normal((70, 16), dtype=np.float32)
    tokens, logits = top_tokens(HEAD, states, 5)
    all_logits = states.astype(np.float64) @ HEAD.T.astype(np.float64)
    np.testing.assert_allclose(logits, -np.sort(-all_logits, axis=1)[:, :5], rtol=1e-10)
    np.testing.assert_allclose(np.take_along_axis(all_logits, tokens, axis=1), logits, rtol=1e-10)


@pytest.mark.parametrize(
    ("dim", "tau", "expected"), [(896, 2, (224, 672)), (896, 4, (336, 560)), (4096, 1, (0, 4096)), (577, 2, (144, 432))]
)
def test_the_band_is_that_of_the_papers_code(dim: int, tau: int, expected: tuple[int, int]) -> None:
    assert band(dim, tau) == expected  # 224:672 is what the paper's ablation names for Qwen2.5-0.5B


def test_bands_that_are_not_there_are_refused() -> None:
    assert band(4096, 8, 128) == (128, 640)
    with pytest.raises(UsageError, match="--offset is 9: 8 of 16 directions can begin at 0 to 8"):
        band(16, 2, 9)
    with pytest.raises(UsageError, match="--tau is 0"):
        band(16, 0)


def test_what_is_no_head_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\[V, d\]; this is \[4, 9\]"):
        Spectrum.of(np.ones((4, 9), np.float32))
    broken = HEAD.copy()
    broken[5, 5] = np.nan
    with pytest.raises(DataError, match="NaN"):
        Spectrum.of(broken)
    with pytest.raises(UsageError, match="states of 16 dimensions"):
        top_tokens(HEAD, np.ones((1, 15), np.float32))
    with pytest.raises(UsageError, match="120 tokens, not"):
        Spectrum.of(HEAD).average_token(HEAD, np.ones(119))
    with pytest.raises(UsageError, match="minimum of 0"):
        Spectrum.of(HEAD).average_token(HEAD, np.zeros(120))
    with pytest.raises(UsageError, match="not centred"):
        Spectrum.of(HEAD, center=True).average_token(HEAD, np.ones(120))
    with pytest.raises(DataError, match="logit of 0"):
        Spectrum.of(HEAD).delta_pi(HEAD, np.zeros(16), np.array([1]))
