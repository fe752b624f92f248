"""The writer: turns, commits, answers. The package docstring says what each failure does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gpulease_protocol.errors import GpuleaseError, Unavailable
from gpulease_protocol.model import Event
from gpulease_server.core.decide import decide
from gpulease_server.core.happenings import Happening, JobSubmitted, LeaseRequested, RenewalRequested, Ticked
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.next_tick import next_tick_s
from gpulease_server.core.pending import PendingRequests
from gpulease_server.core.policy import Policy
from gpulease_server.core.queue import settle
from gpulease_server.core.records import Change, Deadline
from gpulease_server.core.turn import Answer, Turn
from gpulease_server.runtime import clock, event_log
from gpulease_server.runtime.daemon_metrics import DaemonMetrics
from gpulease_server.runtime.grant_waiters import GrantWaiters
from gpulease_server.runtime.outage import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    Outage,
    carry_keeps,
    copy_ledger,
    refuse_older_copy,
    reset_deadlines,
)
from gpulease_server.runtime.recent_events import RecentEvents
from gpulease_server.runtime.submissions import Callback, Reply, Submission, SubmissionQueue
from gpulease_server.runtime.wakeups import Wakeups, wakeup_keys
from gpulease_server.store.disk_reserve import DiskReserve
from gpulease_server.store.file_guard import FileGuard
from gpulease_server.store.ledger_store import Store, StoreFailed, is_stored

log = logging.getLogger("gpulease.writer")

Result = TypeVar("Result")

MAX_TURN = 1000
"""Happenings in one turn, at most."""
TICK_S = 0.25
"""Time between two ticks, at least. There is none before something may be due, see `core.next_tick`."""
SLEEP_S = 60.0
"""How long the writer sleeps, at most."""
RESERVE_CHECK_S, IDLE_RESERVE_CHECK_S = 1.0, 5.0
"""Time between two checks of the ledger's reserve of disk while there are commits, and while there are none."""
SHUTTING_DOWN = "the daemon is shutting down"
FAULT = "An internal error of the daemon: it could not decide this request."
NOTHING_DONE = "Nothing was done. Ask again."
MAY_BE_DONE = "It may have been recorded anyway: ask again with the same Idempotency-Key, or check first."


