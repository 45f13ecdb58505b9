"""What is fuzzed: for each kind of file valid ones, how they are read, and which command lines read them."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vecferry
from fuzzing.mutate import mutate
from vecferry.baseline import compare, load_baseline
from vecferry.batch import VectorBatch
from vecferry.cache import Cache
from vecferry.errors import StoppedError
from vecferry.holdout import Holdout, Qrels, holdout_of
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapcard import describe
from vecferry.mapfile import CARD, TENSORS
from vecferry.store import open_reader

ROWS, D, OUT = 90, 8, 6
KNOWN = [
    "IDMap2,Flat",
    "HNSW4,Flat",
    "IVF4,Flat",
    "IVF4,SQ8",
    "IVF4,PQ4x4",
    "PCA4,SQfp16",
    "OPQ4,PQ4x4",
    "IVF4,PQ4x4fs",
]
PROBED = ["RQ2x4", "IVF4,RQ2x4"]
"""Types of which no parser of ours vouches for the sizes, so that a process of its own reads them first."""

Commands = list[list[str]]


@dataclass(frozen=True)
class Kind:
    """Hold how a kind is made, damaged, and read.

    make      write valid variants, a folder each
    harm      damage one file of a variant's copy
    read      read it, and return whatever must not change unnoticed
    exact     say whether a checksum covers what is read from a damaged variant: it comes out as it was, or not at all
    commands  command lines that read it
    """

    make: Callable[[Path], None]
    harm: Callable[[Path, random.Random], None]
    read: Callable[[Path], bytes]
    exact: Callable[[Path], bool]
    commands: Callable[[Path], Commands]


def harm(form: str, pattern: str, folder: Path, luck: random.Random) -> None:
    """Damage one of the files that match a pattern."""
    path = luck.choice(sorted(folder.glob(pattern)))
    path.write_bytes(mutate(path.read_bytes(), luck, form=form))


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def vectors() -> np.ndarray:
    return rng().standard_normal((ROWS, D), dtype=np.float32)


def ids() -> np.ndarray:
    return rng().permutation(ROWS) + (1 << 41)


def a_map(folder: Path) -> LinearMap:
    """Write a map with a hold-out of documents, queries and labels."""
    x = rng().standard_normal((60, D), dtype=np.float32)
    y = np.ascontiguousarray(x[:, :OUT])
    q = rng().standard_normal((40, OUT), dtype=np.float32)
    names = pa.array([f"q{i}" for i in range(40)])
    labels = Qrels(np.arange(40), np.arange(40), np.ones(40, np.int64))
    keys = np.arange(1, 50, dtype=np.uint64)
    held = Holdout(pa.array(ids()[:60]), x, y, names, q, None, labels, keys, {"count": ROWS, "kind": "npy"})
    card = Card(Side(D, "old"), Side(OUT, "new"), "ridge", {"lambda": 0.1}, pairs=300, warnings=("few pairs",))
    m = LinearMap(np.eye(D, OUT), rng().standard_normal(OUT), post="l2", card=card, holdout=held)
    m.save(folder)
    return LinearMap.load(folder)


def rows_of(path: Path | str) -> bytes:
    """Read a store in every way there is; return its rows, which must agree with each other."""
    digest = hashlib.sha256()
    with open_reader(str(path)) as reader:
        info = reader.info
        batches = list(reader.read(32))
        found = sum(map(len, batches))
        told = list(reader.ids(1000))
        assert info.count == found == sum(map(len, told)), "the counts of info, read and ids differ"
        names = [i for batch in batches for i in batch.ids.to_pylist()]
        assert names == [i for piece in told for i in piece.to_pylist()], "read and ids give other ids"
        for batch in batches:
            assert batch.vectors.shape == (len(batch), info.dim)
            digest.update(repr(batch.ids.to_pylist()).encode() + batch.vectors.tobytes())
            digest.update(repr(batch.payload.to_pylist() if batch.payload is not None else None).encode())
        some = told[0].unique()[:5] if told else pa.array([], info.id_type or pa.int64())
        reader.take(some)
        if info.kind == "faiss" and found:
            reader.search(np.ones((3, info.dim), np.float32), 5)
    return digest.digest() + f"{info.metric} {info.space} {info.id_type} {info.provenance.get('plan')}".encode()


def make_faiss(types: list[str], folder: Path) -> None:
    import faiss

    for name in types:
        faiss.omp_set_num_threads(1)
        index = faiss.index_factory(D, name)
        index.train(rng().standard_normal((1000, D), dtype=np.float32))
        index.add_with_ids(vectors(), ids()) if name.startswith(("ID", "IVF")) else index.add(vectors())
        (folder / name).mkdir()
        faiss.write_index(index, str(folder / name / "x.faiss"))


def make_parquet(folder: Path) -> None:
    x = vectors()
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), D)
    texts = pa.array([f"text {i % 7}" for i in range(ROWS)])
    ragged = pa.array([v.tolist() for v in x.astype(np.float64)])
    nested = pa.StructArray.from_arrays([lists, texts], ["v", "t"])
    payload = {"s": texts.dictionary_encode(), "n": pa.array([None, {"a": [1, 2]}] * (ROWS // 2))}
    for name, table, options in [
        ("fixed", {"id": ids(), "emb": lists}, {"compression": "none", "use_dictionary": False}),
        ("lists", {"id": texts, "emb": ragged} | payload, {"compression": "zstd", "row_group_size": 40}),
        ("nested", {"id": ids(), "emb": nested}, {"compression": "snappy", "data_page_version": "2.0"}),
        ("checked", {"id": ids(), "emb": lists}, {"write_page_checksum": True}),
    ]:
        (folder / name).mkdir()
        pq.write_table(pa.table(table), folder / name / "x.parquet", **options)


def make_npy(folder: Path) -> None:
    x = vectors()
    for name, values, keys in [
        ("plain", x, None),
        ("fortran", np.asfortranarray(x.astype(">f8")), ids()),
        ("half", x.astype(np.float16), np.array([f"é{i}" for i in range(ROWS)])),
    ]:
        (folder / name).mkdir()
        np.save(folder / name / "vectors.npy", values)
        if keys is not None:
            np.save(folder / name / "ids.npy", keys)


def make_map(folder: Path) -> None:
    a_map(folder / "map")


def harm_tensors(folder: Path, luck: random.Random) -> None:
    """Damage the tensors; a forger also writes their new hash into the card."""
    harm("safetensors", TENSORS, folder, luck)
    if luck.random() < 0.7:
        card = json.loads((folder / CARD).read_bytes())
        card["sha256"] = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
        (folder / CARD).write_text(json.dumps(card))


def map_of(folder: Path, *, forged: bool = False) -> bytes:
    m = LinearMap.load(folder)
    describe(m).encode()
    mapped = m.apply(vectors())
    assert mapped.shape == (ROWS, OUT)
    assert np.isfinite(mapped).all()
    assert m.card is not None
    sides = repr((m.card.source, m.card.target, m.pre, m.post, m.card.metric, m.card.direction))
    return b"" if forged else mapped.tobytes() + sides.encode()


def holdout_in(folder: Path) -> bytes:
    held = holdout_of(LinearMap.load(folder))
    parts = (held.source, held.target, held.queries, held.fit_keys)
    return b"".join(p.tobytes() for p in parts if p is not None) + repr(held.ids.to_pylist()).encode()


def make_manifests(folder: Path) -> None:
    """Publish a store of each kind by a migration, so that what is recorded of it stands beside it; and a cache."""
    np.save(folder / "source.npy", vectors())
    m = a_map(folder / "map")
    for name in ("new.parquet", "new.npy", "new.faiss"):
        (folder / name[4:]).mkdir()
        vecferry.migrate(folder / "source.npy", f"{folder / name[4:] / name}", m)
    (folder / "cache").mkdir()
    assert m.card is not None
    Cache(folder / "cache" / "new.cache", m.card.space, OUT, pa.int64()).add(pa.array(ids()), m.apply(vectors()))
    (folder / "source.npy").unlink()
    shutil.rmtree(folder / "map")


def harm_manifest(folder: Path, luck: random.Random) -> None:
    harm("json", "**/*.json", folder, luck)


def recorded(folder: Path) -> bytes:
    """Read rows, ids and whatever is recorded; a sidecar that is damaged is ignored, and nothing else."""
    (path,) = [p for p in folder.glob("new.*") if p.suffix != ".json"]
    if path.suffix == ".cache":
        cache = Cache(path, "new", OUT, pa.int64())
        return cache.take(pa.array(ids())).tobytes()
    if path.suffix == ".faiss":
        rows_of(path)
        return b""
    rows = rows_of(path).partition(b"None")[0]
    return rows[:32]


def make_cache(folder: Path) -> None:
    cache = Cache(folder / "cache" / "new.cache", "new", OUT, pa.int64())
    for some in (slice(0, 50), slice(50, ROWS)):
        cache.add(pa.array(ids()[some]), np.ascontiguousarray(vectors()[some, :OUT]))


def cached(folder: Path) -> bytes:
    """Read the vectors that a cache says it has; they are right, or their page's checksum is not."""
    cache = Cache(folder / "new.cache", "new", OUT, pa.int64())
    known = cache.has(pa.array(ids()))
    return cache.take(pa.array(ids()[known])).tobytes() if known.all() else b"fewer"


