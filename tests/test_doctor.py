"""What doctor says of broken environments: each is a real one, with real or invented packages, asked as users ask."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from importlib.metadata import distribution, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from vecferry import machine
from vecferry.cli import cli
from vecferry.diagnosis import Diagnosis, Finding

ROOT = Path(__file__).parents[1]
NEEDED = ("numpy", "pyarrow", "safetensors", "click", "tqdm", "threadpoolctl")
ABI = "numpy.core.multiarray failed to import (auto-generated because you didn't call 'numpy.import_array()')"


class Environment:
    """Hold a virtual environment of links to what vecferry needs, and of whatever a test puts there."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self.path = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")
        for name in NEEDED:
            spec = find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            module = Path(spec.origin)
            module = module.parent if module.name == "__init__.py" else module
            info = Path(str(distribution(name).locate_file("")))
            for path in [module, *info.glob(f"{name}.libs"), *info.glob(f"{name}-*.dist-info")]:
                (self.site / path.name).symlink_to(path)
        for source in ("migrate/vecferry", "adapters/vecferry_adapters"):
            (self.site / Path(source).name).symlink_to(ROOT / source)
        self.install("vecferry", version("vecferry"), requires("vecferry") or ())
        points = "[vecferry.adapters]\nfaiss = vecferry_adapters.faiss\nnpy = vecferry_adapters.numpy\n"
        (self.site / f"vecferry-{version('vecferry')}.dist-info/entry_points.txt").write_text(points)

    def install(self, name: str, number: str, needs: Any = (), module: str = "", code: str = "") -> None:
        """Put a package there as pip would: its metadata, and a module of some code."""
        info = self.site / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}", *(f"Requires-Dist: {n}" for n in needs)]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if module:
            (self.site / module).mkdir()
            (self.site / module / "__init__.py").write_text(code)

    def remove(self, pattern: str) -> None:
        """Take what a pattern matches away."""
        for path in self.site.glob(pattern):
            path.unlink()

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run vecferry there, and nothing of the environment around it."""
        command = [str(self.python), "-P", "-c", "from vecferry.cli import cli; cli()", *arguments]
        variables = {"PATH": f"{self.path}:/usr/bin:/bin", "HOME": "/nonexistent"}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=self.path, check=False)
        return done.returncode, done.stdout, done.stderr

    def doctor(self) -> tuple[int, dict[str, Any]]:
        """Return doctor's exit code and its findings by name."""
        code, out, err = self.run("doctor", "--json")
        assert err == ""
        told = json.loads(out)
        assert told["works"] == (code == 0)
        return code, {finding["name"]: finding for finding in told["findings"]}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def test_it_says_what_is_here() -> None:
    pytest.importorskip("faiss")
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    found = {f["name"]: f for f in json.loads(result.stdout)["findings"]}
    assert result.exit_code == 0, result.output
    import faiss

    for name in ("numpy", "pyarrow", "safetensors"):
        assert found[name]["value"].split(",")[0] == version(name)
    (wheel,) = (f for name, f in found.items() if name.startswith("faiss"))
    assert wheel["value"].startswith(f"{faiss.__version__}, {faiss.get_compile_options().strip()}, ")
    assert found["cores"]["value"].startswith(f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable")
    assert "faiss, npy, parquet" in found["adapters"]["value"]
    assert str(Path.cwd()) in found["folder"]["value"]
    shown = CliRunner().invoke(cli, ["doctor"]).stdout
    assert all(f["name"] in shown for f in found.values())
    assert "a migration can work here" in shown.splitlines()[-1]


def test_what_is_optional_may_be_missing_and_what_is_needed_not(environment: Environment) -> None:
    (environment.path / "numpy.py").write_text("raise ImportError('a file in the current folder is no package')")
    code, found = environment.doctor()
    assert code == 0
    assert found["faiss-cpu"]["value"] == "not installed; pip install 'vecferry[cpu]' brings it"
    assert found["torch"]["value"] == "not installed; pip install 'vecferry[torch]' brings it"
    assert found["adapters"]["value"] == "faiss, npy"
    environment.remove("pyarrow*")
    code, found = environment.doctor()
    assert (code, found["pyarrow"]["level"], found["pyarrow"]["fault"]) == (2, "stop", "vecferry needs it")
    assert found["pyarrow"]["cure"].startswith("pip install 'pyarrow>=")


@pytest.mark.parametrize("other", ["faiss-gpu", "faiss_gpu_cu12"])
@pytest.mark.case("35")
def test_two_faiss_wheels(environment: Environment, other: str) -> None:
    """Both import as faiss, so pip writes one's files over the other's."""
    environment.install("faiss-cpu", "1.15.1", module="faiss", code="")
    environment.install(other, "1.15.0")
    code, found = environment.doctor()
    name = other.replace("_", "-")
    assert (code, found["faiss"]["level"]) == (2, "stop")
    assert found["faiss"]["value"] == f"faiss-cpu 1.15.1 and {name} 1.15.0"
    assert found["faiss"]["cure"] == f"pip uninstall -y faiss-cpu {name} && pip install 'vecferry[cpu]'"


@pytest.mark.case("34")
def test_faiss_that_was_built_for_another_numpy(environment: Environment, tmp_path: Path) -> None:
    environment.install("faiss-cpu", "1.7.4", module="faiss", code=f"raise ImportError({ABI!r})")
    code, found = environment.doctor()
    assert (code, found["faiss-cpu"]["level"]) == (2, "stop")
    assert found["faiss-cpu"]["fault"] == f"built for another numpy than {np.__version__}, which is installed"
    assert found["faiss-cpu"]["cure"] == "pip install --upgrade --force-reinstall --no-cache-dir faiss-cpu"
    # who doesn't ask doctor is told to, and not that faiss is missing
    (tmp_path / "x.faiss").write_bytes(b"IxFI" + np.array([4, 0, 1 << 20, 1 << 20], np.int64).tobytes()[4:] + bytes(20))
    code, out, err = environment.run("inspect", f"faiss:{tmp_path / 'x.faiss'}")
    assert (code, out) == (2, "")
    assert "faiss is installed, but broken (numpy.core.multiarray failed to import" in err
    assert "vecferry doctor" in err


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "can't be imported: the process ended by signal 11",
        ),
        (
            "raise ImportError('libcudart.so.12: cannot open shared object')",
            "can't be imported: ImportError: libcudart",
        ),
        ("", "can't be imported: AttributeError"),
    ],
)
def test_a_package_that_cannot_be_imported_takes_nothing_with_it(
    environment: Environment, code: str, fault: str
) -> None:
    environment.install("faiss-cpu", "1.15.1", module="faiss", code=code)
    left, found = environment.doctor()
    assert (left, found["faiss-cpu"]["level"]) == (2, "stop")
    assert found["faiss-cpu"]["fault"].startswith(fault)
    assert found["numpy"]["level"] == found["folder"]["level"] == "ok"


