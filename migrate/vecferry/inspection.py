"""The verb `inspect`: describe a store from its header, a seeded sample, and on request all of its rows; or a map."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vecferry.batch import faulty
from vecferry.errors import UsageError
from vecferry.linear import LinearMap
from vecferry.mapcard import describe
from vecferry.mapfile import CARD
from vecferry.rewrite import duplicates
from vecferry.store import StoreInfo, opened

SAMPLE = 2000
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Sampled:
    """Hold what a seeded uniform sample of rows shows: norms, and how many directions carry the variance."""

    rows: int
    norm_min: float
    norm_mean: float
    norm_max: float
    mean_vector_norm: float
    dims_90: int
    dims_99: int


@dataclass(frozen=True, slots=True)
class Scanned:
    """Hold what reading all rows shows: counts of bad rows and of ids that occur more than once, and some of them."""

    rows: int
    bad: int
    bad_ids: list[Any] = field(default_factory=list)
    duplicate_ids: int = 0
    duplicate_examples: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Inspection:
    """Hold a store's description, with what was seen in a sample and, where asked for, in all rows."""

    info: StoreInfo
    sampled: Sampled | None
    scanned: Scanned | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; Arrow types become their names."""
        info = self.info
        facts = {name: getattr(info, name) for name in StoreInfo.__dataclass_fields__}
        facts["id_type"] = None if info.id_type is None else str(info.id_type)
        facts["payload"] = None if info.payload is None else {f.name: str(f.type) for f in info.payload}
        facts |= {"parameters": dict(info.parameters), "provenance": dict(info.provenance)}
        parts = {"sample": self.sampled, "scan": self.scanned}
        rest = {k: None if v is None else {n: getattr(v, n) for n in v.__dataclass_fields__} for k, v in parts.items()}
        return facts | rest

    def table(self) -> str:
        """Write the description for people."""
        info = self.info
        numbered = "none: rows are numbered from 0"
        columns = ", ".join(f"{f.name} ({f.type})" for f in info.payload) if info.payload else "none"
        rows = [
            ("store", f"{info.uri} ({info.kind})"),
            ("rows", f"{info.count:,}" if info.count is not None else "unknown"),
            ("dimensions", f"{info.dim} of {info.dtype}" + (", LOSSY: quantised codes" if info.lossy else "")),
            ("metric", info.metric or "not recorded"),
            ("index", info.index or "none"),
            ("parameters", ", ".join(f"{k}={v}" for k, v in info.parameters.items()) or "none"),
            ("ids", numbered if info.id_type is None else str(info.id_type)),
            ("payload", columns),
            ("bytes", f"{info.nbytes:,}"),
            ("space", info.space or "not recorded"),
        ]
        if (needed := info.provenance.get("filter")) is not None:
            queries = f"of {needed.get('dim')} dimensions ({needed.get('queries') or 'space not recorded'})"
            rows.append(("queries", f"{queries} go through the filter with sha256 {needed.get('sha256')}"))
        if (s := self.sampled) is not None:
            note = f" (sample of {s.rows:,} rows)"
            rows += [
                ("norms", f"min {s.norm_min:.4g}, mean {s.norm_mean:.4g}, max {s.norm_max:.4g}{note}"),
                (
                    "mean vector",
                    f"norm {s.mean_vector_norm:.3f} of unit rows: 0 is isotropic, 1 is one direction{note}",
                ),
                ("spectrum", f"90 % of the variance in {s.dims_90} directions, 99 % in {s.dims_99}{note}"),
            ]
        if (a := self.scanned) is not None:
            bad = f": {', '.join(map(str, a.bad_ids))}" if a.bad_ids else ""
            twice = f": {', '.join(map(str, a.duplicate_examples))}" if a.duplicate_examples else ""
            rows += [
                ("bad rows", f"{a.bad:,} NaN, infinite, zero or malformed (all {a.rows:,} rows read){bad}"),
                ("duplicate ids", f"{a.duplicate_ids:,}{twice}"),
            ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@dataclass(frozen=True, slots=True)
class MapInspection:
    """Hold a map whose card is to be shown."""

    map: LinearMap

    def to_json(self) -> dict[str, Any]:
        """Return the whole card as JSON values."""
        card = {} if self.map.card is None else asdict(self.map.card)
        return {"kind": "map", "pre": self.map.pre, "post": self.map.post} | card

    def table(self) -> str:
        """Write the whole card for people."""
        return describe(self.map)


def inspect(source: Any, *, scan: bool = False, seed: int = 0) -> Inspection | MapInspection:
    """Describe a store: from its header, from a seeded sample of rows, and with `scan` from all rows; or a map's card.

    Raises UsageError for an unknown address or a map to be scanned, DataError for a store or map that can't be read.
    """
    if isinstance(source, (str, Path)) and (Path(source) / CARD).is_file():
        if scan:
            raise UsageError(f"{source} is a map, which has no rows to read: leave out --scan")
        return MapInspection(LinearMap.load(source))
    with opened(source) as reader:
        count = reader.info.count or 0
        sampled = None
        if count:
            places = np.sort(np.random.default_rng(seed).choice(count, min(SAMPLE, count), replace=False))
            at, parts = 0, []
            for ids in reader.ids(1 << 16):
                inside = places[np.searchsorted(places, at) : np.searchsorted(places, at + len(ids))] - at
                parts.append(ids.take(pa.array(inside)))
                at += len(ids)
            sampled = _describe(reader.take(pa.concat_arrays(parts).unique()).vectors)
        scanned = None
        if scan:
            rows, bad = 0, 0
            names: list[Any] = []
            for batch in reader.read(8192):
                faults = np.flatnonzero(faulty(batch.vectors))
                rows, bad = rows + len(batch), bad + len(faults)
                names += batch.ids.take(pa.array(faults[: SHOWN - len(names)])).to_pylist()
            doubled, _ = duplicates(reader)
            scanned = Scanned(rows, bad, names, len(doubled), doubled[:SHOWN])
        return Inspection(reader.info, sampled, scanned)


def _describe(x: np.ndarray[Any, np.dtype[np.float32]]) -> Sampled | None:
    x = x[~faulty(x)].astype(np.float64)
    if not len(x):
        return None
    norms = np.linalg.norm(x, axis=1)
    unit_mean = float(np.linalg.norm((x / norms[:, None]).mean(axis=0)))
    variance = np.linalg.svd(x - x.mean(axis=0), compute_uv=False) ** 2
    share = np.cumsum(variance) / max(variance.sum(), np.finfo(float).tiny)
    dims = [int(min(np.searchsorted(share, level) + 1, x.shape[1])) for level in (0.9, 0.99)]
    return Sampled(len(x), float(norms.min()), float(norms.mean()), float(norms.max()), unit_mean, *dims)
