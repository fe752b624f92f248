"""The launchers: what each needs, which commands it accepts, which variables it sets, and which GPU mask it can read.

A new training must not inherit the variables that a launcher, a scheduler or a lease has left in an environment: an
inherited LOCAL_RANK makes Lightning wait forever, an inherited mask hides the leased GPUs, PET_NNODES changes what
torchrun does. Used by everything that starts a process under a lease: the holder (`gpulease.lease`, `gpulease run`)
and the worker, which builds the launcher's arguments (`gpulease_worker.jobs.launcher_argv`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gpulease_protocol.errors import shortened
from gpulease_protocol.gpu_selection import SELECTING_OPTIONS, outside_the_lease, program_name
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.states import Launcher, Mask


@dataclass(frozen=True, slots=True)
class LauncherTraits:
    """How a launcher behaves."""

    modules: tuple[str, ...] = ()
    """At least one of these must be importable in the job's interpreter; none is needed where it is empty."""
    starts_ranks: bool = True
    """False when the process that is launched is rank 0 itself; any further ranks are the script's own doing."""
    restarts_ranks: bool = False
    """True when it can restart its ranks (`max_restarts`)."""
    spans_nodes: bool = True
    """True when its ranks can be on several nodes, with the launcher started on each."""


LAUNCHERS: Mapping[Launcher, LauncherTraits] = {
    Launcher.TORCHRUN: LauncherTraits(("torch",), restarts_ranks=True),
    Launcher.ACCELERATE: LauncherTraits(("accelerate",), restarts_ranks=True),
    Launcher.DEEPSPEED: LauncherTraits(("deepspeed",)),
    Launcher.LIGHTNING: LauncherTraits(("lightning", "pytorch_lightning"), starts_ranks=False),
    Launcher.FABRIC: LauncherTraits(("lightning", "lightning_fabric"), starts_ranks=False),
    Launcher.HOROVODRUN: LauncherTraits(("horovod",), spans_nodes=False),
    Launcher.BAGUA: LauncherTraits(("bagua",), spans_nodes=False),
    Launcher.PLAIN: LauncherTraits(starts_ranks=False),
}

_LAUNCH = (
    r"LOCAL_RANK|RANK|WORLD_SIZE|GROUP_RANK|NODE_RANK|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
    r"|(ROLE|MASTER|TORCHELASTIC|PET|SLURM|SLURMD|LT|ACCELERATE|PMI|HOROVOD|DLTS)_\w*"
    r"|PMIX_(?!MCA_)\w*|OMPI_(?!ALLOW_RUN_AS_ROOT|MCA_)\w*"
    r"|OMPI_MCA_(ess|orte_|pmix|initial_wdir|mpi_oversubscribe|shmem_RUNTIME_)\w*"
    r"|GPULEASE_(LEASE_ID|LEASE_TOKEN|JOB_ID|FOUND_BY|PARENT_PID|NODES|GPUS_PER_NODE)"
)

