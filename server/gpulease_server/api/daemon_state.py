"""The parts of a running daemon that routes use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated

from fastapi import Depends, Request

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.host.process_id import realm
from gpulease_protocol.joining import Authority
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.api import fair_share
from gpulease_server.api.access_settings import AccessSettings
from gpulease_server.api.shared_answers import SharedAnswers
from gpulease_server.api.start_forecasts import StartForecasts
from gpulease_server.core.forecast.expected_start import ExpectedStart
from gpulease_server.core.gpu import is_silent, node_problem
from gpulease_server.core.happenings import Happening
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant
from gpulease_server.core.turn import Answer
from gpulease_server.runtime import clock
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.gpu_metrics.recorder import GpuMetricsRecorder
from gpulease_server.runtime.group_members import GroupMembers
from gpulease_server.runtime.leadership.status import LeadershipStatus
from gpulease_server.runtime.log_relay import LogRelay
from gpulease_server.runtime.reading_age import DesiredStateTickets
from gpulease_server.runtime.writer import MAY_BE_DONE, Writer
from gpulease_server.store.ledger_store import Store

START_A_WORKER = "Start one on each host with GPUs: gpulease worker --url URL."


@dataclass
class DaemonState:
    """The parts of a running daemon."""

    writer: Writer
    store: Store
    tickets: DesiredStateTickets
    recorder: GpuMetricsRecorder
    host: str
    """Name of this host."""
    local_node: str | None = None
    """Node of the worker that the daemon supervises; `/readyz` waits for its first report."""
    address: str | None = None
    """IP address at which other hosts reach this daemon; None where it listens on loopback alone."""
    authority: Authority = field(default_factory=Authority)
    """Its own certificate authority, and where other hosts reach it."""
    leadership: LeadershipStatus = field(default_factory=LeadershipStatus)
    """Whether this daemon is the writer of its database, and whether that is confirmed."""
    access: AccessSettings = field(default_factory=AccessSettings)
    admin_groups: GroupMembers = field(default_factory=lambda: GroupMembers(frozenset()))
    """Whose members are administrators."""
    bearer_tokens: BearerTokens | None = None
    """The valid bearer tokens; None if this daemon has none, as in a test."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the daemon begins to shut down; every long poll ends then."""
    log_relay: LogRelay = field(init=False)
    """The logs that other nodes are asked for."""
    forecasts: StartForecasts = field(default_factory=StartForecasts)
    gpu_lists: SharedAnswers = field(default_factory=SharedAnswers)
    """The answers to `GET /v1/gpus`."""
    long_read: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Who reads for seconds holds it meanwhile: such reads are one at a time, or they would take all threads of the
    others, and the interpreter's lock from the event loop."""

    def __post_init__(self) -> None:
        self.log_relay = LogRelay(lambda node: self.writer.wakeups.wake([f"node:{node}"]))

    @property
    def ledger(self) -> Ledger:
        """The committed ledger."""
        return self.writer.committed

    @property
    def policy(self) -> Policy:
        """The current policy."""
        return self.writer.policy

    def node_here(self) -> str | None:
        """The node whose worker sees the processes of this host as the daemon does: the one that it supervises, else
        the last to report of those that say so, such as a worker with a service of its own. None if there is none."""
        if self.local_node is not None:
            return self.local_node
        here, observations = realm(), self.ledger.node_observations
        if here is None:
            return None
        nodes = [name for name in self.ledger.nodes if name in observations and observations[name].realm == here]
        return max(nodes, key=lambda name: observations[name].reported_at_s, default=None)

    async def submit(self, happening: Happening) -> Answer:
        """The answer to a happening, as `Writer.submit`; the caller's other requests go on meanwhile."""
        try:
            if fair_share.TURN.get() is None:
                return await self.writer.submit(happening)
            async with fair_share.waiting_for_writer():
                return await self.writer.submit(happening)
        except asyncio.CancelledError:
            if not self.stopping.is_set():
                raise
            # The database does not answer while the daemon stops, and uvicorn waits no longer.
            unknown = {"outcome": "unknown"}
            raise Unavailable("The daemon stops.", remedy=MAY_BE_DONE, extra=unknown) from None

    async def wait_for(self, topic: str, timeout_s: float, interrupts: list[Callable[[], None]] | None = None) -> None:
        """Wait until this topic was woken, at most so long; the caller's other requests go on meanwhile.

        `interrupts` is that of `Wakeups.wait`.
        """
        if fair_share.TURN.get() is None:
            await self.writer.wakeups.wait(topic, timeout_s, interrupts)
            return
        async with fair_share.waiting():
            await self.writer.wakeups.wait(topic, timeout_s, interrupts)

    async def expected_starts(self) -> Mapping[str, ExpectedStart]:
        """By lease id, when the first requests of the queue are expected to start; the caller's other requests go on
        meanwhile. A standby, which knows of no reading, knows of none."""
        if not self.ledger.queue or self.leadership.standby_copy is not None:
            return {}
        if fair_share.TURN.get() is None:
            return await self.forecasts.expected_starts(self.ledger, self.now(), self.policy)
        async with fair_share.waiting():
            return await self.forecasts.expected_starts(self.ledger, self.now(), self.policy)

    def not_ready(self) -> str | None:
        """Why the daemon cannot grant now; None if it can."""
        problem = self.writer.problem
        if problem is None and self.local_node is not None:
            problem = node_problem(self.ledger, self.local_node, self.now(), self.policy)
        return problem

    def without_worker(self) -> str | None:
        """Why nothing can be granted although the daemon is ready: no worker reports to it. None if one does."""
        observations = self.ledger.node_observations.values()
        if any(not is_silent(observation, self.now(), self.policy) for observation in observations):
            return None
        found = "No worker reports any more" if observations else "No worker has reported since this daemon started"
        return f"{found}: nothing can be granted. {START_A_WORKER}"

    def worker_host(self, node: str | None) -> str | None:
        """The host of the worker that reports for a node; None while none does."""
        observation = None if node is None else self.ledger.node_observations.get(node)
        if node is None or observation is None or is_silent(observation, self.now(), self.policy):
            return None
        return self.ledger.nodes[node].host if node in self.ledger.nodes else None

    def now(self) -> Instant:
        """This moment."""
        return clock.now()


async def _daemon(request: Request) -> DaemonState:
    daemon: DaemonState = request.app.state.daemon
    return daemon


DaemonDep = Annotated[DaemonState, Depends(_daemon)]
