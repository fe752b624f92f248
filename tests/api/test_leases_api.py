"""Leases over plain HTTP, as curl and a sweep scheduler use them."""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import quote

import pytest

from tests.api.conftest import Hardware, states
from tests.daemon import Answer, DaemonProcess, events, eventually

pytestmark = pytest.mark.usefixtures("each_way")


def ask(api: DaemonProcess, body: dict[str, Any] | None = None, query: str = "", **headers: str) -> Answer:
    return api.call("POST", f"/v1/leases{query}", {"count": 1} if body is None else body, **headers)


def test_a_lease_from_grant_to_release(api: DaemonProcess) -> None:
    answer = ask(api, {"count": 2, "label": "sweep 7"})
    assert answer.status == 201
    lease = answer.json
    assert answer.headers["location"] == f"/v1/leases/{lease['id']}"
    assert lease["state"] == "active"
    assert lease["holder"]["label"] == "sweep 7"
    uuids = [gpu["uuid"] for gpu in lease["gpus"]]
    assert lease["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(uuids)
    assert lease["env"]["GPULEASE_LEASE_TOKEN"] == str(lease["token"])
    assert 21000 <= int(lease["env"]["MASTER_PORT"]) < 23000
    assert states(api) == ["leased", "leased", "free", "free"]
    renewed = api.call("POST", f"/v1/leases/{lease['id']}/renew", {"token": lease["token"]})
    assert renewed.status == 200
    assert renewed.json["expires_at"] > lease["expires_at"]
    released = api.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
    assert (released.status, released.json["end_reason"]) == (200, "released")
    eventually(lambda: states(api) == ["free"] * 4, 60)


def test_idle_gpus_are_kept_on_purpose_and_who_waits_is_told(api: DaemonProcess) -> None:
    lease = ask(api, {"count": 4}).json
    path, said = f"/v1/leases/{lease['id']}", {"token": lease["token"], "reason": "slow copy", "for_s": 600}
    assert lease["kept"] is None
    kept = api.call("POST", f"{path}/keep", said)
    assert (kept.status, kept.json["kept"]["reason"], kept.json["id"]) == (200, "slow copy", lease["id"])
    assert api.call("GET", path).json["kept"] == kept.json["kept"]
    waits = ask(api).json
    told = api.call("GET", f"/v1/leases/{waits['id']}/explain").json
    assert "kept idle on purpose until" in told["sentence"]
    assert told["obstacles"][0]["kept"] == kept.json["kept"]
    [event] = [one for one in events(api) if (one["kind"], one["lease_id"]) == ("lease.kept", lease["id"])]
    assert event["reason"].endswith("UTC: slow copy")
    for wrong in (
        {"for_s": 1e9},
        {"for_s": 0},
        {"reason": ""},
        {"reason": " "},
        {"reason": "a\nb"},
        {"reason": "x" * 501},
    ):
        assert api.call("POST", f"{path}/keep", said | wrong).problem() == (422, "invalid_request"), wrong
    assert api.call("POST", f"{path}/keep", said | {"for_s": 86401}).problem() == (422, "invalid_request")
    assert api.call("POST", f"{path}/keep", said | {"token": 99}).problem() == (412, "stale_token")
    assert api.call("POST", "/v1/leases/lease-x/keep", said).problem() == (404, "not_found")
    api.call("DELETE", f"/v1/leases/{waits['id']}")
    api.call("POST", f"{path}/release", {"token": lease["token"]})
    assert api.call("POST", f"{path}/keep", said).problem() == (410, "lease_lost")


def test_a_request_may_say_that_idle_gpus_are_taken_back(api: DaemonProcess) -> None:
    lease = ask(api, {"reclaim_idle_after_s": 1800}).json
    assert (lease["state"], lease["demand"]["reclaim_idle_after_s"], lease["reclaim_at"]) == ("active", 1800, None)
    renewed = api.call("POST", f"/v1/leases/{lease['id']}/renew", {"token": lease["token"]}).json
    assert (renewed["demand"]["reclaim_idle_after_s"], renewed["reclaim_at"]) == (1800, None)
    assert ask(api).json["demand"]["reclaim_idle_after_s"] is None
    for wrong in (59, 0, -1, 1e9, "30m"):
        assert ask(api, {"reclaim_idle_after_s": wrong}).problem() == (422, "invalid_request"), wrong


def test_a_request_says_whether_it_may_end_for_others(api: DaemonProcess) -> None:
    def said(**body: Any) -> tuple[str, bool]:
        lease = ask(api, body).json
        shown = api.call("GET", f"/v1/leases/{lease['id']}").json
        assert shown["demand"]["preemptible"] is lease["demand"]["preemptible"]
        api.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
        return lease["demand"]["priority"], lease["demand"]["preemptible"]

    assert said() == ("normal", False)
    assert said(preemptible=None, priority="scavenge") == ("scavenge", True)
    assert said(preemptible=True) == ("normal", True)
    assert said(preemptible=True, priority="interactive") == ("interactive", True)
    assert said(preemptible=True, priority="scavenge") == ("scavenge", True)
    assert said(preemptible=False) == ("normal", False)
    for path, body in (("/v1/leases", {}), ("/v1/jobs", {"command": ["true"]})):
        refused = api.call("POST", path, body | {"priority": "scavenge", "preemptible": False})
        assert refused.problem() == (422, "invalid_request")
        assert "ask with priority normal" in refused.json["detail"]
    adopting = api.call("POST", "/v1/leases", {"adopt": True, "owner_pid": 1, "preemptible": True})
    assert adopting.problem() == (422, "invalid_request")
    assert "leave out preemptible" in adopting.json["detail"]
    assert ask(api, {"preemptible": "maybe"}).problem() == (422, "invalid_request")

    array = {"indices": "0-1"}
    for more, expected in (
        ({"preemptible": True, "array": array}, True),
        ({"priority": "scavenge"}, True),
        ({}, False),
    ):
        body = {"command": ["true"], "launcher": "plain", "node": "n1", "gpus": 1} | more
        job = api.call("POST", "/v1/jobs", body).json
        assert job["preemptible"] is expected
        assert api.call("GET", f"/v1/jobs/{job['id']}").json["preemptible"] is expected
        lease = api.call("GET", f"/v1/leases/{job['lease_id']}").json
        assert lease["demand"]["preemptible"] is expected


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (3, [0, 1, 2]),
        (-1, [0, 1, 2, 3]),
        ([0], [0]),
        ([1, 3], [1, 3]),
        ("3", [0, 1, 2]),
        ("1, 3", [1, 3]),
        ("-1", [0, 1, 2, 3]),
        ("auto", [0, 1, 2, 3]),
        ("0,", [0]),
        (["GPU-00000002-0000-0000-0000-000000000000"], [2]),
        ("gpu-00000002-0000-0000-0000-000000000000", [2]),
    ],
)
def test_every_form_of_devices_that_lightning_accepts(api: DaemonProcess, devices: Any, indices: list[int]) -> None:
    answer = ask(api, {"devices": devices})
    assert answer.status == 201, answer.content
    assert [gpu["index"] for gpu in answer.json["gpus"]] == indices


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"count": 0}, "count"),
        ({"count": -1}, "count"),
        ({"count": 10**9}, "count"),
        ({"count": "2"}, "count"),
        ({"count": True}, "count"),
        ({"count": 1.5}, "count"),
        ({"count": 1, "devices": 1}, "count"),
        ({"devices": 0}, "devices"),
        ({"devices": -2}, "devices"),
        ({"devices": []}, "devices"),
        ({"devices": "0"}, "devices"),
        ({"devices": "one"}, "devices"),
        ({"devices": [1, 1]}, "devices"),
        ({"devices": [-1, 2]}, "devices"),
        ({"devices": {"count": 1}}, "devices"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": -5}, "ttl_s"),
        ({"ttl_s": 1e12}, "ttl_s"),
        ({"min_free_memory_bytes": -1}, "min_free_memory_bytes"),
        ({"owner_pid": 0}, "owner_pid"),
        ({"min_free_memory_bytes": 10**400}, "min_free_memory_bytes"),
        ({"queue": "yes"}, "queue"),
        ({"gpus": 2}, "gpus"),
        ([], ""),
    ],
)
def test_an_invalid_request_is_refused_with_the_name_of_the_field(api: DaemonProcess, body: Any, field: str) -> None:
    before = len(events(api))
    answer = ask(api, body)
    assert answer.problem() == (422, "invalid_request")
    assert field in answer.json["detail"]
    assert len(events(api)) == before, "something was recorded all the same"


