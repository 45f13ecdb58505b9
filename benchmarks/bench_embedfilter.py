"""What is left of an LLM's embeddings at 1/tau of their dimensions? EmbedFilter beside all it is compared with.

    python benchmarks/bench_embedfilter.py --data ../shared/data --model SMOLLM2.gguf [--tau 2 4 8] [--seeds 3]

Vectors are SmolLM2's of DATA (mean pooling, PromptEOL), or `--vectors NAME DOCS.npy QUERIES.npy` of the same texts and
model. Searched are documents 0 to 9,999 by 2,000 queries, by cosine, with one relevant document each; corpus PCA and
whitening are fitted on the documents searched, without labels. V-measure is of k-means with one cluster for each of the
45 lexical classes, three starts; the probe is ridge regression on classes, fitted on documents 0 to 4,999 and right on
the other 5,000. The variants of chance are means over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy.cluster.vq import kmeans2
from threadpoolctl import threadpool_limits

import vecferry
from vecferry.filters import KINDS, Given, make
from vecferry.heads import read_head
from vecferry.holdout import Qrels
from vecferry.linear import LinearMap, normalize
from vecferry.recall import label_recall, ndcg, topk
from vecferry.spectrum import Spectrum, frequent, smoothed

RESULTS = Path(__file__).parent / "results" / "bench_embedfilter.json"
DOCUMENTS, PROBED, K = 10_000, 5_000, 10
CHANCE = ("random", "random-directions", "random-orthonormal")
RIDGE = 1e-2
"""Of the mean variance: what the probe's regression is held back by."""
PUBLISHED = {
    ("smollm2_mean", "all dimensions", 1): 0.023,
    **{("smollm2_mean", "embedfilter", t): v for t, v in zip((2, 4, 8), (0.053, 0.041, 0.028), strict=True)},
    **{("smollm2_mean", "embedfilter-centered", t): v for t, v in zip((2, 4, 8), (0.067, 0.053, 0.038), strict=True)},
    **{("smollm2_mean", "first", t): v for t, v in zip((2, 4, 8), (0.016, 0.022, 0.015), strict=True)},
    **{("smollm2_mean", "edges", t): v for t, v in zip((2, 4, 8), (0.020, 0.015, 0.009), strict=True)},
    **{("smollm2_mean", "pca", t): v for t, v in zip((2, 4, 8), (0.025, 0.023, 0.020), strict=True)},
    ("smollm2_eol", "all dimensions", 1): 0.249,
    **{("smollm2_eol", "embedfilter", t): v for t, v in zip((2, 4, 8), (0.260, 0.220, 0.161), strict=True)},
    **{("smollm2_eol", "embedfilter-centered", t): v for t, v in zip((2, 4, 8), (0.265, 0.221, 0.163), strict=True)},
    **{("smollm2_eol", "first", t): v for t, v in zip((2, 4, 8), (0.227, 0.179, 0.116), strict=True)},
    **{("smollm2_eol", "edges", t): v for t, v in zip((2, 4, 8), (0.214, 0.147, 0.079), strict=True)},
    **{("smollm2_eol", "pca", t): v for t, v in zip((2, 4, 8), (0.259, 0.254, 0.220), strict=True)},
}
"""nDCG@10 of the same vectors and task as another implementation measured it."""


def load(path: Path) -> Any:
    return np.load(path).astype(np.float32)


class Task:
    """Hold the labels: relevant documents, and the class of each document."""

    def __init__(self, folder: Path) -> None:
        texts = pq.read_table(folder / "texts.parquet")
        at = {name: i for i, name in reversed(list(enumerate(texts["id"].to_pylist())))}
        labels = dict(line.split("\t")[:2] for line in (folder / "qrels.tsv").read_text().splitlines())
        queries = pq.read_table(folder / "queries.parquet")["id"].to_pylist()
        relevant = np.array([at[labels[q]] for q in queries])
        self.qrels = Qrels(np.arange(len(queries)), relevant, np.ones(len(queries), np.int64))
        self.classes = np.unique(texts["lexfile"].to_pylist()[:DOCUMENTS], return_inverse=True)[1]

    def measure(self, documents: Any, queries: Any) -> dict[str, float]:
        """Measure unit vectors."""
        found, _ = topk(queries, documents, K, "cosine")
        centred = documents.astype(np.float64) - documents.mean(0, dtype=np.float64)
        spectrum = np.linalg.eigvalsh(centred.T @ centred).clip(0)
        mean = documents.mean(0, dtype=np.float64)
        n = len(documents)
        values = {
            f"ndcg@{K}": ndcg(found, self.qrels, K).mean(),
            f"recall@{K}": label_recall(found, self.qrels, K).mean(),
            "v-measure": statistics.fmean(self.clustered(documents, seed) for seed in range(3)),
            "probe": self.probed(centred),
            "mean cosine": (n * (mean @ mean) - 1) / (n - 1),
            "participation ratio": spectrum.sum() ** 2 / (spectrum**2).sum(),
        }
        return {name: round(float(value), 4) for name, value in values.items()}

    def clustered(self, documents: Any, seed: int) -> float:
        """Return the V-measure of k-means: the harmonic mean of homogeneity and completeness."""
        found = kmeans2(documents, len(np.unique(self.classes)), iter=20, minit="++", rng=seed)[1]
        table = np.zeros((self.classes.max() + 1, found.max() + 1))
        np.add.at(table, (self.classes, found), 1)
        table /= table.sum()
        rows, columns = table.sum(1), table.sum(0)
        together = np.outer(rows, columns)
        shared = (table[table > 0] * np.log(table[table > 0] / together[table > 0])).sum()
        entropies = [-(p[p > 0] * np.log(p[p > 0])).sum() for p in (rows, columns)]
        return float(2 * shared / sum(entropies))

    def probed(self, centred: Any) -> float:
        """Return how often ridge regression names the right class of documents that it wasn't fitted on."""
        x, held = centred[:PROBED], centred[PROBED:]
        wanted = np.eye(self.classes.max() + 1)[self.classes[:PROBED]]
        gram = x.T @ x
        gram += RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
        said = (held @ np.linalg.solve(gram, x.T @ (wanted - wanted.mean(0))) + wanted.mean(0)).argmax(1)
        return float((said == self.classes[PROBED:]).mean())


