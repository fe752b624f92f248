"""Hosts that are cut off: what a cut means for jobs and holders there. Each has a disk and process ids of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId
from tests.daemon import eventually
from tests.host_fleet import Fleet, fleet
from tests.hosts import Host

pytestmark = [pytest.mark.slow, pytest.mark.budget(180)]

FENCE_S = 10.0
CERTAIN_S = FENCE_S + 30.0
TICKING = "while :; do date +%s.%N >> {ticks}; sleep 0.2; done"
"""A job that shows when it runs, in a file that the tests see."""

HOLD = """
import gpulease, signal
lease = gpulease.Client().lease(1, ttl_s=600, wait_s=60, node="{node}")
print(lease.id, flush=True)
signal.pause()
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[Fleet, dict[str, Host]]]:
    """Two hosts with a GPU each."""
    with fleet(tmp_path) as made:
        hosts = {name: made.host(name) for name in ("n1", "n2")}
        for name, host in hosts.items():
            made.start_worker(host, name, 1)
        yield made, hosts


def submit(made: Fleet, ticks: Path, **fields: object) -> tuple[str, str]:
    """A job that writes when it runs; its id, and its node once it runs."""
    job_id = made.daemon.submit("sh", "-c", TICKING.format(ticks=ticks), **fields)
    made.daemon.wait_job(job_id, "running", within_s=120)
    eventually(lambda: len(last(ticks)) > 0, 60)
    return job_id, made.daemon.job(job_id)["gpus"][0]["node"]


def last(ticks: Path) -> list[float]:
    """When it ran."""
    text = ticks.read_text() if ticks.exists() else ""
    return [float(line) for line in text.splitlines()]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def two_attempts_never_ran_at_once(first: list[float], second: list[float]) -> None:
    assert first
    assert second
    assert max(first) < min(second), "the next attempt began before the one before had ended"


@pytest.mark.parametrize("fault", ["the link is cut", "the worker is stopped", "the worker is killed"])
def test_a_fenced_job_ends_on_its_node_and_then_starts_on_another(
    lab: tuple[Fleet, dict[str, Host]], tmp_path: Path, fault: str
) -> None:
    made, hosts = lab
    script = TICKING.format(ticks=f"{tmp_path}/ticks-$(hostname)")
    job_id = made.daemon.submit("sh", "-c", script, retries=1, fence_s=FENCE_S)
    made.daemon.wait_job(job_id, "running", within_s=120)
    node = made.daemon.job(job_id)["gpus"][0]["node"]
    other = "n2" if node == "n1" else "n1"
    first, second = tmp_path / f"ticks-{node}", tmp_path / f"ticks-{other}"
    eventually(lambda: len(last(first)) > 0, 60)
    pid = made.worker_pid(node)
    match fault:
        case "the link is cut":
            hosts[node].cut()
        case "the worker is stopped":
            os.kill(pid, signal.SIGSTOP)
        case "the worker is killed":
            made.kill_worker(node)
    begun_s = time.time()
    eventually(lambda: len(last(second)) > 0, CERTAIN_S + 180, lambda: made.story(node))
    two_attempts_never_ran_at_once(last(first), last(second))
    assert max(last(first)) - begun_s < FENCE_S + 20, "the fence was late"
    job = made.daemon.job(job_id)
    assert job["attempts"] == 2
    assert "the job's fence is 10 s" in job["attempt_history"][0]["reason"]
    if fault == "the link is cut":
        hosts[node].repair()
    if fault == "the worker is stopped":
        os.kill(pid, signal.SIGCONT)
    if fault != "the worker is killed":
        eventually(lambda: made.states(node) == ["free"], 120, lambda: made.story(node))
    assert made.daemon.job(job_id)["attempts"] == 2
    made.daemon.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 0})
    made.daemon.wait_job(job_id)


