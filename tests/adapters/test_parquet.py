"""Parquet: the suite for every way of storing vectors, and what goes wrong in real files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vecferry import store
from vecferry.batch import VectorBatch, concat
from vecferry.errors import BadRowsError, DataError, StoppedError, UsageError
from vecferry.testing import ID_TYPES, AdapterSuite, ReaderSuite, contents, cut
from vecferry_adapters import _parquet_file, _parquet_writer


def table_of(rows: VectorBatch, vectors: pa.Array, name: str = "emb", field: pa.Field | None = None) -> pa.Table:
    """Put ids first, the vectors behind the first payload column, as a user's table might have them."""
    assert rows.payload is not None
    columns = [pa.field("doc_id", rows.ids.type), *rows.payload.schema]
    arrays: list[Any] = [rows.ids, *rows.payload.columns]
    columns.insert(2, field or pa.field(name, vectors.type))
    arrays.insert(2, vectors)
    return pa.table(arrays, schema=pa.schema(columns, rows.payload.schema.metadata))


def fixed(x: np.ndarray, dtype: str = "float32") -> pa.Array:
    kind = pa.list_(pa.from_numpy_dtype(dtype), x.shape[1])
    return pa.FixedSizeListArray.from_arrays(pa.array(x.astype(dtype).reshape(-1)), type=kind)


def ragged(x: np.ndarray, dtype: str = "float32", large: bool = False) -> pa.Array:
    offsets = np.arange(0, x.size + 1, x.shape[1])
    cls, kind = (pa.LargeListArray, pa.int64()) if large else (pa.ListArray, pa.int32())
    return cls.from_arrays(pa.array(offsets, kind), pa.array(x.astype(dtype).reshape(-1)))


class ParquetSources(ReaderSuite):
    kind = "parquet"
    no_search = "Parquet has no index"


class ParquetSuite(AdapterSuite):
    kind = "parquet"
    id_types = (pa.int64(), *(k for k in ID_TYPES if k != pa.int64()))
    dtypes = ("float32", "float16")
    no_search = "Parquet has no index"

    def make(self, folder: Path, rows: VectorBatch) -> str:
        pq.write_table(table_of(rows, fixed(rows.vectors)), folder / "source.parquet", row_group_size=400)
        return f"parquet:{folder / 'source.parquet'}"

    def target(self, folder: Path) -> str:
        return f"parquet:{folder / 'target'}"


class TestFile(ParquetSuite):
    pass


class TestFolderOfDoubles(ParquetSources):
    def make(self, folder: Path, rows: VectorBatch) -> str:
        parts = folder / "parts"
        parts.mkdir()
        for i, at in enumerate(range(0, self.count, 300)):
            part = rows.take(np.arange(at, min(at + 300, self.count)))
            table = table_of(part, ragged(part.vectors, "float64"))
            pq.write_table(table, parts / f"{i:02}.parquet", row_group_size=128, use_dictionary=["class"])
        (parts / "_SUCCESS").touch()
        (parts / ".hidden.parquet").write_text("no")
        return f"parquet:{parts}"


class TestGlobOfNestedLargeLists(ParquetSources):
    def make(self, folder: Path, rows: VectorBatch) -> str:
        for i, at in enumerate(range(0, self.count, 300)):
            part = rows.take(np.arange(at, min(at + 300, self.count)))
            nested = pa.StructArray.from_arrays([ragged(part.vectors, large=True)], ["emb"])
            pq.write_table(table_of(part, nested, "a"), folder / f"{i:02}.parquet")
        return f"parquet:{folder}/*.parquet?vector=a.emb&id=doc_id"


class TestTensors(ParquetSources):
    def make(self, folder: Path, rows: VectorBatch) -> str:
        tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [self.dim]), fixed(rows.vectors))
        pq.write_table(table_of(rows, tensors), folder / "wrong-extension.csv")
        return f"parquet:{folder / 'wrong-extension.csv'}"


class TestBlobs(ParquetSources):
    def make(self, folder: Path, rows: VectorBatch) -> str:
        blobs = pa.array([v.astype("<f4").tobytes() for v in rows.vectors])
        pq.write_table(table_of(rows, blobs), folder / "source.parquet")
        return f"parquet:{folder / 'source.parquet'}?vector=emb&dtype=float32"


