"""The verb `demo`: the whole job on the real data that ship inside the package."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import vecferry
from vecferry.batch import VectorBatch
from vecferry.errors import UsageError
from vecferry.store import StoreInfo, open_writer

OLD, NEW = "intfloat/multilingual-e5-small", "sentence-transformers/all-MiniLM-L6-v2"
PAIRS = 2500
GATE = "agreement@10>=0.35"
DATA = Path(str(files("vecferry") / "data"))


def write_store(uri: str, ids: pa.Array, vectors: pa.ChunkedArray, space: str, payload: pa.Table | None = None) -> None:
    """Write one side of the sample as a store of its own."""
    x = vectors.combine_chunks().flatten().to_numpy().reshape(len(vectors), -1).astype(np.float32)
    schema = None if payload is None else payload.schema
    info = StoreInfo(
        "",
        uri,
        len(x),
        x.shape[1],
        metric="ip",
        id_type=ids.type,
        payload=schema,
        space=space,
        index="Flat",
        provenance={"plan": uri},
    )
    with open_writer(uri, info) as writer:
        writer.write(VectorBatch(ids, np.ascontiguousarray(x), payload))
        with writer.staged():
            pass
        writer.commit()


def demo(out: Path, *, as_json: bool = False) -> None:
    """Migrate 4,500 WordNet definitions from multilingual-e5-small to all-MiniLM-L6-v2, from 2,500 pairs, into `out`.

    Leaves the old index, the sample, the map, the new index and report.json. Raises UsageError if `out` exists.
    """
    if out.exists():
        raise UsageError(f"{out} exists: delete it, or name another folder with --out")
    out.mkdir(parents=True)

    def say(text: str) -> None:
        click.echo(text, err=as_json)

    documents, queries = pq.read_table(DATA / "documents.parquet"), pq.read_table(DATA / "queries.parquet")
    ids, names = documents["id"].combine_chunks(), queries["id"].combine_chunks()
    old, new, truth = out / "old.faiss", out / "new.faiss", f"parquet:{out / 'truth'}"
    write_store(f"faiss:{old}", ids, documents["e5"], OLD)
    write_store(truth, ids, documents["minilm"], NEW)
    write_store(f"parquet:{out / 'queries-new'}", names, queries["minilm"], NEW)
    write_store(f"parquet:{out / 'queries-old'}", names, queries["e5"], OLD)
    (out / "qrels.tsv").write_bytes((DATA / "qrels.tsv").read_bytes())
    say(f"{old}: {len(ids):,} real texts encoded by {OLD}, the index in production")

    labels = out / "qrels.tsv"
    vecferry.sample(str(old), PAIRS, qrels=labels, output=out / "sample.parquet")
    drawn = pq.read_table(out / "sample.parquet")
    picked = documents.filter(pa.compute.is_in(documents["id"], drawn["id"]))
    write_store(f"parquet:{out / 'encoded'}", picked["id"].combine_chunks(), picked["minilm"], NEW)
    say(f"{out / 'encoded'}: {picked.num_rows:,} of them encoded by {NEW} too, the paired sample")

    m = vecferry.fit(
        str(old),
        f"parquet:{out / 'encoded'}",
        queries=f"parquet:{out / 'queries-new'}",
        source_queries=f"parquet:{out / 'queries-old'}",
        qrels=labels,
        sample=out / "sample.parquet",
        source_model=OLD,
        target_model=NEW,
    )
    m.save(out / "map")
    report = vecferry.migrate(str(old), str(new), out / "map", gate=GATE)
    assert isinstance(report, vecferry.Report)
    full = vecferry.check(str(new), map=out / "map", truth=truth)
    report.save(out / "report.json")
    say(f"{new}: translated, verified, gated and published\n")
    click.echo(json.dumps(report.to_json(), indent=2, ensure_ascii=False) if as_json else report.table())
    say(f"\nThe same index against all {len(ids):,} texts encoded by {NEW} (--truth):\n\n{full.table()}")
    say(f"\nIn {out}: map/, old.faiss, new.faiss, report.json. Next: vecferry inspect {new}")
