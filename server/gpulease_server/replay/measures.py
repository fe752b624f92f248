"""What a replay shows: waits, slowdowns, use of the GPUs, and how even it all was between users.

| measure | what it is |
|---|---|
| wait | from the request to its first grant; to the end of the replay for one that was never granted |
| bounded slowdown | `max(1, (end - request) / max(held, 10 s))`, after Feitelson: short leases count with a bound |
| Jain's index | `(sum x)^2 / (n * sum x^2)`: 1 if all users fare alike, 1/n if one of n has everything |
| ... of slowdowns | of the users' mean slowdowns: who waits longer than their leases are long |
| ... of shares | of the GPUs that each user holds on average while a request of theirs waits |
| utilization | GPU-seconds held, of all from the first request to the last end |
| idle while waited for | GPU-hours that were free or draining while a request waited: what does not fit, what is held |
| lost | GPU-hours held by leases that a rule ended before they were done |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun
from gpulease_server.replay.virtual_daemon import Outcome

TAU_S = 10.0
"""Held for less, a lease counts as held for so long in the slowdown."""
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOutcome(Noun):
    """How one user fared."""

    user: str
    requests: int
    gpu_hours: float
    """Held by their leases."""
    wait_mean_s: float
    wait_p99_s: float
    slowdown_mean: float
    """Bounded slowdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome(Noun):
    """How the requests fared under one policy. Percentiles are those of nearest rank."""

    requests: int
    """All that are counted."""
    refused: int
    """Of these, refused: no node has so many GPUs, or a limit."""
    refusals: dict[str, int]
    """The same by the code of the error, as `never_fits` and `over_quota`."""
    never_granted: int
    """Of these, still waiting when nothing more happened."""
    wait_mean_s: float
    wait_median_s: float
    wait_p99_s: float
    wait_max_s: float
    slowdown_mean: float
    """Bounded slowdown."""
    slowdown_p99: float
    jain_of_slowdowns: float
    """Jain's index of the users' mean bounded slowdowns."""
    jain_of_shares: float
    """Jain's index of the GPUs that users hold on average while a request of theirs waits."""
    utilization_ratio: float
    gpu_hours_held: float
    gpu_hours_idle_while_waited_for: float
    gpu_hours_lost: float
    end_s: float
    """When the last lease ended, in seconds since the first request."""
    users: tuple[UserOutcome, ...]
    """Those with the most GPU-hours first."""
    waiting: tuple[float, ...] = ()
    """How many requests waited on average in each of as many equal parts of the period."""


def measure(outcomes: Sequence[Outcome], gpus: int) -> PolicyOutcome:
    """The measures of a replay on so many GPUs. Raises ValueError where no request is counted."""
    counted = [one for one in outcomes if one.request.counted]
    served = [one for one in counted if one.refused is None]
    if not served:
        raise ValueError("no request could be granted")
    end_s = max((one.ended_at_s or 0.0 for one in outcomes), default=0.0)
    waits = sorted(wait_s(one, end_s) for one in served)
    slowdowns = sorted(slowdown(one, end_s) for one in served)
    users = users_of(served, end_s)
    use = use_of_gpus(outcomes, gpus)
    return PolicyOutcome(
        requests=len(counted),
        refused=len(counted) - len(served),
        refusals=dict(sorted(Counter(one.refused for one in counted if one.refused is not None).items())),
        never_granted=sum(one.granted_at_s is None for one in served),
        wait_mean_s=mean(waits),
        wait_median_s=percentile(waits, 0.5),
        wait_p99_s=percentile(waits, 0.99),
        wait_max_s=waits[-1],
        slowdown_mean=mean(slowdowns),
        slowdown_p99=percentile(slowdowns, 0.99),
        jain_of_slowdowns=jain([one.slowdown_mean for one in users]),
        jain_of_shares=jain(shares_while_waiting(outcomes)),
        utilization_ratio=use.utilization_ratio,
        gpu_hours_held=use.held_s / HOUR_S,
        gpu_hours_idle_while_waited_for=use.idle_s / HOUR_S,
        gpu_hours_lost=math.fsum(one.lost_s * one.gpus for one in outcomes) / HOUR_S,
        end_s=end_s - use.begin_s,
        users=users,
    )


def wait_s(one: Outcome, end_s: float) -> float:
    """How long a request waited."""
    asked_at_s = one.request.asked_at_s if one.asked_at_s is None else one.asked_at_s
    return max(0.0, (end_s if one.granted_at_s is None else one.granted_at_s) - asked_at_s)


def slowdown(one: Outcome, end_s: float) -> float:
    """The bounded slowdown of a request; of one that was never granted as if it began at the end."""
    waited_s, worked_s = wait_s(one, end_s), one.request.duration_s
    whole_s = waited_s + worked_s
    if one.ended_at_s is not None and one.granted_at_s is not None and one.asked_at_s is not None:
        # One that a rule ended early has worked for less; what it held before without effect is a part of the whole.
        whole_s = one.ended_at_s - one.asked_at_s
        worked_s = min(worked_s, one.ended_at_s - one.granted_at_s)
    return max(1.0, whole_s / max(worked_s, TAU_S))


