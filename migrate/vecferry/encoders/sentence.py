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
        parts = [type(part).__name__ for part in model]
        self.normalized = parts[-1] == "Normalize"
        modes = [part.get_pooling_mode_str() for part in model if hasattr(part, "get_pooling_mode_str")]
        self.pooling = "+".join([*modes, *(p for p in parts if p not in ("Transformer", "Pooling", "Normalize"))])
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


def module_folders(folder: Path) -> list[str]:
    """Return the parts of a model's folder whose files its vectors depend on."""
    try:
        modules = (folder / "modules.json").read_text(encoding="utf-8")
    except OSError:
        return [""]
    try:
        return sorted({"", *(str(module["path"]) for module in json.loads(modules))})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder / 'modules.json'} is damaged: {error}") from error
