"""What a pool asks Slurm's commands, and how it reads what they print."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpulease_fleet.carrier import CarriedState, PilotName
from gpulease_fleet.slurm import SlurmCarrier, read_list
from gpulease_fleet.slurm_script import SlurmOptions, sbatch_options

NAME = PilotName(pool="p", ordinal=0, generation=1)
NOW = datetime(2026, 11, 26, tzinfo=UTC)


def options(*sbatch: str) -> SlurmOptions:
    return SlurmOptions(url="http://127.0.0.1:1", program="/opt/gpulease", directory="/srv/w", sbatch=sbatch)


def program(place: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a script in the place of one of Slurm's commands."""
    path = place / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("word", "host", "state"),
    [
        ("PENDING", "", CarriedState.PENDING),
        ("SPECIAL_EXIT", "", CarriedState.PENDING),
        ("RUNNING", "n1", CarriedState.RUNNING),
        ("RESIZING", "n1", CarriedState.RUNNING),
        ("COMPLETING", "n1", CarriedState.ENDING),
        ("PREEMPTED", "n1", CarriedState.GONE),
        ("NODE_FAIL", "n1", CarriedState.GONE),
        ("REVOKED", "", CarriedState.GONE),
    ],
)
def test_a_state_of_slurm_is_one_of_a_pilot(word: str, host: str, state: CarriedState) -> None:
    (pilot,) = read_list("p", f"7|{NAME}|{word}|1:00:00|{host}|None\n", NOW)
    assert (pilot.name, pilot.handle, pilot.state) == (NAME, "7", state)


def test_a_state_that_is_not_known_ends_no_pilot() -> None:
    """A newer Slurm may have more of them; the jobs of a pilot that was taken for ended would be lost."""
    (runs, waits) = read_list("p", f"7|{NAME}|WARMING|1:00|n1|None\n8|{NAME}|DREAMING|1:00||None\n", NOW)
    assert (runs.state, waits.state) == (CarriedState.RUNNING, CarriedState.PENDING)


def test_variables_of_a_user_hide_no_pilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"7|{NAME}|RUNNING|1:00:00|n1|None"
    program(tmp_path, "squeue", f'[ -n "$SQUEUE_PARTITION" ] || echo "{line}"', monkeypatch)
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    assert [one.handle for one in SlurmCarrier(options()).list("p")] == ["7"]


def test_a_pilot_is_one_job_that_is_never_requeued_whatever_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an option that is given twice sbatch takes the last, and the command line before SBATCH_ variables."""
    chosen = sbatch_options(options("--requeue", "--job-name=mine", "--nodes=4", "--partition=gpu"), NAME)
    assert "--partition=gpu" in chosen
    for own, other in (
        ("--no-requeue", "--requeue"),
        (f"--job-name={NAME}", "--job-name=mine"),
        ("--nodes=1", "--nodes=4"),
    ):
        assert chosen.index(own) > chosen.index(other)
    told = f'echo "$@" > {tmp_path}/told; cat > {tmp_path}/script; echo "$SBATCH_ARRAY_INX" > {tmp_path}/array; echo 7'
    program(tmp_path, "sbatch", told, monkeypatch)
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-9")
    assert SlurmCarrier(options("--requeue")).start(NAME, "secret") == "7"
    assert (tmp_path / "told").read_text().strip().endswith("--no-requeue")
    assert (tmp_path / "array").read_text() == "\n"
    assert "secret" not in (tmp_path / "told").read_text(), "everyone may read a command line"
    assert "secret" in (tmp_path / "script").read_text()
