"""Whatever rows there are go in and come out: through `migrate`, with a map that changes nothing, into every store."""

from __future__ import annotations

import datetime as dt
import re
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vecferry
from vecferry.batch import VectorBatch, concat
from vecferry.errors import DataError, UnsupportedError, UsageError
from vecferry.linear import Card, LinearMap, Side
from vecferry_adapters import _faiss_writer, _numpy_writer, _parquet_writer

INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
TEXTS = (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))
BLOBS = (pa.binary(), pa.large_binary(), pa.binary(3))
ELEMENTS = (pa.float16(), pa.float32(), pa.float64())
LISTS = ("list_", "large_list", "fixed")

moments = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(dt.UTC))
decimals = st.decimals(-(10**20), 10**20, places=4)
words = st.text(max_size=5)
PAYLOAD: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), words),
    (pa.binary(), st.binary(max_size=4)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "Asia/Kathmandu"), moments),
    (
        pa.timestamp("ms"),
        st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1)).map(lambda t: t.replace(microsecond=0)),
    ),
    (pa.decimal128(38, 4), decimals.map(lambda d: Decimal(d).quantize(Decimal("0.0001")))),
    (pa.dictionary(pa.int8(), pa.string()), words),
    (pa.list_(pa.field("element", pa.int32())), st.lists(st.none() | st.integers(-9, 9), max_size=3)),
    (
        pa.struct([("a", pa.list_(pa.field("element", pa.string()))), ("b", pa.struct([("c", pa.float32())]))]),
        st.fixed_dictionaries(
            {
                "a": st.none() | st.lists(words, max_size=2),
                "b": st.fixed_dictionaries({"c": st.floats(width=32, allow_nan=False)}),
            }
        ),
    ),
    (
        pa.map_(pa.string(), pa.int32()),
        st.dictionaries(words, st.integers(0, 5), max_size=2).map(lambda d: list(d.items())),
    ),
]


@pytest.fixture(autouse=True, scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a handful of rows cross the boundaries of groups, parts and checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("rows")))  # pytest deletes what is in there
        patch.setattr(_parquet_writer, "GROUP_ROWS", 4)
        patch.setattr(_parquet_writer, "PART_GROUPS", 2)
        patch.setattr(_numpy_writer, "SYNC_BYTES", 64)
        patch.setattr(_faiss_writer, "CHECKPOINT", 64)
        yield


