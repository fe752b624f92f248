"""What a client could not say is said later, for as long as its process lives."""

from __future__ import annotations

import asyncio
import linecache
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from gpulease import AsyncClient, Client, DaemonUnavailable, JobRequest
from gpulease.lease import HeldLease, renew_timeout_s
from gpulease.sansio.failover import Destination, Failover
from gpulease.sansio.flows import Flows, lease_request
from gpulease.sansio.release_retries import DEBTS, Debt, is_answer
from gpulease_protocol import errors
from gpulease_protocol.model import Liveness
from tests.client.fake_daemon import FakeDaemon

Until = Callable[..., None]


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 0.2)


def owed_by(client: Client) -> list[Debt]:
    return DEBTS.owed_to(client.destination)


def is_released(daemon: FakeDaemon) -> bool:
    return daemon.only_lease()["end_reason"] == "released"


@pytest.mark.parametrize("fault", [None, "503", "unknown", "break", "html"])
def test_a_block_that_ends_without_the_daemon_releases_its_lease_later(
    daemon: FakeDaemon, client: Client, until: Until, fault: str | None
) -> None:
    with client.lease(1):
        if fault is None:
            daemon.stop()
        else:
            daemon.fault = lambda line: fault if "release" in line else None
    assert owed_by(client)
    daemon.fault = lambda line: None
    if fault is None:
        daemon.start()
    until(lambda: is_released(daemon) and not owed_by(client))


def test_ctrl_c_at_any_line_of_a_release_gives_the_lease_back(client: Client, daemon: FakeDaemon, until: Until) -> None:
    """Its threads no longer renew it, but a daemon that sees this process live would keep it."""
    bodies = {f.__code__ for f in (HeldLease.release, HeldLease._release, HeldLease._join)}
    stopped_at: list[int] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        if frame.f_code not in bodies:
            return None
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and lease._stopped.is_set() and source != "try:":  # Python handles no signal there
            lines -= 1
            if lines == 0:
                stopped_at.append(frame.f_lineno)
                raise KeyboardInterrupt
        return trace

    for number in range(1, 100):
        lease, lines, before = client.lease(1), number, len(stopped_at)
        with suppress(KeyboardInterrupt):
            sys.settrace(trace)
            try:
                lease.release()
            finally:
                sys.settrace(None)
        until(lambda: daemon.leases[lease.id]["end_reason"] == "released")  # noqa: B023 - called in this round
        lease.release()
        if len(stopped_at) == before:
            break
    assert len(stopped_at) > 10


def test_no_process_asks_again_before_it_has_said_what_it_owes(daemon: FakeDaemon, client: Client, monkeypatch) -> None:
    monkeypatch.setattr(DEBTS, "settle_in_background", lambda: None)
    with client.lease(1):
        daemon.stop()
    daemon.start()
    daemon.request_lines.clear()
    with Client(daemon.url, timeout_s=7) as another:
        another.lease(1).detach()
        another.request_lease(lease_request(count=1))
    assert [line.split("?")[0] for line in daemon.request_lines] == [
        "POST /v1/leases/L-1/release",
        "POST /v1/leases",
        "POST /v1/leases",
    ]


@pytest.mark.parametrize("by", ["thread", "next request"])
def test_a_debt_for_which_there_is_no_answer_keeps_no_other_waiting(
    daemon: FakeDaemon, client: Client, until: Until, monkeypatch, by: str
) -> None:
    if by == "next request":
        monkeypatch.setattr(DEBTS, "settle_in_background", lambda: None)
    away = threading.Event()
    away.set()
    with client.lease(1), client.lease(1):
        daemon.fault = lambda line: (
            "html" if "L-2/release" in line else "503" if "release" in line and away.is_set() else None
        )
    assert [debt.lease_id for debt in owed_by(client)] == ["L-2", "L-1"]
    away.clear()
    if by == "next request":
        client.lease(1).detach()
    until(lambda: daemon.leases["L-1"]["end_reason"] == "released")
    until(lambda: [debt.lease_id for debt in owed_by(client)] == ["L-2"])


