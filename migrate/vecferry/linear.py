"""The one form that every map has: `post(pre(x) @ weight + bias)`. Needs numpy, and safetensors to load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vecferry.errors import IncompatibleError, UsageError

if TYPE_CHECKING:
    from vecferry.holdout import Holdout

Floats = NDArray[np.float32]
Pre = Literal["none", "l2", "center_l2"]
Post = Literal["none", "l2"]
Direction = Literal["document", "query", "filter"]

BLOCK = 256
"""Rows of every float32 product: BLAS picks kernels by shape, and 256 rows reach the speed of large products."""

Multiply = Callable[[Floats], NDArray[Any]]
BatchRunner = Callable[[Callable[[int], None], Iterable[int]], object]


@dataclass(frozen=True, slots=True)
class Side:
    """Name one side of a map: the embedding model, the prompt its texts were given, and the dimension."""

    dim: int
    model: str | None = None
    prompt: str | None = None

    @property
    def space(self) -> str | None:
        """Identify the embedding space: the model with its prompt, since each prompt makes a space of its own."""
        return f"{self.model} [{self.prompt}]" if self.model and self.prompt else self.model


@dataclass(frozen=True, slots=True)
class Card:
    """Record where a map comes from and what it is for.

    direction   "document": old documents into the new space; "query": new queries into the old space; "filter": both
                documents and queries of one model into fewer dimensions
    metric      the target space's ranking rule: "cosine", "ip" or "l2"
    measured    metrics on the held-out part, by name
    warnings    what the fit found suspicious
    """

    source: Side
    target: Side
    solver: str
    parameters: dict[str, Any] = field(default_factory=dict)
    direction: Direction = "document"
    metric: Literal["cosine", "ip", "l2"] = "cosine"
    pairs: int = 0
    seed: int = 0
    measured: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    version: str = ""
    sha256: str = ""

    @property
    def space(self) -> str:
        """Identify the space the map leads to: the target model's name, or the map itself where nobody named it."""
        return self.target.space or f"unnamed-{self.sha256[:16]}"


