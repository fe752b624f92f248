"""`gpulease run`: a command in the foreground, bound to leased GPUs.

When the lease is lost, the command and everything below it is ended, because the GPUs may be someone else's by then.
When the command ends by itself, what it has left behind stays: that may be meant, and the daemon names it while the
GPUs drain.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated

import typer

from gpulease.cli import descendants, output, waiting
from gpulease.cli.options import Gpus, Label, MaskOption, Model, Node, Wait, duration
from gpulease.client import Client
from gpulease.errors import UnknownOrdinals
from gpulease.launchers import mask_for
from gpulease.lease import HeldLease
from gpulease.model import Launcher, Mask

GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL for a command whose lease is lost."""
BY_UUID = "See what CUDA says here, or say --mask uuids if the program reads UUIDs. The command was not started."
KILL_S = 5.0
"""How long to go on with SIGKILL; what lives then hangs in the kernel, or is another user's."""
ALWAYS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What to run, with its arguments, after `--`.")
    ],
    gpus: Gpus = 1,
    wait: Wait = 0.0,
    label: Label = "",
    ttl: Annotated[
        float,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            show_default="60s",
            help="How soon the GPUs are free again if this program dies.",
        ),
    ] = 60.0,
    model: Model = None,
    node: Node = None,
    mask: MaskOption = None,
) -> int:
    """Lease GPUs, run a command bound to them, release them. Exits with the command's code, 4 if the lease was lost."""
    program = shutil.which(command[0])
    if program is None:
        output.complain(
            "the command was not started",
            f"there is no program {command[0]!r} on PATH",
            "check its name; no GPU was leased",
        )
        return 127
    foreground = _Foreground(command)
    with (
        Client() as client,
        waiting.QueueWatch(client) as queue,
        client.lease(
            count=gpus,
            wait_s=wait,
            ttl_s=ttl,
            label=label,
            gpu_model=model,
            node=node,
            on_lost=foreground.give_up,
            on_queued=queue.watch,
        ) as lease,
    ):
        queue.close()
        environ = _environ(lease, mask or mask_for(Launcher.PLAIN, command))
        with _passed_on(foreground.signal):
            code = foreground.run(lease, environ)
    if lease.lost.is_set():
        _complain_of_loss(lease.id, foreground.await_sweep())
        return output.LOST
    return code


def _environ(lease: HeldLease, mask: Mask) -> dict[str, str]:
    """The command's environment. Raises UnknownOrdinals, in the words of the command line."""
    try:
        return lease.environ(mask)
    except UnknownOrdinals as error:
        raise UnknownOrdinals(error.detail, remedy=BY_UUID) from error


def _complain_of_loss(lease_id: str, left: tuple[int, ...]) -> None:
    why, remedy = f"lease {lease_id} ended before the command did", "run it again"
    if left:
        why += f", and of what it had started pid {', '.join(map(str, left))} could not be ended"
        remedy = "end that by hand, it may be on someone else's GPUs; then run it again"
    output.complain("lease lost", why, remedy)


class _Foreground:
    """The command's process, for those who must be able to signal it from the moment at which it exists."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        # Reentrant, because a signal handler may run within any block that holds it. Whoever holds it while `_ended` is
        # not set knows that the pid is still the command's.
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._given_up = False
        self._swept = threading.Event()
        self._left: tuple[int, ...] = ()

    def run(self, lease: HeldLease, environ: dict[str, str]) -> int:
        """Exit code of the command, 128 + N when signal N ended it."""
        descendants.adopt_orphans()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # were it ignored, the kernel would throw the exit code away
        with self._lock:
            if self._given_up:
                return output.LOST
            try:
                self._process = subprocess.Popen(self._command, env=environ)
            except OSError as error:
                output.complain(
                    "the command was not started", str(error), "check that it is a program for this machine"
                )
                return 126
            for number in self._early:
                self.signal(number)
        _reap_until_ended(self._process.pid)
        with self._lock:
            self._ended.set()
        code = self._process.wait()
        if lease.lost.is_set():
            self.await_sweep()
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Send a signal, at once or as soon as there is a process."""
        with self._lock:
            if self._process is None:
                self._early.append(number)
            elif not self._ended.is_set():
                with suppress(PermissionError):  # under sudo it is another user's
                    os.kill(self._process.pid, number)

    def give_up(self, lease: HeldLease) -> None:
        """End a command that may no longer use its GPUs, and all below it; called in the thread that found out."""
        try:
            with self._lock:
                self._given_up = True
                if self._process is None:
                    return
                self.signal(signal.SIGTERM)
            end = time.monotonic() + GRACE_S
            # First the command alone: a launcher such as torchrun ends its ranks in its own order.
            if self._ended.wait(GRACE_S) and descendants.send_all(signal.SIGTERM):
                descendants.await_end(end - time.monotonic())
            self._left = descendants.kill_all(KILL_S)
        finally:
            self._swept.set()

    def await_sweep(self) -> tuple[int, ...]:
        """Wait for `give_up`, which another thread may be about to call, and return the pids that it could not end."""
        self._swept.wait(2 * (GRACE_S + KILL_S))
        return self._left


def _reap_until_ended(pid: int) -> None:
    """Return when this child has ended, before its pid is free for others; reap the orphans that come meanwhile."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != pid:
        os.waitpid(ended.si_pid, 0)


@contextmanager
def _passed_on(send: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, signals go to the command instead of to this process.

    What the terminal sends (Ctrl-C) already reaches the command, which is in the same foreground process group. What
    was ignored when this process started stays ignored, as under nohup.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number not in FROM_TERMINAL or not _in_foreground():
            send(number)

    before = {number: signal.getsignal(number) for number in (*ALWAYS, *FROM_TERMINAL)}
    taken = [number for number, action in before.items() if action is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, pass_on)
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
