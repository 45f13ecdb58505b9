"""The verb `lens`: the tokens that a vector speaks of, before and after a filter (the logit lens, arXiv 2606.07502)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vecferry.compressing import filter_of
from vecferry.encoders import load_encoder
from vecferry.errors import DataError, IncompatibleError, UsageError
from vecferry.filters import middle
from vecferry.heads import Head, read_head
from vecferry.linear import Floats, LinearMap
from vecferry.spectrum import Spectrum, top_tokens
from vecferry.store import opened

RCOND = 1e-6
"""Directions of a filter that are shorter than this part of its longest carry nothing."""


@dataclass(frozen=True, slots=True)
class Lens:
    """Hold the tokens with the largest logits of a vector, largest first, and those logits.

    before, after   (token, logit), of the vector as it is, and of its part in the directions that the filter keeps
    """

    of: str
    filter: str
    before: tuple[tuple[str, float], ...]
    after: tuple[tuple[str, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, strings and numbers."""
        return asdict(self)

    def table(self) -> str:
        """Write both lists side by side."""
        rows = [("before", "", "after", "")]
        for (left, x), (right, y) in zip(self.before, self.after, strict=True):
            rows.append((repr(left), f"{x:.2f}", repr(right), f"{y:.2f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"the tokens that {self.of} speaks of, before and after {self.filter}", *lines])


def lens(
    model: str | Path,
    *,
    text: str | None = None,
    store: Any = None,
    id: str | int | None = None,
    filter: LinearMap | str | Path | None = None,
    tau: int = 2,
    offset: int | None = None,
    k: int = 10,
    encoder: Mapping[str, Any] | None = None,
) -> Lens:
    """Decode one vector with a model's own head: a text as the model encodes it, or a row of a store.

    The filter is EmbedFilter for `tau` and `offset`, unless one is given. `encoder` are arguments of `load_encoder`,
    such as prompt and pooling; by default the text's last token is taken. Raises UsageError unless there is exactly
    one of text and store with id, DataError for a row that isn't there, IncompatibleError for another dimension.
    """
    if (text is None) == (store is None) or (store is None) != (id is None):
        raise UsageError("lens takes --text, or --store with --id: one vector")
    head = read_head(model)
    if head.vocabulary is None:
        raise UsageError(f"{model} has no tokenizer.json, so tokens can't be named")
    if text is not None:
        arguments: dict[str, Any] = {"pooling": "last", "normalize": False} | dict(encoder or {})
        made = load_encoder(str(model), **arguments)
        state, of = made.encode([text]), f"the text {text[:40]!r}"
    else:
        state, of = _row(store, id), f"the row {id!r}"
    if state.shape[1] != head.weight.shape[1]:
        raise IncompatibleError(
            f"{of} has {state.shape[1]} dimensions, the head of {head.name} takes {head.weight.shape[1]}"
        )
    if filter is None:
        f, name = middle(Spectrum.of(head.weight), tau, offset), f"embedfilter 1/{tau}"
    else:
        f = filter_of(filter)
        assert f.card is not None
        name = f"the filter {f.card.solver} {f.d_in} -> {f.d_out}"
    if f.d_in != state.shape[1]:
        raise IncompatibleError(f"the filter takes vectors of {f.d_in} dimensions, {of} has {state.shape[1]}")
    return Lens(of, name, _top(head, state, k), _top(head, kept_part(f, state), k))


def kept_part(f: LinearMap, states: Floats) -> Floats:
    """Return states `[n, d]` projected on the directions that a filter keeps; what is subtracted there is left out."""
    w = f.weight.astype(np.float64)
    projected: Floats = (states.astype(np.float64) @ w @ np.linalg.pinv(w, rcond=RCOND)).astype(np.float32)
    return projected


def _top(head: Head, state: Floats, k: int) -> tuple[tuple[str, float], ...]:
    tokens, logits = top_tokens(head.weight, state, k)
    assert head.vocabulary is not None
    return tuple((head.vocabulary.read(int(t)), float(x)) for t, x in zip(tokens[0], logits[0], strict=True))


def _row(store: Any, id: str | int | None) -> Floats:
    with opened(store) as reader:
        kind = reader.info.id_type or pa.int64()
        try:
            ids = pa.array([str(id)]).cast(kind)
        except pa.ArrowInvalid as error:
            raise DataError(f"{reader.info.uri} has ids of type {kind}, which {id!r} can't be") from error
        return reader.take(ids).vectors
