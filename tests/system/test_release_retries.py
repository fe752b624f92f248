"""No process waits behind its own former request: what it could not say while the daemon was away, it says later."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from datetime import datetime

import pytest

from gpulease import AsyncClient, GpuleaseError
from gpulease.sansio.flows import lease_request
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import Liveness
from tests.daemon import DaemonProcess, events, eventually, workers_of

COUNT = 4
"""All GPUs of the daemon."""


def test_a_block_that_ends_while_the_daemon_is_away_frees_its_gpus_when_it_is_back(
    running: DaemonProcess, monkeypatch
) -> None:
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 0.5)
    with running.client() as client:
        with client.lease(COUNT, ttl_s=300, wait_s=60) as lease:
            running.kill()
        running.start()
        running.wait_free(60)
        ended = client.lease_by_id(lease.id)
        assert (ended.liveness, ended.end_reason) == (Liveness.PROCESS, "released")


def test_a_process_asks_again_at_once_and_does_not_wait_behind_itself(running: DaemonProcess, monkeypatch) -> None:
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 0.5)
    monkeypatch.setattr("gpulease.sansio.release_retries.MIN_PAUSE_S", 600.0)
    with running.client() as client:
        with client.lease(COUNT, ttl_s=300, wait_s=60):
            running.kill()
        running.start()
    with running.client() as another, another.lease(COUNT, wait_s=60):
        pass


@pytest.mark.budget(30)
@pytest.mark.parametrize("granted", [True, False])
def test_a_task_that_is_cancelled_while_the_daemon_is_stopped_leaves_nothing(
    running: DaemonProcess, granted: bool
) -> None:
    assert running.process is not None
    daemon = running.process.pid
    holder = None if granted else running.request_lease(COUNT, wait_s=60)

    async def work() -> None:
        async with AsyncClient(f"unix://{running.socket}") as client:
            asking = asyncio.create_task(client.lease(COUNT, ttl_s=300, wait_s=300).__aenter__())
            if not granted:
                await asyncio.to_thread(eventually, lambda: bool(running.leases("queued")), 60, running.story)
            os.kill(daemon, signal.SIGSTOP)
            for _ in range(200):
                await asyncio.sleep(0)  # until the request is sent, which no one answers
            asking.cancel()
            with pytest.raises((asyncio.CancelledError, GpuleaseError)):
                await asking

    try:
        asyncio.run(work())
    finally:
        os.kill(daemon, signal.SIGCONT)
    eventually(lambda: not running.leases("queued"), 60, running.story)
    if holder is not None:
        running.release(holder)
    running.wait_free(60)


@pytest.mark.budget(30)
def test_a_task_that_is_cancelled_while_the_daemon_is_away_withdraws_its_request_when_it_is_back(
    running: DaemonProcess,
) -> None:
    holder = running.request_lease(COUNT, wait_s=60)

    async def work() -> None:
        async with AsyncClient(f"unix://{running.socket}") as client:
            asking = asyncio.create_task(client.lease(COUNT, ttl_s=300, wait_s=300).__aenter__())
            await asyncio.to_thread(eventually, lambda: bool(running.leases("queued")), 60, running.story)
            running.kill()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(work())
    running.start()
    eventually(lambda: not running.leases("queued"), 60, running.story)
    running.release(holder)
    running.wait_free()


def test_a_request_that_no_one_waits_for_ends_although_its_process_lives(running: DaemonProcess) -> None:
    """As in a notebook or a shell whose user has pressed Ctrl-C: granted in the queue's next turn or not."""
    with running.client() as client:
        request = lease_request(count=COUNT, ttl_s=1, **ProcessId.this_process().owner_fields(local=True))
        with client.lease(COUNT, wait_s=60):
            waits = client.request_lease(request)
            assert (waits.state, waits.liveness) == ("queued", Liveness.PROCESS)
            eventually(lambda: client.leases("queued") == (), 30, running.story)
            soon_granted = client.request_lease(request)
        # Not asked for by its id, which would tell its holder of the grant.
        eventually(lambda: soon_granted.id in ends(running), 60, running.story)
        assert ends(running)[soon_granted.id] in ("expired", "holder_died")
        running.wait_free(60)


