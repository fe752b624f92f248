"""A fake daemon that fails on demand: breaks off, hangs, refuses, ends a lease, restarts."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gpulease_protocol.codec import to_json
from gpulease_protocol.errors import GpuleaseError, LeaseLost, NotFound, NotNow, StaleToken
from gpulease_protocol.explanation import Explanation, Obstacle
from gpulease_protocol.log_frames import LogFrame
from gpulease_protocol.model import Demand, Device, Gpu, Holder, Job, Lease, LeaseState, Liveness, Node, Page

BUSY = Explanation(
    verdict="not_now",
    sentence="No GPU is free.",
    obstacles=(
        Obstacle(
            uuid="GPU-0", node="a", index=0, code="leased", sentence="GPU 0 is leased to ada until 14:00 (lease L-9)."
        ),
    ),
)


class FakeDaemon:
    """Grants leases while `free` is true. `fault` maps a request line to a fault, or to None.

    Faults: `503`, `unknown` (a 503 with an unknown outcome), `break`, `hang`, `html`, `cut` (of a stream).
    """

    def __init__(self) -> None:
        self.free = True
        self.liveness = Liveness.HEARTBEAT
        self.lease_requests: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        """What was sent, byte by byte."""
        self.explanation = BUSY
        self.leases: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.request_lines: list[str] = []
        self.request_times_s: list[float] = []
        self.hang_s = 2.0
        """How long a fault `hang` lasts, after which the connection breaks."""
        self.retry_after: str | None = None
        """Sent with each 503."""
        self.more_env: dict[str, str] = {}
        """Added to `env` of the leases that it grants."""
        self.as_of: str | None = None
        """`Gpulease-As-Of` of a standby."""
        self.fault: Callable[[str], str | None] = lambda line: None
        self.changed = threading.Condition()
        self.gpus: list[Gpu] = []
        self.nodes: list[Node] = []
        self.jobs: dict[str, Job] = {}
        self.logs = [b"one\n", b"two\n"]
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        stand_in = self

        class Handler(_Handler):
            daemon = stand_in

        self._server = _Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            with self.changed:
                self.changed.notify_all()

    def grant(self, lease_id: str) -> None:
        with self.changed:
            self.leases[lease_id] |= {
                "state": "active",
                "token": 7,
                "env": {
                    "CUDA_VISIBLE_DEVICES": "GPU-0",
                    "GPULEASE_LEASE_ID": lease_id,
                    "GPULEASE_LEASE_TOKEN": "7",
                    **self.more_env,
                },
                "gpus": [to_json(Device(uuid="GPU-0", node="a", index=0))],
            }
            self.changed.notify_all()

    def end(self, lease_id: str, reason: str = "expired") -> None:
        with self.changed:
            self.leases[lease_id] |= {"state": "ended", "end_reason": reason}
            self.changed.notify_all()

    def count(self, text: str) -> int:
        return sum(text in line for line in self.request_lines)

    def only_lease(self) -> dict[str, Any]:
        (lease,) = self.leases.values()
        return lease

    def new_lease(self, body: dict[str, Any]) -> str:
        with self.changed:
            self.lease_requests.append(body)
            lease = Lease(
                id=f"L-{len(self.leases) + 1}",
                state=LeaseState.QUEUED,
                holder=Holder(),
                demand=Demand(),
                ttl_s=body.get("ttl_s", 300.0),
                liveness=self.liveness,
                created_at=datetime.now(UTC),
            )
            self.leases[lease.id] = to_json(lease)
            if self.free:
                self.grant(lease.id)
        return lease.id


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    daemon: FakeDaemon
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        line = f"{self.command} {self.path}"
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.daemon.bodies.append(content)
        body = json.loads(content or b"null")
        if self.server is not self.daemon._server:  # stopped: close connections that were kept alive
            self.close_connection = True
            return
        self.daemon.request_lines.append(line)
        self.daemon.request_times_s.append(time.monotonic())
        fault = self.daemon.fault(line)
        if fault == "hang":
            time.sleep(self.daemon.hang_s)
        if fault in ("503", "unknown"):
            outcome = {"outcome": "unknown"} if fault == "unknown" else {}
            self._answer(503, {"code": "unavailable", "detail": "not recorded", **outcome})
            return
        if fault in ("html", "404", "500"):  # of a proxy
            self._answer(200 if fault == "html" else int(fault), "<html>", "text/html")
            return
        try:
            status, answer = self._route(body)
        except GpuleaseError as error:
            status, answer = error.status, error.problem()
        if fault in ("break", "hang") or self.server is not self.daemon._server:  # done, but the response is lost
            self.close_connection = True
            return
        if isinstance(answer, list):
            self._stream(answer, cut=fault == "cut")
        else:
            self._answer(status, answer)

    def _route(self, body: Any) -> tuple[int, Any]:
        where = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(where.query).items()}
        match where.path.strip("/").split("/"):
            case ["healthz"]:
                return 200, {}
            case ["v1", "gpus"]:
                return 200, to_json(Page(items=tuple(self.daemon.gpus)))
            case ["v1", "nodes"]:
                return 200, to_json(Page(items=tuple(self.daemon.nodes)))
            case ["v1", "jobs", job_id]:
                return 200, to_json(self.daemon.jobs[job_id])
            case ["v1", "jobs", _, "logs"]:
                return 200, _in_frames(self.daemon.logs, int(query.get("offset", "0")))
            case ["v1", "leases"] if self.command == "POST":
                return self._request(body)
            case ["v1", "leases", lease_id, *action]:
                if lease_id not in self.daemon.leases:
                    raise NotFound("no such lease")
                if action == ["explain"]:
                    return 200, to_json(self.daemon.explanation)
                return self._one(self.daemon.leases[lease_id], action, query, body)
        raise NotFound(self.path)

    def _request(self, body: Any) -> tuple[int, Any]:
        key = self.headers["Idempotency-Key"]
        if not self.daemon.free and not body.get("queue", True):
            raise NotNow("No GPU is free.", extra={"explanation": to_json(self.daemon.explanation)})
        lease_id = self.daemon.keys.get(key) or self.daemon.new_lease(body)
        if key:
            self.daemon.keys[key] = lease_id
        lease = self.daemon.leases[lease_id]
        if lease["state"] == "ended":
            raise LeaseLost(f"lease {lease_id} has ended ({lease['end_reason']})", extra={"lease": lease})
        return 201 if lease["state"] == "active" else 202, lease

    def _one(self, lease: dict[str, Any], action: list[str], query: dict[str, str], body: Any) -> tuple[int, Any]:
        if not action:
            with self.daemon.changed:
                server = self.daemon._server
                self.daemon.changed.wait_for(
                    lambda: lease["state"] != query.get("wait_while") or self.daemon._server is not server,
                    float(query.get("wait_s", 0)),
                )
            return 200, lease
        if lease["state"] == "ended" and lease["end_reason"] != "released":
            raise LeaseLost(f"lease {lease['id']} is {lease['end_reason']}")
        if lease["token"] != body["token"]:
            raise StaleToken("not the token")
        if action == ["release"]:
            self.daemon.end(lease["id"], "released")
        return 200, lease

    def _stream(self, pieces: list[bytes], cut: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces[:1] if cut else [*pieces, b""]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.close_connection = True

    def _answer(self, status: int, answer: Any, kind: str = "application/json") -> None:
        text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        if status == 503 and self.daemon.retry_after is not None:
            self.send_header("Retry-After", self.daemon.retry_after)
        if self.daemon.as_of is not None:
            self.send_header("Gpulease-As-Of", self.daemon.as_of)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """The tests' output stays quiet."""


def _in_frames(pieces: list[bytes], offset: int) -> list[bytes]:
    """A log from `offset` on, in frames that each say where it goes on."""
    frames, at = [], 0
    for piece in pieces:
        at += len(piece)
        if at > offset:
            frames.append(LogFrame(str(at), piece[max(0, len(piece) - at + offset) :]).encoded())
    return [*frames, LogFrame(str(at), end=True).encoded()]
