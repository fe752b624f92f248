"""Forks the supervisors of a worker's jobs: `python -m gpulease_worker.jobs.fork_server DESCRIPTOR`.

A supervisor that is started as a program of its own takes 100 ms of processor time to import its modules. This process
has imported them, and forks a supervisor in one or two. It is started as a supervisor would be, so whatever a
supervisor inherits from its worker it inherits from here: environment, limits, priority, cgroup, umask. If any of that
changes in the worker, or a file of the package, the worker replaces this process (`start_conditions`).

It has one thread, reads no order and no record, and knows no secret of a job. A supervisor gets a session of its own,
its log as output and no other descriptor. The worker is told its pid and sent a pidfd of it, which stays exact because
only this process reaps it. It ends with its worker; without it, when no supervisor of it is left; and after IDLE_S
without one. Its supervisors go on in any case.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from gpulease_protocol import codec
from gpulease_protocol.host.process_id import boot_id
from gpulease_protocol.lazy_dataclass import write_methods
from gpulease_worker.jobs import cgroup, command_line, supervisor
from gpulease_worker.jobs.launch_plan import LaunchPlan

IDLE_S = 600.0
"""How long it stays without a request and without a supervisor."""
READY = b"ready"
"""What it sends when it has imported the supervisor."""
REQUEST_BYTES = 4096
"""Longest path of a job's directory, as PATH_MAX."""


class ForkServer:
    """Answers the requests of one worker: a job's directory, with the descriptor of its supervisor's log.

    The answer is the pid with a pidfd, or the error alone.
    """

    def __init__(self, worker: socket.socket) -> None:
        self._worker: socket.socket | None = worker
        self._parent = os.pidfd_open(os.getppid())
        self._supervisors: set[int] = set()
        self._wake, self._wake_end = socket.socketpair()
        for end in (self._wake, self._wake_end):
            end.setblocking(False)

    def run(self) -> None:
        """Serve until the worker has ended, or no one needs this process any more."""
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        with suppress(OSError):
            if self._worker is not None:
                self._worker.send(READY)
        is_used = True
        while is_used or self._supervisors:
            wanted = [self._wake.fileno(), self._parent, *([] if self._worker is None else [self._worker.fileno()])]
            ready = select.select(wanted, [], [], IDLE_S)[0]
            if self._parent in ready:
                return
            is_used = bool(ready) and self._worker is not None
            if self._wake.fileno() in ready:
                self._reap()
            if self._worker is not None and self._worker.fileno() in ready and not self._serve(self._worker):
                self._worker.close()
                self._worker, is_used = None, False

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._supervisors.discard(pid)

    def _serve(self, worker: socket.socket) -> bool:
        """Answer one request. False if the worker has closed the connection."""
        try:
            request, descriptors, _, _ = socket.recv_fds(worker, REQUEST_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        if not request:
            return False
        try:
            (log,) = descriptors
            pid = self._fork(os.fsdecode(request), log)
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)  # its end would go unnoticed
                raise
            try:
                socket.send_fds(worker, [str(pid).encode()], [pidfd])
            finally:
                os.close(pidfd)
        except OSError as error:
            with suppress(OSError):
                worker.send(f"{error.strerror or error}".encode())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, directory: str, log: int) -> int:
        """Fork a supervisor. A SIGTERM that arrives before it catches signals stays pending, and none ends this process
        in between."""
        mask = signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
        try:
            pid = os.fork()
            if pid == 0:
                _supervise(directory, log)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._supervisors.add(pid)
        return pid


def _supervise(directory: str, log: int) -> None:
    """In the new process: supervise, as the program would that the worker starts otherwise. Does not return."""
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        command_line.show([sys.executable, "-P", "-m", supervisor.__name__, directory])
        status = supervisor.main([directory])
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def _use_what_supervisors_use() -> None:
    """Have the first use made here of what is made or imported only then: readers of orders, codecs of text."""
    write_methods()
    boot_id()
    cgroup.directory_of_jobs()
    with suppress(ValueError):
        codec.from_json(LaunchPlan, {})


def main(arguments: Sequence[str]) -> int:
    """Serve the worker at the other end of an inherited socket."""
    worker = socket.socket(fileno=int(arguments[0]))
    worker.set_inheritable(False)
    os.chdir("/")  # so that it keeps no directory of the worker in use
    _use_what_supervisors_use()
    gc.collect()
    gc.freeze()  # supervisors share this memory as long as no one writes to it
    ForkServer(worker).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
