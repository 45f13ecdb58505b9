"""What the lengths of vectors say about how their space ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vecferry.batch import Floats
from vecferry.errors import UsageError
from vecferry.recall import Metric
from vecferry.store import StoreInfo

METRICS: tuple[Metric, ...] = ("cosine", "ip", "l2")
AGREE = 0.01
"""Norms whose largest is at most this part above the smallest are one length."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Hold the smallest, the median and the largest norm of some vectors."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, x: Floats) -> Norms:
        """Measure the norms of rows."""
        norms = np.linalg.norm(x, axis=1).astype(np.float64)
        return cls(*(float(f"{v:.6g}") for v in (norms.min(), np.median(norms), norms.max())))

    @property
    def agree(self) -> bool:
        """Whether they are one length."""
        return self.high <= self.low * (1 + AGREE)

    def __str__(self) -> str:
        return f"from {self.low:.4g} to {self.high:.4g}, median {self.median:.4g}"


def metric_of(norms: Norms, info: StoreInfo) -> Metric:
    """Return cosine for target vectors of one length; raise UsageError for others, whose ranking rule can't be told."""
    if norms.agree:
        return "cosine"
    recorded = f" (the store says {info.metric})" if info.metric else ""
    raise UsageError(
        f"{info.uri}: norms go {norms} and don't agree within {AGREE:.0%}, so how this space ranks can't be told"
        f"{recorded}: say --metric cosine, ip or l2"
    )


def metric_warnings(metric: Metric, norms: tuple[Norms, Norms], old: StoreInfo, new: StoreInfo) -> list[str]:
    """Say where the metric that a map ranks by is not what its ends make of their vectors' lengths."""
    found = []
    if metric == "cosine":
        for info, length in ((old, norms[0]), (new, norms[1])):
            if info.metric in ("ip", "l2") and not length.agree:
                found.append(
                    f"{info.uri} ranks by {info.metric} and its norms go {length}: lengths count there, but not under "
                    "cosine, by which the map ranks"
                )
    elif norms[1].agree:
        found.append(
            f"{new.uri}: all norms are {norms[1].median:.4g}, so {metric} ranks like cosine there; but only a map "
            "for cosine gives vectors of one length: --metric cosine"
        )
    return found
