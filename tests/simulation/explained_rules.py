"""What those who wait are told of the order, judged by the grants that follow. Imports nothing of the product.

A line `explained` has what several requests were told while no one came or went: `said`, by request its `position` in
the queue, and those that it is `behind`, for which GPUs are held that it could use. Judged where the order is that of
priority and arrival, and for requests that no limit may keep out. Where usage orders, the places that were told are
compared with what was used by the event log; that the grants follow it is another rule.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.simulation.rules_starvation import Waiting
from tests.simulation.usage_rules import COMMITTED_S, UsageByEvents, has_gpus

if TYPE_CHECKING:
    from tests.simulation.checker import Seen

Line = dict[str, Any]
Pair = tuple[str, str]
STALLS_S = 6.0
"""What is told of places may be so old: the disk stalls, and it is not ordered again meanwhile."""


def order_is_as_explained(seen: Seen) -> Iterator[str]:
    """No grant passes a request that was said to be before it, and that it would have served. Nor does one leave too
    few GPUs to a request that it was said to be behind, on the only node that can serve that. Who runs ahead without
    delay, and those for whom leases end, may; so may those that go first because they have waited longest: one grant of
    `max_overtakes + 1`, and none of a newer request of higher priority. What was said before a restart of the daemon
    counts no more: what was counted until then is lost."""
    yield from _places_are_by_usage(seen)
    looks = sorted(seen.of["explained"], key=lambda line: line["at_s"])
    for bounds in seen.of["passes"] if looks else ():
        waiting, last, taken, grants, passes = Waiting(seen), dict[str, Line](), 0, 0, 0
        for event, _ in waiting.events():
            granted, moments = event["lease_id"], seen.moments(event)
            if event["kind"] != "lease.granted" or len(moments) != 1:
                continue
            grants += 1
            while taken < len(looks) and looks[taken]["at_s"] < moments[0] - seen.tolerance_s:
                last |= dict.fromkeys(looks[taken]["said"], looks[taken])
                taken += 1
            passed = _passed(seen, waiting, event, last[granted]) if granted in last else []
            if not passed:
                continue
            passes += 1
            turns = 1 + grants // (bounds["max_overtakes"] + 1) if bounds["priorities"] else 0
            if passes > turns or any(_is_higher_and_newer(waiting, granted, other) for other in passed):
                yield f"seq {event['seq']}: {granted} is granted, and was said to come after {passed}"


def _is_higher_and_newer(waiting: Waiting, one: str, other: str) -> bool:
    """True where a request goes before another by its priority alone: the other goes first for good once it does."""
    is_newer = waiting.since[one]["seq"] > waiting.since[other]["seq"]
    return is_newer and waiting.rank(one) < waiting.rank(other)


def _passed(seen: Seen, waiting: Waiting, event: Line, look: Line) -> list[str]:
    """The requests that a grant passes although what was said last puts them before it."""
    granted, at_s, node = event["lease_id"], seen.moments(event)[0], event["node"]
    own, gpus = look["said"][granted], set(event["gpus"]) - waiting.nodes.closed
    is_new = any(look["sent_s"] - seen.tolerance_s <= line["at_s"] <= at_s for line in seen.of["started"])
    is_other = "runs ahead of" in (event["reason"] or "") or granted in waiting.preempt
    if is_new or is_other or granted not in waiting.demands or waiting.may_keep_out(granted):
        return []
    serving = waiting.nodes.serving(node, at_s)
    before = {other for other, said in look["said"].items() if said["position"] < own["position"]}
    found = []
    for other in sorted({*before, *own["behind"]}):
        if other not in waiting.since or other not in waiting.demands or waiting.may_keep_out(other):
            continue
        count = waiting.demands[other]["count"]
        would_serve = other in before and count <= len(gpus)
        is_short = len(serving - set(event["gpus"])) < count <= len(serving) and waiting.nodes.most(count) == 1
        if (would_serve or (other in own["behind"] and is_short)) and not has_gpus(seen, event, other):
            found.append(other)
    return found


def _places_are_by_usage(seen: Seen) -> Iterator[str]:
    """Of two requests the one that surely goes before the other, by what was used, was told the lower place. What was
    decided in the last seconds was committed by then, or was not: some part of the log must fit what was told."""
    for rules in seen.of["usage order"]:
        events = [(max(seen.moments(event), default=0.0), event) for event in seen.log]
        base, taken, order = UsageByEvents(seen, rules | {"recount_s": STALLS_S}), 0, _Arrivals(seen)
        for look in sorted(seen.of["explained"], key=lambda line: line["at_s"]):
            while taken < len(events) and events[taken][0] < look["sent_s"] - COMMITTED_S:
                base.take(events[taken][1], events[taken][0])
                taken += 1
            places = {lease: said["position"] for lease, said in look["said"].items() if lease in base.users}
            wrong = [(one, other) for one in places for other in places if places[one] > places[other]]
            now, later = _copy(base), iter(events[taken:])
            while wrong := [pair for pair in wrong if order.is_turned(now, pair, look["at_s"])]:
                at_s, event = next(later, (math.inf, {}))
                if at_s > look["at_s"] + seen.tolerance_s:
                    break
                now.take(event, at_s)
            for one, other in wrong:
                yield f"{one} goes before {other}, and was told place {places[one]} at {look['at_s']:.3f}"


class _Arrivals:
    """When requests were asked for, and when they were in the queue."""

    def __init__(self, seen: Seen) -> None:
        keys: dict[str, float] = {}
        for line in seen.of["asked"]:
            keys[line["key"]] = min(keys.get(line["key"], math.inf), line["sent_s"])
        listed = [line["lease"] for line in seen.of["listed"]]
        self._sent = {lease["id"]: keys.get(lease["holder"].get("label"), 0.0) for lease in listed}
        queued = seen.events("lease.queued")
        self._queued = {event["lease_id"]: max(seen.moments(event), default=math.inf) for event in queued}

    def is_turned(self, now: UsageByEvents, pair: Pair, at_s: float) -> bool:
        """True where the first of two surely goes before the other."""
        one, other = pair
        users = now.users[one], now.users[other]
        if users[0] is None or users[1] is None:
            return False
        older = self._queued.get(one, math.inf) < self._sent.get(other, 0.0)
        return now.goes_before(users[0], users[1], older, at_s)


def _copy(base: UsageByEvents) -> UsageByEvents:
    now = UsageByEvents(base.seen, base.rules, dict(base.members), defaultdict(list), dict(base.held))
    now.spans |= {user: list(spans) for user, spans in base.spans.items()}
    now.changed_s |= base.changed_s
    return now
