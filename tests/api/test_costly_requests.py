"""Requests that take much more to answer than to send are answered cheaply, or in few words."""

from __future__ import annotations

import gzip
import json
import random
import re

import pytest

from gpulease_protocol.errors import InvalidRequest
from gpulease_server.api.request_body import _may_be_unstorable
from gpulease_server.api.routes.front_page import MAX_WAITING
from gpulease_server.api.routes.jobs import SUBMIT_BODY
from tests.daemon import DaemonProcess


def test_a_body_of_very_many_errors_is_refused_without_a_list_of_them(api: DaemonProcess) -> None:
    fields = ",".join(f'"V{number}": 1' for number in range(5000))
    for body, detail in (
        (
            f"{{{fields}}}",
            "The body has 5000 fields that are not fields of this request: V0, V1, V2, V3, V4, and so on.",
        ),
        (f'{{"command": ["true"], "environment": {{{fields}}}}}', "The body has 5000 errors, too many to list."),
    ):
        answer = api.call("POST", "/v1/jobs", raw=body.encode())
        assert answer.problem() == (422, "invalid_request")
        assert answer.json["detail"].startswith(detail)


def test_unknown_fields_are_not_handed_to_what_makes_an_error_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SUBMIT_BODY, "_adapter", None)
    with pytest.raises(InvalidRequest, match="The body has 5000 fields"):
        SUBMIT_BODY.read(json.dumps(dict.fromkeys(map("V{}".format, range(5000)), 1)).encode())


@pytest.mark.parametrize("body", ['{"command": [%s1]}' % ("1," * 70_000), "{%s}" % ("[]," * 70_000)])
def test_a_body_of_very_many_parts_is_refused_before_it_is_read(api: DaemonProcess, body: str) -> None:
    answer = api.call("POST", "/v1/jobs", raw=body.encode())
    assert answer.problem() == (413, "too_large")
    assert "16384 commas" in answer.json["detail"]


def test_a_job_has_no_more_variables_than_a_login(api: DaemonProcess) -> None:
    answer = api.call("POST", "/v1/jobs", {"command": ["true"], "environment": {f"V{n}": "" for n in range(4097)}})
    assert answer.problem() == (422, "invalid_request")
    assert "at most 4096 variables, not 4097" in answer.json["detail"]


def test_what_cannot_be_stored_is_found_as_a_regular_expression_would() -> None:
    dice = random.Random(1)
    seen = set()
    for _ in range(3000):
        parts = dice.choices([b"9" * 18, b"0", b"7", b"x", b" ", b"\\u0000", b"\\u00001", b"u0000"], k=4)
        body = b"".join(parts)
        expected = re.search(rb"\\u0000|[0-9]{19}", body) is not None
        assert _may_be_unstorable(body) is expected, body
        seen.add(expected)
    assert seen == {True, False}


def test_a_document_that_never_changes_is_sent_as_the_caller_accepts_it(api: DaemonProcess) -> None:
    for path in ("/openapi.json", "/docs"):
        plain, packed = api.get(path), api.call("GET", path, **{"Accept-Encoding": "gzip"})
        assert (plain.status, packed.status) == (200, 200)
        assert "content-encoding" not in plain.headers
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed.content) == plain.content
        assert len(packed.content) < len(plain.content) / 4
        assert {answer.headers["vary"] for answer in (plain, packed)} == {"Accept-Encoding"}
        assert plain.headers["content-type"] == packed.headers["content-type"]


def test_the_text_page_shows_the_beginning_of_a_long_queue_and_says_how_many_more_wait(api: DaemonProcess) -> None:
    api.request_lease(4)
    api.submit("true", gpus=4, name="sweep", array={"indices": f"0-{MAX_WAITING + 2}"})
    page = api.get("/").content.decode()
    assert page.count("sweep") == MAX_WAITING
    assert "\n3 more wait; `gpulease leases` lists them.\n" in page
    assert f"0 of 4 GPUs free, {MAX_WAITING + 3} waiting" in page
    for job in api.get("/v1/jobs?state=queued&limit=1000").json["items"]:
        api.call("POST", f"/v1/jobs/{job['id']}/cancel")
