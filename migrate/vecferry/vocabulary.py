"""The tokens of a language model by number: how many there are, what they read, and how often texts hold them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecferry.encoders.local import models_library
from vecferry.errors import DataError, UsageError
from vecferry.jsonfile import read_json

Tokenize = Callable[[list[str]], Sequence[Sequence[int]]]
"""Texts to token numbers, without the tokens that a model puts around a text."""

LARGEST = 256 << 20
"""Bytes of the largest tokenizer.json; that of Gemma 3 has 33 MB."""
TEXTS = 1024
"""Texts that are tokenized at a time."""
LENGTH = 1 << 16
"""Characters of a text that are tokenized at a time, so that one book on one line doesn't fill the memory."""
_PADDING = re.compile(r"\[PAD\d+\]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Hold the tokens as the tokenizer writes them; `bytewise` if that is GPT-2's alphabet, a letter for each byte."""

    tokens: tuple[str, ...]
    bytewise: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, token: int) -> str:
        """Return what a token stands for in a text, bytes that are no character as in Python's escapes."""
        text = self.tokens[token]
        if not self.bytewise:
            return text.replace("\u2581", " ")
        if not all(letter in _BYTES for letter in text):
            return text  # an added one, such as <|endoftext|>, which is written as it is
        return bytes(_BYTES[letter] for letter in text).decode("utf-8", "backslashreplace")


def of_folder(folder: Path) -> Vocabulary | None:
    """Read the vocabulary of a model's folder from its tokenizer.json; None where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    described = read_json(path, LARGEST)
    try:
        listed = described["model"]["vocab"]
        numbered = dict(listed) if isinstance(listed, dict) else {piece[0]: i for i, piece in enumerate(listed)}
        numbered |= {added["content"]: added["id"] for added in described.get("added_tokens") or []}
        tokens = [""] * (max(numbered.values(), default=-1) + 1)
        for text, number in numbered.items():
            tokens[number] = text
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise DataError(f"{path} is no tokenizer that lists its tokens: {error!r}") from error
    return Vocabulary(tuple(tokens), "ByteLevel" in repr(described.get("decoder")))


def of_gguf(reader: Any) -> Vocabulary | None:
    """Read the vocabulary of a GGUF file; what converters call [PAD7] only fills up the head's rows."""
    field = reader.get_field("tokenizer.ggml.tokens")
    if field is None:
        return None
    tokens = list(field.contents())
    while tokens and _PADDING.fullmatch(tokens[-1]) and tokens[-1] == f"[PAD{len(tokens) - 1}]":
        tokens.pop()
    model = reader.get_field("tokenizer.ggml.model")
    return Vocabulary(tuple(tokens), model is not None and model.contents() == "gpt2")


def tokenizer_of(path: Path) -> Tokenize:
    """Return a model's tokenizer: of its folder, or its GGUF file. Raises MissingDependencyError without `models`."""
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise UsageError(f"{path} has no tokenizer.json to count tokens with")
        tokenizer = models_library("tokenizers").Tokenizer.from_file(str(path / "tokenizer.json"))
    else:
        transformers = models_library("transformers")
        made = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer = made.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def count_tokens(texts: Iterable[str], tokenize: Tokenize, tokens: int) -> NDArray[np.int64]:
    """Count how often each of `tokens` tokens stands in the texts, `[tokens]`, a few texts at a time.

    Raises DataError for a corpus without any, and for numbers beyond the vocabulary.
    """
    counts = np.zeros(tokens, np.int64)
    held: list[str] = []

    def count() -> None:
        numbers = np.array([n for ids in tokenize(held) for n in ids], np.int64)
        if len(numbers) and numbers.max() >= tokens:
            raise DataError(f"the tokenizer gives token {numbers.max()}, the head has {tokens:,}: another model's?")
        counts[:] += np.bincount(numbers, minlength=tokens)
        held.clear()

    for text in texts:
        for start in range(0, len(text), LENGTH):
            held.append(text[start : start + LENGTH])
            if len(held) >= TEXTS:
                count()
    if held:
        count()
    if not counts.any():
        raise DataError("the corpus holds no tokens: nothing can be counted")
    return counts


def _letters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes stand for themselves, the others for the letters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _letters()