class Writer:
    """Decides everything that happens, one turn after the other. See the package docstring."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self.store = store
        self.policy = policy
        self.wakeups = Wakeups()
        self.committed = Ledger()
        """What readers see."""
        self.published = 0
        """How often that has changed since the start."""
        self.has_loaded = False
        """True once `committed` was loaded. Before that it is empty, which says nothing about the database."""
        self.recent_events = RecentEvents()
        """The last events of `committed`."""
        self.problem: str | None = "the ledger is being read"
        """Why nothing can be recorded now; None while commits succeed."""
        self.reading_requests: dict[str, float] = {}
        """Nodes that are asked for a new reading, and since when; only once the reason for that is committed."""
        self.grant_waiters = GrantWaiters()
        self.metrics = DaemonMetrics()
        self._file_guard = FileGuard(store.engine)
        self.disk_reserve = DiskReserve(store.engine)
        self._ledger = Ledger()
        self._pending = PendingRequests()
        self._requested_readings: dict[str, float] = {}
        """As `reading_requests`, as the last turn has decided."""
        self._futures: dict[str, Reply] = {}
        self._unanswered: dict[Reply, None] = {}
        """Oldest first."""
        self._queue = SubmissionQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._last_tick_s = self._ran_at_s = clock.now().mono_s
        self._stalled_s = 0.0
        """Since the last tick, the time in which the event loop did not run, and so took no request."""
        self._backlog: int | None = None
        """Submissions that arrived before the next tick was due and are still undecided; None while no tick is due."""
        self._outage: Outage | None = None
        self._pause_s, self._load_s = FIRST_PAUSE_S, 0.0
        self._commits = 0
        """Turns that were committed."""
        self._stopping = False

    async def submit(self, happening: Happening) -> Answer:
        """The answer to a happening, after its commit. Raises the error that the core answered, or `Unavailable`.

        During an outage renewals are still answered, see `Outage.answer_renewal`.
        """
        answer = self._answer_at_once(happening)
        if answer is not None:
            return _raise_if_error(answer)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        begun_s = clock.mono_s()
        self._add(Submission(happening, future))
        try:
            answer = _raise_if_error(await future)
            self.metrics.observe_answer(happening, answer, begun_s)
            return answer
        finally:
            del self._unanswered[future]

    def begin(self, happening: Happening, tell: Callable[[Answer], None]) -> None:
        """As `submit`, but `tell` is called later, with the answer or the error; not if this raises `Unavailable`."""
        answer = self._answer_at_once(happening)
        if answer is not None:
            asyncio.get_running_loop().call_soon(tell, answer)
            return
        self._add(Submission(happening, Callback(tell, self._unanswered)))

    def _answer_at_once(self, happening: Happening) -> Answer | None:
        """The answer to a renewal during an outage. Raises `Unavailable` if a happening cannot be recorded now."""
        if self._outage is not None and isinstance(happening, RenewalRequested):
            answer = self._outage.answer_renewal(self.committed, happening, clock.now(), self.policy)
            if answer is not None:
                return answer
        if self.problem is not None:
            raise Unavailable(f"The daemon cannot record anything now: {self.problem}.", remedy=NOTHING_DONE)
        if self.disk_reserve.is_short and isinstance(happening, (LeaseRequested, JobSubmitted)):
            detail = "The disk of the ledger is full; what is left is kept for releases and cancellations."
            raise Unavailable(detail, remedy="Nothing was done. Free some space on the daemon's disk, then ask again.")
        return None

    def enqueue(self, happening: Happening) -> None:
        """Queue a happening that needs no answer. It is dropped if nothing can be recorded now or the queue is full."""
        if self.problem is None:
            with contextlib.suppress(Unavailable):
                self._add(Submission(happening, None))

    async def keep_reserve(self) -> None:
        """Keep the ledger's reserve of disk allocated, until cancelled."""
        checked, checked_s = -1, clock.mono_s()
        while True:
            is_idle = checked == self._commits and clock.mono_s() < checked_s + IDLE_RESERVE_CHECK_S
            if self.problem is None and (self.disk_reserve.is_short or not is_idle):
                checked, checked_s = self._commits, clock.mono_s()
                await self.between_turns(self.disk_reserve.top_up)
            await asyncio.sleep(RESERVE_CHECK_S if self.problem is None else MAX_PAUSE_S)

    async def between_turns(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run `work` in the thread that commits, between two turns. It must be short: turns wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _add(self, submission: Submission) -> None:
        if not self._queue.put(submission):
            raise Unavailable(f"{len(self._queue)} requests are waiting for an answer already.", remedy=NOTHING_DONE)
        if submission.future is not None:
            self._unanswered[submission.future] = None

    async def run(self) -> None:
        """Take turns until cancelled. A commit under way is finished first, and its callers are answered."""
        try:
            await self._recover(Outage("the ledger is being read", try_writing=False))
            while not self._stopping:
                submissions = await self._gather()
                if not submissions or await self._take_turn(submissions) or len(submissions) == 1:
                    continue
                for submission in submissions:
                    # One that was refused meanwhile has been told that nothing was done.
                    if not submission.refused and not self._stopping:
                        await self._take_turn([submission])
            raise asyncio.CancelledError
        except Exception:
            log.critical("the writer has stopped; nothing is decided until the daemon is restarted", exc_info=True)
            self.problem = "the writer has stopped after an internal error; restart the daemon"
        finally:
            self.problem, self._outage = self.problem or SHUTTING_DOWN, None
            self._refuse(self._unanswered, Unavailable(f"Not decided: {self.problem}.", remedy=NOTHING_DONE))

    def close(self) -> None:
        """Refuse new happenings, wake every waiter, finish the commit under way."""
        self.problem = SHUTTING_DOWN
        self.wakeups.wake_all()
        self._thread.shutdown(wait=True)

    async def _gather(self) -> list[Submission]:
        """Everything that has arrived, and a tick if one is due. Nothing where no more than some time has passed."""
        self._note_running()
        due_s = self._tick_s()
        # While time runs for a holder or a node, the event loop shows often that it runs. Any other sleep is no stall.
        is_watched = bool(self._ledger.deadlines or self._ledger.silent_s)
        wait_s = min(due_s - self._ran_at_s, self.policy.stall_s / 4 if is_watched else SLEEP_S)
        if wait_s > 0:
            await self._queue.wait(wait_s)
            if not is_watched:
                self._ran_at_s = clock.now().mono_s
        submissions = self._queue.take(MAX_TURN)
        self._note_running()
        now_s = clock.now().mono_s
        if now_s < due_s:
            return submissions
        # A renewal that has arrived is decided before its lease can expire.
        self._backlog = len(self._queue) if self._backlog is None else self._backlog - len(submissions)
        if self._backlog <= 0:
            since_s = now_s - self._last_tick_s
            ticked = Ticked(cause="tick", since_last_s=since_s, stalled_s=self._stalled_s)
            submissions.append(Submission(ticked, None))
            self._last_tick_s, self._backlog, self._stalled_s = now_s, None, 0.0
        return submissions

    def _tick_s(self) -> float:
        """When the next tick is due, if nothing happens before."""
        soonest_s = self._last_tick_s + TICK_S
        return soonest_s if self._stalled_s else max(soonest_s, next_tick_s(self._ledger, self._pending, self.policy))

    def _note_running(self) -> None:
        """The event loop runs at this moment. If it did not for long, no holder could be heard for so long."""
        before_s, self._ran_at_s = self._ran_at_s, clock.now().mono_s
        if self._ran_at_s - before_s > self.policy.stall_s:
            self._stalled_s += self._ran_at_s - before_s

    async def _take_turn(self, submissions: list[Submission]) -> bool:
        """Decide, commit, publish.

        False after a bug in the program: nothing of the turn is recorded, the ledger has been loaded again, and each
        submission is to be tried in a turn of its own.
        """
        turn, recorded, commit_s = None, self.committed.next_seq, 0.0
        try:
            turn = self._decide(submissions)
            stored = [change for change in turn.changes if is_stored(change)]
            if stored:
                begun_s = clock.now().mono_s
                with self.metrics.time_commit(len(submissions)):
                    await self._in_thread(self._commit, stored, turn.ledger)
                commit_s = clock.now().mono_s - begun_s
                self._pause_s = FIRST_PAUSE_S
                self._commits += 1
        except StoreFailed as error:
            assert turn is not None
            await self._start_outage(error, turn)
        except Exception:
            log.exception("a turn of %d happenings could not be decided or written", len(submissions))
            replies = self._pop_answers(turn, submissions)
            await self._reload()
            if turn is None or not self.committed.next_seq >= turn.ledger.next_seq > recorded:
                self._fail(submissions, replies)
                return False
            for future, answer in replies:
                _answer(future, answer)  # it was recorded before the error
        else:
            _count_from_answer(turn, commit_s)
            await self._publish(turn)
        return True

    def _decide(self, submissions: list[Submission]) -> Turn:
        waiters = self.grant_waiters
        turn = Turn(self._ledger, clock.now(), self.policy, self._pending, self._requested_readings, waiters)
        for submission in submissions:
            if submission.future is not None:
                self._futures[submission.happening.cause] = submission.future
            decide(turn, submission.happening)
        settle(turn)
        waiters.begin_commit(turn.told)
        if not self._requested_readings.keys() <= self.reading_requests.keys():
            changed = wakeup_keys(turn.changes, self.committed)
            self._request_readings(node for node in self._requested_readings if f"node:{node}" not in changed)
        return turn

    def _request_readings(self, nodes: Iterable[str]) -> None:
        """Ask these nodes for the readings that the last turn wants."""
        new = {node: self._requested_readings[node] for node in nodes if node not in self.reading_requests}
        self.reading_requests |= new
        self.wakeups.wake(f"node:{node}" for node in new)

    def _commit(self, changes: list[Change], ledger: Ledger) -> None:
        """Write, and check that it goes, and went, where a restart will read it. Blocks. Raises `StoreFailed`."""
        self._file_guard.check()
        self.store.write(changes, ledger)
        self._file_guard.check()

    async def _in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run `work` in the store's thread. Waits for its end even if cancelled meanwhile: callers must be answered."""
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        while not doing.done():
            try:
                await asyncio.wait({doing}, timeout=TICK_S)
            except asyncio.CancelledError:
                self._stopping = True
            self._note_running()
        return doing.result()

    async def _publish(self, turn: Turn) -> None:
        """Publish a committed turn: apply it to `committed`, answer its callers, wake the waiters. Never undone."""
        replies = self._pop_answers(turn, [])
        self.published += bool(turn.changes)
        try:
            keys = wakeup_keys(turn.changes, self.committed)
            for change in turn.changes:
                self.committed.apply(change)
                if isinstance(change, Event):
                    self.recent_events.add(change)
        except Exception:
            log.exception("a turn was recorded but cannot be published; the ledger is loaded again")
            keys = set()
            await self._reload()
        # Who has waited for a grant goes before the node whose report has led to it: its answer takes longer.
        polled = {key for key in keys if key.startswith("lease:")}
        self.wakeups.wake(polled)
        for future, answer in replies:
            _answer(future, answer)
        self.wakeups.wake(keys - polled)
        self._note_untold()
        self._request_readings(self._requested_readings)
        if self.reading_requests != self._requested_readings:  # some are answered
            self.reading_requests = dict(self._requested_readings)
        self.metrics.count_turn(turn.changes, self.committed, turn.now)
        # After the callers have gone on: they were answered before.
        asyncio.get_running_loop().call_soon(event_log.log_turn, turn.changes, turn.answers)

    def _pop_answers(self, turn: Turn | None, submissions: list[Submission]) -> list[tuple[Reply, Answer]]:
        """The futures that this turn answers, with their answers; these and those of `submissions` are forgotten."""
        answers = turn.answers if turn is not None else []
        replies = [(self._futures.pop(cause, None), answer) for cause, answer in answers]
        for submission in submissions:
            self._futures.pop(submission.happening.cause, None)
        return [(future, answer) for future, answer in replies if future is not None]

    def _fail(self, submissions: list[Submission], replies: list[tuple[Reply, Answer]]) -> None:
        """After a bug in a turn: a lone submission is the one that caused it and gets a 500; several get a turn each.
        A request of an earlier turn that was answered in this one gets a 503."""
        fault = GpuleaseError(FAULT, remedy="Please report it with the daemon's log.")
        if len(submissions) == 1 and submissions[0].future is not None:
            _answer(submissions[0].future, fault)
        own = {submission.future for submission in submissions}
        earlier = [future for future, _ in replies if future not in own]
        self._refuse(earlier, Unavailable("An internal error of the daemon.", remedy=NOTHING_DONE))

    async def _reload(self) -> None:
        """After a bug: refuse every undecided request, and load the ledger again."""
        why = "the ledger is being read again after an internal error"
        self._refuse(self._futures.values(), Unavailable(f"Not decided: {why}.", remedy=NOTHING_DONE))
        await self._recover(Outage(why, try_writing=False))

    async def _start_outage(self, error: StoreFailed, turn: Turn) -> None:
        """A commit failed. Refuse every request, and recover once a commit succeeds."""
        unknown = Unavailable(error.detail, remedy=MAY_BE_DONE, extra={"outcome": "unknown"})
        nothing = Unavailable(error.detail, remedy=NOTHING_DONE)
        for future, answer in self._pop_answers(turn, []):
            _answer(future, nothing if isinstance(answer, GpuleaseError) else unknown)
        self._queue.take(len(self._queue))
        self._refuse(self._unanswered, nothing)
        log.error("nothing can be recorded: %s", error.detail)
        outage = Outage(
            error.detail, failed=turn.changes, committed=self.committed, answers_renewals=self._file_guard.locked
        )
        await self._recover(outage)

    async def _recover(self, outage: Outage) -> None:
        """Load the ledger from the database, retrying until that succeeds; after a failed commit it takes a commit too,
        that of the event which ends the outage: reading proves nothing. Every holder gets a full `ttl_s`."""
        self._pending.clear()
        self._futures.clear()
        self.reading_requests.clear()
        self._requested_readings.clear()
        self.problem, self._outage = outage.reason, outage
        failed, self._load_s = outage.try_writing, 0.0
        while True:
            if failed:
                # Loading a large ledger is expensive; other processes need the CPU too.
                await asyncio.sleep(max(self._pause_s, 4 * self._load_s))
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            try:
                ledger = await self._in_thread(self._load)
                if outage.try_writing:
                    changes = outage.closing_changes(ledger, clock.now())
                    await self._in_thread(self._commit, changes, ledger)
                break
            except Exception as error:
                outage.update(error)
                self.problem, failed = outage.reason, True
                unknown = Unavailable(f"{self.problem}.", remedy=MAY_BE_DONE, extra={"outcome": "unknown"})
                self._queue.take(len(self._queue))
                self._refuse(self._unanswered, unknown)  # after a bug in a turn; else they were refused before
            if self._stopping:
                raise asyncio.CancelledError
        outage.log_end()
        self._publish_loaded(ledger)

    def _load(self) -> Ledger:
        """The ledger as the database has it. Blocks. Raises `StoreFailed` or SQLAlchemyError."""
        begun_s = clock.thread_s()
        self._file_guard.open()
        ledger = self.store.load()
        self._load_s = clock.thread_s() - begun_s
        refuse_older_copy(ledger, self.committed, self.recent_events.newest, self.store.has_event)
        return ledger

    def _publish_loaded(self, ledger: Ledger) -> None:
        """Go on with a ledger that was loaded, and wake every waiter."""
        moment = clock.now()
        carry_keeps(ledger, self.committed)
        reset_deadlines(ledger, moment)
        self._ledger, self.committed, self.has_loaded = ledger, copy_ledger(ledger), True
        self.published += 1
        self.metrics.reset_usage(ledger, moment)
        self.recent_events.reset(ledger.next_seq - 1)
        self.problem = self._outage = None
        self._last_tick_s = self._ran_at_s = moment.mono_s
        self._stalled_s = 0.0
        self.wakeups.wake_all()
        self._note_untold()

    def _note_untold(self) -> None:
        for lost in self.grant_waiters.end_commit():
            self.enqueue(lost)

    def _refuse(self, futures: Iterable[Reply], error: GpuleaseError) -> None:
        for future in list(futures):
            _answer(future, error)


def _answer(future: Reply, answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)


def _count_from_answer(turn: Turn, commit_s: float) -> None:
    """Where a commit took long: a holder that was heard in it has its time from the answer on, because it could say
    nothing while it waited for that. Others could, and have no more time than they had."""
    if commit_s > TICK_S:
        for place, change in enumerate(turn.changes):
            # One that a later change of the turn has taken away stays away: its lease has ended.
            if isinstance(change, Deadline) and change.at_s is not None and change.lease_id in turn.ledger.deadlines:
                turn.changes[place] = later = Deadline(change.lease_id, change.at_s + commit_s)
                turn.ledger.apply(later)


def _raise_if_error(answer: Answer) -> Answer:
    if isinstance(answer, GpuleaseError):
        raise answer.with_traceback(None)  # the same one may refuse thousands
    return answer
