"""What every file writer checks of the rows it is given, and what a published folder says of itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecferry.batch import Floats, VectorBatch
from vecferry.errors import BadRowsError, DataError, IncompatibleError, UnsupportedError, UsageError
from vecferry.jsonfile import read_json, typed
from vecferry.store import Provenance, StoreInfo
from vecferry_adapters._fingerprint import fingerprint

log = logging.getLogger("vecferry")

MANIFEST = "_vecferry.json"


class Manifest(TypedDict):
    """Name what readers take from a manifest, with its types; it holds more."""

    count: int
    metric: NotRequired[Literal["ip", "l2", "cosine"] | None]
    space: NotRequired[str | None]
    provenance: NotRequired[Provenance]
    vector: NotRequired[str]
    id: NotRequired[str | None]
    files: NotRequired[dict[str, str]]


def check_dtype(dtype: str, where: str) -> None:
    """Raise UnsupportedError for elements that aren't float32 or float16."""
    if dtype not in ("float32", "float16"):
        raise UnsupportedError(f"{where}: elements of type {dtype} can't be written; use float32 or float16")


def checked_ids(batch: VectorBatch, info: StoreInfo, start: int, where: str) -> pa.Array:
    """Return a batch's ids in the store's type; `start` rows were written before it.

    Raises IncompatibleError for vectors of another dimension, UsageError where no ids are stored and the rows
    aren't numbered as they would be on reading.
    """
    if batch.vectors.shape[1] != info.dim:
        raise IncompatibleError(f"{where} takes vectors of {info.dim} dimensions, these have {batch.vectors.shape[1]}")
    if info.id_type is not None:
        return batch.ids.cast(info.id_type)
    if not np.array_equal(batch.ids.to_numpy(zero_copy_only=False), np.arange(start, start + len(batch))):
        raise UsageError(
            f"{where} stores no ids, so its rows must be those numbered {start} and on: give it an id type"
        )
    return batch.ids


def elements(vectors: Floats, dtype: str, ids: pa.Array, where: str) -> NDArray[Any]:
    """Return vectors as the elements to store; raise BadRowsError where float16 is too small for them."""
    if dtype == "float32":
        return vectors
    with np.errstate(over="ignore"):
        out = vectors.astype(dtype)
    bad = (np.isinf(out) & np.isfinite(vectors)).any(axis=1)
    if bad.any():
        names = ids.filter(pa.array(bad)).to_pylist()
        raise BadRowsError(where, f"vectors have elements beyond {dtype}", names, "Store them with --dtype float32.")
    return out


def manifest(info: StoreInfo, count: int, files: Iterable[Path], **more: Any) -> dict[str, Any]:
    """Describe a written store for those who read it later, with fingerprints of its files."""
    more["files"] = {path.name: fingerprint(path) for path in files}
    described = {"format": 1, "count": count, "dim": info.dim, "dtype": info.dtype, "metric": info.metric}
    return described | {"space": info.space} | more | {"provenance": dict(info.provenance)}


def read_manifest(folder: Path) -> Manifest | None:
    """Return what `manifest` described, None where vecferry didn't write; raise DataError if it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    held = read_json(path)
    if held.get("format") != 1:
        raise DataError(f"{path} is of format {held.get('format')}, this vecferry reads format 1: update it")
    try:
        checked: Manifest = typed(Manifest, held, MANIFEST)
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error
    return checked


def speaks_of(held: Manifest, files: Iterable[Path]) -> bool:
    """Say whether a manifest was written of these files, and none of them was replaced or changed since."""
    known = held.get("files")
    if known is None:  # an earlier version's
        return True
    for file in files:
        if known.get(file.name) != (fingerprint(file) if file.is_file() else None):
            log.warning("%s isn't the file that %s beside it speaks of, so what that says is ignored", file, MANIFEST)
            return False
    return True
