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
from vecferry.assessing import Assessment
from vecferry.cli import cli
from vecferry.crossfit import FOLDS, folds_of, learner, search_mapped, translate
from vecferry.errors import DataError, UsageError
from vecferry.holdout import Qrels
from vecferry.pairs import Pairs, Queries
from vecferry.qrels import read_qrels
from vecferry.recall import interval, ndcg
from vecferry.verdict import MAP_QUERIES, NOTHING, RE_EMBED, TRANSLATE
from vecferry.ways import Gains, Trial, cascade

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
        """Measure nDCG@10 of each way at the full 4,500 documents for each of the 300 other queries, by plain sorting.

        Documents are carried by maps of the other half of the documents than they are in.
        """
        x, y = self.documents[old], self.documents[new]
        asked, relevant = slice(QUERIES, 500), self.relevant[QUERIES:]
        learn = learner("ridge", "cosine", 0)
        half = np.random.default_rng(1).permutation(4500)
        moved, mapped = np.empty_like(y), np.empty((300, 4500))
        for held in (half[:2250], half[2250:]):
            fit = np.setdiff1d(half, held)[:PAIRS]
            moved[held] = learn(x[fit], y[fit]).apply(x[held])
            mapped[:, held] = learn(y[fit], x[fit]).apply(self.queries[new][asked]) @ x[held].T
        scores = {
            NOTHING: self.queries[old][asked] @ x.T,
            TRANSLATE: self.queries[new][asked] @ moved.T,
            MAP_QUERIES: mapped,
            RE_EMBED: self.queries[new][asked] @ y.T,
        }
        for c in (50, 100, 200):
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
    assert verdict.way.startswith("cascade")
    assert happened[verdict.way].mean() > 1.2 * happened[NOTHING].mean()
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
    assert set(verdict.standings.values()) <= {"loses", "unknown"}
    assert "The upgrade itself is none" in verdict.reasons[0]
    kept = downgrade.way(cascade(200)).cell("retention.ndcg")
    translated = downgrade.way(TRANSLATE).cell("retention.ndcg")
    assert kept.value is not None
    assert translated.high is not None
    assert kept.value > translated.high
    check_against(downgrade, happened)


def check_against(assessment: Assessment, happened: dict[str, Any]) -> None:
    """Compare with what happened at 4,500 documents to other queries: no opposite verdict, and intervals that meet."""
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
    assert upgrade.way(cascade(500)).cells[0].reason == "needs more than 2,500 pairs, there are 1,100"


def test_the_page_holds_the_verdict_its_evidence_and_the_rule(upgrade: Assessment) -> None:
    page = upgrade.table()
    lines = page.splitlines()
    assert max(map(len, lines)) <= 125
    assert (
        "INDEX (4,500 rows), 1,100 of them encoded by the new model too, 200 queries, 200 of them with labels" in page
    )
    assert any(line.startswith("Migrate: cascade, c = ") for line in lines)
    assert "break-even  retention x gain" in page
    assert "projected to 4,500" in page
    assert f"{upgrade.way(TRANSLATE).cells[0].value:.3f}" in page
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
    pairs, queries = small()
    fold, learn = folds_of(pairs.ids, FOLDS, 0), learner("ridge", "cosine", 0)
    before = translate(pairs, fold, learn)
    target = pairs.target.copy()
    target[7] = -target[7]
    changed = Pairs(pairs.ids, pairs.source, target)
    after = translate(changed, fold, learn)
    own = fold == fold[7]
    np.testing.assert_array_equal(after[own], before[own])
    assert (after[~own] != before[~own]).any(axis=1).all()

    seen: list[tuple[Any, Any]] = []

    def watching(x: Any, y: Any) -> Any:
        seen.append((x, y))
        return learn(x, y)

    found = search_mapped(pairs, queries, fold, watching, 10, "cosine", 0)
    half = folds_of(queries.ids, 2, 0, queries.vectors)
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


# Carried to the index's own size


def test_ratios_follow_the_power_law() -> None:
    """nDCG that falls as n^-.1 for one way and n^-.2 for another: the ratio at 16 n is known in closed form."""
    a, b = np.array([0.4, 0.6, 0.8]), np.array([0.5, 0.5, 0.5])
    parts = {"a": np.stack([a * 2**0.2] * 4), "b": np.stack([b * 2**0.1] * 4)}
    gains = Gains({"a": a, "b": b}, parts, 1000, 500, 8000, 0)
    cell = gains.ratio("retention.ndcg", "a", "b")
    assert cell.value == pytest.approx(1.2 * 8**-0.1)
    assert (cell.documents, cell.queries, cell.among) == (8000, 3, "documents, projected")
    here = Gains({"a": a, "b": b}, parts, 1000, 500, 900, 0).ratio("retention.ndcg", "a", "b")
    assert here.value == pytest.approx(1.2)
    assert (here.documents, here.among) == (1000, "held-out documents")
    far = Gains({"a": a, "b": b}, parts, 1000, 500, 10**6, 0).ratio("retention.ndcg", "a", "b")
    assert far.value == pytest.approx(1.2 * 16**-0.1)
    assert far.documents == 16000
    # where nearly all documents are relevant ones there are no parts to tell from
    full = Gains({"a": a, "b": b}, parts, 1000, 900, 8000, 0).ratio("retention.ndcg", "a", "b")
    assert full.value == pytest.approx(1.2)
    assert full.documents == 1000
    assert Gains({"b": b}, parts, 9, 5, 9, 0).ratio("x", "a", "b").reason == "a wasn't measured"
    none = Gains({"a": a, "b": b * 0}, parts, 9, 5, 9, 0).ratio("x", "a", "b")
    assert none.reason == "b finds no relevant document"


def test_parts_hold_the_relevant_documents_and_a_fourth_of_the_others() -> None:
    pairs, queries = small(200)
    trial = Trial.of(pairs, queries, "ridge", "cosine", 0)
    qrels = Qrels(np.arange(8), np.arange(8) * 3, np.ones(8, np.int64))
    found = trial.among()
    gains = Gains.of(trial, found, qrels, 200, 0)
    assert gains.size == 8 + 48
    assert set(gains.parts) == set(gains.whole) == {n for n, p in found.items() if not isinstance(p, str)}
    others = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(200), qrels.document)).reshape(4, 48)
    for i, part in enumerate(others):
        rows = np.sort(np.concatenate([qrels.document, part]))
        near = rows[np.argsort(-(queries.vectors @ pairs.target[rows].T), axis=1)[:, :10]]
        np.testing.assert_allclose(gains.parts[RE_EMBED][i], ndcg(near, qrels, 10))
    # mapped queries are searched once and filtered: the same as scores of the half alone
    rows = np.sort(np.concatenate([qrels.document, others[0]]))
    filtered = trial.among(rows)[MAP_QUERIES]
    assert not isinstance(filtered, str)
    assert not isinstance(trial.mapped, str)
    expected = [[p for p in line if p in set(rows.tolist())][:10] for line in trial.mapped.tolist()]
    np.testing.assert_array_equal(filtered, expected)
