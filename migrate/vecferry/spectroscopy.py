"""The verb `spectrum`: which directions of a model's head speak of frequent tokens, as numbers and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vecferry.encoders.local import locate
from vecferry.errors import MissingDependencyError, UsageError
from vecferry.filtering import EDGE, texts_in
from vecferry.heads import Head, read_head
from vecferry.report import publish
from vecferry.spectrum import Spectrum, Tokens, Values, band, frequent, infrequent, smoothed
from vecferry.vocabulary import Tokenize, count_tokens, tokenizer_of

GROUPS = ("frequent", "infrequent", "random")
SWEEP = (0.01, 0.1, 0.5, 1.0)
"""Smoothings of unseen tokens under which the average token is compared."""
PARTS = 10
"""Stretches of the spectrum that a table for people averages over."""
FORMS = {"literal": False, "centered": True}
"""Values of `center_log`: log p as the paper has it, and less its mean."""


@dataclass(frozen=True, slots=True)
class Spectroscopy:
    """Hold a head's singular values, and by how much each direction moves the logits of some tokens.

    band       first and last direction that EmbedFilter keeps for `tau`, the last not included
    delta_pi   by form of the average token ("literal", "centered") and by group of tokens, `[d]` each
    forms      cosine of the two average tokens, and the rank correlation of their delta-pi of frequent tokens
    smoothing  by smoothing, the cosine of the average token, in each form, with the one that is shown
    """

    model: str
    tokens: int
    counted: int
    seen: int
    tau: int
    band: tuple[int, int]
    singular_values: tuple[float, ...]
    delta_pi: dict[str, dict[str, tuple[float, ...]]]
    forms: dict[str, float]
    smoothing: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, strings and numbers."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def rows(self) -> list[list[str]]:
        """Return the table of all directions, with its head."""
        columns = [(form, group) for form in FORMS for group in GROUPS]
        head = ["direction", "singular_value", "kept", *(f"delta_pi_{group}_{form}" for form, group in columns)]
        rows = [head]
        for i, value in enumerate(self.singular_values):
            changes = [f"{self.delta_pi[form][group][i]:.6g}" for form, group in columns]
            rows.append([str(i), f"{value:.6g}", str(int(self.band[0] <= i < self.band[1])), *changes])
        return rows

    def table(self) -> str:
        """Write means over tenths of the spectrum, and how stable they are."""
        d = len(self.singular_values)
        low, high = self.band
        lines = [
            f"model    {self.model}: {self.tokens:,} tokens, {d} dimensions",
            f"corpus   {self.counted:,} tokens counted, {self.seen:,} different ones",
            f"kept     directions {low} to {high - 1} at tau = {self.tau}",
            f"forms    average tokens of log p and centred log p: cosine {self.forms['cosine']:.2f}, rank "
            f"correlation of their delta-pi {self.forms['rank_correlation']:.2f}",
            "",
            f"{'mean delta-pi by':16}{'log p':>36}{'centred log p':>36}{'singular':>12}",
            f"{'directions':16}{''.join(f'{group:>12}' for _ in FORMS for group in GROUPS)}{'value':>12}",
        ]
        for part in np.array_split(np.arange(d), min(PARTS, d)):
            means = [np.mean([self.delta_pi[form][group][i] for i in part]) for form in FORMS for group in GROUPS]
            value = np.mean([self.singular_values[i] for i in part])
            lines.append(f"{f'{part[0]} to {part[-1]}':16}{''.join(f'{m:12.4f}' for m in means)}{value:12.3f}")
        lines += ["", "average tokens under other smoothings of unseen tokens, by cosine with the one above"]
        for name, cosines in self.smoothing.items():
            lines.append(f"{name:16}log p {cosines['literal']:.3f}, centred {cosines['centered']:.3f}")
        return "\n".join(lines)


def spectroscopy(
    model: str | Path,
    corpus: str | Path,
    output: str | Path | None = None,
    *,
    tau: int = 2,
    offset: int | None = None,
    smoothing: float = 0.5,
    plot: bool = True,
    seed: int = 0,
    tokenize: Tokenize | None = None,
) -> Spectroscopy:
    """Decompose a model's head, and say which directions change the logits of frequent, rare and random tokens.

    With `output` a new folder gets spectrum.json, spectrum.csv and, with `plot`, spectrum.png. `tokenize` stands in
    for the model's own tokenizer. Sections 3.1 and 3.2 of arXiv 2606.07502. Raises UsageError for a folder that
    exists, MissingDependencyError without matplotlib where there is to be a plot.
    """
    folder = None if output is None else Path(output)
    if folder is not None and folder.exists():
        raise UsageError(f"{folder} exists: choose another name for the results")
    if folder is not None and plot:
        _matplotlib()
    head = read_head(model)
    kept = band(head.weight.shape[1], tau, offset)
    counts = count_tokens(texts_in(corpus), tokenize or tokenizer_of(locate(str(model)).path), len(head.weight))
    spectrum = Spectrum.of(head.weight)
    k = min(EDGE, len(counts))
    groups: dict[str, Tokens] = {
        "frequent": frequent(counts, k),
        "infrequent": infrequent(counts, k),
        "random": np.sort(np.random.default_rng(seed).permutation(len(counts))[:k]),
    }
    states = {form: _state(spectrum, head, counts, smoothing, center_log=centre) for form, centre in FORMS.items()}
    changes = {
        form: {name: spectrum.delta_pi(head.weight, state, tokens) for name, tokens in groups.items()}
        for form, state in states.items()
    }
    swept = {
        f"{other:g}": {
            form: _cosine(states[form], _state(spectrum, head, counts, other, center_log=centre))
            for form, centre in FORMS.items()
        }
        for other in SWEEP
    }
    result = Spectroscopy(
        model=head.name,
        tokens=len(counts),
        counted=int(counts.sum()),
        seen=int((counts > 0).sum()),
        tau=tau,
        band=kept,
        singular_values=_numbers(spectrum.values),
        delta_pi={form: {name: _numbers(v) for name, v in found.items()} for form, found in changes.items()},
        forms={
            "cosine": _cosine(*states.values()),
            "rank_correlation": rank_correlation(changes["literal"]["frequent"], changes["centered"]["frequent"]),
        },
        smoothing=swept,
    )
    if folder is not None:
        folder.mkdir(parents=True)
        publish(folder / "spectrum.json", json.dumps(result.to_json(), indent=2) + "\n")
        publish(folder / "spectrum.csv", "\n".join(map(",".join, result.rows())) + "\n")
        if plot:
            draw(result, folder / "spectrum.png")
    return result


def rank_correlation(x: Values, y: Values) -> float:
    """Return Spearman's rank correlation of two series without ties."""
    a, b = (np.argsort(np.argsort(v)) - (len(v) - 1) / 2 for v in (x, y))
    return round(float(a @ b / (a @ a)), 4)


