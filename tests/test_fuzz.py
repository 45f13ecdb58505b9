"""Thousands of damaged files: each is read right or refused by name; no crash, no hang, no traceback, no other rows."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fuzzing.campaign import campaign
from fuzzing.kinds import KINDS
from fuzzing.mutate import mutate

SHORT = {"faiss": 50, "faiss-probed": 6, "checkpoint": 30, "stage": 10}
LONG = {"faiss-probed": 120, "checkpoint": 500, "stage": 300}


def survive(kind: str, folder: Path, cases: range) -> None:
    counts = campaign(kind, folder, cases)
    assert not counts.failures, "\n\n".join(f"case {n}: {why}" for n, why in counts.failures.items())
    assert counts.inputs == len(cases) == counts.read + counts.refused
    assert counts.refused > len(cases) // 4  # or hardly anything was damaged
    assert counts.commands == len([n for n in cases if n % 5 == 0])


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_right_or_refused(kind: str, tmp_path: Path) -> None:
    survive(kind, tmp_path, range(SHORT.get(kind, 60)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_damaged_files(kind: str, tmp_path: Path) -> None:
    survive(kind, tmp_path, range(10_000, 10_000 + LONG.get(kind, 1500)))


@pytest.mark.parametrize(("kind", "case"), [("parquet", 10_193), ("parquet", 10_965)])
def test_what_was_once_found_stays_mended(kind: str, case: int, tmp_path: Path) -> None:
    """Lists of a negative number of elements, and names of columns that are no text."""
    survive(kind, tmp_path, range(case, case + 1))


def test_a_reader_that_dies_hangs_or_is_wrong_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign itself: a kind whose reader ends the process, never ends, or reads something else."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("fuzzing.campaign.SECONDS", 1.0)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "import fuzzing.kinds as kinds\n"
        "from dataclasses import replace\n"
        "def read(folder):\n"
        "    number = folder.name.rpartition('-')[2]\n"
        "    {'1': os.abort, '2': lambda: time.sleep(60), '3': lambda: 1 / 0}.get(number, lambda: None)()\n"
        "    return b'other' if number == '4' else b''\n"
        "kinds.KINDS['card'] = replace(kinds.KINDS['card'], read=read)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    counts = campaign("card", tmp_path / "work", range(1, 5))
    assert {n: why.split(":")[0] for n, why in counts.failures.items()} == {
        1: "crashed",
        2: "hung",
        3: "raised",
        4: "wrong",
    }
    assert (counts.inputs, counts.crashed, counts.hung) == (4, 3, 1)


@pytest.mark.parametrize("form", ["json", "parquet", "safetensors", "binary"])
def test_one_number_is_one_damage(form: str, tmp_path: Path) -> None:
    data = json.dumps({"a": [1, 2.5, None], "b": {"c": "text", "d": True}}).encode()
    assert all(
        mutate(data, random.Random(seed), form=form) == mutate(data, random.Random(seed), form=form)
        for seed in range(200)
    )
    assert len({mutate(data, random.Random(seed), form=form) for seed in range(200)}) > 100
