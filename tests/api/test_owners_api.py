"""Whom a request may name as the owner of its lease, over real sockets: what is not confirmed must renew."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gpulease.owner import Owner
from tests.daemon import DaemonProcess, daemon

from .test_service_api import GONE


def ticks(pid: int) -> int:
    """Start time of a living process."""
    owner = Owner.of(pid)
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
def test_the_caller_or_an_ancestor_of_it_is_confirmed_where_the_kernel_names_the_caller(
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
def test_who_names_no_owner_must_renew(api: DaemonProcess, over: str) -> None:
    """curl ends with its answer: its lease must not."""
    assert ask(api, over)[0] == "heartbeat"


def test_a_start_time_without_a_pid_is_refused(api: DaemonProcess) -> None:
    answer = api.call("POST", "/v1/leases", {"owner_start_ticks": 5})
    assert answer.problem() == (422, "invalid_request")
    assert "owner_start_ticks" in answer.json["detail"]


def test_without_a_worker_of_this_host_nobody_is_watched(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1") as running:
        pid = os.getpid()
        assert ask(running, "socket", owner_pid=pid, owner_start_ticks=ticks(pid))[0] == "process"
        running.stop()
        running.options = ("--no-worker",)
        running.start(ready=False)
        answer = running.call("POST", "/v1/leases", {"owner_pid": pid, "owner_start_ticks": ticks(pid)})
        assert answer.json["liveness"] == "heartbeat"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as somebody else, or make a pid namespace")
def test_nobody_may_tie_his_lease_to_the_process_of_another_user(api: DaemonProcess, stranger: int) -> None:
    body = json.dumps({"count": 1, "owner_pid": stranger, "owner_start_ticks": ticks(stranger)})
    curl = ["curl", "-s", f"{api.url}/v1/leases", "-d", body]
    answer = subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", *curl], check=True, capture_output=True)
    lease = json.loads(answer.stdout)
    assert (lease["liveness"], lease["holder"]["owner_pid"]) == ("heartbeat", None)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as somebody else, or make a pid namespace")
@pytest.mark.parametrize("start", ["", ', "owner_start_ticks": 0'])
def test_a_pid_of_another_pid_namespace_is_never_taken_for_one_of_this_host(api: DaemonProcess, start: str) -> None:
    body = f'{{"count": 1, "owner_pid": $$ {start}}}'.replace('"', '\\"')
    curl = f'curl -s --unix-socket {api.socket} http://localhost/v1/leases -d "{body}"'
    contained = ["unshare", "--pid", "--fork", "sh", "-c", f'{curl}; [ "$$" = 1 ]']
    answer = subprocess.run(contained, check=True, capture_output=True)
    lease = json.loads(answer.stdout)
    assert lease["liveness"] == "heartbeat"
    assert lease["holder"]["owner_pid"] != 1
