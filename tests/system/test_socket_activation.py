"""A daemon on sockets that systemd holds: a restart leaves no gap in which someone else could have them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease import Client
from tests.daemon import DaemonProcess, eventually, workers_of
from tests.ports import free_port

ACTIVATE = """
import fcntl, os, sys
fds = [int(word) for word in sys.argv[1].split(",")]
copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
for number, copy in enumerate(copies, 3):
    os.dup2(copy, number)
    os.set_inheritable(number, True)
os.closerange(3 + len(fds), 200)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": "a:b:c"}
os.execv(sys.executable, [sys.executable, "-m", "gpulease_cli", "serve", *sys.argv[2:]])
"""
"""Passes sockets on as systemd does (sd_listen_fds(3))."""


class Systemd:
    """Holds the daemon's addresses, and starts it."""

    def __init__(self, directory: Path) -> None:
        self.data_dir, self.log = directory / "d", directory / "log"
        self.path = directory / "run.sock"
        self.sockets = [socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", free_port()))]
        self.sockets[0].bind(str(self.path))
        self.sockets[0].listen()
        self.port = self.sockets[1].getsockname()[1]
        self.sockets.append(socket.create_server(("::1", self.port), family=socket.AF_INET6))
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start the daemon on the sockets."""
        numbers = [one.fileno() for one in self.sockets]
        words = [sys.executable, "-c", ACTIVATE, ",".join(map(str, numbers)), *options]
        words += ["--data-dir", str(self.data_dir)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(words, pass_fds=numbers, stdout=log, stderr=log, env=environment)

    def end(self, number: int) -> None:
        """Send a signal, and wait until the daemon has ended."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)
        self.process = None

    def story(self) -> str:
        """What the daemon has printed."""
        return self.log.read_text()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path)
    try:
        yield made
    finally:
        if made.process is not None:
            made.end(signal.SIGTERM)
        for one in made.sockets:
            one.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_request_during_a_restart_is_answered(systemd: Systemd, number: int) -> None:
    systemd.start("--no-worker")
    addresses = (systemd.url, f"http://[::1]:{systemd.port}", f"unix://{systemd.path}")
    for address in addresses:
        with Client(address) as client:
            assert client.gpus() == ()
    systemd.end(number)
    assert systemd.path.is_socket(), "it is systemd's"
    answers: dict[str, object] = {}

    def ask(address: str) -> None:
        with Client(address, timeout_s=60) as client:
            answers[address] = client.gpus()

    asking = [threading.Thread(target=ask, args=(address,)) for address in addresses]
    for one in asking:
        one.start()
    waiting = [f"127.0.0.1:{systemd.port}", f"[::1]:{systemd.port}"]
    table = lambda: subprocess.check_output(["ss", "-Htn", "state", "established"], text=True)  # noqa: E731
    eventually(lambda: all(f"{address} " in table() for address in waiting), 60, table)
    assert answers == {}
    systemd.start("--no-worker")
    for one in asking:
        one.join(60)
    assert answers == dict.fromkeys(addresses, ()), systemd.story()


@pytest.mark.slow
def test_the_inherited_addresses_count_and_not_the_settings(systemd: Systemd) -> None:
    systemd.start("--simulate", "1", "--port", "1", "--socket", str(systemd.path.parent / "other.sock"))
    with Client(systemd.url, retry_s=60) as client:
        eventually(lambda: [node.gpu_count for node in client.nodes()] == [1], 60, systemd.story)
    assert f"gpulease listens on {systemd.url} and http://[::1]:{systemd.port} and unix://" in systemd.story()
    assert not (systemd.path.parent / "other.sock").exists()
    assert systemd.process is not None
    (worker,) = workers_of(systemd.process.pid)
    assert b"LISTEN_" not in Path(f"/proc/{worker.pid}/environ").read_bytes()
    inherited = {os.stat(one.fileno()).st_ino for one in systemd.sockets}
    assert not inherited & {number.stat().st_ino for number in Path(f"/proc/{worker.pid}/fd").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "said"), [("datagram", "not a listening"), ("two", "Two Unix sockets")])
def test_other_sockets_are_refused(systemd: Systemd, which: str, said: str, tmp_path: Path) -> None:
    if which == "datagram":
        more = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    else:
        more = socket.socket(socket.AF_UNIX)
        more.bind(str(tmp_path / "second"))
        more.listen()
    systemd.sockets.append(more)
    systemd.start("--no-worker")
    assert systemd.process is not None
    assert systemd.process.wait(60) == 1
    assert said in systemd.story()
    assert "Traceback" not in systemd.story()


def test_sockets_that_are_meant_for_another_process_are_left_alone(tmp_path: Path) -> None:
    process = DaemonProcess(tmp_path / "d", "--no-worker", environment={"LISTEN_PID": "1", "LISTEN_FDS": "3"})
    try:
        assert process.start().answers("/readyz")
    finally:
        process.stop()
