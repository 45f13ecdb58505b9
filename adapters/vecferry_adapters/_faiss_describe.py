"""Say what a FAISS index is made of, as the factory string that makes such an index, and find what can be tuned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vecferry_adapters._faiss_file import load_faiss


def code_name(index: Any) -> str:
    """Name how an index stores elements: a float type, or the last part of its factory string."""
    name = describe(index).rsplit(",", 1)[-1]
    return {"SQfp16": "float16", "Flat": "float32"}.get(name, name)


def describe(index: Any) -> str:
    """Return the factory string that makes such an index; the class's name for a part that none makes."""
    faiss = load_faiss()
    from faiss.contrib import factory_tools

    tools: Any = factory_tools
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIDMap):
        outer = "IDMap2" if isinstance(index, faiss.IndexIDMap2) else "IDMap"
        return f"{outer},{describe(index.index)}"
    if isinstance(index, faiss.IndexPreTransform):
        chain = [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]
        return ",".join([*(_describe_transform(faiss, t, index.index) for t in chain), describe(index.index)])
    if isinstance(index, faiss.IndexRefine):
        second = describe(index.refine_index)
        return f"{describe(index.base_index)},{'RFlat' if second == 'Flat' else f'Refine({second})'}"
    if isinstance(index, faiss.IndexHNSW):
        storage = describe(index.storage)
        return f"HNSW{int(tools.get_hnsw_M(index))},{storage}"
    if isinstance(index, faiss.IndexNSG):
        return f"NSG{index.nsg.R},{describe(index.storage)}"
    if isinstance(index, faiss.IndexIVFPQFastScan) and index.by_residual:
        return f"{tools.reverse_index_factory(index)}r"
    try:
        return str(tools.reverse_index_factory(index))
    except (NotImplementedError, AssertionError, KeyError):
        return type(index).__name__


def _describe_transform(faiss: Any, t: Any, behind: Any) -> str:
    size = "" if t.d_out == t.d_in else str(t.d_out)
    if isinstance(t, faiss.OPQMatrix):
        return f"OPQ{t.M}" + (f"_{size}" if size else "")
    pq = getattr(faiss.downcast_index(behind), "pq", None)
    if type(t) is faiss.LinearTransform and pq is not None:
        # a file says of an OPQ only that it is linear; its parts are those of the codes that it was made for
        return f"OPQ{pq.M}" + (f"_{size}" if size else "")
    if isinstance(t, faiss.PCAMatrix):
        return f"PCA{'W' if t.eigen_power == -0.5 else ''}{'R' if t.random_rotation else ''}{t.d_out}"
    if isinstance(t, faiss.RandomRotationMatrix):
        return f"RR{size}"
    if isinstance(t, faiss.ITQTransform):
        return f"ITQ{size}"
    if isinstance(t, faiss.NormalizationTransform):
        return "L2norm"
    if isinstance(t, faiss.RemapDimensionsTransform):
        return f"Pad{t.d_out}"
    return type(t).__name__


def tuned(index: Any) -> Iterator[tuple[Any, str]]:
    """Yield the search and build parameters inside an index: (the object that has it, its attribute's name)."""
    faiss = load_faiss()
    index = faiss.downcast_index(index)
    if isinstance(index, (faiss.IndexIDMap, faiss.IndexPreTransform)):
        yield from tuned(index.index)
    elif isinstance(index, faiss.IndexRefine):
        yield from tuned(index.base_index)
    elif isinstance(index, faiss.IndexIVF):
        yield index, "nprobe"
    elif isinstance(index, faiss.IndexHNSW):
        yield index.hnsw, "efSearch"
        yield index.hnsw, "efConstruction"
