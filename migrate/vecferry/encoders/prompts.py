"""What a text is wrapped in before a model sees it: templates with `{text}`, for documents and for queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vecferry.errors import UsageError

TextSide = Literal["document", "query"]
MARK = "{text}"
PLAIN = (MARK,)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Hold the templates of both sides of one space; the vectors of several templates of a side are averaged.

    A model that was trained with one prefix for queries and another for documents (E5) puts both into one space, so
    the pair belongs to it, and an encoder holds the pair whichever side it encodes.
    """

    document: tuple[str, ...] = PLAIN
    query: tuple[str, ...] = PLAIN

    def __post_init__(self) -> None:
        for template in (*self.document, *self.query):
            if MARK not in template:
                raise UsageError(
                    f"the prompt {template!r} has no {MARK}, where the text goes; it is no name of one either "
                    f"({', '.join(PRESETS)})"
                )
        if not self.document or not self.query:
            raise UsageError("each side needs a prompt; the text alone is " + MARK)

    def of(self, side: TextSide) -> tuple[str, ...]:
        """Return the templates of a side."""
        return self.query if side == "query" else self.document


@dataclass(frozen=True, slots=True)
class Preset:
    """Name templates that are in use, and the pooling that they were made for, None where the model decides."""

    document: str
    query: str
    pooling: str | None = None


def _same(template: str, pooling: str) -> Preset:
    return Preset(template, template, pooling)


PRESETS = {
    "promptEOL": _same('Summarize the sentence: "{text}" in one word:"', "last"),
    "promptEOL-mistral": _same('This sentence: "{text}" means [MASK]', "last"),
    "promptEOL-original": _same('This sentence : "{text}" means in one word:"', "last"),
    "echo": _same("Rewrite the following paragraph: {text}. The rewritten paragraph: {text}", "echo"),
    "e5": Preset("passage: {text}", "query: {text}"),
}
"""promptEOL and echo are those of arXiv 2606.07502 (for Qwen and Llama; `-mistral` for Mistral), `-original` is that of
arXiv 2307.16645; e5 is what the E5 models were trained with (arXiv 2212.03533)."""


def prompt_of(document: list[str], query: list[str]) -> tuple[Prompt, str | None]:
    """Make a prompt of templates and names of PRESETS; return also the pooling that the names ask for.

    Without templates for queries those of documents are used, a preset's own for each side. Raises UsageError for
    presets that ask for different poolings.
    """
    named = [PRESETS[name] for name in (*document, *query) if name in PRESETS]
    poolings = {preset.pooling for preset in named}
    if len(poolings) > 1:
        raise UsageError(f"the prompts {', '.join((*document, *query))} need different poolings: take one kind")
    documents = tuple(PRESETS[p].document if p in PRESETS else p for p in document)
    queries = tuple(PRESETS[p].query if p in PRESETS else p for p in query or document)
    return Prompt(documents or PLAIN, queries or PLAIN), poolings.pop() if poolings else None


def fill(template: str, text: str) -> tuple[str, int]:
    """Put a text into a template; return the result, and where in it the last copy of the text starts."""
    *before, after = template.split(MARK)
    head = text.join(before)
    return f"{head}{text}{after}", len(head)
