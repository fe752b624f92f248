"""Thousands of long polls at once: they cost little, delay no one, and are all answered when the daemon stops."""

from __future__ import annotations

import asyncio
import resource
import signal
import statistics
import time
from pathlib import Path

import psutil
import pytest

from tests.daemon import DaemonProcess, daemon, workers_of

pytestmark = [pytest.mark.slow, pytest.mark.alone]

WAITERS, MIB = 5000, 2**20
EACH_BYTES = 64 * 1024
"""What one long poll may cost the daemon: its connection, its request and its lease."""
IDLE_RATIO = 0.1
"""How much of a processor all of them may cost while nothing happens."""
MEDIAN_S = 0.1
BODY = b'{"count": 1, "ttl_s": 600}'


async def wait_in_queue(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a GPU, and do not read the answer yet."""
    for _ in range(50):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            break
        except OSError:  # more than the backlog takes at once
            await asyncio.sleep(0.1)
    head = f"POST /v1/leases?wait_s=3600 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + BODY)
    await writer.drain()
    return reader, writer


async def queue_length(running: DaemonProcess) -> int:
    """How many requests wait, as Prometheus is told."""
    metrics = (await asyncio.to_thread(running.call, "GET", "/metrics")).content.decode()
    return int(float(metrics.split("\ngpulease_queue_length ")[1].split("\n")[0]))


async def play(running: DaemonProcess) -> str:
    """Five thousand come, wait, and are told that the daemon ends."""
    assert running.process is not None
    process = psutil.Process(running.process.pid)
    resting = process.memory_info().rss
    waiting = []
    for _ in range(WAITERS // 100):
        waiting += await asyncio.gather(*(wait_in_queue(running.port) for _ in range(100)))
    async with asyncio.timeout(120):
        while await queue_length(running) < WAITERS:  # noqa: ASYNC110 - only the daemon knows
            await asyncio.sleep(0.1)
    grown = (process.memory_info().rss - resting) / WAITERS
    begun_s, before = time.monotonic(), process.cpu_times()
    took = []
    for _ in range(20):
        asked_s = time.monotonic()
        assert (await asyncio.to_thread(running.call, "GET", "/v1/gpus")).status == 200
        took.append(time.monotonic() - asked_s)
        await asyncio.sleep(0.2)
    after = process.cpu_times()
    busy = (after.user + after.system - before.user - before.system) / (time.monotonic() - begun_s)
    ended_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(reader.read() for reader, _ in waiting))
    await asyncio.to_thread(process.wait, 60)
    ended_s = time.monotonic() - ended_s
    for _, writer in waiting:
        writer.close()
    said = [answer.split(b"\r\n", 1)[0] for answer in answers]
    assert set(said) == {b"HTTP/1.1 202 Accepted"}, {line: said.count(line) for line in set(said)}
    median_s = statistics.median(took)
    figures = f"{WAITERS} wait: {grown / 1024:.1f} KiB each, {busy:.0%} of a processor, others are answered in"
    figures += f" {median_s * 1000:.1f} ms (median), all told of the end in {ended_s:.1f} s"
    assert grown < EACH_BYTES, figures
    assert busy < IDLE_RATIO, figures
    assert median_s < MEDIAN_S, figures
    return figures


def test_five_thousand_long_polls_are_cheap_and_answered_at_shutdown(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert before[1] == resource.RLIM_INFINITY or before[1] > 2 * WAITERS, "raise the hard limit of `ulimit -n`"
    resource.setrlimit(resource.RLIMIT_NOFILE, (WAITERS + 1000, before[1]))
    try:
        # Executed, not forked from a process that another test has started with another limit.
        with daemon(tmp_path, "--simulate", "1", PYTHONUNBUFFERED="1") as running:
            held = running.call("POST", "/v1/leases", {"count": 1, "ttl_s": 3600})
            assert held.status == 201
            assert running.process is not None
            serving = psutil.Process(running.process.pid)
            (worker,) = workers_of(serving.pid)
            assert serving.rlimit(psutil.RLIMIT_NOFILE)[0] > WAITERS + 1000, "it takes as many as it may"
            assert worker.rlimit(psutil.RLIMIT_NOFILE)[0] == WAITERS + 1000, "jobs would inherit it"
            print(asyncio.run(play(running)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
