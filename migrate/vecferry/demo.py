"""The verb `demo`: the whole job on the real data that ship inside the package."""

from __future__ import annotations

import json
import textwrap
from importlib.resources import files
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import vecferry
from vecferry.batch import VectorBatch
from vecferry.errors import UsageError
from vecferry.measured import AS_INDEXED, CASCADE, NAIVE_SWAP, RE_EMBEDDED, STATUS_QUO, Evaluation
from vecferry.store import StoreInfo, open_writer

OLD, NEW = "intfloat/multilingual-e5-small", "sentence-transformers/all-MiniLM-L6-v2"
PAIRS = 2500
GATE = "agreement@10>=0.35"
K = 10
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
    say(f"{new}: translated, verified and measured\n\n{meaning(report, full)}\n")
    click.echo(json.dumps(report.to_json(), indent=2, ensure_ascii=False) if as_json else report.table())
    say(f"\nThe same index against all {len(ids):,} texts encoded by {NEW} (--truth):\n\n{full.table()}")
    say(f"\nIn {out}: map/, old.faiss, new.faiss, report.json. Next: vecferry inspect {new}")


def meaning(report: vecferry.Report, full: vecferry.Report) -> str:
    """Say in words what became of the gate, what the numbers mean, and what they are at full size."""
    decision, measured, whole = report.decision, report.evaluation, full.evaluation
    assert decision is not None
    assert measured is not None
    assert whole is not None

    def value(row: str, metric: str, evaluation: Evaluation = measured) -> float:
        cell = evaluation.cell(row, metric, K)
        assert cell is not None
        assert cell.value is not None
        return cell.value

    rows = full.facts["rows"]
    told = measured.cell(AS_INDEXED, "agreement", K, rows)
    assert told is not None
    assert told.value is not None
    assert told.low is not None
    assert told.high is not None
    known = {row: value(row, "ndcg") for row in (STATUS_QUO, AS_INDEXED, CASCADE, RE_EMBEDDED)}
    went = "is published" if report.passed else "is not published"
    found = {row: f"{K * value(row, 'agreement'):.1f}" for row in (STATUS_QUO, NAIVE_SWAP, AS_INDEXED)}
    lines = [
        f"{decision.outcome.upper()}: gate {decision.gate}; {report.facts['destination']} {went}.",
        f"Of the {K} documents that true re-embedding finds for a query, the translated index finds "
        f"{found[AS_INDEXED]} (among the held-out documents), the old index with old queries {found[STATUS_QUO]}, and "
        f"the old index with the new model's queries {found[NAIVE_SWAP]}: changing the model without migrating.",
        f"By relevance labels (nDCG@{K}) the old index has {known[STATUS_QUO]:.3f}, the translated one "
        f"{known[AS_INDEXED]:.3f}, a cascade {known[CASCADE]:.3f} (it re-ranks with true vectors what the translated "
        f"index finds), and re-embedding everything {known[RE_EMBEDDED]:.3f}. Translation carries the old model's "
        "information, and no more.",
        f"A number is for a corpus of its size: for all {rows:,} documents agreement@{K} was foretold, "
        f"{told.value:.3f} [{told.low:.3f}, {told.high:.3f}], by which the gate decided. Measured against re-embedding "
        f"all of them it is {value(AS_INDEXED, 'agreement', whole):.3f}. Labels are harder to meet there too: "
        f"nDCG@{K} is {value(AS_INDEXED, 'ndcg', whole):.3f} translated, {value(RE_EMBEDDED, 'ndcg', whole):.3f} "
        "re-embedded.",
    ]
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines)
