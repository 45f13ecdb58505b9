"""Filters in the migration: what is made, chosen, refused, folded, and measured against all dimensions."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_llm
from click.testing import CliRunner

import vecferry
from vecferry.batch import id_keys
from vecferry.cli import cli
from vecferry.compressing import compress, filter_of
from vecferry.errors import DataError, IncompatibleError, UsageError
from vecferry.filtering import make_filter
from vecferry.filters import embed_filter
from vecferry.holdout import holdout_of
from vecferry.kernel import torch_kernel
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapcard import describe
from vecferry.store import open_reader
from vecferry.transforming import transform_store

DIM, TAU = 16, 4
HEAD = tiny_llm.head(dim=DIM)
RNG = np.random.default_rng(5)
SCALES = np.linspace(2.0, 0.05, DIM, dtype=np.float32)
ROTATION = np.linalg.qr(RNG.standard_normal((DIM, DIM)))[0].astype(np.float32)


def vectors(n: int, seed: int, mean: float = 1.0) -> np.ndarray:
    """Return vectors that vary in few directions around a mean, of one length."""
    x = (np.random.default_rng(seed).standard_normal((n, DIM)).astype(np.float32) * SCALES + mean) @ ROTATION
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def write(path: Path, x: np.ndarray) -> str:
    pq.write_table(pa.table({"id": np.arange(len(x)), "vector": list(x)}), path)
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model, a corpus of its vectors, queries, and the same documents by an old model."""
    folder = tmp_path_factory.mktemp("filters")
    tiny_llm.write(folder / "llm", HEAD)
    new = vectors(1500, 1)
    old = new @ np.random.default_rng(2).standard_normal((DIM, 12)).astype(np.float32)
    write(folder / "new.parquet", new)
    write(folder / "old.parquet", old + 0.05 * np.random.default_rng(3).standard_normal(old.shape).astype(np.float32))
    write(folder / "some.parquet", new[:1000])
    write(folder / "queries.parquet", vectors(300, 4))
    m = vecferry.fit(
        folder / "old.parquet", folder / "some.parquet", queries=folder / "queries.parquet", solver="ridge"
    )
    m.save(folder / "map")
    given = {"store": folder / "new.parquet", "queries": folder / "queries.parquet", "map": folder / "map"}
    made = make_filter(tau=TAU, kind="pca", **given)
    made.save(folder / "pca")
    make_filter(folder / "llm", tau=TAU, kind="embedfilter").save(folder / "embedfilter")
    return folder


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def agreement(found: np.ndarray, best: np.ndarray) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, best, strict=True)]))


def nearest(queries: np.ndarray, documents: np.ndarray, k: int = 10) -> np.ndarray:
    unit = [x.astype(np.float64) / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, documents)]
    return np.argsort(-(unit[0] @ unit[1].T), axis=1, kind="stable")[:, :k]


def test_a_head_alone_makes_embed_filter(place: Path) -> None:
    f = LinearMap.load(place / "embedfilter")
    np.testing.assert_array_equal(f.weight, embed_filter(HEAD, TAU).weight)
    assert f.card is not None
    assert (f.card.direction, f.card.source.space, f.post) == ("filter", "llm", "l2")
    assert f.card.parameters == {"tau": 4, "head": "lm_head.weight", "tokens": 120, "dropped_rows": 0, "band": "6:10"}


def test_what_is_measured_is_agreement_with_all_dimensions_on_what_is_held_out(place: Path) -> None:
    f = LinearMap.load(place / "pca")
    held = holdout_of(f)
    assert f.card is not None
    found = nearest(f.apply(held.queries), f.apply(held.target))
    expected = agreement(found, nearest(held.queries, held.target))
    assert f.card.measured["agreement@10"] == pytest.approx(expected, abs=2e-3)
    assert 0.2 < expected < 0.98


def test_auto_takes_the_best_by_queries_that_measure_nothing_else(place: Path) -> None:
    f = make_filter(place / "llm", tau=TAU, store=place / "new.parquet", queries=place / "queries.parquet")
    assert f.card is not None
    tried = f.card.parameters["candidates"]
    scores = [c["agreement@10"] for c in tried]
    assert f.card.solver == tried[0]["name"]
    assert scores == sorted(scores, reverse=True)
    assert {c["name"] for c in tried} >= {"embedfilter", "pca", "whiten", "no-tail", "first", "random-orthonormal"}
    # few directions carry these vectors, and the head knows nothing of them
    assert f.card.solver == "pca"
    assert "filters that were tried" in describe(f)