def users_of(outcomes: Iterable[Outcome], end_s: float) -> tuple[UserOutcome, ...]:
    """How each user fared, those with the most GPU-hours first."""
    of_user: dict[str, list[Outcome]] = {}
    for one in outcomes:
        of_user.setdefault(one.request.user or "-", []).append(one)
    found = []
    for user, some in of_user.items():
        waits = sorted(wait_s(one, end_s) for one in some)
        found.append(
            UserOutcome(
                user=user,
                requests=len(some),
                gpu_hours=math.fsum(held_gpu_s(one) for one in some) / HOUR_S,
                wait_mean_s=mean(waits),
                wait_p99_s=percentile(waits, 0.99),
                slowdown_mean=mean([slowdown(one, end_s) for one in some]),
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.gpu_hours, one.user)))


def held_gpu_s(one: Outcome) -> float:
    """GPU-seconds that its lease held, what was lost included."""
    if one.granted_at_s is None or one.ended_at_s is None:
        return 0.0
    return (one.ended_at_s - one.granted_at_s) * one.gpus


@dataclass(frozen=True, slots=True)
class GpuUse:
    """How the GPUs were used."""

    begin_s: float
    """When the first request was made."""
    held_s: float
    """GPU-seconds."""
    idle_s: float
    """GPU-seconds in which GPUs were not held while a request waited."""
    utilization_ratio: float


def use_of_gpus(outcomes: Iterable[Outcome], gpus: int) -> GpuUse:
    """How the GPUs were used from the first request to the last end."""
    changes = _changes(outcomes)
    held, waiting, at_s = 0, 0, changes[0][0] if changes else 0.0
    begin_s, held_s, idle_s = at_s, 0.0, 0.0
    for next_s, asked, taken in changes:
        held_s += held * (next_s - at_s)
        idle_s += (gpus - held) * (next_s - at_s) if waiting else 0.0
        held, waiting, at_s = held + taken, waiting + asked, next_s
    whole_s = gpus * (at_s - begin_s)
    return GpuUse(begin_s, held_s, idle_s, held_s / whole_s if whole_s else 0.0)


def shares_while_waiting(outcomes: Iterable[Outcome]) -> list[float]:
    """How many GPUs each user held on average in the time in which a request of theirs waited; nothing of those who
    never waited."""
    of_user: dict[str | None, list[Outcome]] = {}
    for one in outcomes:
        of_user.setdefault(one.request.user, []).append(one)
    found = []
    for some in of_user.values():
        held, waiting, at_s, held_s, waited_s = 0, 0, 0.0, 0.0, 0.0
        for next_s, asked, taken in _changes(some):
            if waiting:
                held_s, waited_s = held_s + held * (next_s - at_s), waited_s + next_s - at_s
            held, waiting, at_s = held + taken, waiting + asked, next_s
        if waited_s:
            found.append(held_s / waited_s)
    return found


def _changes(outcomes: Iterable[Outcome]) -> list[tuple[float, int, int]]:
    """(when, how many requests begin to wait, how many GPUs are taken), in order of time."""
    changes = list[tuple[float, int, int]]()
    for one in outcomes:
        if one.refused is not None or one.asked_at_s is None:
            continue
        changes.append((one.asked_at_s, 1, 0))
        if one.granted_at_s is not None:
            changes.append((one.granted_at_s, -1, one.gpus))
        if one.ended_at_s is not None:
            changes.append((one.ended_at_s, 0, -one.gpus))
    return sorted(changes)


def waiting_over_time(outcomes: Iterable[Outcome], end_s: float, parts: int) -> tuple[float, ...]:
    """How many requests waited on average in each of so many equal parts of the time from the first request to
    `end_s` later."""
    asked = [one for one in outcomes if one.asked_at_s is not None and one.refused is None]
    begin_s = min((one.asked_at_s or 0.0 for one in asked), default=0.0)
    width_s = end_s / parts if end_s > 0 else 1.0
    sums, steps = [0.0] * (parts + 1), [0.0] * (parts + 1)
    """In each part: the time waited there by those who begin or end in it, and how many begin or end to wait."""
    for one in asked:
        until_s = begin_s + end_s if one.granted_at_s is None else one.granted_at_s
        for at_s, sign in ((one.asked_at_s or 0.0, 1.0), (until_s, -1.0)):
            part = min(int((at_s - begin_s) / width_s), parts - 1)
            sums[part] += sign * ((part + 1) * width_s - (at_s - begin_s))
            steps[part + 1] += sign
    found, waiting = list[float](), 0.0
    for part in range(parts):
        waiting += steps[part]
        found.append(max(0.0, round(waiting + sums[part] / width_s, 6)))
    return tuple(found)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value of nearest rank; 0 of nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; 0 of nothing."""
    return math.fsum(values) / len(values) if values else 0.0


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness; 1 of nothing."""
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0
