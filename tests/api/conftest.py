from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import PATIENT, DaemonProcess


class Hardware:
    """The simulated hardware of a daemon: the JSON file that its worker reads at every poll."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def show(self, *gpus: dict[str, Any], **more: Any) -> None:
        """Change the hardware; each GPU by its index, with what is not as usual."""
        items = [
            {"uuid": self.uuid(index), "memory_total_bytes": 80 * 2**30, **what} for index, what in enumerate(gpus)
        ]
        replacement = self.path.with_suffix(".new")
        replacement.write_text(json.dumps({"gpus": items, **more}))
        replacement.replace(self.path)

    def uuid(self, index: int) -> str:
        return f"GPU-0000000{index}-0000-0000-0000-000000000000"


@pytest.fixture(scope="package")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, Hardware]]:
    directory = tmp_path_factory.mktemp("api")
    hardware = Hardware(directory / "hardware.json")
    hardware.show({}, {}, {}, {})
    options = ("--simulate", str(hardware.path), "--node", "n1")
    running = DaemonProcess(directory / "d", *options, environment=PATIENT)
    try:
        yield running.start(), hardware
    finally:
        running.stop()


@pytest.fixture
def api(shared_daemon: tuple[DaemonProcess, Hardware]) -> DaemonProcess:
    """A daemon with four free GPUs; whatever the test before left is taken back first."""
    running, hardware = shared_daemon
    hardware.show({}, {}, {}, {})
    running.give_everything_back()
    return running


@pytest.fixture(params=["hot path", "application"])
def each_way(request: pytest.FixtureRequest, api: DaemonProcess) -> Iterator[None]:
    """The hot path answers what the test sends; then, because of a field that changes nothing, the application."""
    api.more_fields = {} if request.param == "hot path" else {"If-None-Match": '"none"'}
    yield
    api.more_fields = {}


@pytest.fixture
def hardware(shared_daemon: tuple[DaemonProcess, Hardware]) -> Hardware:
    return shared_daemon[1]


def states(running: DaemonProcess) -> list[str]:
    """The state of each GPU."""
    return [gpu["state"] for gpu in running.call("GET", "/v1/gpus").json["items"]]
