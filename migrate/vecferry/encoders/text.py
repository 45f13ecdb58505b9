"""The encoder: everything about texts, prompts and vectors that is the same whatever library runs the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from vecferry.encoders.contract import Backend, Text, identity_of
from vecferry.encoders.prompts import Prompt, TextSide
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.linear import Floats, normalize


@dataclass(frozen=True, slots=True, eq=False)
class TextEncoder:
    """Encode texts with a model; `vecferry.load_encoder` makes one. An `Encoder`, see there for the names."""

    backend: Backend
    prompt: Prompt
    normalize: bool
    name: str

    @property
    def dim(self) -> int:
        """Return the dimension of the vectors."""
        return self.backend.dim

    @property
    def pooling(self) -> str:
        """Return how a text's tokens become one vector."""
        return self.backend.pooling

    @property
    def max_length(self) -> int | None:
        """Return how many tokens of a text the model sees, None where only a server knows."""
        return self.backend.max_length

    @property
    def revision(self) -> str:
        """Return which weights these are."""
        return self.backend.revision

    @property
    def identity(self) -> str:
        """Return the name of the space that both documents and queries are encoded into."""
        return identity_of(self.name, **self.facts())

    def facts(self) -> dict[str, Any]:
        """Return what the vectors depend on, by name."""
        names = ("dim", "pooling", "normalize", "max_length", "revision")
        return {name: getattr(self, name) for name in names} | {"prompt": asdict(self.prompt)}

    def encode(
        self, texts: Sequence[Text], *, side: TextSide = "document", batch_size: int = 32, progress: bool = False
    ) -> Floats:
        """Return float32 vectors `[n, dim]`, in the order of the texts.

        Texts of like length are run together, so that little is padded. A text may be a list of wordings, and a side
        may have several prompts: the mean of all their vectors is the text's. Raises BadRowsError, by their numbers,
        for texts that are blank, DataError for what the model returns if it can't be vectors.
        """
        if side not in ("document", "query"):
            raise UsageError(f"unknown side {side!r}: choose document or query")
        if batch_size < 1:
            raise UsageError(f"a batch of {batch_size} texts is none: choose 1 or more")
        if isinstance(texts, str):
            raise UsageError("encode takes a list of texts, this is one text")
        groups = [[text] if isinstance(text, str) else list(text) for text in texts]
        if blank := [i for i, wordings in enumerate(groups) if not wordings or not all(w.strip() for w in wordings)]:
            raise BadRowsError("the texts", "are blank (counted from 0)", blank, "Leave them out.")
        counts = np.array([len(wordings) for wordings in groups], np.int64)
        owner, flat = np.repeat(np.arange(len(groups)), counts), [w for wordings in groups for w in wordings]
        longest_first = np.argsort([-len(text) for text in flat], kind="stable")  # what is too much fails at once
        templates = self.prompt.of(side)
        total = np.zeros((len(groups), self.dim), np.float32)
        with tqdm(total=len(flat) * len(templates), unit="texts", disable=not progress) as bar:
            for template in templates:
                for start in range(0, len(flat), batch_size):
                    rows = longest_first[start : start + batch_size]
                    np.add.at(total, owner[rows], self._embed(template, [flat[i] for i in rows]))
                    bar.update(len(rows))
        total /= (counts * len(templates))[:, None]
        if self.normalize:
            normalize(total)
        return total

    def _embed(self, template: str, texts: list[str]) -> Floats:
        vectors = np.asarray(self.backend.embed(template, texts), np.float32)
        if vectors.shape != (len(texts), self.dim):
            raise DataError(
                f"{self.name} returned {list(vectors.shape)} for {len(texts)} texts of {self.dim} dimensions"
            )
        return vectors
