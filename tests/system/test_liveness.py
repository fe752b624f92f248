"""Does a holder live? Real daemons, workers and scripts that are killed, stopped and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpulease_protocol.model import Lease, LeaseState
from tests.daemon import USUAL, DaemonProcess, events, eventually, workers_of

ENVIRONMENT = USUAL
HOLD = """
import signal, sys, gpulease
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
lease = gpulease.Client(sys.argv[1]).lease(int(sys.argv[2]), ttl_s=float(sys.argv[3]), wait_s=float(sys.argv[4]))
print("held", lease.id, flush=True)
for line in sys.stdin:
    print("lost" if lease.lost.is_set() else "mine", flush=True)
"""
"""Takes a lease and holds it; for each line it is sent it says whether the lease is lost."""


@contextmanager
def script(
    running: DaemonProcess, count: int = 1, *, ttl_s: float = 300, wait_s: float = 60, over: str = "socket"
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


def worker_pid(running: DaemonProcess) -> int:
    """The worker that the daemon supervises; 0 while there is none."""
    assert running.process is not None
    return next((worker.pid for worker in workers_of(running.process.pid)), 0)


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


@pytest.mark.alone
@pytest.mark.parametrize("over", ["socket", "tcp"])
def test_a_script_that_is_killed_frees_its_gpus_within_a_second(running: DaemonProcess, over: str) -> None:
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 1 and len(took_s) < 3):  # the machine may keep the daemon from running
        with script(running, 4, over=over) as process:
            lease_id = held(process)
            assert running.lease(lease_id)["liveness"] == "process"
            eventually(lambda: watched(running, process.pid), 60, running.story)
            process.kill()
            begun = time.monotonic()
            running.wait_free()
            took_s.append(time.monotonic() - begun)
        assert running.lease(lease_id)["end_reason"] == "holder_died"
    assert took_s[-1] < 1, took_s
    ended = [event for event in events(running) if event["reason"] == "holder_died" and event["lease_id"] == lease_id]
    assert [event["kind"] for event in ended] == ["lease.ended", "lease.lost"]


def test_a_script_that_is_killed_while_it_waits_is_never_granted_anything(running: DaemonProcess) -> None:
    with running.client() as client, client.lease(4, wait_s=60) as holder, script(running, 4, wait_s=300) as process:
        eventually(lambda: bool(client.leases("queued")), 60, running.story)
        (request,) = client.leases("queued")
        eventually(lambda: watched(running, process.pid), 60, running.story)
        process.kill()
        eventually(lambda: not client.leases("queued"), 60, running.story)
        holder.release()
        running.wait_free(30)
        ended = client.lease_by_id(request.id)
        assert (ended.end_reason, ended.granted_at) == ("holder_died", None)
    assert not [one for one in events(running) if one["lease_id"] == request.id and one["kind"] == "lease.granted"]


def test_a_stopped_script_keeps_its_lease_and_goes_on_with_it(running: DaemonProcess) -> None:
    with script(running, ttl_s=2) as process, running.client() as client:
        lease_id = held(process)
        eventually(lambda: watched(running, process.pid), 60, running.story)
        process.send_signal(signal.SIGSTOP)
        until_s = time.monotonic() + 6
        eventually(
            lambda: client.lease_by_id(lease_id).state is not LeaseState.ACTIVE or time.monotonic() > until_s, 30
        )
        assert client.lease_by_id(lease_id).state is LeaseState.ACTIVE
        process.send_signal(signal.SIGCONT)
        assert still(process) == "mine"
        until_s = left_s(client.lease_by_id(lease_id)) + time.time()
        eventually(lambda: left_s(client.lease_by_id(lease_id)) + time.time() > until_s + 0.1, 60, running.story)
        assert still(process) == "mine"


def is_past_its_deadline(lease: Lease) -> bool:
    """Its node is silent, and it is shown without a time limit."""
    return lease.expires_at is None and any("silent" in problem for problem in lease.problems)


def left_s(lease: Lease) -> float:
    """Seconds until it expires."""
    return 0.0 if lease.expires_at is None else (lease.expires_at - datetime.now(UTC)).total_seconds()


def test_a_stopped_script_keeps_its_lease_while_its_worker_is_stopped_too(running: DaemonProcess) -> None:
    """Its end would free nothing: the GPUs of a silent node are unknown."""
    with script(running, ttl_s=2) as process, running.client() as client:
        lease_id = held(process)
        eventually(lambda: left_s(client.lease_by_id(lease_id)) > 3, 60, running.story)  # its worker has seen it
        worker = worker_pid(running)
        os.kill(worker, signal.SIGSTOP)
        try:
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: is_past_its_deadline(client.lease_by_id(lease_id)), 30, running.story)
            assert client.lease_by_id(lease_id).state is LeaseState.ACTIVE
        finally:
            os.kill(worker, signal.SIGCONT)
        eventually(lambda: client.lease_by_id(lease_id).expires_at is not None, 30, running.story)
        process.send_signal(signal.SIGCONT)
        assert still(process) == "mine"


def test_a_worker_that_is_killed_and_started_again_watches_the_same_owners(running: DaemonProcess) -> None:
    with script(running) as process:
        lease_id = held(process)
        eventually(lambda: watched(running, process.pid), 60, running.story)
        former = worker_pid(running)
        os.kill(former, signal.SIGKILL)
        eventually(lambda: worker_pid(running) not in (0, former), 60, running.story)
        eventually(lambda: watched(running, process.pid), 60, running.story)
        assert still(process) == "mine"
        process.kill()
        eventually(lambda: running.lease(lease_id)["end_reason"] == "holder_died", 60, running.story)


def test_a_daemon_that_is_killed_and_started_again_is_not_noticed_by_the_script(running: DaemonProcess) -> None:
    with script(running, ttl_s=60) as process:
        lease_id = held(process)
        running.kill()
        running.start()
        eventually(lambda: watched(running, process.pid), 60, running.story)
        assert still(process) == "mine"
        assert running.lease(lease_id)["state"] == "active"
        process.send_signal(signal.SIGTERM)
        eventually(lambda: running.lease(lease_id)["end_reason"] == "released", 30, running.story)


def test_a_script_that_dies_while_the_daemon_is_down_frees_its_gpus_after_the_restart(running: DaemonProcess) -> None:
    with script(running, 2) as process:
        lease_id = held(process)
        eventually(lambda: watched(running, process.pid), 60, running.story)
        running.kill()
        process.kill()
        process.wait()
        running.start()
        eventually(lambda: running.lease(lease_id)["end_reason"] == "holder_died", 30, running.story)
        running.wait_free(30)


def test_a_shell_that_asks_by_curl_owns_its_lease_for_as_long_as_it_lives(
    running: DaemonProcess, tmp_path: Path
) -> None:
    body = '{\\"count\\": 1, \\"owner_pid\\": $$}'
    url = "http://localhost/v1/leases?wait_s=60"
    commands = f'curl -s --unix-socket {running.socket} -d "{body}" "{url}" > {tmp_path}/asked; echo asked; read line'
    with subprocess.Popen(["sh", "-c", commands], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "asked\n"
        with running.client() as client:
            (asked,) = client.leases("active")
            assert (asked.liveness, asked.holder.owner_pid) == ("process", shell.pid)
            eventually(lambda: watched(running, shell.pid), 60, running.story)
            shell.communicate("\n", timeout=60)
            eventually(lambda: client.lease_by_id(asked.id).end_reason == "holder_died", 60, running.story)


@contextmanager
def worker_service(running: DaemonProcess, node: str) -> Iterator[None]:
    """A worker that the daemon did not start, once it has reported; ended at the close."""
    words = ["worker", "--url", f"unix://{running.socket}", "--simulate", "1", "--node", node]
    data = running.socket.parent / node
    with subprocess.Popen([sys.executable, "-m", "gpulease_cli", *words, "--data-dir", data]) as worker:
        try:
            eventually(lambda: running.call("GET", f"/v1/nodes/{node}").status == 200, 60, running.story)
            yield
        finally:
            worker.terminate()
            worker.wait(60)


def test_a_worker_with_a_service_of_its_own_watches_the_holders_of_its_host(tmp_path: Path) -> None:
    """As the units run it: the daemon supervises no worker, and the worker of the same host reports to it.

    Its node had another name before, under which no worker reports any more.
    """
    running = DaemonProcess(tmp_path / "d", "--no-worker").start(ready=False)
    try:
        with worker_service(running, "former"):
            pass
        with worker_service(running, "present"), script(running) as process:
            lease_id = held(process)
            assert running.lease(lease_id)["liveness"] == "process"
            process.kill()
            eventually(lambda: running.lease(lease_id)["end_reason"] == "holder_died", 60, running.story)
    finally:
        running.stop()
