"""`AsyncClient` against the stand-in: the same answers, and what an event loop adds: cancellation, being blocked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from gpulease import AsyncClient, AsyncLease, Client, DaemonUnavailable, InvalidRequest, LeaseRequest, NotFound, NotNow
from gpulease_protocol.model import Liveness
from tests.client.fake_daemon import FakeDaemon

T = TypeVar("T")


def within(seconds: float, work: Callable[[], Awaitable[T]]) -> T:
    """Run it in an event loop of its own, and fail if it takes longer."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await work()

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - it comes true in another thread
            await asyncio.sleep(0.005)


def test_a_lease_is_renewed_while_the_block_runs_and_released_once(daemon: FakeDaemon) -> None:
    daemon.liveness = Liveness.PROCESS  # so that a machine that keeps this process from running loses no lease

    async def work() -> None:
        async with AsyncClient(daemon.url) as client, client.lease(1, ttl_s=6) as lease:
            assert [gpu.uuid for gpu in lease.gpus] == ["GPU-0"]
            assert (lease.id, lease.fencing_token) == ("L-1", 7)
            await until(lambda: daemon.count("renew") >= 3)
            assert not lease.is_lost
        await lease.release()

    within(60, work)
    assert daemon.count("release") == 1
    assert daemon.only_lease()["end_reason"] == "released"


def test_a_lease_can_be_awaited_and_released_explicitly(daemon: FakeDaemon) -> None:
    async def work() -> None:
        client = AsyncClient(daemon.url)
        lease = await client.lease(1)
        await lease.release()
        await client.close()

    within(60, work)
    assert daemon.only_lease()["end_reason"] == "released"


def test_a_lease_survives_an_event_loop_blocked_longer_than_the_ttl(daemon: FakeDaemon) -> None:
    daemon.liveness = Liveness.PROCESS  # so that a machine that keeps this process from running loses no lease

    async def work() -> None:
        async with AsyncClient(daemon.url) as client, client.lease(1, ttl_s=3) as lease:
            begun = time.monotonic()
            while (blocked_s := time.monotonic() - begun) < 4 or daemon.count("renew") < 3:
                assert blocked_s < 40, "no one renews while the loop is blocked"
                if blocked_s < 1.5:
                    sum(range(1000))
                else:
                    time.sleep(0.05)  # noqa: ASYNC251 - it blocks the loop
            assert not lease.is_lost
            await asyncio.sleep(0)
            assert not lease.lost.is_set()

    within(60, work)


def test_a_lost_lease_sets_the_event_and_calls_a_coroutine_function(daemon: FakeDaemon, caplog) -> None:
    told: list[AsyncLease] = []

    async def tell(lease: AsyncLease) -> None:
        await asyncio.sleep(0)
        told.append(lease)

    async def work() -> None:
        async with AsyncClient(daemon.url) as client, client.lease(1, ttl_s=0.6, on_lost=tell) as lease:
            daemon.end(lease.id)
            await lease.lost.wait()
            assert lease.is_lost
            await until(lambda: told == [lease])

    with caplog.at_level(logging.WARNING, "gpulease"):
        within(60, work)
    assert "is lost" in caplog.text


@pytest.mark.parametrize("coroutine", [False, True])
def test_on_lost_that_fails_is_reported(daemon: FakeDaemon, caplog, coroutine: bool) -> None:
    def fail(lease: AsyncLease) -> None:
        raise RuntimeError("of the callback")

    async def fail_later(lease: AsyncLease) -> None:
        raise RuntimeError("of the callback")

    async def work() -> None:
        async with (
            AsyncClient(daemon.url) as client,
            client.lease(1, ttl_s=0.3, on_lost=fail_later if coroutine else fail) as lease,
        ):
            daemon.end(lease.id)
            await until(lambda: "of the callback" in caplog.text)

    within(60, work)


@pytest.mark.parametrize("granted_meanwhile", [False, True])
@pytest.mark.parametrize("times", [1, 3])
def test_cancelling_a_waiting_task_withdraws_its_request(
    daemon: FakeDaemon, granted_meanwhile: bool, times: int
) -> None:
    daemon.free = False
    cancel: list[Callable[[], object]] = []

    def fault(line: str) -> None:
        if "release" in line:
            if granted_meanwhile and daemon.only_lease()["state"] == "queued":
                daemon.grant("L-1")
            for again in cancel[1:]:
                again()  # impatient: cancelled once more while the request is being taken back

    daemon.fault = fault

    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with AsyncClient(daemon.url) as client:

            async def wait() -> None:
                async with client.lease(1, wait_s=60):
                    pytest.fail("it was never granted")

            waiting = asyncio.create_task(wait())
            cancel.extend([lambda: loop.call_soon_threadsafe(waiting.cancel)] * times)
            await until(lambda: daemon.count("wait_while=queued") == 1)
            cancel[0]()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    within(60, work)
    assert daemon.only_lease()["end_reason"] == "released"


def test_cancelling_a_task_before_the_response_releases_its_lease(daemon: FakeDaemon) -> None:
    faults = ["hang"]
    daemon.fault = lambda line: faults.pop() if faults and line.startswith("POST /v1/leases?") else None

    async def work() -> None:
        async with AsyncClient(daemon.url) as client:
            asking = asyncio.ensure_future(client.lease(1))
            await until(lambda: not faults)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    within(60, work)
    assert daemon.only_lease()["end_reason"] == "released"
    assert daemon.count("POST /v1/leases?") == 2, "the same request again, to learn its id"


