"""Time the rewrite against a bare loop that reads, multiplies, normalises, writes and fsyncs the same rows.

    python benchmarks/bench_rewrite.py [--rows 100000 500000] [--repeats 3]

Each run is a process of its own, ours and the bare one in turn; the figure is the ratio of their rows per second.
What ours does beyond that (verifying the target from its own bytes) is timed apart. Peak RSS is the process's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

D_IN, D_OUT, BATCH = 384, 768, 8192
RESULTS = Path(__file__).parent / "results" / "bench_rewrite.json"


def make_source(kind: str, path: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    if kind == "flat":
        import faiss

        header = path.with_suffix(".empty")
        faiss.write_index(faiss.IndexFlatIP(D_IN), str(header))
        raw = bytearray(header.read_bytes())
        header.unlink()
        raw[8:16] = np.int64(rows).tobytes()
        raw[37:45] = np.uint64(rows * D_IN).tobytes()
        with path.open("wb") as file:
            file.write(raw)
            for start in range(0, rows, BATCH):
                file.write(rng.standard_normal((min(BATCH, rows - start), D_IN), dtype=np.float32).tobytes())
        return
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("emb", pa.list_(pa.float32(), D_IN))])
    with pq.ParquetWriter(
        path, schema, use_dictionary=["text"], compression={"emb": "NONE", "id": "ZSTD", "text": "ZSTD"}
    ) as writer:
        for start in range(0, rows, 25_000):
            n = min(25_000, rows - start)
            x = rng.standard_normal((n, D_IN), dtype=np.float32)
            ids = np.arange(start, start + n)
            columns = [
                pa.array(ids),
                pa.array([f"text of document {i}" for i in ids]),
                pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), D_IN),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def the_map() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((D_IN, D_OUT), dtype=np.float32) / 20, rng.standard_normal(D_OUT, dtype=np.float32) / 20


def bare(kind: str, source: Path, target: Path, rows: int) -> dict[str, float]:
    """Do the job in twenty lines, with every core that BLAS likes."""
    weight, bias = the_map()

    def translate(x: np.ndarray) -> np.ndarray:
        y = x @ weight
        y += bias
        y /= np.sqrt(np.einsum("ij,ij->i", y, y))[:, None]
        return y

    started = time.perf_counter()
    if kind == "flat":
        with source.open("rb") as read, target.open("wb") as write:
            read.seek(45)
            write.write(bytes(45))
            for start in range(0, rows, BATCH):
                x = np.fromfile(read, np.float32, min(BATCH, rows - start) * D_IN).reshape(-1, D_IN)
                write.write(translate(x).data)
            write.flush()
            os.fsync(write.fileno())
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        started = time.perf_counter()
        schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("emb", pa.list_(pa.float32(), D_OUT))])
        how = {
            "use_dictionary": ["text"],
            "compression": {"emb": "NONE", "id": "ZSTD", "text": "ZSTD"},
            "write_statistics": ["id"],
        }
        with pq.ParquetWriter(target, schema, **how) as writer:
            for batch in pq.ParquetFile(source).iter_batches(BATCH):
                x = batch.column("emb").flatten().to_numpy().reshape(-1, D_IN)
                y = pa.FixedSizeListArray.from_arrays(pa.array(translate(x).reshape(-1)), D_OUT)
                writer.write_batch(pa.record_batch([batch.column("id"), batch.column("text"), y], schema=schema))
        with target.open("rb") as file:
            os.fsync(file.fileno())
    return {"seconds": time.perf_counter() - started}


def ours(kind: str, source: Path, target: Path, rows: int) -> dict[str, float]:
    from vecferry.linear import Card, LinearMap, Side
    from vecferry.mapfile import seal
    from vecferry.migration import migrate

    weight, bias = the_map()
    m = seal(LinearMap(weight, bias, post="l2", card=Card(Side(D_IN), Side(D_OUT), "benchmark")))
    report = migrate(str(source), str(target), m)
    t = report.timing
    return {"seconds": t["rewrite"] + t["build"] + t["publish"], "verify": t["verify"], "everything": sum(t.values())}


def child(which: str, kind: str, source: str, target: str, rows: int) -> None:
    result = (bare if which == "bare" else ours)(kind, Path(source), Path(target), rows)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())  # ru_maxrss would count the parent's
    assert peak is not None
    result["peak_rss_mb"] = int(peak[1]) / 1024
    print(json.dumps(result))


def run(which: str, kind: str, source: Path, target: Path, rows: int) -> dict[str, float]:
    os.sync()
    command = [sys.executable, __file__, "--child", which, kind, str(source), str(target), str(rows)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    for sidecar in target.parent.glob(f"{target.name}*.json"):
        sidecar.unlink()
    return dict(json.loads(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 500_000, 2_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["flat", "parquet"])
    parser.add_argument("--folder", type=Path, help="where the files go (a temporary folder by default)")
    parser.add_argument("--child", nargs=5)
    args = parser.parse_args()
    if args.child:
        which, kind, source, target, rows = args.child
        child(which, kind, source, target, int(rows))
        return
    table = []
    print("store         rows  bare rows/s  ours rows/s  ratio  verify s  bare MB ours MB")
    for kind in args.kinds:
        for rows in args.rows:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                source = Path(folder) / ("source.faiss" if kind == "flat" else "source.parquet")
                make_source(kind, source, rows)
                pairs = []
                for _ in range(args.repeats):
                    pairs.append(
                        [
                            run(which, kind, source, Path(folder) / f"{which}.{source.suffix[1:]}", rows)
                            for which in ("bare", "ours")
                        ]
                    )
            middle = {
                "bare_rows_per_s": statistics.median(rows / b["seconds"] for b, _ in pairs),
                "ours_rows_per_s": statistics.median(rows / o["seconds"] for _, o in pairs),
                "ratio": statistics.median(b["seconds"] / o["seconds"] for b, o in pairs),
                "ratio_min": min(b["seconds"] / o["seconds"] for b, o in pairs),
                "ratio_max": max(b["seconds"] / o["seconds"] for b, o in pairs),
                "verify_s": statistics.median(o["verify"] for _, o in pairs),
                "bare_peak_rss_mb": max(b["peak_rss_mb"] for b, _ in pairs),
                "ours_peak_rss_mb": max(o["peak_rss_mb"] for _, o in pairs),
            }
            table.append({"store": kind, "rows": rows, **middle})
            r = middle
            print(
                f"{kind:8} {rows:>9,} {r['bare_rows_per_s']:>12,.0f} {r['ours_rows_per_s']:>12,.0f} {r['ratio']:>6.2f} "
                f"{r['verify_s']:>9.2f} {r['bare_peak_rss_mb']:>8.0f} {r['ours_peak_rss_mb']:>7.0f}",
                flush=True,
            )
    parameters = {
        "d_in": D_IN,
        "d_out": D_OUT,
        "batch": BATCH,
        "repeats": args.repeats,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    if RESULTS.exists():  # of other stores and sizes, from runs with the same parameters
        before = json.loads(RESULTS.read_text())
        known = {(r["store"], r["rows"]) for r in table}
        if before["parameters"] == parameters:
            table += [r for r in before["results"] if (r["store"], r["rows"]) not in known]
    table.sort(key=lambda r: (r["store"], r["rows"]))
    RESULTS.write_text(json.dumps({"parameters": parameters, "results": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
