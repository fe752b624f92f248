"""Idle GPUs go to who waits for them, with a real daemon and worker; tests/core/test_reclaim.py has the rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.daemon import PATIENT, DaemonProcess, events
from tests.system.hardware import Hardware
from tests.system.short_reclaim import ShortReclaim


def take(running: DaemonProcess, uuid: str) -> dict[str, Any]:
    """A lease on this GPU, which gives it back while it is idle."""
    body = {"devices": [uuid], "priority": "interactive", "ttl_s": 3600}
    answer = running.call("POST", "/v1/leases?wait_s=60", body)
    assert answer.status == 201, answer.content
    return dict(answer.json)


def test_an_idle_lease_is_told_and_its_gpu_goes_to_who_waits_and_one_that_works_stays(tmp_path: Path) -> None:
    hardware = Hardware(tmp_path / "gpus.json", gpus=2)
    hardware.set_wrong({0: {"utilization_ratio": 0.5}})
    running = ShortReclaim(
        tmp_path / "d", "--simulate", str(hardware.path), environment=PATIENT | {"GPULEASE_POLL_S": "0.2"}
    )
    try:
        running.start()
        works, idle = (take(running, uuid) for uuid in hardware.uuids)
        waits = running.request_lease(ttl_s=3600)
        assert waits["state"] == "queued"
        granted = running.wait_active(waits["id"])
        assert [gpu["uuid"] for gpu in granted["gpus"]] == hardware.uuids[1:]
        assert running.lease(idle["id"])["end_reason"] == "reclaimed_idle"
        assert running.lease(works["id"])["state"] == "active"
        told = [(one["kind"], one["lease_id"]) for one in events(running) if one["kind"].startswith("lease.recl")]
        assert told[0] == ("lease.reclaim_notice", idle["id"])
        assert told[-1] == ("lease.reclaimed", idle["id"])
        assert {lease_id for _, lease_id in told} == {idle["id"]}
    finally:
        running.stop()
