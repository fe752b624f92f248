"""Budgets of bearer tokens, judged by the event log alone. Imports nothing of the product.

A line `token budget` has `token_id`, and what may be held with it: `max_gpus` at a time, each lease for `max_lease_s`,
and `most_s` GPU-seconds on a day; `least_s`, for how long what is left of the day must last; and `midnight_s`, when the
second day begins. No one sets the clock, and a run ends before the third day.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.checker import Seen

Line = dict[str, Any]
LATE_S, SILENT_S = 1.5, 1.0
"""What a budget ends has ended so soon, while a daemon lives that has recorded something each second."""


@dataclass
class HeldWithToken:
    """What is held with a token, as the log goes on."""

    rules: Line
    held: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By active lease: since when, and how many GPUs."""
    spans: list[tuple[float, float, int]] = field(default_factory=list)
    """Of those that have ended: from when until when so many GPUs were held."""

    def used_s(self, now_s: float) -> float:
        """GPU-seconds of the day."""
        midnight_s = self.rules["midnight_s"]
        day_s = midnight_s if now_s >= midnight_s else 0.0
        spans = [*self.spans, *((since_s, now_s, gpus) for since_s, gpus in self.held.values())]
        return float(sum(gpus * max(0.0, until_s - max(since_s, day_s)) for since_s, until_s, gpus in spans))

    def late_s(self, lease: str, now_s: float) -> float:
        """For how long a lease has gone on that its token's budget ends."""
        over_s = self.used_s(now_s) - self.rules["most_s"]
        of_day_s = over_s / sum(gpus for _, gpus in self.held.values())
        return max(of_day_s, now_s - self.held[lease][0] - float(self.rules["max_lease_s"]))


def budgets_are_never_passed(seen: Seen) -> Iterator[str]:
    """With each grant, what a token has is within its budget, and what is left of the day lasts for a while; and what
    has lasted for too long ends, as soon as a daemon can tell."""
    for rules in seen.of["token budget"]:
        listed = (line["lease"] for line in seen.of["listed"])
        theirs = {lease["id"] for lease in listed if lease["holder"].get("token_id") == rules["token_id"]}
        now, signs = HeldWithToken(rules), _signs(seen)
        for event in seen.log:
            lease, kind, at_s = event["lease_id"], event["kind"], max(seen.moments(event), default=0.0)
            if kind in ("lease.granted", "lease.revived") and lease in theirs:
                yield from _over(now, event, at_s, seen.tolerance_s)
                now.held[lease] = at_s, len(event["gpus"])
            elif kind == "lease.ended" and lease in now.held:
                since_s, gpus = now.held.pop(lease)
                now.spans.append((since_s, at_s, gpus))
            late = [other for other in now.held if now.late_s(other, at_s) > LATE_S]
            for other in late if at_s - _records_since_s(seen, signs, at_s) > LATE_S else ():
                yield f"seq {event['seq']}: {other} goes on at {at_s:.3f}, and the budget of its token ends it"


def _signs(seen: Seen) -> list[float]:
    """When something was recorded: events, and answers that rest on a commit."""
    answered = [line for what in ("asked", "released") for line in seen.of[what] if line.get("status", 500) < 300]
    return sorted([max(seen.moments(event), default=0.0) for event in seen.log] + [line["at_s"] for line in answered])


def _records_since_s(seen: Seen, signs: list[float], at_s: float) -> float:
    """Since when a daemon lives, and has recorded something again and again."""
    since_s = at_s
    for sign_s in reversed(signs[: bisect.bisect_right(signs, at_s)]):
        if since_s - sign_s > SILENT_S:
            break
        since_s = sign_s
    return max([since_s, *(line["at_s"] for line in seen.of["started"] if line["at_s"] <= at_s)])


def _over(now: HeldWithToken, event: Line, at_s: float, tolerance_s: float) -> Iterator[str]:
    """What a grant takes beyond the budget."""
    rules, gpus = now.rules, len(event["gpus"])
    has = sum(held for _, held in now.held.values()) + gpus
    if has > rules["max_gpus"]:
        yield f"seq {event['seq']}: with {event['lease_id']} its token has {has} GPUs, of {rules['max_gpus']}"
    used_s = now.used_s(at_s)
    if used_s + gpus * rules["least_s"] > rules["most_s"] + 0.02 * len(now.spans) + tolerance_s:
        yield f"seq {event['seq']}: {event['lease_id']} is granted, and {used_s:.2f} of {rules['most_s']} s are used"
