"""Pilots as jobs of Slurm: one job for each node, with no other right than to submit jobs."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from gpulease_fleet.carrier import Carried, CarriedState, EngineUnavailable, Finding, PilotName, SubmitError
from gpulease_fleet.slurm_doctor import findings
from gpulease_fleet.slurm_script import SlurmOptions, pilot_script, sbatch_options
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.slurm_duration import parse_slurm_duration

ANSWER_S = 60.0
"""How long a command of Slurm may take."""
NOT_THERE = ("Invalid job id", "Job/step already completing or completed")
STATES = {
    "PENDING": CarriedState.PENDING,
    "REQUEUED": CarriedState.PENDING,
    "REQUEUE_HOLD": CarriedState.PENDING,
    "REQUEUE_FED": CarriedState.PENDING,
    "RESV_DEL_HOLD": CarriedState.PENDING,
    "SPECIAL_EXIT": CarriedState.PENDING,
    "CONFIGURING": CarriedState.RUNNING,
    "RUNNING": CarriedState.RUNNING,
    "SUSPENDED": CarriedState.RUNNING,
    "STOPPED": CarriedState.RUNNING,
    "SIGNALING": CarriedState.RUNNING,
    "STAGE_OUT": CarriedState.RUNNING,
    "RESIZING": CarriedState.RUNNING,
    "COMPLETING": CarriedState.ENDING,
}
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""A pilot in a state that is in neither counts as running where it has a host: a word of a newer Slurm ends no job."""
IGNORED = ("SQUEUE_", "SCANCEL_", "SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_WAIT", "SLURM_CLUSTERS")
"""Variables by which a user has these commands hide jobs, ask other clusters, ask back, or wait for the end of a job:
not of ours."""
NO_REASON = ("None", "(null)", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command answered."""

    code: int
    output: str
    errors: str


class SlurmCarrier:
    """Submits, lists and ends pilots with `sbatch`, `squeue` and `scancel`."""

    engine = "slurm"
    gone_s = 60.0
    leaves_s = 0.0  # Slurm has given the node to others by then

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options

    def doctor(self) -> list[Finding]:
        """What would go wrong on this cluster, before it does."""
        return findings(self._options, self._run)

    def start(self, name: PilotName, token: str) -> str:
        """Submit a pilot and return the id of its job. Raises `SubmitError`.

        The script goes in on stdin, with the token in it: the file that Slurm makes of it is for its user and
        administrators, while the environment of a job is shown more widely.
        """
        try:
            answer = self._run(
                ("sbatch", "--parsable", *sbatch_options(self._options, name)), pilot_script(self._options, name, token)
            )
        except EngineUnavailable as error:
            raise SubmitError(str(error)) from error
        handle = answer.output.strip().partition(";")[0]
        if answer.code != 0 or not handle.isdecimal():
            raise SubmitError(" ".join((answer.errors or answer.output).split()) or f"sbatch ended with {answer.code}")
        return handle

    def list(self, pool: str) -> list[Carried]:
        """All pilots of a pool, those that have just ended too. Raises `EngineUnavailable`."""
        command = (
            "squeue",
            "--noheader",
            "--all",
            "--states=all",
            f"--user={getpass.getuser()}",
            "--format=%i|%j|%T|%L|%N|%r",
        )
        answer = self._run(command)
        if answer.code != 0:
            raise EngineUnavailable(" ".join(answer.errors.split()) or f"squeue ended with {answer.code}")
        return read_list(pool, answer.output, datetime.now(UTC))

    def stop(self, pilot: Carried, *, at_once: bool) -> None:
        """End a pilot: SIGTERM to its batch script alone, which has the worker leave; `at_once`: as `scancel` does."""
        gently = () if at_once else ("--batch", "--signal=TERM")
        answer = self._run(("scancel", *gently, pilot.handle))
        if answer.code != 0 and not any(text in answer.errors for text in NOT_THERE):
            raise EngineUnavailable(" ".join(answer.errors.split()) or f"scancel ended with {answer.code}")

    def node_of(self, pilot: Carried) -> str:
        """The name of the node that it carries, as the daemon knows it; empty before it has a host."""
        if not pilot.host or self._options.exclusive:
            return pilot.host
        return f"{pilot.host}-{pilot.name.pool}-{pilot.name.ordinal}"

    def _run(self, command: Sequence[str], text: str = "") -> Answer:
        try:
            ended = subprocess.run(
                command,
                input=text,
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
                check=False,
                env={name: value for name, value in os.environ.items() if not name.startswith(IGNORED)},
            )
        except OSError as error:
            raise EngineUnavailable(f"{command[0]} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise EngineUnavailable(f"{command[0]} did not answer within {ANSWER_S:g} s") from error
        return Answer(code=ended.returncode, output=ended.stdout, errors=ended.stderr)


def read_list(pool: str, output: str, now: datetime) -> list[Carried]:
    """The pilots of a pool in what `squeue` has printed. Its name is that of a pilot, or it is none of ours."""
    found = []
    for line in output.splitlines():
        parts = line.split("|", 5)
        name = PilotName.parse(parts[1]) if len(parts) == 6 else None
        if name is None or name.pool != pool:
            continue
        handle, _, state, left, host, why = parts
        left_s = parse_slurm_duration(left)
        pilot = Carried(
            name=name,
            handle=handle.strip(),
            state=_state(state, host.strip()),
            host=host.strip(),
            ends_at=None if left_s is None else now + timedelta(seconds=left_s),
            why=state if why.strip() in NO_REASON else f"{state}: {why.strip()}",
        )
        found.append(pilot)
    return found


def _state(word: str, host: str) -> CarriedState:
    if word in ENDED:
        return CarriedState.GONE
    return STATES.get(word, CarriedState.RUNNING if host else CarriedState.PENDING)
