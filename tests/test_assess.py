"""Should I migrate, and which way? On the package's real data in both directions, and by hand on small ones."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import vecferry
from vecferry.assessing import MAX_PAIRS
from vecferry.assessment import Assessment
from vecferry.cli import cli
from vecferry.crossfit import FOLDS, Recipe, folds_of, search_mapped, set_apart, translate
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.gains import FORM, Gains, weighted_ndcg
from vecferry.holdout import Qrels
from vecferry.pairs import Pairs, Queries
from vecferry.qrels import read_qrels
from vecferry.recall import interval, ndcg
from vecferry.verdict import KEEPS, MAP_QUERIES, NOTHING, RE_EMBED, TRANSLATE
from vecferry.ways import CANDIDATES, Trial, cascade, foretell, resembling

NOBODY = np.array([], np.int64)
DATA = Path(str(files("vecferry") / "data"))
PAIRS, QUERIES = 1100, 200


def unit(x: Any) -> Any:
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def vectors(table: pa.Table, model: str) -> Any:
    return unit(table[model].combine_chunks().flatten().to_numpy().reshape(len(table), -1).astype(np.float32))


class Sample:
    """The package's sample: an index of 4,500 documents; 1,100 pairs, among them what is relevant to 200 queries."""

    def __init__(self) -> None:
        documents, queries = (pq.read_table(DATA / f"{name}.parquet") for name in ("documents", "queries"))
        self.ids, self.names = documents["id"].combine_chunks(), queries["id"].combine_chunks()
        self.documents = {m: vectors(documents, m) for m in ("e5", "minilm")}
        self.queries = {m: vectors(queries, m) for m in ("e5", "minilm")}
        names = self.names.cast(pa.string())
        labels = read_qrels(DATA / "qrels.tsv").match(names, self.ids)
        assert labels is not None
        self.relevant = np.zeros(500, np.int64)
        self.relevant[labels.query] = labels.document
        needed = np.unique(self.relevant[:QUERIES])
        others = np.setdiff1d(np.random.default_rng(0).permutation(4500), needed, assume_unique=True)
        self.pairs = np.concatenate([needed, others[: PAIRS - len(needed)]])

    def stores(self, rows: Any, old: str, new: str, queries: slice = slice(0, QUERIES)) -> dict[str, Any]:
        names = self.names.take(pa.array(np.arange(500)[queries]))
        return {
            "source": rows(self.ids, self.documents[old], uri="INDEX"),
            "target": rows(self.ids.take(pa.array(self.pairs)), self.documents[new][self.pairs], uri="PAIRS"),
            "queries": rows(names, self.queries[new][queries], uri="NEW"),
            "source_queries": rows(names, self.queries[old][queries], uri="OLD"),
            "qrels": DATA / "qrels.tsv",
        }

    def happened(self, old: str, new: str) -> dict[str, Any]:
        """Measure nDCG@10 of each way for each of the 300 other queries by plain sorting.

        One map each way, that `fit` makes of 1,100 other documents, carries the 3,400 that are searched: what two maps
        carry can't be ranked together.
        """
        from tests.conftest import Rows

        x, y = self.documents[old], self.documents[new]
        asked, relevant = slice(QUERIES, 500), self.relevant[QUERIES:]
        free = np.setdiff1d(np.random.default_rng(1).permutation(4500), relevant, assume_unique=True)
        rows = np.sort(np.random.default_rng(1).permutation(free)[:PAIRS])
        stores = self.stores(Rows, old, new) | {"qrels": None}
        stores |= {"target": Rows(self.ids.take(pa.array(rows)), y[rows], uri="FIT")}
        moved = vecferry.fit(**stores, effort=0).apply(x)
        mapped = vecferry.fit(**stores, direction="query").apply(self.queries[new][asked]) @ x.T
        scores = {
            NOTHING: self.queries[old][asked] @ x.T,
            TRANSLATE: self.queries[new][asked] @ moved.T,
            MAP_QUERIES: mapped,
            RE_EMBED: self.queries[new][asked] @ y.T,
        }
        for seen in scores.values():
            seen[:, rows] = -np.inf
        for c in CANDIDATES:
            first = np.argsort(-scores[TRANSLATE], axis=1)[:, :c]
            true = np.full_like(scores[TRANSLATE], -np.inf)
            np.put_along_axis(true, first, np.take_along_axis(scores[RE_EMBED], first, axis=1), axis=1)
            scores[cascade(c)] = true
        ranks = {name: (s > s[np.arange(300), relevant][:, None]).sum(axis=1) for name, s in scores.items()}
        return {name: np.where(r < 10, 1 / np.log2(r + 2), 0) for name, r in ranks.items()}


