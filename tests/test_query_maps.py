"""Maps that carry new queries into the old space: the index stays (field case 44, both ways)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import vecferry
from vecferry.batch import id_keys
from vecferry.cli import cli
from vecferry.errors import IncompatibleError, UsageError
from vecferry.linear import LinearMap
from vecferry.prechecks import check_taken
from vecferry.qrels import read_qrels
from vecferry.split import split
from vecferry.store import open_reader

DATA = Path(str(files("vecferry") / "data"))


def unit(x: Any) -> Any:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


class Sample:
    """The package's sample: e5 as the old model, MiniLM as the new one; equal dimensions, and nobody names them."""

    def __init__(self, rows: Any) -> None:
        self.documents, self.queries = (pq.read_table(DATA / f"{name}.parquet") for name in ("documents", "queries"))
        ids, names = self.documents["id"].combine_chunks(), self.queries["id"].combine_chunks()
        self.old, self.new = (unit(vectors(self.documents, m)) for m in ("e5", "minilm"))
        self.asked_old, self.asked_new = (unit(vectors(self.queries, m)) for m in ("e5", "minilm"))
        self.index = rows(ids, self.old, uri="INDEX")
        part = np.arange(0, 4500, 2)
        self.pairs = rows(ids.take(pa.array(part)), self.new[part], uri="PAIRS")
        self.new_queries = rows(names, self.asked_new, uri="NEW QUERIES")
        self.old_queries = rows(names, self.asked_old, uri="OLD QUERIES")
        self.new_documents = rows(ids, self.new, uri="NEW DOCUMENTS")

    def fit(self, **options: Any) -> LinearMap:
        given = {"queries": self.new_queries, "source_queries": self.old_queries, "solver": "ridge"} | options
        return vecferry.fit(self.index, self.pairs, **given)


def vectors(table: pa.Table, model: str) -> Any:
    return table[model].combine_chunks().flatten().to_numpy().reshape(len(table), -1).astype(np.float32)


@pytest.fixture(scope="module")
def sample() -> Sample:
    from tests.conftest import Rows

    return Sample(Rows)


@pytest.fixture(scope="module")
def query_map(sample: Sample) -> LinearMap:
    return sample.fit(direction="query", qrels=DATA / "qrels.tsv", source_model="old", target_model="new")


def test_what_it_learns_and_what_is_measured(sample: Sample, query_map: LinearMap) -> None:
    card, held = query_map.card, query_map.holdout
    assert card is not None
    assert held is not None
    assert card.direction == "query"
    assert (card.source.model, card.target.model, card.space) == ("new", "old", "old")
    assert (query_map.pre, query_map.post) == ("l2", "l2")
    # the hold-out is the one of a document map: index side first
    other = sample.fit(qrels=DATA / "qrels.tsv").holdout
    assert other is not None
    assert held.ids.equals(other.ids)
    np.testing.assert_array_equal(held.source, other.source)
    assert held.queries is not None
    assert held.source_queries is not None
    assert card.pairs == len(held.fit_keys) + 250  # the other half of 500 queries
    # agreement, by sorting all scores in float64
    truth = np.argsort(-(held.queries.astype(np.float64) @ held.target.T), axis=1)[:, :10]
    mapped = query_map.apply(held.queries).astype(np.float64)
    found = np.argsort(-(mapped @ held.source.T), axis=1)[:, :10]
    shared = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(truth, found, strict=True)])
    assert card.measured["agreement@10"] == pytest.approx(shared, abs=2e-3)
    assert shared > 10 * 10 / len(held.ids)  # far above chance
    cosine = (mapped * held.source_queries).sum(axis=1) / np.linalg.norm(held.source_queries, axis=1)
    assert card.measured["mean_cosine"] == pytest.approx(cosine.mean(), abs=2e-4)
    assert (card.measured["documents"], card.measured["queries"]) == (len(held.ids), 250)


