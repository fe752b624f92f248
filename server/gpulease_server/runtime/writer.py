"""The writer: turns, commits, answers. The package's essay says what each failure does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from gpulease.errors import GpuleaseError, Unavailable
from gpulease.model import Event

from ..core.decide import decide
from ..core.happenings import Happening, LeaseRenewed, Ticked
from ..core.ledger import Change, GpuRecord, JobRecord, LeaseRecord, Ledger, NodeRecord
from ..core.queue import settle
from ..core.turn import Answer, Pending, Policy, Turn
from ..store.place import Place
from ..store.store import Store, StoreFailed, is_stored
from . import clock, decisions
from .meters import Meters
from .outage import FIRST_PAUSE_S, MAX_PAUSE_S, Outage, refuse_older, start_anew, twin
from .recent import EVENTS, RecentEvents
from .topics import Topics

log = logging.getLogger("gpulease.writer")

Result = TypeVar("Result")

MAX_TURN = 1000
"""Happenings in one turn, at most."""
MAX_WAITING = 20_000
"""Happenings that may wait for their turn; beyond that callers get 503."""
TICK_S = 0.25
"""Time between two looks at what is due."""
SHUTTING_DOWN = "the daemon is shutting down"
FAULT = "The daemon has a fault and could not decide on this."
NOTHING_DONE = "Nothing was done. Ask again."
MAY_BE_DONE = "It may have been recorded all the same: ask again under the same Idempotency-Key, or look first."


@dataclass(slots=True)
class Call:
    """A happening, and who waits for its answer."""

    happening: Happening
    future: asyncio.Future[Answer] | None

    @property
    def refused(self) -> bool:
        """True when its caller has had an answer; one that is gone has had none."""
        return self.future is not None and self.future.done() and not self.future.cancelled()


class Writer:
    """Decides on everything that happens, one turn after the other. See the package."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self.store = store
        self.policy = policy
        self.topics = Topics()
        self.committed = Ledger()
        """What readers see."""
        self.has_read = False
        """True once that is what the database had. Before, nothing is known: there may be GPUs, leases and jobs."""
        self.recent = RecentEvents()
        """The last events of what they see."""
        self.problem: str | None = "the ledger is being read"
        """Why nothing can be recorded now; None while all is well."""
        self.wanted: dict[str, float] = {}
        """Nodes of which a fresh reading is wanted."""
        self.meters = Meters()
        self._place = Place(store.engine)
        self._ledger = Ledger()
        self._pending: dict[str, Pending] = {}
        self._callers: dict[str, asyncio.Future[Answer]] = {}
        self._open: set[asyncio.Future[Answer]] = set()
        self._arrived: asyncio.Queue[Call] = asyncio.Queue(MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._last_tick_s = clock.now().mono_s
        self._ahead: int | None = None
        """What has still to be decided of all that had arrived when the next tick was due."""
        self._outage: Outage | None = None
        self._pause_s = FIRST_PAUSE_S
        self._told_to_end = False

    async def submit(self, happening: Happening) -> Answer:
        """The answer to a happening, after its commit. Raises an error that the core answered, or `Unavailable`.

        While nothing can be recorded a renewal is answered all the same, see `Outage.renewed`.
        """
        if self._outage is not None and isinstance(happening, LeaseRenewed):
            answer = self._outage.renewed(self.committed, happening, clock.now(), self.policy)
            if answer is not None:
                return _unless_error(answer)
        if self.problem is not None:
            raise Unavailable(f"The daemon cannot record anything now: {self.problem}", remedy=NOTHING_DONE)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        begun_s = clock.now().mono_s
        self._put(Call(happening, future))
        self._open.add(future)
        try:
            answer = _unless_error(await future)
            self.meters.answered(happening, answer, begun_s)
            return answer
        finally:
            self._open.discard(future)

    def tell(self, happening: Happening) -> None:
        """Say that something happened that needs no answer. It is passed over when it cannot be decided now."""
        if self.problem is None:
            with contextlib.suppress(Unavailable):
                self._put(Call(happening, None))

    async def between_turns(self, work: Callable[..., Result], *arguments: object) -> Result:
        """What `work` returns, done in the thread that commits, while no turn is. It has to be short: a turn waits."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _put(self, call: Call) -> None:
        try:
            self._arrived.put_nowait(call)
        except asyncio.QueueFull:
            raise Unavailable(f"{MAX_WAITING} requests wait for an answer already.", remedy=NOTHING_DONE) from None

    async def run(self) -> None:
        """Take turns until cancelled. A commit under way then is finished first, and its callers hear of it."""
        try:
            await self._come_back(Outage("the ledger is being read", try_writing=False))
            while not self._told_to_end:
                calls = await self._gather()
                if await self._take_turn(calls) or len(calls) == 1:
                    continue
                for call in calls:
                    # One that has been refused meanwhile was told that nothing is done.
                    if not call.refused and not self._told_to_end:
                        await self._take_turn([call])
            raise asyncio.CancelledError
        except Exception:
            log.critical("the writer has ended; nothing is decided until the daemon is restarted", exc_info=True)
            self.problem = "the writer has ended because of a fault; restart the daemon"
        finally:
            self.problem, self._outage = self.problem or SHUTTING_DOWN, None
            self._refuse(self._open, Unavailable(f"No verdict: {self.problem}.", remedy=NOTHING_DONE))

    def close(self) -> None:
        """Refuse what comes, wake every waiter, finish the commit under way."""
        self.problem = SHUTTING_DOWN
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
        since_s = clock.now().mono_s - self._last_tick_s
        if since_s < TICK_S:
            return calls
        # A renewal that has arrived is decided before what would expire without it.
        self._ahead = self._arrived.qsize() if self._ahead is None else self._ahead - len(calls)
        if self._ahead <= 0:
            calls.append(Call(Ticked(cause="tick", since_last_s=since_s), None))
            self._last_tick_s, self._ahead = self._last_tick_s + since_s, None
        return calls

    async def _take_turn(self, calls: list[Call]) -> bool:
        """Decide, commit, tell. False when a fault of the program kept that from happening: then nothing of it is
        recorded, the ledger has been read again, and each call deserves a turn of its own."""
        turn, recorded = None, self.committed.next_seq
        try:
            turn = self._decided(calls)
            stored = [change for change in turn.changes if is_stored(change)]
            if stored:
                with self.meters.committing(len(calls)):
                    await self._in_thread(self._commit, stored, turn.ledger)
                self._pause_s = FIRST_PAUSE_S
        except StoreFailed as error:
            assert turn is not None
            await self._sit_out(error, turn)
        except Exception:
            log.exception("a turn of %d could not be decided or written", len(calls))
            told = self._callers_told(turn, calls)
            await self._start_over()
            if turn is None or not self.committed.next_seq >= turn.ledger.next_seq > recorded:
                self._give_up(calls, told)
                return False
            for future, answer in told:
                _answer(future, answer)  # it was recorded before the fault
        else:
            await self._tell(turn)
        return True

    def _decided(self, calls: list[Call]) -> Turn:
        asked_before = dict(self.wanted)
        turn = Turn(ledger=self._ledger, now=clock.now(), policy=self.policy, pending=self._pending, wanted=self.wanted)
        for call in calls:
            if call.future is not None:
                self._callers[call.happening.cause] = call.future
            decide(turn, call.happening)
        settle(turn)
        if self.wanted != asked_before:
            self.topics.changed(f"node:{node}" for node in self.wanted)
        return turn

    def _commit(self, changes: list[Change], ledger: Ledger) -> None:
        """Write, and see that it was written where a restart will read it. Blocks. Raises `StoreFailed`."""
        self.store.write(changes, ledger)
        self._place.check()

    async def _in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        """What `work` returns. Waits for its end although the writer is told to end meanwhile: what is committed is to
        be told."""
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        while not doing.done():
            try:
                await asyncio.wait({doing})
            except asyncio.CancelledError:
                self._told_to_end = True
        return doing.result()

    async def _tell(self, turn: Turn) -> None:
        """Show a committed turn, answer its callers, wake the waiters. Whatever fails here, it is not decided again."""
        told = self._callers_told(turn, [])
        try:
            for change in turn.changes:
                self.committed.apply(change)
                if isinstance(change, Event):
                    self.recent.add(change)
            topics = _topics(turn.changes)
        except Exception:
            log.exception("a turn was recorded but cannot be shown; the ledger is read again")
            topics = set()
            await self._start_over()
        for future, answer in told:
            _answer(future, answer)
        self.topics.changed(topics)
        self.meters.take(turn.changes, self.committed, turn.now)
        decisions.say(turn.changes, turn.answers)

    def _callers_told(self, turn: Turn | None, calls: list[Call]) -> list[tuple[asyncio.Future[Answer], Answer]]:
        """Who is to be told what by this turn. They, and those of `calls`, are nobody's callers any more."""
        answers = turn.answers if turn is not None else []
        found = [(self._callers.pop(cause, None), answer) for cause, answer in answers]
        for call in calls:
            self._callers.pop(call.happening.cause, None)
        return [(future, answer) for future, answer in found if future is not None]

    def _give_up(self, calls: list[Call], told: list[tuple[asyncio.Future[Answer], Answer]]) -> None:
        """After a fault in a turn: one call alone is the one that the program stumbles over; others get another turn,
        but for those of an earlier turn on which a verdict fell in this one."""
        fault = GpuleaseError(FAULT, remedy="Please report its log.")
        if len(calls) == 1 and calls[0].future is not None:
            _answer(calls[0].future, fault)
        own = {call.future for call in calls}
        earlier = [future for future, _ in told if future not in own]
        self._refuse(earlier, Unavailable("The daemon had a fault in this turn.", remedy=NOTHING_DONE))

    async def _start_over(self) -> None:
        """After a fault: refuse whoever waits for a verdict, and read the ledger again."""
        why = "the ledger is read again after a fault of the daemon"
        self._refuse(self._callers.values(), Unavailable(f"No verdict: {why}.", remedy=NOTHING_DONE))
        await self._come_back(Outage(why, try_writing=False))

    async def _sit_out(self, error: StoreFailed, turn: Turn) -> None:
        """A commit failed. Refuse everyone, and come back when one succeeds."""
        unknown = Unavailable(error.detail, remedy=MAY_BE_DONE, extra={"outcome": "unknown"})
        nothing = Unavailable(error.detail, remedy=NOTHING_DONE)
        for future, answer in self._callers_told(turn, []):
            _answer(future, nothing if isinstance(answer, GpuleaseError) else unknown)
        while not self._arrived.empty():
            self._arrived.get_nowait()
        self._refuse(self._open, nothing)
        log.error("nothing can be recorded: %s", error.detail)
        outage = Outage(
            error.detail, failed=turn.changes, committed=self.committed, answers_renewals=self._place.guarded
        )
        await self._come_back(outage)

    async def _come_back(self, outage: Outage) -> None:
        """Read the ledger from the database, however often it takes. Every holder gets a full `ttl_s`.

        After a failed commit the end of the outage is an event, whose commit shows that there can be others.
        """
        self._pending.clear()
        self._callers.clear()
        self.wanted.clear()
        self.problem, self._outage = outage.reason, outage
        read_s, failed = 0.0, outage.try_writing
        while True:
            if failed:
                # Reading a great ledger takes its time, and others need the processor too.
                await asyncio.sleep(max(self._pause_s, 4 * read_s))
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            begun_s = clock.now().mono_s
            try:
                ledger = await self._in_thread(self._read)
                read_s = clock.now().mono_s - begun_s
                if outage.try_writing:
                    changes = outage.closing(ledger, clock.now())
                    await self._in_thread(self._commit, changes, ledger)
                break
            except Exception as error:
                outage.say(error)
                self.problem, failed = outage.reason, True
            if self._told_to_end:
                raise asyncio.CancelledError
        outage.over()
        self._show(ledger)

    def _read(self) -> Ledger:
        """The ledger as the database has it. Blocks. Raises `StoreFailed`, or what the database raises."""
        self._place.open()
        ledger = self.store.load()
        refuse_older(ledger, self.committed)
        return ledger

    def _show(self, ledger: Ledger) -> None:
        """Go on with a ledger that was read, and let everybody look again."""
        moment = clock.now()
        start_anew(ledger, moment)
        self._ledger, self.committed, self.has_read = ledger, twin(ledger), True
        self.meters.take_up(ledger, moment)
        self.recent.begin_after(ledger.next_seq - 1)
        self.problem = self._outage = None
        self._last_tick_s = moment.mono_s
        self.topics.wake_all()

    def _refuse(self, futures: Iterable[asyncio.Future[Answer]], error: GpuleaseError) -> None:
        for future in list(futures):
            _answer(future, error)


def _answer(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)


def _unless_error(answer: Answer) -> Answer:
    if isinstance(answer, GpuleaseError):
        raise answer.with_traceback(None)  # the same one may refuse thousands
    return answer


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
            case Event():
                topics.add(EVENTS)
    return topics