def cache_pages_only(folder: Path) -> bool:
    """Say whether all parts have their own footers, which no checksum covers."""
    sound = Path((folder / "origin").read_text()) / "cache" / "new.cache"
    return all(footer(p) == footer(sound / p.name) for p in (folder / "new.cache").glob("*.parquet"))


def warming(folder: Path) -> Commands:
    return [["inspect", f"parquet:{folder / 'new.cache'}", "--scan"]]


class Stopping:
    """Read a store up to a row, where somebody presses Ctrl-C."""

    def __init__(self, reader: Any, row: int) -> None:
        self.reader, self.row = reader, row
        self.info = reader.info

    def read(self, batch_size: int, after: Any = None) -> Iterator[VectorBatch]:
        for batch in self.reader.read(batch_size, after):
            if batch.cursor > self.row:
                raise KeyboardInterrupt
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)


def small_stages(patch: pytest.MonkeyPatch) -> None:
    """Let every writer make its stage durable after some rows, so that a stage of few rows has all its parts."""
    import vecferry_adapters._faiss_writer as faiss_writer
    import vecferry_adapters._numpy_writer as numpy_writer
    import vecferry_adapters._parquet_writer as parquet_writer

    patch.setattr(faiss_writer, "CHECKPOINT", 1)
    patch.setattr(numpy_writer, "SYNC_BYTES", 1)
    patch.setattr(parquet_writer, "GROUP_ROWS", 8)
    patch.setattr(parquet_writer, "PART_GROUPS", 2)


