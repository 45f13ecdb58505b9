"""The files beside a verdict, from the command line: written whole, never left over from another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from vecferry.cli import cli
from vecferry.errors import UsageError
from vecferry.holdout import Holdout
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapfile import seal
from vecferry.outputs import prepare_outputs

N, Q, D = 600, 60, 12


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet index with a payload column, and a map with a hold-out of all its rows."""
    folder = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    target = rng.standard_normal((N, D)).astype(np.float32)
    source = target + 0.2 * rng.standard_normal((N, D)).astype(np.float32)
    queries = target[:Q] + 0.1 * rng.standard_normal((Q, D)).astype(np.float32)
    ids = pa.array([f"d{i}" for i in range(N)])
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(source.ravel()), D)
    topics = pa.array([["a", "b"][i % 2] for i in range(N)])
    pq.write_table(pa.table({"id": ids, "vector": vectors, "topic": topics}), folder / "old.parquet")
    held = Holdout(ids, source, target, pa.array([f"q{i}" for i in range(Q)]), queries)
    card = Card(Side(D, "old"), Side(D, "new"), "by hand")
    seal(LinearMap(np.eye(D), post="l2", card=card, holdout=held)).save(folder / "map")
    return folder


def migrate(world: Path, target: Path, *options: object) -> tuple[int, str, str]:
    return run("migrate", world / "old.parquet", f"parquet:{target}", "--map", world / "map", *options)


def cases(path: Path) -> dict[str, str]:
    found = ElementTree.parse(path).iter("testcase")
    return {case.get("name", ""): case[0].get("type", "") if len(case) else "pass" for case in found}


def test_a_migration_by_slices_writes_its_verdict_as_files(world: Path, tmp_path: Path) -> None:
    gate = "agreement@10>=0.2 and worst-slice.agreement@10>=0.95"
    files = ["--junit", tmp_path / "junit.xml", "--html", tmp_path / "report.html", "--json"]
    code, out, _ = migrate(world, tmp_path / "new", "--gate", gate, "--slice", "topic", *files)
    report = json.loads(out)
    assert code == 1
    assert [row["name"] for row in report["evaluation"]["slices"]["rows"]] == ["a", "b"]
    assert cases(tmp_path / "junit.xml") == {"agreement@10>=0.2": "pass", "worst-slice.agreement@10>=0.95": "fail"}
    assert "By topic" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "new").exists()


def test_check_compares_with_the_report_that_the_last_run_printed(world: Path, tmp_path: Path) -> None:
    assert migrate(world, tmp_path / "new")[0] == 0
    check = ["check", tmp_path / "new", "--map", world / "map"]
    code, out, _ = run(*check, "--slice", "topic", "--json")
    assert code == 0
    (tmp_path / "report.json").write_text(out)
    again = ["--baseline", tmp_path / "report.json", "--max-drop", 0.001, "--junit", tmp_path / "junit.xml"]
    code, out, _ = run(*check, *again)
    assert code == 0
    assert "gate drop.agreement@10<=0.001: PASS" in out
    assert cases(tmp_path / "junit.xml") == {"drop.agreement@10<=0.001": "pass"}


def test_no_verdict_of_an_earlier_run_outlives_one_that_stops(world: Path, tmp_path: Path) -> None:
    for name, text in (("junit.xml", "<?xml?><testsuites>passed"), ("report.html", "<!DOCTYPE html>passed")):
        (tmp_path / name).write_text(text)
    files = ["--junit", tmp_path / "junit.xml", "--html", tmp_path / "report.html"]
    code, _, err = migrate(world, tmp_path / "new", "--gate", "nonsense", *files)
    assert (code, "can't read 'nonsense'" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_written_is_refused_before_the_work(
    world: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    code, _, err = migrate(world, tmp_path / "new", "--junit", tmp_path / "missing" / "junit.xml")
    assert (code, "there is no folder" in err) == (2, True)
    code, _, err = migrate(world, tmp_path / "new", "--html", tmp_path)
    assert (code, "is a folder: name a file" in err) == (2, True)
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(UsageError, match="jinja2"):
        prepare_outputs(None, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_column_that_nobody_has_is_refused_before_the_work(world: Path, tmp_path: Path) -> None:
    code, _, err = migrate(world, tmp_path / "new", "--slice", "colour")
    assert (code, "no payload column 'colour'" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_verdict_is_never_deleted(world: Path, tmp_path: Path) -> None:
    index, page, link = tmp_path / "live.faiss", tmp_path / "page.html", tmp_path / "link"
    index.write_bytes(b"IxFI")
    page.write_text("<!DOCTYPE html>")
    link.symlink_to(page)
    for option, path in (("--junit", index), ("--html", index), ("--junit", page), ("--html", link)):
        code, _, err = run("check", world / "old.parquet", "--map", world / "map", option, path)
        assert (code, f"{path} exists and is no" in err) == (2, True)
    code, _, err = run("check", world / "old.parquet", "--map", world / "map", "--junit", page, "--html", page)
    assert (code, "name two files" in err) == (2, True)
    assert (index.read_bytes(), page.read_text(), link.is_symlink()) == (b"IxFI", "<!DOCTYPE html>", True)