def test_the_same_filter_again_has_the_same_bytes(place: Path, tmp_path: Path) -> None:
    given = {"store": place / "new.parquet", "queries": place / "queries.parquet", "map": place / "map"}
    again = make_filter(tau=TAU, kind="pca", **given)
    again.save(tmp_path / "again")
    for name in ("map.safetensors", "card.json"):
        assert (tmp_path / "again" / name).read_bytes() == (place / "pca" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "magic"}, "unknown kind 'magic'"),
        ({"kind": "embedfilter", "store": "new.parquet"}, "--kind embedfilter is made of a language model's head"),
        ({"kind": "pca", "model": "llm"}, "--kind pca needs --store"),
        ({"model": "llm"}, "--kind auto needs --store"),
        ({"kind": "ideal", "model": "llm"}, "--kind ideal needs token frequencies"),
        ({"kind": "first"}, "name the model"),
        ({"kind": "embedfilter", "model": "llm", "tau": 17}, "--tau is 17: choose one from 1 to 16"),
        ({"kind": "embedfilter", "model": "llm", "tau": 0}, "--tau is 0"),
        ({"kind": "embedfilter", "model": "llm", "offset": 13}, "--offset is 13: 4 of 16"),
        ({"kind": "pca", "store": "new.parquet", "offset": 1}, "--kind pca has none"),
        ({"kind": "embedfilter", "model": "llm", "queries": "queries.parquet"}, "--queries goes with --store"),
    ],
)
def test_filters_that_cannot_be_made(place: Path, options: dict[str, object], message: str) -> None:
    given = {k: place / str(v) if k in ("store", "model", "queries") else v for k, v in options.items()}
    with pytest.raises(UsageError, match=message):
        make_filter(**({"tau": TAU} | given))


def test_vectors_that_are_not_the_models_are_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="vectors of 12 dimensions, the hidden states of llm have 16"):
        make_filter(place / "llm", tau=TAU, kind="embedfilter", store=place / "old.parquet", metric="cosine")


def test_of_a_map_and_a_filter_one_matrix_is_made_where_that_can_be(place: Path) -> None:
    m, f = LinearMap.load(place / "map"), LinearMap.load(place / "embedfilter")
    x = vectors(50, 9)[:, :12].copy()
    both = compress(m, f)
    assert both.after is None
    assert (both.d_in, both.d_out, both.d_asked) == (12, 4, 16)
    np.testing.assert_allclose(both.apply(x), f.apply(m.apply(x)), atol=2e-6)


def test_a_mean_between_map_and_filter_keeps_both(place: Path) -> None:
    m, f = LinearMap.load(place / "map"), LinearMap.load(place / "pca")
    x = vectors(700, 9)[:, :12].copy()
    both = compress(m, f)
    assert both.after is f or both.after is both.ask
    np.testing.assert_array_equal(both.apply(x), f.apply(m.apply(x)))
    np.testing.assert_array_equal(both.apply(x[3:4]), both.apply(x)[3:4])  # bits don't depend on the batch


def test_torch_applies_both_too(place: Path) -> None:
    pytest.importorskip("torch")
    both = compress(LinearMap.load(place / "map"), LinearMap.load(place / "pca"))
    x = vectors(70, 9)[:, :12].copy()
    np.testing.assert_allclose(torch_kernel(both, "cpu")(x), both.apply(x), atol=1e-5)


@pytest.mark.parametrize("name", ["pca", "embedfilter"])
def test_an_index_is_translated_filtered_and_measured_against_all_dimensions(
    place: Path, tmp_path: Path, name: str
) -> None:
    target = tmp_path / "target"
    report = vecferry.migrate(place / "old.parquet", target, place / "map", filter=place / name)
    assert isinstance(report, vecferry.Report)
    m, f = LinearMap.load(place / "map"), LinearMap.load(place / name)
    with open_reader(str(target)) as reader:
        assert reader.info.dim == DIM // TAU
        assert f.card is not None
        recorded = reader.info.provenance["filter"]
        assert recorded["sha256"] == f.card.sha256
        index = np.concatenate([b.vectors for b in reader.read(500)])
        before, after = report.facts["bytes"]
        assert after == reader.info.nbytes < before
    old = np.stack(pq.read_table(place / "old.parquet")["vector"].to_numpy())
    np.testing.assert_allclose(index, f.apply(m.apply(old)), atol=1e-5)
    held = holdout_of(m)
    expected = agreement(
        nearest(f.apply(held.queries), f.apply(m.apply(held.source))), nearest(held.queries, held.target)
    )
    cell = report.evaluation.cell("as indexed", "agreement", 10)
    assert cell.value == pytest.approx(expected, abs=2e-3)
    assert report.evaluation.cell("re-embedded", "agreement", 10).value == 1
    assert "the map and the filter" in report.table()
    again = vecferry.migrate(place / "old.parquet", target, place / "map", filter=place / name)
    assert "finished and published by this very migration" in again.table()


