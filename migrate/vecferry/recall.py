"""Exact search and all that is called recall, each under its own name; values per query, intervals over them.

A document found is *right* if its true score reaches the k-th best true score, so a duplicate of a true
neighbour is as good as the neighbour. Scores are computed in float64 from the vectors themselves; a float32
product only preselects, with room for its rounding. `SLACK` is what rounding in a store's own search may cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vecferry.batch import Floats
from vecferry.errors import DataError, IncompatibleError, UsageError
from vecferry.holdout import Qrels
from vecferry.linear import normalize

Metric = Literal["cosine", "ip", "l2"]
Places = NDArray[np.int64]  # positions of documents, nearest first; -1 where a search found no more
Values = NDArray[np.float64]

SLACK = 1e-6
"""Relative rounding granted to a score: of 1 for cosine, of |q||d| for ip, of the squared distance for l2."""

RESAMPLES = 2000
_DOCUMENTS, _QUERIES = 4096, 512  # rows of one float32 product: 8 MB of scores at a time
_PAIRS = 256  # rows scored in float64 at a time, few enough to stay in cache


def require_k(k: int, documents: int) -> None:
    """Raise UsageError unless k documents can be found among this many."""
    if not 1 <= k <= documents:
        raise UsageError(f"k = {k} can't be found among {documents} documents: choose k from 1 to {documents}")


def require_apart(mean: Values, what: str) -> None:
    """Raise DataError where the mean of unit vectors shows that all are alike: whatever is found would be right.

    1 - |mean|^2 is the mean of 1 - cosine over all pairs.
    """
    if 1 - float(mean @ mean) <= SLACK:
        raise DataError(f"{what}: all true vectors are alike, so they tell no documents apart: encode the texts again")


def paired_scores(queries: Floats, documents: Floats, metric: Metric) -> tuple[Values, Values]:
    """Return the float64 score of each pair of rows `[m, d]`, larger for nearer, and its slack."""
    q, d = queries.astype(np.float64), documents.astype(np.float64)
    if metric == "l2":
        q -= d
        distance = np.einsum("ij,ij->i", q, q)
        return -distance, SLACK * distance
    dot = np.einsum("ij,ij->i", q, d)
    norms = np.sqrt(np.einsum("ij,ij->i", q, q) * np.einsum("ij,ij->i", d, d))
    if metric == "ip":
        return dot, SLACK * norms
    norms[norms == 0] = 1
    return dot / norms, np.full(len(dot), SLACK)


def scores_at(queries: Floats, documents: Floats, places: Places, metric: Metric) -> tuple[Values, Values]:
    """Return the score of each place `[q, m]` for its query and its slack; -inf and 0 where a place is -1."""
    scores, slack = np.full(places.shape, -np.inf), np.zeros(places.shape)
    rows, columns = np.nonzero(places >= 0)
    for part in _slices(len(rows), _PAIRS):
        r, c = rows[part], columns[part]
        scores[r, c], slack[r, c] = paired_scores(queries[r], documents[places[r, c]], metric)
    return scores, slack


class TopK:
    """Find the k nearest documents of each query while blocks of documents pass by.

    places  `[q, k]` positions in the order in which documents came, nearest first; of equal scores the first
            position wins; -1 while fewer than k have come
    scores  `[q, k]` float64, larger for nearer, -inf where the place is -1
    """

    def __init__(self, queries: Floats, k: int, metric: Metric) -> None:
        self.k, self.metric, self.seen = k, metric, 0
        self.places: Places = np.full((len(queries), k), -1, np.int64)
        self.scores: Values = np.full((len(queries), k), -np.inf)
        if not _finite(queries).all():
            raise DataError("the queries hold NaN, infinite or too large numbers")
        self._given = queries
        self._queries = _unit(queries) if metric == "cosine" else queries
        self._centre = np.zeros(queries.shape[1], np.float32)

    def update(self, documents: Floats) -> None:
        """Take the next documents `[n, d]`; raise IncompatibleError for another d than the queries'."""
        if documents.shape[1] != self._given.shape[1]:
            dims = f"{documents.shape[1]} and {self._given.shape[1]}"
            raise IncompatibleError(f"documents and queries differ in dimensions: {dims}")
        if self.metric == "l2" and self.seen == 0 and len(documents):
            # distances don't depend on the origin, their float32 products do: move it into the data
            self._centre = documents[:_DOCUMENTS].mean(axis=0, dtype=np.float64).astype(np.float32)
            self._queries = self._given - self._centre
        for part in _slices(len(documents), _DOCUMENTS):
            block = documents[part]
            finite = _finite(block)
            if not finite.all():
                first = self.seen + int(np.argmin(finite))
                raise DataError(f"document {first} (counted from 0) holds NaN, infinite or too large numbers")
            moved = _unit(block) if self.metric == "cosine" else block - self._centre
            squares = np.einsum("ij,ij->i", moved, moved)
            for rows in _slices(len(self._given), _QUERIES):
                self._merge(rows, block, moved, squares)
            self.seen += len(block)

    def _merge(self, rows: slice, block: Floats, moved: Floats, squares: Floats) -> None:
        """Let the documents of a block compete with the best so far of some queries."""
        queries = self._queries[rows]
        products = queries @ moved.T
        lengths = np.linalg.norm(queries, axis=1)
        error = lengths * np.sqrt(squares.max())
        bar = self.scores[rows, -1]
        if self.metric == "l2":  # -|q - d|^2 = 2 (q.d - |d|^2 / 2) - |q|^2
            products -= squares / 2
            error += squares.max() / 2
            bar = (bar + lengths.astype(np.float64) ** 2) / 2
        # what float32 can have cost the k-th best and the document compared with it (Higham 2002, section 3.1)
        error *= 2 * (block.shape[1] + 8) * np.finfo(np.float32).eps
        keep = products >= (bar - error).astype(np.float32)[:, None]
        if len(block) > self.k and np.count_nonzero(keep) > 4 * self.k * len(products):
            keep &= products >= (np.partition(products, -self.k, axis=1)[:, -self.k] - error)[:, None]
        row, column = np.nonzero(keep)
        scores = np.empty(len(row))
        for part in _slices(len(row), _PAIRS):
            scores[part], _ = paired_scores(self._given[rows][row[part]], block[column[part]], self.metric)
        n = len(products)
        row = np.concatenate([np.repeat(np.arange(n), self.k), row])
        places = np.concatenate([self.places[rows].reshape(-1), column + self.seen])
        scores = np.concatenate([self.scores[rows].reshape(-1), scores])
        order = np.lexsort((places, -scores, row))
        best = order[_rank(row[order]) < self.k]
        self.places[rows], self.scores[rows] = places[best].reshape(n, -1), scores[best].reshape(n, -1)


