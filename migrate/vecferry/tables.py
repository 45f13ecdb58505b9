"""Numbers as text for people: every table under a header with its sizes, every gap with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vecferry.measured import AS_INDEXED, TRANSLATED, Cell, Curve, Evaluation, Loss, Point, Slices, one_line

SECTIONS = ("agreement", "doc-agreement", "recall", "ndcg", "index-overlap", "true-share", "doc-true-share")


def write_facts(facts: Mapping[str, Any]) -> Iterator[str]:
    """Write a line for each fact that says something."""
    shown = {name.replace("_", " "): write_fact(value) for name, value in facts.items()}
    shown = {name: text for name, text in shown.items() if text}
    width = max((len(name) for name in shown), default=0)
    for name, text in shown.items():
        yield f"{name:{width}}  {text}"


def write_fact(value: Any) -> str:
    """Write one value; nothing for one that is empty."""
    if value is None or value == [] or value == {}:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {write_fact(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        more = f" and {len(value) - 10:,} more" if len(value) > 10 else ""
        return ", ".join(str(v) for v in value[:10]) + more
    return str(value)


def write_tables(evaluation: Evaluation) -> Iterator[str]:
    """Write a table for each metric and k, and below them the reasons for what is missing, numbered."""
    width = max(len(row.name) for row in evaluation.rows)
    reasons: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    for metric, k, size in sections(evaluation):
        cells = [(row, cell) for row in evaluation.rows if (cell := row.cell(metric, k, size)) is not None]
        first = next((cell for _, cell in cells if cell.value is not None), None)
        if first is None:
            for cell in {cell.name: cell for _, cell in cells}.values():
                missing.setdefault(cell.reason or "", []).append(cell.name)
            continue
        yield f"{first.name} {first.basis}; 95 % interval"
        for row, cell in cells:
            if cell.value is None:
                number = reasons.setdefault(cell.reason or "", len(reasons) + 1)
                yield f"  {row.name:{width}}      -  ({number})"
                continue
            retained = row.cell(f"retention.{metric}", k) if size is None else None
            yield f"  {row.name:{width}}  {_number(cell)}{_percent(retained)}".rstrip()
        yield ""
    yield from _hubness(evaluation)
    if evaluation.slices is not None:
        yield from _slices(evaluation.slices, evaluation.k)
    yield f"ranked by {evaluation.metric}"
    yield from (f"({number}) {reason}" for reason, number in reasons.items())
    yield from (f"not measured: {', '.join(names)}: {reason}" for reason, names in missing.items())
    if (identity := evaluation.cell(TRANSLATED, "identity", evaluation.k)) is not None and identity.value is not None:
        yield f"identity recall@{identity.k} is {_number(identity)}; it saturates near 1 and proves little"
    yield from (f"note: {note}" for note in evaluation.notes)


def sections(evaluation: Evaluation) -> list[tuple[str, int, int | None]]:
    """Return metric, k and size of every table: what was measured first, then what is foretold by rising size."""
    cells = [cell for row in evaluation.rows for cell in row.cells if cell.metric in SECTIONS]
    found = {(cell.metric, cell.k, cell.size) for cell in cells}
    return sorted(found, key=lambda key: (SECTIONS.index(key[0]), key[1], key[2] or 0))


def _hubness(evaluation: Evaluation) -> Iterator[str]:
    """Write how unevenly each way of searching finds its documents."""
    k, shown = evaluation.k, []
    for row in evaluation.rows:
        skew, never = row.cell("hub-skew", k), row.cell("never-found", k)
        if skew is not None and never is not None and skew.value is not None and never.value is not None:
            shown.append((row.name, skew, never))
    if not shown:
        return
    first, width = shown[0][1], max(len(name) for name, _, _ in shown)
    yield f"hubness@{k} among {first.documents:,} {first.among}, {first.queries:,} {first.asked}"
    for name, skew, never in shown:
        yield f"  {name:{width}}  skew {skew.value:6.2f}, {never.value:.1%} never found"
    yield ""


def _slices(slices: Slices, k: int) -> Iterator[str]:
    """Write the row "as indexed" of each slice, for each metric that some slice has."""
    width = max((len(one_line(row.name)) for row in slices.rows), default=0)
    for metric in SECTIONS:
        cells = [(one_line(row.name), cell) for row in slices.rows if (cell := row.cell(metric, k)) is not None]
        first = next((cell for _, cell in cells if cell.value is not None), None)
        if first is None:
            continue
        yield f"{first.name} by {slices.column}, {AS_INDEXED}, among {first.documents:,} {first.among}; 95 % interval"
        for name, cell in cells:
            number = f"{_number(cell)}  {cell.queries:,} {cell.asked}" if cell.value is not None else cell.reason
            yield f"  {name:{width}}  {number}"
        yield ""
    if slices.left_out:
        yield f"{slices.left_out:,} more slices by {slices.column} are too few"


def write_losses(losses: tuple[Loss, ...]) -> Iterator[str]:
    """Write what is lost to each cause, or why that isn't known."""
    if losses:
        yield from ("", "what is lost to what")
    width = max((len(loss.cause) for loss in losses), default=0)
    for loss in losses:
        yield f"  {loss.cause:{width}}  {_number(loss) if loss.value is not None else loss.reason}"


def write_curves(curves: tuple[Curve, ...]) -> Iterator[str]:
    """Write the points of each curve."""
    for curve in curves:
        yield from ("", f"{curve.metric} against {curve.against}")
        for p in curve.points:
            yield f"  {p.x:>12,.0f}  {_number(p)}{'  predicted' if p.predicted else ''}"


def _number(number: Cell | Point | Loss) -> str:
    interval = "" if number.low is None or number.high is None else f"  [{number.low:.3f}, {number.high:.3f}]"
    return f"{number.value:.3f}{interval}"


def _percent(retained: Cell | None) -> str:
    if retained is None or retained.value is None or retained.low is None or retained.high is None:
        return ""
    low, value, high = (100 * x for x in (retained.low, retained.value, retained.high))
    return f"  {value:4.0f} % [{low:.0f}, {high:.0f}] of re-embedded"
