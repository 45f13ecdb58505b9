from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from scipy.stats import chisquare

import vecferry
from vecferry.cli import cli
from vecferry.errors import BadRowsError, DataError, UsageError
from vecferry.sampling import draw, farthest

N = 400
RNG = np.random.default_rng(1)
IDS = RNG.permutation(10_000)[:N]
VECTORS = RNG.standard_normal((N, 5)).astype(np.float32)
TEXTS = pa.table({"text": [f"text {i}" for i in IDS], "year": pa.array(IDS % 50, pa.int16())})


@pytest.fixture
def index(rows: Any) -> Any:
    return rows(IDS, VECTORS, TEXTS, uri="SRC")


@pytest.mark.parametrize("strategy", ["random", "spread"])
def test_writes_ids_payload_and_role_in_the_order_of_the_index(index: Any, tmp_path: Path, strategy: Any) -> None:
    drawn = vecferry.sample(index, 50, strategy=strategy, output=tmp_path / "ids.parquet")
    table = pq.read_table(tmp_path / "ids.parquet")
    assert table.schema == pa.schema(
        [("id", pa.int64()), ("text", pa.string()), ("year", pa.int16()), ("role", pa.string())]
    )
    assert (drawn.fit, drawn.holdout, drawn.relevant, drawn.unusable) == (40, 10, 0, 0)
    assert table["role"].to_pylist().count("fit") == 40
    assert table["role"].to_pylist().count("holdout") == 10
    places = [int(np.flatnonzero(i == IDS)[0]) for i in table["id"].to_pylist()]
    assert places == sorted(set(places))
    assert table["text"].to_pylist() == [f"text {i}" for i in table["id"].to_pylist()]
    assert "40 to fit" in drawn.table()


def test_string_ids_and_row_numbers(rows: Any, tmp_path: Path) -> None:
    names = pa.array([f"d{i}" for i in IDS], pa.large_string())
    vecferry.sample(rows(names, VECTORS), 30, output=tmp_path / "a")
    assert pq.read_schema(tmp_path / "a").field("id").type == pa.large_string()
    vecferry.sample(rows(None, VECTORS, count=None), 30, output=tmp_path / "b")
    assert set(pq.read_table(tmp_path / "b")["id"].to_pylist()) <= set(range(N))


