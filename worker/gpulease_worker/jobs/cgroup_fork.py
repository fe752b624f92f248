"""Forks a process into a cgroup (version 2).

A process that moves into a cgroup waits for every processor of the host: 4 to 16 ms, in which no process of the host
can fork, execute a program or end. One that is made there does not: CLONE_INTO_CGROUP of clone3(2), since Linux 5.7.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

SYS_CLONE3 = 435
CLONE_INTO_CGROUP = 0x200000000

_libc = ctypes.PyDLL(None)  # keeps the interpreter's lock, as `os.fork` does
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t)


class _CloneArguments(ctypes.Structure):
    """`struct clone_args` of linux/sched.h, as long as Linux 5.7 has it."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls"),
            *("set_tid", "set_tid_size", "cgroup"),
        )
    )


def fork_into(directory: Path) -> int | None:
    """`os.fork`, with the child in the cgroup of this directory. The caller has one thread.

    None where that is not possible, and nothing was forked: an older kernel, a container that forbids the call, or a
    cgroup that the caller may not enter.
    """
    try:
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    arguments = _CloneArguments(flags=CLONE_INTO_CGROUP, exit_signal=signal.SIGCHLD, cgroup=place)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_syscall(SYS_CLONE3, ctypes.addressof(arguments), ctypes.sizeof(arguments)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    os.close(place)
    return None if pid < 0 else pid
