"""The simulated installation: one daemon at a time, its nodes and clients, its faults, and what was seen of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import math
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fastapi import FastAPI
from sqlalchemy import event

from gpulease_protocol.limits import Limits, LimitsRequest
from gpulease_protocol.tokens import BearerToken, Role
from gpulease_server.api.app import create_app
from gpulease_server.api.auth import user_names
from gpulease_server.api.auth.user_names import CachedName
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Change
from gpulease_server.runtime import clock, ids
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.gpu_metrics.recorder import GpuMetricsRecorder
from gpulease_server.runtime.leadership.status import LeadershipStatus
from gpulease_server.runtime.reading_age import DesiredStateTickets
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.bearer_tokens import BearerTokenRecord
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store, StoreFailed
from tests.simulation.checker import check
from tests.simulation.clients import (
    BEARER,
    EVE,
    SHORTER,
    TOKEN_ID,
    ZOE,
    Administrator,
    Attacker,
    LimitSetter,
    PlayedClient,
    Reserver,
    follow_events,
    share_in_groups,
    watch_explanations,
    watch_held_gpus,
)
from tests.simulation.hardware import PlayedNode
from tests.simulation.jobs import Submitter
from tests.simulation.loop import START_S, PlayedLoop
from tests.simulation.network import Network, request
from tests.simulation.owners import PlayedDebts, PlayedOwner, modules_of_the_client

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
STORE = "gpulease_server.store.ledger_store"
MAX_ENDED_IN_MEMORY = 30
"""Ended leases in memory: few, so that what is known from the database only comes into play."""
LOST_AFTER_S = 20.0
"""How long a node is silent until it is gone for good."""
AFTERWARDS_S = 2 * LOST_AFTER_S
"""By then nothing is held, because no one wants anything any more."""
MAX_OVERTAKES = 3
"""How many may be granted by priority until the one that has waited longest goes first."""
MAX_INTERACTIVE = 5
"""GPUs of one user by interactive requests, where there are limits: more than any request asks for."""
MAX_QUEUED = 20
"""Requests of one user that may wait: more than those of all others together."""
PREEMPT_AFTER_S = 3.0
"""For so long a lease holds its GPUs at least before it is preempted."""
DAY_ENDS_S, LEAST_S = 25.0, 1.0
"""With token budgets: when the first day ends, and for how long a grant lasts at least, in place of a minute."""
BUDGET = {"max_gpus": 4, "max_lease_s": 5.0, "gpu_hours_per_day": 0.01}
RECLAIM_AFTER_S, RECLAIM_NOTICE_S, RECLAIM_CHECK_S = 1.5, 0.8, 0.5
"""After so much idle time GPUs are taken back, so long after a notice at least; and how often that is looked at. The
notice is shorter than any `ttl_s` there: who does not hear of it trusts the lease for longer."""
GROUPS, SHARES = {"vision": ["zoe", "eve"]}, {"vision": 1.5}
"""The groups where groups share: their members, and for how many users they count."""
HALF_LIFE_S, ENTRY_S, LOWEST_S, RECOUNT_S = 20.0, 2.0, 2.0, 0.5
"""Of usage there: a week, an hour, a GPU-hour and five minutes."""
CALM_S = 200.0
"""How long everyone has to be served once nothing fails any more."""
MAX_CALM_STEPS = 4000
"""How many steps that may take, beside as many as there were before: some 1,000 if no promise is broken."""


class Killed(Exception):
    """The daemon was killed inside a commit."""


@dataclass
class Outcome:
    """What came of a run."""

    trace: list[str]
    log: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    complaints: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Of everything that happened, in order."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def gangs(self) -> list[dict[str, Any]]:
        """The leases over several nodes that were granted."""
        listed = (line["lease"] for line in self.lines if line["what"] == "listed")
        return [lease for lease in listed if lease["demand"]["nodes"] > 1 and lease["token"] is not None]

    def count(self, part: str) -> int:
        """How many steps say this."""
        return sum(part in step for step in self.trace)


class PlayedStore(Store):
    """The real store, on a disk that is slow, full, or misreports a commit; and killed together with its daemon."""

    def __init__(self, url: str, world: World) -> None:
        super().__init__(url)
        self.world = world

    def write(self, changes: Iterable[Change], ledger: Ledger) -> None:
        """Commit a turn, if nothing comes between."""
        world = self.world
        if world.now_s < world.full_until_s or world.happens(0.004 * world.faults):
            world.step("commit fails")
            raise StoreFailed("the disk is full")
        if world.happens(0.01 * world.faults):
            world.kill("before the commit")
            raise Killed
        super().write(changes, ledger)
        world.step("commit")
        if world.happens(0.01 * world.faults):
            world.kill("after the commit")
            raise Killed
        if world.happens(0.003 * world.faults):
            world.step("commit is said to have failed")
            raise StoreFailed("the connection was lost during COMMIT")


class PlayedTokens(BearerTokens):
    """One bearer token, of root."""

    def __init__(self, store: Store, writer: Writer, budget: dict[str, Any]) -> None:
        super().__init__(store, writer)
        token = BearerToken(id=TOKEN_ID, user="root", uid=0, role=Role.USER, created_at=NOON, **budget)
        self._records = {TOKEN_ID: BearerTokenRecord(token=token, hash=hashlib.sha256(BEARER.encode()).hexdigest())}
        self._authoritative = True


class PlayedDaemon:
    """One life of the daemon, as `main.py` puts it together."""

    def __init__(self, world: World) -> None:
        self._loop = world.loop
        self.store = PlayedStore(world.url, world)
        writer = Writer(self.store, world.policy)
        recorder = GpuMetricsRecorder(self.store, writer)
        recorder.restore()
        self.parts = DaemonState(
            writer=writer, store=self.store, tickets=DesiredStateTickets(), recorder=recorder, host="here"
        )
        if world.budgets:
            self.parts.bearer_tokens = PlayedTokens(self.store, writer, BUDGET if world.token_budgets else {})
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.spawn(writer.run())
        self.spawn(recorder.run())

    def spawn(self, body: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Something that dies with the daemon."""
        task = self._loop.create_task(body)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def kill(self) -> None:
        """SIGKILL: nothing that is under way goes on. What was committed is there."""
        for task in self._tasks:
            task.cancel()
        self.store.close()
        event.listen(self.store.engine, "do_connect", _refuse_the_dead)  # the writer waits for its thread


