"""The verb `warm`: spend a budget of texts to encode on the documents that a query log asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from vecferry.batch import Floats, faulty
from vecferry.cascade import CANDIDATES, TEXTS, Cascade, Encode
from vecferry.encoders.contract import Encoder
from vecferry.errors import BadRowsError, DataError, StoppedError, UsageError
from vecferry.linear import LinearMap
from vecferry.lookup import Texts, texts_of
from vecferry.recall import Values
from vecferry.store import Reader, Uri, opened


@dataclass(frozen=True, slots=True)
class Warmed:
    """Say what a query log needs and how much of it has true vectors.

    queries     in the log
    needed      distinct documents among the first `candidates` of a query
    known       of them, those whose true vectors were in the cache before
    chosen      of the others, those that the budget allows, in the order of need
    encoded     of the chosen, those that were encoded now; 0 where they were written to `output` instead
    before, after   the share of the log's need that has true vectors, before and once the chosen are in the cache
    """

    queries: int
    candidates: int
    needed: int
    known: int
    chosen: int
    encoded: int
    before: float
    after: float
    output: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)

    def table(self) -> str:
        """Write the numbers for people."""
        done = f"{self.encoded:,} encoded" if self.output is None else f"to encode, in {self.output}"
        return (
            f"queries   {self.queries:,}\n"
            f"needed    {self.needed:,} documents are among the first {self.candidates} of a query; "
            f"{self.known:,} had true vectors\n"
            f"chosen    {self.chosen:,}, those needed most: {done}\n"
            f"covered   {self.before:.1%} of the log's need before, {self.after:.1%} with them"
        )


def warm(
    index: str | Uri | Reader | Any,
    map: LinearMap | str | Path | None,
    queries: str | Uri | Reader | Any,
    budget: int,
    *,
    encode: Encode | Encoder | None = None,
    texts: Texts | None = None,
    cache: str | Path | None = None,
    filter: LinearMap | str | Path | None = None,
    output: str | Path | None = None,
    c: int = CANDIDATES,
    progress: bool = False,
) -> Warmed:
    """Encode the `budget` documents that a query log needs most and that have no true vector, into the cache.

    index, map, encode, texts, cache, filter   as `Cascade` takes them
    queries   the log: a store of query vectors by the new model; a query that came often stands there often
    output    without `encode`: a Parquet file for the ids, in order of need (column `need`), with their texts where
              `texts` are given; encode them and hand the vectors to `Cascade.add` or `vecferry warm --add`
    c         candidates of each query, as the cascade will use

    A document's need is the sum of 1 / sqrt(rank) over the log's queries that have it among their first c. Raises
    UsageError with neither or both of `encode` and `output`, IncompatibleError for a log of another space or of the
    old model's queries, StoppedError where Ctrl-C or SIGTERM ended it (what was encoded is kept), and what `Cascade`
    raises.
    """
    if budget < 1:
        raise UsageError(f"a budget of {budget} texts buys nothing: choose 1 or more")
    if (encode is None) == (output is None):
        raise UsageError("either encode the documents (--encode), or have their ids written (--output)")
    if output is not None and Path(output).exists():
        raise UsageError(f"{output} exists: choose another name")
    with Cascade(index, map, encode, texts, cache, filter=filter) as cascade:
        asked, need = _need(cascade, queries, c)
        needed = np.flatnonzero(need)
        by_need = needed[np.lexsort((needed, -need[needed]))]
        ids = cascade.ids_at(by_need)
        if cascade.cache is None:
            known = np.zeros(len(ids), np.bool_)
        else:
            cascade.cache.refresh()
            known = cascade.cache.has(ids)
        weights, total = need[by_need], need.sum()
        chosen = np.flatnonzero(~known)[:budget]
        wanted, before = ids.take(pa.array(chosen)), weights[known].sum()
        if output is not None:
            _write(wanted, weights[chosen], texts, Path(output))
        else:
            try:
                with tqdm(total=len(wanted), unit="texts", disable=not progress) as bar:
                    for start in range(0, len(wanted), TEXTS):
                        bar.update(cascade.fill(wanted.slice(start, TEXTS)))
            except KeyboardInterrupt as error:
                done = cascade.encoded
                raise StoppedError(
                    f"stopped: {done:,} of {len(wanted):,} texts are encoded and in {cache}; the same command with a "
                    f"budget of {len(wanted) - done} encodes the others"
                ) from error
        return Warmed(
            queries=asked,
            candidates=c,
            needed=len(needed),
            known=int(known.sum()),
            chosen=len(chosen),
            encoded=cascade.encoded,
            before=float(before / total),
            after=float((before + weights[chosen].sum()) / total),
            output=None if output is None else str(output),
        )


def _need(cascade: Cascade, queries: str | Uri | Reader | Any, c: int) -> tuple[int, Values]:
    """Return the number of queries of a log, and the need of each document of the index `[n]`.

    1 / sqrt(rank) lies between counting, which spends too much on documents that stand low in many lists, and
    1 / rank, which leaves out those from low down that true vectors would bring up (see bench_cascade).
    """
    if c < 1:
        raise UsageError(f"{c} candidates: choose 1 or more")
    count = cascade.rows
    c = min(c, count)
    need, asked = np.zeros(count), 0
    gain = np.arange(1, c + 1) ** -0.5
    with opened(queries) as log:
        cascade.require_new(log)
        for vectors, times in _distinct(log):
            asked += int(times.sum())
            places = cascade.candidates(vectors, c)
            found = places >= 0
            need += np.bincount(places[found], (times[:, None] * gain)[found], count)
        if not asked:
            raise DataError(f"{log.info.uri} is empty: a log has one query or more")
    return asked, need


def _distinct(log: Reader) -> Iterator[tuple[Floats, Values]]:
    """Yield the different queries of each batch of a log, in the order they came, with how often each stands there."""
    for batch in log.read(8192):
        if (bad := faulty(batch.vectors)).any():
            names = batch.ids.filter(pa.array(bad)).to_pylist()
            raise BadRowsError(log.info.uri, "queries are zero, NaN or infinite", names, "Leave them out.")
        rows = batch.vectors.view(np.dtype((np.void, batch.vectors[0].nbytes))).ravel()
        _, first, times = np.unique(rows, return_index=True, return_counts=True)
        order = np.argsort(first)
        yield batch.vectors[first[order]], times[order].astype(np.float64)


def _write(ids: pa.Array, need: Values, texts: Texts | None, path: Path) -> None:
    """Write the ids to encode, the most needed first."""
    columns = {"id": ids, "need": pa.array(need)}
    if texts is not None:
        columns["text"] = pa.array(texts_of(texts)(ids), pa.string())
    stage = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(pa.table(columns), stage, compression="zstd")
        stage.replace(path)
    finally:
        stage.unlink(missing_ok=True)
