"""No process waits behind its own former request: what it could not say while the daemon was away, it says later."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from gpulease import AsyncClient, GpuleaseError
from gpulease.sansio.flows import lease_request
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import Liveness
from tests.daemon import DaemonProcess, events, eventually

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
    monkeypatch.setattr("gpulease.sansio.owed.MIN_PAUSE_S", 600.0)
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
                await asyncio.to_thread(eventually, lambda: bool(running.leases("queued")), 20, running.story)
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


def ends(running: DaemonProcess) -> dict[str, str]:
    """By lease, why it ended, as the event log has it."""
    return {event["lease_id"]: event["reason"] for event in events(running) if event["kind"] == "lease.ended"}
