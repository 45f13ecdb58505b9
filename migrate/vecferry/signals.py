"""SIGTERM and Ctrl-C for the command line: stop in order, at once where they come twice, and not where all is done."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN = 5.0
"""Seconds after which a signal that had no effect is acted on again."""
STOPPING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Put all handlers back as they were before the block."""
    before = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at the first signal, end the process at the second; be deaf behind it.

    To be used inside `handlers_kept`. What its caller ignores (nohup) stays ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for heard in listening:
            signal.signal(heard, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
        raise KeyboardInterrupt

    def again(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # the first one was lost, as some C extensions do with it while they are loaded

    listening = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    signal.signal(signal.SIGALRM, again)
    for number in listening:
        signal.signal(number, stop)
    try:
        yield
    finally:  # all is done or said: a signal could only change the exit code
        for number in (*STOPPING, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