@pytest.mark.parametrize("after_the_request", [False, True])
def test_a_task_that_is_cancelled_while_the_daemon_hangs_leaves_no_lease(
    daemon: FakeDaemon, until: Until, monkeypatch, after_the_request: bool
) -> None:
    monkeypatch.setattr("gpulease.sansio.release_retries.SETTLE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("gpulease.sansio.flows.RETRY_S", 0.2)
    daemon.free, hangs, continues = after_the_request, threading.Event(), threading.Event()

    def fault(line: str) -> str | None:
        if after_the_request or "GET /v1/leases/L-1" in line or hangs.is_set():
            hangs.set()
            return None if continues.wait(60) else "503"
        return None

    daemon.fault = fault

    async def work() -> None:
        async with AsyncClient(daemon.url) as client:
            asking = asyncio.create_task(client.lease(1, wait_s=60).__aenter__())
            await asyncio.to_thread(hangs.wait, 20)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(work())
    assert not daemon.leases or daemon.only_lease()["state"] != "ended"
    continues.set()
    until(lambda: bool(daemon.leases) and is_released(daemon))


def test_a_second_ctrl_c_does_not_lose_the_release(daemon: FakeDaemon, client: Client, until: Until) -> None:
    continues = threading.Event()

    def interrupt(line: str) -> str | None:
        if "release" in line and not continues.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return None if continues.wait(60) else "503"
        return None

    with pytest.raises(KeyboardInterrupt), client.lease(1):  # noqa: PT012
        daemon.fault = interrupt
        raise KeyboardInterrupt
    continues.set()
    until(lambda: is_released(daemon))


def test_a_request_whose_outcome_is_unknown_is_withdrawn_when_the_daemon_is_back(
    daemon: FakeDaemon, client: Client, until: Until, monkeypatch
) -> None:
    monkeypatch.setattr("gpulease.sansio.flows.RETRY_S", 0.1)
    client.gpus()

    def dies(line: str) -> str | None:
        threading.Thread(target=daemon.stop).start()
        return "break"

    daemon.fault = dies
    with pytest.raises(DaemonUnavailable):
        client.request_lease(lease_request(count=1))
    assert daemon.only_lease()["state"] == "active"
    until(lambda: daemon._server is None)
    daemon.fault = lambda line: None
    daemon.start()
    until(lambda: is_released(daemon) and not owed_by(client))


def test_a_flow_that_is_given_up_between_two_effects_owes_its_request(daemon: FakeDaemon, until: Until) -> None:
    """As when Ctrl-C arrives there, or a loop ends without finishing its tasks."""
    flow = Flows(Destination.of(daemon.url, None, 1.0), 1.0).request_lease(lease_request(count=1), 0)
    next(flow)
    flow.close()
    until(lambda: bool(daemon.leases) and is_released(daemon))


def test_a_waiter_whose_withdrawal_is_not_answered_withdraws_later(
    daemon: FakeDaemon, client: Client, until: Until, caplog
) -> None:
    daemon.free = False
    daemon.fault = lambda line: "503" if "release" in line or "explain" in line else None
    with pytest.raises(errors.GpuleaseError), Client(daemon.url, retry_s=0.1) as brief:
        brief.lease(1, wait_s=0.1)
    assert "this process keeps trying" in caplog.text
    assert daemon.only_lease()["state"] == "queued"
    daemon.fault = lambda line: None
    until(lambda: is_released(daemon))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_owes_nothing(daemon: FakeDaemon, client: Client) -> None:
    with client.lease(1):
        daemon.stop()
    child = os.fork()
    if child == 0:
        os._exit(len(owed_by(client)))
    assert os.waitpid(child, 0)[1] == 0
    assert owed_by(client)


def test_the_thread_ends_when_nothing_is_owed(daemon: FakeDaemon, client: Client, until: Until) -> None:
    with client.lease(1):
        daemon.stop()
    assert "gpulease-owed" in [thread.name for thread in threading.enumerate()]
    daemon.start()
    until(lambda: "gpulease-owed" not in [thread.name for thread in threading.enumerate()])


def test_a_debt_is_settled_by_any_answer(daemon: FakeDaemon, client: Client, until: Until) -> None:
    with client.lease(1):
        daemon.stop()
    daemon.end("L-1", "expired")
    daemon.start()
    until(lambda: not owed_by(client))
    assert daemon.count("release") >= 1


@pytest.mark.parametrize(
    ("error", "answered"),
    [
        (errors.LeaseLost("410"), True),
        (errors.NotFound("404"), True),
        (errors.StaleToken("412"), True),
        (errors.NotAuthenticated("401"), True),
        (errors.NotNow("409"), True),
        (errors.OverQuota("the queue is full"), True),
        (errors.Unavailable("503"), False),
        (errors.DaemonUnavailable("no one there"), False),
        (errors.TooSlow("408"), False),
        (errors.GpuleaseError("500"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts_as_an_answer(error: BaseException, answered: bool) -> None:
    assert is_answer(error) is answered


def test_a_caller_that_is_asked_to_slow_down_has_no_answer_yet() -> None:
    error = errors.OverQuota("too many requests")
    error.retry_after_s = 1.0
    assert not is_answer(error)


def test_debts_are_told_to_their_own_daemon_only() -> None:
    def at(*urls: str, token: str | None = None) -> Destination:
        return Destination.of(list(urls), token, 1.0)

    debt = Debt(Failover(at("http://a:1", "http://b:1")), lease_id="L-1")
    DEBTS.add(debt)
    assert DEBTS.owed_to(at("http://b:1")) == [debt]
    assert not DEBTS.owed_to(at("http://c:1"))
    assert not DEBTS.owed_to(at("http://b:1", token="of-another-user"))


@pytest.mark.parametrize("wait_s", [float("nan"), -1.0])
def test_a_wait_that_is_no_time_is_refused(daemon: FakeDaemon, client: Client, wait_s: float) -> None:
    for call in (lambda: client.lease(1, wait_s=wait_s), lambda: client.wait_job("job-1", wait_s)):
        with pytest.raises(errors.InvalidRequest, match="wait_s: must be 0 or more"):
            call()
    with pytest.raises(errors.InvalidRequest, match="wait_s: must be 0 or more"):
        client.request_lease(lease_request(count=1), wait_s)
    assert not daemon.request_lines


def test_a_renewal_that_is_never_answered_leaves_time_for_another(
    daemon: FakeDaemon, client: Client, until: Until
) -> None:
    daemon.liveness = Liveness.PROCESS  # so that a machine that keeps this process from running loses no lease
    over = threading.Event()

    def silent_once(line: str) -> None:
        if "renew" in line and daemon.count("renew") == 1:
            over.wait(60)

    daemon.fault = silent_once
    with client.lease(1, ttl_s=6) as lease:
        until(lambda: daemon.count("renew") >= 2)
        assert not lease.lost.wait(2.5)
    over.set()


@pytest.mark.parametrize(("left_s", "timeout_s"), [(57600, 10), (40, 10), (10, 5), (2, 1), (0.5, 0.5)])
def test_no_renewal_waits_through_the_trust_window(left_s: float, timeout_s: float) -> None:
    assert renew_timeout_s(left_s) == timeout_s


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_text_that_is_not_utf_8_is_an_invalid_request(daemon: FakeDaemon, kind: type) -> None:
    broken = b"caf\xe9".decode(errors="surrogateescape")

    async def ask(client: AsyncClient) -> None:
        async with client:
            await client.lease(1, label=broken)

    with pytest.raises(errors.InvalidRequest, match=r"label: must be text in UTF-8, not 'caf\\udce9'\. "):
        Client(daemon.url).lease(1, label=broken) if kind is Client else asyncio.run(ask(AsyncClient(daemon.url)))
    with pytest.raises(errors.InvalidRequest, match="is not UTF-8 text"):
        Client(daemon.url).job(broken)
    assert not daemon.leases
    assert not DEBTS.owed_to(Destination.of(daemon.url, None, 1.0))


def test_a_job_whose_text_is_not_utf_8_is_refused_without_its_other_variables(daemon: FakeDaemon) -> None:
    broken = b"caf\xe9".decode(errors="surrogateescape")
    variables = {"SECRET": "hunter2", "PLACE": broken}
    with pytest.raises(errors.InvalidRequest) as refused:
        Client(daemon.url).submit(JobRequest(command=["train.py"], environment=variables))
    assert "environment, PLACE: must be text in UTF-8, not 'caf\\udce9'" in str(refused.value)
    with pytest.raises(errors.InvalidRequest, match=r"command: must be text in UTF-8, not 'caf\\udce9'\."):
        Client(daemon.url).submit(JobRequest(command=["train.py", "--where", broken]))


class Two:
    """As a whole number of numpy or torch: no `int`, but it stands for one."""

    def __index__(self) -> int:
        return 2

    def __ge__(self, other: int) -> bool:
        return other <= 2

    def __lt__(self, other: int) -> bool:
        return other > 2


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_json_cannot_say_is_refused_and_owes_nothing(daemon: FakeDaemon, kind: type) -> None:
    """Such a request was owed, could never be sent, and made each later call of the process fail in its stead."""

    async def ask(client: AsyncClient, **wishes: Any) -> None:
        async with client, client.lease(**wishes):
            pass

    def lease(**wishes: Any) -> None:
        if kind is AsyncClient:
            asyncio.run(ask(AsyncClient(daemon.url), **wishes))
        else:
            with Client(daemon.url) as client, client.lease(**wishes):
                pass

    for wishes in ({"among": {"GPU-0"}}, {"node": b"a"}):
        with pytest.raises(errors.InvalidRequest, match=f"{next(iter(wishes))}: must be text, a number, or a list of"):
            lease(**wishes)
    assert not DEBTS.owed_to(Destination.of(daemon.url, None, 1.0))
    lease(min_free_memory_bytes=Two())
    assert [request["min_free_memory_bytes"] for request in daemon.lease_requests] == [2]


@pytest.mark.parametrize("lease_id", [None, "", 5, b"lease-1"])
def test_what_is_no_id_is_refused_and_owes_nothing(daemon: FakeDaemon, client: Client, lease_id: Any) -> None:
    for call in (client.release, client.renew):
        with pytest.raises(errors.InvalidRequest, match="An id or a name must be text, not "):
            call(lease_id, 1)
    with pytest.raises(errors.InvalidRequest, match="An id or a name must be text, not "):
        client.job(lease_id)
    assert not DEBTS.owed_to(Destination.of(daemon.url, None, 1.0))
    with client.lease(1):
        assert len(daemon.lease_requests) == 1
