"""Compressors of embeddings to 1/tau of their dimensions: EmbedFilter (arXiv 2606.07502), and what it is compared with.

Each is a `LinearMap` d -> d // tau without normalisation (see `ranked_by`), so that it can be tried against the others
and folded into the map of a migration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from vecferry.errors import UsageError
from vecferry.linear import Floats, LinearMap
from vecferry.recall import Metric
from vecferry.spectrum import Spectrum, Values, band, signed

Need = Literal["spectrum", "centered", "delta_pi", "vectors"]
T = TypeVar("T")


def identity(dim: int) -> LinearMap:
    """Return the map that changes nothing: EmbedFilter at tau = 1, where nothing is filtered."""
    return LinearMap(np.eye(dim, dtype=np.float32))


def embed_filter(unembedding: Floats, tau: int, offset: int | None = None, center: bool = False) -> LinearMap:
    """Keep the middle right-singular vectors of an unembedding `[V, d]`: V[:, l:r] with r - l = d // tau.

    `offset` is l, (d - d // tau) // 2 by default; `center` subtracts the mean row of the unembedding first. Inner
    products and distances in the reduced space are those of vectors projected on these directions in the full one.
    With tau = 1 nothing is filtered, and the map is the identity. Section 3.3 and the code of arXiv 2606.07502.
    """
    first, last = band(unembedding.shape[1], tau, offset)
    return identity(unembedding.shape[1]) if tau == 1 else kept(Spectrum.of(unembedding, center=center), first, last)


def kept(spectrum: Spectrum, first: int, last: int) -> LinearMap:
    """Keep the directions `first` to `last - 1` of a spectrum, whatever their number: a band anywhere."""
    if not 0 <= first < last <= spectrum.dim:
        raise UsageError(f"directions {first} to {last} can't be kept: there are 0 to {spectrum.dim}")
    return _onto(spectrum.directions[first:last])


def middle(spectrum: Spectrum, tau: int, offset: int | None = None) -> LinearMap:
    """Keep d // tau directions from `offset`, by default the middle: EmbedFilter, of a spectrum that is known."""
    first, last = band(spectrum.dim, tau, offset)
    return identity(spectrum.dim) if tau == 1 else kept(spectrum, first, last)


def without_head(spectrum: Spectrum, tau: int) -> LinearMap:
    """Drop the directions of the largest singular values ("dominant filtered")."""
    return kept(spectrum, *band(spectrum.dim, tau, spectrum.dim - width(spectrum.dim, tau)))


def without_tail(spectrum: Spectrum, tau: int) -> LinearMap:
    """Drop the directions of the smallest singular values ("secondary filtered")."""
    return kept(spectrum, *band(spectrum.dim, tau, 0))


def edges(spectrum: Spectrum, tau: int) -> LinearMap:
    """Keep both ends of the spectrum, half of d // tau at each, and drop the middle ("bulk filtered")."""
    n = width(spectrum.dim, tau)
    chosen = np.r_[: (n + 1) // 2, spectrum.dim - n // 2 : spectrum.dim]
    return _onto(spectrum.directions[chosen])


def ideal(spectrum: Spectrum, delta_pi: Values, tau: int) -> LinearMap:
    """Keep the d // tau directions that change the logits of frequent tokens least ("upper bound")."""
    n = width(spectrum.dim, tau)
    return _onto(spectrum.directions[np.sort(np.argsort(delta_pi, kind="stable")[:n])])


def first_coordinates(dim: int, tau: int) -> LinearMap:
    """Keep the first d // tau coordinates, as Matryoshka embeddings are cut."""
    return _onto(np.eye(dim)[: width(dim, tau)])


def random_coordinates(dim: int, tau: int, seed: int) -> LinearMap:
    """Keep d // tau coordinates drawn at random."""
    return _onto(np.eye(dim)[_drawn(dim, tau, seed)])


def random_directions(spectrum: Spectrum, tau: int, seed: int) -> LinearMap:
    """Keep d // tau right-singular vectors drawn at random: the paper's code for "random dims"."""
    return _onto(spectrum.directions[_drawn(spectrum.dim, tau, seed)])


def random_orthonormal(dim: int, tau: int, seed: int) -> LinearMap:
    """Project on d // tau directions drawn at random from all of space, orthogonal to one another."""
    with threadpool_limits(1, "blas"):
        q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, width(dim, tau))))
    return _onto((q * np.sign(np.diagonal(r))).T)


def pca(vectors: Floats, tau: int, center: bool = True) -> LinearMap:
    """Project on the d // tau principal components of vectors `[n, d]`, less their mean.

    Without `center` the mean stays: the rank-n map that keeps most of the vectors' inner products.
    """
    return _principal(vectors, tau, center, lambda variances: np.ones_like(variances))


def whitening(vectors: Floats, tau: int, center: bool = True) -> LinearMap:
    """Project on principal components of vectors `[n, d]` and scale each to unit variance (Su et al. 2021)."""
    return _principal(vectors, tau, center, lambda variances: variances**-0.5)


