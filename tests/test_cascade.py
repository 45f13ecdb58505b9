"""The cascade against brute force, what it encodes, and what its cache survives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vecferry
from vecferry.cache import Cache
from vecferry.errors import BadRowsError, DataError, IncompatibleError, UsageError
from vecferry.linear import Card, LinearMap, Side
from vecferry.lookup import Lookup
from vecferry.solvers import ridge
from vecferry.store import open_reader

N, D = 500, 12
METRICS = ("cosine", "ip", "l2")


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def a_map(metric: str = "cosine", model: str = "new", dim: int = D, direction: str = "document") -> LinearMap:
    card = Card(Side(7, "old"), Side(dim, model), "by hand", metric=metric, direction=direction)
    return LinearMap(gaussian(7, dim), card=card)


def brute(queries: np.ndarray, documents: np.ndarray, metric: str) -> np.ndarray:
    """All scores, in float64, by the textbook formula."""
    q, d = queries.astype(np.float64), documents.astype(np.float64)
    if metric == "l2":
        return np.stack([-((row - d) ** 2).sum(axis=1) for row in q])
    if metric == "cosine":
        q, d = q / np.linalg.norm(q, axis=1)[:, None], d / np.linalg.norm(d, axis=1)[:, None]
    return q @ d.T


def best(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, axis=1, kind="stable")


class Model:
    """Look the true vector of `text i` up, and count: what a real encoder does, without its cost."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors
        self.seen: list[int] = []

    def __call__(self, texts: list[str]) -> np.ndarray:
        rows = [int(text.removeprefix("text ")) for text in texts]
        self.seen += rows
        return self.vectors[rows]


def text_of(number: int) -> str:
    return f"text {number}"


@pytest.fixture(scope="module")
def true() -> np.ndarray:
    return gaussian(N, D)


@pytest.fixture(scope="module")
def translated(true) -> np.ndarray:
    return true + 0.9 * gaussian(N, D, seed=1)


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return gaussian(70, D, seed=2)


@pytest.mark.parametrize("metric", METRICS)
def test_with_all_documents_as_candidates_it_is_re_embedding(metric, true, translated, queries, rows, tmp_path):
    model = Model(true)
    names = np.array([f"d{i:03}" for i in range(N)])
    texts = {name: text_of(i) for i, name in enumerate(names)}
    with vecferry.Cascade(rows(names, translated), a_map(metric), model, texts, tmp_path / "cache") as cascade:
        ids, scores = cascade.search(queries, k=N, c=N)
    expected = brute(queries, true, metric)
    assert (ids == names[best(expected)]).all()
    np.testing.assert_allclose(scores, -np.sort(-expected, axis=1), rtol=1e-12, atol=1e-14)
    assert sorted(model.seen) == list(range(N))


@pytest.mark.parametrize("metric", METRICS)
def test_it_is_the_translated_top_c_in_the_order_of_true_scores(metric, true, translated, queries, tmp_path):
    index = faiss.IndexFlatL2(D) if metric == "l2" else faiss.IndexFlatIP(D)
    unit = translated / np.linalg.norm(translated, axis=1)[:, None]
    index.add(unit if metric == "cosine" else translated)
    model = Model(true)
    with vecferry.Cascade(index, a_map(metric), model, text_of, tmp_path / "cache") as cascade:
        ids, scores = cascade.search(queries[:20], k=10, c=40)
        encoded = cascade.encoded
    candidates = best(brute(queries[:20], translated, metric))[:, :40]
    exact = np.take_along_axis(brute(queries[:20], true, metric), candidates, axis=1)
    order = best(exact)[:, :10]
    assert (ids == np.take_along_axis(candidates, order, axis=1)).all()
    np.testing.assert_allclose(scores, np.take_along_axis(exact, order, axis=1), rtol=1e-12)
    needed = set(candidates.ravel().tolist())
    assert encoded == len(needed) < N
    assert (len(model.seen), set(model.seen)) == (encoded, needed)


