"""A holder is told of a grant out of the queue only when the database says so, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.model import Lease, LeaseState
from gpulease_protocol.requests import HolderProof, LeaseRequest
from gpulease_protocol.tokens import Role
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.http_limits import ON_DISCONNECT
from gpulease_server.api.routes import leases
from gpulease_server.core.happenings import IdempotencyKey
from gpulease_server.runtime import clock
from gpulease_server.runtime.reading_age import DesiredStateTickets
from tests.runtime.faults import Fate, FaultyStore, recovered, report, writing

ROOT = Caller("root", 0, 0, Role.ADMIN, "socket")
KEY = IdempotencyKey(key="k", fingerprint="k")
PEER = PeerCredentials(uid=0, local=True, connection=ConnectionType.SOCKET)


class Client:
    """The other end of a request, which may go away."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()
        self._interrupts: list[Callable[[], None]] = []
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], ON_DISCONNECT: self._interrupts}
        self.request = Request(scope, self._receive)

    async def _receive(self) -> dict[str, str]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self._gone.set()
        for interrupt in list(self._interrupts):
            interrupt()


class Story:
    """A lease that has all GPUs, and one that waits for them."""

    def __init__(self, daemon: DaemonState, store: FaultyStore) -> None:
        self.daemon, self.store, self.writer = daemon, store, daemon.writer
        self.waits: Lease
        self.freeing: asyncio.Task[None]

    async def begin(self) -> None:
        await report(self.writer)
        holder, self.waits = await self.request(None), await self.request(KEY)
        await leases.release(holder.id, HolderProof(fencing_token=holder.fencing_token), self.daemon, ROOT)

    async def request(self, key: IdempotencyKey | None) -> Any:
        requested = await leases.lease_requested(LeaseRequest(count=4), key, self.daemon, ROOT, PEER)
        return await leases.request_lease(requested, self.daemon, ROOT, Client().request, Response())

    async def poll(self, client: Client, wait_s: float = 60.0) -> asyncio.Task[Lease]:
        """A long poll that waits for the grant."""
        polling = asyncio.create_task(leases.show_lease(self.waits.id, self.daemon, ROOT, client.request, wait_s))
        await until(lambda: self.waits.id in self.writer.grant_waiters)
        return polling

    async def hold_commit_of_grant(self) -> None:
        """Have the node report its GPUs as clean, and stop while the grant is committed."""
        self.store.entered.clear()
        self.store.gate.clear()
        self.freeing = asyncio.create_task(report(self.writer))
        assert await asyncio.to_thread(self.store.entered.wait, 30)

    @property
    def is_unclaimed(self) -> bool:
        return self.waits.id in self.daemon.ledger.unclaimed

    @property
    def is_recorded_as_told(self) -> bool:
        return self.store.load().leases[self.waits.id].renewed_at is not None


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - only a test asks
        await asyncio.sleep(0.001)


@asynccontextmanager
async def story(url: str) -> AsyncIterator[Story]:
    nothing: Any = None
    async with asyncio.timeout(60), writing(url) as (writer, store):
        tickets = DesiredStateTickets()
        found = Story(DaemonState(writer=writer, store=store, tickets=tickets, recorder=nothing, host="here"), store)
        await found.begin()
        yield found


def told(url: str, tell: Callable[[Story], Awaitable[None]]) -> None:
    async def main() -> None:
        async with story(url) as one:
            await tell(one)

    asyncio.run(main())


@pytest.mark.parametrize("ask_again", ["with a poll", "under its key"])
def test_no_holder_is_told_of_a_grant_that_the_database_does_not_know_as_told(sqlite_url: str, ask_again: str) -> None:
    async def tell(one: Story) -> None:
        async def ask() -> Any:
            if ask_again == "with a poll":
                return await leases.show_lease(one.waits.id, one.daemon, ROOT, Client().request)
            return await one.request(KEY)

        await report(one.writer)
        assert one.is_unclaimed
        one.store.fates = [Fate.FAILED]
        with pytest.raises(Unavailable):
            await ask()
        await recovered(one.writer)
        assert one.is_unclaimed
        assert (await ask()).state is LeaseState.ACTIVE
        assert not one.is_unclaimed
        assert one.is_recorded_as_told

    told(sqlite_url, tell)


