"""The wall clock jumps by an hour either way, under a real daemon, worker, job and clients that all see it jump.

libfaketime shows them a clock that a file sets, and the true monotonic one. The tests themselves measure on the true
one. A lease that no one renews must end at most 1 s late; `LOAD_S` is for a machine that does not let the daemon run.
Were anything timed by the wall clock it would be an hour off, so the allowance hides nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, daemon, events

HOUR_S = 3600
LATE_S = 1.0
LOAD_S = 20.0

HOLD = """
import sys, gpulease
lease = gpulease.Client(sys.argv[1]).lease(1, ttl_s=20, wait_s=60)
print("held", flush=True)
sys.stdin.read()
print("lost" if lease.lost.is_set() else "mine", lease.id, flush=True)
lease.release()
"""
"""Holds a lease, which the library renews, until its input ends; then says whether it still has it."""
CHURN = """
import select, sys, gpulease
client, rounds = gpulease.Client(sys.argv[1]), 0
while True:
    with client.lease(1, ttl_s=20, wait_s=60) as lease:
        assert not lease.lost.is_set()
    rounds += 1
    if rounds == 1:
        print("held", flush=True)
    if select.select([sys.stdin], [], [], 0)[0]:
        break
print("mine", rounds, flush=True)
"""
"""Takes and gives back one GPU after the other until its input ends."""


class WallClock:
    """The wall clock of everything that is started with `environment`."""

    def __init__(self, directory: Path) -> None:
        found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
        assert found, "libfaketime is missing. On Debian and Ubuntu: apt-get install faketime"
        self._file = directory / "clock"
        self.environment = {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_CACHE_DURATION": "1",  # reading the file at every look at the clock makes all of it slow
        }
        self.off_by(0)

    def off_by(self, seconds: int) -> None:
        """Set it so far from the true time, within a second."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._file)


@contextmanager
def program(text: str, running: DaemonProcess, clock: WallClock) -> Iterator[subprocess.Popen[str]]:
    """A Python program that has a GPU by the time this is entered."""
    words = [sys.executable, "-c", text, running.url]
    environment = os.environ | clock.environment
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def lease(running: DaemonProcess, ttl_s: float, **headers: str) -> dict[str, Any]:
    """A lease that no one renews."""
    answer = running.call("POST", "/v1/leases?wait_s=50", {"count": 1, "ttl_s": ttl_s}, **headers)
    assert answer.status == 201, answer.content
    found: dict[str, Any] = answer.json
    return found


def renewed(running: DaemonProcess, ttl_s: float) -> tuple[str, float, float]:
    """A lease, and two times on the monotonic clock between which it was renewed for the last time."""
    for _ in range(20):
        found = lease(running, ttl_s)
        sent_s = time.monotonic()
        if running.call("POST", f"/v1/leases/{found['id']}/renew", {"token": found["token"]}).status == 200:
            return found["id"], sent_s, time.monotonic()
    raise AssertionError(f"no renewal gets through within {ttl_s} s; {running.story()}")


def end_of(running: DaemonProcess, lease_id: str) -> float:
    """When a lease was seen to have expired, on the monotonic clock."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        shown = running.call("GET", f"/v1/leases/{lease_id}?wait_s=10&wait_while=active").json
        if shown["state"] == "ended":
            assert shown["end_reason"] == "expired"
            return time.monotonic()
    raise AssertionError(f"lease {lease_id} has not expired; {running.story()}")


@pytest.mark.slow
@pytest.mark.busy
def test_nothing_ends_early_or_late_when_the_wall_clock_jumps_under_load(tmp_path: Path) -> None:
    clock, ttl_s, limit_s = WallClock(tmp_path), 3.0, 8.0
    with daemon(tmp_path, "--simulate", "8", **clock.environment) as running, ExitStack() as stack:
        programs = [stack.enter_context(program(text, running, clock)) for text in (HOLD, HOLD, CHURN)]
        body = {"command": ["sleep", "300"], "gpus": 1, "launcher": "plain", "timeout_s": limit_s}
        submitted_s = time.monotonic()
        job = running.call("POST", "/v1/jobs", body | {"environment": dict(os.environ)}).json
        expired = set()
        for jump_h in (1, -1, 0):
            lease_id, before_s, after_s = renewed(running, ttl_s)
            clock.off_by(jump_h * HOUR_S)
            ended_s = end_of(running, lease_id)
            assert ended_s - before_s >= ttl_s, f"expired early after a jump to {jump_h} h"
            assert ended_s - after_s <= ttl_s + LATE_S + LOAD_S, f"expired late after a jump to {jump_h} h"
            expired.add(lease_id)
        while (job := running.call("GET", f"/v1/jobs/{job['id']}?wait_s=60").json)["ended_at"] is None:
            assert time.monotonic() - submitted_s < limit_s + 60, running.story()
        assert job["state"] == "timed_out", job
        assert time.monotonic() - submitted_s >= limit_s, "the job's time limit went by the wall clock"
        said = [process.communicate("", timeout=120)[0].split() for process in programs]
        assert [words[0] for words in said] == ["mine"] * 3, said
        log = events(running)
    assert [event["seq"] for event in log] == list(range(1, len(log) + 1))
    kept = {words[1] for words in said[:2]}
    lost = {event["lease_id"] for event in log if event["kind"] == "lease.lost"}
    assert expired <= lost
    assert not lost & kept
    at = [datetime.fromisoformat(event["at"]) for event in log]
    steps_s = [(after - before).total_seconds() for before, after in pairwise(at)]
    assert max(steps_s) > HOUR_S - 60, "no jump was seen"
    assert min(steps_s) < 60 - HOUR_S, "no jump back was seen"


def test_a_restart_under_another_wall_clock_gives_every_holder_a_full_ttl(tmp_path: Path) -> None:
    clock, ttl_s = WallClock(tmp_path), 3.0
    clock.off_by(HOUR_S)
    with daemon(tmp_path, "--simulate", "4") as running:  # on the true clock
        kept = lease(running, 60.0, **{"Idempotency-Key": "k"})
        for jump, environment in (("forward", clock.environment), ("back", {})):
            found = lease(running, ttl_s)
            running.kill()
            running.environment = environment
            begun_s = time.monotonic()
            running.start()
            ready_s = time.monotonic()
            ended_s = end_of(running, found["id"])
            assert ended_s - begun_s >= ttl_s, f"expired before a full ttl after the restart, an hour {jump}"
            assert ended_s - ready_s <= ttl_s + LATE_S + LOAD_S, jump
            answer = running.call("POST", f"/v1/leases/{kept['id']}/renew", {"token": kept["token"]})
            assert (answer.status, answer.json["state"], answer.json["token"]) == (200, "active", kept["token"]), jump
            again = lease(running, 60.0, **{"Idempotency-Key": "k"})
            assert again["id"] == kept["id"], f"the key was forgotten, an hour {jump}"
        at = [datetime.fromisoformat(event["at"]) for event in events(running)]
    steps_s = [(after - before).total_seconds() for before, after in pairwise(at)]
    assert max(steps_s) > HOUR_S - 60, "the clock did not jump"
    assert min(steps_s) < 60 - HOUR_S, "the clock did not jump back"
