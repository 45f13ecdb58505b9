"""What people are shown of a map is what its card holds: after a fit, by `inspect`, in its folder, and as JSON."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from vecferry.cli import cli
from vecferry.demo import write_store
from vecferry.errors import UsageError
from vecferry.linear import Card, LinearMap, Side
from vecferry.mapcard import brief, describe, page

DATA = Path(str(files("vecferry") / "data"))
NAMED = ("chosen", "ridge", "procrustes")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("stores")
    documents = pq.read_table(DATA / "documents.parquet").slice(0, 800)
    ids = documents["id"].combine_chunks()
    uris = [f"parquet:{folder / name}" for name in ("old", "encoded")]
    for uri, column, space in zip(uris, ("e5", "minilm"), ("old model", "new model"), strict=True):
        write_store(uri, ids, documents[column], space)
    return ["--source", uris[0], "--target", uris[1], "--effort", "0"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def lines(text: str) -> dict[str, str]:
    return {name.strip(): value for name, _, value in (line.partition("  ") for line in text.splitlines())}


def test_a_fit_says_in_a_few_lines_what_its_card_holds(stores: list[str], tmp_path: Path) -> None:
    done = run("fit", *stores, "-o", tmp_path / "map")
    assert done.exit_code == 0, done.output
    card = json.loads((tmp_path / "map" / "card.json").read_text(encoding="utf-8"))
    assert len(done.stdout.splitlines()) <= 12
    shown = lines(done.stdout)
    assert shown["from"].strip() == "old model, 384 dimensions"
    assert shown["to"].strip() == "new model, 384 dimensions, ranked by cosine"
    documents = card["measured"]["documents"]
    assert card["pairs"] + documents == 800
    assert shown["pairs"].strip() == f"{card['pairs']} fitted on, {documents} held out, 0 rows skipped"
    judged = {c["name"]: c["agreement@10"] for c in card["parameters"]["candidates"] if c["name"]}
    for name, value in judged.items():
        assert f"{value:.3f}" in shown["leave-one-out"], name
    assert f"{card['measured']['doc-agreement@10']:.4g} " in shown["held out"]
    doubled = card["measured"]["learning_curve"]["doubled"]
    interval = f"{doubled['value']:.3f} [{doubled['low']:.3f}, {doubled['high']:.3f}]"
    assert f"twice as many ({2 * card['pairs']:,}) would give doc-agreement@10 of about {interval}" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("warning: ")] == [
        f"warning: {warning}" for warning in card["warnings"]
    ]
    assert f"written to {tmp_path / 'map'}" in done.stdout
    assert f"next: vecferry migrate {stores[1]} NEW_INDEX --map {tmp_path / 'map'} --dry-run" in done.stderr


def test_json_of_a_fit_and_of_its_inspection_is_the_whole_card(stores: list[str], tmp_path: Path) -> None:
    done = run("fit", *stores, "-o", tmp_path / "map", "--json")
    card = json.loads((tmp_path / "map" / "card.json").read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == {"kind": "map"} | {k: v for k, v in card.items() if k != "format"}
    assert run("inspect", tmp_path / "map", "--json").stdout == done.stdout


def test_inspect_says_that_it_is_a_map_and_shows_the_best_candidates(stores: list[str], tmp_path: Path) -> None:
    run("fit", *stores, "-o", tmp_path / "map")
    shown = run("inspect", tmp_path / "map").stdout
    first = shown.splitlines()[:3]
    assert first[0].split(maxsplit=1) == [
        "map",
        "carries old document vectors into the new space (direction 'document')",
    ]
    assert first[1].split(maxsplit=1) == ["from", "old model, 384 dimensions"]
    assert first[2].split(maxsplit=1)[1].startswith("new model, 384 dimensions")
    card = json.loads((tmp_path / "map" / "card.json").read_text(encoding="utf-8"))
    assert card["sha256"] in shown
    table = shown.partition("maps that were tried")[2].splitlines()[2:]
    tried = card["parameters"]["candidates"]
    best = sorted((c["agreement@10"] for c in tried), reverse=True)[:10]
    column = shown.partition("maps that were tried")[2].splitlines()[1].split().index("agreement@10")
    assert [float(row.split()[column - (not row.startswith(NAMED))]) for row in table[:-1]] == pytest.approx(
        best, abs=1e-4
    )
    assert table[-1] == f"and {len(tried) - 10} others, which did no better: all of them with --json"
    assert (tmp_path / "map" / "README.md").read_text(encoding="utf-8").count("\n| ") >= len(tried)
    refused = run("inspect", tmp_path / "map", "--scan")
    assert (refused.exit_code, "leave out --scan" in refused.stderr) == (2, True)


def by_hand(**given: Any) -> LinearMap:
    sides = Side(3, "m", "query: "), Side(2)
    return LinearMap(np.ones((3, 2)), card=Card(*sides, "ridge", version="1", **given))


def test_a_map_of_queries_and_a_solver_by_name() -> None:
    m = by_hand(direction="query", metric="ip", pairs=1234, parameters={"lambda": 0.25, "skipped": {"a: b": 3}})
    shown = lines(brief(m))
    assert "new query vectors into the old space" in shown["map"]
    assert shown["from"].strip() == "m with the prompt 'query: ', 3 dimensions"
    assert shown["to"].strip() == "an unnamed model, 2 dimensions, ranked by ip"
    assert shown["pairs"].strip() == "1,234 fitted on, 3 rows skipped"
    assert shown["solver"].strip() == "ridge, lambda 0.25"
    assert "held out" not in shown
    assert "no bias" in describe(m)
    assert page(m).startswith("# m → an unnamed model\n")


def test_that_nothing_was_better_is_said() -> None:
    setting = {"centred": False, "penalty": 1.0, "unshrunk": 0.0, "turned": 1.0, "tilt": 0.0, "mean": 1.0}
    scores = {"": 0.31, "procrustes": 0.3, "ridge": 0.2}
    m = by_hand(
        parameters={
            "chosen": setting | {"lambda": 0.5, "rank": None},
            "judged": {"by": "queries", "queries": 100, "pairs": 700},
            "gain": {"over": "procrustes", "agreement@10": 0.01, "standard_error": 0.02},
            "candidates": [{"name": name, "agreement@10": score} | setting for name, score in scores.items()],
        }
    )
    shown = lines(brief(m))
    assert shown["solver"].strip() == "ridge: procrustes"
    assert shown["leave-one-out"].strip() == (
        "agreement@10: ridge 0.200, procrustes 0.300; nothing beats procrustes by a standard error"
    )


def test_what_has_no_card_is_refused() -> None:
    with pytest.raises(UsageError, match="without a card"):
        describe(LinearMap(np.ones((3, 2))))
