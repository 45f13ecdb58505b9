from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vecferry
from vecferry.batch import id_keys
from vecferry.errors import BadRowsError, DataError, IncompatibleError, UsageError
from vecferry.holdout import Holdout
from vecferry.linear import LinearMap
from vecferry.mapfile import HOLDOUT

N, D_OLD, D_NEW = 400, 12, 8
IDS = np.random.default_rng(7).permutation(5000)[:N]


def unit(x: Any) -> Any:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def two_models(n: int, seed: int = 0) -> tuple[Any, Any]:
    """Vectors of n texts by two models that share most of what they know; unit length."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((10, D_OLD)), rng.standard_normal((10, D_NEW))
    rng = np.random.default_rng(seed + 1)
    meaning = rng.standard_normal((n, 10)) + 0.5
    sides = (meaning @ m + 0.3 * rng.standard_normal((n, m.shape[1])) for m in (a, b))
    old, new = (unit(s).astype(np.float32) for s in sides)
    return old, new


OLD, NEW = two_models(N)
PART = np.random.default_rng(8).permutation(N)[:300]


def stores(rows: Any, old: Any = OLD, new: Any = NEW, **info: Any) -> tuple[Any, Any]:
    """Make the index, and the new model's vectors of 300 of its 400 documents; `source_...`, `target_...` describe."""
    described = [{k[7:]: v for k, v in info.items() if k.startswith(s)} for s in ("source_", "target_")]
    return (
        rows(IDS, old, uri="SRC", **described[0]),
        rows(IDS[PART], new[PART], uri="TGT", **described[1]),
    )


def has_warning(m: LinearMap, text: str) -> bool:
    assert m.card is not None
    return any(text in w for w in m.card.warnings)


@pytest.fixture(scope="module")
def wordnet() -> tuple[pa.Table, pa.Table, Path]:
    folder = Path(str(files("vecferry") / "data"))
    tables = [pq.read_table(folder / f"{name}.parquet") for name in ("documents", "queries")]
    return tables[0], tables[1], folder / "qrels.tsv"


def vectors(table: pa.Table, model: str) -> Any:
    flat = table[model].combine_chunks().flatten().to_numpy()
    return flat.reshape(len(table), -1).astype(np.float32)


def test_real_job_from_sample_to_saved_map(rows: Any, wordnet: Any, tmp_path: Path) -> None:
    documents, queries, qrels = wordnet
    ids, names = documents["id"].combine_chunks(), queries["id"].combine_chunks()
    index = rows(ids, vectors(documents, "e5"), documents.select(["text"]), uri="old index", metric="ip")
    drawn = vecferry.sample(index, 1500, qrels=qrels, output=tmp_path / "ids.parquet")
    asked = pq.read_table(tmp_path / "ids.parquet")
    at = {i: k for k, i in enumerate(ids.to_pylist())}
    encoded = vectors(documents, "minilm")[[at[i] for i in asked["id"].to_pylist()]]
    m = vecferry.fit(
        index,
        rows(asked["id"].combine_chunks(), encoded, asked.drop_columns(["id"]), uri="new vectors"),
        queries=rows(names, vectors(queries, "minilm"), uri="queries"),
        source_queries=rows(names, vectors(queries, "e5"), uri="old queries"),
        qrels=qrels,
        solver="ridge",
        source_model="e5",
        target_model="minilm",
        source_prompt="passage: ",
    )
    card, held = m.card, m.holdout
    assert card is not None
    assert held is not None
    assert (card.direction, card.metric, card.solver, card.version) == (
        "document",
        "cosine",
        "ridge",
        vecferry.__version__,
    )
    assert (card.source.space, card.space) == ("e5 [passage: ]", "minilm")
    assert (m.pre, m.post, m.d_in, m.d_out) == ("none", "l2", 384, 384)
    assert card.warnings == ()
    assert len(held.ids) == drawn.holdout + drawn.relevant
    assert card.pairs == len(held.fit_keys) == drawn.fit
    roles = dict(zip(asked["id"].to_pylist(), asked["role"].to_pylist(), strict=True))
    assert {roles[i] for i in held.ids.to_pylist()} == {"holdout"}
    assert not np.isin(id_keys(held.ids), held.fit_keys).any()
    np.testing.assert_array_equal(held.source[0], vectors(documents, "e5")[at[held.ids[0].as_py()]])
    assert held.qrels is not None
    assert len(held.qrels.query) == len(held.query_ids) == 250
    # what is measured, against the same from scratch in float64
    guess = held.source.astype(np.float64) @ m.weight.astype(np.float64)
    guess += m.bias if m.bias is not None else 0
    true = unit(held.target.astype(np.float64))
    assert card.measured["mean_cosine"] == pytest.approx((unit(guess) * true).sum(1).mean(), abs=2e-4)
    fitted = unit(encoded[[roles[i] == "fit" for i in asked["id"].to_pylist()]].astype(np.float64))
    error = np.linalg.norm(guess - true) / np.linalg.norm(true - fitted.mean(0))
    assert card.measured["relative_error"] == pytest.approx(error, abs=2e-4)
    assert 0.6 < card.measured["mean_cosine"] < 0.7  # these encoders gave .620 from 850 pairs, .665 from 2,000
    assert card.measured["mean_cosine_of_mean_vector"] < 0.3
    # and all of it survives the folder
    m.save(tmp_path / "map")
    loaded = LinearMap.load(tmp_path / "map")
    assert loaded.card == card
    again = Holdout.load(tmp_path / "map" / HOLDOUT)
    assert again.ids.equals(held.ids)
    np.testing.assert_array_equal(again.target, held.target)
    assert again.fingerprint == {**held.fingerprint, "map": card.sha256}
    assert again.fingerprint["count"] == len(documents)


