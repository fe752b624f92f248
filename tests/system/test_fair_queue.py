"""Bounded bypass as a user sees it: a real daemon that is killed in between, plain requests, and `gpulease explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, daemon


def pass_by(running: DaemonProcess) -> None:
    """A request for one GPU comes, is served, and gives it back."""
    younger = running.request_lease(wait_s=50)
    assert younger["state"] == "active", younger
    running.release(younger)


def explain(running: DaemonProcess, lease: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = running.call("GET", f"/v1/leases/{lease['id']}/explain").json
    return found


def printed(running: DaemonProcess, lease: dict[str, Any]) -> str:
    """What `gpulease explain` prints."""
    return running.gpulease("explain", lease["id"]).stdout


@pytest.mark.budget(20)
def test_a_gang_is_passed_twice_across_a_kill_then_gpus_are_held_and_it_is_served(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "4", "--max-bypass", "2") as running:
        held = running.request_lease(wait_s=50)
        gang = running.request_lease(4)
        assert (held["state"], gang["state"]) == ("active", "queued")
        pass_by(running)
        assert explain(running, gang)["passed"] == 1
        running.kill()
        running.start()
        assert explain(running, gang)["passed"] == 1
        pass_by(running)
        younger = running.request_lease(wait_s=2)
        assert younger["state"] == "queued", "passed a third time"
        assert explain(running, gang)["passed"] == 2
        assert explain(running, younger)["behind"] == [gang["id"]]
        assert len(explain(running, gang)["held"]) == 3
        assert "2 newer requests started first" in printed(running, gang)
        assert "Held for it: GPUs" in printed(running, gang)
        assert f"held for the earlier {gang['id']}" in printed(running, younger)
        running.release(held)
        served = running.call("GET", f"/v1/leases/{gang['id']}?wait_s=50&wait_while=queued").json
        assert (served["state"], len(served["gpus"])) == ("active", 4)
        running.release(served)
        assert running.call("GET", f"/v1/leases/{younger['id']}?wait_s=50&wait_while=queued").json["state"] == "active"
