"""Builds the argument list of each launcher. Pure.

The lease determines what a launcher would otherwise choose by itself: the number of ranks, the address and port, the
GPUs. Checked against torch 2.13, accelerate 1.15, deepspeed 0.19 and Horovod 0.28.
"""

from __future__ import annotations

import json
from pathlib import Path

from gpulease_protocol.launchers import LAUNCHERS
from gpulease_protocol.model import Launcher
from gpulease_protocol.node_protocol import GangPlace, JobOrder

RANK_SCRIPT = 'ln -f "${TORCHELASTIC_ERROR_FILE%/*}/stdout.log" "$0/rank-$RANK.log"; exec "$@" 2>&1'
"""Shell script that torchrun starts for each rank. torchrun opens one file for stdout and one for stderr in a directory
with a random name; this joins both streams, in order, in the first and links it as `rank-N.log`. `exec` keeps the pid,
so torchrun watches and signals the rank itself. `$0` is the log directory."""
ACCELERATE_CONFIG = "accelerate.json"
"""Name of the configuration of `accelerate launch` in the job's directory, in place of the user's own."""
HOST_FILE = "hostfile"
"""Name of deepspeed's host file in the job's directory, for a job on several nodes."""


def argv(order: JobOrder, interpreter: str, logs: Path) -> tuple[str, ...]:
    """The argument list that starts a job's ranks with the job's `interpreter`; `logs` is its log directory.

    Raises ValueError when the lease has no MASTER_ADDR or MASTER_PORT and the launcher needs them.
    """
    launcher, command = order.spec.launcher, order.spec.command
    if LAUNCHERS[launcher].starts_ranks:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not order.env.get(name)]
        if missing:
            raise ValueError(f"the lease's environment has no {' and no '.join(missing)}, which {launcher} needs")
    match launcher:
        case Launcher.TORCHRUN:
            return _torchrun(order, interpreter, logs)
        case Launcher.ACCELERATE:
            return _accelerate(order, interpreter, logs)
        case Launcher.DEEPSPEED:
            return _deepspeed(order, interpreter, logs)
        case Launcher.HOROVODRUN:
            return _horovodrun(order, interpreter)
        case Launcher.BAGUA:
            return _bagua(order, interpreter)
        case Launcher.LIGHTNING | Launcher.FABRIC:
            return (interpreter, "-u", *command)  # it starts its further ranks itself, as copies of this command
        case Launcher.PLAIN:
            return command


def ranks(order: JobOrder) -> int:
    """How many ranks a launcher starts on this node: one per GPU."""
    return len(order.gpus) or order.spec.gpus


def nodes(order: JobOrder) -> int:
    """On how many nodes the job runs."""
    return 1 if order.gang is None else len(order.gang.nodes)


def first_rank(order: JobOrder) -> int:
    """Global rank of the first rank on this node."""
    return 0 if order.gang is None else order.gang.rank * ranks(order)


def accelerate_config(order: JobOrder) -> str:
    """The configuration of `accelerate launch`. Given this one, it ignores the user's own, which may name GPUs, a port
    or a number of processes."""
    total = ranks(order) * nodes(order)
    return json.dumps(
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU" if total > 1 else "NO",
            "num_processes": total,
            "num_machines": nodes(order),
            "machine_rank": 0 if order.gang is None else order.gang.rank,
            "gpu_ids": "all",
            "mixed_precision": "no",
            "use_cpu": False,
            "debug": False,
            "main_training_function": "main",
        }
    )


