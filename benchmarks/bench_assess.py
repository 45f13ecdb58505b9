"""Does `vecferry assess` say the truth? Its verdict from some hundred pairs, against what happens at 10,000 documents.

    python benchmarks/bench_assess.py --data ../shared/data

For each ordered pair of the five encoders: an index of the first 10,000 documents; pairs are the documents relevant
to the assessing queries and uniform others. What happens is measured with 1,000 other queries and the maps that
`vecferry fit` makes by default of as many documents that are not in the index. Intervals are held against it with the
uncertainty of those 1,000 queries allowed for. Resumable: finished rows are kept in the results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import vecferry
from vecferry.holdout import Qrels
from vecferry.recall import Truth, interval, ndcg, rerank, topk
from vecferry.verdict import KEEPS, MAP_QUERIES, NOTHING, RE_EMBED, TRANSLATE
from vecferry.ways import CANDIDATES, K, cascade

RESULTS = Path(__file__).parent / "results" / "bench_assess.json"
MODELS = ("minilm", "e5", "smollm2_eol", "smollm2_mean", "glove")
INDEX = 10_000
SIZES = ((600, 200), (1200, 400))  # pairs, queries


def unit(path: Path) -> Any:
    x = np.load(path).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


class Data:
    def __init__(self, folder: Path) -> None:
        self.documents = {m: unit(folder / f"{m}_docs.npy") for m in MODELS}
        self.queries = {m: unit(folder / f"{m}_queries.npy") for m in MODELS}
        at: dict[str, int] = {}
        for i, name in enumerate(pq.read_table(folder / "texts.parquet")["id"].to_pylist()):
            at.setdefault(name, i)
        labels = dict(line.split("\t")[:2] for line in (folder / "qrels.tsv").read_text().splitlines())
        self.relevant = np.array([at[labels[q]] for q in pq.read_table(folder / "queries.parquet")["id"].to_pylist()])
        order = np.random.default_rng(0).permutation(len(self.relevant))
        self.assessing, self.judging = order[:1000], order[1000:]


def store(folder: str, name: str, vectors: Any, ids: Any) -> str:
    for suffix, array in (("", vectors), ("-ids", ids)):
        np.save(Path(folder) / f"{name}{suffix}.npy", array)
    return f"npy:{folder}/{name}.npy?ids={folder}/{name}-ids.npy"


def assess(data: Data, old: str, new: str, pairs: int, queries: int) -> vecferry.Assessment:
    asked = data.assessing[:queries]
    relevant = np.unique(data.relevant[asked])
    others = np.setdiff1d(np.random.default_rng(1).permutation(INDEX), relevant, assume_unique=True)
    rows = np.sort(np.concatenate([relevant, others[: pairs - len(relevant)]]))
    with tempfile.TemporaryDirectory() as folder:
        qrels = Path(folder) / "qrels.tsv"
        qrels.write_text("".join(f"{q}\t{data.relevant[q]}\t1\n" for q in asked))
        return vecferry.assess(
            store(folder, "index", data.documents[old][:INDEX], np.arange(INDEX)),
            store(folder, "pairs", data.documents[new][rows], rows),
            queries=store(folder, "new", data.queries[new][asked], asked),
            source_queries=store(folder, "old", data.queries[old][asked], asked),
            qrels=qrels,
        )


def fitted(data: Data, old: str, new: str, pairs: int, queries: int) -> list[vecferry.LinearMap]:
    """Fit both maps as a user would: `fit` holds out a fifth of the pairs and half of the queries itself."""
    asked, rows = data.assessing[:queries], np.arange(INDEX, INDEX + pairs)
    with tempfile.TemporaryDirectory() as folder:
        stores = {
            "source": store(folder, "source", data.documents[old][rows], rows),
            "target": store(folder, "target", data.documents[new][rows], rows),
            "queries": store(folder, "new", data.queries[new][asked], asked),
            "source_queries": store(folder, "old", data.queries[old][asked], asked),
        }
        return [vecferry.fit(**stores, direction=direction) for direction in ("document", "query")]


def outcome(data: Data, old: str, new: str, pairs: int, queries: int) -> dict[str, dict[str, float]]:
    """Measure every way at the size of the index, with other queries and maps of other documents."""
    asked = data.judging
    x, y = (data.documents[m] for m in (old, new))
    documents_map, queries_map = fitted(data, old, new, pairs, queries)
    moved = documents_map.apply(x[:INDEX])
    true = Truth.of(data.queries[new][asked], y[:INDEX], K, "cosine")
    found = {
        NOTHING: topk(data.queries[old][asked], x[:INDEX], K, "cosine")[0],
        TRANSLATE: topk(true.queries, moved, K, "cosine")[0],
        MAP_QUERIES: topk(queries_map.apply(true.queries), x[:INDEX], K, "cosine")[0],
    }
    candidates, _ = topk(true.queries, moved, max(CANDIDATES), "cosine")
    for c in CANDIDATES:
        found[cascade(c)] = rerank(true.queries, true.documents, candidates[:, :c], "cosine")[:, :K]
    found[RE_EMBED] = true.places
    qrels = Qrels(np.arange(len(asked)), data.relevant[asked], np.ones(len(asked), np.int64))
    values = {name: ndcg(places, qrels, K) for name, places in found.items()}
    rows = {}
    for name, places in found.items():
        value, low, high = interval(values[name], values[NOTHING])
        rows[name] = {
            "agreement": float(true.agreement(places, K).mean()),
            "ndcg": float(values[name].mean()),
            "retention": float(values[name].mean() / values[RE_EMBED].mean()),
            "retention_error": error_of_log(values[name], values[RE_EMBED]),
            "break_even": value,
            "low": low,
            "high": high,
        }
    return rows


def error_of_log(values: Any, over: Any) -> float:
    """Return the standard error of the logarithm of a ratio of means, by the delta method."""
    moves = values / values.mean() - over / over.mean()
    return float(moves.std(ddof=1) / np.sqrt(len(moves)))


def covers(cell: dict[str, Any], truth: float, error: float) -> bool:
    """Say whether an interval holds the truth, of whose logarithm no more is known than the standard error."""
    if not cell["value"] or not cell["low"]:
        return bool(cell["low"] <= truth <= cell["high"])
    own = np.log(cell["high"] / cell["low"]) / 2 / 1.96
    return bool(abs(np.log(cell["value"] / truth)) <= 1.96 * np.hypot(own, error))


def compare(assessed: dict[str, Any], happened: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Say where the verdict and what happened agree."""
    verdict = assessed["verdict"]
    gain = happened[RE_EMBED]
    truth = "pays" if gain["low"] > 1 else "loses" if gain["high"] < 1 else "borderline"
    said = {"migrate": "pays", "don't": "loses", "borderline": "borderline"}[verdict["outcome"]]
    wrong = [
        f"{name} {standing}, {happened[name]['break_even']:.2f} happened"
        for name, standing in verdict["standings"].items()
        if (standing == "pays" and happened[name]["high"] < 1) or (standing == "loses" and happened[name]["low"] > 1)
    ]
    kept = happened[verdict["instead"]]["retention"]
    covered, errors, plain, foretold = [], [], [], []
    for way in assessed["ways"]:
        cells = {c["metric"]: c for c in way["cells"]}
        ratio, retention = cells["break-even.ndcg"], cells["retention.ndcg"]
        if way["name"] in (NOTHING, RE_EMBED) or ratio["value"] is None:
            continue
        errors.append(abs(retention["value"] - happened[way["name"]]["retention"]))
        base = next(c for c in assessed["ways"][-1]["cells"] if c["metric"] == "ndcg")["value"]
        if cells["ndcg"]["value"] is not None:
            plain.append(abs(cells["ndcg"]["value"] / base - happened[way["name"]]["retention"]))
        covered.append(covers(retention, happened[way["name"]]["retention"], happened[way["name"]]["retention_error"]))
        told, true = way["foretold"], happened[way["name"]]["agreement"]
        if told["value"] is not None:
            foretold.append([abs(told["value"] - true), told["low"] <= true <= told["high"]])
    return {
        "said": said,
        "happened": truth,
        "agrees": {said, truth} != {"pays", "loses"},
        "same": said == truth,
        "wrong": wrong,
        "way": verdict["way"],
        "instead": verdict["instead"],
        "instead_kept": kept,
        "instead_holds": kept >= KEEPS,
        "retention_error": float(np.mean(errors)),
        "retention_error_unprojected": float(np.mean(plain)),
        "covered": float(np.mean(covered)),
        "foretold_error": float(np.mean([error for error, _ in foretold])),
        "foretold_covered": float(np.mean([inside for _, inside in foretold])),
    }


