"""Hubness: how unevenly a search finds its documents, some of them always, some of them never."""

from __future__ import annotations

import numpy as np

from vecferry.recall import Places


def hubness(found: Places, documents: int) -> tuple[float, float]:
    """Return the skew of how often documents are found, and the share never found.

    `found` `[q, k]` are places among this many documents, -1 for none. The skew is the third standardised moment
    of the k-occurrences N_k (Radovanović, Nanopoulos and Ivanović 2010, section 3), 0 where all are found equally
    often. Both depend on the numbers of queries and documents: compare them between searches of the same ones.
    """
    times = np.bincount(found[found >= 0], minlength=documents).astype(np.float64)
    apart = times - times.mean()
    spread = float(np.sqrt(np.mean(apart**2)))
    return float(np.mean(apart**3)) / spread**3 if spread else 0.0, float((times == 0).mean())
