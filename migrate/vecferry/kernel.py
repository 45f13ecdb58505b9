"""Run a map over batches on a device: the one place that knows about threads and GPUs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from vecferry.batch import Floats
from vecferry.errors import MissingDependencyError, UsageError
from vecferry.linear import LinearMap

Kernel = Callable[[Floats], Floats]

CUDA_ROWS = 8192
"""Rows of every product on a GPU; one shape for all, as on the CPU."""


def cpu_count() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_cuda() -> bool:
    """Say whether a GPU can be used, without importing torch where there is no driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def choose_device(device: str) -> str:
    """Turn "auto", "cpu" or "cuda" into the device to use; raise UsageError for one that isn't there."""
    if device == "auto":
        return "cuda" if has_cuda() else "cpu"
    if device == "cuda" and find_spec("torch") is None:
        raise MissingDependencyError("torch", "torch", "--device cuda")
    if device == "cuda" and not has_cuda():
        raise UsageError("--device cuda: no usable GPU on this machine; --device auto takes one where there is one")
    if device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}: auto, cpu or cuda")
    return device


@contextmanager
def kernel(m: LinearMap, device: str = "cpu", threads: int = 1) -> Iterator[Kernel]:
    """Give a function that maps batches `[n, d_in]` to `[n, d_out]` on `device` with `threads` threads.

    On the CPU blocks run side by side, each on a single BLAS thread: the bits don't depend on `threads`.
    """
    if device == "cuda":
        yield torch_kernel(m, device)
        return
    with ThreadPoolExecutor(threads) as pool, threadpool_limits(1, user_api="blas"):
        if threads == 1:
            yield m.apply
        else:
            yield lambda x: m.apply(x, run=lambda task, starts: list(pool.map(task, starts)))


def torch_kernel(m: LinearMap, device: str) -> Kernel:
    """Return a function that maps batches with torch, in full float32, in blocks of one shape."""
    import torch

    weight = torch.from_numpy(m.weight).to(device)
    bias = None if m.bias is None else torch.from_numpy(m.bias).to(device)
    mean = None if m.mean is None else torch.from_numpy(m.mean).to(device)
    block = torch.zeros((CUDA_ROWS, m.d_in), device=device)

    def normalize(x: Any) -> Any:
        norms = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return x / torch.where(norms == 0, 1.0, norms)

    after = None if m.after is None else torch_kernel(m.after, device)

    def run(x: Floats) -> Floats:
        out = np.empty((len(x), m.weight.shape[1]), np.float32)
        for start in range(0, len(x), CUDA_ROWS):
            n = min(CUDA_ROWS, len(x) - start)
            block[:n] = torch.from_numpy(np.array(x[start : start + n], np.float32)).to(device)
            block[n:] = 0
            rows = block if mean is None else block - mean
            y = (rows if m.pre == "none" else normalize(rows)) @ weight
            y = y if bias is None else y + bias
            y = normalize(y) if m.post == "l2" else y
            out[start : start + n] = y[:n].cpu().numpy()
        return out if after is None else after(out)

    torch.backends.cuda.matmul.allow_tf32 = False
    return run