@pytest.mark.parametrize("raw", [b"", b"{", b"count=2", b'{"count": NaN}', b"\xff\xfe", b'{"count": 1}}'])
def test_a_body_that_is_not_json_is_refused(api: DaemonProcess, raw: bytes) -> None:
    answer = api.call("POST", "/v1/leases", raw=raw)
    assert answer.problem() in [(400, "invalid_request"), (422, "invalid_request")]


def test_a_compressed_body_is_refused_as_what_it_is(api: DaemonProcess) -> None:
    answer = api.call("POST", "/v1/leases", raw=gzip.compress(b'{"count": 1}'))
    assert answer.problem() == (400, "invalid_request")
    assert answer.json["detail"] == "The body is compressed with gzip."


def test_a_body_over_one_mebibyte_is_refused(api: DaemonProcess) -> None:
    answer = api.call("POST", "/v1/leases", raw=json.dumps({"label": "x" * 2**20}).encode())
    assert answer.problem() == (413, "too_large")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1/leases/lease-x", (404, "not_found")),
        ("GET", "/v1/leases/lease-x/explain", (404, "not_found")),
        ("POST", "/v1/leases/lease-x/renew", (404, "not_found")),
        ("POST", "/v1/leases/lease-x/release", (404, "not_found")),
        ("GET", "/v1/gpus/GPU-x", (404, "not_found")),
        ("GET", "/v1/nodes/x", (404, "not_found")),
        ("GET", "/v1/jobs/job-x", (404, "not_found")),
        ("GET", "/v1/jobs/job-x/logs", (404, "not_found")),
        ("POST", "/v1/jobs/job-x/cancel", (404, "not_found")),
        ("GET", "/v1/nothing", (404, "not_found")),
        ("DELETE", "/v1/leases", (405, "method_not_allowed")),
        ("GET", "/v1/leases?limit=0", (422, "invalid_request")),
        ("GET", "/v1/leases?cursor=abc", (422, "invalid_request")),
        ("GET", "/v1/leases?state=dead", (422, "invalid_request")),
        ("GET", "/v1/events?after=-1", (422, "invalid_request")),
        ("GET", "/v1/events?after=99999999999999999999", (422, "invalid_request")),
        ("GET", f"/v1/jobs/job-x/logs?rank=1{'0' * 300}", (422, "invalid_request")),
        ("GET", "/v1/leases/lease-x?wait_s=nan", (422, "invalid_request")),
    ],
)
def test_every_error_is_a_problem_document(
    api: DaemonProcess, method: str, path: str, expected: tuple[int, str]
) -> None:
    body = {"token": 1} if path.endswith(("renew", "release")) else None
    assert api.call(method, path, body).problem() == expected


