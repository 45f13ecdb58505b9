"""What went wrong for people who do this job with other tools: the smallest input of a kind, and what must come of it.

The numbers are those of the list of field cases. Rows that another test covers are marked there; the last test here
sees to it that each row has its test.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import vecferry
from vecferry.cli import cli
from vecferry.errors import UsageError
from vecferry.holdout import Holdout
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapfile import seal
from vecferry.store import open_reader

faiss = pytest.importorskip("faiss", reason="the stores that teams have")

N, D_IN, D_OUT = 1500, 24, 40
PAIRED, ASKED = 1100, 120

COVERED = (
    *("1", "2", "4", "5", "44", "19", "20", "21", "22", "38", "45", "p1", "p2", "p3", "p4", "p5", "p6", "p7"),
    *("16", "17", "18", "p8", "p9", "p10", "p11", "p12", "p13", "27", "30", "28", "29"),
    *("6", "7", "9", "10", "11", "13", "15", "23", "32", "34", "35", "q1", "q2", "q3", "q4"),
)
"""Every row that faiss, parquet or numpy can meet. 40 (a server's cap on the rows of one batch) and 41 (HNSW over 2,000
dimensions in pgvector) aren't among them: files have no such caps, and there is no adapter for either store yet."""


def unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)


def run(*arguments: object, code: int = 0) -> str:
    """Run vecferry; return its result, or its complaint where it is to fail."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert code == 0 or result.stdout == ""
    return result.stderr if code else result.stdout


def flat(path: Path, x: np.ndarray, metric: int = faiss.METRIC_INNER_PRODUCT) -> Path:
    index = faiss.IndexFlat(x.shape[1], metric)
    index.add(np.ascontiguousarray(x, np.float32))
    faiss.write_index(index, str(path))
    return path


def table(path: Path, ids: Any, vectors: Any) -> Path:
    pq.write_table(pa.table({"id": ids, "vector": vectors if isinstance(vectors, pa.Array) else list(vectors)}), path)
    return path


def read(address: object) -> tuple[list[Any], np.ndarray]:
    """Return all ids and vectors of a store."""
    with open_reader(str(address)) as reader:
        batches = list(reader.read(7))
    return [i for b in batches for i in b.ids.to_pylist()], np.concatenate([b.vectors for b in batches])


def plain_map(d_in: int = D_IN, d_out: int = D_OUT, *models: str) -> LinearMap:
    weight = np.random.default_rng(9).standard_normal((d_in, d_out))
    old, new = models or (None, None)
    return seal(LinearMap(weight, post="l2", card=Card(Side(d_in, old), Side(d_out, new), "by hand")))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with an index, vectors of two models for some documents and queries, and a fitted map."""
    folder = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, D_IN))
    x = unit(centres[rng.integers(0, 40, N)] + 0.7 * rng.standard_normal((N, D_IN)))
    y = unit(x @ rng.standard_normal((D_IN, D_OUT)) + 0.2 * rng.standard_normal((N, D_OUT)))
    asked = rng.permutation(N)[:ASKED]
    flat(folder / "old.faiss", x)
    table(folder / "new.parquet", np.arange(PAIRED), y[:PAIRED])
    names = [f"q{i}" for i in range(ASKED)]
    table(folder / "qnew.parquet", names, unit(y[asked] + 0.1 * rng.standard_normal((ASKED, D_OUT))))
    table(folder / "qold.parquet", names, unit(x[asked] + 0.1 * rng.standard_normal((ASKED, D_IN))))
    sides = ("--source", folder / "old.faiss", "--target", folder / "new.parquet")
    queries = ("--queries", folder / "qnew.parquet", "--source-queries", folder / "qold.parquet")
    run("fit", *sides, *queries, "--solver", "ridge", "-o", folder / "map")
    run("migrate", folder / "old.faiss", folder / "new.faiss", "--map", folder / "map")
    return folder


# Wrong space, wrong direction, wrong numbers


@pytest.mark.case("2")
def test_a_wrong_pair_is_reported_before_anything_is_migrated(world: Path, tmp_path: Path) -> None:
    ids, y = read(world / "new.parquet")
    other = table(tmp_path / "other.parquet", ids, np.random.default_rng(1).permutation(y))
    said = run("fit", "--source", world / "old.faiss", "--target", other, "--solver", "ridge", "-o", tmp_path / "map")
    assert "predicts next to nothing" in said


