"""The hot path answers as the application does: same status, same headers, same bytes, counted and logged the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from gpulease_protocol.codec import to_body
from gpulease_protocol.node_protocol import NodeReport
from gpulease_protocol.tokens import MADE_ROLES, Role, TokenRequest
from gpulease_server.api.access_settings import AccessSettings
from gpulease_server.runtime.leadership import status as leadership_status
from gpulease_server.runtime.leadership.status import Leadership
from tests.api.two_ways import ADA, EVE, ROOT, STRANGER, Conversation, Side, both
from tests.core.build import gpu

KIB = 2**10


def same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversation: Conversation, access: AccessSettings | None = None
) -> Side:
    """Have the conversation both ways and compare; the side with the hot path."""
    hot, plain = both(tmp_path, monkeypatch, conversation, access)
    assert len(hot.replies) == len(plain.replies) > 0
    for one, other in zip(hot.replies, plain.replies, strict=True):
        assert one == other
    assert hot.counted() == plain.counted()
    assert sorted(hot.lines, key=str) == sorted(plain.lines, key=str), "those who wait end in any order"
    assert plain.hot.total() == 0
    return hot


def test_the_life_of_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        for peer in (ROOT, ADA, EVE):
            asked = {"count": 2, "label": "schnörkel ü \u2028 \"'<>", "ttl_s": 60.5}
            made = await side.send("POST", "/v1/leases?wait_s=0", asked, peer=peer)
            assert made.status == 201
            lease = made.json
            path, proof = f"/v1/leases/{lease['id']}", {"token": lease["token"]}
            queued = (await side.send("POST", "/v1/leases", {"count": 4, "ttl_s": 3600}, peer=peer)).json
            assert queued["state"] == "queued"
            for reader in (ROOT, ADA, EVE):
                await side.send("GET", path, peer=reader)
                await side.send("GET", f"/v1/leases/{queued['id']}", peer=reader)
            await side.send("POST", f"{path}/renew", proof, peer=peer)
            await side.send("POST", f"{path}/renew", proof, peer=peer, fields=[("X-Request-Id", "mine.1")])
            await side.send("POST", f"{path}/renew", proof, peer=peer, fields=[("X-Request-Id", "not one word")])
            await side.send("POST", f"/v1/leases/{queued['id']}/renew", {}, peer=peer)
            await side.send("POST", f"/v1/leases/{queued['id']}/release", {"token": None}, peer=peer)
            for wrong in (lease["token"] + 1, None, -1, 2**62):
                await side.send("POST", f"{path}/renew", {"token": wrong}, peer=peer)
            await side.send("DELETE", f"{path}?token=7", peer=peer)
            await side.send("DELETE", path, peer=EVE)
            await side.send("POST", f"{path}/release", proof, peer=peer)
            await side.send("POST", f"{path}/release", proof, peer=peer)
            await side.send("POST", f"{path}/renew", proof, peer=peer)
            for state in ("queued", "active"):
                await side.send("GET", f"{path}?wait_s=5&wait_while={state}", peer=peer)
            await side.send("GET", f"{path}?wait_s=5", peer=peer)
            await side.send("DELETE", f"{path}?token={lease['token']}", peer=peer)
            await report_free(side)

    found = same(tmp_path, monkeypatch, conversation)
    assert found.hot.total() == len(found.replies), "nothing in it is unusual"


async def report_free(side: Side) -> None:
    """The node shows all its GPUs clean, as its worker would."""
    ticket = None
    for _ in range(2):
        side.clock.passed_s += 0.01
        view = NodeReport(worker_id="w", host="a", gpus=tuple(gpu(index) for index in range(4)), ticket=ticket)
        answer = await side.send("POST", "/v1/nodes/a/exchange", to_body(view) | {"hold_s": 0})
        assert answer.status == 200, answer.body
        ticket = answer.json["ticket"]


PEERS = pytest.mark.parametrize("peer", [ROOT, ADA, EVE, STRANGER], ids=["root", "user", "loopback", "unknown"])


@PEERS
def test_what_is_odd_or_hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: Any) -> None:
    async def conversation(side: Side) -> None:
        lease = (await side.send("POST", "/v1/leases", {})).json
        own = (await side.send("POST", "/v1/leases", {"count": 1}, peer=ADA)).json
        for held in (lease, own):
            for path in (f"/v1/leases/{held['id']}/renew", f"/v1/leases/{held['id']}/release"):
                for body in BODIES:
                    if body is not None or path.endswith("renew"):
                        await side.send("POST", path, body, peer=peer)
        for body in BODIES:
            await side.send("POST", "/v1/leases", body, peer=peer)
            await side.send("POST", "/v1/nodes/a/exchange", body, peer=peer)
        for target in targets(lease["id"]):
            for method in ("GET", "POST", "DELETE", "HEAD", "PUT", "OPTIONS"):
                await side.send(method, target, {"token": 1} if method == "POST" else None, peer=peer)

    found = same(tmp_path, monkeypatch, conversation)
    assert found.hot["POST"] > 50


@PEERS
def test_odd_heads_and_bodies_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: Any) -> None:
    async def conversation(side: Side) -> None:
        lease = (await side.send("POST", "/v1/leases", {})).json
        proof = {"token": lease["token"]}
        for fields in FIELDS:
            await side.send("POST", f"/v1/leases/{lease['id']}/renew", proof, peer=peer, fields=fields)
            await side.send("GET", f"/v1/leases/{lease['id']}", peer=peer, fields=fields)
            await side.send("POST", "/v1/leases", {"count": 4, "queue": False}, peer=peer, fields=fields)
        for parts in ([b'{"tok', b'en": 1}'], [b"", b"{}"], [b" " * 20_000, b"{}"], [b"{}" * 2**20]):
            await side.send("POST", f"/v1/leases/{lease['id']}/renew", peer=peer, parts=parts)
            await side.send("POST", "/v1/nodes/a/exchange", peer=peer, parts=parts)
            chunked = [("Transfer-Encoding", "chunked")]
            await side.send("POST", "/v1/leases", peer=peer, parts=parts, fields=chunked)
            await side.send("POST", "/v1/leases", peer=peer, parts=parts, fields=[("Expect", "100-continue")])
            await side.send("POST", "/v1/leases", peer=peer, parts=parts, leaves=True)

    assert same(tmp_path, monkeypatch, conversation).hot["POST"] > 10


BODIES: list[Any] = [
    *(
        b"",
        b" ",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"\xff\xfe{}",
        b'{"label": "\xff"}',
        b'{"label": "\\ud800"}',
    ),
    *(b"[" * 10_000, b'{"a":' * 1000, b"[" * 100 + b"]" * 100, b'{"ttl_s": NaN}', b'{"ttl_s": Infinity}'),
    *(b'{"ttl_s": 1e400}', b'{"count": ' + b"9" * 5000 + b"}", b'{"token": 1, "token": 2}', b'{"token": 1} x'),
    *({"token": "1"}, {"token": True}, {"token": 1.0}, {"token": 2**63}, {"token": 2**64}, {"token": 1, "x": 1}),
    *({"fencing_token": 1}, {"label": "a\0b"}, {"count": 0}, {"count": "2"}, {"count": 1, "devices": 1}, {"count": 5}),
    *({"ttl_s": 10**9}, {"ttl_s": 0}, {"devices": "auto", "queue": False}, {"node": "none"}, {"label": "x" * 5000}),
    *({"adopt": True}, {"adopt": True, "owner_pid": 1}, {"owner_pid": 2**31}, {"owner_pid": 1, "owner_start_ticks": 1}),
    *({"count": 3, "queue": False}, {f"field{number}": 1 for number in range(200)}, b"," * 17_000, None),
    *(
        {"worker_id": "w", "host": "h"},
        {"worker_id": "x" * 300, "host": "h"},
        {"worker_id": "v", "host": "h", "gpus": 1},
    ),
]
FIELDS: list[list[tuple[str, str]]] = [
    *([("Host", "evil.example")], [("Host", "localhost")], [("Host", "[::1]:1")], [("Host", "127.0.0.1.evil.example")]),
    *([("Host", "localhost"), ("Host", "localhost")], [("Host", "")], [("Host", "\xe9")]),
    *([("Origin", "http://evil.example")], [("Origin", "http://127.0.0.1:8750")], [("Origin", "null")]),
    *([("Authorization", "Bearer wrong")], [("Authorization", "Basic eDp5")], [("Authorization", "")]),
    *([("Authorization", "Bearer a"), ("Authorization", "Bearer b")], [("Authorization", "Bearer \xe9")]),
    *([("Idempotency-Key", "one")], [("Idempotency-Key", "one")], [("Idempotency-Key", "")]),
    *([("Idempotency-Key", "x" * 201)], [("Idempotency-Key", "\xe9")]),
    [("Idempotency-Key", "one"), ("Idempotency-Key", "one")],
    *([("If-None-Match", "*")], [("If-None-Match", '"x"')], [("Accept-Encoding", "gzip")], [("Accept-Encoding", "br")]),
    *(
        [("Content-Type", "text/plain")],
        [("Content-Type", "application/x-www-form-urlencoded")],
        [("Accept", "text/html")],
    ),
    *([("X-Request-Id", "\xe9")], [("X-Request-Id", "a"), ("X-Request-Id", "b")], [("Upgrade", "websocket")]),
    *([("Connection", "close")], [("Range", "bytes=0-1")], [("Cookie", "a=b")], [("X-Forwarded-For", "1.2.3.4")]),
]


def targets(lease_id: str) -> list[str]:
    """Places near those of the hot path."""
    lease = f"/v1/leases/{lease_id}"
    return [
        *("/v1/leases/", "/v1//leases", "/v1/leases?", "/V1/leases", "/v1/leases/explain", "/v1/leases/x/y/z"),
        *(
            "/v1/leases?wait_s=",
            "/v1/leases?wait_s=x",
            "/v1/leases?wait_s=-1",
            "/v1/leases?wait_s=3601",
            "/v1/leases?x=1",
        ),
        *(
            "/v1/leases?x=1",
            "/v1/leases?wait_s=0&wait_s=0",
            "/v1/leases?wait_s=nan",
            "/v1/leases?wait_s=1e1",
            "/v1/leases?wait_s=%31",
        ),
        *(f"{lease}/", f"{lease}/renew/", f"{lease}/renew?x=1", f"{lease}/renew?wait_s=1", f"{lease}/Renew"),
        *(f"{lease}?token=x", f"{lease}?token=1&token=1", f"{lease}?wait_while=queued", f"{lease}?wait_s=1&x=y"),
        *(
            f"{lease}?wait_s=0&wait_while={word}"
            for word in ("active", "none", "", "Queued", "queued&wait_while=ended")
        ),
        *(f"{lease}?wait_while=queued&wait_s=0", f"{lease}?wait_s=0&wait_while=queued&token=1"),
        *("/v1/leases?wait_s=0&wait_while=queued", f"{lease}?wait_s=0&wait_while=%71ueued"),
        *(f"{lease}?wait_while=none", f"{lease}?token={2**63}", f"{lease}x", "/v1/leases/%00", "/v1/leases/\u00e9"),
        *("/v1/leases/x/renew", "/v1/leases/" + "x" * 300, "/v1/leases/" + "x" * 300 + "/renew", "/v1/leases/./renew"),
        *(
            "/v1/nodes//exchange",
            "/v1/nodes/none/exchange",
            "/v1/nodes/a/exchange?x=1",
            "/v1/jobs/x/renew",
            "/v1/gpus/x",
        ),
        *("/v1/nodes/" + "x" * 300 + "/exchange", "/v1/nodes/a\u00e9/exchange"),
    ]


def test_bearer_tokens_and_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        assert side.daemon.bearer_tokens is not None
        side.daemon.bearer_tokens.restore()
        lease = (await side.send("POST", "/v1/leases", {"label": "of root"})).json
        for role in MADE_ROLES:
            joins: dict[str, Any] = {"node": "b", "expires_s": 60} if role is Role.JOIN else {}
            made = await side.daemon.bearer_tokens.create(TokenRequest(user=f"a-{role}", role=role, **joins), "root")
            sent = [("Authorization", f"Bearer {made.bearer}")]
            for peer in (STRANGER, EVE):
                asked = await side.send("POST", "/v1/leases", {"count": 1}, peer=peer, fields=sent)
                of_other = f"/v1/leases/{lease['id']}"
                await side.send("GET", of_other, peer=peer, fields=sent)
                await side.send("POST", f"{of_other}/renew", {"token": lease["token"]}, peer=peer, fields=sent)
                await side.send("POST", "/v1/leases/none/renew", {}, peer=peer, fields=sent)
                view = {"worker_id": "w2", "host": "h", "hold_s": 0}
                await side.send("POST", "/v1/nodes/b/exchange", view, peer=peer, fields=sent)
                await side.send("POST", "/v1/nodes/c/exchange", view, peer=peer, fields=sent)
                if asked.status == 201:
                    path = f"/v1/leases/{asked.json['id']}"
                    await side.send("DELETE", f"{path}?token={asked.json['token']}", peer=peer, fields=sent)
                await report_free(side)
            await side.daemon.bearer_tokens.revoke(made.id, "root")
            await side.send("POST", "/v1/leases", {}, peer=STRANGER, fields=sent)

    assert same(tmp_path, monkeypatch, conversation).hot.total() > 50


def test_one_key_makes_one_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        key = [("Idempotency-Key", "mine")]
        made = [await side.send("POST", "/v1/leases", {"count": 1}, peer=ADA, fields=key) for _ in range(2)]
        assert made[0].json["id"] == made[1].json["id"]
        await side.send("POST", "/v1/leases", {"count": 2}, peer=ADA, fields=key)
        await side.send("POST", "/v1/leases?wait_s=1", {"count": 1}, peer=ADA, fields=key)
        other = await side.send("POST", "/v1/leases", {"count": 1}, peer=EVE, fields=key)
        assert other.json["id"] != made[0].json["id"]
        await side.send("DELETE", f"/v1/leases/{made[0].json['id']}?token={made[0].json['token']}", peer=ADA)
        ended = await side.send("POST", "/v1/leases", {"count": 1}, peer=ADA, fields=key)
        assert ended.status == 410

    found = same(tmp_path, monkeypatch, conversation)
    assert found.hot.total() == len(found.replies)


def test_a_long_answer_is_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        lease = (await side.send("POST", "/v1/leases", {"count": 4, "label": "x" * 900})).json
        path = f"/v1/leases/{lease['id']}"
        for fields in ([], [("Accept-Encoding", "gzip, deflate")], [("Accept-Encoding", "identity")]):
            for peer in (ROOT, ADA):
                await side.send("GET", path, fields=fields, peer=peer)
            answer = await side.send("POST", f"{path}/renew", {"token": lease["token"]}, fields=fields)
            assert len(answer.body) > (2 * KIB if not fields or "gzip" not in fields[0][1] else 100)

    found = same(tmp_path, monkeypatch, conversation)
    assert found.hot.total() == len(found.replies)


def test_a_wait_ends_with_the_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        first = (await side.send("POST", "/v1/leases", {"count": 4}, peer=ADA)).json
        waiting = asyncio.create_task(side.send("POST", "/v1/leases?wait_s=60", {"count": 2}, peer=EVE))
        while len(side.daemon.ledger.leases) < 2:  # noqa: ASYNC110 - no one signals to a test
            await asyncio.sleep(0.001)
        (queued,) = (lease_id for lease_id in side.daemon.ledger.leases if lease_id != first["id"])
        reading = await side.begin("GET", f"/v1/leases/{queued}?wait_s=60", peer=ROOT)
        known = f"/v1/leases/{queued}?wait_s=60&wait_while=queued"
        also = [await side.begin("GET", known, peer=peer) for peer in (ROOT, EVE, ADA)]
        await side.send("POST", f"/v1/leases/{first['id']}/release", {"token": first["token"]}, peer=ADA)
        await report_free(side)
        granted = await waiting
        assert (granted.status, granted.json["state"]) == (201, "active")
        assert {(await one).json["state"] for one in (reading, *also)} == {"active"}

    found = same(tmp_path, monkeypatch, conversation)
    assert found.hot.total() == len(found.replies)


def test_a_limit_on_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        lease = (await side.send("POST", "/v1/leases", {}, peer=ADA)).json
        statuses = set()
        for _ in range(5):
            statuses.add((await side.send("GET", f"/v1/leases/{lease['id']}", peer=ADA)).status)
            await side.send("POST", f"/v1/leases/{lease['id']}/renew", {"token": lease["token"]}, peer=ADA)
            await side.send("POST", "/v1/leases", b"{", peer=EVE)
        assert statuses == {200, 429}

    same(tmp_path, monkeypatch, conversation, AccessSettings(max_rps_per_user=1.5))


def test_behind_a_proxy_a_connection_is_no_one_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        for peer in (ROOT, EVE):
            await side.send("POST", "/v1/leases", {}, peer=peer, fields=[("Host", "gpus.example")])

    same(tmp_path, monkeypatch, conversation, AccessSettings(behind_proxy=True))


@pytest.mark.parametrize("state", [Leadership.UNCONFIRMED, Leadership.SUPERSEDED])
def test_an_answer_that_may_be_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Leadership) -> None:
    async def conversation(side: Side) -> None:
        lease = (await side.send("POST", "/v1/leases", {})).json
        monkeypatch.setattr(leadership_status, "CONFIRM_TIMEOUT_S", 0.0)
        monkeypatch.setattr(side.leadership, "state", lambda: state)
        for path in (f"/v1/leases/{lease['id']}", "/v1/leases/none"):
            await side.send("GET", path)
            await side.send("POST", f"{path}/renew", {"token": lease["token"]})
        await side.send("POST", "/v1/leases", {"count": 9})

    assert same(tmp_path, monkeypatch, conversation).hot.total() == 6


def test_a_daemon_that_cannot_answer_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        side.daemon.writer.has_loaded = False
        await side.send("POST", "/v1/leases", {})
        await side.send("GET", "/v1/leases/x")

    assert same(tmp_path, monkeypatch, conversation).hot.total() == 0


@pytest.mark.parametrize(
    ("fault", "status"),
    [(ZeroDivisionError("a bug"), 500), (OperationalError("SELECT 1", {}, Exception("the disk is gone")), 503)],
)
def test_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int) -> None:
    async def conversation(side: Side) -> None:
        def lease(_: str) -> None:
            raise fault

        monkeypatch.setattr(side.store, "lease", lease)
        for method, path in (("GET", "none"), ("POST", "none/renew"), ("POST", "none/release"), ("DELETE", "none")):
            answer = await side.send(method, f"/v1/leases/{path}", {} if method == "POST" else None)
            assert answer.status == status

    assert same(tmp_path, monkeypatch, conversation).hot.total() == 4
