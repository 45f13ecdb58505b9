"""The verb `assess`: should this index migrate, and which way? One page, with its evidence and its rule."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vecferry.errors import DataError, UsageError
from vecferry.fitting import check_sides
from vecferry.linear import LinearMap
from vecferry.measured import Cell
from vecferry.norms import METRICS, Norms, metric_of
from vecferry.pairs import BadRows, Pairs, Queries, join, read_queries
from vecferry.qrels import read_qrels
from vecferry.recall import Metric, ndcg
from vecferry.sampling import rows_of
from vecferry.solvers import SOLVERS
from vecferry.store import StoreInfo, opened
from vecferry.verdict import MAP_QUERIES, NOTHING, RE_EMBED, RULE, TRANSLATE, Judged, Verdict, judge
from vecferry.ways import CANDIDATES, FARTHEST, Gains, K, Trial, cascade

MIN_PAIRS = 100


@dataclass(frozen=True, slots=True)
class Way:
    """Hold what is known of one way.

    cells           agreement (or doc-agreement) and ndcg among the paired documents; retention.ndcg and
                    break-even.ndcg at the index's own size (see `ways.Gains`)
    texts_now       texts to encode with the new model before it works, beyond the pairs
    texts_per_query texts to encode for a query at most, fewer as a cache fills
    nbytes          bytes of new vectors to write
    """

    name: str
    cells: tuple[Cell, ...]
    texts_now: int
    texts_per_query: int
    nbytes: int
    cost_now: float | None = None
    cost_per_query: float | None = None

    def cell(self, metric: str) -> Cell:
        """Return the cell of a metric."""
        return next(c for c in self.cells if c.metric == metric)

    @property
    def judged(self) -> Judged:
        """Return what the rule looks at."""
        return Judged(self.name, self.cells[0], self.cell("retention.ndcg"), self.cell("break-even.ndcg"))


@dataclass(frozen=True, slots=True)
class Assessment:
    """Hold all ways on the same queries, what the upgrade is worth, and the verdict; `timing` in seconds here."""

    facts: Mapping[str, Any]
    ways: tuple[Way, ...]
    gain: Cell
    verdict: Verdict
    notes: tuple[str, ...]
    timing: Mapping[str, float]

    def way(self, name: str) -> Way:
        """Return a way by its name."""
        return next(w for w in self.ways if w.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dictionaries, strings and numbers, the same for the same input but for "timing"."""
        value = {
            "facts": dict(self.facts),
            "ways": [asdict(way) for way in self.ways],
            "gain": asdict(self.gain),
            "verdict": self.verdict.to_json(),
            "notes": list(self.notes),
            "timing": dict(self.timing),
        }
        plain: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
        return plain

    def table(self) -> str:
        """Return the page for people: the verdict, the numbers, the rule, and what they rest on."""
        facts = self.facts
        head = (
            f"{facts['source']} ({facts['rows']:,} rows), {facts['pairs']:,} of them encoded by the new model too, "
            f"{facts['queries']:,} queries, {facts['labelled']:,} of them with labels"
        )
        lines = [*textwrap.wrap(head, 110), ""]
        for reason in self.verdict.reasons:
            lines += textwrap.wrap(reason, 110)
        lines += ["", *self._numbers(), "", "The rule:", *RULE.splitlines(), "", "What this rests on:"]
        for note in self.notes:
            lines += textwrap.wrap(note, 110, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines)

    def _numbers(self) -> Iterator[str]:
        paired, size = self.facts["pairs"], self.gain.documents or self.facts["pairs"]
        width = max(len(w.name) for w in self.ways)
        names = (self.ways[-1].cells[0].name, f"ndcg@{K}", "retention", "break-even")
        yield f"{'':{width}}" + "".join(f"{name:>22}" for name in names)
        yield f"{'':{width}}" + "".join(f"{f'among {n:,}':>22}" for n in (paired, paired, size, size))
        reasons: dict[str, int] = {}
        for way in self.ways:
            shown = [_number(cell, reasons) for cell in way.cells]
            said = self.verdict.standings.get(way.name, "unknown")
            yield (
                f"{way.name:{width}}" + "".join(f"{text:>22}" for text in shown) + f"  {said}".replace("  unknown", "")
            )
        yield from (f"({number}) {reason}" for reason, number in reasons.items())
        yield ""
        costs = self.facts["cost_per_1k_texts"] is not None
        heads = ("texts now", "texts per query", "bytes to write", *(("cost now", "cost per query") if costs else ()))
        yield f"{'':{width}}" + "".join(f"{head:>17}" for head in heads)
        for way in self.ways:
            shown = [f"{way.texts_now:,}", f"{way.texts_per_query:,}", _bytes(way.nbytes)]
            shown += [f"{way.cost_now:,.2f}", f"{way.cost_per_query:,.5f}"] if costs else []
            yield f"{way.name:{width}}" + "".join(f"{text:>17}" for text in shown)
        yield (
            f"Translating {self.facts['rows']:,} rows takes about {self.timing['translate']:.2g} s on one core here; "
            "encoding takes what your new model takes."
        )


