"""A tiny random language model as a checkpoint: a head, a tokenizer and a config, written without transformers."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

WORDS = ["[UNK]", "the", "of", "and", "cat", "dog", "tree", "house", "river", "stone"]


def head(tokens: int = 120, dim: int = 16, seed: int = 0) -> np.ndarray:
    """Return a head whose spectrum falls off, with a mean row as real ones have."""
    rng = np.random.default_rng(seed)
    scales = np.linspace(3, 0.3, dim)
    rotation = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    return ((rng.standard_normal((tokens, dim)) * scales) @ rotation + 0.4 * rotation[2]).astype(np.float32)


def write(
    folder: Path,
    weight: np.ndarray,
    *,
    name: str = "lm_head.weight",
    architecture: str = "LlamaForCausalLM",
    tied: bool = False,
    tokens: int | None = None,
) -> Path:
    """Write a checkpoint in one file, with a tokenizer of `tokens` tokens, by default one for each row."""
    folder.mkdir(parents=True)
    save_file(
        {name: np.ascontiguousarray(weight), "model.norm.weight": np.ones(3, np.float32)}, folder / "model.safetensors"
    )
    write_config(folder, architecture, tied, len(weight) if tokens is None else tokens)
    return folder


def write_config(folder: Path, architecture: str, tied: bool, tokens: int) -> None:
    config = {"architectures": [architecture], "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {WORDS[i] if i < len(WORDS) else f"w{i}": i for i in range(tokens)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def package(name: str) -> Path:
    """Return the folder of a package with a real model in it, without importing it; skip where it isn't installed."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{name} is not installed: make test-models installs it")
    return Path(found.submodule_search_locations[0])
