"""What other users feel of one user's load: how long each route takes for A while E does each thing that was reported.

The daemon is a real one, as root, and E and A are real users to it. E's program is as nice as can be, so that not the
kernel but the daemon decides who waits. A asks one request after another, each route in turn, as people and scripts do
who do not attack. Asserted is of each route, under each load: the median is under twice the idle one, or not over it by
more than `SLACK_S`; and nine of ten answers come within `TAIL_S` more. No one feels what is under `SLACK_S`, and a
machine with two processors, on which the daemon, its worker, the test and the load all run, cannot tell it from noise.
A load under which each route stays within half of its bounds for a few rounds has had enough of them. A load that is
felt is put on again, beside a new idle measurement, and a route that is slow each time counts: other programs take the
processor, too, and a daemon that does not share is slow each time.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, daemon, eventually
from tests.http_as_user import Connection, call
from tests.system.hostile_load import EVE, LOADS

pytestmark = [pytest.mark.slow, pytest.mark.alone]

ADA = 54322
KEPT = "kept"
ROUNDS, FEW_ROUNDS, ATTEMPTS = 7, 3, 8
PAUSE_S = 0.015
"""Between two requests of A. With less, A would ask for more than `fair_share.SHARE` of the daemon's time, and wait."""
SLACK_S, TAIL_S = 0.008, 0.150
EVENTS = 3000
"""In the history, before anything is measured."""
Samples = dict[str, list[float]]


class Ada:
    """Sends each request that a user can send, and notes how long each takes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.connection.connect()
        self.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.took_s: Samples = defaultdict(list)
        self.held = self.ask("POST /v1/leases", {"count": 7, "ttl_s": 3600})
        done = self.ask("POST /v1/jobs", {"command": ["echo", "done"], "launcher": "plain"})
        self.job = self.ask(f"GET /v1/jobs/{done['id']}?wait_s=60&wait_while=queued")["id"]
        while (state := self.ask(f"GET /v1/jobs/{self.job}"))["ended_at"] is None:
            self.ask(f"GET /v1/jobs/{self.job}?wait_s=60&wait_while={state['state']}")
        self.took_s.clear()

    def ask(self, request: str, body: Any = None, route: str = "", **fields: str) -> Any:
        """One request, timed under the name of its route; its JSON."""
        begun_s = time.perf_counter()
        method, path = request.split()
        payload = None if body is None else json.dumps(body)
        self.connection.request(method, path, payload, fields)
        answer = self.connection.getresponse()
        content = answer.read()
        self.took_s[route or request].append(time.perf_counter() - begun_s)
        assert answer.status < 300, (request, answer.status, content[:500])
        return json.loads(content) if content[:1] == b"{" else None

    def round(self) -> None:
        """Each route once. While the lists are made, a job waits: when it is expected to start takes time to work out,
        and E's requests that wait must not be the first that do."""
        held, gpu = f"/v1/leases/{self.held['id']}", self.held["gpus"][0]
        lease = self.pause().ask("POST /v1/leases", {"count": 1})
        self.pause().ask(
            f"POST /v1/leases/{lease['id']}/release", {"token": lease["token"]}, route="POST /v1/leases/{id}/release"
        )
        job = self.pause().ask("POST /v1/jobs", {"command": ["true"], "launcher": "plain", "gpus": 8})
        for path in ("/v1/gpus", "/v1/nodes", "/v1/leases", "/v1/jobs", "/v1/events", "/metrics", "/", "/docs"):
            self.pause().ask(f"GET {path}")
        self.pause().ask("GET /openapi.json", **{"Accept-Encoding": "gzip"})
        for path in ("/healthz", "/readyz"):
            self.pause().ask(f"GET {path}")
        self.pause().ask(f"GET /v1/gpus/{gpu['uuid']}", route="GET /v1/gpus/{uuid}")
        self.pause().ask(f"GET /v1/nodes/{gpu['node']}", route="GET /v1/nodes/{name}")
        self.pause().ask(f"GET {held}", route="GET /v1/leases/{id}")
        self.pause().ask(f"GET {held}/explain", route="GET /v1/leases/{id}/explain")
        self.pause().ask(f"POST {held}/renew", {"token": self.held["token"]}, route="POST /v1/leases/{id}/renew")
        for end in ("", "/logs", "/metrics"):
            self.pause().ask(f"GET /v1/jobs/{self.job}{end}", route=f"GET /v1/jobs/{{id}}{end}")
        self.pause().ask(f"POST /v1/jobs/{job['id']}/cancel", {"grace_s": 0}, route="POST /v1/jobs/{id}/cancel")

    def pause(self) -> Ada:
        """What a user does between two requests."""
        time.sleep(PAUSE_S)
        return self

    def measured(self, beside: Samples | None = None) -> Samples:
        """How long each route takes now; of fewer rounds if they are far from what would be felt beside these."""
        self.round()
        self.took_s.clear()
        for number in range(1, ROUNDS + 1):
            self.round()
            if beside and number >= FEW_ROUNDS and all(good for *_, good in felt(beside, self.took_s, 0.5)):
                break
        taken, self.took_s = self.took_s, defaultdict(list)
        return taken


