"""A granted lease that nobody has, or that somebody else gives back: what must not come of an error in between."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, cast

import pytest

from gpulease import Client, GpuleaseError
from gpulease.finds import Find, Finds, Wishes
from gpulease.lease import HeldLease, _release_all
from gpulease.ordinals import Visible
from gpulease.owner import Owner
from gpulease.route import Destination
from gpulease.task_loop import TaskLoop

from .stand_in import StandIn

RANKS: dict[str, Any] = {"count": 1, "shared_key": "ranks", "owner": Owner(1, 1)}


@pytest.mark.parametrize("fault", ["503", "break"])
def test_a_rank_that_fails_when_it_joins_does_not_take_the_lease_from_the_others(
    daemon: StandIn, client: Client, fault: str
) -> None:
    held = client.lease(**RANKS)
    daemon.fault = lambda line: fault if "renew" in line else None
    with Client(daemon.url, retry_s=0.1) as another, pytest.raises(GpuleaseError):
        another.lease(**RANKS)
    daemon.fault = lambda line: None
    assert daemon.only_lease()["state"] == "active"
    assert held.active
    held.leave()


def test_a_rank_that_stops_waiting_does_not_take_back_what_the_others_were_granted(
    daemon: StandIn, client: Client
) -> None:
    daemon.free = False

    def granted_meanwhile(line: str) -> str | None:
        if line.startswith("GET /v1/leases/L-1"):
            daemon.grant("L-1")
            return "503"
        return None

    daemon.fault = granted_meanwhile
    with Client(daemon.url, retry_s=0.1) as another, pytest.raises(GpuleaseError):
        another.lease(**RANKS, wait_s=20)
    assert daemon.only_lease()["state"] == "active"


def test_a_lease_that_no_thread_can_renew_is_given_back(daemon: StandIn, client: Client, monkeypatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("gpulease-watch"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="can't start"):
        client.lease(1)
    assert daemon.only_lease()["end_reason"] == "released"
    begun = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("gpulease-renew") for thread in begun)


def test_a_lease_whose_release_was_not_answered_is_not_given_out_again(daemon: StandIn, client: Client) -> None:
    """Nothing renews it any more, so it may end at any time."""
    lease = client.lease(1)
    daemon.stop()
    with pytest.raises(GpuleaseError):
        lease.release()
    assert not lease.active


def test_a_task_that_is_cancelled_in_the_moment_of_its_grant_gives_it_back() -> None:
    class Lease:
        released = False

        async def release(self) -> None:
            await asyncio.sleep(0)
            self.released = True

    async def at_step(number: int) -> tuple[bool, bool]:
        lease, granted = Lease(), []

        class Asking:
            async def lease(self, **_: object) -> Lease:
                await asyncio.sleep(0)
                granted.append(lease)
                return lease

        loop = TaskLoop(Destination.of("http://127.0.0.1:1", None, 1.0), 1, {}, lambda total, done: None)
        serving = asyncio.create_task(loop._granted(cast("Any", Asking()), Future()))
        for _ in range(number):
            await asyncio.sleep(0)
        serving.cancel()
        try:
            await serving
        except asyncio.CancelledError:
            return lease.released, bool(granted)
        return True, True

    outcomes = [asyncio.run(at_step(number)) for number in range(8)]
    assert (True, True) in outcomes
    assert all(released or not granted for released, granted in outcomes), outcomes


def test_a_find_is_not_forgotten_when_another_thread_looks_for_living_ones() -> None:
    finds = Finds()

    class Held:
        def __init__(self, also: Find | None = None) -> None:
            self.also = also

        @property
        def active(self) -> bool:
            if self.also is not None:
                finds.add(self.also)  # what another thread does at this moment
                self.also = None
            return True

    def find(held: Held) -> Find:
        return Find(cast("HeldLease", held), (0,), Wishes(), Visible((), (), latched=False), (None, None))

    later = find(Held())
    finds.add(find(Held(later)))
    finds.living()
    assert later in finds.living()


def test_a_call_does_not_wait_for_ever_for_that_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.finds.TURN_S", 0.05)
    finds, inside, over = Finds(), threading.Event(), threading.Event()

    def first() -> None:
        with finds.one_at_a_time(float("inf")):
            inside.set()
            over.wait(20)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(RuntimeError, match="Another thread"), finds.one_at_a_time(0):
        pass
    over.set()
    thread.join(20)
    with finds.one_at_a_time(0):
        pass


def test_a_process_that_proc_does_not_show_names_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pid namespace of its own with the host's /proc its number is another process's, such as init's."""
    assert Owner.this_process().named()["owner_start_ticks"]
    monkeypatch.setattr("gpulease.owner.os.readlink", lambda path: "4242")
    assert Owner.this_process().named() == {}


def test_the_end_of_a_program_waits_once_for_a_daemon_that_does_not_answer(
    daemon: StandIn, client: Client, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("gpulease.lease.RELEASE_S", 0.2)
    monkeypatch.setattr("gpulease.lease._held", set())
    held = [client.lease(1) for _ in range(5)]
    daemon.fault = lambda line: "hang" if "release" in line else None
    _release_all()
    asked = {line.split("/")[3] for line in daemon.seen if "release" in line}
    assert len(asked) == 1
    assert len([record for record in caplog.records if "was not released" in record.message]) == len(held)
    for lease in held:
        lease.leave()


def test_a_cancelled_request_that_was_refused_leaves_no_warning(daemon, client: Client, monkeypatch, caplog) -> None:
    """Nothing was granted, so nothing is left to end by itself."""
    daemon.free = False
    daemon.fault = lambda line: "break" if len(daemon.seen) < 2 else None

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpulease.transport.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.lease(1)
    assert not caplog.records
