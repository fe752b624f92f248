"""How long does a lease take, and how many are there in a second?

Beside it, in the same run: the least that a request to this daemon can take (`GET /healthz`), and the most that the
disk allows (single durable commits of SQLite, one row each). A lease is two requests and two commits, and its GPU is
looked at by the (simulated) hardware before and after.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sqlite3
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gpulease_protocol.host.process_id import ProcessId
from tests.daemon import DaemonProcess

ROUNDS = 300
CLIENTS = 16


class Connection:
    """One keep-alive connection, as bare as the standard library has it."""

    def __init__(self, port: int) -> None:
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def call(self, method: str, path: str, body: object = None) -> dict[str, object]:
        self.http.request(method, path, None if body is None else json.dumps(body))
        answer: dict[str, object] = json.loads(self.http.getresponse().read())
        return answer

    def lease(self, owner: dict[str, object] | None = None) -> float:
        """Ask, get, release; the seconds from asking to having. `owner` names the process that owns the lease."""
        begun = time.perf_counter()
        lease = self.call("POST", "/v1/leases?wait_s=30", {"count": 1} | (owner or {}))
        took_s = time.perf_counter() - begun
        assert lease["state"] == "active", lease
        assert lease["liveness"] == ("process" if owner else "heartbeat"), lease
        self.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
        return took_s


def timed(action: Callable[[], object], rounds: int) -> list[float]:
    """Seconds that each call took."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        action()
        found.append(time.perf_counter() - begun)
    return found


def commits(directory: Path) -> list[float]:
    """Seconds of single durable commits."""
    connection = sqlite3.connect(directory / "limit.db", isolation_level=None)
    connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE t (n INTEGER)")
    found = timed(lambda: connection.execute("INSERT INTO t VALUES (1)"), ROUNDS)
    connection.close()
    return found


def row(name: str, seconds: list[float]) -> str:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return f"{name:<46}{statistics.median(ordered) * 1e3:>9.2f}{ordered[int(len(ordered) * 0.99)] * 1e3:>9.2f}"


def main() -> None:
    """Print the table of bench/README.md."""
    with tempfile.TemporaryDirectory() as place:
        running = DaemonProcess(Path(place) / "d", "--simulate", "64").start()
        try:
            one = Connection(running.port)
            timed(one.lease, 20)
            print(f"{'':<46}{'median ms':>9}{'p99 ms':>9}")
            print(row("durable SQLite commit", commits(Path(place))))
            print(row("GET /healthz", timed(lambda: one.call("GET", "/healthz"), ROUNDS)))
            print(row("from request to grant, 1 client", [one.lease() for _ in range(ROUNDS)]))
            rates = {watched: storm(running.port, watched) for watched in (False, True)}
            print(f"\n{CLIENTS} clients: {rates[False]:.0f} leases granted and released in a second")
            print(f"each owned by a process of its own that is watched: {rates[True] / rates[False]:.2f} of that")
        finally:
            running.stop()


def storm(port: int, watched: bool) -> float:
    """Leases in a second of clients at once, with a row of how long each took; with or without owners to watch."""
    each: list[list[float]] = [[] for _ in range(CLIENTS)]
    with contextlib.ExitStack() as stack:
        owners: list[dict[str, object] | None] = [None] * CLIENTS
        if watched:
            processes = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(CLIENTS)]
            for process in processes:
                stack.callback(process.kill)
            owners = [
                identity.owner_fields(local=True)
                for process in processes
                if (identity := ProcessId.of(process.pid)) is not None
            ]
        threads = [threading.Thread(target=many, args=(port, *one)) for one in zip(each, owners, strict=True)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.perf_counter() - begun
    name = f"from request to grant, {CLIENTS} clients{', owners watched' if watched else ''}"
    print(row(name, [second for found in each for second in found]))
    return CLIENTS * ROUNDS / 4 / took_s


def many(port: int, found: list[float], owner: dict[str, object] | None) -> None:
    """One of the clients."""
    connection = Connection(port)
    found += [connection.lease(owner) for _ in range(ROUNDS // 4)]


if __name__ == "__main__":
    main()
