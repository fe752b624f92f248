"""Who may do what: every route against every kind of caller, over real connections of several users."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.codec import to_json
from gpulease_protocol.model import Gpu, GpuState, Process
from gpulease_protocol.tokens import Role
from gpulease_server.api.access_settings import AccessSettings
from gpulease_server.api.auth.access_rules import ACCESS_RULES, AccessRule
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.redaction import redact_gpu
from tests.api.documents import endpoints, whole_document
from tests.daemon import PATIENT, Answer, DaemonProcess, events, eventually
from tests.http_as_user import OTHER, OWNER, call

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root can send requests as another user")

CALLERS = ("anonymous", "viewer", "owner", "other", "worker", "admin", "root")
ALLOWED = {
    AccessRule.ANYONE: set(CALLERS),
    AccessRule.KNOWN: set(CALLERS) - {"anonymous"},
    AccessRule.VIEWER: {"viewer", "owner", "other", "admin", "root"},
    AccessRule.USER: {"owner", "other", "admin", "root"},
    AccessRule.HOLDER: {"owner", "admin", "root"},
    AccessRule.LIMITED: {"admin", "root"},  # the limits of someone else
    AccessRule.ADMIN: {"admin", "root"},
    AccessRule.WORKER: {"worker", "admin", "root"},
    AccessRule.JOIN: set(),  # join tokens alone, see tests/cli/test_joining_cli.py
}
UNDOCUMENTED = {"GET /docs"}


def test_every_endpoint_has_a_rule_and_every_rule_an_endpoint() -> None:
    assert set(ACCESS_RULES) - UNDOCUMENTED == set(endpoints())


class Installation:
    """A daemon behind a proxy: TCP callers are unknown without a token, those of the socket are known."""

    def __init__(self, directory: Path) -> None:
        options = ("--simulate", "4", "--node", "n1", "--behind-proxy")
        self.running = DaemonProcess(directory / "d", *options, environment=PATIENT).start()
        self.bearers = {role: self.token(role, role=role) for role in ("viewer", "worker", "admin")}
        held = self.ask("owner", "POST", "/v1/leases", {"count": 1, "ttl_s": 3600, "label": "held"})
        assert held.status == 201, held.content
        self.lease = held.json
        body = {"command": ["sleep", "600"], "launcher": "plain", "gpus": 3}
        self.job = self.ask("owner", "POST", "/v1/jobs", body).json

    def token(self, user: str, **what: Any) -> str:
        made = call(self.running.socket, "POST", "/v1/tokens", {"user": user, **what})
        assert made.status == 201, made.content
        return str(made.json["bearer"])

    def ask(self, who: str, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """One request of a caller of `CALLERS`."""
        if who in ("anonymous", *self.bearers):
            return call(self.running.port, method, path, body, bearer=self.bearers.get(who), **more)
        uid = {"owner": OWNER, "other": OTHER, "root": 0}[who]
        return call(self.running.socket, method, path, body, uid=uid, **more)


@pytest.fixture(scope="module")
def here() -> Iterator[Installation]:
    directory = Path(tempfile.mkdtemp(prefix="gpulease-identity-"))
    directory.chmod(0o711)  # other users pass through to the socket
    made = Installation(directory)
    try:
        yield made
    finally:
        made.running.stop()
        shutil.rmtree(directory, ignore_errors=True)


@ROOT_ONLY
@pytest.mark.parametrize("operation", sorted(set(ACCESS_RULES) - UNDOCUMENTED))
def test_each_caller_may_do_what_the_rule_of_the_route_says(here: Installation, operation: str) -> None:
    """Bodies are not JSON and most names do not exist, so that allowed requests are refused for that."""
    method, path = operation.split(" ", 1)
    named = {"lease_id": here.lease["id"], "job_id": here.job["id"], "name": "nowhere", "uuid": "GPU-x"}
    asked = path.format(**named, token_id="token-none", reservation_id="reservation-none", kind="user")
    if operation == "DELETE /v1/leases/{lease_id}":
        asked += "?token=0"  # stale, so that even an administrator ends nothing
    found = {}
    for who in CALLERS:
        answer = here.ask(who, method, asked, raw=b"{" if method in ("POST", "PUT") else None)
        found[who] = answer.status
        if answer.status in (401, 403):
            status, code = answer.problem()
            assert (status, code) == ((401, "not_authenticated") if who == "anonymous" else (403, "not_allowed"))
            assert answer.json["remedy"]
            assert ("www-authenticate" in answer.headers) is (status == 401)
    allowed = {who for who, status in found.items() if status not in (401, 403)}
    assert allowed == ALLOWED[ACCESS_RULES[operation]], found
    assert {status for status in found.values() if status >= 500} <= {503}, found
    if ACCESS_RULES[operation] in (AccessRule.USER, AccessRule.HOLDER, AccessRule.ADMIN):
        assert allowed == {who for who in CALLERS if is_offered(here, who, operation)}, "a button shows nothing else"


def is_offered(here: Installation, who: str, operation: str) -> bool:
    """Whether `/v1/me` tells a caller that they may do this with what belongs to `owner`."""
    method, path = operation.split(" ", 1)
    name = whole_document()["paths"][path][method.lower()]["operationId"]
    if who == "anonymous":
        return False
    me = here.ask(who, "GET", "/v1/me").json
    return name in me["may"] or (who == "owner" and name in me["may_own"])


@ROOT_ONLY
def test_everyone_is_told_who_they_are(here: Installation) -> None:
    me = {who: here.ask(who, "GET", "/v1/me").json for who in ("owner", "root", "viewer", "worker")}
    assert me["owner"] | {"user": None} == {
        "user": None, "uid": OWNER, "role": "user", "identified_by": "socket", "token_id": None, "node": None,
        "worker_host": None, "budget": None, "may": me["owner"]["may"], "may_own": me["owner"]["may_own"],
    }  # fmt: skip
    assert "createJob" in me["owner"]["may"]
    assert "cancelJob" in me["owner"]["may_own"]
    assert me["viewer"]["may"] == me["viewer"]["may_own"] == me["worker"]["may"] == me["root"]["may_own"] == []
    assert (me["root"]["uid"], me["root"]["role"]) == (0, "admin")
    assert (me["viewer"]["user"], me["viewer"]["role"], me["viewer"]["identified_by"]) == ("viewer", "viewer", "token")
    listed = here.ask("root", "GET", "/v1/tokens").json["items"]
    assert [token["id"] for token in listed if token["user"] == "worker"] == [me["worker"]["token_id"]]
    assert not [who for who in me if here.bearers.get(who, "none") in str(me[who])], "the secret is never shown"


@ROOT_ONLY
def test_private_fields_are_not_shown_to_others(here: Installation) -> None:
    shown = {who: here.ask(who, "GET", f"/v1/leases/{here.lease['id']}").json for who in ("owner", "root", "other")}
    assert shown["owner"]["token"] == shown["root"]["token"] == here.lease["token"]
    assert shown["owner"]["env"] == here.lease["env"]
    assert (shown["other"]["token"], shown["other"]["env"]) == (None, {})
    assert shown["other"]["holder"]["user"] == "nobody", "everyone sees who holds what"
    for who in ("other", "viewer"):
        listed = here.ask(who, "GET", "/v1/leases").json["items"]
        assert {(lease["token"], len(lease["env"])) for lease in listed} == {(None, 0)}
        told = here.ask(who, "GET", "/v1/events").json["items"]
        assert {event["token"] for event in told} == {None}
    assert here.lease["token"] in {event["token"] for event in here.ask("owner", "GET", "/v1/events").json["items"]}


@ROOT_ONLY
def test_everyone_sees_whose_job_it_is(here: Installation) -> None:
    owner = here.ask("owner", "GET", f"/v1/leases/{here.job['lease_id']}").json["holder"]["user"]
    for who in ("owner", "other", "viewer"):
        assert here.ask(who, "GET", f"/v1/jobs/{here.job['id']}").json["user"] == owner
        own_jobs = here.ask(who, "GET", f"/v1/jobs?user={owner}").json["items"]
        assert here.job["id"] in [job["id"] for job in own_jobs]
        assert here.ask(who, "GET", "/v1/jobs?user=another-user").json["items"] == []


def test_the_output_of_a_job_is_private_to_its_holder(here: Installation) -> None:
    # Printed as Python would, and in no command line.
    program = """printf 'Traceback (most recent call last):\\n  File "x", line 1, in f\\nValueError: s3c''ret\\n' >&2"""
    asked = {"command": ["/bin/sh", "-c", f"{program}; exit 1"], "launcher": "plain"}
    here.ask("owner", "POST", f"/v1/jobs/{here.job['id']}/cancel", {"grace_s": 0})
    job = here.ask("owner", "POST", "/v1/jobs", asked).json
    while (over := here.ask("owner", "GET", f"/v1/jobs/{job['id']}?wait_s=60")).json["ended_at"] is None:
        assert over.status == 200
    assert "s3cret" in over.json["reason"], over.json
    for path in (f"/v1/jobs/{job['id']}", "/v1/jobs", "/v1/events?limit=1000", "/v1/leases", "/"):
        for who in ("other", "viewer"):
            assert b"s3cret" not in here.ask(who, "GET", path).content, path


@ROOT_ONLY
def test_the_right_token_does_not_help_another_user(here: Installation) -> None:
    path, proof = f"/v1/leases/{here.lease['id']}", {"token": here.lease["token"]}
    for verb in ("renew", "release"):
        answer = here.ask("other", "POST", f"{path}/{verb}", proof)
        assert answer.problem() == (403, "not_allowed")
        owner = here.lease["holder"]["user"]
        assert answer.json["detail"].startswith(f"{here.lease['id']} belongs to {owner}; you are ")
        assert answer.json["remedy"] == f"Ask {owner}, or an administrator."
    assert here.ask("owner", "POST", f"{path}/renew", proof).status == 200
    why = {"reason": "slow copy", "for_s": 60}
    assert here.ask("other", "POST", f"{path}/keep", proof | why).problem() == (403, "not_allowed")
    assert here.ask("owner", "POST", f"{path}/keep", why).problem() == (412, "stale_token")
    assert here.ask("owner", "POST", f"{path}/keep", proof | why).json["kept"]["by"] == owner
    assert here.ask("root", "POST", f"{path}/keep", why).json["kept"]["by"] == "root"


@ROOT_ONLY
def test_no_user_of_the_host_can_report_as_a_worker(here: Installation) -> None:
    """Their reports would free GPUs."""
    report = {"worker_id": "w", "host": "h", "gpus": [], "hold_s": 0}
    answer = here.ask("owner", "POST", "/v1/nodes/n1/exchange", report)
    assert answer.problem() == (403, "not_allowed")
    assert here.ask("anonymous", "POST", "/v1/nodes/n1/exchange", report).problem() == (401, "not_authenticated")
    assert here.ask("worker", "POST", "/v1/nodes/n9/exchange", report).status == 200


@ROOT_ONLY
@pytest.mark.parametrize("over", ["socket", "port"])
@pytest.mark.parametrize(
    "header", ["Bearer x", "Bearer ", "Bearer token-0000000000000000.x", "Basic cm9vdDo=", "", "Bearer \xe9"]
)
def test_a_wrong_token_never_falls_back_to_the_connection(here: Installation, over: str, header: str) -> None:
    """Not even for root on the socket, who would be let in without it."""
    to = getattr(here.running, over)
    for path in ("/v1/gpus", "/v1/leases?limit=1"):
        answer = call(to, "GET", path, Authorization=header)
        assert answer.problem() == (401, "not_authenticated")
    assert call(to, "POST", "/v1/leases", {"count": 1}, Authorization=header).status == 401


@ROOT_ONLY
def test_a_token_is_valid_until_it_is_revoked_or_expires(here: Installation) -> None:
    bearer = here.token("nobody", note="for the test")
    port, path = here.running.port, f"/v1/leases/{here.lease['id']}"
    assert call(port, "POST", f"{path}/renew", {"token": here.lease["token"]}, bearer=bearer).status == 200
    listed = call(here.running.socket, "GET", "/v1/tokens").json["items"]
    (token,) = [item for item in listed if item["note"] == "for the test"]
    assert (token["user"], token["uid"], token["created_by"]) == ("nobody", OWNER, "root")
    assert bearer not in str(listed)
    assert call(port, "DELETE", f"/v1/tokens/{token['id']}", bearer=bearer).problem() == (403, "not_allowed")
    assert call(here.running.socket, "DELETE", f"/v1/tokens/{token['id']}").json["id"] == token["id"]
    assert call(port, "GET", "/v1/gpus", bearer=bearer).problem() == (401, "not_authenticated")
    assert call(here.running.socket, "DELETE", f"/v1/tokens/{token['id']}").problem() == (404, "not_found")
    short = here.token("nobody", expires_s=0.05)
    eventually(lambda: call(port, "GET", "/v1/gpus", bearer=short).status == 401, 60, here.running.story)


@ROOT_ONLY
def test_a_viewers_token_makes_even_root_a_viewer(here: Installation) -> None:
    answer = call(here.running.socket, "POST", "/v1/leases", {"count": 1}, bearer=here.bearers["viewer"])
    assert answer.problem() == (403, "not_allowed")


@ROOT_ONLY
def test_a_proxy_may_use_any_host_name_and_is_not_identified_itself(here: Installation) -> None:
    assert here.ask("anonymous", "GET", "/healthz", Host="gpubox.example").status == 200
    assert here.ask("anonymous", "GET", "/v1/gpus", Host="gpubox.example").problem() == (401, "not_authenticated")
    assert here.ask("viewer", "GET", "/v1/gpus", Host="gpubox.example").status == 200


@ROOT_ONLY
def test_no_token_is_stored_on_disk(here: Installation) -> None:
    secret = here.token("nobody").partition(".")[2].encode()
    files = [path for path in here.running.data_dir.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert [path for path in files if secret in path.read_bytes()] == []
    assert secret not in here.running.output.read_bytes()


@ROOT_ONLY
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"user": ""},
        {"user": "a b"},
        {"user": "x" * 51},
        {"user": "a", "role": "root"},
        {"user": "a", "expires_s": 0},
        {"user": "a", "expires_s": 1e300},
        {"user": "a\0"},
        {"user": "a", "note": "x" * 201},
    ],
)
def test_an_invalid_token_request_is_refused(here: Installation, body: dict[str, Any]) -> None:
    assert call(here.running.socket, "POST", "/v1/tokens", body).problem() == (422, "invalid_request")


@ROOT_ONLY
def test_idempotency_keys_are_separate_for_each_user(here: Installation) -> None:
    """Two users, and two tokens without a number, choose the same Idempotency-Key."""
    ann, bob = here.token("ann-elsewhere"), here.token("bob-elsewhere")
    made = [
        call(here.running.port, "POST", "/v1/leases", {"count": 4}, bearer=bearer, **{"Idempotency-Key": "same"})
        for bearer in (ann, bob, ann)
    ]
    assert [answer.status for answer in made] == [202] * 3
    assert made[0].json["id"] == made[2].json["id"] != made[1].json["id"]
    for answer in made[:2]:
        assert call(here.running.socket, "POST", f"/v1/leases/{answer.json['id']}/release", {}).status == 200


@ROOT_ONLY
def test_a_long_poll_of_another_user_does_not_keep_a_request_queued(here: Installation) -> None:
    waits = here.ask("owner", "POST", "/v1/leases", {"count": 4, "ttl_s": 1.0}).json
    assert waits["state"] == "queued"
    seen = here.ask("other", "GET", f"/v1/leases/{waits['id']}?wait_s=30&wait_while=queued").json
    assert (seen["state"], seen["end_reason"]) == ("ended", "holder_died")


@ROOT_ONLY
def test_an_administrator_revokes_without_the_token_and_the_holder_learns_it(here: Installation) -> None:
    lease = here.ask("owner", "POST", "/v1/leases", {"count": 4}).json
    path = f"/v1/leases/{lease['id']}"
    assert here.ask("viewer", "POST", f"{path}/release", {}).problem() == (403, "not_allowed")
    ended = here.ask("admin", "POST", f"{path}/release", {})
    assert (ended.json["state"], ended.json["end_reason"]) == ("ended", "revoked")
    assert here.ask("owner", "POST", f"{path}/renew", {"token": lease["token"]}).problem() == (410, "lease_lost")
    told = [event for event in events_as_root(here) if event["lease_id"] == lease["id"]]
    assert ("lease.revoked", "by user admin") in {(event["kind"], event["reason"]) for event in told}


def events_as_root(here: Installation) -> list[dict[str, Any]]:
    answer = call(here.running.socket, "GET", "/v1/events?limit=1000")
    found: list[dict[str, Any]] = answer.json["items"]
    return found


@ROOT_ONLY
def test_over_loopback_the_owner_of_the_socket_is_the_caller(api: DaemonProcess) -> None:
    lease = call(api.port, "POST", "/v1/leases", {"count": 1}, uid=OTHER).json
    assert lease["holder"]["user"] == str(OTHER)
    assert lease["token"] is not None
    path = f"/v1/leases/{lease['id']}/release"
    assert call(api.port, "POST", path, {"token": lease["token"]}, uid=OWNER).problem() == (403, "not_allowed")
    assert call(api.port, "POST", "/v1/nodes/n1/drain", uid=OTHER).problem() == (403, "not_allowed")
    report = {"worker_id": "w", "host": "h"}
    assert call(api.port, "POST", "/v1/nodes/n1/exchange", report, uid=OTHER).problem() == (403, "not_allowed")
    ended = call(api.port, "POST", path, {"token": lease["token"]}, uid=OTHER)
    assert ended.json["end_reason"] == "released"
    assert [event["token"] for event in events(api) if event["lease_id"] == lease["id"] and event["token"]], "root"


@ROOT_ONLY
def test_a_token_outlives_a_restart_and_a_revoked_one_does_not_come_back() -> None:
    directory = Path(tempfile.mkdtemp(prefix="gpulease-identity-"))
    directory.chmod(0o711)
    group = grp.getgrgid(pwd.getpwuid(OWNER).pw_gid).gr_name
    running = DaemonProcess(directory / "d", "--no-worker", "--admin", f"@{group}", "--show-commands", "own")
    try:
        running.start(ready=False)
        # A member of a group named by --admin is an administrator, but cannot report as a worker.
        made = [call(running.port, "POST", "/v1/tokens", {"user": "ann"}, uid=OWNER).json for _ in range(2)]
        assert call(running.port, "POST", "/v1/nodes/n/exchange", {}, uid=OWNER).problem() == (403, "not_allowed")
        assert call(running.port, "DELETE", f"/v1/tokens/{made[1]['id']}", uid=OWNER).status == 200
        running.kill()
        running.start(ready=False)
        assert call(running.port, "GET", "/v1/gpus", bearer=made[0]["bearer"]).status == 200
        assert call(running.port, "GET", "/v1/gpus", bearer=made[1]["bearer"]).status == 401
        report = {
            "worker_id": "w",
            "host": "h",
            "gpus": [
                {
                    "uuid": "GPU-00000000-0000-0000-0000-0000000000aa",
                    "node": "n",
                    "index": 0,
                    "processes": [{"pid": 4, "user": "ann", "command": "python secret.py"}],
                }
            ],
            "hold_s": 0,
        }
        assert call(running.port, "POST", "/v1/nodes/n/exchange", report).status == 200
        told = {
            who: call(running.port, "GET", "/v1/gpus", uid=uid, bearer=bearer).content.decode()
            for who, uid, bearer in (("ann", None, made[0]["bearer"]), ("other", OTHER, None), ("root", None, None))
        }
        assert {who for who, text in told.items() if "secret.py" in text} == {"ann", "root"}
    finally:
        running.stop()
        shutil.rmtree(directory, ignore_errors=True)


def test_where_users_see_their_own_commands_only_no_field_of_a_gpu_has_anothers() -> None:
    bobs = Process(pid=9, user="bob", command="secret")
    processes = {"processes": (bobs,), "opened_by": (bobs,), "unreadable_process": bobs}
    gpu = Gpu(uuid="GPU-0", node="n", index=0, state=GpuState.FREE, **processes)  # type: ignore[arg-type]
    own = AccessSettings(show_commands=False)
    for user, count in ("ada", 0), ("bob", 3):
        shown = redact_gpu(Caller(user=user, role=Role.USER), gpu, own)
        assert json.dumps(to_json(shown)).count("secret") == count
