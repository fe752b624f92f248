"""Starts supervisors: through a fork server where one is ready, and otherwise each as a program of its own.

The fork server is started with the first job, which does not wait for it. Whatever goes wrong with it costs a job the
time of a start without it, and nothing else: it has died or does not answer (ANSWER_S), the worker's own state or the
package has changed since it was started (`start_conditions`), the installed package has none. If an answer is lost, a
job may have two supervisors: the lock of its directory decides (`supervisor_watch`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_worker.jobs import command_line, start_conditions
from gpulease_worker.processes import lease_claims

SUPERVISOR, FORK_SERVER = "gpulease_worker.jobs.supervisor", "gpulease_worker.jobs.fork_server"
"""The programs, as modules: this process imports neither."""
DESCRIPTOR = 3
"""The descriptor of the fork server's end of the connection."""
ANSWER_S = 1.0
"""How long the fork server may take to fork a supervisor: it takes milliseconds, and the worker waits."""
ANSWER_BYTES = 1024
RETRY_S = 60.0
"""Pause after a fork server that ended before it was ready."""
REAP_S, MAX_REAP_S = 0.05, 60.0
"""First and longest pause between two attempts to reap a fork server that has closed its connection."""
ROOM_BYTES = 256
"""Room on the command line of the fork server, beside the path of a job's directory: others may have longer ids."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedSupervisor:
    """A supervisor that this worker has started."""

    pid: int
    """Its pid."""
    pidfd: int
    """A pidfd of it, for the caller to close."""


class SupervisorStarter:
    """Starts supervisors, from the event loop."""

    def __init__(self) -> None:
        self._server: _ForkServerConnection | None = None
        self._retired: list[_ForkServerConnection] = []

    @property
    def is_ready(self) -> bool:
        """True when the next supervisor will be forked."""
        return self._server is not None and self._server.is_ready

    def start(self, directory: Path) -> StartedSupervisor:
        """Start the supervisor of a job: in a session of its own, and with no pipe to this worker. Raises OSError."""
        environment = {
            name: value for name, value in os.environ.items() if name not in (lease_claims.MARKER, "GPULEASE_TOKEN")
        }
        conditions = start_conditions.current(environment)
        if self._server is not None and self._server.conditions != conditions:
            self._server.retire()
            self._retired = [*(server for server in self._retired if not server.has_ended), self._server]
            self._server = None
        output = os.open(directory / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            started = None
            if self._server is not None and self._server.is_ready:
                started = self._server.fork(directory, output)
            return started or _start_program(directory, output, environment)
        finally:
            os.close(output)
            self._prepare(conditions, environment, len(os.fsencode(directory)) + ROOM_BYTES)

    def _prepare(self, conditions: tuple[object, ...], environment: dict[str, str], room_bytes: int) -> None:
        """Start a fork server for the next job, unless there is one, or none can be started under these conditions."""
        server = self._server
        if server is None or (server.has_ended and time.monotonic() >= server.retry_at_s):
            with suppress(OSError):  # for want of memory, say: supervisors are started without it, or are refused
                self._server = _ForkServerConnection(conditions, environment, room_bytes)

    def close(self) -> None:
        """Need no fork server any more. Each ends when its supervisors have."""
        for server in (*self._retired, *([self._server] if self._server else [])):
            server.close()
        self._server, self._retired = None, []


class _ForkServerConnection:
    """A fork server that was started by this worker, and the connection to it."""

    def __init__(self, conditions: tuple[object, ...], environment: dict[str, str], room_bytes: int) -> None:
        """Start it. Raises OSError."""
        self.conditions = conditions
        self.is_ready = False
        """True once it has imported the supervisor, as long as it is used."""
        self.has_ended = False
        """True once it has closed the connection."""
        self._was_ready = False
        self.retry_at_s = 0.0
        """When another may be started after it, by the monotonic clock."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", FORK_SERVER, str(DESCRIPTOR), command_line.room(room_bytes)],
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), DESCRIPTOR),
                ],
                setsid=True,
                setsigmask=(),
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read)

    def fork(self, directory: Path, output: int) -> StartedSupervisor | None:
        """Have it fork the supervisor of a directory; None if it does not, and is given up."""
        try:
            socket.send_fds(self._socket, [os.fsencode(directory)], [output], socket.MSG_NOSIGNAL)
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(ANSWER_S * 1000):
                raise OSError(f"it did not answer within {ANSWER_S:g} s")
            answer, descriptors, _, _ = socket.recv_fds(self._socket, ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise OSError(answer.decode(errors="replace") or "it has ended")
            return StartedSupervisor(int(answer), descriptors[0])
        except (OSError, ValueError) as error:
            log.warning("the fork server is given up, and a supervisor is started without it: %s", error)
            os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the pid was not reused
            self.is_ready = False
            return None

    def retire(self) -> None:
        """Send it no further request. It ends when its supervisors have."""
        self.is_ready, self._was_ready = False, True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection: it ends as if it were retired, and no one waits for that."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _read(self) -> None:
        """It says that it is ready, or has ended."""
        try:
            message = self._socket.recv(ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message:
            self.is_ready = not self._was_ready
            self._was_ready = True
            return
        if not self._was_ready:
            log.warning("the fork server %d ended before it was ready: jobs start more slowly", self._pid)
            self.retry_at_s = time.monotonic() + RETRY_S
        self.is_ready, self.has_ended = False, True
        self.close()
        self._reap()

    def _reap(self, pause_s: float = REAP_S) -> None:
        """Reap it once it has ended: soon, or when its last supervisor has."""
        with suppress(ChildProcessError):
            if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                self._loop.call_later(pause_s, self._reap, min(2 * pause_s, MAX_REAP_S))


def _start_program(directory: Path, output: int, environment: dict[str, str]) -> StartedSupervisor:
    """Start a supervisor as a program. Raises OSError."""
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-m", SUPERVISOR, str(directory)],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ],
        setsid=True,
        # A SIGTERM that arrives before the supervisor catches signals stays pending.
        setsigmask={signal.SIGTERM},
    )
    try:
        return StartedSupervisor(child, os.pidfd_open(child))  # not reaped yet, so the pid was not reused
    except OSError:
        # Its end would go unnoticed. It has hardly begun; if it has launched already, the next search cleans up.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
