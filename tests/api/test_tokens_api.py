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
from tests.daemon import PATIENT, Answer, DaemonProcess, events, eventually
from tests.http_as_user import OWNER, call

ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root can send requests as another user")
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def running() -> Iterator[DaemonProcess]:
    directory = Path(tempfile.mkdtemp(prefix="gpulease-tokens-"))
    directory.chmod(0o711)  # other users pass through to the socket
    made = DaemonProcess(directory / "d", "--simulate", "4", "--node", "n1", "--admin", "nobody", environment=PATIENT)
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
def test_a_named_administrator_cannot_create_tokens_of_other_host_users(
    running: DaemonProcess, user: str, role: str
) -> None:
    """With a token of root they would run jobs as root."""
    assert token(running, user, OWNER, role=role).problem() == (403, "not_allowed")
    assert token(running, user, role=role).status == 201, "root may"


@ROOT_ONLY
@pytest.mark.parametrize("user", ["nobody", "ann-elsewhere"])
@pytest.mark.parametrize("role", ["admin", "worker"])
def test_a_named_administrator_cannot_create_tokens_that_report_for_nodes(
    running: DaemonProcess, user: str, role: str
) -> None:
    assert token(running, user, OWNER, role=role).problem() == (403, "not_allowed")
    above = token(running, "ann-elsewhere", role="admin").json["bearer"]
    body = {"user": user, "role": role}
    assert call(running.port, "POST", "/v1/tokens", body, bearer=above).status == 201, "an administrator's token may"


@ROOT_ONLY
@pytest.mark.parametrize(
    ("user", "kept", "uid"), [("nobody", "nobody", OWNER), (str(OWNER), "nobody", OWNER), ("ann", "ann", None)]
)
def test_a_named_administrator_creates_tokens_of_their_own_and_of_unknown_users(
    running: DaemonProcess, user: str, kept: str, uid: int | None
) -> None:
    made = token(running, user, OWNER)
    assert (made.status, made.json["user"], made.json["uid"]) == (201, kept, uid)


@ROOT_ONLY
def test_each_user_has_one_spelling(running: DaemonProcess) -> None:
    """So that no one has two quotas, and two names share no Idempotency-Keys."""
    spelled = [token(running, user).json["user"] for user in ("nobody", str(OWNER), f"0{OWNER}", "0", "054321")]
    assert spelled == ["nobody", "nobody", "nobody", "root", "54321"]
    assert token(running, "ann:1").problem() == (422, "invalid_request")


@ROOT_ONLY
def test_a_revoked_token_neither_keeps_its_request_queued_nor_learns_its_end(running: DaemonProcess) -> None:
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
        # The list is of the database, and a moment ahead of what one lease is shown as.
        eventually(lambda: running.call("GET", f"/v1/leases/{waits['id']}").json["end_reason"] is not None, WITHIN_S)
        assert running.call("GET", f"/v1/leases/{waits['id']}").json["end_reason"] == "holder_died"
    finally:
        running.call("POST", f"/v1/leases/{all_of_them['id']}/release", {"token": all_of_them["token"]})


@ROOT_ONLY
def test_a_grant_is_not_shown_to_a_token_that_was_revoked_before_it(running: DaemonProcess) -> None:
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
def test_a_stream_sends_nothing_more_to_a_revoked_token(running: DaemonProcess) -> None:
    made = token(running, "ann", role="viewer")
    with stream(running, Authorization=f"Bearer {made.json['bearer']}", Connection="close") as watched:
        watched.until(b"id: ")
        lease(running)
        watched.event("lease.ended")
        revoke(running, made)
        lease(running)
        told = watched.rest()
    assert b"lease.granted" not in told
    assert told.count(b": the token is no longer valid\n\n") == 1


@pytest.mark.slow
@ROOT_ONLY
def test_a_quiet_stream_ends_with_its_token(running: DaemonProcess) -> None:
    made = token(running, "ann", role="viewer", expires_s=5)
    with stream(running, Authorization=f"Bearer {made.json['bearer']}", Connection="close") as watched:
        assert b"the token is no longer valid" in watched.rest()


