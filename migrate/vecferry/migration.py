"""The verb `migrate`: plan, rewrite, verify, measure, publish, in this order and no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vecferry.aside import publish_payload, stage_payload
from vecferry.compressing import FILTER, alone, compress, filter_of
from vecferry.encoded import TrueRows
from vecferry.errors import BadRowsError, DataError, StoppedError, UsageError
from vecferry.estimating import Estimate, estimate
from vecferry.gate import Gate
from vecferry.holdout import Holdout, holdout_of
from vecferry.kernel import choose_device, cpu_count, kernel
from vecferry.linear import LinearMap
from vecferry.measuring import Measure, Measured
from vecferry.pairs import BadRows
from vecferry.plan import Plan, finished, make_plan, stamp_of
from vecferry.prechecks import card_of, check_apart, check_exact, check_gate, check_payload, check_source, check_space
from vecferry.report import Report
from vecferry.rewrite import duplicates, rewrite
from vecferry.slices import Slicing
from vecferry.store import Reader, StoreInfo, Uri, Writer, open_reader, open_writer, opened
from vecferry.verify import verify

BATCH = 8192


def migrate(
    source: Any,
    destination: str | Path | Uri,
    map: LinearMap | str | Path | None = None,
    *,
    filter: LinearMap | str | Path | None = None,
    index: str | None = None,
    gate: str | Gate | None = None,
    slice: str | None = None,
    slice_file: str | Path | None = None,
    source_exact: Any = None,
    encoded: Any = None,
    dtype: str = "float32",
    resume: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    batch_size: int = BATCH,
    threads: int | None = None,
    device: str = "auto",
    bad_rows: str = "fail",
    duplicate_ids: str = "fail",
    drop_payload: bool = False,
    payload: str | Path | None = None,
    allow_lossy: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> Report | Estimate:
    """Translate every vector of `source` into a new store at `destination`, and publish it if it passes the gate.

    source         a store's address, an open reader, or an in-memory FAISS index
    map            a map of direction "document", or its folder; its hold-out is what the gate measures with
    filter         a filter that every vector goes through behind the map, or its folder; without a map it shrinks the
                   index in its own space. Queries have to go through it too, and the index records which it is
    index          a FAISS factory string; None for the source's own structure at the new dimension
    gate           "agreement@10>=0.35 and ..."; without one the report is made and nothing blocks
    slice          a payload column of the source, or of `slice_file`, a Parquet file with ids in the column `id`:
                   measure each of its values by itself too
    source_exact   a store of exact source vectors, at least of the held-out ids: where the source stores codes, it
                   tells apart what is lost to them and what to the map
    encoded        a store of the new model's vectors for some ids: they stand in the index in the place of their
                   translations, if they are found among those (see `measure_mix`); otherwise nothing is published
    dtype          how the target stores elements: "float32" or "float16"
    bad_rows       what to do with NaN, infinite, zero and malformed rows: "fail" or "skip"
    duplicate_ids  "fail", or "keep-last": of rows with one id only the last is kept
    payload        a Parquet file for the columns that the target can't hold; `drop_payload` leaves them behind

    Nothing is visible at `destination` before the gate has passed. A stopped run continues with `resume`, to the
    same bytes. With `dry_run` an Estimate is returned and nothing is written; of a migration that was finished before,
    a Report that says so and measures nothing. Raises UsageError, DataError,
    IncompatibleError before any work where the input or the options can't work, BadRowsError when a bad row is met,
    and StoppedError when interrupted.
    """
    bad = BadRows.of(bad_rows)
    if duplicate_ids not in ("fail", "keep-last") or dtype not in ("float32", "float16"):
        raise UsageError("duplicate_ids is fail or keep-last, dtype is float32 or float16")
    if batch_size < 1 or (threads is not None and threads < 1):
        raise UsageError("batch_size and threads must be at least 1")
    if drop_payload and payload is not None:
        raise UsageError("--drop-payload and --payload exclude each other")
    device = choose_device(device)
    threads = threads or cpu_count()
    wanted = Gate.of(gate)
    if map is None and filter is None:
        raise UsageError("nothing to migrate with: pass a map (--map), a filter (--filter), or both")
    if filter is not None and encoded is not None:
        raise UsageError(
            "--encoded puts true vectors among translated ones, --filter has none of all dimensions: drop one"
        )
    f = None if filter is None else filter_of(filter)
    nothing = nullcontext()
    with opened(source) as reader, nothing if source_exact is None else opened(source_exact) as exact:
        if not reader.info.count:
            raise DataError(f"{reader.info.uri} is empty: there is nothing to migrate")
        m = _route(map, f, reader, seed)
        card = card_of(m, "document")
        holdout = _holdout(m, required=wanted is not None)
        slicing = Slicing.of(slice, slice_file, (reader,), wanted)
        warnings = check_source(reader, m, card, holdout, allow_lossy=allow_lossy)
        if exact is not None:
            check_exact(exact, m, holdout)
        true = None
        if encoded is not None:
            with opened(encoded) as store:
                true = TrueRows.read(store, reader, holdout, card, seed, bad)
        measured_on = holdout if true is None or holdout is None else holdout.take(true.held_in.measured)
        check_gate(wanted, measured_on, reader.info.count)
        measure = Measure(reader, m, holdout, wanted, slicing, exact, true, seed)
        keep = "drop" if drop_payload else "keep" if payload is None else "aside"
        rules = {"bad_rows": bad_rows, "duplicates": duplicate_ids, "payload": keep}
        plan = make_plan(reader, destination, m, card, index=index, dtype=dtype, true=true, seed=seed, **rules)
        aside = None if payload is None else Path(payload)
        if (published := finished(plan, reader.info)) is not None:
            if dry_run:
                missing = None if aside is None or aside.exists() else aside
                return _already(plan, reader, published, missing, Measured(), would=True)
            written = _complete(plan, reader, aside, batch_size, skip=bad.skip)
            return _already(plan, reader, published, written, _judge_again(plan, measure))
        check_apart(reader.info, plan, m, aside)
        doubled, drop = duplicates(reader)
        if doubled and duplicate_ids == "fail":
            cure = "Mend the source, or keep the last row of each with --duplicates keep-last."
            raise BadRowsError(reader.info.uri, "ids occur more than once", doubled, cure)
        job = _Job(reader, plan, m, measure, batch_size, bad.skip, drop, set(doubled), keep, threads, device)
        if dry_run:
            return estimate(
                reader,
                plan,
                m,
                card,
                wanted,
                true,
                batch_size=batch_size,
                threads=threads,
                device=device,
                payload=keep,
                overwrite=overwrite,
            )
        with open_writer(plan.destination, plan.target, resume=resume, overwrite=overwrite, threads=threads) as writer:
            return job.run(writer, warnings, aside, progress)


@dataclass(frozen=True, slots=True)
class _Job:
    """Hold what all steps of one migration share."""

    reader: Reader
    plan: Plan
    m: LinearMap
    measure: Measure
    batch_size: int
    skip: bool
    drop: NDArray[np.int64]
    doubled: set[Any]
    keep: str
    threads: int
    device: str

    def run(
        self,
        writer: Writer,
        warnings: tuple[str, ...],
        aside: Path | None,
        progress: bool,
    ) -> Report:
        """Rewrite, verify, measure, publish; where that stops early, leave only a stage that can be resumed."""
        reader, plan = self.reader, self.plan
        try:
            check_payload(reader.info, plan.target.kind, writer.capabilities, self.keep)
            check_space(plan, writer.progress.rows)
            clock = [time.perf_counter()]
            with kernel(self.m, self.device, self.threads) as translate:
                with _bar(reader.info.count, progress) as advance:
                    tally = rewrite(
                        reader,
                        writer,
                        translate,
                        stamp=stamp_of(reader.info),
                        batch_size=self.batch_size,
                        skip=self.skip,
                        drop=self.drop,
                        payload=self.keep == "keep",
                        true=self.measure.true,
                        advance=advance,
                    )
                if not tally.written:
                    raise DataError(f"{reader.info.uri}: none of its {tally.read} rows can be translated")
                clock.append(time.perf_counter())
                with writer.staged() as staged:
                    clock.append(time.perf_counter())
                    error = verify(
                        reader,
                        staged,
                        tally,
                        translate,
                        seed=self.measure.seed,
                        doubled=self.doubled,
                        true=self.measure.true,
                    )
                    clock.append(time.perf_counter())
                    measured = self.measure.of(staged)
                    info = staged.info
            clock.append(time.perf_counter())
            published = measured.decision is None or measured.decision.passed
            facts = _facts(reader, plan) | {
                "bytes": [reader.info.nbytes, info.nbytes],
                "index": info.index,
                "parameters": dict(info.parameters),
                "read": tally.read,
                "written": tally.written,
                "skipped": tally.skipped,
                "skipped_ids": tally.skipped_ids,
                "verified_error": error,
                "published": published,
            }
            if published:
                if aside is not None:
                    stage_payload(reader, aside, self.batch_size, skip=self.skip, drop=self.drop)
                facts["backup"] = writer.commit()
                if aside is not None:
                    publish_payload(aside)
            clock.append(time.perf_counter())
        except DataError:
            writer.abort()
            raise
        except UsageError:
            if writer.progress.rows == 0:  # refused before any work: nothing is worth keeping
                writer.abort()
            raise
        except OSError as error:  # what a writer meets is a StoppedError already
            where = "" if error.filename is not None else f"{reader.info.uri}: "
            raise StoppedError(
                f"{where}{error}; {self._done(writer)}: put that right, then the same command with --resume continues"
            ) from error
        except KeyboardInterrupt:
            raise StoppedError(f"stopped; {self._done(writer)}: the same command with --resume continues") from None
        names = ("rewrite", "build", "verify", "measure", "publish")
        timing = {name: b - a for name, a, b in zip(names, clock, clock[1:], strict=False)}
        return _report(facts, measured, warnings, timing)

    def _done(self, writer: Writer) -> str:
        return f"{writer.progress.rows:,} of {self.reader.info.count:,} rows are safe in the stage"


def _complete(plan: Plan, reader: Reader, aside: Path | None, batch_size: int, *, skip: bool) -> Path | None:
    """Do what a run that was killed just after its publication left undone; return the payload's file if that was."""
    with suppress(UsageError), open_writer(plan.destination, plan.target, resume=True, overwrite=True) as writer:
        writer.abort()  # an empty stage
    if aside is None or aside.exists():
        return None
    stage_payload(reader, aside, batch_size, skip=skip, drop=duplicates(reader)[1])
    publish_payload(aside)
    return aside


