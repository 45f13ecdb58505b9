"""The verb `transform`: apply a saved map to arrays, with numpy and safetensors only, or to a whole store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vecferry.errors import BadRowsError, DataError, StoppedError, UsageError
from vecferry.linear import Floats, LinearMap, faulty


def transform(vectors: ArrayLike, map: LinearMap | str | Path) -> Floats:
    """Map vectors `[n, d_in]`, or one vector `[d_in]`, to float32 `[n, d_out]` or `[d_out]`.

    Raises UsageError for what isn't an array of real numbers, IncompatibleError for vectors of another dimension, and
    BadRowsError, by their numbers counted from 0, for rows that `transform_store` would refuse too.
    """
    m = map if isinstance(map, LinearMap) else LinearMap.load(map)
    x = _real(vectors)
    rows = x[None] if x.ndim == 1 else x
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        _refuse(faulty(rows), "rows hold NaN, infinite or too large numbers, or nothing but zeros")
        y = m.apply(rows)
        _refuse(faulty(y), "rows are mapped to nothing but zeros, or beyond what float32 holds")
    return y[0] if x.ndim == 1 else y


def _real(vectors: ArrayLike) -> Floats:
    """Return an array of numbers as float32; numpy would cut complex ones, and read numbers out of text."""
    try:
        given = np.asarray(vectors)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the vectors can't be read as an array [n, d] of numbers: {error}") from error
    if given.dtype.kind in "cOSUMm" or given.ndim not in (1, 2):
        raise UsageError(
            f"the vectors must be real numbers, [n, d] or one vector [d], not {given.dtype} {list(given.shape)}"
        )
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, and is refused
        return given.astype(np.float32, copy=False)


def _refuse(bad: NDArray[np.bool_], fault: str) -> None:
    if bad.any():
        raise BadRowsError("the vectors", fault, np.flatnonzero(bad).tolist(), "Leave them out or mend them.")


def transform_store(vectors: str, map: LinearMap | str | Path, output: str) -> int:
    """Map all vectors of a store into a new store at `output`; return the number of rows.

    Ids and payload stay. Raises UsageError for an output that exists, BadRowsError for rows that can't be mapped, and
    IncompatibleError for vectors of the side that the map leads to.
    """
    from vecferry.compressing import of_space
    from vecferry.kernel import cpu_count, kernel
    from vecferry.plan import make_plan
    from vecferry.prechecks import check_payload, check_taken
    from vecferry.rewrite import rewrite
    from vecferry.store import Uri, open_writer, opened

    m = map if isinstance(map, LinearMap) else LinearMap.load(map)
    if Path(Uri.parse(output).path).exists():
        raise UsageError(f"{output} exists: choose another name")
    with opened(vectors) as reader:
        if m.card is None:
            raise UsageError("the map has no card: give it one with with_card()")
        if m.card.direction == "filter":
            m = of_space(m, reader.info)
        assert m.card is not None
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
            except BaseException as error:
                writer.abort()
                if isinstance(error, StoppedError):  # of a writer, because of what the system said
                    raise DataError(
                        f"{output} was not written ({error.__cause__}): put that right, and start again"
                    ) from error
                raise
        return tally.written
