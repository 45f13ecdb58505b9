"""What a user is shown: the facts of a run, the numbers with their sizes, the verdict; as a table and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vecferry.errors import DataError, UsageError
from vecferry.gate import Decision
from vecferry.measured import CASCADE, RE_EMBEDDED, STATUS_QUO, TRANSLATED, Cell, Evaluation

FORMAT = 1
SECTIONS = ("agreement", "doc-agreement", "recall", "ndcg", "index-overlap")
NEXT = {
    "pass": "vecferry inspect {destination}",
    "fail": "look at the staged index, or fit a better map; the old index is as it was",
    "inconclusive": "pass more held-out documents or queries to vecferry fit; the old index is as it was",
}


@dataclass(frozen=True, slots=True)
class Report:
    """Hold what a run did and measured.

    facts       what there is to know besides numbers: source, destination, map, models, counts, index
    evaluation  the measured rows, None where the map has no hold-out
    decision    what became of the gate, None without one
    timing      seconds by step: the only part that differs between two equal runs
    """

    facts: Mapping[str, Any]
    evaluation: Evaluation | None = None
    decision: Decision | None = None
    warnings: tuple[str, ...] = ()
    timing: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool | None:
        """Whether the gate passed; None without one."""
        return None if self.decision is None else self.decision.passed

    @property
    def exit_code(self) -> int:
        """0, or 1 where a gate didn't pass."""
        return 1 if self.passed is False else 0

    @property
    def advice(self) -> str | None:
        """A sentence where the labels say that translated vectors aren't better than the old ones, or None."""
        return None if self.evaluation is None else _advice(self.evaluation)

    def next_step(self) -> str:
        """Return what to do next, in a line."""
        outcome = self.decision.outcome if self.decision is not None else "pass"
        return NEXT[outcome].format(destination=self.facts.get("destination", ""))

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dictionaries, strings and numbers, the same for the same run but for "timing"."""
        value = {
            "format": FORMAT,
            "passed": self.passed,
            "facts": dict(self.facts),
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "gate": None if self.decision is None else asdict(self.decision) | {"outcome": self.decision.outcome},
            "advice": self.advice,
            "warnings": list(self.warnings),
            "timing": dict(self.timing),
        }
        plain: dict[str, Any] = json.loads(json.dumps(value, default=_plain, allow_nan=False))
        return plain

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report.json; raise UsageError if there is none, DataError for anything else."""
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
            if value["format"] != FORMAT:
                raise DataError(f"{path} is a report of format {value['format']}, this vecferry reads {FORMAT}")
            evaluation, gate = value["evaluation"], value["gate"]
            return cls(
                facts=value["facts"],
                evaluation=None if evaluation is None else Evaluation.from_json(evaluation),
                decision=None if gate is None else Decision.from_json(gate),
                warnings=tuple(value["warnings"]),
                timing=value["timing"],
            )
        except FileNotFoundError as error:
            raise UsageError(f"{path}: no such file") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} can't be read as a report: {error!r}") from error

    def table(self) -> str:
        """Return the report for people: facts, a table for each metric, notes, and the verdict as the last line."""
        lines = [*_facts(self.facts), *(f"warning: {w}" for w in self.warnings)]
        if self.evaluation is not None:
            lines += ["", *_tables(self.evaluation)]
        if self.advice:
            lines += ["", *textwrap.wrap(self.advice, 100)]
        return "\n".join([*lines, "", *self._verdict()])

    def _verdict(self) -> Iterator[str]:
        if self.decision is None:
            yield "no gate: nothing was decided" if self.evaluation is not None else "nothing was measured"
            return
        for judgement in self.decision.judgements:
            yield f"{judgement.outcome}: {judgement.condition}: {judgement.message}"
        counts = " (counts as failed)" if self.decision.outcome == "inconclusive" else ""
        yield f"gate {self.decision.gate}: {self.decision.outcome.upper()}{counts}"


def _plain(value: Any) -> Any:
    """Turn numpy numbers into Python's, and whatever else JSON doesn't know into its text."""
    return value.item() if hasattr(value, "item") else value.hex() if isinstance(value, bytes) else str(value)