def test_what_was_encoded_is_never_encoded_again(true, translated, queries, rows, tmp_path):
    def refuse(texts: list[str]) -> np.ndarray:
        raise AssertionError(f"{len(texts)} texts are encoded again")

    index, m = rows(None, translated), a_map()
    with vecferry.Cascade(index, m, Model(true), text_of, tmp_path / "cache") as cascade:
        first = cascade.search(queries, c=50)
    for encode in (refuse, None):
        with vecferry.Cascade(index, m, encode, text_of, tmp_path / "cache") as cascade:
            again = cascade.search(queries, c=50)
            assert cascade.encoded == 0
        assert (again[0] == first[0]).all()
        assert (again[1] == first[1]).all()
    few = Model(true)
    with vecferry.Cascade(index, m, few, text_of, tmp_path / "cache") as cascade:
        cascade.search(queries, c=80)
    wider = set(best(brute(queries, translated, "cosine"))[:, :80].ravel().tolist())
    before = set(best(brute(queries, translated, "cosine"))[:, :50].ravel().tolist())
    assert set(few.seen) == wider - before


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(0, 11), st.sampled_from(METRICS))
def test_each_true_vector_can_only_help(tmp_path_factory, seed, k, extra, metric):
    """Of every query, at every k: more known never means fewer true neighbours, and none known is translation."""
    rng = np.random.default_rng(seed)
    true = rng.standard_normal((60, 4)).astype(np.float32)
    other = (rng.random() * true + rng.standard_normal((60, 4))).astype(np.float32)
    asked = rng.standard_normal((5, 4)).astype(np.float32)
    index = faiss.IndexFlatL2(4) if metric == "l2" else faiss.IndexFlatIP(4)
    index.add(other / np.linalg.norm(other, axis=1)[:, None] if metric == "cosine" else other)
    neighbours = best(brute(asked, true, metric))[:, :k]
    folder = tmp_path_factory.mktemp("helps") / "cache"
    m = a_map(metric, dim=4)
    cache = Cache(folder, m.card.space, 4, pa.int64())
    right = []
    order = rng.permutation(60)
    for known in ([], order[:1], order[1:20], order[20:21], order[21:40], order):
        cache.add(pa.array(known, pa.int64()), true[np.array(known, int)])
        if not len(known):
            found = best(brute(asked, other, metric))[:, :k]
        else:
            with vecferry.Cascade(index, m, cache=folder) as cascade:
                found, _ = cascade.search(asked, k, c=k + extra)
        right.append([len(set(f) & set(t)) for f, t in zip(found.tolist(), neighbours.tolist(), strict=True)])
    assert (np.diff(right, axis=0) >= 0).all()


def test_documents_without_a_true_vector_keep_their_place(true, translated, queries, rows, tmp_path):
    """Scores of two kinds never meet: translations ten times as long, or as short, change nothing."""
    candidates = best(brute(queries, translated, "ip"))[:, :30]
    known = np.arange(0, N, 3)
    m = a_map("ip")
    Cache(tmp_path / "cache", m.card.space, D, pa.int64()).add(pa.array(known), true[known])
    for scale in (0.1, 1, 10):
        with vecferry.Cascade(rows(None, translated * np.float32(scale)), m, cache=tmp_path / "cache") as cascade:
            ids, scores = cascade.search(queries, k=30, c=30)
        slots = candidates % 3 == 0
        assert (np.isnan(scores) == ~slots).all()
        assert (ids[~slots] == candidates[~slots]).all()
        for found, row, place in zip(ids, brute(queries, true, "ip"), slots, strict=True):
            assert (np.diff(row[found[place]]) <= 0).all()
    assert 0.2 < slots.mean() < 0.5


def test_an_index_that_finds_too_few_says_so(true, translated, tmp_path):
    flat = faiss.IndexFlatIP(D)
    index = faiss.IndexIVFFlat(flat, D, 40, faiss.METRIC_INNER_PRODUCT)
    index.train(translated)
    index.add(translated)
    with vecferry.Cascade(index, a_map("ip"), Model(true), text_of, tmp_path / "cache") as cascade:
        ids, scores = cascade.search(true[:3], k=100, c=100)
    assert (ids[:, -1] == -1).all()
    assert ((ids == -1) == (scores == -np.inf)).all()
    assert (np.diff((ids == -1).astype(int), axis=1) >= 0).all()
    for row, found in zip(brute(true[:3], true, "ip"), ids, strict=True):
        kept = found[found >= 0]
        assert len(set(kept)) == len(kept) > 0
        assert (np.diff(row[kept]) <= 0).all()


