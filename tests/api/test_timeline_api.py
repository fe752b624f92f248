"""`GET /v1/timeline` of a daemon: what it grants, ends and cordons is told, also after a restart."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from gpulease import Client
from tests.daemon import DaemonProcess, daemon, eventually


def test_leases_cordons_and_the_queue_are_told(api: DaemonProcess) -> None:
    gpus = api.get("/v1/gpus").json["items"]
    lease = api.call("POST", "/v1/leases", {"count": len(gpus), "label": "all of it"}).json
    waiting = api.call("POST", "/v1/leases", {"count": 1}).json
    assert waiting["state"] == "queued"
    api.call("POST", f"/v1/gpus/{gpus[0]['uuid']}/cordon")
    found = api.get("/v1/timeline").json
    (span,) = [one for one in found["spans"] if one["kind"] == "lease" and one["label"] == "all of it"]
    assert (span["lease_id"], span["to_at"], span["end_reason"]) == (lease["id"], None, None)
    assert span["from_at"] == lease["granted_at"]
    assert sorted(span["gpus"]) == sorted(gpu["uuid"] for gpu in gpus)
    (cordoned,) = [one for one in found["spans"] if one["kind"] == "cordoned" and one["to_at"] is None]
    assert cordoned["gpus"] == [gpus[0]["uuid"]]
    assert found["queue"][-1]["length"] == 1
    assert [gpu["uuid"] for gpu in found["gpus"]] == [gpu["uuid"] for gpu in gpus]

    for one in (waiting, lease):
        api.call("POST", f"/v1/leases/{one['id']}/release", {"token": one["token"]})
    api.call("POST", f"/v1/gpus/{gpus[0]['uuid']}/uncordon")
    found = api.get(f"/v1/timeline?gpu={gpus[0]['uuid']}").json
    assert [gpu["uuid"] for gpu in found["gpus"]] == [gpus[0]["uuid"]]
    kinds = {one["kind"]: one for one in found["spans"] if one["from_at"] >= lease["granted_at"]}
    assert (kinds["lease"]["end_reason"], kinds["lease"]["gpus"]) == ("released", [gpus[0]["uuid"]])
    assert kinds["cordoned"]["to_at"] is not None
    assert found["queue"][-1]["length"] == 0


def test_a_page_and_what_follows_it_through_the_client(api: DaemonProcess) -> None:
    made = []
    for _ in range(3):
        lease = api.call("POST", "/v1/leases", {"count": 1, "label": "pages"}).json
        ended = api.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]}).json
        made.append(ended["id"])
        eventually(lambda: api.get(f"/v1/gpus/{lease['gpus'][0]['uuid']}").json["state"] == "free", 30, api.story)  # noqa: B023
    answer = api.call("GET", "/v1/timeline?limit=1")
    assert answer.headers["link"].endswith('>; rel="next"')
    seen: list[str | None] = []
    with Client(api.url) as client:
        page = client.timeline(limit=1)
        seen += [span.lease_id for span in page.spans if span.label == "pages"]
        while page.next is not None and len(seen) < 3:
            page = client.timeline(from_at=page.from_at, to_at=page.to_at, limit=1, cursor=page.next)
            seen += [span.lease_id for span in page.spans if span.label == "pages"]
    assert seen == made[::-1], "the latest end first"


@pytest.mark.parametrize(
    "query",
    [
        "from=2030-01-01T00:00:00Z",
        "from=x",
        "to=1700000000.5",
        "limit=0",
        "limit=10001",
        "cursor=5",
        "cursor=999999999999999999-1",
        "gpu=a%20b",
        "from=9999-12-31T23:59:59",
    ],
)
def test_what_is_no_timeline_is_refused(api: DaemonProcess, query: str) -> None:
    assert api.call("GET", f"/v1/timeline?{query}").problem() == (422, "invalid_request")


def test_it_is_the_same_after_a_restart(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "2") as api:
        _kill_and_compare(api)


def _kill_and_compare(api: DaemonProcess) -> None:
    api.wait_free()
    lease = api.call("POST", "/v1/leases", {"count": 1, "label": "before", "ttl_s": 600}).json
    uuid = lease["gpus"][0]["uuid"]
    (before,) = [one for one in api.get("/v1/timeline").json["spans"] if one["label"] == "before"]
    used = api.get("/v1/usage?by=label").json
    api.kill()
    api.start()
    eventually(lambda: api.get(f"/v1/gpus/{uuid}").json["state"] == "leased", 60, api.story)
    found = api.get("/v1/timeline").json
    (after,) = [one for one in found["spans"] if one["label"] == "before"]
    assert after == before
    assert [one for one in found["spans"] if one["to_at"] is None] == [before], "no GPU is told to be anything else"
    again = api.get("/v1/usage?by=label").json
    (share,) = [one for one in again["shares"] if one["key"] == "before"]
    lasted_s = (datetime.fromisoformat(again["to_at"]) - datetime.fromisoformat(lease["granted_at"])).total_seconds()
    assert share["gpu_hours_held"] * 3600 == pytest.approx(lasted_s, rel=0.001)
    assert again["gpu_hours_held"] >= used["gpu_hours_held"]
