"""What a worker hears, and how old its readings count: the ticket of the oldest part decides."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease_protocol.codec import to_json
from gpulease_protocol.host.process_id import realm
from gpulease_protocol.model import Process
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import NodeObservation, NodeRecord
from tests.daemon import Answer, DaemonProcess

UUID = "GPU-00000000-0000-0000-0000-0000000000aa"


class Worker:
    """Plays the worker of a node with one idle GPU, one report at a time."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon

    def report(
        self, *, ticket: int | None, seen: int | None = None, hold_s: float = 0.05, **more: Any
    ) -> dict[str, Any]:
        """The daemon's answer to a report."""
        reading = {"uuid": UUID, "node": "n", "index": 0, "memory_total_bytes": 1 << 30, "memory_used_bytes": 0}
        body = {"worker_id": "w", "host": "h", "ticket": ticket, "seen": seen, "gpus": [reading], "hold_s": hold_s}
        body |= more
        answer = self.daemon.call("POST", "/v1/nodes/n/exchange", body)
        assert answer.status == 200, answer.json
        found: dict[str, Any] = answer.json
        return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    process = DaemonProcess(tmp_path / "d", "--no-worker")
    try:
        yield process.start(ready=False)
    finally:
        process.stop()


def test_a_complete_reading_is_requested_for_news_and_not_after_a_timeout(running: DaemonProcess) -> None:
    worker = Worker(running)
    first = worker.report(ticket=None)
    assert first["fresh"], "the worker has seen nothing yet"
    second = worker.report(ticket=first["ticket"])
    assert not second["fresh"], "its time was over"
    third = worker.report(ticket=first["ticket"], seen=second["ticket"], hold_s=0.3)
    assert not third["fresh"], "it was held: the worker has seen all, although its reading is older"


def test_a_grant_waits_for_a_reading_that_began_after_it_was_requested(running: DaemonProcess) -> None:
    worker = Worker(running)
    old = worker.report(ticket=None)["ticket"]
    seen = worker.report(ticket=old)["ticket"]
    worker.report(ticket=old, seen=seen, hold_s=0.6)  # now the reading is older than a grant may rest on
    answers: list[Answer] = []
    asking = threading.Thread(
        target=lambda: answers.append(running.call("POST", "/v1/leases?wait_s=60", {"count": 1, "ttl_s": 60}))
    )
    asking.start()
    try:
        wanted = worker.report(ticket=old, seen=seen, hold_s=1)
        for _ in range(20):  # the request may be on its way still
            if wanted["fresh"]:
                break
            wanted = worker.report(ticket=old, seen=wanted["ticket"], hold_s=1)
        again = worker.report(ticket=old, seen=wanted["ticket"], hold_s=0.2)
        assert again["fresh"], "a reading with an older part is no answer: asked once more, at once"
        assert not answers, "and nothing was granted on it"
        worker.report(ticket=again["ticket"])
    finally:
        asking.join(60)
    assert [answer.status for answer in answers] == [201]


def test_a_node_shows_the_address_that_its_worker_reports_and_none_that_is_not_one(running: DaemonProcess) -> None:
    worker = Worker(running)
    assert (running.get("/v1/nodes/n").status, worker.report(ticket=None)["ticket"] > 0) == (404, True)
    assert [running.get("/v1/nodes/n").json[key] for key in ("address", "interface")] == [None, None]
    worker.report(ticket=None, address="10.0.0.7", interface="eth0")
    assert [running.get("/v1/nodes").json["items"][0][key] for key in ("address", "interface")] == ["10.0.0.7", "eth0"]
    for field, values in {"address": ("gpubox", "10.0.0.7\n"), "interface": ("eth0,eth1", "a b", "x" * 16, "")}.items():
        for value in values:
            body = {"worker_id": "w", "host": "h", field: value}
            refused = running.call("POST", "/v1/nodes/n/exchange", body)
            assert refused.problem() == (422, "invalid_request"), value
            assert refused.json["detail"].startswith(f"{field}: must be"), value


