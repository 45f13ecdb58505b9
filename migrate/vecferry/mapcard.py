"""What a map's card says, for people: a few lines after a fit, more for `inspect`, a page in the map's folder.

All three show the same facts, so that no two of them can disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vecferry.errors import UsageError
from vecferry.linear import Card, LinearMap, Side

CARRIES = {
    "document": "old document vectors into the new space",
    "query": "new query vectors into the old space",
    "filter": "documents and queries of one model into fewer dimensions",
}
TRIED = {
    "document": "maps that were tried, judged on the pairs of the fit with each left out",
    "query": "maps that were tried, judged on the pairs of the fit with each left out",
    "filter": "filters that were tried, judged on vectors that are neither fitted on nor held out",
}
BRIEF = ("map", "from", "to", "pairs", "solver", "leave-one-out", "held out", "more pairs")
"""The facts that are shown after a fit."""
SHOWN = 10
"""Candidates that `inspect` shows: there are over a hundred of them, the best first."""


def facts(m: LinearMap, card: Card) -> list[tuple[str, str]]:
    """Return what there is to know of a map as names and values, what matters most first; without the candidates."""
    parameters, measured = card.parameters, card.measured
    rows = [
        ("map", f"carries {CARRIES[card.direction]} (direction {card.direction!r})"),
        ("from", _side(card.source)),
        ("to", f"{_side(card.target)}, ranked by {card.metric}"),
        ("pairs", _pairs(card)),
        ("solver", _solver(card)),
    ]
    if "gain" in parameters:
        rows.append(("leave-one-out", _choice(parameters)))
        rows.append(("judged by", "{queries:,} {by} among {pairs:,} pairs".format(**parameters["judged"])))
    if parameters.get("rank"):
        rows.append(("distillation", f"{_numbers(parameters['rank'])}, on held-out folds"))
    if "documents" in measured:
        rows.append(("held out", _retrieved(measured)))
    if near := {key: value for key, value in measured.items() if isinstance(value, float) and "@" not in key}:
        rows.append(("vectors", _numbers(near)))
    if (curve := measured.get("learning_curve")) is not None:
        rows.append(("more pairs", _doubled(curve)))
        points = zip(curve["pairs"], curve["values"], strict=True)
        rows.append(("learning curve", ", ".join(f"{n:,}: {value:.3f}" for n, value in points)))
    for name, key in (("likeness", "likeness"), ("skipped", "skipped")):
        if parameters.get(key):
            rows.append((name, _numbers(parameters[key])))
    for side in ("source", "target"):
        if (norms := parameters.get(f"{side}_norms")) is not None:
            rows.append((f"{side} norms", "from {0:.4g} to {2:.4g}, median {1:.4g}".format(*norms)))
    bias = "no bias" if m.bias is None else "bias"
    rows.append(("form", f"pre {m.pre}, weight {m.d_in} x {m.d_out}, {bias}, post {m.post}"))
    return [*rows, ("made by", f"vecferry {card.version}, seed {card.seed}"), ("sha256", card.sha256)]


def brief(m: LinearMap) -> str:
    """Write what a fit found in about ten lines; raise UsageError for a map without a card."""
    card = _card(m)
    rows = [fact for fact in facts(m, card) if fact[0] in BRIEF]
    return "\n".join([*_aligned(rows), *(f"warning: {w}" for w in card.warnings)])


def describe(m: LinearMap) -> str:
    """Write a map's card, the best candidates of its choice as a table; raise UsageError for a map without a card."""
    card = _card(m)
    lines = [*_aligned(facts(m, card)), *(f"warning: {w}" for w in card.warnings)]
    if tried := _candidates(card):
        table, others = tried[: SHOWN + 1], len(tried) - 1 - SHOWN
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", TRIED[card.direction]]
        lines += ["  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines += [f"and {others} others, which did no better: all of them with --json"] if others > 0 else []
    return "\n".join(lines)


def page(m: LinearMap) -> str:
    """Write the model card as Markdown, for the map's folder; raise UsageError for a map without a card."""
    card = _card(m)
    name = [side.model or "an unnamed model" for side in (card.source, card.target)]
    lines = [
        f"# {name[0]} → {name[1]}",
        "",
        f"A linear map made by vecferry {card.version}. It carries {CARRIES[card.direction]}; nothing else.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {fact} | {value} |" for fact, value in facts(m, card)),
    ]
    if card.warnings:
        lines += ["", "Warnings of the fit:", "", *(f"- {w}" for w in card.warnings)]
    if table := _candidates(card):
        lines += ["", f"{TRIED[card.direction].capitalize()}:", ""]
        lines += [f"| {' | '.join(table[0])} |", "|" + "---|" * len(table[0])]
        lines += [f"| {' | '.join(row)} |" for row in table[1:]]
    return "\n".join(lines) + "\n"


