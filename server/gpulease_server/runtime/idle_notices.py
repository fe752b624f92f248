"""Runs an administrator's command for each lease that has done nothing for long, so that it can tell the holder.

| what happens | what follows |
|---|---|
| a lease has been idle for `after_s` | the command runs once |
| one of its GPUs works, and then all are idle again for as long | the command runs again |
| its idle GPUs are kept on purpose (`core.keep`) | nothing; then the command runs, also if it did before |
| it is told when its idle GPUs are taken back (`core.reclaim`) | the command runs, with that moment |
| its readings are missing for a while | nothing: it runs again only after work was seen |
| the daemon restarts | idle time begins at 0, so the command may run once more for the same lease |
| many leases are idle at once | `MAX_RUNNING` commands run; the others have their turn within `CHECK_S` after that |
| the command hangs | it and what it has started in its session are killed after `TIMEOUT_S` |
| the command fails, or there is no such program | the log says so; it is not repeated |
| the daemon ends while commands run | they are killed |
| the holder's label or user is odd | it comes in a variable, and no shell reads it |

Nothing waits for a command: no turn, no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from datetime import datetime

from gpulease_protocol.model import Lease
from gpulease_server.core.kept_leases import kept_now
from gpulease_server.core.timestamps import wall_clock
from gpulease_server.runtime import clock
from gpulease_server.runtime.lease_idle import idle_s
from gpulease_server.runtime.writer import Writer

log = logging.getLogger("gpulease.idle")

CHECK_S = 5.0
"""Time between two looks at all active leases."""
MAX_RUNNING = 4
"""Commands that run at once."""
TIMEOUT_S = 30.0
"""How long a command may take."""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "HOME", "TZ")
"""Variables of the daemon that the command has, too."""


class IdleNotices:
    """Used from one event loop.

    Args:
        writer: Knows the leases, and what their GPUs do.
        command: Program and arguments; empty runs nothing.
        after_s: How long a lease must have been idle.
    """

    def __init__(self, writer: Writer, command: Sequence[str], after_s: float) -> None:
        self._writer = writer
        self._command = command
        self._after_s = after_s
        self._noticed: set[str] = set()
        """Ids of the leases that have been idle, and not kept, since the command ran for them."""
        self._warned: set[str] = set()
        """Ids of the leases that were told when idle GPUs are taken back, and for which the command ran."""
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Look for idle leases until cancelled. Commands that run then are killed."""
        if not self._command:
            return
        try:
            while True:
                await asyncio.sleep(CHECK_S)
                self.check()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def check(self) -> None:
        """Start the command for each lease that has become idle, as far as there is room."""
        now, ledger = clock.now(), self._writer.committed
        holding = {gpu.lease_id for gpu in ledger.gpus.values() if gpu.lease_id is not None and not gpu.draining}
        self._noticed &= holding
        self._warned &= ledger.reclaims.notices.keys()
        for lease_id in sorted(holding):
            record = ledger.leases[lease_id]
            lease, seconds = record.lease, idle_s(self._writer, record.lease, now)
            notice = ledger.reclaims.notices.get(lease_id)
            if notice is not None and lease_id not in self._warned and len(self._running) < MAX_RUNNING:
                self._warned.add(lease_id)
                self._noticed.add(lease_id)
                self._start(lease, seconds or 0.0, wall_clock(now, notice.at_s or 0.0))
            if seconds is None:
                continue
            if seconds < self._after_s or kept_now(record, now) is not None:
                self._noticed.discard(lease_id)
            elif lease_id not in self._noticed and len(self._running) < MAX_RUNNING:
                self._noticed.add(lease_id)
                self._start(lease, seconds, None)

    def _start(self, lease: Lease, seconds: float, reclaim_at: datetime | None) -> None:
        task = asyncio.create_task(self._notify(lease, variables(lease, seconds, reclaim_at)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _notify(self, lease: Lease, told: dict[str, str]) -> None:
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | told
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.error("the command for idle leases cannot be run: %s", error)
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                code = await process.wait()
            if code:
                log.error("the command for idle leases ended with %d for %s", code, lease.id)
        except TimeoutError:
            log.error("the command for idle leases took over %g s for %s, and is killed", TIMEOUT_S, lease.id)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def variables(lease: Lease, seconds: float, reclaim_at: datetime | None) -> dict[str, str]:
    """What the command is told of a lease. `reclaim_at`: when its idle GPUs are taken back, where that was told."""
    told = {
        "GPULEASE_IDLE_LEASE_ID": lease.id,
        "GPULEASE_IDLE_JOB_ID": lease.job_id or "",
        "GPULEASE_IDLE_USER": lease.holder.user or "",
        "GPULEASE_IDLE_LABEL": lease.holder.label,
        "GPULEASE_IDLE_HOST": lease.holder.host or "",
        "GPULEASE_IDLE_NODE": lease.gpus[0].node,
        "GPULEASE_IDLE_GPUS": str(len(lease.gpus)),
        "GPULEASE_IDLE_S": f"{seconds:.0f}",
        "GPULEASE_IDLE_RECLAIM_AT": "" if reclaim_at is None else f"{reclaim_at:%Y-%m-%dT%H:%M:%SZ}",
    }
    return {name: value.replace("\0", "").encode(errors="replace").decode() for name, value in told.items()}
