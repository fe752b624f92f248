"""A walk over every route as eve: what it changes and shows of a lease and a job of ada.

A new route fails here until the walk knows how to fill it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.api.documents import whole_document
from tests.attack.attacked import Attacked
from tests.attack.host import UIDS, UUIDS
from tests.daemon import Answer
from tests.http_as_user import Connection

pytestmark = pytest.mark.slow

CANARY = "routes-canary"
"""Begins each secret of ada; eve must find it nowhere."""
QUERIES: dict[str, tuple[str, ...]] = {
    "after": ("0",), "array": ("array-1",), "before": ("1000000",), "by": ("label", "node"), "cursor": (),
    "follow": ("1",), "format": ("csv",), "frames": ("1",), "from": ("2020-01-01",), "gpu": (),
    "id_prefix": ("lease-", "job-"), "job": (), "kind": ("lease", "job", "token"), "label": (), "last_s": ("60",),
    "lease": (), "limit": ("1000",), "measures": ("power_w",), "name": (), "node": (), "offset": ("0",),
    "overlaps": ("../..",),
    "attempt": ("1",), "order": ("desc",), "points": ("10",), "rank": ("launcher", "0"), "state": (), "tail": ("10",),
    "to": (), "token": (), "user": ("ada",), "wait_s": ("0",), "wait_while": (),
}  # fmt: skip
"""What eve asks for with each query parameter, one at a time; nothing where it could show no more than without it."""
MUTATIONS: dict[str, Any] = {
    "POST /v1/gpus/{uuid}/cordon": None,
    "POST /v1/gpus/{uuid}/uncordon": None,
    "POST /v1/nodes/{name}/drain": None,
    "POST /v1/nodes/{name}/resume": None,
    "POST /v1/nodes/{name}/pause": {"force": True},
    "POST /v1/nodes/{name}/forget": None,
    "POST /v1/nodes/{name}/join": None,
    "POST /v1/nodes/{name}/exchange": {"worker_id": "w", "host": "h", "hold_s": 0},
    "POST /v1/nodes/{name}/logs": {"request_id": "r", "number": 0, "offset": "0"},
    "POST /v1/leases/{lease_id}/renew": {"token": "TOKEN"},
    "POST /v1/leases/{lease_id}/keep": {"token": "TOKEN", "reason": "eve", "for_s": 60},
    "POST /v1/leases/{lease_id}/release": {"token": "TOKEN"},
    "DELETE /v1/leases/{lease_id}": None,
    "POST /v1/jobs/{job_id}/cancel": {"grace_s": 0},
    "PUT /v1/limits/{kind}/{name}": {"max_gpus": 1},
    "DELETE /v1/limits/{kind}/{name}": None,
    "POST /v1/reservations": {"node": "n1", "count": 1, "from_at": "2020-01-01T00:00Z", "to_at": "2020-01-02T00:00Z"},
    "DELETE /v1/reservations/{reservation_id}": None,
    "POST /v1/tokens": {"user": "ada", "role": "user"},
    "DELETE /v1/tokens/{token_id}": None,
}
"""What eve sends to change something of ada's, and is refused. TOKEN becomes the fencing token, as if eve had it."""
OF_THE_CALLER = {"POST /v1/leases", "POST /v1/jobs", "POST /v1/leases/explain", "POST /v1/jobs/explain"}
"""Routes that act for the caller: `test_a_lease_that_eve_asks_for_is_eves_whatever_the_body_says`."""
PRETENDING = {
    "X-Forwarded-For": "127.0.0.1", "X-Forwarded-User": "root", "X-Remote-User": "ada", "Remote-User": "ada",
    "Forwarded": "for=127.0.0.1;by=root", "X-Original-Method": "GET", "X-HTTP-Method-Override": "GET",
    "X-Request-Id": "request-1", "Cookie": "user=ada",
}  # fmt: skip
"""Headers with which a proxy would say who calls."""


