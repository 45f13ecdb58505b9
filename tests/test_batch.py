"""VectorBatch and the hashing of ids, against plain Python."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vecferry.batch import IdDigest, Positions, VectorBatch, concat, faulty, id_keys

integers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
texts = st.lists(st.text(max_size=12), max_size=40)
blobs = st.lists(st.binary(max_size=12), max_size=40)
some_ids = st.one_of(
    integers.map(lambda v: pa.array(v, pa.int64())),
    texts.map(lambda v: pa.array(v, pa.string())),
    blobs.map(lambda v: pa.array(v, pa.binary())),
)


def batch(n: int, payload: bool = True) -> VectorBatch:
    x = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    return VectorBatch(
        pa.array(np.arange(n) + 100), x, pa.table({"t": [f"t{i}" for i in range(n)]}) if payload else None, n
    )


def test_vectors_of_another_layout_are_refused() -> None:
    good = batch(4)
    for x in (good.vectors.astype(np.float64), good.vectors[:, ::2], np.asfortranarray(good.vectors), good.vectors[0]):
        with pytest.raises(TypeError, match="C-contiguous float32"):
            dataclasses.replace(good, vectors=x)


@pytest.mark.parametrize("payload", [True, False])
def test_parts_must_have_equal_rows(payload: bool) -> None:
    good = batch(4, payload)
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        dataclasses.replace(good, ids=good.ids.slice(1))
    if payload:
        with pytest.raises(ValueError, match=r"\[3, 4\]"):
            dataclasses.replace(good, payload=batch(3).payload)


@given(st.lists(st.integers(0, 9), max_size=20))
def test_take_is_indexing(rows: list[int]) -> None:
    whole = batch(10)
    part = whole.take(np.array(rows, np.int64))
    assert part.ids.to_pylist() == [100 + i for i in rows]
    assert part.vectors.tolist() == [[3 * i, 3 * i + 1, 3 * i + 2] for i in rows]
    assert part.payload is not None
    assert part.payload["t"].to_pylist() == [f"t{i}" for i in rows]
    assert part.cursor == 10


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_concat_undoes_cutting(sizes: list[int]) -> None:
    whole = batch(sum(sizes))
    ends = np.cumsum(sizes)
    parts = [whole.take(np.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    joined = concat(parts)
    assert joined.ids.equals(whole.ids)
    assert joined.vectors.tolist() == whole.vectors.tolist()
    assert joined.payload is not None
    assert whole.payload is not None
    assert joined.payload.to_pylist() == whole.payload.to_pylist()


def test_concat_of_nothing() -> None:
    with pytest.raises(ValueError, match="no batches"):
        concat([])


def test_faulty_rows() -> None:
    x = np.array([[1, 2], [np.nan, 1], [np.inf, 1], [0, 0], [3e38, 3e38], [1e-45, 0], [-0.0, 1]], np.float32)
    # 3e38 twice is finite, but its length isn't; the smallest denormal's square is zero
    assert faulty(x).tolist() == [False, True, True, True, True, True, False]


# Keys


@given(some_ids)
def test_keys_are_equal_where_ids_are(ids: pa.Array) -> None:
    keys = id_keys(ids).tolist()
    values = ids.to_pylist()
    assert len(set(zip(keys, values, strict=True))) == len(set(values)) == len(set(keys))


@given(st.lists(st.integers(0, 127), max_size=30))
def test_keys_of_integers_do_not_depend_on_width(values: list[int]) -> None:
    expected = id_keys(pa.array(values, pa.int64())).tolist()
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()):
        assert id_keys(pa.array(values, kind)).tolist() == expected


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=30))
def test_keys_of_negative_integers_do_not_depend_on_width(values: list[int]) -> None:
    assert id_keys(pa.array(values, pa.int32())).tolist() == id_keys(pa.array(values, pa.int64())).tolist()


@given(st.lists(st.integers(0, 2**63), max_size=20), st.sampled_from([1, -1]))
def test_negative_integers_are_not_the_large_ones_with_their_bits(values: list[int], sign: int) -> None:
    """By twos they have the same 64 bits; a key of one has no more chance to be another's than strings have."""
    large = np.array([*values, 1, 2**62, 2**63], np.uint64) - np.uint64(1) | np.uint64(2**63)
    negative = large.view(np.int64)[::sign]
    keys = id_keys(pa.array(large)), id_keys(pa.array(negative))
    assert not set(keys[0].tolist()) & set(keys[1].tolist())
    assert len(set(keys[1].tolist())) == len(set(negative.tolist()))


