"""What users have used by the event log alone, and what follows for the order. Imports nothing of the product.

A run in which usage orders the requests of users and groups has the line `usage order`: `groups` (name, share),
`half_life_s`, `entry_s` and `lowest_s` (GPU-seconds), `step` (a power of two), and `recount_s`, how old the usages may
be by which it is ordered. All leases are of one node and one priority, and declare no time; no one sets the clock.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.checker import Seen

Line = dict[str, Any]
COMMITTED_S = 12.0
"""What was decided so long ago is committed, or never was."""

READING_S = 0.5
"""A reading that was asked for has come by then."""


@dataclass
class UsageByEvents:
    """What was used, as the log goes on: GPU-seconds of each user, however these were asked for."""

    seen: Seen
    rules: Line
    members: dict[str, list[str]] = field(default_factory=dict)
    """By group."""
    spans: dict[str, list[tuple[float, float, int]]] = field(default_factory=lambda: defaultdict(list))
    """By user: from when until when so many GPUs were held."""
    held: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By active lease: since when, and how many GPUs."""
    changed_s: dict[str, float] = field(default_factory=dict)
    """By user: the last grant or end."""

    def __post_init__(self) -> None:
        self.users = {line["lease"]["id"]: line["lease"]["holder"].get("user") for line in self.seen.of["listed"]}

    def take(self, event: Line, now_s: float) -> None:
        """Go on by one event."""
        lease, user = event["lease_id"], self.users.get(event["lease_id"])
        if event["kind"] == "limits.set" and (
            found := re.match(r"group (\w+): .*members ([\w, ]+), by ", event["reason"])
        ):
            self.members[found[1]] = found[2].split(", ")
        if user is None or event["kind"] not in ("lease.granted", "lease.revived", "lease.ended"):
            return
        if (before := self.held.pop(lease, None)) is not None:
            self.spans[user].append((before[0], now_s, before[1]))
        if event["kind"] != "lease.ended":
            self.held[lease] = now_s, len(event["gpus"])
        self.changed_s[user] = now_s

    def used_s(self, users: Iterable[str], now_s: float) -> float:
        """What these users have used by then, with the charges for what they hold."""
        theirs, half_life_s = set(users), self.rules["half_life_s"]
        held = [span for lease, span in self.held.items() if self.users[lease] in theirs]
        spans = [span for user in theirs for span in self.spans[user]]
        spans += [(since_s, now_s, gpus) for since_s, gpus in held]
        decayed = math.fsum(
            gpus * (2 ** ((until_s - now_s) / half_life_s) - 2 ** ((since_s - now_s) / half_life_s))
            for since_s, until_s, gpus in spans
        )
        return decayed * half_life_s / math.log(2) + sum(gpus for _, gpus in held) * float(self.rules["entry_s"])

    def group_of(self, user: str) -> str | None:
        """The group with a share that a user is in."""
        return next(
            (one for one, members in self.members.items() if user in members and one in self.rules["groups"]), None
        )

    def levels(self, users: Iterable[str], share: float, now_s: float) -> tuple[float, float, bool]:
        """The least and the most that may be compared, and whether it is too little to count. Between two changes what
        is used goes one way."""
        users = list(users)
        slack_s = self.rules["recount_s"] + self.seen.tolerance_s
        since_s = max([now_s - slack_s, *(self.changed_s[user] for user in users if user in self.changed_s)])
        found = [(at_s, self.used_s(users, at_s) / share) for at_s in (min(since_s, now_s), now_s)]
        lowest_s = self.rules["lowest_s"]
        levels = [math.log2(max(used_s, lowest_s)) + at_s / self.rules["half_life_s"] for at_s, used_s in found]
        return min(levels), max(levels), all(used_s < lowest_s * 0.99 for _, used_s in found)

    def goes_before(self, one: str, other: str, older: bool, now_s: float) -> bool:
        """True where a request of one user surely goes before that of another; `older`: it was made before."""
        if one == other:
            return older
        groups = self.group_of(one), self.group_of(other)
        own = [self.levels([user], 1.0, now_s) for user in (one, other)]
        first = [
            mine if group is None else self.levels(self.members[group], self.rules["groups"][group], now_s)
            for group, mine in zip(groups, own, strict=True)
        ]
        is_alike = (groups[0] == groups[1] and groups[0] is not None) or (first[0][2] and first[1][2])
        if not is_alike:
            return self._is_less(*first)
        return older if own[0][2] and own[1][2] else self._is_less(*own)

    def _is_less(self, one: tuple[float, float, bool], other: tuple[float, float, bool]) -> bool:
        return one[1] + self.rules["step"] + 1e-6 <= other[0]