def test_a_release_completes_even_if_the_task_is_cancelled(daemon: FakeDaemon) -> None:
    faults = ["hang"]

    def fault(line: str) -> str | None:
        return faults.pop() if faults and "release" in line else None

    daemon.fault = fault

    async def work() -> None:
        async with AsyncClient(daemon.url) as client:

            async def hold() -> None:
                async with client.lease(1):
                    pass

            holding = asyncio.create_task(hold())
            await until(lambda: not faults)
            holding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await holding

    within(60, work)
    assert daemon.only_lease()["end_reason"] == "released"


def test_a_wait_that_times_out_names_the_holder_and_withdraws_the_request(daemon: FakeDaemon) -> None:
    daemon.free = False

    async def work() -> None:
        async with AsyncClient(daemon.url) as client:
            with pytest.raises(NotNow, match="GPU 0 is leased to ada"):
                await client.lease(1)
            with pytest.raises(NotNow, match=r"within 0\.2 s.*leased to ada"):
                await client.lease(1, wait_s=0.2)

    within(60, work)
    assert daemon.only_lease()["end_reason"] == "released"


def test_a_restart_of_the_daemon_during_a_wait_is_survived(daemon: FakeDaemon) -> None:
    daemon.free = False

    async def work() -> None:
        async with AsyncClient(daemon.url) as client:

            async def hold() -> str:
                async with client.lease(1, wait_s=60) as lease:
                    return lease.id

            holding = asyncio.create_task(hold())
            await until(lambda: daemon.count("wait_while=queued") == 1)
            await asyncio.to_thread(daemon.stop)
            daemon.start()
            await until(lambda: daemon.count("wait_while=queued") >= 2)
            daemon.grant("L-1")
            assert await holding == "L-1"

    within(60, work)


def test_many_tasks_of_one_loop_hold_leases_at_once(daemon: FakeDaemon) -> None:
    async def work() -> None:
        async with AsyncClient(daemon.url) as client:

            async def hold() -> str:
                async with client.lease(1) as lease:
                    await until(lambda: daemon.count("POST /v1/leases?") == 16)
                    return lease.id

            assert len(set(await asyncio.gather(*(hold() for _ in range(16))))) == 16

    within(60, work)
    assert {lease["end_reason"] for lease in daemon.leases.values()} == {"released"}


def test_one_client_serves_one_event_loop_after_another(daemon: FakeDaemon) -> None:
    client = AsyncClient(daemon.url)

    async def work() -> None:
        assert await client.gpus() == ()
        await client.close()

    for _ in range(2):
        within(60, work)


def test_the_environment_for_a_child_is_complete(daemon: FakeDaemon, monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("OF_MY_OWN", "stays")

    async def work() -> dict[str, str]:
        async with AsyncClient(daemon.url) as client, client.lease(1) as lease:
            assert lease.environ().items() >= lease.env.items()
            return lease.environ()

    environ = within(60, work)
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert environ["OF_MY_OWN"] == "stays"
    assert "MASTER_PORT" not in environ, "the stand-in leases none, and the inherited one is another training's"


def test_errors_are_the_same_as_those_of_the_client(daemon: FakeDaemon) -> None:
    async def work() -> None:
        async with AsyncClient(daemon.url) as client:
            with pytest.raises(NotFound):
                await client.lease_by_id("none")
            with pytest.raises(InvalidRequest):
                client.lease(0)

    within(60, work)


def test_a_log_stream_that_breaks_off_is_resumed(daemon: FakeDaemon) -> None:
    faults = ["cut"]
    daemon.fault = lambda line: faults.pop() if faults and "/logs" in line else None

    async def work() -> str:
        async with AsyncClient(daemon.url) as client:
            return "".join([piece async for piece in client.job_logs("j", follow=True)])

    assert within(60, work) == "one\ntwo\n"
    assert daemon.count("/logs") == 2


def test_a_request_whose_response_was_lost_is_retried_and_granted_once(daemon: FakeDaemon) -> None:
    faults = ["break"]
    daemon.fault = lambda line: faults.pop() if faults and "POST /v1/leases" in line else None

    async def work() -> str:
        async with AsyncClient(daemon.url) as client:
            return (await client.request_lease(LeaseRequest(count=1))).id

    assert within(60, work) == "L-1"
    assert list(daemon.leases) == ["L-1"]


def test_a_request_is_the_same_bytes_whichever_client_sends_it(daemon: FakeDaemon) -> None:
    """A daemon knows a repeated request by them: what a task has asked for, a thread of its process takes back."""

    async def ask() -> None:
        async with AsyncClient(daemon.url) as client, client.lease(2, label="grün"):
            pass

    asyncio.run(ask())
    of_task = next(body for body in daemon.bodies if b"label" in body)
    daemon.bodies.clear()
    with Client(daemon.url) as client, client.lease(2, label="grün"):
        pass
    assert next(body for body in daemon.bodies if b"label" in body) == of_task


def test_a_daemon_that_never_responds_times_out(daemon: FakeDaemon) -> None:
    daemon.fault = lambda line: "hang"

    async def work() -> None:
        async with AsyncClient(daemon.url, timeout_s=0.2) as client:
            with pytest.raises(DaemonUnavailable, match="did not answer GET /v1/gpus within"):
                await client.gpus()

    within(60, work)


def test_a_connection_opened_during_close_is_closed_after_its_response(daemon: FakeDaemon, monkeypatch) -> None:
    sockets: list[Any] = []
    client = AsyncClient(daemon.url)
    connect = asyncio.BaseEventLoop.create_connection

    async def connect_and_close(*where: Any, **options: Any) -> Any:
        connected = await connect(*where, **options)
        sockets.append(connected[0])
        await client.close()
        return connected

    async def work() -> None:
        monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", connect_and_close)
        assert await client.gpus() == ()
        assert [one.is_closing() for one in sockets] == [True] * len(sockets)

    within(60, work)
    assert sockets