def test_an_older_version_than_is_needed(environment: Environment) -> None:
    environment.remove("tqdm-*")
    environment.install("tqdm", "4.9.0")
    code, found = environment.doctor()
    assert (code, found["tqdm"]["level"]) == (2, "stop")
    assert found["tqdm"]["fault"] == "4.9.0 is older than 4.66, which vecferry needs"  # 9 < 66, though "9" > "66"
    assert found["tqdm"]["cure"] == "pip install --upgrade 'tqdm>=4.66'"


def test_two_adapters_of_one_name(environment: Environment) -> None:
    environment.install("other", "1.0")
    (environment.site / "other-1.0.dist-info/entry_points.txt").write_text("[vecferry.adapters]\nnpy = other.store\n")
    code, shown, _ = environment.run("doctor")
    assert code == 2
    assert "stop  adapters" in shown
    assert "two adapters are named 'npy'" in shown
    assert "cure: pip uninstall one of the two" in shown
    assert shown.splitlines()[-1] == "stops a migration: adapters"


def test_a_gpu_that_nothing_can_use_is_noted(environment: Environment) -> None:
    tool = environment.path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.86'\n")
    tool.chmod(0o755)
    options = "def get_compile_options(): return 'OPTIMIZE AVX2 '"
    environment.install("faiss-cpu", "1.15.1", module="faiss", code=f"__version__ = '1.15.1'\n{options}")
    code, found = environment.doctor()
    assert code == 0  # everything works without
    assert found["gpu"]["value"] == "NVIDIA H200, 143771 MiB, 570.86"
    assert found["faiss-cpu"]["value"] == "1.15.1, OPTIMIZE AVX2, for CPUs only"
    assert found["faiss-cpu"]["level"] == "note"
    assert found["faiss-cpu"]["cure"] == "pip uninstall -y faiss-cpu && pip install 'vecferry[gpu]'"
    tool.write_text("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n")
    code, found = environment.doctor()
    assert (code, found["gpu"]["level"]) == (0, "note")
    assert found["gpu"]["fault"] == "nvidia-smi failed: Driver/library version mismatch"