@pytest.fixture(scope="module")
def sample() -> Sample:
    return Sample()


@pytest.fixture(scope="module")
def upgrade(sample: Sample) -> Assessment:
    from tests.conftest import Rows

    return vecferry.assess(**sample.stores(Rows, "e5", "minilm"), cost_per_1k_texts=0.02)


@pytest.fixture(scope="module")
def downgrade(sample: Sample) -> Assessment:
    from tests.conftest import Rows

    return vecferry.assess(**sample.stores(Rows, "minilm", "e5"))


def test_an_upgrade_that_pays(sample: Sample, upgrade: Assessment) -> None:
    """Field: e5 -> MiniLM. Translation alone doesn't pay, a cascade does."""
    happened = sample.happened("e5", "minilm")
    assert happened[RE_EMBED].mean() > 1.3 * happened[NOTHING].mean()
    assert happened[TRANSLATE].mean() < happened[NOTHING].mean()
    verdict = upgrade.verdict
    assert verdict.outcome == "migrate"
    assert verdict.way is not None
    assert verdict.way not in (TRANSLATE, MAP_QUERIES)
    assert happened[verdict.way].mean() > 1.2 * happened[NOTHING].mean()
    assert happened[verdict.way].mean() > KEEPS * happened[RE_EMBED].mean()
    assert verdict.standings[cascade(500)] == "pays"
    assert happened[cascade(500)].mean() > 1.2 * happened[NOTHING].mean()
    assert verdict.standings[TRANSLATE] != "pays"
    assert verdict.standings[MAP_QUERIES] == "loses"
    assert happened[MAP_QUERIES].mean() < happened[NOTHING].mean()
    check_against(upgrade, happened)


def test_an_upgrade_that_is_none(sample: Sample, downgrade: Assessment) -> None:
    """MiniLM -> e5: doing nothing is better than any way to it, while a cascade comes nearest to re-embedding."""
    happened = sample.happened("minilm", "e5")
    assert happened[RE_EMBED].mean() < 0.8 * happened[NOTHING].mean()
    verdict = downgrade.verdict
    assert (verdict.outcome, verdict.way) == ("don't", NOTHING)
    assert set(verdict.standings.values()) == {"loses"}
    assert "The upgrade itself is none" in verdict.reasons[0]
    kept = downgrade.way(cascade(500)).cell("retention.ndcg")
    assert happened[cascade(500)].mean() > 0.8 * happened[RE_EMBED].mean()
    assert happened[cascade(500)].mean() > happened[TRANSLATE].mean()
    translated = downgrade.way(TRANSLATE).cell("retention.ndcg")
    assert kept.value is not None
    assert translated.value is not None
    assert kept.value > translated.value
    check_against(downgrade, happened)


def check_against(assessment: Assessment, happened: dict[str, Any]) -> None:
    """Compare with what happened to other queries: no opposite verdict, and intervals that meet."""
    for name, values in happened.items():
        if name == NOTHING:
            continue
        broke_even, low, high = interval(values, happened[NOTHING])
        said = assessment.verdict.standings[name]
        assert not (said == "pays" and broke_even < 1), name
        assert not (said == "loses" and broke_even > 1), name
        cell = assessment.way(name).cell("break-even.ndcg")
        assert cell.low is not None
        assert cell.high is not None
        assert cell.low <= high, name
        assert cell.high >= low, name