@dataclass(frozen=True)
class Belongings:
    """What ada has while eve walks."""

    lease: dict[str, Any]
    job: dict[str, Any]
    ended: dict[str, Any]
    token: dict[str, Any]
    reservation: dict[str, Any]
    secrets: tuple[str, ...]

    @property
    def ids(self) -> set[str | None]:
        """What the API calls them."""
        jobs = {job[name] for job in (self.job, self.ended) for name in ("id", "lease_id")}
        return {self.lease["id"], self.token["id"], *jobs}

    def fillers(self, node: str) -> dict[str, tuple[str, ...]]:
        """The values of each path parameter."""
        return {
            "lease_id": (self.lease["id"], self.job["lease_id"], self.ended["lease_id"]),
            "job_id": (self.job["id"], self.ended["id"]),
            "uuid": (self.lease["gpus"][0]["uuid"],),
            "name": (node,),
            "kind": ("user",),
            "token_id": (self.token["id"],),
            "reservation_id": (self.reservation["id"],),
        }


@pytest.fixture
def belongings(attacked: Attacked) -> Iterator[Belongings]:
    """A lease, a job that runs, one that has failed, and a token of ada, each with secrets in its private parts. The
    GPU of the lease is reserved for ada next week."""
    directory = attacked.host.home("ada") / "routes-canary-directory"
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    private = {"environment": {"SECRET": "routes-canary-in-the-environment"}, "working_directory": str(directory)}
    lines = ("routes-canary-in-the-output", "Traceback (most recent call last):", "  line 1", "E: routes-canary")
    script = "; ".join(f"echo '{line}'" for line in lines) + "; "
    token = attacked.daemon.call("POST", "/v1/tokens", {"user": "ada", "note": "routes-canary-note"}).json
    ended, _ = attacked.completed_job("ada", "sh", "-c", f"{script}exit 3", "routes-canary-argument", **private)
    attacked.daemon.wait_free()
    lease, begins = attacked.lease("ada"), datetime.now(UTC) + timedelta(days=7)
    window = {"from_at": begins.isoformat(), "to_at": (begins + timedelta(hours=1)).isoformat()}
    asked = {"gpus": [lease["gpus"][0]["uuid"]], "user": "ada", **window}
    reservation = attacked.daemon.call("POST", "/v1/reservations", asked).json
    yield Belongings(
        lease=lease,
        job=attacked.running_job("ada", "sh", "-c", f"{script}sleep 1000", "routes-canary-argument", **private),
        ended=ended,
        token=token,
        reservation=reservation,
        secrets=(CANARY, token["bearer"].partition(".")[2]),
    )
    assert attacked.daemon.call("DELETE", f"/v1/reservations/{reservation['id']}").status == 200, "eve has cancelled it"


def operations() -> dict[str, Any]:
    """Every operation of the application, by `METHOD /path`."""
    paths = whole_document()["paths"]
    return {f"{verb.upper()} {path}": what for path, verbs in paths.items() for verb, what in verbs.items()}


def addresses(operation: str, fillers: dict[str, tuple[str, ...]]) -> list[str]:
    """The paths of an operation with everything of ada's filled in."""
    found = [operation.split(" ", 1)[1]]
    for name in re.findall(r"{(\w+)}", found[0]):
        assert name in fillers, f"{operation}: add to Belongings.fillers what {{{name}}} is of ada's, for the walk"
        values = ("ada",) if name == "name" and "{kind}" in operation else fillers[name]
        found = [path.replace(f"{{{name}}}", value) for path in found for value in values]
    return found


def test_the_walk_knows_every_route() -> None:
    unknown = {name for name in operations() if not name.startswith("GET ")} - set(MUTATIONS) - OF_THE_CALLER
    assert unknown == set(), (
        "the walk does not know these routes: add to MUTATIONS what eve would send to harm ada through each, or, if it"
        " acts for the caller alone, to OF_THE_CALLER and a test of what it then does for eve"
    )
    asked = {one["name"] for what in operations().values() for one in what.get("parameters", [])
             if one["in"] == "query"}  # fmt: skip
    assert asked - set(QUERIES) == set(), "add to QUERIES what eve would ask for with these parameters"


