"""Ranks: which process launched this one, to tell the ranks of one training from independent programs.

A launcher such as torchrun, accelerate or deepspeed starts all ranks at once. They share only their parent and what it
put into their environment. Lightning's and Fabric's own launchers make the script itself rank 0, which starts the
script again for every other rank, with a copy of its environment.

A variable alone proves nothing, because everything inherits it that a rank, a notebook or a terminal multiplexer
starts. So the process tree counts too, with the environment that each process was *started* with: a process does not
become a rank by setting a variable later (as Lightning's rank 0 sets LOCAL_RANK for itself). The exceptions are the
children of Python's multiprocessing: accelerate's notebook_launcher and torch's start_processes tell them their rank
after the start, so there the current environment counts, and the process that started them is the launcher.

Ranks, and the children of a pool, work for the process that started them. When that dies they are orphans: they train
at a rendezvous that no one else comes to, or wait for work that no one sends. They give back what they hold
(`gpulease.lease`) and take no more (`check_not_orphaned`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from gpulease_protocol.errors import LeaseLost
from gpulease_protocol.host.process_id import ProcessId, boot_id, proc_shows_own_pids, stat

FINDER_VARIABLE = "GPULEASE_FOUND_BY"
"""`pid:start_ticks` of the process that found the devices of GPULEASE_LEASE_ID, for the ranks that it launches."""

RANK_VARIABLES = (
    "RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK",
    "HOROVOD_RANK",
)
"""Variables that distinguish ranks from each other and from their launcher, even if the launcher was itself started
with LOCAL_RANK set: by a rank of another training, or from a shell used for debugging."""
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")
"""One of these is set if a launcher started the rank, and not a shell script."""
REAPERS = {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "launchd", "s6-svscan", "runit"}
"""Programs that adopt orphaned processes and launch no ranks."""
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK")
"""One of these is set in every rank: of torchrun, accelerate, deepspeed and Lightning; of mpirun; of horovodrun with
gloo. Slurm's SLURM_LOCALID is missing here because a batch script has it too."""
WORLD_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")
"""How many ranks there are. A single rank, as in a shell used for debugging, shares with no other."""
START_OF_MULTIPROCESSING = re.compile(r"\bfrom multiprocessing\.(spawn|forkserver) import (spawn_)?main; ")
"""In the word after `python -c` of a spawned child and of the fork server. With late versions of Python 3.14 another
statement goes before it in that of the fork server, which imports the caller's main module."""
ENDED_PROCESS = ProcessId(0, 0)
"""A process that has ended; nothing else is known of it."""
MAX_ANCESTORS = 64
"""How far up the process tree to look."""


def launcher_process(proc: Path = Path("/proc")) -> ProcessId | None:
    """The process that launched this one as one of several ranks; None if this is no rank or its launcher is gone.

    It is the nearest ancestor that was started with other rank variables or none, so that child processes of a rank
    belong to that rank.
    """
    own = _own_environment(proc)
    if not proc_shows_own_pids() or not _is_one_of_several(own):
        return None
    pid = _launcher_pid(own, proc)
    return None if pid <= 0 or _is_reaper(pid, own, proc) else ProcessId.of(pid)


def forking_launcher(proc: Path = Path("/proc")) -> ProcessId | None:
    """The process that started this one by multiprocessing and then made it one of several ranks; None if none did.

    That process may live on after the training, as a notebook does.
    """
    if _is_one_of_several(_own_environment(proc)) or not _is_one_of_several(os.environ):
        return None
    return pool_parent() if proc_shows_own_pids() else None


def pool_parent() -> ProcessId | None:
    """The process that started this one by multiprocessing or joblib, dead or alive; None if none did."""
    global _pool_parent  # noqa: PLW0603 - looked up once in each process: a dead one has no start time any more
    if _pool_parent is None or _pool_parent[0] != os.getpid():
        _pool_parent = os.getpid(), _find_pool_parent()
    return _pool_parent[1]


_pool_parent: tuple[int, ProcessId | None] | None = None
"""The process that asked, and what it found."""


def _find_pool_parent(proc: Path = Path("/proc")) -> ProcessId | None:
    process = sys.modules.get("multiprocessing.process")
    parent = None if process is None else process.parent_process()
    if parent is not None and parent.pid is not None:
        return ProcessId.of(parent.pid) or ProcessId(parent.pid, 0)
    if any("loky.backend" in word for word in sys.orig_argv[:4]):  # it does not say which process started this one
        return ENDED_PROCESS if _is_reaper(os.getppid(), {}, proc) else ProcessId.of(os.getppid())
    return None


def check_not_orphaned(proc: Path = Path("/proc")) -> None:
    """Raise LeaseLost if this process is a rank or a child of a pool, and its launcher or parent has ended."""
    if not proc_shows_own_pids():
        return
    parent = pool_parent()
    if parent is not None and not parent.alive():
        raise _orphaned(parent.pid or None)
    own = _own_environment(proc)
    if not _is_one_of_several(own):
        return
    pid = _launcher_pid(own, proc)
    # Whatever that finder's program started to launch training has this variable too; a process that adopts has not.
    finder = finder_process(own)
    if finder is not None and not finder.alive() and finder_process(_environment(pid, proc)) != finder:
        raise _orphaned(finder.pid)
    if pid > 0 and any(name in own for name in LAUNCHER_VARIABLES) and _is_reaper(pid, own, proc):
        raise _orphaned(None)