def test_what_a_way_takes(upgrade: Assessment) -> None:
    new_index = 4500 * 384 * 4
    takes = {w.name: (w.texts_now, w.texts_per_query, w.nbytes) for w in upgrade.ways}
    assert takes == {
        NOTHING: (0, 0, 0),
        TRANSLATE: (0, 0, new_index),
        MAP_QUERIES: (0, 0, 0),
        "cascade, c = 50": (0, 50, new_index),
        "cascade, c = 100": (0, 100, new_index),
        "cascade, c = 200": (0, 200, new_index),
        "cascade, c = 500": (0, 500, new_index),
        RE_EMBED: (3400, 0, new_index),
    }
    assert upgrade.way(RE_EMBED).cost_now == pytest.approx(0.068)
    assert upgrade.way(cascade(50)).cost_per_query == pytest.approx(0.001)
    assert upgrade.way(cascade(500)).cells[0].reason == "needs more than 2,500 pairs, there are 600"


def test_the_page_holds_the_verdict_its_evidence_and_the_rule(upgrade: Assessment) -> None:
    page = upgrade.table()
    lines = page.splitlines()
    assert max(map(len, lines)) <= 125
    assert (
        "INDEX (4,500 rows), 1,100 of them encoded by the new model too, 200 queries, 200 of them with labels" in page
    )
    assert any(line.startswith("Migrate: ") for line in lines)
    assert "break-even  retention x gain" in page
    notes = " ".join(page.split())
    assert f"Retention and break-even are for {upgrade.gain.documents:,} documents" in notes
    assert upgrade.gain.documents < 4500
    assert "what holds there is unverified" in notes
    told = upgrade.way(TRANSLATE).foretold
    assert told is not None
    assert told.verified
    assert f"{told.value:.2f} [{told.low:.2f}, {told.high:.2f}]" in page
    assert f"Agreement among 4,500 is extrapolated from {told.held_out} pairs." in notes
    value = upgrade.to_json()
    assert json.loads(json.dumps(value)) == value
    assert value["verdict"]["outcome"] == "migrate"


def test_same_input_same_numbers(sample: Sample, rows: Any) -> None:
    some = sample.pairs[:150]
    stores = sample.stores(rows, "minilm", "e5")
    stores["target"] = rows(sample.ids.take(pa.array(some)), sample.documents["e5"][some])
    values = [vecferry.assess(**stores).to_json() for _ in range(2)]
    assert [value.pop("timing") is not None for value in values] == [True, True]
    assert values[0] == values[1]


def test_without_labels_only_agreement_is_known(sample: Sample, rows: Any) -> None:
    stores = sample.stores(rows, "e5", "minilm") | {"qrels": None}
    some = {
        "target": rows(sample.ids.take(pa.array(sample.pairs[:300])), sample.documents["minilm"][sample.pairs[:300]])
    }
    a = vecferry.assess(**stores | some)
    assert (a.verdict.outcome, a.verdict.way) == ("can't tell", None)
    assert "Can't tell whether the new model is better" in a.table()
    assert a.way(TRANSLATE).cells[0].metric == "agreement"
    assert a.way(TRANSLATE).cells[0].value is not None
    assert a.way(RE_EMBED).cells[0].value == 1
    alone = vecferry.assess(stores["source"], some["target"])
    assert {c.metric for c in alone.way(TRANSLATE).cells} >= {"doc-agreement"}
    assert alone.way(MAP_QUERIES).cells[0].reason == "no queries: pass --queries"
    assert "Documents stood in as queries" in alone.table()
    unnamed = vecferry.assess(**stores | some | {"source_queries": None, "qrels": DATA / "qrels.tsv"})
    assert unnamed.verdict.outcome == "can't tell"
    assert unnamed.way(TRANSLATE).cell("retention.ndcg").value is not None
    assert unnamed.way(NOTHING).cells[0].reason == "no source queries: pass --source-queries"


