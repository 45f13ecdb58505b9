"""The report as one self-contained page: no script, no network, nothing of a document's text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import vecferry
from vecferry.errors import MissingDependencyError, UsageError
from vecferry.gate import SIZED, WORST, Gate
from vecferry.measured import AS_INDEXED, Cell, Curve, Evaluation, Point, Row
from vecferry.report import Report
from vecferry.tables import SECTIONS, sections, write_fact

MEANING = {
    "agreement": "The share of the first {k} documents that true re-embedding finds, too; queries are real ones.",
    "doc-agreement": "The same with held-out documents standing in as queries: it flatters, so it has its own name.",
    "recall": "The share of the documents labelled relevant that are among the first {k}.",
    "ndcg": "How near the top the documents labelled relevant are found, 1 at best.",
    "index-overlap": "The share of exact search that the built index finds by its own search, at full size.",
    "true-share": "How much of the first {k} are true vectors that were put in the place of translations.",
    "doc-true-share": "How much of the first {k} are true vectors put in, with documents standing in as queries.",
}
WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 12, 40


@dataclass(frozen=True, slots=True)
class Line:
    """Hold a line of a table: a number with its interval, drawn on a scale from 0 to 100, or the reason for none."""

    name: str
    cell: Cell
    retained: Cell | None = None
    threshold: float | None = None
    scale: float = 1.0

    def at(self, value: float) -> float:
        """Return the place of a number on the scale."""
        return round(100 * min(1.0, max(0.0, value / self.scale)), 2)


@dataclass(frozen=True, slots=True)
class Section:
    """Hold a metric's table: all ways of searching, or the row "as indexed" for all slices."""

    title: str
    meaning: str
    first: Cell
    lines: tuple[Line, ...]

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Return places and numbers along the scale."""
        top = self.lines[0].scale
        parts = {0.2: 4, 0.4: 4, 0.6: 3, 0.8: 4, 1.0: 5}[top]
        return [(round(100 * i / parts, 2), f"{top * i / parts:.3g}") for i in range(parts + 1)]


@dataclass(frozen=True, slots=True)
class Plot:
    """Hold a curve in the coordinates of its drawing: points, the band of their intervals, ticks of both axes."""

    curve: Curve
    points: tuple[tuple[float, float, Point], ...]
    band: str
    measured: str
    predicted: str
    xticks: tuple[tuple[float, str], ...]
    yticks: tuple[tuple[float, str], ...]


def require_jinja2() -> Any:
    """Return the module jinja2; raise MissingDependencyError with its cure."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("jinja2", "report", "an HTML report") from error
    return jinja2


def page(report: Report) -> str:
    """Write a report as an HTML page that needs no other file.

    Whatever comes from outside (addresses, ids, names of slices) is escaped, and the page forbids scripts and
    network by its own policy. Raises MissingDependencyError without jinja2.
    """
    jinja2 = require_jinja2()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((files("vecferry") / "templates" / "report.html").read_text(encoding="utf-8"))
    evaluation = report.evaluation
    facts = {name.replace("_", " "): write_fact(value) for name, value in report.facts.items()}
    text: str = template.render(
        report=report,
        title=report.facts.get("destination") or "report",
        outcome=report.decision.outcome if report.decision is not None else "none",
        sections=[] if evaluation is None else list(_sections(evaluation, _thresholds(report))),
        slices=[] if evaluation is None else list(_slice_sections(evaluation, _thresholds(report))),
        hubness=[] if evaluation is None else _hubness(evaluation),
        losses=[(loss, round(100 * min(1.0, max(0.0, loss.value or 0.0)), 2)) for loss in report.attribution],
        plots=[_plot(curve) for curve in report.all_curves if curve.points],
        missing=[] if evaluation is None else _missing(evaluation),
        facts={name: value for name, value in facts.items() if value},
        size={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM},
        version=vecferry.__version__,
        as_indexed=AS_INDEXED,
    )
    return text


def _thresholds(report: Report) -> dict[tuple[str, int, int | None], float]:
    """Return what the gate asks of the row "as indexed", and of each slice of it, by metric, k and size."""
    found: dict[tuple[str, int, int | None], float] = {}
    acting = None if report.evaluation is None else report.evaluation.acting
    for judgement in report.decision.judgements if report.decision is not None else ():
        try:
            (condition,) = Gate.parse(judgement.condition).conditions
        except UsageError:  # a condition on the change since a baseline
            continue
        size = (condition.size or acting) if condition.metric in SIZED else None
        found[condition.metric, condition.k, size] = condition.threshold
    return found


