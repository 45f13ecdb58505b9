"""Let pytest explain failing assertions of the adapter suite too; a store in memory for tests of what reads stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings

from vecferry.batch import VectorBatch
from vecferry.errors import UnsupportedError
from vecferry.store import StoreInfo, find, require_all

pytest.register_assert_rewrite("vecferry.testing")
settings.register_profile("steady", deadline=None, derandomize=True)  # the same examples on every machine, fast or slow
settings.load_profile("steady")


class Rows:
    """Read rows in memory: a whole Reader, with the faults that a test wants in it."""

    def __init__(
        self,
        ids: Any,
        vectors: Any,
        payload: pa.Table | None = None,
        *,
        uri: str = "memory",
        **info: Any,
    ) -> None:
        vectors = np.ascontiguousarray(vectors, np.float32)
        numbered = ids is None
        ids = pa.array(np.arange(len(vectors)) if numbered else ids)
        self.rows = VectorBatch(ids, vectors, payload)
        fields = {"kind": "memory", "uri": uri, "count": len(vectors), "dim": vectors.shape[1]}
        fields |= {
            "id_type": None if numbered else ids.type,
            "payload": payload.schema if payload is not None else None,
        }
        self.info = StoreInfo(**(fields | info))

    def read(self, batch_size: int, after: Any = None) -> Iterator[VectorBatch]:
        for start in range(after or 0, len(self.rows), batch_size):
            part = self.rows.take(np.arange(start, min(start + batch_size, len(self.rows))))
            yield replace(part, cursor=start + len(part))

    def ids(self, batch_size: int) -> Iterator[pa.Array]:
        for start in range(0, len(self.rows), batch_size):
            yield self.rows.ids.slice(start, batch_size)

    def take(self, ids: pa.Array) -> VectorBatch:
        places = find(self, ids)
        require_all(self.info.uri, ids, places)
        return self.rows.take(places)

    def search(self, queries: Any, k: int, among: Any = None) -> Any:
        raise UnsupportedError("rows in memory have no index")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def rows() -> type[Rows]:
    """Return the class of stores in memory."""
    return Rows