def test_too_little_and_wrong_options(sample: Sample, rows: Any) -> None:
    stores = sample.stores(rows, "e5", "minilm")
    few = rows(sample.ids.slice(0, 99), sample.documents["minilm"][:99])
    with pytest.raises(DataError, match="99 pairs: at least 100 are needed"):
        vecferry.assess(stores["source"], few)
    for options, said in (
        ({"solver": "mlp"}, "unknown solver"),
        ({"metric": "dot"}, "unknown metric"),
        ({"qrels": "labels"}, "--qrels needs --queries"),
        ({"source_queries": "old"}, "--source-queries needs --queries"),
        ({"cost_per_1k_texts": -1}, "from 0 on"),
    ):
        with pytest.raises(UsageError, match=said):
            vecferry.assess("nowhere", "nowhere", **options)


def test_the_command_line(sample: Sample, tmp_path: Path) -> None:
    at = {}
    names = np.arange(200)
    for name, x, ids in (
        ("source", sample.documents["e5"][:400], np.arange(400)),
        ("target", sample.documents["minilm"][:150], np.arange(150)),
        ("queries", sample.queries["minilm"][:200], names),
        ("source-queries", sample.queries["e5"][:200], names),
    ):
        np.save(tmp_path / f"{name}.npy", x)
        np.save(tmp_path / f"{name}-ids.npy", ids)
        at[name] = f"npy:{tmp_path}/{name}.npy?ids={tmp_path}/{name}-ids.npy"
    command = ["assess", "--cost-per-1k-texts", "0.1", *(x for name, uri in at.items() for x in (f"--{name}", uri))]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert "Can't tell" in result.stdout
    result = CliRunner().invoke(cli, [*command, "--json"])
    assert json.loads(result.stdout)["facts"]["cost_per_1k_texts"] == 0.1


# Every document is held out once


def small(n: int = 60, d: int = 5) -> tuple[Pairs, Queries]:
    rng = np.random.default_rng(0)
    old, new = unit(rng.standard_normal((n, d))), unit(rng.standard_normal((n, d + 1)))
    asked, asked_old = unit(rng.standard_normal((8, d + 1))), unit(rng.standard_normal((8, d)))
    return Pairs(pa.array(np.arange(n)), old, new), Queries(pa.array([str(i) for i in range(8)]), asked, asked_old)


def test_folds_are_even_and_keep_equal_rows_together() -> None:
    pairs, _ = small()
    plain = folds_of(pairs.ids, FOLDS, 0)
    assert np.bincount(plain).tolist() == [12] * 5
    old, new = pairs.source.copy(), pairs.target.copy()
    old[[3, 17]] = old[5]  # 3, 5 and 17 are equal on one side, 17 and 40 on the other
    new[40] = new[17]
    fold = folds_of(pairs.ids, FOLDS, 0, old, new)
    assert len({int(fold[i]) for i in (3, 5, 17, 40)}) == 1
    others = np.setdiff1d(np.arange(60), [3, 5, 17, 40])
    np.testing.assert_array_equal(fold[others], plain[others])
    assert (folds_of(pairs.ids, FOLDS, 1) != plain).any()