def test_same_seed_same_bytes(index: Any, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        vecferry.sample(index, 50, strategy="spread", seed=seed, output=tmp_path / name)
    data = [(tmp_path / name).read_bytes() for name in "abc"]
    assert data[0] == data[1] != data[2]


@pytest.mark.parametrize("strategy", ["random", "spread"])
def test_every_row_is_held_out_equally_often(rows: Any, tmp_path: Path, strategy: Any) -> None:
    """Whatever chooses the fit rows: half of the index is one tight cluster, which `spread` all but ignores."""
    vectors = np.concatenate([VECTORS[:20], np.ones((20, 5)) + VECTORS[20:40] / 1000])
    store = rows(np.arange(40), vectors)
    held, fit = np.zeros(40), np.zeros(40)
    for seed in range(150):
        path = tmp_path / str(seed)
        vecferry.sample(store, 20, strategy=strategy, seed=seed, output=path)
        table = pq.read_table(path)
        chosen = np.array(table["role"].to_pylist()) == "holdout"
        ids = table["id"].to_numpy()
        held[ids[chosen]] += 1
        fit[ids[~chosen]] += 1
    assert held.sum() == 150 * 4
    assert chisquare(held).pvalue > 0.001
    assert (fit[:20].sum() > 1.4 * fit[20:].sum()) == (strategy == "spread")


def test_unusable_rows_are_never_drawn(rows: Any, tmp_path: Path) -> None:
    vectors = VECTORS.copy()
    vectors[::3] = 0
    vectors[1::3, 2] = np.nan
    good = set(IDS[2::3].tolist())
    drawn = vecferry.sample(rows(IDS, vectors), 100, output=tmp_path / "a")
    assert set(pq.read_table(tmp_path / "a")["id"].to_pylist()) <= good
    assert drawn.unusable == N - len(good)
    with pytest.raises(DataError, match=f"400 rows looked at, {N - len(good)} of them zero or not finite"):
        vecferry.sample(rows(IDS, vectors), 200, output=tmp_path / "b")


def test_relevant_documents_join_the_holdout(index: Any, tmp_path: Path) -> None:
    relevant = IDS[:60]
    lines = [f"q{i} 0 {d} {int(k < 50)}\n" for i, (k, d) in enumerate(zip(range(60), relevant, strict=True))]
    (tmp_path / "qrels").write_text("".join([*lines, "q 0 99999 1\n", "q 0 none 1\n"]))
    drawn = vecferry.sample(index, 100, qrels=tmp_path / "qrels", output=tmp_path / "ids")
    table = pq.read_table(tmp_path / "ids")
    roles = dict(zip(table["id"].to_pylist(), table["role"].to_pylist(), strict=True))
    assert all(roles[i] == "holdout" for i in relevant[:50].tolist())
    counts = [list(roles.values()).count(r) for r in ("fit", "holdout")]
    assert counts == [80, 20 + drawn.relevant]
    assert drawn.unknown == 1  # 99999; "none" can't be an id of this index
    plain = vecferry.sample(index, 100, output=tmp_path / "plain")
    assert plain.relevant == 0


def test_reads_only_what_it_needs(index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of at most 20 rows for each fit row and the spares are asked for, and never a whole read."""
    asked: list[int] = []
    take = index.take
    monkeypatch.setattr(index, "take", lambda ids: (asked.append(len(ids)), take(ids))[1])
    monkeypatch.setattr(index, "read", None)
    monkeypatch.setattr("vecferry.sampling.SPARE", 5)
    vecferry.sample(index, 14, strategy="spread", output=tmp_path / "a")
    assert sum(asked) == 3 + 20 * 11 + (3 + 20 * 11) // 10


def test_what_cannot_be_right_is_refused_before_work(index: Any, rows: Any, tmp_path: Path) -> None:
    path = tmp_path / "ids.parquet"
    with pytest.raises(UsageError, match="SRC has 400 rows, 401 were asked for"):
        vecferry.sample(index, 401, output=path)
    with pytest.raises(UsageError, match="leave 8 to fit on, at least 10"):
        vecferry.sample(index, 10, output=path)
    with pytest.raises(UsageError, match="strategy 'far'"):
        vecferry.sample(index, 50, strategy="far", output=path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a folder"):
        vecferry.sample(index, 50, output=tmp_path / "no" / "ids")
    for name in ("role", "id"):
        clash = rows(IDS, VECTORS, TEXTS.append_column(name, TEXTS["year"]), uri="SRC")
        with pytest.raises(UsageError, match=f"payload column '{name}'"):
            vecferry.sample(clash, 50, output=path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        vecferry.sample(index, 50, output=path)
    assert path.read_text() == "mine"


def test_without_a_number_a_small_index_gives_half_and_says_so(rows: Any, tmp_path: Path) -> None:
    drawn = vecferry.sample(rows(IDS, VECTORS, lossy=True), output=tmp_path / "a")
    assert (drawn.fit + drawn.holdout, drawn.rows, drawn.lossy) == (200, N, True)
    assert "warning: half of the 400 rows were drawn" in drawn.table()
    asked = vecferry.sample(rows(IDS, VECTORS), 200, output=tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (asked.rows, asked.lossy, "warning" in asked.table()) == (None, False, False)
    many = rows(np.arange(10_001), RNG.standard_normal((10_001, 2)))
    usual = vecferry.sample(many, output=tmp_path / "c")
    assert (usual.fit, usual.holdout, usual.rows) == (4000, 1000, None)
    with pytest.raises(UsageError, match="SRC has 20 rows; 10 documents leave 8 to fit on, at least 10"):
        vecferry.sample(rows(IDS[:20], VECTORS[:20], uri="SRC"), output=tmp_path / "d")


@pytest.mark.parametrize("lossy", [False, True])
def test_the_next_step_names_the_options_that_it_needs(tmp_path: Path, lossy: bool) -> None:
    faiss = pytest.importorskip("faiss")
    index = faiss.index_factory(5, "SQ8" if lossy else "Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    index.add(VECTORS)
    old, out = str(tmp_path / "old.faiss"), str(tmp_path / "sample.parquet")
    faiss.write_index(index, old)
    done = CliRunner().invoke(cli, ["sample", old, "-o", out])
    assert done.exit_code == 0, done.output
    option = " --allow-lossy" if lossy else ""
    assert done.stderr.endswith(f"vecferry fit --source {old} --target VECTORS --sample {out}{option} -o MAP\n")
    command = done.stderr.partition("vecferry ")[2].split()
    x = RNG.standard_normal((200, 3)).astype(np.float32)
    np.save(tmp_path / "new.npy", x / np.linalg.norm(x, axis=1, keepdims=True))
    np.save(tmp_path / "ids.npy", pq.read_table(out)["id"].to_numpy())
    places = {"VECTORS": f"npy:{tmp_path / 'new.npy'}?ids={tmp_path / 'ids.npy'}", "MAP": str(tmp_path / "map")}
    fitted = CliRunner().invoke(cli, [places.get(word, word) for word in command])
    assert fitted.exit_code == 0, fitted.output


@pytest.mark.case("30")
def test_repeated_ids_are_named(rows: Any, tmp_path: Path) -> None:
    """Field case 30."""
    ids = IDS.copy()
    ids[17] = ids[3]
    with pytest.raises(BadRowsError, match=f"1 ids stand more than once: {ids[3]}"):
        vecferry.sample(rows(ids, VECTORS), 390, output=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_counts_too_many_is_damage(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="claims 500 rows but holds 400"):
        vecferry.sample(rows(IDS, VECTORS, count=500), 300, output=tmp_path / "a")


def test_draw_is_uniform_in_order_too(rows: Any) -> None:
    """The first row drawn is any row: the hold-out takes the first ones."""
    store = rows(np.arange(20), VECTORS[:20])
    rng = np.random.default_rng(5)
    first = np.bincount([draw(store, 10, rng)[0].ids[0].as_py() for _ in range(2000)], minlength=20)
    assert chisquare(first).pvalue > 0.001


def test_farthest_is_what_brute_force_finds() -> None:
    x = VECTORS[:120]
    unit = x.astype(np.float64) / np.linalg.norm(x, axis=1, keepdims=True)
    distance = np.linalg.norm(unit[:, None] - unit[None], axis=2)
    want = [0]
    while len(want) < 30:
        want.append(int(distance[want].min(axis=0).argmax()))
    assert farthest(x, 30).tolist() == want
    same = farthest(np.ones((5, 3), np.float32), 5)
    assert sorted(same.tolist()) == [0, 1, 2, 3, 4]
