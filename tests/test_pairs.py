from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vecferry.errors import BadRowsError, DataError, IncompatibleError, UsageError
from vecferry.pairs import BadRows, join, read_queries, with_roles
from vecferry.store import open_reader

RNG = np.random.default_rng(0)
OLD, NEW = RNG.standard_normal((200, 6)), RNG.standard_normal((200, 4))
IDS = RNG.permutation(10_000)[:200]
PART = RNG.permutation(200)[:70]  # rows of the index that were encoded with the new model, in another order


def stores(rows: Any, kind: pa.DataType | None = None, **faults: Any) -> tuple[Any, Any]:
    """Make an index of 200 rows and a target of 70 of them; `faults` replace arrays."""
    kind = kind or pa.int64()
    ids = pa.array([f"d{i}" if pa.types.is_string(kind) else int(i) for i in IDS], kind)
    old = faults.get("old", OLD)
    new = faults.get("new", NEW[PART])
    source = rows(faults.get("ids", ids), old, uri="SRC")
    target = rows(faults.get("target_ids", ids.take(pa.array(PART))), new, uri="TGT")
    return source, target


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_join_pairs_what_a_dictionary_pairs(rows: Any, kind: pa.DataType) -> None:
    source, target = stores(rows, kind)
    pairs = join(source, target, BadRows())
    old = dict(zip(source.rows.ids.to_pylist(), OLD.astype(np.float32), strict=True))
    assert pairs.ids.type == kind
    assert pairs.ids.to_pylist() == target.rows.ids.to_pylist()
    np.testing.assert_array_equal(pairs.source, [old[i] for i in pairs.ids.to_pylist()])
    np.testing.assert_array_equal(pairs.target, NEW[PART].astype(np.float32))
    assert pairs.marked is None


def test_integer_widths_may_differ_and_the_sources_is_kept(rows: Any) -> None:
    source, target = stores(rows, ids=pa.array(IDS, pa.uint64()), target_ids=pa.array(IDS[PART], pa.int32()))
    pairs = join(source, target, BadRows())
    assert pairs.ids.type == pa.uint64()
    assert pairs.ids.to_pylist() == IDS[PART].tolist()


def spoil(rows: Any, fault: str) -> tuple[Any, Any, list[int], str]:
    """Return stores with a fault, the ids that it names, and the store that it is in."""
    ids, target_ids, old, new = IDS.copy(), IDS[PART].copy(), OLD.copy(), NEW[PART].copy()
    bad = [int(target_ids[i]) for i in (3, 11)]
    where = "SRC"
    match fault:
        case "missing":
            bad = [10_001, 10_002]
            target_ids[[3, 11]] = bad
        case "twice in the source":
            ids[np.flatnonzero(~np.isin(IDS, IDS[PART]))[:2]] = bad
        case "twice in the target":
            bad, where = [int(target_ids[3])] * 2, "TGT"
            target_ids[11] = target_ids[3]
        case "nan in the source":
            old[np.isin(IDS, bad), 2] = [np.nan, np.inf]
        case "zero in the source":
            old[np.isin(IDS, bad)] = 0
        case "nan in the target":
            where, new[[3, 11], 0] = "TGT", np.nan
        case "zero in the target":
            where, new[[3, 11]] = "TGT", -0.0
    source, target = stores(rows, old=old, new=new, ids=pa.array(ids), target_ids=pa.array(target_ids))
    return source, target, bad, where