def test_no_map_saw_what_it_carries() -> None:
    """Change a document's true vector, and its translation stays; only those of other folds may move."""
    pairs, _ = small()
    also = Pairs(pa.array(np.arange(0)), pairs.source[:0], pairs.target[:0])
    fold, recipe = folds_of(pairs.ids, FOLDS, 0), Recipe("ridge", "cosine", False, 0)
    learn = recipe.for_documents(pairs.source, pairs.target, None)
    none = np.zeros(60, np.bool_)
    before = translate(pairs, fold, learn, also, none)
    target = pairs.target.copy()
    target[7] = -target[7]
    changed = Pairs(pairs.ids, pairs.source, target)
    after = translate(changed, fold, learn, also, none)
    own = fold == fold[7]
    np.testing.assert_array_equal(after[own], before[own])
    assert (after[~own] != before[~own]).any(axis=1).all()
    apart = np.arange(60) == 7  # nor did any that is apart
    np.testing.assert_array_equal(
        translate(changed, fold, learn, also, apart), translate(pairs, fold, learn, also, apart)
    )


def test_what_chooses_is_not_measured() -> None:
    pairs, _ = small(1300)
    old = pairs.source.copy()
    old[:1200:2] = old[1:1200:2]  # equal texts
    pairs = Pairs(pairs.ids, old, pairs.target)
    relevant = np.arange(1200, 1290)
    chooser, measured = set_apart(pairs, relevant, 0, True)
    assert 0 < len(chooser) < 500 < len(measured)
    assert not set(map(bytes, chooser.source)) & set(map(bytes, measured.source))
    assert set(relevant) <= set(measured.ids.to_pylist())
    assert len(set_apart(pairs, relevant, 0, False)[0]) == 0
    assert len(set_apart(small(700)[0], np.arange(10), 0, True)[0]) == 0
    plain, left = set_apart(small(900)[0], np.arange(10), 0, True)
    assert (len(plain), len(left)) == (500, 400)


def test_maps_are_chosen_by_the_other_half_of_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a query is worth mustn't depend on a map that it helped to choose: both halves choose, for each other."""
    pairs, queries = small(900)
    chosen_by: list[Any] = []
    plain = Recipe.for_documents

    def watching(self: Recipe, x: Any, y: Any, asked: Any) -> Any:
        chosen_by.append((x, asked))
        return plain(self, x, y, asked)

    monkeypatch.setattr(Recipe, "for_documents", watching)
    trial = Trial.of(pairs, queries, np.arange(10), "auto", "cosine", 0)
    assert len(chosen_by) == 2
    for h, (x, asked) in enumerate(chosen_by):
        np.testing.assert_array_equal(asked, queries.vectors[trial.half != h])
        assert len(x) == 500
        assert not set(map(bytes, x)) & set(map(bytes, trial.pairs.source))


@pytest.mark.slow
def test_a_recipe_makes_the_map_that_fit_makes(sample: Sample, rows: Any) -> None:
    """With old vectors of one length, and of many: the same translations as of the map that `fit` chose."""
    ids = sample.ids.slice(0, 640)
    for length in (np.full(640, 3.0), np.random.default_rng(0).uniform(1, 5, 640)):
        x, y = (sample.documents["minilm"][:640] * length[:, None]).astype(np.float32), sample.documents["e5"][:640]
        m = vecferry.fit(rows(ids, x), rows(ids, y), effort=0)
        assert m.holdout is not None
        fitted = ~np.isin(ids.to_pylist(), m.holdout.ids.to_pylist())
        recipe = Recipe("auto", "cosine", not np.allclose(length, 3), 0)
        learn = recipe.for_documents(x[fitted], y[fitted], None)
        np.testing.assert_allclose(learn(x[fitted], y[fitted]).apply(x), m.apply(x), atol=1e-5)


