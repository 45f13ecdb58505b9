"""Check a staged store from its own bytes: count, ids, and a sample of vectors against what they should be."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.random import default_rng

from vecferry.batch import IdDigest, id_keys
from vecferry.encoded import TrueRows
from vecferry.errors import DataError
from vecferry.kernel import Kernel
from vecferry.rewrite import Tally
from vecferry.store import Reader, find

RUNS, RUN = 10, 100
"""The sample is RUNS stretches of RUN rows, so that stores which read by blocks read few of them."""
NEARER = 0.9
"""Codes lie at most so much as far from their own translations as from others'; rows that have shifted miss it."""
TOLERANCE = {"float32": 1e-4, "float16": 2e-3}
"""Relative error allowed for each way of storing: rotations inside an index, rounding to 11 bits."""


def verify(
    source: Reader,
    staged: Reader,
    tally: Tally,
    translate: Kernel,
    *,
    seed: int,
    doubled: Collection[Any] = (),
    true: TrueRows | None = None,
) -> float:
    """Return the mean relative error of a seeded sample of staged vectors; raise DataError if anything is wrong.

    A store of quantised codes is asked only that its vectors lie nearer to their own translations than to others'.
    The vectors of `true`, of which a sample is looked at too, must stand there as they are. `doubled` are ids that the
    source holds more than once; they aren't sampled.
    """
    info = staged.info
    where = f"{info.uri}: nothing is published"
    if info.count != tally.written:
        raise DataError(f"{where}: {info.count} rows are in the staged store, {tally.written} were written")
    digest = IdDigest()
    rng = default_rng(seed)
    starts = np.sort(rng.integers(0, max(1, tally.written - RUN + 1), RUNS))
    places = np.unique(starts[:, None] + np.arange(min(RUN, tally.written)))
    chosen: list[pa.Array] = []
    for ids in staged.ids(1 << 16):
        inside = places[np.searchsorted(places, digest.count) : np.searchsorted(places, digest.count + len(ids))]
        chosen.append(ids.take(pa.array(inside - digest.count)))
        digest.update(ids)
    if digest.count != tally.written:
        raise DataError(f"{where}: {digest.count} ids are in the staged store, {tally.written} rows were written")
    if digest.unordered != tally.digest.unordered or (info.ordered and digest.ordered != tally.digest.ordered):
        raise DataError(f"{where}: the staged store's ids are not those that were written")

    sample = pa.concat_arrays(chosen) if chosen else pa.array([], pa.int64())
    if true is not None:
        some = true.ids.take(pa.array(rng.permutation(len(true))[:RUN])).cast(sample.type)
        some = some.filter(pa.array((find(staged, some) >= 0) & ~np.isin(id_keys(some), id_keys(sample))))
        sample = pa.concat_arrays([sample, some])
    if doubled:
        sample = sample.filter(pa.array([i not in doubled for i in sample.to_pylist()]))
    if not len(sample):
        return 0.0
    expected = translate(source.take(sample.cast(source.info.id_type or pa.int64())).vectors)
    if true is not None:
        true.put(sample, expected)
    found = staged.take(sample).vectors
    scale = np.linalg.norm(expected, axis=1) + np.finfo(np.float32).tiny
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged stage may hold anything
        error = np.linalg.norm(found - expected, axis=1) / scale
    if info.lossy and info.dtype not in TOLERANCE:
        others = np.linalg.norm(found - np.roll(expected, len(expected) // 2, axis=0), axis=1) / scale
        if len(sample) >= RUN and error.mean() >= NEARER * others.mean():
            raise DataError(f"{where}: its vectors are as far from their own translations as from those of other rows")
        return float(error.mean())
    wrong = np.flatnonzero(~(error <= TOLERANCE.get(info.dtype, TOLERANCE["float32"])))
    if len(wrong):
        raise DataError(
            f"{where}: {len(wrong)} of {len(sample)} sampled vectors differ from what they should be, the first (id "
            f"{sample[int(wrong[0])]}) by {error[wrong[0]]:.2g} of its length"
        )
    return float(error.mean())
