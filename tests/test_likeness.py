from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.spatial.distance import cdist

from vecferry.likeness import MATERIAL, SIGNIFICANT, Likeness, compare, measure_likeness
from vecferry.pairs import Pairs
from vecferry.sampling import farthest


def gaussian(n: int, seed: int, d: int = 24) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Anisotropic Gaussian rows, off the origin as real embeddings are."""
    x = np.random.default_rng(seed).standard_normal((n, d)) * np.linspace(2, 0.2, d) + 0.5
    return x.astype(np.float32)


def pairs_of(store: Any, places: Any) -> Pairs:
    batch = store.rows.take(np.asarray(places))
    return Pairs(batch.ids, batch.vectors, batch.vectors)


def measured(store: Any, places: Any, seed: int = 0) -> Likeness:
    found = measure_likeness(pairs_of(store, places), store, seed)
    assert found is not None
    return found


def test_pairs_drawn_from_the_index_raise_no_alarm(rows: Any) -> None:
    """They are rows of the index themselves: without setting them apart each would find itself."""
    alarms = 0
    for seed in range(60):
        store = rows(np.arange(900), gaussian(900, seed))
        alarms += not measured(store, np.random.default_rng(seed).permutation(900)[:300], seed).alike
    assert alarms <= 3


def test_pairs_of_another_distribution_do(rows: Any) -> None:
    x = gaussian(1500, 0)
    shifted = gaussian(300, 1) + 1.5 * np.eye(24, dtype=np.float32)[0] * 2
    narrow = gaussian(300, 2) * np.r_[np.ones(4), np.zeros(20)].astype(np.float32)
    for other in (shifted, narrow):
        store = rows(np.arange(1800), np.concatenate([x, other]))
        found = measured(store, np.arange(1500, 1800))
        assert found.warning is not None
        assert "not like the corpus" in found.warning


def test_certain_but_immaterial_is_no_alarm() -> None:
    found = compare(gaussian(2000, 0) + np.float32(0.22), gaussian(2000, 1), np.random.default_rng(0))
    assert found.z > SIGNIFICANT
    assert found.same_side < 0.6
    assert found.warning is None


def test_large_but_uncertain_is_no_alarm() -> None:
    found = [compare(gaussian(30, s), gaussian(30, 100 + s), np.random.default_rng(0)) for s in range(60)]
    large = [f for f in found if f.same_side - f.expected > MATERIAL]
    assert large
    assert all(f.alike for f in large)


@pytest.fixture(scope="module")
def wordnet() -> tuple[Any, Any]:
    table = pq.read_table(str(files("vecferry") / "data" / "documents.parquet"))
    flat = table["e5"].combine_chunks().flatten().to_numpy()
    return flat.reshape(len(table), -1).astype(np.float32), np.array(table["pos"].to_pylist())


def test_real_pairs_of_one_part_of_speech(rows: Any, wordnet: Any) -> None:
    """Nouns are the bulk of WordNet and pass; verbs alone are another domain."""
    vectors, pos = wordnet
    store = rows(np.arange(len(vectors)), vectors)
    rng = np.random.default_rng(0)
    verbs = np.flatnonzero(pos == "verb") if "verb" in pos else np.flatnonzero(pos == "v")
    assert len(verbs) > 300
    assert not measured(store, verbs).alike
    assert measured(store, rng.permutation(len(vectors))[:1500]).alike


def test_pairs_spread_over_the_corpus_raise_no_alarm(rows: Any, wordnet: Any) -> None:
    vectors, _ = wordnet
    store = rows(np.arange(len(vectors)), vectors)
    assert measured(store, farthest(vectors, 800)).alike


def test_numbers_against_brute_force() -> None:
    x, y = gaussian(150, 3), gaussian(150, 4) * np.float32(1.2)
    found = compare(x, y, np.random.default_rng(0))
    both = np.concatenate([x, y]).astype(np.float64)
    distance = cdist(both, both, "cosine")
    np.fill_diagonal(distance, np.inf)
    near = distance.argmin(axis=1)
    side = np.arange(300) < 150
    assert found.same_side == pytest.approx((side[near] == side).mean(), abs=1e-4)
    assert found.expected == pytest.approx(149 / 299, abs=0.01)  # of 299 others 149 are of the own side
    spread = np.sqrt(np.trace(np.cov(y.T.astype(np.float64), bias=True)))
    assert found.mean_shift == pytest.approx(np.linalg.norm(x.mean(0) - y.mean(0)) / spread, abs=1e-3)
    spectra = [np.sort(np.linalg.eigvalsh(np.cov(a.T.astype(np.float64))))[::-1] for a in (x, y)]
    shares = [s / s.sum() for s in spectra]
    assert found.spectrum == pytest.approx(np.abs(shares[0] - shares[1]).sum() / 2, abs=1e-3)


def test_more_dimensions_than_rows_gives_the_same_spectrum() -> None:
    x, y = gaussian(40, 5, d=90), gaussian(40, 6, d=90)
    wide = compare(x, y, np.random.default_rng(0))
    turned = np.linalg.qr(np.random.default_rng(1).standard_normal((90, 90)))[0].astype(np.float32)
    assert compare(x @ turned, y @ turned, np.random.default_rng(0)).spectrum == pytest.approx(wide.spectrum, abs=1e-3)
    spectra = [np.linalg.svd(a - a.mean(0), compute_uv=False) ** 2 for a in (x, y)]
    shares = [s / s.sum() for s in spectra]
    assert wide.spectrum == pytest.approx(np.abs(shares[0] - shares[1]).sum() / 2, abs=1e-3)


def test_nothing_is_said_about_too_few_rows(rows: Any) -> None:
    store = rows(np.arange(100), gaussian(100, 0))
    assert measure_likeness(pairs_of(store, range(20)), store, 0) is None
    assert measure_likeness(pairs_of(store, range(90)), store, 0) is None  # the pairs are nearly all there is