def test_too_many_gpus_never_fit_and_busy_ones_are_not_now(api: DaemonProcess) -> None:
    never = ask(api, {"count": 5})
    assert never.problem() == (422, "never_fits")
    assert "Node n1 has 4 GPUs" in never.json["detail"]
    held = ask(api, {"count": 3}).json
    not_now = ask(api, {"count": 2, "queue": False})
    assert not_now.problem() == (409, "not_now")
    assert [item["lease_id"] for item in not_now.json["explanation"]["obstacles"]] == [held["id"]] * 3


def test_a_queued_request_is_granted_by_a_push(api: DaemonProcess) -> None:
    held = ask(api, {"count": 4}).json
    queued = ask(api, {"count": 2})
    assert (queued.status, queued.json["position"]) == (202, 1)
    assert "number 1 in the queue" in api.call("GET", f"/v1/leases/{queued.json['id']}/explain").json["sentence"]
    answers: list[tuple[float, Answer]] = []

    def wait() -> None:
        answer = api.call("GET", f"/v1/leases/{queued.json['id']}?wait_s=60&wait_while=queued")
        answers.append((time.monotonic(), answer))

    waiter = threading.Thread(target=wait)
    waiter.start()
    begun = time.monotonic()
    api.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]})
    waiter.join(60)
    (at, answer), *_ = answers
    assert answer.json["state"] == "active"
    assert at - begun < 40, "not pushed: the answer came when its time was over"


