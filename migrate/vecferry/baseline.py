"""The regression gate: has an index become worse than an earlier report of it, on the same queries?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from vecferry.errors import DataError, UsageError
from vecferry.gate import MIN_QUERIES, WORST, Decision, Gate, Judgement, more_queries
from vecferry.measured import AS_INDEXED, Evaluation
from vecferry.recall import Values, interval
from vecferry.report import Report

MAX_DROP = 0.01
GROWTH = 0.02
"""How much the number of documents may have changed: agreement falls as they grow, by itself."""
SAME = 0.01
"""How far apart two probes of one query may lie, after rounding to float16; those of two queries lie about 1 apart."""


def load_baseline(baseline: Report | str | Path, max_drop: float) -> Report:
    """Read an earlier report; raise DataError if it can't be compared with, UsageError if `max_drop` is no share."""
    if not 0 <= max_drop < 1:
        raise UsageError(f"--max-drop is {max_drop}: it is a share, such as {MAX_DROP}")
    report = baseline if isinstance(baseline, Report) else Report.load(baseline)
    if report.evaluation is None or not report.evaluation.per_query:
        where = "the baseline" if isinstance(baseline, Report) else str(baseline)
        raise DataError(
            f"{where} holds no values per query, so nothing can be paired with it: make it with this vecferry"
        )
    return report


def compare(
    evaluation: Evaluation, baseline: Report, gate: Gate | None, *, max_drop: float = MAX_DROP, seed: int = 0
) -> Decision:
    """Judge how far the row "as indexed" has dropped since a report, by a bootstrap over pairs of values of one query.

    Compared are the metrics that the gate names, what retention and worst slices are made of included; without a
    gate agreement@k, or doc-agreement@k where documents stood in as queries. A metric passes if the lower end of
    the 95 % interval of the mean change is at least -max_drop, fails if the mean change itself is below that, and
    is inconclusive between the two: then the message says how many queries would decide. It is inconclusive, too,
    where there is nothing to pair: other documents, or too few common queries.
    """
    judgements = tuple(
        _judge(metric, k, evaluation, baseline, max_drop, seed) for metric, k in _wanted(evaluation, gate)
    )
    return Decision(" and ".join(j.condition for j in judgements), judgements)


def _wanted(evaluation: Evaluation, gate: Gate | None) -> list[tuple[str, int]]:
    if gate is not None:
        plain = [replace(c, metric=c.metric.removeprefix(WORST).removeprefix("retention.")) for c in gate.conditions]
        return list(dict.fromkeys((c.metric, c.k) for c in plain))
    names = {name for per_query in evaluation.per_query for name in per_query.values}
    asked = f"agreement@{evaluation.k}" in names
    return [("agreement" if asked else "doc-agreement", evaluation.k)]


def _judge(metric: str, k: int, now: Evaluation, baseline: Report, max_drop: float, seed: int) -> Judgement:
    def judgement(outcome: Literal["pass", "fail", "inconclusive"], message: str) -> Judgement:
        return Judgement(f"drop.{metric}@{k}<={max_drop:g}", outcome, message)

    name = f"{metric}@{k}"
    before = baseline.evaluation
    assert before is not None
    values = [_values(evaluation, name) for evaluation in (before, now)]
    cells = [evaluation.cell(AS_INDEXED, metric, k) for evaluation in (before, now)]
    for which, known, cell in zip(("in the baseline", "now"), values, cells, strict=True):
        if not known or cell is None:
            reason = cell.reason if cell is not None and cell.reason else f"not measured with k = {k}"
            return judgement("inconclusive", f"{name} can't be compared: {which} {reason}")
    sizes = [cell.documents for cell in cells if cell is not None]
    if abs(sizes[1] - sizes[0]) > GROWTH * sizes[0]:
        return judgement(
            "inconclusive",
            f"{name} was measured among {sizes[0]:,} documents and now among {sizes[1]:,}: numbers for sizes more than "
            f"{GROWTH:.0%} apart say nothing about a change; make the baseline again at the new size",
        )
    if None not in (before.held_out, now.held_out) and before.held_out != now.held_out:
        return judgement(
            "inconclusive",
            f"{name} was measured among other held-out documents than now, so the difference isn't one of the index "
            "alone: make the baseline again with this map",
        )
    old, new, others = _pair(*values, by_vector=metric not in ("recall", "ndcg"))
    asked = cells[1].asked if cells[1] is not None else "queries"
    common = f"on {len(old):,} common {asked} ({len(values[0]):,} in the baseline, {len(values[1]):,} now)"
    if others:
        common += f", {others:,} more have other vectors under the same ids"
    if len(old) < MIN_QUERIES:
        return judgement("inconclusive", f"{name} can't be compared {common}: at least {MIN_QUERIES} are needed")
    change, low, high = interval(new - old, seed=seed)
    measured = (
        f"{name} went from {old.mean():.3f} to {new.mean():.3f}: {change:+.4f} [{low:+.4f}, {high:+.4f}] {common}"
    )
    tiny = 1e-9  # the mean of equal drops isn't to fail by a rounding
    if low >= -max_drop - tiny:
        return judgement("pass", f"{measured}: the lower end is above {-max_drop:g}")
    if change < -max_drop - tiny:
        return judgement("fail", f"{measured}: a drop of more than {max_drop:g}")
    more = more_queries(len(old), change, low, -max_drop)
    return judgement("inconclusive", f"{measured}: the lower end is below {-max_drop:g}; {more}")


def _values(evaluation: Evaluation, name: str) -> dict[str, tuple[float, float]]:
    found = [per_query for per_query in evaluation.per_query if name in per_query.values]
    return found[0].read(name) if found else {}


def _pair(
    before: dict[str, tuple[float, float]], now: dict[str, tuple[float, float]], *, by_vector: bool
) -> tuple[Values, Values, int]:
    """Return the values of queries that both reports have, and how many were left out for their vectors.

    Labels belong to a query's id, whatever model encodes it. True neighbours belong to its vector: where ids are
    numbers of rows, another query may stand under the same id.
    """
    keys = [key for key in before if key in now]
    same = [key for key in keys if not by_vector or abs(before[key][1] - now[key][1]) <= SAME]
    old, new = (np.array([values[key][0] for key in same]) for values in (before, now))
    return old, new, len(keys) - len(same)
