"""Policies of the daemon beside each other, beside strict order, and beside oracles that know how long jobs take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.policy.small_models import by_duration, by_gpu_time, schedule
from bench.policy.traces import on_nodes
from bench.policy.validation import BEGUN, FIT_FIRST, STRICT, UNLIMITED
from gpulease_protocol.model import Priority
from gpulease_server.core.policy import Policy
from gpulease_server.replay.measures import PolicyOutcome, measure
from gpulease_server.replay.recorded_requests import RecordedRequest, uniform_nodes, with_priorities
from gpulease_server.replay.virtual_daemon import Outcome, replay

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
OPEN = Policy(limits=UNLIMITED, max_queued=10**9, max_queued_bytes=2**60)
HEADS = (
    *("policy", "wait, mean", "median", "99 %", "longest", "slowdown, mean", "99 %"),
    *("Jain, slowdowns", "Jain, shares", "GPUs in use", "idle while waited for", "lost", "CPU per request"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests on a fleet."""

    name: str
    requests: list[RecordedRequest]
    nodes: int
    gpus: int


class Result(NamedTuple):
    """How one policy did."""

    policy: str
    outcome: PolicyOutcome
    cpu_s: float
    """Per request; 0 for an oracle."""


def busiest_user(requests: Sequence[RecordedRequest]) -> str:
    """Who asks for the most GPU-seconds."""
    used = Counter[str]()
    for one in requests:
        used[one.user or "-"] += one.duration_s * one.demand.count * one.demand.nodes  # type: ignore[assignment]
    return max(used, key=lambda user: (used[user], user))


def with_short_ones_interactive(requests: Sequence[RecordedRequest], most_s: float = 900.0) -> list[RecordedRequest]:
    """As if everything of one GPU and at most 15 minutes had been asked for as interactive (synthetic)."""
    return [
        replace(one, demand=replace(one.demand, priority=Priority.INTERACTIVE))
        if one.demand.count == 1 and one.duration_s <= most_s
        else one
        for one in requests
    ]


def with_times(requests: Sequence[RecordedRequest], factor: float = 2.0) -> list[RecordedRequest]:
    """As if everyone had declared so many times what they take (synthetic): EASY backfill plans with it."""
    return [replace(one, demand=replace(one.demand, time_s=factor * one.duration_s)) for one in requests]


Run = Callable[[list[RecordedRequest]], tuple[Policy, list[RecordedRequest]]]
POLICIES: dict[str, Run] = {
    "strict order (max_bypass 0)": lambda some: (STRICT, some),
    "first come, bounded bypass (default)": lambda some: (OPEN, some),
    "strict order, all declare twice their time (EASY backfill)": lambda some: (
        replace(STRICT, easy_backfill=True),
        with_times(some),
    ),
    "first come, all declare twice their time (EASY backfill)": lambda some: (
        replace(OPEN, easy_backfill=True),
        with_times(some),
    ),
    "fit first (no bound)": lambda some: (FIT_FIRST, some),
    "first come, bypass 100 times or for 4 h": lambda some: (
        replace(OPEN, max_bypass=100, max_bypass_s=4 * HOUR_S),
        some,
    ),
    "fair share, half-life 7 d": lambda some: (replace(OPEN, fair_share=True), some),
    "fair share, half-life 1 d": lambda some: (replace(OPEN, fair_share=True, usage_half_life_s=DAY_S), some),
    "fair share, half-life 7 d, bypass 100 times or for 4 h": lambda some: (
        replace(OPEN, fair_share=True, max_bypass=100, max_bypass_s=4 * HOUR_S),
        some,
    ),
    "the busiest user as scavenge": lambda some: (OPEN, with_priorities(some, {busiest_user(some): Priority.SCAVENGE})),
    "short ones of 1 GPU interactive, 2 GPUs a user": lambda some: (
        replace(OPEN, limits=replace(UNLIMITED, interactive_gpus=2)),
        with_short_ones_interactive(some),
    ),
}
ORACLES = {
    "oracle: shortest first": by_duration,
    "oracle: least GPU time first": by_gpu_time,
}


def results(workload: Workload, policies: Sequence[str] = (*POLICIES, *ORACLES)) -> Iterator[Result]:
    """Every policy on one workload."""
    fleet = uniform_nodes(workload.nodes, workload.gpus)
    requests = list(on_nodes(workload.requests, fleet))
    for name in policies:
        begun_s = time.process_time()
        outcomes: list[Outcome]
        if name in ORACLES:
            sizes = [workload.gpus] * workload.nodes
            outcomes = schedule(requests, sizes, ORACLES[name], greedy=True)
            cpu_s = 0.0
        else:
            policy, some = POLICIES[name](requests)
            outcomes = replay(fleet, some, policy, BEGUN)
            cpu_s = (time.process_time() - begun_s) / len(requests)
        yield Result(name, measure(outcomes, workload.nodes * workload.gpus), cpu_s)


def row(result: Result) -> tuple[str, ...]:
    """A line of the table."""
    one = result.outcome
    return (
        result.policy,
        *(length(value) for value in (one.wait_mean_s, one.wait_median_s, one.wait_p99_s, one.wait_max_s)),
        *(f"{one.slowdown_mean:,.1f}", f"{one.slowdown_p99:,.0f}"),
        *(f"{one.jain_of_slowdowns:.2f}", f"{one.jain_of_shares:.2f}"),
        *(
            f"{one.utilization_ratio:.1%}",
            f"{one.gpu_hours_idle_while_waited_for:,.0f} h",
            f"{one.gpu_hours_lost:,.0f} h",
        ),
        f"{result.cpu_s * 1e3:.2f} ms" if result.cpu_s else "-",
    )


def length(seconds: float) -> str:
    """A wait in one unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"