CRASH = """
import os, sys
import numpy as np
import vecferry
from vecferry import cascade
from vecferry.linear import Card, LinearMap, Side
from pathlib import Path

folder = Path(sys.argv[1])
true = np.load(folder / "true.npy")
m = LinearMap(np.ones((7, 12)), card=Card(Side(7, "old"), Side(12, "new"), "by hand"))
cascade.TEXTS = 50
encoded, replace = [], Path.replace

def encode(texts):
    encoded.append(texts)
    return true[[int(t.split()[1]) for t in texts]]

def dies(self, target):
    if self.name.startswith(".part-") and len(encoded) == 3:
        os._exit(9)
    return replace(self, target)

Path.replace = dies
with vecferry.Cascade(str(folder / "index.npy"), m, encode, lambda i: f"text {i}", folder / "cache") as c:
    c.search(true[:40], c=40)
"""


def test_a_crash_between_encoding_and_publishing_costs_one_piece(true, translated, rows, tmp_path):
    np.save(tmp_path / "true.npy", true)
    np.save(tmp_path / "index.npy", translated)
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], check=False)
    assert done.returncode == 9
    assert len(list((tmp_path / "cache").glob(".part-*"))) == 1  # what the crash left, which nobody reads
    cache = Cache(tmp_path / "cache", "new", D, pa.int64())
    assert len(cache) == 100
    index, m = rows(None, translated), a_map()
    model = Model(true)
    with vecferry.Cascade(index, m, model, text_of, tmp_path / "cache") as cascade:
        after = cascade.search(true[:40], c=40)
    needed = set(best(brute(true[:40], translated, "cosine"))[:, :40].ravel().tolist())
    assert len(model.seen) == len(needed) - 100
    with vecferry.Cascade(index, m, Model(true), text_of, tmp_path / "fresh") as cascade:
        assert (cascade.search(true[:40], c=40)[0] == after[0]).all()


ADDS = """
import sys
import numpy as np
import pyarrow as pa
from pathlib import Path
from vecferry.cache import Cache

true = np.load(sys.argv[2])
rows = np.random.default_rng(int(sys.argv[3])).permutation(len(true))
cache = Cache(Path(sys.argv[1]), "new", true.shape[1], pa.int64())
print("ready", flush=True)
sys.stdin.readline()
for part in np.array_split(rows, 40):
    cache.add(pa.array(part), true[part])
"""


