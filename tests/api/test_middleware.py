"""What any client may rely on whatever it asks: errors are problems with a name, answers have tags, lists are short."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon import DaemonProcess

MIB = 2**20


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/nowhere", None, (404, "not_found")),
        ("GET", "/v1/leases/%ff%fe", None, (404, "not_found")),
        ("GET", "/v1/gpus/%00", None, (422, "invalid_request")),
        ("DELETE", "/v1/leases", None, (405, "method_not_allowed")),
        ("PATCH", "/v1/nodes/n1", b"{}", (405, "method_not_allowed")),
        ("POST", "/v1/leases", b"", (400, "invalid_request")),
        ("POST", "/v1/jobs/x/cancel", b" ", (400, "invalid_request")),
        ("POST", "/v1/leases", b"{", (400, "invalid_request")),
        ("POST", "/v1/leases", b"\xff\xfe{}", (400, "invalid_request")),
        ("POST", "/v1/leases", b'{"label": "\xff"}', (400, "invalid_request")),
        ("POST", "/v1/leases", b'{"label": "\\ud800"}', (400, "invalid_request")),
        ("POST", "/v1/leases", b"[" * 100_000, (400, "invalid_request")),
        ("POST", "/v1/leases", b'{"a":' * 100_000, (400, "invalid_request")),
        ("POST", "/v1/leases", b"[" * 100 + b"]" * 100, (422, "invalid_request")),
        ("POST", "/v1/leases", b'{"ttl_s": NaN}', (422, "invalid_request")),
        ("POST", "/v1/leases", b'{"ttl_s": Infinity}', (422, "invalid_request")),
        ("POST", "/v1/leases", b'{"ttl_s": 1e400}', (422, "invalid_request")),
        ("POST", "/v1/leases", b'{"count": ' + b"9" * 5000 + b"}", (400, "invalid_request")),
        ("POST", "/v1/leases", b" " * (MIB + 1), (413, "too_large")),
        ("POST", "/v1/jobs", b" " * (4 * MIB + 1), (413, "too_large")),
    ],
)
def test_every_error_is_a_problem_with_a_request_id(
    api: DaemonProcess, method: str, path: str, body: bytes | None, expected: tuple[int, str]
) -> None:
    answer = api.call(method, path, raw=body)
    assert answer.problem() == expected
    assert answer.json["request_id"] == answer.headers["x-request-id"]
    assert re.fullmatch(r"request-[0-9a-f]{16}", answer.json["request_id"])


def requests_of_every_kind(document: Any) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Every operation of the OpenAPI document, for what does not exist; and what the document does not have."""
    for path, operations in document["paths"].items():
        for method in operations:
            yield method.upper(), re.sub(r"\{\w+\}", "x", path), {}
    for path in ("/docs", "/openapi.json", "/dashboard/dashboard.js", "/dashboard/none.js", "/<script>"):
        yield "GET", path, {}
    for headers in (
        {"Accept": "text/html"},
        {"Accept": "text/event-stream"},
        {"Accept-Encoding": "gzip"},
        {"If-None-Match": "*"},
        {"Origin": "http://evil.example"},
        {"Authorization": "Bearer wrong"},
    ):
        yield "HEAD", "/v1/events", headers
        yield "GET", "/", headers
    yield "PUT", "/v1/leases", {}
    yield "OPTIONS", "/v1/leases", {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}


def test_no_browser_guesses_the_media_type_of_any_answer(api: DaemonProcess) -> None:
    statuses = set()
    for method, path, headers in requests_of_every_kind(api.get("/openapi.json").json):
        answer = api.call(method, path, raw=b"{" if method == "POST" else None, **headers)
        assert answer.headers.get("x-content-type-options") == "nosniff", (method, path, headers, answer.status)
        statuses.add(answer.status)
    assert {200, 304, 400, 401, 403, 404, 405} <= statuses


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/leases", "GET, HEAD, POST"),
        ("/v1/jobs", "GET, HEAD, POST"),
        ("/", "GET, HEAD"),
        ("/v1/jobs/x/cancel", "POST"),
        ("/v1/jobs/explain", "POST"),
    ],
)
def test_a_refused_method_is_answered_with_the_allowed_ones(api: DaemonProcess, path: str, allowed: str) -> None:
    answer = api.call("PUT", path, {})
    assert answer.headers["allow"] == allowed
    assert answer.json["remedy"] == f"Use {allowed}."


