"""What watches the pools of the soak sees what must not be."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon import eventually
from tests.fleet.books import GRANT_S, LEFT_S, Books, SlurmView
from tests.fleet.faults import trainings
from tests.fleet.slurm_cluster import SlurmCluster
from tests.fleet.soak import Outcome, verdict

TRAINING = f"98{os.getpid()}"
"""Of this process alone: tests run side by side."""

Start = Callable[[str, str], int]


class PlayedView(SlurmView):
    """Slurm's list, as a test sets it."""

    def look(self) -> None:
        """It does not change."""


def books(*active: dict[str, Any]) -> Books:
    """Books beside a daemon with these active leases, and a Slurm that has given node `n1` to a pilot."""
    fleet: Any = SimpleNamespace(running=SimpleNamespace(leases=lambda state: list(active)))
    now = time.monotonic()
    slurm = PlayedView(SlurmCluster(Path("/nowhere"), ()), answered_at=now, carried_at={"n1": now})
    return Books(fleet, slurm, TRAINING)


def lease(lease_id: str, *uuids: str, node: str = "n1") -> dict[str, Any]:
    return {"id": lease_id, "gpus": [{"uuid": uuid, "node": node} for uuid in uuids]}


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a training of a lease on a GPU; its pid."""
    with ExitStack() as started:

        def one(lease_id: str, uuid: str) -> int:
            own = {"GPULEASE_LEASE_ID": lease_id, "CUDA_VISIBLE_DEVICES": uuid}
            process = started.enter_context(subprocess.Popen(["sleep", TRAINING], env=os.environ | own))
            started.callback(process.kill)
            eventually(lambda: process.pid in trainings(TRAINING), 60)
            return process.pid

        yield one


def test_what_is_right_is_not_wrong(start: Start) -> None:
    start("lease-1", "GPU-1")
    start("lease-2", "GPU-2")
    seen = books(lease("lease-1", "GPU-1"), lease("lease-2", "GPU-2"))
    seen.look()
    assert seen.wrong == []
    assert (seen.looks, seen.grants) == (1, 2)


def test_two_trainings_on_a_gpu_are_seen(start: Start) -> None:
    start("lease-1", "GPU-1")
    start("lease-2", "GPU-1")
    seen = books(lease("lease-2", "GPU-1"))
    seen.look()
    assert seen.wrong == ["GPU-1 is used by ['lease-1', 'lease-2']"]


def test_a_gpu_in_two_leases_is_seen() -> None:
    seen = books(lease("lease-1", "GPU-1", "GPU-2"), lease("lease-2", "GPU-2"))
    seen.look()
    assert seen.wrong == ["GPU-2 is in 2 leases"]


def test_a_training_that_outlives_its_lease_is_seen(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    pid, seen, began = start("lease-1", "GPU-1"), books(), time.monotonic()
    seen.look()
    assert seen.wrong == [], "it has its time"
    monkeypatch.setattr(time, "monotonic", lambda: began + LEFT_S + 60.0)  # under load a look comes late
    seen.look()
    seen.look()
    assert seen.wrong == [f"training {pid} is left of lease lease-1"]


def test_a_grant_on_a_node_that_slurm_has_taken_back_is_seen() -> None:
    seen = books(lease("lease-1", "GPU-1"), lease("lease-2", "GPU-2", node="n2"))
    seen.slurm.carried_at["n1"] -= GRANT_S + 1
    seen.slurm.carried_at["n2"] = seen.slurm.answered_at
    seen.slurm.others_at["n2"] = ("7", seen.slurm.answered_at - GRANT_S - 1)
    seen.look()
    assert seen.wrong == [
        f"lease-1 was granted on n1, {GRANT_S + 1:.1f} s after Slurm had taken it back",
        f"lease-2 was granted on n2, which job 7 has for {GRANT_S + 1:.1f} s",
    ]


def test_the_verdict_says_how_much_of_the_plan_was_seen() -> None:
    outcomes = [Outcome(fault=fault) for fault in ("down", "scancel", "down", "slurmctld away")]
    seen = "5 pilots, 3 of 7 faults of pilots (down 2, scancel 1), slurmctld away 1 times"
    assert verdict(outcomes, 7, 5, []) == f"verdict: {seen}: no GPU granted twice, no process left, every job true"
    assert verdict(outcomes, 7, 5, ["one"]) == f"verdict: {seen}: 1 violations"
