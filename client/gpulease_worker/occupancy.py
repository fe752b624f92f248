"""The worker's side of the probe: every reading has a deadline, and a probe that misses it is killed and replaced."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gpulease import wire
from gpulease.exchange import NodeLease
from gpulease.model import ComputeMode
from gpulease_worker.health import xid_of
from gpulease_worker.processes import MARKER
from gpulease_worker.source import IDLE_BYTES, ModeChange, ModeFound, ModeNotSet, Pace, Reading, Start, name_of
from gpulease_worker.tasks import cancel

START_S = 120.0
"""How long a probe may take until it is ready, where nothing else is said: without persistence mode the driver sets up
each GPU at `nvmlInit`, one to three seconds each."""
STARTING = "The probe is starting."
UNDYING_PAUSE_S = 1.0
"""How long a reading takes that cannot be had because no further probe may be started."""
BETWEEN_STARTS_S = 1.0
"""A probe is replaced at most this often."""
DYING_S = 0.2
"""How long to wait for a killed probe; one in an uninterruptible driver call dies when the driver lets it."""
MAX_UNDYING = 3
"""So many killed probes may hang in the kernel, where no signal reaches them, before no further one is started."""
LINE_BYTES = 64 * 1024 * 1024
"""Longest answer: thousands of GPUs with hundreds of processes each."""

log = logging.getLogger(__name__)


class Probe:
    """A probe process that is asked for readings, one at a time.

    Args:
        node: Name of this node; simulated UUIDs derive from it.
        simulate: None for NVML, else what to simulate.
        deadline_s: How long one reading may take before the probe is killed.
        pace: How often what is read, and how long one call may take.
        start_s: How long it may take until it is ready.
        ended: Called when the probe has ended by itself, so that nobody waits for the next reading to find out.
        idle_bytes: How much memory in use may be that of an idle GPU, where the processes of others cannot be seen.
    """

    def __init__(
        self,
        node: str,
        simulate: str | None,
        deadline_s: float,
        pace: Pace | None = None,
        ended: Callable[[], None] = lambda: None,
        start_s: float = START_S,
        idle_bytes: int = IDLE_BYTES,
    ) -> None:
        self._arguments = [node, *([] if simulate is None else [simulate])]
        self._told = Start(pace=pace or Pace(), idle_bytes=idle_bytes)
        self._simulated = simulate is not None
        self._deadline_s = deadline_s
        self._start_s = start_s
        self._ended = ended
        self._call: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ends: dict[asyncio.subprocess.Process, asyncio.Task[None]] = {}
        """Every probe that has not ended yet, with the task that waits for its end."""
        self._starting: asyncio.Task[None] | None = None
        self._started_at_s = -BETWEEN_STARTS_S
        self._problem = STARTING

    @property
    def simulated(self) -> bool:
        """True when there is no driver."""
        return self._simulated

    @property
    def under_way(self) -> str | None:
        """The call into the driver that has been under way for long; None otherwise."""
        return self._call

    @property
    def starting(self) -> bool:
        """True while a new probe opens the driver."""
        return self._starting is not None

    async def read(self, leases: Sequence[NodeLease], fresh: bool = True, anew: Collection[str] = ()) -> Reading:
        """A reading, or one whose `problem` says why there is none. Takes at most the deadline.

        With `fresh` all of it was begun after the call; without, only what is due, and the GPUs that `anew` names by
        UUID (see `Reading.whole`).
        """
        if not await self._ready():
            return self._failed(self._problem)
        try:
            async with asyncio.timeout(self._deadline_s):
                reading = await self._ask(leases, fresh, anew)
        except TimeoutError:
            return await self._replace(
                f"The probe did not answer within {self._deadline_s:g} s, so it was killed; the GPU driver may hang."
            )
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            return await self._replace(f"The probe ended in the middle of a reading ({self._ending(error)}).")
        if reading.over:
            return await self._replace(reading.problem or "The probe ended itself.")
        if reading.problem is None:
            xids = {gpu.uuid: xid for gpu in reading.gpus if (xid := xid_of(gpu.health)) is not None}
            # Only a driver loses GPUs; thousands of simulated ones have no room on a command line.
            named = () if self._simulated else tuple(name_of(gpu) for gpu in reading.gpus)
            least = {} if self._simulated else _least(self._told.least_bytes, reading)
            self._told = replace(self._told, xids=xids, gpus=named, least_bytes=least)
        return reading

    async def change_compute_mode(self, change: ModeChange) -> ComputeMode | None:
        """Change a GPU's mode if it is as expected; what it was before. Raises ModeNotSet within the deadline."""
        if not await self._ready():
            raise ModeNotSet(self._problem)
        try:
            async with asyncio.timeout(self._deadline_s):
                told = await self._asked({"compute_mode": wire.to_json(change)})
            if told.get("over"):  # not an answer to this: the probe gives up on a call that hangs
                last = wire.from_json(Reading, told)
                await self._replace(last.problem or "The probe ended itself.")
                raise ModeNotSet(self._problem)
            found = wire.from_json(ModeFound, told)
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            await self._replace(f"The probe did not answer to an order ({self._ending(error)}), so it was killed.")
            raise ModeNotSet(self._problem) from error
        if found.problem is not None:
            raise ModeNotSet(found.problem, refused=found.refused)
        return found.found

    async def end(self) -> bool:
        """End the probe. True when none is left, so that NVML is closed; one that hangs in the driver, or that is its
        last client and so tears every GPU down, takes longer than this waits. A later reading starts another."""
        if self._starting is not None:
            await cancel(self._starting)
            self._starting = None
        await self._kill()
        if self._ends:
            await asyncio.wait(list(self._ends.values()), timeout=DYING_S)
        return not self._ends

    async def close(self) -> None:
        """End the probe for good."""
        await self.end()
        ends = list(self._ends.values())
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def _ready(self) -> bool:
        """True when there is a probe to ask. Waits for one that starts, though no longer than one reading may take."""
        if self._process is not None and self._starting is None:
            return True
        if self._starting is None:
            early_s = self._started_at_s + BETWEEN_STARTS_S - time.monotonic()
            if early_s > 0:
                # A daemon that wants a reading asks again at once; waiting here keeps that from becoming a spin.
                await asyncio.sleep(min(early_s, self._deadline_s))
                return False
            if len(self._ends) >= MAX_UNDYING:
                await asyncio.sleep(min(UNDYING_PAUSE_S, self._deadline_s))
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
            *("-P", "-m", "gpulease_worker.probe", json.dumps(wire.to_json(self._told)), *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=LINE_BYTES,
        )
        self._ends[self._process] = asyncio.create_task(self._watch(self._process))
        async with asyncio.timeout(self._start_s):
            line = await self._line(self._process)
        if json.loads(line) != {"ready": True}:
            raise ValueError(f"it began with {line[:80]!r}")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of a probe, and say so if it was not this side that ended it."""
        await process.wait()
        del self._ends[process]
        if process is self._process:
            self._ended()

    async def _ask(self, leases: Sequence[NodeLease], fresh: bool, anew: Collection[str]) -> Reading:
        asked = {"leases": [wire.to_json(lease) for lease in leases], "fresh": fresh, "anew": sorted(anew)}
        return wire.from_json(Reading, await self._asked(asked))

    async def _asked(self, request: dict[str, Any]) -> Any:
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
        """Kill the probe; a later reading starts another. Until that one answers, this is the node's problem."""
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
            async with asyncio.timeout(DYING_S):
                await process.wait()


def _least(known: dict[str, int], reading: Reading) -> dict[str, int]:
    """The least memory in use that any reading has shown, by UUID."""
    used = {gpu.uuid: gpu.memory_used_bytes for gpu in reading.gpus if gpu.memory_used_bytes is not None}
    return known | {uuid: min(amount, known.get(uuid, amount)) for uuid, amount in used.items()}