def runs(task: Task, name: str, documents: Any, queries: Any, given: Given, taus: list[int], seeds: int) -> Any:
    """Yield what is left of one kind of vectors by each filter and tau."""
    unit = documents[:DOCUMENTS].copy()
    normalize(unit)
    whole = LinearMap(np.eye(documents.shape[1]), post="l2")
    cases: list[tuple[str, int, list[LinearMap]]] = [("all dimensions", 1, [whole])]
    for tau in taus:
        for kind in KINDS:
            drawn = [Given(**{**fields(given), "vectors": unit, "seed": s}) for s in range(seeds)]
            cases.append((kind, tau, [make(kind, g, tau) for g in drawn[: None if kind in CHANCE else 1]]))
    for kind, tau, filters in cases:
        found = [task.measure(f.apply(unit), f.apply(queries)) for f in filters]
        values = {metric: round(statistics.fmean(v[metric] for v in found), 4) for metric in found[0]}
        yield {"vectors": name, "kind": kind, "tau": tau, "seeds": len(found), **values}


def fields(given: Given) -> dict[str, Any]:
    return {name: getattr(given, name) for name in Given.__dataclass_fields__}


def cone(name: str, documents: Any, spectrum: Spectrum, head: Any, counts: Any, tau: int) -> Any:
    """Say how near the corpus mean is to the average token, in both forms, before and after filtering."""
    mean = documents[:DOCUMENTS].mean(0, dtype=np.float64)
    f = make("embedfilter", Given(len(mean), "ip", spectrum), tau).weight.astype(np.float64)
    for form, center in (("log p", False), ("centred log p", True)):
        state = spectrum.average_token(head, smoothed(counts), center_log=center)
        pairs = {"before": (mean, state), "after": (mean @ f, state @ f)}
        cosines = {k: round(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), 4) for k, (a, b) in pairs.items()}
        yield {"vectors": name, "average token": form, "tau": tau, **cosines}


def table(found: list[dict[str, Any]]) -> str:
    metrics = [m for m in found[0] if m not in ("vectors", "kind", "tau", "seeds")]
    lines = [f"{'':14}{'':22}{'tau':>4}" + "".join(f"{m:>21}" for m in metrics)]
    for r in found:
        lines.append(f"{r['vectors']:14}{r['kind']:22}{r['tau']:4}" + "".join(f"{r[m]:21.4f}" for m in metrics))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tau", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--vectors", nargs=3, action="append", metavar=("NAME", "DOCS", "QUERIES"), default=[])
    parser.add_argument("--only", help="of these kinds of vectors only one, beside the results that there are")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    head = read_head(args.model)
    spectrum, task = Spectrum.of(head.weight), Task(args.data)
    counts = np.load(args.data / "smollm2_token_counts.npy")
    state = spectrum.average_token(head.weight, smoothed(counts), center_log=True)
    given = Given(
        dim=spectrum.dim,
        spectrum=spectrum,
        centered=Spectrum.of(head.weight, center=True),
        delta_pi=spectrum.delta_pi(head.weight, state, frequent(counts, 100)),
    )
    sets = [(n, args.data / f"{n}_docs.npy", args.data / f"{n}_queries.npy") for n in ("smollm2_mean", "smollm2_eol")]
    sets += [(name, Path(documents), Path(queries)) for name, documents, queries in args.vectors]
    known = json.loads(args.output.read_text()) if args.output.exists() else {"runs": [], "cone": []}
    content: dict[str, Any] = {
        "parameters": {"documents": DOCUMENTS, "queries": len(task.qrels.query), "probe fitted on": PROBED},
        "model": {"name": head.name, "tokens": len(head.weight), "dim": spectrum.dim},
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "vecferry": vecferry.__version__},
    }
    for name, documents, queries in sets:
        if args.only not in (None, name):
            continue
        x, q, done = load(documents), load(queries), []
        with threadpool_limits(1, "blas"):
            for run in runs(task, name, x, q, given, args.tau, args.seeds):
                expected = PUBLISHED.get((name, run["kind"], run["tau"]))
                if expected is not None:
                    run["difference"] = round(run[f"ndcg@{K}"] - expected, 4)
                done.append(run)
                print(json.dumps(run), flush=True)
            cones = list(cone(name, x, spectrum, head.weight, counts, args.tau[0]))
        known = {key: [r for r in known[key] if r["vectors"] != name] for key in ("runs", "cone")}
        known = {"runs": known["runs"] + done, "cone": known["cone"] + cones}
        worst = max((abs(r["difference"]) for r in known["runs"] if "difference" in r), default=None)
        content["largest difference from what was measured before"] = worst
        args.output.write_text(json.dumps(content | known, indent=1) + "\n")
    print(table([{k: v for k, v in r.items() if k != "difference"} for r in known["runs"]]))


if __name__ == "__main__":
    main()
