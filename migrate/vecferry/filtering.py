"""The verb `filter`: make a compressor of a model's vectors, measured and, if asked, chosen by what searches find."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import vecferry
from vecferry.auto import QUERIES, Judge
from vecferry.batch import Floats
from vecferry.corpus import Corpus
from vecferry.encoders.contract import is_identity
from vecferry.encoders.local import locate
from vecferry.errors import IncompatibleError, UsageError
from vecferry.filters import KINDS, Given, make, possible
from vecferry.fitting import check_lossy
from vecferry.heads import Head, describe, read_head
from vecferry.holdout import Holdout, holdout_of
from vecferry.linear import Card, LinearMap, Side, normalize
from vecferry.mapfile import seal
from vecferry.norms import Norms, metric_of
from vecferry.pairs import BadRows, Pairs, read_queries
from vecferry.qrels import read_qrels
from vecferry.recall import Metric, Places, Values, ndcg, topk, without
from vecferry.sampling import draw
from vecferry.spectrum import Spectrum, band, frequent, smoothed
from vecferry.split import Split, beside, split
from vecferry.store import Reader, opened
from vecferry.vocabulary import TEXTS, count_tokens, tokenizer_of

SAMPLE = 20_000
"""Rows that are drawn of a store: a fifth is held out, and a quarter of the others chooses."""
VALIDATION = 0.25
K = 10
EDGE = 100
"""Most frequent tokens, whose logits "ideal" wants to leave alone: k of the paper."""


def make_filter(
    model: str | Path | None = None,
    *,
    tau: int,
    kind: str = "auto",
    offset: int | None = None,
    store: Any = None,
    queries: Any = None,
    qrels: str | Path | None = None,
    map: LinearMap | str | Path | None = None,
    corpus: str | Path | None = None,
    smoothing: float = 0.5,
    center_log: bool = False,
    space: str | None = None,
    metric: Metric | None = None,
    allow_lossy: bool = False,
    seed: int = 0,
) -> LinearMap:
    """Make a filter, which carries documents and queries of one model alike from d to d // tau dimensions.

    model   whose head "embedfilter" and its kin are made of (see `filters.KINDS`)
    store   vectors of that model: what "pca" and "whiten" are fitted on, and what every filter is measured with
    queries the model's query vectors; without them documents stand in, which flatters
    map     the map that the filter is to stand behind: what that holds out measures the filter too, and neither is it
            fitted nor chosen by any of it
    corpus  texts whose tokens are counted, for "ideal"; `smoothing` and `center_log` as in `spectrum`
    space   name of the vectors' space; that of the store by default, or else the model's name, which stands for every
            space that its encoders make

    "auto" takes the kind by which the fit half of the queries finds most among vectors that no filter was fitted on:
    agreement@10 with the search in all d dimensions. Its hold-out, which a gate measures with, chooses nothing. Raises
    UsageError for a kind that lacks what it is made of, IncompatibleError for a store that isn't the model's.
    """
    _check(kind, tau, offset, model, store, queries, qrels, map, corpus)
    head = None if model is None else read_head(model)
    with ExitStack() as stack:
        reader = None if store is None else stack.enter_context(opened(store))
        parts = None
        if reader is not None:
            check_lossy([reader], allow_lossy)
            asked = None if queries is None else stack.enter_context(opened(queries))
            parts = _parts(reader, asked, qrels, map, seed)
            metric = metric or metric_of(Norms.of(parts.source), reader.info)
            space = _space(reader, space)
        metric = metric or "cosine"
    dim = parts.source.shape[1] if parts is not None else len(_known(head).weight[0])
    if head is not None and head.weight.shape[1] != dim:
        raise IncompatibleError(
            f"{reader.info.uri if reader is not None else store} holds vectors of {dim} dimensions, the hidden states "
            f"of {head.name} have {head.weight.shape[1]}: they aren't of this model"
        )
    warnings: tuple[str, ...] = ()
    if head is not None and space is not None and is_identity(space) and space.rpartition("@")[0] != head.name:
        warnings = (f"the head is of {head.name}, the vectors are in the space {space!r}: are they of one model?",)
    given = _given(head, model, corpus, kind, dim, metric, smoothing, center_log, seed)
    parameters: dict[str, Any] = {"tau": tau}
    if parts is not None:
        if kind == "auto":
            kind, parameters["candidates"], more = choose(given, parts, tau, seed)
            warnings += more
        given = dataclasses.replace(given, vectors=_unit(parts.source, metric))
    f = make(kind, given, tau, offset)
    if head is not None and "spectrum" in KINDS[kind].needs:
        parameters |= describe(head)
    if kind.startswith("embedfilter"):
        parameters["band"] = "{}:{}".format(*band(dim, tau, offset))
    holdout = None if parts is None else parts.holdout
    return _sealed(f, kind, parameters, space or (head.name if head else None), metric, parts, holdout, warnings, seed)


def choose(given: Given, parts: Split, tau: int, seed: int) -> tuple[str, list[dict[str, Any]], tuple[str, ...]]:
    """Return the kind by which most is found, what each finds, best first, and why some couldn't be tried.

    Judged are filters fitted on three quarters of the fit part, by searches among the other quarter.
    """
    order = np.random.default_rng(seed).permutation(len(parts.source))
    cut = round(VALIDATION * len(order))
    documents = _unit(parts.source[np.sort(order[:cut])], given.metric)
    given = dataclasses.replace(given, vectors=_unit(parts.source[np.sort(order[cut:])], given.metric))
    name, judge = _judge(documents, parts.queries, given.metric)
    found: dict[str, float] = {}
    warnings = []
    for kind in possible(given):
        try:
            found[kind] = round(float(agreement(make(kind, given, tau), judge, documents).mean()), 4)
        except UsageError as error:
            warnings.append(f"{kind} was not tried: {error}")
    if parts.queries is None:
        warnings.append("documents stood in for queries when the filter was chosen: pass --queries")
    ranked = sorted(found, key=lambda kind: -found[kind])
    return ranked[0], [{"name": kind, name: found[kind]} for kind in ranked], tuple(warnings)


def agreement(f: LinearMap, judge: Judge, documents: Floats) -> Values:
    """Return agreement@k `[q]` of a search by filtered queries among filtered documents with one in all dimensions."""
    own = judge.own
    more = 0 if own is None else 1
    found, _ = topk(f.apply(judge.truth.queries), f.apply(documents), judge.k + more, judge.truth.metric)
    return judge.truth.agreement(found if own is None else without(found, own), judge.k)


def texts_in(corpus: str | Path) -> Iterator[str]:
    """Yield the texts of a file (see `Corpus`), all wordings of each, for their tokens to be counted."""
    for _, texts in Corpus(Path(corpus)).read(TEXTS):
        for text in texts:
            yield from [text] if isinstance(text, str) else text or []


def measure(f: LinearMap, holdout: Holdout, metric: Metric) -> dict[str, Any]:
    """Return agreement on the hold-out and, with labels, nDCG beside that of all dimensions: the filter may be better.

    Agreement takes the search in all dimensions for right; only labels can say that it isn't.
    """
    name, judge = _judge(holdout.target, holdout.queries, metric)
    queries = holdout.queries
    measured: dict[str, Any] = {"documents": len(holdout.ids), "queries": 0 if queries is None else len(queries)}
    measured[name] = round(float(agreement(f, judge, holdout.target).mean()), 4)
    if holdout.qrels is not None and queries is not None:
        for what, g in ((f"ndcg@{judge.k}", f.apply), (f"ndcg@{judge.k} in all dimensions", np.asarray)):
            found, _ = topk(g(queries), g(holdout.target), judge.k, metric)
            measured[what] = round(float(np.nanmean(ndcg(found, holdout.qrels, judge.k))), 4)
    return measured


def _judge(documents: Floats, queries: Floats | None, metric: Metric) -> tuple[str, Judge]:
    random = np.random.default_rng(0)
    own: Places | None = None
    if queries is None or not len(queries):
        own = np.sort(random.permutation(len(documents))[:QUERIES])
        queries = documents[own]
    elif len(queries) > QUERIES:
        queries = queries[np.sort(random.permutation(len(queries))[:QUERIES])]
    k = min(K, len(documents) - 1)
    return f"{'agreement' if own is None else 'doc-agreement'}@{k}", Judge.of(queries, own, documents, k, metric)


def _parts(
    reader: Reader,
    asked: Reader | None,
    qrels: str | Path | None,
    map: LinearMap | str | Path | None,
    seed: int,
) -> Split:
    """Draw rows of the store, and split them, and the queries, into what chooses and what measures."""
    drawn, _ = draw(reader, SAMPLE, np.random.default_rng(seed))
    pairs = Pairs(drawn.ids, drawn.vectors, drawn.vectors)
    questions = None if asked is None else read_queries(asked, None, (0, reader.info.dim), BadRows(optional=False))
    if map is not None:
        m = map if isinstance(map, LinearMap) else LinearMap.load(map)
        if m.card is not None and m.d_out != reader.info.dim:
            raise IncompatibleError(
                f"{reader.info.uri} holds vectors of {reader.info.dim} dimensions, the map leads to {m.d_out}"
            )
        return beside(holdout_of(m), pairs, questions)
    fingerprint = {"uri": reader.info.uri, "kind": reader.info.kind, "count": reader.info.count, "dim": reader.info.dim}
    labels = None if qrels is None else read_qrels(qrels)
    return split(pairs, questions, labels, seed=seed, fingerprint=fingerprint)


def _given(
    head: Head | None,
    model: str | Path | None,
    corpus: str | Path | None,
    kind: str,
    dim: int,
    metric: Metric,
    smoothing: float,
    center_log: bool,
    seed: int,
) -> Given:
    """Decompose the head, and count tokens, where some kind that may be made needs that."""
    given = Given(dim, metric, seed=seed)
    needs = {n for name in (KINDS if kind == "auto" else [kind]) for n in KINDS[name].needs}
    if head is None or not needs & {"spectrum", "centered"}:
        return given
    spectrum = Spectrum.of(head.weight)
    if "centered" in needs:
        given = dataclasses.replace(given, centered=Spectrum.of(head.weight, center=True))
    if "delta_pi" in needs and corpus is not None:
        tokenize = tokenizer_of(locate(str(model)).path)
        counts = count_tokens(texts_in(corpus), tokenize, len(head.weight))
        state = spectrum.average_token(head.weight, smoothed(counts, smoothing), center_log=center_log)
        changes = spectrum.delta_pi(head.weight, state, frequent(counts, min(EDGE, len(counts))))
        given = dataclasses.replace(given, delta_pi=changes)
    return dataclasses.replace(given, spectrum=spectrum)


def _sealed(
    f: LinearMap,
    kind: str,
    parameters: dict[str, Any],
    space: str | None,
    metric: Metric,
    parts: Split | None,
    holdout: Holdout | None,
    warnings: tuple[str, ...],
    seed: int,
) -> LinearMap:
    """Give a filter its card: whose vectors it takes, what it was made of, and what it keeps of searches."""
    measured = {} if holdout is None else measure(f, holdout, metric)
    digest = hashlib.sha256(f.weight.tobytes() + (b"" if f.bias is None else f.bias.tobytes())).hexdigest()[:12]
    reduced = f"{space or 'unnamed'} | {kind} 1/{parameters['tau']} {digest}"
    card = Card(
        source=Side(f.d_in, space),
        target=Side(f.d_out, reduced),
        solver=kind,
        parameters=parameters,
        direction="filter",
        metric=metric,
        pairs=0 if parts is None else len(parts.source),
        seed=seed,
        measured=measured,
        warnings=warnings + (() if parts is None else parts.warnings),
        version=vecferry.__version__,
    )
    return seal(dataclasses.replace(f, card=card, holdout=holdout))


def _check(
    kind: str,
    tau: int,
    offset: int | None,
    model: str | Path | None,
    store: Any,
    queries: Any,
    qrels: Any,
    map: Any,
    corpus: Any,
) -> None:
    if kind != "auto" and kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}: choose one of auto, {', '.join(KINDS)}")
    needs = ("vectors",) if kind == "auto" else KINDS[kind].needs
    if tau < 1:
        raise UsageError(f"--tau is {tau}: choose 1, where nothing is dropped, or more")
    if kind == "auto" and offset is not None:
        raise UsageError("--offset goes with --kind embedfilter; auto tries the middle")
    if "vectors" in needs and store is None:
        raise UsageError(f"--kind {kind} needs --store, vectors of the model; --kind embedfilter needs its head alone")
    if {"spectrum", "centered"} & set(needs) and model is None:
        raise UsageError(f"--kind {kind} is made of a language model's head: name the model with --model")
    if "delta_pi" in needs and corpus is None:
        raise UsageError(f"--kind {kind} needs token frequencies: name texts to count them in with --corpus")
    if model is None and store is None:
        raise UsageError("name the model (--model), or a store of its vectors (--store)")
    for name, value in (("--queries", queries), ("--qrels", qrels), ("--map", map)):
        if value is not None and store is None:
            raise UsageError(f"{name} goes with --store, the documents that are searched")
    if qrels is not None and map is not None:
        raise UsageError("--qrels is held out with --map already: leave it out")
    if qrels is not None and queries is None:
        raise UsageError("--qrels needs --queries, the model's vectors of the same queries")


def _space(reader: Reader, space: str | None) -> str | None:
    if None not in (space, reader.info.space) and space != reader.info.space:
        raise IncompatibleError(f"{reader.info.uri} is in the space {reader.info.space!r}, not {space!r}")
    return space or reader.info.space


def _unit(x: Floats, metric: Metric) -> Floats:
    x = x.copy()
    if metric == "cosine":
        normalize(x)
    return x


def _known(head: Head | None) -> Head:
    assert head is not None, "either a model or a store is given"
    return head
