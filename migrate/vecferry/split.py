"""The split of a paired sample into what a map is fitted on and what it is measured with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from vecferry.batch import Floats, id_keys
from vecferry.errors import DataError
from vecferry.holdout import Holdout
from vecferry.linear import Direction
from vecferry.pairs import Mask, Pairs, Queries
from vecferry.qrels import Labels

MIN_FIT = 10
FEW_HELD = 50
SHARE = 0.2
"""The part of the documents that is held out."""


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Hold the fit part beside the hold-out.

    source, target           documents' vectors in both spaces
    queries, source_queries  the new model's vectors of the fit half's queries, and the old one's, or None
    """

    source: Floats
    target: Floats
    queries: Floats | None
    source_queries: Floats | None
    holdout: Holdout
    warnings: tuple[str, ...]

    def pairs(self, direction: Direction) -> tuple[Floats, Floats]:
        """Return rows of what a map of this direction takes, and of where it leads.

        One that carries queries learns from documents, and from the queries that both models encoded.
        """
        if direction == "document":
            return self.source, self.target
        if self.queries is None or self.source_queries is None:
            return self.target, self.source
        return np.concatenate([self.target, self.queries]), np.concatenate([self.source, self.source_queries])


def split(
    pairs: Pairs,
    queries: Queries | None,
    labels: Labels | None,
    *,
    seed: int,
    fingerprint: dict[str, Any],
) -> Split:
    """Hold out marked documents (or 20 % by hash of id), half of the queries, and what is relevant to them.

    No held-out document or query is in the fit part: not by id, and not as an equal vector on either side.
    Raises DataError when too little is left, or when the labels know none of the documents or queries.
    """
    warnings = []
    held = lowest(pairs.ids, SHARE, seed) if pairs.marked is None else pairs.marked.copy()
    asked = learned = None
    if queries is not None:
        later = lowest(queries.ids, 0.5, seed)
        asked = queries.take(np.flatnonzero(later))
        learned = queries.take(np.flatnonzero(~later & ~_equal_rows(queries.vectors, asked.vectors)))
    if labels is not None and queries is not None and asked is not None:
        among = labels.match(queries.ids, pairs.ids)
        if among is None:
            raise DataError(
                f"{labels.path}: none of its {len(labels)} labels joins one of the {len(queries)} queries "
                f"({_some(queries.ids)}) and one of the {len(pairs)} pairs ({_some(pairs.ids)}); "
                f"its lines name queries like {_some(labels.queries)}, documents like {_some(labels.documents)}"
            )
        if len(among.query) < len(labels):
            warnings.append(f"{len(labels) - len(among.query)} of {len(labels)} labels name other queries or documents")
        known = labels.match(asked.ids, pairs.ids)
        if known is not None:
            held[known.document] = True
    equal = _equal_rows(pairs.source, pairs.source[held]) | _equal_rows(pairs.target, pairs.target[held])
    fit = ~held & ~equal
    if (same := int((equal & ~held).sum())) > 0:
        warnings.append(f"{same} pairs left out of the fit: a held-out document has the same vector")
    if fit.sum() < MIN_FIT or not held.any():
        raise DataError(
            f"{len(pairs)} pairs leave {fit.sum()} to fit and {held.sum()} to measure ({same} more equal "
            f"held-out ones): at least {MIN_FIT} and 1 are needed, some thousand make a good map; "
            "`vecferry sample` draws them"
        )
    if held.sum() < FEW_HELD:
        warnings.append(f"only {held.sum()} documents are held out: what is measured on them says little")
    ids = pairs.ids.filter(pa.array(held))
    holdout = Holdout(
        ids=ids,
        source=pairs.source[held],
        target=pairs.target[held],
        fit_keys=np.sort(id_keys(pairs.ids)[fit]),
        fingerprint=fingerprint,
        **_query_part(asked, labels, ids),
    )
    return Split(
        source=pairs.source[fit],
        target=pairs.target[fit],
        queries=None if learned is None else learned.vectors,
        source_queries=None if learned is None else learned.source,
        holdout=holdout,
        warnings=tuple(warnings),
    )


def beside(holdout: Holdout, drawn: Pairs, queries: Queries | None) -> Split:
    """Take what lies beside a map's hold-out, to fit what stands behind the map: no document and no query of it.

    Raises DataError when too little is left.
    """
    taken = np.isin(id_keys(drawn.ids), id_keys(holdout.ids)) | _equal_rows(drawn.target, holdout.target)
    rows = np.flatnonzero(~taken)
    if len(rows) < MIN_FIT:
        raise DataError(
            f"{len(drawn)} rows leave {len(rows)} to fit beside the map's hold-out: at least {MIN_FIT} are needed"
        )
    learned = None
    if queries is not None and holdout.queries is not None:
        asked = np.isin(id_keys(queries.ids), id_keys(holdout.query_ids)) | _equal_rows(
            queries.vectors, holdout.queries
        )
        learned = queries.vectors[~asked]
    elif queries is not None:
        learned = queries.vectors
    return Split(
        source=drawn.source[rows],
        target=drawn.target[rows],
        queries=learned,
        source_queries=None,
        holdout=replace(
            holdout, source=holdout.target, source_queries=None, fit_keys=np.sort(id_keys(drawn.ids)[rows])
        ),
        warnings=(),
    )


def lowest(ids: pa.Array, share: float, seed: int) -> Mask:
    """Mark a share of the ids, at least one: the lowest by seeded hash, so that a new id moves hardly any."""
    salt = id_keys(pa.array([seed]))[0]
    ranks = np.argsort(id_keys(pa.array(id_keys(ids) ^ salt)), kind="stable")
    chosen = np.zeros(len(ids), np.bool_)
    chosen[ranks[: max(1, round(share * len(ids)))]] = True
    return chosen


def _query_part(asked: Queries | None, labels: Labels | None, ids: pa.Array) -> dict[str, Any]:
    if asked is None:
        return {}
    qrels = None if labels is None else labels.match(asked.ids, ids)
    return {"query_ids": asked.ids, "queries": asked.vectors, "source_queries": asked.source, "qrels": qrels}


def _equal_rows(rows: Floats, others: Floats) -> Mask:
    """Mark the rows that stand among the others too; 0.0 and -0.0 are one number."""
    known = {row.tobytes() for row in others + np.float32(0)}
    return np.fromiter(((row + np.float32(0)).tobytes() in known for row in rows), np.bool_, len(rows))


def _some(ids: pa.Array) -> str:
    return ", ".join(str(i) for i in ids.slice(0, 3).to_pylist())