def test_the_best_of_several_maps_is_fitted_saved_and_explained(rows: Any, wordnet: Any, tmp_path: Path) -> None:
    """MiniLM to e5, where ridge is far from the best; documents ask, and effort 0 does without torch."""
    documents, _, _ = wordnet
    ids = documents["id"].combine_chunks()
    index = rows(ids, unit(vectors(documents, "minilm")), uri="old index")
    target = rows(ids[:3000], vectors(documents, "e5")[:3000], uri="new vectors")
    maps = [vecferry.fit(index, target, solver=s, effort=0) for s in ("auto", "ridge", "procrustes")]
    cards = [m.card for m in maps if m.card is not None]
    found = [card.measured["doc-agreement@10"] for card in cards]
    assert found[0] > max(found[1:]) + 0.01
    m, card, held = maps[0], cards[0], maps[0].holdout
    assert held is not None
    assert (card.solver, m.post) == ("auto", "l2")
    assert len(card.warnings) == 1
    assert has_warning(m, "documents stood in")
    assert (m.pre == "center_l2") == (m.mean is not None) == card.parameters["chosen"]["centred"]
    # each held-out document asks for its neighbours among the others: by sorting in float64
    asked = held.target.astype(np.float64)
    scores = [asked @ y.astype(np.float64).T - 9 * np.eye(len(asked)) for y in (held.target, m.apply(held.source))]
    true, mine = (np.argsort(-s, axis=1)[:, :10] for s in scores)
    shared = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(true, mine, strict=True)])
    assert card.measured["doc-agreement@10"] == pytest.approx(shared, abs=2e-3)
    # the tilt moves all rows by one vector: that says nothing of what the map has learned
    assert card.parameters["chosen"]["tilt"] > 0.3
    assert 0.5 < card.measured["relative_error"] < 0.95
    curve = card.measured["learning_curve"]
    n = card.pairs
    assert curve["pairs"] == [round(n / 8), round(n / 4), round(n / 2), n]
    assert curve["values"][-1] == card.measured["doc-agreement@10"]
    assert curve["doubled"]["pairs"] == 2 * n
    assert curve["doubled"]["low"] <= curve["doubled"]["value"] <= curve["doubled"]["high"]
    assert curve["values"][0] < curve["values"][-1] < curve["doubled"]["value"] + 0.02
    m.save(tmp_path / "map")
    page = (tmp_path / "map" / "README.md").read_text()
    assert f"twice as many ({2 * n:,}) would give doc-agreement@10 of about {curve['doubled']['value']:.3f} [" in page
    assert "| ridge |" in page
    assert "| chosen |" in page
    assert LinearMap.load(tmp_path / "map").card == card
    np.testing.assert_array_equal(LinearMap.load(tmp_path / "map").apply(held.source), m.apply(held.source))