def test_a_post_that_waits_is_answered_with_the_grant(api: DaemonProcess) -> None:
    held = ask(api, {"count": 4}).json
    timer = threading.Timer(0.3, api.call, ("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]}))
    timer.start()
    answer = ask(api, {"count": 4}, "?wait_s=30")
    timer.join()
    assert (answer.status, answer.json["state"]) == (201, "active")


def test_a_long_poll_ends_after_wait_s(api: DaemonProcess) -> None:
    lease = ask(api, {}).json
    begun = time.monotonic()
    answer = api.call("GET", f"/v1/leases/{lease['id']}?wait_s=0.5")
    assert answer.json["state"] == "active"
    assert 0.45 <= time.monotonic() - begun < 30


def test_only_the_token_of_the_grant_acts_on_a_lease(api: DaemonProcess) -> None:
    lease = ask(api).json
    for action in ("renew", "release"):
        for token in (lease["token"] + 1, None):
            assert api.call("POST", f"/v1/leases/{lease['id']}/{action}", {"token": token}).problem() == (
                412,
                "stale_token",
            )
    assert api.call("GET", f"/v1/leases/{lease['id']}").json["state"] == "active"


def test_a_lease_that_expired_and_went_to_another_is_lost(api: DaemonProcess) -> None:
    lease = ask(api, {"devices": [0], "ttl_s": 0.3}).json
    other = ask(api, {"devices": [0]}, "?wait_s=60").json
    assert other["state"] == "active"
    assert api.call("POST", f"/v1/leases/{lease['id']}/renew", {"token": lease["token"]}).problem() == (
        410,
        "lease_lost",
    )


def test_the_same_key_gets_the_same_lease(api: DaemonProcess) -> None:
    key = {"Idempotency-Key": f"key-{time.monotonic_ns()}"}
    first, second = ask(api, {"count": 1}, **key), ask(api, {"count": 1}, **key)
    assert (first.status, first.json["id"]) == (second.status, second.json["id"])
    assert ask(api, {"count": 2}, **key).problem() == (422, "idempotency_mismatch")
    job = {"command": ["x.py"]}
    assert api.call("POST", "/v1/jobs", job, **key).problem() == (422, "idempotency_mismatch")


@pytest.mark.parametrize("path", ["/v1/leases", "/v1/jobs"])
def test_two_keys_are_refused(api: DaemonProcess, path: str) -> None:
    """A proxy adds one of its own: with only the first of them a repetition would be another request."""
    body = json.dumps({"count": 1} if path == "/v1/leases" else {"command": ["x.py"]}).encode()
    connection = HTTPConnection("127.0.0.1", api.port, timeout=60)
    connection.putrequest("POST", path)
    for name, value in (("Idempotency-Key", "own"), ("Idempotency-Key", "added"), ("Content-Length", str(len(body)))):
        connection.putheader(name, value)
    connection.endheaders(body)
    refused = json.load(connection.getresponse())
    connection.close()
    assert (refused["status"], refused["code"]) == (422, "invalid_request")
    assert refused["detail"] == "Idempotency-Key: is given 2 times."


def test_the_key_of_a_lease_that_has_ended_gets_410_and_no_environment(api: DaemonProcess) -> None:
    """Who scripts by status and `env`, as with curl, would start a training on GPUs that another has by now."""
    key = {"Idempotency-Key": f"key-{time.monotonic_ns()}"}
    lease = ask(api, {"devices": [0]}, **key).json
    api.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
    for query in ("", "?wait_s=5"):
        again = ask(api, {"devices": [0]}, query, **key)
        assert again.problem() == (410, "lease_lost")
        assert "has ended (released) and its GPUs may be someone else's" in again.json["detail"]
        shown = again.json["lease"]
        assert (shown["id"], shown["state"], shown["end_reason"]) == (lease["id"], "ended", "released")
        assert shown["env"] == {}


def test_a_post_that_waits_for_a_request_that_is_withdrawn_gets_410(api: DaemonProcess) -> None:
    ask(api, {"count": 4})
    answers: list[Answer] = []
    waiter = threading.Thread(target=lambda: answers.append(ask(api, {"count": 4, "label": "gone"}, "?wait_s=30")))
    waiter.start()

    def queued() -> list[str]:
        return [lease["id"] for lease in api.call("GET", "/v1/leases?state=queued").json["items"]]

    eventually(queued, 60)
    api.call("POST", f"/v1/leases/{queued()[0]}/release", {"token": None})
    waiter.join(60)
    assert answers[0].problem() == (410, "lease_lost")
    assert "ended before it was granted: cancelled" in answers[0].json["detail"]


def test_lists_are_paginated(api: DaemonProcess) -> None:
    ids = [ask(api).json["id"] for _ in range(3)]
    first = api.call("GET", "/v1/leases?limit=2").json
    second = api.call("GET", f"/v1/leases?limit=1&cursor={first['next']}").json
    assert [lease["id"] for lease in first["items"] + second["items"]] == ids[::-1]
    assert {lease["state"] for lease in api.call("GET", "/v1/leases?state=active").json["items"]} == {"active"}


def test_a_gpu_with_a_foreign_process_is_never_granted(api: DaemonProcess, hardware: Hardware) -> None:
    hardware.show({"processes": [{"pid": 4242, "memory_bytes": 2**30}]}, {}, {}, {})
    eventually(lambda: states(api) == ["foreign", "free", "free", "free"], 60)
    assert ask(api, {"devices": [0], "queue": False}).problem() == (409, "not_now")
    shown = api.call("GET", f"/v1/gpus/{hardware.uuid(0)}").json
    assert "pid 4242" in shown["reason"]
    assert [gpu["index"] for gpu in ask(api, {"count": 3}).json["gpus"]] == [1, 2, 3]


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[]",
        '{"gpus": 3}',
        '{"gpus": [{}]}',
        '{"gpus": [{"uuid": 7}]}',
        '{"gpus": [{"uuid": "GPU-1", "memory_used_bytes": "x"}]}',
    ],
)
def test_a_broken_simulation_file_turns_the_node_unknown_and_nothing_else(
    api: DaemonProcess, hardware: Hardware, broken: str
) -> None:
    held = ask(api, {"devices": [0]}).json
    hardware.path.write_text(broken)
    # It may have been unknown for a moment before, because a busy machine had no time for its probe.
    eventually(lambda: str(hardware.path) in (api.get("/v1/nodes/n1").json["reason"] or ""), 60, api.story)
    assert api.get("/v1/nodes/n1").json["state"] == "unknown"
    assert set(states(api)) == {"unknown"}
    assert ask(api, {"queue": False}).problem() == (409, "not_now")
    assert api.call("POST", f"/v1/leases/{held['id']}/renew", {"token": held["token"]}).status == 200
    hardware.show({}, {}, {}, {})
    eventually(lambda: states(api) == ["leased", "free", "free", "free"], 60)


