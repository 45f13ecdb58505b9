"""What is lost to what: each stage against brute force, from codes into other codes, searched approximately."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import vecferry
from vecferry.batch import VectorBatch
from vecferry.errors import BadRowsError, IncompatibleError, UsageError
from vecferry.evaluate import evaluate
from vecferry.holdout import Holdout
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapfile import seal
from vecferry.measured import Loss
from vecferry.report import Report
from vecferry.store import StoreInfo, Tunable, open_reader, open_writer

faiss = pytest.importorskip("faiss", reason="the stores that have codes and search approximately")

N, HELD, D_IN, D_OUT, Q = 4000, 800, 16, 24, 120


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((80, D_IN))
    x = unit(centres[rng.integers(0, 80, N)] + 0.6 * rng.standard_normal((N, D_IN)))
    lift = rng.standard_normal((D_IN, D_OUT)).astype(np.float32)
    y = unit(x @ lift + 0.5 * rng.standard_normal((N, D_OUT)))
    return {"x": x, "y": y, "lift": lift, "q": unit(y[:Q] + 0.1 * rng.standard_normal((Q, D_OUT)))}


def built(path: Path, x: np.ndarray, factory: str) -> str:
    index = faiss.index_factory(x.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(x)
    index.add(x)
    faiss.write_index(index, str(path))
    return str(path)


def stored(path: Path, ids: np.ndarray, x: np.ndarray, **info: str) -> str:
    uri = f"parquet:{path}"
    with open_writer(
        uri, StoreInfo("parquet", uri, len(x), x.shape[1], id_type=pa.int64(), provenance={"plan": uri}, **info)
    ) as w:
        w.write(VectorBatch(pa.array(ids), np.ascontiguousarray(x)))
        with w.staged():
            pass
        w.commit()
    return uri


def vectors(path: str) -> np.ndarray:
    """Decode all rows of an index with FAISS itself, in the order of their numbers."""
    index = faiss.read_index(path)
    if isinstance(index, faiss.IndexIVF):
        index.make_direct_map()
    return index.reconstruct_n(0, index.ntotal)


def a_map(data: dict[str, np.ndarray], x: np.ndarray, *, queries: bool = True) -> LinearMap:
    held = slice(N - HELD, N)
    asked = {"query_ids": pa.array([f"q{i}" for i in range(Q)]), "queries": data["q"]} if queries else {}
    holdout = Holdout(pa.array(np.arange(N)[held]), x[held], data["y"][held], **asked)
    card = Card(Side(D_IN, "old"), Side(D_OUT, "new"), "by hand")
    return seal(LinearMap(data["lift"], post="l2", card=card, holdout=holdout))


def agreement(queries: np.ndarray, true: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return agreement@10 by sorting all products: no ties among these vectors but those of equal codes."""
    want = np.argsort(-(queries.astype(float) @ true.T.astype(float)), axis=1)[:, :10]
    got = np.argsort(-(queries.astype(float) @ documents.T.astype(float)), axis=1, kind="stable")[:, :10]
    return np.array([len(set(a) & set(b)) / 10 for a, b in zip(want, got, strict=True)])


def by_cause(report: Report) -> dict[str, Loss]:
    return {loss.cause: loss for loss in report.attribution}


def test_each_stage_is_what_brute_force_finds(data: dict[str, np.ndarray], tmp_path: Path) -> None:
    source = built(tmp_path / "old.faiss", data["x"], "PQ4")
    exact = stored(tmp_path / "exact", np.arange(N - HELD, N), data["x"][-HELD:])
    decoded = vectors(source)
    m = a_map(data, decoded)
    target = tmp_path / "new.faiss"
    report = vecferry.migrate(
        source, f"faiss:{target}?nprobe=2", m, index="IVF32,SQ4", source_exact=exact, allow_lossy=True
    )
    assert isinstance(report, Report)
    found = by_cause(report)
    true = data["y"][-HELD:]
    stages = [
        np.ones(Q),
        agreement(data["q"], true, unit(data["x"][-HELD:] @ data["lift"])),
        agreement(data["q"], true, unit(decoded[-HELD:] @ data["lift"])),
        agreement(data["q"], true, vectors(str(target))[-HELD:]),
    ]
    index = faiss.read_index(str(target))
    only = faiss.SearchParametersIVF(sel=faiss.IDSelectorRange(N - HELD, N), nprobe=index.nprobe)
    _, hits = index.search(data["q"], 10, params=only)
    want = np.argsort(-(data["q"].astype(float) @ true.T.astype(float)), axis=1)[:, :10] + N - HELD
    stages.append(np.array([len(set(a) & set(b)) / 10 for a, b in zip(want, hits, strict=True)]))
    causes = ["the map", "the source's codes", "the target's codes", "ANN search"]
    for cause, before, after in zip(causes, stages, stages[1:], strict=False):
        loss = found[cause]
        # equal codes are ties, of which none is preferred: both orders may differ by some places
        assert loss.value == pytest.approx((before - after).mean(), abs=0.005), cause
        assert loss.low is not None
        assert loss.high is not None
        assert loss.low <= loss.value <= loss.high
        # paired: the interval is as narrow as the differences, by the central limit theorem
        half = 1.96 * (before - after).std() / np.sqrt(Q)
        assert (loss.high - loss.low) / 2 == pytest.approx(half, rel=0.25, abs=0.003), cause
    assert all(found[cause].value > 0.02 for cause in causes if cause != "the target's codes")
    indexed = report.evaluation.cell("as indexed", "agreement", 10)  # type: ignore[union-attr]
    assert sum(found[cause].value for cause in causes) == pytest.approx(1 - indexed.value)
    worst = max(causes, key=lambda cause: found[cause].value)
    assert report.most_lost.startswith(f"Most is lost to {worst}: {found[worst].value:.3f} of the")
    assert report.most_lost in " ".join(report.table().split())
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").attribution == report.attribution
    # a check of the finished index knows from its sidecar that the source held codes
    again = by_cause(vecferry.check(str(target), map=m))
    assert again["the map and the source's codes"].value == pytest.approx(1 - stages[2].mean(), abs=0.005)
    assert "--source-exact" in again["the source's codes"].reason