def _orphaned(pid: int | None) -> LeaseLost:
    name = "The process" if pid is None else f"Process {pid}"
    return LeaseLost(
        f"{name} that started this one has ended.",
        remedy="End this process too, and start everything again.",
    )


def finder_process(environ: Mapping[str, str] = os.environ) -> ProcessId | None:
    """The process that found the devices of GPULEASE_LEASE_ID."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)", environ.get(FINDER_VARIABLE, ""))
    return ProcessId(*map(int, match.groups())) if match else None


def _is_one_of_several(environ: Mapping[str, str]) -> bool:
    """True if these variables make a process one of several ranks."""
    sizes = (environ.get(name, "") for name in WORLD_SIZE_VARIABLES)
    several = any(int(size) > 1 for size in sizes if re.fullmatch("[0-9]{1,9}", size))
    return several and any(name in environ for name in LOCAL_RANK_VARIABLES)


def _launcher_pid(own: Mapping[str, str], proc: Path) -> int:
    """The nearest ancestor that was started with other rank variables or none; 0 if there is none."""
    pid, values = os.getpid(), _rank_values(own)
    for _ in range(MAX_ANCESTORS):
        pid = _parent(pid, proc)
        if pid <= 0 or _rank_values(_environment(pid, proc)) != values:
            break
    return pid


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """True for a rank of any launcher, and for a child that Python's multiprocessing has started."""
    process = sys.modules.get("multiprocessing.process")  # slow to import, and always imported in its children
    if any(name in environ for name in LOCAL_RANK_VARIABLES) or (
        process is not None and process.parent_process() is not None
    ):
        return True
    # Only its command line shows a spawned child, or the fork server, while it imports the caller's main module.
    return any(START_OF_MULTIPROCESSING.search(word) for word in sys.orig_argv[:8])


def is_first_rank() -> bool:
    """False in every rank of a host but the first, so that one of them speaks for all."""
    return all(os.environ.get(name, "0") == "0" for name in LOCAL_RANK_VARIABLES)


def descends_from(ancestor: ProcessId, proc: Path = Path("/proc")) -> bool:
    """True if that process started this one, directly or not, and all processes in between are alive."""
    pid = os.getpid()
    for _ in range(MAX_ANCESTORS):
        pid = _parent(pid, proc)
        if pid == ancestor.pid:
            return ancestor.alive()
        if pid <= 1:
            return False
    return False


def shared_key(launched_by: ProcessId, generation: int, proc: Path = Path("/proc")) -> str:
    """An Idempotency-Key that is the same in all ranks of one training, whatever they ask for, and nowhere else.

    It includes the mask, so that ranks that a launcher has bound to different GPUs do not share. It also includes what
    distinguishes training runs with the same parent: torchrun's run id, which unlike the port survives restarts of the
    ranks; else the address of the rendezvous.
    """
    import hashlib  # noqa: PLC0415 - loads slowly, and only ranks need it

    own = _own_environment(proc) if forking_launcher(proc) is None else os.environ
    names = ("TORCHELASTIC_RUN_ID",) if "TORCHELASTIC_RUN_ID" in own else ("MASTER_ADDR", "MASTER_PORT")
    run = [own.get(name) for name in names] + [os.environ.get("CUDA_VISIBLE_DEVICES")]
    whole = json.dumps([boot_id(), launched_by.pid, launched_by.start_ticks, run, generation])
    return f"ranks-{hashlib.sha256(whole.encode()).hexdigest()}"


def _rank_values(environ: Mapping[str, str]) -> list[str | None]:
    return [environ.get(name) for name in (*LOCAL_RANK_VARIABLES, *WORLD_SIZE_VARIABLES, *RANK_VARIABLES)]


def _is_reaper(pid: int, own: Mapping[str, str], proc: Path) -> bool:
    """True if that process is the parent only because it adopted this rank when its real parent exited.

    Process 1 of a container may be a launcher itself; ranks started by its script are in its process group.
    """
    parent, this = stat(pid, proc), stat(os.getpid(), proc)
    if parent is not None and parent.name in REAPERS:
        return True
    started = any(variable in own for variable in LAUNCHER_VARIABLES)
    return pid == 1 and not started and (parent is None or this is None or parent.group != this.group)


def _own_environment(proc: Path) -> Mapping[str, str]:
    """The environment this process was started with; its current one if that was overwritten, as by `setproctitle`."""
    return _environment(os.getpid(), proc) or os.environ


def _environment(pid: int, proc: Path) -> dict[str, str]:
    """The environment a process was started with; empty if it may not be read."""
    pairs = (entry.partition("=") for entry in _read_text(proc / str(pid) / "environ").split("\0"))
    return {name: value for name, equals, value in pairs if name and equals}


def _parent(pid: int, proc: Path) -> int:
    process = stat(pid, proc)
    return 0 if process is None else process.parent


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
