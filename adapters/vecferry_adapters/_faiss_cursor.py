"""Walk over the bytes of a FAISS file, and refuse any length that doesn't fit what is left of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vecferry.errors import DataError

Bytes = NDArray[np.uint8]


class UnknownTypeError(Exception):
    """Raised for a part whose layout isn't known."""


@dataclass(frozen=True, slots=True)
class ListsFile:
    """Say what a file of inverted lists must be: its recorded name, its size."""

    name: str
    size: int


class Cursor:
    """Take values from a file, one after the other."""

    def __init__(self, data: Bytes, at: int, where: str) -> None:
        self.data, self.at, self.where = data, at, where
        self.lists_files: list[ListsFile] = []

    def damaged(self, fault: str) -> DataError:
        return DataError(f"{self.where} is damaged or cut short: {fault}, near byte {self.at}")

    def skip(self, size: int, what: str) -> int:
        """Pass over as many bytes; return where they start."""
        start, left = self.at, len(self.data) - self.at
        if size > left:
            raise self.damaged(f"{what} should take {size} bytes, {left} are left")
        self.at += size
        return start

    def take(self, form: str, what: str) -> tuple[int, ...]:
        """Read integers; floats among them may be passed over as the integers that they look like."""
        size = struct.calcsize("<" + form)
        start = self.skip(size, what)
        return struct.unpack("<" + form, self.data[start : start + size].tobytes())

    def kind(self, what: str) -> bytes:
        start = self.skip(4, what)
        return self.data[start : start + 4].tobytes()

    def vector(self, width: int, what: str, expected: int | None = None, unit: int = 1) -> tuple[int, int]:
        """Pass over a number of elements and the elements; return where these start, and how many there are.

        `unit` is for lengths that count groups of bytes.
        """
        (count,) = self.take("Q", f"the length of {what}")
        count *= unit
        self.equal(f"the length of {what}", count, expected)
        return self.skip(count * width, what), count

    def values(self, start: int, count: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        return np.frombuffer(self.data[start : start + count * np.dtype(dtype).itemsize].tobytes(), dtype)

    def equal(self, what: str, found: int, expected: int | None) -> None:
        if expected is not None and found != expected:
            raise self.damaged(f"{what} is {found}, {expected} would fit the rest of it")

    def between(self, what: str, found: int, least: int, most: int) -> None:
        if not least <= found <= most:
            raise self.damaged(f"{what} is {found}, which is not from {least} to {most}")
