"""Taking out of use over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess, daemon, eventually


@pytest.fixture
def administered(api: DaemonProcess) -> Iterator[DaemonProcess]:
    """The daemon; everything is in use again at the end."""
    yield api
    api.call("POST", "/v1/nodes/n1/resume")
    for gpu in api.call("GET", "/v1/gpus").json["items"]:
        api.call("POST", f"/v1/gpus/{gpu['uuid']}/uncordon")


def state(running: DaemonProcess, uuid: str) -> str:
    return str(running.call("GET", f"/v1/gpus/{uuid}").json["state"])


def test_a_cordon_holds_a_request_back_until_it_is_lifted(administered: DaemonProcess, hardware: Hardware) -> None:
    uuid = hardware.uuid(2)
    cordoned = administered.call("POST", f"/v1/gpus/{uuid.upper()}/cordon")
    assert (cordoned.status, cordoned.json["state"], cordoned.json["cordoned"]) == (200, "cordoned", True)
    refused = administered.call("POST", "/v1/leases", {"devices": [2], "queue": False})
    assert refused.problem() == (409, "not_now")
    assert "is cordoned by an administrator" in refused.json["detail"]
    waiting = administered.call("POST", "/v1/leases", {"devices": [2]})
    assert waiting.status == 202
    assert administered.call("POST", f"/v1/gpus/{uuid}/uncordon").json["cordoned"] is False
    granted = administered.call("GET", f"/v1/leases/{waiting.json['id']}?wait_s=60&wait_while=queued").json
    assert granted["state"] == "active"


def test_a_pause_is_refused_while_a_lease_is_active_and_can_be_forced(administered: DaemonProcess) -> None:
    lease = administered.call("POST", "/v1/leases", {"count": 1}).json
    refused = administered.call("POST", "/v1/nodes/n1/pause")
    assert refused.problem() == (409, "in_use")
    assert lease["id"] in refused.json["detail"]
    assert administered.call("POST", "/v1/nodes/n1/pause", {"force": 1}).problem() == (422, "invalid_request")
    paused = administered.call("POST", "/v1/nodes/n1/pause", {"force": True})
    assert (paused.status, paused.json["mode"], paused.json["state"]) == (200, "paused", "unknown")
    held = administered.call("GET", f"/v1/leases/{lease['id']}").json
    assert held["state"] == "active"
    assert administered.call("POST", "/v1/nodes/n1/resume").json["mode"] == "active"
    eventually(lambda: state(administered, lease["gpus"][0]["uuid"]) == "leased", 60, administered.story)


def test_unknown_nodes_and_gpus_are_not_found(administered: DaemonProcess) -> None:
    assert administered.call("POST", "/v1/nodes/nowhere/drain").problem() == (404, "not_found")
    assert administered.call("POST", "/v1/gpus/GPU-x/cordon").problem() == (404, "not_found")


def test_maintenance_survives_a_restart(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "2", "--node", "n1") as running:
        uuid = running.call("GET", "/v1/gpus").json["items"][1]["uuid"]
        running.call("POST", f"/v1/gpus/{uuid}/cordon")
        refused = running.call("POST", "/v1/nodes/n1/drain", {"reason": "x" * 201})
        assert refused.problem() == (422, "invalid_request")
        running.call("POST", "/v1/nodes/n1/pause", {"reason": "new driver"})
        eventually(lambda: running.call("GET", "/v1/nodes/n1").json["reason"] == "paused by an administrator", 60)
        running.kill()
        running.start(ready=False)
        node = running.call("GET", "/v1/nodes/n1").json
        assert (node["mode"], node["mode_reason"], node["mode_by"]) == ("paused", "new driver", "root")
        eventually(lambda: running.call("GET", "/v1/nodes/n1").json["reason"] == "paused by an administrator", 60)
        assert running.call("POST", "/v1/leases", {"count": 1, "queue": False}).problem() == (409, "not_now")
        running.call("POST", "/v1/nodes/n1/resume")
        eventually(lambda: state(running, uuid) == "cordoned", 60, running.story)
        assert running.call("POST", "/v1/leases", {"count": 2, "queue": False}).problem() == (409, "not_now")


def test_a_node_shows_how_its_gpus_are_connected(api: DaemonProcess, hardware: Hardware) -> None:
    assert api.call("GET", "/v1/nodes/n1").json["links"] == []
    hardware.show({}, {}, {}, {}, links=[[0, 1, "nvlink"], [2, 3, "pcie"]])
    shown = [
        {
            "first": hardware.uuid(0),
            "second": hardware.uuid(1),
            "path": "nvlink",
            "peer_to_peer": True,
            "nvlinks": None,
        },
        {"first": hardware.uuid(2), "second": hardware.uuid(3), "path": "pcie", "peer_to_peer": None, "nvlinks": None},
    ]
    eventually(lambda: api.call("GET", "/v1/nodes/n1").json["links"] == shown, 30)
    (node,) = api.call("GET", "/v1/nodes").json["items"]
    assert node["islands"] == [[hardware.uuid(0), hardware.uuid(1)]]