def _sections(evaluation: Evaluation, thresholds: dict[tuple[str, int, int | None], float]) -> Iterable[Section]:
    for key in sections(evaluation):
        section = _section(*key, evaluation.rows, {AS_INDEXED: thresholds.get(key)})
        if section is not None:
            yield section


def _slice_sections(evaluation: Evaluation, thresholds: dict[tuple[str, int, int | None], float]) -> Iterable[Section]:
    rows = evaluation.slices.rows if evaluation.slices is not None else ()
    for metric in SECTIONS:
        asked = thresholds.get((WORST + metric, evaluation.k, None))
        section = _section(metric, evaluation.k, None, rows, dict.fromkeys((row.name for row in rows), asked))
        if section is not None:
            yield section


def _section(
    metric: str, k: int, size: int | None, rows: tuple[Row, ...], asked: dict[str, float | None]
) -> Section | None:
    cells = [(row, cell) for row in rows if (cell := row.cell(metric, k, size)) is not None]
    known = [cell for _, cell in cells if cell.value is not None]
    if not known:
        return None
    most = max([cell.high or cell.value or 0.0 for cell in known] + [a or 0.0 for a in asked.values()])
    scale = next(top for top in (0.2, 0.4, 0.6, 0.8, 1.0) if most <= top + 1e-9)
    lines = tuple(
        Line(row.name, cell, None if size else row.cell(f"retention.{metric}", k), asked.get(row.name), scale)
        for row, cell in cells
    )
    return Section(known[0].name, MEANING[metric].format(k=k), known[0], lines)


def _missing(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return the metrics that no row has, each with the reason."""
    cells = [cell for row in evaluation.rows for cell in row.cells if cell.metric in SECTIONS]
    measured = {cell.name for cell in cells if cell.value is not None}
    return list({cell.name: cell.reason or "" for cell in cells if cell.name not in measured}.items())


def _hubness(evaluation: Evaluation) -> list[tuple[str, Cell, Cell]]:
    found = []
    for row in evaluation.rows:
        skew, never = row.cell("hub-skew", evaluation.k), row.cell("never-found", evaluation.k)
        if skew is not None and never is not None and skew.value is not None and never.value is not None:
            found.append((row.name, skew, never))
    return found


def _plot(curve: Curve) -> Plot:
    """Lay a curve out; by the logarithm of x where that spans a factor of eight or more."""
    xs = [p.x for p in curve.points]
    logarithmic = min(xs) > 0 and max(xs) >= 8 * min(xs)
    bottom = min(p.value if p.low is None else p.low for p in curve.points)
    top = max(p.value if p.high is None else p.high for p in curve.points)
    yticks = _ticks(bottom, top)
    left, right = (math.log(x) if logarithmic else x for x in (min(xs), max(xs)))

    def x_at(x: float) -> float:
        share = ((math.log(x) if logarithmic else x) - left) / (right - left) if right > left else 0.5
        return round(LEFT + 12 + share * (WIDTH - LEFT - RIGHT - 24), 1)

    def y_at(value: float) -> float:
        share = (value - yticks[0]) / (yticks[-1] - yticks[0])
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    placed = tuple((x_at(p.x), y_at(p.value), p) for p in curve.points)
    ends = [(x, y_at(p.low), y_at(p.high)) for x, _, p in placed if p.low is not None and p.high is not None]
    band = [f"{x},{high}" for x, _, high in ends] + [f"{x},{low}" for x, low, _ in reversed(ends)]
    measured = [(x, y) for x, y, p in placed if not p.predicted]
    predicted = measured[-1:] + [(x, y) for x, y, p in placed if p.predicted]
    shown: list[tuple[float, str]] = []
    for x, _, p in placed:  # a label for each point that there is room for
        if not shown or x - shown[-1][0] >= 56:
            shown.append((x, f"{p.x:,.0f}"))
    return Plot(
        curve,
        placed,
        " ".join(band),
        " ".join(f"{x},{y}" for x, y in measured),
        " ".join(f"{x},{y}" for x, y in predicted),
        tuple(shown),
        tuple((y_at(v), f"{v:g}") for v in yticks),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers around a range."""
    if high - low < 0.02:  # no curve is to look steep that is flat
        low, high = low - 0.01, high + 0.01
    span = high - low
    unit = 10 ** math.floor(math.log10(span))
    step = next(unit * f for f in (0.2, 0.5, 1, 2) if span / (unit * f) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 10) for i in range(first, max(last, first + 1) + 1)]
