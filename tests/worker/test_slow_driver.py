"""A driver that is slow, not ill: grants go on, and who waits is told."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.daemon import DaemonProcess, daemon, eventually

UUID = "GPU-00000000-0000-0000-0000-000000000000"


def machine(path: Path, **members: Any) -> None:
    """A simulated machine of one GPU; `hang_s` is what each reading takes."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"gpus": [{"uuid": UUID}], **members}))
    new.rename(path)


def state(running: DaemonProcess) -> str:
    return str(running.call("GET", f"/v1/gpus/{UUID}").json["state"])


def test_a_node_is_granted_on_though_each_reading_takes_over_half_a_second(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine(path, hang_s=0.8)
    with daemon(tmp_path, "--simulate", str(path), "--node", "n") as running:
        eventually(lambda: state(running) == "free", 30, running.story)
        for _ in range(3):
            answer = running.call("POST", "/v1/leases", {"count": 1, "queue": False})
            assert answer.status == 201, answer.content
            body = {"token": answer.json["token"]}
            assert running.call("POST", f"/v1/leases/{answer.json['id']}/release", body).status == 200
            eventually(lambda: state(running) == "free", 20, running.story)


def test_a_driver_that_is_blocked_for_a_while_makes_its_gpus_unknown_and_then_is_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine(path)
    with daemon(tmp_path, "--simulate", str(path), "--node", "n") as running:
        eventually(lambda: state(running) == "free", 30, running.story)
        machine(path, hang_s=45)
        eventually(lambda: state(running) == "unknown", 5, running.story)
        reason = running.call("GET", f"/v1/gpus/{UUID}").json["reason"]
        assert "the simulated driver did not answer within 2 s" in reason
        waiting = running.call("POST", "/v1/leases", {"count": 1}).json
        assert waiting["state"] == "queued"
        begun = time.monotonic()
        machine(path)
        lease = running.call("GET", f"/v1/leases/{waiting['id']}?wait_s=20").json
        assert lease["state"] == "active"
        assert time.monotonic() - begun < 5, "no probe had to be started anew"


def test_how_old_a_reading_may_be_is_a_setting(tmp_path: Path) -> None:
    """With 60 s nobody asks the node again: a driver that hangs meanwhile does not matter."""
    path = tmp_path / "machine.json"
    machine(path)
    options = ("--simulate", str(path), "--node", "n", "--max-observation-age-s", "60")
    with daemon(tmp_path, *options, GPULEASE_PROBE_DEADLINE_S="30") as running:
        eventually(lambda: state(running) == "free", 30, running.story)
        machine(path, hang_s=25)
        eventually(lambda: running.call("GET", "/v1/nodes/n").json["state"] == "ready", 5)
        answer = running.call("POST", "/v1/leases", {"count": 1, "queue": False})
        assert answer.status == 201, answer.content
