"""Two daemons on one host: each GPU is in the ledger of one of them, and the second one is told so."""

from __future__ import annotations

import os
import pwd
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_server import other_daemons
from tests.daemon import PATIENT, DaemonProcess, eventually
from tests.imported_program import completed
from tests.worker.stand_in import EVERY, Driver

FAST = PATIENT | {"GPULEASE_POLL_S": "0.2"}


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    found = Driver(tmp_path)
    found.says(("count", EVERY, 3), ("idle", 0, 1))
    return found


@pytest.fixture
def two(driver: Driver, tmp_path: Path) -> Iterator[list[DaemonProcess]]:
    """Two daemons with data directories of their own, started at once, on the GPUs of one host."""
    made = [DaemonProcess(tmp_path / name, environment=driver.environment | FAST) for name in ("one", "two")]
    try:
        starts = [threading.Thread(target=each.start) for each in made]
        for start in starts:
            start.start()
        for start in starts:
            start.join()
        yield made
    finally:
        for each in made:
            if each.process is not None:
                each.stop()


def shown(daemon: DaemonProcess) -> dict[str, str]:
    """State of each GPU by UUID."""
    return {gpu["uuid"]: gpu["state"] for gpu in daemon.gpus()}


@pytest.mark.budget(20)
def test_a_gpu_is_in_one_ledger(two: list[DaemonProcess]) -> None:
    """B6 of the first walks through gpulease: a user starts a daemon beside the lab's, and both grant the same GPUs."""
    eventually(lambda: all(len(shown(each)) == 3 for each in two), 60, two[0].story)
    states: list[dict[str, str]] = []

    def each_gpu_is_unknown_to_one() -> bool:
        states[:] = [shown(each) for each in two]
        return all([state[uuid] == "unknown" for state in states].count(True) == 1 for uuid in states[0])

    eventually(each_gpu_is_unknown_to_one, 60, lambda: str(states))
    mine, others = two if "free" in states[0].values() else two[::-1]
    free = [uuid for uuid, state in states[two.index(mine)].items() if state == "free"]
    assert free
    for uuid in free:
        answer = others.call("POST", "/v1/leases", {"devices": [uuid], "queue": False})
        assert answer.problem() == (409, "not_now"), "not never: the other daemon may end"
        assert "in the ledger of another gpulease daemon, whose worker is pid" in answer.json["detail"]
        assert mine.call("POST", "/v1/leases?wait_s=60", {"devices": [uuid]}).status == 201
    assert "is not leased here: it is in the ledger of another gpulease daemon" in others.output.read_text()


@pytest.mark.budget(20)
def test_master_ports_of_two_daemons_never_meet(tmp_path: Path) -> None:
    made = [DaemonProcess(tmp_path / name, "--simulate", "8", environment=FAST) for name in ("one", "two")]
    try:
        given = []
        for each in made:
            each.start()
            given.append([each.request_lease(wait_s=60)["env"]["MASTER_PORT"] for _ in range(8)])
        assert len({port for ports in given for port in ports}) == 16
        for each in made:
            assert set(each.gpu_states()) == {"leased"}, "simulated GPUs of the same UUIDs keep no other from its own"
    finally:
        for each in made:
            if each.process is not None:
                each.stop()


def test_a_second_daemon_is_told_of_the_first(tmp_path: Path) -> None:
    user = f"user {pwd.getpwuid(os.getuid()).pw_name}"
    first, second = (DaemonProcess(tmp_path / name, "--no-worker") for name in ("first", "second"))
    second.port = first.port
    try:
        first.start()
        refused = completed(second.command[3:], os.environ, 60)
        assert refused.returncode == 1
        assert f"a gpulease daemon of {user} answers at {first.url} already" in refused.stderr
        assert "You need none of your own: `gpulease status` shows its GPUs." in refused.stderr
        at_socket = other_daemons.at(other_daemons.unix(first.socket))
        assert str(at_socket) == f"a gpulease daemon of {user} answers at unix://{first.socket} already"
    finally:
        first.stop()


def test_what_is_no_daemon_is_not_taken_for_one(tmp_path: Path) -> None:
    assert other_daemons.at(other_daemons.unix(tmp_path / "none")) is None
    assert other_daemons.at(other_daemons.parse("http://127.0.0.1:1")) is None


def test_a_daemon_that_hangs_up_after_its_answer_is_named_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            caller, _ = listener.accept()
            with caller:
                head = caller.recv(65536).decode()
                (nonce,) = re.findall(r"(?im)^x-request-id: (\w+)", head)
                ends = f"X-Request-Id: {nonce}\r\nConnection: close\r\nContent-Length: 15"
                caller.sendall(f'HTTP/1.1 200 OK\r\n{ends}\r\n\r\n{{"status":"ok"}}'.encode())

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found = other_daemons.at(other_daemons.parse(url))
    assert found is not None
    assert found.user == f"user {pwd.getpwuid(os.getuid()).pw_name}"
