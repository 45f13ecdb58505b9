"""What a migration measures of its staged index: the rows of the report, where the losses are, and the gate."""

from __future__ import annotations

from dataclasses import dataclass

from vecferry.attribution import attribute
from vecferry.encoded import TrueRows
from vecferry.evaluate import evaluate
from vecferry.gate import Decision, Gate, decide, join
from vecferry.holdout import Holdout
from vecferry.linear import LinearMap
from vecferry.measured import Evaluation, Loss
from vecferry.mixing import measure_mix
from vecferry.slices import Slicing
from vecferry.store import Reader


@dataclass(frozen=True, slots=True)
class Measured:
    """Hold what was measured, where losses are, and what became of the gate; nothing of it without a hold-out."""

    evaluation: Evaluation | None = None
    attribution: tuple[Loss, ...] = ()
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Measure:
    """Hold what a staged index of translations of `source` is measured with.

    exact   exact vectors of the source, at least of the held-out documents, where it stores codes
    true    true vectors that stand in the index in the place of translations
    """

    source: Reader
    m: LinearMap
    holdout: Holdout | None
    gate: Gate | None
    slicing: Slicing | None
    exact: Reader | None
    true: TrueRows | None
    seed: int

    def of(self, staged: Reader) -> Measured:
        """Measure the index, and apply the gate."""
        if self.holdout is None:
            return Measured()
        holdout = self.holdout if self.true is None else self.holdout.take(self.true.held_in.measured)
        evaluation = evaluate(holdout, self.m, staged=staged, gate=self.gate, slicing=self.slicing, seed=self.seed)
        losses = attribute(
            holdout,
            self.m,
            staged,
            evaluation,
            source=self.source,
            exact=self.exact,
            lossy=self.source.info.lossy,
            true=self.true,
            seed=self.seed,
        )
        decisions = [] if self.gate is None else [decide(self.gate, evaluation)]
        if self.true is not None:
            mixed, decision = measure_mix(staged, self.true, self.holdout, evaluation.metric, evaluation.k, self.seed)
            evaluation = evaluation.joined(mixed)
            decisions.append(decision)
        return Measured(evaluation, losses, join(decisions))
