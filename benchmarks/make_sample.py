"""Make the sample that ships inside the package from the full paired data (see the project's data README).

    python benchmarks/make_sample.py --data ../shared/data

500 queries, the documents relevant to them, and other documents up to 4,500, all in the data's own (random) order;
the few ids that the data give to an adjective and to an adverb are left out, since an id must name one thing;
two encoders' vectors as float16, byte-stream-split so that they compress.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENTS, QUERIES = 4500, 500
MODELS = {"e5": "intfloat/multilingual-e5-small", "minilm": "sentence-transformers/all-MiniLM-L6-v2"}
PARTS = {"n": 1, "v": 2, "a": 3, "r": 4}  # WordNet's own numbers of the parts of speech
OUT = Path(__file__).parents[1] / "migrate" / "vecferry" / "data"


def number(synset: str) -> int:
    """Turn a WordNet id (n00123456) into an integer, since FAISS holds no other ids."""
    return PARTS[synset[0]] * 10**8 + int(synset[1:])


def vectors(path: Path, rows: np.ndarray) -> pa.Array:
    x = np.load(path)[rows]
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(x).reshape(-1)), x.shape[1])


def write(table: pa.Table, path: Path) -> None:
    split = [f"{name}.list.element" for name in MODELS]
    plain = [c for c in table.column_names if c not in MODELS]
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=19,
        use_dictionary=plain,
        use_byte_stream_split=split,
        write_statistics=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    texts = pq.read_table(data / "texts.parquet")
    queries = pq.read_table(data / "queries.parquet")
    labels = dict(line.split("\t")[:2] for line in (data / "qrels.tsv").read_text().splitlines())
    ids, names = texts["id"].to_pylist(), queries["id"].to_pylist()
    copies = Counter(ids)
    asked_rows = np.array([i for i, q in enumerate(names) if copies[labels[q]] == 1][:QUERIES])
    queries = queries.take(pa.array(asked_rows))
    relevant = {labels[q] for q in queries["id"].to_pylist()}
    free = [i for i, name in enumerate(ids) if name not in relevant and copies[name] == 1]
    others = free[: DOCUMENTS - len(relevant)]
    rows = np.array(sorted([i for i, name in enumerate(ids) if name in relevant] + others))

    columns = {"id": pa.array([number(ids[i]) for i in rows], pa.int64())}
    columns |= {name: texts[name].take(pa.array(rows)) for name in ("text", "pos", "lexfile")}
    columns |= {m: vectors(data / f"{m}_docs.npy", rows) for m in MODELS}
    write(pa.table(columns), OUT / "documents.parquet")
    asked = {name: queries[name] for name in ("id", "text")}
    asked |= {m: vectors(data / f"{m}_queries.npy", asked_rows) for m in MODELS}
    write(pa.table(asked), OUT / "queries.parquet")
    lines = [f"{q}\t{number(labels[q])}\t1\n" for q in queries["id"].to_pylist()]
    (OUT / "qrels.tsv").write_text("".join(lines))
    for path in sorted(OUT.iterdir()):
        print(f"{path.name:24} {path.stat().st_size:>10,} bytes")


if __name__ == "__main__":
    main()
