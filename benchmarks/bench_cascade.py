"""Measure what a cascade gives for each text encoded, from none (translation) to all (re-embedding).

    python benchmarks/bench_cascade.py [--data ../shared/data]

Without --data: the sample inside the package, 2,000 of its documents searched, the map fitted on the other 2,500. With
it: 10,000 documents searched, fitted on 5,000 others, asked with queries that no map was fitted with.

Queries come as traffic does, some often: a Zipf distribution over the distinct queries. A first stream of them is the
log; what is measured is a second stream. Texts are spent on the documents that `vecferry.warm` finds the log to need,
or on those that came first in the log (on demand: each query's candidates are encoded when it is asked, until the
budget ends), or at random; then the second stream is answered from the cache alone. "Encoding" a text is looking its
true vector up, and counting it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import vecferry
from vecferry.holdout import Qrels
from vecferry.linear import normalize
from vecferry.recall import Truth, ndcg, topk

RESULTS = Path(__file__).parent / "results" / "bench_cascade.json"
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
CANDIDATES = (20, 50, 100, 200, 500)
K = 10
PAIRS = {
    "sample": [("e5", "minilm"), ("minilm", "e5")],
    "data": [("e5", "minilm"), ("minilm", "e5"), ("smollm2_eol", "minilm"), ("minilm", "smollm2_eol")],
}


@dataclass(frozen=True)
class Task:
    """Hold one pair of models: rows to fit on, documents to search, queries to ask, and the label of each query."""

    fit: tuple[np.ndarray, np.ndarray]
    documents: tuple[np.ndarray, np.ndarray]
    queries: tuple[np.ndarray, np.ndarray]
    labels: np.ndarray

    @property
    def qrels(self) -> Qrels:
        n = len(self.labels)
        return Qrels(np.arange(n), self.labels, np.ones(n, np.int64))


def unit(x: np.ndarray) -> np.ndarray:
    y = np.ascontiguousarray(x, np.float32)
    normalize(y)
    return y


def from_sample(old: str, new: str) -> Task:
    folder = Path(str(files("vecferry") / "data"))
    documents, queries = pq.read_table(folder / "documents.parquet"), pq.read_table(folder / "queries.parquet")
    place = {i: n for n, i in enumerate(documents["id"].to_pylist())}
    relevant = dict(line.split("\t")[:2] for line in (folder / "qrels.tsv").read_text().splitlines())
    wanted = np.array([place[int(relevant[q])] for q in queries["id"].to_pylist()])
    others = np.setdiff1d(np.arange(len(place)), wanted)
    searched = np.concatenate([np.unique(wanted), others])[:2000]
    rest = np.setdiff1d(others, searched)

    def side(table: pa.Table, name: str) -> np.ndarray:
        return unit(table[name].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1))

    x, y = side(documents, old), side(documents, new)
    labels = np.searchsorted(searched[: len(np.unique(wanted))], wanted)
    return Task((x[rest], y[rest]), (x[searched], y[searched]), (side(queries, old), side(queries, new)), labels)


def from_data(folder: Path, old: str, new: str) -> Task:
    x, y = (unit(np.load(folder / f"{name}_docs.npy")) for name in (old, new))
    ids = pq.read_table(folder / "texts.parquet")["id"].to_pylist()
    place = {i: n for n, i in reversed(list(enumerate(ids[:10_000])))}
    labels = np.array([place[line.split("\t")[1]] for line in (folder / "qrels.tsv").read_text().splitlines()])
    asked = np.random.default_rng(0).permutation(len(labels))[1000:]
    queries = tuple(unit(np.load(folder / f"{name}_queries.npy"))[asked] for name in (old, new))
    return Task((x[10_000:15_000], y[10_000:15_000]), (x[:10_000], y[:10_000]), queries, labels[asked])


class Traffic:
    """Draw two streams of queries from one Zipf distribution, and measure what the second one gets."""

    def __init__(self, task: Task, length: int, exponent: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        n = len(task.labels)
        weights = 1 / (1 + rng.permutation(n)) ** exponent
        self.log, later = rng.choice(n, (2, length), p=weights / weights.sum())
        self.asked, self.times = np.unique(later, return_counts=True)
        self.new = ~np.isin(self.asked, self.log)
        self.task = task
        self.truth = Truth.of(task.queries[1][self.asked], task.documents[1], K, "cosine")
        self.first = self.log[np.sort(np.unique(self.log, return_index=True)[1])]

    def measure(self, found: np.ndarray) -> dict[str, float]:
        """Return means over the second stream, and over its queries that the log doesn't have."""
        everything = np.full((len(self.task.labels), K), -1, np.int64)
        everything[self.asked] = found[:, :K]
        gains = ndcg(everything, self.task.qrels, K)[self.asked]
        right = self.truth.agreement(found, K)
        new = np.average(right[self.new], weights=self.times[self.new]) if self.new.any() else np.nan
        return {
            "agreement@10": float(np.average(right, weights=self.times)),
            "ndcg@10": float(np.average(gains, weights=self.times)),
            "agreement@10, new queries": float(new),
        }


