"""What `vecferry doctor` finds out about the machine: system, processor, cores, memory, disks, GPU."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from vecferry.diagnosis import Finding

GIB = 1 << 30
LITTLE = GIB
"""Below so many free bytes, in memory or on a disk, little but a demonstration fits."""
VECTOR_UNITS = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_tile": "AMX"}
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def system() -> Finding:
    """Look at the operating system: targets are published by Linux's atomic renames."""
    value = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if not hasattr(ctypes.CDLL(None), "renameat2"):
        fault = "has no renameat2, by which a target is published in one step"
        return Finding("system", value, fault, "use Linux with glibc 2.28 or newer", stops=True)
    return Finding("system", value)


def processor(root: Path = Path("/")) -> Finding:
    """Look at the vector units, which decide how fast vectors are multiplied and searched."""
    text = (root / "proc/cpuinfo").read_text(encoding="utf-8")
    facts = dict(re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", text, re.MULTILINE))
    flags = facts.get("flags", "").split()
    units = [f"{name} {'yes' if flag in flags else 'no'}" for flag, name in VECTOR_UNITS.items()] if flags else []
    value = ", ".join([facts.get("model name", platform.machine()), *units])
    if flags and "avx2" not in flags:
        return Finding(
            "processor", value, "no AVX2: FAISS and numpy fall back to code several times slower", "run it elsewhere"
        )
    return Finding("processor", value)


def cores(root: Path = Path("/")) -> Finding:
    """Look at how many cores this process may use, by affinity and by its control group's quota."""
    usable, quota = len(os.sched_getaffinity(0)), _quota(root)
    value = f"{usable} of {os.cpu_count()} usable" + (f", quota {quota:g}" if quota is not None else "")
    most = usable if quota is None else max(1, min(usable, int(quota)))
    if most < usable:
        fault = f"a control group allows {quota:g} cores' time to {usable} threads, which then wait for one another"
        return Finding("cores", value, fault, f"vecferry migrate --threads {most}")
    for name in THREADS:
        given = os.environ.get(name, "")
        if given.isdigit() and int(given) > usable:
            fault = f"{name}={given} is more threads than usable cores"
            return Finding("cores", f"{value}, {name}={given}", fault, f"export {name}={usable}")
    return Finding("cores", ", ".join([value, *(f"{n}={os.environ[n]}" for n in THREADS if n in os.environ)]))


def memory(root: Path = Path("/")) -> Finding:
    """Look at the memory that is available here, which a control group may limit further."""
    text = (root / "proc/meminfo").read_text(encoding="utf-8")
    facts = {name: 1024 * int(kb) for name, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    free = facts["MemAvailable"]
    value = f"{free / GIB:.1f} of {facts['MemTotal'] / GIB:.1f} GiB available"
    limit = _number(root, "memory", "memory.max", "memory.limit_in_bytes")
    used = _number(root, "memory", "memory.current", "memory.usage_in_bytes")
    if limit is not None and used is not None and limit < facts["MemTotal"]:
        free = min(free, max(0, limit - used))
        value += f", a control group allows {limit / GIB:.1f} GiB"
    if free < LITTLE:
        fault = f"{free:,} bytes are free: an index that FAISS builds in memory has to fit"
        return Finding("memory", value, fault, "see what a migration takes with --dry-run; --index Flat takes least")
    return Finding("memory", value)


def disk(name: str, folder: Path) -> Finding:
    """Look at the free space of a folder, and try whether names can be swapped and linked there."""
    free = shutil.disk_usage(folder).free
    value = f"{folder}: {free / GIB:.1f} GiB free"
    fault = f"{free:,} bytes are free" if free < LITTLE else _cannot(folder)
    if free < LITTLE:
        return Finding(name, value, fault, f"make room in {folder}, or write elsewhere; --dry-run says what is needed")
    return Finding(name, value, fault, "write targets to another folder" if fault else "")


def gpu() -> Finding:
    """Look for a GPU and its driver."""
    value, fault, cure = "none found", "", ""
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
            said, failed = (done.stdout or done.stderr).strip(), done.returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            said, failed = str(error), True
        value = "; ".join(said.splitlines()) or "none found"
        if failed:
            value, fault, cure = "unknown", f"nvidia-smi failed: {value}", "reinstall the GPU's driver, then reboot"
    elif Path("/dev/nvidia0").exists():
        value, fault = "there is one", "no nvidia-smi, so its driver can't be asked"
        cure = "in a container: docker run --gpus all; otherwise install the driver's tools"
    return Finding("gpu", value, fault, cure)


def _cannot(folder: Path) -> str:
    """Return what can't be done in a folder that publication needs, "" where all can."""
    try:
        with tempfile.TemporaryDirectory(prefix=".vecferry-doctor-", dir=folder) as made:
            a, b, linked = (Path(made) / name for name in "abc")
            a.mkdir()
            b.touch()
            linked.hardlink_to(b)
            libc = ctypes.CDLL(None, use_errno=True)
            swapped = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
            return "" if swapped == 0 else "names can't be swapped in one step, which --overwrite and rollback need"
    except OSError as error:
        return f"files can't be made or linked: {error.strerror}"


def _group(root: Path, controller: str, *names: str) -> list[str]:
    """Read a file of this process's control group, by its name in version 2 or in version 1, as words."""
    text = root / "proc/self/cgroup"
    if not text.is_file():
        return []
    groups: dict[str, str] = dict(re.findall(r"^\d+:(.*?):(.*)$", text.read_text(encoding="utf-8"), re.MULTILINE))
    own = next((path for kinds, path in groups.items() if controller in kinds.split(",")), "/")
    homes = (("sys/fs/cgroup", groups.get("", "/")), (f"sys/fs/cgroup/{controller}", own))
    for (home, group), name in zip(homes, names, strict=True):
        if (file := root / home / group.lstrip("/") / name).is_file():
            return file.read_text(encoding="utf-8").split()
    return []


def _number(root: Path, controller: str, *names: str) -> int | None:
    """Return the number in a file of this process's control group; None where there is none, or no limit."""
    words = _group(root, controller, *names)
    return int(words[0]) if words and words[0].isdigit() else None


def _quota(root: Path) -> float | None:
    """Return how many cores' time this process's control group allows; None where it sets no limit."""
    time = _group(root, "cpu", "cpu.max", "cpu.cfs_quota_us")
    period = time[1:] or _group(root, "cpu", "cpu.max", "cpu.cfs_period_us")
    return int(time[0]) / int(period[0]) if time and time[0].isdigit() and period else None