def test_a_short_cut_and_restarts_of_worker_and_daemon_cost_nothing(
    lab: tuple[Fleet, dict[str, Host]], tmp_path: Path
) -> None:
    made, hosts = lab
    fenced, surviving = tmp_path / "fenced", tmp_path / "surviving"
    job_id, node = submit(made, fenced, retries=1, fence_s=40.0)
    other_id, other = submit(made, surviving)
    assert node != other
    hosts[node].cut()
    hosts[other].cut()
    eventually(lambda: set(made.states(node) + made.states(other)) == {"unknown"}, 60)
    made.daemon.kill()
    made.daemon.start(ready=False)
    made.kill_worker(node)
    hosts[node].repair()
    hosts[other].repair()
    made.launch_worker(hosts[node], node, 1)
    eventually(lambda: set(made.states(node) + made.states(other)) == {"leased"}, 120, lambda: made.story(node))
    for one, ticks in ((job_id, fenced), (other_id, surviving)):
        assert made.daemon.job(one)["state"] == "running"
        assert made.daemon.job(one)["attempts"] == 1
        count = len(last(ticks))
        eventually(lambda ticks=ticks, count=count: len(last(ticks)) > count, 60)  # type: ignore[misc]


def test_a_holder_on_one_host_with_gpus_of_another_is_watched_by_its_own_worker(
    lab: tuple[Fleet, dict[str, Host]],
) -> None:
    made, hosts = lab
    command = hosts["n1"].command(sys.executable, "-c", HOLD.format(node="n2"), **made.client())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        lease_id = holder.stdout.readline().strip()
        lease = made.daemon.lease(lease_id)
        assert [gpu["node"] for gpu in lease["gpus"]] == ["n2"]
        assert lease["liveness"] == "process"
        assert lease["holder"]["host"] == "n1"

        hosts["n1"].cut()  # its worker is silent, and it lives on
        eventually(lambda: made.states("n1") == ["unknown"], 60)
        time.sleep(5)
        assert made.daemon.lease(lease_id)["state"] == "active"
        hosts["n1"].repair()
        eventually(lambda: made.states("n1") == ["free"], 60, lambda: made.story("n1"))
        assert made.daemon.lease(lease_id)["state"] == "active"

        killed_s = time.monotonic()
        (pid,) = children(holder.pid) or [holder.pid]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: made.daemon.lease(lease_id)["state"] == "ended", 30, lambda: made.story("n1"))
        print(f"ended after {time.monotonic() - killed_s:.2f} s")
        assert made.daemon.lease(lease_id)["end_reason"] == "holder_died"
        eventually(lambda: made.states("n2") == ["free"], 60)


def test_a_training_inside_a_job_finds_its_devices_and_its_log_is_read_from_anywhere(
    lab: tuple[Fleet, dict[str, Host]],
) -> None:
    made, hosts = lab
    client = made.client()
    program = "import gpulease; print('devices', gpulease.find_usable_cuda_devices(1), flush=True)"
    job_id = (
        hosts["n2"].gpulease("submit", "--node", "n1", "--", sys.executable, "-c", program, **client).stdout.strip()
    )
    assert made.daemon.wait_job(job_id, within_s=120)["state"] == "succeeded", made.daemon.job(job_id)
    for host in hosts.values():
        read = host.gpulease("logs", job_id, **client)
        assert read.stdout == "devices [0]\n", read.stderr
    shown = json.loads(hosts["n2"].gpulease("show", "--json", job_id, **client).stdout)
    assert "GPULEASE_TOKEN" not in json.dumps(shown)


def test_nothing_of_a_process_is_left_of_a_host_that_is_off() -> None:
    """What these tests rest on."""
    from tests.hosts import switch  # noqa: PLC0415

    with switch() as network:
        host = network.boot("n")
        (pid,) = [int(word) for word in host.sh("sleep 600 > /dev/null 2>&1 & echo $!").split()]
        inside = ProcessId.of(host.init)
        assert pid > 1
        host.power_off()
        assert inside is not None
        eventually(lambda: not inside.alive(), 60)
