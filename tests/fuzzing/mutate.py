"""Damage the bytes of a file: blindly, and by what its format says of lengths, counts and numbers."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

LIES = [
    0,
    1,
    2,
    7,
    255,
    4096,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**61,
    2**62,
    2**63 - 1,
    -1,
    -2,
    -(2**31),
]
DEEP = 100_000
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, -(2**63) - 1, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "../../etc/passwd", "/etc/passwd", "\x00", "\ud800", "float64", "l2", "none", "é" * 300, "0" * 64),
    *([], {}, [1], [None], {"x": 1}, [[[[]]]]),
]


def mutate(data: bytes, luck: random.Random, *, form: str) -> bytes:
    """Damage a file of a form: "json", "parquet", "safetensors", or "binary" for one without a grammar here."""
    shaped = {"json": lie_in_json, "parquet": lie_in_parquet, "safetensors": lie_in_safetensors, "binary": lie_in_words}
    for _ in range(luck.choice([1, 1, 1, 2, 3])):
        change = luck.choice([truncate, flip, extend, splice, *[shaped[form]] * 4])
        data = change(data, luck)
    return data


def truncate(data: bytes, luck: random.Random) -> bytes:
    """Cut at a random place, or a few bytes before the end."""
    return data[: luck.choice([luck.randrange(len(data) + 1), max(0, len(data) - luck.randrange(1, 20))])]


def flip(data: bytes, luck: random.Random) -> bytes:
    """Flip some bits, half of the time near one of the ends, where headers are."""
    out = bytearray(data)
    for _ in range(luck.choice([1, 1, 2, 8]) if data else 0):
        out[_place(len(data), luck)] ^= 1 << luck.randrange(8)
    return bytes(out)


def extend(data: bytes, luck: random.Random) -> bytes:
    """Add bytes behind the end or before the start."""
    n = luck.choice([1, 4, 8, 100, 5000])
    more = luck.choice([bytes(n), luck.randbytes(n), data[:n], data])
    return luck.choice([data + more, data + more, more + data])


def splice(data: bytes, luck: random.Random) -> bytes:
    """Delete, double, overwrite or exchange stretches."""
    if len(data) < 4:
        return data
    a, b = sorted(luck.randrange(len(data)) for _ in range(2))
    n = luck.choice([1, 4, 8, 64, 1000])
    return luck.choice(
        [
            data[:a] + data[a + n :],
            data[:a] + data[b : b + n] + data[a:],
            data[:a] + data[b : b + n] + data[a + n :],
            data[:a] + luck.choice([b"\0", b"\xff"]) * n + data[a + n :],
            data[:a] + data[b:] + data[a:b],
        ]
    )


def lie_in_words(data: bytes, luck: random.Random) -> bytes:
    """Write another number over one of 4 or 8 bytes; often where a small one stands, as lengths and counts are."""
    size, code = luck.choice([(4, "<i"), (8, "<q")])
    if len(data) < size:
        return data
    places = [_place(len(data) - size + 1, luck) for _ in range(40)]
    small = [p for p in places if 0 < struct.unpack_from(code, data, p)[0] < 1 << 20]
    at = luck.choice(small or places)
    (old,) = struct.unpack_from(code, data, at)
    value = luck.choice([*LIES, old + 1, old - 1, old * 2, -old, old << 32])
    return data[:at] + (value % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]


def lie_in_json(data: bytes, luck: random.Random) -> bytes:
    """Exchange, rename, drop, double or nest values of a JSON text; of a text that is none anymore flip bits."""
    try:
        text = data.decode()
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return flip(data, luck)
    places = list(_nodes(tree))
    if not places or luck.random() < 0.15:
        at = luck.randrange(len(text) + 1)
        pieces = ["[" * DEEP, '{"a":' * DEEP, "9" * 5000, "1e999", '"' * 3, "\ufeff", '"format": 1,', "NaN"]
        changed = text[:at] + luck.choice(pieces) + text[at:]
        return luck.choice([changed.encode(), changed.encode("utf-16"), changed.encode("latin-1", "replace")])
    holder, key = luck.choice(places)
    change = luck.randrange(6)
    if change == 0 and isinstance(holder, dict):
        del holder[key]
    elif change == 1 and isinstance(holder, dict):
        holder[luck.choice(["x", key.upper(), "../" + key, key + "\ud800"])] = holder.pop(key)
    elif change == 2:
        other_holder, other = luck.choice(places)
        holder[key] = json.loads(json.dumps(other_holder[other]))
    elif change == 3 and isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        holder[key] = luck.choice([*LIES, holder[key] + 1, holder[key] - 1, holder[key] * 2, -holder[key]])
    else:
        holder[key] = luck.choice(VALUES)
    return json.dumps(tree, indent=luck.choice([None, 2])).encode()


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value of a tree by its container and key."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _nodes(tree[key])


def lie_in_safetensors(data: bytes, luck: random.Random) -> bytes:
    """Lie in the header: its length, or its JSON with the length put right."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) or luck.random() < 0.3:
        value = luck.choice([*LIES, length + 1, length - 1, length + 8]) % 2**64
        return value.to_bytes(8, "little") + data[8:]
    header = lie_in_json(data[8 : 8 + length], luck)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def lie_in_parquet(data: bytes, luck: random.Random) -> bytes:
    """Write another number into the footer or a page header (Thrift), or flip bits of the Arrow schema within."""
    if len(data) < 12:
        return flip(data, luck)
    length = int.from_bytes(data[-8:-4], "little")
    start = len(data) - 8 - length
    if start < 4 or luck.random() < 0.05:
        lie = luck.choice([*LIES, length + 1, length - 1]) % 2**32
        return data[:-8] + lie.to_bytes(4, "little") + data[-4:]
    footer = data[start : start + length]
    kind = luck.randrange(4)
    if kind == 0 and b"ARROW:schema" in footer:  # a flatbuffer in base64
        at = footer.index(b"ARROW:schema") + 12
        while not footer[at : at + 1].isalnum() and at < len(footer):
            at += 1
        end = at
        while footer[end : end + 1].isalnum() or footer[end : end + 1] in (b"+", b"/", b"="):
            end += 1
        end -= (end - at) % 4
        try:
            buffer = base64.b64decode(footer[at:end])
        except ValueError:  # an earlier change has struck it
            return flip(data, luck)
        buffer = luck.choice([flip, lie_in_words])(buffer, luck)
        footer = footer[:at] + base64.b64encode(buffer)[: end - at] + footer[end:]
        return data[:start] + footer + data[start + length :]
    if kind == 1:  # a page header stands right behind the magic, others behind pages
        at = luck.choice([4, 4, luck.randrange(4, max(5, start))])
        spans = list(_integers(data, at, min(start, at + 200)))
        if spans:
            a, b = luck.choice(spans)
            return data[:a] + _varint(_lie(data[a:b], luck), b - a) + data[b:]
    spans = list(_integers(footer, 0, len(footer)))
    if not spans:
        return flip(data, luck)
    a, b = luck.choice(spans)
    lie = _lie(footer[a:b], luck)
    footer = footer[:a] + luck.choice([_varint(lie), _varint(lie, b - a)]) + footer[b:]
    return data[:start] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _lie(old: bytes, luck: random.Random) -> int:
    value = _unzigzag(old)
    return luck.choice([*LIES, value + 1, value - 1, value * 2, -value])