def test_curl_sees_a_table(api: DaemonProcess) -> None:
    ask(api, {"count": 4, "label": "mine"})
    ask(api, {"count": 2, "label": "yours"})
    answer = api.call("GET", "/")
    assert answer.headers["content-type"].startswith("text/plain")
    table = answer.content.decode()
    assert table.count("leased") == 4
    assert "mine" in table
    assert "yours" in table


def test_a_reserved_gpu_says_so_in_the_list_by_itself_and_in_the_table(api: DaemonProcess) -> None:
    ask(api, {"devices": [3]})
    older = ask(api, {"count": 4, "label": "resnet"}).json["id"]
    for _ in range(10):
        younger = ask(api).json
        assert younger["state"] == "active"
        api.call("POST", f"/v1/leases/{younger['id']}/release", {"token": younger["token"]})
        eventually(lambda: states(api).count("free") == 3, 60, api.story)
    free = [gpu for gpu in api.call("GET", "/v1/gpus").json["items"] if gpu["state"] == "free"]
    assert len(free) == 3
    for gpu in free:
        assert gpu["reason"].startswith(f"Held for {older} (")
        assert gpu["reserved_for"] == older
        assert '"resnet"' in gpu["reason"]
        assert api.call("GET", f"/v1/gpus/{gpu['uuid']}").json["reason"] == gpu["reason"]
    table = api.call("GET", "/").content.decode()
    assert table.count("free (held)") == 3
    assert table.count(f"GPUs 0-2: Held for {older}") == 1


