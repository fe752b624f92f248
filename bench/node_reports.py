"""What does the daemon pay for its nodes, each of which reports once a second?

Every node speaks the node protocol as a worker does when nothing changes but the power of its GPUs:
it sends a whole reading of eight simulated GPUs, and the daemon holds its answer for a second. The nodes share one
process, and nothing is leased.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from bench.clients import http_answer
from bench.daemon import installed
from bench.table.load import cpu_s
from bench.table.rows import Row, Target
from gpulease_protocol import codec
from gpulease_protocol.node_protocol import JUST_STARTED, NodeReport
from gpulease_worker.probe.simulation import SimulatedReader

NODES, QUICK_NODES = 1_250, 100
MEASURED_S, QUICK_S = 30.0, 10.0
GPUS = 8
HOLD_S = 1.0
JOINED_AT_ONCE = 8
TICKET = 987_654_321_987
"""Stands in a prepared report where the ticket of the last answer goes."""
POWERS_W = (71.25, 70.5)
"""Of each GPU, in turns: what a report shows is never what the last one showed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the nodes found."""

    exchanges_per_s: float
    """Of all nodes."""
    cpu_s: float
    """CPU seconds of the daemon for each exchange."""
    late_s: float
    """Median seconds of an answer beyond the second that it was held."""
    cores: float
    """What the nodes used themselves."""


def node_reports(quick: bool) -> list[Row]:
    """The rows of the table."""
    nodes, seconds = (QUICK_NODES, QUICK_S) if quick else (NODES, MEASURED_S)
    with tempfile.TemporaryDirectory() as place, installed(Path(place), "--no-worker") as running:
        found = measure(running.port, running.pid, nodes, seconds)
    return [
        Row(
            question=f"exchanges of {nodes:,} nodes at 1 Hz, {nodes * GPUS:,} GPUs: cores of the daemon",
            formerly="2.3 cores",
            target=Target(bound=0.4 * nodes / NODES),
            figure=found.cpu_s * nodes,
            unit="cores",
            beside=f"{found.cpu_s * 1e3:.3f} ms of CPU each; {found.exchanges_per_s:,.0f}/s answered, "
            f"{found.late_s * 1e3:.0f} ms late; the nodes used {found.cores:.2f} of a core",
        )
    ]


def measure(port: int, daemon: int, nodes: int, seconds: float) -> Figures:
    """Run the nodes in a process of their own; `daemon` is the process id of the daemon."""
    command = [sys.executable, "-m", "bench.node_reports", *map(str, (port, daemon, nodes, seconds))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return Figures(**json.loads(ran.stdout))


def report(node: str, *, reading: bool, power_w: float = POWERS_W[0]) -> bytes:
    """A report as a worker sends it: its first one, which has no reading, or one after that, without its ticket."""
    found = SimulatedReader(str(GPUS), node).read(())
    gpus = tuple(replace(gpu, power_w=power_w + gpu.index) for gpu in found.gpus)
    whole = NodeReport(
        worker_id=f"worker-of-{node}",
        host=node,
        ticket=TICKET if reading else None,
        seen=TICKET if reading else None,
        reading_ticket=TICKET if reading else None,
        problem=None if reading else JUST_STARTED,
        read_s=0.004 if reading else None,
        gpus=gpus if reading else (),
        driver_version=found.driver_version,
        simulated=True,
        ports_reserved=tuple(range(21000, 21000 + GPUS)) if reading else (),
        hold_s=HOLD_S if reading else 0.0,
    )
    return json.dumps(codec.to_json(whole), separators=(",", ":")).encode()


class Node(asyncio.Protocol):
    """One node on one connection: it sends the next report when the last one is answered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.templates = itertools.cycle([report(name, reading=True, power_w=power_w) for power_w in POWERS_W])
        self.received = b""
        self.sent_s = 0.0
        self.answered = 0
        self.late_s: list[float] = []
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send(report(self.name, reading=False))

    def send(self, body: bytes) -> None:
        head = f"POST /v1/nodes/{self.name}/exchange HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.sent_s = time.monotonic()
        self.transport.write(b"%sContent-Length: %d\r\n\r\n%s" % (head.encode(), len(body), body))

    def data_received(self, data: bytes) -> None:
        self.received += data
        try:
            body = http_answer(self.received)
        except AssertionError as refused:
            sys.exit(f"{self.name}: {refused}")
        if body is None:
            return
        self.received = b""
        self.answered += 1
        self.late_s.append(time.monotonic() - self.sent_s - HOLD_S)
        if self.answered == 2 and not self.joined.done():
            self.joined.set_result(None)
        self.send(next(self.templates).replace(str(TICKET).encode(), str(json.loads(body)["ticket"]).encode()))

    def connection_lost(self, exc: Exception | None) -> None:
        sys.exit(f"{self.name}: the daemon closed the connection: {exc}")


async def run(port: int, daemon: int, count: int, seconds: float) -> Figures:
    """All nodes join, a few at once, and then report for so many seconds."""
    turns = asyncio.Semaphore(JOINED_AT_ONCE)
    nodes = [Node(f"n{number:04}") for number in range(count)]

    async def join(node: Node) -> None:
        async with turns:
            await asyncio.get_running_loop().create_connection(lambda: node, "127.0.0.1", port)
            await asyncio.sleep(HOLD_S * JOINED_AT_ONCE / count)  # so that their seconds begin at different times
        await node.joined

    await asyncio.gather(*map(join, nodes))
    await asyncio.sleep(2 * HOLD_S)
    for node in nodes:
        node.answered, node.late_s = 0, []
    used_s, own_s, begun_s = cpu_s(daemon), time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - begun_s
    answered = sum(node.answered for node in nodes)
    return Figures(
        exchanges_per_s=answered / took_s,
        cpu_s=(cpu_s(daemon) - used_s) / answered,
        late_s=statistics.median(late for node in nodes for late in node.late_s),
        cores=(time.process_time() - own_s) / took_s,
    )


if __name__ == "__main__":
    port, daemon, count, seconds = sys.argv[1:]
    sys.stdout.write(json.dumps(asdict(uvloop.run(run(int(port), int(daemon), int(count), float(seconds))))))