def _finite(rows: Floats) -> NDArray[np.bool_]:
    """Mark rows whose squared length is finite: a longer one becomes zeros where it is normalised."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite: NDArray[np.bool_] = np.isfinite(np.einsum("ij,ij->i", rows, rows))
    return finite


def topk(queries: Floats, documents: Floats | Iterable[Floats], k: int, metric: Metric) -> tuple[Places, Values]:
    """Return places and float64 scores `[q, k]` of the k nearest documents, nearest first, by exact search.

    `documents` is `[n, d]` or an iterable of such blocks, of which one at a time is held; no matrix of all
    queries by all documents is made. Of equal scores the lowest position comes first. Raises UsageError when k
    is more than the number of documents, DataError for numbers that aren't finite.
    """
    search = TopK(queries, k, metric)
    for block in [documents] if isinstance(documents, np.ndarray) else documents:
        search.update(block)
    require_k(k, search.seen)
    return search.places, search.scores


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Hold the true neighbours of queries: what any other search of the same documents is compared with.

    queries, documents  the true vectors `[q, d]` and `[n, d]`
    places, scores      the true `[q, k]`, nearest first
    """

    queries: Floats
    documents: Floats
    metric: Metric
    places: Places
    scores: Values

    @classmethod
    def of(cls, queries: Floats, documents: Floats, k: int, metric: Metric) -> Truth:
        """Search the documents exactly."""
        return cls(queries, documents, metric, *topk(queries, documents, k, metric))

    @classmethod
    def of_documents(cls, rows: Places, documents: Floats, k: int, metric: Metric) -> Truth:
        """Search with the documents at `rows` as queries, each of which is not its own neighbour."""
        places, scores = topk(documents[rows], documents, k + 1, metric)
        others = others_than(places, rows)
        kept = np.take_along_axis(places, others, axis=1), np.take_along_axis(scores, others, axis=1)
        return cls(documents[rows], documents, metric, *kept)

    def agreement(self, found: Places, k: int) -> Values:
        """Return agreement@k `[q]`: the share of k that the first k of `found` `[q, >= k]` have right."""
        scores, slack = scores_at(self.queries, self.documents, found[:, :k], self.metric)
        return share_right(scores + slack, self.scores, k)