def _with_short_window(asked: LimitsRequest, whole: Callable[[LimitsRequest], Limits] = LimitsRequest.limits) -> Limits:
    limits = whole(asked)
    return dataclasses.replace(limits, window_s=limits.window_s / SHORTER)


def _refuse_the_dead(*_: object) -> None:
    raise Killed


class World:
    """All of it, on an empty database. `seed` decides everything that happens; the run ends after `steps` of it. With
    `gangs` there are two nodes more, and clients that renew ask for GPUs on one to four nodes; with `priorities` they
    ask with all of these; with `limits` an administrator sets and removes limits, and with both a part of the clients
    are of another user, for whom none are set. With `budgets` there are limits of GPU-hours, too, and of a bearer token
    that half of the clients send; no one sets the clock. With `token_budgets` that token has a budget, too, and a day
    ends soon; who sends it holds GPUs for long. With `fair_share` usage orders the requests of two users, of
    whom one asks for single GPUs, on one node; only the daemon and the network fail. With `shares` it orders those of a
    group and of a user in none, all of whose times are short; one user asks in parts, and one withdraws and asks again.
    With `reservations` an administrator reserves GPUs for one of two users, and a part of the requests declares a time.
    With `preemption` most requests are
    preemptible, hold their GPUs for long, and end for others; no one sets the clock, because a restart would
    take the jump for time that they were held. With `jobs` there are jobs beside them, that are preempted again and
    again, and only these go first. With `reclaim` most requests are of priority interactive, hold their
    GPUs for long, work now and then, and give them back while idle; no one sets the clock, because a restart takes what
    is kept for shorter then. With `crowd` there are few GPUs and many requests, of all priorities and of one
    GPU up to a whole node, with and without a declared time; preemptible leases end for others, and an
    administrator reserves GPUs: all that lets one go before another, with small bounds and few faults. With
    `explains` someone looks what those who wait are told."""

    def __init__(
        self,
        seed: int,
        steps: int,
        url: str,
        *,
        clients: int = 6,
        gangs: bool = False,
        priorities: bool = False,
        limits: bool = False,
        budgets: bool = False,
        token_budgets: bool = False,
        fair_share: bool = False,
        shares: bool = False,
        reservations: bool = False,
        preemption: bool = False,
        jobs: bool = False,
        reclaim: bool = False,
        crowd: bool = False,
        explains: bool = False,
    ) -> None:
        budgets = budgets or token_budgets
        fair_share, preemption = fair_share or shares, preemption or jobs
        self.chance = random.Random(seed)
        self.steps = steps
        self.url = url
        self.policy = Policy(
            retained_memory_s=3.0,
            node_lost_after_s=LOST_AFTER_S,
            limits=UserLimits(
                queued=100 if priorities else MAX_QUEUED,
                interactive_gpus=MAX_INTERACTIVE if priorities and limits else 0,
            ),
            max_overtakes=1000 if fair_share or jobs else MAX_OVERTAKES,
            max_bypass=10**6 if shares else 0 if fair_share else 1 if priorities or crowd else 10,
            max_bypass_s=1e9 if shares else 300.0,
            easy_backfill=priorities or crowd or (fair_share and not shares),
            fair_share=fair_share,
            usage_half_life_s=HALF_LIFE_S if shares else 7 * 24 * 3600.0,
            group_shares=tuple(SHARES.items()) if shares else (),
            preemption=preemption or crowd,
            preempt_after_s=PREEMPT_AFTER_S,
            preempt_notice_s=1.0,
            reclaim_interactive_after_s=RECLAIM_AFTER_S if reclaim else 0.0,
            reclaim_notice_s=RECLAIM_NOTICE_S,
        )
        self.preemption = preemption or crowd
        self.crowd = crowd
        self.jobs = jobs
        self.explains = explains
        self.reclaim = reclaim
        self.faults = 0.1 if crowd else 0.25 if reclaim or jobs else 1.0
        """How many faults of the daemon, its disk and the hardware there are, of the usual ones. A notice outlives none
        of them, and after each restart newer ones pass as often again."""
        self.priorities = priorities
        self.fair_share = fair_share
        self.shares = shares
        self.trace: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self.calm = False
        self.over = False
        self.daemon: PlayedDaemon | None = None
        self.jump_s = 0.0
        self.slow_until_s = 0.0
        self.full_until_s = 0.0
        self.loop = PlayedLoop(self._thread_delays)
        self.network = Network(self)
        self.gangs = gangs
        self.limits = limits or budgets
        self.budgets = budgets
        self.token_budgets = token_budgets
        self.noon = NOON + timedelta(hours=12, seconds=-DAY_ENDS_S) if token_budgets else NOON
        self.reservations = reservations or crowd
        sizes = (
            (("a", 4),)
            if fair_share
            else (("a", 4), ("b", 2))
            if preemption or reclaim or crowd
            else (("a", 4), ("b", 2), ("c", 2), *((("d", 4), ("e", 4)) if gangs else ()))
        )
        self.nodes = {name: PlayedNode(self, name, gpus) for name, gpus in sizes}
        self.owner_pids = itertools.count(5000)
        self.debts = PlayedDebts(self)
        homes = (
            [node for node in self.nodes.values() for _ in range(2)]
            if clients and not (gangs or fair_share or preemption or reclaim or crowd)
            else []
        )
        self.owners = [PlayedOwner(self, f"o{number}", node) for number, node in enumerate(homes)]
        others = clients * 2 // 3 if fair_share else clients // 2 if (priorities and limits) or self.reservations else 0
        self.clients = [PlayedClient(self, f"c{number}", ZOE if number < others else None) for number in range(clients)]
        if shares:
            uids = (None, ZOE, EVE)
            self.clients = [PlayedClient(self, f"c{number}", uids[number % 3]) for number in range(clients)]
        if budgets:
            self.clients = [
                PlayedClient(self, f"c{number}", None, (None, BEARER)[number % 2]) for number in range(clients)
            ]
        self.app: FastAPI = create_app(SimpleNamespace(leadership=LeadershipStatus()))  # type: ignore[arg-type]
        self._calmed = asyncio.Event()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._stores: list[PlayedStore] = []
        self._ids = itertools.count(1)

    @property
    def now_s(self) -> float:
        """The monotonic clock of everyone."""
        return self.loop.time()

    def happens(self, share: float) -> bool:
        """True with this probability; never once everything is calm."""
        return self.chance.random() < share and not self.calm

    def step(self, what: str) -> None:
        """Something has happened."""
        self.trace.append(f"{self.now_s:.6f} {what}")
        if len(self.trace) == self.steps:
            self.calm = True
            self._calmed.set()

    def see(self, what: str, **more: Any) -> None:
        """A witness outside the daemon has seen something."""
        self.lines.append({"what": what, "at_s": self.now_s, **more})

    def spawn(self, body: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Something that goes on beside everything else."""
        task = self.loop.create_task(body)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.call_exception_handler({"message": "a part of the simulation failed", "exception": error})
            raise error

    def gpu_node(self, uuid: str) -> PlayedNode:
        """The node that has this GPU."""
        return next(node for node in self.nodes.values() if uuid in node.gpus)

    def _thread_delays(self) -> tuple[float, float]:
        wait_s = max(self.slow_until_s - self.now_s, 0.0)
        return wait_s + self.chance.uniform(0.0005, 0.01), self.chance.uniform(0.0001, 0.005)

    def start(self) -> None:
        """Start a daemon on what the one before has committed."""
        clock.now = clock._Clocks().now
        self.daemon = PlayedDaemon(self)
        self._stores.append(self.daemon.store)
        self.app.state.daemon = self.daemon.parts
        self.step("daemon starts")
        self.see("started")

    def kill(self, where: str) -> None:
        """Kill the daemon now."""
        if self.daemon is not None:
            self.step(f"daemon killed {where}")
            self.daemon.kill()
            self.daemon = None

    def set_clock(self, jump_s: float) -> None:
        """The wall clock is set."""
        self.jump_s = jump_s
        self.step(f"wall clock {jump_s:+.3f}")
        self.see("clock", wall_s=self.wall().timestamp())

    def wall(self, zone: tzinfo | None = UTC) -> datetime:
        """What the wall clock shows."""
        return (self.noon + timedelta(seconds=self.now_s - START_S + self.jump_s)).astimezone(zone)

    async def _operate(self) -> None:
        """Kill the daemon now and then, hold it up, set the clock, and start it again whenever it is down."""
        while not self.calm:
            await asyncio.sleep(self.chance.expovariate(0.5 * self.faults))
            what = self.chance.choice(("kill", "stall", "clock", "full", "nothing", "nothing"))
            if what == "kill":
                self.kill("at a random instant")
            elif what == "stall":
                self.slow_until_s = self.now_s + self.chance.uniform(0.5, 4.0)
                self.step("the disk stalls")
            elif what == "full":
                self.full_until_s = self.now_s + self.chance.uniform(0.2, 5.0)
                self.step("the disk is full")
            elif what == "clock" and not (self.preemption or self.reclaim or self.shares or self.budgets):
                self.set_clock(self.chance.choice((-3600.0, 3600.0, 0.0, self.chance.randrange(-10, 10) / 2)))

    async def _keep_up(self) -> None:
        while not self.over:
            await asyncio.sleep(self.chance.uniform(0.05, 0.6))
            if self.daemon is None:
                self.start()

    def begin(self) -> None:
        """The first daemon, on a fresh database."""
        upgrade(self.url)
        self.set_clock(0.0)
        self.start()

    async def wait(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)

    async def _live(self) -> list[dict[str, Any]]:
        background = [node.run() for node in self.nodes.values()]
        background += [watch_held_gpus(self)] if self.fair_share else [node.suffer() for node in self.nodes.values()]
        if self.explains:
            background.append(watch_explanations(self))
        if self.shares:
            background.append(share_in_groups(self, GROUPS))
        self._show_rules()
        for body in (*background, self._operate(), self._keep_up(), follow_events(self)):
            self.spawn(body)
        if not self.fair_share:
            self.spawn(Attacker(self).run())
        waiting: set[asyncio.Task[Any]] = {self.spawn(client.run()) for client in (*self.clients, *self.owners)}
        if not (self.fair_share or self.preemption or self.reclaim):
            waiting.add(self.spawn(Administrator(self).run()))
        if self.jobs:
            waiting |= {self.spawn(Submitter(self, f"j{number}").run()) for number in range(6)}
        if self.reservations:
            waiting.add(self.spawn(Reserver(self).run()))
        if self.limits:
            waiting.add(self.spawn(LimitSetter(self).run()))
        await self._calmed.wait()
        until_s, most = self.now_s + CALM_S, 2 * len(self.trace) + MAX_CALM_STEPS
        while waiting and self.now_s < until_s and len(self.trace) < most:
            _, waiting = await asyncio.wait(waiting, timeout=1.0)
        await asyncio.sleep(AFTERWARDS_S)
        self.see("over")
        self.over = True
        self.kill("at the end")
        self.start()
        return await self.finish()

    def _show_rules(self) -> None:
        """What the checker has to know of the policy."""
        self.see("limit", user="eve", queued=self.policy.limits.queued)
        sets = 1 + math.ceil(math.log2(len(self.nodes)))
        if self.shares:
            rules = {"half_life_s": HALF_LIFE_S, "entry_s": ENTRY_S, "lowest_s": LOWEST_S, "recount_s": RECOUNT_S}
            self.see("usage order", groups=SHARES, step=math.log2(1.05), **rules)
        if self.token_budgets:
            of_token = BUDGET | {"most_s": BUDGET["gpu_hours_per_day"] * 3600, "least_s": LEAST_S}
            self.see("token budget", token_id=TOKEN_ID, midnight_s=START_S + DAY_ENDS_S, **of_token)
        if self.preemption:
            self.see("preemption", after_s=PREEMPT_AFTER_S)
        if self.reclaim:
            self.see("reclaim", after_s=RECLAIM_AFTER_S, notice_s=RECLAIM_NOTICE_S, priority="interactive")
        if not self.fair_share:
            self.see(
                "passes",
                max_bypass=self.policy.max_bypass,
                max_overtakes=self.policy.max_overtakes,
                priorities=self.priorities or self.preemption or self.reclaim,
                interactive_gpus=self.policy.limits.interactive_gpus,
            )
        # Who may not have reserved GPUs may be passed by all who may; no one passes who has had others end. What waits
        # for GPU-hours has no turn.
        self.see(
            "order of others" if self.reservations or self.preemption or self.budgets else "order",
            max_overtakes=self.policy.max_overtakes,
            max_bypasses=self.policy.max_bypass * sets,
            interactive_gpus=self.policy.limits.interactive_gpus,
        )

    async def finish(self) -> list[dict[str, Any]]:
        """The whole event log, as the last daemon has it; then all of it ends."""
        log = await self._pages("/v1/events?limit=1000&after=", lambda page: page["items"] and page["items"][-1]["seq"])
        for lease in await self._pages("/v1/leases?limit=1000&cursor=", lambda page: page["next"], "999999999"):
            self.see("listed", lease=lease)
        self.kill("for good")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.sleep(1.0)
        return log

    async def _pages(self, path: str, go_on: Callable[[Any], Any], at: Any = 0) -> list[dict[str, Any]]:
        """All items of a list, straight from the daemon."""
        found: list[dict[str, Any]] = []
        while at is not None:
            status, page = await request(
                self.app, "GET", f"{path}{at}", [(b"host", b"localhost")], b"", asyncio.Event()
            )
            if status == 503:  # it reads its ledger
                await asyncio.sleep(0.1)
                continue
            found += page["items"]
            at = go_on(page) or None
        return found

    def _short_times(self) -> Iterator[tuple[str, float]]:
        """What counts as long of usage and of budgets, and what as much."""
        if self.token_budgets:
            yield "token_budgets.MIN_USE_S", LEAST_S
        if self.shares:
            yield from (("usage.ENTRY_S", ENTRY_S), ("usage.LOWEST_S", LOWEST_S), ("group_usage.LOWEST_S", LOWEST_S))
            yield from (("fair_share.RECOUNT_S", RECOUNT_S), ("fair_share.NOTHING_S", 0.0))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Clock, ids and threads of the daemon are the world's for as long as this lasts."""

        class PlayedDatetime(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return self.wall(tz)

        async def inline(func: Any, *args: Any, **more: Any) -> Any:
            return func(*args, **more)

        with contextlib.ExitStack() as stack:
            for target, name, value in (
                (clock, "time", SimpleNamespace(monotonic=lambda: self.now_s, thread_time=lambda: 0.0)),
                (clock, "datetime", PlayedDatetime),
                (clock, "now", clock.now),
                (ids, "new_id", lambda kind: f"{kind}-{next(self._ids):06d}"),
                (ids, "first_ticket", lambda: self.chance.randrange(2**48)),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            for place, value in modules_of_the_client(self):
                stack.enter_context(mock.patch(place, value))
            stack.enter_context(mock.patch("fastapi.dependencies.utils.run_in_threadpool", inline))
            # By the real clock these would do in some runs what they do not do in others.
            for module in ("start_forecasts", "long_lists"):
                played = SimpleNamespace(perf_counter=lambda: self.now_s)
                stack.enter_context(mock.patch(f"gpulease_server.api.{module}.time", played))
            # So would a name be looked up again.
            names = {uid: CachedName("root", math.inf) for uid in (0, os.getuid())}
            names |= {EVE: CachedName("eve", math.inf), ZOE: CachedName("zoe", math.inf)}
            stack.enter_context(mock.patch.dict(user_names._cache, names))
            stack.enter_context(mock.patch("gpulease_server.core.ledger.MAX_ENDED_IN_MEMORY", MAX_ENDED_IN_MEMORY))
            stack.enter_context(mock.patch(f"{STORE}.MAX_ENDED_IN_MEMORY", MAX_ENDED_IN_MEMORY))
            stack.enter_context(mock.patch("gpulease_server.core.reclaim.CHECK_S", RECLAIM_CHECK_S))
            if self.budgets:
                stack.enter_context(mock.patch("gpulease_protocol.limits.LimitsRequest.limits", _with_short_window))
            for place, value in self._short_times():
                stack.enter_context(mock.patch(f"gpulease_server.core.{place}", value))
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            yield
        for store in self._stores:  # what was under way in a daemon that was killed may have connected once more
            store.close()

    def run(self) -> Outcome:
        """Let it happen, and have it judged."""
        with self.in_place(), contextlib.closing(self.loop):
            self.begin()
            log = self.loop.run_until_complete(self._live())
        return Outcome(self.trace, log, self.lines, check(log, self.lines, 0.002))
