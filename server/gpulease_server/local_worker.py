"""Supervises the worker of the daemon's own host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from gpulease_protocol.host import config_file
from gpulease_server import systemd_notify

log = logging.getLogger("gpulease.serve")

DESCRIPTOR_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Limits at the start of this program, which raises its own; jobs must not inherit the raised ones."""
RESTART_S = 1.0
"""Minimum time between two starts."""
STOP_S = 10.0
"""How long a worker may take to end before it is killed."""


class LocalWorker:
    """`gpulease worker` as a child of the daemon. Jobs are not affected by its end.

    It is started before there is an event loop: its imports and its first reading take as long as the daemon's own
    start, and the report waits at the socket on which the daemon listens already. On exit it is ended.

    Args:
        addresses: It reports to the first, this daemon, and to the others while that one does not serve.
        data_dir: Its own data directory.
        node: Name of its node.
        simulate: What to simulate; None for real GPUs.
        options: Further options of `gpulease worker`.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        data_dir: Path,
        node: str,
        simulate: str | None,
        options: tuple[str, ...] = (),
    ) -> None:
        command = [sys.executable, "-P", "-m", "gpulease_cli", "worker", "--url", ",".join(addresses), "--node", node]
        command += ["--data-dir", str(data_dir), "--with-parent", *options]
        command += ["--simulate", simulate] if simulate is not None else []
        # Not for the worker: the daemon's URL and secrets, and its connection to systemd.
        withheld = ["GPULEASE_URL", "GPULEASE_DATABASE_URL", "PGPASSWORD", *systemd_notify.SYSTEMD_VARIABLES]
        if len(addresses) == 1:
            withheld.append("GPULEASE_TOKEN")  # this daemon knows the worker by its user; a token may allow less
        environment = {name: value for name, value in os.environ.items() if name not in withheld}
        environment[config_file.VARIABLE] = os.devnull  # it gets every setting as an option; the files may have changed
        environment["GPULEASE_PARENT_PID"] = str(os.getpid())
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it. What goes wrong is logged, and `supervise` tries again."""
        try:
            # In its own session, so that Ctrl-C at the terminal reaches only the daemon, which then ends the worker.
            process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            log.error("the worker of this host could not be started: %s; trying again", error)
            return
        with contextlib.suppress(OSError):  # it has ended already
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, DESCRIPTOR_LIMITS)
        self._process = process

    async def supervise(self) -> None:
        """Restart it when it ends, until cancelled; then end it."""
        while True:
            if self._process is None:
                self.start()
            if (process := self._process) is not None:
                try:
                    code = await _end_of(process)
                except asyncio.CancelledError:
                    await _stop(process)
                    raise
                self._process = None
                log.warning("the worker of this host ended with code %s; starting it again", code)
            await asyncio.sleep(RESTART_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it, where the daemon ends before `supervise` has begun."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process, once it has ended."""
    while (code := process.poll()) is None:
        try:
            await _readable(os.pidfd_open(process.pid))
        except OSError:  # no descriptor is left, or a container forbids it
            await asyncio.sleep(RESTART_S)
    return code


async def _readable(descriptor: int) -> None:
    """Return once this can be read, and close it."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(_end_of(process), STOP_S)
    except TimeoutError:
        process.kill()
        await _end_of(process)