def rerank(queries: Floats, documents: Floats, found: Places, metric: Metric) -> Places:
    """Return the same places `[q, m]` in the order of their true scores: the second stage of a cascade."""
    scores, _ = scores_at(queries, documents, found, metric)
    return np.take_along_axis(found, np.lexsort((found, -scores), axis=1), axis=1)


def share_right(found: Values, true: Values, k: int) -> Values:
    """Return for each query the share of k whose true score reaches the k-th best one.

    found   `[q, >= k]` the true scores of what a search found, slack included, in the order found
    true    `[q, >= k]` the best scores that there are, descending
    """
    require_k(k, true.shape[1])
    values: Values = (found[:, :k] >= true[:, k - 1, None]).sum(axis=1) / k
    return values


def others_than(places: Places, own: Places) -> Places:
    """Return the columns `[q, m - 1]` of `places` `[q, m]` that aren't `own`; all but the last if none is."""
    keep = places != own[:, None]
    keep[keep.all(axis=1), -1] = False
    return np.nonzero(keep)[1].reshape(len(places), -1)


def without(places: Places, own: Places) -> Places:
    """Return what a search for one more than k found, `[q, k]`, without the document that was the query."""
    return np.take_along_axis(places, others_than(places, own), axis=1)


def identity_recall(
    translated: Floats, rows: Places, target: Floats, ks: tuple[int, ...], metric: Metric
) -> dict[int, Values]:
    """Return for each k whether the true vector of a document is among the k nearest of its translation.

    `translated` `[q, d]` are the translations of the documents at `rows` of `target` `[n, d]`. It saturates
    near 1 for maps whose searches agree by a third: it proves little.
    """
    _, best = topk(translated, target, max(ks), metric)
    own, slack = paired_scores(translated, target[rows], metric)
    return {k: (own + slack >= best[:, k - 1]).astype(np.float64) for k in ks}


def label_recall(found: Places, qrels: Qrels, k: int) -> Values:
    """Return recall@k `[q]`: the share of a query's relevant documents in its first k; NaN without any."""
    queries, _, _ = _labels(qrels)
    relevant = np.bincount(queries, minlength=len(found)).astype(np.float64)
    relevant[relevant == 0] = np.nan
    values: Values = (_grades(found[:, :k], qrels) > 0).sum(axis=1) / relevant
    return values


def ndcg(found: Places, qrels: Qrels, k: int) -> Values:
    """Return nDCG@k `[q]` with the grade as gain and 1 / log2(rank + 1) as discount; NaN without labels.

    That is trec_eval's `ndcg_cut` (Järvelin and Kekäläinen 2002, with their first form of gain).
    """
    discount = 1 / np.log2(np.arange(2, k + 2))
    gained = _grades(found[:, :k], qrels) @ discount[: found.shape[1]]
    queries, _, grades = _labels(qrels)
    order = np.lexsort((-grades, queries))
    queries, grades = queries[order], grades[order]
    rank = _rank(queries)
    top = rank < k
    ideal = np.bincount(queries[top], weights=grades[top] * discount[rank[top]], minlength=len(found))
    ideal[ideal == 0] = np.nan
    values: Values = gained / ideal
    return values


