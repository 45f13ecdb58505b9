"""Pull the plug at random instants: after --resume the target is the same to the byte, the old one is never hurt."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_harness import KINDS, Campaign, Job, Outcome, Server

pytest.importorskip("faiss", reason="most of the targets")

BRIEFLY = {
    "flat": ("read", "stage", "verify", "publish"),
    "ivf": ("train", "build"),
    "hnsw": ("build", "gate"),
    "npy": ("checkpoint", "publish"),
    "parquet": ("checkpoint", "finish", "publish"),
}
"""What of each kind the short test kills, so that all of them together meet every phase."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("stderr")) as running:
        yield running


def check(outcome: Outcome, kills: int) -> None:
    """Hold a campaign to what is promised: nothing lost, nothing doubled, the same bytes, a whole target always."""
    assert outcome.kills >= kills
    assert outcome.resumed == outcome.equal
    assert (outcome.lost, outcome.doubled) == (0, 0)
    assert outcome.checks == outcome.whole


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_killed_run_resumes_to_the_same_bytes(kind: str, server: Server, tmp_path: Path) -> None:
    phases = BRIEFLY[kind]
    outcome = Campaign(server, Job(tmp_path / "job", 4000), kind, tmp_path / "runs").run(len(phases), phases)
    check(outcome, len(phases))
    assert all(outcome.phases[phase] for phase in phases)


def test_the_short_tests_meet_every_phase() -> None:
    assert {phase for phases in BRIEFLY.values() for phase in phases} == {p for k in KINDS.values() for p in k.phases}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_fifty_kills(kind: str, server: Server, tmp_path: Path) -> None:
    outcome = Campaign(server, Job(tmp_path / "job", 10_000), kind, tmp_path / "runs").run(50)
    check(outcome, 50)
    assert all(outcome.phases[phase] >= 3 for phase in KINDS[kind].phases), outcome.phases
