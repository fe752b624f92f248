"""Jobs: those who submit them, and what a node runs. A program that is told to stop saves what it has, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpulease_protocol.node_protocol import JobReport, RunState
from tests.simulation.network import NoAnswer

if TYPE_CHECKING:
    from tests.simulation.hardware import PlayedNode
    from tests.simulation.world import World

Line = dict[str, Any]
FINAL = ("succeeded", "failed", "cancelled", "timed_out", "lost")
KILLED = 137


@dataclass
class Run:
    """One attempt of a job on a node."""

    order: Line
    state: RunState = RunState.STARTING
    exit_code: int | None = None
    pids: list[tuple[str, int]] = field(default_factory=list)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is told to end."""


class NodeJobs:
    """The jobs of a node. They go on while its worker is down, which knows them when it is back."""

    def __init__(self, node: PlayedNode) -> None:
        self.node = node
        self.world = node.world
        self._runs: dict[tuple[str, int], Run] = {}

    def reports(self) -> tuple[JobReport, ...]:
        """What the worker says of each."""
        return tuple(
            JobReport(job_id=job, attempt=attempt, state=run.state, exit_code=run.exit_code)
            for (job, attempt), run in self._runs.items()
        )

    def take(self, orders: list[Line]) -> None:
        """Start what should run here and is not known, stop what should end, and kill what no one wants any more."""
        wanted = {(order["job_id"], order["attempt"]): order for order in orders}
        for key in self._runs.keys() - wanted.keys():
            self._end(self._runs.pop(key), KILLED)
        for key, order in wanted.items():
            if key not in self._runs:
                self._runs[key] = Run(order)
                self.world.spawn(self._live(self._runs[key]))
            if order["stop"]:
                self._runs[key].order = order
                self._runs[key].stopped.set()

    async def _live(self, run: Run) -> None:
        """Run for a while, or until told to stop."""
        world, chance = self.world, self.world.chance
        await asyncio.sleep(chance.uniform(0.0, 0.2))
        if run.state is RunState.EXITED:
            return
        lease = run.order["lease_id"]
        run.pids = [(uuid, self.node.start_process(uuid, lease)) for uuid in run.order["gpus"]]
        run.state = RunState.RUNNING
        world.step(f"{self.node.name} runs {run.order['job_id']}, attempt {run.order['attempt']}")
        until_s = world.now_s + chance.expovariate(0.04)
        while not run.stopped.is_set() and world.now_s < until_s and not world.calm:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.stopped.wait(), 0.5)
        if run.stopped.is_set():
            await asyncio.sleep(chance.uniform(0.0, run.order["grace_s"]))
        self._end(run, 143 if run.stopped.is_set() else 0)

    def _end(self, run: Run, exit_code: int) -> None:
        """Its processes are gone."""
        if run.state is not RunState.EXITED:
            run.state, run.exit_code = RunState.EXITED, exit_code
            for uuid, pid in run.pids:
                self.node.gpus[uuid].processes.pop(pid, None)


class Submitter:
    """Submits one job after the other, and waits for the end of each."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name

    async def run(self) -> None:
        """Until everything is calm."""
        chance = self.world.chance
        for number in itertools.count(1):
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            if self.world.calm:
                return
            body: Line = {"command": ["train"], "launcher": "plain", "gpus": chance.choice((1, 1, 2))}
            body["priority"] = chance.choice(("normal", "normal", "scavenge"))
            body["preemptible"] = True
            sent_s = self.world.now_s
            job = await self._until_answered("POST", "/v1/jobs", body, key=f"{self.name}-{number}")
            if job is None:
                continue
            self.world.see("submitted", sent_s=sent_s, job_id=job["id"])
            while job is not None and job["state"] not in FINAL:
                await asyncio.sleep(chance.uniform(1.0, 5.0))
                job = await self._until_answered("GET", f"/v1/jobs/{job['id']}")

    async def _until_answered(self, method: str, path: str, body: Line | None = None, **how: Any) -> Line | None:
        """The job; None if it is refused."""
        while True:
            try:
                status, told = await self.world.network.call(self.name, method, path, body, **how)
            except NoAnswer:
                status = 503
            if status in (200, 201):
                return told  # type: ignore[no-any-return]
            if status not in (500, 503):
                return None
            await asyncio.sleep(self.world.chance.uniform(0.05, 0.3))
