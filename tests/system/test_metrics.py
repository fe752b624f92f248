"""What a job's GPUs showed, through the whole of it: daemon, worker, a simulation that changes while a job runs."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Hardware
from tests.daemon import USUAL, DaemonProcess, daemon, eventually
from tests.imported_program import completed

GATE = """import os, sys, time
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
sys.exit(int(open(sys.argv[1]).read()))"""


@pytest.fixture(scope="module")
def hardware(tmp_path_factory: pytest.TempPathFactory) -> Hardware:
    made = Hardware(tmp_path_factory.mktemp("hardware") / "hardware.json")
    made.show({}, {}, {})
    return made


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory, hardware: Hardware) -> Iterator[DaemonProcess]:
    with daemon(
        tmp_path_factory.mktemp("metrics"), "--simulate", str(hardware.path), "--node", "n1", **USUAL
    ) as started:
        yield started


@pytest.fixture
def running(shared_daemon: DaemonProcess, hardware: Hardware) -> DaemonProcess:
    """The file's daemon with all GPUs idle and free."""
    hardware.show({}, {}, {})
    shared_daemon.give_everything_back()
    return shared_daemon


def show(running: DaemonProcess, hardware: Hardware, *gpus: dict[str, Any]) -> None:
    """Change the hardware, and wait until the daemon has read it: what a job shows is then of its own time."""
    hardware.show(*gpus)

    def is_read() -> bool:
        shown = zip(gpus, running.gpus(), strict=True)
        return all(gpu[name] == value for what, gpu in shown for name, value in what.items())

    eventually(is_read, 60, running.story)


def submit(running: DaemonProcess, gate: Path, **what: Any) -> str:
    """A job that runs until there is an exit code in a file."""
    job_id = running.submit(sys.executable, "-c", GATE, str(gate), **what)
    running.wait_job(job_id, "running")
    return job_id


def metrics(running: DaemonProcess, job_id: str, query: str = "") -> dict[str, Any]:
    answer = running.call("GET", f"/v1/jobs/{job_id}/metrics{query}")
    assert answer.status == 200, answer.content
    found: dict[str, Any] = answer.json
    return found


def known(running: DaemonProcess, job_id: str, measure: str = "utilization_ratio", gpu: int = 0) -> list[float]:
    """The means of one GPU in the last attempt, without the gaps."""
    attempts = metrics(running, job_id)["attempts"]
    return [] if not attempts else [one for one in attempts[-1]["gpus"][gpu][measure]["mean"] if one is not None]


def let_end(gate: Path, code: int = 0) -> None:
    gate.with_suffix(".new").write_text(str(code))
    gate.with_suffix(".new").replace(gate)


