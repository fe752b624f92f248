"""Runs the probe process for the worker: a probe that misses a reading's deadline is killed and replaced."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gpulease_protocol import codec
from gpulease_protocol.model import ComputeMode, LeaseState
from gpulease_protocol.node_protocol import LeaseOwner, NodeLease
from gpulease_worker.probe.gpu_health import xid_of
from gpulease_worker.probe.probe_protocol import (
    IDLE_BYTES,
    ComputeModeChange,
    ComputeModeNotSet,
    ComputeModeResult,
    Pace,
    ProbeSetup,
    Reading,
    identity_of,
)
from gpulease_worker.processes.lease_claims import MARKER
from gpulease_worker.task_cancellation import cancel_and_wait

START_DEADLINE_S = 120.0
"""How long a probe may take to become ready, by default: without persistence mode the driver initializes every GPU at
`nvmlInit`, one to three seconds each."""
STARTING = "The probe is starting."
UNKILLABLE_PAUSE_S = 1.0
"""How long a reading takes to fail if no further probe may be started."""
MIN_START_INTERVAL_S = 1.0
"""A probe is replaced at most this often."""
KILL_WAIT_S = 0.2
"""How long to wait for a killed probe; one in an uninterruptible driver call dies only after the call."""
CLOSE_WAIT_S = 5.0
"""How long to wait for killed probes at the very end: on a busy host they take a while to die."""
MAX_UNKILLABLE = 3
"""How many killed probes may hang in the kernel, unreachable by signals, before no further probe is started."""
MAX_LINE_BYTES = 64 * 1024 * 1024
"""Maximum length of an answer: thousands of GPUs with hundreds of processes each."""

log = logging.getLogger(__name__)


class ProbeClient:
    """A probe process, which serves one reading at a time.

    Args:
        node: Name of this node; simulated UUIDs derive from it.
        simulate: None for NVML, else what to simulate.
        deadline_s: How long one reading may take before the probe is killed.
        pace: How often the probe reads what, and how long one driver call may take.
        start_s: How long the probe may take to become ready.
        ended: Called when the probe has ended by itself, so that this is noticed before the next reading.
        idle_bytes: Memory in use allowed on an idle GPU where other users' processes are not visible.
        askers: Tells the owners of all leases that have not ended, of those that wait too.
    """

    def __init__(
        self,
        node: str,
        simulate: str | None,
        deadline_s: float,
        pace: Pace | None = None,
        ended: Callable[[], None] = lambda: None,
        start_s: float = START_DEADLINE_S,
        idle_bytes: int = IDLE_BYTES,
        askers: Callable[[], Iterable[LeaseOwner]] = lambda: (),
    ) -> None:
        self._arguments = [node, *([] if simulate is None else [simulate])]
        self._setup = ProbeSetup(pace=pace or Pace(), idle_bytes=idle_bytes)
        self._simulated = simulate is not None
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._ended = ended
        self._askers = askers
        self._call: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ends: dict[asyncio.subprocess.Process, asyncio.Task[None]] = {}
        """Every probe that has not ended yet, with the task that waits for its end."""
        self._starting: asyncio.Task[None] | None = None
        self._started_at_s = -MIN_START_INTERVAL_S
        self._problem = STARTING

    @property
    def simulated(self) -> bool:
        """True if the GPUs are simulated."""
        return self._simulated

    @property
    def under_way(self) -> str | None:
        """The driver call that is taking long; None if none is."""
        return self._call

    @property
    def starting(self) -> bool:
        """True while a new probe opens the driver."""
        return self._starting is not None

    async def read(self, leases: Sequence[NodeLease], complete: bool = True, reread: Collection[str] = ()) -> Reading:
        """A reading; its `problem` says why if there is none. Takes at most the deadline.

        If `complete`, everything is read after the call; otherwise only what is due, and the GPUs that `reread` names
        by UUID (see `Reading.whole`).
        """
        reading = await self._read(leases, {"complete": complete, "reread": sorted(reread)})
        if reading.problem is None:
            xids = {gpu.uuid: xid for gpu in reading.gpus if (xid := xid_of(gpu.health)) is not None}
            # Simulated GPUs are never lost, and thousands of them would not fit on a command line.
            known = () if self._simulated else tuple(identity_of(gpu) for gpu in reading.gpus)
            least = {} if self._simulated else _least(self._setup.least_bytes, reading)
            self._setup = replace(self._setup, xids=xids, gpus=known, least_bytes=least)
        return reading

    async def read_some(self, uuids: Collection[str], leases: Sequence[NodeLease]) -> Reading:
        """A reading of these GPUs alone, which may leave some out; its `problem` says why if there is none. Takes at
        most the deadline."""
        return await self._read(leases, {"only": sorted(uuids)})

    async def _read(self, leases: Sequence[NodeLease], what: dict[str, Any]) -> Reading:
        if not await self._ready():
            return self._failed(self._problem)
        try:
            async with asyncio.timeout(self._deadline_s):
                request = {"leases": [codec.to_json(lease) for lease in leases], **what}
                if any(lease.state is LeaseState.ENDED for lease in leases):
                    request["askers"] = [(owner.pid, owner.start_ticks) for owner in self._askers()]
                reading = codec.from_json(Reading, await self._request(request))
        except TimeoutError:
            return await self._replace(
                f"The probe did not answer within {self._deadline_s:g} s, so it was killed; the GPU driver may hang."
            )
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            return await self._replace(f"The probe ended in the middle of a reading ({self._ending(error)}).")
        if reading.over:
            return await self._replace(reading.problem or "The probe ended itself.")
        return reading

    async def change_compute_mode(self, change: ComputeModeChange) -> ComputeMode | None:
        """Change a GPU's mode if it is as expected. Returns the mode before. Takes at most the deadline.

        Raises ComputeModeNotSet.
        """
        if not await self._ready():
            raise ComputeModeNotSet(self._problem)
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await self._request({"compute_mode": codec.to_json(change)})
            if answer.get("over"):  # not an answer to this request: the probe gives up on a call that hangs
                last = codec.from_json(Reading, answer)
                await self._replace(last.problem or "The probe ended itself.")
                raise ComputeModeNotSet(self._problem)
            result = codec.from_json(ComputeModeResult, answer)
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            await self._replace(f"The probe did not change a compute mode ({self._ending(error)}), so it was killed.")
            raise ComputeModeNotSet(self._problem) from error
        if result.problem is not None:
            raise ComputeModeNotSet(result.problem, refused=result.refused)
        return result.found

    async def end(self) -> bool:
        """End the probe. True if none is left, so that NVML is closed. A probe that hangs in the driver, or tears down
        every GPU as the driver's last client, takes longer than this waits. A later reading starts another probe."""
        if self._starting is not None:
            await cancel_and_wait(self._starting)
            self._starting = None
        await self._kill()
        if self._ends:
            await asyncio.wait(list(self._ends.values()), timeout=KILL_WAIT_S)
        return not self._ends

    async def close(self) -> None:
        """End the probe permanently."""
        await self.end()
        ends = list(self._ends.values())
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_WAIT_S)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def _ready(self) -> bool:
        """True if a probe is ready. Waits for one that is starting, but no longer than one reading may take."""
        if self._process is not None and self._starting is None:
            return True
        if self._starting is None:
            early_s = self._started_at_s + MIN_START_INTERVAL_S - time.monotonic()
            if early_s > 0:
                # A daemon that wants a reading asks again immediately; waiting here prevents a busy loop.
                await asyncio.sleep(min(early_s, self._deadline_s))
                return False
            if len(self._ends) >= MAX_UNKILLABLE:
                await asyncio.sleep(min(UNKILLABLE_PAUSE_S, self._deadline_s))
                self._problem = f"{len(self._ends)} probes hang in the driver and cannot be killed. Reboot this host."
                return False
            self._started_at_s = time.monotonic()
            self._starting = asyncio.create_task(self._start())
        await asyncio.wait({self._starting}, timeout=self._deadline_s)
        if not self._starting.done():
            return False
        started, self._starting = self._starting, None
        error = started.exception()
        if error is not None:
            why = (
                f"it was not ready within {self._start_s:g} s"
                if isinstance(error, TimeoutError)
                else self._ending(error)
            )
            await self._replace(f"The probe could not be started: {why}.")
        return self._process is not None

    async def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != MARKER}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "gpulease_worker.probe.main", json.dumps(codec.to_json(self._setup)), *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=MAX_LINE_BYTES,
        )
        self._ends[self._process] = asyncio.create_task(self._watch(self._process))
        async with asyncio.timeout(self._start_s):
            line = await self._line(self._process)
        if json.loads(line) != {"ready": True}:
            raise ValueError(f"it began with {line[:80]!r}")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of a probe, and call `ended` if this side did not end it."""
        await process.wait()
        del self._ends[process]
        if process is self._process:
            self._ended()

    async def _request(self, request: dict[str, Any]) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        try:
            while "under_way" in (answer := json.loads(await self._line(process))):
                self._call = answer["under_way"]
            return answer
        finally:
            self._call = None

    async def _line(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise asyncio.IncompleteReadError(line, None)
        return line

    def _ending(self, error: BaseException) -> str:
        code = None if self._process is None else self._process.returncode
        return f"exit code {code}" if code is not None else str(error) or type(error).__name__

    async def _replace(self, problem: str) -> Reading:
        """Kill the probe; a later reading starts another. Until that one answers, `problem` is the node's problem."""
        await self._kill()
        self._problem = problem
        log.warning(problem)
        return self._failed(problem)

    def _failed(self, problem: str) -> Reading:
        return Reading(problem=problem, simulated=self._simulated)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT_S):
                await process.wait()


def _least(known: dict[str, int], reading: Reading) -> dict[str, int]:
    """By UUID: the least memory in use in any reading."""
    used = {gpu.uuid: gpu.memory_used_bytes for gpu in reading.gpus if gpu.memory_used_bytes is not None}
    return known | {uuid: min(amount, known.get(uuid, amount)) for uuid, amount in used.items()}
