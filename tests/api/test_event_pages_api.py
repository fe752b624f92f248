"""`GET /v1/events` as a page of it is asked for: a period, a subject, the newest first."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.daemon import DaemonProcess


def seqs(api: DaemonProcess, query: str) -> list[int]:
    return [event["seq"] for event in api.get(f"/v1/events?limit=1000&{query}").json["items"]]


def test_the_events_of_a_lease_are_found_by_all_that_it_is(api: DaemonProcess) -> None:
    lease = api.call("POST", "/v1/leases", {"count": 1, "label": "found"}).json
    gpu = lease["gpus"][0]
    everything = {event["seq"]: event for event in api.get("/v1/events?limit=1000").json["items"]}
    of_it = [seq for seq, event in everything.items() if event["lease_id"] == lease["id"]]
    assert of_it == seqs(api, f"lease={lease['id']}")
    (granted,) = seqs(api, f"lease={lease['id']}&kind=lease.granted")
    at = everything[granted]["at"]
    for query in (
        f"kind=lease&user={lease['holder']['user']}",
        f"kind=lease.granted&gpu={gpu['uuid']}",
        f"kind=lease.granted&node={gpu['node']}",
        f"from={quote(at)}",
    ):
        assert granted in seqs(api, query), query
    assert granted not in seqs(api, f"to={quote(at)}")
    assert seqs(api, "user=no-such-user") == seqs(api, "gpu=GPU-none") == seqs(api, "job=job-none") == []


def test_the_newest_come_first_page_by_page(api: DaemonProcess) -> None:
    everything = seqs(api, "")
    page = api.get("/v1/events?order=desc&limit=2")
    assert [event["seq"] for event in page.json["items"]] == everything[::-1][:2]
    assert f"before={page.json['next']}" in page.headers["link"]
    older = api.get(f"/v1/events?order=desc&limit=2&before={page.json['next']}").json
    assert [event["seq"] for event in older["items"]] == everything[::-1][2:4]


def test_a_number_that_no_event_has_yet_finds_none(api: DaemonProcess) -> None:
    page = api.get(f"/v1/events?before={2**63 - 1}&kind=x").json
    assert (page["items"], page["next"]) == ([], None)


@pytest.mark.parametrize("query", ["", "&order=desc", "&kind=lease"])
def test_a_page_after_an_event_that_there_has_never_been_is_refused(api: DaemonProcess, query: str) -> None:
    """A reader that has seen more, in the database before a restore, would miss all events up to there."""
    newest = api.get("/v1/events?limit=1").json["last_seq"]
    assert api.get(f"/v1/events?after={newest}{query}").json["items"] == []
    for after in (newest + 1, 2**63 - 1):
        refused = api.call("GET", f"/v1/events?after={after}{query}")
        assert refused.problem() == (410, "events_pruned")
        assert refused.json["pruned_seq"] == newest
        assert f"There is no event {after}" in refused.json["detail"]


@pytest.mark.parametrize(
    "query", ["order=up", "from=yesterday", "to=1700000000", "kind=Lease", "kind=a.b.c", "gpu=%22", "before=0"]
)
def test_a_page_that_is_none_is_refused(api: DaemonProcess, query: str) -> None:
    assert api.call("GET", f"/v1/events?{query}").problem() == (422, "invalid_request")


@pytest.mark.parametrize("query", ["kind=lease", "order=desc", "from=2026-11-22T12:00:00Z", "user=ada&after=0"])
def test_a_stream_has_all_events_and_says_so(api: DaemonProcess, query: str) -> None:
    refused = api.call("GET", f"/v1/events?{query}", None, Accept="text/event-stream")
    assert refused.problem() == (422, "invalid_request")
    assert "a stream has all events" in refused.json["detail"]


def lease_ids(api: DaemonProcess, query: str) -> list[str]:
    return [lease["id"] for lease in api.get(f"/v1/leases?limit=1000&{query}").json["items"]]


def test_leases_are_found_by_when_they_held_which_gpu(api: DaemonProcess) -> None:
    first = api.call("POST", "/v1/leases", {"count": 1}).json
    api.call("POST", f"/v1/leases/{first['id']}/release", {"token": first["token"]})
    second = api.call("POST", "/v1/leases", {"count": 1}).json
    queued = api.call("POST", "/v1/leases", {"count": 4, "queue": True}).json
    ended = quote(api.get(f"/v1/leases/{first['id']}").json["ended_at"])
    begun = quote(second["granted_at"])
    assert {first["id"], second["id"]} & set(lease_ids(api, f"overlaps={begun}/..")) == {second["id"]}
    assert {first["id"], second["id"]} & set(lease_ids(api, f"overlaps=../{begun}")) == {first["id"]}
    assert second["id"] in lease_ids(api, f"overlaps={ended}/2999-01-01T00:00:00Z")
    assert second["id"] not in lease_ids(api, "overlaps=2000-01-01/2001-01-01T02:00:00%2B02:00")
    assert queued["id"] not in lease_ids(api, "overlaps=2000-01-01T00:00:00Z/..")
    (gpu,) = second["gpus"]
    of_gpu = lease_ids(api, f"gpu={gpu['uuid']}")
    assert of_gpu[0] == second["id"]
    assert (first["id"] in of_gpu) == (first["gpus"] == second["gpus"])
    assert lease_ids(api, "gpu=GPU-none") == []


@pytest.mark.parametrize(
    "interval",
    ["yesterday/..", "2026-11-23", "/", "2026-11-23/", "2026-11-24/2026-11-23", "1700000000/..", "2026-11-23/..//.."],
)
def test_an_interval_that_is_none_is_refused_with_how_to_write_one(api: DaemonProcess, interval: str) -> None:
    refused = api.call("GET", f"/v1/leases?overlaps={interval}")
    assert refused.problem() == (422, "invalid_request")
    assert "2026-11-23T18:00:00Z/2026-11-24T18:00:00Z" in refused.json["remedy"]
