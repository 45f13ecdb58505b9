"""Are true vectors found among translated ones? Their share of what is found, and of what should be found."""

from __future__ import annotations

from vecferry.bench import Bench
from vecferry.encoded import TrueRows
from vecferry.evaluate import index_way, present
from vecferry.gate import MIN_QUERIES, Decision, Judgement
from vecferry.holdout import Holdout
from vecferry.measured import AS_INDEXED, RE_EMBEDDED, Cell, Row
from vecferry.recall import Metric, interval, without
from vecferry.store import Reader

HALF = 0.5
"""The share of what it should be that true rows must have of the first k found; less, and they are being lost."""
FEW = 30
"""Fewer true rows among all that should be found say nothing."""
CURE = "migrate without --encoded, and keep the true vectors in a cascade's cache"


def measure_mix(
    staged: Reader, true: TrueRows, holdout: Holdout, metric: Metric, k: int, seed: int
) -> tuple[tuple[Row, ...], Decision]:
    """Return the true rows' share of the first k as indexed and by re-embedding, and whether that is enough.

    It is measured in the mixed index itself, among all held-out documents, of which a part is held in with true
    vectors. The lower end of the ratio's interval must reach HALF.
    """
    held, absent = present(holdout, staged, [])
    bench = Bench.of(held, metric, (k,), seed)
    condition = f"true-share@{k}>={HALF:g} of re-embedding's"

    def decided(outcome: str, message: str) -> Decision:
        return Decision(condition, (Judgement(condition, outcome, message),))  # type: ignore[arg-type]

    way = absent or index_way(staged, held.ids, held.target[:1], metric, [])
    if isinstance(way, str) or bench.by_documents is None:
        reason = way if isinstance(way, str) else f"k = {k} needs more than {k} held-out documents"
        return (), decided("inconclusive", f"whether true vectors are found can't be measured: {reason}")
    if bench.asked is not None:
        name, found, best = "true-share", way(bench.asked.queries, k), bench.asked.places
    else:
        own = bench.stand_ins
        name, found, best = "doc-true-share", without(way(held.target[own], k + 1), own), bench.by_documents.places
    is_true = true.find(held.ids) >= 0
    got = (is_true[found] & (found >= 0)).sum(axis=1) / k
    due = is_true[best[:, :k]].sum(axis=1) / k
    n = len(held.ids)
    rows = (
        Row(
            AS_INDEXED,
            (Cell.of(name, k, got, n, seed=seed), Cell.of(f"retention.{name}", k, got, n, seed=seed, over=due)),
        ),
        Row(RE_EMBEDDED, (Cell.of(name, k, due, n, seed=seed),)),
    )
    few = round(due.sum() * k)
    if len(due) < MIN_QUERIES or few < FEW:
        message = f"{few} true vectors among what {len(due)} queries should find are too few: hold out more documents"
        return rows, decided("inconclusive", message)
    ratio, low, high = interval(got, due, seed=seed)
    message = (
        f"{int(is_true.sum()):,} true vectors among {n:,} held-out documents are {got.mean():.3f} of the first {k} "
        f"found and should be {due.mean():.3f}: {100 * ratio:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"
    )
    if low >= HALF:
        return rows, decided("pass", message)
    return rows, decided("fail" if ratio < HALF else "inconclusive", f"{message}; {CURE}")
