"""Prompts, averages, order and names of spaces, with a model that is a formula; what needs real models is beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vecferry.encoders import MtebEncoder, Prompt, TextEncoder
from vecferry.encoders.contract import is_identity
from vecferry.encoders.local import content_hash, locate
from vecferry.encoders.pooling import kept, pool
from vecferry.encoders.prompts import PRESETS, fill, prompt_of
from vecferry.encoders.sentence import described, modules_of, own_prompt
from vecferry.errors import BadRowsError, DataError, UsageError

DIM = 5


def formula(text: str) -> np.ndarray:
    """Return a vector that depends on every character and its place."""
    codes = np.array([ord(c) for c in text], np.float64)
    return np.array([np.cos(codes * (i + 1) + np.arange(len(codes))).sum() for i in range(DIM)])


class Formula:
    """A model whose vectors can be written down."""

    name, dim, pooling, revision = "formula", DIM, "none", "1"
    max_length: int | None = None
    normalized = False
    prompt: Prompt | None = None

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def embed(self, template: str, texts: list[str]) -> Any:
        self.batches.append(texts)
        return np.array([formula(template.replace("{text}", text)) for text in texts])


def encoder(*document: str, query: tuple[str, ...] = (), normalize: bool = False) -> TextEncoder:
    prompt = Prompt(document or ("{text}",), query or document or ("{text}",))
    return TextEncoder(Formula(), prompt, normalize, "formula")


TEXTS = ["middling text", "a", "the longest text of all of them", "bb", "some {braces} and {text}"]


def test_rows_come_back_in_order_whatever_the_batches() -> None:
    expected = np.array([formula(text) for text in TEXTS])
    for size in (1, 2, 3, 100):
        made = encoder()
        out = made.encode(TEXTS, batch_size=size)
        assert out.dtype == np.float32
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
        backend: Any = made.backend
        lengths = [len(text) for batch in backend.batches for text in batch]
        assert lengths == sorted(lengths, reverse=True)
        assert max(map(len, backend.batches)) <= size
    assert encoder().encode([]).shape == (0, DIM)


def test_several_prompts_are_averaged_and_so_are_wordings_of_a_text() -> None:
    made = encoder("one: {text}", "{text} two", "{text} and {text}")
    expected = [
        np.mean([formula(f"one: {t}"), formula(f"{t} two"), formula(f"{t} and {t}")], axis=0) for t in ("x", "yy")
    ]
    np.testing.assert_allclose(made.encode(["x", "yy"]), expected, rtol=1e-5)
    wordings = ["a cat", "one cat", "feline"]
    np.testing.assert_allclose(
        encoder().encode(["x", wordings, "y"]),
        [formula("x"), np.mean([formula(w) for w in wordings], axis=0), formula("y")],
        rtol=1e-5,
    )
    both = encoder("p {text}", "q {text}", normalize=True).encode([wordings])
    mean = np.mean([formula(f"{p} {w}") for p in "pq" for w in wordings], axis=0)
    np.testing.assert_allclose(both, [mean / np.linalg.norm(mean)], rtol=1e-5)


def test_sides_have_prompts_of_their_own_and_one_space() -> None:
    made = encoder("passage: {text}", query=("query: {text}",))
    np.testing.assert_allclose(made.encode(["x"]), [formula("passage: x")], rtol=1e-6)
    np.testing.assert_allclose(made.encode(["x"], side="query"), [formula("query: x")], rtol=1e-6)
    with pytest.raises(UsageError, match="unknown side 'both'"):
        made.encode(["x"], side="both")  # type: ignore[arg-type]


def test_the_identity_changes_with_all_that_vectors_depend_on_and_nothing_else() -> None:
    first = encoder("passage: {text}", query=("query: {text}",))
    assert is_identity(first.identity)
    assert first.identity.startswith("formula@")
    assert first.identity == encoder("passage: {text}", query=("query: {text}",)).identity
    others = [
        encoder("passage: {text}"),
        encoder("query: {text}", query=("passage: {text}",)),
        encoder("passage: {text}", "x {text}", query=("query: {text}",)),
        replace(first, normalize=True),
    ]
    for name, value in (("dim", 6), ("pooling", "mean"), ("max_length", 9), ("revision", "2")):
        backend = Formula()
        setattr(backend, name, value)
        others.append(replace(first, backend=backend))
    assert len({other.identity for other in [first, *others]}) == 9
    renamed = replace(first, name="other")
    assert renamed.identity == first.identity.replace("formula", "other")
    assert not is_identity("sentence-transformers/all-MiniLM-L6-v2")


def test_texts_without_words_and_models_without_sense_are_refused() -> None:
    with pytest.raises(BadRowsError, match=r"the texts: 3 are blank \(counted from 0\): 1, 2, 4"):
        encoder().encode(["x", "", " \n", "y", ["z", ""]])
    with pytest.raises(UsageError, match="this is one text"):
        encoder().encode("text")
    with pytest.raises(UsageError, match="a batch of 0 texts"):
        encoder().encode(["x"], batch_size=0)

    class Short(Formula):
        def embed(self, template: str, texts: list[str]) -> Any:
            return np.ones((len(texts), DIM - 1))

    with pytest.raises(DataError, match=r"formula returned \[1, 4\] for 1 texts of 5 dimensions"):
        replace(encoder(), backend=Short()).encode(["x"])


def test_presets_are_the_published_templates() -> None:
    assert fill(PRESETS["promptEOL"].document, "A cat.")[0] == 'Summarize the sentence: "A cat." in one word:"'
    assert fill(PRESETS["promptEOL-mistral"].document, "A cat.")[0] == 'This sentence: "A cat." means [MASK]'
    assert fill(PRESETS["promptEOL-original"].query, "A cat.")[0] == 'This sentence : "A cat." means in one word:"'
    echo, copy = fill(PRESETS["echo"].document, "A cat")
    assert echo == "Rewrite the following paragraph: A cat. The rewritten paragraph: A cat"
    assert echo[copy:] == "A cat"
    assert prompt_of(["e5"], []) == (Prompt(("passage: {text}",), ("query: {text}",)), None)
    assert prompt_of(["promptEOL"], [])[1] == "last"
    assert prompt_of([], ["query: {text}"]) == (Prompt(("{text}",), ("query: {text}",)), None)
    assert fill("{text}", "{text}") == ("{text}", 0)
    with pytest.raises(UsageError, match=r"the prompt 'promptEoL' has no \{text\}"):
        prompt_of(["promptEoL"], [])
    with pytest.raises(UsageError, match="need different poolings"):
        prompt_of(["promptEOL", "echo"], [])


def test_a_text_too_long_keeps_its_two_ends() -> None:
    assert kept(5, 5) == [0, 1, 2, 3, 4]
    assert kept(9, 4) == [0, 1, 7, 8]
    assert kept(9, 5) == [0, 1, 2, 7, 8]
    assert kept(9, 1) == [0]


def test_pooling_is_a_mean_that_padding_can_not_spoil() -> None:
    torch = pytest.importorskip("torch")
    states = torch.tensor(np.random.default_rng(0).standard_normal((2, 4, 3)), dtype=torch.float32)
    expected = [states[0, 1:].numpy().mean(axis=0), states[1, 2].numpy()]
    pooled = torch.tensor([[False, True, True, True], [False, False, True, False]])
    states[0, 0] = states[1, 0] = float("nan")
    np.testing.assert_allclose(pool(states, pooled).numpy(), expected, rtol=1e-6)


def test_where_a_model_is_looked_for_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./nothing", "a/b/c", "model.gguf", "org/model.gguf"):
        with pytest.raises(UsageError, match=r"no such folder or \.gguf file"):
            locate(name)
    Path("notes.txt").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match=r"a model is a folder, a \.gguf file, or a name on the hub"):
        locate("notes.txt")
    Path("all-mini.v2").mkdir()
    assert locate("all-mini.v2").name == "all-mini.v2"
    with pytest.raises(UsageError, match=r"all-mini\.v2 is here, and has no revisions"):
        locate("all-mini.v2", "main")


def test_the_hash_of_a_model_is_of_the_files_that_count(tmp_path: Path) -> None:
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    for path, content in (
        ("config.json", "{}"),
        ("model.safetensors", "weights"),
        ("README.md", "words"),
        ("onnx/model.json", "{}"),
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}'),
        ("modules.json", json.dumps([{"path": p, "type": f"library.models.{t}"} for p, t in modules])),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content, encoding="utf-8")
    assert modules_of(tmp_path) == modules
    assert described(tmp_path) == ("mean", True)
    parts = {part for part, _ in modules}
    first = content_hash(tmp_path, parts)
    for path in ("README.md", "onnx/model.json"):
        (tmp_path / path).write_text("other", encoding="utf-8")
        assert content_hash(tmp_path, parts) == first
    seen = {first}
    for path in ("model.safetensors", "1_Pooling/config.json", "config.json"):
        (tmp_path / path).write_text("other", encoding="utf-8")
        seen.add(content_hash(tmp_path, parts))
    (tmp_path / "config.json").rename(tmp_path / "config2.json")
    seen.add(content_hash(tmp_path, parts))
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({}, None),
        ({"prompts": {"query": "", "document": ""}}, None),
        ({"prompts": {"query": "query: ", "passage": "passage: "}}, Prompt(("passage: {text}",), ("query: {text}",))),
        ({"prompts": {"query": "ask: "}}, Prompt(("{text}",), ("ask: {text}",))),
        ({"prompts": {"sts": "x: "}, "default_prompt_name": "sts"}, Prompt(("x: {text}",), ("x: {text}",))),
    ],
)
def test_a_models_own_prompts_are_read(tmp_path: Path, held: dict[str, Any], expected: Prompt | None) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(held), encoding="utf-8")
    assert own_prompt(tmp_path) == expected


def test_mteb_gets_arrays_for_lists_and_for_batches_of_columns() -> None:
    made = encoder("passage: {text}", query=("query: {text}",))
    wrapped = MtebEncoder(made)
    documents = wrapped.encode(["x", "yy"], task_name="T", batch_size=1)
    np.testing.assert_allclose(documents, [formula("passage: x"), formula("passage: yy")], rtol=1e-5)

    class Kind:
        value = "query"

    batches = [{"text": ["x", "yy"], "id": [1, 2]}, {"text": ["z"]}]
    queries = wrapped.encode(batches, task_metadata=None, hf_split="test", hf_subset="en", prompt_type=Kind)
    np.testing.assert_allclose(queries, [formula(f"query: {t}") for t in ("x", "yy", "z")], rtol=1e-5)
    pytest.importorskip("torch")
    a, b = documents.astype(np.float64), queries.astype(np.float64)
    cosines = (a @ b.T) / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(wrapped.similarity(documents, queries).numpy(), cosines, atol=1e-6)
    np.testing.assert_allclose(wrapped.similarity_pairwise(documents, queries[:2]).numpy(), np.diag(cosines), atol=1e-6)
    assert float(wrapped.similarity(documents[0], queries[0])) == pytest.approx(cosines[0, 0], abs=1e-6)
