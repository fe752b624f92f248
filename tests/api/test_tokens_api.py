"""Bearer tokens: who may make which, how their users are spelled, and what is left of a wait when one is revoked."""

from __future__ import annotations

import http.client
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_event_stream import lease, stream
from tests.callers import OWNER, call
from tests.daemon import Answer, DaemonProcess, events, eventually

pytestmark = pytest.mark.xdist_group("machine")
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as somebody else")
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def running() -> Iterator[DaemonProcess]:
    directory = Path(tempfile.mkdtemp(prefix="gpulease-tokens-"))
    directory.chmod(0o711)  # other users pass through to the socket
    made = DaemonProcess(directory / "d", "--simulate", "4", "--node", "n1", "--admin", "nobody")
    try:
        yield made.start()
    finally:
        made.stop()
        shutil.rmtree(directory, ignore_errors=True)


def token(running: DaemonProcess, user: str, uid: int | None = None, **what: Any) -> Answer:
    return call(running.socket, "POST", "/v1/tokens", {"user": user, **what}, uid=uid)


def revoke(running: DaemonProcess, made: Answer) -> None:
    assert call(running.socket, "DELETE", f"/v1/tokens/{made.json['id']}").status == 200


@contextmanager
def asking(running: DaemonProcess, made: Answer, method: str, path: str, body: Any = None) -> Iterator[list[Answer]]:
    """A request with a token that waits meanwhile; its answer is there at the end."""
    answers: list[Answer] = []
    bearer = made.json["bearer"]
    thread = threading.Thread(target=lambda: answers.append(call(running.port, method, path, body, bearer=bearer)))
    thread.start()
    try:
        yield answers
    finally:
        thread.join(WITHIN_S)


@ROOT_ONLY
@pytest.mark.parametrize("user", ["root", "0", "000", "daemon"])
@pytest.mark.parametrize("role", ["viewer", "user"])
def test_whom_admin_names_makes_no_token_of_another_user_of_the_host(
    running: DaemonProcess, user: str, role: str
) -> None:
    """With one of root he would run jobs as root."""
    assert token(running, user, OWNER, role=role).problem() == (403, "not_allowed")
    assert token(running, user, role=role).status == 201, "root may"


@ROOT_ONLY
@pytest.mark.parametrize("user", ["nobody", "ann-elsewhere"])
@pytest.mark.parametrize("role", ["admin", "worker"])
def test_whom_admin_names_makes_no_token_that_may_speak_for_nodes(running: DaemonProcess, user: str, role: str) -> None:
    assert token(running, user, OWNER, role=role).problem() == (403, "not_allowed")
    above = token(running, "ann-elsewhere", role="admin").json["bearer"]
    body = {"user": user, "role": role}
    assert call(running.port, "POST", "/v1/tokens", body, bearer=above).status == 201, "an administrator's token may"


@ROOT_ONLY
@pytest.mark.parametrize(
    ("user", "kept", "uid"), [("nobody", "nobody", OWNER), (str(OWNER), "nobody", OWNER), ("ann", "ann", None)]
)
def test_whom_admin_names_makes_tokens_of_himself_and_of_whom_the_host_does_not_know(
    running: DaemonProcess, user: str, kept: str, uid: int | None
) -> None:
    made = token(running, user, OWNER)
    assert (made.status, made.json["user"], made.json["uid"]) == (201, kept, uid)


@ROOT_ONLY
def test_each_user_has_one_spelling(running: DaemonProcess) -> None:
    """So that nobody has two quotas, and two names no Idempotency-Keys in common."""
    spelled = [token(running, user).json["user"] for user in ("nobody", str(OWNER), f"0{OWNER}", "0", "054321")]
    assert spelled == ["nobody", "nobody", "nobody", "root", "54321"]
    assert token(running, "ann:1").problem() == (422, "invalid_request")


@ROOT_ONLY
def test_a_revoked_token_neither_keeps_its_request_in_the_queue_nor_hears_of_its_end(running: DaemonProcess) -> None:
    made = token(running, "ann")
    all_of_them = running.call("POST", "/v1/leases?wait_s=60", {"count": 4, "ttl_s": 600}).json
    queued = "/v1/leases?state=queued"
    try:
        with asking(running, made, "POST", "/v1/leases?wait_s=300", {"count": 1, "ttl_s": 3}) as answers:
            eventually(lambda: running.call("GET", queued).json["items"] != [], WITHIN_S, running.story)
            (waits,) = running.call("GET", queued).json["items"]
            revoke(running, made)
        assert [answer.problem() for answer in answers] == [(401, "not_authenticated")]
        eventually(lambda: running.call("GET", queued).json["items"] == [], WITHIN_S, running.story)
        assert running.call("GET", f"/v1/leases/{waits['id']}").json["end_reason"] == "holder_died"
    finally:
        running.call("POST", f"/v1/leases/{all_of_them['id']}/release", {"token": all_of_them["token"]})


@ROOT_ONLY
def test_a_grant_is_not_told_to_a_token_that_was_revoked_before_it(running: DaemonProcess) -> None:
    made = token(running, "ann")
    all_of_them = running.call("POST", "/v1/leases?wait_s=60", {"count": 4, "ttl_s": 600}).json
    with asking(running, made, "POST", "/v1/leases?wait_s=300", {"count": 1, "ttl_s": 600}) as answers:
        eventually(lambda: len(running.call("GET", "/v1/leases?state=queued").json["items"]) == 1, WITHIN_S)
        (waits,) = running.call("GET", "/v1/leases?state=queued").json["items"]
        revoke(running, made)
        running.call("POST", f"/v1/leases/{all_of_them['id']}/release", {"token": all_of_them["token"]})
    assert [answer.problem() for answer in answers] == [(401, "not_authenticated")]
    assert running.call("POST", f"/v1/leases/{waits['id']}/release", {}).status == 200


