"""Requests that take much more to answer than to send are answered cheaply, or in few words."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from gpulease_protocol.errors import InvalidRequest
from gpulease_server.api.request_body import _may_be_unstorable
from gpulease_server.api.routes import timeline, usage
from gpulease_server.api.routes.front_page import MAX_WAITING
from gpulease_server.api.routes.jobs import SUBMIT_BODY
from gpulease_server.core.ledger import Ledger
from gpulease_server.runtime import clock
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


def ask_timeline(daemon: Any) -> Coroutine[Any, Any, Any]:
    return timeline.show_timeline(daemon, Request({"type": "http"}), limit=5000)


@pytest.mark.parametrize("ask", [usage.show_usage, ask_timeline])
def test_reads_that_take_seconds_leave_the_threads_to_others(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[Any], Coroutine[Any, Any, Any]]
) -> None:
    begun, may_end, reading, at_once = threading.Semaphore(0), threading.Event(), list[int](), list[int]()

    def read(*_: object) -> tuple[bytes, None]:
        reading.append(1)
        at_once.append(len(reading))
        begun.release()
        assert may_end.wait(10)
        reading.pop()
        return b"", None

    monkeypatch.setattr(usage, "gpu_usage", read)
    monkeypatch.setattr(timeline, "_encoded", read)

    async def story() -> None:
        daemon = SimpleNamespace(store=None, ledger=Ledger(), policy=None, now=clock.now, long_read=asyncio.Lock())
        async with asyncio.timeout(60), asyncio.TaskGroup() as asking:
            for _ in range(60):  # more than there are threads
                asking.create_task(ask(daemon))
            await asyncio.sleep(0)
            assert await asyncio.to_thread(begun.acquire, timeout=30), "a thread is left for who reads little"
            may_end.set()

    asyncio.run(story())
    assert at_once == [1] * 60
