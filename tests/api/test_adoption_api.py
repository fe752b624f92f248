"""`adopt` over REST and on the command line, with real processes on simulated GPUs."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.host.process_id import realm
from gpulease_protocol.requests import LeaseRequest
from tests.api.test_lease_owner_api import as_admin, give_back, killed, lease_of, ticks, token
from tests.api.test_service_api import GONE
from tests.daemon import DaemonProcess, daemon, eventually

UUIDS = [f"GPU-00000000-0000-0000-0000-00000000000{index}" for index in range(3)]
OTHER_UID = 65534
AS_USER = ("setpriv", f"--reuid={OTHER_UID}", "--clear-groups")
PARENT = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
Show = Callable[..., None]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonProcess, Show]]:
    """A daemon with three GPUs, and what puts processes on each of them."""
    place = tmp_path_factory.mktemp("d")

    def show(*pids: list[int]) -> None:
        listed = [pids[index] if index < len(pids) else [] for index in range(len(UUIDS))]
        processes = [[{"pid": pid, "type": "compute", "memory_bytes": 2**30} for pid in some] for some in listed]
        gpus = [{"uuid": uuid, "processes": some} for uuid, some in zip(UUIDS, processes, strict=True)]
        (place / "new").write_text(json.dumps({"gpus": gpus}))
        (place / "new").rename(place / "gpus.json")

    show()
    with daemon(place, "--simulate", str(place / "gpus.json")) as running:
        yield running, show


@pytest.fixture
def training() -> Iterator[int]:
    """A process that was started without a lease."""
    with killed("sleep", "600") as process:
        yield process.pid


def states(running: DaemonProcess) -> list[str]:
    return [gpu["state"] for gpu in as_admin(running, "GET", "/v1/gpus")["items"]]


def adopt(running: DaemonProcess, pid: int, **more: Any) -> Any:
    return running.call("POST", "/v1/leases", {"adopt": True, "owner_pid": pid, "owner_start_ticks": ticks(pid)} | more)


def cleared(machine: tuple[DaemonProcess, Show]) -> tuple[DaemonProcess, Show]:
    """The machine with all GPUs free."""
    running, show = machine
    show()
    eventually(lambda: states(running) == ["free"] * 3, 60, running.story)
    return machine


@pytest.mark.budget(20)
def test_a_running_process_gets_a_lease_on_its_gpus_that_ends_with_it(machine) -> None:
    running, show = cleared(machine)
    with killed("sleep", "600") as process:
        show([process.pid], [], [process.pid])
        eventually(lambda: states(running) == ["foreign", "free", "foreign"], 30, running.story)
        answer = adopt(running, process.pid, label="by hand")
        assert answer.status == 201, answer.content
        lease = answer.json
        assert [gpu["index"] for gpu in lease["gpus"]] == [0, 2]
        assert (lease["state"], lease["liveness"]) == ("active", "process")
        assert (lease["holder"]["owner_pid"], lease["holder"]["label"]) == (process.pid, "by hand")
        assert states(running) == ["leased", "free", "leased"]
        seen = as_admin(running, "GET", "/v1/gpus")["items"]
        eventually(
            lambda: as_admin(running, "GET", "/v1/gpus")["items"][0]["processes"][0]["lease_id"] == lease["id"],
            30,
            lambda: f"{seen} {running.story()}",
        )
        assert lease_of(running, lease).get("problems", []) == []
        again = adopt(running, process.pid)
        assert (again.status, again.json["code"]) == (409, "in_use")
        process.kill()
        process.wait()
        show()
        eventually(lambda: lease_of(running, lease)["end_reason"] == "holder_died", 30, running.story)
        eventually(lambda: states(running) == ["free"] * 3, 60, running.story)


@pytest.mark.budget(20)
def test_what_runs_below_it_counts_and_what_does_not_is_in_the_way(machine) -> None:
    running, show = cleared(machine)
    with (
        subprocess.Popen(
            ["python3", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as launcher,
        killed("sleep", "600") as stranger,
    ):
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        try:
            show([rank, stranger.pid])
            refused = adopt(running, launcher.pid)
            assert (refused.status, refused.json["code"]) == (409, "not_now")
            assert f"used by pid {stranger.pid}" in refused.json["detail"]
            assert "launcher" in refused.json["remedy"]
            show([rank])
            lease = adopt(running, launcher.pid)
            assert lease.status == 201, lease.content
            assert lease.json["holder"]["owner_pid"] == launcher.pid
            give_back(running, lease.json)
            assert states(running)[0] == "draining"
        finally:
            os.kill(rank, 9)
            launcher.kill()


def test_one_that_uses_no_gpu_has_ended_or_does_not_exist_is_refused(machine, training: int) -> None:
    running, _ = cleared(machine)
    idle = adopt(running, training)
    assert (idle.status, idle.json["code"]) == (409, "not_now")
    assert f"Process {training} uses no GPU" in idle.json["detail"]
    for body in ({"owner_pid": GONE}, {"owner_pid": training, "owner_start_ticks": 1}, {"owner_pid": training}):
        answer = running.call("POST", "/v1/leases", {"adopt": True} | body)
        assert answer.problem() == (422, "invalid_request"), body
        assert "there is no process" in answer.json["detail"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can send requests as another user")
def test_only_its_user_and_administrators_adopt_a_process_and_the_lease_is_its_users(machine) -> None:
    running, show = cleared(machine)
    with (
        killed(*AS_USER, "sleep", "600") as theirs,
        killed("sleep", "600") as own,
    ):
        show([own.pid], [theirs.pid])
        body = json.dumps({"adopt": True, "owner_pid": own.pid, "owner_start_ticks": ticks(own.pid)})
        curl = ["curl", "-s", f"{running.url}/v1/leases", "-d", body]
        answer = subprocess.run([*AS_USER, *curl], check=True, capture_output=True)
        problem = json.loads(answer.stdout)
        assert problem["code"] == "not_allowed"
        assert problem["detail"] == f"Process {own.pid} belongs to user {pwd.getpwuid(0).pw_name}."
        parent = adopt(running, os.getpid())
        assert parent.status == 201, parent.content
        assert [gpu["index"] for gpu in parent.json["gpus"]] == [0], "below it runs another user's process, too"
        give_back(running, parent.json)
        lease = adopt(running, theirs.pid)
        assert lease.status == 201, lease.content
        assert lease.json["holder"]["user"] == pwd.getpwuid(OTHER_UID).pw_name


@pytest.mark.budget(20)
def test_a_process_of_another_host_is_adopted_by_its_user_alone(tmp_path: Path) -> None:
    """Behind a proxy the daemon knows nothing of a caller but its token, as of one on another host."""
    hardware = tmp_path / "gpus.json"
    with killed("sleep", "600") as process:
        processes = [{"pid": process.pid, "type": "compute", "memory_bytes": 2**30}]
        hardware.write_text(json.dumps({"gpus": [{"uuid": UUIDS[0], "processes": processes}]}))
        with daemon(tmp_path, "--simulate", str(hardware), "--behind-proxy") as running:
            user = pwd.getpwuid(os.getuid()).pw_name
            body = {"adopt": True, "owner_pid": process.pid, "owner_start_ticks": ticks(process.pid)}

            def ask(name: str, **more: Any) -> Any:
                bearer = f"Bearer {token(running, name)}"
                return running.call("POST", "/v1/leases", body | more, Authorization=bearer)

            assert ask(user).problem() == (422, "invalid_request"), "which host is meant is not known"
            assert ask("another", owner_realm=realm()).json["code"] == "not_allowed"
            lease = ask(user, owner_realm=realm())
            assert lease.status == 201, lease.content
            assert lease.json["liveness"] == "process"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"adopt": True}, "must come with owner_pid"),
        ({"adopt": True, "owner_pid": 7, "count": 2}, "leave out count"),
        ({"adopt": True, "owner_pid": 7, "devices": "auto", "node": "a"}, "leave out devices, node"),
        ({"adopt": True, "owner_pid": 7, "watch_owner": False}, "needs watch_owner"),
    ],
)
def test_an_adoption_that_chooses_gpus_is_refused_by_the_body_itself(body: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        LeaseRequest(**body)


def test_nothing_is_explained_beforehand(machine, training: int) -> None:
    running, _ = machine
    body = {"adopt": True, "owner_pid": training, "owner_start_ticks": ticks(training)}
    assert running.call("POST", "/v1/leases/explain", body).problem() == (422, "invalid_request")
