"""What does a client cost that waits in the queue: memory of the daemon, and CPU time while nothing happens?

All GPUs are held. The clients queue a request each, and then wait for its grant with a long poll each.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.clients import http_answer, post
from bench.daemon import InstalledDaemon, installed
from bench.table.rows import Row, Target

CLIENTS, QUICK_CLIENTS = 2_000, 200
MEASURED_S, QUICK_S = 30.0, 10.0
SETTLE_S = 3.0
OPENING_AT_ONCE = 16
GPUS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What waiting clients cost."""

    bytes_each: float
    """Memory for each client: its lease and its long poll."""
    lease_bytes_each: float
    """Of that, memory for each lease that is queued."""
    percent: float
    """CPU time of the daemon while they wait, in percent of a core."""


def long_polls(quick: bool) -> list[Row]:
    """The rows of the table."""
    clients, seconds = (QUICK_CLIENTS, QUICK_S) if quick else (CLIENTS, MEASURED_S)
    with tempfile.TemporaryDirectory() as place, installed(Path(place), "--simulate", str(GPUS)) as running:
        idle = idle_percent(running, seconds / 2)
        cost = measure(running, clients, seconds)
    what = f"{clients:,} long polls that wait"
    lease = f"of these {cost.lease_bytes_each / 1024:.1f} KiB for the lease in the queue"
    return [
        Row(
            question=f"{what}, memory of the daemon (PSS) each",
            formerly="41.8 KiB",
            target=Target(bound=20.0),
            figure=cost.bytes_each / 1024,
            unit="KiB",
            beside=lease,
        ),
        Row(
            question=f"{what}, CPU of the daemon, of a core",
            formerly="14.2 %",
            target=Target(bound=1.0),
            figure=cost.percent,
            unit="%",
            beside=f"{idle:.2f} % with no one waiting",
        ),
    ]


def idle_percent(running: InstalledDaemon, seconds: float) -> float:
    """CPU time of the daemon over so many seconds, in percent of a core."""
    used_s, begun_s = running.cpu_s(), time.monotonic()
    time.sleep(seconds)
    return (running.cpu_s() - used_s) / (time.monotonic() - begun_s) * 100


def measure(running: InstalledDaemon, clients: int, seconds: float) -> Cost:
    """Hold all GPUs, have so many clients wait, and measure for so many seconds."""
    running.request_lease(GPUS, wait_s=30, ttl_s=3600)
    before = running.pss_bytes()
    command = [sys.executable, "-m", "bench.long_polls", str(running.port), str(clients)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "queued\n"
            queued = running.pss_bytes()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "polling\n"
            time.sleep(SETTLE_S)
            polling = running.pss_bytes()
            percent = idle_percent(running, seconds)
        finally:
            process.kill()
    return Cost(bytes_each=(polling - before) / clients, lease_bytes_each=(queued - before) / clients, percent=percent)


async def wait_in_queue(port: int, clients: int) -> None:
    """Queue a request for each client; once standard input has a line, open their long polls and keep them open."""
    turns = asyncio.Semaphore(OPENING_AT_ONCE)

    async def queue() -> tuple[asyncio.StreamWriter, str]:
        async with turns:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post("/v1/leases", {"count": 1, "ttl_s": 3600}))
            received = b""
            while (body := http_answer(received)) is None:
                received += await reader.read(65536)
            return writer, json.loads(body)["id"]

    waiting = await asyncio.gather(*(queue() for _ in range(clients)))
    print("queued", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for writer, lease_id in waiting:
        writer.write(
            f"GET /v1/leases/{lease_id}?wait_s=3600&wait_while=queued HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        )
        await asyncio.sleep(0)
    print("polling", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(wait_in_queue(int(sys.argv[1]), int(sys.argv[2])))
