"""A model run by sentence-transformers, as its own configuration says: pooling, length, normalisation and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vecferry.encoders.local import models_library
from vecferry.encoders.prompts import MARK, PLAIN, Prompt, fill
from vecferry.encoders.transformer import device_of, quiet
from vecferry.errors import DataError, UsageError
from vecferry.jsonfile import read_json
from vecferry.linear import Floats

CONFIGURATION = "config_sentence_transformers.json"
_SHORT = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last", "max_tokens": "max"}


class SentenceBackend:
    """Run a sentence-transformers model from a folder; a `Backend`. A text that is too long loses its end."""

    def __init__(
        self, folder: Path, *, name: str, revision: str, max_length: int | None = None, device: str = "auto"
    ) -> None:
        library = models_library("sentence_transformers")
        torch, transformers = models_library("torch"), models_library("transformers")
        self.name, self.revision = name, revision
        with quiet(transformers):
            try:
                model = library.SentenceTransformer(
                    str(folder), device=device_of(torch, device), model_kwargs={"use_safetensors": True}
                )
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise DataError(f"{folder} is no model that sentence-transformers can load: {error}") from error
        if max_length is not None:
            if model.max_seq_length is not None and max_length > model.max_seq_length:
                raise UsageError(
                    f"{name} takes {model.max_seq_length} tokens at most, --max-length asks for {max_length}"
                )
            model.max_seq_length = max_length
        self._model = model
        self.max_length: int | None = model.max_seq_length
        self.pooling, self.normalized = described(folder)
        self.prompt = own_prompt(folder)
        dim = model.get_embedding_dimension() if hasattr(model, "get_embedding_dimension") else None
        self.dim = int(dim or model.get_sentence_embedding_dimension())

    def embed(self, template: str, texts: list[str]) -> Floats:
        """Return the vectors `[n, dim]` of one batch."""
        prefix, _, rest = template.partition(MARK)
        # a prefix is handed over as such, since some models leave its tokens out of the mean
        given = {"prompt": prefix} if prefix and not rest else {}
        filled = texts if given or template == MARK else [fill(template, text)[0] for text in texts]
        vectors: Floats = self._model.encode(
            filled, batch_size=len(texts), show_progress_bar=False, convert_to_numpy=True, **given
        )
        return vectors


def own_prompt(folder: Path) -> Prompt | None:
    """Return the prefixes that a model's configuration names for queries and documents, None where it names none."""
    path = folder / CONFIGURATION
    held: dict[str, Any] = read_json(path) if path.is_file() else {}
    prefixes = {name: p for name, p in (held.get("prompts") or {}).items() if isinstance(p, str) and p}
    usual = prefixes.get(str(held.get("default_prompt_name")), "")
    document = next((prefixes[n] for n in ("document", "passage", "corpus") if n in prefixes), usual)
    query = prefixes.get("query", usual)
    if not document and not query:
        return None
    return Prompt(*((prefix + MARK,) if prefix else PLAIN for prefix in (document, query)))


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """Return the folder and the class of each step of a model, none for one that isn't sentence-transformers'."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return [(str(module["path"]), str(module["type"]).rpartition(".")[2]) for module in modules]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def described(folder: Path) -> tuple[str, bool]:
    """Return a model's pooling and whether it normalises: from its files, whose words don't change with the library."""
    steps: list[str] = []
    kinds = modules_of(folder)
    for part, kind in kinds:
        if kind == "Pooling":
            held = read_json(folder / part / "config.json")
            modes = [key.removeprefix("pooling_mode_") for key, on in held.items() if on is True and "_mode_" in key]
            steps += [_SHORT.get(mode, mode) for mode in modes] or [str(held.get("pooling_mode", "pooled"))]
        elif kind not in ("Transformer", "Normalize"):
            steps.append(kind)
    return "+".join(steps), bool(kinds) and kinds[-1][1] == "Normalize"