def test_mapped_queries_are_compared_by_maps_that_saw_neither() -> None:
    pairs, queries = small()
    fold, learn = folds_of(pairs.ids, FOLDS, 0), Recipe("auto", "cosine", False, 0).for_queries()
    half = folds_of(queries.ids, 2, 0, queries.vectors)
    seen: list[tuple[Any, Any]] = []

    def watching(x: Any, y: Any) -> Any:
        seen.append((x, y))
        return learn(x, y)

    found = search_mapped(pairs, queries, fold, half, watching, 10, "cosine")
    assert len(seen) == 2 * FOLDS
    scores = np.empty((8, 60))
    for i, (x, _) in enumerate(seen):
        h, f = divmod(i, FOLDS)
        assert not any((row == x).all(axis=1).any() for row in pairs.target[fold == f])
        assert not any((row == x).all(axis=1).any() for row in queries.vectors[half == h])
        assert len(x) == 48 + 4
        mapped = learn(*seen[i]).apply(queries.vectors[half == h])
        scores[np.ix_(half == h, fold == f)] = mapped @ pairs.source[fold == f].T
    np.testing.assert_array_equal(found, np.argsort(-scores, axis=1)[:, :10])


# What comes in


def test_of_a_large_target_some_are_drawn_and_what_is_relevant(
    sample: Sample, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vecferry.assessing.MAX_PAIRS", 300)
    read: list[int] = []

    class Watched(rows):  # type: ignore[misc]
        def take(self, ids: pa.Array) -> Any:
            read.append(len(ids))
            return super().take(ids)

        def read(self, batch_size: int, after: Any = None) -> Any:
            raise AssertionError("read as a whole")

    stores = sample.stores(rows, "e5", "minilm")
    stores |= {
        "source": Watched(sample.ids, sample.documents["e5"], uri="INDEX"),
        "target": Watched(sample.ids, sample.documents["minilm"], uri="ALL"),
    }
    a = vecferry.assess(**stores, solver="ridge")
    assert a.facts["labelled"] == QUERIES
    relevant = len(np.unique(sample.relevant[:QUERIES]))
    assert 300 <= a.facts["pairs"] <= 300 + relevant
    assert max(read) == a.facts["pairs"]
    assert "Of the 4,500 rows of ALL about 300 were drawn." in a.table()
    assert MAX_PAIRS == 20_000


def test_ids_that_the_index_lacks_are_named(sample: Sample, rows: Any) -> None:
    stores = sample.stores(rows, "e5", "minilm")
    stores["source"] = rows(sample.ids.slice(0, 4000), sample.documents["e5"][:4000], uri="INDEX")
    with pytest.raises(BadRowsError, match="ids of PAIRS are not in it"):
        vecferry.assess(**stores)
    a = vecferry.assess(**stores, bad_rows="skip", solver="ridge")
    assert a.facts["pairs"] < PAIRS
    assert "rows left out: INDEX: ids of PAIRS are not in it" in a.table()


def test_codes_are_not_taken_for_vectors(sample: Sample, rows: Any) -> None:
    stores = sample.stores(rows, "e5", "minilm")
    codes = rows(sample.ids, sample.documents["e5"], uri="CODES", lossy=True, index="PQ48")
    with pytest.raises(UsageError, match=r"CODES holds quantised codes \(PQ48\).* --allow-lossy accepts that"):
        vecferry.assess(**stores | {"source": codes})
    a = vecferry.assess(**stores | {"source": codes}, allow_lossy=True, solver="ridge")
    assert "CODES holds quantised codes: what they lost is lost to every way" in a.table()


# Carried to the index's own size


def test_each_document_stands_for_others() -> None:
    """Ranks behind others that weigh w lie evenly from 1 + w on; with weights of 1 it is nDCG."""
    rng = np.random.default_rng(0)
    found = np.stack([rng.permutation(40)[:10] for _ in range(50)])
    documents = np.concatenate([rng.permutation(40)[:4] for _ in range(48)])
    qrels = Qrels(np.repeat(np.arange(48), 4), documents, rng.integers(1, 4, 48 * 4))
    np.testing.assert_allclose(weighted_ndcg(found, qrels, np.ones(40), 1), ndcg(found, qrels, 10))
    assert np.isnan(weighted_ndcg(found, qrels, np.ones(40), 3)[48:]).all()
    # another, the relevant 7 of grade 2, another, the relevant 5 of grade 1; each other stands for 2
    one = Qrels(np.zeros(2, np.int64), np.array([7, 5]), np.array([2, 1]))
    gained = 2 * np.mean([1 / np.log2(1 + r) for r in (3, 4)]) + np.mean([1 / np.log2(1 + r) for r in (6, 7)])
    expected = gained / (2 + 1 / np.log2(3))
    assert weighted_ndcg(np.array([[1, 7, 2, 5]]), one, np.full(9, 2.0), 2)[0] == pytest.approx(expected)
    assert weighted_ndcg(np.array([[1, 7, 2, 5]]), one, np.full(9, 10.0), 10)[0] == 0


def test_ratios_and_their_intervals() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.2, 1, 100), rng.uniform(0.2, 1, 100)
    here = Gains({"a": a, "b": b}, 1000, 1000).ratio("retention.ndcg", "a", "b")
    assert here.value == pytest.approx(a.mean() / b.mean())
    assert (here.documents, here.queries, here.among) == (1000, 100, "held-out documents")
    drawn = rng.integers(0, 100, (20_000, 100))
    low, high = np.quantile(a[drawn].mean(axis=1) / b[drawn].mean(axis=1), [0.025, 0.975])
    assert here.low == pytest.approx(low, rel=0.01)
    assert here.high == pytest.approx(high, rel=0.01)
    far = Gains({"a": a, "b": b}, 1000, 4000).ratio("retention.ndcg", "a", "b")
    widths = [np.log(cell.value / cell.low) / 1.96 for cell in (here, far) if cell.value and cell.low]
    assert widths[1] ** 2 - widths[0] ** 2 == pytest.approx((FORM * np.log(4)) ** 2)
    assert far.among == "documents, projected"
    same = Gains({"a": a, "b": b}, 1000, 4000).ratio("retention.ndcg", "b", "b")
    assert (same.low, same.value, same.high) == (1, 1, 1)
    none = Gains({"a": a * 0, "b": b}, 9, 9).ratio("x", "a", "b")
    assert (none.value, none.low) == (0, 0)
    assert none.high == pytest.approx(0.03 / b.mean())
    assert Gains({"b": b}, 9, 9).ratio("x", "a", "b").reason == "a wasn't measured"
    assert Gains({"a": a, "b": b * 0}, 9, 9).ratio("x", "a", "b").reason == "b finds no relevant document"
    assert Gains({"a": a[:1], "b": b[:1]}, 9, 9).ratio("x", "a", "b").reason == "1 labelled queries"


