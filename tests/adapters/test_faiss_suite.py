"""FAISS: the suite for the structures that people use most."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from vecferry.batch import VectorBatch
from vecferry.store import StoreInfo
from vecferry.testing import AdapterSuite

faiss = pytest.importorskip("faiss")


class FaissSuite(AdapterSuite):
    kind = "faiss"
    id_types = (pa.int64(), pa.int32(), pa.uint64())
    no_payload = "a FAISS file holds vectors and ids only"
    factory: ClassVar[str]
    made: ClassVar[str] = ""  # what `make` builds, where that differs from what the writer is told

    def make(self, folder: Path, rows: VectorBatch) -> str:
        index = faiss.index_factory(self.dim, self.made or self.factory, faiss.METRIC_L2)
        index.train(rows.vectors)
        index.add_with_ids(rows.vectors, rows.ids.to_numpy())
        faiss.write_index(index, str(folder / "source.data"))
        return f"faiss:{folder / 'source.data'}"

    def target(self, folder: Path) -> str:
        return f"faiss:{folder / 'target.index'}"

    def info(self, rows: VectorBatch, **changes: Any) -> StoreInfo:
        return dataclasses.replace(super().info(rows), **({"index": self.factory} | changes))


class Tame(FaissSuite):
    """Structures that have to be trained, on rows without the huge values that make codes useless."""

    def rows(self, n: int | None = None, kind: pa.DataType | None = None, seed: int = 0) -> VectorBatch:
        rows = super().rows(n, kind, seed)
        rows.vectors[np.abs(rows.vectors) > 1e6] = 2.0
        return rows

    def test_an_empty_store(self, tmp_path: Path) -> None:
        pytest.skip("there is nothing to train on")


class TestFlat(FaissSuite):
    factory = "Flat"
    made = "IDMap2,Flat"


class TestIdMap(FaissSuite):
    factory = "IDMap,Flat"

    def test_row_numbers_stay_row_numbers(self, tmp_path: Path) -> None:
        pytest.skip("an id map holds numbers as ids")


class TestInvertedFile(Tame):
    factory = "IVF8,Flat"

    def make(self, folder: Path, rows: VectorBatch) -> str:
        return super().make(folder, rows) + "?nprobe=8"

    def target(self, folder: Path) -> str:
        return f"faiss:{folder / 'target.index'}?nprobe=8"

    def test_row_numbers_stay_row_numbers(self, tmp_path: Path) -> None:
        pytest.skip("rows of an inverted file are read in another order, so their numbers are ids")


class TestScalarQuantizer(Tame):
    factory = "SQ8"
    made = "IDMap2,SQ8"
    inexact = "8 bits for an element"
    dtypes = ()

    def info(self, rows: VectorBatch, **changes: Any) -> StoreInfo:
        return super().info(rows, **({"dtype": "SQ8"} | changes))