FAULTS = [
    "missing",
    "twice in the source",
    "twice in the target",
    "nan in the source",
    "zero in the source",
    "nan in the target",
    "zero in the target",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_rows_fail_by_name(rows: Any, fault: str) -> None:
    source, target, bad, where = spoil(rows, fault)
    with pytest.raises(BadRowsError, match=f"^{where}: 2 ") as caught:
        join(source, target, BadRows())
    assert sorted(caught.value.ids) == sorted(bad)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_rows_are_left_out_and_counted(rows: Any, fault: str) -> None:
    source, target, bad, _ = spoil(rows, fault)
    policy = BadRows(skip=True)
    pairs = join(source, target, policy)
    stay = [i for i in target.rows.ids.to_pylist() if i not in bad]
    assert pairs.ids.to_pylist() == stay
    assert len(stay) == 68
    assert list(policy.skipped.values()) == [2]
    at = {int(i): k for k, i in enumerate(IDS[PART])}
    np.testing.assert_array_equal(pairs.target, NEW[PART].astype(np.float32)[[at[i] for i in stay]])
    np.testing.assert_array_equal(
        pairs.source, OLD.astype(np.float32)[[int(np.flatnonzero(i == IDS)[0]) for i in stay]]
    )


@pytest.mark.case("q2")
def test_mixed_dimensions_and_nulls_of_a_parquet_store(rows: Any, tmp_path: Path) -> None:
    """Field case q2: a short, a long and a missing row, by name, and no other row shifted."""
    source, _ = stores(rows)
    column: list[Any] = NEW[PART].tolist()
    column[2], column[40], column[41] = column[2][:3], [*column[40], 1.0], None
    path = tmp_path / "new.parquet"
    pq.write_table(pa.table({"id": IDS[PART], "vector": column}), path)
    bad = IDS[PART][[2, 40, 41]].tolist()
    with open_reader(f"parquet:{path}") as target:
        with pytest.raises(BadRowsError, match="3 vectors are null, of another length") as caught:
            join(source, target, BadRows())
        assert caught.value.ids == bad
        pairs = join(source, target, BadRows(skip=True))
    assert pairs.ids.to_pylist() == [i for i in IDS[PART].tolist() if i not in bad]
    stay = ~np.isin(IDS[PART], bad)
    np.testing.assert_array_equal(pairs.target, NEW[PART].astype(np.float32)[stay])
    np.testing.assert_array_equal(pairs.source, OLD.astype(np.float32)[PART][stay])


def test_length_beyond_float32_is_a_fault(rows: Any) -> None:
    new = NEW[PART].copy()
    new[5] = 1e30  # finite, but its squares are not
    with pytest.raises(BadRowsError, match="too large"):
        join(*stores(rows, new=new), BadRows())


def test_nothing_left(rows: Any) -> None:
    with pytest.raises(DataError, match="no usable pair"):
        join(*stores(rows, new=np.zeros((70, 4))), BadRows(skip=True))


def test_ids_of_two_kinds_are_refused_with_both_types(rows: Any) -> None:
    source, target = stores(rows, target_ids=pa.array([str(i) for i in IDS[PART]]))
    with pytest.raises(UsageError, match="SRC are int64, those of TGT are string"):
        join(source, target, BadRows())


@pytest.mark.case("27")
def test_no_id_in_common_shows_ids_of_both(rows: Any) -> None:
    source, target = stores(rows, target_ids=pa.array(IDS[PART] + 20_000))
    with pytest.raises(DataError, match=f"{IDS[PART][0] + 20_000}, .*{IDS[0]}, "):
        join(source, target, BadRows(skip=True))


@pytest.mark.case("27")
def test_row_numbers_join_only_what_they_must_mean(rows: Any) -> None:
    numbered, whole = rows(None, OLD, uri="SRC"), rows(None, NEW, uri="TGT")
    assert join(numbered, whole, BadRows()).ids.to_pylist() == list(range(200))
    picked = join(numbered, rows(pa.array(PART), NEW[PART]), BadRows())
    np.testing.assert_array_equal(picked.source, OLD.astype(np.float32)[PART])
    with pytest.raises(UsageError, match="TGT numbers its 70 rows and SRC numbers 200"):
        join(numbered, rows(None, NEW[PART], uri="TGT"), BadRows())
    with pytest.raises(UsageError, match="SRC stores ids"):
        join(rows(IDS, OLD, uri="SRC"), whole, BadRows())


def test_a_parquet_store_without_known_ids_is_asked_which_of_its_columns_holds_them(rows: Any, tmp_path: Path) -> None:
    columns = {"key": pa.array(IDS[PART]), "name": [f"d{i}" for i in PART], "emb": list(NEW[PART].astype(np.float32))}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    address = f"parquet:{tmp_path / 'x.parquet'}"
    cure = re.escape(f"of its columns key, name name the one with the ids, as in {address}?id=COLUMN")
    with open_reader(address) as numbered:
        with pytest.raises(UsageError, match=cure):
            join(rows(IDS, OLD), numbered, BadRows())
        with pytest.raises(UsageError, match=f"are row numbers, those of TGT are string: {cure}"):
            join(numbered, rows([str(i) for i in IDS], OLD, uri="TGT"), BadRows())
        with pytest.raises(DataError, match=f"only numbers its rows: {cure}"):
            join(numbered, rows(IDS + 20_000, OLD), BadRows())
    with open_reader(f"{address}?id=key") as named:
        assert join(rows(IDS, OLD), named, BadRows()).ids.to_pylist() == IDS[PART].tolist()
    pq.write_table(pa.table({"emb": columns["emb"]}), tmp_path / "y.parquet")
    with open_reader(str(tmp_path / "y.parquet")) as bare, pytest.raises(UsageError, match="add a column of ids"):
        join(rows(IDS, OLD), bare, BadRows())


def test_the_same_vectors_on_both_sides_are_refused(rows: Any) -> None:
    with pytest.raises(IncompatibleError, match="70 of 70 vectors are the same"):
        join(*stores(rows, new=OLD[PART]), BadRows())


def roles(values: list[str | None]) -> pa.Table:
    return pa.table({"text": ["x"] * len(values), "role": pa.array(values, pa.string())})


def test_role_column_marks_the_holdout(rows: Any) -> None:
    source, _ = stores(rows)
    marks = ["holdout" if i % 4 == 0 else "fit" for i in range(70)]
    pairs = join(source, rows(IDS[PART], NEW[PART], roles(marks)), BadRows())
    assert pairs.marked is not None
    assert pairs.marked.tolist() == [m == "holdout" for m in marks]
    other = join(source, rows(IDS[PART], NEW[PART], roles(["author"] * 70)), BadRows())
    assert other.marked is None
    with pytest.raises(DataError, match="TGT: all 70 rows have the role 'fit'"):
        join(source, rows(IDS[PART], NEW[PART], roles(["fit"] * 70), uri="TGT"), BadRows())
    with pytest.raises(DataError, match="'role' holds author, test beside"):
        join(source, rows(IDS[PART], NEW[PART], roles(["holdout", "author", "test"] + ["fit"] * 67)), BadRows())


def test_sample_file_marks_the_holdout(rows: Any, tmp_path: Path) -> None:
    pairs = join(*stores(rows), BadRows())
    held = set(IDS[PART][:20].tolist())
    path = tmp_path / "ids.parquet"
    marks = pa.array(["holdout" if i in held else "fit" for i in IDS.tolist()])
    pq.write_table(pa.table({"id": IDS, "role": marks}), path)
    marked = with_roles(pairs, path).marked
    assert marked is not None
    assert {i for i, m in zip(pairs.ids.to_pylist(), marked, strict=True) if m} == held
    pq.write_table(pa.table({"id": IDS[PART][:60], "role": marks[:60]}), path)
    with pytest.raises(BadRowsError, match="10 pairs are not in this sample"):
        with_roles(pairs, path)
    pq.write_table(pa.table({"id": IDS, "role": ["fit"] * 200}), path)
    with pytest.raises(DataError, match="all 200 rows have the role 'fit'"):
        with_roles(pairs, path)
    pq.write_table(pa.table({"id": IDS}), path)
    with pytest.raises(DataError, match="not a sample"):
        with_roles(pairs, path)


def test_queries_of_both_models_are_joined_as_strings(rows: Any) -> None:
    new = rows([7, 5, 9], NEW[:3], uri="QN")
    old = rows(["9", "8", "7", "5"], OLD[:4], uri="QO")
    found = read_queries(new, old, (6, 4), BadRows())
    assert found.ids.to_pylist() == ["7", "5", "9"]
    np.testing.assert_array_equal(found.vectors, NEW[:3].astype(np.float32))
    np.testing.assert_array_equal(found.source, OLD[[2, 3, 0]].astype(np.float32))
    short = rows(["9", "5"], OLD[:2], uri="QO")
    with pytest.raises(BadRowsError, match="QO: 1 queries of QN are not in it: 7"):
        read_queries(new, short, (6, 4), BadRows())
    assert read_queries(new, short, (6, 4), BadRows(skip=True)).ids.to_pylist() == ["5", "9"]
    assert read_queries(new, None, (6, 4), BadRows()).source is None


def test_queries_of_another_dimension_or_twice_are_refused(rows: Any) -> None:
    with pytest.raises(IncompatibleError, match="QN has 6 dimensions, the target vectors have 4"):
        read_queries(rows([1], OLD[:1], uri="QN"), None, (6, 4), BadRows())
    with pytest.raises(IncompatibleError, match="QO has 4 dimensions, the source vectors have 6"):
        read_queries(rows([1], NEW[:1]), rows([1], NEW[:1], uri="QO"), (6, 4), BadRows())
    with pytest.raises(BadRowsError, match="share their id"):
        read_queries(rows([1, 1, 2], NEW[:3]), None, (6, 4), BadRows())
    with pytest.raises(UsageError, match="numbers its 3 rows"):
        read_queries(rows(None, NEW[:3]), rows(None, OLD[:4]), (6, 4), BadRows())


def test_a_target_without_rows_is_called_that(rows: Any) -> None:
    source, _ = stores(rows)
    _, empty = stores(rows, target_ids=pa.array([], pa.int64()), new=NEW[:0])
    with pytest.raises(DataError, match=r"no usable pair is left between .*TGT: there are no rows"):
        join(source, empty, BadRows())