def test_delete_releases_as_the_route_with_that_name_does(api: DaemonProcess) -> None:
    held, waiting = api.request_lease(4), api.request_lease(1)
    assert api.call("DELETE", f"/v1/leases/{held['id']}").problem() == (412, "stale_token")
    assert api.call("DELETE", f"/v1/leases/{held['id']}?token={held['token'] + 1}").problem() == (412, "stale_token")
    assert api.call("DELETE", f"/v1/leases/{waiting['id']}").json["end_reason"] == "cancelled"
    for _ in range(2):
        ended = api.call("DELETE", f"/v1/leases/{held['id']}?token={held['token']}")
        assert (ended.status, ended.json["end_reason"]) == (200, "released")
    assert api.call("DELETE", "/v1/leases/lease-none").problem() == (404, "not_found")


def test_leases_are_listed_by_user_label_and_node(api: DaemonProcess) -> None:
    me = api.get("/v1/me").json["user"]
    label = f"sweep {time.monotonic_ns()}"
    first, _, waiting = (api.request_lease(count, label=text) for count, text in ((1, label), (1, "other"), (4, label)))

    def listed(query: str) -> list[str]:
        return [lease["id"] for lease in api.get(f"/v1/leases?label={quote(label)}{query}").json["items"]]

    assert listed("") == listed(f"&user={me}") == [waiting["id"], first["id"]]
    assert listed("&user=another-user") == listed("&node=n2") == []
    assert listed("&node=n1") == [first["id"]], "a queued request is on no node"
    assert listed("&state=queued") == [waiting["id"]]
    job = api.job(api.submit("true"))
    assert [lease["id"] for lease in api.get(f"/v1/leases?job={job['id']}").json["items"]] == [job["lease_id"]]