@pytest.mark.budget(20)
def test_a_grant_is_not_told_to_a_client_that_has_gone(running: DaemonProcess) -> None:
    """As when Ctrl-C ends curl, which has asked with `wait_s`, in front of the shell that owns the lease."""
    holder = running.request_lease(COUNT, wait_s=60)
    body = json.dumps({"count": COUNT, "ttl_s": 4, **ProcessId.this_process().owner_fields(local=True)})
    head = f"POST /v1/leases?wait_s=60 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.socket(socket.AF_UNIX) as curl:
        curl.connect(str(running.socket))
        curl.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        eventually(lambda: bool(running.leases("queued")), 60, running.story)
        (waits,) = running.leases("queued")
        assert waits["liveness"] == "process"
    running.release(holder)
    eventually(lambda: waits["id"] in ends(running), 60, running.story)
    assert ends(running)[waits["id"]] in ("expired", "holder_died")
    running.wait_free()


def test_a_client_that_breaks_off_a_long_poll_keeps_its_place_for_a_minute(running: DaemonProcess) -> None:
    """As `gpulease acquire` that is killed: it leases for hours, and its shell lives on."""
    holder = running.request_lease(COUNT, wait_s=60)
    body = {"count": COUNT, "ttl_s": 7200, **ProcessId.this_process().owner_fields(local=True)}
    waits = running.call("POST", "/v1/leases", body).json

    def lasts_s() -> float:
        until_at = running.lease(waits["id"])["expires_at"]
        return datetime.fromisoformat(until_at).timestamp() - time.time()

    assert (waits["state"], waits["liveness"]) == ("queued", "process")
    assert lasts_s() > 7000
    with socket.socket(socket.AF_UNIX) as acquire:
        acquire.connect(str(running.socket))
        acquire.sendall(f"GET /v1/leases/{waits['id']}?wait_s=600 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    eventually(lambda: lasts_s() < 61, 60, running.story)
    running.release(holder)


@pytest.mark.budget(20)
def test_a_client_that_gives_up_before_its_grant_leaves_no_lease_to_its_shell(running: DaemonProcess) -> None:
    """As `curl -m 1` does in a loop, while a reading is awaited."""
    assert running.process is not None
    (worker,) = workers_of(running.process.pid)
    body = json.dumps({"count": COUNT, "ttl_s": 2, **ProcessId.this_process().owner_fields(local=True)})
    key = {"Idempotency-Key": "given up"}
    head = (
        f"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nIdempotency-Key: given up\r\n"
    )

    def asked_for() -> str | None:
        """The lease that the request under this key asks for, once it has arrived."""
        return running.call("POST", "/v1/leases", {"count": 99}, **key).json.get("made")

    worker.suspend()
    try:
        time.sleep(0.6)  # no reading is recent enough for a grant now
        with socket.socket(socket.AF_UNIX) as curl:
            curl.connect(str(running.socket))
            curl.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            eventually(lambda: asked_for() is not None, 60, running.story)
            lease_id = asked_for()
    finally:
        worker.resume()
    eventually(lambda: lease_id in ends(running), 60, running.story)
    running.wait_free()


def test_a_request_that_is_repeated_under_its_key_learns_of_its_grant(running: DaemonProcess) -> None:
    holder = running.request_lease(COUNT, wait_s=60)
    body = {"count": COUNT, "ttl_s": 15, **ProcessId.this_process().owner_fields(local=True)}
    key = {"Idempotency-Key": "asked twice"}
    assert running.call("POST", "/v1/leases", body, **key).status == 202
    running.release(holder)
    eventually(lambda: bool(running.leases("active")), 60, running.story)
    granted = running.call("POST", "/v1/leases", body, **key)
    assert (granted.status, granted.json["state"]) == (201, "active")
    # Only the life of its owner moves it on, and that counts from when its holder knows of it.
    before = granted.json["expires_at"]
    eventually(lambda: any((one["expires_at"] or "") > before for one in running.leases("active")), 60, running.story)


def ends(running: DaemonProcess) -> dict[str, str]:
    """By lease, why it ended, as the event log has it."""
    return {event["lease_id"]: event["reason"] for event in events(running) if event["kind"] == "lease.ended"}