def test_an_index_shrinks_in_its_own_space(place: Path, tmp_path: Path) -> None:
    target = tmp_path / "small"
    report = vecferry.migrate(place / "new.parquet", target, filter=place / "pca")
    f = LinearMap.load(place / "pca")
    assert f.card is not None
    cell = report.evaluation.cell("as indexed", "agreement", 10)
    assert cell.value == pytest.approx(f.card.measured["agreement@10"], abs=1e-4)
    assert report.evaluation.cell("status quo", "agreement", 10).reason == "the model stays the same"
    checked = vecferry.check(target, filter=place / "pca")
    assert checked.evaluation.cell("as indexed", "agreement", 10) == cell
    needed = f"of 16 dimensions (space not recorded) go through the filter with sha256 {f.card.sha256}"
    assert needed in vecferry.inspect(target).table()
    assert "  the filter " in report.table()


def test_a_filter_fitted_on_no_vectors_is_measured_on_rows_of_the_index(place: Path, tmp_path: Path) -> None:
    report = vecferry.migrate(place / "new.parquet", tmp_path / "small", filter=place / "embedfilter")
    new = np.stack(pq.read_table(place / "new.parquet")["vector"].to_numpy())
    f = LinearMap.load(place / "embedfilter")
    wide, narrow = (nearest(x, x, 11)[:, 1:] for x in (new, f.apply(new)))
    cell = report.evaluation.cell("as indexed", "doc-agreement", 10)
    assert (cell.documents, cell.queries) == (1500, 1000)
    assert cell.value == pytest.approx(agreement(narrow, wide), abs=0.02)  # over 1,000 of the 1,500