@dataclass(frozen=True, slots=True, eq=False)
class LinearMap:
    """Map vectors by `y = post(pre(x) @ weight + bias)`.

    weight  `[d_in, d_out]` float32
    bias    `[d_out]` float32, None for none
    pre     nothing, L2 normalisation, or subtracting `mean` and then L2 normalisation
    post    nothing, or L2 normalisation
    mean    `[d_in]` float32, with `pre="center_l2"` only
    after   a map that what this one gives goes through, where the two can't be folded into one
    ask     the filter that vectors of the target model, queries above all, go through before they are compared with
            what this map gives; None where they are compared as they are
    """

    weight: Floats
    bias: Floats | None = None
    pre: Pre = "none"
    post: Post = "none"
    mean: Floats | None = None
    card: Card | None = None
    holdout: Holdout | None = None
    path: Path | None = None
    after: LinearMap | None = None
    ask: LinearMap | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "bias", "mean"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, np.ascontiguousarray(value, dtype=np.float32))
        if self.weight.ndim != 2 or 0 in self.weight.shape:
            raise UsageError(f"weight must be [d_in, d_out], not {list(self.weight.shape)}")
        width = self.weight.shape[1]
        if self.bias is not None and self.bias.shape != (width,):
            raise UsageError(f"bias has shape {list(self.bias.shape)}, weight leads to {width} dimensions")
        if self.pre not in ("none", "l2", "center_l2") or self.post not in ("none", "l2"):
            raise UsageError(f"unknown normalisation: pre={self.pre!r}, post={self.post!r}")
        if (self.pre == "center_l2") != (self.mean is not None):
            raise UsageError("mean goes with pre='center_l2', and only with it")
        if self.mean is not None and self.mean.shape != (self.d_in,):
            raise UsageError(f"mean has shape {list(self.mean.shape)}, weight takes {self.d_in} dimensions")
        if not all(np.isfinite(a).all() for a in (self.weight, self.bias, self.mean) if a is not None):
            raise UsageError("the map holds NaN or infinite numbers")

    @property
    def d_in(self) -> int:
        """The dimension of the vectors it takes."""
        return int(self.weight.shape[0])

    @property
    def d_out(self) -> int:
        """The dimension of the vectors it gives."""
        return int(self.weight.shape[1]) if self.after is None else self.after.d_out

    @property
    def d_asked(self) -> int:
        """The dimension of the target model's own vectors; what the map gives may have fewer, see `ask`."""
        return self.d_out if self.ask is None else self.ask.d_in

    @property
    def changes_model(self) -> bool:
        """Whether the map leads into another model's space, and not only into fewer dimensions of the same."""
        return self.ask is None or self.weight is not self.ask.weight

    def asking(self, vectors: Floats) -> Floats:
        """Return vectors of the target model `[n, d_asked]` as they are compared with what the map gives."""
        return vectors if self.ask is None else self.ask.apply(vectors)

    def apply(self, x: Floats, out: Floats | None = None, run: BatchRunner | None = None) -> Floats:
        """Map rows `[n, d_in]` to `[n, d_out]` float32; a row's bits depend on that row and the map alone.

        They don't depend on the batch, the row's place in it, or the number of threads. `out` is written to and
        returned where given. `run(task, starts)` may run the blocks in parallel: each writes rows of its own. A row
        whose norm is zero stays zero under L2 normalisation. Raises IncompatibleError for rows of another dimension.
        """
        if x.ndim != 2 or x.shape[1] != self.d_in:
            raise IncompatibleError(f"the map takes vectors of {self.d_in} dimensions, these are {list(x.shape)}")
        if out is None:
            out = np.empty((len(x), self.d_out), np.float32)
        elif out.shape != (len(x), self.d_out) or out.dtype != np.float32:
            raise UsageError(f"out must be float32 {[len(x), self.d_out]}, not {out.dtype} {list(out.shape)}")
        multiply = in_blocks(self.weight) if equal_rows_agree(*self.weight.shape) else exactly(self.weight)

        def block(start: int) -> None:
            rows = np.ascontiguousarray(x[start : start + BLOCK], dtype=np.float32)
            if self.pre != "none":
                rows = rows.copy() if self.mean is None else rows - self.mean
                normalize(rows)
            product = multiply(rows)
            if self.bias is not None:
                product += self.bias
            y = product.astype(np.float32, copy=False)
            if self.post == "l2":
                normalize(y)
            if self.after is not None:
                y = self.after.apply(y)
            out[start : start + BLOCK] = y

        starts = range(0, len(x), BLOCK)
        if run is None:
            for start in starts:
                block(start)
        else:
            run(block, starts)
        return out

    def then(self, second: LinearMap) -> LinearMap:
        """Fold this map and a second one into one, which maps as both do one after the other.

        Raises IncompatibleError where dimensions disagree, and where no single map of this form does it: a
        normalisation between the two can only be dropped if the second has no bias and normalises its output.
        """
        if self.d_out != second.d_in:
            raise IncompatibleError(f"the first map gives {self.d_out} dimensions, the second takes {second.d_in}")
        scale_free = second.bias is None and second.post == "l2"
        if second.pre == "center_l2" or ((self.post == "l2" or second.pre == "l2") and not scale_free):
            raise IncompatibleError("a normalisation between the two maps can't be folded into one map")
        first = self.weight.astype(np.float64)
        after = second.weight.astype(np.float64)
        bias: NDArray[np.float64] | None = None if self.bias is None else self.bias.astype(np.float64) @ after
        if second.bias is not None:
            bias = second.bias.astype(np.float64) if bias is None else bias + second.bias
        return LinearMap(
            weight=(first @ after).astype(np.float32),
            bias=None if bias is None else bias.astype(np.float32),
            pre=self.pre,
            post=second.post,
            mean=self.mean,
        )

    def with_card(self, card: Card) -> LinearMap:
        """Return the same map with another card."""
        return dataclasses.replace(self, card=card)

    def save(self, folder: str | Path) -> Path:
        """Write the map folder (`vecferry.mapfile`); raise UsageError if it exists or there is no card."""
        from vecferry.mapfile import save

        return save(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> LinearMap:
        """Read a map folder; raise UsageError for what is no path, DataError for a damaged or unknown one."""
        from vecferry.mapfile import load

        if not isinstance(folder, (str, Path)):
            raise UsageError(f"a map is a LinearMap or the path of its folder, not {folder!r}")
        return load(Path(folder))


@cache
def equal_rows_agree(d_in: int, d_out: int) -> bool:
    """Say whether this BLAS gives equal rows of a block equal bits, by trying: AVX-512 kernels do, AVX2 ones don't.

    Sums of other lengths than multiples of 64 are cut elsewhere on one thread than on many, and a single column is
    left to a kernel for vectors: never there.
    """
    if d_in % 64 or d_out == 1:
        return False
    random = np.random.default_rng(0)
    weight = random.standard_normal((d_in, d_out), dtype=np.float32)
    rows = np.tile(random.standard_normal(d_in, dtype=np.float32), (BLOCK, 1))
    product = rows @ weight
    return bool((product == product[0]).all())


def in_blocks(weight: Floats) -> Multiply:
    """Multiply in float32, always as many rows: bits don't depend on the batch where equal rows agree."""

    def multiply(rows: Floats) -> Floats:
        n = len(rows)
        if n < BLOCK:
            rows = np.concatenate([rows, np.zeros((BLOCK - n, rows.shape[1]), np.float32)])
        product: Floats = rows @ weight
        return product[:n]

    return multiply


def exactly(weight: Floats) -> Multiply:
    """Multiply in float64 without rounding, so that the order in which BLAS adds can't matter; twice the work.

    Weight and rows are first rounded to so few bits (some 21, where float32 has 24) that all sums of their products
    fit into float64: Ozaki et al. 2012, Error-free transformations of matrix multiplication. The result is as near
    to the true product as a float32 one.
    """
    bits = 53 - (len(weight) - 1).bit_length()  # for one product, when as many as weight has rows are added
    rounded = round_to(weight, bits // 2, axis=0)

    def multiply(rows: Floats) -> NDArray[np.float64]:
        product: NDArray[np.float64] = round_to(rows, bits - bits // 2, axis=1) @ rounded
        return product

    return multiply


def round_to(x: Floats, bits: int, axis: int) -> NDArray[np.float64]:
    """Round to multiples of 2**-bits of the power of two above the largest magnitude along the axis."""
    exponent = np.frexp(np.abs(x).max(axis=axis, keepdims=True))[1]
    shift = np.ldexp(1.5, exponent - bits + 52)  # its last bit is the last to keep: adding it rounds off the rest
    rounded: NDArray[np.float64] = x + shift
    rounded -= shift
    return rounded


def faulty(vectors: Floats) -> NDArray[np.bool_]:
    """Mark rows that can't be translated: NaN or infinite elements, a length of zero or beyond float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("ij,ij->i", vectors, vectors)
    bad: NDArray[np.bool_] = ~(np.isfinite(squares) & (squares > 0))
    return bad


def normalize(x: Floats) -> None:
    """Scale rows to length 1 in place; rows of zeros stay zeros."""
    norms = np.sqrt(np.einsum("ij,ij->i", x, x))
    norms[norms == 0] = 1
    x /= norms[:, None]
