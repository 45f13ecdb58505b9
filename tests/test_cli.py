"""The command line is a skin: commands have help, errors become messages and exit codes, --json stands alone."""

import json
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import vecferry
from vecferry.cli import cli
from vecferry.linear import Card, LinearMap, Side

README = Path(__file__).parents[1] / "README.md"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_and_option_says_what_it_does(name: str) -> None:
    command = cli.commands[name]
    assert command.help
    assert command.help.strip().split("\n")[0].endswith(".") or "," in command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"
    assert f"vecferry {name}" in README.read_text(encoding="utf-8"), f"the README doesn't show `vecferry {name}`"


def test_usage_errors_exit_2(tmp_path: Path) -> None:
    assert run("migrate")[0] == 2
    assert run("fit", "--solver", "magic")[0] == 2
    code, out, err = run("inspect", tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert "no such file or folder" in err


def test_bad_data_exits_3(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"neither a store nor anything else" * 10)
    code, out, err = run("inspect", tmp_path / "junk")
    assert (code, out) == (3, "")
    assert "not a store that any installed adapter knows (faiss, npy, parquet)" in err


@pytest.mark.case("4")
def test_an_incompatible_map_exits_4_with_both_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((5, 7), np.float32))
    LinearMap(np.ones((6, 4)), card=Card(Side(6), Side(4), "by hand")).save(tmp_path / "map")
    code, _, err = run("migrate", tmp_path / "x.npy", tmp_path / "y.npy", "--map", tmp_path / "map")
    assert code == 4
    assert "7 dimensions, the map takes 6" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["map", "x.npy"]


def test_json_stands_alone_on_stdout(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((50, 7), dtype=np.float32))
    code, out, err = run("inspect", tmp_path / "x.npy", "--scan", "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert (facts["count"], facts["dim"], facts["scan"]["bad"], facts["id_type"]) == (50, 7, 0, None)


def test_a_crash_is_not_taken_for_a_failed_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(vecferry, "inspect", broken)
    code, out, err = run("inspect", tmp_path)
    assert (code, out) == (70, "")
    assert "please report" in err


def test_the_installed_command_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "vecferry.cli"], capture_output=True, text=True, check=False)
    assert done.returncode == 0  # importing the module defines the commands and does nothing
    done = subprocess.run(
        [Path(sys.executable).with_name("vecferry"), "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"vecferry, version {vecferry.__version__}"
