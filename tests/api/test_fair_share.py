"""One request of each user works at a time, and none for longer than its user's share, see `fair_share`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from gpulease_protocol.tokens import TokenRequest
from gpulease_server.api import fair_share
from gpulease_server.api.auth.peer_credentials import PeerCredentials
from gpulease_server.api.fair_share import BURST_S, OTHERS_S, SHARE, FairShare, Turn
from gpulease_server.api.middleware.fair_turns import turn_of
from gpulease_server.core.policy import Policy
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.ledger_store import Store
from tests.daemon import DaemonProcess, eventually
from tests.http_as_user import OTHER, acting_as, call

EVE, ADA = "eve", "ada"


class Played(FairShare):
    """A share whose clock the test sets."""

    def __init__(self) -> None:
        self.clock_s = 100.0
        super().__init__(now_s=lambda: self.clock_s)

    def waits(self, user: str, lane: str = "other", *, resumes: bool = False) -> asyncio.Task[None]:
        """A request that wants to work."""
        return asyncio.ensure_future(self.begin(user, lane, resumes=resumes))


def playing(story: Callable[[Played], Coroutine[Any, Any, None]]) -> None:
    """Run a story on an event loop."""

    async def play() -> None:
        async with asyncio.timeout(60):
            await story(Played())

    asyncio.run(play())


async def settled(*waiting: asyncio.Task[None]) -> list[bool]:
    """Which of these may work, once all that can happen at this moment has happened."""
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.done() for task in waiting]


def test_one_request_of_each_user_works_at_a_time() -> None:
    async def story(share: Played) -> None:
        eve, ada = [share.waits(EVE) for _ in range(3)], [share.waits(ADA) for _ in range(2)]
        assert await settled(*eve, *ada) == [True, False, False, True, False]
        share.end(EVE, "other", 0.001)
        assert await settled(*eve, *ada) == [True, True, False, True, False]
        share.end(ADA, "other", 0.001)
        assert await settled(*eve, *ada) == [True, True, False, True, True]
        for task in (*eve, *ada):
            task.cancel()

    playing(story)


def test_what_goes_on_after_a_wait_comes_before_what_begins() -> None:
    async def story(share: Played) -> None:
        first, begins, resumes = share.waits(EVE), share.waits(EVE), share.waits(EVE, resumes=True)
        assert await settled(first, begins, resumes) == [True, False, False]
        share.end(EVE, "other", 0.0)
        assert await settled(begins, resumes) == [False, True]
        begins.cancel()

    playing(story)


def test_a_renewal_does_not_wait_for_other_requests_of_its_user() -> None:
    async def story(share: Played) -> None:
        assert await settled(share.waits(EVE), share.waits(EVE, "keeping")) == [True, True]

    playing(story)


def test_a_user_who_took_long_waits_in_proportion_while_others_are_there() -> None:
    async def story(share: Played) -> None:
        share.note_request(ADA)
        share.note_request(EVE)
        await share.begin(EVE, "other")
        share.end(EVE, "other", BURST_S + SHARE)  # one second's worth more than at once
        later, other = share.waits(EVE), share.waits(ADA)
        assert await settled(later, other) == [False, True]
        share.end(ADA, "other", 0.0)
        share.clock_s += OTHERS_S / 2  # half of it has passed
        assert await settled(share.waits(ADA)) == [True]
        assert share._delay_s(EVE, share._users[EVE, "other"]) == pytest.approx(0.5)
        later.cancel()

    playing(story)


def test_a_user_who_is_alone_waits_for_nothing() -> None:
    async def story(share: Played) -> None:
        share.note_request(ADA)
        share.clock_s += 2 * OTHERS_S
        for _ in range(10):
            share.note_request(EVE)
            assert await settled(share.waits(EVE)) == [True]
            share.end(EVE, "other", 0.9)
        share.note_request(ADA)  # what was taken alone makes no one wait now
        share.end(EVE, "other", 0.0)
        assert await settled(share.waits(EVE)) == [True]

    playing(story)


@pytest.mark.parametrize("had_its_turn", [False, True])
def test_a_request_that_is_cancelled_leaves_its_turn_to_the_next(had_its_turn: bool) -> None:
    async def story(share: Played) -> None:
        working, cancelled, follows = share.waits(EVE), share.waits(EVE), share.waits(EVE)
        await settled(working)
        if had_its_turn:
            share.end(EVE, "other", 0.0)  # its future is set, and its task has not run since
        cancelled.cancel()
        if not had_its_turn:
            await settled()
            share.end(EVE, "other", 0.0)
        assert await settled(follows) == [True]
        assert cancelled.cancelled()

    playing(story)


def test_a_request_whose_client_leaves_waits_no_longer() -> None:
    async def story(share: Played) -> None:
        working = share.waits(EVE)
        on_disconnect: list[Callable[[], None]] = []
        gone = [asyncio.ensure_future(share.begin(EVE, "other", on_disconnect=on_disconnect)) for _ in range(3)]
        follows = share.waits(EVE)
        assert await settled(working, *gone, follows) == [True, False, False, False, False]
        gone[1].cancel()
        for leave in list(on_disconnect):
            leave()
        assert await settled(*gone, follows) == [True, True, True, False]
        assert [type(one.exception()) for one in (gone[0], gone[2])] == [ClientDisconnect, ClientDisconnect]
        assert not on_disconnect
        share.end(EVE, "other", 0.0)
        assert await settled(follows, share.waits(EVE)) == [True, False]

    playing(story)


def test_a_request_that_waits_or_fails_meanwhile_keeps_no_other_back() -> None:
    async def wait_and_fail() -> None:
        async with fair_share.waiting():
            raise LookupError

    async def story(share: Played) -> None:
        turn, other = Turn(share, EVE, "other"), Turn(share, EVE, "other")
        fair_share.TURN.set(turn)
        await turn.begin()
        async with fair_share.waiting():
            await other.begin()
            other.end()
        assert await settled(waits := share.waits(EVE)) == [False]  # it works again
        with pytest.raises(LookupError):
            await wait_and_fail()
        assert await settled(waits) == [True]

    playing(story)


def test_a_large_request_is_counted_while_it_is_written_and_a_report_of_a_worker_never() -> None:
    async def story(share: Played) -> None:
        turn = Turn(share, EVE, "other")
        fair_share.TURN.set(turn)
        await turn.begin()
        fair_share.count_writing()
        async with fair_share.waiting_for_writer():
            assert await settled(waits := share.waits(EVE)) == [False]
        fair_share.exempt()
        assert await settled(waits) == [True]
        async with fair_share.waiting():
            pass
        assert await settled(share.waits(EVE)) == [False]  # the other one still works

    playing(story)


@pytest.mark.parametrize("asked_before", [False, True])
def test_what_outlives_its_request_takes_no_turn(asked_before: bool) -> None:
    async def story(share: Played) -> None:
        turn, working = Turn(share, EVE, "other"), share.waits(EVE)
        fair_share.TURN.set(turn)
        assert await settled(working) == [True]
        if not asked_before:
            turn.exempt()  # as at the end of its request
        outlives = asyncio.ensure_future(fair_share.resume())
        assert await settled(outlives) == [not asked_before]
        turn.exempt()
        share.end(EVE, "other", 0.0)
        assert await settled(outlives, share.waits(EVE)) == [True, True]

    playing(story)


def test_users_who_are_gone_are_forgotten() -> None:
    async def story(share: Played) -> None:
        for number in range(3 * fair_share.MAX_USERS):
            await share.begin(f"token-{number}", "other")
            share.end(f"token-{number}", "other", 0.0)
        assert len(share._users) <= fair_share.MAX_USERS + 1

    playing(story)


def test_a_wrong_token_with_the_id_of_anothers_takes_none_of_its_turns(sqlite_url: str) -> None:
    """Leases show the ids of tokens, and of leases with jobs on other hosts."""

    async def story(share: FairShare, bearers: BearerTokens) -> None:
        made = await bearers.create(TokenRequest(user="ada-elsewhere"), "root")
        job = bearers.of_jobs.bearer("lease-1") or ""

        def turn(header: str, host: str = "192.0.2.1") -> Turn:
            request = {"type": "http", "method": "POST", "path": "/v1/leases/lease-1/renew", "client": (host, 1)}
            found = turn_of(
                share, PeerCredentials(), bearers, {**request, "headers": [(b"authorization", header.encode())]}
            )
            assert found is not None
            return found

        wrong = turn(f"Bearer {made.id}.wrong"), turn("Bearer lease-1.wrong"), turn("Bearer x")
        assert [one.begins_at_once() for one in wrong] == [True, False, False], "all of one host"
        assert turn("Bearer x", "192.0.2.2").begins_at_once()
        assert turn(f"Bearer {made.bearer}").begins_at_once()
        assert not turn(f"bearer  {made.bearer}").begins_at_once(), "however it is spelled, it is the same token"
        assert turn(f"Bearer {job}").begins_at_once()

    with closing(Store(sqlite_url)) as store, closing(Writer(store, Policy())) as turns:
        bearers = BearerTokens(store, turns)
        bearers.restore()
        asyncio.run(story(FairShare(), bearers))


HEAD = "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{"
STREAM = "GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
POLL = "GET /v1/leases/LEASE?wait_s=600 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@contextmanager
def unfinished(api: DaemonProcess, request: str) -> Iterator[None]:
    """A request of OTHER that is not answered, or not to its end."""
    with closing(socket.socket()) as connection:
        with acting_as(OTHER):
            connection.connect(("127.0.0.1", api.port))
        connection.sendall(request.encode())
        yield


@pytest.mark.skipif(os.getuid() != 0, reason="only root can send requests as another user")
@pytest.mark.parametrize("request_text", [HEAD, STREAM, POLL], ids=["half a body", "event stream", "long poll"])
def test_a_request_that_waits_delays_no_other_of_its_user(api: DaemonProcess, request_text: str) -> None:
    lease = call(api.port, "POST", "/v1/leases", {"count": 1}, uid=OTHER).json
    with unfinished(api, request_text.replace("LEASE", lease["id"])):
        eventually(lambda: in_flight(api) >= 2, 60, api.story)  # it, and the question
        for _ in range(3):
            assert call(api.port, "GET", "/v1/gpus", uid=OTHER).status == 200
        renewal = {"token": lease["token"]}
        assert call(api.port, "POST", f"/v1/leases/{lease['id']}/release", renewal, uid=OTHER).status == 200


def in_flight(api: DaemonProcess) -> int:
    """Requests that are being answered, those of the worker left out."""
    text = api.get("/metrics").content.decode()
    return int(float(text.split("\ngpulease_http_requests_in_flight ")[1].split("\n")[0])) - 1
