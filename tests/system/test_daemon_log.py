"""The log of a daemon against what it decided, and a search for secrets in it."""

from __future__ import annotations

import getpass
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gpulease import Client, LeaseState, NotNow
from gpulease_protocol.requests import JobRequest, LeaseRequest
from gpulease_protocol.tokens import Role, TokenRequest
from tests.daemon import PATIENT, DaemonProcess, events, eventually
from tests.databases import PASSWORD
from tests.system.hardware import GIB, Hardware

TOKEN, SECRET = "t0ken-of-the-tests", "s3cret-of-a-job"
IDS = ("seq", "cause", "lease_id", "job_id", "node", "token", "reason")


def lines(running: DaemonProcess) -> list[dict[str, Any]]:
    """What daemon and worker have logged: each whole line is an object."""
    return [json.loads(line) for line in running.output.read_text().split("\n")[:-1]]


def logged(running: DaemonProcess, event: str, **fields: Any) -> list[dict[str, Any]]:
    return [line for line in lines(running) if line.get("event") == event and line.items() >= fields.items()]


def live(running: DaemonProcess, hardware: Hardware, tmp_path: Path) -> str:
    """Have the daemon decide on a little of everything. Returns the bearer token that was used."""
    with Client(running.url) as administrator:
        bearer = administrator.create_token(TokenRequest(user=getpass.getuser(), role=Role.ADMIN)).bearer
    with Client(running.url, token=bearer) as client:
        held = client.request_lease(LeaseRequest(count=2, label="held\nERROR forged"), 60)
        with pytest.raises(NotNow):
            client.request_lease(LeaseRequest(count=2, queue=False))
        waiting = client.request_lease(LeaseRequest(count=2))
        assert waiting.state is LeaseState.QUEUED
        hardware.set_wrong({0: {"processes": [{"pid": 3999999, "memory_bytes": GIB}]}})
        eventually(lambda: bool(logged(running, "gpu.conflict", lease_id=held.id)), 60, running.story)
        hardware.set_wrong({})
        client.release(held.id, held.fencing_token)
        eventually(lambda: client.lease_by_id(waiting.id).state is LeaseState.ACTIVE, 60, running.story)
        granted = client.lease_by_id(waiting.id)
        client.release(granted.id, granted.fencing_token)
        program = [sys.executable, "-c", f"print({SECRET!r}); raise SystemExit(3)"]
        environment = {"WANDB_API_KEY": SECRET}
        job = client.submit(
            JobRequest(
                command=program,
                gpus=1,
                launcher="plain",
                environment=environment,
                working_directory=str(tmp_path),
            )
        )
        assert client.wait_job(job.id, 60.0).exit_code == 3
        client.cordon_gpu(hardware.uuids[1])
        client.drain_node("n")
        running.call("GET", "/no/such/thing?token=" + bearer, Authorization=f"Bearer {TOKEN}")
        running.call("POST", "/v1/leases", raw=b'{"' + bearer.encode(), **{"Content-Type": "application/json"})
        return bearer


def test_every_decision_has_a_line_and_no_line_has_a_secret(postgres_url: str, tmp_path: Path) -> None:
    hardware = Hardware(tmp_path / "hardware.json", gpus=3)
    options = ("--simulate", str(hardware.path), "--node", "n", "--log-level", "debug")
    environment = PATIENT | {"GPULEASE_DATABASE_URL": postgres_url, "GPULEASE_TOKEN": TOKEN}
    running = DaemonProcess(tmp_path / "d", *options, environment=environment)
    try:
        running.start()
        bearer = live(running, hardware, tmp_path)
        recorded = events(running)
    finally:
        running.stop()

    found = {line["seq"]: line for line in lines(running) if line["logger"] == "gpulease.decisions" and "seq" in line}
    for event in recorded:
        line = found[event["seq"]]
        assert line["event"] == line["message"] == event["kind"]
        assert {name: line.get(name) for name in IDS} == {name: event[name] for name in IDS}
        assert line.get("gpus", []) == event["gpus"]
    kinds = {event["kind"] for event in recorded}
    assert kinds >= {
        "lease.granted",
        "lease.queued",
        "lease.ended",
        "gpu.clean",
        "gpu.conflict",
        "job.starting",  # and running, unless it has ended before anyone has looked
        "job.ended",
    }
    assert kinds >= {"node.ready", "node.drained", "gpu.cordoned"}
    assert logged(running, "lease.granted")[0]["user"]
    assert {line["level"] for line in logged(running, "gpu.conflict")} == {"warning"}
    (refused,) = logged(running, "refused")
    assert refused["code"] == "not_now"
    assert "asked for 2 GPUs" in refused["reason"]
    assert logged(running, "request", path="/no/such/thing", status=404, method="GET")
    assert {line["program"] for line in lines(running)} == {"serve", "worker"}
    (exited,) = logged(running, "job.exited", program="worker")
    assert exited["exit_code"] == 3

    assert PASSWORD in postgres_url
    supervisors = [path.read_text() for path in (tmp_path / "d").rglob("supervisor.log")]
    assert len(supervisors) == 1
    for text in (running.output.read_text(), *supervisors):
        for secret in (PASSWORD, TOKEN, bearer, SECRET):
            assert secret not in text


def test_a_log_for_people_where_that_is_wanted(tmp_path: Path) -> None:
    running = DaemonProcess(tmp_path / "d", "--simulate", "1", "--log-format", "human", environment=PATIENT)
    try:
        running.start()
        with running.client() as client:
            lease = client.request_lease(LeaseRequest(count=1), 60)
    finally:
        running.stop()
    text = running.output.read_text()
    assert re.search(rf"INFO    lease.granted seq=\d+ lease_id={lease.id} node=", text)
    addresses = (running.url, f"http://[::1]:{running.port}", f"unix://{running.socket}")
    assert f"INFO    gpulease listens on {' and '.join(addresses)}\n" in text
    assert text.endswith("INFO    gpulease has stopped\n")
    assert '{"' not in text
