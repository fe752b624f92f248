"""A holder that was stopped asks before it gives up a lease that its process keeps; one by heartbeat does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gpulease import Client
from gpulease.lease import HeldLease
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import Liveness
from tests.client.fake_daemon import FakeDaemon
from tests.client.stalls import stalls

pytestmark = pytest.mark.alone

TTL_S = 2.5
STOPPED_FOR_S = TTL_S + 1.5
ASK_S = 2.0
HOLD = f"""
import ctypes, sys, time, gpulease
import gpulease.lease
gpulease.lease.CONFIRM_S = {ASK_S}
held = gpulease.Client(sys.argv[1]).lease(1, ttl_s={TTL_S}, on_lost=lambda lease: print("lost", flush=True))
print("held", flush=True)
for line in sys.stdin:
    if line == "block\\n":
        ctypes.PyDLL(None).sleep({int(STOPPED_FOR_S) + 1})  # as C code does that does not let go of the lock
    print("lost?" if held.lost.is_set() else "mine", flush=True)
"""


@contextmanager
def stopped(daemon: FakeDaemon, until) -> Iterator[subprocess.Popen[str]]:
    """A script that holds a lease and has been stopped for longer than its ttl."""
    words = [sys.executable, "-c", HOLD, daemon.url]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
        try:
            assert script.stdout is not None
            assert script.stdout.readline() == "held\n"
            until(lambda: daemon.count("renew") > 0)
            script.send_signal(signal.SIGSTOP)
            since = time.monotonic()
            until(lambda: time.monotonic() > since + STOPPED_FOR_S)
            yield script
        finally:
            script.kill()


def word(script: subprocess.Popen[str]) -> str:
    """What the script says next."""
    assert script.stdout is not None
    return script.stdout.readline().strip()


def test_a_request_names_its_owner_with_its_start_time(daemon: FakeDaemon, client: Client) -> None:
    with client.lease(1):
        pass
    (asked,) = daemon.lease_requests
    assert (asked["owner_pid"], asked["owner_start_ticks"]) == (os.getpid(), ProcessId.this_process().start_ticks)


def test_a_watched_holder_that_was_stopped_confirms_its_lease(daemon: FakeDaemon, until) -> None:
    daemon.liveness = Liveness.PROCESS
    with stopped(daemon, until) as script:
        asked = daemon.count("renew")
        script.send_signal(signal.SIGCONT)
        until(lambda: daemon.count("renew") >= asked + 3)
        assert script.stdin is not None
        script.stdin.write("?\n")
        script.stdin.flush()
        assert word(script) == "mine"


def test_a_watched_holder_whose_threads_could_not_run_confirms_its_lease(daemon: FakeDaemon, until) -> None:
    daemon.liveness = Liveness.PROCESS
    words = [sys.executable, "-c", HOLD, daemon.url]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
        try:
            assert word(script) == "held"
            asked = daemon.count("renew")
            for said in ("block", "?"):
                assert script.stdin is not None
                script.stdin.write(f"{said}\n")
                script.stdin.flush()
                assert word(script) == "mine"
            until(lambda: daemon.count("renew") >= asked + 3)
        finally:
            script.kill()


def test_a_watched_holder_that_was_stopped_accepts_a_refusal_at_once(daemon: FakeDaemon, until) -> None:
    daemon.liveness = Liveness.PROCESS
    with stopped(daemon, until) as script:
        (lease_id,) = daemon.leases
        daemon.end(lease_id, "revoked")
        asked = daemon.count("renew")
        script.send_signal(signal.SIGCONT)
        assert word(script) == "lost"
        assert daemon.count("renew") > asked


@pytest.mark.alone
def test_a_watched_holder_that_was_stopped_waits_a_bounded_time_for_a_response(daemon: FakeDaemon, until) -> None:
    daemon.liveness = Liveness.PROCESS
    with stopped(daemon, until) as script:
        daemon.fault = lambda line: "503" if "renew" in line else None
        asked = daemon.count("renew")
        begun = time.monotonic()
        script.send_signal(signal.SIGCONT)
        assert word(script) == "lost"
        assert ASK_S - 0.1 < time.monotonic() - begun < ASK_S + 10
        assert daemon.count("renew") > asked + 2


def test_a_heartbeat_holder_that_was_stopped_has_lost_its_lease(daemon: FakeDaemon, until) -> None:
    with stopped(daemon, until) as script:
        asked = daemon.count("renew")
        script.send_signal(signal.SIGCONT)
        assert word(script) == "lost"
        assert daemon.count("renew") == asked


def test_a_renewal_whose_answer_is_read_late_is_one(
    daemon: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch, until
) -> None:
    """Each step of the thread that renews may wait for code that keeps the GIL, so that the watch runs first."""
    daemon.liveness = Liveness.PROCESS
    monkeypatch.setattr(HeldLease, "_watch_loop", lambda self: None)
    send = client.send

    def read_late(call: Any, **limits: Any) -> Any:
        sent_at, answer = time.monotonic(), send(call, **limits)
        until(lambda: time.monotonic() > sent_at + 0.6)
        return answer

    monkeypatch.setattr(client, "send", read_late)
    with client.lease(1, ttl_s=0.5) as lease:
        until(lambda: daemon.count("renew") >= 3 or lease.lost.is_set())
        assert not lease.lost.is_set()


@pytest.mark.alone
def test_a_watched_holder_that_was_not_stopped_gives_up_at_its_ttl(
    daemon: FakeDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may let it expire: if its worker is silent as well, no one sees the holder."""
    monkeypatch.setattr("gpulease.lease.LATE_WAKEUP_S", 5.0)  # a busy machine does not pass for a stop
    daemon.liveness = Liveness.PROCESS
    with client.lease(1, ttl_s=TTL_S) as lease, stalls() as stalled_s:
        begun = time.monotonic()
        daemon.fault = lambda line: "503" if "renew" in line else None
        assert lease.lost.wait(60)
        assert TTL_S / 2 < time.monotonic() - begun < TTL_S + 3 + stalled_s()
