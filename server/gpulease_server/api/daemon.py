"""What every route needs of the daemon."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from ..core.gpu import node_problem
from ..core.ledger import Instant, Ledger
from ..core.turn import Policy
from ..runtime import clock
from ..runtime.bearers import Bearers
from ..runtime.recorder import Recorder
from ..runtime.standing import Standing
from ..runtime.tickets import Tickets
from ..runtime.writer import Writer
from ..store.store import Store
from .callers import Access, Caller, no_token_in_force


@dataclass
class Daemon:
    """The parts of a running daemon."""

    writer: Writer
    store: Store
    tickets: Tickets
    recorder: Recorder
    host: str
    """Name of this host."""
    local_node: str | None = None
    """Node of the worker that the daemon supervises; `/readyz` waits for its first report."""
    standing: Standing = field(default_factory=Standing)
    """Whether it is the writer of its database, and whether it may say so."""
    access: Access = field(default_factory=Access)
    """What an administrator has set about callers."""
    bearers: Bearers | None = None
    """The bearer tokens in force; None where there are none."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the daemon begins to shut down; every long poll ends then."""

    @property
    def ledger(self) -> Ledger:
        """What is committed."""
        return self.writer.committed

    @property
    def policy(self) -> Policy:
        """The rules in force."""
        return self.writer.policy

    def not_ready(self) -> str | None:
        """Why it cannot grant now; None when it can."""
        problem = self.writer.problem
        if problem is None and self.local_node is not None:
            problem = node_problem(self.ledger, self.local_node, self.now(), self.policy)
        return problem

    def knows(self, caller: Caller) -> bool:
        """False when he was known by a token that was revoked or has expired since."""
        return caller.token_id is None or (self.bearers is not None and self.bearers.in_force(caller.token_id))

    def require_known(self, caller: Caller) -> None:
        """For who waits, before he is told or given anything. Raises `NotAuthenticated` unless he is still known."""
        if not self.knows(caller):
            raise no_token_in_force()

    def now(self) -> Instant:
        """This moment."""
        return clock.now()


async def _daemon(request: Request) -> Daemon:
    daemon: Daemon = request.app.state.daemon
    return daemon


TheDaemon = Annotated[Daemon, Depends(_daemon)]
