"""A GGUF file as a folder that transformers loads: its weights are de-quantised once, and kept in the cache."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from vecferry.encoders.local import cache_folder, models_library
from vecferry.encoders.transformer import quiet
from vecferry.errors import DataError

log = logging.getLogger("vecferry")

FORMAT = 1


def dequantised(path: Path, revision: str) -> Path:
    """Return a folder with the float32 weights of a GGUF file whose hash is `revision`; made if it isn't there.

    That takes minutes for hundreds of millions of weights, and 4 bytes for each. The folder appears whole, by a
    rename; of two processes that make it one wins. Raises DataError for files that transformers can't read.
    """
    folder = cache_folder() / "gguf" / f"{path.stem}-{revision[:16]}-{FORMAT}"
    if (folder / "config.json").is_file():
        return folder
    torch, transformers = models_library("torch"), models_library("transformers")
    for package in ("gguf", "accelerate"):
        models_library(package)
    log.warning("de-quantising %s, once, into %s", path, folder)
    stage = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    stage.mkdir(parents=True)
    try:
        with quiet(transformers):
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    path.parent, gguf_file=path.name, dtype=torch.float32
                )
            except Exception as error:
                raise DataError(f"{path} can't be read as GGUF by transformers: {error}") from error
            model.hf_quantizer = None  # or transformers takes the weights for quantised ones, and refuses to save them
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            tokenizer.save_pretrained(stage)
            model.save_pretrained(stage)
        for file in stage.iterdir():  # or after a crash the folder could be there, and its weights not
            with file.open("rb") as written:
                os.fsync(written.fileno())
        try:
            stage.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return folder
