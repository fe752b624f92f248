"""The process between `gpulease run` and its command, which ends the command when `gpulease run` is killed.

    gpulease run  --pipe-->  guard (child subreaper)  -->  command  -->  whatever it starts

The lease ends with `gpulease run`. A command that went on would train on GPUs that no one holds. The kernel alone
cannot end it: PR_SET_PDEATHSIG reaches the command but not the ranks below it. The guard adopts every orphan of the
command, so it finds them all.

| what ends | what ends the rest |
|---|---|
| the command, by itself | nothing: what it has left behind may be intended; its exit code is passed on |
| `gpulease run` (the pipe is closed) | the guard: SIGTERM to the command, after the grace period SIGKILL to all |
| the guard | the kernel sends SIGTERM to the command; `gpulease run` adopts the rest and ends it |
| both at once | that SIGTERM alone; what survives it keeps its GPUs draining, and is named |

A command that is a shell may be suspended: see `suspended_shell`.

`gpulease run` forks it before it asks for GPUs: at that time there are no threads and no sockets, and nothing has to be
imported again. The guard then waits for the environment of its command. Signals are blocked until it can handle them.
Signals for the command come as bytes through the pipe, because the guard cannot tell a Ctrl-C of the terminal, which
has reached the command too, from one that was sent to it alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpulease_protocol.host import process_tree, suspended_shell
from gpulease_protocol.host.process_id import ProcessId

SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a process by default, and the guard must survive."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that also continue a command that is stopped, as shells do with their jobs."""
NOT_STARTED = 126
"""Exit code where the command could not be started; the report says why."""
LENGTH_BYTES = 8
"""What precedes the environment in the pipe: its length."""


class Guard:
    """The guard, as `gpulease run` sees it. Make it before there are threads, because it is a fork of this process."""

    def __init__(self, command: Sequence[str], grace_s: float, kill_s: float) -> None:
        """Start the guard, which does nothing yet.

        Args:
            command: What the guard runs, in its own directory and terminal.
            grace_s: Seconds between SIGTERM and SIGKILL when `gpulease run` has ended.
            kill_s: For how many seconds SIGKILL is repeated.
        """
        control_fd, self._control_fd = os.pipe()
        self._report_fd, report_fd = os.pipe()
        sys.stdout.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.pid = os.fork()
        """Process id of the guard, a child of this process until it is waited for."""
        if self.pid == 0:
            code = NOT_STARTED
            try:
                os.close(self._control_fd)
                os.close(self._report_fd)
                code = _run_command(command, control_fd, report_fd, grace_s, kill_s)
            except BaseException:  # nothing of `gpulease run` may go on in its fork
                traceback.print_exc()
            finally:
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(control_fd)
        os.close(report_fd)

    def start(self, environ: Mapping[str, str]) -> str:
        """Start the command in this environment. Returns "" once it runs, else why it does not."""
        content = json.dumps(dict(environ)).encode()
        with suppress(BrokenPipeError), open(self._control_fd, "wb", closefd=False) as control:
            control.write(len(content).to_bytes(LENGTH_BYTES) + content)
        with open(self._report_fd, "rb") as report:
            return report.read().decode(errors="replace")

    def send_signal(self, number: int) -> None:
        """Have the guard send a signal to the command, if that still runs."""
        with suppress(BrokenPipeError):
            os.write(self._control_fd, bytes([number]))

    def wait(self) -> int:
        """Wait for the guard, and return its exit code, which is the command's; -N if signal N ended the guard."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def _run_command(command: Sequence[str], control_fd: int, report_fd: int, grace_s: float, kill_s: float) -> int:
    """In the guard: run the command to its end, and return its exit code; 128 + N if signal N ended it."""
    parent, environ = os.getppid(), _read_environment(control_fd)
    if environ is None:
        return 0
    process_tree.adopt_orphans()
    wake_fd = _survive_signals()
    try:
        process = _start(command, environ)
    except OSError as error:
        os.write(report_fd, str(error).encode(errors="replace"))
        return NOT_STARTED
    os.close(report_fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while (code := _reap(process)) is None:
        if _has_stopped(process):
            suspended_shell.stop_with(process.pid, parent)
        readable, _, _ = select.select([control_fd, wake_fd], [], [])
        if wake_fd in readable:
            _drain(wake_fd)
        if control_fd in readable:
            numbers = os.read(control_fd, 64)
            if not numbers:
                return _end_everything(process, wake_fd, grace_s, kill_s)
            for number in numbers:
                _send(process, number)
    return code if code >= 0 else 128 - code


def _read_environment(control_fd: int) -> dict[str, str] | None:
    """The environment of the command; None where `gpulease run` ends without one, as when it got no GPUs."""

    def read(size: int) -> bytes:
        content = b""
        while len(content) < size and (more := os.read(control_fd, size - len(content))):
            content += more
        return content

    head = read(LENGTH_BYTES)
    size = int.from_bytes(head)
    if len(head) < LENGTH_BYTES or len(content := read(size)) < size:
        return None
    environ: dict[str, str] = json.loads(content)
    return environ


def _survive_signals() -> int:
    """Let no signal end this process. Returns a descriptor that is readable after one, also after SIGCHLD."""
    wake_fd, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    for number in (*SIGNALS, signal.SIGCHLD):
        # Not SIG_IGN, which the command would inherit; and what is ignored already stays so, as under nohup.
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:
            signal.signal(number, lambda *_: None)
    return wake_fd


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the command, which the kernel ends when this process ends. Raises OSError."""
    guard = os.getpid()

    def end_with_guard() -> None:
        process_tree.signal_on_parent_death(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if os.getppid() != guard:
            os._exit(NOT_STARTED)

    return subprocess.Popen(command, env=environ, preexec_fn=end_with_guard)  # noqa: PLW1509 - there is one thread


def _end_everything(process: subprocess.Popen[bytes], wake_fd: int, grace_s: float, kill_s: float) -> int:
    """End the command, and then all that is below it. First the command alone: a launcher ends its ranks in order."""

    def below() -> set[ProcessId]:
        return process_tree.descendants(os.getpid())

    end_s = time.monotonic() + grace_s
    _send(process, signal.SIGTERM)
    while _reap(process) is None and (left_s := end_s - time.monotonic()) > 0:
        select.select([wake_fd], [], [], left_s)
        _drain(wake_fd)
    process_tree.signal_all(below(), signal.SIGTERM)
    process_tree.await_end(below, end_s - time.monotonic())
    process_tree.kill_all(below, kill_s)
    return 128 + signal.SIGKILL


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(PermissionError):  # under sudo it is another user's
        process.send_signal(number)
        if number in ENDING:  # a shell in which `suspend` was typed would take it in only when it goes on
            process.send_signal(signal.SIGCONT)


def _reap(process: subprocess.Popen[bytes]) -> int | None:
    """Reap adopted orphans, and the command if it has ended: its return code, else None."""
    while process.returncode is None:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            break
        if ended.si_pid == process.pid:
            process.wait()
        else:
            os.waitpid(ended.si_pid, 0)
    return process.returncode


def _has_stopped(process: subprocess.Popen[bytes]) -> bool:
    """True if the command has stopped since the last call."""
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG) is not None


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass
