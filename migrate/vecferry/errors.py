"""The exceptions that vecferry raises on purpose, each with the exit code it gives the command line.

VecferryError
├── UsageError                2   the call itself can't be right
│   ├── UnsupportedError          a store can't do what was asked
│   └── MissingDependencyError    an optional package isn't installed
├── DataError                 3   the input is bad: unreadable, damaged, or not what it says
│   └── BadRowsError              rows that can't be translated, named by id
├── IncompatibleError         4   map, direction, dimension or space don't belong together
└── StoppedError              5   stopped before the end; --resume continues

A failed gate is a result, not an exception: `Report.passed` is false and the command exits 1.
"""

from __future__ import annotations

from collections.abc import Iterable


class VecferryError(Exception):
    """Base of every error that vecferry raises on purpose."""

    exit_code = 1


class UsageError(VecferryError):
    """Raised when a call can't be right whatever the data: an unknown option value, a target that exists."""

    exit_code = 2


class UnsupportedError(UsageError):
    """Raised when a store can't do what was asked; the message says what can be done instead."""


class MissingDependencyError(UsageError):
    """Raised when an optional package is missing; the message holds the exact install command."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'vecferry[{extra}]'")


class DataError(VecferryError):
    """Raised when input data are unreadable, damaged, or not what they claim to be."""

    exit_code = 3


class BadRowsError(DataError):
    """Raised when rows can't be used; holds their ids, and names the first of them."""

    def __init__(self, where: str, fault: str, ids: Iterable[object], cure: str) -> None:
        self.ids = list(ids)
        shown = ", ".join(str(i) for i in self.ids[:10])
        more = f" and {len(self.ids) - 10} more" if len(self.ids) > 10 else ""
        super().__init__(f"{where}: {len(self.ids)} {fault}: {shown}{more}. {cure}")


class IncompatibleError(VecferryError):
    """Raised when a map, its direction, a dimension or an embedding space don't belong together."""

    exit_code = 4


class StoppedError(VecferryError):
    """Raised when work stopped before its end in a state from which `--resume` continues."""

    exit_code = 5