def _facts(facts: Mapping[str, Any]) -> Iterator[str]:
    shown = {name.replace("_", " "): _fact(value) for name, value in facts.items()}
    shown = {name: text for name, text in shown.items() if text}
    width = max((len(name) for name in shown), default=0)
    for name, text in shown.items():
        yield f"{name:{width}}  {text}"


def _fact(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_fact(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        more = f" and {len(value) - 10:,} more" if len(value) > 10 else ""
        return ", ".join(str(v) for v in value[:10]) + more
    return str(value)


def _tables(evaluation: Evaluation) -> Iterator[str]:
    """Write a table for each metric and k, and below them the reasons for what is missing, numbered."""
    width = max(len(row.name) for row in evaluation.rows)
    reasons: dict[str, int] = {}
    missing: dict[str, list[str]] = {}
    ks = sorted({cell.k for row in evaluation.rows for cell in row.cells})
    for metric in SECTIONS:
        for k in ks:
            cells = [(row, cell) for row in evaluation.rows if (cell := row.cell(metric, k)) is not None]
            first = next((cell for _, cell in cells if cell.value is not None), None)
            if first is None:
                for cell in {cell.name: cell for _, cell in cells}.values():
                    missing.setdefault(cell.reason or "", []).append(cell.name)
                continue
            size = f"{first.documents:,} {first.among}, {first.queries:,} {first.asked}"
            yield f"{first.name} among {size}; 95 % interval"
            for row, cell in cells:
                if cell.value is None:
                    number = reasons.setdefault(cell.reason or "", len(reasons) + 1)
                    yield f"  {row.name:{width}}      -  ({number})"
                    continue
                retained = row.cell(f"retention.{metric}", k)
                yield f"  {row.name:{width}}  {_number(cell)}{_percent(retained)}".rstrip()
            yield ""
    yield f"ranked by {evaluation.metric}"
    yield from (f"({number}) {reason}" for reason, number in reasons.items())
    yield from (f"not measured: {', '.join(names)}: {reason}" for reason, names in missing.items())
    if (identity := evaluation.cell(TRANSLATED, "identity", evaluation.k)) is not None and identity.value is not None:
        yield f"identity recall@{identity.k} is {_number(identity)}; it saturates near 1 and proves little"
    yield from (f"note: {note}" for note in evaluation.notes)


def _number(cell: Cell) -> str:
    return f"{cell.value:.3f}  [{cell.low:.3f}, {cell.high:.3f}]"


def _percent(retained: Cell | None) -> str:
    if retained is None or retained.value is None or retained.low is None or retained.high is None:
        return ""
    low, value, high = (100 * x for x in (retained.low, retained.value, retained.high))
    return f"  {value:4.0f} % [{low:.0f}, {high:.0f}] of re-embedded"


def _advice(evaluation: Evaluation) -> str | None:
    """Compare translating with doing nothing, by labels: agreement can't, since it takes the new model for right."""
    k = evaluation.k
    cells = {row: evaluation.cell(row, "ndcg", k) for row in (TRANSLATED, STATUS_QUO, CASCADE, RE_EMBEDDED)}
    values = {row: cell.value for row, cell in cells.items() if cell is not None and cell.value is not None}
    translated = cells[TRANSLATED]
    if translated is None or translated.low is None or translated.high is None or STATUS_QUO not in values:
        return None
    now = values[STATUS_QUO]
    if translated.low >= now:
        return None
    how = "retrieves worse than" if translated.high < now else "is not shown to retrieve better than"
    numbers = f"ndcg@{k} {translated.value:.3f} against {now:.3f}"
    others = {CASCADE: "a cascade that re-ranks with true vectors", RE_EMBEDDED: "re-embedding everything"}
    reach = " and ".join(f"{text} {values[row]:.3f}" for row, text in others.items() if row in values)
    return f"Translation alone {how} doing nothing here ({numbers})." + (f" With {reach}." if reach else "")
