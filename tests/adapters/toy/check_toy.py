"""The toy's own tests: what its author would write. Run by test_third_party.py where the toy is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import vecferry_toy

from vecferry import store
from vecferry.batch import VectorBatch
from vecferry.testing import AdapterSuite


class TestToy(AdapterSuite):
    kind = "toy"
    count = 300
    id_types = (pa.int64(), pa.string())
    no_payload = "a line holds an id and a vector"
    no_search = "a text file has no index"

    def make(self, folder: Path, rows: VectorBatch) -> str:
        head = {"toy": 1, "dim": self.dim, "ids": "int64", "metric": None, "space": None, "provenance": {}}
        lines = [head, *map(list, zip(rows.ids.to_pylist(), rows.vectors.tolist(), strict=True))]
        (folder / "source").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return f"toy:{folder / 'source'}"

    def target(self, folder: Path) -> str:
        return f"toy:{folder / 'target'}"


def test_it_came_in_by_the_public_door() -> None:
    assert store.adapters()["toy"].dist.name == "vecferry-toy"
    assert store.load("toy") is vecferry_toy
