"""EASY backfill under the virtual clock, beside a model of a few lines that knows nothing of the core."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest

from gpulease_server.core.policy import Policy
from gpulease_server.core.shadow_time import END_S
from gpulease_server.replay.recorded_requests import RecordedRequest
from tests.replay.build import STRICT, granted, run, workload

SETTLES_S = 2 * Policy().retained_memory_s + END_S
"""What passes from the end of a declared time until its GPUs are surely free."""


def declared(seed: int, gpus: int) -> list[RecordedRequest]:
    """Requests that declare a little, or far, more than they take."""
    chance = random.Random(seed)
    some = workload(seed, 120, gpus, load=0.9)
    return [
        replace(one, demand=replace(one.demand, time_s=float(int(one.duration_s * chance.choice([1.1, 1.5, 4.0])) + 1)))
        for one in some
    ]


class Running(NamedTuple):
    """A lease of the model."""

    ends_s: float
    declared_s: float
    """By its declared time."""
    gpus: int
    granted_s: float
    is_ahead: bool
    """It ran ahead of others."""
    user: str | None


def served_s(
    count: int, idle: int, running: Sequence[Running], now_s: float, asked_s: float = math.inf, by: str | None = None
) -> float:
    """From when on so many GPUs are free, with so many that are free or drain now. Who ran ahead of one that asked at
    this time is not waited for, nor is the user who wants to."""
    times = [now_s] * idle
    for one in running:
        is_now = (one.is_ahead and one.granted_s >= asked_s) or (by is not None and one.user == by)
        times += [now_s if is_now else one.declared_s] * one.gpus
    return sorted(times)[count - 1]


def easy(requests: Sequence[RecordedRequest], gpus: int) -> tuple[dict[str, float], dict[str, float]]:
    """When each starts on one node of so many GPUs, and by when each that came to be first could be told to start."""
    running, waiting, starts, by_s = list[Running](), list[RecordedRequest](), {}, {}
    arrivals = sorted(requests, key=lambda one: one.asked_at_s)
    while arrivals or running:
        now_s = min([one.asked_at_s for one in arrivals[:1]] + [one.ends_s for one in running])
        while arrivals and arrivals[0].asked_at_s <= now_s:
            waiting.append(arrivals.pop(0))
        drains = sum(one.gpus for one in running if one.ends_s <= now_s)
        running = [one for one in running if one.ends_s > now_s]
        for draining in dict.fromkeys((drains, 0)):
            left = list[RecordedRequest]()
            for one in waiting:
                count, time_s = one.demand.count, one.demand.time_s or 0.0
                idle = gpus - sum(some.gpus for some in running)
                by = one.user if any(some.user != one.user for some in waiting if some.id not in starts) else None
                until_s = [served_s(some.demand.count, idle, running, now_s, some.asked_at_s, by) for some in left]
                if count <= idle - draining and all(now_s + time_s + SETTLES_S <= at_s for at_s in until_s):
                    running.append(Running(now_s + one.duration_s, now_s + time_s, count, now_s, bool(left), one.user))
                    starts[one.id] = now_s
                    continue
                if not left:
                    by_s.setdefault(one.id, served_s(count, idle, running, now_s))
                left.append(one)
            waiting = left
    return starts, by_s


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_declare_their_time_start_as_in_a_small_model(seed: int) -> None:
    requests = declared(seed, 8)
    starts, by_s = easy(requests, 8)

    found = granted(run(requests, gpus=8, easy_backfill=True, **STRICT))

    assert found == {name: pytest.approx(at_s, abs=0.02) for name, at_s in starts.items()}
    assert any(starts[name] > min(starts[later] for later in list(starts)) for name in by_s), "no one ran ahead"


@pytest.mark.parametrize("seed", range(4))
def test_the_first_starts_no_later_than_it_could_have_been_told(seed: int) -> None:
    requests = declared(seed, 8)
    by_s = easy(requests, 8)[1]

    found = granted(run(requests, gpus=8, easy_backfill=True, **STRICT))

    late = {name: (at_s, found[name]) for name, at_s in by_s.items() if (found[name] or 0.0) > at_s + 0.02}
    assert len(by_s) > 20
    assert late == {}


def test_a_time_that_is_declared_shortens_waits_and_none_changes_nothing() -> None:
    requests = declared(3, 8)
    silent = [replace(one, demand=replace(one.demand, time_s=None)) for one in requests]

    with_times, without = (
        granted(run(requests, gpus=8, easy_backfill=True, **STRICT)),
        granted(run(silent, gpus=8, easy_backfill=True, **STRICT)),
    )

    waits = [sum(at_s or 0.0 for at_s in found.values()) for found in (with_times, without)]
    assert waits[0] < waits[1]
