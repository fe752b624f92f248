"""A daemon with something of everything: a lease that works, a stranger, a job, a sick GPU, a queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.conftest import Hardware, states
from tests.daemon import PATIENT, DaemonProcess, eventually
from tests.prometheus_scrape import Scrape, scrape

GIB = 2**30
STRANGER = {"processes": [{"pid": 4_000_000, "memory_bytes": 3 * GIB}, {"pid": 4_000_001, "memory_bytes": None}]}
WITHIN_S = 60.0


def steady(running: DaemonProcess, *, openmetrics: bool = False) -> Scrape:
    """A scrape while the node is heard. On a machine that has no time for its worker, nothing is known of it."""
    found: list[Scrape] = []

    def heard() -> bool:
        found.append(scrape(running, openmetrics=openmetrics))
        return found[-1].value("gpulease_node_ready", node="n1") == 1

    eventually(heard, WITHIN_S, running.story)
    return found[-1]


@pytest.fixture(scope="package")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """GPU 0 is leased and works, 1 has two strangers, 2 runs a job, 3 is unhealthy; one request waits."""
    directory = tmp_path_factory.mktemp("monitoring")
    hardware = Hardware(directory / "hardware.json")
    hardware.show({"utilization_ratio": 0.5}, STRANGER, {}, {"health": "xid:79"})
    running = DaemonProcess(directory / "d", "--simulate", str(hardware.path), "--node", "n1", environment=PATIENT)
    try:
        running.start()
        eventually(lambda: states(running) == ["free", "foreign", "free", "unhealthy"], WITHIN_S, running.story)
        asked = {"devices": [0], "ttl_s": 3600, "label": "works", "agent": "coder", "session": "s1"}
        held = running.call("POST", "/v1/leases?wait_s=30", asked)
        assert held.status == 201, held.content
        job = running.call("POST", "/v1/jobs", {"command": ["sleep", "100000"], "gpus": 1, "launcher": "plain"}).json
        eventually(
            lambda: running.call("GET", f"/v1/jobs/{job['id']}").json["state"] == "running", WITHIN_S, running.story
        )
        assert running.call("POST", "/v1/leases", {"count": 3, "ttl_s": 3600, "label": "waits"}).status == 202
        yield running
        running.call("POST", f"/v1/jobs/{job['id']}/cancel", {"grace_s": 0})
        eventually(lambda: bool(running.call("GET", f"/v1/jobs/{job['id']}").json["ended_at"]), WITHIN_S, running.story)
    finally:
        running.stop()
