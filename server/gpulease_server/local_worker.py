"""The worker of the daemon's own host, supervised."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from pathlib import Path

from gpulease import config_file

from . import notify

log = logging.getLogger("gpulease.serve")

DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)
"""As this program was started with them; it raises its own, but jobs must not inherit that."""
RESTART_S = 1.0
"""Least time between two starts."""
STOP_S = 10.0
"""How long a worker may take to end before it is killed."""


async def keep_worker(
    addresses: tuple[str, ...], data_dir: Path, node: str, simulate: str | None, options: tuple[str, ...] = ()
) -> None:
    """Run `gpulease worker` until cancelled; start it again when it ends. Jobs do not notice.

    It reports to the first of `addresses`, this daemon, and to the others while that one does not serve.
    """
    command = [sys.executable, "-P", "-m", "gpulease.cli", "worker", "--url", ",".join(addresses), "--node", node]
    command += ["--data-dir", str(data_dir), "--with-parent"]
    command += options
    command += ["--simulate", simulate] if simulate is not None else []
    # The daemon's own URL, its secrets, and what makes a process speak to systemd in its name.
    kept_back = ["GPULEASE_URL", "GPULEASE_DATABASE_URL", "PGPASSWORD", *notify.VARIABLES]
    if len(addresses) == 1:
        kept_back.append("GPULEASE_TOKEN")  # its daemon knows it by its user; a token may allow it less
    environment = {name: value for name, value in os.environ.items() if name not in kept_back}
    environment[config_file.VARIABLE] = os.devnull  # it is told everything: the files may have changed by now
    environment["GPULEASE_PARENT_PID"] = str(os.getpid())
    while True:
        try:
            # In a session of its own, so that Ctrl-C at the terminal reaches the daemon alone, which then ends it.
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            log.error("the worker of this host cannot be started: %s; trying again", error)
            await asyncio.sleep(RESTART_S)
            continue
        with contextlib.suppress(OSError):  # it has ended already
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, DESCRIPTORS)
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
