"""The hold-out file: every kind of id, with and without its optional parts, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vecferry.batch import id_keys
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.holdout import Holdout, Qrels, holdout_of
from vecferry.linear import LinearMap

IDS = {
    "int64": pa.array([5, -3, 2**62], pa.int64()),
    "int32": pa.array([5, -3, 0], pa.int32()),
    "uint64": pa.array([5, 2**64 - 1, 0], pa.uint64()),
    "string": pa.array(["b", "", "é"], pa.string()),
    "large_string": pa.array(["b", "", "é"], pa.large_string()),
    "binary": pa.array([b"b", b"", b"\xff"], pa.binary()),
}


def some_holdout(ids: Any = IDS["int64"], **parts: Any) -> Holdout:
    rng = np.random.default_rng(0)
    source, target = (rng.standard_normal((len(ids), d), dtype=np.float32) for d in (4, 6))
    return Holdout(ids, source, target, **parts)


def questions(source: bool) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "query_ids": pa.array(["q1", "q2"]),
        "queries": rng.standard_normal((2, 6), dtype=np.float32),
        "source_queries": rng.standard_normal((2, 4), dtype=np.float32) if source else None,
    }


LABELS = Qrels(np.array([1, 1, 0]), np.array([2, 0, 2]), np.array([2, 1, 1]))
PARTS: dict[str, dict[str, Any]] = {
    "documents": {},
    "queries": questions(False),
    "source queries": questions(True),
    "labels": questions(True) | {"qrels": LABELS},
    "fit keys": {"fit_keys": np.array([0, 2**64 - 1], np.uint64), "fingerprint": {"uri": "a b", "count": 3}},
}


@pytest.mark.parametrize("ids", list(IDS))
@pytest.mark.parametrize("parts", list(PARTS))
def test_it_comes_back_as_it_was(tmp_path: Path, ids: str, parts: str) -> None:
    held = some_holdout(IDS[ids], **PARTS[parts])
    held.save(tmp_path / "holdout.parquet")
    back = Holdout.load(tmp_path / "holdout.parquet")
    assert back.ids.type == IDS[ids].type
    assert back.ids.to_pylist() == IDS[ids].to_pylist()
    assert back.query_ids.to_pylist() == held.query_ids.to_pylist()
    for name in ("source", "target", "queries", "source_queries", "fit_keys"):
        left, right = getattr(held, name), getattr(back, name)
        assert (left is None) == (right is None), name
        assert left is None or (left.tobytes() == right.tobytes() and left.shape == right.shape), name
    assert (held.qrels is None) == (back.qrels is None)
    if back.qrels is not None:
        assert back.qrels.query.tolist() == [1, 1, 0]
        assert back.qrels.document.tolist() == [2, 0, 2]
        assert back.qrels.grade.tolist() == [2, 1, 1]
    assert back.fingerprint == held.fingerprint


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    held = some_holdout(**PARTS["labels"])
    for name in ("one", "two"):
        held.save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("fitted", [pa.array([7, 5], pa.int64()), pa.array([7, 5], pa.int32())])
def test_documents_that_were_fitted_on_are_refused(fitted: Any) -> None:
    with pytest.raises(DataError, match="1 of 3 held-out documents were fitted on"):
        some_holdout(fit_keys=id_keys(fitted))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "holdout.parquet"
    with pytest.raises(DataError, match="can't be read as a hold-out"):
        Holdout.load(path)
    some_holdout().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="can't be read as a hold-out"):
        Holdout.load(path)
    pq.write_table(pa.table({"kind": ["document"]}), path)
    with pytest.raises(DataError, match="can't be read as a hold-out"):
        Holdout.load(path)


def test_a_file_whose_rows_were_tampered_with_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "holdout.parquet"
    held = some_holdout(**PARTS["labels"])
    held.save(path)
    table = pq.read_table(path)
    pq.write_table(
        table.filter(pa.array([row["id"] != 5 or row["kind"] == "label" for row in table.to_pylist()])), path
    )
    with pytest.raises(DataError, match="can't be read as a hold-out: 5"):  # a label for a document that isn't there
        Holdout.load(path)
    pq.write_table(table.replace_schema_metadata(None), path)
    with pytest.raises(DataError, match="can't be read as a hold-out"):
        Holdout.load(path)
    key = pa.array([None] * (table.num_rows - 1) + [int(id_keys(held.ids)[0])], pa.uint64())
    kinds = pa.array([*table["kind"].to_pylist()[:-1], "fit"])
    leaky = table.set_column(0, "kind", kinds).set_column(6, "key", key)
    pq.write_table(leaky, path)
    with pytest.raises(DataError, match="1 of 3 held-out documents were fitted on"):
        Holdout.load(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0, 1e30])
@pytest.mark.parametrize("part", ["source", "target", "queries", "source_queries"])
def test_vectors_that_nothing_is_measured_with_are_refused_by_id(tmp_path: Path, part: str, bad: float) -> None:
    held = some_holdout(**PARTS["source queries"])
    getattr(held, part)[1] = bad
    held.save(tmp_path / "holdout.parquet")
    with pytest.raises(BadRowsError, match="1 held-out vectors hold NaN") as caught:
        Holdout.load(tmp_path / "holdout.parquet")
    assert caught.value.ids == (["q2"] if "queries" in part else [-3])
    assert caught.value.exit_code == 3


def test_a_map_in_memory_has_its_holdout_at_hand() -> None:
    held = some_holdout()
    assert holdout_of(LinearMap(np.ones((4, 6)), holdout=held)) is held
    with pytest.raises(UsageError, match="has no hold-out"):
        holdout_of(LinearMap(np.ones((4, 6))))
