"""Where a model's files are: a folder or GGUF file here, or a hub's model in its cache; and which weights they hold."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vecferry.errors import MissingDependencyError, UsageError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WANTED = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors"]
_UNWANTED = ["onnx/*", "openvino/*", "original/*"]
_HASHED = (".json", ".txt", ".model", ".safetensors")


@dataclass(frozen=True, slots=True)
class Located:
    """Hold a model's folder, or GGUF file, and what people call the model."""

    path: Path
    name: str


def locate(model: str, revision: str | None = None) -> Located:
    """Find a model's files: a path here, or a model of the hub, which is fetched if its cache doesn't have it.

    Of the hub's models only configuration, tokenizer and safetensors weights are fetched: pickles can run code.
    Raises UsageError, which says where it looked, when it is in none of these places.
    """
    path = Path(model).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise UsageError(f"{model}: a model is a folder, a .gguf file, or a name on the hub")
        if revision is not None:
            raise UsageError(f"{model} is here, and has no revisions: --revision is for models of the hub and servers")
        return Located(path, path.resolve().name.removesuffix(".gguf"))
    if not _HUB_NAME.fullmatch(model) or path.suffix == ".gguf":
        raise UsageError(f"{model}: no such folder or .gguf file")
    hub = models_library("huggingface_hub")
    try:
        return Located(Path(_snapshot(hub, model, revision, local=True)), model)
    except Exception as absent:
        try:
            return Located(Path(_snapshot(hub, model, revision, local=False)), model)
        except Exception as error:
            at = f" at revision {revision}" if revision else ""
            reason = next(iter(str(error).splitlines()), "").strip()
            raise UsageError(
                f"{model}{at}: no folder of that name in {Path.cwd()}, not in the hub's cache "
                f"{hub.constants.HF_HUB_CACHE} ({type(absent).__name__}), and the hub didn't give it "
                f"({type(error).__name__}: {reason}): give the path of a folder, or fetch it where there is a network"
            ) from None


def _snapshot(hub: Any, model: str, revision: str | None, *, local: bool) -> str:
    folder: str = hub.snapshot_download(
        model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=local
    )
    return folder


def models_library(name: str) -> Any:
    """Import a package of the extra `models`; raise MissingDependencyError where it isn't installed."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] not in (name, "torch"):
            raise
        raise MissingDependencyError(name, "models", "running a model here") from error


def content_hash(folder: Path, parts: Iterable[str] = ("",)) -> str:
    """Hash the files that vectors depend on, in a model's folder and these parts of it, by name and content."""
    digest = hashlib.sha256()
    files = sorted((part, path) for part in parts for path in (folder / part).glob("*") if path.suffix in _HASHED)
    for part, path in files:
        digest.update(f"{part}/{path.name}\0{file_hash(path)}\0".encode())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """Hash a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Return the platform's folder for what can be made again: XDG's on Linux."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vecferry"
