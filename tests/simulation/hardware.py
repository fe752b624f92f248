"""Nodes: GPUs, whatever runs on them, and the worker that reports what it sees."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from gpulease_protocol.codec import to_json
from gpulease_protocol.model import ComputeMode, Device, GpuReading, Process
from gpulease_protocol.node_protocol import (
    JUST_STARTED,
    PAUSED,
    ClaimedGpu,
    LeaseOwner,
    NodeReport,
    OwnerReport,
    OwnerState,
)
from tests.simulation.jobs import NodeJobs
from tests.simulation.network import NoAnswer

if TYPE_CHECKING:
    from tests.simulation.world import World

GIB = 2**30
EXPORTER = 99
"""A process of no lease that always has the device file of each node's first GPU open: it only delays."""
CHANGES = (
    *("foreign", "foreign", "foreign", "health", "mode", "mode", "vanish", "claim", "claim", "claim"),
    *("restart", "down", "down", "hang", "off"),
)
GOES_OFF = "c"
"""The node that is gone for good at some time."""


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
    elsewhere: bool = False
    """Another daemon's worker has claimed it."""
    utilization_ratio: float = 0.0

    def memory(self, pid: int) -> int:
        """What a process uses; every second one so little that only the list of processes tells of it."""
        return GIB if pid % 2 else GIB // 16

    @property
    def clean(self) -> bool:
        """Nothing speaks against granting it."""
        there = self.present and not self.elsewhere
        return there and not self.processes and self.health == "ok" and self.mode is ComputeMode.DEFAULT

    @property
    def device(self) -> Device:
        """What does not change of it."""
        return Device(uuid=self.uuid, node=self.node, index=self.index)

    def reading(self) -> GpuReading:
        """What the probe would see now."""
        return GpuReading(
            uuid=self.uuid,
            node=self.node,
            index=self.index,
            name="NVIDIA H100",
            memory_total_bytes=80 * GIB,
            memory_used_bytes=sum(map(self.memory, self.processes)),
            utilization_ratio=self.utilization_ratio,
            compute_mode=self.mode,
            health=self.health,
            processes=tuple(
                Process(pid=pid, lease_id=lease, memory_bytes=self.memory(pid)) for pid, lease in self.processes.items()
            ),
            opened_by=(Process(pid=EXPORTER, command="exporter"),) if self.index == 0 else (),
            unreadable_processes=0,
        )


def in_newer_words(report: dict[str, Any]) -> dict[str, Any]:
    """The report as a worker of a newer version says it: with words and a field that the daemon does not know."""
    for gpu in report["gpus"]:
        if gpu["compute_mode"] != ComputeMode.DEFAULT.value:
            gpu["compute_mode"] = "maintenance"
        for process in (*gpu["processes"], *gpu["opened_by"]):
            process["type"] = "video"
    return report | {"of_tomorrow": {"gpus": []}}


NEW_FIELDS = {"claimed_elsewhere", "ports_reserved", "partial", "address", "interface"}
"""Fields of a report that the version before does not have. It sends the others even at their defaults."""


def in_older_words(report: dict[str, Any]) -> dict[str, Any]:
    """The report as a worker of the version before says it."""
    defaults = {
        one.name: one.default for one in fields(NodeReport) if one.default is not MISSING and one.name not in NEW_FIELDS
    }
    return defaults | {name: value for name, value in report.items() if name not in NEW_FIELDS}


VERSIONS = (in_older_words, in_newer_words, dict[str, Any], in_newer_words)
"""How a report is said; each start of a worker is of the next version."""


