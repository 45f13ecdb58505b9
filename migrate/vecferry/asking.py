"""What an index is asked: queries and labels, given or those of a map's hold-out, found in stores by id."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vecferry.batch import Floats
from vecferry.errors import DataError, IncompatibleError, UsageError
from vecferry.holdout import Holdout, Qrels, holdout_of
from vecferry.linear import LinearMap
from vecferry.mapfile import HOLDOUT
from vecferry.pairs import BadRows, read_queries
from vecferry.prechecks import check_new, check_taken
from vecferry.qrels import Labels, as_ids, as_strings, read_qrels
from vecferry.store import Reader, find, opened

OWN = "the map's hold-out"
"""Where labels come from that no file was given for."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Hold the queries to measure with: given, or those of a map's hold-out; and labels, by id."""

    ids: pa.Array
    vectors: Floats | None
    source: Floats | None
    labels: Labels | None
    given: bool

    @classmethod
    def read(
        cls,
        index: Reader,
        m: LinearMap | None,
        queries: Any,
        source_queries: Any,
        qrels: Any,
        ask: LinearMap | None = None,
    ) -> Asked:
        """Read queries and labels; queries have all dimensions, also where the index is asked through a filter.

        Raises IncompatibleError for queries of another space, dimension or model, BadRowsError for unusable vectors
        and for ids that stand more than once or lack a source query.
        """
        labels = None if qrels is None else read_qrels(qrels)
        if queries is None:
            if source_queries is not None:
                raise UsageError("--source-queries goes with --queries: both are matched by id")
            held = holdout_of(m) if m is not None else None
            if held is None or held.queries is None:
                return cls(pa.array([], pa.string()), None, None, labels, given=False)
            if labels is None and held.qrels is not None:
                names = (held.query_ids.take(pa.array(held.qrels.query)), held.ids.take(pa.array(held.qrels.document)))
                labels = Labels(OWN, names[0], as_strings(names[1]), held.qrels.grade)
            return cls(held.query_ids, held.queries, held.source_queries, labels, given=False)
        with opened(queries) as store, nullcontext() if source_queries is None else opened(source_queries) as old:
            same_space(index, store.info.space, store.info.dim, f"the queries {store.info.uri}", ask)
            if store.info.count == 0:
                raise DataError(f"{store.info.uri} is empty")
            if m is not None:
                check_new(store, m)
                if old is not None and m.card is not None:
                    check_taken(old, m, m.card)
            dims = (0 if m is None else m.d_in, store.info.dim)
            asked = read_queries(store, old, dims, BadRows(optional=False))
        return cls(asked.ids, asked.vectors, asked.source, labels, given=True)

    def of(self, held: Holdout) -> Holdout:
        """Put these queries and labels in the place of a hold-out's own."""
        if self.given:
            held = replace(held, query_ids=self.ids, queries=self.vectors, source_queries=self.source, qrels=None)
        if self.labels is None:
            return held
        qrels = self.labels.match(held.query_ids, held.ids)
        self._require(qrels, held.query_ids, f"{len(held.ids):,} held-out documents")
        return replace(held, qrels=qrels)

    def warnings(self, m: LinearMap) -> tuple[str, ...]:
        """Say where given queries come from the log that the map was fitted with, of which only a part is held out."""
        has_holdout = m.holdout is not None or (m.path is not None and (m.path / HOLDOUT).is_file())
        if not self.given or not has_holdout:
            return ()
        held = int(pc.sum(pc.is_in(self.ids, value_set=holdout_of(m).query_ids.cast(self.ids.type))).as_py() or 0)
        if held in (0, len(self.ids)):
            return ()
        return (
            f"{held:,} of the {len(self.ids):,} queries were held out of the fit, so the map may have been fitted with "
            "the others, which flatters: leave --queries out to measure with those held out alone",
        )

    def _require(self, qrels: Qrels | None, queries: pa.Array, documents: str) -> None:
        """Refuse labels of other queries or documents; a hold-out's own may be of documents that an index lacks."""
        if qrels is None and self.labels is not None and self.labels.path != OWN:
            raise DataError(
                f"{self.labels.path}: none of its {len(self.labels):,} labels joins one of the {len(queries):,} "
                f"queries and one of the {documents}"
            )

    def found_in(self, store: Reader) -> Qrels | None:
        """Return the labels with documents as places of a store."""
        if self.labels is None:
            return None
        ids = as_ids(self.labels.documents, store.info.id_type)
        qrels, places = self.labels.match(self.ids, ids), find(store, ids)
        if qrels is not None:
            document = places[qrels.document]
            here = document >= 0
            qrels = Qrels(qrels.query[here], document[here], qrels.grade[here]) if here.any() else None
        self._require(qrels, self.ids, f"documents of {store.info.uri}")
        return qrels


def same_space(index: Reader, space: str | None, dim: int, what: str, ask: LinearMap | None = None) -> None:
    """Refuse what isn't in the space of the index: by its name where both are known, by its dimension always.

    Where the index is asked through a filter, that is the space which the filter takes vectors of.
    """
    info = index.info
    own_dim, own_space, where = info.dim, info.space, info.uri
    if ask is not None and ask.card is not None:
        own_dim, own_space, where = ask.d_in, ask.card.source.space, f"what {info.uri} was filtered of"
    if own_dim != dim:
        raise IncompatibleError(f"{where} holds vectors of {own_dim} dimensions, {what} has {dim}")
    if own_space is not None and space is not None and own_space != space:
        raise IncompatibleError(f"{where} is in the space {own_space!r}, {what} in {space!r}: use the same model")
