"""An answer that many get: made once at a moment, and never for someone who may not see it."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

from starlette.requests import Request

from gpulease_server.api.shared_answers import MAX_AUDIENCES, MAX_COMPRESSED_BYTES, SharedAnswers
from tests.daemon import DaemonProcess

LONG = b'{"items":[' + b"7," * 4000 + b'7],"next":null}'


class Asked:
    """A list, and how often it was made."""

    def __init__(self, body: bytes = LONG) -> None:
        self.body, self.made, self.shared = body, 0, SharedAnswers()

    def ask(self, moment: int = 1, audience: Any = "all", accepts: str = "") -> Any:
        async def make() -> bytes:
            self.made += 1
            return self.body

        request = Request({"type": "http", "headers": [(b"accept-encoding", accepts.encode())]})
        return asyncio.run(self.shared.respond(request, moment, audience, make))


def test_it_is_made_once_for_all_who_ask_at_one_moment() -> None:
    asked = Asked()
    assert [asked.ask().body for _ in range(20)] == [LONG] * 20
    assert asked.made == 1


def test_it_is_made_again_when_something_has_changed() -> None:
    asked = Asked()
    asked.ask(1)
    asked.body = b"[]"
    assert asked.ask(2).body == b"[]"


def test_who_may_see_something_else_has_an_answer_of_their_own() -> None:
    asked = Asked()
    asked.ask(audience="all")
    asked.body = b"[]"
    assert asked.ask(audience="ann").body == b"[]"
    assert asked.ask(audience="all").body == LONG


def test_no_more_answers_are_kept_than_that_however_many_ask() -> None:
    asked = Asked()
    for user in range(3 * MAX_AUDIENCES):
        asked.ask(audience=user)
    for user in range(3 * MAX_AUDIENCES):
        asked.ask(audience=user)
    assert asked.made == 5 * MAX_AUDIENCES


def test_who_accepts_gzip_gets_it_unless_it_is_so_long_that_a_thread_compresses_it() -> None:
    asked = Asked()
    compressed = asked.ask(accepts="gzip, br")
    assert gzip.decompress(compressed.body) == LONG
    assert compressed.headers["content-encoding"] == "gzip"
    assert compressed.headers["content-length"] == str(len(compressed.body))
    assert "content-encoding" not in asked.ask().headers
    assert asked.made == 1
    asked = Asked(b" " * (MAX_COMPRESSED_BYTES + 1))
    assert "content-encoding" not in asked.ask(accepts="gzip").headers


def test_a_list_of_gpus_shows_a_lease_as_soon_as_its_holder_has_the_answer(api: DaemonProcess) -> None:
    for count in range(1, 5):
        lease = api.call("POST", "/v1/leases", {"count": 1}).json
        assert lease["state"] == "active"
        leases = [gpu["lease_id"] for gpu in api.get("/v1/gpus").json["items"]]
        assert lease["id"] in leases
        assert leases.count(None) == 4 - count
