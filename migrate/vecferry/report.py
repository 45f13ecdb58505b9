"""What a user is shown: the facts of a run, the numbers with their sizes, the verdict; as a table and as JSON."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vecferry.errors import DataError, UsageError
from vecferry.gate import Decision
from vecferry.jsonfile import read_json, typed
from vecferry.measured import CASCADE, RE_EMBEDDED, STATUS_QUO, TRANSLATED, Curve, Evaluation, Loss
from vecferry.tables import write_curves, write_facts, write_losses, write_tables

FORMAT = 1
MOST = 256 << 20
"""Bytes of the largest report: one of many queries holds some numbers for each of them."""
NEXT = {
    "pass": "vecferry inspect {destination}",
    "fail": "it stays staged beside {destination}: publish it with --resume and another --gate, or delete the stage "
    "(.NAME.vecferry) and fit a better map",
    "inconclusive": "it stays staged beside {destination}: fit with more held-out documents or queries, or publish "
    "it with --resume and another --gate",
}
STAYS = (
    "{destination} was published by an earlier run and stays: go back with vecferry rollback {destination} if it "
    "replaced an index (.bak), or migrate to another name with a better map"
)
"""What to do about a gate that didn't pass for what is published already: there is no stage."""


@dataclass(frozen=True, slots=True)
class Report:
    """Hold what a run did and measured.

    facts       what there is to know besides numbers: source, destination, map, models, counts, index
    evaluation  the measured rows, None where the map has no hold-out
    decision    what became of the gate, None without one
    timing      seconds by step: the only part that differs between two equal runs
    curves      how the numbers go with the number of pairs or of documents
    attribution what is lost to which cause, from re-embedding to the index as it is searched
    """

    facts: Mapping[str, Any]
    evaluation: Evaluation | None = None
    decision: Decision | None = None
    warnings: tuple[str, ...] = ()
    timing: Mapping[str, float] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    attribution: tuple[Loss, ...] = ()

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

    @property
    def most_lost(self) -> str | None:
        """A sentence that says where most is lost, or None where nothing is attributed."""
        return _most_lost(self.attribution)

    @property
    def all_curves(self) -> tuple[Curve, ...]:
        """The curves, those over the number of documents, and those of the index's search parameters."""
        measured = self.evaluation
        return self.curves + (() if measured is None else measured.sizes + measured.sweep)

    def next_step(self) -> str:
        """Return what to do next, in a line."""
        outcome = self.decision.outcome if self.decision is not None else "pass"
        step = STAYS if outcome != "pass" and self.facts.get("published") else NEXT[outcome]
        return step.format(destination=self.facts.get("destination", ""))

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dictionaries, strings and numbers, the same for the same run but for "timing"."""
        value = {
            "format": FORMAT,
            "passed": self.passed,
            "facts": dict(self.facts),
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "gate": None if self.decision is None else asdict(self.decision) | {"outcome": self.decision.outcome},
            "curves": [asdict(curve) for curve in self.curves],
            "attribution": [asdict(loss) for loss in self.attribution],
            "most_lost": self.most_lost,
            "advice": self.advice,
            "warnings": list(self.warnings),
            "timing": dict(self.timing),
        }
        plain: dict[str, Any] = json.loads(json.dumps(value, default=_plain, allow_nan=False))
        return plain

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report.json; raise UsageError if there is none, DataError for anything else."""
        path = Path(path)
        try:
            value = read_json(path, MOST)
            if value["format"] != FORMAT:
                raise DataError(f"{path} is a report of format {value['format']}, this vecferry reads {FORMAT}")
            gate = typed(dict[str, Any] | None, value["gate"], "gate")
            if gate is not None:
                gate.pop("outcome", None)  # it follows from the judgements
            report = cls(
                facts=typed(dict[str, Any], value["facts"], "facts"),
                evaluation=typed(Evaluation | None, value["evaluation"], "evaluation"),
                decision=typed(Decision | None, gate, "gate"),
                warnings=typed(tuple[str, ...], value["warnings"], "warnings"),
                timing=typed(dict[str, float], value["timing"], "timing"),
                curves=typed(tuple[Curve, ...], value.get("curves", []), "curves"),
                attribution=typed(tuple[Loss, ...], value.get("attribution", []), "attribution"),
            )
            for per_query in report.evaluation.per_query if report.evaluation is not None else ():
                for name in per_query.values:
                    per_query.read(name)
            report.table()  # one that can't be shown isn't one that was written
        except FileNotFoundError as error:
            raise UsageError(f"{path}: no such file") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} can't be read as a report: {error!r}") from error
        return report

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, whole or not at all."""
        publish(path, json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n")

    def table(self) -> str:
        """Return the report for people: facts, a table for each metric, notes, and the verdict as the last line."""
        lines = [*write_facts(self.facts), *(f"warning: {w}" for w in self.warnings)]
        if self.evaluation is not None:
            lines += ["", *write_tables(self.evaluation)]
        lines += write_losses(self.attribution)
        if self.most_lost:
            lines += ["", *textwrap.wrap(self.most_lost, 100)]
        lines += write_curves(self.all_curves)
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


def publish(path: str | Path, text: str) -> None:
    """Write a file in one step: readers find the old one or the new one, never a part."""
    path = Path(path)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with fresh.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """Turn numpy numbers into Python's, and whatever else JSON doesn't know into its text."""
    return value.item() if hasattr(value, "item") else value.hex() if isinstance(value, bytes) else str(value)


def _most_lost(losses: tuple[Loss, ...]) -> str | None:
    """Name the largest loss among those of one metric, which add up; say what ANN search loses at full size too."""
    metric = losses[0].metric if losses else ""
    chain = [(loss.value, loss.cause) for loss in losses if loss.value is not None and loss.metric == metric]
    if not chain:
        return None
    worst, cause = max(chain, key=lambda step: step[0])
    total = sum(value for value, _ in chain if value > 0)
    if worst <= 0:
        return f"No {metric} is lost."
    found = f"Most is lost to {cause}: {worst:.3f} of the {total:.3f} {metric} that is lost."
    full = next((loss for loss in losses if loss.metric.startswith("index-overlap") and loss.value), None)
    if full is None:
        return found
    return f"{found} At full size its search misses {full.value:.3f} of what exact search over its vectors finds."


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
