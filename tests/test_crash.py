"""What stops a migration short of a kill: signals, a full disk, permissions, a source that vanishes.

Each is a line that names the place and an exit code; what was there before is whole, and --resume ends with the bytes
of a run that nobody disturbed.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kill_harness import KINDS, Campaign, Job, Run, Server

import vecferry
from vecferry.errors import UsageError
from vecferry.signals import handlers_kept, stoppable
from vecferry.store import open_reader

pytest.importorskip("faiss", reason="most of the targets")

ROWS = 4000
PHASES = [(kind, phase) for kind in KINDS for phase in KINDS[kind].phases]
BRIEFLY = {("flat", "read"), ("flat", "publish"), ("ivf", "train"), ("hnsw", "build"), ("parquet", "checkpoint")}
BRIEFLY |= {("parquet", "gate")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("stderr")) as running:
        yield running


@pytest.fixture(scope="module")
def campaign(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Campaign]:
    """Return what makes a kind's targets, made once: its old target, and what an undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("crash")
    job = Job(folder / "job" / "data", ROWS)
    made: dict[str, Campaign] = {}

    def of(kind: str) -> Campaign:
        if kind not in made:
            made[kind] = Campaign(server, job, kind, folder / kind)
        return made[kind]

    return of


def check_stopped(run: Run, code: int, *told: str) -> None:
    """Hold a run to its exit code and to one line on stderr that tells what is needed."""
    assert run.end() == code, run.stderr
    line, rest = run.stderr.split("\n", 1)
    assert not rest, run.stderr
    assert line.startswith("vecferry: ")
    for part in told:
        assert part in line


def check_resumed(c: Campaign, folder: Path, *more: str) -> None:
    """See that the target is whole, resume, and compare with an undisturbed run."""
    assert c.is_whole(folder, over=True)
    done = c.server.finish(c.command(folder, True, "--resume", *more))
    assert done.code == 0, done.stderr
    assert c.is_undisturbed(folder, over=True)


@pytest.mark.parametrize(
    ("kind", "phase"), [p if p in BRIEFLY else pytest.param(*p, marks=pytest.mark.slow) for p in PHASES]
)
def test_a_signal_in_any_phase_is_a_resumable_stop(
    kind: str, phase: str, campaign: Callable[[str], Campaign], server: Server, tmp_path: Path
) -> None:
    c = campaign(kind)
    for number in (signal.SIGTERM, signal.SIGINT):
        for attempt in range(5):
            folder = c.fresh(tmp_path / f"{number.name}-{attempt}", over=True)
            run = server.start(c.command(folder, True))
            assert run.until(phase, 1)
            run.signal(number)
            if run.code != 0:  # or else it came when all was done
                break
        check_stopped(run, 5, "stopped; ", f"of {ROWS:,} rows are safe in the stage: the same command with --resume")
        check_resumed(c, folder)


def test_a_second_signal_ends_it_at_once(campaign: Callable[[str], Campaign], server: Server, tmp_path: Path) -> None:
    c = campaign("hnsw")
    folder = c.fresh(tmp_path / "run", over=True)
    run = server.start(c.command(folder, True))
    assert run.until("build", 1)
    os.kill(run.pid, signal.SIGINT)
    run.signal(signal.SIGINT)
    assert run.code in (5, -signal.SIGINT)
    assert "Traceback" not in run.stderr
    check_resumed(c, folder)


