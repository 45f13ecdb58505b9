"""The verb `encode`: the vectors of a file of texts, into a store that says what space they are in.

Vectors that were made are kept in a hidden folder beside the output, by a hash of their text, until all are there. So
what was stopped goes on where it was, a text that stands twice is encoded once, and one that was changed, again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from vecferry.batch import VectorBatch, faulty, id_keys
from vecferry.cache import Cache
from vecferry.corpus import Corpus
from vecferry.encoders.contract import Encoder, Text
from vecferry.encoders.prompts import TextSide
from vecferry.errors import BadRowsError, DataError, IncompatibleError, StoppedError, UsageError
from vecferry.pairs import BadRows
from vecferry.store import StoreInfo, Uri, open_writer

TEXTS = 256
"""Texts, or one batch if that is more, that are encoded and made durable together: what a crash costs at most."""
PIECE = 4096
"""Rows that are read together where nothing is encoded."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Say what was encoded.

    rows      in the output
    encoded   texts that a model was run on, now
    kept      different texts whose vectors an earlier run, which was stopped, had left
    skipped   rows without a text that were left out
    space     the identity of the encoder
    """

    output: str
    rows: int
    encoded: int
    kept: int
    skipped: int
    dim: int
    space: str
    side: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)

    def table(self) -> str:
        """Write the numbers for people."""
        lines = [
            f"{self.output}: {self.rows:,} vectors of {self.dim} dimensions, a {self.side} each",
            f"space     {self.space}",
            f"encoded   {self.encoded:,} texts in {self.seconds:,.1f} s",
        ]
        if self.kept:
            lines.append(f"kept      {self.kept:,} texts that were encoded before")
        if self.skipped:
            lines.append(f"skipped   {self.skipped:,} rows without a text")
        return "\n".join(lines)


@dataclass(slots=True)
class _Survey:
    """Hold what a first look over all texts finds: rows, their type of ids, and an identity of ids and texts."""

    rows: int = 0
    skipped: int = 0
    id_type: Any = None
    digest: Any = field(default_factory=hashlib.sha256)


def encode(
    texts: str | Path,
    encoder: Encoder,
    output: str | Path,
    *,
    side: TextSide = "document",
    id: str | None = None,
    text: str | None = None,
    batch_size: int = 32,
    bad_rows: str = "fail",
    progress: bool = False,
) -> Encoded:
    """Encode a file of texts into a new Parquet store of their ids and vectors, whose space is the encoder's identity.

    texts   Parquet, JSON lines or one text a line; `id` and `text` name its columns where they have unusual names
    side    whose prompt the texts are given: a query's or a document's
    bad_rows   "skip" leaves out rows without a text

    In memory are some 40 bytes for each text, and a few batches. Raises UsageError for an output that exists,
    BadRowsError for rows without a text and ids that stand more than once, StoppedError where Ctrl-C, SIGTERM, a full
    disk or a server that is gone ended it: the same call goes on.
    """
    begun = time.monotonic()
    path = _new(output)
    rule = BadRows.of(bad_rows)
    corpus = Corpus(Path(texts), id, text)
    survey = _survey(corpus, rule)
    work = path.with_name(f".{path.name}.encoding")
    try:
        cache = Cache(work, f"{encoder.identity} as {side}", encoder.dim, pa.int64())
    except IncompatibleError as error:
        raise UsageError(
            f"{work} holds what an unfinished `encode` with another model, prompt or side made for {path}: repeat that "
            "command, or delete the folder"
        ) from error
    kept = len(cache)
    try:
        done = _fill(corpus, encoder, cache, side, survey.rows, batch_size, progress)
        _publish(corpus, encoder, cache, side, survey, path)
    except (KeyboardInterrupt, OSError) as error:
        why = "stopped" if isinstance(error, KeyboardInterrupt) else f"stopped: {error}"
        raise StoppedError(
            f"{why}; {len(cache):,} texts are encoded and kept in {work}: the same command goes on from there"
        ) from error
    shutil.rmtree(work, ignore_errors=True)
    return Encoded(
        output=str(output),
        rows=survey.rows,
        encoded=done,
        kept=kept,
        skipped=survey.skipped,
        dim=encoder.dim,
        space=encoder.identity,
        side=side,
        seconds=round(time.monotonic() - begun, 3),
    )


def _new(output: str | Path) -> Path:
    """Return where the output is to be; refuse another kind of store, and what is there already."""
    address = Uri.parse(str(output)).as_new("parquet")
    if address.kind != "parquet" or address.options:
        raise UsageError(f"{output}: encode writes a folder of Parquet files, named by its path alone")
    path = Path(address.path)
    if path.exists():
        raise UsageError(f"{path} exists: choose another name")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder: make it first")
    return path


def _is_text(text: Any) -> bool:
    """Say whether there is something to encode."""
    wordings = [text] if isinstance(text, str) else text or []
    return bool(wordings) and all(wording is not None and wording.strip() for wording in wordings)


def _key(text: Text) -> int:
    """Hash a text, or its wordings, to 64 bits."""
    whole = text.encode() if isinstance(text, str) else json.dumps(list(text)).encode()
    kind = b"one" if isinstance(text, str) else b"several"
    return int.from_bytes(hashlib.blake2b(whole, digest_size=8, person=kind).digest(), "little", signed=True)


def _usable(corpus: Corpus, size: int = PIECE) -> Iterator[tuple[pa.Array, list[Text]]]:
    """Yield ids and texts of the rows that have one."""
    for ids, texts in corpus.read(size):
        good = [i for i, text in enumerate(texts) if _is_text(text)]
        yield ids.take(pa.array(good, pa.int64())), [texts[i] for i in good]


def _survey(corpus: Corpus, rule: BadRows) -> _Survey:
    """Look at all rows before any is encoded; raise for what would make the output useless."""
    found, keys = _Survey(), []
    for ids, texts in corpus.read(PIECE):
        good = np.array([_is_text(text) for text in texts], np.bool_)
        rule.drop(~good, ids, str(corpus.path), "rows have no text, or a blank one", "Give them one")
        found.id_type = ids.type
        keys.append(id_keys(ids)[good])
        hashes = np.array([_key(texts[i]) for i in np.flatnonzero(good)], np.int64)
        found.digest.update(keys[-1].tobytes() + hashes.tobytes())
        found.rows += len(hashes)
        found.skipped += len(texts) - len(hashes)
    if not found.rows:
        raise DataError(f"{corpus.path} has no texts")
    every = np.concatenate(keys)
    order = np.argsort(every, kind="stable")
    again = np.sort(order[1:][every[order[1:]] == every[order[:-1]]])
    if len(again):
        names = pa.concat_arrays([ids for ids, _ in _usable(corpus)]).take(pa.array(again)).to_pylist()
        raise BadRowsError(str(corpus.path), "ids stand more than once", names, "Make ids unique: rows join by id.")
    return found


def _fill(
    corpus: Corpus, encoder: Encoder, cache: Cache, side: TextSide, rows: int, batch_size: int, progress: bool
) -> int:
    """Encode the texts whose vectors aren't there yet, and return how many."""
    done = 0
    with tqdm(total=rows, unit="texts", disable=not progress) as bar:
        for ids, texts in _usable(corpus, max(TEXTS, batch_size)):
            keys, first = np.unique(np.array([_key(text) for text in texts], np.int64), return_index=True)
            new = np.sort(first[~cache.has(pa.array(keys))])
            if len(new):
                wanted = [texts[i] for i in new]
                vectors = np.ascontiguousarray(encoder.encode(wanted, side=side, batch_size=batch_size), np.float32)
                if vectors.shape != (len(new), encoder.dim):
                    raise DataError(
                        f"{encoder.name} got {len(new)} texts and returned {list(vectors.shape)}, its vectors have "
                        f"{encoder.dim} dimensions"
                    )
                if (bad := faulty(vectors)).any():
                    names = ids.take(pa.array(new[bad])).to_pylist()
                    fault = "texts got a vector that is zero, NaN or infinite; their ids"
                    raise BadRowsError(encoder.name, fault, names, "Mend the texts or the model.")
                cache.add(pa.array([_key(text) for text in wanted], pa.int64()), vectors)
                done += len(new)
            bar.update(len(texts))
    return done