def test_it_is_the_ridge_of_documents_and_queries_with_the_roles_swapped(rows: Any, sample: Sample) -> None:
    from vecferry.pairs import Pairs, Queries
    from vecferry.solvers import ridge

    m = sample.fit(direction="query")
    assert m.holdout is not None
    ids = sample.documents["id"].combine_chunks()
    fit = np.isin(id_keys(ids), m.holdout.fit_keys)
    names = pa.array(sample.queries["id"].to_pylist(), pa.string())
    asked = ~np.isin(id_keys(names), id_keys(m.holdout.query_ids))
    assert (asked.sum(), fit.sum()) == (250, m.card.pairs - 250 if m.card else 0)
    again = ridge(
        np.concatenate([sample.new[fit], sample.asked_new[asked]]),
        np.concatenate([sample.old[fit], sample.asked_old[asked]]),
    )
    np.testing.assert_allclose(m.weight, again.weight, atol=1e-4)
    # and so it is where a choice among maps is asked for, which is one among maps of documents
    chosen = sample.fit(direction="query", solver="auto")
    assert chosen.card is not None
    assert chosen.card.solver == "ridge"
    assert any("auto chooses among maps that carry documents" in w for w in chosen.card.warnings)
    assert chosen.weight.tobytes() == m.weight.tobytes()
    # without the old model's queries it learns from documents
    alone = sample.fit(direction="query", source_queries=None)
    assert alone.card is not None
    assert alone.card.pairs == fit.sum()
    assert alone.card.measured["agreement@10"] > 0.2
    none = sample.fit(direction="query", queries=None, source_queries=None)
    assert none.card is not None
    assert "agreement@10" not in none.card.measured
    # a held-out query's twin is not learned from
    pairs = Pairs(ids, sample.old, sample.new)
    twins = Queries(names, np.repeat(sample.asked_new[:1], 500, axis=0), sample.asked_old)
    parts = split(pairs, twins, None, seed=0, fingerprint={})
    assert parts.queries is not None
    assert parts.source_queries is not None
    assert len(parts.queries) == len(parts.source_queries) == 0


@pytest.mark.case("44")
def test_documents_are_refused_by_it_and_queries_taken(sample: Sample, query_map: LinearMap, tmp_path: Path) -> None:
    """Equal dimensions, no names: by name nothing could be told."""
    nameless = sample.fit(direction="query")
    for m in (query_map, nameless):
        with pytest.raises(IncompatibleError, match=r"carries new queries into the old space.*--direction document"):
            vecferry.migrate(sample.index, tmp_path / "new.faiss", m)
        with pytest.raises(IncompatibleError, match="carries new queries into the old space"):
            vecferry.Cascade(sample.index, m, cache=tmp_path / "cache")
        assert m.card is not None
        with pytest.raises(IncompatibleError, match=r"INDEX: 200 of 200 held-out ids.*space where the map leads"):
            check_taken(sample.index, m, m.card)
        with pytest.raises(IncompatibleError, match=r"OLD QUERIES: 200 of 200 held-out ids"):
            check_taken(sample.old_queries, m, m.card)
        check_taken(sample.new_queries, m, m.card)
        check_taken(sample.new_documents, m, m.card)
    y = vecferry.transform(sample.asked_new, nameless)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), 1, atol=1e-5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("44")
def test_a_document_map_refuses_new_queries(sample: Sample) -> None:
    m = sample.fit()
    assert m.card is not None
    for store in (sample.new_queries, sample.new_documents):
        with pytest.raises(IncompatibleError, match=r"it carries old vectors into the new space.*other --direction"):
            check_taken(store, m, m.card)
    check_taken(sample.index, m, m.card)
    check_taken(sample.old_queries, m, m.card)


