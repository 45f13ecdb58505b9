"""The pass/fail rule: the lower end of an interval, as indexed, at the size of the index or one that is named."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from vecferry.errors import UsageError
from vecferry.measured import AS_INDEXED, HELD_OUT, Cell, Evaluation, one_line

SLICED = ("agreement", "doc-agreement", "recall", "ndcg")
WORST = "worst-slice."
METRICS = (*SLICED, "retention.recall", "retention.ndcg", "index-overlap", *(WORST + m for m in SLICED))
SIZED = ("agreement", "doc-agreement")
"""What can be foretold for a corpus of another size, and is held to the gate at the index's own."""
EXAMPLE = '--gate "agreement@10>=0.35 and ndcg@10>=0.2"'

MIN_QUERIES = 30
"""Below this a bootstrap interval isn't to be trusted: it can't know of queries unlike the few it saw."""
CHANCE = 0.1
"""The share of a threshold that chance, k of n documents, may reach; more, and passing would prove little."""

MOST = 10**12
"""Documents of the largest index that a condition may speak of."""

_CONDITION = re.compile(
    r"\s*([a-z.-]+)\s*@\s*([0-9]+)\s*(?:@\s*([0-9][0-9_,]*)\s*)?(>=|>|<=|<|==|=)\s*([0-9]*\.?[0-9]+)\s*", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Condition:
    """Hold one condition of a gate, such as agreement@10>=0.35, or agreement@10@15000>=0.35 among 15,000 documents."""

    metric: str
    k: int
    operator: Literal[">=", ">"]
    threshold: float
    size: int | None = None

    def __str__(self) -> str:
        size = "" if self.size is None else f"@{self.size}"
        return f"{self.metric}@{self.k}{size}{self.operator}{self.threshold:g}"

    @property
    def least(self) -> int:
        """How many documents must be searched, or chance alone finds more than `CHANCE` of the threshold."""
        return math.ceil(self.k / (CHANCE * self.threshold) - 1e-9)

    def holds(self, value: float) -> bool:
        """Say whether a number reaches the threshold."""
        return value > self.threshold if self.operator == ">" else value >= self.threshold


@dataclass(frozen=True, slots=True)
class Gate:
    """Hold the conditions that a new index must all meet."""

    conditions: tuple[Condition, ...]

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read `METRIC@K OP VALUE`, several joined by `and`; raise UsageError quoting what can't be read."""
        parts = re.split(r"\s+and\s+", text.strip(), flags=re.IGNORECASE)
        return cls(tuple(_condition(part, text) for part in parts))

    @classmethod
    def of(cls, gate: str | Gate | None) -> Gate | None:
        """Return a gate, read where it is text, and None for none; raise UsageError for anything else."""
        if gate is None or isinstance(gate, Gate):
            return gate
        if not isinstance(gate, str):
            raise UsageError(f"a gate is text or a Gate, not {gate!r}: write METRIC@K>=VALUE, as in {EXAMPLE}")
        return cls.parse(gate)

    @property
    def ks(self) -> frozenset[int]:
        """Every k that must be measured."""
        return frozenset(c.k for c in self.conditions)

    @property
    def metrics(self) -> frozenset[str]:
        """Every metric that must be measured."""
        return frozenset(c.metric for c in self.conditions)

    @property
    def sliced(self) -> bool:
        """Whether it asks for the worst slice."""
        return any(metric.startswith(WORST) for metric in self.metrics)

    def __str__(self) -> str:
        return " and ".join(str(c) for c in self.conditions)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Hold what became of one condition; "inconclusive" blocks as "fail" does, and says what is missing."""

    condition: str
    outcome: Literal["pass", "fail", "inconclusive"]
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Hold what became of a gate."""

    gate: str
    judgements: tuple[Judgement, ...]

    @property
    def passed(self) -> bool:
        """Whether every condition passed."""
        return all(j.outcome == "pass" for j in self.judgements)

    @property
    def outcome(self) -> Literal["pass", "fail", "inconclusive"]:
        """The outcome of all together: a clear fail outweighs an inconclusive one."""
        outcomes = {j.outcome for j in self.judgements}
        return "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"


def decide(gate: Gate, evaluation: Evaluation) -> Decision:
    """Hold every condition against the row "as indexed", by the lower end of the interval."""
    return Decision(str(gate), tuple(_judge(c, evaluation) for c in gate.conditions))


def join(decisions: list[Decision]) -> Decision | None:
    """Make one decision of several, None of none."""
    if not decisions:
        return None
    return Decision(" and ".join(d.gate for d in decisions), tuple(j for d in decisions for j in d.judgements))


def _condition(part: str, text: str) -> Condition:
    match = _CONDITION.fullmatch(part)
    if match is None:
        raise UsageError(f"can't read {part.strip()!r} in the gate {text!r}: write METRIC@K>=VALUE, as in {EXAMPLE}")
    metric, k, operator, value = match[1].lower(), int(match[2]), match[4], float(match[5])
    size = None if match[3] is None else int(re.sub("[_,]", "", match[3]))
    if metric in ("identity", "identity-recall"):
        raise UsageError(
            f"{part.strip()!r}: identity recall saturates near 1 for maps whose searches agree by a third, so it can't "
            f"be gated; gate what users see, as in {EXAMPLE}"
        )
    if metric == "retention.agreement":
        raise UsageError(
            f"{part.strip()!r}: agreement is measured against re-embedding already, so what is retained of it is "
            f"agreement itself, as in {EXAMPLE}"
        )
    if metric not in METRICS:
        raise UsageError(f"{part.strip()!r}: no metric {metric!r}; there are {', '.join(METRICS)}, as in {EXAMPLE}")
    if operator not in (">=", ">"):
        raise UsageError(
            f"{part.strip()!r}: a gate asks how good the new index is at least, so it takes >= and >, as in {EXAMPLE}"
        )
    if max(k, size or 0) > MOST:
        raise UsageError(f"{part.strip()!r}: no index has more than {MOST:,} documents: name fewer, as in {EXAMPLE}")
    if k < 1:
        raise UsageError(f"{part.strip()!r}: k must be at least 1, as in {EXAMPLE}")
    if not 0 < value <= 1 or (operator == ">" and value == 1):
        raise UsageError(
            f"{part.strip()!r}: metrics lie between 0 and 1, and a threshold that nothing or everything "
            f"passes is no gate, as in {EXAMPLE}"
        )
    if size is not None and metric not in SIZED:
        raise UsageError(
            f"{part.strip()!r}: only {' and '.join(SIZED)} are foretold for a corpus of another size; {metric} is "
            f"judged as it was measured, as in {EXAMPLE}"
        )
    if size is not None and size <= k:
        raise UsageError(
            f"{part.strip()!r}: {k} documents are to be found among {size}: name a larger size, as in {EXAMPLE}"
        )
    return Condition(metric, k, ">" if operator == ">" else ">=", value, size)


def _judge(condition: Condition, evaluation: Evaluation) -> Judgement:
    if condition.metric.startswith(WORST):
        return _judge_worst(condition, evaluation)
    cell = evaluation.cell(AS_INDEXED, condition.metric, condition.k)
    size = (condition.size or evaluation.acting) if condition.metric in SIZED else None
    if cell is not None and cell.value is not None and size not in (None, cell.documents):
        cell = evaluation.cell(AS_INDEXED, condition.metric, condition.k, size)
    if cell is None or cell.value is None:
        return Judgement(str(condition), "inconclusive", _unmeasured(condition, evaluation, cell))
    judgement = _judge_cell(condition, cell)
    if condition.metric in SIZED or evaluation.acting is None or cell.among != HELD_OUT:
        return judgement
    return replace(judgement, message=f"{judgement.message} (labels aren't foretold: the whole index has less)")


def _judge_cell(condition: Condition, cell: Cell) -> Judgement:
    def judgement(outcome: Literal["pass", "fail", "inconclusive"], message: str) -> Judgement:
        return Judgement(str(condition), outcome, message)

    assert cell.value is not None
    assert cell.low is not None
    k, threshold = condition.k, condition.threshold
    measured = f"{cell.name} is {cell.value:.3f} [{cell.low:.3f}, {cell.high:.3f}] {cell.basis}"
    if cell.queries < MIN_QUERIES:
        return judgement("inconclusive", f"{measured}: at least {MIN_QUERIES} {cell.asked} are needed")
    needed = condition.least
    searched = cell.documents if cell.held_out is None else min(cell.documents, cell.held_out)
    if searched < needed:
        among = cell.among if cell.held_out is None else HELD_OUT
        chance = f"chance alone finds {k / searched:.3f} among {searched:,}"
        return judgement("inconclusive", f"{measured}: {chance}; at least {needed:,} {among} are needed")
    if condition.holds(cell.low):
        return judgement("pass", f"{measured}: the lower end reaches {threshold:g}")
    if not condition.holds(cell.value):
        return judgement("fail", f"{measured}: below {threshold:g}")
    more = (
        "more queries and more held-out documents narrow the interval"
        if cell.size is not None
        else more_queries(cell.queries, cell.value, cell.low, threshold)
    )
    return judgement("inconclusive", f"{measured}: the lower end is below {threshold:g}; {more}")


def _judge_worst(condition: Condition, evaluation: Evaluation) -> Judgement:
    """Judge every slice that has enough queries by itself; what becomes of the worst becomes of all."""
    slices, metric = evaluation.slices, condition.metric.removeprefix(WORST)
    if slices is None:
        return Judgement(str(condition), "inconclusive", "no slices were measured: name a payload column with --slice")
    cells = [(row.name, row.cell(metric, condition.k)) for row in slices.rows]
    known = [(name, cell) for name, cell in cells if cell is not None and cell.value is not None]
    judged = [(name, cell, _judge_cell(condition, cell)) for name, cell in known]
    few = len(cells) - len(judged) + slices.left_out
    unknown = f"; {few} more of fewer than {MIN_QUERIES} queries say nothing" if few else ""
    if all(cell is None for _, cell in cells):
        plain = Condition(metric, condition.k, condition.operator, condition.threshold)
        message = _unmeasured(plain, evaluation, evaluation.cell(AS_INDEXED, metric, condition.k))
        return Judgement(str(condition), "inconclusive", message)
    if not judged:
        message = f"none of the {few} slices by {slices.column} has {MIN_QUERIES} queries"
        return Judgement(str(condition), "inconclusive", message)
    severity = ("fail", "inconclusive", "pass")
    name, _, worst = min(judged, key=lambda item: (severity.index(item[2].outcome), item[1].low))
    where = f"of {len(judged)} slices by {slices.column} the worst is {one_line(name)!r}"
    return Judgement(str(condition), worst.outcome, f"{where}: {worst.message}{unknown}")


def more_queries(queries: int, value: float, low: float, threshold: float) -> str:
    """Say how many queries would decide, as the interval narrows with the square root of their number."""
    if value <= threshold:
        return "the value is the threshold itself, so more queries wouldn't decide"
    needed = math.ceil(queries * ((value - low) / (value - threshold)) ** 2)
    return f"if the value stays, about {needed:,} queries decide"


def _unmeasured(condition: Condition, evaluation: Evaluation, cell: Cell | None) -> str:
    reason = cell.reason if cell is not None and cell.reason else f"not measured with k = {condition.k}"
    name, verb = f"{condition.metric}@{condition.k}", "measured"
    if (cell is not None and cell.size is not None) or condition.size is not None:
        name, verb = f"{name}@{condition.size or evaluation.acting}", "foretold"
    message = f"{name} can't be {verb}: {reason}"
    instead = evaluation.cell(AS_INDEXED, "doc-agreement", condition.k)
    if condition.metric == "agreement" and instead is not None and instead.value is not None:
        message += (
            f"; without real queries only doc-agreement@k can be gated, which flatters (here {instead.value:.3f}): "
            f"--gate 'doc-agreement@{condition.k}>=...'"
        )
    return message