@pytest.mark.case("4", "5")
@pytest.mark.parametrize("by", [-1, 1])
def test_a_dimension_too_many_or_too_few_is_named_beside_the_right_one(world: Path, by: int, tmp_path: Path) -> None:
    old, new = (tmp_path / f"{d}.npy" for d in (D_IN + by, D_OUT + by))
    for path in (old, new):
        np.save(path, np.ones((20, int(path.stem)), np.float32))
    before = sorted(tmp_path.iterdir())
    target = tmp_path / "out.npy"
    wrong_in, wrong_out = f"npy:{old} holds vectors of {D_IN + by} dimensions", f"npy:{new}"
    for said, *command in (
        (f"{wrong_in}, the map takes {D_IN}", "migrate", old, target, "--map", world / "map"),
        (f"{wrong_in}, the map takes {D_IN}", "transform", old, "--map", world / "map", "-o", target),
        (f"{wrong_out} holds vectors of {D_OUT + by} dimensions", "check", new, "--map", world / "map"),
        (f"{D_OUT} dimensions, the queries {wrong_out} has {D_OUT + by}", "check", world / "new.faiss",
         "--map", world / "map", "--queries", new),
    ):  # fmt: skip
        assert said in run(*command, code=4)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.case("4", "23")
@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
def test_another_metric_and_another_dimension_are_a_new_store(metric: int, tmp_path: Path) -> None:
    """An index can't change either in place: what stood there is swapped whole, and kept."""
    x = np.random.default_rng(0).standard_normal((50, D_IN))
    old, live = flat(tmp_path / "old.faiss", x, metric), flat(tmp_path / "live.faiss", x, metric)
    before = live.read_bytes()
    plain_map().save(tmp_path / "map")
    said = run("migrate", old, live, "--map", tmp_path / "map", code=2)
    assert "live.faiss exists: choose another name, or --overwrite" in said
    assert live.read_bytes() == before
    run("migrate", old, live, "--map", tmp_path / "map", "--overwrite")
    with open_reader(str(live)) as new, open_reader(str(old)) as source:
        assert (new.info.dim, new.info.metric) == (D_OUT, "cosine")
        assert (source.info.dim, source.info.metric) == (D_IN, "l2" if metric == faiss.METRIC_L2 else "ip")
    np.testing.assert_allclose(np.linalg.norm(read(live)[1], axis=1), 1, rtol=1e-5)  # cosine of either kind of index
    assert (tmp_path / "live.faiss.bak").read_bytes() == old.read_bytes() == before


@pytest.mark.case("20")
@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_what_is_decided_is_decided_by_ranks(metric: Any, scale: float, tmp_path: Path) -> None:
    """All products are below zero here, and of any size; a distance is smaller for nearer, a product larger."""
    rng = np.random.default_rng(2)
    x = np.abs(rng.standard_normal((400, D_IN))).astype(np.float32)
    weight = (scale * np.abs(rng.standard_normal((D_IN, D_OUT)))).astype(np.float32)
    y = (x @ weight * rng.uniform(0.9, 1.1, (400, D_OUT))).astype(np.float32)
    q = -y[:60] if metric == "ip" else (y[:60] * rng.uniform(0.8, 1.2, (60, 1))).astype(np.float32)
    kind = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
    source = flat(tmp_path / "old.faiss", x, kind)
    held = Holdout(pa.array(np.arange(400)), x, y, pa.array([f"q{i}" for i in range(60)]), q)
    card = Card(Side(D_IN), Side(D_OUT), "by hand", metric=metric)
    m = seal(LinearMap(weight, card=card, holdout=held))

    def order(documents: np.ndarray) -> np.ndarray:
        d, queries = documents.astype(np.float64), q.astype(np.float64)
        distances = ((queries[:, None] - d[None]) ** 2).sum(axis=2) if metric == "l2" else -queries @ d.T
        assert metric == "l2" or (distances > 0).all()
        return np.argsort(distances, axis=1)[:, :10]

    expected = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(order(x @ weight), order(y), strict=True)])
    assert 0.2 < expected < 0.95
    for gate, passed in ((f"agreement@10>={expected - 0.2}", True), (f"agreement@10>={expected}", False)):
        report = vecferry.migrate(str(source), tmp_path / f"{passed}.faiss", m, index="IVF1,Flat", gate=gate)
        assert isinstance(report, vecferry.Report)
        assert report.evaluation is not None
        for row in ("translated", "as indexed"):
            cell = report.evaluation.cell(row, "agreement", 10)
            assert cell is not None
            assert cell.value == pytest.approx(expected, abs=1e-9), row
        assert report.passed is passed