def in_order(traffic: Traffic, cascade: vecferry.Cascade, c: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the documents in the order in which the budget is spent, for the ways that need no `warm`."""
    queries = traffic.task.queries[1]
    candidates = np.concatenate([cascade.candidates(queries[[q]], c)[0] for q in traffic.first])
    first = np.sort(np.unique(candidates, return_index=True)[1])
    return {"on demand": candidates[first], "random": rng.permutation(len(traffic.task.documents[1]))}


def curve(
    traffic: Traffic, index: Any, m: vecferry.LinearMap, c: int, seed: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield what each way of spending each budget gives."""
    task = traffic.task
    y, asked = task.documents[1], task.queries[1][traffic.asked]
    n = len(y)

    def look_up(texts: list[str]) -> np.ndarray:
        return y[[int(text) for text in texts]]

    np.save(folder / "log.npy", task.queries[1][traffic.log])
    with vecferry.Cascade(index, m, look_up, str, folder / "orders") as cascade:
        orders = in_order(traffic, cascade, c, np.random.default_rng(seed))
    for way in ("warm by the log", *orders):
        cache, spent = folder / way.replace(" ", "-"), 0
        for share in SHARES:
            budget = round(share * n)
            if way in orders:
                with vecferry.Cascade(index, m, look_up, str, cache) as cascade:
                    encoded = cascade.fill(pa.array(orders[way][:budget]))
            else:
                log, afford = str(folder / "log.npy"), max(1, budget - spent)
                warmed = vecferry.warm(index, m, log, afford, encode=look_up, texts=str, cache=cache, c=c)
                encoded = warmed.encoded
            spent += encoded
            with vecferry.Cascade(index, m, cache=cache) as cascade:
                ids, _ = cascade.search(asked, K, c)
            yield {"way": way, "texts": spent, "share": spent / n, **traffic.measure(ids)}


def costs(traffic: Traffic, index: Any, m: vecferry.LinearMap, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what a cascade that encodes whatever it needs gives and costs, from the first query on, for each c."""
    task = traffic.task
    y, queries = task.documents[1], task.queries[1]
    for c in CANDIDATES:
        with vecferry.Cascade(
            index, m, lambda texts: y[[int(t) for t in texts]], str, folder / f"every-{c}"
        ) as cascade:
            after: dict[str, int] = {}
            for stop in (100, 1000, len(traffic.log)):
                cascade.search(queries[np.unique(traffic.log[:stop])], K, c)
                after[f"texts after {stop} queries"] = cascade.encoded
            ids, _ = cascade.search(queries[traffic.asked], K, c)
        yield {"candidates": c, **traffic.measure(ids), **after}


def averaged(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the mean of each number over the runs, row by row."""

    def mean(values: list[Any]) -> Any:
        return values[0] if isinstance(values[0], str) or None in values else float(np.mean(values))

    return [{key: mean([row[key] for row in rows]) for key in rows[0]} for rows in zip(*runs, strict=True)]


def ends(traffic: Traffic, translated: np.ndarray) -> list[dict[str, Any]]:
    """Return what the old index gives, and both ends of the curve."""
    (x, y), (old, new) = traffic.task.documents, (q[traffic.asked] for q in traffic.task.queries)
    quo = {"way": "status quo", "texts": 0, "share": 0.0, **traffic.measure(topk(old, x, K, "cosine")[0])}
    quo |= {key: None for key in quo if key.startswith("agreement")}  # other queries: only labels compare
    none = {"way": "translate only", "texts": 0, "share": 0.0}
    all_ = {"way": "re-embed all", "texts": len(y), "share": 1.0}
    return [
        quo,
        none | traffic.measure(topk(new, translated, K, "cosine")[0]),
        all_ | traffic.measure(topk(new, y, K, "cosine")[0]),
    ]


def run(name: str, task: Task, args: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    old, new = name.split(" -> ")
    points, every, distinct = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for side, x in zip(("old", "new"), task.fit, strict=True):
            np.save(folder / f"{side}.npy", x)
        m = vecferry.fit(str(folder / "old.npy"), str(folder / "new.npy"), source_model=old, target_model=new)
        translated = m.apply(task.documents[0])
        index = faiss.IndexFlatIP(translated.shape[1])
        index.add(translated)
        for seed in range(args.seeds):
            traffic = Traffic(task, args.stream, args.exponent, seed)
            here = folder / f"traffic-{seed}"
            here.mkdir()
            points.append([*ends(traffic, translated), *curve(traffic, index, m, args.candidates, seed, here)])
            every.append(list(costs(traffic, index, m, here)))
            distinct.append([len(traffic.first), len(traffic.asked), int(traffic.new.sum())])
    counted = dict(zip(("log", "later", "later, not in the log"), np.mean(distinct, axis=0).tolist(), strict=True))
    result = {"pair": name, "documents": len(translated), "distinct queries": counted}
    result |= {"curve": averaged(points), "on demand": averaged(every)}
    show(result)
    print(f"({time.perf_counter() - started:.0f} s)\n", flush=True)
    return result


def show(result: dict[str, Any]) -> None:
    counted = ", ".join(f"{n:,.0f} {name}" for name, n in result["distinct queries"].items())
    print(f"{result['pair']}: {result['documents']:,} documents; distinct queries: {counted}\n")
    print(f"{'texts spent':16} {'texts':>7} {'of all':>7} {'agreement@10':>13} {'of new queries':>15} {'nDCG@10':>8}")
    before: dict[str, Any] = {"way": None}
    for row in result["curve"]:
        if (row["way"], row["texts"]) == (before["way"], before.get("texts")):
            continue  # the log needs no more
        before = row
        cells = [row["agreement@10"], row["agreement@10, new queries"]]
        numbers = ["-" if x is None else f"{x:.3f}" for x in cells]
        print(
            f"{row['way']:16} {row['texts']:>7,.0f} {row['share']:>7.0%} {numbers[0]:>13} {numbers[1]:>15} "
            f"{row['ndcg@10']:>8.3f}"
        )
    print("\nencode whatever is needed, from the first query on:\n")
    stops = [key for key in result["on demand"][0] if key.startswith("texts after")]
    print(f"{'candidates':>10} {'agreement@10':>13} {'nDCG@10':>8} " + " ".join(f"{key:>24}" for key in stops))
    for row in result["on demand"]:
        print(
            f"{row['candidates']:>10.0f} {row['agreement@10']:>13.3f} {row['ndcg@10']:>8.3f} "
            + " ".join(f"{row[key]:>24,.0f}" for key in stops)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the full paired data; the package's sample by default")
    parser.add_argument("--stream", type=int, default=3000, help="queries in each of the two streams")
    parser.add_argument("--exponent", type=float, default=1.0, help="of the Zipf distribution")
    parser.add_argument("-c", "--candidates", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="numbers are means over so many draws of the traffic")
    args = parser.parse_args()
    kind = "sample" if args.data is None else "data"
    results = []
    for old, new in PAIRS[kind]:
        if args.data is None:
            task = from_sample(old, new)
        else:
            task = from_data(args.data, old, new)
        results.append(run(f"{old} -> {new}", task, args))
    parameters = {"stream": args.stream, "exponent": args.exponent, "candidates": args.candidates, "seeds": args.seeds}
    parameters |= {"cores": os.cpu_count(), "python": platform.python_version(), "vecferry": vecferry.__version__}
    RESULTS.parent.mkdir(exist_ok=True)
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    held[kind] = {"parameters": parameters, "results": results}
    RESULTS.write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