def test_eve_changes_nothing_of_ada_through_any_route(attacked: Attacked, belongings: Belongings) -> None:
    before, wrong = state_of(attacked, belongings), []
    fillers = belongings.fillers(attacked.daemon.gpus()[0]["node"])
    for operation in operations():
        method = operation.split(" ")[0]
        if method == "GET" or operation in OF_THE_CALLER:
            continue
        body = json.loads(json.dumps(MUTATIONS.get(operation)).replace('"TOKEN"', str(belongings.lease["token"])))
        for path in addresses(operation, fillers):
            for headers in ({}, PRETENDING):
                answer = attacked.call("eve", method, path, body, **headers)
                if answer.status not in (403, 404) or leaks(answer, belongings):
                    wrong.append((operation, answer.status, answer.content[:300]))
        if (after := state_of(attacked, belongings)) != before:
            changed = {name: after[name] for name in after if after[name] != before[name]}
            wrong.append((operation, 0, f"it has changed {changed}".encode()))
            before = after
    assert wrong == []


def state_of(attacked: Attacked, belongings: Belongings) -> dict[str, Any]:
    """Everything of ada's that eve would like to change."""
    lease = attacked.daemon.lease(belongings.lease["id"])
    for name in ("expires_at", "held_for_s", "idle_s"):  # it is renewed as long as its owner is seen alive
        lease.pop(name)
    tokens = attacked.daemon.get("/v1/tokens").json["items"]
    nodes = attacked.daemon.get("/v1/nodes").json["items"]
    return {
        "lease": lease,
        "jobs": [attacked.daemon.job(job["id"]) for job in (belongings.job, belongings.ended)],
        "tokens": [(token["id"], token["user"], token["expires_at"]) for token in tokens],
        "nodes": [(node["name"], node["mode"], node["gpu_count"]) for node in nodes],
        "gpus": [(gpu["uuid"], gpu["lease_id"], gpu["cordoned"]) for gpu in attacked.daemon.gpus()],
    }


def test_eve_reads_no_secret_of_ada_on_any_route(attacked: Attacked, belongings: Belongings) -> None:
    found, shown = [], 0
    fillers = belongings.fillers(attacked.daemon.gpus()[0]["node"])
    for operation, what in operations().items():
        if not operation.startswith("GET "):
            continue
        for path in addresses(operation, fillers):
            for query in queries(what):
                for headers in ({}, {"Accept": "text/html, text/plain"}, PRETENDING):
                    answer = attacked.call("eve", "GET", path + query, **headers)
                    assert answer.status < 500 or "healthz" in path, (path, answer.content)
                    shown += answer.status == 200
                    found += [(path + query, secret) for secret in leaks(answer, belongings)]
    assert found == []
    assert shown > 20, "the walk was refused nearly everything, and so shows nothing"


def queries(operation: Any) -> Iterator[str]:
    """The query strings with which an operation is asked."""
    yield ""
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "query":
            yield from (f"?{parameter['name']}={value}" for value in QUERIES.get(parameter["name"], ()))


def leaks(answer: Answer, belongings: Belongings) -> list[str]:
    """What an answer to eve says that only ada may know."""
    text = answer.content.decode(errors="replace")
    found = [secret for secret in belongings.secrets if secret in text]
    if "json" in answer.headers.get("content-type", ""):
        found += private_fields(json.loads(text or "null"), belongings)
    return found


def private_fields(document: Any, belongings: Belongings) -> list[str]:
    """The private fields that are filled in where a document shows something of ada."""
    return [
        f"{name} = {noun[name]!r}"
        for noun in objects(document)
        if {noun.get("id"), noun.get("lease_id"), noun.get("job_id")} & belongings.ids - {None}
        for name in ("token", "env", "bearer", "environment", "traceback")
        if noun.get(name)
    ]


def objects(document: Any) -> Iterator[dict[str, Any]]:
    """Every object in a document whose identifiers are texts."""
    if isinstance(document, dict):
        if all(isinstance(document.get(name), str | None) for name in ("id", "lease_id", "job_id")):
            yield document
        document = list(document.values())
    if isinstance(document, list):
        for value in document:
            yield from objects(value)


def test_the_secrets_are_there_for_ada(attacked: Attacked, belongings: Belongings) -> None:
    """Otherwise it would show nothing that eve does not find them."""
    for job in (belongings.job, belongings.ended):
        assert "routes-canary-argument" in attacked.call("ada", "GET", f"/v1/jobs/{job['id']}").json["command"]
        assert b"routes-canary-in-the-output" in attacked.call("ada", "GET", f"/v1/jobs/{job['id']}/logs").content
    assert CANARY in belongings.ended["reason"]
    shown = attacked.call("ada", "GET", f"/v1/leases/{belongings.lease['id']}").json
    assert len(private_fields(shown, belongings)) == 2, "its token and its environment"
    assert b"routes-canary-note" in attacked.daemon.get("/v1/tokens").content