def test_recorded_names_are_compared(rows: Any, sample: Sample, query_map: LinearMap) -> None:
    assert query_map.card is not None
    for space, said in (("old", "is in the space 'old' already"), ("third", "'third', the map takes 'new'")):
        with pytest.raises(IncompatibleError, match=said):
            check_taken(rows(None, sample.asked_new, space=space), query_map, query_map.card)
    check_taken(rows(None, sample.asked_new, space="new"), query_map, query_map.card)
    with pytest.raises(IncompatibleError, match="7 dimensions, the map takes 384"):
        check_taken(rows(None, np.ones((3, 7))), query_map, query_map.card)


def test_the_rule_of_the_old_space_is_what_counts(rows: Any) -> None:
    """The index has norms of its own: the map leads there, so they are part of it; the new side's are not."""
    rng = np.random.default_rng(0)
    new = unit(rng.standard_normal((400, 6)))
    old = (new @ rng.standard_normal((6, 5)) * np.linspace(0.5, 2, 400)[:, None]).astype(np.float32)
    index, pairs = rows(np.arange(400), old, uri="INDEX", metric="ip"), rows(np.arange(300), new[:300], uri="NEW")
    with pytest.raises(UsageError, match=r"INDEX: norms go .*the store says ip"):
        vecferry.fit(index, pairs, direction="query")
    m = vecferry.fit(index, pairs, direction="query", metric="ip")
    assert m.card is not None
    assert (m.card.metric, m.post, m.d_in, m.d_out) == ("ip", "none", 6, 5)
    assert vecferry.fit(index, pairs).post == "l2"
    with pytest.raises(UsageError, match="unknown direction 'back'"):
        vecferry.fit(index, pairs, direction="back")  # type: ignore[arg-type]


def test_the_whole_way_by_the_command_line(sample: Sample, tmp_path: Path) -> None:
    """Fit, transform, and search the old index: the numbers are those of the arrays."""
    from vecferry.demo import write_store

    ids, names = sample.documents["id"].combine_chunks(), sample.queries["id"].combine_chunks()
    at = {n: f"{tmp_path / n}.parquet" for n in ("index", "pairs", "new", "old", "mapped")}
    write_store(at["index"], ids, sample.documents["e5"], "old model")
    part = pa.array(np.arange(0, 4500, 2))
    write_store(at["pairs"], ids.take(part), sample.documents["minilm"].take(part), "new model")
    write_store(at["new"], names, sample.queries["minilm"], "new model")
    write_store(at["old"], names, sample.queries["e5"], "old model")
    fit = ["fit", "--source", at["index"], "--target", at["pairs"], "--direction", "query", "-o", str(tmp_path / "map")]
    result = CliRunner().invoke(cli, [*fit, "--queries", at["new"], "--source-queries", at["old"]])
    assert result.exit_code == 0, result.output
    assert "new query vectors into the old space" in result.stdout
    assert "next: vecferry transform NEW_QUERIES" in result.stderr
    turn = ["transform", "--map", str(tmp_path / "map"), "-o", at["mapped"]]
    refused = CliRunner().invoke(cli, [*turn, at["index"]])
    assert (refused.exit_code, "is in the space 'old model' already" in refused.stderr) == (4, True)
    assert CliRunner().invoke(cli, [*turn, at["new"]]).exit_code == 0
    with open_reader(at["mapped"]) as store:
        assert store.info.space == "old model"
        mapped = store.take(names).vectors
    # labels: mapped queries find in the old index more than the new model's queries do as they are
    labels = read_qrels(DATA / "qrels.tsv").match(names.cast(pa.string()), ids)
    assert labels is not None

    def recall(asked: Any) -> float:
        found = np.argsort(-(asked @ sample.old.T), axis=1)[:, :10]
        return float(np.mean([d in found[q] for q, d in zip(labels.query, labels.document, strict=True)]))

    assert recall(mapped) > 10 * recall(sample.asked_new)
    refused = CliRunner().invoke(cli, ["migrate", at["index"], str(tmp_path / "x"), "--map", str(tmp_path / "map")])
    assert (refused.exit_code, "--direction document" in refused.stderr) == (4, True)
