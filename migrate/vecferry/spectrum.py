"""The spectrum of a language model's unembedding, and what it shows of the model's embeddings (arXiv 2606.07502).

An unembedding W `[V, d]` turns a hidden state h `[d]` into logits `h W^T` `[V]`. With W = U S V^T, the paper finds
that a few directions v_i at both ends of the spectrum carry token frequency rather than meaning. All of it comes from
the Gram matrix W^T W, `[d, d]` in float64; no pseudo-inverse of `[V, d]` is ever built.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from vecferry.errors import DataError, UsageError
from vecferry.linear import Floats

Values = NDArray[np.float64]
Tokens = NDArray[np.int64]

ROWS = 8192
"""Rows of the unembedding that are held in float64 at a time."""
STATES = 64
"""States whose logits are in memory together."""


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """Hold the singular values and right-singular vectors of an unembedding.

    values      `[d]` singular values, descending
    directions  `[d, d]` v_i as rows, each with its largest element positive, since their signs are free
    centered    they are those of the unembedding less its mean row
    """

    values: Values
    directions: Values
    centered: bool = False

    @classmethod
    def of(cls, unembedding: Floats, *, center: bool = False) -> Spectrum:
        """Decompose an unembedding `[V, d]`; with `center` its rows less their mean.

        On one thread, so that the same head gives the same bits. Raises UsageError for another shape than a matrix of
        more tokens than dimensions, DataError for numbers that aren't finite.
        """
        _require_matrix(unembedding)
        tokens, d = unembedding.shape
        gram, total = np.zeros((d, d)), np.zeros(d)
        with threadpool_limits(1, "blas"), np.errstate(invalid="ignore"):
            for start in range(0, tokens, ROWS):
                block = unembedding[start : start + ROWS].astype(np.float64)
                gram += block.T @ block
                total += block.sum(axis=0)
            if not np.isfinite(gram).all():
                raise DataError("the unembedding holds NaN or infinite numbers: the checkpoint is damaged")
            if center:
                gram -= np.outer(total, total) / tokens
            squares, vectors = np.linalg.eigh(gram)
        return cls(np.sqrt(squares[::-1].clip(0)), signed(vectors[:, ::-1].T), center)

    @property
    def dim(self) -> int:
        """The dimension of the hidden states."""
        return len(self.values)

    def average_token(self, unembedding: Floats, frequencies: Values, *, center_log: bool = False) -> Values:
        """Return h_hat = log(p) W^+ `[d]`: the state whose logits are the log frequencies `[V]` (section 3.1).

        Frequencies are positive and of any scale: `smoothed` makes them of counts. With `center_log` the mean of the
        logarithms is subtracted, as the constant that the softmax leaves open; the paper drops it, which on a real
        head gives another direction, so both are worth a look. Raises UsageError for another number of frequencies,
        any that isn't positive, and a centred spectrum, which doesn't decompose the logits.
        """
        if self.centered:
            raise UsageError("the average token follows from the spectrum of the unembedding as it is, not centred")
        if frequencies.shape != (len(unembedding),) or not (frequencies > 0).all():
            raise UsageError(
                f"average_token takes a positive frequency for each of {len(unembedding):,} tokens, not "
                f"{list(frequencies.shape)} with a minimum of {frequencies.min(initial=np.inf):g}"
            )
        wanted = np.log(frequencies / frequencies.sum())
        if center_log:
            wanted -= wanted.mean()
        pulled = np.zeros(self.dim)
        with threadpool_limits(1, "blas"):
            for start in range(0, len(unembedding), ROWS):
                pulled += wanted[start : start + ROWS] @ unembedding[start : start + ROWS].astype(np.float64)
        squares = self.values**2
        kept = squares > squares[0] * self.dim * np.finfo(np.float64).eps
        along = self.directions @ pulled
        average: Values = (along[kept] / squares[kept]) @ self.directions[kept]
        return average

    def delta_pi(self, unembedding: Floats, state: Values, tokens: Tokens) -> Values:
        """Return by how much removing each direction from a `state` `[d]` changes the logits of some tokens, `[d]`.

        That is logit spectroscopy (section 3.2): sum_j |w~_j - w_j| / sum_j |w_j| over `tokens`, where w are the
        logits of the state, and w~ those of the state without v_i. Since they differ by <h, v_i> <W_j, v_i> alone,
        all directions come from one product `[tokens, d]`.
        """
        rows = unembedding[tokens].astype(np.float64)
        logits = np.abs(rows @ state).sum()
        if logits == 0:
            raise DataError("the state gives all of these tokens a logit of 0: nothing can change by a share of it")
        changes: Values = np.abs(self.directions @ state) * np.abs(rows @ self.directions.T).sum(axis=0) / logits
        return changes


def signed(directions: Values) -> Values:
    """Return the same directions as rows, each turned so that its largest element is positive."""
    largest = np.abs(directions).argmax(axis=1)
    turned: Values = directions * np.sign(directions[np.arange(len(directions)), largest])[:, None]
    return turned


def smoothed(counts: NDArray[np.int64], smoothing: float = 0.5) -> Values:
    """Return (counts + smoothing) / (sum + smoothing * V) `[V]`: frequencies without zeros, which have a logarithm."""
    if not smoothing > 0:
        raise UsageError(f"--smoothing is {smoothing:g}: it must be above 0, or tokens never seen have no logarithm")
    frequencies: Values = (counts + smoothing) / (counts.sum() + smoothing * len(counts))
    return frequencies


def frequent(counts: NDArray[np.int64], k: int) -> Tokens:
    """Return the k tokens that were counted most, of equal counts the lower first: V+ of the paper."""
    return np.argsort(-counts, kind="stable")[: _within(k, counts)]


def infrequent(counts: NDArray[np.int64], k: int) -> Tokens:
    """Return the k tokens that were counted least, of equal counts the lower first."""
    return np.argsort(counts, kind="stable")[: _within(k, counts)]


def top_tokens(unembedding: Floats, states: Floats, k: int = 10) -> tuple[Tokens, Values]:
    """Return the tokens with the largest logits of each state `[n, d]` and those logits, `[n, k]`: the logit lens.

    Of equal logits the lower token comes first. Raises UsageError for states of another dimension.
    """
    _require_matrix(unembedding)
    if states.ndim != 2 or states.shape[1] != unembedding.shape[1]:
        raise UsageError(f"the unembedding takes states of {unembedding.shape[1]} dimensions, not {list(states.shape)}")
    if not 1 <= k <= len(unembedding):
        raise UsageError(f"k is {k}: choose one from 1 to {len(unembedding):,}, the number of tokens")
    tokens, logits = np.empty((len(states), k), np.int64), np.empty((len(states), k))
    for first in range(0, len(states), STATES):
        part = states[first : first + STATES].astype(np.float64)
        all_logits = np.empty((len(part), len(unembedding)))
        for start in range(0, len(unembedding), ROWS):
            block = unembedding[start : start + ROWS].astype(np.float64)
            all_logits[:, start : start + ROWS] = part @ block.T
        best = np.argsort(-all_logits, axis=1, kind="stable")[:, :k]
        tokens[first : first + STATES] = best
        logits[first : first + STATES] = np.take_along_axis(all_logits, best, axis=1)
    return tokens, logits


def band(dim: int, tau: int, offset: int | None = None) -> tuple[int, int]:
    """Return which directions EmbedFilter keeps, `l` to `r - 1`: d // tau from `offset`, by default the middle.

    As in the paper's code, n = d // tau and l = (d - n) // 2. Raises UsageError for a band that isn't there.
    """
    if not 1 <= tau <= dim:
        raise UsageError(f"--tau is {tau}: choose one from 1 to {dim}, the dimension")
    n = dim // tau
    first = (dim - n) // 2 if offset is None else offset
    if not 0 <= first <= dim - n:
        raise UsageError(f"--offset is {first}: {n} of {dim} directions can begin at 0 to {dim - n}")
    return first, first + n


def _within(k: int, counts: NDArray[np.int64]) -> int:
    if not 1 <= k <= len(counts):
        raise UsageError(f"{k} tokens can't be taken of {len(counts):,}")
    return k


def _require_matrix(unembedding: Floats) -> None:
    if unembedding.ndim != 2 or unembedding.shape[0] < unembedding.shape[1]:
        raise UsageError(
            f"an unembedding has a row for each token and fewer columns, [V, d]; this is {list(unembedding.shape)}"
        )