@ROOT_ONLY
@pytest.mark.parametrize("frames", ["true", "false"])
def test_a_log_follower_with_a_revoked_token_reads_nothing_more(
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
        assert b'"end":true' not in rest.replace(b" ", b""), "the answer does not claim to be complete"
        log = running.data_dir / "worker" / "jobs" / job["id"] / "logs"
        eventually(lambda: any(b"secret" in file.read_bytes() for file in log.iterdir()), WITHIN_S, running.story)
    finally:
        running.call("POST", f"/v1/jobs/{job['id']}/cancel", {"grace_s": 0})


@ROOT_ONLY
def test_a_worker_gets_no_answer_if_its_token_is_revoked_meanwhile(running: DaemonProcess) -> None:
    made = token(running, "w", role="worker")
    path, report = "/v1/nodes/n7/exchange", {"worker_id": "w", "host": "h", "hold_s": 0.05}
    first = call(running.port, "POST", path, report, bearer=made.json["bearer"]).json
    again = {"ticket": first["ticket"], "driver_version": "1.2", "hold_s": 30.0}
    with asking(running, made, "POST", path, report | again) as answers:
        eventually(lambda: running.call("GET", "/v1/nodes/n7").json["driver_version"] == "1.2", WITHIN_S, running.story)
        revoke(running, made)
        assert running.call("POST", "/v1/nodes/n7/pause").status == 200  # news for it, which ends the wait
    assert [answer.problem() for answer in answers] == [(401, "not_authenticated")]


def test_the_last_use_of_a_token_survives_a_restart(tmp_path: Path) -> None:
    def shown() -> Any:
        return {item["id"]: item["last_used_on"] for item in running.call("GET", "/v1/tokens").json["items"]}

    running = DaemonProcess(tmp_path / "d", "--no-worker")
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
def test_only_administrators_see_events_of_tokens(
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


def report(running: DaemonProcess, bearer: str, node: str, **what: Any) -> Answer:
    """A worker's report, of no GPU, unless it says otherwise."""
    body = {"worker_id": f"of-{node}", "host": "h", "hold_s": 0.0, **what}
    return call(running.port, "POST", f"/v1/nodes/{node}/exchange", body, bearer=bearer)


def node_of(running: DaemonProcess, made: Answer) -> Any:
    listed = running.call("GET", "/v1/tokens").json["items"]
    return next(item["node"] for item in listed if item["id"] == made.json["id"])


def test_a_workers_token_reports_for_its_node_and_makes_no_other(running: DaemonProcess) -> None:
    made = token(running, "w", role="worker", node="t1")
    assert made.json["node"] == "t1"
    refused = report(running, made.json["bearer"], "t2")
    assert refused.problem() == (403, "not_allowed")
    assert "reports for node t1 and for no other" in refused.json["detail"]
    assert report(running, made.json["bearer"], "n1").problem() == (403, "not_allowed"), "a node that is there"
    assert report(running, made.json["bearer"], "t1").status == 200
    names = {node["name"] for node in running.call("GET", "/v1/nodes").json["items"]}
    assert "t1" in names
    assert "t2" not in names


def test_a_workers_token_without_a_node_is_bound_to_the_first_it_reports_for(running: DaemonProcess) -> None:
    made = token(running, "w", role="worker")
    assert made.json["node"] is None
    assert report(running, made.json["bearer"], "t3", gpus=7).problem() == (422, "invalid_request")
    assert node_of(running, made) is None, "a report that is refused binds nothing"
    assert report(running, made.json["bearer"], "t3").status == 200
    assert node_of(running, made) == "t3"
    assert report(running, made.json["bearer"], "t4").problem() == (403, "not_allowed")
    assert report(running, made.json["bearer"], "t3").status == 200


def test_of_two_first_reports_at_once_one_binds_the_token(running: DaemonProcess) -> None:
    made = token(running, "w", role="worker")
    answers: list[Answer] = []
    several = [
        threading.Thread(target=lambda name=name: answers.append(report(running, made.json["bearer"], name)))
        for name in ("u1", "u2", "u3", "u4")
    ]
    for one in several:
        one.start()
    for one in several:
        one.join(WITHIN_S)
    assert sorted(answer.status for answer in answers) == [200, 403, 403, 403]
    names = {node["name"] for node in running.call("GET", "/v1/nodes").json["items"]}
    assert len(names & {"u1", "u2", "u3", "u4"}) == 1


def test_a_workers_token_takes_no_gpu_of_another_node(running: DaemonProcess) -> None:
    """Not even one of a silent node, which may drain of a lease: reported clean, it would be granted again."""
    reading = {"uuid": "GPU-00000000-0000-0000-0000-0000000000b1", "node": "t", "index": 0}
    its, another = (token(running, "w", role="worker", node=node).json["bearer"] for node in ("t10", "t11"))

    def gpu() -> Any:
        return running.call("GET", f"/v1/gpus/{reading['uuid']}").json

    assert report(running, its, "t10", gpus=[reading]).status == 200
    eventually(lambda: running.call("GET", "/v1/nodes/t10").json["state"] == "unknown", WITHIN_S, running.story)
    assert report(running, another, "t11", gpus=[reading]).status == 200
    assert (gpu()["node"], gpu()["state"]) == ("t10", "unknown")
    body = {"worker_id": "of-root", "host": "h", "hold_s": 0.0, "gpus": [reading]}
    assert call(running.socket, "POST", "/v1/nodes/t12/exchange", body).status == 200
    assert gpu()["node"] == "t12", "a worker that the kernel shows to be root may have a new name"


def test_a_bound_token_is_bound_after_a_restart(tmp_path: Path) -> None:
    running = DaemonProcess(tmp_path / "d", "--no-worker")
    try:
        running.start(ready=False)
        made = token(running, "w", role="worker")
        assert report(running, made.json["bearer"], "t1").status == 200
        running.kill()
        running.start(ready=False)
        assert node_of(running, made) == "t1"
        assert report(running, made.json["bearer"], "t2").problem() == (403, "not_allowed")
        assert report(running, made.json["bearer"], "t1").status == 200
    finally:
        running.stop()


@ROOT_ONLY
def test_a_path_of_a_workers_token_is_not_opened(running: DaemonProcess) -> None:
    """Also on the daemon's host, where it looks like that of a worker: the daemon may read what this one may not."""
    bearer = token(running, "w", role="worker", node="t9").json["bearer"]
    reading = {"uuid": "GPU-00000000-0000-0000-0000-0000000000a9", "node": "t9", "index": 0}

    def reported(**what: Any) -> Any:
        body = {"worker_id": "of-t9", "host": "h", "gpus": [reading], "hold_s": 0.5, **what}
        answer = call(running.port, "POST", "/v1/nodes/t9/exchange", body, bearer=bearer, uid=OWNER)
        assert answer.status == 200, answer.json
        return answer.json

    answer = reported()
    job = {"command": ["/bin/true"], "launcher": "plain", "node": "t9"}
    submitted: list[Answer] = []
    asking_for_it = threading.Thread(target=lambda: submitted.append(call(running.socket, "POST", "/v1/jobs", job)))
    asking_for_it.start()
    try:
        answers = (answer := reported(ticket=answer["ticket"]) for _ in range(60))
        assert any(one["jobs"] for one in answers), running.story()
    finally:
        asking_for_it.join(WITHIN_S)
    job_id = submitted[0].json["id"]
    directory = f"/var/lib/gpulease/worker/jobs/{job_id}/logs"
    started = {"job_id": job_id, "state": "running", "started_at": "2026-11-22T00:00:00Z", "log_directory": directory}
    reported(ticket=answer["ticket"], jobs=[started])
    refused = call(running.socket, "GET", f"/v1/jobs/{job_id}/logs")
    assert refused.problem() == (404, "not_found")
    assert f"is on node t9, in {directory}, and the worker there" in refused.json["detail"]
    reported(jobs=[{**started, "state": "exited", "exit_code": 0}])
    assert call(running.socket, "GET", f"/v1/jobs/{job_id}").json["state"] == "succeeded"


def test_only_a_workers_token_has_a_node(running: DaemonProcess) -> None:
    assert token(running, "ann", role="user", node="n1").problem() == (422, "invalid_request")
    assert token(running, "ann", role="worker", node="").problem() == (422, "invalid_request")
    assert token(running, "ann", role="worker", node="x" * 256).problem() == (422, "invalid_request")