def test_gains_are_at_the_size_of_the_index() -> None:
    pairs, queries = small(300)
    trial = Trial.of(pairs, queries, NOBODY, "ridge", "cosine", 0)
    qrels = Qrels(np.arange(8), np.arange(8) * 3, np.ones(8, np.int64))
    assert Gains.of(trial, qrels, 10**6).target == 8 + 2920
    assert Gains.of(trial, qrels, 200).target == 300
    here = Gains.of(trial, qrels, 300)  # each document stands for itself: plain searches
    for name, places in trial.among().items():
        if not isinstance(places, str):
            np.testing.assert_allclose(here.values[name], ndcg(places, qrels, 10), err_msg=name)
    assert cascade(50) in here.values
    assert cascade(100) not in here.values
    assert cascade(200) in Gains.of(trial, qrels, 1200).values


def test_relevant_documents_count_as_often_as_in_the_index() -> None:
    """Of 600 pairs 200 are relevant: 400 of the 9,800 others are there, so 8 of the 200 relevant stay."""
    rows = resembling(600, np.arange(200), 10_000, 0)
    assert (int(np.sum(rows < 200)), int(np.sum(rows >= 200))) == (8, 400)
    assert len(resembling(600, np.arange(200), 600, 0)) == 600
    assert len(resembling(600, np.array([], np.int64), 10_000, 0)) == 600