def draw(result: Spectroscopy, path: Path) -> None:
    """Draw singular values, and delta-pi of both forms, with the kept band marked."""
    figure_module, canvas_module = _matplotlib()
    figure = figure_module.Figure(figsize=(9, 9), layout="constrained")
    canvas_module.FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True)
    places = np.arange(len(result.singular_values))
    axes[0].semilogy(places, np.maximum(result.singular_values, 1e-12), color="black")
    axes[0].set_ylabel("singular value")
    titles = {"literal": "log p", "centered": "centred log p"}
    for axis, form in zip(axes[1:], FORMS, strict=True):
        for group in GROUPS:
            axis.plot(places, result.delta_pi[form][group], label=f"{group} tokens", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_ylabel(f"delta-pi, {titles[form]}")
        axis.legend(loc="upper center", ncols=3)
    for axis in axes:
        axis.axvspan(result.band[0], result.band[1] - 1, color="tab:green", alpha=0.12)
    axes[0].set_title(f"{result.model}: shaded is what EmbedFilter keeps at tau = {result.tau}")
    axes[-1].set_xlabel("direction, largest singular value first")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _matplotlib() -> tuple[Any, Any]:
    """Import what draws without a screen; raise MissingDependencyError where it isn't installed."""
    try:
        return import_module("matplotlib.figure"), import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise MissingDependencyError(
            "matplotlib", "plots", "the plot of a spectrum (leave it out with --no-plot)"
        ) from error


def _state(spectrum: Spectrum, head: Head, counts: Tokens, smoothing: float, *, center_log: bool) -> Values:
    return spectrum.average_token(head.weight, smoothed(counts, smoothing), center_log=center_log)


def _cosine(x: Values, y: Values) -> float:
    return round(float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y))), 4)


def _numbers(values: Values) -> tuple[float, ...]:
    return tuple(float(f"{v:.8g}") for v in values)
