"""Errors must leave no granted lease without a holder, and let no process release the lease of another."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, cast

import pytest

from gpulease import Client, Gpu, GpuleaseError, GpuState, Node, NodeState, find_usable_cuda_devices, reserved_leases
from gpulease.cuda.ordinals import VisibleDevices
from gpulease.device_reuse import DeviceRegistry, DeviceRequirements, FoundDevices
from gpulease.executor.task_loop import TaskLoop
from gpulease.lease import HeldLease, _held_leases, _release_all
from gpulease.sansio.failover import Destination
from gpulease.sansio.release_retries import DEBTS
from gpulease_protocol.host.process_id import ProcessId
from tests.client.fake_daemon import FakeDaemon

RANKS: dict[str, Any] = {"count": 1, "shared_key": "ranks", "owner": ProcessId.of(os.getppid())}
"""The launcher lives, or a rank on a busy machine would give the lease back within the test."""


@pytest.mark.parametrize("fault", ["503", "break"])
def test_a_rank_that_fails_to_join_does_not_end_the_shared_lease(
    daemon: FakeDaemon, client: Client, fault: str
) -> None:
    held = client.lease(**RANKS)
    daemon.fault = lambda line: fault if "renew" in line else None
    with Client(daemon.url, retry_s=0.1) as another, pytest.raises(GpuleaseError):
        another.lease(**RANKS)
    daemon.fault = lambda line: None
    assert daemon.only_lease()["state"] == "active"
    assert held.active
    held.detach()


@pytest.mark.parametrize("error", [TimeoutError("alarm"), OSError("alarm")])
@pytest.mark.parametrize("bound", [False, True])
def test_the_error_of_a_signal_handler_ends_the_wait_and_withdraws_the_request(
    daemon: FakeDaemon, client: Client, error: OSError, bound: bool
) -> None:
    """It is of a class of which those of sockets are, after which a call is sent again."""
    daemon.free = False

    def alarm(*_: object) -> None:
        raise error

    def interrupt(line: str) -> None:
        if "wait_while=queued" in line:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    daemon.fault = interrupt
    before = signal.signal(signal.SIGUSR1, functools.partial(alarm) if bound else alarm)
    try:
        with pytest.raises(type(error), match="alarm"):
            client.lease(1, wait_s=10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert daemon.only_lease()["end_reason"] == "released"


def test_a_call_after_the_error_of_a_signal_handler_is_sent_again(daemon: FakeDaemon, client: Client) -> None:
    """That error is in the context of the call's own failures, and did not cause them."""

    def alarm(*_: object) -> None:
        raise TimeoutError("alarm")

    faults = iter(["break", "break"])
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except TimeoutError:
        daemon.fault = lambda line: next(faults, None)
        assert client.gpus() == ()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert next(faults, None) is None


def test_a_rank_that_stops_waiting_does_not_withdraw_the_shared_lease(daemon: FakeDaemon, client: Client) -> None:
    daemon.free = False

    def granted_meanwhile(line: str) -> str | None:
        if line.startswith("GET /v1/leases/L-1"):
            daemon.grant("L-1")
            return "503"
        return None

    daemon.fault = granted_meanwhile
    with Client(daemon.url, retry_s=0.1) as another, pytest.raises(GpuleaseError):
        another.lease(**RANKS, wait_s=60)
    assert daemon.only_lease()["state"] == "active"


def test_a_lease_that_no_thread_can_renew_is_released(daemon: FakeDaemon, client: Client, monkeypatch) -> None:
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


def test_a_lease_with_an_unanswered_release_is_not_reused(daemon: FakeDaemon, client: Client) -> None:
    """Nothing renews it, so it may expire at any time."""
    lease = client.lease(1)
    daemon.stop()
    with pytest.raises(GpuleaseError):
        lease.release()
    assert not lease.active


def test_a_task_cancelled_at_the_moment_of_its_grant_releases_it() -> None:
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


def test_devices_added_while_another_thread_prunes_the_registry_are_kept() -> None:
    finds = DeviceRegistry()

    class Held:
        def __init__(self, also: FoundDevices | None = None) -> None:
            self.also = also

        @property
        def active(self) -> bool:
            if self.also is not None:
                finds.add(self.also)  # what another thread does at this moment
                self.also = None
            return True

    def find(held: Held) -> FoundDevices:
        return FoundDevices(
            cast("HeldLease", held), (0,), DeviceRequirements(), VisibleDevices((), (), initialized=False), (None, None)
        )

    later = find(Held())
    finds.add(find(Held(later)))
    finds.active()
    assert later in finds.active()


