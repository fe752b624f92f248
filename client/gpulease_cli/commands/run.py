"""`gpulease run`: a command in the foreground, bound to leased GPUs.

When the lease is lost, the command and all its descendants are terminated, because someone else may have the GPUs by
then. When it is preempted, the command gets SIGTERM at once, as a job does, and has the notice to save its work.
When the command ends by itself, processes that it left behind stay: that may be intended, and the daemon names
them while the GPUs drain. A guard between this program and the command ends it when this program is killed
(`gpulease_protocol.host.command_guard`).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click
from click.core import ParameterSource

from gpulease.client import Client
from gpulease.lease import NOT_RENEWED, HeldLease
from gpulease.own_node import node_to_ask_for
from gpulease_cli import caller_mask, output, wait_progress
from gpulease_cli.help_format import ARGUMENTS_LAST, command
from gpulease_cli.option_types import Field, NodeRange, Number, OneOf
from gpulease_cli.options import (
    DEVICES,
    LABEL,
    MASK,
    MODEL,
    OWN_NODE,
    PREEMPTIBLE,
    PRIORITY,
    RECLAIM,
    TIME,
    TOPOLOGY,
    WAIT,
    ttl,
)
from gpulease_cli.parameters import argument, option
from gpulease_cli.surrounding_lease import BorrowedLease, chosen_gpus, surrounding_lease
from gpulease_protocol.errors import GpuleaseError, InvalidRequest, LeaseLost, NotFound, NotNow, UnknownOrdinals
from gpulease_protocol.host import command_guard, process_tree
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.launchers import choose_mask, usage_error
from gpulease_protocol.model import Device, Launcher, Mask
from gpulease_protocol.obstacle_groups import gpu_ranges
from gpulease_protocol.requests import LeaseRequest

GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL for a command after its lease is lost."""
BY_UUID = "Check CUDA on this host, or use --mask uuids if the program reads UUIDs. The command was not started."
KILL_S = 5.0
"""How long SIGKILL is repeated; a process that survives hangs in the kernel or belongs to another user."""
ALWAYS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
NOT_NOW, FAILED, NOT_EXECUTABLE, NOT_FOUND = 75, 125, 126, 127
"""Exit codes of this program's own, as those of `env` and `docker run`; 75 is EX_TEMPFAIL of sysexits.h."""


NEW = option("--new", is_flag=True, help="Lease other GPUs, even if this shell or job has a lease.")
QUIET = option("-q", "--quiet", is_flag=True, help="Do not print which GPUs the command gets.")
COUNT = option(
    "-n",
    "--gpus",
    type=Field(Number(), LeaseRequest, "count"),
    metavar="N",
    show_default="1, or within a lease all its GPUs",
    help="Number of GPUs.",
)
TTL = ttl(
    "60s",
    "How long the command goes on while no daemon answers, and how soon the GPUs are free again if this program dies"
    " and the daemon does not see it.",
)


