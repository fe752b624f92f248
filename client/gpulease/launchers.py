"""What launchers leave in an environment, and what they must not be told.

Variables that a launcher, a scheduler or a lease leaves behind, a new training must not inherit: an inherited
LOCAL_RANK makes Lightning wait for ever, an inherited mask hides the leased GPUs, PET_NNODES changes what torchrun
does. And which programs cannot read a mask of UUIDs (`mask_for`). Used by whoever starts a process under a lease: the
holder (`gpulease.lease`, `gpulease run`) and the worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from gpulease.states import Launcher, Mask

_LAUNCH = (
    r"LOCAL_RANK|RANK|WORLD_SIZE|GROUP_RANK|NODE_RANK|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
    r"|(ROLE|MASTER|TORCHELASTIC|PET|SLURM|LT|ACCELERATE|OMPI|PMI|PMIX|HOROVOD|DLTS)_\w*"
    r"|GPULEASE_(LEASE_ID|LEASE_TOKEN|JOB_ID|FOUND_BY|PARENT_PID)"
)

LAUNCHER_VARIABLES = re.compile(_LAUNCH + r"|GPULEASE_ARRAY_\w*|CUDA_(?!HOME$|PATH$)\w*")
"""Variables that bind a process to an earlier launch, lease or set of GPUs. CUDA_HOME and CUDA_PATH only say where the
toolkit lies, and stay. PET_* are torchrun's options."""
NOT_ASKED_FOR = re.compile(_LAUNCH + r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)")
"""What even a request that names its variables one by one cannot set, because the launcher and the lease do. A switch
such as CUDA_LAUNCH_BLOCKING, in a request, is a wish; in an environment that is there anyway it is a leftover."""

CHOOSING_GPUS = ("--num_gpus", "--num_nodes", "--include", "--exclude", "--hostfile", "-i", "-e", "-H")
"""deepspeed's own ways to choose GPUs. With any of them it takes physical GPUs from 0 on, whatever the lease says."""
READS_NUMBERS = {
    "deepspeed": "its launcher turns the mask into --include, whose entries are numbers",
    "ds": "is another name of the program deepspeed",
    "vllm": "takes int() of each entry to ask NVML about the GPU (`device_id_to_physical_device_id`)",
}
"""What cannot read UUIDs in CUDA_VISIBLE_DEVICES, and why: a launcher, a program, or a Python module and all in it."""
PYTHON = re.compile(r"python[0-9.]*t?")
RUNS = re.compile(r"-[bBdEiIOPqRsSuvx]*([mc])(.*)", re.DOTALL)
"""Options of Python of which the last names what it runs, in the same word or the next."""
WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
"""Options of Python that are followed by a word of their own."""
RESTARTING = (Launcher.TORCHRUN, Launcher.ACCELERATE)
"""Launchers that can restart their ranks (`max_restarts`)."""


def objection(launcher: Launcher, command: Sequence[str], max_restarts: int = 0) -> str | None:
    """What is wrong with a command for a launcher, as `FIELD: why`; None when nothing is.

    A script comes first, or `-m MODULE`: options of the launcher are chosen from the lease. What follows the script is
    the script's own.
    """
    first = command[0]
    if max_restarts and launcher not in RESTARTING:
        able = " and ".join(RESTARTING)
        return f"max_restarts: {launcher} cannot restart its ranks, only {able} can; use retries"
    if launcher is Launcher.PLAIN or not first.startswith("-"):
        return None
    if first in ("-m", "-c"):
        return None if len(command) > 1 else f"command: {first} needs something after it"
    if first.partition("=")[0] in CHOOSING_GPUS:
        return f"command: {first} would take GPUs outside the lease; leave it out, the launcher is given those leased"
    return f"command: must begin with the script, not with the option {first}; launcher options follow from the lease"


def mask_for(launcher: Launcher, command: Sequence[str]) -> Mask:
    """How the GPUs must be named for what a launcher and a command start, as far as that is known.

    Only the program that is started is looked at, not what it starts in turn: one that runs vLLM from a script or a
    shell must be given a mask by whoever starts it.
    """
    started = _program(command if launcher is Launcher.PLAIN else ("python", *command))
    return Mask.INDICES if {launcher.value, started} & READS_NUMBERS.keys() else Mask.UUIDS


def _program(command: Sequence[str]) -> str:
    """Name of the program that a command runs; of one that Python runs the script's, or the outermost module's."""
    name = PurePath(command[0]).name
    if not PYTHON.fullmatch(name):
        return name
    words = iter(command[1:])
    for word in words:
        if (ending := RUNS.fullmatch(word)) is not None:
            return (ending[2] or next(words, "")).partition(".")[0] if ending[1] == "m" else ""
        if not word.startswith("-") or word == "-":
            return PurePath(word).name
        if word in WITH_VALUE:
            next(words, None)
    return ""


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environ` without what an earlier launcher or lease left in it."""
    return _without(LAUNCHER_VARIABLES, environ)


def asked_for(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of the variables that a request names, without those that the launcher and the lease set."""
    return _without(NOT_ASKED_FOR, environment)


def _without(names: re.Pattern[str], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not names.fullmatch(name)}