NOT_NAMES = ("", " ", "..", "GPU-a/b", "GPU-a,GPU-b", "GPU-a b", "gpu-aa", "GPU-AA", "GPU-\n", "GPU-" + "a" * 93)


def test_a_report_names_all_processes_that_a_large_job_has_left(running: DaemonProcess) -> None:
    """600 of them, each with the files of 8 GPUs open: the workers of data loaders, of which the parents are gone."""
    command = "python train.py " + "x" * 200
    left = [to_json(Process(pid=1000 + number, user="ada", command=command)) for number in range(600)]
    gpus = [{"uuid": f"{UUID[:-1]}{index}", "node": "n", "index": index, "opened_by": left} for index in range(8)]
    assert len(json.dumps(gpus)) > 2**20
    assert json.dumps(gpus).count(",") > 16384
    Worker(running).report(ticket=None, gpus=gpus)
    assert len(running.get("/v1/gpus").json["items"]) == 8


def test_a_gpu_with_an_invalid_uuid_is_refused(running: DaemonProcess) -> None:
    for uuid in NOT_NAMES:
        gpus = [{"uuid": UUID, "node": "n", "index": 0}, {"uuid": uuid, "node": "n", "index": 1}]
        answer = running.call("POST", "/v1/nodes/n/exchange", {"worker_id": "w", "host": "h", "gpus": gpus})
        assert answer.status == 422, uuid
        assert answer.json["detail"].startswith("gpus.1.uuid: must be spelled as CUDA spells it"), uuid
    claimed = [{"device": {"uuid": NOT_NAMES[2], "node": "n", "index": 0}, "reason": "another has it"}]
    body = {"worker_id": "w", "host": "h", "claimed_elsewhere": claimed}
    answer = running.call("POST", "/v1/nodes/n/exchange", body)
    assert answer.json["detail"].startswith("claimed_elsewhere.0.uuid: must be spelled as CUDA spells it")
    assert running.call("GET", "/v1/gpus").json["items"] == [], "a report is taken as a whole or not at all"


def test_a_log_that_lies_elsewhere_is_not_opened_and_the_answer_says_where_it_is(running: DaemonProcess) -> None:
    """The daemon may run as root: a path is opened only if it is the one that a worker makes for that job."""
    worker, begun = Worker(running), "2026-11-22T00:00:00Z"
    answer = worker.report(ticket=None)
    job_id = running.submit("/bin/true")
    while not answer["jobs"]:
        answer = worker.report(ticket=answer["ticket"], hold_s=1.0)
    job = {"job_id": job_id, "state": "running", "started_at": begun, "log_directory": "/etc"}
    worker.report(ticket=answer["ticket"], jobs=[job])
    for query in ("", "?follow=1", "?rank=0"):
        refused = running.get(f"/v1/jobs/{job_id}/logs{query}")
        assert refused.problem() == (404, "not_found")
        assert (
            "is on node n, in /etc, and the worker there is of a release that does not send" in refused.json["detail"]
        )


@pytest.mark.parametrize(("supervised", "expected"), [(None, "later"), ("elsewhere", "elsewhere")])
def test_one_node_is_here_however_many_report_and_it_is_the_one_that_watches(
    supervised: str | None, expected: str
) -> None:
    ledger = Ledger()
    for at_s, (name, place) in enumerate(
        [("elsewhere", "x/1"), ("earlier", realm()), ("later", realm()), ("old", None)]
    ):
        ledger.apply(NodeRecord(name=name, host=name))
        ledger.apply(NodeObservation(node=name, worker_id=name, reported_at_s=at_s, observed_at_s=None, realm=place))
    unused: Any = None
    writer: Any = SimpleNamespace(committed=ledger)
    daemon = DaemonState(
        writer=writer, store=unused, tickets=unused, recorder=unused, host="here", local_node=supervised
    )
    assert daemon.node_here() == expected
