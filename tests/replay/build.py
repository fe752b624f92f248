"""Short builders, beside a scheduler of a few lines that knows nothing of the core."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bench.policy.small_models import by_arrival, schedule
from gpulease_protocol.limits import LimitKind, Limits
from gpulease_protocol.model import Demand
from gpulease_server.core.limit_records import LimitRecord, UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.replay.recorded_requests import RecordedRequest, uniform_nodes
from gpulease_server.replay.virtual_daemon import Outcome, replay

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)
DRAIN_S = 1e-6
MANY = 10**9
STRICT = {"max_bypass": 0}
"""First come, first served: no one passes."""
GREEDY = {"max_bypass": MANY, "max_bypass_s": 1e12}
"""Each that fits starts."""


def request(name: str, asked_at_s: float, duration_s: float, count: int = 1, **what: Any) -> RecordedRequest:
    own = {
        key: what.pop(key)
        for key in ("user", "token_id", "after", "part_of", "array_id", "array_at_most")
        if key in what
    }
    demand = Demand(count=count, **what)
    return RecordedRequest(
        id=name, asked_at_s=asked_at_s, duration_s=duration_s, demand=demand, **{"user": "ann"} | own
    )


def run(
    requests: Sequence[RecordedRequest],
    nodes: int = 1,
    gpus: int = 1,
    limits: UserLimits | None = None,
    records: Sequence[LimitRecord] = (),
    **rules: Any,
) -> dict[str, Outcome]:
    """What becomes of each, by name."""
    unlimited = UserLimits(queued=0, queued_bytes=0, interactive_gpus=0, interactive_s=0.0)
    policy = Policy(limits=limits or unlimited, max_queued=MANY, **rules)
    outcomes = replay(uniform_nodes(nodes, gpus), requests, policy, BEGUN, DRAIN_S, limits=records)
    return {one.request.id: one for one in outcomes}


def limit(kind: LimitKind, name: str, *members: str, **limits: Any) -> LimitRecord:
    """The limits of a user, a group or a token."""
    return LimitRecord(kind=kind, name=name, limits=Limits(**limits), members=members, set_at=BEGUN)


def granted(found: dict[str, Outcome]) -> dict[str, float | None]:
    """When each was granted, without the drains of a microsecond."""
    return {name: None if one.granted_at_s is None else round(one.granted_at_s, 2) for name, one in found.items()}


def workload(seed: int, number: int, gpus: int, load: float = 1.0) -> list[RecordedRequest]:
    """Requests of whole seconds, which no two share a moment."""
    chance, at_s, found = random.Random(seed), 0, []
    for index in range(number):
        count = chance.choice([1, 1, 1, 2, 2, 4, gpus])
        duration_s = chance.randrange(1, 200) + (index + 1) / (10 * number)
        at_s += 1 + int(chance.expovariate(load / (100 * 1.9 / gpus)))
        found.append(request(f"r{index}", at_s, duration_s, min(count, gpus), user=f"u{chance.randrange(4)}"))
    return found


def scheduled(requests: Sequence[RecordedRequest], gpus: int, *, greedy: bool) -> dict[str, float | None]:
    """When each starts on one node of so many GPUs: in order of arrival, or each that fits."""
    return {one.request.id: one.granted_at_s for one in schedule(requests, [gpus], by_arrival, greedy=greedy)}