def test_processes_that_add_at_the_same_time_lose_nothing(true, tmp_path):
    np.save(tmp_path / "true.npy", true)
    arguments = [str(tmp_path / "cache"), str(tmp_path / "true.npy")]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", ADDS, *arguments, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        _, errors = child.communicate("go\n", timeout=60)
        assert (child.returncode, errors) == (0, "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "true.npy"]
    cache = Cache(tmp_path / "cache", "new", D, pa.int64())
    ids = pa.array(np.arange(N)[::-1].copy())
    assert len(cache) == N
    assert (cache.take(ids) == true[::-1]).all()


def test_an_open_cache_sees_what_others_add(true, tmp_path):
    one, other = (Cache(tmp_path / "cache", "new", D, pa.int64()) for _ in range(2))
    assert not one.exists
    assert one.add(pa.array([3, 5]), true[[3, 5]]) == 2
    other.refresh()
    assert other.has(pa.array([5, 4, 3])).tolist() == [True, False, True]
    assert other.add(pa.array([5, 7]), true[[5, 7]]) == 1
    one.refresh()
    assert (one.take(pa.array([7, 3, 7])) == true[[7, 3, 7]]).all()


def test_the_cache_is_a_store_like_any_other(true, tmp_path):
    cache = Cache(tmp_path / "cache", "new", D, pa.string())
    for part in np.array_split(np.arange(N), 7):
        cache.add(pa.array([f"d{i}" for i in part]), true[part])
    with open_reader(f"parquet:{tmp_path / 'cache'}") as reader:
        assert (reader.info.count, reader.info.dim) == (N, D)
        assert (reader.take(pa.array(["d499", "d0"])).vectors == true[[499, 0]]).all()


def test_a_cache_of_another_space_is_refused(true, translated, queries, rows, tmp_path):
    index = rows(None, translated)
    with vecferry.Cascade(index, a_map(), Model(true), text_of, tmp_path / "cache") as cascade:
        cascade.search(queries[:2], c=10)
    before = {p.name: p.read_bytes() for p in (tmp_path / "cache").iterdir()}
    with pytest.raises(IncompatibleError, match=r"cache holds vectors of the space 'new' .* leads to 'newer'"):
        vecferry.Cascade(index, a_map(model="newer"), Model(true), text_of, tmp_path / "cache")
    with pytest.raises(IncompatibleError, match=r"12 dimensions.*\(5\)"):
        vecferry.Cascade(rows(None, gaussian(9, 5)), a_map(dim=5), cache=tmp_path / "cache")
    named = rows([f"d{i}" for i in range(N)], translated)
    with pytest.raises(IncompatibleError, match=r"ids of type int64, the index of type string"):
        vecferry.Cascade(named, a_map(), cache=tmp_path / "cache")
    assert {p.name: p.read_bytes() for p in (tmp_path / "cache").iterdir()} == before


def test_map_index_and_queries_must_belong_together(true, translated, queries, rows, tmp_path):
    here = tmp_path / "cache"
    with pytest.raises(IncompatibleError, match="new queries into the old space"):
        vecferry.Cascade(rows(None, translated), a_map(direction="query"), Model(true), text_of, here)
    with pytest.raises(IncompatibleError, match="7 dimensions, the map leads to 12"):
        vecferry.Cascade(rows(None, gaussian(20, 7)), a_map(), Model(true), text_of, here)
    with pytest.raises(IncompatibleError, match="in the space 'old', the map leads to 'new'"):
        vecferry.Cascade(rows(None, translated, space="old"), a_map(), Model(true), text_of, here)
    with vecferry.Cascade(rows(None, translated), a_map(), Model(true), text_of, here) as cascade:
        with pytest.raises(IncompatibleError, match=r"\[q, 12\] here, these are \[70, 11\]"):
            cascade.search(queries[:, :11])
        with pytest.raises(DataError, match="NaN"):
            cascade.search(np.full((1, D), np.nan))
        with pytest.raises(UsageError, match=r"k = 11 .* 10 documents"):
            cascade.search(queries, k=11, c=10)
    assert not here.exists()


def test_nothing_to_rank_by_is_said_not_guessed(true, translated, queries, rows, tmp_path):
    with vecferry.Cascade(rows(None, translated), a_map(), cache=tmp_path / "typo") as cascade:
        with pytest.raises(UsageError, match="no true vectors"):
            cascade.search(queries)
        with pytest.raises(UsageError, match="nothing encodes"):
            cascade.fill(pa.array([1]))
    assert not (tmp_path / "typo").exists()
    with pytest.raises(UsageError, match=r"an encoder takes texts \(--texts\) and a cache \(--cache\)"):
        vecferry.Cascade(rows(None, translated), a_map(), Model(true), text_of)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(DataError, match="not a store"):
        vecferry.Cascade(rows(None, translated), a_map(), Model(true), text_of, tmp_path / "full")


def parquet_texts(folder: Path) -> str:
    """Write the texts of all but two documents to two files, shuffled, in small row groups."""
    order = np.random.default_rng(0).permutation([i for i in range(N) if i not in (17, 18)])
    folder.mkdir()
    for name, part in zip("ab", np.array_split(order, 2), strict=True):
        table = pa.table({"passage": [text_of(i) for i in part], "pid": pa.array(part, pa.int32())})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=37)
    return f"{folder}?id=pid&text=passage"


@pytest.mark.parametrize("kind", ["mapping", "function", "parquet"])
def test_a_candidate_without_a_text_is_named(kind, true, translated, rows, tmp_path):
    held: Any = {i: text_of(i) for i in range(N) if i not in (17, 18)}
    texts = {"mapping": held, "function": held.get}.get(kind) or parquet_texts(tmp_path / "texts")
    model = Model(true)
    with vecferry.Cascade(rows(None, translated), a_map(), model, texts, tmp_path / "cache") as cascade:
        with pytest.raises(BadRowsError, match=r"1 documents have no text: 17\.") as caught:
            cascade.search(translated[17:18], k=1, c=5)
        assert caught.value.ids == [17]
        assert model.seen == []
        candidates = best(brute(true, translated, "cosine"))[:, :40]
        number = next(i for i, row in enumerate(candidates) if not {17, 18} & set(row.tolist()))
        ids, _ = cascade.search(true[[number]], k=40, c=40)
        far = candidates[number]
        expected = far[best(brute(true[[number]], true[far], "cosine"))[0]]
        assert (ids[0] == expected).all()