@pytest.mark.case("21", "22")
@pytest.mark.parametrize("factory", ["L2norm,Flat", "L2norm,IVF4,Flat"])
def test_a_store_that_normalised_what_it_was_given_is_reported_before_the_fit(factory: str, tmp_path: Path) -> None:
    x = 7 * unit(np.random.default_rng(3).standard_normal((300, D_IN)))
    index = faiss.index_factory(D_IN, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(x)
    index.add(x)
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    table(tmp_path / "new.parquet", np.arange(300), unit(x @ np.random.default_rng(4).standard_normal((D_IN, D_OUT))))
    shown = json.loads(run("inspect", tmp_path / "old.faiss", "--json"))
    assert (shown["index"], shown["lossy"]) == (factory, True)
    assert shown["sample"]["norm_max"] == pytest.approx(1, abs=1e-5)  # not the 7 that went in
    command = ("fit", "--source", tmp_path / "old.faiss", "--target", tmp_path / "new.parquet", "--solver", "ridge")
    said = run(*command, "-o", tmp_path / "map", code=2)
    assert f"({factory})" in said
    assert "--allow-lossy" in said
    assert not (tmp_path / "map").exists()


@pytest.mark.case("45")
def test_every_report_shows_what_there_is_without_migrating(world: Path, tmp_path: Path) -> None:
    """The naive swap has no number where dimensions differ; it keeps its line, with the reason."""
    new, by = tmp_path / "new.faiss", ("--map", world / "map")
    for report in (run("migrate", world / "old.faiss", new, *by), run("check", new, *by)):
        for heading in ("\nagreement@10", "doc-agreement@10"):
            shown = report.split(heading)[1].split("\n\n")[0]
            places = [shown.index(f"\n  {name}") for name in ("status quo", "naive swap", "translated", "re-embedded")]
            assert places == sorted(places)
        assert f"(1) dimensions differ: {D_IN} and {D_OUT}" in report


@pytest.mark.case("p3")
def test_what_saturates_is_no_headline_and_no_gate(world: Path, tmp_path: Path) -> None:
    report = run("migrate", world / "old.faiss", tmp_path / "new.faiss", "--map", world / "map")
    headings = [line for line in report.splitlines() if "@10 among" in line]
    assert headings[0].startswith("agreement@10 among")
    assert "identity recall@10 is 1.000" in report
    assert "it saturates near 1 and proves little" in report
    agreement = float(report.split("translated")[1].split()[0])
    assert agreement < 0.95
    gate = ("migrate", world / "old.faiss", tmp_path / "x", "--map", world / "map", "--gate", "identity@10>=0.9")
    assert "identity recall saturates" in run(*gate, code=2)


@pytest.mark.case("p4")
def test_pinv_near_as_many_pairs_as_dimensions_warns_and_auto_stays_away_from_it(rows: Any) -> None:
    """512 pairs of 500 dimensions are left to fit, where the pseudo-inverse is at its worst."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((640, 500), dtype=np.float32)
    y = unit(x @ rng.standard_normal((500, 30)) + 9 * rng.standard_normal((640, 30)))
    found = {}
    for solver in ("pinv", "ridge", "auto"):
        m = vecferry.fit(rows(range(640), x, uri="SRC"), rows(range(640), y, uri="TGT"), solver=solver, effort=0)
        assert m.card is not None
        found[solver] = m.card.measured["relative_error"]
        warned = "pinv on 512 pairs of 500 dimensions: below 1000 pairs it fits noise" in str(m.card.warnings)
        assert warned == (solver == "pinv")
    assert found["pinv"] > 0.9  # next to nothing is predicted
    assert found["auto"] == pytest.approx(found["ridge"], rel=0.05)
    assert found["ridge"] < 0.75


@pytest.mark.case("p7")
def test_float32_comes_out_of_float64_and_half_of_it_where_asked(tmp_path: Path) -> None:
    x = np.random.default_rng(6).standard_normal((300, D_IN))
    np.save(tmp_path / "old.npy", x)
    table(tmp_path / "old.parquet", np.arange(300), pa.array(x.tolist(), pa.list_(pa.float64())))
    plain_map().save(tmp_path / "map")
    expected = unit(x @ np.asarray(plain_map().weight, np.float64))
    for dtype, width in (("float32", 4), ("float16", 2)):
        for kind in ("npy", "parquet"):
            new = tmp_path / f"{kind}-{dtype}"
            run("migrate", tmp_path / f"old.{kind}", f"{kind}:{new}", "--map", tmp_path / "map", "--dtype", dtype)
            with open_reader(str(new)) as reader:
                assert reader.info.dtype == dtype
            np.testing.assert_allclose(read(new)[1], expected, atol=1e-6 if width == 4 else 1e-3)
        raw = np.load(tmp_path / f"npy-{dtype}" / "vectors.npy", mmap_mode="r")
        assert raw.nbytes == 300 * D_OUT * width
        assert pq.read_schema(next((tmp_path / f"parquet-{dtype}").glob("*.parquet"))).field(
            "vector"
        ).type.value_type == pa.type_for_alias("float" if width == 4 else "halffloat")


# Losing, doubling or breaking data


@pytest.mark.case("p8")
def test_the_same_command_twice_is_one_migration(tmp_path: Path) -> None:
    x = np.random.default_rng(7).standard_normal((500, D_IN))
    table(tmp_path / "old.parquet", [f"d{i}" for i in range(500)], np.asarray(x, np.float32))
    plain_map().save(tmp_path / "map")
    command = ("migrate", tmp_path / "old.parquet", f"parquet:{tmp_path / 'new'}", "--map", tmp_path / "map")
    run(*command)
    files = {p: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "new").iterdir()}
    assert "published by this very migration before: nothing was written" in run(*command, "--batch-size", 77)
    assert {p: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in files} == files
    assert read(tmp_path / "new")[0] == [f"d{i}" for i in range(500)]


def written() -> int:
    """Return the bytes that this process has handed to write calls."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "wchar" in line)


@pytest.mark.case("p10")
@pytest.mark.parametrize(
    ("kind", "index", "staged"),
    [
        ("faiss", "Flat", 0),
        ("faiss", "IDMap,Flat", 16),
        ("faiss", "IVF8,Flat", 32),
        ("parquet", None, 0),
        ("npy", None, 0),
    ],
)
def test_each_row_is_written_once_however_many_batches(
    kind: str, index: str | None, staged: int, tmp_path: Path
) -> None:
    """A thousand batches. Ids, and rows of what FAISS builds in memory, stand in files of their own before."""
    n, d = 100_000, 8
    np.save(tmp_path / "old.npy", np.random.default_rng(8).standard_normal((n, d), dtype=np.float32))
    target = tmp_path / "new"
    before = written()
    m = plain_map(d, d)
    vecferry.migrate(str(tmp_path / "old.npy"), f"{kind}:{target}", m, index=index, batch_size=100, threads=1)
    total = written() - before
    size = sum(p.stat().st_size for p in ([target] if target.is_file() else target.iterdir()))
    assert n * d * 4 <= size <= total < 1.1 * (size + staged * n)


@pytest.mark.case("p13")
def test_ids_keep_their_type_or_are_refused_up_front(tmp_path: Path) -> None:
    x = np.random.default_rng(9).standard_normal((40, D_IN)).astype(np.float32)
    plain_map().save(tmp_path / "map")
    ids = (np.random.default_rng(9).permutation(40) + 2**40).tolist()
    index = faiss.IndexIDMap(faiss.IndexFlatIP(D_IN))
    index.add_with_ids(x, np.array(ids))
    faiss.write_index(index, str(tmp_path / "0"))
    for n, target in enumerate(("parquet", "npy", "faiss")):  # from one to the next
        plain_map(D_IN, D_IN, f"model {n}", f"model {n + 1}").save(tmp_path / f"map{n}")
        run("migrate", tmp_path / f"{n}", f"{target}:{tmp_path / str(n + 1)}", "--map", tmp_path / f"map{n}")
        with open_reader(str(tmp_path / f"{n + 1}")) as reader:
            assert reader.info.id_type == pa.int64()
        assert read(tmp_path / f"{n + 1}")[0] == ids
    table(tmp_path / "s.parquet", [f"d{i}" for i in ids], x)
    before = sorted(tmp_path.iterdir())
    said = run("migrate", tmp_path / "s.parquet", tmp_path / "s.faiss", "--map", tmp_path / "map", code=2)
    assert "FAISS stores integer ids only, these are string: write to parquet" in said
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.case("27")
def test_vectors_of_another_table_are_not_attached(tmp_path: Path) -> None:
    rng = np.random.default_rng(10)
    for name, n, d in (("old", 400, D_IN), ("new", 399, D_OUT)):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((n, d), dtype=np.float32))
    stores = ("--source", tmp_path / "old.npy", "--target", tmp_path / "new.npy")
    said = run("fit", *stores, "-o", tmp_path / "map", code=2)
    assert "numbers its 399 rows" in said
    assert "numbers 400" in said
    table(tmp_path / "other.parquet", [f"x{i}" for i in range(400)], rng.standard_normal((400, D_OUT)))
    table(tmp_path / "docs.parquet", [f"d{i}" for i in range(400)], rng.standard_normal((400, D_IN)))
    stores = ("--source", tmp_path / "docs.parquet", "--target", tmp_path / "other.parquet")
    said = run("fit", *stores, "-o", tmp_path / "map", code=3)
    assert f"none of the 400 ids of parquet:{tmp_path / 'other.parquet'} (x0, x1, x2, ...)" in said
    assert f"{tmp_path / 'docs.parquet'} (d0, d1, d2, ...): give both stores the same ids" in said


