"""Supervises the worker of the daemon's own host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from pathlib import Path

from gpulease_protocol.host import config_file
from gpulease_server import systemd_notify

log = logging.getLogger("gpulease.serve")

DESCRIPTOR_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Limits at the start of this program, which raises its own; jobs must not inherit the raised ones."""
RESTART_S = 1.0
"""Minimum time between two starts."""
STOP_S = 10.0
"""How long a worker may take to end before it is killed."""


async def supervise_worker(
    addresses: tuple[str, ...], data_dir: Path, node: str, simulate: str | None, options: tuple[str, ...] = ()
) -> None:
    """Run `gpulease worker` until cancelled, restarting it when it ends. Jobs are not affected.

    It reports to the first of `addresses`, this daemon, and to the others while that one does not serve.
    """
    command = [sys.executable, "-P", "-m", "gpulease_cli", "worker", "--url", ",".join(addresses), "--node", node]
    command += ["--data-dir", str(data_dir), "--with-parent"]
    command += options
    command += ["--simulate", simulate] if simulate is not None else []
    # Not for the worker: the daemon's URL and secrets, and its connection to systemd.
    withheld = ["GPULEASE_URL", "GPULEASE_DATABASE_URL", "PGPASSWORD", *systemd_notify.SYSTEMD_VARIABLES]
    if len(addresses) == 1:
        withheld.append("GPULEASE_TOKEN")  # this daemon knows the worker by its user; a token may allow less
    environment = {name: value for name, value in os.environ.items() if name not in withheld}
    environment[config_file.VARIABLE] = os.devnull  # it gets every setting as an option; the files may have changed
    environment["GPULEASE_PARENT_PID"] = str(os.getpid())
    while True:
        try:
            # In its own session, so that Ctrl-C at the terminal reaches only the daemon, which then ends the worker.
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            log.error("the worker of this host could not be started: %s; trying again", error)
            await asyncio.sleep(RESTART_S)
            continue
        with contextlib.suppress(OSError):  # it has ended already
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, DESCRIPTOR_LIMITS)
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await _stop(process)
            raise
        log.warning("the worker of this host ended with code %s; starting it again", code)
        await asyncio.sleep(RESTART_S)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