@contextmanager
def hostile(kind: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """E's load meanwhile."""
    with subprocess.Popen([sys.executable, "-m", "tests.system.hostile_load", kind, str(port)]) as load:
        try:
            yield load
        finally:
            load.kill()


def felt(idle: Samples, loaded: Samples, of_bounds: float = 1.0) -> Iterator[tuple[str, str, bool]]:
    """Each route with a line about it, and whether it is within this part of the bounds."""
    for route, before in idle.items():
        usual_s, now_s = statistics.median(before), statistics.median(loaded[route])
        tail_s, tail_now_s = (statistics.quantiles(taken, n=10)[-1] for taken in (before, loaded[route]))
        good = now_s - usual_s <= of_bounds * max(usual_s, SLACK_S)
        good &= tail_now_s - tail_s <= of_bounds * (tail_s + TAIL_S)
        line = " ".join(f"{1000 * taken_s:7.1f}" for taken_s in (usual_s, now_s, tail_s, tail_now_s))
        yield route, f"{line} ms  {'' if good else 'SLOW '}{route}", good


def answered(running: DaemonProcess) -> float:
    """How many requests the daemon has answered."""
    lines = running.get("/metrics").content.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("gpulease_http_requests_total{"))


def tidy(running: DaemonProcess) -> None:
    """Give back what E's program had when it was ended."""
    mine = [lease for state in ("queued", "active") for lease in running.leases(state) if is_left(lease)]
    for lease in mine:
        if lease["job_id"] is None:
            running.release(lease)
        else:
            running.call("POST", f"/v1/jobs/{lease['job_id']}/cancel", {"grace_s": 0})
    eventually(lambda: running.gpu_states().count("free") >= 16, 60, running.story)


def is_left(lease: dict[str, Any]) -> bool:
    """True for what a load left behind, and not the test."""
    return lease["holder"]["user"] == str(EVE) and lease["holder"]["label"] != KEPT


def measure(running: DaemonProcess, ada: Ada, kind: str, idle: Samples) -> dict[str, str]:
    """What A feels of one kind of load: a line for each route that is slow."""
    before = answered(running)
    with hostile(kind, running.port) as load:
        loops, _, (silent, _) = LOADS[kind]
        eventually(lambda: sockets_of(load.pid) >= loops + silent, 60, running.story)
        loaded = ada.measured(idle)
        assert load.poll() is None, kind
    lines = list(felt(idle, loaded))
    rounds = len(loaded["GET /v1/gpus"])
    print(f"\n{kind}: {answered(running) - before:.0f} requests, {rounds} rounds")
    print("median: idle, now; nine of ten: idle, now")
    print(*(line for _, line, _ in lines), sep="\n")
    return {route: f"{kind}: {line}" for route, line, good in lines if not good}


def make_history(running: DaemonProcess) -> None:
    """Leave events and leases behind. One stream shows how many: who asks again and again uses the daemon, too, so that
    E would get only a share of its time."""
    with closing(http.client.HTTPConnection("127.0.0.1", running.port, timeout=120)) as stream:
        stream.request("GET", "/v1/events?after=0", headers={"Accept": "text/event-stream"})
        answer = stream.getresponse()
        with hostile("leases", running.port):
            for line in answer:
                if line.startswith(b"id:") and int(line[3:]) > EVENTS:
                    return
    raise AssertionError(f"the stream has ended; {running.story()}")


def sockets_of(pid: int) -> int:
    """How many connections E's program has."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it is closed meanwhile
            count += os.readlink(descriptor).startswith("socket:")
    return count


@pytest.mark.budget(150)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can send requests as another user")
def test_no_load_of_one_user_is_felt_by_another(tmp_path: Path) -> None:
    slow = []
    with (
        daemon(tmp_path, "--simulate", "24", "--node", "n1", "--max-gpus-per-user", "8") as running,
        closing(Connection(running.port, ADA)) as connection,
    ):
        running.wait_free()
        ada, port = Ada(connection), running.port
        waiting = {"command": ["true"], "launcher": "plain", "gpus": 8, "array": {"indices": "0-99"}, "name": KEPT}
        assert call(port, "POST", "/v1/leases", {"count": 1, "ttl_s": 3600, "label": KEPT}, uid=EVE).status == 201
        assert call(port, "POST", "/v1/jobs", waiting, uid=EVE).status == 201
        make_history(running)
        tidy(running)
        idle = ada.measured()
        for kind in LOADS:
            felt_each_time = measure(running, ada, kind, idle)
            tidy(running)
            for _ in range(ATTEMPTS - 1):
                if felt_each_time:  # or another program has taken the processor meanwhile
                    idle = ada.measured()
                    again = measure(running, ada, kind, idle)
                    felt_each_time = {route: line for route, line in again.items() if route in felt_each_time}
                    tidy(running)
            slow += felt_each_time.values()
    assert not slow, "\n".join(slow)