@pytest.mark.case("30")
@pytest.mark.parametrize("kind", ["faiss", "parquet", "npy"])
def test_duplicate_ids_of_every_store(kind: str, tmp_path: Path) -> None:
    x = np.eye(3, D_IN, dtype=np.float32)
    if kind == "faiss":
        index = faiss.IndexIDMap(faiss.IndexFlatIP(D_IN))
        index.add_with_ids(x, np.array([1, 1, 2]))
        faiss.write_index(index, str(tmp_path / "old"))
    elif kind == "parquet":
        table(tmp_path / "old", [1, 1, 2], x)
    else:
        (tmp_path / "old").mkdir()
        np.save(tmp_path / "old" / "vectors", x)
        np.save(tmp_path / "old" / "ids", [1, 1, 2])
    plain_map().save(tmp_path / "map")
    command = ("migrate", tmp_path / "old", tmp_path / "new", "--map", tmp_path / "map")
    said = run(*command, code=3)
    assert f"{kind}:{tmp_path / 'old'}: 1 ids occur more than once: 1. " in said
    assert "--duplicates keep-last" in said
    run(*command, "--duplicates", "keep-last")
    ids, y = read(tmp_path / "new")
    assert ids == [1, 2]
    np.testing.assert_allclose(y, unit(plain_map().weight[[1, 2]]), atol=1e-6)  # rows of the identity pick rows


