"""Nodes: GPUs, whatever runs on them, and the worker that reports what it sees."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpulease.exchange import JUST_STARTED, PAUSED, NodeReport
from gpulease.model import ComputeMode, GpuReading, Process
from gpulease.wire import to_json

from .network import NoAnswer

if TYPE_CHECKING:
    from .world import World

GIB = 2**30
EXPORTER = 99
"""A process of no lease that always has the device file of each node's first GPU open: it only delays."""
CHANGES = ("foreign", "foreign", "foreign", "health", "mode", "vanish", "restart", "down", "hang")


@dataclass
class PlayedGpu:
    """The truth about one GPU."""

    uuid: str
    node: str
    index: int
    processes: dict[int, str | None] = field(default_factory=dict)
    """Lease by pid."""
    health: str = "ok"
    mode: ComputeMode = ComputeMode.DEFAULT
    present: bool = True

    def memory(self, pid: int) -> int:
        """What a process uses; every second one so little that only the list of processes tells of it."""
        return GIB if pid % 2 else GIB // 16

    @property
    def clean(self) -> bool:
        """Nothing speaks against granting it."""
        return self.present and not self.processes and self.health == "ok" and self.mode is ComputeMode.DEFAULT

    def reading(self) -> GpuReading:
        """What the probe would see now."""
        return GpuReading(
            uuid=self.uuid,
            node=self.node,
            index=self.index,
            name="NVIDIA H100",
            memory_total_bytes=80 * GIB,
            memory_used_bytes=sum(map(self.memory, self.processes)),
            utilization_ratio=0.0,
            compute_mode=self.mode,
            health=self.health,
            processes=tuple(
                Process(pid=pid, lease_id=lease, memory_bytes=self.memory(pid)) for pid, lease in self.processes.items()
            ),
            opened_by=(Process(pid=EXPORTER, command="exporter"),) if self.index == 0 else (),
            unreadable_processes=0,
        )


class PlayedNode:
    """One host: its GPUs and its worker."""

    def __init__(self, world: World, name: str, gpus: int) -> None:
        self.world = world
        self.name = name
        self.gpus = {
            uuid: PlayedGpu(uuid, name, index)
            for index, uuid in enumerate(f"GPU-{ord(name[0]):08x}-0000-0000-0000-{index:012x}" for index in range(gpus))
        }
        self.down = False
        self.hung = False
        self._starts = itertools.count(1)
        self._pids = itertools.count(100)
        self._restarted = asyncio.Event()

    def start_process(self, uuid: str, lease: str | None) -> int:
        """A process comes onto a GPU; its pid."""
        pid = next(self._pids)
        self.gpus[uuid].processes[pid] = lease
        return pid

    async def run(self) -> None:
        """The worker, as often as it is started again."""
        while True:
            self._restarted.clear()
            if not self.down:
                await self._work(f"{self.name}-worker-{next(self._starts)}")
            await asyncio.sleep(self.world.chance.uniform(0.05, 0.5))

    async def _work(self, worker: str) -> None:
        ticket: int | None = None
        paused, problem = False, JUST_STARTED
        while not self.down and not self._restarted.is_set():
            begun_s, shown, known = self.world.now_s, (), ticket
            if problem is None:
                shown = await self._read(begun_s)
            report = NodeReport(
                worker_id=worker,
                host=self.name,
                ticket=known,
                problem=problem,
                gpus=shown,
                simulated=True,
                hold_s=1.0,
            )
            try:
                path = f"/v1/nodes/{self.name}/exchange"
                status, desired = await self.world.network.call(worker, "POST", path, to_json(report))
            except NoAnswer:
                status = 0
            if status == 200:
                ticket, paused = desired["ticket"], desired["paused"]
            else:
                await asyncio.sleep(self.world.chance.uniform(0.05, 0.3))
            if ticket is not None:
                problem = PAUSED if paused else "the probe hangs" if self.hung else None

    async def _read(self, begun_s: float) -> tuple[GpuReading, ...]:
        """One reading: somewhere between its begin and its end the hardware is looked at."""
        await asyncio.sleep(self._reading_s())
        readings = tuple(gpu.reading() for gpu in self.gpus.values() if gpu.present)
        free = [gpu.uuid for gpu in self.gpus.values() if gpu.clean]
        await asyncio.sleep(self._reading_s())
        self.world.see("reading", node=self.name, begun_s=begun_s, free=free)
        return readings

    def _reading_s(self) -> float:
        """Half of what a reading takes; some take long, and the world goes on meanwhile."""
        return self.world.chance.uniform(0.0, 0.2 if self.world.happens(0.1) else 0.01)

    async def suffer(self) -> None:
        """Things that happen to hardware and workers, until everything is calm."""
        chance = self.world.chance
        while not self.world.calm:
            await asyncio.sleep(chance.expovariate(0.4))
            if not self.world.calm:
                change = chance.choice(CHANGES)
                self.world.step(f"{self.name} suffers {change}")
                self.world.spawn(
                    getattr(self, f"_{change}")(chance.choice(list(self.gpus.values())), chance.uniform(0.2, 5.0))
                )

    async def _foreign(self, gpu: PlayedGpu, lasts_s: float) -> None:
        pid = self.start_process(gpu.uuid, None)
        await asyncio.sleep(lasts_s)
        gpu.processes.pop(pid, None)

    async def _health(self, gpu: PlayedGpu, lasts_s: float) -> None:
        gpu.health = "lost"
        await asyncio.sleep(lasts_s)
        gpu.health = "ok"

    async def _mode(self, gpu: PlayedGpu, lasts_s: float) -> None:
        gpu.mode = ComputeMode.PROHIBITED
        await asyncio.sleep(lasts_s)
        gpu.mode = ComputeMode.DEFAULT

    async def _vanish(self, gpu: PlayedGpu, lasts_s: float) -> None:
        gpu.present = False
        await asyncio.sleep(lasts_s)
        gpu.present = True

    async def _restart(self, _: PlayedGpu, __: float) -> None:
        self._restarted.set()

    async def _down(self, _: PlayedGpu, lasts_s: float) -> None:
        self.down = True
        await asyncio.sleep(lasts_s)
        self.down = False

    async def _hang(self, _: PlayedGpu, lasts_s: float) -> None:
        self.hung = True
        await asyncio.sleep(lasts_s)
        self.hung = False