def _unzigzag(data: bytes) -> int:
    value = sum((byte & 127) << 7 * i for i, byte in enumerate(data))
    return value >> 1 ^ -(value & 1)


def _varint(value: int, size: int | None = None) -> bytes:
    """Encode a number zigzag as Thrift does, or as much of it as goes into `size` bytes."""
    rest, out = (value << 1 ^ value >> 63) % 2**64, bytearray()
    while rest >= 128 and (size is None or len(out) < size - 1):
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest & 127)
    while size is not None and len(out) < size:
        out[-1] |= 128
        out.append(0)
    return bytes(out)


def _integers(data: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Walk a struct of Thrift's compact protocol; yield where its integers stand, and end where it can't go on."""
    found: list[tuple[int, int]] = []

    def varint(at: int) -> int:
        while data[at] & 128:
            at += 1
        return at + 1

    def skip(kind: int, at: int) -> int:
        if kind in (1, 2):
            return at
        if kind == 3:
            return at + 1
        if kind in (4, 5, 6):
            found.append((at, varint(at)))
            return varint(at)
        if kind == 7:
            return at + 8
        if kind == 8:
            after = varint(at)
            return after + sum((byte & 127) << 7 * i for i, byte in enumerate(data[at:after]))
        if kind in (9, 10):
            count, item = data[at] >> 4, data[at] & 15
            at += 1
            if count == 15:
                after = varint(at)
                count = sum((byte & 127) << 7 * i for i, byte in enumerate(data[at:after]))
                at = after
            for _ in range(count):
                at = at + 1 if item in (1, 2) else skip(item, at)
            return at
        if kind == 12:
            return walk(at)
        raise IndexError

    def walk(at: int) -> int:
        while at < end and data[at]:
            kind, delta = data[at] & 15, data[at] >> 4
            at += 1
            if not delta:
                at = varint(at)
            at = skip(kind, at)
        return at + 1

    with contextlib.suppress(IndexError, RecursionError):
        walk(at)
    yield from (span for span in found if span[1] <= end)


def _place(size: int, luck: random.Random) -> int:
    """Return a place in a file, half of the time near one of its ends."""
    near = min(size, 400)
    return luck.choice(
        [luck.randrange(size), luck.randrange(size), luck.randrange(near), size - 1 - luck.randrange(near)]
    )
