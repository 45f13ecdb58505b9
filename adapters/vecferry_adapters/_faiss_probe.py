"""Let a process of its own read a FAISS file first, where nobody vouches for the sizes in it.

FAISS's reader trusts what it reads: a damaged file can make it end the process, or fill all memory. A child process
with limits does so instead; it opens the file as its parent would, finds its rows, and decodes some of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from vecferry.errors import DataError, UnsupportedError

BYTES = 1 << 30
"""Memory that a file may take to be opened, besides three times its own size: in a map, in a copy, in tables."""
SECONDS = 60
BYTES_A_SECOND = 10 << 20
"""What the slowest storage reads; with SECONDS it makes the time that opening a file may take."""
SAMPLE = 256
_PR_SET_PDEATHSIG = 1


def probe(path: Path) -> None:
    """Open a file in a child process; raise the child's error, or DataError where it didn't survive."""
    seconds = SECONDS + path.stat().st_size // BYTES_A_SECOND
    folders = [folder for folder in sys.path if folder]  # "" is the current folder, whose files mustn't be imported
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-P", "-m", __name__, str(path), str(os.getpid())]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{path} is damaged: FAISS didn't finish reading it in {seconds} seconds") from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        code = done.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        last = done.stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1]
        raise DataError(
            f"{path} is damaged: the process that FAISS read it in was ended {how}{': ' if last else ''}{last}"
        ) from None
    if answer["error"]:
        raise (UnsupportedError if answer["unsupported"] else DataError)(answer["error"])


def _limit_memory(size: int) -> None:
    """Leave a file's worth of address space beside what the process has by now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + 3 * size + BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _die_with(parent: int) -> None:
    """End when the parent does, however that ends, and leave no core file."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(path: Path, parent: int) -> None:
    """Open the file, decode rows at both of its ends, and say on the standard output what was wrong."""
    _die_with(parent)
    from vecferry_adapters._faiss_file import open_index
    from vecferry_adapters._faiss_walk import walk

    _limit_memory(path.stat().st_size)
    error: Exception | None = None
    try:
        opened = open_index(path, probed=True)  # to be kept: it owns what the rows are in
        rows = walk(opened.index, str(path))
        for some in (slice(0, min(SAMPLE, rows.count)), slice(max(0, rows.count - SAMPLE), rows.count)):
            rows.vectors(some)
            rows.labels(some)
    except (DataError, UnsupportedError) as caught:
        error = caught
    except (RuntimeError, MemoryError, ValueError) as caught:
        error = DataError(f"{path} is damaged: {str(caught).split('Error: ')[-1] or type(caught).__name__}")
    answer = {"error": str(error) if error else "", "unsupported": isinstance(error, UnsupportedError)}
    print(f"\n{json.dumps(answer)}", flush=True)
    os._exit(0)  # what a damaged file left in memory isn't taken apart


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