def make_stages(folder: Path) -> None:
    table = {"id": ids(), "emb": [v.tolist() for v in vectors()]}
    pq.write_table(pa.table(table), folder / "source.parquet")
    m = a_map(folder / "map")
    for name in ("new.parquet", "new.npy", "new.faiss"):
        (folder / name[4:]).mkdir()
        with pytest.MonkeyPatch.context() as patch, open_reader(str(folder / "source.parquet")) as reader:
            small_stages(patch)  # other tests follow in this process
            try:
                vecferry.migrate(Stopping(reader, 70), folder / name[4:] / name, m, batch_size=10)
            except StoppedError:
                continue
        raise AssertionError("the migration wasn't stopped")


def resumed(folder: Path) -> bytes:
    """Continue the migration; return the rows that come out of it."""
    valid = Path((folder / "origin").read_text())
    target = folder / f"new.{folder.name.partition('-')[0]}"
    with pytest.MonkeyPatch.context() as patch:
        small_stages(patch)
        vecferry.migrate(valid / "source.parquet", target, valid / "map", resume=True, batch_size=10)
    return rows_of(target)[:32]


def harm_stage(folder: Path, luck: random.Random) -> None:
    """Damage a file of the stage other than its state."""
    files = [p for p in folder.glob(".new.*.vecferry/**/*") if p.is_file() and p.name not in ("state.json", "lock")]
    path = luck.choice(sorted(files))
    path.write_bytes(mutate(path.read_bytes(), luck, form="parquet" if ".parquet" in path.name else "binary"))


def resumed_nearly(folder: Path) -> bytes:
    """Continue the migration; what comes out of it must be right as far as verification promises."""
    resumed(folder)
    valid = Path((folder / "origin").read_text())
    with open_reader(str(next(p for p in folder.glob("new.*") if p.suffix != ".json"))) as reader:
        batch = reader.take(pa.array(ids()))
    wanted = LinearMap.load(valid / "map").apply(vectors())
    assert np.linalg.norm(batch.vectors - wanted, axis=1).max() <= 1e-4
    return b""


def make_report(folder: Path) -> None:
    (folder / "report").mkdir()
    m = a_map(folder / "map")
    np.save(folder / "source.npy", vectors())
    np.save(folder / "ids.npy", ids())
    report = vecferry.migrate(f"npy:{folder}/source.npy?ids={folder}/ids.npy", folder / "index.faiss", m)
    assert isinstance(report, vecferry.Report)
    checked = vecferry.check(folder / "index.faiss", map=m)
    checked.save(folder / "report" / "report.json")


