"""The writer: turns, commits, answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gpulease.errors import GpuleaseError, Unavailable
from gpulease.model import Event, Liveness

from ..core.decide import decide
from ..core.happenings import Happening, Ticked
from ..core.ledger import Change, Deadline, GpuRecord, Instant, JobRecord, LeaseRecord, Ledger, NodeRecord
from ..core.queue import settle
from ..core.turn import Answer, Pending, Policy, Turn
from ..store.store import Store, StoreFailed, is_stored
from . import clock
from .topics import Topics

log = logging.getLogger("gpulease.writer")

MAX_TURN = 1000
"""Happenings in one turn, at most."""
MAX_WAITING = 20_000
"""Happenings that may wait for their turn; beyond that callers get 503."""
TICK_S = 0.25
"""Time between two looks at what is due."""


@dataclass(slots=True)
class Call:
    """A happening, and who waits for its answer."""

    happening: Happening
    future: asyncio.Future[Answer] | None


class Writer:
    """Decides on everything that happens, one turn after the other. See the package."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self.store = store
        self.policy = policy
        self.topics = Topics()
        self.committed = Ledger()
        """What readers see."""
        self.problem: str | None = "the ledger is being read"
        """Why nothing can be decided now; None while all is well."""
        self.wanted: dict[str, float] = {}
        """Nodes of which a fresh reading is wanted."""
        self._ledger = Ledger()
        self._pending: dict[str, Pending] = {}
        self._callers: dict[str, asyncio.Future[Answer]] = {}
        self._arrived: asyncio.Queue[Call] = asyncio.Queue(MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._last_tick_s = clock.now().mono_s

    async def submit(self, happening: Happening) -> Answer:
        """The answer to a happening, after its commit. Raises an error that the core answered, or `Unavailable`."""
        if self.problem is not None:
            raise Unavailable(f"The daemon cannot decide anything now: {self.problem}", remedy="Ask again.")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._put(Call(happening, future))
        answer = await future
        if isinstance(answer, GpuleaseError):
            raise answer
        return answer

    def tell(self, happening: Happening) -> None:
        """Say that something happened that needs no answer."""
        if self.problem is None:
            self._put(Call(happening, None))

    def _put(self, call: Call) -> None:
        try:
            self._arrived.put_nowait(call)
        except asyncio.QueueFull:
            raise Unavailable(f"{MAX_WAITING} requests wait for an answer already.", remedy="Ask again.") from None

    async def run(self) -> None:
        """Take turns until cancelled."""
        await self._reload()
        while True:
            calls = await self._gather()
            try:
                await self._take_turn(calls)
            except StoreFailed as error:
                log.error("turn not committed: %s", error.detail)
                while not self._arrived.empty():
                    calls.append(self._arrived.get_nowait())
                await self._recover(calls, error)
            except Exception:
                log.exception("turn not decided; deciding on each happening alone")
                await self._one_by_one(calls)

    def close(self) -> None:
        """Refuse what comes, wake every waiter, finish the commit under way."""
        self.problem = "the daemon is shutting down"
        self.topics.wake_all()
        self._thread.shutdown(wait=True)

    async def _gather(self) -> list[Call]:
        """Everything that has arrived, and a tick when one is due."""
        calls: list[Call] = []
        due_s = self._last_tick_s + TICK_S - clock.now().mono_s
        if due_s > 0:
            with contextlib.suppress(TimeoutError):
                calls.append(await asyncio.wait_for(self._arrived.get(), due_s))
        while len(calls) < MAX_TURN and not self._arrived.empty():
            calls.append(self._arrived.get_nowait())
        moment_s = clock.now().mono_s
        if moment_s - self._last_tick_s >= TICK_S:
            calls.append(Call(Ticked(cause="tick", since_last_s=moment_s - self._last_tick_s), None))
            self._last_tick_s = moment_s
        return calls

    async def _take_turn(self, calls: list[Call]) -> None:
        asked_before = dict(self.wanted)
        turn = Turn(ledger=self._ledger, now=clock.now(), policy=self.policy, pending=self._pending, wanted=self.wanted)
        for call in calls:
            if call.future is not None:
                self._callers[call.happening.cause] = call.future
            decide(turn, call.happening)
        settle(turn)
        stored = [change for change in turn.changes if is_stored(change)]
        if self.wanted != asked_before:
            self.topics.changed(f"node:{node}" for node in self.wanted)
        if stored:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self.store.write, stored, self._ledger)
        for change in turn.changes:
            self.committed.apply(change)
            if isinstance(change, Event) and change.kind.startswith("node."):
                log.log(logging.INFO if change.reason is None else logging.WARNING, "%s", _told(change))
        for cause, answer in turn.answers:
            self._answer(cause, answer)
        self.topics.changed(_topics(turn.changes))

    def _answer(self, cause: str, answer: Answer) -> None:
        future = self._callers.pop(cause, None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def _one_by_one(self, calls: list[Call]) -> None:
        """After a fault of the core: find the happening that it stumbles over, so that only its caller is refused."""
        fault = GpuleaseError("The daemon has a fault and could not decide on this.", remedy="Please report its log.")
        for call in calls:
            self._callers.pop(call.happening.cause, None)
        await self._recover([], fault)
        for call in calls:
            try:
                await self._take_turn([call])
            except StoreFailed as error:
                await self._recover([call], error)
            except Exception:
                log.exception("cannot decide on %s", type(call.happening).__name__)
                await self._recover([call], fault)

    async def _recover(self, calls: list[Call], error: GpuleaseError) -> None:
        """Refuse everyone who was waiting for this turn or for a verdict, and read the ledger again."""
        self.problem = error.detail
        for call in calls:
            if call.future is not None and not call.future.done():
                call.future.set_result(error)
        for cause in list(self._callers):
            self._answer(cause, error)
        self._pending.clear()
        self.wanted.clear()
        await self._reload()

    async def _reload(self) -> None:
        """Read the ledger from the database, however often it takes. Every holder gets a full `ttl_s`."""
        loop, pause_s = asyncio.get_running_loop(), 0.1
        while True:
            try:
                ledger = await loop.run_in_executor(self._thread, self.store.load)
                committed = await loop.run_in_executor(self._thread, self.store.load)
                break
            except Exception as error:
                self.problem = f"the ledger cannot be read: {error}"
                log.error("%s", self.problem)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
        moment = clock.now()
        for fresh in (ledger, committed):
            start_anew(fresh, moment)
        self._ledger, self.committed, self.problem = ledger, committed, None
        self._last_tick_s = moment.mono_s


def _told(event: Event) -> str:
    """A line of the log for an event of a node."""
    return f"{event.kind} {event.node}{f': {event.reason}' if event.reason else ''}"


def start_anew(ledger: Ledger, now: Instant) -> None:
    """Set what is not stored: full deadlines, and draining GPUs that need a reading begun after now."""
    for record in ledger.leases.values():
        if record.lease.ended_at is None and record.lease.liveness is not Liveness.JOB:
            ledger.apply(Deadline(record.lease.id, now.mono_s + record.lease.ttl_s))
    for gpu in ledger.gpus.values():
        if gpu.draining:
            ledger.draining_since[gpu.device.uuid] = now.mono_s


def _topics(changes: list[Change]) -> set[str]:
    topics: set[str] = set()
    for change in changes:
        match change:
            case LeaseRecord(lease=lease):
                topics.add(f"lease:{lease.id}")
                topics.update(f"node:{device.node}" for device in lease.gpus)
            case JobRecord(job=job):
                topics.add(f"job:{job.id}")
                topics.update(f"node:{device.node}" for device in job.gpus)
            case GpuRecord(device=device):
                topics.add(f"node:{device.node}")
            case NodeRecord(name=name):
                topics.add(f"node:{name}")
    return topics
