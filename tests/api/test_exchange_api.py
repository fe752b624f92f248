"""What a worker hears, and how old its readings count: the ticket of the oldest part decides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Answer, DaemonProcess

UUID = "GPU-00000000-0000-0000-0000-0000000000aa"


class Worker:
    """Plays the worker of a node with one idle GPU, one report at a time."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon

    def report(self, *, ticket: int | None, seen: int | None = None, hold_s: float = 0.05) -> dict[str, Any]:
        """The daemon's answer to a report."""
        reading = {"uuid": UUID, "node": "n", "index": 0, "memory_total_bytes": 1 << 30, "memory_used_bytes": 0}
        body = {"worker_id": "w", "host": "h", "ticket": ticket, "seen": seen, "gpus": [reading], "hold_s": hold_s}
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


def test_a_whole_reading_is_asked_for_when_something_is_new_and_not_when_time_is_over(running: DaemonProcess) -> None:
    worker = Worker(running)
    first = worker.report(ticket=None)
    assert first["fresh"], "the worker has seen nothing yet"
    second = worker.report(ticket=first["ticket"])
    assert not second["fresh"], "its time was over"
    third = worker.report(ticket=first["ticket"], seen=second["ticket"], hold_s=0.3)
    assert not third["fresh"], "it was held: the worker has seen all, although its reading is older"


def test_a_grant_waits_for_a_reading_whose_oldest_part_was_begun_after_it_was_asked_for(running: DaemonProcess) -> None:
    worker = Worker(running)
    old = worker.report(ticket=None)["ticket"]
    seen = worker.report(ticket=old)["ticket"]
    worker.report(ticket=old, seen=seen, hold_s=0.6)  # now the reading is older than a grant may rest on
    answers: list[Answer] = []
    asking = threading.Thread(
        target=lambda: answers.append(running.call("POST", "/v1/leases?wait_s=20", {"count": 1, "ttl_s": 60}))
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
        asking.join(30)
    assert [answer.status for answer in answers] == [201]


NOT_NAMES = ("", " ", "..", "GPU-a/b", "GPU-a,GPU-b", "GPU-a b", "gpu-aa", "GPU-AA", "GPU-\n", "GPU-" + "a" * 93)


def test_a_gpu_that_nobody_could_name_is_refused(running: DaemonProcess) -> None:
    for uuid in NOT_NAMES:
        gpus = [{"uuid": UUID, "node": "n", "index": 0}, {"uuid": uuid, "node": "n", "index": 1}]
        answer = running.call("POST", "/v1/nodes/n/exchange", {"worker_id": "w", "host": "h", "gpus": gpus})
        assert answer.status == 422, uuid
        assert answer.json["detail"].startswith("gpus.1.uuid: must be spelled as CUDA takes it"), uuid
    assert running.call("GET", "/v1/gpus").json["items"] == [], "a report is taken as a whole or not at all"