def test_without_installation_there_are_no_adapters(environment: Environment) -> None:
    for path in (environment.site / f"vecferry-{version('vecferry')}.dist-info").iterdir():
        path.unlink()
    path.parent.rmdir()
    code, found = environment.doctor()
    assert (code, found["vecferry"]["level"], found["adapters"]["level"]) == (2, "stop", "stop")


def system(root: Path, **files: str) -> Path:
    """Make files of /proc and /sys under a folder, `__` for a slash and `_dot_` for a dot in their names."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_vector_units(tmp_path: Path) -> None:
    new = system(tmp_path / "new", proc__cpuinfo="model name\t: Xeon 8481C\nflags\t\t: fpu avx2 avx512f amx_tile\n" * 2)
    assert machine.processor(new) == Finding("processor", "Xeon 8481C, AVX2 yes, AVX-512 yes, AMX yes")
    old = machine.processor(system(tmp_path / "old", proc__cpuinfo="model name\t: Atom\nflags\t\t: fpu sse2\n"))
    assert (old.value, old.level) == ("Atom, AVX2 no, AVX-512 no, AMX no", "note")
    arm = machine.processor(system(tmp_path / "arm", proc__cpuinfo="processor\t: 0\nFeatures\t: fp asimd\n"))
    assert arm.level == "ok"


@pytest.mark.parametrize(
    "files",
    [
        {"proc__self__cgroup": "0::/box\n", "sys__fs__cgroup__box__cpu_dot_max": "100000 100000\n"},
        {
            "proc__self__cgroup": "3:cpu,cpuacct:/box\n0::/\n",
            "sys__fs__cgroup__cpu__box__cpu_dot_cfs_quota_us": "150000\n",
            "sys__fs__cgroup__cpu__box__cpu_dot_cfs_period_us": "100000\n",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_a_quota_below_the_cores(files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    found = machine.cores(system(tmp_path, **files))
    assert found.level == "note"
    assert found.cure == "vecferry migrate --threads 1"


def test_more_threads_than_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = system(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_dot_max="max 100000\n")
    usable = len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", str(usable))
    assert machine.cores(unlimited).level == "ok"
    monkeypatch.setenv("OMP_NUM_THREADS", str(usable + 1))
    found = machine.cores(unlimited)
    assert (found.level, found.cure) == ("note", f"export OMP_NUM_THREADS={usable}")


def test_memory_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    gib, info = 1 << 30, "MemTotal:       33554432 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n"
    assert machine.memory(system(tmp_path / "a", proc__meminfo=info)) == Finding("memory", "16.0 of 32.0 GiB available")
    group = {
        "proc__self__cgroup": "0::/box\n",
        "sys__fs__cgroup__box__memory_dot_max": f"{2 * gib}\n",
        "sys__fs__cgroup__box__memory_dot_current": f"{2 * gib - 1000}\n",
    }
    found = machine.memory(system(tmp_path / "b", proc__meminfo=info, **group))
    assert (found.value, found.level) == ("16.0 of 32.0 GiB available, a control group allows 2.0 GiB", "note")
    assert found.fault.startswith("1,000 bytes are free")


def test_a_folder_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.disk("folder", Path("/proc"))
    assert (found.level, found.fault) == ("note", "0 bytes are free")
    monkeypatch.setattr(machine, "LITTLE", 0)
    assert machine.disk("folder", Path("/proc")).fault.startswith("files can't be made or linked: ")
    assert machine.disk("folder", tmp_path) == Finding("folder", machine.disk("folder", tmp_path).value)
    assert list(tmp_path.iterdir()) == []


def test_a_finding_of_each_level() -> None:
    ok, note, stop = Finding("a", "1"), Finding("b", "2", "odd", "do c"), Finding("c", "3", "bad", "do d", stops=True)
    assert [f.level for f in (ok, note, stop)] == ["ok", "note", "stop"]
    assert Diagnosis((ok, note)).exit_code == 0
    assert Diagnosis((ok, note)).table().splitlines()[-1] == "a migration can work here; to be noted: b"
    assert Diagnosis((ok, note, stop)).exit_code == 2
