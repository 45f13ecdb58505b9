"""Turn a factory string into an empty index, or into an error that names a string that works."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vecferry.errors import UnsupportedError, UsageError
from vecferry.store import StoreInfo, Uri
from vecferry_adapters._faiss_describe import describe, tuned
from vecferry_adapters._faiss_file import load_faiss

WELL = 39
"""Rows for each centroid below which FAISS warns that there are too few."""

LINKS = {"HNSW": 2, "NSG": 8}
"""Links of a graph's node below which FAISS ends the process."""
USUAL_LINKS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Hold an empty index to be filled.

    `index` is what rows are added to; `whole` is what is written: the same, or an id map around it. `native_ids` says
    that the index itself keeps ids. `parameters` are those it was given, for the record.
    """

    index: Any
    whole: Any
    native_ids: bool
    parameters: Mapping[str, int]

    @property
    def has_map(self) -> bool:
        """Whether ids are in an id map."""
        return self.whole is not self.index

    @property
    def is_flat(self) -> bool:
        """Whether its file is a header, the rows, and perhaps their ids."""
        faiss = load_faiss()
        return type(self.index) in (faiss.IndexFlat, faiss.IndexFlatIP, faiss.IndexFlatL2)


def integer(uri: Uri, name: str) -> int:
    """Return an option of an address that must be a positive number."""
    text = uri.options[name]
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{uri}: {name} must be a positive number, not {text!r}")
    return int(text)


def design(uri: Uri, info: StoreInfo) -> Structure:
    """Make the empty index that a target's description asks for; raise UsageError for one that can't be made."""
    faiss = load_faiss()
    if info.metric not in ("ip", "cosine", "l2"):
        raise UsageError(f"{uri}: FAISS ranks by ip, cosine or l2, not by {info.metric}")
    metric = faiss.METRIC_L2 if info.metric == "l2" else faiss.METRIC_INNER_PRODUCT
    factory = info.index or "Flat"
    whole = _make(factory, info.dim, metric)
    if isinstance(whole, str) and info.metric == "cosine":
        # some structures know L2 only, which ranks unit vectors as cosine does
        other = _make(factory, info.dim, faiss.METRIC_L2)
        whole = whole if isinstance(other, str) else other
    if isinstance(whole, str):
        better = _suggest(factory, info.dim, info.count, metric)
        raise UsageError(f"{uri}: {factory} can't be built for {info.dim} dimensions ({whole}); --index {better!r} can")
    index = faiss.downcast_index(whole.index) if isinstance(whole, faiss.IndexIDMap) else whole
    _check_kind(uri, factory, index)
    least = least_rows(index)
    if info.count is not None and info.count < least:
        better = _suggest(factory, info.dim, info.count, metric)
        raise UsageError(
            f"{uri}: {factory} needs at least {least} rows to be trained, there are {info.count}; "
            f"--index {better!r} needs no more"
        )
    native = whole is index and _keeps_ids(index)
    if info.id_type is not None and whole is index and not native:
        whole = faiss.IndexIDMap2(index)
    return Structure(index, whole, native, _tune(uri, info, index))


def _make(factory: str, dim: int, metric: int) -> Any:
    """Return an empty index, or the reason why there is none."""
    faiss = load_faiss()
    if re.search(r"(?<!\d)0+(?!\d)", factory):
        return "it has a size of 0"
    for kind, size in re.findall(r"(HNSW|NSG)(\d+)", factory):
        if int(size) < LINKS[kind]:
            return f"a node of {kind} needs at least {LINKS[kind]} links, not {size}"
    try:
        index = faiss.index_factory(dim, factory, metric)
        if index.metric_type != metric:
            return "it ranks by L2 only"
        for transform in chain_of(index):
            if isinstance(transform, (faiss.PCAMatrix, faiss.OPQMatrix)) and transform.d_out > transform.d_in:
                return f"{type(transform).__name__} would lead from {transform.d_in} to {transform.d_out}"
        return index
    except (RuntimeError, MemoryError, AssertionError, ValueError) as error:
        return str(error).split("Error: ")[-1] or type(error).__name__


def chain_of(index: Any) -> list[Any]:
    """Return the transforms that rows of an index go through first."""
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, (faiss.IndexIDMap, faiss.IndexRefine)):
        return chain_of(index.index if isinstance(index, faiss.IndexIDMap) else index.base_index)
    if not isinstance(index, faiss.IndexPreTransform):
        return []
    return [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]


def _check_kind(uri: Uri, factory: str, index: Any) -> None:
    """Refuse a part whose rows the reader couldn't read back."""
    faiss = load_faiss()
    while isinstance(index, (faiss.IndexPreTransform, faiss.IndexRefine)):
        if isinstance(index, faiss.IndexRefine):
            index = faiss.downcast_index(index.refine_index)
            continue
        if any(isinstance(t, faiss.ITQTransform) for t in chain_of(index)):
            raise UnsupportedError(f"{uri}: ITQ in {factory} can't be undone, so nothing could be verified")
        index = faiss.downcast_index(index.index)
    if "Panorama" in type(index).__name__ or isinstance(index, (faiss.IndexIVFFlatDedup, faiss.IndexIDMap)):
        raise UnsupportedError(f"{uri}: the rows of {factory} can't be read back, so nothing could be verified")


