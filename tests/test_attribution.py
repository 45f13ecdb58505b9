"""What is lost to what: each stage against brute force, from codes into other codes, searched approximately."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

import vecferry
from vecferry.batch import VectorBatch
from vecferry.cli import cli
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


@pytest.fixture(scope="module")
def codes(data: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Store the source as codes, once: they take long to train."""
    return built(tmp_path_factory.mktemp("codes") / "old.faiss", data["x"], "PQ4")


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


def test_each_stage_is_what_brute_force_finds(data: dict[str, np.ndarray], codes: str, tmp_path: Path) -> None:
    exact = stored(tmp_path / "exact", np.arange(N - HELD, N), data["x"][-HELD:])
    decoded = vectors(codes)
    m = a_map(data, decoded)
    target = tmp_path / "new.faiss"
    report = vecferry.migrate(
        codes, f"faiss:{target}?nprobe=2", m, index="IVF32,SQ4", source_exact=exact, allow_lossy=True
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
    # with exact vectors a check tells apart what the migration did: the hold-out has what the codes gave back
    assert vecferry.check(str(target), map=m, source_exact=exact).attribution == report.attribution
    # a hold-out of exact vectors doesn't know that, and says so
    unseen = by_cause(vecferry.check(str(target), map=a_map(data, data["x"]), source_exact=exact))
    assert unseen["the map"].value == found["the map"].value
    assert "counted with the target's codes" in unseen["the source's codes"].reason
    assert unseen["the target's codes"].value == pytest.approx((stages[1] - stages[3]).mean(), abs=0.005)
    unrecorded = built(tmp_path / "any.faiss", data["y"], "Flat")
    unseen = by_cause(vecferry.check(unrecorded, map=a_map(data, data["x"]), source_exact=exact))
    assert "counted with the target's codes" in unseen["the source's codes"].reason


def without_own(queries: np.ndarray, documents: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the ten nearest of all documents but the query itself."""
    scores = queries.astype(float) @ documents.T.astype(float)
    scores[np.arange(len(own)), own] = -np.inf
    return np.argsort(-scores, axis=1)[:, :10]


def test_at_full_size_codes_and_map_are_one_loss(data: dict[str, np.ndarray], codes: str, tmp_path: Path) -> None:
    m = a_map(data, vectors(codes))
    target = f"{tmp_path}/new.faiss"
    vecferry.migrate(codes, f"faiss:{target}?nprobe=2", m, index="IVF32,SQ4", allow_lossy=True)
    truth = stored(tmp_path / "truth", np.arange(N)[::-1], data["y"][::-1])
    report = vecferry.check(f"faiss:{target}?nprobe=2", truth=truth, map=m)
    found = by_cause(report)
    decoded = agreement(data["q"], data["y"], vectors(target))
    index = faiss.read_index(target)
    index.nprobe = 2
    _, hits = index.search(data["q"], 10)
    want = np.argsort(-(data["q"].astype(float) @ data["y"].T.astype(float)), axis=1)[:, :10]
    searched = np.array([len(set(a) & set(b)) / 10 for a, b in zip(want, hits, strict=True)])
    assert found["the map and the codes"].value == pytest.approx((1 - decoded).mean(), abs=0.005)
    assert found["ANN search"].value == pytest.approx((decoded - searched).mean(), abs=0.005)
    assert found["ANN search"].value > 0.01
    assert {loss.metric for loss in report.attribution} == {"agreement@10", "index-overlap@10"}
    chain = [loss.value for loss in report.attribution if loss.value is not None and loss.metric == "agreement@10"]
    cell = report.evaluation.cell("as indexed", "agreement", 10)  # type: ignore[union-attr]
    assert sum(chain) == pytest.approx(1 - cell.value)
    for cause in ("the source's codes", "the target's codes"):
        assert found[cause].value is None
        assert "unknown at full size" in found[cause].reason
        assert "without --truth" in found[cause].reason
    assert found["ANN search at full size"].value == pytest.approx(
        1 - report.evaluation.cell("as indexed", "index-overlap", 10).value  # type: ignore[union-attr]
    )
    assert report.most_lost.startswith("Most is lost to the map and the codes")


def test_at_full_size_what_exact_vectors_lose_is_the_map(data: dict[str, np.ndarray], tmp_path: Path) -> None:
    m = a_map(data, data["x"], queries=False)
    target = f"{tmp_path}/new.faiss"
    flat = built(tmp_path / "old.faiss", data["x"], "Flat")
    vecferry.migrate(flat, target, m, index="IVF32,Flat")
    truth = stored(tmp_path / "truth", np.arange(N), data["y"])
    # the sidecar says that a map made it, of exact vectors
    found = by_cause(vecferry.check(f"faiss:{target}?nprobe=1", truth=truth))
    with open_reader(target) as reader:  # documents stand in as they are drawn from its order, list by list
        order = np.concatenate([ids.to_numpy() for ids in reader.ids(1000)])
    translated = unit(data["x"] @ data["lift"])

    def lost_by_hand(order: np.ndarray, searched: faiss.Index | None = None) -> np.ndarray:
        own = order[np.sort(np.random.default_rng(0).permutation(N)[:1000])]
        want, got = (without_own(data["y"][own], documents, own) for documents in (data["y"], translated))
        if searched is not None:
            _, hits = searched.search(data["y"][own], 11)
            got = np.array([[h for h in row if h != o][:10] for row, o in zip(hits, own, strict=True)])
        return 1 - np.array([len(set(a) & set(b)) / 10 for a, b in zip(want, got, strict=True)])

    lost = lost_by_hand(order)
    index = faiss.read_index(target)
    index.nprobe = 1
    assert found["the map"].metric == "doc-agreement@10"
    assert found["the map"].value == pytest.approx(lost.mean(), abs=1e-3)
    half = 1.96 * lost.std() / np.sqrt(1000)
    assert (found["the map"].high - found["the map"].low) / 2 == pytest.approx(half, rel=0.15)
    assert found["the source's codes"].value == found["the target's codes"].value == 0
    assert found["ANN search"].value == pytest.approx(lost_by_hand(order, index).mean() - lost.mean(), abs=1e-3)
    assert found["ANN search"].value > 0.01
    # an index of which nothing is known holds vectors; a store without an index loses nothing to search
    lost = lost_by_hand(np.arange(N))
    found = by_cause(vecferry.check(built(tmp_path / "any.faiss", translated, "Flat"), truth=truth))
    assert found["the vectors that the index holds"].value == pytest.approx(lost.mean(), abs=1e-3)
    assert found["ANN search"].value == 0
    assert "the map" not in found
    assert "the source's codes" not in found
    plain = stored(tmp_path / "plain", np.arange(N), translated)
    found = by_cause(vecferry.check(plain, truth=truth, map=m))
    assert found["the map and the source's codes"].value == pytest.approx(lost.mean(), abs=1e-3)
    assert found["ANN search"].reason == "the store has no index of its own"


def test_the_command_line_compares_with_exact_vectors(data: dict[str, np.ndarray], codes: str, tmp_path: Path) -> None:
    m, exact = a_map(data, vectors(codes)), stored(tmp_path / "exact", np.arange(N), data["x"])
    m.save(tmp_path / "map")
    target = str(tmp_path / "new.faiss")
    vecferry.migrate(codes, target, m, index="Flat", allow_lossy=True)
    arguments = ["check", target, "--map", str(tmp_path / "map"), "--source-exact", exact, "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.stderr
    told = {loss["cause"]: loss["value"] for loss in json.loads(result.stdout)["attribution"]}
    true = data["y"][-HELD:]
    from_exact = agreement(data["q"], true, unit(data["x"][-HELD:] @ data["lift"]))
    from_codes = agreement(data["q"], true, unit(vectors(codes)[-HELD:] @ data["lift"]))
    assert told["the map"] == pytest.approx((1 - from_exact).mean(), abs=0.005)
    assert told["the source's codes"] == pytest.approx((from_exact - from_codes).mean(), abs=0.005)
    result = CliRunner().invoke(cli, [*arguments, "--truth", exact])
    assert result.exit_code == 2
    assert "--source-exact goes with --map and without --truth" in result.stderr


def test_what_is_unknown_and_what_is_nothing(data: dict[str, np.ndarray], codes: str, tmp_path: Path) -> None:
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


def test_exact_vectors_of_something_else_are_refused(data: dict[str, np.ndarray], codes: str, tmp_path: Path) -> None:
    m, ids = a_map(data, vectors(codes)), np.arange(N)
    other = unit(np.random.default_rng(1).standard_normal((N, D_IN)))
    for name, kind, match, store in (
        ("few", BadRowsError, "not in this store", stored(tmp_path / "few", ids[:-5], data["x"][:-5])),
        ("dims", IncompatibleError, f"{D_OUT} dimensions", stored(tmp_path / "dims", ids, data["y"])),
        ("other", IncompatibleError, "no nearer to their own rows", stored(tmp_path / "other", ids, other)),
        ("codes", UsageError, "quantised codes", codes),
    ):
        with pytest.raises(kind, match=match):
            vecferry.migrate(codes, tmp_path / f"{name}.faiss", m, source_exact=store, allow_lossy=True)
        assert not (tmp_path / f"{name}.faiss").exists()
        with pytest.raises(kind, match=match):
            vecferry.check(built(tmp_path / "new.faiss", data["y"], "Flat"), map=m, source_exact=store)


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
