"""Whom a request may name as the owner of its lease, over real sockets: what is not confirmed must renew."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gpulease_protocol.host.process_id import ProcessId, realm
from gpulease_protocol.requests import LeaseRequest
from tests.api.test_service_api import GONE
from tests.daemon import DaemonProcess, daemon, eventually
from tests.http_as_user import call

pytestmark = pytest.mark.usefixtures("each_way")


def ticks(pid: int) -> int:
    """Start time of a living process."""
    owner = ProcessId.of(pid)
    assert owner is not None
    assert owner.start_ticks is not None
    return owner.start_ticks


@pytest.fixture
def stranger() -> Iterator[int]:
    """A living process of this user that is no ancestor of the caller."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def ask(api: DaemonProcess, over: str, **body: Any) -> tuple[str, int | None]:
    """Liveness and owner of a lease that was asked for over TCP or the Unix socket."""
    if over == "tcp":
        answer = api.call("POST", "/v1/leases", body)
        assert answer.status == 201, answer.content
        lease = answer.json
    else:
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(api.socket))) as client:
            lease = client.post("http://localhost/v1/leases", json=body).json()
    return lease["liveness"], lease["holder"]["owner_pid"]


@pytest.mark.parametrize(("over", "liveness"), [("socket", "process"), ("tcp", "heartbeat")])
@pytest.mark.parametrize("pid", [os.getpid(), os.getppid()], ids=["the caller", "its parent"])
def test_the_caller_or_its_ancestor_is_confirmed_if_the_kernel_shows_its_pid(
    api: DaemonProcess, over: str, liveness: str, pid: int
) -> None:
    assert ask(api, over, owner_pid=pid) == (liveness, pid)


@pytest.mark.parametrize("over", ["socket", "tcp"])
def test_a_process_of_the_callers_user_is_confirmed_by_its_start_time(
    api: DaemonProcess, over: str, stranger: int
) -> None:
    assert ask(api, over, owner_pid=stranger, owner_start_ticks=ticks(stranger)) == ("process", stranger)
    assert ask(api, over, owner_pid=stranger) == ("heartbeat", stranger)


@pytest.mark.parametrize(("over", "owner"), [("socket", os.getpid()), ("tcp", None)], ids=["socket", "tcp"])
def test_another_start_time_means_another_process(api: DaemonProcess, over: str, owner: int | None) -> None:
    assert ask(api, over, owner_pid=os.getppid(), owner_start_ticks=ticks(os.getppid()) + 1) == ("heartbeat", owner)


@pytest.mark.parametrize(("over", "owner"), [("socket", os.getpid()), ("tcp", None)], ids=["socket", "tcp"])
def test_a_process_that_is_gone_owns_nothing(api: DaemonProcess, over: str, owner: int | None) -> None:
    assert ask(api, over, owner_pid=GONE, owner_start_ticks=1) == ("heartbeat", owner)


def test_a_zombie_is_not_watched(api: DaemonProcess) -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        text = Path(f"/proc/{process.pid}/stat").read_text()
        started = int(text[text.rindex(")") + 2 :].split()[19])
        assert ask(api, "tcp", owner_pid=process.pid, owner_start_ticks=started)[0] == "heartbeat"


@pytest.mark.parametrize("over", ["socket", "tcp"])
def test_a_lease_without_an_owner_must_be_renewed(api: DaemonProcess, over: str) -> None:
    """curl ends with its answer: its lease must not."""
    assert ask(api, over)[0] == "heartbeat"


def test_a_start_time_without_a_pid_is_refused(api: DaemonProcess) -> None:
    answer = api.call("POST", "/v1/leases", {"owner_start_ticks": 5})
    assert answer.problem() == (422, "invalid_request")
    assert "owner_start_ticks" in answer.json["detail"]