def width(dim: int, tau: int) -> int:
    """Return how many dimensions are kept, d // tau."""
    first, last = band(dim, tau)
    return last - first


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Hold what filters can be made of; what isn't known is None.

    vectors   `[n, d]` of a corpus in the space that is compressed, of length 1 where cosine ranks there
    delta_pi  `[d]` by how much each direction changes the logits of frequent tokens
    """

    dim: int
    metric: Metric = "cosine"
    spectrum: Spectrum | None = None
    centered: Spectrum | None = None
    delta_pi: Values | None = None
    vectors: Floats | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """Hold one kind of filter: what of `Given` it needs, and how it is made for tau (and offset)."""

    needs: tuple[Need, ...]
    make: Callable[[Given, int, int | None], LinearMap]


def _centring(given: Given) -> bool:
    """Say whether a corpus' mean may be subtracted: by inner product that would change the ranking."""
    return given.metric != "ip"


def _known(value: T | None) -> T:
    assert value is not None, "a kind is made of what it needs alone"
    return value


KINDS: dict[str, Kind] = {
    "embedfilter": Kind(("spectrum",), lambda g, tau, at: middle(_known(g.spectrum), tau, at)),
    "embedfilter-centered": Kind(("centered",), lambda g, tau, at: middle(_known(g.centered), tau, at)),
    "no-tail": Kind(("spectrum",), lambda g, tau, _: without_tail(_known(g.spectrum), tau)),
    "no-head": Kind(("spectrum",), lambda g, tau, _: without_head(_known(g.spectrum), tau)),
    "edges": Kind(("spectrum",), lambda g, tau, _: edges(_known(g.spectrum), tau)),
    "ideal": Kind(("spectrum", "delta_pi"), lambda g, tau, _: ideal(_known(g.spectrum), _known(g.delta_pi), tau)),
    "pca": Kind(("vectors",), lambda g, tau, _: pca(_known(g.vectors), tau, _centring(g))),
    "whiten": Kind(("vectors",), lambda g, tau, _: whitening(_known(g.vectors), tau, _centring(g))),
    "first": Kind((), lambda g, tau, _: first_coordinates(g.dim, tau)),
    "random": Kind((), lambda g, tau, _: random_coordinates(g.dim, tau, g.seed)),
    "random-directions": Kind(("spectrum",), lambda g, tau, _: random_directions(_known(g.spectrum), tau, g.seed)),
    "random-orthonormal": Kind((), lambda g, tau, _: random_orthonormal(g.dim, tau, g.seed)),
}
"""All kinds by name. "no-tail", "no-head" and "edges" are the paper's "secondary", "dominant" and "bulk filtered"."""


def possible(given: Given) -> list[str]:
    """Return the kinds that can be made of what is given."""
    return [name for name, kind in KINDS.items() if all(getattr(given, need) is not None for need in kind.needs)]


def make(kind: str, given: Given, tau: int, offset: int | None = None) -> LinearMap:
    """Make a filter that ranks as its space does; raise UsageError for an offset that the kind doesn't have."""
    if offset is not None and not kind.startswith("embedfilter"):
        raise UsageError(f"--offset says where the band of embedfilter begins; --kind {kind} has none")
    return ranked_by(KINDS[kind].make(given, tau, offset), given.metric)


def ranked_by(m: LinearMap, metric: Metric) -> LinearMap:
    """Add the normalisations: for cosine to length 1 afterwards, and before a mean is subtracted."""
    if metric != "cosine":
        return m
    return dataclasses.replace(m, pre="none" if m.bias is None else "l2", post="l2")


def _drawn(dim: int, tau: int, seed: int) -> list[int]:
    return sorted(np.random.default_rng(seed).permutation(dim)[: width(dim, tau)].tolist())


def _principal(vectors: Floats, tau: int, center: bool, scale: Callable[[Values], Values]) -> LinearMap:
    n = width(vectors.shape[1], tau)
    if len(vectors) <= n:
        raise UsageError(f"{n} principal components can't be learned from {len(vectors):,} vectors: give more")
    x = vectors.astype(np.float64)
    mean = x.mean(axis=0) if center else np.zeros(x.shape[1])
    x -= mean
    with threadpool_limits(1, "blas"):
        squares, axes = np.linalg.eigh(x.T @ x / (len(x) - 1))
    variances, directions = squares[::-1][:n], signed(axes[:, ::-1][:, :n].T)
    if variances[-1] <= variances[0] * len(vectors) * np.finfo(np.float64).eps:
        raise UsageError(f"the vectors vary in fewer than {n} directions: choose a larger --tau")
    weight = directions.T * scale(variances)
    bias = (-mean @ weight).astype(np.float32) if center else None
    return LinearMap(weight.astype(np.float32), bias)


def _onto(directions: Values) -> LinearMap:
    return LinearMap(directions.T.astype(np.float32))
