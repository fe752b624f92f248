"""Bounded bypass as a user sees it: a real daemon that is killed in between, plain requests, and `gpulease explain`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.daemon import DaemonProcess, daemon

TTL_S = 600


def ask(running: DaemonProcess, count: int, wait_s: float = 50) -> dict[str, Any]:
    body = {"count": count, "ttl_s": TTL_S}
    found: dict[str, Any] = running.call("POST", f"/v1/leases?wait_s={wait_s}", body).json
    return found


def release(running: DaemonProcess, lease: dict[str, Any]) -> None:
    answer = running.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
    assert answer.status == 200, answer.content


def pass_by(running: DaemonProcess) -> None:
    """A request for one GPU comes, is served, and gives it back."""
    younger = ask(running, 1)
    assert younger["state"] == "active", younger
    release(running, younger)


def explain(running: DaemonProcess, lease: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = running.call("GET", f"/v1/leases/{lease['id']}/explain").json
    return found


def said(running: DaemonProcess, lease: dict[str, Any]) -> str:
    words = [sys.executable, "-m", "gpulease.cli", "explain", lease["id"]]
    environment = {**running.environment, "GPULEASE_URL": running.url, "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = ":".join(sys.path)
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_gang_is_passed_twice_across_a_kill_then_gpus_are_held_and_it_is_served(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "4", "--max-bypass", "2") as running:
        held = ask(running, 1)
        gang = ask(running, 4, wait_s=0)
        assert (held["state"], gang["state"]) == ("active", "queued")
        pass_by(running)
        assert explain(running, gang)["passed"] == 1
        running.kill()
        running.start()
        assert explain(running, gang)["passed"] == 1
        pass_by(running)
        younger = ask(running, 1, wait_s=2)
        assert younger["state"] == "queued", "passed a third time"
        assert explain(running, gang)["passed"] == 2
        assert explain(running, younger)["behind"] == [gang["id"]]
        assert len(explain(running, gang)["held"]) == 3
        assert "Younger requests have passed it 2 times" in said(running, gang)
        assert "Held for it: GPUs" in said(running, gang)
        assert f"is held for the earlier {gang['id']}" in said(running, younger)
        release(running, held)
        served = running.call("GET", f"/v1/leases/{gang['id']}?wait_s=50&wait_while=queued").json
        assert (served["state"], len(served["gpus"])) == ("active", 4)
        release(running, served)
        assert running.call("GET", f"/v1/leases/{younger['id']}?wait_s=50&wait_while=queued").json["state"] == "active"
