"""An adapter of somebody else: installed as a distribution of its own, found by its entry point, held to the suite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TOY = Path(__file__).parent / "toy"


@pytest.fixture(name="installed", scope="module")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the toy into a folder as pip would, from its pyproject.toml, but without a network or a build tool."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((TOY / "pyproject.toml").read_text())["project"]
    (info := folder / f"vecferry_toy-{project['version']}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for group, e in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    shutil.copy(TOY / "vecferry_toy.py", folder)
    return folder


def run(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def test_it_passes_the_suite(installed: Path, tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "pyproject.toml"
    options = ["-q", "-c", str(config), "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'toy'}"]
    done = run(installed, "-m", "pytest", *options, str(TOY / "check_toy.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 25, done.stdout


def test_a_store_of_it_is_read_like_any_other(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(
        '{"toy": 1, "dim": 2, "ids": "string", "metric": "l2", "space": null, "provenance": {}}\n["a", [1.5, 2]]\n'
    )
    code = (
        "import sys; from vecferry.store import open_reader; reader = open_reader(sys.argv[1]);"
        "batch = next(reader.read(9)); print(reader.info.kind, batch.ids.to_pylist(), batch.vectors.tolist())"
    )
    assert run(installed, "-c", code, str(tmp_path / "x")).stdout == "toy ['a'] [[1.5, 2.0]]\n"


def test_a_second_adapter_of_one_name_is_an_error(installed: Path, tmp_path: Path) -> None:
    (other := tmp_path / "rival-1.dist-info").mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1\n")
    (other / "entry_points.txt").write_text("[vecferry.adapters]\ntoy = rival_toy\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from vecferry.store import adapters; adapters()"
    assert "two adapters are named 'toy'" in run(installed, "-c", code).stderr
