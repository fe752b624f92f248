"""Clients that send the next request as soon as the last one is answered: the load of the table, on one event loop.

A process of its own, so that what it uses is not counted as the server's, and it says how much that was. Requests are
bytes, and answers are cut at their length and not parsed where a client does not need them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

Step = Generator[tuple[str, bytes], bytes, None]
"""Yields the name of a request and its bytes, and is sent the body of the answer. A request without a name is not
counted."""
Ending = Callable[[], bool]
WARM_UP_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the clients do."""

    pattern: str
    """A name of `PATTERNS`."""
    port: int
    """Of the server on loopback."""
    clients: int
    """How many there are at once."""
    seconds: float
    """How long they are measured, after a moment in which they warm up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What came of it."""

    rate: float
    """Requests per second, in the measured time."""
    requests: int
    """All that were answered, those before and after it included."""
    p50_s: dict[str, float]
    """Median seconds by the name of the request."""
    p99_s: dict[str, float]
    """99th percentile."""
    cores: float
    """What the clients used themselves."""


def measured(load: Load) -> Figures:
    """Run the clients in a process of their own."""
    ran = subprocess.run(
        [sys.executable, "-m", "bench.clients"],
        input=json.dumps(asdict(load)), capture_output=True, text=True, timeout=load.seconds + 60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return Figures(**json.loads(ran.stdout))


def post(path: str, body: object = None) -> bytes:
    """A request as bytes."""
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return f"{head}\r\n\r\n".encode() + content


ACQUIRE = post("/v1/leases?wait_s=30", {"count": 1})


def renewals(_: int, ended: Ending) -> Step:
    """Renew one lease again and again."""
    lease = json.loads((yield "", ACQUIRE))
    token = {"token": lease["token"]}
    request = post(f"/v1/leases/{lease['id']}/renew", token)
    while not ended():
        yield "renew", request
    yield "", post(f"/v1/leases/{lease['id']}/release", token)


def leases(_: int, ended: Ending) -> Step:
    """Acquire a GPU and release it."""
    while not ended():
        lease = json.loads((yield "acquire", ACQUIRE))
        assert lease["state"] == "active", lease
        yield "release", post(f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})


def etcd_locks(number: int, ended: Ending) -> Step:
    """Lock and unlock one name under an etcd lease, over etcd's HTTP gateway."""
    lease = json.loads((yield "", post("/v3/lease/grant", {"TTL": "300"})))["ID"]
    lock = post("/v3/lock/lock", {"name": base64.b64encode(b"gpu-%d" % number).decode(), "lease": lease})
    while not ended():
        key = json.loads((yield "acquire", lock))["key"]
        yield "release", post("/v3/lock/unlock", {"key": key})
    yield "", post("/v3/lease/revoke", {"ID": lease})


def redis_keys(number: int, ended: Ending) -> Step:
    """SET NX EX and DEL of one key."""
    lock, unlock = resp("SET", f"gpu-{number}", "holder", "NX", "EX", "300"), resp("DEL", f"gpu-{number}")
    while not ended():
        yield "acquire", lock
        yield "release", unlock


def resp(*words: str) -> bytes:
    """A command in Redis' protocol."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)


def http_answer(received: bytes) -> bytes | None:
    """The body of an answer; None if it is not whole yet."""
    head = received.find(b"\r\n\r\n")
    if head < 0:
        return None
    fields = received[:head].lower()
    assert fields[9:11] == b"20", received
    at = fields.index(b"content-length:") + 15
    stop = fields.find(b"\r", at)
    length = int(fields[at : stop if stop >= 0 else head])
    return received[head + 4 :] if len(received) >= head + 4 + length else None


def redis_answer(received: bytes) -> bytes | None:
    """A short answer in Redis' protocol; None if it is not whole yet."""
    assert received[:1] in (b"+", b":"), received
    return received if received.endswith(b"\r\n") else None


PATTERNS: dict[str, tuple[Callable[[int, Ending], Step], Callable[[bytes], bytes | None]]] = {
    "renewals": (renewals, http_answer),
    "leases": (leases, http_answer),
    "etcd locks": (etcd_locks, http_answer),
    "redis keys": (redis_keys, redis_answer),
}


@dataclass(slots=True)
class Record:
    """Latencies in seconds of what was answered within the measured time."""

    from_s: float
    until_s: float
    requests: int = 0
    found: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Client(asyncio.Protocol):
    """One connection, and the steps on it."""

    def __init__(self, steps: Step, answer: Callable[[bytes], bytes | None], record: Record) -> None:
        self.steps, self.answer, self.record = steps, answer, record
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received = b""
        self.name, self.begun_s = "", 0.0
        self.transport: asyncio.WriteTransport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send(next(self.steps))

    def send(self, request: tuple[str, bytes]) -> None:
        self.name = request[0]
        self.begun_s = time.perf_counter()
        self.transport.write(request[1])

    def data_received(self, data: bytes) -> None:
        self.received += data
        try:
            body = self.answer(self.received)
            if body is None:
                return
            self.received = b""
            now_s = time.perf_counter()
            self.record.requests += 1
            if self.name and self.record.from_s <= now_s < self.record.until_s:
                self.record.found[self.name].append(now_s - self.begun_s)
            self.send(self.steps.send(body))
        except StopIteration:
            self.ended.set_result(None)
            self.transport.close()
        except Exception as error:
            self.ended.set_exception(error)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionResetError("the server closed the connection"))


async def run(load: Load) -> Figures:
    """All clients, until the time has passed."""
    steps, answer = PATTERNS[load.pattern]
    begun_s = time.perf_counter() + WARM_UP_S
    record = Record(begun_s, begun_s + load.seconds)

    def ended() -> bool:
        return time.perf_counter() >= record.until_s

    loop = asyncio.get_running_loop()
    clients = [Client(steps(number, ended), answer, record) for number in range(load.clients)]
    for client in clients:
        await loop.create_connection(lambda one=client: one, "127.0.0.1", load.port)  # type: ignore[misc]
    used_s, used_from_s = time.process_time(), time.perf_counter()
    await asyncio.gather(*(client.ended for client in clients))
    cores = (time.process_time() - used_s) / (time.perf_counter() - used_from_s)
    return Figures(
        rate=sum(map(len, record.found.values())) / load.seconds,
        requests=record.requests,
        p50_s={name: statistics.median(found) for name, found in record.found.items()},
        p99_s={name: sorted(found)[int(len(found) * 0.99)] for name, found in record.found.items()},
        cores=cores,
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(uvloop.run(run(Load(**json.load(sys.stdin)))))))
