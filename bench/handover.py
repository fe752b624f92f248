"""How soon does the next in the queue have a GPU that was released?

All 8 GPUs are held, and clients wait for one each. A release needs a reading of the GPU that begins after it and shows
it clean, so the daemon, the worker and the probe all take part. Beside it, in the same run and on the same daemon: one
durable request (a renewal).
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue

from bench.grants import Connection
from tests.daemon import DaemonProcess

GPUS = 8
WAITING = 60
"""As many as there are rounds."""


def main() -> None:
    """Print the table of bench/README.md."""
    with tempfile.TemporaryDirectory() as place:
        running = DaemonProcess(Path(place) / "d", "--simulate", str(GPUS)).start()
        try:
            measure(running.port)
        finally:
            running.stop()


def measure(port: int) -> None:
    """Release GPUs one at a time, and print how long it took until the next one had it."""
    one = Connection(port)
    held = [one.call("POST", "/v1/leases?wait_s=30", lease(600)) for _ in range(GPUS)]
    granted: Queue[tuple[float, dict[str, object]]] = Queue()
    for _ in range(WAITING):
        threading.Thread(target=wait_for_grant, args=(port, granted), daemon=True).start()
    while len(queued(one)) != WAITING:
        time.sleep(0.05)
    answered, handed_over, renewals = [], [], []
    for _ in range(WAITING):
        begun = time.perf_counter()
        one.call("POST", f"/v1/leases/{held[-1]['id']}/renew", {"token": held[-1]["token"]})
        renewals.append(time.perf_counter() - begun)
        given = held.pop(0)
        begun = time.perf_counter()
        one.call("POST", f"/v1/leases/{given['id']}/release", {"token": given["token"]})
        answered.append(time.perf_counter() - begun)
        at, following = granted.get(timeout=30)
        handed_over.append(at - begun)
        held.append(following)
    limit = statistics.median(renewals)
    print(f"\n| {GPUS} GPUs, {WAITING} clients waiting | median ms | p90 ms | of a renewal |\n|---|---|---|---|")
    for what, seconds in (
        ("renewal, one durable request (limit)", renewals),
        ("release, answered", answered),
        ("release, until the next client has its grant", handed_over),
    ):
        median, p90 = statistics.median(seconds), statistics.quantiles(seconds, n=10)[-1]
        print(f"| {what} | {median * 1e3:.1f} | {p90 * 1e3:.1f} | {median / limit:.1f} x |")


def queued(connection: Connection) -> list[object]:
    found = connection.call("GET", "/v1/leases?state=queued&limit=1000")["items"]
    assert isinstance(found, list)
    return found


def lease(ttl_s: float) -> dict[str, object]:
    return {"count": 1, "ttl_s": ttl_s, "queue": True}


def wait_for_grant(port: int, granted: Queue[tuple[float, dict[str, object]]]) -> None:
    """One of the clients: asks for a GPU, waits, and says when it had one."""
    connection = Connection(port)
    found = connection.call("POST", "/v1/leases?wait_s=60", lease(600))
    while found["state"] == "queued":
        found = connection.call("GET", f"/v1/leases/{found['id']}?wait_s=60&wait_while=queued")
    granted.put((time.perf_counter(), found))


if __name__ == "__main__":
    main()
