"""An encoder as the benchmark mteb calls one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from vecferry.encoders.contract import Encoder
from vecferry.encoders.prompts import TextSide
from vecferry.linear import Floats, normalize


class MtebEncoder:
    """Let mteb run an encoder: `mteb.evaluate(MtebEncoder(encoder), tasks)`.

    Takes texts as a list (mteb 1) or in batches of columns (mteb 2); queries, as `prompt_type` says, are given the
    query prompt. Not run with mteb itself by us: its data sets come from a hub.
    """

    mteb_model_meta = None
    """Which makes mteb take its own defaults."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def encode(
        self, sentences: Iterable[Any], *, prompt_type: Any = None, batch_size: int = 32, **others: Any
    ) -> Floats:
        """Return vectors `[n, dim]`; other arguments of mteb's are of no use here."""
        texts: list[str] = []
        for item in sentences:
            texts += [item] if isinstance(item, str) else list(item["text"])
        kind = str(getattr(prompt_type, "value", prompt_type))
        side: TextSide = "query" if kind == "query" else "document"
        return self._encoder.encode(texts, side=side, batch_size=batch_size)

    def similarity(self, one: Any, other: Any) -> Any:
        """Return the cosines of two sets of vectors, as the torch tensor `[n, m]` that mteb works with."""
        import torch

        return torch.from_numpy(_unit(one) @ _unit(other).T)

    def similarity_pairwise(self, one: Any, other: Any) -> Any:
        """Return the cosines of pairs of vectors, as a torch tensor `[n]`."""
        import torch

        return torch.from_numpy((_unit(one) * _unit(other)).sum(axis=1))


def _unit(vectors: Any) -> Floats:
    x = np.array(vectors, np.float32, ndmin=2)
    normalize(x)
    return x
