"""A PAM session for each job (`--pam-service`), as for a login: PAM may refuse the user, and pam_limits sets limits.

A process of its own opens the session, keeps it, and closes it when the supervisor has ended, however it ended: its end
of the socket is closed then. It is not a process of the job: it is started before the supervisor adopts orphans, so it
is no descendant of the supervisor, and has neither the job's marker nor its cgroup. No job waits for it beyond OPEN_S.

As with `PAMName=` of systemd, the account is checked and credentials are established before the session is opened. Of
what the modules change, the job gets the limits and the nice value alone; `resource_limits` lowers its limits to them.
Environment, keyring, namespaces and cgroups that modules make stay in the process that keeps the session.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
from contextlib import suppress
from dataclasses import field
from typing import Any

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_worker.jobs import inherited_state, resource_limits
from gpulease_worker.jobs.resource_limits import SoftHard

OPEN_S, CLOSE_S = 30, 30
"""How long PAM may take to open and to close a session; then the kernel ends the process that waits for it."""
LIBRARY = "libpam.so.0"
TERMINAL = b"gpulease"
"""Stands for the terminal in configurations of pam_access and pam_time, as `cron` does."""
PAM_SUCCESS, PAM_CONV_ERR = 0, 19
PAM_TTY = 3
PAM_ESTABLISH_CRED, PAM_DELETE_CRED, PAM_SILENT = 0x2, 0x4, 0x8000
MESSAGE_BYTES = 4096


class SessionRefusedError(Exception):
    """PAM refuses a session; the message says why, as a sentence."""


@dataclass(frozen=True, slots=True)
class LoginLimits:
    """What the login of a job's user has."""

    limits: dict[int, SoftHard] = field(default_factory=dict)
    """Resource limits by number."""
    nice: int = 0
    """Nice value."""


class PamSession:
    """The session of one job, kept by another process until this object's socket is closed."""

    def __init__(self, service: str, user: str) -> None:
        """Start to open a session. Call it before this process adopts orphans. Raises OSError."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = os.fork()
        if child == 0:
            try:
                if os.fork() == 0:
                    _keep(theirs.detach(), service, user)
            finally:
                os._exit(0)
        theirs.close()
        os.waitpid(child, 0)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the session is open, or has been refused."""
        return self._socket.fileno()

    def opened(self) -> LoginLimits | None:
        """The limits of the login, once; None while the session is not open. Raises SessionRefusedError."""
        try:
            answer = self._socket.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return None
        if not answer:
            raise SessionRefusedError(f"PAM did not open a session within {OPEN_S} s.")
        content = json.loads(answer)
        if "error" in content:
            raise SessionRefusedError(content["error"])
        limits = {int(number): (soft, hard) for number, (soft, hard) in content["limits"].items()}
        return LoginLimits(limits, content["nice"])


def _keep(descriptor: int, service: str, user: str) -> None:
    """In a process of its own: open a session, say so, and close it when the other end of the socket is closed."""
    inherited_state.reset_signals()  # among them SIGALRM, which ends this process when PAM hangs
    signal.signal(signal.SIGTERM, lambda *_: None)  # of a shutdown: the job ends first
    os.setsid()
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    inherited_state.reset_scheduling()
    supervisor = socket.socket(fileno=descriptor)
    signal.alarm(OPEN_S)
    try:
        pam = _Pam(service, user)
        pam.open()
    except SessionRefusedError as error:
        _send(supervisor, {"error": str(error)})
        return
    signal.alarm(0)
    _send(supervisor, {"limits": resource_limits.current(), "nice": os.getpriority(os.PRIO_PROCESS, 0)})
    supervisor.recv(1)
    signal.alarm(CLOSE_S)
    pam.close()


def _send(supervisor: socket.socket, content: dict[str, Any]) -> None:
    with suppress(OSError):  # it has ended
        supervisor.send(json.dumps(content).encode(), socket.MSG_NOSIGNAL)


class _Message(ctypes.Structure):
    _fields_ = (("style", ctypes.c_int), ("text", ctypes.c_char_p))


_CONVERSE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.POINTER(_Message)),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


class _Conversation(ctypes.Structure):
    _fields_ = (("converse", _CONVERSE), ("data", ctypes.c_void_p))


class _Pam:
    """libpam, for one session (pam(3))."""

    def __init__(self, service: str, user: str) -> None:
        """Raises SessionRefusedError where there is no libpam."""
        self._service, self._user = service, user
        try:
            self._library: Any = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise SessionRefusedError(f"PAM cannot be used on this node: {error}.") from error
        self._library.pam_strerror.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        # No one can be asked anything, and no one reads messages.
        self._conversation = _Conversation(_CONVERSE(lambda *_: PAM_CONV_ERR), None)

    def open(self) -> None:
        """Open the session. Raises SessionRefusedError."""
        names = self._service.encode(), self._user.encode()
        handle = ctypes.byref(self._handle)
        self._check("start", self._library.pam_start(*names, ctypes.byref(self._conversation), handle))
        self._check("set_item", self._library.pam_set_item(self._handle, PAM_TTY, TERMINAL))
        self._check("acct_mgmt", self._library.pam_acct_mgmt(self._handle, PAM_SILENT))
        # As systemd does: a stack without `auth` refuses this, and needs no credentials.
        self._library.pam_setcred(self._handle, PAM_ESTABLISH_CRED | PAM_SILENT)
        self._check("open_session", self._library.pam_open_session(self._handle, PAM_SILENT))

    def close(self) -> None:
        """Close the session."""
        code = self._library.pam_close_session(self._handle, PAM_SILENT)
        self._library.pam_setcred(self._handle, PAM_DELETE_CRED | PAM_SILENT)
        self._library.pam_end(self._handle, code)

    def _check(self, function: str, code: int) -> None:
        if code != PAM_SUCCESS:
            why = self._library.pam_strerror(self._handle, code).decode(errors="replace")
            raise SessionRefusedError(f"PAM refuses {self._user} (service {self._service}, pam_{function}): {why}.")