def assess(
    source: Any,
    target: Any,
    *,
    queries: Any = None,
    source_queries: Any = None,
    qrels: str | Path | None = None,
    cost_per_1k_texts: float | None = None,
    solver: str = "ridge",
    metric: Metric | None = None,
    seed: int = 0,
    bad_rows: Literal["fail", "skip"] = "fail",
) -> Assessment:
    """Compare doing nothing, translating, mapping the queries, cascades and re-embedding, and judge by `verdict.RULE`.

    Takes the stores that `fit` takes. Maps are learned without each fifth of the pairs in turn, and carry that fifth,
    so that every number is about documents that no map saw. Whether the new model is better needs `queries`,
    `source_queries` and `qrels`; without them only agreement with the new model is known. Raises DataError for fewer
    than 100 pairs, and what `fit` raises for stores that don't belong together.
    """
    _check_options(solver, metric, queries, source_queries, qrels, cost_per_1k_texts)
    labels = None if qrels is None else read_qrels(qrels)
    bad = BadRows(skip=bad_rows == "skip")
    with ExitStack() as stack:
        old, new = (stack.enter_context(opened(store)) for store in (source, target))
        asked, asked_old = (
            None if store is None else stack.enter_context(opened(store)) for store in (queries, source_queries)
        )
        check_sides(old.info, new.info, (None, None), (None, None))
        pairs = join(old, new, bad)
        dims = old.info.dim, new.info.dim
        questions = None if asked is None else read_queries(asked, asked_old, dims, bad)
        metric = metric or metric_of(Norms.of(pairs.target), new.info)
        rows, info = rows_of(old), old.info
    if len(pairs) < MIN_PAIRS:
        raise DataError(f"{len(pairs)} pairs: at least {MIN_PAIRS} are needed, some hundred say more")
    started = time.perf_counter()
    trial = Trial.of(pairs, questions, solver, metric, seed)
    learned = time.perf_counter()
    found = trial.among()
    known = None if labels is None or questions is None else labels.match(questions.ids, pairs.ids)
    if labels is not None and questions is not None and known is None:
        raise DataError(
            f"{labels.path}: none of its {len(labels)} labels joins one of the queries and one of the pairs"
        )
    gains = None if known is None else Gains.of(trial, found, known, rows, seed)
    truth = trial.truth()
    agreement = "agreement" if trial.own is None else "doc-agreement"

    def cells(name: str) -> tuple[Cell, ...]:
        places = found[name]
        if isinstance(places, str):
            metrics = (agreement, "ndcg", "retention.ndcg", "break-even.ndcg")
            return tuple(Cell(m, K, reason=places) for m in metrics)
        first = Cell.of(agreement, K, truth.agreement(places, K), len(pairs), seed=seed)
        if known is None or gains is None:
            reason = "no queries: pass --queries" if questions is None else "no labels: pass --qrels"
            return first, *(Cell(m, K, reason=reason) for m in ("ndcg", "retention.ndcg", "break-even.ndcg"))
        return (
            first,
            Cell.of("ndcg", K, ndcg(places, known, K), len(pairs), seed=seed),
            gains.ratio("retention.ndcg", name, RE_EMBED),
            gains.ratio("break-even.ndcg", name, NOTHING),
        )

    index, rest = rows * pairs.target.shape[1] * 4, max(0, rows - len(pairs))
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
        )
        for name, now, each, nbytes in plans
    )
    gain = ways[-1].cell("break-even.ndcg")
    searched = time.perf_counter()
    facts = {
        "source": info.uri,
        "rows": rows,
        "pairs": len(pairs),
        "queries": 0 if questions is None else len(questions),
        "labelled": 0 if known is None else len(np.unique(known.query)),
        "solver": solver,
        "metric": metric,
        "cost_per_1k_texts": cost_per_1k_texts,
    }
    timing = {"maps": learned - started, "searches": searched - learned, "translate": _seconds_per_row(pairs) * rows}
    notes = (
        f"Maps here are by {solver}; `vecferry fit` chooses by default among better ones (--solver auto), so "
        "translating may turn out better than this page says.",
        *_notes(info, pairs, questions, gains, rows, bad),
    )
    return Assessment(facts, ways, gain, judge([w.judged for w in ways[1:]], gain), notes, timing)


