"""Translated candidates, re-ranked by their true vectors: most of what re-embedding gives, for the documents asked for.

The translated index only has to find the right documents among its first c; their order comes from vectors that the
new model made of their texts. Vectors once made are kept in a cache beside the index, never in it: a translated
index with some true vectors mixed in can lose those documents, whose scores are of another scale.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from vecferry.batch import Floats, faulty, id_keys
from vecferry.cache import DESCRIPTION, Cache, Stored
from vecferry.compressing import compress, filter_of, recorded, require_filter, unmapped
from vecferry.encoders.contract import Encoder, is_identity
from vecferry.errors import BadRowsError, DataError, IncompatibleError, UsageError
from vecferry.fullsize import search_or_scan
from vecferry.linear import Card, LinearMap
from vecferry.lookup import Texts, texts_of
from vecferry.prechecks import card_of, check_new
from vecferry.recall import Metric, Places, Values, require_k, scores_at
from vecferry.store import Reader, Uri, opened

CANDIDATES = 200
QUERIES = 64
"""Queries whose candidates' vectors are in memory together."""
TEXTS = 1024
"""Texts that are encoded and made durable together: what a crash costs at most."""

Encode = Callable[[list[str]], ArrayLike]


class Cascade:
    """Search a translated index, and rank what it finds by true vectors; a context manager.

    index   the translated index: a store's address, an open reader, or an in-memory FAISS index
    map     the map of direction "document" that translated it, or the map's folder
    encode  the new model: an encoder (see `vecferry.load_encoder`), or a function from a list of n texts to vectors
            `[n, d]`; the prompt, if the new space has one, is for it to add. With None no text is encoded, and
            documents without a true vector keep their place (see `search`)
    texts   what to encode: a function or mapping from an id to its text, or the address of Parquet files with columns
            `id` and `text` (`docs.parquet?id=pid&text=passage` for other names)
    cache   a folder that keeps what was encoded, made when needed; or, where nothing is encoded, a store of any kind
            that has true vectors

    filter  the filter that the index was made with: candidates are found through it, and ranked by true vectors of all
            dimensions; without a map, for an index that it shrunk in its own space

    Raises IncompatibleError when map, filter, index and cache are not of one space and dimension, or the map carries
    queries. Ids are held in memory (8 bytes for an integer), and 16 bytes for each row of the cache.
    """

    def __init__(
        self,
        index: str | Uri | Reader | Any,
        map: LinearMap | str | Path | None = None,
        encode: Encode | Encoder | None = None,
        texts: Texts | None = None,
        cache: str | Path | Reader | Any | None = None,
        *,
        filter: LinearMap | str | Path | None = None,
    ) -> None:
        if encode is not None and (texts is None or cache is None):
            raise UsageError("an encoder takes texts (--texts) and a cache (--cache): a folder for what was encoded")
        f = None if filter is None else filter_of(filter)
        self.encoded = 0
        """Texts encoded since this cascade was opened."""
        self._stack = ExitStack()
        try:
            self.index = self._stack.enter_context(opened(index))
            self._map, self.card = _route(self.index, map, f)
            self.metric: Metric = self.card.metric
            self.dim = self._map.d_asked
            _require_space(
                self.index, self._map.d_out, self.card.space if f is None else card_of(self._map, "document").space
            )
            self._encode = self._function(encode) if isinstance(encode, Encoder) else encode
            self._ids: pa.ChunkedArray | None = None
            self._text = None if texts is None else texts_of(texts)
            self.cache = None if cache is None else self._open_cache(cache)
        except BaseException:
            self._stack.close()
            raise

    def _function(self, encoder: Encoder) -> Encode:
        """Return what an encoder does with documents; refuse one that isn't of the space that the map leads to.

        Where somebody named that space by hand, nothing but the dimension can be compared.
        """
        if encoder.dim != self.dim:
            raise IncompatibleError(
                f"{encoder.name} gives vectors of {encoder.dim} dimensions, the map leads to {self.dim}"
            )
        if is_identity(self.card.space) and encoder.identity != self.card.space:
            raise IncompatibleError(
                f"the encoder gives vectors of the space {encoder.identity!r}, the map leads to {self.card.space!r}: "
                "use the model, prompts (both sides'), pooling and name that its sample was encoded with"
            )
        return encoder.encode

    def _open_cache(self, address: str | Path | Reader | Any) -> Cache | Stored:
        if isinstance(address, (str, Path)) and not Uri.parse(str(address)).kind:
            folder = Path(address)
            if (folder / DESCRIPTION).exists() or not folder.exists():
                return Cache(folder, self.card.space, self.dim, self.index.info.id_type or pa.int64())
        reader = self._stack.enter_context(opened(address))
        self.require_space(reader)
        if self._encode is not None:
            raise UsageError(
                f"{reader.info.uri} is a store, which can't grow: name a new folder for the cache, and copy the store "
                "into it with `vecferry warm --add`"
            )
        return Stored(reader)

    def require_space(self, store: Reader) -> None:
        """Refuse a store that isn't in the space that the map leads to: by its name where it is known."""
        _require_space(store, self.dim, self.card.space)

    def require_new(self, store: Reader) -> None:
        """Refuse queries or true vectors that aren't the new model's, though space and dimension may be the same."""
        self.require_space(store)
        check_new(store, self._map)

    def candidates(self, queries: Floats, c: int) -> Places:
        """Return the places `[q, c]` that the index finds, nearest first; -1 where it finds no more."""
        return search_or_scan(self.index, self._map.asking(queries), c, self.metric)[0]

    def ids_at(self, places: NDArray[np.int64]) -> pa.Array:
        """Return the ids of the documents at these places of the index."""
        if self.index.info.id_type is None:
            return pa.array(places)
        if self._ids is None:
            self._ids = pa.chunked_array(list(self.index.ids(1 << 18)), self.index.info.id_type)
        return self._ids.take(pa.array(places)).combine_chunks()

    def search(self, queries: ArrayLike, k: int = 10, c: int = CANDIDATES) -> tuple[NDArray[Any], Values]:
        """Return ids and scores `[q, k]` of what the index finds among its first c, nearest by their true vectors.

        `queries` `[q, d]` are by the new model. Candidates without a true vector are encoded. Without an encoder they
        stay at the places where the translated index ranked them, and the others change places among themselves:
        true and translated scores are never compared, and no true vector that is added lowers the number of true
        neighbours among the first k, of any query. Their score is NaN.

        Ids are int64, or Python objects; where the index finds fewer than k, -1 or None with score -inf. Scores are
        exact, larger for nearer, and minus the squared distance for "l2". Raises UsageError for k beyond c or the
        index, BadRowsError for a candidate without a text, DataError for what can't be a vector.
        """
        asked = self._queries(queries)
        c = min(c, self.rows)
        require_k(k, c)
        if self._encode is None and (self.cache is None or not self.cache.exists):
            raise UsageError(
                "there are no true vectors to rank by, and nothing encodes: pass encode, texts and a cache folder, "
                "or a cache that exists"
            )
        places, scores = np.empty((len(asked), k), np.int64), np.empty((len(asked), k))
        candidates = self.candidates(asked, c)
        for start in range(0, len(asked), QUERIES):
            part = slice(start, start + QUERIES)
            found, true = self._ranked(asked[part], candidates[part])
            places[part], scores[part] = found[:, :k], true[:, :k]
        return self._named(places), scores

    def _queries(self, queries: ArrayLike) -> Floats:
        x = np.ascontiguousarray(queries, np.float32)
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise IncompatibleError(f"queries are [q, {self.dim}] here, these are {list(x.shape)}")
        if not np.isfinite(x).all():
            raise DataError("the queries hold NaN or infinite numbers")
        return x

    @property
    def rows(self) -> int:
        """Return the number of documents in the index."""
        if self.index.info.count is not None:
            return self.index.info.count
        return sum(len(piece) for piece in self.index.ids(1 << 18))

    def _ranked(self, queries: Floats, places: Places) -> tuple[Places, Values]:
        """Sort each query's candidates that have a true vector by it, within the slots that they hold.

        Where m of the first k slots are theirs, the m truly nearest of them stand there, and no other m have more
        true neighbours among them. Putting all of them first would bury a good translation under a poor document that
        happens to be known: with a tenth known, agreement@10 fell from .31 to .09 (e5 to MiniLM, 10,000 documents).
        """
        distinct = np.unique(places[places >= 0])
        ids = self.ids_at(distinct)
        if self._encode is not None:
            self.fill(ids)
        assert self.cache is not None
        self.cache.refresh()
        known = self.cache.has(ids)
        vectors = self.cache.take(ids.filter(pa.array(known)))
        row_of = np.full(len(distinct) + 1, -1, np.int64)  # the last for a place of -1
        row_of[:-1][known] = np.arange(len(vectors))
        at = np.where(places >= 0, np.searchsorted(distinct, places), len(distinct))
        true, _ = scores_at(queries, vectors, row_of[at], self.metric)

        row, slot = np.nonzero(row_of[at] >= 0)
        order = np.lexsort((places[row, slot], -true[row, slot], row))
        ranked, scores = places.copy(), np.where(places >= 0, np.nan, -np.inf)
        ranked[row, slot] = places[row, slot][order]
        scores[row, slot] = true[row, slot][order]
        return ranked, scores

    def _named(self, places: Places) -> NDArray[Any]:
        found = places >= 0
        names = self.ids_at(places[found])
        if pa.types.is_signed_integer(names.type):
            ids = np.full(places.shape, -1, np.int64)
            ids[found] = names.to_numpy()
            return ids
        objects = np.full(places.shape, None, object)
        objects[found] = names.to_pylist()
        return objects

    def fill(self, ids: pa.Array) -> int:
        """Encode the texts of documents that have no true vector yet, keep the vectors, and return their number."""
        if self._encode is None or self._text is None or not isinstance(self.cache, Cache):
            raise UsageError("nothing encodes: pass encode, texts and a cache folder")
        self.cache.refresh()
        _, first = np.unique(id_keys(ids), return_index=True)
        first.sort()
        distinct = ids.take(pa.array(first))
        wanted = distinct.filter(pa.array(~self.cache.has(distinct)))
        for start in range(0, len(wanted), TEXTS):
            piece = wanted.slice(start, TEXTS)
            vectors = self._checked(self._encode(self._text(piece)), piece)
            self.cache.add(piece, vectors)
            self.encoded += len(piece)
        return len(wanted)

    def _checked(self, vectors: ArrayLike, ids: pa.Array) -> Floats:
        """Refuse what an encoder returned unless it is one vector for each text."""
        x = np.ascontiguousarray(vectors, np.float32)
        if x.ndim != 2 or len(x) != len(ids):
            raise DataError(f"the encoder got {len(ids)} texts and returned an array of shape {list(x.shape)}")
        if x.shape[1] != self.dim:
            dims = f"{x.shape[1]} dimensions, the map leads to {self.dim}"
            raise IncompatibleError(f"the encoder returned vectors of {dims}")
        if (bad := faulty(x)).any():
            fault = "texts got a vector that is zero, NaN or infinite; their ids"
            names = ids.filter(pa.array(bad)).to_pylist()
            raise BadRowsError("the encoder", fault, names, "Mend the texts or the model.")
        return x

    def add(self, vectors: str | Uri | Reader | Any, batch_size: int = 8192) -> int:
        """Copy true vectors from a store into the cache folder, and return how many it didn't have.

        Raises IncompatibleError for a store of another space or of the old model's vectors, BadRowsError for ids that
        the index doesn't have and for what can't be a vector.
        """
        if not isinstance(self.cache, Cache):
            raise UsageError("there is no cache folder to add to: name a new folder")
        known = np.sort(np.concatenate([np.empty(0, np.uint64), *map(id_keys, self.index.ids(1 << 18))]))
        added = 0
        with opened(vectors) as reader:
            self.require_new(reader)
            for batch in reader.read(batch_size):
                keys = id_keys(batch.ids)
                at = np.searchsorted(known, keys).clip(max=len(known) - 1)
                for bad, fault in (
                    (known[at] != keys, f"ids are not in {self.index.info.uri}"),
                    (faulty(batch.vectors), "vectors are zero, NaN or infinite"),
                ):
                    if bad.any():
                        names = batch.ids.filter(pa.array(bad)).to_pylist()
                        raise BadRowsError(reader.info.uri, fault, names, "Leave those rows out.")
                added += self.cache.add(batch.ids, batch.vectors)
        return added

    def close(self) -> None:
        """Close what this cascade opened."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _route(index: Reader, map: LinearMap | str | Path | None, f: LinearMap | None) -> tuple[LinearMap, Card]:
    """Return what made the index, map and filter in one, and a card for the space of true vectors."""
    require_filter(index.info, f)
    if map is not None:
        m = map if isinstance(map, LinearMap) else LinearMap.load(map)
        card = card_of(m, "document")
        return (m if f is None else compress(m, f)), card
    if f is None:
        raise UsageError("a cascade takes the map that made the index (--map), or its filter (--filter)")
    m = unmapped(recorded(f, index.info))
    own = card_of(m, "document")
    return m, replace(own, target=own.source)


def _require_space(store: Reader, dim: int, space: str) -> None:
    info = store.info
    if info.dim != dim:
        raise IncompatibleError(f"{info.uri} holds vectors of {info.dim} dimensions, the map leads to {dim}")
    if info.space is not None and info.space != space:
        raise IncompatibleError(
            f"{info.uri} is in the space {info.space!r}, the map leads to {space!r}: use the same model"
        )
