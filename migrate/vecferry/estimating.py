"""What a migration would take, and whether it could begin: `migrate --dry-run`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vecferry.encoded import TrueRows
from vecferry.errors import UsageError, VecferryError
from vecferry.gate import Gate
from vecferry.kernel import kernel
from vecferry.linear import Card, LinearMap
from vecferry.plan import Plan, is_built_in_memory
from vecferry.prechecks import check_payload, check_space, free_bytes
from vecferry.store import Reader, open_writer

TIMED = 4
"""Batches from which the time of all is foretold."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Say what a migration would take.

    nbytes   on disk, the stage included; `free` where that is a folder
    seconds  to read and multiply, extrapolated from a few batches; writing, verifying and an index build come on top
    memory   bytes, an index that FAISS builds in memory included
    target   what would be built: kind, index (a factory string), dtype, dimension, metric, id type, parameters
    map      by what: the spaces that it leads from and to, its solver, and the first 16 digits of its sha256
    gate     the conditions as they were read, None without a gate
    """

    rows: int
    nbytes: int
    free: int | None
    seconds: float
    memory: int
    target: Mapping[str, Any]
    map: Mapping[str, Any]
    gate: tuple[str, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)

    def table(self) -> str:
        """Write the numbers for people."""
        free = "" if self.free is None else f" ({self.free:,} are free)"
        target, map, gate = self.target, self.map, self.gate
        structure = f"{target['kind']} {target['index']}".rstrip()
        parameters = "".join(f", {name} {value}" for name, value in target["parameters"].items())
        ids = "rows numbered from 0" if target["id_type"] is None else f"ids {target['id_type']}"
        conditions = "none: nothing would block" if gate is None else "; ".join(gate) + ", as indexed, by the lower end"
        return (
            f"target    {structure}, dtype {target['dtype']}, {target['dim']} dimensions, metric {target['metric']}, "
            f"{ids}{parameters}\n"
            f"map       {map['source'] or 'an unnamed space'} -> {map['target'] or 'an unnamed space'}, "
            f"{map['solver']}, sha256 {map['sha256']}\n"
            f"gate      {conditions}\n"
            f"rows      {self.rows:,}\n"
            f"disk      about {self.nbytes:,} bytes, the stage included{free}\n"
            f"memory    about {self.memory / 2**20:,.0f} MiB\n"
            f"time      at least {self.seconds:,.0f} s to read and multiply\n"
            "dry run: nothing was written"
        )


def estimate(
    reader: Reader,
    plan: Plan,
    m: LinearMap,
    card: Card,
    gate: Gate | None,
    true: TrueRows | None,
    *,
    batch_size: int,
    threads: int,
    device: str,
    payload: str,
    overwrite: bool,
) -> Estimate:
    """Check what a migration would refuse, time a few batches, and write nothing that stays.

    The target's structure is tried in a folder elsewhere. Raises what `migrate` would raise before any work.
    """
    count, target = reader.info.count or 0, Path(plan.destination.path)
    if os.path.lexists(target) and not overwrite:
        raise UsageError(f"{target} exists: choose another name, or --overwrite to swap it and keep a backup")
    if free_bytes(plan.destination) is None:
        raise UsageError(f"{target.parent} is not a folder: make it first")
    check_space(plan)
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = replace(plan.destination, path=str(Path(folder) / target.name))
        try:
            with open_writer(elsewhere, plan.target, threads=threads) as writer:
                check_payload(reader.info, plan.target.kind, writer.capabilities, payload)
                writer.abort()
        except VecferryError as error:  # it happened elsewhere, but it is about the destination
            raise type(error)(str(error).replace(elsewhere.path, plan.destination.path)) from error
    started, rows = time.perf_counter(), 0
    with kernel(m, device, threads) as translate:
        for batch in reader.read(batch_size):
            translate(batch.vectors)
            rows += len(batch)
            if rows >= TIMED * batch_size:
                break
    seconds = (time.perf_counter() - started) * count / rows
    # batches on their way, ids, true vectors, and an index that FAISS builds in memory
    memory = 8 * batch_size * (m.d_in + m.d_out) * 4 + 16 * count
    memory += 0 if true is None else 3 * true.vectors.nbytes
    memory += plan.nbytes // 2 if is_built_in_memory(plan.target) else 0
    built = plan.target
    return Estimate(
        rows=count,
        nbytes=plan.nbytes,
        free=free_bytes(plan.destination),
        seconds=seconds,
        memory=200 * 2**20 + memory,
        target={
            "kind": built.kind,
            "index": built.index or ("Flat" if built.kind == "faiss" else ""),
            "dtype": built.dtype,
            "dim": built.dim,
            "metric": built.metric,
            "id_type": None if built.id_type is None else str(built.id_type),
            "parameters": {**built.parameters, **plan.destination.options},
        },
        map={
            "source": card.source.space,
            "target": card.target.space,
            "solver": card.solver,
            "sha256": card.sha256[:16],
        },
        gate=None if gate is None else tuple(map(str, gate.conditions)),
    )
