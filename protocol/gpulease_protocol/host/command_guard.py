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

`gpulease run` starts it with its signals blocked. Signals for the command come as bytes through the pipe, because the
guard cannot tell a Ctrl-C of the terminal, which has reached the command too, from one that was sent to it alone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId

SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end a process by default, and the guard must survive."""
NOT_STARTED = 126
"""Exit code where the command could not be started; the report says why."""
PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from gpulease_protocol.host import command_guard; "
    "sys.exit(command_guard.main())"
)


def guarded(command: Sequence[str], control_fd: int, report_fd: int, grace_s: float, kill_s: float) -> list[str]:
    """The command line of a guard, to be started with both descriptors.

    Args:
        command: What the guard runs, with its own environment, directory and terminal.
        control_fd: Read end of a pipe: each byte is the number of a signal for the command; its end ends everything.
        report_fd: Write end of a pipe: closed once the command runs, with an error in it if it could not be started.
        grace_s: Seconds between SIGTERM and SIGKILL when `gpulease run` has ended.
        kill_s: For how many seconds SIGKILL is repeated.
    """
    place = str(Path(__file__).parents[2])
    numbers = (str(control_fd), str(report_fd), str(grace_s), str(kill_s))
    return [sys.executable, "-I", "-S", "-c", PROGRAM, place, *numbers, *command]


def main() -> int:
    """Run the command to its end, and return its exit code; 128 + N if signal N ended it."""
    control_fd, report_fd = int(sys.argv[2]), int(sys.argv[3])
    grace_s, kill_s, command = float(sys.argv[4]), float(sys.argv[5]), sys.argv[6:]
    for descriptor in (control_fd, report_fd):
        os.set_inheritable(descriptor, False)
    process_tree.adopt_orphans()
    wake_fd = _survive_signals()
    try:
        process = _start(command)
    except OSError as error:
        os.write(report_fd, str(error).encode(errors="replace"))
        return NOT_STARTED
    os.close(report_fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while (code := _reap(process)) is None:
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


def _survive_signals() -> int:
    """Let no signal end this process. Returns a descriptor that is readable after one, also after SIGCHLD."""
    wake_fd, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    for number in (*SIGNALS, signal.SIGCHLD):
        # Not SIG_IGN, which the command would inherit; and what is ignored already stays so, as under nohup.
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:
            signal.signal(number, lambda *_: None)
    return wake_fd


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command, which the kernel ends when this process ends. Raises OSError."""
    guard = os.getpid()

    def end_with_guard() -> None:
        process_tree.signal_on_parent_death(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if os.getppid() != guard:
            os._exit(NOT_STARTED)

    return subprocess.Popen(command, preexec_fn=end_with_guard)  # noqa: PLW1509 - there is one thread


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


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        while os.read(descriptor, 4096):
            pass