@pytest.mark.case("28", "29")
@pytest.mark.parametrize("kind", ["faiss", "parquet", "npy"])
def test_one_nan_and_one_zero_in_ten(kind: str, tmp_path: Path) -> None:
    x = np.random.default_rng(11).standard_normal((10, D_IN)).astype(np.float32)
    x[3, 5], x[8] = np.nan, 0
    old = tmp_path / "old"
    if kind == "faiss":
        flat(old, x)
    elif kind == "parquet":
        table(old, np.arange(10), x)
    else:
        np.save(tmp_path / "old.npy", x)
        old = tmp_path / "old.npy"
    plain_map().save(tmp_path / "map")
    command = ("migrate", old, tmp_path / "new", "--map", tmp_path / "map")
    said = run(*command, code=3)
    assert "2 bad rows (NaN, infinite, zero or malformed) in rows 0 to 9: 3, 8. " in said
    assert "--bad-rows skip" in said
    facts = json.loads(run(*command, "--bad-rows", "skip", "--json"))["facts"]
    assert (facts["read"], facts["written"], facts["skipped"], facts["skipped_ids"]) == (10, 8, 2, [3, 8])
    assert read(tmp_path / "new")[0] == [0, 1, 2, 4, 5, 6, 7, 9]
    scan = json.loads(run("inspect", old, "--scan", "--json"))["scan"]
    assert (scan["rows"], scan["bad"], scan["bad_ids"]) == (10, 2, [3, 8])


