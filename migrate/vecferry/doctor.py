"""The verb `doctor`: look at the packages and the machine, and say of each fault how it is cured.

What may crash (a package that is built for another numpy, or over which another was installed) is imported in a child.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from vecferry import machine
from vecferry.diagnosis import Diagnosis, Finding

PATIENCE = 120
"""Seconds that an import may take: torch's are many on a cold disk."""
TRIED = {
    "numpy": """
        import numpy
        from threadpoolctl import threadpool_info
        built = numpy.show_config(mode="dicts")
        blas = [f"BLAS {b['internal_api']} {b['version']} on {b['num_threads']} threads" for b in threadpool_info()]
        return numpy.__version__, [", ".join(built["SIMD Extensions"].get("found", [])), *blas]
    """,
    "pyarrow": """
        import pyarrow, pyarrow.parquet
        return pyarrow.__version__, []
    """,
    "safetensors": """
        import safetensors, safetensors.numpy
        return safetensors.__version__, []
    """,
    "faiss": """
        import faiss
        gpus = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else None
        shown = "for CPUs only" if gpus is None else f"finds {gpus} GPUs"
        return faiss.__version__, [faiss.get_compile_options().strip(), shown]
    """,
    "torch": """
        import torch
        shown = f"finds {torch.cuda.device_count()} GPUs" if torch.version.cuda else "for CPUs only"
        return torch.__version__, [torch.backends.cpu.get_cpu_capability(), shown]
    """,
}
"""How each compiled package is tried: its version, and what else there is to say of it."""
OTHER_NUMPY = re.compile(
    r"multiarray failed to import|_ARRAY_API not found|compiled using NumPy|dtype size changed|"
    r"compiled against (?:ABI|API) version"
)
"""What numpy and Cython say where a package was built for another numpy."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """Hold a package that vecferry can use, the least version, and the extra that brings it ("" where it is needed)."""

    package: str
    least: str
    extra: str

    @property
    def module(self) -> str:
        """Return the name it is imported by."""
        return "faiss" if self.package.startswith("faiss-") else self.package.replace("-", "_")


def doctor(folder: str | Path = ".") -> Diagnosis:
    """Look at everything that a migration into `folder` depends on but its data: packages, adapters, the machine."""
    gpu = _guarded("gpu", machine.gpu)
    found = [
        *_guarded("packages", lambda: packages(on_gpu=gpu[0].value != "none found")),
        *_guarded("adapters", adapters),
        *_guarded("system", machine.system),
        *_guarded("processor", machine.processor),
        *_guarded("cores", machine.cores),
        *_guarded("memory", machine.memory),
        *gpu,
        *_guarded("folder", lambda: machine.disk("folder", Path(folder).resolve())),
        *_guarded("temporary folder", lambda: machine.disk("temporary folder", Path(tempfile.gettempdir()))),
    ]
    return Diagnosis(tuple(found))


def _guarded(name: str, look: Callable[[], Finding | Iterator[Finding]]) -> list[Finding]:
    """Return findings; whatever goes wrong while looking is a finding too."""
    try:
        found = look()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:
        return [Finding(name, "unknown", f"could not be looked at: {error!r}", "please report it")]


def packages(*, on_gpu: bool) -> Iterator[Finding]:
    """Look at the packages that vecferry needs and can use, by what vecferry itself says of them."""
    yield Finding("python", f"{sys.version.split()[0]}, {sys.executable}")
    try:
        yield Finding("vecferry", version("vecferry"))
        wanted = list(requirements())
    except PackageNotFoundError:
        fault = "not installed, so it finds no adapters"
        yield Finding("vecferry", "a folder of sources", fault, "pip install 'vecferry[cpu]'", stops=True)
        return
    installed: dict[str, str] = {}
    for found in distributions():
        if found.name:
            installed.setdefault(_normal(found.name), found.version)  # of two copies the first on the path counts
    wheels = sorted(name for name in installed if re.fullmatch(r"faiss|faiss-(cpu|gpu).*", name))
    for one in wanted:
        if one.module != "faiss":
            yield _package(one, installed.get(_normal(one.package)), on_gpu=on_gpu)
        else:
            yield _faiss(one, {name: installed[name] for name in wheels}, on_gpu=on_gpu)


def requirements() -> Iterator[Requirement]:
    """Yield what vecferry's own metadata ask for, each package once, by the extra that brings the fewest others.

    Of the two kinds of FAISS that for CPUs.
    """
    wanted: dict[str, list[Requirement]] = {}
    for text in requires("vecferry") or []:
        found = re.match(
            r"([\w.-]+)(?:\[[^]]*\])?\s*(?:>=\s*([\w.]+))?[^;]*(?:;.*extra\s*==\s*['\"]([\w-]+)['\"])?", text
        )
        package, least, extra = found.groups(default="") if found else ("", "", "")
        if package and package != "vecferry" and extra not in ("dev", "all", "gpu"):
            wanted.setdefault(package, []).append(Requirement(package, least, extra))
    brought = Counter(one.extra for several in wanted.values() for one in several if one.extra)
    for several in wanted.values():
        yield min(several, key=lambda one: brought[one.extra])


def _faiss(wanted: Requirement, wheels: dict[str, str], *, on_gpu: bool) -> Finding:
    """Look at FAISS, which several packages bring, each over the others' files."""
    if len(wheels) > 1:
        shown = " and ".join(f"{name} {number}" for name, number in wheels.items())
        cure = f"pip uninstall -y {' '.join(wheels)} && pip install 'vecferry[{'gpu' if on_gpu else 'cpu'}]'"
        return Finding("faiss", shown, "installed over one another, their files are mixed", cure, stops=True)
    name = next(iter(wheels), wanted.package)
    return _package(replace(wanted, package=name), wheels.get(name), on_gpu=on_gpu)