def _judge_again(plan: Plan, measure: Measure) -> Measured:
    """Hold what is published to the gate."""
    if measure.gate is None and measure.true is None:
        return Measured()
    with open_reader(plan.destination) as target:
        return measure.of(target)


def _already(
    plan: Plan, reader: Reader, published: StoreInfo, written: Path | None, measured: Measured, *, would: bool = False
) -> Report:
    """Say that this very migration was finished before, and that its target stays whatever the gate says of it now."""
    what = "nothing" if written is None else f"only {written}"
    did = "would be" if would else "was"
    note = f"{plan.destination.path} was finished and published by this very migration before: {what} {did} written"
    if measured.decision is not None and not measured.decision.passed:
        note += "; it stays published, though this gate did not pass"
    facts = _facts(reader, plan) | {"written": published.count, "published": True}
    return _report(facts, measured, (note,), {})


def _report(facts: dict[str, Any], measured: Measured, warnings: tuple[str, ...], timing: dict[str, float]) -> Report:
    return Report(facts, measured.evaluation, measured.decision, warnings, timing, attribution=measured.attribution)


def _route(map: LinearMap | str | Path | None, f: LinearMap | None, reader: Reader, seed: int) -> LinearMap:
    """Return what carries the source's vectors: a map, a filter, or both in one."""
    if map is None:
        assert f is not None
        return alone(f, reader, seed)
    m = map if isinstance(map, LinearMap) else LinearMap.load(map)
    card_of(m, "document")
    return m if f is None else compress(m, f)


def _holdout(m: LinearMap, *, required: bool) -> Holdout | None:
    """Return the map's hold-out; only a gate can't do without one."""
    try:
        return holdout_of(m)
    except UsageError:
        if required:
            raise
        return None


def _facts(reader: Reader, plan: Plan) -> dict[str, Any]:
    """Return what a report says of a migration whatever its outcome."""
    provenance = plan.target.provenance
    return {
        "source": reader.info.uri,
        "destination": str(plan.destination),
        "source_model": provenance["source_model"],
        "target_model": provenance["target_model"],
        "map": provenance["map"],
        "filter": provenance.get(FILTER, {}).get("sha256"),
        "dimensions": [reader.info.dim, plan.target.dim],
        "lossy": reader.info.lossy,
        "true_vectors": provenance.get("encoded", {}).get("rows"),
    }


@contextmanager
def _bar(total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of rows on stderr, where that is a terminal and `shown`."""
    with tqdm(total=total, unit=" rows", unit_scale=True, disable=None if shown else True) as bar:

        def advance(rows: int) -> None:
            bar.update(rows)

        yield advance