def test_without_a_worker_of_this_host_no_owner_is_watched(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1") as running:
        pid = os.getpid()
        assert ask(running, "socket", owner_pid=pid, owner_start_ticks=ticks(pid))[0] == "process"
        running.stop()
        running.options = ("--no-worker",)
        running.start(ready=False)
        answer = running.call("POST", "/v1/leases", {"owner_pid": pid, "owner_start_ticks": ticks(pid)})
        assert answer.json["liveness"] == "heartbeat"


def test_on_another_host_than_the_daemons_a_holder_is_watched_and_no_stranger_on_its_gpu(tmp_path: Path) -> None:
    """Behind a proxy the daemon knows nothing of a caller but its token, as of one on another host."""
    hardware, uuid = tmp_path / "gpus.json", "GPU-00000000-0000-0000-0000-000000000001"

    def show(*pids: int) -> None:
        processes = [{"pid": pid, "type": "compute", "memory_bytes": 2**30} for pid in pids]
        (tmp_path / "new").write_text(json.dumps({"gpus": [{"uuid": uuid, "processes": processes}]}))
        (tmp_path / "new").rename(hardware)

    show()
    with daemon(tmp_path, "--simulate", str(hardware), "--behind-proxy") as running, killed("sleep", "600") as training:
        user = pwd.getpwuid(os.getuid()).pw_name
        bearers = {name: token(running, name) for name in (user, "another")}
        owner = {"owner_pid": training.pid, "owner_start_ticks": ticks(training.pid), "owner_realm": realm()}

        def ask_as(name: str, **body: Any) -> dict[str, Any]:
            answer = running.call("POST", "/v1/leases", body, Authorization=f"Bearer {bearers[name]}")
            assert answer.status == 201, answer.content
            return dict(answer.json)

        unknown = ask_as(user, **{**owner, "owner_realm": f"{UNKNOWN_BOOT}/pid:[1]"})
        assert (unknown["liveness"], unknown["holder"]["host"]) == ("heartbeat", None)
        give_back(running, unknown)
        eventually(lambda: state_of(running) == "free", 30, running.story)
        theirs = ask_as("another", **owner)
        eventually(lambda: lease_of(running, theirs)["liveness"] == "heartbeat", 30, running.story)
        assert training.poll() is None
        give_back(running, theirs)
        eventually(lambda: state_of(running) == "free", 30, running.story)

        held = ask_as(user, **owner)
        assert (held["liveness"], held["holder"]["host"]) == ("process", socket.gethostname())
        show(training.pid)
        eventually(lambda: activity_of(running) in ("active", "idle"), 30, running.story)
        kinds = [event["kind"] for event in as_admin(running, "GET", "/v1/events?limit=1000")["items"]]
        assert "gpu.conflict" not in kinds, "it is no stranger to its own lease"
        training.kill()
        training.wait()
        show()
        eventually(lambda: lease_of(running, held)["end_reason"] == "holder_died", 60, running.story)
        eventually(lambda: state_of(running) == "free", 30, running.story)


@contextmanager
def killed(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed at the close."""
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


UNKNOWN_BOOT = "00000000-0000-0000-0000-000000000000"


def as_admin(running: DaemonProcess, method: str, path: str, body: Any = None) -> dict[str, Any]:
    answer = call(running.socket, method, path, body)
    assert answer.status < 300, answer.content
    return dict(answer.json)


def token(running: DaemonProcess, user: str) -> str:
    return str(as_admin(running, "POST", "/v1/tokens", {"user": user, "role": "user"})["bearer"])


def lease_of(running: DaemonProcess, lease: dict[str, Any]) -> dict[str, Any]:
    return as_admin(running, "GET", f"/v1/leases/{lease['id']}")


def give_back(running: DaemonProcess, lease: dict[str, Any]) -> None:
    as_admin(running, "POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})


def state_of(running: DaemonProcess) -> str:
    return str(as_admin(running, "GET", "/v1/gpus")["items"][0]["state"])


def activity_of(running: DaemonProcess) -> str:
    return str(as_admin(running, "GET", "/v1/gpus")["items"][0]["activity"])


@pytest.mark.parametrize(
    "wrong", [{"owner_realm": "x"}, {"owner_realm": f"{UNKNOWN_BOOT}/pid:[{'9' * 400}]"}], ids=["no realm", "long"]
)
def test_a_realm_that_is_none_is_refused(api: DaemonProcess, wrong: dict[str, str]) -> None:
    assert api.call("POST", "/v1/leases", wrong).problem() == (422, "invalid_request")


def test_a_client_of_another_host_names_its_realm() -> None:
    own = ProcessId.this_process()
    local = {"owner_pid": own.pid, "owner_start_ticks": own.start_ticks}
    assert own.owner_fields(local=True) == local, "an older daemon on this host knows no more"
    assert own.owner_fields(local=False) == local | {"owner_realm": realm()}
    assert LeaseRequest(**own.owner_fields(local=False)).owner_realm == realm()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can send requests as another user, or make a pid namespace")
def test_a_lease_cannot_be_tied_to_the_process_of_another_user(api: DaemonProcess, stranger: int) -> None:
    body = json.dumps({"count": 1, "owner_pid": stranger, "owner_start_ticks": ticks(stranger)})
    curl = ["curl", "-s", f"{api.url}/v1/leases", "-d", body]
    answer = subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", *curl], check=True, capture_output=True)
    lease = json.loads(answer.stdout)
    assert (lease["liveness"], lease["holder"]["owner_pid"]) == ("heartbeat", None)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can send requests as another user, or make a pid namespace")
@pytest.mark.parametrize("start", ["", ', "owner_start_ticks": 0'])
def test_a_pid_of_another_namespace_is_never_taken_for_one_of_this_host(api: DaemonProcess, start: str) -> None:
    body = f'{{"count": 1, "owner_pid": $$ {start}}}'.replace('"', '\\"')
    curl = f'curl -s --unix-socket {api.socket} http://localhost/v1/leases -d "{body}"'
    contained = ["unshare", "--pid", "--fork", "sh", "-c", f'{curl}; [ "$$" = 1 ]']
    answer = subprocess.run(contained, check=True, capture_output=True)
    lease = json.loads(answer.stdout)
    assert lease["liveness"] == "heartbeat"
    assert lease["holder"]["owner_pid"] != 1