def test_a_request_that_is_granted_while_its_start_is_found_is_shown_as_granted(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tell(one: Story) -> None:
        async def expected_starts(_: DaemonState) -> dict[str, Any]:
            await report(one.writer)
            return {}

        monkeypatch.setattr(DaemonState, "expected_starts", expected_starts)
        shown = await leases.show_lease(one.waits.id, one.daemon, ROOT, Client().request)
        assert shown.state is LeaseState.ACTIVE
        assert one.is_recorded_as_told

    told(sqlite_url, tell)


def test_a_holder_who_waits_is_told_after_the_one_commit_of_the_grant(sqlite_url: str) -> None:
    async def tell(one: Story) -> None:
        polling, before = await one.poll(Client()), one.store.writes
        await report(one.writer)
        assert (await polling).state is LeaseState.ACTIVE
        assert one.store.writes == before + 1
        assert one.is_recorded_as_told

    told(sqlite_url, tell)


@pytest.mark.parametrize("fate", [Fate.DONE, Fate.LOST, Fate.STUMBLED_AFTER])
def test_a_grant_whose_client_goes_away_during_its_commit_is_unclaimed(sqlite_url: str, fate: Fate) -> None:
    async def tell(one: Story) -> None:
        client = Client()
        polling = await one.poll(client)
        one.store.fates = [fate]
        await one.hold_commit_of_grant()
        client.leave()
        await polling
        one.store.gate.set()
        await asyncio.wait({one.freeing})
        await recovered(one.writer)
        await until(lambda: one.is_unclaimed)
        assert not one.is_recorded_as_told
        assert one.freeing.exception() is None or fate is not Fate.DONE

    told(sqlite_url, tell)


def test_a_client_that_comes_back_at_once_is_told_of_a_grant_that_it_keeps(sqlite_url: str) -> None:
    async def tell(one: Story) -> None:
        client = Client()
        polling = await one.poll(client)
        await one.hold_commit_of_grant()
        client.leave()
        await polling
        again = await one.poll(Client())
        one.store.gate.set()
        assert (await again).state is LeaseState.ACTIVE
        await report(one.writer)  # by then the lost answer is decided
        assert not one.is_unclaimed
        assert one.is_recorded_as_told

    told(sqlite_url, tell)


def test_a_poll_whose_time_is_over_during_the_commit_is_answered_with_the_grant(sqlite_url: str) -> None:
    async def tell(one: Story) -> None:
        wait_s, begun_s = 0.3, clock.mono_s()
        polling = await one.poll(Client(), wait_s)
        await one.hold_commit_of_grant()
        await until(lambda: clock.mono_s() > begun_s + 2 * wait_s)
        assert not polling.done()
        one.store.gate.set()
        assert (await polling).state is LeaseState.ACTIVE
        assert one.is_recorded_as_told

    told(sqlite_url, tell)


@pytest.mark.parametrize("fate", [Fate.FAILED, Fate.LOST, Fate.STUMBLED, Fate.STUMBLED_AFTER])
def test_a_poll_is_answered_with_what_is_recorded_after_a_commit_that_failed(sqlite_url: str, fate: Fate) -> None:
    async def tell(one: Story) -> None:
        polling = await one.poll(Client())
        one.store.fates = [fate]
        await asyncio.wait({asyncio.create_task(report(one.writer))})
        await recovered(one.writer)
        if fate in (Fate.FAILED, Fate.STUMBLED):
            await report(one.writer)
        assert (await polling).state is LeaseState.ACTIVE
        assert not one.is_unclaimed
        assert one.is_recorded_as_told

    told(sqlite_url, tell)
