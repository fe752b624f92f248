"""What on a cluster of Slurm would hurt pilots, by the name of the setting, with what to change."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from typing import Protocol

from gpulease_fleet.carrier import EngineUnavailable, Finding, PilotName
from gpulease_fleet.slurm_script import SlurmOptions, pilot_script, sbatch_options

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol")
ENDS_ALL = "proctrack/cgroup"
LEAST_KILL_WAIT_S = 5


class Answered(Protocol):
    """What a command answered."""

    @property
    def code(self) -> int:
        """Its exit code."""

    @property
    def output(self) -> str:
        """What it printed."""

    @property
    def errors(self) -> str:
        """What it printed on stderr."""


Run = Callable[[Sequence[str], str], Answered]


def findings(options: SlurmOptions, run: Run) -> list[Finding]:
    """Everything that was looked at. Asks Slurm for its configuration, and whether it would take a pilot."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        remedy = "Install Slurm's commands here (slurm-client), or run this on a login node of the cluster."
        return [Finding(ok=False, what=f"{', '.join(missing)}: not found in PATH", remedy=remedy)]
    try:
        answer = run(("scontrol", "show", "config"), "")
        if answer.code != 0:
            raise EngineUnavailable(" ".join(answer.errors.split()))
        name = PilotName(pool="doctor", ordinal=0, generation=1)
        tried = run(("sbatch", "--test-only", *sbatch_options(options, name)), pilot_script(options, name, ""))
    except EngineUnavailable as error:
        remedy = "Check `sinfo`; SLURM_CONF must name the cluster's slurm.conf."
        return [Finding(ok=False, what=f"Slurm does not answer: {error}", remedy=remedy)]
    return [*of_config(read_config(answer.output)), _of_trial(tried, options)]


def read_config(text: str) -> dict[str, str]:
    """The settings in what `scontrol show config` prints."""
    found = (re.match(r"(\w+)\s*=\s*(.*?)\s*$", line) for line in text.splitlines())
    return {match[1]: match[2] for match in found if match is not None}


def of_config(config: dict[str, str]) -> list[Finding]:
    """What the settings of a cluster mean for pilots."""
    return [
        _of_proctrack(config),
        _of_gres(config),
        _of_kill_wait(config),
        _of_job_age(config),
        _of_devices(config),
    ]


def _of_proctrack(config: dict[str, str]) -> Finding:
    proctrack = config.get("ProctrackType", "unknown")
    if proctrack == ENDS_ALL:
        return Finding(ok=True, what=f"ProctrackType={proctrack}: nothing of a pilot outlives its allocation")
    return Finding(
        ok=False,
        what=f"ProctrackType={proctrack}: jobs outlive their pilot, while Slurm gives their GPUs to others",
        remedy=f"Set ProctrackType={ENDS_ALL} in slurm.conf, with cgroup.conf, and restart slurmctld and every slurmd.",
    )


def _of_gres(config: dict[str, str]) -> Finding:
    types = config.get("GresTypes", "")
    if "gpu" in types.split(","):
        return Finding(ok=True, what=f"GresTypes={types}")
    return Finding(
        ok=False,
        what=f"GresTypes={types or '(none)'}: Slurm does not know GPUs, and would give the same ones to others",
        remedy="Set GresTypes=gpu in slurm.conf, name the GPUs of each node in gres.conf, or share no node with Slurm.",
    )


def _of_kill_wait(config: dict[str, str]) -> Finding:
    seconds = _number(config.get("KillWait"))
    if seconds is None or seconds >= LEAST_KILL_WAIT_S:
        return Finding(ok=True, what=f"KillWait={config.get('KillWait', 'unknown')}")
    return Finding(
        ok=False,
        what=f"KillWait={seconds} s: `scancel` leaves a worker no time to say that its node leaves",
        remedy="Set KillWait=30 in slurm.conf, which is Slurm's default.",
    )


def _of_job_age(config: dict[str, str]) -> Finding:
    seconds = _number(config.get("MinJobAge"))
    if seconds is None or seconds == 0 or seconds >= 60:
        return Finding(ok=True, what=f"MinJobAge={config.get('MinJobAge', 'unknown')}")
    return Finding(
        ok=True,
        what=f"MinJobAge={seconds} s: an end may be noticed only when a pilot was not listed for 60 s",
        remedy="Set MinJobAge=300 in slurm.conf, which is Slurm's default.",
    )


def _of_devices(config: dict[str, str]) -> Finding:
    if config.get("ConstrainDevices", "").lower() in ("yes", "(null)", ""):
        return Finding(ok=True, what=f"ConstrainDevices={config.get('ConstrainDevices') or 'not shown'}")
    return Finding(
        ok=True,
        what="ConstrainDevices=no: jobs of Slurm may use GPUs that they were not given; those are `foreign` here then",
        remedy="Set ConstrainDevices=yes in cgroup.conf.",
    )


def _of_trial(tried: Answered, options: SlurmOptions) -> Finding:
    said = " ".join((tried.errors or tried.output).split())
    if tried.code == 0:
        return Finding(ok=True, what=f"sbatch --test-only: {said}")
    return Finding(
        ok=False,
        what=f"sbatch --test-only refuses a pilot with --gres={options.gres} --time={options.time}: {said}",
        remedy="Change --gres, --time or --sbatch; `sinfo -o '%P %G %l'` shows partitions, GPUs and limits.",
    )


def _number(text: str | None) -> int | None:
    found = re.match(r"\d+", text or "")
    return None if found is None else int(found[0])
