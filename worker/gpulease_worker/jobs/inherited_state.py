"""Resets what a process inherits from the worker: what a service, a login or `nohup` gave the worker is not the job's.

A worker that runs as root resets everything. A worker of another user runs that user's own jobs alone; what the user
started it with (a nice value, processors, limits) is meant for its jobs, too, so only signals and capabilities are
reset. The environment is `launch_plan`'s, the keyring `session_keyring`'s, limits `resource_limits`'s. The controlling
terminal goes with the session, open files are closed by `spawn`.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 28, 38
CAPABILITY_VERSION_3 = 0x20080522
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call ioprio_set(2): the C library has no function for it."""
IOPRIO_WHO_PROCESS = 1
ALL_PROCESSORS = range(8192)
"""The kernel takes those that exist and that the process's cpuset allows."""
UMASK = 0o022
"""Of a job that was submitted without one, to a worker that runs as root."""
OOM_SCORE, LOGIN_UID = Path("/proc/self/oom_score_adj"), Path("/proc/self/loginuid")


def reset_signals() -> None:
    """Block no signal and ignore none: neither ends with execve(2)."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):  # the C library's own
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def reset_scheduling() -> None:
    """Usual scheduling policy, nice value, I/O priority, processors, and treatment by the out-of-memory killer.

    Call it as root. In a container root may lack the right to take back what is to the job's disadvantage; it stays.
    """
    for step in (
        lambda: os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0)),
        lambda: os.setpriority(os.PRIO_PROCESS, 0, 0),
        lambda: os.sched_setaffinity(0, ALL_PROCESSORS),
        _reset_io_priority,
        lambda: OOM_SCORE.write_text("0"),
    ):
        with suppress(PermissionError):
            step()


def set_login_user(uid: int) -> None:
    """Have the audit log name the job's user. It stays as it is where the kernel allows no change, or has no audit."""
    with suppress(OSError):
        LOGIN_UID.write_text(str(uid))


def drop_capabilities() -> None:
    """Give up every capability, the inheritable and ambient ones too, which a change of user may leave. Raises OSError.

    The bounding set stays: it gives no right, and programs such as sudo need it.
    """
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _check(_library().capset(header, none))


def reset_securebits() -> None:
    """Let a change of user take the capabilities, and setuid programs work, as usual. Needs root."""
    with suppress(OSError):  # they are locked, or root may not
        _prctl(PR_SET_SECUREBITS, 0)


def set_no_new_privileges() -> None:
    """Let no program that is executed from here on gain rights: setuid bits and file capabilities have no effect."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def _reset_io_priority() -> None:
    """No I/O class of its own: the priority then follows the nice value."""
    number = IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        _library().syscall(ctypes.c_long(number), IOPRIO_WHO_PROCESS, 0, 0)  # not every kernel has priorities


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _check(_library().prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