def _card(m: LinearMap) -> Card:
    if m.card is None:
        raise UsageError("a map without a card has nothing to describe: give it one with with_card()")
    return m.card


def _aligned(rows: list[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in rows)
    return (f"{name:<{width}}  {value}" for name, value in rows)


def _side(side: Side) -> str:
    prompt = f" with the prompt {side.prompt!r}" if side.prompt else ""
    return f"{side.model or 'an unnamed model'}{prompt}, {side.dim} dimensions"


def _pairs(card: Card) -> str:
    skipped = sum(card.parameters.get("skipped", {}).values())
    held = f", {card.measured['documents']:,} held out" if "documents" in card.measured else ""
    return f"{card.pairs:,} fitted on{held}, {skipped:,} rows skipped"


def _solver(card: Card) -> str:
    chosen = card.parameters.get("chosen")
    if chosen is None:
        given = {k: v for k, v in card.parameters.items() if isinstance(v, (str, int, float))}
        return f"{card.solver}, {_numbers(given)}" if given else card.solver
    turned = chosen["turned"]
    parts = [{0.0: "ridge", 1.0: "procrustes"}.get(turned, f"ridge with {turned:g} of procrustes")]
    parts += ["centred"] if chosen["centred"] else []
    shrunk = ("lambda", "unshrunk") if turned < 1 else ()  # a rotation alone has neither
    parts += [f"{name} {chosen[name]:.4g}" for name in (*shrunk, "tilt") if chosen[name]]
    parts += [f"mean times {chosen['mean']:.4g}"] if chosen["mean"] != 1 else []
    parts += [f"{chosen['rank']} rank distillation"] if chosen["rank"] else []
    return f"{card.solver}: {', '.join(parts)}"


def _choice(parameters: Mapping[str, Any]) -> str:
    """Put the chosen closed form beside the simple maps, by what each finds with every pair left out in turn."""
    gain = parameters["gain"]
    metric = next(key for key in gain if "@" in key)
    found = {c["name"]: c[metric] for c in parameters["candidates"] if c["name"]}
    simple = f"ridge {found['ridge']:.3f}, procrustes {found['procrustes']:.3f}"
    if "chosen" not in found:
        return f"{metric}: {simple}; nothing beats {gain['over']} by a standard error"
    better = f"{gain[metric]:+.3f} over {gain['over']}, standard error {gain['standard_error']:.3f}"
    return f"{metric} {found['chosen']:.3f}; {simple} ({better})"


def _retrieved(measured: Mapping[str, Any]) -> str:
    found = _numbers({key: value for key, value in measured.items() if "@" in key}) or "no search was measured"
    asked = f"{measured['queries']:,} queries" if measured.get("queries") else "documents as queries"
    return f"{found} ({asked} among {measured['documents']:,} held-out documents)"


def _doubled(curve: Mapping[str, Any]) -> str:
    doubled = curve["doubled"]
    about = f"{doubled['value']:.3f} [{doubled['low']:.3f}, {doubled['high']:.3f}]"
    return f"twice as many ({doubled['pairs']:,}) would give {curve['metric']} of about {about}"


def _candidates(card: Card) -> list[list[str]]:
    """Return the maps that were tried as a table with its head; empty where none were."""
    candidates = card.parameters.get("candidates", [])
    columns = list(dict.fromkeys(key for candidate in candidates for key in candidate))
    return [columns, *([_cell(c.get(key, "")) for key in columns] for c in candidates)] if candidates else []


def _numbers(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_cell(value)}" for name, value in values.items())


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