def usage_is_what_was_held(seen: Seen) -> Iterator[str]:
    """What is said of the usage of a user or group is what they held for so long, however it was asked for: in one
    request or several, and whether it was given back at once. Nothing counts that was only asked for."""
    for rules in seen.of["usage order"]:
        events = [(max(seen.moments(event), default=0.0), event) for event in seen.log]
        lines = sorted(seen.of["used"], key=lambda line: line["sent_s"])
        base, taken = UsageByEvents(seen, rules), 0
        for line in lines:
            while taken < len(events) and events[taken][0] < line["sent_s"] - COMMITTED_S:
                base.take(events[taken][1], events[taken][0])
                taken += 1
            wrong = _nearest(base, events[taken:], line)
            if wrong is not None:
                used_s, at_s = line["used_s"], line["at_s"]
                yield f"{line['whose']} is said to have used {used_s:.3f} at {at_s:.3f}, {wrong:.3f} off"


def _nearest(base: UsageByEvents, later: list[tuple[float, Line]], line: Line) -> float | None:
    """How far off it is by the most fitting part of the log that may have been committed by then; None if one fits."""
    now = UsageByEvents(base.seen, base.rules, dict(base.members), defaultdict(list), dict(base.held))
    now.spans |= {user: list(spans) for user, spans in base.spans.items()}
    name, off_s = line["whose"].partition(" ")[2], math.inf
    for at_s, event in [(0.0, {"kind": "", "lease_id": None}), *later]:
        if at_s > line["at_s"] + base.seen.tolerance_s:
            break
        now.take(event, at_s)
        users = now.members.get(name, []) if line["whose"].startswith("group ") else [name]
        # Each lease may have lasted for a little more or less, and the moment of the look is not known exactly.
        slack_s = 0.02 + 0.0005 * sum(len(now.spans[user]) for user in users) + 8 * (line["at_s"] - line["sent_s"])
        off_s = min(off_s, abs(now.used_s(users, line["sent_s"]) - line["used_s"]))
        if off_s <= slack_s:
            return None
    return off_s


def less_used_goes_first(seen: Seen) -> Iterator[str]:
    """No grant passes a request that it would have served, and that surely goes before it: its group has used less by
    its share; or as much, and its user less; or as much too, and it was made before. One that was withdrawn and is
    asked for again is a new one."""
    for rules in seen.of["usage order"]:
        now, waiting = UsageByEvents(seen, rules), dict[str, Line]()
        counts = {line["lease"]["id"]: line["lease"]["demand"]["count"] for line in seen.of["listed"]}
        for event in seen.log:
            lease, at_s = event["lease_id"], max(seen.moments(event), default=0.0)
            if event["kind"] == "lease.queued":
                waiting[lease] = event
            elif event["kind"] in ("lease.granted", "lease.ended"):
                queued, user = waiting.pop(lease, event), now.users.get(lease)
                for other, waits in waiting.items() if event["kind"] == "lease.granted" and user else ():
                    owner = now.users.get(other)
                    if owner is None or counts.get(other, math.inf) > len(event["gpus"]):
                        continue
                    if now.goes_before(owner, user, waits["seq"] < queued["seq"], at_s) and not has_gpus(
                        seen, event, other
                    ):
                        yield f"seq {event['seq']}: {lease} of {user} is granted, and {other} of {owner} goes before it"
            now.take(event, at_s)


def has_gpus(seen: Seen, event: Line, lease: str) -> bool:
    """True where a request was granted GPUs soon after this event that were clean by then: it waited for a reading."""
    became_clean: set[str] = set()
    for later in seen.log[event["seq"] :]:
        if later["kind"] == "gpu.clean":
            became_clean |= set(later["gpus"])
        if later["kind"] == "lease.granted" and later["lease_id"] == lease:
            soon_s = max(seen.moments(later), default=math.inf) - max(seen.moments(event), default=0.0)
            return soon_s <= READING_S and became_clean.isdisjoint(later["gpus"])
    return False
