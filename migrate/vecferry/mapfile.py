"""The map folder on disk: tensors, card, hold-out, and a page for people. Loading needs numpy and safetensors only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from vecferry.errors import DataError, UsageError
from vecferry.jsonfile import parse_json, read_json, typed
from vecferry.linear import Card, LinearMap, Post, Pre
from vecferry.mapcard import page

FORMAT = 1
TENSORS = "map.safetensors"
CARD = "card.json"
HOLDOUT = "holdout.parquet"
HEADER = 1 << 20
"""Bytes of the largest header of a tensor file; what stands in it is three shapes, and the card's two sides."""


def meaning(m: LinearMap) -> str:
    """Say what the numbers of a map are for; it stands in the tensor file, so that the sha256 covers it too."""
    if m.card is None:
        raise UsageError("a map without a card can't be identified: give it one with with_card()")
    sides = {"source": dataclasses.asdict(m.card.source), "target": dataclasses.asdict(m.card.target)}
    form = {"pre": m.pre, "post": m.post, "metric": m.card.metric, "direction": m.card.direction}
    return json.dumps(form | sides, sort_keys=True)


def tensor_bytes(m: LinearMap) -> bytes:
    """Serialise the numbers of a map and what they are for: what its sha256 is taken of."""
    tensors = {"weight": m.weight, "bias": m.bias, "mean": m.mean}
    # ascontiguousarray: safetensors stores a transposed view wrongly, and says nothing
    held = {name: np.ascontiguousarray(a) for name, a in tensors.items() if a is not None}
    return bytes(save_tensors(held, metadata={"vecferry": meaning(m)}))


def seal(m: LinearMap) -> LinearMap:
    """Return the map with the sha256 of its tensors in the card, from which its identity follows.

    Raises UsageError for a map without a card, or with a card of other dimensions, and for one with a filter.
    """
    if m.ask is not None or m.after is not None:
        raise UsageError("a map and its filter are kept as two folders: save each by itself, and give both to migrate")
    if m.card is None:
        raise UsageError("a map without a card can't be identified: give it one with with_card()")
    told = (m.card.source.dim, m.card.target.dim)
    if told != (m.d_in, m.d_out):
        raise UsageError(f"the map leads {m.d_in} -> {m.d_out}, its card says {told[0]} -> {told[1]}: correct the card")
    return m.with_card(dataclasses.replace(m.card, sha256=hashlib.sha256(tensor_bytes(m)).hexdigest()))


def save(m: LinearMap, folder: Path) -> Path:
    """Write a map folder under a staging name, then rename it; raise UsageError if it exists.

    The hold-out of a map that was loaded, which stays on disk until it is needed, is copied.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists: choose another name for the map, or delete it first")
    m = seal(m)
    assert m.card is not None
    stage = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        stage.mkdir(parents=True)
        data = tensor_bytes(m)
        (stage / TENSORS).write_bytes(data)
        header = {"format": FORMAT, "pre": m.pre, "post": m.post}
        card = header | dataclasses.asdict(m.card)
        (stage / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if m.holdout is not None:
            made_for = {**m.holdout.fingerprint, "map": m.card.sha256}
            dataclasses.replace(m.holdout, fingerprint=made_for).save(stage / HOLDOUT)
        elif m.path is not None and (m.path / HOLDOUT).is_file():
            shutil.copyfile(m.path / HOLDOUT, stage / HOLDOUT)
        (stage / "README.md").write_text(page(m), encoding="utf-8")
        for path in (*stage.iterdir(), stage):
            _fsync(path)
        try:
            stage.rename(folder)
        except OSError as error:  # another process made it meanwhile
            raise UsageError(f"{folder} exists: choose another name for the map, or delete it first") from error
        _fsync(folder.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return folder


def load(folder: Path) -> LinearMap:
    """Read a map folder; raise UsageError if there is none, DataError if it isn't what its card says."""
    if not (folder / CARD).is_file():
        raise UsageError(f"{folder} is not a map folder: it has no {CARD}; `vecferry fit -o {folder}` makes one")
    try:
        pre, post, card = _card(folder / CARD)
        data = _checked_bytes(folder / TENSORS, card)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tensors = load_tensors(data)
        if any(a.dtype != np.float32 for a in tensors.values()):
            raise DataError(f"{folder / TENSORS} holds tensors of other types than float32")
        m = LinearMap(tensors["weight"], tensors.get("bias"), pre, post, tensors.get("mean"), card, path=folder)
        if (m.d_in, m.d_out) != (card.source.dim, card.target.dim):
            told = f"the card says {card.source.dim} -> {card.target.dim}"
            raise DataError(f"{folder}: the tensor maps {m.d_in} -> {m.d_out}, {told}: damaged or edited")
        if typed(dict[str, Any], header.get("__metadata__", {}), "__metadata__").get("vecferry") != meaning(m):
            raise DataError(f"{folder / CARD} says other things of the map than {TENSORS}: it was edited")
        page(m)  # of a card that can't be shown nothing else is to be believed either
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, UsageError) as error:
        raise DataError(f"{folder} can't be read as a map: {error}") from error
    return m


def _card(path: Path) -> tuple[Pre, Post, Card]:
    """Read what normalises before and after, and the card; raise DataError or ValueError for anything else."""
    fields = read_json(path)
    version = fields.pop("format")
    if version != FORMAT:
        raise DataError(f"{path} is of format {version}, this vecferry reads format {FORMAT}: update it")
    pre, post = typed(Pre, fields.pop("pre"), "pre"), typed(Post, fields.pop("post"), "post")
    return pre, post, typed(Card, fields, CARD)


def _checked_bytes(path: Path, card: Card) -> bytes:
    """Read the tensor file, not before its size fits what the card says, and compare its sha256 with the card's."""
    d_in, d_out = card.source.dim, card.target.dim
    most = 8 + HEADER + 4 * (d_in * d_out + d_in + d_out)
    with path.open("rb") as file:
        start = file.read(8)
        size, length = path.stat().st_size, int.from_bytes(start, "little")
        if size > most or length > min(HEADER, size):
            told = f"{size:,} bytes with a header of {length:,}; a map {d_in} -> {d_out} has at most {most:,}"
            raise DataError(f"{path} has {told} with one of {HEADER:,}: damaged or swapped")
        data = start + file.read()
    digest = hashlib.sha256(data).hexdigest()
    if digest != card.sha256:
        told = f"the card says {card.sha256[:16]}…"
        raise DataError(f"{path} has sha256 {digest[:16]}…, {told}: damaged or swapped")
    return data


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
