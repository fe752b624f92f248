"""What-if on a real database: leases of real requests, replayed beside the daemon that recorded them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, daemon


def served(running: DaemonProcess, gpus: int = 1) -> dict[str, Any]:
    lease = running.request_lease(gpus, wait_s=50)
    assert lease["state"] == "active", lease
    return lease


def rows(running: DaemonProcess) -> dict[str, list[Any]]:
    """Everything that the ledger has."""
    with closing(sqlite3.connect(running.data_dir / "gpulease.db")) as connection:
        return {name: list(connection.execute(f"SELECT * FROM {name}")) for name in ("lease", "gpu", "job", "counter")}


def replay(running: DaemonProcess, *options: str) -> dict[str, Any]:
    ran = running.gpulease("policy", "replay", "--data-dir", str(running.data_dir), "--json", *options)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.budget(20)
def test_recorded_leases_are_replayed_beside_the_daemon_and_nothing_of_it_changes(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "2") as running:
        both = served(running, 2)
        waiting = running.request_lease(1)
        given_up = running.request_lease(2)
        assert (waiting["state"], given_up["state"]) == ("queued", "queued")
        running.call("DELETE", f"/v1/leases/{given_up['id']}")
        running.release(both)
        running.call("GET", f"/v1/leases/{waiting['id']}?wait_s=50&wait_while=queued")
        before = rows(running)

        found = replay(running, "--fair-share")

        assert rows(running) == before
        assert (found["nodes"], found["gpus"], found["left_out"]) == (1, 2, 1)
        assert found["recorded"]["requests"] == 2
        assert (found["now"]["requests"], found["now"]["refused"], found["now"]["never_granted"]) == (2, 0, 0)
        assert found["tried"]["requests"] == 2
        # The one that waited did so for as long as it did, but for what HTTP, disk and the probe took.
        assert 0 < found["now"]["wait_max_s"] <= found["recorded"]["wait_max_s"] + 0.1
        larger = replay(running, "--gpus", "1x4")
        assert larger["now"]["wait_max_s"] < found["now"]["wait_max_s"]
        assert served(running)["state"] == "active"