@pytest.mark.parametrize(
    ("kind", "rows"), [("flat", 0.6), ("npy", 0.6), ("ivf", 1.0), ("hnsw", 1.0), ("parquet", 0.1)]
)  # a built index is larger than its rows: it is the index that doesn't fit
def test_a_file_that_may_not_grow_is_a_resumable_stop(
    kind: str, rows: float, campaign: Callable[[str], Campaign], server: Server, tmp_path: Path
) -> None:
    c = campaign(kind)
    folder = c.fresh(tmp_path / "run", over=True)
    largest = int(ROWS * rows * 4 * 40) + 100
    run = server.finish(c.command(folder, True), largest=largest)
    check_stopped(run, 5, f"{folder / c.target.name} can't be written: File too large", "rows are staged safely")
    check_resumed(c, folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a filesystem of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small filesystem needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> None:
    """Leave not a byte free."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


@pytest.mark.parametrize(
    ("kind", "phase"),
    [("flat", "stage"), ("flat", "publish"), ("ivf", "build"), ("npy", "stage"), ("parquet", "stage")],
)
def test_a_full_disk_is_a_resumable_stop(
    kind: str, phase: str, campaign: Callable[[str], Campaign], server: Server, small_disk: Path
) -> None:
    c = campaign(kind)
    folder = c.fresh(small_disk / "run", over=True)
    run = server.start(c.command(folder, True), hold=phase)
    run.wait_held(phase)
    fill(small_disk / "filler")
    run.release()
    check_stopped(run, 5, f"the disk of {folder / c.target.name} is full (0 bytes are free)", "make room")
    begun = server.finish(c.command(folder, True, "--resume"))
    assert begun.code in (2, 5), begun.stderr  # no room yet
    assert "full" in begun.stderr or "bytes" in begun.stderr
    (small_disk / "filler").unlink()
    check_resumed(c, folder)


@pytest.mark.parametrize("kind", ["ivf", "parquet"])
def test_a_folder_that_may_not_be_written_to_is_named_before_any_work(
    kind: str, campaign: Callable[[str], Campaign], server: Server, tmp_path: Path
) -> None:
    c = campaign(kind)
    folder = c.fresh(tmp_path / "run", over=True)
    folder.chmod(0o555)
    run = server.finish(c.command(folder, True), powers=False)
    check_stopped(run, 2, f"{folder / c.target.name} can't be written: Permission denied ({folder}/.", "put that right")
    folder.chmod(0o755)
    assert c.is_whole(folder, over=True)
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    done = server.finish(c.command(folder, True), powers=False)
    assert done.code == 0, done.stderr
    assert c.is_undisturbed(folder, over=True)


@pytest.mark.parametrize(("kind", "phase"), [("flat", "stage"), ("parquet", "publish"), ("flat", "publish")])
def test_a_folder_that_turns_read_only_is_a_resumable_stop(
    kind: str, phase: str, campaign: Callable[[str], Campaign], server: Server, tmp_path: Path
) -> None:
    c = campaign(kind)
    folder = c.fresh(tmp_path / "run", over=True)
    stage = folder / f".{c.target.name}.vecferry"
    run = server.start(c.command(folder, True), powers=False, hold=phase)
    run.wait_held(phase)
    for path in (folder, stage):
        path.chmod(0o555)
    run.release()
    check_stopped(run, 5, f"{folder / c.target.name} can't be written: Permission denied", "rows are staged safely")
    for path in (folder, stage):
        path.chmod(0o755)
    check_resumed(c, folder)


def test_a_source_that_may_not_be_read_is_named(
    campaign: Callable[[str], Campaign], server: Server, tmp_path: Path
) -> None:
    c = campaign("flat")
    folder = c.fresh(tmp_path / "run", over=True)
    c.job.source.chmod(0)
    try:
        run = server.finish(c.command(folder, True), powers=False)
    finally:
        c.job.source.chmod(0o644)
    check_stopped(run, 3, f"Permission denied: '{c.job.source}'")
    assert c.is_whole(folder, over=True)


@pytest.mark.parametrize(("kind", "phase"), [("flat", "read"), ("parquet", "checkpoint"), ("hnsw", "build")])
def test_a_source_that_vanishes_is_a_resumable_stop(
    kind: str, phase: str, campaign: Callable[[str], Campaign], server: Server, tmp_path: Path
) -> None:
    """Take away its folder, as when a network share is gone, and bring it back."""
    c = campaign(kind)
    folder = c.fresh(tmp_path / "run", over=True)
    gone = c.job.folder.with_name("gone")
    run = server.start(c.command(folder, True), hold=phase)
    run.wait_held(phase)
    c.job.folder.rename(gone)
    run.release()
    try:
        check_stopped(run, 5, f"No such file or directory: '{c.job.source}'", "rows are safe in the stage", "--resume")
    finally:
        run.end()
        gone.rename(c.job.folder)
    check_resumed(c, folder)


def test_a_source_that_was_touched_between_a_stop_and_its_resumption_is_refused_with_the_cure(
    campaign: Callable[[str], Campaign], server: Server, tmp_path: Path
) -> None:
    c = campaign("flat")
    folder = c.fresh(tmp_path / "run", over=True)
    run = server.start(c.command(folder, True), hold="verify")
    run.wait_held("verify")
    run.signal()
    c.job.source.touch()
    stage = folder / ".new.faiss.vecferry"
    again = server.finish(c.command(folder, True, "--resume"))
    check_stopped(again, 2, "was written to, touched or copied since its first 4,000 rows were translated", "delete")
    first = server.finish(c.command(folder, True))  # what the message says to do: it names the folder to delete
    check_stopped(first, 2, str(stage), "delete that folder to start again")
    shutil.rmtree(stage)
    done = server.finish(c.command(folder, True))
    assert done.code == 0, done.stderr
    assert c.is_undisturbed(folder, over=True)


@pytest.mark.parametrize("kind", ["faiss", "npy", "parquet"])
def test_a_target_whose_files_somebody_changed_is_not_called_finished(
    kind: str, campaign: Callable[[str], Campaign], tmp_path: Path
) -> None:
    """Of the same size, with the same ids: only the vectors are others."""
    job = campaign("flat").job
    target = tmp_path / f"new.{kind}"
    options = {"drop_payload": kind != "parquet"}
    vecferry.migrate(str(job.source), target, job.folder / "map", **options)
    again = vecferry.migrate(str(job.source), target, job.folder / "map", **options)
    assert isinstance(again, vecferry.Report)
    assert "was finished and published by this very migration" in again.warnings[0]
    vecferry.migrate(str(job.source), tmp_path / f"other.{kind}", job.folder / "old-map", **options)
    inside = {"faiss": "", "npy": "vectors.npy", "parquet": "part-00000.parquet"}[kind]
    with open_reader(str(target)) as reader:
        assert reader.info.space is not None
    shutil.copyfile(tmp_path / f"other.{kind}" / inside if inside else tmp_path / f"other.{kind}", target / inside)
    with open_reader(str(target)) as reader:
        assert reader.info.space is None  # nobody knows what these vectors are
    with pytest.raises(UsageError, match="exists: choose another name, or --overwrite"):
        vecferry.migrate(str(job.source), target, job.folder / "map", **options)


def test_a_finished_migration_writes_the_payload_that_is_asked_for_now(
    campaign: Callable[[str], Campaign], tmp_path: Path
) -> None:
    """Under another name than the first time, where a run that was killed had begun to write it."""
    job = campaign("flat").job
    (tmp_path / ".b.parquet.vecferry").write_bytes(b"PAR1 half of it")
    for name in ("a", "b"):
        payload = tmp_path / f"{name}.parquet"
        vecferry.migrate(str(job.source), tmp_path / "new.faiss", job.folder / "map", payload=payload)
        table = pq.read_table(payload)
        assert table["id"].to_pylist() == job.ids.tolist()
        assert table["text"].to_pylist() == [f"text {i}" for i in job.ids]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.parquet",
        "b.parquet",
        "new.faiss",
        "new.faiss.vecferry.json",
    ]


def test_transform_leaves_nothing_where_its_file_may_not_grow(
    campaign: Callable[[str], Campaign], server: Server, tmp_path: Path
) -> None:
    job = campaign("flat").job
    output = tmp_path / "new.parquet"
    command = ["transform", str(job.source), "--map", str(job.folder / "map"), "-o", str(output)]
    run = server.finish(command, largest=50_000)
    check_stopped(run, 3, f"{output} was not written (", "File too large", "put that right, and start again")
    assert list(tmp_path.iterdir()) == []


LOSING = """
import os, signal, sys, time
import vecferry, vecferry.cli as cli, vecferry.signals as signals

def inspect(source, **options):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    except KeyboardInterrupt:  # as extension modules do while they are loaded
        print("lost", flush=True)
    time.sleep(60)

vecferry.inspect, signals.AGAIN = inspect, 0.1
cli.cli(["inspect", "x"])
"""


def test_a_signal_that_was_lost_is_acted_on_again() -> None:
    done = subprocess.run([sys.executable, "-c", LOSING], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (5, "lost\n"), done.stderr
    assert done.stderr == "vecferry: stopped; nothing half-done was published\n"


def test_a_signal_when_all_is_done_changes_nothing() -> None:
    """Not the exit code above all: 1 would be a failed gate."""
    late = """
import os, signal, sys
import vecferry.cli as cli
real = cli.Group.invoke
def invoke(self, ctx):
    try:
        return real(self, ctx)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
cli.Group.invoke = invoke
cli.cli(["inspect", sys.argv[1]])
"""
    done = subprocess.run([sys.executable, "-c", late, "absent"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "vecferry: absent: no such file or folder\n")


def test_handlers_are_put_back_and_what_is_ignored_stays_so() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(n) for n in numbers]
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nohup, or a shell's background job
        with handlers_kept():
            with stoppable():
                os.kill(os.getpid(), signal.SIGINT)
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # all is done
        assert [signal.getsignal(n) for n in numbers] == [before[0], signal.SIG_IGN, before[2]]
    finally:
        signal.signal(signal.SIGINT, before[1])