def _package(wanted: Requirement, installed: str | None, *, on_gpu: bool) -> Finding:
    """Look at one package; import it where it is compiled."""
    name, module = wanted.package, wanted.module
    source = f"vecferry[{wanted.extra}]" if wanted.extra else f"{name}>={wanted.least}"
    answer = ask(TRIED[module]) if module in TRIED else None
    absent = installed is None and (answer is None or answer.absent(module))
    if absent and wanted.extra:
        return Finding(name, f"not installed; pip install '{source}' brings it")
    if absent:
        return Finding(name, "not installed", "vecferry needs it", f"pip install '{source}'", stops=True)
    if answer is not None and answer.fault:
        return _broken(name, installed or "unknown version", answer)
    number = str(answer.value[0]) if answer is not None else str(installed)
    value = ", ".join([number, *(text for text in answer.value[1] if text)]) if answer is not None else number
    if _numbers(number) < _numbers(wanted.least):
        fault = f"{number} is older than {wanted.least}, which vecferry needs"
        return Finding(name, value, fault, f"pip install --upgrade '{name}>={wanted.least}'", stops=True)
    if on_gpu and "for CPUs only" in value:
        fault = "there is a GPU, which this package can't use"
        cures = {
            "faiss": f"pip uninstall -y {name} && pip install 'vecferry[gpu]'",
            "torch": "pip install --force-reinstall torch",
        }
        return Finding(name, value, fault, cures[module])
    return Finding(name, value)


def _broken(name: str, installed: str, answer: Answer) -> Finding:
    """Say why an installed package can't be imported."""
    cure = f"pip install --upgrade --force-reinstall --no-cache-dir {name}"
    if OTHER_NUMPY.search(answer.said):
        have = next((d.version for d in distributions(name="numpy")), "none")
        return Finding(name, installed, f"built for another numpy than {have}, which is installed", cure, stops=True)
    return Finding(name, installed, f"can't be imported: {answer.fault}", cure, stops=True)


def adapters() -> Finding:
    """Look at the adapters that are installed."""
    answer = ask("from vecferry.store import adapters\nreturn sorted(adapters())")
    if answer.fault:
        twice = "two adapters" in answer.fault
        cure = "pip uninstall one of the two" if twice else "pip install --force-reinstall 'vecferry[cpu]'"
        return Finding("adapters", "unknown", answer.fault, cure, stops=True)
    if not answer.value:
        return Finding("adapters", "none", "no stores can be read", "pip install 'vecferry[cpu]'", stops=True)
    return Finding("adapters", ", ".join(answer.value))


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold what a child process returned; or why it didn't, and all it said."""

    value: Any = None
    fault: str = ""
    said: str = ""

    def absent(self, module: str) -> bool:
        """Say whether it failed because there is no such module."""
        return f"No module named {module!r}" in self.fault


def ask(body: str) -> Answer:
    """Run the body of a function in a child process; return what it returns."""
    function = "def ask():\n" + indent(dedent(body).strip(), "    ")
    code = f"import json, sys\n{function}\nsys.stdout.write('\\n' + json.dumps(ask()))"
    try:  # -P: a file numpy.py in the current folder is no numpy
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(fault=f"it took more than {PATIENCE} s")
    if done.returncode == 0:
        return Answer(json.loads(done.stdout.splitlines()[-1]))
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    crashed = f"the process ended by signal {-done.returncode}; " if done.returncode < 0 else ""
    return Answer(fault=crashed + last, said=done.stderr)


def _normal(name: str) -> str:
    """Return a package's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that a version starts with, to compare it by."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in found[0].split(".")) if found else ()