@ROOT_ONLY
def test_a_stream_tells_a_revoked_token_nothing_more(running: DaemonProcess) -> None:
    made = token(running, "ann", role="viewer")
    with stream(running, Authorization=f"Bearer {made.json['bearer']}", Connection="close") as watched:
        watched.until(b"id: ")
        lease(running)
        watched.event("lease.ended")
        revoke(running, made)
        lease(running)
        told = watched.rest()
    assert b"lease.granted" not in told
    assert told.count(b": the token is in force no more\n\n") == 1


@ROOT_ONLY
def test_a_stream_in_which_nothing_happens_ends_with_its_token(running: DaemonProcess) -> None:
    made = token(running, "ann", role="viewer", expires_s=5)
    with stream(running, Authorization=f"Bearer {made.json['bearer']}", Connection="close") as watched:
        assert b"the token is in force no more" in watched.rest()


@ROOT_ONLY
@pytest.mark.parametrize("frames", ["true", "false"])
def test_who_follows_a_log_with_a_revoked_token_reads_nothing_more(
    running: DaemonProcess, tmp_path: Path, frames: str
) -> None:
    made, flag = token(running, "ann", role="admin"), tmp_path / "flag"
    script = f"echo begun; while [ ! -e {flag} ]; do sleep 0.1; done; echo se''cret; sleep 600"
    job = running.call("POST", "/v1/jobs", {"command": ["sh", "-c", script], "launcher": "plain"}).json
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", running.port, timeout=WITHIN_S)) as connection:
            path = f"/v1/jobs/{job['id']}/logs?follow=true&frames={frames}"
            connection.request("GET", path, headers={"Authorization": f"Bearer {made.json['bearer']}"})
            answer = connection.getresponse()
            while b"begun" not in answer.readline():
                pass
            revoke(running, made)
            flag.touch()
            rest = answer.read()
        assert b"secret" not in rest
        assert b'"end":true' not in rest.replace(b" ", b""), "he is not told that this was all"
        log = running.data_dir / "worker" / "jobs" / job["id"] / "logs"
        eventually(lambda: any(b"secret" in file.read_bytes() for file in log.iterdir()), WITHIN_S, running.story)
    finally:
        running.call("POST", f"/v1/jobs/{job['id']}/cancel", {"grace_s": 0})


@ROOT_ONLY
def test_a_worker_whose_token_is_revoked_while_it_waits_is_given_nothing(running: DaemonProcess) -> None:
    made = token(running, "w", role="worker")
    path, report = "/v1/nodes/n7/exchange", {"worker_id": "w", "host": "h", "hold_s": 0.05}
    first = call(running.port, "POST", path, report, bearer=made.json["bearer"]).json
    again = {"ticket": first["ticket"], "driver_version": "1.2", "hold_s": 5.0}
    with asking(running, made, "POST", path, report | again) as answers:
        eventually(lambda: running.call("GET", "/v1/nodes/n7").json["driver_version"] == "1.2", WITHIN_S, running.story)
        revoke(running, made)
    assert [answer.problem() for answer in answers] == [(401, "not_authenticated")]


def test_a_token_shows_the_day_on_which_it_was_last_used_also_after_a_restart(tmp_path: Path) -> None:
    def shown() -> Any:
        return {item["id"]: item["last_used_on"] for item in running.call("GET", "/v1/tokens").json["items"]}

    running = DaemonProcess(tmp_path / "d", "--simulate", "1")
    try:
        running.start()
        used, unused = token(running, "ann").json, token(running, "ann").json
        assert used["last_used_on"] is None
        before = datetime.now(UTC).date()
        assert call(running.port, "GET", "/v1/gpus", bearer=used["bearer"]).status == 200
        day = shown()[used["id"]]
        assert day in {before.isoformat(), (before + timedelta(days=1)).isoformat()}
        running.stop()
        running.start()
        assert shown() == {used["id"]: day, unused["id"]: None}
    finally:
        running.stop()


@ROOT_ONLY
def test_administrators_see_in_the_history_who_made_and_revoked_a_token_and_others_do_not(
    running: DaemonProcess,
) -> None:
    viewer = token(running, "ann-elsewhere", role="viewer").json["bearer"]
    made = token(running, "ann", role="user", note="laptop")
    revoke(running, made)
    marked = lease(running)["id"]
    seen = {one["kind"]: one for one in events(running) if made.json["id"] in (one["reason"] or "")}
    assert set(seen) == {"token.created", "token.revoked"}
    for one in seen.values():
        assert one["reason"] == f"{made.json['id']} of user ann, role user, by root"
        assert made.json["bearer"] not in str(one)
    before = seen["token.created"]["seq"] - 1
    path = f"/v1/events?after={before}&limit="
    assert call(running.port, "GET", f"{path}1", bearer=viewer).json["items"][0]["kind"] != "token.created"
    listed = call(running.port, "GET", f"{path}1000", bearer=viewer).json["items"]
    assert listed != []
    assert not [one for one in listed if one["kind"].startswith("token.")]
    for bearer, told in ((viewer, False), (None, True)):
        headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        with stream(running, f"?after={before}", **headers) as watched:
            watched.until(marked.encode())
            assert (b"token.revoked" in watched.text) is told
