"""The output head of a language model: its unembedding, read from the checkpoint without running the model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecferry.encoders.local import locate, models_library
from vecferry.errors import DataError, UsageError
from vecferry.jsonfile import parse_json, read_json
from vecferry.linear import Floats
from vecferry.vocabulary import Vocabulary, of_folder, of_gguf

log = logging.getLogger("vecferry")

HEADS = ("lm_head.weight", "embed_out.weight")
"""Ends of the names of heads that have weights of their own."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
"""Ends of the names of input embeddings, which are the head too where both are tied."""
CAUSAL = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
NO_HEAD = re.compile(r"bert|t5encoder|clip")
"""GGUF architectures that predict no next token."""
HEADER = 64 << 20
"""Bytes of the largest header of a safetensors file; those of sharded models with many experts reach some megabytes."""
STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""How a head's numbers may be stored, by the name that safetensors has for it; numpy doesn't know bfloat16."""
ROWS = 8192
"""Rows that are widened to float32 at a time."""
INSTEAD = "make a filter of its vectors instead: --kind pca --store VECTORS"


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Hold a model's unembedding `[V, d]` float32, read-only where it is the file itself, and what it is.

    tensor      its name in the checkpoint
    dropped     rows beyond the tokenizer's last token, by which training frameworks pad a vocabulary
    vocabulary  the tokens by number, None where the checkpoint comes without a tokenizer
    """

    weight: Floats
    name: str
    tensor: str
    dropped: int
    vocabulary: Vocabulary | None


def unembedding(model: str | Path) -> Floats:
    """Return the matrix `[V, d]` that turns a model's hidden states into logits: see `read_head`."""
    return read_head(model).weight


def read_head(model: str | Path) -> Head:
    """Read the unembedding of a causal language model: a folder, a .gguf file, or the name of a model on the hub.

    The head is a tensor of its own, or the input embedding where the two are tied. Of a checkpoint in several files
    only that tensor is read, a block of rows at a time, so that no second copy of it is in memory. Rows without a
    token are dropped. Raises UsageError for a model without such a head and for one that can't be found, DataError
    for a damaged checkpoint, MissingDependencyError for a GGUF file or the hub where the extra `models` is missing.
    """
    found = locate(str(model))
    if found.path.is_file():
        tensor, weight, vocabulary = _from_gguf(found.path)
    else:
        tensor, weight = _from_folder(found.path)
        vocabulary = of_folder(found.path)
    rows = len(weight)
    if vocabulary is None:
        log.warning("%s has no tokenizer here: rows that only pad its vocabulary can't be told, and are kept", model)
    kept = rows if vocabulary is None else min(rows, len(vocabulary))  # Gemma 3 has a token for images without a row
    return Head(weight[:kept], found.name, tensor, rows - kept, vocabulary)


def _from_folder(folder: Path) -> tuple[str, Floats]:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is not a model's folder: it has no config.json")
    config = read_json(folder / "config.json")
    names = config.get("architectures") or []
    if not any(CAUSAL.search(str(name)) for name in names):
        what = ", ".join(map(str, names)) or "a model that doesn't say what it is"
        raise UsageError(f"{folder} is {what}, which has no head that predicts tokens: {INSTEAD}")
    places = _places(folder)
    tensor = next((n for end in HEADS for n in sorted(places) if n == end or n.endswith(f".{end}")), None)
    if tensor is None:
        tied = [n for end in EMBEDDINGS for n in sorted(places) if n == end or n.endswith(f".{end}")]
        if not tied or config.get("tie_word_embeddings") is False:
            raise UsageError(f"{folder} has no head among its {len(places)} tensors, and none is tied to it: {INSTEAD}")
        tensor = tied[0]
    return tensor, _tensor(folder / places[tensor], tensor)


def _places(folder: Path) -> dict[str, str]:
    """Return the file of each tensor: from the index of a sharded checkpoint, or the header of a single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = read_json(index, HEADER).get("weight_map")
        if not isinstance(files, dict) or any(Path(str(f)).name != f for f in files.values()):
            raise DataError(f"{index} is damaged: its weight_map names no files of its folder")
        return files
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UsageError(f"{folder} has neither model.safetensors nor its index: convert the checkpoint to safetensors")
    return dict.fromkeys(_header(file)[0], file.name)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return what a safetensors file says of its tensors, and where their bytes begin."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(HEADER, file.stat().st_size):
            raise DataError(f"{file} is damaged: its header of {length:,} bytes is longer than the file can hold")
        try:
            header = parse_json(stream.read(length))
        except ValueError as error:
            raise DataError(f"{file} is damaged: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _tensor(file: Path, name: str) -> Floats:
    """Map a tensor of a safetensors file into memory, and widen it to float32 where it isn't."""
    if not file.is_file():
        raise DataError(f"{file}, which holds {name}, is missing: the checkpoint is incomplete")
    header, start = _header(file)
    try:
        kind, shape, (begin, end) = (header[name][key] for key in ("dtype", "shape", "data_offsets"))
        if kind not in STORED:
            raise UsageError(f"{file}: {name} holds {kind}; a head is read as F32, F16 or BF16")
        stored = STORED[kind]
        rows, columns = (int(n) for n in shape)
        if not 0 <= begin <= end <= file.stat().st_size - start or end - begin != rows * columns * stored.itemsize:
            raise ValueError("its bytes don't fit its shape or the file")
        held: NDArray[Any] = np.memmap(file, stored, "r", offset=start + begin, shape=(rows, columns))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: {name} can't be read: {error!r}") from error
    if kind == "F32":
        return held
    if kind == "F16":
        return _widened(rows, columns, lambda part: held[part])
    # bfloat16 is the upper half of a float32
    return _widened(rows, columns, lambda part: (held[part].astype(np.uint32) << 16).view(np.float32))


def _widened(rows: int, columns: int, block: Callable[[slice], Any]) -> Floats:
    out = np.empty((rows, columns), np.float32)
    for start in range(0, rows, ROWS):
        out[start : start + ROWS] = block(slice(start, start + ROWS))
    return out


def _from_gguf(file: Path) -> tuple[str, Floats, Vocabulary | None]:
    gguf = models_library("gguf")
    try:
        reader = gguf.GGUFReader(str(file))
        architecture = str(reader.get_field("general.architecture").contents())
        tensors = {t.name: t for t in reader.tensors}
        vocabulary = of_gguf(reader)
    except Exception as error:  # whatever the library makes of a damaged file
        raise DataError(f"{file} can't be read as GGUF: {error!r}") from error
    causal = reader.get_field(f"{architecture}.attention.causal")
    tensor = next((tensors[n] for n in ("output.weight", "token_embd.weight") if n in tensors), None)
    if tensor is None or NO_HEAD.search(architecture) or (causal is not None and not causal.contents()):
        raise UsageError(f"{file} is a {architecture}, which has no head that predicts tokens: {INSTEAD}")
    columns, rows = (int(n) for n in tensor.shape)  # GGUF counts dimensions from the innermost
    try:
        weight = _widened(rows, columns, lambda part: gguf.dequantize(tensor.data[part], tensor.tensor_type))
    except NotImplementedError as error:
        raise UsageError(
            f"{file}: {tensor.name} is stored as {tensor.tensor_type.name}, which gguf can't read"
        ) from error
    return tensor.name, weight, vocabulary


def describe(head: Head) -> dict[str, Any]:
    """Return what a filter's card says of the head that it was made of."""
    return {"head": head.tensor, "tokens": len(head.weight), "dropped_rows": head.dropped}
