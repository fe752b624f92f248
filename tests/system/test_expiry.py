"""Leases that no one renews end when they should: never early, at most a second late, however many there are."""

from __future__ import annotations

import statistics
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import daemon, events, eventually
from tests.system.outages import Clients

pytestmark = [pytest.mark.slow, pytest.mark.busy]

LATE_S = 1.0
LOAD_S = 20.0
"""For a machine that does not let the daemon run; the soak has none of it."""


@pytest.mark.parametrize(
    ("rounds", "allowed_s"), [(1, LATE_S + LOAD_S), pytest.param(10, LATE_S, marks=pytest.mark.soak)]
)
def test_leases_end_in_time_under_load(tmp_path: Path, rounds: int, allowed_s: float) -> None:
    late_s = []
    with daemon(tmp_path, "--simulate", "64") as running, Clients(running) as clients:
        for _ in range(rounds):
            granted = {}
            for number in range(40):
                lease = running.call("POST", "/v1/leases?wait_s=30", {"ttl_s": 1.0 + number / 20}).json
                granted[lease["id"]] = lease
            ends: dict[str, dict[str, Any]] = {}

            def all_over(granted: dict[str, Any] = granted, ends: dict[str, Any] = ends) -> bool:
                ends |= {event["lease_id"]: event for event in events(running) if event["kind"] == "lease.lost"}
                return granted.keys() <= ends.keys()

            eventually(all_over, 90, running.story)
            for lease_id, lease in granted.items():
                assert ends[lease_id]["reason"] == "expired"
                expires_at = datetime.fromisoformat(lease["expires_at"])
                lasted_s = (expires_at - datetime.fromisoformat(lease["granted_at"])).total_seconds()
                assert lasted_s >= lease["ttl_s"] - 1e-3, "it was given less than it asked for"
                late_s.append((datetime.fromisoformat(ends[lease_id]["at"]) - expires_at).total_seconds())
        assert not clients.wrong, clients.wrong[:5]
    print(
        f"{len(late_s)} leases: ended late by {statistics.median(late_s):.3f} s (median), {max(late_s):.3f} s at most"
    )
    assert min(late_s) >= 0, "ended early"
    assert max(late_s) <= allowed_s
