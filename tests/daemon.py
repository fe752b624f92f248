"""A real `gpulease serve` in a process of its own, for tests that go through the whole of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpulease import Client

START_S = 60.0


class DaemonProcess:
    """`gpulease serve` on a directory. Can be killed and started again on the same port."""

    def __init__(self, data_dir: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self.environment = environment or {}
        self.options = options
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.output = data_dir.parent / f"{data_dir.name}.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def socket(self) -> Path:
        return self.data_dir / "gpulease.sock"

    @property
    def command(self) -> list[str]:
        start = [
            sys.executable,
            "-m",
            "gpulease.cli",
            "serve",
            "--port",
            str(self.port),
            "--data-dir",
            str(self.data_dir),
        ]
        return [*start, *self.options]

    def start(self, *, ready: bool = True) -> DaemonProcess:
        """Start it, and wait until it can grant; else until it has read its ledger, or stands by."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
        environment |= self.environment
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output, env=environment)
        eventually(lambda: self.answers("/readyz" if ready else "/healthz"), START_S, self.story)
        eventually(lambda: b"the ledger is being read" not in self.get("/readyz").content, START_S, self.story)
        return self

    def answers(self, path: str) -> bool:
        """True when a GET of this path is answered with success."""
        assert self.process is not None
        assert self.process.poll() is None, self.story()
        try:
            return self.get(path).status == 200
        except OSError:
            return False

    def get(self, path: str) -> Answer:
        """What a GET of this path is answered."""
        return self.call("GET", path)

    def story(self) -> str:
        """What it printed."""
        return f"the daemon printed:\n{self.output.read_text(errors='replace')[-4000:]}"

    def kill(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the daemon did not end on SIGTERM; {self.story()}") from None
        return self.process.returncode

    def call(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Answer:
        """One plain HTTP request, as curl would send it."""
        payload = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, payload, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, answer.read(), dict(answer.headers))
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read(), dict(error.headers))

    def client(self) -> Client:
        return Client(self.url)


class Answer:
    """An HTTP answer: status, headers, and its JSON."""

    def __init__(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.status = status
        self.content = content
        self.headers = {name.lower(): value for name, value in headers.items()}

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    def problem(self) -> tuple[int, str]:
        """Status and code of an error, which must be a whole problem document."""
        assert self.headers["content-type"] == "application/problem+json", self.content
        assert self.json["status"] == self.status
        assert self.json["detail"]
        assert self.json["title"]
        return self.status, self.json["code"]


@contextmanager
def daemon(directory: Path, *options: str, **environment: str) -> Iterator[DaemonProcess]:
    """A ready daemon, ended at the close. Without options it simulates four GPUs."""
    process = DaemonProcess(directory / "d", *(options or ("--simulate", "4")), environment=environment)
    try:
        yield process.start()
    finally:
        process.stop()


def eventually(condition: Callable[[], bool], within_s: float, story: Callable[[], str] = lambda: "") -> None:
    """Wait until a condition is true; fail with the story when it does not become so in time."""
    until_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until_s:
            raise AssertionError(f"not within {within_s} s; {story()}")
        time.sleep(0.02)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def events(running: DaemonProcess) -> list[dict[str, Any]]:
    """The whole event log."""
    found: list[dict[str, Any]] = []
    while page := running.call("GET", f"/v1/events?limit=1000&after={found[-1]['seq'] if found else 0}").json["items"]:
        found += page
    return found
