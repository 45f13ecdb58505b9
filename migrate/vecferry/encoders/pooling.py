"""From the hidden states of a text's tokens to one vector, and which tokens of a text too long are kept."""

from __future__ import annotations

from typing import Any

POOLINGS = ("cls", "mean", "last", "echo")
"""The first token, the mean of all, the last token, or the mean from the last copy of the text on."""


def kept(length: int, most: int) -> list[int]:
    """Return which of a text's tokens are kept: all, or the first and last halves of `most`.

    The end of a prompt, from which the last token speaks, and the special tokens at both ends survive so.
    """
    if length <= most:
        return list(range(length))
    return [*range(most - most // 2), *range(length - most // 2, length)]


def pool(states: Any, pooled: Any) -> Any:
    """Return the mean `[b, d]` in float32 of the states `[b, t, d]` of those tokens that `pooled` `[b, t]` marks.

    What other tokens hold doesn't matter, even if it isn't finite, as in padding.
    """
    mark = pooled[..., None]
    return states.float().masked_fill(~mark, 0.0).sum(dim=1) / mark.sum(dim=1)
