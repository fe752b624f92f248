"""Load that one user puts on a daemon: `python -m tests.system.hostile_load KIND PORT`, as root, until it is ended.

It becomes the user E and the nicest process there is: what E's own processes take from the others is the kernel's to
share, and what is looked at is the daemon. Each kind of load is a loop over prepared requests, as many at once as the
attack that was reported had.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

EVE = 54321
SILENT_STREAMS, HALF_OPEN = 100, 2000
"""Below what one user may have of each."""

Loop = Callable[["Connection"], Awaitable[None]]


class Connection:
    """One connection, kept open; as little work for the client as possible."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, request: bytes) -> Any:
        """The JSON that a request is answered; None for anything else."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        reader, writer = self.streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b"0")
        body = await reader.readexactly(int(length))
        return json.loads(body) if body[:1] == b"{" else None


def get(path: str, *fields: str) -> bytes:
    """A request without a body."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *fields, "", ""]).encode()


def post(path: str, body: Any = None) -> bytes:
    """A request with a body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def asking(request: bytes) -> Loop:
    """The same request again and again."""

    async def ask(connection: Connection) -> None:
        await connection.call(request)

    return ask


async def lease_and_release(connection: Connection) -> None:
    """A lease of a moment."""
    lease = await connection.call(post("/v1/leases", {"count": 1}))
    if "id" in lease:
        await connection.call(post(f"/v1/leases/{lease['id']}/release", {"token": lease["token"]}))


def submitting(body: dict[str, Any]) -> Loop:
    """A job that waits, and is cancelled at once."""
    request = post("/v1/jobs", {"command": ["true"], "launcher": "plain", "gpus": 8} | body)

    async def submit_and_cancel(connection: Connection) -> None:
        job = await connection.call(request)
        if "id" in job:
            await connection.call(post(f"/v1/jobs/{job['id']}/cancel", {"grace_s": 0}))

    return submit_and_cancel


async def hold_open(port: int, request: bytes) -> None:
    """Connections that send this and read nothing, again when they are closed."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(request)
            while await reader.read(1) and b"event-stream" not in request:
                pass
            await asyncio.sleep(3600 if b"event-stream" in request else 1)
        except OSError:
            await asyncio.sleep(1)


FEW = {f"V{number}": "x" * 110_000 for number in range(9)}
MANY = {f"V{number}": "x" * 9 for number in range(4096)}
AMONG = [f"GPU-{number:092d}" for number in range(4096)]
UNKNOWN = b"{%s}" % b",".join(b'"V%d":1' % number for number in range(16_000))
STREAM = get("/v1/events?after=0", "Accept: text/event-stream")

LOADS: dict[str, tuple[int, Callable[[], Loop], tuple[int, bytes]]] = {
    "leases": (8, lambda: lease_and_release, (0, b"")),
    "events": (8, lambda: asking(get("/v1/events?limit=1000")), (0, b"")),
    "wrong tokens": (8, lambda: asking(get("/v1/gpus", "Authorization: Bearer token-0123456789abcdef.0")), (0, b"")),
    "long lists of GPUs": (
        4,
        lambda: asking(post("/v1/leases", {"count": 1, "queue": False, "among": AMONG})),
        (0, b""),
    ),
    "large jobs": (2, lambda: submitting({"environment": FEW}), (0, b"")),
    "jobs of many variables": (2, lambda: submitting({"environment": MANY}), (0, b"")),
    "large commands": (2, lambda: submitting({"command": ["true", *["x" * 100] * 5000]}), (0, b"")),
    "large nonsense": (2, lambda: asking(post("/v1/jobs", UNKNOWN)), (0, b"")),
    "lists of jobs": (8, lambda: asking(get("/v1/jobs?limit=1000")), (0, b"")),
    "lists of leases": (8, lambda: asking(get("/v1/leases?limit=1000")), (0, b"")),
    "metrics": (8, lambda: asking(get("/metrics")), (0, b"")),
    "openapi": (8, lambda: asking(get("/openapi.json", "Accept-Encoding: gzip")), (0, b"")),
    "streams that are not read": (8, lambda: lease_and_release, (SILENT_STREAMS, STREAM)),
    "half-open connections": (0, lambda: lease_and_release, (HALF_OPEN, b"GET /v1/gpus HTTP/1.1\r\n")),
}
"""How many loops, what each does, and how many connections that only send this."""


async def load(kind: str, port: int) -> None:
    """Put this load on the daemon until cancelled."""
    loops, make, (silent, request) = LOADS[kind]
    once = make()

    async def again_and_again() -> None:
        while True:
            connection = Connection(port)
            try:
                while True:
                    await once(connection)
            except (OSError, EOFError):  # refused or closed, as for one connection too many
                await asyncio.sleep(0.1)

    held = [hold_open(port, request) for _ in range(silent)]
    await asyncio.gather(*held, *(again_and_again() for _ in range(loops)))


def main() -> None:
    """Become E, and begin."""
    kind, port = sys.argv[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, HALF_OPEN + 500), hard))
    os.nice(19)
    os.setgroups([])
    os.setgid(EVE)
    os.setuid(EVE)
    uvloop.run(load(kind, int(port)))


if __name__ == "__main__":
    main()
