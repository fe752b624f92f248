"""Holders that never renew, because a worker watches their process; they run the flows of the client library itself.

They are interrupted in the middle of whatever they do, as by Ctrl-C, and live on; or killed. What no daemon has
answered they owe (`gpulease.sansio.release_retries`), and say later, as the library's thread does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpulease.sansio import release_retries
from gpulease.sansio.effects import Attempt, Effect, Flow, FlowDriver, NotConnected, Response, ResponseLost, Result
from gpulease.sansio.failover import Destination, Failover
from gpulease.sansio.flows import Flows
from gpulease_protocol.codec import to_json
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.host import addresses
from gpulease_protocol.model import Lease
from gpulease_protocol.requests import LeaseRequest
from tests.simulation.network import NoAnswer, NotThere

if TYPE_CHECKING:
    from tests.simulation.hardware import PlayedNode
    from tests.simulation.world import World

START_TICKS = 7
KEY: ContextVar[str] = ContextVar("KEY")
"""Idempotency-Key of the next request that this task makes."""


class Interrupted(BaseException):
    """Ctrl-C: the flow still runs to its end."""


class PlayedTransport:
    """Runs flows on the simulated network, as `sync_transport.Transport` does, and writes down what it was told."""

    def __init__(self, world: World, who: str) -> None:
        self.world = world
        self.who = who
        self.interrupt_at_s = float("inf")
        """When the user presses Ctrl-C."""

    async def run(self, flow: Flow[Result]) -> Result:
        """What the flow returns."""
        driver = FlowDriver(flow)
        try:
            while (effect := driver.next_effect()) is not None:
                try:
                    driver.outcome = await self._unless_interrupted(effect)
                except (NotConnected, ResponseLost, Interrupted) as failure:
                    driver.failure = failure
            return driver.result
        finally:
            flow.close()

    async def _unless_interrupted(self, effect: Effect) -> Response | None:
        task = asyncio.ensure_future(self._perform(effect))
        try:
            await asyncio.wait({task}, timeout=min(self.interrupt_at_s - self.world.now_s, 3600.0))
        finally:
            task.cancel()  # no effect on one that is done
        if task.done() and not task.cancelled():
            return task.result()
        self.interrupt_at_s = float("inf")
        self.world.step(f"{self.who} is interrupted")
        raise Interrupted

    async def _perform(self, effect: Effect) -> Response | None:
        if not isinstance(effect, Attempt):
            await asyncio.sleep(effect.seconds)  # type: ignore[union-attr]
            return None
        call = effect.call
        query = "&".join(f"{name}={value}" for name, value in call.query)
        path = f"{call.path}?{query}" if query else call.path
        line = self._line(call)
        try:
            status, told = await self.world.network.call(
                self.who, call.method, path, call.body, key=call.idempotency_key, patience_s=effect.timeout_s
            )
        except NotThere:
            raise NotConnected("Connection refused") from None
        except NoAnswer:
            raise ResponseLost("it did not respond in time", timed_out=True) from None
        line |= {"at_s": self.world.now_s, "status": status}
        line |= {"lease": told} if status < 300 else {"code": told["code"]}
        return Response(status, "", json.dumps(told).encode())

    def _line(self, call: ApiCall[Any]) -> dict[str, Any]:
        """What the checker is told of a call, to be completed with the answer."""
        _, _, resource, *names = call.path.split("/")
        line: dict[str, Any] = {"sent_s": self.world.now_s, "at_s": None}
        match names:
            case []:
                line |= {"what": "asked", "key": call.idempotency_key}
            case [lease_id]:
                waited = any(name == "wait_s" for name, _ in call.query)
                line |= {"what": "shown", "lease_id": lease_id, "trusted_from": None, "waited": waited}
            case [lease_id, "release" | "renew" as verb]:
                line |= {"what": "released" if verb == "release" else "renewed", "lease_id": lease_id}
                line["token"] = call.body["token"]
            case _:
                return line  # an explanation: nothing is promised
        assert resource == "leases"
        self.world.lines.append(line)
        return line


class PlayedDebts(release_retries.Debts):
    """What all processes owe; a task says it in place of each process's thread, for as long as that process lives."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.transports: dict[Failover, PlayedTransport] = {}
        """By the failover of each process that lives."""
        self._reset()

    def add(self, debt: release_retries.Debt) -> None:
        """Owe this; who is dead owes nothing."""
        if debt.failover in self.transports:
            super().add(debt)

    def of(self, failover: Failover) -> list[release_retries.Debt]:
        """What one process owes."""
        return [debt for debt in self._debts if debt.failover is failover]

    def bury(self, failover: Failover) -> None:
        """The process is dead."""
        self.transports.pop(failover, None)
        self._debts = [debt for debt in self._debts if debt.failover is not failover]

    def settle_in_background(self) -> None:
        """`PlayedOwner._settle` looks by itself."""


