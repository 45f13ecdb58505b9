"""Which documents a query log needs, against a loop over its queries; the cache that comes of it; the command line."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import vecferry
from vecferry.cache import Cache
from vecferry.cli import cli
from vecferry.errors import BadRowsError, DataError, IncompatibleError, StoppedError, UsageError
from vecferry.holdout import Holdout
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapfile import seal
from vecferry.solvers import ridge

N, D, C = 300, 8, 12


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


TRUE = gaussian(N, D)
TRANSLATED = TRUE + 0.8 * gaussian(N, D, seed=1)
MAP = LinearMap(gaussian(7, D), card=Card(Side(7, "old"), Side(D, "new"), "by hand", metric="ip"))
DISTINCT = gaussian(9, D, seed=2)
LOG = DISTINCT[[0, 1, 2, 0, 3, 4, 0, 5, 6, 1, 7, 8]]


def encode(texts: list[str]) -> np.ndarray:
    return TRUE[[int(text) for text in texts]]


def need_by_hand(log: np.ndarray, c: int = C) -> np.ndarray:
    need = np.zeros(N)
    for query in log.astype(np.float64):
        ranking = np.argsort(-(TRANSLATED.astype(np.float64) @ query), kind="stable")
        for rank, document in enumerate(ranking[:c], 1):
            need[document] += 1 / rank**0.5
    return need


def order_of(need: np.ndarray) -> np.ndarray:
    return np.lexsort((np.arange(N), -need))[: np.count_nonzero(need)]


def held_in_cache(cache: Path) -> set[int]:
    kept = Cache(cache, "new", D, pa.int64())
    return set(np.flatnonzero(kept.has(pa.array(np.arange(N)))).tolist())


def test_the_most_needed_are_encoded_first_and_the_next_call_goes_on(rows, tmp_path):
    need = need_by_hand(LOG)
    order = order_of(need)
    index, log, cache = rows(None, TRANSLATED), rows(None, LOG), tmp_path / "cache"
    seen: list[str] = []

    def counted(texts: list[str]) -> np.ndarray:
        seen.extend(texts)
        return encode(texts)

    first = vecferry.warm(index, MAP, log, 20, encode=counted, texts=str, cache=cache, c=C)
    assert seen == [str(i) for i in order[:20]]
    assert held_in_cache(cache) == set(order[:20].tolist())
    assert (first.queries, first.needed, first.known, first.chosen, first.encoded) == (12, len(order), 0, 20, 20)
    assert first.before == 0
    assert first.after == pytest.approx(need[order[:20]].sum() / need.sum(), rel=1e-12)
    second = vecferry.warm(index, MAP, log, 15, encode=counted, texts=str, cache=cache, c=C)
    assert seen[20:] == [str(i) for i in order[20:35]]
    assert (second.known, second.chosen, second.before) == (20, 15, pytest.approx(first.after))
    rest = vecferry.warm(index, MAP, log, 10**6, encode=counted, texts=str, cache=cache, c=C)
    assert (rest.chosen, rest.after) == (len(order) - 35, pytest.approx(1))
    assert held_in_cache(cache) == set(order.tolist())
    done = vecferry.warm(index, MAP, log, 5, encode=counted, texts=str, cache=cache, c=C)
    assert (done.chosen, done.encoded, done.before, len(seen)) == (0, 0, pytest.approx(1), len(order))


def test_a_warm_cache_answers_the_log_without_an_encoder(rows, tmp_path):
    index = rows(None, TRANSLATED)
    vecferry.warm(index, MAP, rows(None, LOG), N, encode=encode, texts=str, cache=tmp_path / "warm", c=C)
    with vecferry.Cascade(index, MAP, cache=tmp_path / "warm") as cascade:
        without = cascade.search(LOG, k=C, c=C)
    with vecferry.Cascade(index, MAP, encode, str, tmp_path / "cold") as cascade:
        with_encoder = cascade.search(LOG, k=C, c=C)
        assert cascade.encoded == np.count_nonzero(need_by_hand(LOG))
    assert (without[0] == with_encoder[0]).all()
    assert (without[1] == with_encoder[1]).all()


def command(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    index = faiss.IndexFlatIP(D)
    index.add(TRANSLATED)
    faiss.write_index(index, str(tmp_path / "index.faiss"))
    np.save(tmp_path / "log.npy", LOG)
    MAP.save(tmp_path / "map")
    pq.write_table(pa.table({"id": np.arange(N), "text": [str(i) for i in range(N)]}), tmp_path / "texts.parquet")
    return tmp_path


def test_what_to_encode_is_written_encoded_elsewhere_and_added(folder):
    common = [folder / "index.faiss", "--map", folder / "map", "--cache", folder / "cache"]
    log = ["--queries", folder / "log.npy", "--budget", 25, "-c", C, "--texts", folder / "texts.parquet"]
    code, out, err = command("warm", *common, *log, "-o", folder / "need.parquet", "--json")
    assert code == 0, err
    assert "next: encode them" in err
    facts = json.loads(out)
    assert (facts["queries"], facts["chosen"], facts["encoded"]) == (12, 25, 0)
    need, table = need_by_hand(LOG), pq.read_table(folder / "need.parquet")
    order = order_of(need)[:25]
    assert table["id"].to_pylist() == order.tolist()
    assert table["text"].to_pylist() == [str(i) for i in order]
    np.testing.assert_allclose(table["need"].to_numpy(), need[order], rtol=1e-12)
    assert not (folder / "cache").exists()

    vectors = encode(table["text"].to_pylist())
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), D)
    pq.write_table(pa.table({"id": table["id"], "vector": lists}), folder / "encoded.parquet")
    code, out, err = command("warm", *common, "--add", folder / "encoded.parquet")
    assert (code, out) == (0, "")
    assert "25 vectors added" in err
    assert held_in_cache(folder / "cache") == set(order.tolist())
    code, out, err = command("warm", *common, *log, "-o", folder / "more.parquet")
    assert code == 0
    assert pq.read_table(folder / "more.parquet")["id"].to_pylist() == order_of(need)[25:50].tolist()
    assert "25 had true vectors" in out
    assert command("warm", *common, *log, "-o", folder / "more.parquet")[0] == 2


def test_an_encoder_is_named_by_module_and_function(folder, monkeypatch):
    np.save(folder / "true.npy", TRUE)
    code = "import numpy as np\ndef embed(texts):\n    return np.load('true.npy')[[int(t) for t in texts]]\n"
    (folder / "mymodel_of_test.py").write_text(code)
    monkeypatch.chdir(folder)
    warm = ["warm", "index.faiss", "--map", "map", "--queries", "log.npy", "--budget", 25, "--cache", "cache", "-c", C]
    warm += ["--texts", "texts.parquet"]
    code, out, err = command(*warm, "--encode", "mymodel_of_test:embed")
    assert code == 0, err
    assert "25 encoded" not in err
    assert "25, those needed most: 25 encoded" in out
    assert held_in_cache(Path("cache")) == set(order_of(need_by_hand(LOG))[:25].tolist())
    code = "def embed(texts):\n    raise ValueError('out of memory')\n"
    (folder / "broken_of_test.py").write_text(code)
    code, out, err = command(*warm, "--encode", "broken_of_test:embed")
    assert code == 3
    assert "broken_of_test:embed failed on 25 texts: ValueError('out of memory')" in err
    for name in ("mymodel_of_test:nothing", "no_module_of_this_name:f", "mymodel_of_test", ":"):
        code, out, err = command(*warm, "--encode", name)
        assert (code, out) == (2, "")
        assert "MODULE:FUNCTION" in err


def test_what_was_encoded_before_a_stop_is_kept(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("vecferry.warming.TEXTS", 10)
    seen: list[str] = []

    def interrupted(texts: list[str]) -> np.ndarray:
        if len(seen) == 20:
            raise KeyboardInterrupt
        seen.extend(texts)
        return encode(texts)

    index, log = rows(None, TRANSLATED), rows(None, LOG)
    with pytest.raises(StoppedError, match=r"20 of 35 texts are encoded .* budget of 15"):
        vecferry.warm(index, MAP, log, 35, encode=interrupted, texts=str, cache=tmp_path / "cache", c=C)
    order = order_of(need_by_hand(LOG))
    assert held_in_cache(tmp_path / "cache") == set(order[:20].tolist())
    vecferry.warm(index, MAP, log, 15, encode=encode, texts=str, cache=tmp_path / "cache", c=C)
    assert held_in_cache(tmp_path / "cache") == set(order[:35].tolist())


def test_calls_that_cannot_be_right_are_refused(folder):
    index, log = str(folder / "index.faiss"), str(folder / "log.npy")
    out = folder / "out.parquet"
    with pytest.raises(UsageError, match="budget of 0"):
        vecferry.warm(index, MAP, log, 0, output=out)
    with pytest.raises(UsageError, match=r"either encode .* \(--encode\), or have their ids written \(--output\)"):
        vecferry.warm(index, MAP, log, 5)
    with pytest.raises(UsageError, match=r"either encode .* \(--encode\), or have their ids written \(--output\)"):
        vecferry.warm(index, MAP, log, 5, encode=encode, texts=str, cache=folder / "cache", output=out)
    with pytest.raises(UsageError, match=r"takes texts \(--texts\) and a cache \(--cache\)"):
        vecferry.warm(index, MAP, log, 5, encode=encode)
    with pytest.raises(UsageError, match="0 candidates"):
        vecferry.warm(index, MAP, log, 5, output=out, c=0)
    for arguments in (
        ["--budget", 3, "-o", out],
        ["--queries", log, "-o", out],
        ["--add", log],
        ["--add", log, "--cache", folder / "cache", "--budget", 3],
    ):
        assert command("warm", index, "--map", folder / "map", *arguments)[0] == 2
    assert sorted(p.name for p in folder.iterdir()) == ["index.faiss", "log.npy", "map", "texts.parquet"]


def test_a_log_that_is_no_log_of_this_space_is_refused(rows, tmp_path):
    index, out = rows(None, TRANSLATED), tmp_path / "out.parquet"
    with pytest.raises(IncompatibleError, match="holds vectors of 5 dimensions, the map leads to 8"):
        vecferry.warm(index, MAP, rows(None, gaussian(4, 5)), 5, output=out)
    with pytest.raises(IncompatibleError, match="in the space 'old'"):
        vecferry.warm(index, MAP, rows(None, LOG, space="old"), 5, output=out)
    with pytest.raises(BadRowsError, match="1 queries are zero, NaN or infinite: 1"):
        vecferry.warm(index, MAP, rows(None, LOG[:3] * [[1], [np.nan], [1]]), 5, output=out)
    with pytest.raises(DataError, match="is empty"):
        vecferry.warm(index, MAP, rows(None, LOG[:0]), 5, output=out)
    assert not out.exists()


def test_the_old_models_queries_and_vectors_are_refused_where_dimensions_are_equal(folder):
    """Both spaces have as many dimensions and files name neither: only the held-out rows tell them apart."""
    turn = np.linalg.qr(gaussian(D, D, seed=5))[0]
    old, old_queries = TRUE @ turn, DISTINCT @ turn
    names = [f"q{i}" for i in range(len(DISTINCT))]
    held = Holdout(pa.array(np.arange(40)), old[:40], TRUE[:40], pa.array(names), DISTINCT, old_queries)
    m = LinearMap(turn.T.copy(), card=Card(Side(D, "old"), Side(D, "new"), "by hand", metric="ip"), holdout=held)
    seal(m).save(folder / "same")
    for name, ids, vectors in (
        ("log-new", names, DISTINCT),
        ("log-old", names, old_queries),
        ("true", list(range(N)), TRUE),
        ("old", list(range(N)), old),
    ):
        pq.write_table(pa.table({"id": ids, "vector": list(vectors)}), folder / f"{name}.parquet")
    common = [folder / "index.faiss", "--map", folder / "same", "--cache", folder / "cache"]
    log = ["--budget", 25, "-c", C, "-o", folder / "need.parquet"]
    code, _, err = command("warm", *common, "--queries", folder / "log-old.parquet", *log)
    assert code == 4
    assert "log-old.parquet: 9 of 9 held-out ids have the old model's vectors: give those of the new model" in err
    assert not (folder / "need.parquet").exists()
    assert command("warm", *common, "--queries", folder / "log-new.parquet", *log)[0] == 0
    table = pq.read_table(folder / "need.parquet")
    assert table["id"].to_pylist() == order_of(need_by_hand(DISTINCT))[:25].tolist()
    code, _, err = command("warm", *common, "--add", folder / "old.parquet")
    assert code == 4
    assert "old.parquet: 40 of 40 held-out ids have the old model's vectors" in err
    assert not (folder / "cache").exists()
    assert command("warm", *common, "--add", folder / "true.parquet")[0] == 0
    assert held_in_cache(folder / "cache") == set(range(N))


def test_errors_name_options(folder):
    warm = ["warm", folder / "index.faiss", "--map", folder / "map", "--queries", folder / "log.npy", "--budget", 5]
    for arguments, says in (
        ([], "either encode the documents (--encode), or have their ids written (--output)"),
        (["--encode", "numpy:array"], "takes texts (--texts) and a cache (--cache)"),
        (
            ["--encode", "numpy:array", "--texts", folder / "texts.parquet"],
            "takes texts (--texts) and a cache (--cache)",
        ),
    ):
        code, out, err = command(*warm, *arguments)
        assert (code, out) == (2, "")
        assert says in err


def sample(name: str, column: str) -> Any:
    table = pq.read_table(str(files("vecferry") / "data" / f"{name}.parquet"), columns=[column])
    x = table[column].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1).astype(np.float32)
    return x / np.linalg.norm(x, axis=1)[:, None]


def test_on_real_data_a_log_spends_the_budget_better_than_chance(rows, tmp_path):
    """Half of the queries are the log, the other half, which it has not seen, is what comes later."""
    x, y, queries = sample("documents", "e5"), sample("documents", "minilm"), sample("queries", "minilm")
    solution = ridge(x[2500:], y[2500:])
    m = LinearMap(solution.weight, solution.bias, post="l2", card=Card(Side(384, "e5"), Side(384, "minilm"), "ridge"))
    y, later = y[:2500], queries[250:]
    index = rows(None, m.apply(x[:2500]))
    true = np.argsort(-(later.astype(np.float64) @ y.T.astype(np.float64)), axis=1)[:, :10]

    def agreement(cache: Path) -> float:
        with vecferry.Cascade(index, m, cache=cache) as cascade:
            found, _ = cascade.search(later, c=100)
        return float(np.mean([len(set(f) & set(t)) / 10 for f, t in zip(found.tolist(), true.tolist(), strict=True)]))

    def look_up(texts: list[str]) -> np.ndarray:
        return y[[int(text) for text in texts]]

    warm = {"encode": look_up, "texts": str, "c": 100}
    vecferry.warm(index, m, rows(None, queries[:250]), 500, cache=tmp_path / "log", **warm)
    with vecferry.Cascade(index, m, look_up, str, tmp_path / "chance") as cascade:
        cascade.fill(pa.array(np.random.default_rng(0).permutation(2500)[:500]))
    assert agreement(tmp_path / "log") > agreement(tmp_path / "chance") + 0.02
