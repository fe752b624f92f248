"""Who launched this process, so that the ranks of one training are told from independent programs.

A launcher such as torchrun, accelerate or deepspeed starts all ranks at once; they share nothing but their parent and
what it put into their environment. Lightning's and Fabric's own launchers make the script itself rank 0, which starts
the script once more for each further rank, with a copy of its own environment.

A variable alone proves nothing: it is inherited by whatever a rank, a notebook or a terminal multiplexer starts. So
the tree of processes is asked as well, and each of them for the environment it was *started* with: what a process has
put into its environment later (Lightning's rank 0 sets LOCAL_RANK for itself) does not make it a rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gpulease.owner import Owner, boot_id, sees_itself, stat

PLACE = (
    "RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK",
    "HOROVOD_RANK",
)
"""What tells one rank from another, and from its launcher, even where the launcher itself was started with LOCAL_RANK
in its environment: by a rank of another training, or in a shell where somebody was debugging."""
RUN = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")
"""One of these is there when a launcher has started the rank, and not a shell script."""
ADOPTERS = {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "launchd", "s6-svscan", "runit"}
"""Programs that become the parent of processes whose own has ended, and that launch no ranks."""
RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK")
"""One of these is in the environment of every rank: of torchrun, accelerate, deepspeed and Lightning; of mpirun; of
horovodrun with gloo. Slurm's SLURM_LOCALID is not here, because a batch script has it too."""
SIZE = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")
"""How many ranks there are. One by itself, as in a shell where somebody was debugging, shares with nobody."""
ANCESTORS = 64
"""How far up the tree of processes one looks."""


def launcher(proc: Path = Path("/proc")) -> Owner | None:
    """The process that launched this one as one of several ranks; None if this process is no such rank, or if its
    launcher has gone.

    It is the nearest ancestor that was started with another place among ranks or none, so what a rank starts belongs
    with the rank.
    """
    pid, own = os.getpid(), _own_environment(proc)
    if not sees_itself() or not any(int(own[name]) > 1 for name in SIZE if own.get(name, "").isdigit()):
        return None
    place = _place(own)
    if not any(name in own for name in RANK):
        return None
    for _ in range(ANCESTORS):
        pid = _parent(pid, proc)
        if pid <= 0 or _place(_environment(pid, proc)) != place:
            break
    return None if pid <= 0 or _has_adopted(pid, own, proc) else Owner.of(pid)


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """True for a rank of any launcher, and for a child that Python's multiprocessing has started."""
    process = sys.modules.get("multiprocessing.process")  # which loads slowly, and is there in its children
    if any(name in environ for name in RANK) or (process is not None and process.parent_process() is not None):
        return True
    # While a spawned child, or the fork server, still imports the caller's main module, only its command says so.
    return any(word.startswith("from multiprocessing.") for word in sys.orig_argv[:8])


def descends_from(ancestor: Owner, proc: Path = Path("/proc")) -> bool:
    """True when this process was started by that one, directly or not, and all between the two still live."""
    pid = os.getpid()
    for _ in range(ANCESTORS):
        pid = _parent(pid, proc)
        if pid == ancestor.pid:
            return ancestor.alive()
        if pid <= 1:
            return False
    return False


def shared_key(launched_by: Owner, round_: int, proc: Path = Path("/proc")) -> str:
    """An Idempotency-Key that all ranks of one training find alike, whatever they ask for, and nobody else does.

    The mask is in it, so ranks that a launcher has bound to GPUs of their own do not share. So is what tells one
    training from another of the same parent: the id of torchrun's run, which lasts over restarts of its ranks while
    the port does not; else where the ranks meet.
    """
    import hashlib  # noqa: PLC0415 - loads slowly, and only ranks need it

    own = _own_environment(proc)
    names = ("TORCHELASTIC_RUN_ID",) if "TORCHELASTIC_RUN_ID" in own else ("MASTER_ADDR", "MASTER_PORT")
    run = [own.get(name) for name in names] + [os.environ.get("CUDA_VISIBLE_DEVICES")]
    whole = json.dumps([boot_id(), launched_by.pid, launched_by.start_ticks, run, round_])
    return f"ranks-{hashlib.sha256(whole.encode()).hexdigest()}"


def _place(environ: Mapping[str, str]) -> list[str | None]:
    return [environ.get(name) for name in (*RANK, *SIZE, *PLACE)]


def _has_adopted(pid: int, own: Mapping[str, str], proc: Path) -> bool:
    """True when that process is the parent only because the one that started this rank has ended.

    Process 1 of a container may well be a launcher; ranks that a script of it has started are in its process group.
    """
    parent, this = stat(pid, proc), stat(os.getpid(), proc)
    if parent is not None and parent.name in ADOPTERS:
        return True
    started = any(variable in own for variable in RUN)
    return pid == 1 and not started and (parent is None or this is None or parent.group != this.group)


def _own_environment(proc: Path) -> Mapping[str, str]:
    """What this process was started with; what it has now if that was overwritten, as `setproctitle` does."""
    return _environment(os.getpid(), proc) or os.environ


def _environment(pid: int, proc: Path) -> dict[str, str]:
    """What a process was started with; nothing where it may not be read."""
    pairs = (entry.partition("=") for entry in _text(proc / str(pid) / "environ").split("\0"))
    return {name: value for name, equals, value in pairs if name and equals}


def _parent(pid: int, proc: Path) -> int:
    seen = stat(pid, proc)
    return 0 if seen is None else seen.parent


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