@pytest.mark.case("28", "29")
def test_bad_rows_are_not_kept_and_the_reason_is_true(world: Path, tmp_path: Path) -> None:
    x = unit(np.random.default_rng(12).standard_normal((200, 8)))
    x[50, 0], x[70] = np.nan, 0
    index = faiss.index_factory(8, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(np.delete(x, [50, 70], 0))
    index.add(x)
    lists = [index.invlists.list_size(n) for n in range(4)]
    assert (index.ntotal, sum(lists)) == (200, 199)  # the row of NaN is counted and gone
    _, found = faiss.knn(x[:1], x, 200, faiss.METRIC_INNER_PRODUCT)
    below = int((np.delete(x, [50, 70], 0) @ x[0] < 0).sum())
    assert below > 50
    assert np.flatnonzero(found[0] == 70)[0] == 200 - 2 - below  # the row of zeros comes before all of them
    for command in (
        ("migrate", world / "old.faiss", tmp_path / "new", "--map", world / "map"),
        ("fit", "--source", world / "old.faiss", "--target", world / "new.parquet", "-o", tmp_path / "map"),
        ("assess", "--source", world / "old.faiss", "--target", world / "new.parquet"),
    ):
        said = run(*command, "--bad-rows", "keep", code=2)
        assert "bad rows can't be kept: NaN disappears from inverted lists" in said
        assert "a zero row is found before every document whose score is below zero" in said
        assert "--bad-rows skip" in said
    assert list(tmp_path.iterdir()) == []


# FAISS, Parquet and friends


@pytest.mark.case("6", "7")
@pytest.mark.parametrize("factory", ["IDMap,Flat", "IDMap2,Flat", "IVF8,Flat"])
def test_rows_come_back_where_faiss_aborts_or_asks_for_a_direct_map(factory: str, tmp_path: Path) -> None:
    n = 400 if factory.startswith("IVF") else 10
    rng = np.random.default_rng(13)
    x, ids = rng.standard_normal((n, 6), dtype=np.float32), rng.permutation(n) + 2**41
    index = faiss.index_factory(6, factory)
    index.train(x)
    index.add_with_ids(x, ids)
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    if factory.startswith("IVF"):
        with pytest.raises(RuntimeError, match="direct map not initialized"):
            index.reconstruct(int(ids[0]))
    got, y = read(tmp_path / "old.faiss")
    assert sorted(got) == sorted(ids.tolist())
    np.testing.assert_array_equal(y[np.argsort(got)], x[np.argsort(ids)])


@pytest.mark.case("9")
def test_shards_are_read_one_after_the_other() -> None:
    x = np.random.default_rng(14).standard_normal((20, 6), dtype=np.float32)
    shards = faiss.IndexShards(6, False, True)
    parts = [faiss.IndexFlatIP(6), faiss.IndexFlatIP(6)]
    for part, piece in zip(parts, (x[:10], x[10:]), strict=True):
        part.add(piece)
        shards.add_shard(part)
    with open_reader(shards) as reader:
        batches = list(reader.read(7))
    assert [i for b in batches for i in b.ids.to_pylist()] == list(range(20))
    np.testing.assert_array_equal(np.concatenate([b.vectors for b in batches]), x)


@pytest.mark.case("10", "11")
@pytest.mark.parametrize("kind", ["faiss", "npy"])
def test_a_file_larger_than_the_memory_that_may_be_used(kind: str, tmp_path: Path) -> None:
    """256 MiB of rows, and 64 MiB more than what the packages took may be allocated; loading the file whole fails."""
    n, d = 1 << 20, 64
    path = tmp_path / f"old.{kind}"
    if kind == "faiss":
        flat(path, np.empty((0, d), np.float32))
        data = bytearray(path.read_bytes())
        data[8:16] = n.to_bytes(8, "little")  # ntotal
        data[-8:] = (n * d).to_bytes(8, "little")  # elements
        path.write_bytes(data)
    else:
        np.lib.format.open_memmap(path, "w+", np.float32, (n, d)).flush()
    start = len(path.read_bytes()) if kind == "faiss" else path.stat().st_size - 4 * n * d
    with path.open("r+b") as file:  # holes but for the last row, which says whether all was read
        file.truncate(start + 4 * n * d)
        file.seek(start + 4 * (n - 1) * d)
        file.write(np.arange(d, dtype=np.float32).tobytes())
    code = f"""
import re, resource
import faiss, numpy as np
from vecferry.store import open_reader

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

with open_reader({str(path)!r}) as reader:  # everything is imported and every thread started before the limit
    next(iter(reader.read(4096)))
    before, limit = status("VmHWM"), status("VmData") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    total, count = 0.0, 0
    for batch in reader.read(4096):
        total, count = total + float(batch.vectors.sum()), count + len(batch)
print(count, total, status("VmHWM") - before)
try:
    faiss.read_index({str(path)!r}) if {kind == "faiss"} else np.load({str(path)!r})
except MemoryError:
    print("too large")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, total, growth = done.stdout.splitlines()[0].split()
    assert (int(count), float(total)) == (n, d * (d - 1) / 2)
    assert int(growth) < 64 << 20
    assert done.stdout.splitlines()[1] == "too large"  # the limit bites
    with path.open("r+b") as file:
        file.truncate(start + 4 * n * d - 1)
    said = run("inspect", path, code=3)
    assert str(path) in said


@pytest.mark.case("13")
def test_an_index_on_a_gpu_is_copied_to_the_cpu_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wheel for CPUs has neither the class nor the function: both stand in here, the index holds no row itself."""
    x = np.random.default_rng(15).standard_normal((30, D_IN), dtype=np.float32)

    class GpuIndex(faiss.IndexFlatIP):  # type: ignore[misc]
        pass

    def index_gpu_to_cpu(index: Any) -> Any:
        assert isinstance(index, GpuIndex)
        copy = faiss.IndexFlatIP(D_IN)
        copy.add(x)
        return copy

    monkeypatch.setattr(faiss, "GpuIndex", GpuIndex, raising=False)
    monkeypatch.setattr(faiss, "index_gpu_to_cpu", index_gpu_to_cpu, raising=False)
    on_gpu = GpuIndex(D_IN)
    report = vecferry.migrate(on_gpu, tmp_path / "new.faiss", plain_map())
    assert isinstance(report, vecferry.Report)
    assert report.facts["written"] == 30
    np.testing.assert_allclose(read(tmp_path / "new.faiss")[1], unit(x @ plain_map().weight), atol=1e-6)


class Malicious:
    """Make a file when a pickle of it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.case("32")
def test_no_pickle_is_ever_loaded(world: Path, tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    evil = pickle.dumps(Malicious(loaded))
    pickle.loads(evil)
    loaded.rmdir()  # it would work
    bomb = np.array([Malicious(loaded)], object)
    np.save(tmp_path / "x.npy", bomb, allow_pickle=True)
    (tmp_path / "x.faiss").write_bytes(evil)
    (tmp_path / "x.parquet").write_bytes(evil)
    (tmp_path / "index").mkdir()
    flat(tmp_path / "index" / "index.faiss", np.ones((3, D_IN)))
    (tmp_path / "index" / "index.pkl").write_bytes(evil)  # as LangChain stores them, side by side
    for name in ("x.npy", "x.faiss", "x.parquet", "index/index.pkl"):
        assert str(tmp_path / name) in run("inspect", tmp_path / name, code=3)
        assert str(tmp_path / name) in run("migrate", tmp_path / name, tmp_path / "y", "--map", world / "map", code=3)
    for kind in ("faiss", "npy", "parquet"):
        assert "index.pkl" in run("inspect", f"{kind}:{tmp_path / 'index' / 'index.pkl'}", code=3)
    assert read(tmp_path / "index")[1].tolist() == np.ones((3, D_IN)).tolist()  # the index alone
    np.save(tmp_path / "v.npy", np.ones((1, D_IN), np.float32))
    assert "x.npy" in run("inspect", f"npy:{tmp_path / 'v.npy'}?ids={tmp_path / 'x.npy'}", code=3)
    for name in ("card.json", "map.safetensors", "holdout.parquet"):
        damaged = tmp_path / f"map-{name}"
        damaged.mkdir()
        for file in (world / "map").iterdir():
            (damaged / file.name).write_bytes(evil if file.name == name else file.read_bytes())
        target = tmp_path / "y.faiss"
        gate = ("--gate", "agreement@10>=0.1")
        assert name in run("migrate", world / "old.faiss", target, "--map", damaged, *gate, code=3)
    assert not loaded.exists()
    with pytest.raises(UsageError):
        open_reader(Malicious(loaded))


VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3) + 1


def tensor() -> pa.Array:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(VECTORS)


@pytest.mark.case("q1")
@pytest.mark.parametrize(
    ("column", "options"),
    [
        (pa.array(VECTORS.tolist(), pa.list_(pa.float64())), ""),
        (pa.array(VECTORS.tolist(), pa.large_list(pa.float32())), ""),
        (pa.array(VECTORS.astype(np.float16).tolist(), pa.list_(pa.float16(), 3)), ""),
        (tensor(), ""),
        (pa.array([v.astype("<f4").tobytes() for v in VECTORS]), "&dtype=float32"),
        (pa.array([v.astype("<f8").tobytes() for v in VECTORS], pa.large_binary()), "&dtype=float64"),
        (pa.array([v.astype("<f2").tobytes() for v in VECTORS], pa.binary(6)), "&dtype=float16"),
    ],
    ids=lambda p: str(p.type) if isinstance(p, pa.Array) else "",
)
def test_vectors_of_every_column_type(column: pa.Array, options: str, tmp_path: Path) -> None:
    path = table(tmp_path / "old.parquet", [7, 3, 9, 1], column)
    ids, x = read(f"parquet:{path}?vector=vector{options}")
    assert (ids, x.tolist(), x.dtype) == ([7, 3, 9, 1], VECTORS.tolist(), np.float32)
    if options:
        said = run("inspect", f"parquet:{path}?vector=vector", code=2)
        assert "dtype=" in said


@pytest.mark.case("q1")
@pytest.mark.parametrize("kind", [pa.int32(), pa.string(), pa.bool_()], ids=str)
def test_lists_of_other_things_are_refused(kind: pa.DataType, tmp_path: Path) -> None:
    path = table(tmp_path / "old.parquet", [1, 2], pa.array([[1, 0], [0, 1]]).cast(pa.list_(kind)))
    assert f"list<element: {kind}>" in run("inspect", path, code=3)


@pytest.mark.case("q2")
@pytest.mark.parametrize(
    ("rows", "bad"),
    [
        ([[1, 2], [3], [4, 5], [6, 7]], [1]),
        ([[1, 2], None, [4, 5], [6, 7]], [1]),
        ([[1, 2], [3, 4], [None, 5], [6, 7]], [2]),
        ([[1, 2], [3, 4], [4, 5, 6], None], [2, 3]),
    ],
    ids=["ragged", "null row", "null element", "both"],
)
@pytest.mark.parametrize("fixed", [False, True])
def test_rows_that_are_no_vectors_are_named_and_shift_nothing(
    rows: list[Any], bad: list[int], fixed: bool, tmp_path: Path
) -> None:
    if fixed:
        rows = [r if r is None or len(r) == 2 else None for r in rows]
    column = pa.array([[9, 9], *rows, [9, 9]], pa.list_(pa.float32(), 2) if fixed else pa.list_(pa.float32()))
    path = table(tmp_path / "old.parquet", ["a", "b", "c", "d"], column.slice(1, 4))
    plain_map(2, 3).save(tmp_path / "map")
    command = ("migrate", path, f"parquet:{tmp_path / 'new'}", "--map", tmp_path / "map")
    said = run(*command, code=3)
    assert f"in rows 0 to 3: {', '.join('abcd'[n] for n in bad)}. " in said
    run(*command, "--bad-rows", "skip")
    ids, y = read(tmp_path / "new")
    good = [n for n in range(4) if n not in bad]
    assert ids == ["abcd"[n] for n in good]
    x = np.array([rows[n] for n in good], np.float32)
    np.testing.assert_allclose(y, unit(x @ plain_map(2, 3).weight), atol=1e-6)


@pytest.mark.case("q3")
def test_which_column_is_asked_for_with_the_candidates(tmp_path: Path) -> None:
    x = pa.array(VECTORS.tolist(), pa.list_(pa.float32()))
    nested = pa.StructArray.from_arrays([pa.array(VECTORS[::-1].tolist(), pa.list_(pa.float32()))], ["emb"])
    path = tmp_path / "old.parquet"
    pq.write_table(pa.table({"id": [7, 3, 9, 1], "a.b": x, "doc": nested}), path)
    said = run("inspect", path, code=2)
    assert "columns a.b, doc.emb hold vectors: say which" in said
    assert "?vector=" in said
    assert read(f"parquet:{path}?vector=a.b")[1].tolist() == VECTORS.tolist()
    assert read(f"parquet:{path}?vector=doc.emb")[1].tolist() == VECTORS[::-1].tolist()
    assert "nothing" in run("inspect", f"parquet:{path}?vector=nothing", code=2)


@pytest.mark.case("q4")
@pytest.mark.parametrize("kind", ["faiss", "parquet", "npy"])
def test_junk_behind_a_file_a_file_cut_short_and_a_wrong_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"old.{kind}"
    x = np.random.default_rng(16).standard_normal((100, D_IN), dtype=np.float32)
    if kind == "faiss":
        flat(path, x)
    elif kind == "parquet":
        table(path, np.arange(100), x)
    else:
        np.save(path, x)
    whole = path.read_bytes()
    for damaged in (whole + b"junk", whole + bytes(4096), whole[:-1], whole[: len(whole) // 2], whole[:6], b""):
        path.write_bytes(damaged)
        said = run("inspect", f"{kind}:{path}", code=3)
        assert str(path) in said
        run("inspect", path, code=3)
    others = {"faiss": "x.parquet", "parquet": "x.npy", "npy": "x.faiss"}
    wrong = tmp_path / others[kind]
    wrong.write_bytes(whole)
    assert json.loads(run("inspect", wrong, "--json"))["kind"] == kind  # the content says what it is
    assert str(wrong) in run("inspect", f"{wrong.suffix[1:]}:{wrong}", code=3)


def test_every_row_that_applies_has_a_test() -> None:
    marked: set[str] = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "case":
                marked |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    assert marked == set(COVERED)
