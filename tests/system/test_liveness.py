"""Does a holder live? Real daemons, workers and scripts that are killed, stopped and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease.model import LeaseState
from tests.daemon import DaemonProcess, daemon, events, eventually

HOLD = """
import signal, sys, gpulease
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
lease = gpulease.Client(sys.argv[1]).lease(int(sys.argv[2]), ttl_s=float(sys.argv[3]), wait_s=float(sys.argv[4]))
print("held", lease.id, flush=True)
for line in sys.stdin:
    print("lost" if lease.lost.is_set() else "mine", flush=True)
"""
"""Takes a lease and holds it; for each line it is sent it says whether the lease is lost."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon(tmp_path) as process:
        yield process


@contextmanager
def script(
    running: DaemonProcess, count: int = 1, *, ttl_s: float = 300, wait_s: float = 0, over: str = "socket"
) -> Iterator[subprocess.Popen[str]]:
    """A script that asks for a lease and holds it, killed at the close."""
    url = f"unix://{running.socket}" if over == "socket" else running.url
    words = [sys.executable, "-c", HOLD, url, str(count), str(ttl_s), str(wait_s)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def held(process: subprocess.Popen[str]) -> str:
    """The lease that a script has, once it has it."""
    assert process.stdout is not None
    word, lease_id = process.stdout.readline().split()
    assert word == "held"
    return lease_id


def still(process: subprocess.Popen[str]) -> str:
    """What a script says of its lease."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def lease(running: DaemonProcess, lease_id: str) -> dict[str, object]:
    """A lease as the daemon shows it."""
    shown: dict[str, object] = running.call("GET", f"/v1/leases/{lease_id}").json
    return shown


def free(running: DaemonProcess) -> int:
    """How many GPUs are free."""
    return sum(gpu["state"] == "free" for gpu in running.call("GET", "/v1/gpus").json["items"])


def worker_pid(running: DaemonProcess) -> int:
    """The worker that the daemon supervises; 0 while there is none."""
    assert running.process is not None
    task = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    for child in map(int, task.read_text().split()):
        if b"\0worker\0" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    return 0


def watched(running: DaemonProcess, owner: int) -> bool:
    """True while the worker has a pidfd of this process."""
    worker = worker_pid(running)
    if not worker:
        return False
    for info in Path(f"/proc/{worker}/fdinfo").iterdir():
        try:
            text = info.read_text()
        except OSError:
            continue
        if f"\nPid:\t{owner}\n" in text:
            return True
    return False


@pytest.mark.parametrize("over", ["socket", "tcp"])
def test_a_script_that_is_killed_frees_its_gpus_within_a_second(running: DaemonProcess, over: str) -> None:
    with script(running, 4, over=over) as process:
        lease_id = held(process)
        assert lease(running, lease_id)["liveness"] == "process"
        eventually(lambda: watched(running, process.pid), 2, running.story)
        process.kill()
        begun = time.monotonic()
        eventually(lambda: free(running) == 4, 5, running.story)
        assert time.monotonic() - begun < 1
    assert lease(running, lease_id)["end_reason"] == "holder_died"
    told = [event["kind"] for event in events(running) if event["reason"] == "holder_died"]
    assert told == ["lease.ended", "lease.lost"]


def test_a_script_that_is_killed_while_it_waits_is_never_granted_anything(running: DaemonProcess) -> None:
    with running.client() as client, client.lease(4) as holder, script(running, 4, wait_s=300) as process:
        eventually(lambda: bool(client.leases("queued")), 20, running.story)
        (request,) = client.leases("queued")
        eventually(lambda: watched(running, process.pid), 2, running.story)
        process.kill()
        eventually(lambda: not client.leases("queued"), 1, running.story)
        holder.release()
        eventually(lambda: free(running) == 4, 5, running.story)
        ended = client.lease_by_id(request.id)
        assert (ended.end_reason, ended.granted_at) == ("holder_died", None)
    assert not [one for one in events(running) if one["lease_id"] == request.id and one["kind"] == "lease.granted"]


def test_a_stopped_script_keeps_its_lease_and_goes_on_with_it(running: DaemonProcess) -> None:
    with script(running, ttl_s=2) as process, running.client() as client:
        lease_id = held(process)
        eventually(lambda: watched(running, process.pid), 2, running.story)
        process.send_signal(signal.SIGSTOP)
        until_s = time.monotonic() + 6
        eventually(
            lambda: client.lease_by_id(lease_id).state is not LeaseState.ACTIVE or time.monotonic() > until_s, 10
        )
        assert client.lease_by_id(lease_id).state is LeaseState.ACTIVE
        process.send_signal(signal.SIGCONT)
        assert still(process) == "mine"
        renewed_until = client.lease_by_id(lease_id).expires_at
        eventually(lambda: client.lease_by_id(lease_id).expires_at > renewed_until, 5, running.story)
        assert still(process) == "mine"


def test_a_stopped_script_that_no_worker_sees_loses_its_lease(running: DaemonProcess) -> None:
    """The other side of the rule: where nobody watches, time decides as it does without a watch."""
    with script(running, ttl_s=2) as process, running.client() as client:
        lease_id = held(process)
        worker = worker_pid(running)
        os.kill(worker, signal.SIGSTOP)
        try:
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: client.lease_by_id(lease_id).end_reason == "expired", 15, running.story)
        finally:
            os.kill(worker, signal.SIGCONT)


def test_a_worker_that_is_killed_and_started_again_watches_the_same_owners(running: DaemonProcess) -> None:
    with script(running) as process:
        lease_id = held(process)
        eventually(lambda: watched(running, process.pid), 2, running.story)
        former = worker_pid(running)
        os.kill(former, signal.SIGKILL)
        eventually(lambda: worker_pid(running) not in (0, former), 20, running.story)
        eventually(lambda: watched(running, process.pid), 20, running.story)
        assert still(process) == "mine"
        process.kill()
        eventually(lambda: lease(running, lease_id)["end_reason"] == "holder_died", 2, running.story)


def test_a_daemon_that_is_killed_and_started_again_is_not_noticed_by_the_script(running: DaemonProcess) -> None:
    with script(running, ttl_s=60) as process:
        lease_id = held(process)
        running.kill()
        running.start()
        eventually(lambda: watched(running, process.pid), 20, running.story)
        assert still(process) == "mine"
        assert lease(running, lease_id)["state"] == "active"
        process.send_signal(signal.SIGTERM)
        eventually(lambda: lease(running, lease_id)["end_reason"] == "released", 10, running.story)


def test_a_script_that_dies_while_the_daemon_is_down_frees_its_gpus_after_the_restart(running: DaemonProcess) -> None:
    with script(running, 2) as process:
        lease_id = held(process)
        eventually(lambda: watched(running, process.pid), 2, running.story)
        running.kill()
        process.kill()
        process.wait()
        running.start()
        eventually(lambda: lease(running, lease_id)["end_reason"] == "holder_died", 10, running.story)
        eventually(lambda: free(running) == 4, 5, running.story)


def test_a_shell_that_asks_by_curl_owns_its_lease_for_as_long_as_it_lives(
    running: DaemonProcess, tmp_path: Path
) -> None:
    body = '{\\"count\\": 1, \\"owner_pid\\": $$}'
    url = "http://localhost/v1/leases"
    commands = f'curl -s --unix-socket {running.socket} -d "{body}" {url} > {tmp_path}/asked; echo asked; read line'
    with subprocess.Popen(["sh", "-c", commands], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "asked\n"
        with running.client() as client:
            (asked,) = client.leases("active")
            assert (asked.liveness, asked.holder.owner_pid) == ("process", shell.pid)
            eventually(lambda: watched(running, shell.pid), 2, running.story)
            shell.communicate("\n", timeout=10)
            eventually(lambda: client.lease_by_id(asked.id).end_reason == "holder_died", 2, running.story)
