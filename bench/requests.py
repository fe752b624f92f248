"""How many durable requests are answered per second, and how long does one take?

The limit is an empty FastAPI endpoint under the same uvicorn settings, which takes the same requests and answers as
many bytes. Peers are etcd's lock and Redis with fsync, one key for each client. All run at once and are measured
in turns, so that a machine that is slow for a moment is slow for all; ratios are medians over the rounds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.clients import Figures, Load, measured
from bench.daemon import InstalledDaemon, installed
from bench.peers import NotInstalled
from bench.peers.empty_endpoint import empty_endpoint
from bench.peers.etcd import etcd
from bench.peers.redis import redis
from bench.table.load import cpu_s
from bench.table.rows import Row, Target

CLIENTS, GPUS = 64, 128
ROUNDS, SECONDS = 5, 3.0
QUICK_ROUNDS, QUICK_SECONDS = 2, 1.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A server and what its clients do."""

    pattern: str
    port: int
    pid: int = 0
    """Of the server, for its CPU time; 0 if that is not shown."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of a contender found."""

    figures: Figures
    cpu_us: float
    """CPU time of the server for each request, in microseconds."""


def in_turns(contenders: Mapping[str, Contender], clients: int, quick: bool) -> dict[str, list[Round]]:
    """Measure all of them once in each round."""
    rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if quick else (ROUNDS, SECONDS)
    found: dict[str, list[Round]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, one in contenders.items():
            before_s = cpu_s(one.pid)
            figures = measured(Load(pattern=one.pattern, port=one.port, clients=clients, seconds=seconds))
            found[name].append(Round(figures, (cpu_s(one.pid) - before_s) / figures.requests * 1e6))
    return found


def ratio(found: list[Round], limit: list[Round], figure: Callable[[Figures], float] = lambda one: one.rate) -> float:
    """Median over the rounds of a figure divided by the limit's of the same round."""
    pairs = zip(found, limit, strict=True)
    return statistics.median(figure(one.figures) / figure(other.figures) for one, other in pairs)


def rate(name: str, rounds: list[Round]) -> str:
    """Requests per second, and the CPU time of each where it is known."""
    text = f"{name} {statistics.median(one.figures.rate for one in rounds):,.0f}/s"
    cpu_us = statistics.median(one.cpu_us for one in rounds)
    return f"{text}, {cpu_us:,.0f} us of CPU each" if cpu_us else text


def acquire_s(figures: Figures) -> float:
    """Median seconds from a request to its grant."""
    return figures.p50_s["acquire"]


def lease_of(running: InstalledDaemon) -> bytes:
    """An answer of the daemon, for the endpoint that answers as many bytes."""
    lease = running.request_lease(wait_s=30)
    running.release(lease)
    running.wait_free()
    return json.dumps(lease, separators=(",", ":")).encode()


def renew(quick: bool) -> list[Row]:
    """Renewals, which only the ledger is asked for."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        running = stack.enter_context(installed(Path(place), "--simulate", str(GPUS)))
        port, pid = stack.enter_context(empty_endpoint(lease_of(running), Path(place)))
        found = in_turns(
            {"gpulease": Contender("renewals", running.port, running.pid), "empty": Contender("renewals", port, pid)},
            CLIENTS,
            quick,
        )
    return [
        Row(
            question=f"renew, {CLIENTS} clients, SQLite: requests/s of an empty FastAPI handler",
            formerly="0.11 x",
            target=Target(bound=1.0, at_least=True),
            figure=ratio(found["gpulease"], found["empty"]),
            beside=f"{rate('gpulease', found['gpulease'])}; {rate('empty handler', found['empty'])}",
        )
    ]


def acquire_and_release(quick: bool) -> list[Row]:
    """Leases, whose GPUs the hardware confirms before and after."""
    peers: dict[str, tuple[str, Callable[[Path], AbstractContextManager[int]]]] = {
        "etcd's lock": ("etcd locks", etcd),
        "Redis with fsync": ("redis keys", redis),
    }
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        running = stack.enter_context(installed(Path(place), "--simulate", str(GPUS)))
        port, pid = stack.enter_context(empty_endpoint(lease_of(running), Path(place)))
        contenders = {
            "gpulease": Contender("leases", running.port, running.pid),
            "empty": Contender("leases", port, pid),
        }
        one_client = in_turns(contenders, 1, quick)
        for name, (pattern, start) in peers.items():
            try:
                contenders[name] = Contender(pattern, stack.enter_context(start(Path(place))))
            except NotInstalled as why:
                missing[name] = str(why)
        found = in_turns(contenders, CLIENTS, quick)
    what = f"acquire + release, {CLIENTS} clients, {GPUS} GPUs: requests/s of"
    ours = rate("gpulease", found["gpulease"])
    row = Row(
        question=f"{what} an empty FastAPI handler",
        formerly="0.08 x",
        target=Target(bound=0.5, at_least=True),
        figure=ratio(found["gpulease"], found["empty"]),
        beside=f"{ours}; {rate('empty handler', found['empty'])}",
    )
    rows = [row]
    for name, target, formerly in (
        ("etcd's lock", Target(bound=1.0, at_least=True), "0.098 x"),
        ("Redis with fsync", None, "0.012 x"),
    ):
        rows.append(
            Row(
                question=f"{what} {name}",
                formerly=formerly,
                target=target,
                figure=ratio(found["gpulease"], found[name]) if name in found else None,
                beside=f"{ours}; {rate(name, found[name])}" if name in found else missing[name],
            )
        )
    p50_ms = {
        name: statistics.median(acquire_s(one.figures) for one in some) * 1e3 for name, some in one_client.items()
    }
    return [
        *rows,
        Row(
            question="acquire, one client: median latency of an empty FastAPI handler's",
            formerly="25 x",
            target=Target(bound=4.0),
            figure=ratio(one_client["gpulease"], one_client["empty"], acquire_s),
            beside=f"gpulease {p50_ms['gpulease']:.2f} ms; empty handler {p50_ms['empty']:.2f} ms",
        ),
    ]