def test_check_asks_through_the_filter_and_only_through_the_right_one(place: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.faiss"
    made = vecferry.migrate(place / "old.parquet", target, place / "map", filter=place / "pca")
    held = vecferry.check(target, map=place / "map", filter=place / "pca")
    assert held.evaluation.cell("as indexed", "agreement", 10) == made.evaluation.cell("as indexed", "agreement", 10)
    truth = vecferry.check(
        target,
        map=place / "map",
        filter=place / "pca",
        truth=place / "new.parquet",
        queries=place / "queries.parquet",
        gate="agreement@10>=0.05",
    )
    m, f = LinearMap.load(place / "map"), LinearMap.load(place / "pca")
    x, y, q = (np.stack(pq.read_table(place / f"{n}.parquet")["vector"].to_numpy()) for n in ("old", "new", "queries"))
    expected = agreement(nearest(f.apply(q), f.apply(m.apply(x))), nearest(q, y))
    assert truth.evaluation.cell("as indexed", "agreement", 10).value == pytest.approx(expected, abs=2e-3)
    alone = vecferry.check(target, filter=place / "pca", truth=place / "new.parquet", queries=place / "queries.parquet")
    assert alone.evaluation.cell("as indexed", "agreement", 10) == truth.evaluation.cell("as indexed", "agreement", 10)
    with pytest.raises(IncompatibleError, match="its queries have to be filtered too: pass --filter"):
        vecferry.check(target, map=place / "map")
    with pytest.raises(IncompatibleError, match=r"was made with the filter \w+…, this one is"):
        vecferry.check(target, map=place / "map", filter=place / "embedfilter")
    vecferry.migrate(place / "old.parquet", tmp_path / "whole", place / "map")
    with pytest.raises(IncompatibleError, match="made without a filter"):
        vecferry.check(tmp_path / "whole", map=place / "map", filter=place / "pca")


def test_queries_are_transformed_by_the_filter_and_known_afterwards(place: Path, tmp_path: Path) -> None:
    transform_store(str(place / "queries.parquet"), place / "pca", str(tmp_path / "q"))
    f = LinearMap.load(place / "pca")
    with open_reader(str(tmp_path / "q")) as reader:
        q = np.stack(pq.read_table(place / "queries.parquet")["vector"].to_numpy())
        np.testing.assert_array_equal(np.concatenate([b.vectors for b in reader.read(99)]), f.apply(q))
        assert f.card is not None
        assert reader.info.space == f.card.target.space
    with pytest.raises(IncompatibleError, match="4 dimensions"):
        transform_store(str(tmp_path / "q"), place / "pca", str(tmp_path / "q2"))
    vecferry.migrate(place / "new.parquet", tmp_path / "small", filter=place / "pca")
    with pytest.raises(IncompatibleError, match="holds vectors of 16 dimensions"):
        vecferry.check(
            tmp_path / "small", map=None, filter=place / "pca", truth=place / "new.parquet", queries=tmp_path / "q"
        )


def test_a_filter_fitted_on_what_measures_the_map_is_refused(place: Path) -> None:
    seen = make_filter(tau=TAU, kind="pca", store=place / "new.parquet", queries=place / "queries.parquet")
    m = LinearMap.load(place / "map")
    with pytest.raises(IncompatibleError, match=r"fitted on \d+ of the 200 documents that the map holds out"):
        compress(m, seen)
    held, own = holdout_of(m), holdout_of(LinearMap.load(place / "pca"))
    np.testing.assert_array_equal(own.target, held.target)
    np.testing.assert_array_equal(own.queries, held.queries)
    assert len(own.fit_keys) == 1500 - 200
    assert not np.isin(id_keys(held.ids), own.fit_keys).any()


def named(m: LinearMap, target: str) -> LinearMap:
    return LinearMap(m.weight, m.bias, post="l2", card=Card(Side(m.d_in), Side(m.d_out, target), "by hand"))


def test_a_filter_is_for_one_model(place: Path) -> None:
    m, f = LinearMap.load(place / "map"), LinearMap.load(place / "embedfilter")
    hashed = "0123456789abcdef"
    for space in ("llm", f"llm@{hashed}"):
        both = compress(named(m, space), f)
        assert both.card is not None
        assert both.card.space.startswith(f"{space} | embedfilter 1/4 ")
        assert both.ask is not None
        assert both.ask.card is not None
        assert both.ask.card.source.space == space
    for space in ("other", f"other@{hashed}", f"llm2@{hashed}", "llm [prompt]"):
        with pytest.raises(IncompatibleError, match="the filter is for the space 'llm', the map"):
            compress(named(m, space), f)


def test_other_dimensions_rankings_and_directions_are_refused(place: Path) -> None:
    m, f = LinearMap.load(place / "map"), LinearMap.load(place / "embedfilter")
    narrow = LinearMap(np.eye(12, dtype=np.float32), post="l2", card=Card(Side(12), Side(12), "by hand"))
    with pytest.raises(IncompatibleError, match="takes vectors of 16 dimensions, the map leads to 12"):
        compress(narrow, f)
    with pytest.raises(IncompatibleError, match="no filter"):
        filter_of(m)
    with pytest.raises(IncompatibleError, match=r"is a filter.*pass it with --filter"):
        vecferry.migrate(place / "new.parquet", place / "never", place / "pca")
    by_product = make_filter(place / "llm", tau=TAU, kind="embedfilter", metric="ip")
    with pytest.raises(IncompatibleError, match="ranks by ip, the map's ranks by cosine"):
        compress(m, by_product)
    with pytest.raises(UsageError, match="kept as two folders"):
        compress(m, f).save(place / "never")
    with pytest.raises(UsageError, match="nothing to migrate with"):
        vecferry.migrate(place / "new.parquet", place / "never")
    with pytest.raises(UsageError, match="--encoded"):
        vecferry.migrate(
            place / "old.parquet", place / "never", place / "map", filter=f, encoded=place / "some.parquet"
        )


def test_a_filters_card_cannot_be_edited_into_a_maps(place: Path, tmp_path: Path) -> None:
    LinearMap.load(place / "pca").save(tmp_path / "edited")
    card = json.loads((tmp_path / "edited" / "card.json").read_text())
    (tmp_path / "edited" / "card.json").write_text(json.dumps(card | {"direction": "document"}))
    with pytest.raises(DataError, match="edited"):
        LinearMap.load(tmp_path / "edited")


def test_a_cascade_finds_through_the_filter_and_ranks_by_all_dimensions(place: Path, tmp_path: Path) -> None:
    vecferry.migrate(place / "old.parquet", tmp_path / "index", place / "map", filter=place / "pca")
    q, y = (np.stack(pq.read_table(place / f"{n}.parquet")["vector"].to_numpy()) for n in ("queries", "new"))
    m, f = LinearMap.load(place / "map"), LinearMap.load(place / "pca")
    x = np.stack(pq.read_table(place / "old.parquet")["vector"].to_numpy())
    candidates = nearest(f.apply(q[:20]), f.apply(m.apply(x)), 50)
    with vecferry.Cascade(
        tmp_path / "index", place / "map", cache=place / "new.parquet", filter=place / "pca"
    ) as cascade:
        found, _ = cascade.search(q[:20], k=10, c=50)
    for i, among in enumerate(candidates):
        assert found[i].tolist() == among[np.argsort(-(y[among] @ q[i]), kind="stable")[:10]].tolist()
    with pytest.raises(IncompatibleError, match="pass --filter"):
        vecferry.Cascade(tmp_path / "index", place / "map", cache=place / "new.parquet")


def test_a_cascade_needs_no_map_where_the_model_is_the_same(place: Path, tmp_path: Path) -> None:
    vecferry.migrate(place / "new.parquet", tmp_path / "small", filter=place / "pca")
    q, y = (np.stack(pq.read_table(place / f"{n}.parquet")["vector"].to_numpy()) for n in ("queries", "new"))
    with vecferry.Cascade(tmp_path / "small", cache=tmp_path / "cache", filter=place / "pca") as cascade:
        assert cascade.add(place / "new.parquet") == 1500
        found, _ = cascade.search(q, k=10, c=1500)
    assert found.tolist() == nearest(q, y).tolist()
    vecferry.migrate(place / "old.parquet", tmp_path / "index", place / "map")
    with pytest.raises(UsageError, match="takes the map"):
        vecferry.Cascade(tmp_path / "index", cache=place / "new.parquet")


def test_the_commands_do_the_whole_job(place: Path, tmp_path: Path) -> None:
    given = ("--store", place / "new.parquet", "--queries", place / "queries.parquet", "--map", place / "map")
    code, out, err = run("filter", "--model", place / "llm", "--tau", 4, *given, "-o", tmp_path / "f", "--json")
    assert code == 0, err
    assert json.loads(out)["solver"] == "pca"
    made = ("--map", place / "map", "--filter", tmp_path / "f")
    gate = ("--gate", "agreement@10>=0.99")
    code, _, err = run("migrate", place / "old.parquet", tmp_path / "index", *made, *gate)
    assert code == 1, err
    code, out, err = run("migrate", place / "old.parquet", tmp_path / "index", *made, "--resume", "--json")
    assert code == 0, err
    before, after = json.loads(out)["facts"]["bytes"]
    assert after < before
    code, _, err = run("check", tmp_path / "index", "--map", place / "map")
    assert code == 4
    assert "pass --filter" in err
    assert run("check", tmp_path / "index", *made)[0] == 0
    log = ("--queries", place / "queries.parquet", "--budget", 5, "-o", tmp_path / "need.parquet")
    code, _, err = run("warm", tmp_path / "index", *made, *log)
    assert code == 0, err
    assert f"--map {place / 'map'} --filter {tmp_path / 'f'} --cache CACHE" in err
    code, out, err = run("lens", "--model", place / "llm", "--store", place / "new.parquet", "--id", 3)
    assert code == 0, err
    assert "before and after embedfilter 1/2" in out
    code, _, err = run("filter", "--tau", 4, "--kind", "pca", "-o", tmp_path / "g")
    assert code == 2
    assert "--kind pca needs --store" in err


def test_the_commands_name_all_kinds() -> None:
    from vecferry.cli_filters import KINDS as NAMED
    from vecferry.filters import KINDS

    assert ("auto", *KINDS) == NAMED


def test_by_labels_a_filter_is_measured_beside_all_dimensions(place: Path, tmp_path: Path) -> None:
    q, y = (np.stack(pq.read_table(place / f"{n}.parquet")["vector"].to_numpy()) for n in ("queries", "new"))
    relevant = nearest(q, y, 3)[:, 2]
    lines = "".join(f"{i}\t{d}\t1\n" for i, d in enumerate(relevant))
    (tmp_path / "qrels.tsv").write_text(lines)
    given = {"store": place / "new.parquet", "queries": place / "queries.parquet", "qrels": tmp_path / "qrels.tsv"}
    f = make_filter(tau=TAU, kind="pca", **given)
    held = holdout_of(f)
    assert f.card is not None
    ids = held.ids.to_numpy()
    asked = [int(i) for i in held.query_ids.to_pylist()]
    known = [i for i, name in enumerate(asked) if relevant[name] in ids]
    for what, g in (("ndcg@10", f.apply), ("ndcg@10 in all dimensions", lambda x: x)):
        ranks = nearest(g(held.queries[known]), g(held.target))
        gains = [
            sum(1 / np.log2(place + 2) for place, d in enumerate(row) if ids[d] == relevant[asked[i]])
            for i, row in zip(known, ranks, strict=True)
        ]
        assert f.card.measured[what] == pytest.approx(np.mean(gains), abs=1e-3)
    assert f.card.measured["ndcg@10 in all dimensions"] > 0.45
