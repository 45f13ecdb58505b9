"""What is measured with is never what was fitted on (field case p6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vecferry.batch import id_keys
from vecferry.errors import DataError
from vecferry.holdout import Holdout
from vecferry.pairs import Pairs, Queries
from vecferry.qrels import Labels, read_qrels
from vecferry.split import lowest, split


def make_pairs(n: int, seed: int = 0, marked: Any = None) -> Pairs:
    rng = np.random.default_rng(seed)
    x, y = (rng.standard_normal((n, d)).astype(np.float32) for d in (5, 3))
    return Pairs(pa.array(rng.permutation(10 * n)[:n]), x, y, marked)


def make_queries(n: int) -> Queries:
    rng = np.random.default_rng(99)
    vectors, old = (rng.standard_normal((n, d)).astype(np.float32) for d in (3, 5))
    return Queries(pa.array([f"q{i}" for i in range(n)]), vectors, old)


def labels_of(tmp_path: Path, text: str) -> Labels:
    (tmp_path / "qrels").write_text(text)
    return read_qrels(tmp_path / "qrels")


def run(pairs: Pairs, queries: Queries | None = None, labels: Labels | None = None, seed: int = 0) -> Any:
    return split(pairs, queries, labels, seed=seed, fingerprint={})


def rows_in(rows: Any, others: Any) -> list[bool]:
    return [any((row == other).all() for other in others) for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.integers(0, 20))
@pytest.mark.case("p6")
def test_no_fit_row_equals_a_held_out_one(seed: int, by_role: bool, copies: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = make_pairs(80, seed, rng.random(80) < 0.2 if by_role else None)
    for side in (pairs.source, pairs.target):
        side[rng.integers(80, size=copies)] = side[rng.integers(80, size=copies)]
    pairs.source[::7, 0] = 0.0
    try:
        parts = run(pairs, seed=seed)
    except DataError:  # the draw marked none
        assert by_role
        assert pairs.marked is not None
        assert not pairs.marked.any()
        return
    held = parts.holdout
    assert not any(rows_in(parts.source, held.source))
    assert not any(rows_in(parts.target, held.target))
    fitted = np.isin(id_keys(pairs.ids), held.fit_keys)
    assert not np.isin(id_keys(held.ids), held.fit_keys).any()
    assert fitted.sum() == len(parts.source)
    np.testing.assert_array_equal(parts.source, pairs.source[fitted])
    # nothing else is lost: what is in neither part equals a held-out row
    neither = ~fitted & ~np.isin(id_keys(pairs.ids), id_keys(held.ids))
    equal = np.array(rows_in(pairs.source, held.source)) | np.array(rows_in(pairs.target, held.target))
    assert (equal[neither]).all()
    if by_role:
        assert pairs.marked is not None
        assert held.ids.to_pylist() == pairs.ids.filter(pa.array(pairs.marked)).to_pylist()


def test_zero_of_either_sign_is_one_number() -> None:
    marked = np.arange(40) < 5
    pairs = make_pairs(40, marked=marked)
    pairs.source[0], pairs.source[20] = 1, 1
    pairs.source[0, 2], pairs.source[20, 2] = 0.0, -0.0
    parts = run(pairs)
    assert len(parts.source) == 34
    assert any("1 pairs left out of the fit" in w for w in parts.warnings)


@pytest.mark.case("p6")
def test_a_holdout_that_was_fitted_on_is_refused() -> None:
    pairs = make_pairs(20)
    with pytest.raises(DataError, match="3 of 5 held-out documents were fitted on"):
        Holdout(pairs.ids[:5], pairs.source[:5], pairs.target[:5], fit_keys=id_keys(pairs.ids[2:]))


def test_a_fifth_of_the_documents_and_half_of_the_queries() -> None:
    parts = run(make_pairs(500), make_queries(60))
    held = parts.holdout
    assert (len(held.ids), len(parts.source)) == (100, 400)
    assert held.queries is not None
    assert (len(held.queries), len(parts.queries)) == (30, 30)
    whole = make_queries(60)
    rows = [int(name[1:]) for name in held.query_ids.to_pylist()]
    np.testing.assert_array_equal(held.queries, whole.vectors[rows])
    assert whole.source is not None
    np.testing.assert_array_equal(held.source_queries, whole.source[rows])
    assert not any(rows_in(parts.queries, held.queries))


def test_the_split_hangs_on_ids_and_seed_alone() -> None:
    pairs = make_pairs(300)
    order = np.random.default_rng(1).permutation(300)
    turned = Pairs(pairs.ids.take(pa.array(order)), pairs.source[order], pairs.target[order])
    held = [set(run(p, seed=s).holdout.ids.to_pylist()) for p, s in ((pairs, 0), (turned, 0), (pairs, 1))]
    assert held[0] == held[1]
    assert len(held[0] & held[2]) < 30  # 12 expected of two independent draws of 60 from 300


def test_a_new_id_hardly_moves_the_split() -> None:
    ids = pa.array([f"d{i}" for i in range(1000)])
    before = lowest(ids.slice(0, 990), 0.2, 0)
    after = lowest(ids, 0.2, 0)[:990]
    assert (before & ~after).sum() + (after & ~before).sum() <= 12


def test_relevant_documents_of_held_out_queries_are_held_out(tmp_path: Path) -> None:
    pairs, queries = make_pairs(300), make_queries(40)
    labels = labels_of(tmp_path, "".join(f"q{i} 0 {pairs.ids[i].as_py()} 1\n" for i in range(40)))
    plain = run(pairs, queries)
    parts = run(pairs, queries, labels)
    asked = {int(name[1:]) for name in parts.holdout.query_ids.to_pylist()}
    held = set(parts.holdout.ids.to_pylist())
    assert held == set(plain.holdout.ids.to_pylist()) | {pairs.ids[i].as_py() for i in asked}
    qrels = parts.holdout.qrels
    assert qrels is not None
    got = {
        (parts.holdout.query_ids[q].as_py(), parts.holdout.ids[d].as_py())
        for q, d in zip(qrels.query.tolist(), qrels.document.tolist(), strict=True)
    }
    assert got == {(f"q{i}", pairs.ids[i].as_py()) for i in asked}
    assert not np.isin(id_keys(parts.holdout.ids), parts.holdout.fit_keys).any()


def test_a_query_that_equals_a_held_out_one_is_not_fitted_on() -> None:
    queries = make_queries(20)
    queries.vectors[:] = queries.vectors[0]
    parts = run(make_pairs(100), queries)
    assert len(parts.queries) == 0


def test_labels_of_something_else_are_an_error_and_some_are_a_warning(tmp_path: Path) -> None:
    pairs, queries = make_pairs(100), make_queries(10)
    with pytest.raises(DataError, match=r"none of its 2 labels .*queries like x, y, documents like a, b"):
        run(pairs, queries, labels_of(tmp_path, "x a 1\ny b 1\n"))
    known = f"q0 {pairs.ids[0].as_py()} 1\n"
    parts = run(pairs, queries, labels_of(tmp_path, known + "x a 1\ny b 1\n"))
    assert any("2 of 3 labels name other" in w for w in parts.warnings)


def test_too_little_is_an_error_with_numbers() -> None:
    with pytest.raises(DataError, match="11 pairs leave 9 to fit and 2 to measure"):
        run(make_pairs(11))
    with pytest.raises(DataError, match=r"50 pairs leave 50 to fit and 0 to measure"):
        run(make_pairs(50, marked=np.zeros(50, bool)))
    same = make_pairs(50)
    same.target[:] = 1
    with pytest.raises(DataError, match=r"leave 0 to fit and 10 to measure .40 more equal"):
        run(same)
    assert any("only 20 documents are held out" in w for w in run(make_pairs(100)).warnings)
    assert run(make_pairs(250)).warnings == ()
