"""The commands of the README and the recipe of docs/ci.md, run as they stand on what the demo leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from vecferry import Report
from vecferry.cli import cli
from vecferry.demo import DATA, NEW, write_store
from vecferry.store import open_reader

ROOT = Path(__file__).parents[1]
(SNIPPET,) = re.findall(r"```yaml\n(.*?)\n```\n\n-", (ROOT / "docs" / "ci.md").read_text(encoding="utf-8"), re.DOTALL)
JOB: dict[str, Any] = yaml.safe_load(SNIPPET)["jobs"]["gate"]
STEPS = {step["name"]: step for step in JOB["steps"] if "run" in step}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ci") / "demo"
    done = CliRunner().invoke(cli, ["demo", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert done.stdout == (out / "report.json").read_text(encoding="utf-8")
    (out / "said.txt").write_text(done.stderr, encoding="utf-8")
    return out


def test_the_demo_says_the_verdict_and_its_meaning_before_the_tables(folder: Path) -> None:
    said = " ".join((folder / "said.txt").read_text(encoding="utf-8").split())
    report = Report.load(folder / "report.json")
    assert report.evaluation is not None
    ways = ("as indexed", "status quo", "naive swap")
    cells = [report.evaluation.cell(row, "agreement", 10) for row in ways]
    assert re.search(r"PASS: gate agreement@10>=0.35; faiss:\S+new.faiss is published\.", said)
    found = re.findall(r"finds? (\d\.\d) \(among|old queries (\d\.\d),|new model's queries (\d\.\d):", said)
    assert ["".join(groups) for groups in found] == [f"{10 * cell.value:.1f}" for cell in cells if cell and cell.value]
    told = report.evaluation.cell("as indexed", "agreement", 10, 4500)
    assert told is not None
    assert told.low is not None
    assert told.high is not None
    numbers = re.findall(r"was foretold, (0\.\d+) \[(0\.\d+), (0\.\d+)\].* it is (0\.\d+)\.", said)[0]
    assert list(numbers[:3]) == [f"{x:.3f}" for x in (told.value, told.low, told.high)]
    assert told.low < float(numbers[3]) < told.high  # the truth, which a real job doesn't have
    whole = re.findall(r"nDCG@10 is (0\.\d+) translated, (0\.\d+) re-embedded\.", said)[0]
    table = said.partition("ndcg@10 among 4,500 documents")[2]
    assert list(whole) == [re.findall(rf"{row} +(0\.\d+) ", table)[0] for row in ("as indexed", "re-embedded")]
    assert said.index("PASS") < said.index("no more.") < said.index("interval")


def run(folder: Path, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does: a script for bash -e, with the job's variables."""
    script = folder / "step.sh"
    script.write_text(STEPS[name]["run"], encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    summary = {"GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    environment = os.environ | JOB["env"] | {"PATH": path} | summary | variables
    return subprocess.run(
        ["bash", "-e", str(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def verdicts(folder: Path) -> dict[str | None, str | None]:
    cases = ElementTree.parse(folder / "verdict.xml").iter("testcase")
    return {case.get("name"): case[0].get("type") if len(case) else "pass" for case in cases}


def sections() -> dict[str, str]:
    parts = re.split(r"(?m)^## ", (ROOT / "README.md").read_text(encoding="utf-8"))
    return {part.partition("\n")[0]: part for part in parts}


def shell(text: str) -> str:
    """Return the commands of all blocks marked as shell, indented ones too."""
    blocks = re.findall(r"(?ms)^( *)```sh\n(.*?)\n *```$", text)
    return "set -eo pipefail\n" + "\n".join(textwrap.dedent(block) for _, block in blocks)


def bash(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_readme_shows_what_the_demo_says(folder: Path) -> None:
    (excerpt,) = re.findall(
        r"<!-- said by the demo -->\n```text\n(.*?)\n```", sections()["What the demo shows"], re.DOTALL
    )
    said = (folder / "said.txt").read_text(encoding="utf-8").replace(str(folder), "vecferry-demo")
    assert " ".join(excerpt.split()) in " ".join(said.split())


@pytest.fixture(scope="module")
def job(folder: Path) -> tuple[str, subprocess.CompletedProcess[str]]:
    """Run the README's main commands in the demo's folder; the others go on from what these leave."""
    script = shell(sections()["The job, in four commands"])
    return script, bash(folder, script)


def test_the_job_of_the_readme_runs_as_it_stands(
    folder: Path, job: tuple[str, subprocess.CompletedProcess[str]]
) -> None:
    script, done = job
    assert [line.split()[1] for line in script.splitlines() if line.startswith("vecferry")] == [
        "sample",
        "fit",
        "migrate",
        "migrate",
    ]
    assert done.returncode == 0, done.stderr
    assert (folder / "ids.parquet").read_bytes() == (folder / "sample.parquet").read_bytes()
    assert (folder / "my-new.faiss").read_bytes() == (folder / "new.faiss").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_the_other_commands_of_the_readme_run_as_they_stand(folder: Path) -> None:
    parts = sections()
    for name in ("Cascade", "All commands"):
        done = bash(folder, shell(parts[name]))
        assert done.returncode == 0, done.stderr
        (code,) = re.findall(r"```python\n(.*?)\n```", parts[name], re.DOTALL)
        ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith(" True\n")


@pytest.mark.slow
def test_filters_are_made_and_used_as_the_readme_says(folder: Path) -> None:
    done = bash(folder, shell(sections()["Fewer dimensions"]))
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("job")
def test_texts_are_encoded_as_the_readme_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the README with a new model that looks its vectors up: the same as those of the demo's `encoded`."""
    documents = pq.read_table(DATA / "documents.parquet")
    known = dict(zip(documents["text"].to_pylist(), documents["minilm"].to_pylist(), strict=True))

    class Model:
        def encode(self, texts: list[str]) -> Any:
            return np.array([known[text] for text in texts], np.float32)

    monkeypatch.chdir(folder)
    pq.write_table(documents.select(["id", "text"]), "docs.parquet")
    (code,) = re.findall(r"```python\n(.*?)\n```", sections()["Your own data"], re.DOTALL)
    exec(code, {"new_model": Model()})
    with open_reader("encoded.parquet") as made, open_reader("encoded") as theirs:
        ids = next(theirs.ids(10_000))
        np.testing.assert_array_equal(made.take(ids).vectors, theirs.take(ids).vectors)


def test_the_recipe_installs_extras_that_exist() -> None:
    (extras,) = re.findall(r"vecferry\[(.*)\]", STEPS["Install"]["run"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert list(STEPS) == ["Install", "Gate", "Summary"]


def test_the_same_index_passes_and_leaves_its_files(folder: Path) -> None:
    done = run(folder, "Gate")
    assert done.returncode == 0, done.stderr
    names = ["agreement@10>=0.35", "retention.ndcg@10>=0.6", "drop.agreement@10<=0.01", "drop.ndcg@10<=0.01"]
    assert verdicts(folder) == dict.fromkeys(names, "pass")
    assert "<!DOCTYPE html>" in (folder / "report.html").read_text(encoding="utf-8")
    assert run(folder, "Summary").returncode == 0
    assert "PASS\n```\n" in (folder / "summary.md").read_text(encoding="utf-8")


def test_a_worse_index_is_stopped_by_the_baseline_alone(folder: Path) -> None:
    with open_reader(str(folder / "new.faiss")) as reader:
        batches = list(reader.read(10_000))
    vectors = np.concatenate([batch.vectors for batch in batches])
    noisy = vectors + 0.012 * np.random.default_rng(0).standard_normal(vectors.shape).astype(np.float32)
    column = pa.chunked_array([pa.FixedSizeListArray.from_arrays(pa.array(noisy.ravel()), noisy.shape[1])])
    write_store(f"faiss:{folder / 'worse.faiss'}", pa.concat_arrays([b.ids for b in batches]), column, NEW)
    done = run(folder, "Gate", INDEX="worse.faiss")
    assert done.returncode == 1, done.stderr
    found = verdicts(folder)
    assert found["agreement@10>=0.35"] == "pass"
    assert found["drop.agreement@10<=0.01"] == "fail"
    assert run(folder, "Summary").returncode == 0


def test_an_index_of_the_old_model_leaves_no_verdict(folder: Path) -> None:
    done = run(folder, "Gate", INDEX="old.faiss")
    assert done.returncode == 4
    assert "is in the space" in done.stderr
    assert not (folder / "verdict.xml").exists()
    assert not (folder / "report.html").exists()