def interval(values: Values, over: Values | None = None, *, seed: int = 0) -> tuple[float, float, float]:
    """Return the mean, or the ratio of the means of paired values, with a 95 % bootstrap interval.

    Queries are drawn anew, with replacement; the documents stay, since a corpus with a row twice is another
    corpus (Efron and Tibshirani 1993, chapter 13). Resamples in which the denominator is zero are left out. The
    interval always contains the value, and stays within the values that resamples take, so that of shares within 0
    and 1. It has no width where all values are equal, which says of 30 queries only that fewer than one in nine of all
    others differ (by the binomial law, at 95 %): see `gate.MIN_QUERIES`.
    """
    value = float(values.mean() / (1 if over is None else over.mean()))
    rng = np.random.default_rng(seed)
    tops, bottoms = np.empty(RESAMPLES), np.ones(RESAMPLES)
    for part in _slices(RESAMPLES, max(1, 2**20 // len(values))):
        rows = rng.integers(0, len(values), (part.stop - part.start, len(values)), dtype=np.int32)
        tops[part] = values[rows].mean(axis=1)
        if over is not None:
            bottoms[part] = over[rows].mean(axis=1)
    known = bottoms > 0
    ends = interval_ends(values - value * (1 if over is None else over))
    low, high = np.quantile(tops[known] / bottoms[known], ends)
    return value, min(value, float(low)), max(value, float(high))


def interval_ends(influence: Values) -> tuple[float, float]:
    """Return which quantiles of bootstrap resamples are the ends of a 95 % interval.

    The 2.5 % and 97.5 % quantiles make an interval that is too narrow, as one that divides by n and takes normal
    quantiles where Student's t is due; the expanded percentiles undo that (Hesterberg 2015). Where values are skewed,
    as most are close to 0 or 1, the truth lies beyond the end of the long tail more often than beyond the other. The
    BCa interval shifts both ends for that (Efron 1987, with his z0 = a of a mean). Here ends are shifted outward only:
    the skewness is that of a sample, and when it is chance, an end shifted inward would err. `tests/test_calibration`
    has the coverage. `influence` `[n]` is what each query adds to the estimate, but for a factor.
    """
    n = len(influence)
    if n == 1:
        return 0.0, 1.0
    normal = NormalDist()
    z = normal.inv_cdf(0.975)
    t = z + (z**3 + z) / (4 * (n - 1)) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)
    z = t * math.sqrt(n / (n - 1))  # t of n - 1 degrees of freedom by Abramowitz and Stegun 1964, equation 26.7.5
    spread = float(np.sum(influence**2)) ** 1.5
    a = float(np.sum(influence**3)) / (6 * spread) if spread > 0 else 0.0
    low, high = (a + (a + side) / (1 - a * (a + side)) for side in (-z, z))
    return normal.cdf(min(-z, low)), normal.cdf(max(z, high))


def _slices(n: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _unit(x: Floats) -> Floats:
    y = np.array(x, np.float32)
    normalize(y)
    return y


def _rank(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each entry within its row, for rows in ascending order."""
    return np.arange(len(rows)) - np.searchsorted(rows, rows)


def _labels(qrels: Qrels) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the labels sorted by query and document, without repetitions."""
    pairs, first = np.unique(np.stack([qrels.query, qrels.document], axis=1), axis=0, return_index=True)
    return pairs[:, 0], pairs[:, 1], qrels.grade[first]


def _grades(found: Places, qrels: Qrels) -> NDArray[np.int64]:
    """Return the grade of each place `[q, m]` for its query, 0 without a label."""
    queries, documents, grades = _labels(qrels)
    width = max(found.max(initial=0), documents.max(initial=0)) + 1
    keys = queries * width + documents
    wanted = np.arange(len(found))[:, None] * width + found
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where((keys[at] == wanted) & (found >= 0), grades[at], 0)
