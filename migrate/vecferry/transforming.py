"""The verb `transform`: apply a saved map to arrays, with numpy and safetensors only, or to a whole store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from vecferry.errors import DataError, UsageError
from vecferry.linear import Floats, LinearMap


def transform(vectors: ArrayLike, map: LinearMap | str | Path) -> Floats:
    """Map vectors `[n, d_in]`, or one vector `[d_in]`, to float32 `[n, d_out]` or `[d_out]`.

    Raises IncompatibleError for vectors of another dimension, DataError for NaN or infinite ones.
    """
    m = map if isinstance(map, LinearMap) else LinearMap.load(map)
    x = np.asarray(vectors, dtype=np.float32)
    rows = x[None] if x.ndim == 1 else x
    if not np.isfinite(rows).all():
        raise DataError("the vectors hold NaN or infinite numbers: leave those rows out")
    y = m.apply(rows)
    return y[0] if x.ndim == 1 else y


def transform_store(vectors: str, map: LinearMap | str | Path, output: str) -> int:
    """Map all vectors of a store into a new store at `output`; return the number of rows.

    Ids and payload stay. Raises UsageError for an output that exists, BadRowsError for rows that can't be mapped, and
    IncompatibleError for vectors of the side that the map leads to.
    """
    from vecferry.kernel import cpu_count, kernel
    from vecferry.plan import make_plan
    from vecferry.prechecks import check_payload, check_taken
    from vecferry.rewrite import rewrite
    from vecferry.store import open_writer, opened

    m = map if isinstance(map, LinearMap) else LinearMap.load(map)
    with opened(vectors) as reader:
        if m.card is None:
            raise UsageError("the map has no card: give it one with with_card()")
        check_taken(reader, m, m.card)
        plan = make_plan(reader, output, m, m.card)
        threads = cpu_count()
        with (
            open_writer(plan.destination, plan.target, threads=threads) as writer,
            kernel(m, threads=threads) as translate,
        ):
            try:
                check_payload(reader.info, plan.target.kind, writer.capabilities, "keep")
                tally = rewrite(reader, writer, translate, batch_size=8192)
                writer.staged().__exit__(None, None, None)
                writer.commit()
            except BaseException:
                writer.abort()
                raise
        return tally.written
