"""How often the expected starts of a forecast are true: `python -m bench.policy.forecasts [--history] NAME=FILE ...`.

Each trace is played through the core, with the time that each request takes as declared; of every request that waits,
the forecast at its arrival is compared with its start in the replay. With `--history` none declares a time: what is
compared is the range that follows from the leases that have ended by then. Traces are Pollux' workloads (with
`FILE+FILE+...` one after the other, on as many GPUs as there), Philly's virtual clusters (`FILE:CLUSTER:NODES`), and
`tiresias` without a file.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from bench.policy import traces
from bench.policy.comparison import OPEN
from bench.policy.validation import BEGUN
from gpulease_server.core.forecast.expected_start import ExpectedStart, StartForecast
from gpulease_server.replay.recorded_requests import RecordedRequest, uniform_nodes
from gpulease_server.replay.virtual_daemon import Outcome, VirtualDaemon

MOST_FORECASTS, MOST_FORECASTS_BY_HISTORY = 60, 300
"""For each trace, about so many, evenly over its requests. Those that do not wait count, too."""
WORKLOAD_S = 8 * 3600.0
"""For how long requests come in a workload of Pollux."""
MOST_REQUESTS = 1200


class Forecasting(VirtualDaemon):
    """A daemon that notes what it expects of each request that comes to wait."""

    expected: dict[str, ExpectedStart | None]
    every: int = 1

    def _step(self, arrivals: deque[Outcome]) -> None:
        before = len(arrivals)
        super()._step(arrivals)
        if len(arrivals) == before or before % self.every or not self.ledger.queue:
            return
        newest = self.ledger.queue[-1][1]
        if newest not in self.expected and len(self.ledger.queue) <= 100:
            forecast = StartForecast(self.ledger, self._instant(), self.policy)
            for _ in forecast.steps():
                pass
            self.expected[newest] = forecast.starts.get(newest)


def forecasts(
    requests: list[RecordedRequest], nodes: int, gpus: int, most: int
) -> tuple[int, list[tuple[ExpectedStart, float]]]:
    """How many requests waited and were asked about; and of those with an expected start, that, and the real one in
    seconds since the begin."""
    daemon = Forecasting(uniform_nodes(nodes, gpus), OPEN, BEGUN)
    daemon.expected, daemon.every = {}, max(1, len(requests) // most)
    started = {one.request.id: one.granted_at_s for one in daemon.run(requests)}
    pairs = ((start, started[lease_id]) for lease_id, start in daemon.expected.items() if start is not None)
    return len(daemon.expected), [(start, real_s) for start, real_s in pairs if real_s is not None]


def calibration(name: str, requests: list[RecordedRequest], nodes: int, gpus: int) -> str:
    """A row of the table of declared times."""
    waited, pairs = forecasts(declared(requests), nodes, gpus, MOST_FORECASTS)
    errors_s = [_since_begin_s(start.at) - real_s for start, real_s in pairs]
    cells = [name, f"{nodes} x {gpus}", f"{waited}", f"{len(errors_s)}"]
    if errors_s:
        by = sum(error_s >= -1 for error_s in errors_s) / len(errors_s)
        cells += [f"{statistics.median(errors_s):.0f} s", f"{by:.0%}"]
    return "| " + " | ".join(cells) + " |"


def coverage(name: str, requests: list[RecordedRequest], nodes: int, gpus: int) -> str:
    """A row of the table of history."""
    waited, pairs = forecasts(requests, nodes, gpus, MOST_FORECASTS_BY_HISTORY)
    ranges = [(_since_begin_s(one.at), _since_begin_s(one.until), real_s) for one, real_s in pairs if one.until]
    cells = [name, f"{nodes} x {gpus}", f"{waited}", f"{len(ranges)}"]
    if ranges:
        earlier = sum(real_s < from_s for from_s, _, real_s in ranges) / len(ranges)
        later = sum(real_s > until_s for _, until_s, real_s in ranges) / len(ranges)
        cells += [f"{1 - earlier - later:.0%}", f"{earlier:.0%}", f"{later:.0%}"]
        cells.append(f"{statistics.median(until_s - from_s for from_s, until_s, _ in ranges) / 60:.0f} min")
    return "| " + " | ".join(cells) + " |"


def _since_begin_s(at: datetime) -> float:
    return (at - BEGUN).total_seconds()


HEADS = ("trace", "GPUs", "waited", "forecast")
HEADS_DECLARED = (*HEADS, "median of expected less real start", "started by then")
HEADS_HISTORY = (*HEADS, "started within the range", "before it", "after it", "median length of the range")


def declared(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """The same, each with the time that it takes as declared."""
    return [replace(one, demand=replace(one.demand, time_s=one.duration_s + 1)) for one in requests]


def main(words: list[str]) -> None:
    """Print the table."""
    by_history = "--history" in words
    heads, row = (HEADS_HISTORY, coverage) if by_history else (HEADS_DECLARED, calibration)
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for word in words:
        if word != "--history":
            print(row(*_trace(word)), flush=True)


def _trace(word: str) -> tuple[str, list[RecordedRequest], int, int]:
    """Name, requests, nodes, and GPUs of each node."""
    name, _, file = word.partition("=")
    path, _, cluster = file.partition(":")
    gpus = 4
    if cluster:
        cluster, _, nodes_text = cluster.partition(":")
        requests = [one for one in traces.philly(path) if one.user == cluster and one.demand.count <= 8]
        requests, nodes, gpus = requests[:MOST_REQUESTS], int(nodes_text or 2), 8
    elif path:
        files = path.split("+")
        requests, nodes = _in_a_row([traces.pollux(Path(one)) for one in files]), 8 if len(files) == 1 else 16
    else:
        requests, nodes = traces.tiresias(), 4
    return name, list(traces.on_nodes(requests, uniform_nodes(nodes, gpus))), nodes, gpus


def _in_a_row(workloads: list[list[RecordedRequest]]) -> list[RecordedRequest]:
    """Their requests, with ids that no two share."""
    if len(workloads) == 1:
        return workloads[0]
    return [
        replace(one, id=f"{number}-{one.id}", asked_at_s=one.asked_at_s + number * WORKLOAD_S)
        for number, workload in enumerate(workloads)
        for one in sorted(workload, key=lambda one: one.asked_at_s)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