class PlayedNode:
    """One host: its GPUs, its worker, and the processes that own leases."""

    def __init__(self, world: World, name: str, gpus: int) -> None:
        self.world = world
        self.name = name
        self.gpus = {
            uuid: PlayedGpu(uuid, name, index)
            for index, uuid in enumerate(f"GPU-{ord(name[0]):08x}-0000-0000-0000-{index:012x}" for index in range(gpus))
        }
        self.realm = f"00000000-0000-0000-0000-{ord(name[0]):012x}/pid:[1]"
        self.down = False
        self.hung = False
        self.off = False
        """Gone for good, with everything that ran on it."""
        self.owners: dict[int, Callable[[], None]] = {}
        """By pid of each that lives: what to do when it dies."""
        self.jobs = NodeJobs(self)
        self._whole: tuple[int | None, tuple[GpuReading, ...]] = (None, ())
        """The last reading with processes and health, and its ticket."""
        self._starts = itertools.count(1)
        self._pids = itertools.count(100)
        self._restarted = asyncio.Event()

    def start_process(self, uuid: str, lease: str | None) -> int:
        """A process comes onto a GPU; its pid."""
        pid = next(self._pids)
        self.gpus[uuid].processes[pid] = lease
        return pid

    def start_owner(self, killed: Callable[[], None]) -> int:
        """A process that may own leases; its pid. `killed` is called when it dies."""
        pid = next(self.world.owner_pids)
        self.owners[pid] = killed
        return pid

    def kill_owner(self, pid: int) -> None:
        """The process dies, if it lives."""
        if (killed := self.owners.pop(pid, None)) is not None:
            self.world.see("died", pid=pid)
            killed()

    async def run(self) -> None:
        """The worker, as often as it is started again."""
        while True:
            self._restarted.clear()
            if not self.down:
                await self._work(f"{self.name}-worker-{next(self._starts)}")
            await asyncio.sleep(self.world.chance.uniform(0.05, 0.5))

    async def _work(self, worker: str) -> None:
        said_by_version = VERSIONS[int(worker.rpartition("-")[2]) % len(VERSIONS)]
        self.claims = said_by_version is not in_older_words
        """An older worker claims no GPUs and has no address for gangs; once everything is calm, it is upgraded."""
        ticket: int | None = None
        owners: tuple[LeaseOwner, ...] = ()
        paused, problem, complete = False, JUST_STARTED, True
        self._whole = None, ()
        drained: set[str] = set()
        while not self.down and not self._restarted.is_set() and not (self.world.calm and not self.claims):
            begun_s, shown, others, known, oldest = self.world.now_s, (), (), ticket, ticket
            if problem is None:
                oldest, shown, others = await self._read_all(begun_s, ticket, complete)
            working = [gpu.uuid for gpu in shown if gpu.utilization_ratio]
            report = NodeReport(
                worker_id=worker,
                host=self.name,
                ticket=oldest,
                seen=None if oldest == known else known,
                reading_ticket=None if oldest == known else known,
                problem=problem,
                gpus=shown,
                claimed_elsewhere=others,
                simulated=True,
                realm=self.realm,
                address=f"10.0.0.{ord(self.name[0])}",
                interface="eth0",
                owners=tuple(map(self._sight, owners)),
                jobs=self.jobs.reports(),
                hold_s=1.0,
            )
            body = said_by_version(to_json(report))
            try:
                path = f"/v1/nodes/{self.name}/exchange"
                status, desired = await self.world.network.call(worker, "POST", path, body)
            except NoAnswer:
                status = 0
            if status == 200:
                if working:
                    self.world.see("worked", gpus=working, begun_s=begun_s)
                ticket, paused = desired["ticket"], desired.get("paused", False)
                complete = desired.get("fresh", True)
                self.jobs.take(desired.get("jobs", []))
                owners = tuple(LeaseOwner(**owner) for owner in desired.get("owners", ()))
                drains = {uuid for lease in desired["leases"] if lease["state"] == "ended" for uuid in lease["gpus"]}
                if said_by_version is not in_older_words and not paused and problem is None and drains - drained:
                    ticket = await self._report_some(worker, drains - drained, ticket, said_by_version)
                drained = drains
            else:
                await asyncio.sleep(self.world.chance.uniform(0.05, 0.3))
            if ticket is not None:
                problem = PAUSED if paused else "the probe hangs" if self.hung else None

    async def _report_some(
        self, worker: str, uuids: set[str], ticket: int, said: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> int:
        """Report these GPUs alone, read after this ticket; the ticket of the answer."""
        gpus, _ = await self._read(self.world.now_s)
        gpus = tuple(gpu for gpu in gpus if gpu.uuid in uuids)
        report = NodeReport(
            worker_id=worker,
            host=self.name,
            seen=ticket,
            reading_ticket=ticket,
            reread=tuple(gpu.uuid for gpu in gpus),
            partial=True,
            gpus=gpus,
        )
        try:
            path = f"/v1/nodes/{self.name}/exchange"
            status, desired = await self.world.network.call(worker, "POST", path, said(to_json(report)))
        except NoAnswer:
            return ticket
        answered: int = desired["ticket"] if status == 200 else ticket
        return answered

    def _sight(self, owner: LeaseOwner) -> OwnerReport:
        return OwnerReport(owner=owner, state=OwnerState.ALIVE if owner.pid in self.owners else OwnerState.GONE)

    async def _read_all(
        self, begun_s: float, ticket: int | None, complete: bool
    ) -> tuple[int | None, tuple[GpuReading, ...], tuple[ClaimedGpu, ...]]:
        """One reading of all GPUs, and the ticket of its oldest part: what the daemon has asked for is whole. Others
        may repeat processes and health, as those of a real worker do, but not what the GPUs do."""
        if complete or not self.world.reclaim or not self._whole[1] or self.world.chance.random() < 0.3:
            shown, others = await self._read(begun_s)
            self._whole = ticket, shown
            return ticket, shown, others
        await asyncio.sleep(self._reading_s())
        present = [gpu for gpu in self.gpus.values() if gpu.present]
        here = {gpu.uuid: gpu for gpu in present if not gpu.elsewhere}
        shown = tuple(
            replace(known, utilization_ratio=here[known.uuid].utilization_ratio)
            for known in self._whole[1]
            if known.uuid in here
        )
        others = tuple(ClaimedGpu(device=gpu.device, reason="another has it") for gpu in present if gpu.elsewhere)
        return self._whole[0], shown, others

    async def _read(self, begun_s: float) -> tuple[tuple[GpuReading, ...], tuple[ClaimedGpu, ...]]:
        """One reading: somewhere between its begin and its end the hardware is looked at. Then what another daemon's
        worker has claimed."""
        await asyncio.sleep(self._reading_s())
        present = [gpu for gpu in self.gpus.values() if gpu.present]
        readings = tuple(gpu.reading() for gpu in present if not gpu.elsewhere)
        others = tuple(ClaimedGpu(device=gpu.device, reason="another has it") for gpu in present if gpu.elsewhere)
        free = [gpu.uuid for gpu in self.gpus.values() if gpu.clean]
        await asyncio.sleep(self._reading_s())
        self.world.see("reading", node=self.name, begun_s=begun_s, free=free)
        return readings, others

    def _reading_s(self) -> float:
        """Half of what a reading takes; some take long, and the world goes on meanwhile."""
        return self.world.chance.uniform(0.0, 0.2 if self.world.happens(0.1) else 0.01)

    async def suffer(self) -> None:
        """Things that happen to hardware and workers, until everything is calm."""
        chance = self.world.chance
        while not self.world.calm:
            await asyncio.sleep(chance.expovariate(0.4 * self.world.faults))
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

    async def _claim(self, gpu: PlayedGpu, lasts_s: float) -> None:
        gpu.elsewhere = self.claims  # a worker of the version before would not see it
        await asyncio.sleep(lasts_s)
        gpu.elsewhere = False

    async def _restart(self, _: PlayedGpu, __: float) -> None:
        self._restarted.set()

    async def _down(self, _: PlayedGpu, lasts_s: float) -> None:
        self.down = True
        await asyncio.sleep(lasts_s * self.world.chance.choice((1, 1, 1, 10)))
        self.down = self.off

    async def _off(self, _: PlayedGpu, __: float) -> None:
        """The host is switched off, and never comes back."""
        if self.name == GOES_OFF:
            self.off = self.down = True
            for gpu in self.gpus.values():
                gpu.processes.clear()
            for pid in list(self.owners):
                self.kill_owner(pid)

    async def _hang(self, _: PlayedGpu, lasts_s: float) -> None:
        self.hung = True
        await asyncio.sleep(lasts_s)
        self.hung = False
