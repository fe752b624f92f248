"""What people look for by hand: GPU-hours in a period, ids by their beginning, what a job asked for."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from tests.api.conftest import Hardware
from tests.daemon import DaemonProcess, eventually


def test_usage_counts_the_leases_of_the_caller(api: DaemonProcess) -> None:
    lease = api.call("POST", "/v1/leases", {"count": 2, "label": "usage test"}).json
    used = api.call("GET", "/v1/usage?by=label").json
    (share,) = [share for share in used["shares"] if share["key"] == "usage test"]
    assert (used["by"], share["leases"]) == ("label", 1)
    assert share["gpu_hours_held"] > 0
    unknown = share["gpu_hours_unknown"] == share["gpu_hours_held"]
    assert (share["gpu_hours_used"] is None) is unknown, "metrics are written each minute, perhaps just now"
    user = lease["holder"]["user"]
    assert [one["key"] for one in api.call("GET", f"/v1/usage?user={user}").json["shares"]] == [user]
    assert api.call("GET", "/v1/usage?user=no-such-user").json["shares"] == []


@pytest.mark.parametrize(
    "query",
    [
        "from=2030-01-01T00:00:00Z",
        "from=x",
        "to=1700000000.5",
        "by=month",
        "from=0001-01-01T00:00:00%2B14:00",
        "from=9999-12-31T23:59:59",
    ],
)
def test_a_period_that_is_none_is_refused(api: DaemonProcess, query: str) -> None:
    assert api.call("GET", f"/v1/usage?{query}").problem() == (422, "invalid_request")


def test_a_job_and_a_lease_are_found_by_the_beginning_of_their_id(api: DaemonProcess) -> None:
    body = {"command": ["sleep", "600"], "launcher": "plain", "working_directory": "/tmp", "timeout_s": 900, "gpus": 2}
    job = api.call("POST", "/v1/jobs", body | {"array": {"indices": "0-1"}}).json
    for kind, whole, key in (("jobs", job["id"], "id"), ("jobs", job["array_id"], "array_id")):
        found = api.call("GET", f"/v1/{kind}?id_prefix={whole[:-3]}").json["items"]
        assert {item[key] for item in found} == {whole}
    found = api.call("GET", f"/v1/leases?id_prefix={job['lease_id'][:12]}").json["items"]
    assert [lease["id"] for lease in found] == [job["lease_id"]]
    assert api.call("GET", f"/v1/jobs?id_prefix={job['lease_id'][:12]}").problem() == (422, "invalid_request")

    assert (job["gpu_count"], job["timeout_s"], job["retries"]) == (2, 900.0, 0)
    assert job["working_directory"] == "/tmp"
    path = f"/v1/jobs/{job['id']}"
    eventually(lambda: api.get(path).json["log_directory"] is not None, 60, api.story)


def test_a_leased_gpu_says_when_it_was_last_busy(api: DaemonProcess) -> None:
    lease = api.call("POST", "/v1/leases", {"count": 1}).json
    (uuid,) = (gpu["uuid"] for gpu in lease["gpus"])
    eventually(lambda: api.get(f"/v1/gpus/{uuid}").json["last_busy_at"] is not None, 60, api.story)
    fields = ("last_busy_at", "idle_s", "activity_since")
    others = [gpu for gpu in api.get("/v1/gpus").json["items"] if gpu["uuid"] != uuid]
    assert [gpu[name] for gpu in others for name in fields] == [None] * 9


def test_a_lease_says_how_long_it_has_done_nothing(api: DaemonProcess, hardware: Hardware) -> None:
    lease = api.call("POST", "/v1/leases", {"count": 2}).json
    assert (lease["held_for_s"], lease["idle_s"]) == (None, None), "told where leases are looked at"
    path = f"/v1/leases/{lease['id']}"
    eventually(lambda: (api.get(path).json["idle_s"] or 0) > 1, 60, api.story)
    idle = api.get(path).json
    assert 1 < idle["idle_s"] <= idle["held_for_s"]
    (listed,) = api.get("/v1/leases?state=active").json["items"]
    assert listed["idle_s"] >= idle["idle_s"]

    numbers = [int(gpu["index"]) for gpu in lease["gpus"]]
    working = {"utilization_ratio": 0.5, "processes": [{"pid": 4242}]}
    hardware.show(*({**working} if index == numbers[1] else {} for index in range(4)))
    eventually(lambda: api.get(path).json["idle_s"] < idle["idle_s"], 60, api.story)
    first, second = (api.get(f"/v1/gpus/{gpu['uuid']}").json for gpu in lease["gpus"])
    assert first["idle_s"] > second["idle_s"], "the lease is as idle as the one of its GPUs that works"
    assert (first["activity"], second["activity"]) == ("starting", "conflict")
    since = [datetime.fromisoformat(text) for text in (first["activity_since"], second["activity_since"])]
    assert datetime.fromisoformat(lease["granted_at"]) - timedelta(seconds=1) < since[0] < since[1]

    hardware.show({}, {}, {}, {})
    ended = api.call("POST", f"{path}/release", {"token": lease["token"]}).json
    told = api.get(path).json
    lasted = datetime.fromisoformat(ended["ended_at"]) - datetime.fromisoformat(ended["granted_at"])
    assert (told["held_for_s"], told["idle_s"]) == (int(lasted.total_seconds()), None)
