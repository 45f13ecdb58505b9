"""The verb `check`: the numbers and the gate alone, on any index, by a map's hold-out or at full size."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from vecferry.asking import Asked, same_space
from vecferry.attribution import attribute
from vecferry.baseline import MAX_DROP, compare, load_baseline
from vecferry.compressing import compress, filter_of, recorded, require_filter, unmapped
from vecferry.encoded import TrueRows
from vecferry.errors import UsageError
from vecferry.evaluate import evaluate
from vecferry.gate import Gate, decide, join
from vecferry.holdout import holdout_of
from vecferry.linear import LinearMap
from vecferry.prechecks import card_of, check_exact, check_truth
from vecferry.report import Report
from vecferry.slices import Slicing
from vecferry.store import Reader, Uri, opened
from vecferry.truthcheck import evaluate_with_truth


def check(
    destination: str | Uri | Reader | Any,
    *,
    map: LinearMap | str | Path | None = None,
    filter: LinearMap | str | Path | None = None,
    truth: str | Uri | Reader | Any | None = None,
    queries: str | Uri | Reader | Any | None = None,
    source_queries: str | Uri | Reader | Any | None = None,
    qrels: str | Path | None = None,
    gate: str | Gate | None = None,
    slice: str | None = None,
    slice_file: str | Path | None = None,
    source_exact: str | Uri | Reader | Any | None = None,
    baseline: Report | str | Path | None = None,
    max_drop: float | None = None,
    k: int = 10,
    seed: int = 0,
) -> Report:
    """Compare an index with true re-embedding, and apply a gate.

    map           measure on its hold-out: every row of the report, at the size of the hold-out
    filter        the filter that the index was made with: it is asked through it, and what it finds is compared with
                  re-embedding in all dimensions
    truth         a store of all documents encoded by the new model: measure at full size instead, joined by id
    queries       a store of the new model's query vectors, in place of the hold-out's; `source_queries` the old
                  model's for the same ids, without `truth`; `qrels` labels by query and document id
    slice         a payload column of the index or of `truth`, or of `slice_file`, a Parquet file with ids in the
                  column `id`: measure each of its values by itself too
    source_exact  a store of exact source vectors, at least of the held-out ids: where the source stored codes, it
                  tells apart what is lost to them and what to the map; with a map and without `truth`
    baseline      an earlier report, or its file: the metrics of the gate, or else agreement, must not have dropped by
                  more than `max_drop` on the same queries (see `baseline.compare`)

    With `truth` and neither `queries` nor a map that has some, documents stand in as queries. Raises UsageError
    with neither map nor truth, IncompatibleError where spaces or dimensions differ or `truth` is none (see
    `prechecks.check_truth`), DataError where `truth` and the index don't hold the same ids, and BadRowsError for
    queries and true vectors that can't be used.
    """
    if map is None and truth is None and filter is None:
        raise UsageError(
            "nothing to compare with: pass a map (--map), a filter (--filter) or a store of true vectors (--truth)"
        )
    wanted = Gate.of(gate)
    if max_drop is not None and baseline is None:
        raise UsageError("--max-drop goes with --baseline: there is no earlier report to have dropped from")
    max_drop = MAX_DROP if max_drop is None else max_drop
    before = None if baseline is None else load_baseline(baseline, max_drop)
    m = map if map is None or isinstance(map, LinearMap) else LinearMap.load(map)
    if m is not None and m.card is not None:
        card_of(m, "document")
    if source_queries is not None and (m is None or queries is None):
        raise UsageError("--source-queries goes with --map and --queries, to which they are matched by id")
    if source_queries is not None and truth is not None:
        raise UsageError(
            "--source-queries goes without --truth: the old queries ask the old index, and at full size there is no "
            "status quo to ask them of"
        )
    if source_exact is not None and (m is None or truth is not None):
        raise UsageError(
            "--source-exact goes with --map and without --truth: what the source's codes lost is measured on the map's "
            "hold-out"
        )
    nothing = nullcontext()
    with (
        opened(destination) as index,
        nothing if truth is None else opened(truth) as true,
        nothing if source_exact is None else opened(source_exact) as exact,
    ):
        f = None if filter is None else filter_of(filter)
        require_filter(index.info, f)
        ask = None
        if f is not None:
            m = m if m is None else compress(m, f)
            ask = recorded(f, index.info) if m is None else m.ask
            if m is None and truth is None:
                m = unmapped(recorded(f, index.info))  # what the filter holds out measures it
        if m is not None:
            space = m.card.space if m.card is not None else None
            same_space(index, space, m.d_out, f"the map {m.path or ''}".strip())
        if true is not None:
            check_truth(index, true, m)
        slicing = Slicing.of(slice, slice_file, (index, true), wanted)
        asked = Asked.read(index, m, queries, source_queries, qrels, ask)
        if true is not None:
            evaluation, losses = evaluate_with_truth(index, true, m, asked, wanted, slicing, k, seed, ask)
        else:
            assert m is not None
            holdout = holdout_of(m)
            if exact is not None:
                check_exact(exact, m, holdout)
            mixed = TrueRows.recorded(index.info.provenance, holdout, m.card)
            held = asked.of(holdout if mixed is None else holdout.take(mixed.held_in.measured))
            evaluation = evaluate(held, m, staged=index, gate=wanted, slicing=slicing, k=k, seed=seed)
            lossy = index.info.provenance.get("source_lossy")
            losses = attribute(held, m, index, evaluation, exact=exact, lossy=lossy, true=mixed, seed=seed)
        facts = {
            "destination": index.info.uri,
            "rows": index.info.count,
            "index": index.info.index,
            "parameters": dict(index.info.parameters),
            "lossy": index.info.lossy,
            "space": index.info.space,
            "filter": ask.card.sha256 if ask is not None and ask.card is not None else None,
            "map": m.card.sha256 if m is not None and m.card is not None else None,
            "truth": true.info.uri if true is not None else None,
            "baseline": str(baseline) if isinstance(baseline, (str, Path)) else None,
        }
    warnings = () if m is None else asked.warnings(m)
    decisions = [] if wanted is None else [decide(wanted, evaluation)]
    if before is not None:
        decisions.append(compare(evaluation, before, wanted, max_drop=max_drop, seed=seed))
    return Report(facts, evaluation, join(decisions), warnings, attribution=losses)