def _torchrun(order: JobOrder, interpreter: str, logs: Path) -> tuple[str, ...]:
    """One rank per GPU, on the leased address.

    Rendezvous is static: torchrun's own store then listens on the leased port, and the ranks get exactly this
    MASTER_ADDR and MASTER_PORT. With c10d, torch 2.13 gives the ranks a port of its own choice, outside the lease.
    """
    restarts = ("--max-restarts", str(order.spec.max_restarts)) if order.spec.max_restarts else ()
    place = () if order.gang is None else ("--node-rank", str(order.gang.rank))
    return (
        *(interpreter, "-m", "torch.distributed.run"),
        *("--nnodes", str(nodes(order)), "--nproc-per-node", str(ranks(order)), *place),
        *("--master-addr", order.env["MASTER_ADDR"], "--master-port", order.env["MASTER_PORT"], *restarts),
        *("--log-dir", str(logs / "torchrun"), "--redirects", "3", "--tee", "3"),
        *("--no-python", "/bin/sh", "-c", RANK_SCRIPT, str(logs)),
        *(interpreter, "-u", *order.spec.command),
    )


def _accelerate(order: JobOrder, interpreter: str, logs: Path) -> tuple[str, ...]:
    """accelerate runs torchrun for two or more ranks, and starts the script itself for one."""
    start = (interpreter, "-m", "accelerate.commands.launch", "--config_file", str(logs.parent / ACCELERATE_CONFIG))
    one = (*start, "--num_processes", "1", "--gpu_ids", "all", "--main_process_port", order.env["MASTER_PORT"])
    if ranks(order) * nodes(order) == 1:
        return (*one, "--no_python", interpreter, "-u", *order.spec.command)
    place = (
        ()
        if order.gang is None
        else ("--num_machines", str(nodes(order)), "--machine_rank", str(order.gang.rank), "--rdzv_backend", "static")
    )
    return (
        *(*start, "--multi_gpu", "--num_processes", str(ranks(order) * nodes(order)), "--gpu_ids", "all", *place),
        *("--main_process_ip", order.env["MASTER_ADDR"], "--main_process_port", order.env["MASTER_PORT"]),
        *("--max_restarts", str(order.spec.max_restarts)),
        *("--log_dir", str(logs / "torchrun"), "--tee", "3"),
        *("--no_python", "/bin/sh", "-c", RANK_SCRIPT, str(logs)),
        *(interpreter, "-u", *order.spec.command),
    )


def host_file(order: JobOrder, place: GangPlace) -> str:
    """deepspeed's list of the nodes, by rank, with the number of ranks on each."""
    return "".join(f"{address} slots={ranks(order)}\n" for address in place.addresses)


def _deepspeed(order: JobOrder, interpreter: str, logs: Path) -> tuple[str, ...]:
    """deepspeed takes its GPUs from the mask, which `environment` gives it as indices. /dev/null as the host file keeps
    it from reading the machine's own, which may be that of a cluster. On several nodes its own way is ssh to each of
    them; with `--no_ssh` it starts the ranks of one node alone."""
    place = order.gang
    hosts: tuple[str, ...] = ("--hostfile", "/dev/null")
    if place is not None:
        hosts = ("--hostfile", str(logs.parent / HOST_FILE), "--no_ssh", "--node_rank", str(place.rank))
    command = order.spec.command
    script = ("--module", *command[1:]) if command[0] == "-m" else command
    return (
        *(interpreter, "-m", "deepspeed.launcher.runner", *hosts),
        *("--master_addr", order.env["MASTER_ADDR"], "--master_port", order.env["MASTER_PORT"], *script),
    )


def _horovodrun(order: JobOrder, interpreter: str) -> tuple[str, ...]:
    """With gloo as its controller it needs no MPI; the build decides what the ranks reduce with."""
    return (
        *(interpreter, "-m", "horovod.runner.launch", "--gloo"),
        *("-np", str(ranks(order)), "-H", f"localhost:{ranks(order)}"),
        *(interpreter, "-u", *order.spec.command),
    )


def _bagua(order: JobOrder, interpreter: str) -> tuple[str, ...]:
    """Bagua's launcher is a copy of torch.distributed.launch."""
    return (
        *(interpreter, "-m", "bagua.distributed.launch", "--nproc_per_node", str(ranks(order))),
        *("--master_addr", order.env["MASTER_ADDR"], "--master_port", order.env["MASTER_PORT"], *order.spec.command),
    )