def test_agreement_is_foretold_for_the_index(sample: Sample, upgrade: Assessment) -> None:
    """What 1,100 pairs foretell of 4,500 documents against a search of all of them."""
    asked, other = sample.queries["minilm"][:QUERIES], sample.queries["e5"][:QUERIES]
    true = np.argsort(-(asked @ sample.documents["minilm"].T), axis=1)[:, :10]
    old = np.argsort(-(other @ sample.documents["e5"].T), axis=1)[:, :10]
    agreement = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(true.tolist(), old.tolist(), strict=True)])
    told = upgrade.way(NOTHING).foretold
    assert told is not None
    assert told.low is not None
    assert told.high is not None
    assert told.low < agreement < told.high
    assert upgrade.way(cascade(50)).foretold.reason.startswith("not foretold for cascades")  # type: ignore[union-attr]
    pairs, queries = small(150)
    trial = Trial.of(pairs, queries, NOBODY, "ridge", "cosine", 0)
    assert set(foretell(trial, np.arange(150), 150, 0).values()) == {None}
    few = foretell(trial, np.arange(150), 900, 0)[TRANSLATE]
    assert few is not None
    assert few.reason == "foretold from at least 200 pairs, not 150"


@pytest.mark.slow
def test_retention_intervals_cover_what_they_should() -> None:
    """100 simulated corpora: 95 % intervals from 400 of 2,000 documents and 100 queries hold the truth 92 to 99 times.

    The truth is what the map does for 3,000 other queries at full size. Old and new vectors see the same latent
    texts through different noise; queries lie near the one document that is relevant to them.
    """
    n, d, covered, trials = 2000, 12, {TRANSLATE: 0, RE_EMBED: 0}, 100
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        axes = rng.standard_normal((2, d, d)) / np.sqrt(d)

        def encode(texts: Any, model: int, rng: Any = rng, axes: Any = axes) -> Any:
            return unit(texts @ axes[model] + (0.5, 0.35)[model] * rng.standard_normal(texts.shape))

        texts = rng.standard_normal((n, d))
        old, new = encode(texts, 0), encode(texts, 1)
        relevant = rng.permutation(n)[:100]
        rows = np.concatenate([relevant, np.setdiff1d(np.arange(n), relevant)[:300]])

        def ask(places: Any, rng: Any = rng, texts: Any = texts, encode: Any = encode) -> tuple[Any, Any]:
            near = texts[places] + 0.6 * rng.standard_normal((len(places), d))
            return encode(near, 0), encode(near, 1)

        asked_old, asked = ask(relevant)
        pairs = Pairs(pa.array(rows), old[rows], new[rows])
        queries = Queries(pa.array([str(i) for i in range(100)]), asked, asked_old)
        trial = Trial.of(pairs, queries, NOBODY, "ridge", "cosine", 0)
        gains = Gains.of(trial, Qrels(np.arange(100), np.arange(100), np.ones(100, np.int64)), n)
        others = rng.integers(0, n, 3000)
        later_old, later = ask(others)
        some = rng.permutation(n)[:333]
        moved = Recipe("ridge", "cosine", False, 0).for_documents(old, new, None)(old[some], new[some]).apply(old)
        scores = {NOTHING: later_old @ old.T, TRANSLATE: later @ moved.T, RE_EMBED: later @ new.T}
        happened = {}
        for name, s in scores.items():
            rank = (s > s[np.arange(3000), others][:, None]).sum(axis=1)
            happened[name] = np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean()
        for name in covered:
            cell = gains.ratio("break-even.ndcg", name, NOTHING)
            assert cell.low is not None
            assert cell.high is not None
            covered[name] += cell.low <= happened[name] / happened[NOTHING] <= cell.high
    assert min(covered.values()) >= 92, covered
    assert max(covered.values()) <= 99, covered