def _check_options(
    solver: str, metric: str | None, queries: Any, source_queries: Any, qrels: Any, price: float | None
) -> None:
    for name, value, choices in (("solver", solver, tuple(SOLVERS)), ("metric", metric or METRICS[0], METRICS)):
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


def _notes(
    info: StoreInfo, pairs: Pairs, queries: Queries | None, gains: Gains | None, rows: int, bad: BadRows
) -> Iterator[str]:
    yield (
        "Maps were learned without each fifth of the pairs in turn and carried that fifth: no map saw what it was "
        "measured on."
    )
    if queries is None:
        yield "Documents stood in as queries, which flatters every way: real queries (--queries) ask differently."
    elif queries.source is not None:
        yield "Maps of queries learned from the documents of the other folds and the other half of the queries."
    size = f"Agreement and nDCG are for a collection of the {len(pairs):,} paired documents"
    if rows <= len(pairs):
        yield f"{size}, which are the whole index."
    elif gains is None or gains.target == len(pairs):
        yield f"{size}; the index has {rows:,}, where all ways but re-embedding find less."
    else:
        yield (
            f"{size}. Retention and break-even are projected to {gains.target:,} by what they lost from "
            f"{gains.size:,} documents to {len(pairs):,} (a power law)."
        )
        if gains.target < rows:
            yield (
                f"The index has {rows:,} rows, more than {FARTHEST} times the pairs: what holds there is unverified. "
                "Encode more pairs."
            )
    yield (
        "A cascade keeps the vectors of texts once encoded; without common candidates it has encoded as many as the "
        "index has after " + ", ".join(f"{-(-rows // c):,} queries (c = {c})" for c in CANDIDATES) + "."
    )
    if info.lossy:
        yield f"{info.uri} holds quantised codes: what they lost is lost to every way that starts from them."
    yield from (f"{n} rows left out: {fault}." for fault, n in bad.skipped.items())


def _number(cell: Cell, reasons: dict[str, int]) -> str:
    """Write a number with its interval, or that of the reason why there is none."""
    if cell.value is None:
        return f"- ({reasons.setdefault(cell.reason or '', len(reasons) + 1)})"
    return f"{cell.value:.3f} [{cell.low:.3f}, {cell.high:.3f}]"


def _bytes(n: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}" if n else "0"
        n /= 1000  # type: ignore[assignment]
    return f"{n:.3g} TB"
