"""What an encoder is: text in, vectors of a named space out; and what of it a model's library has to do."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from vecferry.encoders.prompts import Prompt, TextSide
from vecferry.linear import Floats

Text = str | Sequence[str]
"""A text, or several wordings of one (paraphrases, as in GenEOL, arXiv 2410.14635), whose vectors are averaged."""


@runtime_checkable
class Encoder(Protocol):
    """Turn texts into vectors of one space.

    name        what people call the model
    dim         of the vectors
    prompt      what documents and queries are wrapped in
    pooling     how a text's tokens become one vector
    normalize   vectors are divided by their length
    max_length  tokens of a text at most, None where only a server knows
    revision    which weights these are: a hash of the files, or what a server calls them
    identity    the space (`space` of stores and maps): the name and a hash of all that its vectors depend on
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - described above
    @property
    def dim(self) -> int: ...  # noqa: D102
    @property
    def prompt(self) -> Prompt: ...  # noqa: D102
    @property
    def pooling(self) -> str: ...  # noqa: D102
    @property
    def normalize(self) -> bool: ...  # noqa: D102
    @property
    def max_length(self) -> int | None: ...  # noqa: D102
    @property
    def revision(self) -> str: ...  # noqa: D102
    @property
    def identity(self) -> str: ...  # noqa: D102

    def encode(
        self, texts: Sequence[Text], *, side: TextSide = "document", batch_size: int = 32, progress: bool = False
    ) -> Floats:
        """Return float32 vectors `[n, dim]`, in the order of the texts."""


class Backend(Protocol):
    """Run one model: what differs between libraries, and nothing else.

    normalized  the model gives vectors of length 1 by itself
    prompt      the templates that the model's own configuration names, None where it names none
    """

    name: str
    dim: int
    pooling: str
    max_length: int | None
    revision: str
    normalized: bool
    prompt: Prompt | None

    def embed(self, template: str, texts: list[str]) -> Any:
        """Return the vectors `[n, dim]` of one batch of texts, each put into the template."""


_IDENTITY = re.compile(r".+@[0-9a-f]{16}")


def identity_of(name: str, **facts: Any) -> str:
    """Return `name@hash` of what vectors depend on: stores whose identities are equal are in one space.

    The prompts of both sides are among it, and the side isn't: documents and queries of one encoder share a space.
    Nor is arithmetic (bfloat16 or float32, CPU or GPU), which moves vectors by a cosine of .9999.
    """
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return f"{name}@{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def is_identity(space: str) -> bool:
    """Say whether the name of a space is an encoder's identity, and not one that somebody chose."""
    return _IDENTITY.fullmatch(space) is not None
