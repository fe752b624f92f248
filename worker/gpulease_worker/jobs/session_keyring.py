"""A session keyring for each job, so that none has the keys of the worker or of another job (keyctl(2), keyrings(7)).

A change of user leaves the session keyring as it is, and a process that has a keyring may use the keys in it whatever
its user: without this, a job could read and change the Kerberos and file system keys of the login that started the
worker, and all jobs of a worker would share one keyring.
"""

from __future__ import annotations

import ctypes
import errno
import os

ADD_KEY, REQUEST_KEY, KEYCTL = 0, 1, 2
SYSTEM_CALLS = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}
"""Numbers of add_key, request_key and keyctl: the C library has no functions for them."""
KEYCTL_JOIN_SESSION_KEYRING = 1
ABSENT = (errno.ENOSYS, errno.EPERM)
"""Errors of a kernel without keyrings, and of a system call filter that denies them, as Docker's does."""


def join_new() -> None:
    """Give this process a new, empty session keyring, which no other process has. Raises OSError.

    Nothing is joined where every system call for keys is refused: a kernel without keyrings, or a filter, which all
    children of this process inherit. Then there is no way to any key.
    """
    error = _call(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)
    if error and not (error in ABSENT and _call(ADD_KEY) in ABSENT and _call(REQUEST_KEY) in ABSENT):
        raise OSError(error, os.strerror(error))


def _call(name: int, *arguments: int | None) -> int:
    """The error of a system call for keys, 0 if there is none. Without arguments none does anything: EFAULT."""
    machine = os.uname().machine
    if machine not in SYSTEM_CALLS:
        raise OSError(errno.ENOSYS, f"the numbers of its system calls are unknown for {machine}")
    library = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(argument or 0) for argument in (*arguments, *(None,) * 5)[:5]]
    return ctypes.get_errno() if library.syscall(ctypes.c_long(SYSTEM_CALLS[machine][name]), *words) < 0 else 0