def test_the_stream_of_events_shows_eve_no_secret_of_ada(attacked: Attacked, belongings: Belongings) -> None:
    last = attacked.last_event()
    connection = Connection(attacked.host.socket, UIDS["eve"])
    try:
        connection.request("GET", "/v1/events?after=0", headers={"Accept": "text/event-stream"})
        stream, text = connection.getresponse(), ""
        while f"id: {last}\n" not in text:
            piece = stream.read1(65536)
            assert piece, "the stream has ended"
            text += piece.decode()
    finally:
        connection.close()
    assert belongings.lease["id"] in text
    assert [secret for secret in belongings.secrets if secret in text] == []
    shown = [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line.startswith("data:")]
    assert private_fields(shown, belongings) == []


@pytest.mark.parametrize(
    "body", [{"devices": [UUIDS[0]], "queue": False}, {"label": "of ada"}, {"user": "ada"}, {"holder": {"user": "ada"}}]
)
def test_a_lease_that_eve_asks_for_is_eves_whatever_the_body_says(attacked: Attacked, body: dict[str, Any]) -> None:
    held = attacked.lease("ada", devices=[UUIDS[0]], count=None)
    owner = held["holder"]["owner_pid"]
    for fields in (body, body | {"owner_pid": owner}):
        answer = attacked.call("eve", "POST", "/v1/leases", fields | {"ttl_s": 60}, **PRETENDING)
        if answer.status in (201, 202):
            assert answer.json["holder"]["user"] == "eve"
            assert answer.json["gpus"][0]["uuid"] != UUIDS[0]
            attacked.release("eve", answer.json)
        else:
            assert answer.status in (403, 409, 422), answer.content
    assert attacked.daemon.lease(held["id"])["state"] == "active"


@pytest.mark.parametrize("fields", [{}, {"uid": 0}, {"user": "ada"}, {"interpreter": "/root/python"}])
def test_a_job_that_eve_submits_runs_as_eve_whatever_the_body_says(attacked: Attacked, fields: dict[str, Any]) -> None:
    environment = {"USER": "ada", "HOME": "/root", "GPULEASE_LEASE_ID": "lease-1", "LD_PRELOAD": "/no/such"}
    asked = {"command": ["sh", "-c", "id -u; id -G"], "launcher": "plain", "environment": environment, **fields}
    answer = attacked.call("eve", "POST", "/v1/jobs", asked, **PRETENDING)
    if answer.status == 201:
        assert attacked.daemon.wait_job(answer.json["id"])["user"] == "eve"
        printed = [line for line in attacked.daemon.job_log(answer.json["id"]).splitlines() if line.isdecimal()]
        assert printed == [str(UIDS["eve"])] * 2
    else:
        assert answer.status == 422, answer.content


def test_a_job_of_eve_enters_no_directory_of_ada(attacked: Attacked) -> None:
    home = attacked.host.home("ada")
    (home / "routes-canary-file").write_text("routes-canary-in-a-file")
    job, printed = attacked.completed_job("eve", "ls", working_directory=str(home))
    assert job["state"] == "failed"
    assert CANARY not in printed + job["reason"]


def test_every_answer_forbids_a_browser_to_guess_its_type(attacked: Attacked) -> None:
    without = []
    for method, path in (
        *[("GET", path) for path in ("/", "/v1/gpus", "/v1/tokens", "/v1/<script>", "/healthz", "/metrics", "/docs")],
        ("GET", "/openapi.json"), ("GET", "/v1/leases?limit=x"), ("PUT", "/v1/leases"), ("POST", "/v1/leases"),
        ("GET", "/v1/events?limit=5"), ("HEAD", "/v1/jobs"),
    ):  # fmt: skip
        for headers in ({}, {"Accept": "text/html"}, {"Authorization": "Bearer wrong"}, {"Host": "evil.example"}):
            answer = attacked.call("eve", method, path, raw=b"{" if method == "POST" else None, **headers)
            if answer.headers.get("x-content-type-options") != "nosniff":
                without.append(f"{method} {path} {headers}: {answer.status}")
    assert without == []
