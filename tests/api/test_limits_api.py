"""`/v1/limits`: administrators set limits while the daemon runs, others see their own, and everyone is told of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpulease.client import Client
from gpulease_protocol.limits import LimitKind, LimitsRequest
from tests.daemon import PATIENT, DaemonProcess
from tests.http_as_user import call

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can send requests as another user")
ANN, BOB = 54321, 54322


@contextmanager
def daemon(directory: Path) -> Iterator[DaemonProcess]:
    """A daemon that serves other users, too."""
    made = DaemonProcess(directory, "--simulate", "4", "--node", "n1", "--max-queue-per-user", "7", environment=PATIENT)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="gpulease-limits-"))
    made.chmod(0o711)  # other users pass through to the socket
    yield made / "d"
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def running(directory: Path) -> Iterator[DaemonProcess]:
    with daemon(directory) as one:
        yield one


def set_limits(running: DaemonProcess, kind: str, name: str, **body: Any) -> Any:
    return call(running.socket, "PUT", f"/v1/limits/{kind}/{name}", body)


def ask(running: DaemonProcess, count: int, uid: int = ANN, **body: Any) -> Any:
    return call(running.socket, "POST", "/v1/leases?wait_s=1", {"count": count, **body}, uid=uid)


def test_a_limit_holds_from_its_answer_on_and_is_told_with_what_is_used_of_it(running: DaemonProcess) -> None:
    user = str(ANN)
    held = call(running.socket, "POST", "/v1/leases?wait_s=60", {"count": 2}, uid=ANN)
    assert held.status == 201
    done = set_limits(running, "user", user, max_gpus=2, max_lease_s=3600, gpu_hours=10)
    assert done.status == 200
    shown = call(running.socket, "GET", f"/v1/limits/user/{user}", uid=ANN).json
    expected = {"max_gpus": 2, "gpus": 2, "leases": 1, "queued": 0, "max_queued": 7, "defaults": ["max_queued"]}
    assert shown | expected == shown
    assert (shown["set_by"], shown["gpu_hours_used"] < 1) == ("root", True)
    waits = ask(running, 1)
    assert waits.status == 202
    why = call(running.socket, "GET", f"/v1/leases/{waits.json['id']}/explain", uid=ANN).json["sentence"]
    assert f"user {user} has 2 GPUs and asks for 1 more; the limit is 2 at a time" in why
    assert ask(running, 3).problem() == (422, "over_quota")
    assert ask(running, 1, time_s=7200).problem() == (422, "over_quota")
    assert ask(running, 1, uid=BOB, time_s=7200).status in (201, 202), "not refused"
    explained = call(running.socket, "POST", "/v1/leases/explain", {"count": 1, "time_s": 7200}, uid=ANN)
    assert explained.problem() == (422, "over_quota")
    removed = call(running.socket, "DELETE", f"/v1/limits/user/{user}")
    assert (removed.status, removed.json["max_gpus"], removed.json["set_at"]) == (200, None, None)
    running.wait_active(waits.json["id"])
    assert call(running.socket, "DELETE", f"/v1/limits/user/{user}").problem() == (404, "not_found")
    events = [one for one in running.call("GET", "/v1/events?limit=1000").json["items"] if "limits." in one["kind"]]
    assert [(one["kind"], one["reason"]) for one in events] == [
        ("limits.set", f"user {user}: 2 GPUs, 60 min for a lease, 10 GPU-hours in 7 d, by root"),
        ("limits.removed", f"user {user}, by root"),
    ]


def test_users_see_their_own_and_change_none(running: DaemonProcess) -> None:
    set_limits(running, "group", "vision", members=[str(ANN), "zoe"], max_gpus=3)
    set_limits(running, "user", str(BOB), max_gpus=1)
    own = call(running.socket, "GET", "/v1/limits", uid=ANN).json["items"]
    assert [(one["kind"], one["name"]) for one in own] == [("user", str(ANN)), ("group", "vision")]
    assert call(running.socket, "GET", f"/v1/limits/user/{BOB}", uid=ANN).problem() == (403, "not_allowed")
    assert call(running.socket, "PUT", f"/v1/limits/user/{ANN}", {}, uid=ANN).problem() == (403, "not_allowed")
    assert call(running.socket, "DELETE", "/v1/limits/group/vision", uid=ANN).problem() == (403, "not_allowed")
    for path in ("/v1/events?limit=1000", "/v1/events?limit=1000&kind=limits.set"):
        told = {one["kind"] for one in call(running.socket, "GET", path, uid=ANN).json["items"]}
        assert not {kind for kind in told if kind.startswith("limits.")}, "they name limits of others"
    every = running.call("GET", "/v1/limits").json["items"]
    assert [(one["kind"], one["name"]) for one in every] == [("group", "vision"), ("user", str(BOB))]


def test_what_makes_no_sense_is_refused(running: DaemonProcess) -> None:
    set_limits(running, "group", "vision", members=["zoe"])
    for kind, name, body, said in (
        ("user", "zoe", {"max_gpus": 0}, "max_gpus: must be 1 to 1000000, not 0"),
        ("user", "zoe", {"members": ["ann"]}, "members: are for limits of a group"),
        ("group", "nlp", {"members": ["zoe"]}, "user zoe is in group vision"),
        ("group", "nlp", {"members": [""]}, "members: must be a name"),
        ("group", "nlp", {"members": ["a" * 256]}, "members: must be a name"),
        ("group", "nlp", {"members": ["a\tb"]}, "members: must be a name"),
        ("user", "zoe%09", {"max_gpus": 1}, "name: must have characters that can be printed"),
        ("group", "nlp", {"members": ["a", "a"]}, "members: must name each user once"),
        ("user", "zoe", {"window_s": 60}, "window_s: must be 3600 to 7776000 seconds"),
        ("user", "zoe", {"gpus": 1}, "gpus"),
        ("team", "zoe", {}, "kind"),
    ):
        answer = set_limits(running, kind, name, **body)
        assert answer.problem() == (422, "invalid_request"), body
        assert said in answer.json["detail"]
    assert set_limits(running, "token", "token-0000000000000000", max_gpus=1).problem() == (404, "not_found")


def test_limits_can_be_set_for_any_name_that_a_user_may_have(running: DaemonProcess) -> None:
    names = ["CORP\\ada lovelace", "ada@corp.example:x", "a" * 255, "100%", "user ada", "ä?#&"]
    expected = [(LimitKind.GROUP, "g: 1", 3), *((LimitKind.USER, name, 2) for name in sorted(names))]
    with Client(f"unix://{running.socket}") as client:
        for name in names:
            assert client.set_limits(LimitKind.USER, name, LimitsRequest(max_gpus=2)).name == name
        client.set_limits(LimitKind.GROUP, "g: 1", LimitsRequest(max_gpus=3, members=names))
    running.stop()
    running.start()
    with Client(f"unix://{running.socket}") as client:
        assert [(one.kind, one.name, one.max_gpus) for one in client.limits()] == expected
        assert client.limits_of(LimitKind.GROUP, "g: 1").members == tuple(names)
        client.remove_limits(LimitKind.USER, names[0])
        assert len(client.limits()) == len(names)


def test_limits_of_a_token_stand_beside_those_of_its_user_and_hold_after_a_restart(directory: Path) -> None:
    with daemon(directory) as running:
        made = running.call("POST", "/v1/tokens", {"user": "zoe"}).json
        assert set_limits(running, "token", made["id"], max_leases=1).status == 200
        assert set_limits(running, "user", "zoe", max_gpus=3).status == 200
        call(running.socket, "POST", "/v1/leases", {"count": 1}, bearer=made["bearer"])
        seen = call(running.socket, "GET", "/v1/limits", bearer=made["bearer"]).json["items"]
        assert [(one["kind"], one["leases"]) for one in seen] == [("user", 1), ("token", 1)]
    with daemon(directory) as running:
        assert call(running.socket, "POST", "/v1/leases", {"count": 1}, bearer=made["bearer"]).status == 202
