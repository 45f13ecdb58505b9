"""Make an encoder of a model's name or place, and of what is to be done with it."""

from __future__ import annotations

from collections.abc import Sequence

from vecferry.encoders.contract import Backend
from vecferry.encoders.endpoint import KEY_VARIABLE, EndpointBackend
from vecferry.encoders.gguf import dequantised
from vecferry.encoders.local import content_hash, file_hash, locate
from vecferry.encoders.prompts import prompt_of
from vecferry.encoders.sentence import SentenceBackend, modules_of
from vecferry.encoders.text import TextEncoder
from vecferry.encoders.transformer import TransformerBackend
from vecferry.errors import UsageError


def load_encoder(
    model: str,
    *,
    prompt: str | Sequence[str] = (),
    query_prompt: str | Sequence[str] = (),
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    revision: str | None = None,
    name: str | None = None,
    precision: str = "auto",
    device: str = "auto",
    endpoint: str | None = None,
    key_variable: str = KEY_VARIABLE,
    requests_per_minute: float | None = None,
) -> TextEncoder:
    """Load the model that makes the new space.

    model       a folder, a `.gguf` file, or a name on the hub; with `endpoint` what the server calls it
    prompt, query_prompt   templates with `{text}`, or names of presets (promptEOL, promptEOL-mistral,
                promptEOL-original, echo, e5); several are averaged. Queries are given the documents' where they have
                none of their own; without any, the model's own configuration counts, and else the text alone
    pooling     "cls", "mean", "last" or "echo"; the preset's or the model's own by default. With it, or the preset's,
                transformers runs the model, also where sentence-transformers would
    normalize   divide vectors by their length; by default as the model does
    name        what the space is called, where the folder's name says nothing
    endpoint    base address of an OpenAI-compatible server; the key is read from the environment variable
                `key_variable`

    Raises UsageError for a model that isn't there (naming where it was looked for), MissingDependencyError without
    the extra `models`, DataError for files that aren't a model.
    """
    wanted, preset = prompt_of(_several(prompt), _several(query_prompt))
    pooling = pooling or preset
    backend: Backend
    if endpoint is not None:
        if pooling is not None or max_length is not None:
            raise UsageError("--pooling, --max-length and presets that need a pooling are for models that run here")
        backend = EndpointBackend(
            endpoint,
            model,
            revision=revision or "",
            key_variable=key_variable,
            requests_per_minute=requests_per_minute,
        )
    else:
        backend = _local(model, pooling, max_length, revision, precision, device)
    if not (prompt or query_prompt) and backend.prompt is not None:
        wanted = backend.prompt
    return TextEncoder(backend, wanted, backend.normalized if normalize is None else normalize, name or backend.name)


def _local(
    model: str, pooling: str | None, max_length: int | None, revision: str | None, precision: str, device: str
) -> Backend:
    found = locate(model, revision)
    if found.path.is_file():
        content = file_hash(found.path)
        folder = dequantised(found.path, content)
    else:
        folder = found.path
        steps = modules_of(folder)
        content = content_hash(folder, {"", *(part for part, _ in steps)})
        if steps and pooling is None:
            return SentenceBackend(folder, name=found.name, revision=content, max_length=max_length, device=device)
    return TransformerBackend(
        folder,
        name=found.name,
        revision=content,
        pooling=pooling,
        max_length=max_length,
        precision=precision,
        device=device,
    )


def _several(prompts: str | Sequence[str]) -> list[str]:
    return [prompts] if isinstance(prompts, str) else list(prompts)