class PlayedOwner:
    """A process on a node, and the next one when it is dead. Each asks for GPUs again and again."""

    def __init__(self, world: World, name: str, node: PlayedNode) -> None:
        self.world = world
        self.name = name
        self.node = node
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        """One process after the other, until everything is calm. The last one lives on, and holds nothing."""
        while not self.world.calm and not self.node.off:
            pid = self.node.start_owner(self._killed)
            transport = PlayedTransport(self.world, f"{self.name}.{pid}")
            address = addresses.parse(f"http://{self.name}-{pid}.lab:8750")
            flows = Flows(Destination((address,), interchangeable=True, bearer_token=None, timeout_s=3.0), retry_s=15.0)
            self.world.debts.transports[flows.failover] = transport
            self._tasks = [self.world.spawn(body) for body in (self._live(pid, flows, transport), self._settle(flows))]
            await asyncio.wait(self._tasks)
            self.world.debts.bury(flows.failover)

    def _killed(self) -> None:
        """The process is dead, or its host is off."""
        for task in self._tasks:
            task.cancel()

    async def _live(self, pid: int, flows: Flows, transport: PlayedTransport) -> None:
        chance, world = self.world.chance, self.world
        while not world.calm:
            await asyncio.sleep(chance.uniform(0.0, 1.5))
            temper = chance.choice(("good", "good", "interrupted", "interrupted", "dies"))
            if temper == "interrupted":
                transport.interrupt_at_s = world.now_s + chance.expovariate(0.5)
            elif temper == "dies":
                world.spawn(self._kill(pid, chance.expovariate(0.5)))
            await self._one(pid, flows, transport)

    async def _kill(self, pid: int, after_s: float) -> None:
        """Kill the process, some time from now."""
        await asyncio.sleep(after_s)
        if not self.world.calm:
            self.node.kill_owner(pid)

    async def _one(self, pid: int, flows: Flows, transport: PlayedTransport) -> None:
        """Ask, hold, give back. Whatever is not said in the end is owed."""
        world, chance = self.world, self.world.chance
        key = f"{self.name}-{next(self._numbers)}"
        KEY.set(key)
        request = LeaseRequest(
            count=chance.choice((1, 1, 2, 3)),
            ttl_s=chance.choice((2.0, 5.0, 12.0)),
            label=key,
            owner_pid=pid,
            owner_start_ticks=START_TICKS,
            owner_realm=self.node.realm,
        )
        try:
            held = flows.acquire(
                request, chance.choice((0.5, 5.0, 40.0)), lambda lease, trusted_from: (lease, trusted_from)
            )
            lease, heard_s = await transport.run(held)
        except BaseException as error:
            world.see("gave_up", key=key)
            if isinstance(error, GpuleaseError | Interrupted):
                return
            raise
        shown = {"lease_id": lease.id, "sent_s": heard_s, "status": 200, "lease": to_json(lease)}
        world.see("shown", trusted_from=heard_s, **shown)
        world.see("owned", lease_id=lease.id, pid=pid, liveness=lease.liveness)
        try:
            await self._hold(lease)
        finally:
            world.see("let_go", lease_id=lease.id)
        try:
            await transport.run(flows.release(lease.id, lease.fencing_token))
        except (GpuleaseError, Interrupted):
            world.step(f"{self.name} does not hear of the release of {lease.id}")

    async def _hold(self, lease: Lease) -> None:
        """Use the GPUs for a while, without a word to the daemon."""
        world, chance = self.world, self.world.chance
        uses = [gpu.uuid for gpu in lease.gpus] if chance.random() < 0.5 else []
        pids = [(uuid, world.gpu_node(uuid).start_process(uuid, lease.id)) for uuid in uses]
        try:
            await asyncio.sleep(chance.choice((0.2, 2.0, 6.0, 20.0)) * chance.random())
        finally:
            for uuid, pid in pids:
                world.gpu_node(uuid).gpus[uuid].processes.pop(pid, None)

    async def _settle(self, flows: Flows) -> None:
        """Repeat what is owed. Ends once everything is calm and nothing is owed; the process itself lives on."""
        debts, pause_s = self.world.debts, release_retries.MIN_PAUSE_S
        transport = PlayedTransport(self.world, f"{self.name} owes")
        while True:
            await asyncio.sleep(pause_s)
            mine = debts.of(flows.failover)
            if not mine and self.world.calm and self._tasks[0].done():
                return
            pause_s = release_retries.MIN_PAUSE_S
            for debt in mine:
                if await transport.run(debts.settled(debt)) is not None:
                    pause_s = release_retries.MAX_PAUSE_S
                    break


def modules_of_the_client(world: World) -> list[tuple[str, Any]]:
    """What to patch, so that the library's clock, keys and chance are the world's."""
    played = SimpleNamespace(monotonic=lambda: world.now_s)
    return [
        ("gpulease.sansio.flows.time", played),
        ("gpulease.sansio.failover.time", played),
        ("gpulease.sansio.wait_announcement.time", played),
        ("gpulease.sansio.wait_announcement.WaitAnnouncement._speaker", None),
        ("gpulease.sansio.flows.random", world.chance),
        ("gpulease.sansio.flows.uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=KEY.get()))),
        ("gpulease.sansio.flows.DEBTS", world.debts),
    ]
