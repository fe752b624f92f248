"""`gpulease fleet slurm up` is killed at each step of a submission and of an end, and the next one goes on."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease_fleet.records import Records
from gpulease_fleet.slurm import SlurmCarrier
from tests.daemon import daemon, eventually
from tests.fleet import small_slurm
from tests.fleet.fleet import Fleet

pytestmark = pytest.mark.budget(20)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A pilot here is a process that reports nothing: a pool needs no more of it."""
    (tmp_path / "pilot").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "pilot").chmod(0o755)
    with daemon(tmp_path, "--no-worker") as running:
        yield Fleet(running, tmp_path, small_slurm.install(tmp_path / "slurm"), "--gres", "gpu:2", "--time", "1h")
        for job in alive(tmp_path):
            os.killpg(int((job / "pid").read_text()), signal.SIGKILL)  # a script leads a group of its own


def round_of(fleet: Fleet) -> int:
    """One round of a new program; its exit code."""
    words = ("--program", str(fleet.place / "pilot"), "--nodes", "1", "--once", "--no-doctor")
    return fleet.type("up", *fleet.options, *words).returncode


def kill_at(fleet: Fleet, step: str) -> None:
    """Have the next program killed at a step."""
    (fleet.place / "slurm/kill").write_text(step)


def alive(place: Path) -> list[Path]:
    """The jobs that run."""
    jobs = sorted((place / "slurm/jobs").iterdir())
    return [job for job in jobs if small_slurm.is_alive(int((job / "pid").read_text()))]


def names(jobs: list[Path]) -> list[str]:
    return [(job / "name").read_text() for job in jobs]


def check(fleet: Fleet) -> None:
    """One pilot, the one on record, with the only token that is valid; no name was submitted twice."""
    (row,) = fleet.pilots()
    (job,) = alive(fleet.place)
    assert (job / "name").read_text() == f"gpulease:main:0:{row['generation']}"
    assert row["handle"] == job.name
    assert Counter(names(sorted((fleet.place / "slurm/jobs").iterdir()))).most_common(1)[0][1] == 1
    tokens = fleet.running.call("GET", "/v1/tokens").json["items"]
    assert {token["note"] for token in tokens} == {(job / "name").read_text()}


@pytest.mark.parametrize("step", ["squeue before", "squeue after", "sbatch after"])
def test_killed_around_a_submission_the_next_one_adopts_the_pilot_or_submits_it(fleet: Fleet, step: str) -> None:
    kill_at(fleet, step)
    assert round_of(fleet) == -signal.SIGKILL
    assert len(alive(fleet.place)) == (step == "sbatch after")
    for _ in range(2):
        assert round_of(fleet) == 0
    check(fleet)
    assert fleet.pilots()[0]["generation"] == 1


def test_killed_before_slurm_was_asked_that_generation_is_given_up(fleet: Fleet) -> None:
    kill_at(fleet, "sbatch before")
    assert round_of(fleet) == -signal.SIGKILL
    assert round_of(fleet) == 0
    assert alive(fleet.place) == [], "Slurm may still list it"
    assert [(row["generation"], row["state"]) for row in fleet.pilots()] == [(1, "submitting")]
    with closing(Records(fleet.place / "fleet", "main")) as records:
        (row,) = records.pilots()
        early = row.since - SlurmCarrier.gone_s
        records.put(replace(row, since=early, last_seen=early))
    for _ in range(3):
        assert round_of(fleet) == 0
    check(fleet)
    assert fleet.pilots()[0]["generation"] == 2


@pytest.mark.parametrize("step", ["squeue before", "scancel before", "scancel after"])
def test_killed_while_a_pool_goes_down_the_next_one_ends_it(fleet: Fleet, step: str) -> None:
    for _ in range(2):
        assert round_of(fleet) == 0
    check(fleet)
    kill_at(fleet, step)
    assert fleet.type("down", "--tick", "1s").returncode == -signal.SIGKILL
    assert fleet.type("down", "--tick", "1s").returncode == 0
    eventually(lambda: not alive(fleet.place), 60)
    assert [row["state"] for row in fleet.pilots()] == ["gone"]
    assert fleet.running.call("GET", "/v1/tokens").json["items"] == []
