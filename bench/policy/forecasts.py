"""How often the expected starts of a forecast are true: `python -m bench.policy.forecasts NAME=FILE ...`.

Each trace is played through the core, with the time that each request takes as declared; of every request that waits,
the forecast at its arrival is compared with its start in the replay. Traces are Pollux' workloads, and Philly's virtual
clusters (`FILE:CLUSTER:NODES`).
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

from bench.policy import traces
from bench.policy.comparison import OPEN
from bench.policy.validation import BEGUN
from gpulease_server.core.forecast.expected_start import ExpectedStart, StartForecast
from gpulease_server.replay.recorded_requests import RecordedRequest, uniform_nodes
from gpulease_server.replay.virtual_daemon import Outcome, VirtualDaemon

MOST_FORECASTS = 60
"""For each trace, about so many, evenly over its requests."""
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


def calibration(name: str, requests: list[RecordedRequest], nodes: int, gpus: int) -> str:
    """A row of the table."""
    daemon = Forecasting(uniform_nodes(nodes, gpus), OPEN, BEGUN)
    daemon.expected, daemon.every = {}, max(1, len(requests) // MOST_FORECASTS)
    started = {one.request.id: one.granted_at_s for one in daemon.run(requests)}
    pairs = [(start, started[lease_id]) for lease_id, start in daemon.expected.items() if start is not None]
    errors_s = [(start.at - BEGUN).total_seconds() - real_s for start, real_s in pairs if real_s is not None]
    cells = [name, f"{nodes} x {gpus}", f"{len(daemon.expected)}", f"{len(errors_s)}"]
    if errors_s:
        by = sum(error_s >= -1 for error_s in errors_s) / len(errors_s)
        cells += [f"{statistics.median(errors_s):.0f} s", f"{by:.0%}"]
    return "| " + " | ".join(cells) + " |"


HEADS = ("trace", "GPUs", "waited", "forecast", "median of expected less real start", "started by then")


def declared(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    """The same, each with the time that it takes as declared."""
    return [replace(one, demand=replace(one.demand, time_s=one.duration_s + 1)) for one in requests]


def main(words: list[str]) -> None:
    """Print the table."""
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    for word in words:
        name, _, file = word.partition("=")
        path, _, cluster = file.partition(":")
        if cluster:
            cluster, _, nodes_text = cluster.partition(":")
            requests = [one for one in traces.philly(path) if one.user == cluster and one.demand.count <= 8][
                :MOST_REQUESTS
            ]
            nodes = int(nodes_text or 2)
        else:
            requests, nodes = traces.pollux(Path(path)), 8
        gpus = 8 if cluster else 4
        requests = list(traces.on_nodes(requests, uniform_nodes(nodes, gpus)))
        print(calibration(name, declared(requests), nodes, gpus), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