def lease_options(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of what runs under a lease, in this order."""
    chosen = (MODEL, TOPOLOGY, OWN_NODE, MASK, PRIORITY, PREEMPTIBLE, TIME, RECLAIM)
    for add_option in reversed((COUNT, DEVICES, WAIT, LABEL, TTL, *chosen, NEW, QUIET)):
        function = add_option(function)
    return function


@command(
    context_settings=ARGUMENTS_LAST,
    examples=(
        "gpulease run -n 2 --wait 10m -- python train.py --epochs 3",
        "gpulease run -n 1 -- bash",
        "gpulease run --nodes 2 -n 4 --wait 10m -- train.py        # torchrun on two nodes, 8 ranks",
    ),
)
@argument(
    "words",
    nargs=-1,
    required=True,
    metavar="COMMAND...",
    help="Command to run, with its arguments, after `--`.",
)
@lease_options
@option(
    "--nodes",
    type=NodeRange(),
    metavar="N",
    default="1",
    help="Number of nodes. On several nodes the command runs as a job, as with submit, that ends with this program.",
)
@option(
    "--launcher",
    type=OneOf(Launcher),
    metavar="LAUNCHER",
    show_default="as submit",
    help="With --nodes: what starts the ranks.",
)
def run(
    words: tuple[str, ...],
    gpus: int | None,
    nodes: tuple[int, int | None],
    launcher: Launcher | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Lease GPUs, run a command on them, and release them. Within a lease, the command runs on its GPUs.

    With --nodes, the command runs as a job on several nodes: its output is shown here, and Ctrl-C ends it on all nodes.
    Exits with the command's exit code, or with 4 if the lease was lost, 75 if the GPUs were not granted in time, 126 if
    the command cannot be executed, 127 if it does not exist, and 125 after any other failure.
    """
    tell = not quiet and sys.stderr.isatty()
    if nodes[1] is not None:
        raise InvalidRequest(
            "--nodes: run takes one number of nodes.",
            remedy=f"An elastic job is submitted: gpulease submit --nodes {nodes[0]}:{nodes[1]}",
        )
    if nodes[0] > 1:
        return _run_on_nodes(words, gpus or 1, nodes[0], launcher, tell, options)
    if launcher is not None:
        raise InvalidRequest(
            "--launcher: is for a command on several nodes.", remedy="Add --nodes, or type it: gpulease run -- torchrun"
        )
    code = check_command(words)
    if code is not None:
        return code
    return run_leased(list(words), gpus, tell, "the command", {}, options | {"quiet": quiet})


def _run_on_nodes(
    words: tuple[str, ...], gpus: int, nodes: int, launcher: Launcher | None, tell: bool, options: Mapping[str, Any]
) -> int:
    """Run a command on several nodes; its exit code, or one of `run`'s own. Raises InvalidRequest, a usage error."""
    from gpulease_cli.commands import foreground_job  # noqa: PLC0415 - for this mode only

    if click.get_current_context().get_parameter_source("ttl") is ParameterSource.COMMANDLINE:
        raise InvalidRequest("--ttl: a job has none; it is cancelled when this program ends.", remedy="Leave it out.")
    request = foreground_job.request_for(words, gpus, nodes, launcher, options)
    try:
        return foreground_job.run(request, options["wait"], tell=tell)
    except InvalidRequest:
        raise
    except GpuleaseError as error:
        output.print_gpulease_error(error)
        return NOT_NOW if isinstance(error, NotNow) else NOT_FOUND if isinstance(error, NotFound) else FAILED


def check_command(words: tuple[str, ...]) -> int | None:
    """Say why a command cannot be run, and return the exit code; None if it can. Nothing is leased yet.

    Raises InvalidRequest for one that would take GPUs outside the lease.
    """
    problem = _not_runnable(words[0])
    if problem is not None:
        code, why, remedy = problem
        output.print_error("the command was not started", why, f"{remedy}; no GPU was leased")
        return code
    outside = usage_error(Launcher.PLAIN, words)
    if outside is not None:
        raise InvalidRequest(f"{outside}.", remedy="-n and --devices choose the GPUs; no GPU was leased.")
    return None


@command(examples=("gpulease shell -n 1 --wait 10m",))
@lease_options
def shell(gpus: int | None, quiet: bool, **options: Any) -> int:
    """Start a shell on leased GPUs; they are released when it ends.

    GPULEASE names the GPUs, for a prompt: PS1='${GPULEASE:+($GPULEASE) }'"$PS1" in ~/.bashrc.
    """
    program = os.environ.get("SHELL") or "/bin/sh"
    options["mask"] = options["mask"] or Mask.UUIDS
    return run_leased([program], gpus, not quiet, "this shell", {"GPULEASE": _gpus}, options | {"quiet": quiet})


def run_leased(
    command: list[str],
    gpus: int | None,
    tell: bool,
    what: str,
    more: Mapping[str, Callable[[tuple[Device, ...]], str]],
    options: Mapping[str, Any],
) -> int:
    """Run a command under a lease; its exit code, or one of `run`'s own. `more`: further variables, from the GPUs.

    `options`: the values of `lease_options` but for the number of GPUs. Raises InvalidRequest, a usage error.
    """
    if gpus is not None and options["devices"] is not None:
        raise InvalidRequest("Give -n or --devices, not both.")
    process = _ForegroundProcess(command)
    try:
        with wait_progress.patient_client(options["wait"]) as client, _leased(client, process, gpus, options) as lease:
            environ = _environ(lease, options["mask"] or choose_mask(Launcher.PLAIN, command))
            environ |= {name: value(lease.gpus) for name, value in more.items()}
            if tell:
                _print_granted(lease, what)
            with _forward_signals(process.signal):
                code = process.run(lease, environ)
    except InvalidRequest:  # a usage error
        raise
    except GpuleaseError as error:
        output.print_gpulease_error(error)
        lost = isinstance(error, LeaseLost)
        return NOT_NOW if isinstance(error, NotNow) else output.LOST if lost else FAILED
    if lease.lost.is_set():
        _print_lease_lost(lease, process.await_termination())
        return output.LOST
    return code


@contextmanager
def _leased(
    client: Client, process: _ForegroundProcess, gpus: int | None, options: Mapping[str, Any]
) -> Iterator[HeldLease | BorrowedLease]:
    """The lease of this shell or job, unless it has none or a new one is wanted."""
    surrounding = None if options["new"] else surrounding_lease(client)
    if surrounding is not None:
        chosen = chosen_gpus(surrounding, gpus, options["devices"])
        with BorrowedLease(client, surrounding, chosen, process.terminate, process.preempt) as borrowed:
            yield borrowed
        return
    devices, node = options["devices"], node_to_ask_for(client, options["node"], must_be_here=True)
    among = caller_mask.among(client, gpus or 1, devices, node, quiet=options["quiet"])
    with (
        wait_progress.QueueProgress(client) as progress,
        client.lease(
            count=None if devices is not None else gpus or 1,
            devices=devices,
            among=among,
            wait_s=options["wait"],
            ttl_s=options["ttl"],
            label=options["label"],
            gpu_model=options["model"],
            topology=options["topology"].value,
            priority=options["priority"].value,
            preemptible=options["preemptible"] or None,
            time_s=options["time"],
            reclaim_idle_after_s=options["reclaim_idle_after"],
            node=node,
            on_lost=process.terminate,
            on_queued=progress.start,
        ) as lease,
    ):
        progress.close()
        lease.on_preempting = process.preempt
        yield lease


def _print_granted(lease: HeldLease | BorrowedLease, what: str) -> None:
    where = ", ".join(sorted({gpu.node for gpu in lease.gpus}))
    until = f"until {what} ends" if isinstance(lease, HeldLease) else "as before"
    line = f"gpulease: {_gpus(lease.gpus)} of {where} ({lease.id}), {until}"
    output.say(f"\x1b[2m{line}\x1b[0m\n" if sys.stderr.isatty() else f"{line}\n")


def _gpus(gpus: tuple[Device, ...]) -> str:
    return gpu_ranges([gpu.index for gpu in gpus])


def _environ(lease: HeldLease | BorrowedLease, mask: Mask) -> dict[str, str]:
    """The command's environment. Raises UnknownOrdinals with a remedy for the command line."""
    try:
        return lease.environ(mask)
    except UnknownOrdinals as error:
        raise UnknownOrdinals(error.detail, remedy=BY_UUID) from error


def _not_runnable(name: str) -> tuple[int, str, str] | None:
    """Exit code, why a program cannot run, and what to do; None if it can."""
    if shutil.which(name) is not None:
        return None
    interpreter = f"python {name}" if name.endswith(".py") else f"sh {name}"
    if "/" in name and os.path.isdir(name):
        return NOT_EXECUTABLE, f"{name} is a directory", "name a program in it"
    if "/" in name and os.path.exists(name):
        return NOT_EXECUTABLE, f"{name} is not executable", f"chmod +x {name}, or {interpreter}"
    why, remedy = f"there is no program {name!r} on PATH", "check its name"
    if os.path.isfile(name):
        why, remedy = f"{why}, but a file of this name is here", f"./{name}, or {interpreter}"
    elif " " in name:
        remedy = "leave out the quotes, or write sh -c '...'"
    return NOT_FOUND, why, remedy


def _print_lease_lost(lease: HeldLease | BorrowedLease, survivors: tuple[int, ...]) -> None:
    why, remedy = f"{lease.id} ended before the command did", "run the command again"
    if isinstance(lease, HeldLease) and (lease.loss_reason or "").startswith(NOT_RENEWED):
        why = f"{lease.id} was not renewed for its --ttl, so that someone else may have its GPUs; the command was ended"
        remedy = "run the command again when the daemon answers; a longer --ttl lets it go on without one for as long"
    if survivors:
        why += f"; these of its processes could not be killed: {', '.join(map(str, survivors))}"
        remedy = "end them by hand, they may be on someone else's GPUs; then run the command again"
    output.print_error("lease lost", why, remedy)


class _ForegroundProcess:
    """The command and its guard, which can be signaled from the moment at which they exist."""

    def __init__(self, command: list[str]) -> None:
        self._guard = command_guard.Guard(command, GRACE_S, KILL_S)
        self._started = False
        self._pending_signals: list[int] = []
        # Reentrant, because a signal handler may run within any block that holds it.
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._terminating = False
        self._told_at_s = float("inf")
        """When the command was told that its lease is preempted."""
        self._terminated = threading.Event()
        self._survivors: tuple[int, ...] = ()

    def run(self, lease: HeldLease | BorrowedLease, environ: dict[str, str]) -> int:
        """Exit code of the command, 128 + N when signal N ended it."""
        process_tree.adopt_orphans()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, the kernel would discard the exit code
        with self._lock:
            if self._terminating:
                return output.LOST
            error = self._guard.start(environ)
            if error:
                output.print_error("the command was not started", error, "check that it is a program for this machine")
                return self._guard.wait()
            self._started = True
            for number in self._pending_signals:
                self.signal(number)
        _reap_until_ended(self._guard.pid)
        with self._lock:
            self._ended.set()
        code = self._guard.wait()
        if lease.lost.is_set():
            self.await_termination()
        elif code < 0:  # the guard was killed, which may have left the command alive
            _end_descendants(GRACE_S)
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Send a signal, at once or as soon as there is a process."""
        with self._lock:
            if self._started:
                self._guard.send_signal(number)
            else:
                self._pending_signals.append(number)

    def preempt(self, lease: HeldLease | BorrowedLease) -> None:
        """Tell the command that its lease ends soon, as a job is told: by SIGTERM, so that it saves a checkpoint."""
        output.say(f"gpulease: {lease.id} is preempted: the command gets SIGTERM now, and ends with the lease\n")
        self._told_at_s = time.monotonic()
        self.signal(signal.SIGTERM)

    def terminate(self, lease: HeldLease | BorrowedLease) -> None:
        """End the command and its descendants, which may no longer use the GPUs; called in the thread that renews."""
        try:
            with self._lock:
                self._terminating = True
                if not self._started:
                    return
                self.signal(signal.SIGTERM)
            now = time.monotonic()
            # A command that had the notice of a preemption needs no more time.
            told_at_s = now if lease.preempt_at is None else min(now, self._told_at_s)
            end = max(now, told_at_s + GRACE_S)
            # First the command alone: a launcher such as torchrun ends its ranks in its own order.
            if self._ended.wait(end - now):
                process_tree.signal_all(_descendants(), signal.SIGTERM)
                process_tree.await_end(_descendants, end - time.monotonic())
            self._survivors = tuple(process.pid for process in process_tree.kill_all(_descendants, KILL_S))
        finally:
            self._terminated.set()

    def await_termination(self) -> tuple[int, ...]:
        """Wait for `terminate`, which another thread may be about to call, and return the pids that survived it."""
        self._terminated.wait(2 * (GRACE_S + KILL_S))
        return self._survivors


def _end_descendants(grace_s: float) -> None:
    process_tree.signal_all(_descendants(), signal.SIGTERM)
    process_tree.await_end(_descendants, grace_s)
    process_tree.kill_all(_descendants, KILL_S)


def _descendants() -> set[ProcessId]:
    """Every living process below this one."""
    return process_tree.descendants(os.getpid())


def _reap_until_ended(pid: int) -> None:
    """Return when this child has ended, before its pid can be reused; meanwhile reap adopted orphans."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != pid:
        os.waitpid(ended.si_pid, 0)


@contextmanager
def _forward_signals(send: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, signals go to the command instead of to this process.

    Signals from the terminal (Ctrl-C) already reach the command, which is in the same foreground process group. Signals
    that were ignored when this process started stay ignored, as under nohup.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        if number not in FROM_TERMINAL or not _in_foreground():
            send(number)

    before = {number: signal.getsignal(number) for number in (*ALWAYS, *FROM_TERMINAL)}
    taken = [number for number, action in before.items() if action is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, forward)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _in_foreground() -> bool:
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
