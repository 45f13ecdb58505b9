"""Two migrations into one target at once: one works, the other says who does; a dead owner's stage is taken over."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_harness import KINDS, Campaign, Job, Server, contents

pytest.importorskip("faiss", reason="one of the targets")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Start two processes that fork commands, so that two commands run at once."""
    with Server(tmp_path_factory.mktemp("one")) as one, Server(tmp_path_factory.mktemp("two")) as two:
        yield one, two


@pytest.fixture(scope="module")
def campaigns(servers: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Campaign]:
    folder = tmp_path_factory.mktemp("campaigns")
    job = Job(folder / "job", 2000)
    return {kind: Campaign(servers[0], job, kind, folder / kind) for kind in ("flat", "parquet")}


@pytest.mark.parametrize("kind", ["flat", "parquet"])
@pytest.mark.parametrize("phase", ["stage", "gate"])
def test_the_second_says_who_works_and_hurts_nothing(
    kind: str, phase: str, servers: tuple[Server, Server], campaigns: dict[str, Campaign], tmp_path: Path
) -> None:
    c = campaigns[kind]
    folder = c.fresh(tmp_path / "run", over=True)
    first = servers[0].start(c.command(folder, True), hold=phase)
    first.wait_held(phase)
    try:
        before = contents(folder)
        for more in ((), ("--resume",)):
            second = servers[1].finish(c.command(folder, True, *more))
            assert second.code == 2, second.stderr
            target, who = folder / KINDS[kind].name, f"process {first.pid} on {re.escape(socket.gethostname())}"
            told = (
                rf"vecferry: {target} is being written by {who} since \d{{4}}-\d\d-\d\d [\d:]{{8}} UTC: wait for it, "
            )
            assert re.fullmatch(told + "or stop it\n", second.stderr), second.stderr
        assert contents(folder) == before
    finally:
        first.release()
    assert first.end() == 0, first.stderr
    assert c.is_undisturbed(folder, over=True)


@pytest.mark.parametrize("kind", ["flat", "parquet"])
def test_a_dead_owner_s_stage_is_taken_over_by_one_of_two(
    kind: str, servers: tuple[Server, Server], campaigns: dict[str, Campaign], tmp_path: Path
) -> None:
    """Whoever of the two comes first finishes; the other is refused meanwhile, or finds all finished."""
    c = campaigns[kind]
    for n in range(3):
        folder = c.fresh(tmp_path / str(n), over=True)
        dead = servers[0].start(c.command(folder, True))
        assert dead.until("checkpoint", 2)
        dead.signal()
        lock = folder / f".{KINDS[kind].name}.vecferry" / "lock"
        assert f"process {dead.pid} on" in lock.read_text(encoding="utf-8")  # nobody had the time to take it away
        runs = [server.start(c.command(folder, True, "--resume")) for server in servers]
        codes = sorted(run.end() for run in runs)
        assert codes in ([0, 0], [0, 2]), [run.stderr for run in runs]
        for run in runs:
            assert run.code == 0 or "is being written by process" in run.stderr
        assert c.is_undisturbed(folder, over=True)
