"""What `assess` found: the ways side by side, the verdict, and the page that shows both with the rule."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vecferry.measured import Cell
from vecferry.verdict import RULE, Judged, Verdict
from vecferry.ways import K


@dataclass(frozen=True, slots=True)
class Way:
    """Hold what is known of one way.

    cells           agreement (or doc-agreement) and ndcg among the paired documents; retention.ndcg and
                    break-even.ndcg at the index's own size (see `gains.Gains`)
    foretold        agreement at the index's own size (see `ways.foretell`), where that is more than the pairs
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
    foretold: Cell | None = None

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
        paired, size = self.facts["measured"], self.gain.documents or self.facts["measured"]
        width = max(len(w.name) for w in self.ways)
        columns = [(self.ways[-1].cells[0].name, paired, "measured"), (f"ndcg@{K}", paired, "measured")]
        columns += [(name, size, "measured" if size == paired else "projected") for name in ("retention", "break-even")]
        told = self.ways[-1].foretold
        if told is not None:
            said = "extrapolated" if told.verified else "unverified"
            columns.insert(1, (columns[0][0], told.documents, said))
        yield f"{'':{width}}" + "".join(f"{name:>18}" for name, _, _ in columns)
        yield f"{'':{width}}" + "".join(f"{f'among {n:,}':>18}" for _, n, _ in columns)
        yield f"{'':{width}}" + "".join(f"{how:>18}" for _, _, how in columns)
        reasons: dict[str, int] = {}
        for way in self.ways:
            cells = way.cells if told is None else (way.cells[0], way.foretold or told, *way.cells[1:])
            numbers = "".join(f"{_number(cell, reasons):>18}" for cell in cells)
            said = self.verdict.standings.get(way.name, "unknown")
            yield f"{way.name:{width}}{numbers}  {said}".removesuffix("  unknown")
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


def _number(cell: Cell, reasons: dict[str, int]) -> str:
    """Write a number with its interval, or that of the reason why there is none."""
    if cell.value is None:
        return f"- ({reasons.setdefault(cell.reason or '', len(reasons) + 1)})"
    return f"{cell.value:.2f} [{cell.low:.2f}, {cell.high:.2f}]"


def _bytes(n: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}" if n else "0"
        n /= 1000  # type: ignore[assignment]
    return f"{n:.3g} TB"