def _publish(corpus: Corpus, encoder: Encoder, cache: Cache, side: TextSide, survey: _Survey, path: Path) -> None:
    """Write ids and vectors in the order of the texts into a store, and publish it whole."""
    plan = hashlib.sha256(f"{encoder.identity} {side} {survey.digest.hexdigest()}".encode()).hexdigest()
    how = {name: getattr(encoder, name) for name in ("name", "pooling", "normalize", "max_length", "revision")}
    info = StoreInfo(
        kind="parquet",
        uri=str(path),
        count=survey.rows,
        dim=encoder.dim,
        metric="cosine" if encoder.normalize else None,
        id_type=survey.id_type,
        space=encoder.identity,
        provenance={"plan": plan, "encoder": how | {"prompt": asdict(encoder.prompt), "side": side}},
    )
    rows = 0
    with open_writer(Uri("parquet", str(path)), info, resume=True) as writer:
        durable = writer.progress.rows
        try:
            for ids, texts in _usable(corpus):
                rows += len(texts)
                if (new := min(len(texts), rows - durable)) > 0:
                    keys = pa.array([_key(text) for text in texts[-new:]], pa.int64())
                    _require_same(corpus, bool(cache.has(keys).all()))
                    writer.write(VectorBatch(ids[-new:], cache.take(keys), cursor=rows))
            _require_same(corpus, rows == survey.rows)
        except DataError:
            writer.abort()
            raise
        with writer.staged():
            pass
        writer.commit()


def _require_same(corpus: Corpus, same: bool) -> None:
    if not same:
        raise DataError(f"{corpus.path} was changed while it was read: the same command encodes what is new")
