"""The rule by which `assess` says whether to migrate, and which way: numbers in, words out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vecferry.gate import MIN_QUERIES
from vecferry.measured import Cell

NOTHING, TRANSLATE, MAP_QUERIES = "do nothing", "translate the corpus", "map the queries"
CASCADE, RE_EMBED = "cascade", "re-embed all"
KEEPS = 0.9
"""The part of re-embedding's nDCG that a way must keep, by the lower end of its interval, to stand in for it."""

RULE = f"""\
  gain        nDCG of re-embedding / nDCG of doing nothing: what the new model is worth here
  retention   nDCG of a way / nDCG of re-embedding: what the way keeps of it
  break-even  retention x gain = nDCG of a way / nDCG of doing nothing: it must be above 1 to be worth the change
  A gain or break-even PAYS if its 95 % interval (over queries, paired) is above 1, LOSES if it is below 1,
  and is BORDERLINE between. A way keeps enough if the lower end of its retention is at least {KEEPS}.
  1. The gain loses: don't migrate; the upgrade itself is none.
  2. The gain is borderline: don't migrate for quality; it isn't shown to be there.
  3. The gain pays: of the ways in the table that pay and keep enough, the first, since they stand in the order of
     texts to encode; re-embedding all if there is none.
  If the old model goes away all the same: the first way that keeps enough, whether it pays or not."""

Standing = Literal["pays", "borderline", "loses", "unknown"]
Outcome = Literal["migrate", "borderline", "don't", "can't tell"]


@dataclass(frozen=True, slots=True)
class Judged:
    """Hold what the rule looks at of one way: cells of agreement, retention and break-even, or reasons there."""

    name: str
    agreement: Cell
    retention: Cell
    break_even: Cell

    @property
    def standing(self) -> Standing:
        """Whether the way beats doing nothing."""
        return standing(self.break_even)

    @property
    def keeps(self) -> bool:
        """Whether the way can stand in for re-embedding."""
        return _sure(self.retention) and self.retention.low is not None and self.retention.low >= KEEPS


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold what to do and why.

    outcome  "migrate", "borderline" (the gain isn't shown), "don't", or "can't tell" (no labels, or too few)
    way      the way that is recommended: "do nothing" too; None where it can't be told
    instead  the first way that keeps enough of re-embedding, for those who must leave the old model; None if unknown
    reasons  sentences, the most important first
    """

    outcome: Outcome
    way: str | None
    instead: str | None
    standings: dict[str, Standing]
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"reasons": list(self.reasons), "rule": RULE.splitlines()}


def standing(ratio: Cell) -> Standing:
    """Say on which side of 1 a ratio's whole interval lies."""
    if not _sure(ratio) or ratio.low is None or ratio.high is None:
        return "unknown"
    return "pays" if ratio.low > 1 else "loses" if ratio.high < 1 else "borderline"


def judge(ways: Sequence[Judged], gain: Cell) -> Verdict:
    """Apply the rule to ways in the order of texts to encode, re-embedding last, doing nothing left out."""
    standings = {way.name: way.standing for way in ways}
    measured = [way for way in ways if _sure(way.retention)]
    instead = next((way for way in measured if way.keeps), None)
    worth = standing(gain)
    if worth == "unknown":
        return Verdict("can't tell", None, _name(instead), standings, (*_unknown(gain), *_must(instead, ways)))
    if worth == "loses":
        first = (
            f"Don't migrate: on these labels the new model finds less than the old one (gain {_ratio(gain)}). The "
            "upgrade itself is none, so no way to it can pay."
        )
        return Verdict("don't", NOTHING, _name(instead), standings, (first, *_must(instead, ways)))
    if worth == "borderline":
        first = (
            f"Borderline: on these labels the new model isn't shown to find more than the old one (gain "
            f"{_ratio(gain)}). Don't migrate for quality; more labelled queries would narrow the interval."
        )
        return Verdict("borderline", NOTHING, _name(instead), standings, (first, *_must(instead, ways)))
    chosen = next((way for way in measured if way.keeps and way.standing == "pays"), measured[-1])
    reasons = [
        f"Migrate: {chosen.name}. It finds {_ratio(chosen.break_even)} times what doing nothing finds, and keeps "
        f"{_share(chosen.retention)} of re-embedding. The new model itself is worth {_ratio(gain)}."
    ]
    for way in measured[: measured.index(chosen)]:
        words = {
            "pays": "pays too, but keeps only",
            "borderline": "isn't shown to beat doing nothing, and keeps",
            "loses": "is worse than doing nothing, and keeps",
            "unknown": "keeps",
        }
        reasons.append(
            f"{way.name[0].upper()}{way.name[1:]}: {words[way.standing]} {_share(way.retention)} of re-embedding "
            f"(break-even {_ratio(way.break_even)})."
        )
    return Verdict("migrate", chosen.name, chosen.name, standings, tuple(reasons))


def _unknown(gain: Cell) -> tuple[str, ...]:
    if gain.value is not None:
        return (
            f"Can't tell: {gain.queries} labelled queries are too few to say whether the new model is better, at least "
            f"{MIN_QUERIES} are needed.",
        )
    return (
        f"Can't tell whether the new model is better, so neither whether to migrate: {gain.reason}. Agreement says "
        "only how much of what the new model would find a way finds too.",
    )


def _must(instead: Judged | None, ways: Sequence[Judged]) -> tuple[str, ...]:
    """Say what to do if the old model goes away: from labels, or else what agreement shows."""
    if instead is not None:
        if instead is not ways[-1]:
            kept = _share(instead.retention)
            return (f"If the old model goes away: {instead.name}, which keeps {kept} of re-embedding.",)
        others = [way for way in ways[:-1] if _sure(way.retention)]
        best = max(others, key=lambda way: way.retention.value or 0, default=None)
        short = f" Short of that, {best.name} keeps {_share(best.retention)} of it." if best is not None else ""
        return (
            f"If the old model goes away: {instead.name}; no other way is sure to keep {100 * KEEPS:.0f} %.{short}",
        )
    known = [way for way in ways if way.agreement.value is not None and way.name != RE_EMBED]
    shown = ", ".join(f"{way.name} {way.agreement.value:.2f}" for way in known)
    return (f"Of what re-embedding would find ({ways[-1].agreement.name}): {shown}.",) if known else ()


def _sure(cell: Cell) -> bool:
    return cell.value is not None and cell.queries >= MIN_QUERIES


def _name(way: Judged | None) -> str | None:
    return None if way is None else way.name


def _ratio(cell: Cell) -> str:
    if cell.value is None:
        return f"unknown: {cell.reason}"
    return f"{cell.value:.2f} [{cell.low:.2f}, {cell.high:.2f}]"


def _share(cell: Cell) -> str:
    if cell.value is None or cell.low is None or cell.high is None:
        return "an unknown part"
    return f"{100 * cell.value:.0f} % [{100 * cell.low:.0f}, {100 * cell.high:.0f}]"