def numbers(assessed: dict[str, Any]) -> dict[str, Any]:
    """Return each way's measured cells as value, low, high."""
    return {
        way["name"]: {
            metric: [c["value"], c["low"], c["high"]]
            for metric, c in [*((c["metric"], c) for c in way["cells"]), ("foretold", way["foretold"])]
            if c["value"] is not None
        }
        for way in assessed["ways"]
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    args = parser.parse_args()
    data = Data(args.data)
    done = [] if args.fresh or not RESULTS.exists() else json.loads(RESULTS.read_text())["results"]
    for (pairs, queries), (old, new) in itertools.product(SIZES, itertools.permutations(MODELS, 2)):
        if any((r["old"], r["new"], r["pairs"]) == (old, new, pairs) for r in done):
            continue
        started = time.perf_counter()
        assessed = assess(data, old, new, pairs, queries).to_json()
        happened = outcome(data, old, new, pairs, queries)
        row = compare(assessed, happened)
        done.append(
            {"old": old, "new": new, "pairs": pairs, "queries": queries}
            | row
            | {
                "outcome": rounded(happened),
                "assessed": rounded(numbers(assessed)),
                "reasons": assessed["verdict"]["reasons"],
            }
        )
        print(
            f"{pairs:5} {old:12} -> {new:12} said {row['said']:10} happened {row['happened']:10} "
            f"way {row['way'] or '-':20} instead {row['instead'] or '-':20} keeps {row['instead_kept']:.2f}  "
            f"error {row['retention_error']:.3f} (unprojected {row['retention_error_unprojected']:.3f}) "
            f"covered {row['covered']:.2f}  foretold {row['foretold_error']:.3f} {row['foretold_covered']:.2f}  "
            f"{'; '.join(row['wrong'])}  {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        RESULTS.parent.mkdir(exist_ok=True)
        parameters = {"index": INDEX, "judging_queries": len(data.judging), "sizes": SIZES}
        RESULTS.write_text(json.dumps({"parameters": parameters, "results": done}, separators=(",", ":")) + "\n")
    for pairs, _ in SIZES:
        rows = [r for r in done if r["pairs"] == pairs]
        if not rows:
            continue
        print(
            f"{pairs} pairs: verdict not opposite to what happened in {sum(r['agrees'] for r in rows)} of {len(rows)}, "
            f"the same in {sum(r['same'] for r in rows)}; ways judged opposite {sum(len(r['wrong']) for r in rows)}; "
            f"the way to stand in keeps {KEEPS:.0%} in {sum(r['instead_holds'] for r in rows)}; retention error "
            f"{np.mean([r['retention_error'] for r in rows]):.3f}, unprojected "
            f"{np.mean([r['retention_error_unprojected'] for r in rows]):.3f}, covered "
            f"{np.mean([r['covered'] for r in rows]):.2f}; agreement foretold to "
            f"{np.mean([r['foretold_error'] for r in rows]):.3f}, covered "
            f"{np.mean([r['foretold_covered'] for r in rows]):.2f}"
        )


if __name__ == "__main__":
    main()