LAUNCHER_VARIABLES = re.compile(_LAUNCH + r"|NNODES|GPULEASE_ARRAY_\w*|CUDA_(?!HOME$|PATH$)\w*")
"""Variables that bind a process to an earlier launch, lease or set of GPUs. CUDA_HOME and CUDA_PATH only name the
toolkit's directory, and stay. PET_* are torchrun's options. Of OMPI_MCA_* only those go that mpirun sets for a rank:
the others are a site's settings, without which MPI may not start, and Lightning starts it where mpi4py is installed."""
RESERVED_VARIABLES = re.compile(_LAUNCH + r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)")
"""Variables that even a request that names them one by one cannot set, because the launcher and the lease set them. A
switch such as CUDA_LAUNCH_BLOCKING is intended in a request, and a leftover in an environment that exists anyway."""

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables of a gang that a process keeps where it has its own: its user may know of a faster network."""
LEASE_VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NVIDIA_VISIBLE_DEVICES|MASTER_ADDR|MASTER_PORT"
    r"|NODE_RANK|NNODES|GPULEASE_NODES|GPULEASE_GPUS_PER_NODE|GLOO_SOCKET_IFNAME|NCCL_SOCKET_IFNAME"
    r"|GPULEASE_(LEASE|JOB|ARRAY|MEMBER)_[A-Z0-9_]+"
)
"""Variables that a lease may set in the process of its holder. Not CUDA_* and GPULEASE_* as a whole:
CUDA_INJECTION64_PATH names a library to load, GPULEASE_URL another daemon."""

READS_INDICES = {
    "deepspeed": "its launcher turns the mask into --include, which takes numbers",
    "ds": "is another name of the program deepspeed",
    "vllm": "takes int() of each entry to ask NVML about the GPU (`device_id_to_physical_device_id`)",
}
"""Launchers, programs and Python modules that cannot read UUIDs in CUDA_VISIBLE_DEVICES, and why."""


def usage_error(launcher: Launcher, command: Sequence[str], max_restarts: int = 0, nodes: int = 1) -> str | None:
    """What is wrong with a command for a launcher, as `FIELD: why`; None when nothing is.

    The command begins with a script, or `-m MODULE`: the lease determines the launcher's options. All words after the
    script are the script's own. With launcher `plain` it is any command.
    """
    first = command[0]
    if nodes > 1 and not LAUNCHERS[launcher].spans_nodes:
        able = ", ".join(other for other, traits in LAUNCHERS.items() if traits.spans_nodes)
        return f"nodes: {launcher} cannot run on several nodes here, only {able} can"
    if nodes > 1 and max_restarts:
        return "max_restarts: must be 0 with nodes over 1, where all nodes have to start again; use retries"
    if max_restarts and not LAUNCHERS[launcher].restarts_ranks:
        able = " and ".join(other for other, traits in LAUNCHERS.items() if traits.restarts_ranks)
        return f"max_restarts: {launcher} cannot restart its ranks, only {able} can; use retries"
    if launcher is Launcher.PLAIN:
        outside = outside_the_lease(command)
        return None if outside is None else f"command: {outside}"
    if not first.startswith("-"):
        return None
    if first in ("-m", "-c"):
        return None if len(command) > 1 else f"command: {first} needs something after it"
    if any(first.partition("=")[0] in options for options in SELECTING_OPTIONS.values()):
        return f"command: {first} would take GPUs outside the lease; leave it out, the launcher is given those leased"
    option = shortened(first)
    return f"command: must begin with the script, not with the option {option}; launcher options follow from the lease"


def choose_launcher(command: Sequence[str]) -> Launcher:
    """The launcher of a command for which none was named: torchrun for a Python script or `-m MODULE`, which need one
    process for each GPU; for a program, a shell script or `python train.py` none, because it says itself what it
    starts."""
    first = command[0] if command else ""
    return Launcher.TORCHRUN if first.endswith(".py") or first.startswith("-") else Launcher.PLAIN


def choose_mask(launcher: Launcher, command: Sequence[str]) -> Mask:
    """How the GPUs must be named for the program that a launcher and a command start, as far as that is known.

    Only that program counts, and not what it starts in turn: to run vLLM from a script or a shell, name the mask.
    """
    started = program_name(command if launcher is Launcher.PLAIN else ("python", *command))
    return Mask.INDICES if {launcher.value, started} & READS_INDICES.keys() else Mask.UUIDS


def strip_launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environ` without what an earlier launcher or lease left in it."""
    return _without(LAUNCHER_VARIABLES, environ)


def strip_reserved_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of the variables that a request names, without those that the launcher and the lease set."""
    return _without(RESERVED_VARIABLES, environment)


def lease_variables(env: Mapping[str, str], own: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """The variables of a lease's `env` that its holder's process takes over: those in `LEASE_VARIABLES`, in one line.
    `own`: the variables of that process, which keeps those in `INTERFACE_VARIABLES`.

    Everything that starts a process under a lease, or prints its variables for a shell, takes them from here. A daemon
    of a newer version may name others, and a program that stands for the daemon any, such as LD_PRELOAD: all those are
    left out.
    """
    return {
        name: value
        for name, value in env.items()
        if LEASE_VARIABLES.fullmatch(name)
        and isinstance(value, str)
        and value.isprintable()
        and not (name in INTERFACE_VARIABLES and own.get(name))
    }


def _without(names: re.Pattern[str], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not names.fullmatch(name)}
