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

from bench.daemon import installed
from bench.grants import Connection
from bench.table.rows import Row, Target

GPUS = 8
WAITING = 60
"""As many as there are rounds."""
RENEWAL, RELEASE, GRANT = "renewal", "release", "grant"


def handover(quick: bool) -> list[Row]:
    """The rows of the table."""
    with tempfile.TemporaryDirectory() as place, installed(Path(place), "--simulate", str(GPUS)) as running:
        found = measure(running.port, 10 if quick else WAITING)
    limit, figure = (statistics.median(found[what]) * 1e3 for what in (RENEWAL, GRANT))
    p90 = statistics.quantiles(found[GRANT], n=10)[-1] * 1e3
    answered = statistics.median(found[RELEASE]) * 1e3
    beside = f"90th percentile {p90:.1f} ms; a renewal {limit:.2f} ms; the release {answered:.1f} ms"
    what = "release, until a waiting client has its grant"
    return [
        Row(question=what, formerly="79 ms", target=Target(bound=10.0), figure=figure, unit="ms", beside=beside),
        Row(
            question=f"{what}: of one durable request",
            formerly="13.6 x",
            target=Target(bound=3.0),
            figure=figure / limit,
            beside=beside,
        ),
    ]


def measure(port: int, waiting: int) -> dict[str, list[float]]:
    """Seconds of renewals, of releases, and of handing a GPU over, one at a time."""
    one = Connection(port)
    held = [one.call("POST", "/v1/leases?wait_s=30", lease(600)) for _ in range(GPUS)]
    granted: Queue[tuple[float, dict[str, object]]] = Queue()
    for _ in range(waiting):
        threading.Thread(target=wait_for_grant, args=(port, granted), daemon=True).start()
    while len(queued(one)) != waiting:
        time.sleep(0.05)
    found: dict[str, list[float]] = {RENEWAL: [], RELEASE: [], GRANT: []}
    for _ in range(waiting):
        begun = time.perf_counter()
        one.call("POST", f"/v1/leases/{held[-1]['id']}/renew", {"token": held[-1]["token"]})
        found[RENEWAL].append(time.perf_counter() - begun)
        given = held.pop(0)
        begun = time.perf_counter()
        one.call("POST", f"/v1/leases/{given['id']}/release", {"token": given["token"]})
        found[RELEASE].append(time.perf_counter() - begun)
        at, following = granted.get(timeout=30)
        found[GRANT].append(at - begun)
        held.append(following)
    return found


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