@pytest.mark.parametrize("name", ["a", "trial-7.2_b", "x" * 64])
def test_a_callers_own_request_id_is_kept(api: DaemonProcess, name: str) -> None:
    assert api.call("GET", "/v1/gpus", None, **{"X-Request-Id": name}).headers["x-request-id"] == name
    assert api.call("GET", "/nowhere", None, **{"X-Request-Id": name}).json["request_id"] == name


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "a\tb", "<script>", "\xe9"])
def test_a_request_id_that_would_break_a_log_line_is_not_kept(api: DaemonProcess, name: str) -> None:
    assert api.call("GET", "/healthz", None, **{"X-Request-Id": name}).headers["x-request-id"].startswith("request-")


@pytest.mark.parametrize("path", ["/v1/leases", "/v1/jobs", "/v1/events?after=0", "/v1/leases?state=active"])
def test_an_unchanged_answer_is_not_sent_again(api: DaemonProcess, path: str) -> None:
    first = api.call("GET", path)
    assert first.status == 200
    tag = first.headers["etag"]
    again = api.call("GET", path, None, **{"If-None-Match": f'"other", {tag}'})
    assert (again.status, again.content, again.headers["etag"]) == (304, b"", tag)
    assert "content-type" not in again.headers


def test_a_changed_answer_is_sent(api: DaemonProcess) -> None:
    tag = api.call("GET", "/v1/leases?state=active").headers["etag"]
    lease = api.call("POST", "/v1/leases", {"count": 1}).json
    answer = api.call("GET", "/v1/leases?state=active", None, **{"If-None-Match": tag})
    assert answer.status == 200
    assert [item["id"] for item in answer.json["items"]] == [lease["id"]]
    assert answer.headers["etag"] != tag


def test_a_long_answer_is_compressed_for_clients_that_accept_it(api: DaemonProcess) -> None:
    plain = api.call("GET", "/openapi.json")
    short = api.call("GET", "/openapi.json", None, **{"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert short.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(short.content)) == plain.json
    assert len(short.content) < len(plain.content) / 4
    tiny = api.call("GET", "/healthz", None, **{"Accept-Encoding": "gzip"})
    assert "content-encoding" not in tiny.headers


def test_pages_of_other_origins_may_do_nothing(api: DaemonProcess) -> None:
    asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    for answer in (api.call("OPTIONS", "/v1/leases", None, **asked), api.call("GET", "/v1/gpus", None, **asked)):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/healthz",
        "/readyz",
        "/docs",
        "/openapi.json",
        "/v1/gpus",
        "/v1/nodes/n1",
        "/v1/leases?limit=1",
        "/metrics",
    ],
)
def test_head_answers_as_get_does_without_the_body(api: DaemonProcess, path: str) -> None:
    got, headed = api.call("GET", path), api.call("HEAD", path)
    assert (headed.status, headed.content) == (got.status, b"")
    assert got.content != b""
    assert set(headed.headers) == set(got.headers)
    assert headed.headers["content-type"] == got.headers["content-type"]


def test_head_is_refused_like_get_and_compares_etags(api: DaemonProcess) -> None:
    assert api.call("HEAD", "/v1/leases/lease-0").status == 404
    assert api.call("HEAD", "/v1/leases?stat=active").status == 422
    assert api.call("HEAD", "/v1/jobs/job-0/cancel").status == 405
    assert api.call("HEAD", "/v1/gpus", None, Origin="http://evil.example").status == 403
    tag = api.call("HEAD", "/v1/leases?limit=1").headers["etag"]
    assert api.call("GET", "/v1/leases?limit=1").headers["etag"] == tag
    assert api.call("HEAD", "/v1/leases?limit=1", None, **{"If-None-Match": tag}).status == 304


def test_head_of_a_stream_ends_with_its_head_and_leaves_none_open(api: DaemonProcess) -> None:
    for _ in range(600):  # more than may be open at once
        answer = api.call("HEAD", "/v1/events", None, Accept="text/event-stream")
        assert (answer.status, answer.content) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("path", ["/v1/gpus/", "/v1/leases/", "/healthz/", "/v1/events/", "/docs/"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_path_with_a_trailing_slash_is_another_one(api: DaemonProcess, method: str, path: str) -> None:
    answer = api.call(method, path, {} if method == "POST" else None)
    assert answer.status == 404
    assert "location" not in answer.headers
    if method != "HEAD":
        assert answer.problem() == (404, "not_found")