def compared(folder: Path) -> bytes:
    """Load a report as a baseline, show it, and compare with the sound one."""
    sound = vecferry.Report.load(Path((folder / "origin").read_text()) / "report" / "report.json")
    report = load_baseline(folder / "report.json", 0.01)
    json.dumps(report.to_json(), allow_nan=False).encode()
    report.table().encode()
    assert sound.evaluation is not None
    replace(sound, decision=compare(sound.evaluation, report, None)).table().encode()
    return b""


def inspecting(pattern: str, folder: Path) -> Commands:
    path = str(sorted(folder.glob(pattern))[0])
    origin = (folder / "origin").read_text()
    return [
        ["inspect", path],
        ["inspect", path, "--scan", "--json"],
        ["migrate", path, str(folder / "out.parquet"), "--map", f"{origin}/../a-map", "--allow-lossy"],
    ]


def with_map(folder: Path) -> Commands:
    source = (folder / "origin").read_text() + "/../x.npy"
    return [
        ["inspect", str(folder)],
        ["migrate", source, str(folder / "out.faiss"), "--map", str(folder), "--gate", "doc-agreement@10>=0.01"],
        ["transform", source, "--map", str(folder), "-o", str(folder / "out.npy")],
    ]


def resuming(folder: Path) -> Commands:
    small_stages(pytest.MonkeyPatch())  # for the rest of this child, which runs the commands
    valid = (folder / "origin").read_text()
    target = folder / f"new.{folder.name.partition('-')[0]}"
    return [["migrate", f"{valid}/source.parquet", str(target), "--map", f"{valid}/map", "--resume"]]


def checking(folder: Path) -> Commands:
    valid = (folder / "origin").read_text()
    report = str(folder / "report.json")
    return [["check", f"{valid}/index.faiss", "--map", f"{valid}/map", "--baseline", report, "--json"]]


def always(folder: Path) -> bool:
    return True


def never(folder: Path) -> bool:
    return False


def footer(path: Path) -> bytes:
    data = path.read_bytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") :]


def pages_only(folder: Path) -> bool:
    """Say whether a file with checksums in its pages has its own footer: that isn't covered by one."""
    sound = Path((folder / "origin").read_text()) / "checked" / "x.parquet"
    return folder.name.startswith("checked") and footer(folder / "x.parquet") == footer(sound)


def parquet_in(folder: Path) -> bytes:
    return rows_of(f"{folder / 'x.parquet'}" + ("?vector=emb.v" if folder.name.startswith("nested") else ""))


def faiss_in(folder: Path) -> bytes:
    return rows_of(folder / "x.faiss")


def npy_in(folder: Path) -> bytes:
    return rows_of(f"npy:{folder}")


FAISS = {"harm": partial(harm, "binary", "x.faiss"), "read": faiss_in, "exact": never}
STAGE = {"make": make_stages, "commands": resuming}
MAP = {"make": make_map, "exact": always, "commands": with_map}
KINDS: dict[str, Kind] = {
    "faiss": Kind(make=partial(make_faiss, KNOWN), commands=partial(inspecting, "x.faiss"), **FAISS),
    "faiss-probed": Kind(make=partial(make_faiss, PROBED), commands=partial(inspecting, "x.faiss"), **FAISS),
    "parquet": Kind(
        make_parquet, partial(harm, "parquet", "x.parquet"), parquet_in, pages_only, partial(inspecting, "x.parquet")
    ),
    "npy": Kind(make_npy, partial(harm, "binary", "*.npy"), npy_in, never, partial(inspecting, "vectors.npy")),
    "map": Kind(harm=harm_tensors, read=partial(map_of, forged=True), **MAP),
    "card": Kind(harm=partial(harm, "json", CARD), read=map_of, **MAP),
    "holdout": Kind(harm=partial(harm, "parquet", "holdout.parquet"), read=holdout_in, **MAP),
    "manifest": Kind(make_manifests, harm_manifest, recorded, always, partial(inspecting, "new.*")),
    "cache": Kind(make_cache, partial(harm, "parquet", "new.cache/*.parquet"), cached, cache_pages_only, warming),
    "checkpoint": Kind(harm=partial(harm, "json", ".new.*.vecferry/state.json"), read=resumed, exact=always, **STAGE),
    "stage": Kind(harm=harm_stage, read=resumed_nearly, exact=never, **STAGE),
    "report": Kind(make_report, partial(harm, "json", "report.json"), compared, never, checking),
}