def test_what_is_unknown_and_what_is_nothing(data: dict[str, np.ndarray], tmp_path: Path) -> None:
    codes = built(tmp_path / "codes.faiss", data["x"], "PQ4")
    m = a_map(data, vectors(codes))
    report = vecferry.migrate(codes, tmp_path / "a.faiss", m, index="Flat", allow_lossy=True)
    found = by_cause(report)
    assert found["the source's codes"].value is None
    assert "unknown" in found["the source's codes"].reason
    assert found["the target's codes"].value == found["ANN search"].value == 0
    assert found["ANN search at full size"].reason == "a flat index searches exactly"
    flat = built(tmp_path / "flat.faiss", data["x"], "Flat")
    report = vecferry.migrate(flat, f"parquet:{tmp_path / 'b'}", a_map(data, data["x"], queries=False))
    found = by_cause(report)
    assert found["the source's codes"].value == 0
    assert "no index" in found["ANN search"].reason
    assert {loss.metric for loss in report.attribution} == {"doc-agreement@10", "index-overlap@10"}
    translated = report.evaluation.cell("translated", "doc-agreement", 10)
    assert found["the map"].value == pytest.approx(1 - translated.value)


def test_exact_vectors_of_something_else_are_refused(data: dict[str, np.ndarray], tmp_path: Path) -> None:
    source = built(tmp_path / "old.faiss", data["x"], "PQ4")
    m, ids = a_map(data, vectors(source)), np.arange(N)
    other = unit(np.random.default_rng(1).standard_normal((N, D_IN)))
    for name, kind, match, store in (
        ("few", BadRowsError, "not in this store", stored(tmp_path / "few", ids[:-5], data["x"][:-5])),
        ("dims", IncompatibleError, f"{D_OUT} dimensions", stored(tmp_path / "dims", ids, data["y"])),
        ("other", IncompatibleError, "no nearer to their own rows", stored(tmp_path / "other", ids, other)),
        ("codes", UsageError, "quantised codes", source),
    ):
        with pytest.raises(kind, match=match):
            vecferry.migrate(source, tmp_path / f"{name}.faiss", m, source_exact=store, allow_lossy=True)
        assert not (tmp_path / f"{name}.faiss").exists()


@pytest.mark.parametrize(("factory", "name", "start"), [("IVF64,Flat", "nprobe", 1), ("HNSW8,Flat", "efSearch", 16)])
def test_the_sweep_is_what_faiss_finds_with_these_settings(
    factory: str, name: str, start: int, data: dict[str, np.ndarray], tmp_path: Path
) -> None:
    path = built(tmp_path / "new.faiss", data["y"], factory)
    m = a_map(data, data["x"])
    with open_reader(path) as reader:
        assert isinstance(reader, Tunable)
        assert reader.tunable == {name: 64 if name == "nprobe" else N}
        e = evaluate(m.holdout, m, staged=reader)  # type: ignore[arg-type]
        assert reader.info.parameters[name] == start  # and its own search is as it was
        after = evaluate(m.holdout, m, staged=reader)  # type: ignore[arg-type]
        assert after == e
    overlap, cost = e.sweep
    assert (overlap.metric, overlap.against) == ("index-overlap@10", name)
    index = faiss.read_index(path)
    want = np.argsort(-(data["q"].astype(float) @ data["y"].T.astype(float)), axis=1)[:, :10]
    settings = [p.x for p in overlap.points]
    assert settings == [start * 2**i for i in range(len(settings))]
    counted = []
    for point in overlap.points:
        if name == "nprobe":
            index.nprobe = int(point.x)
        else:
            index.hnsw.efSearch = int(point.x)
        faiss.cvar.indexIVF_stats.reset()
        faiss.cvar.hnsw_stats.reset()
        _, got = index.search(data["q"], 10)
        counted.append(faiss.cvar.indexIVF_stats.ndis + faiss.cvar.hnsw_stats.ndis + (name == "nprobe") * 64 * Q)
        assert point.value == pytest.approx(
            np.mean([len(set(a) & set(b)) / 10 for a, b in zip(want, got, strict=True)])
        )
    assert [p.value for p in cost.points] == pytest.approx([c / counted[0] for c in counted])
    assert all(p.value < 0.99 for p in overlap.points[:-1])
    assert overlap.points[-1].value >= 0.99 or len(settings) == 6
    assert e.cell("as indexed", "index-overlap", 10).value == pytest.approx(overlap.points[0].value)
    # at full size by true vectors too, and it is shown
    report = vecferry.check(path, truth=stored(tmp_path / "truth", np.arange(N), data["y"]), queries=None, map=m)
    assert report.all_curves == e.sweep
    assert f"index-overlap@10 against {name}" in report.table()


def test_where_the_setting_in_use_is_enough_nothing_is_swept(data: dict[str, np.ndarray], tmp_path: Path) -> None:
    path = built(tmp_path / "new.faiss", data["y"], "IVF16,Flat")
    with open_reader(f"faiss:{path}?nprobe=16") as reader:
        e = evaluate(a_map(data, data["x"]).holdout, a_map(data, data["x"]), staged=reader)  # type: ignore[arg-type]
    assert e.cell("as indexed", "index-overlap", 10).value == 1
    assert e.sweep == ()