class TestManyParts(ParquetSuite):
    """Groups of 32 rows and parts of 96, so that 1,100 rows cross every boundary there is."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_parquet_writer, "GROUP_ROWS", 32)
        monkeypatch.setattr(_parquet_writer, "PART_GROUPS", 3)

    def test_parts_are_equal_and_a_crash_costs_less_than_one(self, tmp_path: Path) -> None:
        rows = self.rows()
        with store.open_writer(self.target(tmp_path), self.info(rows)) as writer:
            for batch in cut(rows.take(np.arange(1000)), 90):
                writer.write(batch)
            assert writer.progress == store.Progress(960, {"row": 900}, 900)
        self.write(tmp_path / "..", rows)
        files = sorted((tmp_path / ".." / "target").glob("part-*.parquet"))
        sizes = [pq.read_metadata(f).num_rows for f in files]
        assert sizes == [96] * 11 + [44]
        groups = pq.read_metadata(files[0])
        assert [groups.row_group(i).num_rows for i in range(3)] == [32] * 3


@pytest.fixture(name="rows")
def _rows() -> VectorBatch:
    return ParquetSuite().rows(40)


def column(tmp_path: Path, vectors: pa.Array, **more: Any) -> str:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": pa.array(np.arange(10, 10 + len(vectors))), "emb": vectors} | more), path)
    return str(path)


def matrix(uri: str, size: int = 3) -> np.ndarray:
    with store.open_reader(uri) as reader:
        batch = concat(reader.read(size))
    assert batch.ids.to_pylist() == list(range(10, 10 + len(batch)))
    return batch.vectors


@pytest.mark.parametrize("kind", ["list", "large_list"])
@pytest.mark.case("q2")
def test_bad_rows_are_nan_and_shift_nothing(tmp_path: Path, kind: str) -> None:
    rows = [[1.0, 2.0], None, [3.0, 4.0], [5.0], [6.0, None], [], [7.0, 8.0, 9.0], [10.0, 11.0]]
    vectors = pa.array(rows, getattr(pa, "list_" if kind == "list" else kind)(pa.float32()))
    got = matrix(column(tmp_path, vectors))
    assert np.isnan(got).any(axis=1).tolist() == [False, True, False, True, True, True, True, False]
    assert got[[0, 2, 7]].tolist() == [[1, 2], [3, 4], [10, 11]]


@pytest.mark.parametrize("element", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.case("q2")
def test_null_rows_and_elements_of_fixed_lists(tmp_path: Path, element: pa.DataType) -> None:
    vectors = pa.array([None, [1.0, 2.0], None, [3.0, None], [5.0, 6.0], None], pa.list_(element, 2))
    got = matrix(column(tmp_path, vectors))
    assert np.isnan(got).any(axis=1).tolist() == [True, False, True, True, False, True]
    assert got[[1, 4]].tolist() == [[1, 2], [5, 6]]


def test_null_structs_are_bad_rows(tmp_path: Path) -> None:
    nested = pa.array([{"v": [1.0, 2.0], "t": 1}, None, {"v": None, "t": 3}, {"v": [3.0, 4.0], "t": 4}])
    uri = column(tmp_path, nested) + "?vector=emb.v"
    got = matrix("parquet:" + uri)
    assert np.isnan(got).any(axis=1).tolist() == [False, True, True, False]
    with store.open_reader("parquet:" + uri) as reader:
        payload = concat(reader.read(3)).payload
        assert payload is not None
        assert payload.to_pylist() == [{"emb": {"t": 1}}, {"emb": None}, {"emb": {"t": 3}}, {"emb": {"t": 4}}]


@pytest.mark.case("q1")
def test_blobs_of_a_wrong_length_are_bad_rows(tmp_path: Path) -> None:
    good = np.array([1, 2], "<f8").tobytes()
    uri = column(tmp_path, pa.array([good, good[:8], None, good]))
    got = matrix(f"parquet:{uri}?vector=emb&dtype=float64")
    assert np.isnan(got).any(axis=1).tolist() == [False, True, True, False]
    assert got[3].tolist() == [1, 2]
    with pytest.raises(UsageError, match="binary"):
        store.open_reader(f"parquet:{uri}?vector=emb")
    with pytest.raises(DataError, match="binary"):
        store.open_reader(uri)
    with pytest.raises(UsageError, match="name the column"):
        store.open_reader(f"parquet:{uri}?dtype=float32")
    odd = column(tmp_path, pa.array([good[:7]]))
    with pytest.raises(DataError, match="7 bytes"):
        store.open_reader(f"parquet:{odd}?vector=emb&dtype=float32")


def test_a_double_beyond_float_is_infinite(tmp_path: Path) -> None:
    got = matrix(column(tmp_path, pa.array([[1e300, 1.0], [1.0, 2.0]])))
    assert np.isinf(got[0, 0])
    assert got[1].tolist() == [1, 2]


@pytest.mark.case("q2")
def test_sliced_columns(tmp_path: Path) -> None:
    """Arrays that are slices of longer ones, straight to the decoder: `values` of pyarrow ignores the slice."""
    from vecferry_adapters._parquet_columns import VectorColumn

    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    blobs = pa.array([v.tobytes() for v in x])
    for vectors in (fixed(x), ragged(x), ragged(x, "float64", large=True), fixed(x, "float16"), blobs):
        for piece in (vectors.slice(3, 4), vectors.slice(2).slice(1, 4)):
            held = VectorColumn("v", ("v",), "float32", 4)
            assert held.matrix(piece, 4).tolist() == x[3:7].tolist()
            assert held.measure(piece) == 4
    view = VectorColumn("v", ("v",), "float32", 4).matrix(fixed(x).slice(3, 4), 4)
    assert not view.flags.owndata  # float32 without nulls isn't copied


@pytest.mark.case("q3")
def test_several_vector_columns_are_an_error_that_lists_them(tmp_path: Path, rows: VectorBatch) -> None:
    x = fixed(rows.vectors)
    uri = column(
        tmp_path, x, **{"other": x, "a.b": fixed(rows.vectors * 2), "s": pa.StructArray.from_arrays([x], ["in"])}
    )
    with pytest.raises(UsageError, match=r"emb, other, a\.b, s\.in"):
        store.open_reader(uri)
    assert (matrix(f"parquet:{uri}?vector=a.b") == rows.vectors * 2).all()  # a dot in a name, not a struct
    assert (matrix(f"parquet:{uri}?vector=s.in") == rows.vectors).all()
    for wrong, said in (("text", "no column"), ("id", "int64")):
        with pytest.raises(UsageError, match=said):
            store.open_reader(f"parquet:{uri}?vector={wrong}")


def test_no_vector_column_is_an_error_that_lists_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"id \(int64\), emb \(string\)"):
        store.open_reader(column(tmp_path, pa.array(["a", "b"])))


def test_which_column_holds_the_ids(tmp_path: Path) -> None:
    x = fixed(np.ones((2, 2), np.float32))
    cases: list[tuple[dict[str, Any], str, list[Any]]] = [
        ({"doc_id": [5, 6], "_id": ["a", "b"]}, "", ["a", "b"]),
        ({"doc_id": [5, 6], "_id": ["a", "b"]}, "?id=doc_id", [5, 6]),
        ({"id": [0.5, 0.6], "docid": [5, 6]}, "", [5, 6]),  # floats are no ids
        ({"key": [5, 6]}, "", [0, 1]),
        ({"id": [5, 6]}, "?id=", [0, 1]),
        ({"id": [0.5, 0.6]}, "?id=", [0, 1]),
        ({"key": pa.array(["x", "y"], pa.string_view())}, "?id=key", ["x", "y"]),
        ({"key": pa.array(["x", "y"]).dictionary_encode()}, "?id=key", ["x", "y"]),
    ]
    for n, (columns, asked, expected) in enumerate(cases):
        pq.write_table(pa.table(columns | {"v": x}), tmp_path / f"{n}.parquet")
        with store.open_reader(f"parquet:{tmp_path / f'{n}.parquet'}{asked}") as reader:
            assert concat(reader.read(1)).ids.to_pylist() == expected
            assert concat(reader.read(9)).ids.equals(pa.concat_arrays(reader.ids(1)))
            assert reader.info.id_type == (
                None if expected == [0, 1] else pa.string() if "x" in expected or "a" in expected else pa.int64()
            )
    for asked in ("nothing", "v"):
        with pytest.raises(UsageError, match="ids"):
            store.open_reader(f"parquet:{tmp_path / '0.parquet'}?id={asked}")


@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal128(10), pa.bool_(), pa.date32(), pa.timestamp("s")])
@pytest.mark.parametrize("name", ["id", "doc_id"])
def test_ids_of_an_unusable_type_are_not_left_out_silently(tmp_path: Path, kind: pa.DataType, name: str) -> None:
    ids = pa.nulls(2, kind)
    pq.write_table(pa.table({name: ids, "v": fixed(np.ones((2, 2), np.float32))}), tmp_path / "x.parquet")
    with pytest.raises(UsageError, match=rf"column {name} holds .*: cast it, .*\?id=COLUMN, or .*\?id=$"):
        store.open_reader(str(tmp_path / "x.parquet"))


def test_errors_about_columns_name_those_there_are_and_an_address_that_works(tmp_path: Path) -> None:
    x = fixed(np.ones((2, 2), np.float32))
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": [0.5, 0.6], "key": [5, 6], "a": x, "b": x}), path)
    with pytest.raises(UsageError, match=r"columns a, b hold vectors") as error:
        store.open_reader(str(path))
    with_vectors = str(error.value).split()[-1].replace("NAME", "b")
    assert with_vectors == f"parquet:{path}?vector=b"
    with pytest.raises(UsageError, match=r"column id holds double.* name another of id, key, a, b, as in ") as error:
        store.open_reader(with_vectors)
    address = re.findall(r"as in (\S+),", str(error.value))[0].replace("COLUMN", "key")
    assert address == f"parquet:{path}?vector=b&id=key"
    with store.open_reader(address) as reader:
        assert concat(reader.read(9)).ids.to_pylist() == [5, 6]


def test_a_target_of_numbered_rows_may_have_a_payload_column_called_id(tmp_path: Path) -> None:
    x = fixed(np.ones((2, 2), np.float32))
    pq.write_table(pa.table({"id": [0.5, 0.6], "v": x}), tmp_path / "x.parquet")
    rewrite(f"parquet:{tmp_path / 'x.parquet'}?id=", f"parquet:{tmp_path / 't'}")
    with store.open_reader(str(tmp_path / "t")) as reader:
        batch = concat(reader.read(9))
        assert (reader.info.id_type, batch.ids.to_pylist()) == (None, [0, 1])
        assert batch.payload is not None
        assert batch.payload["id"].to_pylist() == [0.5, 0.6]


def test_views_are_read_taken_and_written_as_what_they_view(tmp_path: Path) -> None:
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    text, view = [f"text {i}" * i for i in range(5)], pa.string_view()
    kinds = {"id": view, "b": pa.binary_view(), "s": pa.struct([("u", view)]), "l": pa.list_(view)}
    kinds |= {"large": pa.large_list(view), "f": pa.list_(view, 1), "m": pa.map_(pa.string(), view)}
    values: dict[str, list[Any]] = {"id": text, "b": [t.encode() for t in text], "s": [{"u": t} for t in text]}
    values |= {name: [[t] for t in text] for name in ("l", "large", "f")} | {"m": [[("k", t)] for t in text]}
    columns = {name: pa.array(values[name], kind) for name, kind in kinds.items()}
    pq.write_table(pa.table(columns | {"v": fixed(x)}), tmp_path / "x.parquet")
    for where in ("x.parquet", "t"):
        with store.open_reader(str(tmp_path / where)) as reader:
            assert reader.info.id_type == pa.string()
            taken = reader.take(pa.array([text[3], text[1]]))
            assert taken.vectors.tolist() == x[[3, 1]].tolist()
            assert taken.payload is not None
            assert taken.payload.to_pydict() == {n: [v[3], v[1]] for n, v in values.items() if n != "id"}
        if where == "x.parquet":
            rewrite(str(tmp_path / "x.parquet"), f"parquet:{tmp_path / 't'}")
    assert pq.read_table(tmp_path / "t" / "part-00000.parquet")["s"].to_pylist() == values["s"]


@pytest.mark.parametrize(
    ("lengths", "dim"), [([1, 2, 2], 2), ([3, 2, 2, 2], 2), ([3, 2], 3), ([0, 3, 2, 3], 3), ([2] * 100 + [3] * 200, 2)]
)
def test_the_dimension_is_that_of_most_of_the_first_rows(tmp_path: Path, lengths: list[int], dim: int) -> None:
    got = matrix(column(tmp_path, pa.array([[1.0] * n for n in lengths])), 1000)
    assert got.shape[1] == dim
    assert np.isnan(got).any(axis=1).tolist() == [n != dim for n in lengths]


def test_rows_without_an_id_are_named(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"id": [1, None, 2, None], "v": fixed(np.ones((4, 2), np.float32))}), tmp_path / "x.parquet"
    )
    with store.open_reader(str(tmp_path / "x.parquet")) as reader:
        for stream in (reader.read(3), reader.ids(3)):
            with pytest.raises(BadRowsError) as caught:
                list(stream)
            assert caught.value.ids == [1]


def test_duplicate_ids_keep_their_places(tmp_path: Path) -> None:
    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    pq.write_table(pa.table({"id": [1, 1, 2], "v": fixed(x)}), tmp_path / "x.parquet")
    with store.open_reader(str(tmp_path / "x.parquet")) as reader:
        batch = concat(reader.read(2))
        assert batch.ids.to_pylist() == [1, 1, 2]
        assert batch.vectors.tolist() == x.tolist()
        assert reader.take(pa.array([2, 1])).vectors.tolist() == [[5, 6], [1, 2]]


@pytest.mark.case("q4")
def test_damaged_files_are_refused(tmp_path: Path, rows: VectorBatch) -> None:
    path = Path(column(tmp_path, fixed(rows.vectors)))
    whole = path.read_bytes()
    for damaged, said in (
        (whole[:-20], "cut short"),
        (whole + b"junk", "cut short or has something behind"),
        (whole[:-100] + b"\xff" * 92 + whole[-8:], "damaged"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=said):
            store.open_reader(str(path))
    middle = len(whole) // 4
    path.write_bytes(whole[:middle] + b"\xff" * 64 + whole[middle + 64 :])
    with pytest.raises(DataError), store.open_reader(str(path)) as reader:  # noqa: PT012
        if np.isnan(concat(reader.read(100)).vectors).any():  # a page without checksum: the damage is in the values
            raise DataError("bad rows")
    path.write_bytes(b"id,vector\n")
    with pytest.raises(DataError, match="not a store"):
        store.open_reader(str(path))


def test_of_a_reason_of_many_lines_the_first_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"incomplete: no such page$"),
        _parquet_file.reading(Path(column(tmp_path, fixed(np.ones((2, 2), np.float32))))),
    ):
        raise pa.ArrowInvalid("no such page\nIn page.cc, line 7, code: read()\n")


def test_files_of_one_store_must_agree(tmp_path: Path) -> None:
    x = np.ones((2, 2), np.float32)
    pq.write_table(pa.table({"id": [1, 2], "v": fixed(x)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [3, 4], "v": fixed(np.ones((2, 3), np.float32))}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet.*\[3\].*a\.parquet.*\[2\]"):
        store.open_reader(str(tmp_path))
    pq.write_table(pa.table({"id": [3, 4], "v": fixed(x), "year": [1, 2]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"3 columns.*2"):
        store.open_reader(str(tmp_path))


def test_a_list_without_rows_has_no_dimension(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dimension"):
        store.open_reader(column(tmp_path, pa.array([], pa.list_(pa.float32()))))


# Writing


def rewrite(source: str, target: str, **changes: Any) -> None:
    """Copy a store as a migration would, the description going from reader to writer."""
    with store.open_reader(source) as reader:
        info = dataclasses.replace(reader.info, dtype="float32", provenance={"plan": "p"}, **changes)
        with store.open_writer(target, info) as writer:
            for batch in reader.read(7):
                writer.write(batch if info.payload is not None else dataclasses.replace(batch, payload=None))
            writer.commit()


def test_columns_keep_their_names_places_and_metadata(tmp_path: Path, rows: VectorBatch) -> None:
    table = table_of(rows, fixed(rows.vectors, "float64"))
    pq.write_table(table, tmp_path / "source.parquet")
    rewrite(str(tmp_path / "source.parquet"), str(tmp_path / "target"))
    got = pq.read_table(tmp_path / "target" / "part-00000.parquet")
    assert got.column_names == table.column_names
    assert got.schema.field("emb").type == pa.list_(pa.float32(), 8)
    assert got.schema.metadata == table.schema.metadata
    for name in set(table.column_names) - {"emb"}:
        assert got.schema.field(name).equals(table.schema.field(name), check_metadata=True)
        assert got[name].to_pylist() == table[name].to_pylist()
    rewrite(str(tmp_path / "source.parquet"), f"parquet:{tmp_path / 'renamed'}?vector=v2&id=key")
    assert pq.read_table(tmp_path / "renamed" / "part-00000.parquet").column_names[:3] == ["key", "text", "v2"]
    rewrite(str(tmp_path / "source.parquet"), str(tmp_path / "bare"), payload=None)
    assert pq.read_table(tmp_path / "bare" / "part-00000.parquet").column_names == ["doc_id", "emb"]


def test_lists_keep_what_they_call_their_elements(tmp_path: Path) -> None:
    """Files of older tools say `item` where the Parquet standard says `element`."""
    tags = pa.array([["a"], None], pa.list_(pa.field("item", pa.string(), nullable=False)))
    path = Path(column(tmp_path, fixed(np.ones((2, 2), np.float32)), tags=tags))
    pq.write_table(pq.read_table(path).set_column(2, "tags", tags), path, use_compliant_nested_type=False)
    rewrite(f"parquet:{path}", f"parquet:{tmp_path / 'target'}")
    got = pq.read_schema(tmp_path / "target" / "part-00000.parquet")
    assert got.field("tags").equals(pq.read_schema(path).field("tags"), check_metadata=True)
    assert got.field("tags").type.value_field.name == "item"


def test_metadata_survives_without_payload_columns(tmp_path: Path) -> None:
    table = pa.table({"emb": fixed(np.ones((2, 2), np.float32)), "key": [1, 2]}).replace_schema_metadata(
        {"made": "here"}
    )
    pq.write_table(table, tmp_path / "source.parquet")
    table = pq.read_table(tmp_path / "source.parquet")  # where Parquet has named the list's elements
    rewrite(f"parquet:{tmp_path / 'source.parquet'}?id=key", str(tmp_path / "target"))
    got = pq.read_table(tmp_path / "target" / "part-00000.parquet")
    assert got.equals(table, check_metadata=True)


def test_two_columns_of_one_name_are_refused(tmp_path: Path, rows: VectorBatch) -> None:
    suite = ParquetSuite()
    with pytest.raises(UsageError, match="named text"):
        store.open_writer(f"parquet:{tmp_path / 'x'}?vector=text", suite.info(rows))
    assert contents(tmp_path) == {}


def test_categories_are_the_same_bytes_however_they_came(tmp_path: Path) -> None:
    """The same values with another dictionary for every batch, and unused words in it."""
    words = np.array(["x", "y", "z"])[np.random.default_rng(0).integers(0, 3, 60)].tolist()
    kind = pa.dictionary(pa.int32(), pa.string())
    x = np.random.default_rng(1).standard_normal((60, 8)).astype(np.float32)
    info = ParquetSuite().info(
        VectorBatch(pa.array(np.arange(60)), x, pa.table({"w": pa.array(words).dictionary_encode()}))
    )
    for name, size, known in (("a", 60, ["x", "y", "z"]), ("b", 7, ["z", "unused", "y", "x"])):
        with store.open_writer(str(tmp_path / name), info) as writer:
            for at in range(0, 60, size):
                part = words[at : at + size]
                codes = pa.array([known.index(w) for w in part], pa.int32())
                coded = pa.DictionaryArray.from_arrays(codes, pa.array(known)).cast(kind)
                ids = pa.array(np.arange(at, at + len(part)))
                writer.write(VectorBatch(ids, x[at : at + size], pa.table({"w": coded}), at))
            writer.commit()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    got = pq.read_table(tmp_path / "a" / "part-00000.parquet")["w"]
    assert got.type == kind
    assert got.to_pylist() == words


def test_float16_that_would_overflow_is_refused(tmp_path: Path, rows: VectorBatch) -> None:
    rows.vectors[:, 0] = 65504  # the largest float16
    rows.vectors[7, 3] = 1e6
    with (
        store.open_writer(str(tmp_path / "x"), ParquetSuite().info(rows, dtype="float16")) as writer,
        pytest.raises(BadRowsError) as caught,
    ):
        writer.write(rows)
    assert caught.value.ids == [rows.ids[7].as_py()]


def test_row_numbers_that_shifted_are_refused(tmp_path: Path, rows: VectorBatch) -> None:
    numbered = dataclasses.replace(rows, ids=pa.array(np.arange(len(rows))))
    with store.open_writer(str(tmp_path / "x"), ParquetSuite().info(rows, id_type=None)) as writer:
        writer.write(numbered.take(np.arange(5)))
        with pytest.raises(UsageError, match="numbered 5"):
            writer.write(numbered.take(np.arange(6, 9)))


def test_a_missing_part_is_noticed(tmp_path: Path, rows: VectorBatch) -> None:
    ParquetSuite().write(tmp_path, rows)
    part = tmp_path / "target" / "part-00000.parquet"
    with store.open_reader(str(part)) as reader:  # the manifest beside the file counts for it too
        assert reader.info.space == "model-b"
    part.rename(part.with_name("part-00001.parquet"))
    pq.write_table(pq.read_table(part.with_name("part-00001.parquet")).slice(0, 5), part)
    with pytest.raises(DataError, match=r"45 rows.*says 40"):
        store.open_reader(str(tmp_path / "target"))


def test_the_manifest_says_what_the_parts_are(tmp_path: Path, rows: VectorBatch) -> None:
    ParquetSuite().write(tmp_path, rows)
    manifest = json.loads((tmp_path / "target" / "_vecferry.json").read_text())
    assert (manifest["format"], manifest["count"], manifest["parts"], manifest["dim"]) == (1, 40, [40], 8)
    assert (manifest["vector"], manifest["id"], manifest["metric"], manifest["space"]) == (
        "vector",
        "id",
        "l2",
        "model-b",
    )
    assert manifest["provenance"] == {"plan": "plan-1", "models": ["model-a", "model-b"], "map": "0123"}


def test_a_full_disk_stops_resumably(tmp_path: Path, rows: VectorBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parquet_writer, "GROUP_ROWS", 16)
    monkeypatch.setattr(_parquet_writer, "PART_GROUPS", 1)
    suite = ParquetSuite()
    (tmp_path / "whole").mkdir()
    suite.write(tmp_path / "whole", rows)
    target = str(tmp_path / "target")
    with store.open_writer(target, suite.info(rows)) as writer:
        writer.write(next(cut(rows, 20)))
        (tmp_path / ".target.vecferry" / "new" / "part-00001.parquet.tmp").symlink_to("/dev/full")
        with pytest.raises(StoppedError, match=r"full \([0-9,]+ bytes are free\); 16 rows are staged"):
            writer.write(next(cut(rows, 20, start=20)))
    with store.open_writer(target, suite.info(rows), resume=True) as writer:
        assert writer.progress.rows == 16
        for batch in cut(rows, 20, start=16):
            writer.write(batch)
        writer.commit()
    assert contents(tmp_path / "target") == contents(tmp_path / "whole" / "target")


STREAM = """
import sys, pathlib
import vecferry.store as store, dataclasses
with store.open_reader(sys.argv[1]) as reader:
    info = dataclasses.replace(reader.info, provenance={"plan": "p"})
    with store.open_writer(sys.argv[2], info) as writer:
        for batch in reader.read(4096):
            writer.write(batch)
        writer.commit()
status = pathlib.Path("/proc/self/status").read_text()  # getrusage would count what the parent used
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    """Few and many rows in one row group each, which pyarrow would read whole by itself."""
    sizes, peaks = (200_000, 800_000), []
    x = np.random.default_rng(0).standard_normal((max(sizes), 64)).astype(np.float32)
    text = pa.array([f"document {i} " * 8 for i in range(max(sizes))])
    for n in sizes:
        table = pa.table({"id": np.arange(n), "text": text.slice(0, n), "v": fixed(x[:n])})
        pq.write_table(table, tmp_path / f"{n}.parquet", row_group_size=n, use_dictionary=False)
        run = [sys.executable, "-c", STREAM, f"parquet:{tmp_path}/{n}.parquet", f"parquet:{tmp_path}/{n}"]
        # the system's allocator gives freed pages back, so that the peak is what was in use
        allocator = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
        done = subprocess.run(run, check=True, capture_output=True, text=True, env=allocator)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 16 * (sizes[1] - sizes[0]) + 16e6  # 220 MB are read; 16 MB: two threads' buffers
