"""Schedulers of a few lines that know nothing of the core, and formulas of queueing theory: what a replay is held to.

They have the same nodes as the core: a request takes its GPUs from one node, of those that have enough the one with the
fewest free; one of whole nodes takes so many whole nodes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

from gpulease_server.replay.recorded_requests import RecordedRequest
from gpulease_server.replay.virtual_daemon import Outcome

Order = Callable[[RecordedRequest], Any]
ROUND_S = 60.0
DEMOTED_AFTER_S = 16 * 3600.0
"""GPU-seconds, after which a job is in the second queue."""


def by_arrival(one: RecordedRequest) -> Any:
    """First in, first out."""
    return one.asked_at_s


def by_duration(one: RecordedRequest) -> Any:
    """Shortest job first: an oracle, since no one knows how long a job takes."""
    return one.duration_s, one.asked_at_s


def by_gpu_time(one: RecordedRequest) -> Any:
    """The least GPU-seconds first: an oracle, too."""
    return one.duration_s * one.demand.count * one.demand.nodes, one.asked_at_s


class Nodes:
    """How many GPUs are free on each node."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.free = list(sizes)
        self._by_free: dict[int, set[int]] = {}
        for node, size in enumerate(sizes):
            self._by_free.setdefault(size, set()).add(node)
        self._most = max(sizes)

    def take(self, count: int, nodes: int) -> list[int] | None:
        """The nodes on which so many GPUs are taken; None if there are not enough."""
        chosen: list[int] = []
        for free in range(count, self._most + 1):
            some = self._by_free.get(free, ())
            chosen += sorted(some)[: nodes - len(chosen)] if nodes > 1 else [min(some)] if some else []
            if len(chosen) == nodes:
                for node in chosen:
                    self._change(node, -count)
                return chosen
        return None

    def give(self, count: int, nodes: Sequence[int]) -> None:
        """They are free again."""
        for node in nodes:
            self._change(node, count)

    def _change(self, node: int, by: int) -> None:
        self._by_free[self.free[node]].discard(node)
        self.free[node] += by
        self._by_free.setdefault(self.free[node], set()).add(node)


def schedule(requests: Sequence[RecordedRequest], sizes: Sequence[int], order: Order, *, greedy: bool) -> list[Outcome]:
    """Who starts when, without preemption; `greedy`: each that fits, in this order, else none before the first."""
    nodes, outcomes = Nodes(sizes), [Outcome(one, asked_at_s=one.asked_at_s) for one in requests]
    waiting: dict[tuple[int, int], list[tuple[Any, int]]] = {}
    """By GPUs and nodes: (order, index), the first one first."""
    events: list[tuple[float, int, int, list[int]]] = [(one.asked_at_s, 1, at, []) for at, one in enumerate(requests)]
    heapq.heapify(events)
    while events:
        now_s = events[0][0]
        while events and events[0][0] == now_s:
            _, arrives, at, held = heapq.heappop(events)
            demand = requests[at].demand
            if arrives:
                heapq.heappush(waiting.setdefault((demand.count, demand.nodes), []), (order(requests[at]), at))
            else:
                outcomes[at].ended_at_s = now_s
                nodes.give(demand.count, held)
        while (start := _next_start(nodes, waiting, greedy=greedy)) is not None:
            at, held = start
            outcomes[at].granted_at_s = now_s
            outcomes[at].gpus = requests[at].demand.count * requests[at].demand.nodes
            heapq.heappush(events, (now_s + requests[at].duration_s, 0, at, held))
    return outcomes


def _next_start(
    nodes: Nodes, waiting: dict[tuple[int, int], list[tuple[Any, int]]], *, greedy: bool
) -> tuple[int, list[int]] | None:
    for (_, at), kind in sorted((queue[0], kind) for kind, queue in waiting.items() if queue):
        held = nodes.take(*kind)
        if held is not None:
            heapq.heappop(waiting[kind])
            return at, held
        if not greedy:
            return None
    return None


def two_queues(requests: Sequence[RecordedRequest], gpus: int, round_s: float = ROUND_S) -> list[float]:
    """Completion times under Tiresias' rule as Pollux' artifact describes it: every minute, GPUs of one pool go to the
    jobs of the first queue that fit, in order of arrival, then to those of the second, in order of demotion. A job is
    demoted after 16 GPU-hours. Others are stopped, and lose nothing."""
    left_s = [one.duration_s for one in requests]
    used_s, done_s = [0.0] * len(requests), [math.inf] * len(requests)
    first, second, arrived, now_s = list[int](), list[int](), 0, 0.0
    while arrived < len(requests) or first or second:
        while arrived < len(requests) and requests[arrived].asked_at_s <= now_s:
            first.append(arrived)
            arrived += 1
        for at in [at for at in first if used_s[at] >= DEMOTED_AFTER_S]:
            first.remove(at)
            second.append(at)
        free = gpus
        for at in [*first, *second]:
            count = requests[at].demand.count
            if count <= free:
                free -= count
                ran_s = min(left_s[at], round_s)
                left_s[at] -= ran_s
                used_s[at] += ran_s * count
                if left_s[at] <= 0:
                    done_s[at] = now_s + ran_s
        first = [at for at in first if left_s[at] > 0]
        second = [at for at in second if left_s[at] > 0]
        now_s += round_s
    return [done - one.asked_at_s for done, one in zip(done_s, requests, strict=True)]


def erlang_wait_s(gpus: int, load: float, service_s: float) -> float:
    """The mean wait in an M/M/c queue (Erlang C)."""
    offered, blocked = load * gpus, 1.0
    for servers in range(1, gpus + 1):  # Erlang B by its recursion
        blocked = offered * blocked / (servers + offered * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    return waits * service_s / (gpus * (1 - load))
