"""Migrate a vector index from one embedding model to another without re-encoding the corpus, and prove it.

Names are imported when they are first used: applying a saved map loads numpy and safetensors, nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vecferry.errors import (
    BadRowsError,
    DataError,
    IncompatibleError,
    MissingDependencyError,
    StoppedError,
    UnsupportedError,
    UsageError,
    VecferryError,
)

if TYPE_CHECKING:
    from vecferry.assessing import assess
    from vecferry.assessment import Assessment
    from vecferry.cascade import Cascade
    from vecferry.checking import check
    from vecferry.encoders import Encoder, load_encoder
    from vecferry.encoding import encode
    from vecferry.filtering import make_filter
    from vecferry.filters import embed_filter
    from vecferry.fitting import fit
    from vecferry.gate import Gate
    from vecferry.heads import unembedding
    from vecferry.inspection import inspect
    from vecferry.linear import LinearMap
    from vecferry.migration import migrate
    from vecferry.report import Report
    from vecferry.sampling import sample
    from vecferry.store import rollback
    from vecferry.transforming import transform
    from vecferry.warming import warm

__version__ = "0.1.0"

_HOME = {
    "Assessment": "assessment",
    "Cascade": "cascade",
    "Encoder": "encoders",
    "Gate": "gate",
    "LinearMap": "linear",
    "Report": "report",
    "assess": "assessing",
    "check": "checking",
    "embed_filter": "filters",
    "encode": "encoding",
    "fit": "fitting",
    "inspect": "inspection",
    "load_encoder": "encoders",
    "make_filter": "filtering",
    "migrate": "migration",
    "rollback": "store",
    "sample": "sampling",
    "transform": "transforming",
    "unembedding": "heads",
    "warm": "warming",
}

__all__ = [
    "Assessment",
    "BadRowsError",
    "Cascade",
    "DataError",
    "Encoder",
    "Gate",
    "IncompatibleError",
    "LinearMap",
    "MissingDependencyError",
    "Report",
    "StoppedError",
    "UnsupportedError",
    "UsageError",
    "VecferryError",
    "assess",
    "check",
    "embed_filter",
    "encode",
    "fit",
    "inspect",
    "load_encoder",
    "make_filter",
    "migrate",
    "rollback",
    "sample",
    "transform",
    "unembedding",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vecferry' has no attribute {name!r}")
    value = getattr(import_module(f"vecferry.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
