"""A model run by transformers: an encoder or a decoder without its head, pooled here."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vecferry.encoders.local import models_library
from vecferry.encoders.pooling import POOLINGS, kept, pool
from vecferry.encoders.prompts import Prompt, fill
from vecferry.errors import DataError, UnsupportedError, UsageError
from vecferry.linear import Floats

MAX_LENGTH = 512
PRECISIONS = ("auto", "float32", "bfloat16")


class TransformerBackend:
    """Run a transformers model from a folder; a `Backend`.

    Pooling is "last" for decoders and "mean" for encoders unless given. Tokens beyond `max_length` (512, or the
    model's own limit) are cut out of the middle. A decoder's token for the beginning is not part of a mean: it draws
    attention and says nothing. `precision` "auto" is bfloat16 for decoders where the machine multiplies it by itself.
    """

    normalized = False
    prompt: Prompt | None = None

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        revision: str,
        pooling: str | None = None,
        max_length: int | None = None,
        precision: str = "auto",
        device: str = "auto",
    ) -> None:
        torch, transformers = models_library("torch"), models_library("transformers")
        self.name, self.revision = name, revision
        with quiet(transformers):
            try:
                config = transformers.AutoConfig.from_pretrained(folder)
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            except (OSError, ValueError, KeyError) as error:
                raise DataError(f"{folder} is no model that transformers can load: {_first_line(error)}") from error
            if config.is_encoder_decoder:
                raise UnsupportedError(
                    f"{name} is a {config.model_type}, which both encodes and decodes: load it as a "
                    "sentence-transformers model, or take another one"
                )
            self._decoder = is_decoder(config)
            self.pooling = pooling or ("last" if self._decoder else "mean")
            if self.pooling not in POOLINGS:
                raise UsageError(f"unknown pooling {self.pooling!r}: choose one of {', '.join(POOLINGS)}")
            if self.pooling == "echo" and not tokenizer.is_fast:
                raise UnsupportedError(
                    f"{name} has a tokenizer that doesn't say where its tokens are: echo can't be pooled"
                )
            self._device = device_of(torch, device)
            dtype = precision_of(torch, precision, self._device, self._decoder)
            model = load_weights(transformers.AutoModel, folder, name, dtype)
        self._torch, self._tokenizer, self._model = torch, tokenizer, model.eval().to(self._device)
        self.dim = int(config.get_text_config().hidden_size)
        limits = [max_length or MAX_LENGTH, int(tokenizer.model_max_length)]
        own = getattr(config.get_text_config(), "max_position_embeddings", None)
        # RoBERTa's positions begin behind the number of the padding token
        offset = config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
        self.max_length: int | None = min([*limits, own - offset] if own else limits)
        if max_length is not None and max_length > self.max_length:
            raise UsageError(f"{name} takes {self.max_length} tokens at most, --max-length asks for {max_length}")
        accepted = inspect.signature(model.forward).parameters
        self._positions = self._decoder and "position_ids" in accepted
        self._options = {"use_cache": False} if "use_cache" in accepted else {}

    def embed(self, template: str, texts: list[str]) -> Floats:
        """Return the pooled vectors `[n, dim]` of one batch."""
        torch = self._torch
        filled = [fill(template, text) for text in texts]
        encoded = self._tokenizer(
            [text for text, _ in filled], return_offsets_mapping=self.pooling == "echo", verbose=False
        )
        rows = encoded["input_ids"]
        if empty := [texts[i] for i, row in enumerate(rows) if not row]:
            raise DataError(f"{self.name}: the text {empty[0][:40]!r} has no tokens: leave it out")
        assert self.max_length is not None
        chosen = [kept(len(row), self.max_length) for row in rows]
        longest = max(map(len, chosen))
        pad = self._tokenizer.pad_token_id or 0
        ids = torch.full((len(rows), longest), pad, dtype=torch.long)
        real = torch.zeros((len(rows), longest), dtype=torch.bool)
        pooled = torch.zeros_like(real)
        for i, (row, places) in enumerate(zip(rows, chosen, strict=True)):
            start = longest - len(places) if self._decoder else 0
            ids[i, start : start + len(places)] = torch.tensor([row[p] for p in places])
            real[i, start : start + len(places)] = True
            offsets = encoded["offset_mapping"][i] if self.pooling == "echo" else None
            for p in self._pooled(row, places, offsets, filled[i][1]):
                pooled[i, start + p] = True
        options: dict[str, Any] = dict(self._options)
        if self._positions:
            options["position_ids"] = (real.long().cumsum(dim=1) - 1).clamp(min=0).to(self._device)
        with torch.inference_mode():
            states = self._model(
                input_ids=ids.to(self._device), attention_mask=real.long().to(self._device), **options
            ).last_hidden_state
            vectors: Floats = pool(states, pooled.to(self._device)).cpu().numpy()
        return vectors

    def _pooled(self, row: list[int], places: list[int], offsets: Any, copy: int) -> range:
        """Return which of the kept tokens are pooled; `copy` is where the last copy of the text starts."""
        count = len(places)
        if self.pooling == "cls":
            return range(1)
        if self.pooling == "last":
            return range(count - 1, count)
        if self.pooling == "echo":
            inside = (i for i, p in enumerate(places) if offsets[p][1] > copy)
            return range(next(inside, count - 1), count)
        marked = self._decoder and count > 1 and row[0] == self._tokenizer.bos_token_id
        return range(int(marked), count)


def is_decoder(config: Any) -> bool:
    """Say whether a configuration is that of a model that writes text from left to right."""
    auto = models_library("transformers.models.auto.modeling_auto")
    writes, fills = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return config.model_type in writes and (config.model_type not in fills or bool(config.is_decoder))


def load_weights(auto: Any, folder: Path, name: str, dtype: Any) -> Any:
    """Load a model's safetensors weights; raise DataError if any that its vectors depend on aren't there."""
    try:
        model, found = auto.from_pretrained(folder, dtype=dtype, use_safetensors=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{folder} has no weights that transformers can load: {_first_line(error)}") from error
    if missing := sorted(key for key in found["missing_keys"] if not key.startswith("pooler.")):
        raise DataError(
            f"{name}: {len(missing)} weights such as {missing[0]} are not in {folder}, and random ones would stand in "
            "for them: the configuration isn't that of these weights"
        )
    return model


def device_of(torch: Any, device: str) -> str:
    """Return where to run: the GPU that is there, unless another place is asked for."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no GPU: run it with --device cpu")
    return device


def precision_of(torch: Any, precision: str, device: str, decoder: bool) -> Any:
    """Return the type to calculate in."""
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if precision == "auto":
        precision = "bfloat16" if decoder and _fast_bfloat16(torch, device) else "float32"
    return getattr(torch, precision)


def _fast_bfloat16(torch: Any, device: str) -> bool:
    if device != "cpu":
        return bool(torch.cuda.get_device_capability() >= (8, 0))  # before Ampere it is emulated
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the terminal while a model is loaded."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
