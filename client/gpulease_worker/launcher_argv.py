"""The argument list of each launcher. Pure.

Whatever a launcher would choose by itself it is told here, from the lease: how many ranks, on which address and port,
on which GPUs. How each behaves is in the versions of torch 2.13, accelerate 1.15, deepspeed 0.19, Horovod 0.28.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpulease.exchange import JobOrder
from gpulease.model import Launcher

RANK_SCRIPT = 'ln -f "${TORCHELASTIC_ERROR_FILE%/*}/stdout.log" "$0/rank-$RANK.log"; exec "$@" 2>&1'
"""What torchrun starts for each rank. torchrun opens one file for stdout and one for stderr in a directory with a
random name; this joins both streams in the first, in order, and gives it its lasting name. `exec` keeps the pid, so
torchrun watches and signals the rank itself. `$0` is the log directory."""
ACCELERATE_CONFIG = "accelerate.json"
"""Name of the configuration of `accelerate launch` in the job's directory, in place of the user's own."""
ALONE = (Launcher.PLAIN, Launcher.LIGHTNING, Launcher.FABRIC)
"""Launchers of which the supervisor starts one process, rank 0; more ranks are the script's own doing."""
MODULES: dict[Launcher, tuple[str, ...]] = {
    Launcher.TORCHRUN: ("torch",),
    Launcher.ACCELERATE: ("accelerate",),
    Launcher.DEEPSPEED: ("deepspeed",),
    Launcher.LIGHTNING: ("lightning", "pytorch_lightning"),
    Launcher.FABRIC: ("lightning", "lightning_fabric"),
    Launcher.HOROVODRUN: ("horovod",),
    Launcher.BAGUA: ("bagua",),
    Launcher.PLAIN: (),
}
"""What must be importable in the job's interpreter, one of these; nothing where it is empty."""


@dataclass(frozen=True, slots=True)
class Place:
    """What an argument list is made of, beside the order."""

    interpreter: str
    """The job's Python."""
    logs: Path
    """Directory of its log files."""

    @property
    def config(self) -> Path:
        """Where accelerate's configuration lies."""
        return self.logs.parent / ACCELERATE_CONFIG


def argv(order: JobOrder, interpreter: str, logs: Path) -> tuple[str, ...]:
    """The argument list that starts a job's ranks.

    Raises ValueError when the lease has no MASTER_ADDR or MASTER_PORT and the launcher needs them.
    """
    launcher = order.spec.launcher
    if launcher not in ALONE:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not order.env.get(name)]
        if missing:
            raise ValueError(f"the lease's environment has no {' and no '.join(missing)}, which {launcher} needs")
    return _BUILDERS[launcher](order, Place(interpreter, logs))


def ranks(order: JobOrder) -> int:
    """How many ranks a launcher starts: one for each GPU."""
    return len(order.gpus) or order.spec.gpus


def accelerate_config(order: JobOrder) -> str:
    """The configuration of `accelerate launch`: with one of ours it does not look for the user's own, which may name
    GPUs, a port or a number of processes."""
    several = ranks(order) > 1
    return json.dumps(
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU" if several else "NO",
            "num_processes": ranks(order),
            "num_machines": 1,
            "machine_rank": 0,
            "gpu_ids": "all",
            "mixed_precision": "no",
            "use_cpu": False,
            "debug": False,
            "main_training_function": "main",
        }
    )


def _plain(order: JobOrder, place: Place) -> tuple[str, ...]:
    return order.spec.command


def _script(order: JobOrder, place: Place) -> tuple[str, ...]:
    """Lightning starts its further ranks itself, as copies of this command."""
    return (place.interpreter, "-u", *order.spec.command)


def _torchrun(order: JobOrder, place: Place) -> tuple[str, ...]:
    """One rank for each GPU, on the leased address.

    Rendezvous is static: with it torchrun's own store listens on the leased port and the ranks are told exactly this
    MASTER_ADDR and MASTER_PORT. With c10d, torch 2.13 gives the ranks a port of its own choice, outside the lease.
    """
    restarts = ("--max-restarts", str(order.spec.max_restarts)) if order.spec.max_restarts else ()
    return (
        *(place.interpreter, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(ranks(order))),
        *("--master-addr", order.env["MASTER_ADDR"], "--master-port", order.env["MASTER_PORT"], *restarts),
        *("--log-dir", str(place.logs / "torchrun"), "--redirects", "3", "--tee", "3"),
        *("--no-python", "/bin/sh", "-c", RANK_SCRIPT, str(place.logs)),
        *(place.interpreter, "-u", *order.spec.command),
    )


def _accelerate(order: JobOrder, place: Place) -> tuple[str, ...]:
    """accelerate is torchrun for two ranks and more, and starts the script itself for one."""
    start = (place.interpreter, "-m", "accelerate.commands.launch", "--config_file", str(place.config))
    one = (*start, "--num_processes", "1", "--gpu_ids", "all", "--main_process_port", order.env["MASTER_PORT"])
    if ranks(order) == 1:
        return (*one, "--no_python", place.interpreter, "-u", *order.spec.command)
    return (
        *(*start, "--multi_gpu", "--num_processes", str(ranks(order)), "--gpu_ids", "all"),
        *("--main_process_ip", order.env["MASTER_ADDR"], "--main_process_port", order.env["MASTER_PORT"]),
        *("--max_restarts", str(order.spec.max_restarts)),
        *("--log_dir", str(place.logs / "torchrun"), "--tee", "3"),
        *("--no_python", "/bin/sh", "-c", RANK_SCRIPT, str(place.logs)),
        *(place.interpreter, "-u", *order.spec.command),
    )


def _deepspeed(order: JobOrder, place: Place) -> tuple[str, ...]:
    """deepspeed takes its GPUs from the mask, which `environment` gives it as indices. /dev/null is no host file, so
    that one which the machine has for clusters is not taken."""
    command = order.spec.command
    script = ("--module", *command[1:]) if command[0] == "-m" else command
    return (
        *(place.interpreter, "-m", "deepspeed.launcher.runner", "--hostfile", "/dev/null"),
        *("--master_addr", order.env["MASTER_ADDR"], "--master_port", order.env["MASTER_PORT"], *script),
    )


def _horovodrun(order: JobOrder, place: Place) -> tuple[str, ...]:
    """With gloo as controller it needs no MPI; what the ranks reduce with is the build's own."""
    return (
        *(place.interpreter, "-m", "horovod.runner.launch", "--gloo"),
        *("-np", str(ranks(order)), "-H", f"localhost:{ranks(order)}"),
        *(place.interpreter, "-u", *order.spec.command),
    )


def _bagua(order: JobOrder, place: Place) -> tuple[str, ...]:
    """Bagua's launcher is a copy of torch.distributed.launch."""
    return (
        *(place.interpreter, "-m", "bagua.distributed.launch", "--nproc_per_node", str(ranks(order))),
        *("--master_addr", order.env["MASTER_ADDR"], "--master_port", order.env["MASTER_PORT"], *order.spec.command),
    )


_BUILDERS: dict[Launcher, Callable[[JobOrder, Place], tuple[str, ...]]] = {
    Launcher.TORCHRUN: _torchrun,
    Launcher.ACCELERATE: _accelerate,
    Launcher.DEEPSPEED: _deepspeed,
    Launcher.LIGHTNING: _script,
    Launcher.FABRIC: _script,
    Launcher.HOROVODRUN: _horovodrun,
    Launcher.BAGUA: _bagua,
    Launcher.PLAIN: _plain,
}