def test_a_call_does_not_wait_forever_for_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.device_reuse.LOCK_TIMEOUT_S", 0.05)
    finds, inside, over = DeviceRegistry(), threading.Event(), threading.Event()

    def first() -> None:
        with finds.exclusive(float("inf")):
            inside.set()
            over.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match="Another thread"), finds.exclusive(0):
        pass
    over.set()
    thread.join(60)
    with finds.exclusive(0):
        pass


def test_a_process_not_visible_in_proc_names_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own pid namespace with the host's /proc, its pid is that of another process, such as init."""
    assert ProcessId.this_process().owner_fields(local=True)["owner_start_ticks"]
    monkeypatch.setattr("gpulease_protocol.host.process_id.os.readlink", lambda path: "4242")
    assert ProcessId.this_process().owner_fields(local=True) == {}


def test_the_exit_of_a_program_waits_once_for_an_unresponsive_daemon(
    daemon: FakeDaemon, client: Client, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("gpulease.lease.RELEASE_TIMEOUT_S", 2.0)
    monkeypatch.setattr("gpulease.lease._held_leases", set())
    daemon.hang_s = 60.0
    held = [client.lease(1) for _ in range(5)]
    daemon.fault = lambda line: "hang" if "release" in line else None
    _release_all()
    asked = {line.split("/")[3] for line in daemon.request_lines if "release" in line}
    assert len(asked) == 1
    assert len([record for record in caplog.records if "was not released" in record.message]) == len(held)
    for lease in held:
        lease.detach()


def test_a_cancelled_request_that_was_refused_leaves_no_warning(daemon, client: Client, monkeypatch, caplog) -> None:
    """Nothing was granted, so nothing has to expire."""
    daemon.free = False
    daemon.fault = lambda line: "break" if len(daemon.request_lines) < 2 else None

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpulease.sansio.sync_transport.time.sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.lease(1)
    assert not caplog.records


def is_interrupted(call: Callable[[], object], at: int, counts: Callable[[FrameType], bool]) -> bool:
    """True if Ctrl-C came in a call, before the line of this number of those that count; false if it has no such."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and counts(frame) and next(lines) == at:
            raise KeyboardInterrupt
        return trace if "gpulease" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("wait_s", [0, 20])
def test_ctrl_c_between_a_grant_and_its_holder_gives_the_lease_back(
    daemon: FakeDaemon, client: Client, until, wait_s: float
) -> None:
    """A notebook that goes on would keep it, and no one would know of it there."""
    client.gpus()

    def counts(frame: FrameType) -> bool:
        is_received = bool(daemon.leases) and frame.f_code.co_filename.endswith(("/flows.py", "/lease.py"))
        return is_received and not any("gpulease-renew" in one.name for one in set(threading.enumerate()) - earlier)

    held: list[HeldLease] = []
    earlier, before = set(threading.enumerate()), set(_held_leases)
    for at in itertools.count():
        daemon.leases.clear()
        if not is_interrupted(lambda: held.append(client.lease(1, wait_s=wait_s)), at, counts):
            held[0].release()
            break
        assert {lease["end_reason"] for lease in daemon.leases.values()} == {"released"}, at
        until(lambda: not DEBTS.owed_to(client.destination))
        assert _held_leases == before, "the exit of the process would release it again"
    assert at > 10


def test_ctrl_c_between_a_lease_and_its_devices_gives_it_back(daemon: FakeDaemon, client: Client, monkeypatch) -> None:
    """The next call would ask for others, and find them held by this process."""
    for name in ("GPULEASE_LEASE_ID", "GPULEASE_LEASE_TOKEN", "GPULEASE_FOUND_BY", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
    daemon.gpus = [Gpu(uuid="GPU-0", node="a", index=0, name="H100", state=GpuState.FREE)]
    daemon.nodes = [Node(name="a", host=socket.gethostname(), state=NodeState.READY, gpu_count=1, simulated=True)]

    def counts(frame: FrameType) -> bool:
        # Python 3.12 and later trace the line of a comprehension once more, where no handler catches what is raised.
        if frame.f_code.co_name != "_register" or frame.f_lineno in traced or reserved_leases():
            return False
        traced.add(frame.f_lineno)
        return True

    traced: set[int] = set()
    for at in itertools.count(1):  # before the first line it has not begun
        traced.clear()
        if not is_interrupted(lambda: find_usable_cuda_devices(1, client=client), at, counts):
            break
        assert [lease["end_reason"] for lease in daemon.leases.values()] == ["released"] * at, at
        assert os.environ["GPULEASE_LEASE_ID"] == ""
    assert at > 5
    for held in reserved_leases():
        held.release()
