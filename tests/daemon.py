"""A real `gpulease serve` in a process of its own, and the words in which tests talk to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from gpulease import Client
from tests.imported_program import ForkedProgram, completed
from tests.ports import free_port

START_S = 120.0
READ_AT_START = ("LD_PRELOAD", "PYTHON", "TMPDIR", "TZ")
"""Variables that matter when a program begins: with others of these a daemon is executed, and not forked."""

PATIENT = {"GPULEASE_PROBE_DEADLINE_S": "15"}
"""For a daemon whose driver never hangs: what a busy machine delays makes no GPU unknown, and puts no grant off."""
USUAL = {"GPULEASE_PROBE_DEADLINE_S": "2"}
"""For a driver that hangs, and a worker that is silent."""

FINAL = ("succeeded", "failed", "cancelled", "timed_out", "lost")
"""The states in which a job has ended."""


def is_read_at_start(environment: Mapping[str, str]) -> bool:
    """True if a program that is forked would not take in these variables as one that is executed does."""
    changed = (name for name, value in environment.items() if os.environ.get(name) != value)
    return any(name.startswith(READ_AT_START) for name in changed)


class DaemonProcess:
    """`gpulease serve` on a directory. Can be killed and started again on the same port."""

    forked: Callable[..., None] | None = None
    """What a process does that is forked, where that is not `tests.imported_program.run`."""

    def __init__(self, data_dir: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self.environment = environment or {}
        self.options = options
        self.port = free_port()
        self.process: ForkedProgram | subprocess.Popen[bytes] | None = None
        self.more_fields: dict[str, str] = {}
        """Of the head of every request."""
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
            "gpulease_cli",
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
        program = [sys.executable, "-m", "gpulease_cli"]
        if self.command[:3] == program and not is_read_at_start(self.environment):
            self.process = ForkedProgram(self.command[3:], environment, self.output, target=self.forked)
        else:
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

    def is_running(self) -> bool:
        """True until it has ended."""
        return self.process is not None and self.process.poll() is None

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
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the daemon did not end on SIGTERM; {self.story()}") from None
        return self.process.returncode

    def call(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Answer:
        """One plain HTTP request, as curl would send it. Raises OSError where the daemon is killed before its answer
        has ended."""
        payload = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, payload, self.more_fields | headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return Answer(answer.status, answer.read(), dict(answer.headers))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read(), dict(error.headers))
        except http.client.IncompleteRead as error:
            raise ConnectionResetError("the answer breaks off") from error

    def client(self) -> Client:
        """A client of this daemon."""
        return Client(self.url)

    def gpulease(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the program against this daemon; what it printed."""
        environment = {"GPULEASE_URL": self.url} | environment
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
        if not is_read_at_start(environment):
            return completed(words, kept | environment, 240)
        command = [sys.executable, "-m", "gpulease_cli", *words]
        return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=240, check=False)

    def gpus(self) -> list[dict[str, Any]]:
        """All GPUs, in the daemon's order."""
        shown: list[dict[str, Any]] = self.get("/v1/gpus").json["items"]
        return shown

    def gpu_states(self) -> list[str]:
        """The state of each GPU."""
        return [gpu["state"] for gpu in self.gpus()]

    def wait_free(self, within_s: float = 60) -> None:
        """Wait until every GPU is free."""
        eventually(lambda: set(self.gpu_states()) == {"free"}, within_s, lambda: f"{self.gpus()}\n{self.story()}")

    def request_lease(self, count: int = 1, *, wait_s: float = 0, **fields: Any) -> dict[str, Any]:
        """Ask for GPUs; the lease, active or queued."""
        answer = self.call("POST", f"/v1/leases?wait_s={wait_s}", {"count": count, **fields})
        assert answer.status in (201, 202), answer.content
        return dict(answer.json)

    def lease(self, lease_id: str) -> dict[str, Any]:
        """A lease as it is now."""
        return dict(self.get(f"/v1/leases/{lease_id}").json)

    def leases(self, state: str) -> list[dict[str, Any]]:
        """The leases in a state."""
        return list(self.get(f"/v1/leases?limit=1000&state={state}").json["items"])

    def wait_active(self, lease_id: str, within_s: float = 60) -> dict[str, Any]:
        """Wait until a queued lease is granted; the lease."""
        eventually(lambda: self.lease(lease_id)["state"] == "active", within_s, self.story)
        return self.lease(lease_id)

    def release(self, lease: Mapping[str, Any]) -> None:
        """Give a lease back, or take a queued request back."""
        answer = self.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
        assert answer.status == 200, answer.content

    def submit(self, *command: str, **fields: Any) -> str:
        """Submit a job, with launcher plain unless another is named; its id."""
        answer = self.call("POST", "/v1/jobs", {"command": list(command), "launcher": "plain", **fields})
        assert answer.status == 201, answer.content
        return str(answer.json["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as it is now."""
        return dict(self.get(f"/v1/jobs/{job_id}").json)

    def job_log(self, job_id: str, query: str = "") -> str:
        """What a job has printed."""
        return self.get(f"/v1/jobs/{job_id}/logs{query}").content.decode(errors="replace")

    def wait_job(self, job_id: str, *states: str, within_s: float = 60) -> dict[str, Any]:
        """Wait until a job has ended, or is in one of these states; the job."""
        eventually(lambda: self.job(job_id)["state"] in (states or FINAL), within_s, self.story)
        return self.job(job_id)

    def give_everything_back(self) -> None:
        """Cancel all jobs and release all leases, and wait until every GPU is free."""
        self.end_everything()
        self.wait_free()

    def end_everything(self) -> None:
        """Cancel all jobs and release all leases, and wait until they have ended."""
        eventually(self._asked_for_everything, 60, self.story)
        eventually(lambda: not (self.leases("queued") or self.leases("active")), 60, self.story)

    def _asked_for_everything(self) -> bool:
        """Ask for it once. False if a request was granted meanwhile: its lease has a token now."""
        answers = []
        for lease in [*self.leases("queued"), *self.leases("active")]:
            if lease["job_id"] is None:
                answers.append(self.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]}))
            else:
                self.call("POST", f"/v1/jobs/{lease['job_id']}/cancel", {"grace_s": 0})
        return all(answer.json.get("code") != "stale_token" for answer in answers)


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
    """A ready daemon, ended at the close. Without options it simulates four GPUs. It is patient with its driver, unless
    a variable says otherwise."""
    options = options or ("--simulate", "4")
    process = DaemonProcess(directory / "d", *options, environment=PATIENT | environment)
    try:
        yield process.start()
    finally:
        process.stop()


def eventually(condition: Callable[[], bool], within_s: float, story: Callable[[], str] = lambda: "") -> None:
    """Wait until a condition is true; fail with the story when it does not become so in time.

    It is looked at less often the longer it takes: most conditions ask a daemon, and other tests need the processor.
    """
    until_s, pause_s = time.monotonic() + within_s, 0.01
    while not condition():
        if time.monotonic() > until_s:
            raise AssertionError(f"not within {within_s} s; {story()}")
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, 0.1)


def workers_of(pid: int) -> list[psutil.Process]:
    """The workers that a daemon has started, and that have not ended."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it ends at this moment
            found += [child] if "worker" in child.cmdline() else []
    return found


def events(running: DaemonProcess, *, after: int = 0) -> list[dict[str, Any]]:
    """The event log after a sequence number."""
    found: list[dict[str, Any]] = []
    while page := running.get(f"/v1/events?limit=1000&after={found[-1]['seq'] if found else after}").json["items"]:
        found += page
    return found