def seconds_between(first: str, last: str) -> float:
    return (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()


@pytest.mark.budget(30)
def test_utilization_that_changes_while_a_job_runs_is_kept_over_restarts(
    running: DaemonProcess, hardware: Hardware, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    show(running, hardware, {"utilization_ratio": 0.25, "power_w": 200}, {"utilization_ratio": None, "power_w": 90}, {})
    job_id = submit(running, gate, gpus=2)
    eventually(lambda: known(running, job_id).count(0.25) >= 3, 60, running.story)
    hardware.show({"utilization_ratio": 0.75, "power_w": 400}, {"utilization_ratio": None, "power_w": 90}, {})
    eventually(lambda: known(running, job_id).count(0.75) >= 2, 60, running.story)
    running.stop()
    running.start()
    kept = known(running, job_id)  # the bucket that was being filled when they were counted may have become a mixed one
    assert kept.count(0.25) >= 2, "lost in the restart"
    assert kept.count(0.75) >= 1, "lost in the restart"
    hardware.show({"utilization_ratio": 1.0, "power_w": 700}, {"utilization_ratio": None, "power_w": 90}, {})
    eventually(lambda: known(running, job_id).count(1.0) >= 2, 60, running.story)
    let_end(gate)
    running.wait_job(job_id, "succeeded")
    ended = metrics(running, job_id)
    (attempt,) = ended["attempts"]
    busy, mute = attempt["gpus"]
    assert busy["uuid"] == hardware.uuid(0)
    ratios = [one for one in busy["utilization_ratio"]["mean"] if one in (0.25, 0.75, 1.0)]
    assert ratios == sorted(ratios)
    assert max(one for one in busy["power_w"]["max"] if one is not None) == 700
    assert set(mute["utilization_ratio"]["mean"]) == {None}, "what the driver cannot tell has become a number"
    assert (mute["gpu_hours_used"], mute["gpu_hours_unknown"]) == (0, mute["gpu_hours_held"])
    used_s = sum(
        mean * seconds
        for mean, seconds in zip(busy["utilization_ratio"]["mean"], busy["utilization_ratio"]["known_s"], strict=True)
        if mean is not None
    )
    assert busy["gpu_hours_used"] * 3600 == pytest.approx(used_s, rel=0.01)
    eventually(lambda: metrics(running, job_id) == ended, 60)
    running.stop()
    running.start()
    assert metrics(running, job_id) == ended, "an ended job's metrics are not what they were"


def test_a_daemon_that_is_killed_loses_no_gpu_hours_held_and_says_what_it_does_not_know(
    running: DaemonProcess, hardware: Hardware, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    show(running, hardware, {"utilization_ratio": 1.0}, {}, {})
    job_id = submit(running, gate)
    eventually(lambda: known(running, job_id).count(1.0) >= 2, 60, running.story)
    running.kill()
    running.start()
    eventually(lambda: known(running, job_id).count(1.0) >= 1, 60, running.story)
    let_end(gate)
    running.wait_job(job_id, "succeeded")
    found, job = metrics(running, job_id), running.call("GET", f"/v1/jobs/{job_id}").json
    lease = running.call("GET", f"/v1/leases/{job['lease_id']}").json
    held_s = seconds_between(lease["granted_at"], lease["ended_at"])
    assert found["gpu_hours_held"] * 3600 == pytest.approx(held_s, rel=0.01)
    assert held_s >= seconds_between(job["started_at"], job["ended_at"]) * 0.99
    assert found["gpu_hours_unknown"] > 0
    total = found["gpu_hours_used"] + found["gpu_hours_unknown"]
    assert total == pytest.approx(found["gpu_hours_held"], rel=0.01), "fully used, so the rest is unknown"


def test_a_driver_that_hangs_leaves_a_gap(running: DaemonProcess, hardware: Hardware, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    show(running, hardware, {"utilization_ratio": 0.5}, {}, {})
    job_id = submit(running, gate)
    eventually(lambda: known(running, job_id).count(0.5) >= 2, 60, running.story)

    def unknown_s() -> float:
        return float(metrics(running, job_id)["gpu_hours_unknown"]) * 3600

    before_s = unknown_s()  # from the grant to the first reading
    hardware.show({"utilization_ratio": 0.5}, {}, {}, hang_s=600)
    eventually(lambda: unknown_s() > before_s + 5, 60, running.story)
    hardware.show({"utilization_ratio": 1.0}, {}, {})
    eventually(lambda: known(running, job_id).count(1.0) >= 1, 60, running.story)
    means = metrics(running, job_id)["attempts"][0]["gpus"][0]["utilization_ratio"]["mean"]
    first_before = means.index(0.5)
    assert None in means[first_before : means.index(1.0)], "the time between was made up"
    let_end(gate)


def test_every_attempt_is_shown_with_its_own_gpus(running: DaemonProcess, hardware: Hardware, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    show(running, hardware, {"utilization_ratio": 0.5}, {"utilization_ratio": 0.5}, {"utilization_ratio": 0.5})
    job_id = submit(running, gate, retries=1)
    eventually(lambda: len(known(running, job_id)) >= 1, 60, running.story)
    let_end(gate, 3)
    running.wait_job(job_id, "failed")
    found = metrics(running, job_id)
    assert [attempt["attempt"] for attempt in found["attempts"]] == [1, 2]
    assert found["gpu_hours_held"] == pytest.approx(sum(one["gpu_hours_held"] for one in found["attempts"]))
    assert all(attempt["held_until_at"] for attempt in found["attempts"])


def test_formats_bounds_and_refusals(running: DaemonProcess, hardware: Hardware, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    show(running, hardware, {"utilization_ratio": 0.5}, {"utilization_ratio": None}, {})
    job_id = submit(running, gate, gpus=2)
    eventually(lambda: len(known(running, job_id)) >= 4, 60, running.story)
    let_end(gate)
    running.wait_job(job_id, "succeeded")
    address = f"/v1/jobs/{job_id}/metrics"
    by_query, by_header = running.call("GET", f"{address}?format=csv"), running.call("GET", address, Accept="text/csv")
    assert by_query.headers["content-type"] == by_header.headers["content-type"] == "text/csv; charset=utf-8"
    assert by_query.content == by_header.content
    lines = list(csv.DictReader(io.StringIO(by_query.content.decode())))
    assert {line["uuid"] for line in lines} == {hardware.uuid(0), hardware.uuid(1)}
    assert {line["utilization_ratio_mean"] for line in lines if line["index"] == "1"} == {"nan"}
    assert [float(line["start_s"]) for line in lines if line["index"] == "0"] == list(range(len(lines) // 2))
    asked_for_json = running.call("GET", f"{address}?format=json", Accept="text/csv")
    assert asked_for_json.headers["content-type"] == "application/json"
    thin = metrics(running, job_id, "?points=2")["attempts"][0]["gpus"][0]
    assert len(thin["start_at"]) <= 2
    whole = metrics(running, job_id)["attempts"][0]["gpus"][0]
    assert thin["gpu_hours_used"] == pytest.approx(whole["gpu_hours_used"])
    assert running.call("GET", "/v1/jobs/no-such-job/metrics").problem() == (404, "not_found")
    for wrong in ("?points=0", "?points=601", "?format=xml"):
        assert running.call("GET", address + wrong).problem() == (422, "invalid_request")
    with running.client() as client:
        assert client.job_metrics(job_id).attempts[0].gpus[0].uuid == hardware.uuid(0)
        assert client.job_metrics_csv(job_id) == by_query.content.decode()


def test_a_job_that_waits_has_no_metrics_yet(running: DaemonProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    submit(running, gate, gpus=3)
    body = {"command": ["true"], "launcher": "plain"}
    waiting = running.call("POST", "/v1/jobs", body).json["id"]
    assert metrics(running, waiting)["attempts"] == []
    shown = program(running, "metrics", waiting)
    assert (shown.returncode, "has not been granted a GPU yet" in shown.stdout) == (0, True)
    let_end(gate)


def test_the_command_shows_hours_and_a_line_over_time(
    running: DaemonProcess, hardware: Hardware, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    show(
        running,
        hardware,
        {"utilization_ratio": 1.0, "temperature_c": 61, "power_w": 512},
        {"utilization_ratio": None},
        {},
    )
    job_id = submit(running, gate, gpus=2)
    eventually(lambda: len(known(running, job_id)) >= 3, 60, running.story)
    let_end(gate)
    running.wait_job(job_id, "succeeded")
    shown = program(running, "metrics", job_id)
    assert shown.returncode == 0, shown.stderr
    heads, busy, mute, _, total = shown.stdout.splitlines()
    assert heads.split()[:5] == ["ATTEMPT", "GPU", "HELD", "USED", "UNKNOWN"]
    assert all(word in busy for word in ("n1:0", "100%", "512 W", "max 61 C", "██"))
    assert all(word in mute for word in ("n1:1", "?", "··"))
    assert total.startswith("GPU-hours: ")
    assert json.loads(program(running, "metrics", job_id, "--json").stdout) == metrics(running, job_id)
    assert program(running, "metrics", job_id, "--csv").stdout.startswith("attempt,node,index,uuid,start_at")
    both = program(running, "metrics", job_id, "--csv", "--json")
    assert (both.returncode, "Use one of them" in both.stderr) == (2, True)
    missing = program(running, "metrics", "no-such-job")
    assert (missing.returncode, "no-such-job" in missing.stderr) == (1, True)


def test_a_gpu_and_a_lease_without_a_job_are_plotted(running: DaemonProcess, hardware: Hardware) -> None:
    show(running, hardware, {"utilization_ratio": 1.0, "power_w": 512}, {}, {})
    lease = running.call("POST", "/v1/leases", {"count": 1}).json
    path = f"/v1/leases/{lease['id']}/metrics"
    eventually(lambda: running.call("GET", path).json["gpu_hours_used"] > 0, 60, running.story)
    shown = program(running, "metrics", lease["id"])
    assert (shown.returncode, "n1:0" in shown.stdout, "512 W" in shown.stdout) == (0, True, True), shown.stderr
    for name in (lease["id"], "n1:0", "0", hardware.uuid(0)):
        drawn = program(running, "metrics", "--plot", name)
        assert (drawn.returncode, "Power: mean" in drawn.stdout) == (0, True), drawn.stderr
        assert max(map(len, drawn.stdout.splitlines())) <= 80
    assert "From 20" in program(running, "metrics", "0", "--since", "2d").stdout
    document = json.loads(program(running, "metrics", "0", "--json").stdout)
    assert document["uuid"] == hardware.uuid(0)
    for wrong in (("--since", "2d", lease["id"]), ("--csv", "0"), ("--csv", lease["id"]), ("--csv", "--plot", "x")):
        refused = program(running, "metrics", *wrong)
        assert (refused.returncode, "--" in refused.stderr) == (2, True), wrong


def program(running: DaemonProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return completed(words, {**os.environ, "GPULEASE_URL": running.url, "PYTHONIOENCODING": "utf-8"}, 60)
