"""What each GPU showed in the last hour, leased or not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess, eventually

MEASURES = ("utilization_ratio", "memory_used_bytes", "power_w", "temperature_c")


def known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def fleet(api: DaemonProcess, query: str = "") -> dict[str, Any]:
    answer = api.call("GET", f"/v1/gpus/history{query}")
    assert answer.status == 200, answer.content
    found: dict[str, Any] = answer.json
    return found


def test_gpus_that_are_not_leased_are_plotted(api: DaemonProcess, hardware: Hardware) -> None:
    hardware.show(
        {"utilization_ratio": 0.25, "power_w": 321.5, "temperature_c": 61}, {"utilization_ratio": None}, {}, {}
    )
    uuid = hardware.uuid(0)

    def shown() -> bool:
        one = api.get(f"/v1/gpus/{uuid}/history?last_s=120&points=1000").json
        return known(one["utilization_ratio"]["mean"])[-2:] == [0.25, 0.25]

    eventually(shown, 60, api.story)
    one = api.get(f"/v1/gpus/{uuid}/history?last_s=120&points=1000").json
    assert (one["uuid"], one["node"], one["index"], one["bucket_s"]) == (uuid, "n1", 0, 1)
    assert len({len(one[name][column]) for name in MEASURES for column in ("mean", "max", "known_s")}) == 1
    assert known(one["power_w"]["max"])[-1] == 321.5
    assert known(one["temperature_c"]["mean"])[-1] == 61
    assert None in one["utilization_ratio"]["mean"] or one["utilization_ratio"]["known_s"][0] > 0
    now = datetime.now(UTC)
    end = datetime.fromisoformat(one["from_at"]) + timedelta(seconds=len(one["power_w"]["mean"]) * one["bucket_s"])
    assert now - timedelta(seconds=30) < datetime.fromisoformat(one["to_at"]) <= end < now + timedelta(seconds=30)
    eventually(lambda: known(fleet(api)["gpus"][0]["utilization_ratio"])[-1] > 0, 60, api.story)
    every = fleet(api)
    assert [gpu["uuid"] for gpu in every["gpus"]] == [gpu["uuid"] for gpu in api.gpus()]
    assert (every["bucket_s"], len(every["gpus"][0]["utilization_ratio"])) in {(60, 60), (60, 61)}
    assert [every["gpus"][0][name] for name in MEASURES[1:]] == [None, None, None]
    some = fleet(api, "?measures=power_w,temperature_c&points=2&node=n1")
    assert len(some["gpus"][0]["power_w"]) <= 2
    assert some["gpus"][0]["utilization_ratio"] is None
    assert fleet(api, "?node=no-such-node")["gpus"] == []
    with api.client() as client:
        assert client.gpu_history(uuid, last_s=120).utilization_ratio.mean
        assert client.gpu_histories(measures=["power_w"], points=10, node="n1").gpus[0].power_w


def test_a_period_before_all_readings_is_a_gap(api: DaemonProcess, hardware: Hardware) -> None:
    every = fleet(api, "?from=2001-01-01&to=2001-01-02")
    assert every["bucket_s"] == 3600
    assert {value for gpu in every["gpus"] for value in gpu["utilization_ratio"]} == {None}
    one = api.get(f"/v1/gpus/{hardware.uuid(0)}/history?from=0001-01-02&points=2").json
    assert one["from_at"].startswith("1970-01-01")


@pytest.mark.parametrize(
    "query",
    [
        "from=2030-01-01T00:00:00Z",
        "from=x",
        "to=1700000000.5",
        "to=0001-01-01",
        "from=2026-01-01&last_s=5",
        "last_s=0",
        "last_s=nan",
        "points=1",
        "points=1001",
        "from=9999-12-31T23:59:59",
    ],
)
def test_a_question_that_is_none_is_refused(api: DaemonProcess, hardware: Hardware, query: str) -> None:
    for path in ("/v1/gpus/history", f"/v1/gpus/{hardware.uuid(0)}/history"):
        assert api.call("GET", f"{path}?{query}").problem() == (422, "invalid_request")


def test_a_lease_without_a_job_has_metrics_and_goes_on_having_them_when_it_has_ended(
    api: DaemonProcess, hardware: Hardware
) -> None:
    hardware.show(*({"utilization_ratio": 0.5} for _ in range(4)))
    lease = api.call("POST", "/v1/leases", {"count": 2}).json
    waiting = api.call("POST", "/v1/leases", {"count": 4}).json
    path = f"/v1/leases/{lease['id']}/metrics"

    def means() -> list[float]:
        return known(api.get(path).json["gpus"][1]["utilization_ratio"]["mean"])

    eventually(lambda: len(means()) >= 2, 60, api.story)
    assert api.get(path).json["held_until_at"] is None
    with api.client() as client:
        none = client.lease_metrics(waiting["id"])
    assert (none.held_from_at, none.gpus, none.gpu_hours_held) == (None, (), 0), "it waits for the others"
    api.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
    eventually(lambda: len(means()) >= 2 and api.get(path).json["held_until_at"] is not None, 60, api.story)
    found = api.get(f"{path}?points=1").json
    assert (found["lease_id"], len(found["gpus"]), len(found["gpus"][0]["start_at"])) == (lease["id"], 2, 1)
    assert found["gpus"][0]["utilization_ratio"]["max"] == [0.5]
    assert 0 < found["gpu_hours_used"] <= found["gpu_hours_held"]
    with api.client() as client:
        assert client.lease_metrics(lease["id"]).gpus[0].uuid == lease["gpus"][0]["uuid"]
    assert api.call("GET", "/v1/leases/lease-none/metrics").problem() == (404, "not_found")


def test_a_measure_and_a_gpu_that_do_not_exist_are_said(api: DaemonProcess) -> None:
    refused = api.call("GET", "/v1/gpus/history?measures=power_w,heat")
    assert refused.problem() == (422, "invalid_request")
    assert ("'heat'" in refused.json["detail"], "temperature_c" in refused.json["remedy"]) == (True, True)
    assert api.call("GET", "/v1/gpus/GPU-none/history").problem() == (404, "not_found")