@pytest.mark.parametrize(
    ("encode", "error", "says"),
    [
        (lambda texts: gaussian(len(texts), D)[1:], DataError, r"got 60 texts and returned .* \[59, 12\]"),
        (lambda texts: gaussian(len(texts), D)[None], DataError, r"got 60 texts and returned .* \[1, 60, 12\]"),
        (lambda texts: gaussian(len(texts), 9), IncompatibleError, "9 dimensions, the map leads to 12"),
        (lambda texts: np.where(np.arange(60)[:, None] == 3, np.nan, 1) * np.ones(D), BadRowsError, "1 texts got"),
        (lambda texts: np.where(np.arange(60)[:, None] == 3, 0, 1) * np.ones(D), BadRowsError, "1 texts got"),
    ],
)
def test_what_an_encoder_returns_is_checked_before_it_is_kept(encode, error, says, translated, rows, tmp_path):
    with vecferry.Cascade(rows(None, translated), a_map(), encode, text_of, tmp_path / "cache") as cascade:
        with pytest.raises(error, match=says):
            cascade.search(translated[:1], c=60)
        assert cascade.encoded == 0
    assert not (tmp_path / "cache").exists()


def test_true_vectors_of_a_faiss_index_serve_and_stay_as_they_are(true, translated, queries, rows, tmp_path):
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(D))
    index.add_with_ids(true, np.arange(N) + 1000)
    faiss.write_index(index, str(tmp_path / "true.faiss"))
    before = (tmp_path / "true.faiss").read_bytes()
    translations = rows(np.arange(N) + 1000, translated)
    with vecferry.Cascade(translations, a_map(), cache=f"faiss:{tmp_path / 'true.faiss'}") as cascade:
        found = cascade.search(queries, c=50)
    with vecferry.Cascade(translations, a_map(), Model(true), lambda i: text_of(i - 1000), tmp_path / "c") as cascade:
        expected = cascade.search(queries, c=50)
    assert (found[0] == expected[0]).all()
    assert (found[1] == expected[1]).all()
    with pytest.raises(UsageError, match="can't grow"):
        vecferry.Cascade(translations, a_map(), Model(true), text_of, tmp_path / "true.faiss")
    assert (tmp_path / "true.faiss").read_bytes() == before


def test_added_vectors_are_checked_and_kept_once(true, translated, queries, rows, tmp_path):
    m, index = a_map(), rows(None, translated)
    with vecferry.Cascade(index, m, cache=tmp_path / "cache") as cascade:
        assert cascade.add(rows(np.arange(N), true, space="new"), batch_size=64) == N
        assert cascade.add(rows(np.arange(50), true[:50])) == 0
        ids, _ = cascade.search(queries, k=10, c=N)
        assert (ids == best(brute(queries, true, "cosine"))[:, :10]).all()
        with pytest.raises(BadRowsError, match=r"2 ids are not in memory: 500, -1"):
            cascade.add(rows([500, 3, -1], true[:3]))
        with pytest.raises(BadRowsError, match=r"1 vectors are zero, NaN or infinite: 4"):
            cascade.add(rows([3, 4], true[:2] * [[1], [0]]))
        with pytest.raises(IncompatibleError, match="in the space 'other'"):
            cascade.add(rows([3], true[:1], space="other"))


def test_a_damaged_part_or_description_is_named(true, translated, rows, tmp_path):
    cache = Cache(tmp_path / "cache", "new", D, pa.int64())
    cache.add(pa.array([1, 2]), true[:2])
    (part,) = (tmp_path / "cache").glob("part-*")
    data = part.read_bytes()
    part.write_bytes(data[:-20])
    with pytest.raises(DataError, match=rf"{part.name} can't be read .* delete that file"):
        Cache(tmp_path / "cache", "new", D, pa.int64())
    part.write_bytes(data)
    description = tmp_path / "cache" / "_cache.json"
    held = json.loads(description.read_text())
    description.write_text(json.dumps(held | {"format": 2}))
    with pytest.raises(DataError, match="format 2, this vecferry reads format 1"):
        Cache(tmp_path / "cache", "new", D, pa.int64())
    description.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        Cache(tmp_path / "cache", "new", D, pa.int64())


