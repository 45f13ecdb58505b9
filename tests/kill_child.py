"""Fork a process for each command of vecferry that is asked for, and tell which phase it is in.

Reads one JSON list [arguments, file for stderr, largest file, powers, phase to hold] a line; writes `pid N`,
`+phase TIME` and `-phase TIME` as phases begin and end, and `exit CODE`. Every child is a process of its own, to be
killed as such; the imports are done only once. Checkpoints are small, so that a kill finds the stage in all of its
states.
"""

import ctypes
import functools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import vecferry.migration as migration
import vecferry.rewrite as rewrite
import vecferry_adapters._faiss_train as faiss_train
import vecferry_adapters._faiss_writer as faiss_writer
import vecferry_adapters._numpy_writer as numpy_writer
import vecferry_adapters._parquet_writer as parquet_writer
from vecferry.cli import cli
from vecferry.store import adapters, load

NEWS = os.dup(1)
held: dict[str, Path] = {}
"""A phase that doesn't begin as long as there is a file."""


def tell(text: str) -> None:
    os.write(NEWS, f"{text}\n".encode())


def marked(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell when a function begins and when it ends."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        tell(f"+{phase} {time.perf_counter()}")
        while held.get(phase) is not None and held[phase].exists():
            time.sleep(0.001)
        try:
            return function(*args, **options)
        finally:
            tell(f"-{phase} {time.perf_counter()}")

    return call


def marked_steps(phase: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Tell when each step of a generator begins and when it ends."""

    def steps(*args: Any, **options: Any) -> Iterator[Any]:
        step = functools.partial(next, function(*args, **options), None)
        yield from iter(marked(phase, step), None)

    return steps


def mark() -> None:
    """Mark the phases of a migration."""
    faiss_writer.CHECKPOINT = 1 << 17
    parquet_writer.GROUP_ROWS = 128
    parquet_writer.PART_GROUPS = 4
    rewrite.sound = marked_steps("read", rewrite.sound)
    numpy_writer.SYNC_BYTES = 1 << 17
    writers = {
        faiss_writer.FaissWriter: "_checkpoint",
        numpy_writer.NumpyWriter: "_sync",
        parquet_writer.ParquetWriter: "_end_part",
    }
    for writer, durable in writers.items():
        names = {"write": "stage", durable: "checkpoint", "staged": "finish", "commit": "publish"}
        for name, phase in names.items():
            setattr(writer, name, marked(phase, getattr(writer, name)))
    faiss_writer.build = marked("build", faiss_writer.build)
    faiss_train._train = marked("train", faiss_train._train)
    migration.verify = marked("verify", migration.verify)
    migration.Measure.of = marked("gate", migration.Measure.of)


def obey_permissions() -> None:
    """Give up root's power to open what permissions forbid: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for i in range(3):  # the lower words of the effective, permitted and inheritable set
        sets[i] &= ~0b110
    assert libc.capset(header, sets) == 0


def run(arguments: list[str], errors: str, largest: int | None, powers: bool, hold: str | None) -> None:
    """Be the command, to the end of the process. Ctrl-C ends it where a shell started the tests in background, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hold is not None:
        held[hold] = Path(f"{errors}.hold")
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    if not powers:
        obey_permissions()
    tell(f"pid {os.getpid()}")
    for source, descriptor in ((os.devnull, 0), (os.devnull, 1), (errors, 2)):
        os.dup2(os.open(source, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    code = 0
    try:
        cli(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    for kind in adapters():
        load(kind)
    for module in ("faiss", "pyarrow.dataset", "vecferry.outputs"):  # what a command would import by and by
        import_module(module)
    mark()
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(*command)
        tell(f"exit {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


if __name__ == "__main__":
    serve()