def ids_of(kind: pa.DataType, n: int) -> st.SearchStrategy[pa.Array]:
    """Draw distinct ids of a type, over all of its range."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_integer(value):
        low = 0 if pa.types.is_unsigned_integer(value) else -(2 ** (value.bit_width - 1))
        one: Any = st.integers(low, low + 2**value.bit_width - 1)
    elif value in (pa.string(), pa.large_string()):
        one = st.text(max_size=8)
    else:
        one = st.binary(min_size=3, max_size=3) if pa.types.is_fixed_size_binary(value) else st.binary(max_size=8)
    return st.lists(one, min_size=n, max_size=n, unique=True).map(lambda v: pa.array(v, kind))


@st.composite
def rows(draw: st.DrawFn, kinds: tuple[pa.DataType, ...], payload: bool) -> tuple[pa.Table, np.ndarray, int]:
    """Draw a table with ids, vectors and payload; return also its vectors, and a size of batches."""
    n, dim = draw(st.sampled_from([1, 1, 2, 5, 11])), draw(st.sampled_from([1, 2, 3, 7]))
    element, shape = draw(st.sampled_from(ELEMENTS)), draw(st.sampled_from(LISTS))
    # quarters of integers below 2**9 have 11 bits, so that no way of multiplying by one can change them
    flat = draw(st.lists(st.integers(-511, 511), min_size=n * dim, max_size=n * dim))
    x = np.array(flat, np.float32).reshape(n, dim) / 4
    x[~x.any(axis=1), 0] = 0.25  # a row of zeros is a bad one
    lists = pa.list_(element, dim) if shape == "fixed" else getattr(pa, shape)(element)
    values = np.asarray(x, element.to_pandas_dtype())
    columns = {"id": draw(ids_of(draw(st.sampled_from(kinds)), n)), "emb": pa.array([list(v) for v in values], lists)}
    for number, (kind, some) in enumerate(draw(st.lists(st.sampled_from(PAYLOAD), max_size=4)) if payload else ()):
        column = draw(st.lists(st.none() | some, min_size=n, max_size=n))
        columns[f"p{number}"] = (
            pa.array(column, kind.value_type).dictionary_encode().cast(kind)
            if pa.types.is_dictionary(kind)
            else pa.array(column, kind)
        )
    return pa.table(columns), x, draw(st.integers(1, n + 2))


def through(table: pa.Table, target: str, size: int, **options: Any) -> tuple[VectorBatch, Path]:
    """Migrate a table by an identity map; return the rows that came out, and the folder, which lives on."""
    folder = Path(tempfile.mkdtemp())
    pq.write_table(table, folder / "source.parquet", row_group_size=3)
    dim = len(table["emb"][0].as_py())
    card = Card(Side(dim, "m"), Side(dim, "m"), "none", metric="l2")
    vecferry.migrate(
        f"parquet:{folder / 'source.parquet'}?vector=emb&id=id",
        folder / target,
        LinearMap(np.eye(dim), card=card),
        batch_size=size,
        **options,
    )
    with vecferry.store.open_reader(str(folder / target)) as reader:
        got = concat(reader.read(size))
        assert reader.take(got.ids).vectors.tolist() == got.vectors.tolist()
        return got, folder


def assert_ids(got: pa.Array, table: pa.Table) -> None:
    want = table["id"].combine_chunks()
    kind = want.type.value_type if pa.types.is_dictionary(want.type) else want.type
    assert got.type == kind
    assert got.to_pylist() == want.to_pylist()


@settings(max_examples=40)
@given(rows((*INTEGERS, *TEXTS, *BLOBS), payload=True))
def test_parquet_gives_back_every_row(drawn: tuple[pa.Table, np.ndarray, int]) -> None:
    table, x, size = drawn
    got, _ = through(table, "new.parquet", size)
    assert_ids(got.ids, table)
    assert got.vectors.tolist() == x.tolist()
    payload = table.drop_columns(["id", "emb"])
    assert (got.payload.to_pylist() if got.payload is not None else []) == (
        payload.to_pylist() if payload.num_columns else []
    )
    assert (got.payload.schema if got.payload is not None else pa.schema([])).types == payload.schema.types


@settings(max_examples=20)
@given(rows(INTEGERS, payload=False))
def test_npy_gives_back_every_row(drawn: tuple[pa.Table, np.ndarray, int]) -> None:
    table, x, size = drawn
    got, _ = through(table, "new.npy", size)
    assert_ids(got.ids, table)
    assert got.vectors.tolist() == x.tolist()


@settings(max_examples=20)
@given(rows(INTEGERS, payload=True))
def test_faiss_and_its_payload_aside_give_back_every_row(drawn: tuple[pa.Table, np.ndarray, int]) -> None:
    pytest.importorskip("faiss")
    table, x, size = drawn
    folder = Path(tempfile.mkdtemp())
    aside = folder / "aside.parquet" if table.num_columns > 2 else None
    if max(table["id"].to_pylist()) >= 2**63:  # FAISS has signed ids
        with pytest.raises((UsageError, DataError), match="id"):
            through(table, "new.faiss", size, payload=aside)
        return
    got, _ = through(table, "new.faiss", size, payload=aside)
    assert_ids(got.ids, table)
    assert got.vectors.tolist() == x.tolist()
    if aside is not None:
        held = pq.read_table(aside)
        assert held["id"].to_pylist() == table["id"].to_pylist()
        assert held.drop_columns(["id"]).to_pylist() == table.drop_columns(["id", "emb"]).to_pylist()


@pytest.mark.parametrize("target", ["new.faiss", "new.npy"])
@settings(max_examples=5)
@given(rows((*TEXTS[:2], *BLOBS), payload=False))
def test_ids_that_a_store_cannot_hold_are_refused_with_the_way_out(
    target: str, drawn: tuple[pa.Table, np.ndarray, int]
) -> None:
    table, _, size = drawn
    kind = table["id"].type
    with pytest.raises(
        UnsupportedError, match=rf"integer.*{re.escape(str(kind))}.*parquet|{re.escape(str(kind))}.*integer.*parquet"
    ):
        through(table, target, size)


@pytest.mark.parametrize("target", ["new.parquet", "new.npy", "new.faiss"])
def test_no_rows_are_refused_by_name(target: str) -> None:
    table = pa.table({"id": pa.array([1], pa.int64()), "emb": pa.array([[1.0]], pa.list_(pa.float32(), 1))})
    with tempfile.TemporaryDirectory() as name:
        pq.write_table(table.slice(0, 0), Path(name) / "x.parquet")
        m = LinearMap(np.eye(1), card=Card(Side(1), Side(1), "none"))
        with pytest.raises(DataError, match=r"x\.parquet is empty: there is nothing to migrate"):
            vecferry.migrate(Path(name) / "x.parquet", Path(name) / target, m)
        assert [p.name for p in Path(name).iterdir()] == ["x.parquet"]