@given(st.lists(st.lists(st.integers(0, 60), max_size=30), min_size=1, max_size=5), st.integers(1, 9))
def test_a_lookup_is_a_dictionary(tmp_path_factory, parts, group):
    folder = tmp_path_factory.mktemp("lookup")
    held: dict[int, str] = {}
    looked = Lookup("id", "text")
    for number, ids in enumerate(parts):
        texts = [f"{i} in {number}, {place}" for place, i in enumerate(ids)]
        held = dict(zip(ids[::-1], texts[::-1], strict=True)) | held  # the first row of an id counts
        path = folder / f"{number}.parquet"
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "text": texts}), path, row_group_size=group)
        looked.add([path])
    assert len(looked) == len(held)
    wanted = [*range(61), *range(60, -1, -7)]
    rows = looked.find(pa.array(wanted))
    assert (rows >= 0).tolist() == [i in held for i in wanted]
    here = [i for i in wanted if i in held]
    if here:
        assert looked.take(rows[rows >= 0]).to_pylist() == [held[i] for i in here]


def test_files_that_cannot_be_looked_up_in_are_named(translated, rows, tmp_path):
    for table, error, says in (
        (pa.table({"id": [1.5], "text": ["a"]}), DataError, "column 'id': ids of type double"),
        (pa.table({"id": [1, None], "text": ["a", "b"]}), DataError, "rows have no id in column 'id'"),
        (pa.table({"id": [1], "body": ["a"]}), UsageError, "no column 'text' among id, body"),
    ):
        pq.write_table(table, tmp_path / "texts.parquet")
        with pytest.raises(error, match=says):
            vecferry.Cascade(rows(None, translated), a_map(), Model(translated), tmp_path / "texts.parquet", "cache")
    with pytest.raises(UsageError, match="no such file"):
        vecferry.Cascade(rows(None, translated), a_map(), Model(translated), tmp_path / "nothing.parquet", "cache")
    with pytest.raises(UsageError, match="options id and text"):
        vecferry.Cascade(rows(None, translated), a_map(), Model(translated), f"{tmp_path}?vector=v", "cache")


def sample(name: str, column: str) -> np.ndarray:
    table = pq.read_table(str(files("vecferry") / "data" / f"{name}.parquet"), columns=[column])
    x = table[column].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1).astype(np.float32)
    return x / np.linalg.norm(x, axis=1)[:, None]


@pytest.mark.parametrize(("old", "new"), [("e5", "minilm"), ("minilm", "e5")])
def test_on_real_data_it_recovers_most_of_re_embedding(old, new, tmp_path):
    x, y, queries = sample("documents", old), sample("documents", new), sample("queries", new)
    solution = ridge(x[2500:], y[2500:])
    m = LinearMap(solution.weight, solution.bias, post="l2", card=Card(Side(384, old), Side(384, new), "ridge"))
    x, y = m.apply(x[:2500]), y[:2500]
    index = faiss.IndexFlatIP(384)
    index.add(x)
    model = Model(y)
    with vecferry.Cascade(index, m, model, text_of, tmp_path / "cache") as cascade:
        ids, _ = cascade.search(queries, c=200)

    def agreement(found: np.ndarray) -> float:
        true = best(queries.astype(np.float64) @ y.T.astype(np.float64))[:, :10]
        return float(np.mean([len(set(f) & set(t)) / 10 for f, t in zip(found.tolist(), true.tolist(), strict=True)]))

    candidates = best(queries @ x.T)[:, :200]
    exact = np.take_along_axis(queries.astype(np.float64) @ y.T.astype(np.float64), candidates, axis=1)
    by_hand = np.take_along_axis(candidates, best(exact)[:, :10], axis=1)
    assert agreement(ids) == pytest.approx(agreement(by_hand), abs=0.002)  # near ties of the last candidate
    assert agreement(ids) > 0.5 > agreement(candidates[:, :10])
    assert sorted(model.seen) == sorted(set(candidates.ravel().tolist()))


def test_names_are_exported() -> None:
    assert isinstance(vecferry.Cascade, type)
    assert isinstance(vecferry.warm, Callable)