def _keeps_ids(index: Any) -> bool:
    faiss = load_faiss()
    while isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
    return isinstance(index, faiss.IndexIVF)


def least_rows(index: Any) -> int:
    """Return how many rows training needs: one for every centroid of the largest codebook inside, none for none."""
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if index.is_trained:
        return 0
    if isinstance(index, faiss.IndexPreTransform):
        # OPQ trains codebooks of 8 bits, whatever the codes behind it
        return max([least_rows(index.index), *(256 for t in chain_of(index) if isinstance(t, faiss.OPQMatrix))])
    if isinstance(index, faiss.IndexRefine):
        return max(least_rows(index.base_index), least_rows(index.refine_index))
    if isinstance(index, (faiss.IndexHNSW, faiss.IndexNSG, faiss.IndexNNDescent)):
        return least_rows(index.storage)
    least = int(index.pq.ksub) if hasattr(index, "pq") else 1
    if isinstance(index, faiss.IndexIVF):
        quantizer = faiss.downcast_index(index.quantizer)
        lists = quantizer.pq.ksub if isinstance(quantizer, faiss.MultiIndexQuantizer) else index.nlist
        return max(least, int(lists))
    return least


def _tune(uri: Uri, info: StoreInfo, index: Any) -> dict[str, int]:
    """Set search and build parameters: the address's, else the source's, else what this structure needs."""
    chosen: dict[str, int] = {}
    for owner, name in tuned(index):
        if name in uri.options:
            value = integer(uri, name)
        elif name in info.parameters:
            value = int(info.parameters[name])
        elif name == "nprobe":
            # FAISS's own is 1, which misses most of what lies near a border between lists
            value = max(8, owner.nlist // 16)
        else:
            value = int(getattr(owner, name))
        chosen[name] = min(value, int(owner.nlist)) if name == "nprobe" else value
        setattr(owner, name, chosen[name])
    if idle := sorted(set(uri.options) - set(chosen)):
        raise UsageError(f"{uri}: an {describe(index)} index has no {', '.join(idle)}")
    return chosen


def _suggest(factory: str, dim: int, count: int | None, metric: int) -> str:
    """Return the nearest factory string that works at this dimension and for so many rows."""
    parts, d = [], dim
    for part in re.split(r",(?![^(]*\))", factory):
        part, d = _mend(part, d, count)
        parts.append(part)
    better = _make(mended := ",".join(parts), dim, metric)
    fits = not isinstance(better, str) and (count is None or _core_rows(better) <= count)
    return mended if fits else "Flat"


def _core_rows(index: Any) -> int:
    faiss = load_faiss()
    return least_rows(index.index if isinstance(index, faiss.IndexIDMap) else index)


def _mend(part: str, d: int, count: int | None) -> tuple[str, int]:
    """Return one part of a factory string made to fit, and the dimension behind it."""
    if found := re.fullmatch(r"(PCAW?R?|RR|ITQ|Pad)(\d+)", part):
        kind, size = found[1], int(found[2])
        out = max(size, d) if kind == "Pad" else min(size, d)
        return f"{kind}{out}", out
    if found := re.fullmatch(r"OPQ(\d+)(?:_(\d+))?", part):
        out = min(int(found[2]), d) if found[2] else d
        return f"OPQ{_divisor(out, int(found[1]))}" + (f"_{out}" if found[2] else ""), out
    if (found := re.fullmatch(r"(HNSW|NSG)(\d+)(.*)", part)) and int(found[2]) < LINKS[found[1]]:
        return f"{found[1]}{USUAL_LINKS}{found[3]}", d
    if (found := re.fullmatch(r"IVF(\d+)(.*)", part)) and count is not None:
        return f"IVF{max(1, min(int(found[1]), count // WELL))}{found[2]}", d
    if found := re.fullmatch(r"PQ(\d+)(?:x(\d+))?(\D.*)?", part):
        bits = int(found[2] or 8)
        if count is not None and count < 2**bits:
            bits = max(1, count.bit_length() - 1)
        suffix = "" if bits == 8 and not found[2] else f"x{bits}"
        return f"PQ{_divisor(d, int(found[1]))}{suffix}{found[3] or ''}", d
    return part, d


def _divisor(d: int, near: int) -> int:
    """Return the divisor of d that is nearest to a number, the larger of two."""
    return min((m for m in range(1, d + 1) if d % m == 0), key=lambda m: (abs(m - near), -m))