@given(texts)
def test_keys_of_strings_do_not_depend_on_the_type(values: list[str]) -> None:
    expected = id_keys(pa.array(values, pa.string())).tolist()
    for kind in (pa.large_string(), pa.string_view()):
        assert id_keys(pa.array(values, kind)).tolist() == expected
    assert id_keys(pa.array([v.encode() for v in values], pa.binary())).tolist() == expected


@given(some_ids, st.data())
def test_keys_of_slices_are_slices_of_keys(ids: pa.Array, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(ids)))
    length = data.draw(st.integers(0, len(ids)))
    assert id_keys(ids.slice(start, length)).tolist() == id_keys(ids)[start : start + length].tolist()


def test_keys_of_many_similar_ids_are_distinct() -> None:
    """Good 64-bit keys of n ids agree somewhere with probability n**2 / 2**65, here 2e-9."""
    n = 300_000
    numbers = np.arange(n)
    for ids in (
        pa.array([f"doc-{i}" for i in numbers]),
        pa.array([f"{i:012}" for i in numbers]),
        pa.array([f"{i:x}" + "\0" * (i % 3) for i in numbers]),
        pa.array(numbers << 32),
    ):
        assert len(np.unique(id_keys(ids))) == n


def test_fixed_size_binary_and_permuted_letters() -> None:
    values = [b"abcd", b"dcba", b"abdc", b"\0\0\0a", b"a\0\0\0"]
    assert len(set(id_keys(pa.array(values, pa.binary(4))).tolist())) == 5
    assert id_keys(pa.array(values, pa.binary(4))).tolist() == id_keys(pa.array(values, pa.binary())).tolist()


@pytest.mark.parametrize("kind", [pa.float64(), pa.bool_(), pa.timestamp("s"), pa.list_(pa.int64())])
def test_other_types_are_no_ids(kind: pa.DataType) -> None:
    with pytest.raises(TypeError, match="not supported"):
        id_keys(pa.array([], kind))


# Digest


def digest(pieces: list[pa.Array], start: IdDigest | None = None) -> IdDigest:
    d = start or IdDigest()
    for piece in pieces:
        d.update(piece)
    return d


@given(some_ids, st.lists(st.integers(0, 40), max_size=5))
def test_a_digest_does_not_depend_on_pieces_and_can_be_stored(ids: pa.Array, cuts: list[int]) -> None:
    bounds = sorted({0, len(ids), *(min(c, len(ids)) for c in cuts)})
    pieces = [ids.slice(a, b - a) for a, b in itertools.pairwise(bounds)]
    whole = digest([ids])
    assert digest(pieces) == whole
    for k in range(len(pieces)):
        half = digest(pieces[:k])
        stored = IdDigest(*(int(v) for v in (half.count, half.ordered, half.unordered)))
        assert digest(pieces[k:], stored) == whole
    assert 0 <= whole.ordered < 2**64
    assert 0 <= whole.unordered < 2**64


@given(st.lists(st.text(max_size=6), min_size=2, max_size=20), st.randoms(use_true_random=False))
def test_a_digest_sees_order_only_where_it_should(values: list[str], random: Any) -> None:
    other = values.copy()
    random.shuffle(other)
    a, b = digest([pa.array(values)]), digest([pa.array(other)])
    assert a.unordered == b.unordered
    assert (a.ordered == b.ordered) == (values == other)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.data())
def test_a_digest_sees_a_changed_lost_or_doubled_id(values: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    whole = digest([pa.array(values)])
    for other in (values[:at] + values[at + 1 :], [*values, values[at]], [*values[:at], 99, *values[at + 1 :]]):
        changed = digest([pa.array(other, pa.int64())])
        assert changed.unordered != whole.unordered
        assert changed != whole


# Positions


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 30), max_size=60),
    st.lists(st.integers(0, 40), unique=True, max_size=30),
    st.integers(1, 20),
)
def test_positions_are_those_of_a_dict(stream: list[int], wanted: list[int], size: int) -> None:
    first: dict[int, int] = {}
    for place, value in enumerate(stream):
        first.setdefault(value, place)
    positions = Positions(pa.array(wanted, pa.int32()))
    for start in range(0, len(stream), size):
        positions.update(pa.array(stream[start : start + size], pa.int64()))
    assert positions.found.tolist() == [first.get(v, -1) for v in wanted]


def test_positions_of_strings() -> None:
    positions = Positions(pa.array(["b", "zz", "a", ""], pa.large_string()))
    for piece in (["x", "a"], [], ["b", "a", ""]):
        positions.update(pa.array(piece, pa.string()))
    assert positions.found.tolist() == [2, -1, 1, 4]