def test_a_page_links_to_the_next_one(api: DaemonProcess) -> None:
    label = f"a&b {time.monotonic_ns()}"
    ids = [api.request_lease(1, label=label)["id"] for _ in range(3)]
    found, path = [], f"/v1/leases?limit=2&label={quote(label, safe='')}"
    while path:
        page = api.get(path)
        found += [lease["id"] for lease in page.json["items"]]
        link = re.fullmatch('<(/v1/leases?[^>]*)>; rel="next"', page.headers.get("link", ""))
        assert (link is None) == (page.json["next"] is None)
        path = link[1] if link else ""
    assert found == ids[::-1]
    assert api.get("/v1/events?after=0&limit=1").headers["link"] == '</v1/events?limit=1&after=1>; rel="next"'
    assert "link" not in api.get("/v1/gpus").headers


def test_a_request_can_require_nvlink(api: DaemonProcess, hardware: Hardware) -> None:
    """GPUs 0 and 2, 1 and 3 have a bridge."""
    hardware.show({}, {}, {}, {}, links=[[0, 2, "nvlink"], [1, 3, "nvlink"]])
    eventually(lambda: len(api.call("GET", "/v1/nodes/n1").json["links"]) == 2, 30)
    try:
        for body, expected in (
            ({"count": 2}, [0, 2]),
            ({"count": 2, "topology": "any"}, [0, 1]),
            ({"count": 2, "topology": "required"}, [0, 2]),
        ):
            lease = api.call("POST", "/v1/leases", body).json
            assert [gpu["index"] for gpu in lease["gpus"]] == expected
            assert lease["demand"]["topology"] == body.get("topology", "preferred")
            api.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
            eventually(lambda: all(gpu["state"] == "free" for gpu in api.call("GET", "/v1/gpus").json["items"]), 30)
        refused = api.call("POST", "/v1/leases", {"count": 3, "topology": "required"})
        assert refused.problem() == (422, "never_fits")
        assert "No 3 GPUs of one node are all connected by NVLink" in refused.json["detail"]
        for body in ({"count": 1, "topology": "nvlink"}, {"devices": "auto", "topology": "required"}):
            wrong = api.call("POST", "/v1/leases", body)
            assert wrong.problem() == (422, "invalid_request")
            assert "topology" in wrong.json["detail"]
    finally:
        hardware.show({}, {}, {}, {})
        eventually(lambda: api.call("GET", "/v1/nodes/n1").json["links"] == [], 30)


def test_a_request_has_a_priority_and_a_time(api: DaemonProcess) -> None:
    def ask(**body: Any) -> dict[str, Any]:
        found: dict[str, Any] = api.call("POST", "/v1/leases", body).json
        return found

    held = ask(count=4)
    low = ask(count=1, priority="scavenge")
    middle = ask(count=1)
    high = ask(count=1, priority="interactive")
    places = [api.call("GET", f"/v1/leases/{lease['id']}").json["position"] for lease in (low, middle, high)]
    assert places == [3, 2, 1]
    assert [lease["demand"]["priority"] for lease in (low, middle, high)] == ["scavenge", "normal", "interactive"]
    assert high["demand"]["time_s"] == 4 * 3600
    explained = api.call("GET", f"/v1/leases/{low['id']}/explain").json
    assert "number 3 in the queue, behind 2 of higher priority" in explained["sentence"]
    for body, said in (
        ({"priority": "interactive", "count": 3}, "may have 2 at a time"),
        ({"priority": "interactive", "time_s": 5 * 3600}, "may last 4 h"),
    ):
        refused = api.call("POST", "/v1/leases", body)
        assert refused.problem() == (422, "over_quota")
        assert said in refused.json["detail"]
    wrong = api.call("POST", "/v1/leases", {"priority": "urgent"})
    assert wrong.problem() == (422, "invalid_request")
    assert "priority" in wrong.json["detail"]
    api.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]})
    eventually(lambda: api.call("GET", f"/v1/leases/{low['id']}").json["state"] == "active", 30)
    short = ask(count=1, time_s=0.5)
    assert short["ends_at"] is not None
    ended = api.call("GET", f"/v1/leases/{short['id']}?wait_s=30&wait_while=active").json
    assert (ended["state"], ended["end_reason"]) == ("ended", "time_over")
