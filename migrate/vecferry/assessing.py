"""The verb `assess`: should this index migrate, and which way? One page, with its evidence and its rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vecferry.assessment import Assessment, Way
from vecferry.batch import id_keys
from vecferry.crossfit import FOLDS
from vecferry.errors import DataError, UsageError
from vecferry.extrapolation import VERIFIED
from vecferry.fitting import check_lossy, check_sides
from vecferry.gains import FARTHEST, Gains
from vecferry.linear import LinearMap
from vecferry.measured import Cell
from vecferry.norms import METRICS, Norms, metric_of, metric_warnings
from vecferry.pairs import BadRows, Mask, Pairs, Queries, join, read_queries
from vecferry.qrels import Labels, as_strings, read_qrels
from vecferry.recall import Metric, ndcg
from vecferry.sampling import rows_of
from vecferry.solvers import SOLVERS
from vecferry.store import StoreInfo, opened
from vecferry.verdict import MAP_QUERIES, NOTHING, RE_EMBED, TRANSLATE, judge
from vecferry.ways import CANDIDATES, K, Trial, cascade, foretell, resembling

MIN_PAIRS, MAX_PAIRS = 100, 20_000
"""Documents that are compared; of a target with more, as many are drawn."""


def assess(
    source: Any,
    target: Any,
    *,
    queries: Any = None,
    source_queries: Any = None,
    qrels: str | Path | None = None,
    cost_per_1k_texts: float | None = None,
    solver: str = "auto",
    metric: Metric | None = None,
    seed: int = 0,
    bad_rows: Literal["fail", "skip"] = "fail",
    allow_lossy: bool = False,
) -> Assessment:
    """Compare doing nothing, translating, mapping the queries, cascades and re-embedding, and judge by `verdict.RULE`.

    Takes the stores that `fit` takes; roles don't matter, since every number is about documents and queries that took
    part neither in the map that carried them nor in its choice (see `crossfit`). "auto" goes without rank
    distillation here. Of a larger target 20,000 documents are drawn, and those that are relevant to the queries.
    Whether the new model is better needs `queries`, `source_queries` and `qrels`; without them only agreement with the
    new model is known. Raises DataError for fewer than 100 pairs, and what `fit` raises for stores that don't belong
    together, and for quantised codes without `allow_lossy`.
    """
    _check_options(solver, metric, queries, source_queries, qrels, cost_per_1k_texts)
    labels = None if qrels is None else read_qrels(qrels)
    bad = BadRows.of(bad_rows)
    with ExitStack() as stack:
        old, new = (stack.enter_context(opened(store)) for store in (source, target))
        asked, asked_old = (
            None if store is None else stack.enter_context(opened(store)) for store in (queries, source_queries)
        )
        check_lossy([reader for reader in (old, new, asked, asked_old) if reader is not None], allow_lossy)
        check_sides(old.info, new.info, (None, None), (None, None))
        dims = old.info.dim, new.info.dim
        questions = None if asked is None else read_queries(asked, asked_old, dims, bad)
        pairs = join(old, new, bad, _draw(labels, questions, seed))
        norms = Norms.of(pairs.source), Norms.of(pairs.target)
        metric = metric or metric_of(norms[1], new.info)
        rows, info = rows_of(old), old.info
        warnings = metric_warnings(metric, norms, info, new.info)
    if len(pairs) < MIN_PAIRS:
        raise DataError(f"{len(pairs)} pairs: at least {MIN_PAIRS} are needed, some hundred say more")
    known = None if labels is None or questions is None else labels.match(questions.ids, pairs.ids)
    if labels is not None and questions is not None and known is None:
        raise DataError(
            f"{labels.path}: none of its {len(labels)} labels joins one of the queries and one of the pairs"
        )
    started = time.perf_counter()
    given = len(pairs)
    relevant = np.array([], np.int64) if known is None else np.unique(known.document)
    trial = Trial.of(pairs, questions, relevant, solver, metric, seed)
    pairs = trial.pairs
    if labels is not None and questions is not None:
        known = labels.match(questions.ids, pairs.ids)
        relevant = np.array([], np.int64) if known is None else np.unique(known.document)
    learned = time.perf_counter()
    found = trial.among()
    gains = None if known is None else Gains.of(trial, known, rows)
    uniform = resembling(len(pairs), relevant, rows, seed)
    foretold = foretell(trial, uniform, rows, seed)
    truth = trial.truth()
    agreement = "agreement" if trial.own is None else "doc-agreement"

    def cells(name: str) -> tuple[Cell, ...]:
        places = found[name]
        if known is None or gains is None:
            reason = "no queries: pass --queries" if questions is None else "no labels: pass --qrels"
            labelled = tuple(Cell(m, K, reason=reason) for m in ("retention.ndcg", "break-even.ndcg"))
        else:
            reason = ""
            labelled = gains.ratio("retention.ndcg", name, RE_EMBED), gains.ratio("break-even.ndcg", name, NOTHING)
        if isinstance(places, str):
            return Cell(agreement, K, reason=places), Cell("ndcg", K, reason=places), *labelled
        first = Cell.of(agreement, K, truth.agreement(places, K), len(pairs), seed=seed)
        if known is None:
            return first, Cell("ndcg", K, reason=reason), *labelled
        return first, Cell.of("ndcg", K, ndcg(places, known, K), len(pairs), seed=seed), *labelled

    index, rest = rows * pairs.target.shape[1] * 4, max(0, rows - given)
    plans = [(NOTHING, 0, 0, 0), (TRANSLATE, 0, 0, index), (MAP_QUERIES, 0, 0, 0)]
    plans += [(cascade(c), 0, c, index) for c in CANDIDATES] + [(RE_EMBED, rest, 0, index)]
    price = None if cost_per_1k_texts is None else cost_per_1k_texts / 1000
    ways = tuple(
        Way(
            name,
            cells(name),
            now,
            each,
            nbytes,
            None if price is None else now * price,
            None if price is None else each * price,
            foretold[name],
        )
        for name, now, each, nbytes in plans
    )
    gain = ways[-1].cell("break-even.ndcg")
    searched = time.perf_counter()
    facts = {
        "source": info.uri,
        "rows": rows,
        "pairs": given,
        "measured": len(pairs),
        "queries": 0 if questions is None else len(questions),
        "labelled": 0 if known is None else len(np.unique(known.query)),
        "solver": solver,
        "metric": metric,
        "cost_per_1k_texts": cost_per_1k_texts,
    }
    timing = {"maps": learned - started, "searches": searched - learned, "translate": _seconds_per_row(pairs) * rows}
    notes = (
        *_maps(solver, given - len(pairs), questions),
        *_sizes(len(pairs), gains, ways[-1].foretold, rows),
        *_costs(rows),
        *_inputs(info, new.info, bad),
        *warnings,
    )
    return Assessment(facts, ways, gain, judge([w.judged for w in ways[1:]], gain), notes, timing)


def _check_options(
    solver: str, metric: str | None, queries: Any, source_queries: Any, qrels: Any, price: float | None
) -> None:
    for name, value, choices in (("solver", solver, ("auto", *SOLVERS)), ("metric", metric or METRICS[0], METRICS)):
        if value not in choices:
            raise UsageError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")
    for name, given in (("--source-queries", source_queries), ("--qrels", qrels)):
        if given is not None and queries is None:
            raise UsageError(f"{name} needs --queries, the new model's vectors of the same queries")
    if price is not None and not 0 <= price < float("inf"):
        raise UsageError(f"--cost-per-1k-texts {price}: a price is a number from 0 on")


def _seconds_per_row(pairs: Pairs) -> float:
    """Time a map of these dimensions on one thread."""
    m = LinearMap(np.zeros((pairs.source.shape[1], pairs.target.shape[1]), np.float32), post="l2")
    started = time.perf_counter()
    m.apply(pairs.source)
    return (time.perf_counter() - started) / len(pairs)


def _draw(labels: Labels | None, questions: Queries | None, seed: int) -> Callable[[pa.Array], Mask]:
    """Return what says of all ids of the target which of them take part."""

    def drawn(ids: pa.Array) -> Mask:
        chosen = np.zeros(len(ids), np.bool_)
        chosen[np.random.default_rng(seed).permutation(len(ids))[:MAX_PAIRS]] = True
        if labels is not None and questions is not None and len(ids) > MAX_PAIRS:
            asked = pc.is_in(labels.queries, value_set=questions.ids)
            chosen |= pc.is_in(as_strings(ids), value_set=labels.documents.filter(asked)).to_numpy(False)
        keys = id_keys(ids)
        return np.isin(keys, keys[chosen])  # other rows of the same id too, so that these are noticed

    return drawn


def _maps(solver: str, chose: int, questions: Queries | None) -> Iterator[str]:
    yield f"Each of {FOLDS} parts of the measured pairs was carried by a map that was learned from the others."
    if chose:
        yield (
            f"Maps are `vecferry fit`'s, chosen on {chose:,} other pairs and queries that they weren't measured with, "
            "but without rank distillation, by which fit may find a little more."
        )
    elif solver == "auto":
        yield "Maps are ridge: with more pairs, `vecferry fit` chooses among better ones."
    else:
        yield f"Maps are by {solver}."
    if questions is None:
        yield "Documents stood in as queries, which flatters every way: real queries (--queries) ask differently."
    elif questions.source is not None:
        yield "Maps of queries learned from the documents of the other parts and the other half of the queries."


def _sizes(pairs: int, gains: Gains | None, told: Cell | None, rows: int) -> Iterator[str]:
    measured = f"What is measured is so in a collection of {pairs:,} of the paired documents"
    if rows <= pairs:
        yield f"{measured}, which are the whole index."
        return
    yield f"{measured}; the index has {rows:,}, where all ways but re-embedding find less."
    if told is not None:
        said = "" if told.verified else f", more than {VERIFIED} times as many: extrapolated, unverified"
        yield (
            f"Agreement among {rows:,} is extrapolated from {told.held_out:,} pairs{said}. Pairs that no query is "
            "labelled with are taken for a uniform draw of the index."
        )
    if gains is not None and gains.target > pairs:
        yield (
            f"Retention and break-even are for {gains.target:,} documents: each pair that isn't relevant stands for "
            "the others of its kind, and a cascade has as many fewer candidates."
        )
        if gains.target < rows:
            yield (
                f"The index has {rows:,} rows, more than {FARTHEST} for each measured pair: what holds there is "
                "unverified. Encode more pairs."
            )


def _costs(rows: int) -> Iterator[str]:
    yield (
        "A cascade keeps the vectors of texts once encoded; without common candidates it has encoded as many as the "
        "index has after " + ", ".join(f"{-(-rows // c):,} queries (c = {c})" for c in CANDIDATES) + "."
    )


def _inputs(old: StoreInfo, new: StoreInfo, bad: BadRows) -> Iterator[str]:
    if old.lossy:
        yield (
            f"{old.uri} holds quantised codes: what they lost is lost to every way that starts from them, and doing "
            "nothing is measured by them too."
        )
    if new.lossy:
        yield f"{new.uri} holds quantised codes: what re-embedding finds, and what maps learned from, is only near it."
    if new.count is not None and new.count > MAX_PAIRS:
        yield f"Of the {new.count:,} rows of {new.uri} about {MAX_PAIRS:,} were drawn."
    yield from (f"{n} rows left out: {fault}." for fault, n in bad.skipped.items())