def test_where_lengths_differ_nothing_is_subtracted_before_they_are_made_equal(rows: Any) -> None:
    old, new = two_models(1000)
    m = vecferry.fit(rows(np.arange(1000), lengths(old, 0.1, 0.7)), rows(np.arange(1000), new), effort=0)
    assert m.card is not None
    assert (m.pre, m.card.solver) == ("l2", "auto")
    assert not any(c["centred"] for c in m.card.parameters["candidates"])
    assert has_warning(m, "0 queries to choose by: documents stood in")


def test_few_pairs_are_fitted_by_ridge_which_says_so(rows: Any) -> None:
    m, plain = vecferry.fit(*stores(rows)), vecferry.fit(*stores(rows), solver="ridge")
    assert m.card is not None
    assert m.card.solver == "ridge"
    assert m.weight.tobytes() == plain.weight.tobytes()
    assert has_warning(m, "240 pairs are too few to choose among maps")
    assert not has_warning(plain, "too few to choose")


def test_sgd_lowers_the_objective_that_is_asked_for(rows: Any) -> None:
    pytest.importorskip("torch", reason="torch is an optional dependency")
    squares, ranks = (vecferry.fit(*stores(rows), solver="sgd", objective=o) for o in ("mse", "rank"))
    assert squares.card is not None
    assert ranks.card is not None
    assert "objective" not in squares.card.parameters
    assert ranks.card.parameters["objective"] == "rank"
    assert squares.weight.tobytes() != ranks.weight.tobytes()
    asked_for: list[tuple[dict[str, Any], str]] = [
        ({"solver": "ridge"}, "--objective rank goes with --solver sgd, not ridge"),
        ({"direction": "query"}, "--objective rank is for maps of --direction document"),
        ({"metric": "ip"}, "by cosine, and this space ranks by ip"),
    ]
    for given, said in asked_for:
        with pytest.raises(UsageError, match=said):
            vecferry.fit(*stores(rows), **({"solver": "sgd", "objective": "rank"} | given))


def test_same_input_same_bytes(rows: Any, tmp_path: Path) -> None:
    for name in "ab":
        vecferry.fit(*stores(rows)).save(tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


# The metric, and what length means


def test_one_length_is_cosine(rows: Any) -> None:
    for scale in (1, 7):
        m = vecferry.fit(*stores(rows, new=NEW * np.float32(scale)))
        assert m.card is not None
        assert (m.card.metric, m.post) == ("cosine", "l2")
        assert m.card.parameters["target_norms"] == pytest.approx((scale, scale, scale), rel=1e-3)
        if scale == 1:
            weight = m.weight
    np.testing.assert_allclose(m.weight, weight, atol=1e-4)  # normalised before the fit


def lengths(x: Any, low: float, high: float) -> Any:
    return (x * np.linspace(low, high, len(x))[:, None]).astype(np.float32)


@pytest.mark.case("19")
def test_several_lengths_need_a_metric(rows: Any) -> None:
    source, target = stores(rows, new=lengths(NEW, 0.1, 0.7), target_metric="ip")
    with pytest.raises(UsageError, match=r"TGT: norms go from 0\.1\d* to 0\.7.*the store says ip.*--metric"):
        vecferry.fit(source, target)
    for metric, post in (("ip", "none"), ("l2", "none"), ("cosine", "l2")):
        m = vecferry.fit(source, target, metric=metric)  # type: ignore[arg-type]
        assert m.card is not None
        assert (m.card.metric, m.pre, m.post) == (metric, "none", post)
        assert has_warning(m, "TGT ranks by ip and its norms go from 0.1") == (metric == "cosine")
    assert not has_warning(vecferry.fit(*stores(rows)), "ranks by")


def test_inner_product_of_one_length_is_called_cosine(rows: Any) -> None:
    m = vecferry.fit(*stores(rows), metric="ip")
    assert m.post == "none"
    assert has_warning(m, "ranks like cosine")


@pytest.mark.case("19")
def test_source_length_is_no_part_of_the_map_under_cosine(rows: Any) -> None:
    """Field case 19: an inner-product index with norms from .1 to .7."""
    plain = vecferry.fit(*stores(rows))
    scaled = vecferry.fit(*stores(rows, old=lengths(OLD, 0.1, 0.7), source_metric="ip"))
    assert (plain.pre, scaled.pre) == ("none", "l2")
    np.testing.assert_allclose(scaled.apply(lengths(OLD, 0.1, 0.7)), plain.apply(OLD), atol=2e-5)
    assert has_warning(scaled, "SRC ranks by ip and its norms go from 0.1 to 0.7")
    assert scaled.card is not None
    assert scaled.card.parameters["source_norms"] == pytest.approx((0.1, 0.4, 0.7), rel=0.05)


# Spaces, models, prompts


@pytest.mark.parametrize(
    ("info", "declared", "said"),
    [
        ({"source_space": "new"}, {"target_model": "new"}, "SRC is in the target space 'new' already"),
        ({"source_space": "new", "target_space": "new"}, {}, "already"),
        ({"source_space": "old"}, {"source_model": "other"}, "SRC records .* 'old', the source .* 'other'"),
        ({"target_space": "new"}, {"target_model": "newer"}, "TGT records .* 'new', the target .* 'newer'"),
        ({}, {"source_model": "m", "target_model": "m"}, "both 'm'"),
        # field case 38: the same model with another prompt is another space
        (
            {"source_space": "e5 [passage: ]"},
            {"source_model": "e5"},
            r"'e5 \[passage: \]', the source .* 'e5'",
        ),
        ({"source_space": "e5"}, {"source_model": "e5", "source_prompt": "passage: "}, "'e5', the source"),
        ({"target_space": "e5"}, {"target_prompt": "passage: "}, "'e5', the target .* prompt 'passage: '"),
    ],
)
@pytest.mark.case("1", "38")
def test_contradicting_spaces_are_refused(rows: Any, info: Any, declared: Any, said: str) -> None:
    with pytest.raises(IncompatibleError, match=said) as caught:
        vecferry.fit(*stores(rows, **info), **declared)
    assert caught.value.exit_code == 4


@pytest.mark.case("38")
def test_recorded_spaces_are_taken_over_and_prompts_are_part_of_them(rows: Any) -> None:
    m = vecferry.fit(*stores(rows, source_space="e5 [passage: ]", target_space="new"))
    assert m.card is not None
    assert (m.card.source.space, m.card.space) == ("e5 [passage: ]", "new")
    m = vecferry.fit(*stores(rows), source_model="e5", target_model="e5", target_prompt="query: ")
    assert m.card is not None
    assert (m.card.source.space, m.card.space) == ("e5", "e5 [query: ]")
    m = vecferry.fit(*stores(rows))
    assert m.card is not None
    assert m.card.space == f"unnamed-{m.card.sha256[:16]}"
    assert m.card.sha256


# What the user gets wrong


def test_options_are_checked_before_stores_are_opened() -> None:
    with pytest.raises(UsageError, match=r"unknown solver 'mlp'.*ridge"):
        vecferry.fit("nowhere", "nowhere", solver="mlp")
    with pytest.raises(UsageError, match="unknown objective 'cosine': choose one of mse, rank"):
        vecferry.fit("nowhere", "nowhere", objective="cosine")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown effort 3: choose one of 0, 1, 2"):
        vecferry.fit("nowhere", "nowhere", effort=3)
    with pytest.raises(UsageError, match="unknown metric 'dot'"):
        vecferry.fit("nowhere", "nowhere", metric="dot")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown bad_rows 'mend'"):
        vecferry.fit("nowhere", "nowhere", bad_rows="mend")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--qrels needs --queries"):
        vecferry.fit("nowhere", "nowhere", qrels="labels")
    with pytest.raises(UsageError, match="--source-queries needs --queries"):
        vecferry.fit("nowhere", "nowhere", source_queries="old")
    with pytest.raises(UsageError, match="absent: no such file"):
        vecferry.fit("nowhere", "nowhere", sample="absent")


def test_quantised_stores_need_leave(rows: Any) -> None:
    source, target = stores(rows, source_lossy=True, source_index="PQ4")
    with pytest.raises(UsageError, match=r"SRC holds quantised codes \(PQ4\).*--allow-lossy"):
        vecferry.fit(source, target)
    assert vecferry.fit(source, target, allow_lossy=True).d_in == D_OLD


@pytest.mark.case("44")
def test_one_store_on_both_sides_is_refused(rows: Any, tmp_path: Path) -> None:
    source, _ = stores(rows)
    with pytest.raises(UsageError, match="SRC is both source and target"):
        vecferry.fit(source, source)
    path = tmp_path / "x.parquet"
    column = pa.FixedSizeListArray.from_arrays(OLD.reshape(-1), D_OLD)
    pq.write_table(pa.table({"id": IDS, "vector": column}), path)
    with pytest.raises(UsageError, match="both source and target"):
        vecferry.fit(f"parquet:{path}", f"parquet:{path}")
    with pytest.raises(IncompatibleError, match="300 of 300 vectors are the same"):
        vecferry.fit(source, rows(IDS[PART], OLD[PART]))


@pytest.mark.case("28", "29", "30")
def test_faulty_rows(rows: Any) -> None:
    """Field cases 28 and 29 (NaN and zero rows), 30 (duplicate ids)."""
    old = OLD.copy()
    old[PART[4]], old[PART[9], 3] = 0, np.nan
    with pytest.raises(BadRowsError, match=f"SRC: 1 vectors are all zeros: {IDS[PART[4]]}"):
        vecferry.fit(*stores(rows, old=old))
    m = vecferry.fit(*stores(rows, old=old), bad_rows="skip")
    assert m.card is not None
    assert m.holdout is not None
    assert m.card.pairs + len(m.holdout.ids) == 298
    assert sum(m.card.parameters["skipped"].values()) == 2
    assert has_warning(m, "1 rows left out: SRC: vectors are all zeros")
    twice = np.r_[IDS[PART], IDS[PART[:1]]]
    with pytest.raises(BadRowsError, match=f"TGT: 2 rows share their id with another: {IDS[PART[0]]}"):
        vecferry.fit(rows(IDS, OLD), rows(twice, NEW[np.r_[PART, PART[:1]]], uri="TGT"))


@pytest.mark.case("27")
def test_a_vector_file_of_other_rows_is_refused(rows: Any) -> None:
    """Field case 27."""
    with pytest.raises(UsageError, match="TGT numbers its 300 rows and SRC numbers 400"):
        vecferry.fit(rows(None, OLD, uri="SRC"), rows(None, NEW[PART], uri="TGT"))


def test_too_few_pairs(rows: Any) -> None:
    with pytest.raises(DataError, match="9 pairs leave 7 to fit"):
        vecferry.fit(rows(IDS, OLD), rows(IDS[:9], NEW[:9]))


# What the fit notices


@pytest.mark.case("2")
def test_pairs_of_other_texts_are_noticed(rows: Any) -> None:
    """Field case 2: the ids don't mean the same texts, so nothing can be learned."""
    wrong = NEW[np.random.default_rng(3).permutation(N)]
    m = vecferry.fit(*stores(rows, new=wrong))
    assert has_warning(m, "predicts next to nothing")
    assert m.card is not None
    assert m.card.measured["relative_error"] == pytest.approx(1, abs=0.05)
    assert not has_warning(vecferry.fit(*stores(rows)), "predicts next to nothing")


def test_pairs_of_one_domain_are_noticed(rows: Any) -> None:
    """Half of the index is of one kind, and only of that kind are there pairs."""
    old, new = (x.copy() for x in two_models(N, seed=5))
    half = np.arange(N) < 150
    for x in (old, new):
        x[half] = unit(x[half] + 2 * x[0])
    m = vecferry.fit(rows(IDS, old), rows(IDS[half], new[half]))
    assert has_warning(m, "not like the corpus")
    mixed = np.random.default_rng(1).permutation(N)[:150]
    assert not has_warning(vecferry.fit(rows(IDS, old), rows(IDS[mixed], new[mixed])), "not like the corpus")


def test_sample_file_says_what_is_held_out(rows: Any, tmp_path: Path) -> None:
    source, _ = stores(rows)
    path = tmp_path / "ids.parquet"
    vecferry.sample(source, 200, seed=4, output=path)
    drawn = pq.read_table(path)
    at = {int(i): k for k, i in enumerate(IDS)}
    target = rows(drawn["id"].combine_chunks(), NEW[[at[i] for i in drawn["id"].to_pylist()]])
    m = vecferry.fit(source, target, sample=path)
    assert m.holdout is not None
    held = drawn.filter(pa.array(np.array(drawn["role"].to_pylist()) == "holdout"))["id"].to_pylist()
    assert m.holdout.ids.to_pylist() == held
    other = vecferry.fit(source, target)
    assert other.holdout is not None
    assert sorted(other.holdout.ids.to_pylist()) != sorted(held)
