"""Rules of the checker: no request starves. Each is passed by boundedly many newer ones, on GPUs that it could use.

Only what surely is a pass counts, and only where the node could surely serve the request once its leases end: each GPU
that it needs there is leased, or clean in every reading of the last seconds; none is out of use, taken by others or
reserved. A newer one is one that was first sent after the request was in the queue. Who runs ahead without delay is
judged by another rule, and those for whom leases have ended have what ended for them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.checker import Seen

Line = dict[str, Any]
RANKS = ("interactive", "normal", "scavenge")
LAST_READINGS_S = 3.0
"""What the daemon knows of a GPU is of a reading that is no older, if it grants others of that node."""
NEVER = float("inf")
SPECIAL = ("node", "gpu_model", "min_free_memory_bytes", "among")
OUT = {
    "gpu.unhealthy": "gpu.recovered",
    "gpu.foreign": "gpu.foreign_over",
    "gpu.conflict": "gpu.conflict_over",
    "gpu.cordoned": "gpu.uncordoned",
    "gpu.gone": "",
}
"""What takes a GPU out of use, and what ends that."""


@dataclass
class Nodes:
    """Which GPUs of a node surely serve a request once leases end, as the log goes on."""

    seen: Seen
    gpus: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By node, its GPUs that were ever clean."""
    held: dict[str, str] = field(default_factory=dict)
    """By GPU, its lease."""
    draining: set[str] = field(default_factory=set)
    out: set[tuple[str, str]] = field(default_factory=set)
    """GPUs and nodes, each with what has taken it out of use."""
    reserved: dict[str, set[str]] = field(default_factory=dict)
    """By reservation."""

    def __post_init__(self) -> None:
        self._readings: dict[str, list[Line]] = defaultdict(list)
        for line in self.seen.of["reading"]:
            self.gpus[line["node"]] |= set(line["free"])
            self._readings[line["node"]].append(line)

    def take(self, event: Line) -> None:
        """Go on by one event."""
        kind, gpus, node = event["kind"], set(event["gpus"]), event["node"]
        if kind in ("lease.granted", "lease.revived"):
            self.held |= dict.fromkeys(gpus, event["lease_id"])
            self.draining -= gpus
        elif kind == "lease.ended":
            self.held = {gpu: lease for gpu, lease in self.held.items() if lease != event["lease_id"]}
            self.draining |= gpus
        elif kind == "gpu.clean":
            self.draining -= gpus
        elif kind == "reservation.created":
            self.reserved[(event["reason"] or "").partition(" ")[0]] = gpus
        elif kind.startswith("reservation."):
            self.reserved.pop((event["reason"] or "").partition(" ")[0], None)
        elif kind.startswith("node."):
            is_back = kind in ("node.ready", "node.resumed")
            self.out -= {(node, "mode" if kind == "node.resumed" else "node")} if is_back else set()
            self.out |= (
                {(node, "mode" if kind in ("node.drained", "node.paused") else "node")} if not is_back else set()
            )
        for begins, ends in OUT.items():
            self.out -= {(gpu, begins) for gpu in gpus} if kind == ends else set()
            self.out |= {(gpu, begins) for gpu in gpus} if kind == begins else set()

    def serving(self, node: str, now_s: float) -> set[str]:
        """GPUs of a node that serve anyone once leases end."""
        out = {name for name, _ in self.out}
        if node in out:
            return set()
        clean = [set(one["free"]) for one in self._readings[node] if now_s - LAST_READINGS_S <= one["begun_s"] <= now_s]
        free = set.intersection(*clean) if clean else set()
        return ((free - self.draining) | (self.gpus[node] & self.held.keys())) - out - self.closed

    @property
    def closed(self) -> set[str]:
        """GPUs that are reserved, now or later."""
        return set().union(*self.reserved.values())

    def most(self, count: int) -> int:
        """How many nodes have so many GPUs."""
        return sum(len(gpus) >= count for gpus in self.gpus.values())


@dataclass
class Waiting:
    """The requests that wait, and who has passed each of them."""

    seen: Seen
    demands: dict[str, Line] = field(default_factory=dict)
    """Of those that any GPUs of one node serve."""
    users: dict[str, str | None] = field(default_factory=dict)
    tokens: dict[str, str | None] = field(default_factory=dict)
    """By lease, the bearer token that it was asked for with."""
    sent: dict[str, float] = field(default_factory=dict)
    """By lease, when it was first asked for."""
    since: dict[str, Line] = field(default_factory=dict)
    """By request that waits, the event that said so."""
    limits: dict[str, set[str]] = field(default_factory=dict)
    """The limits that are set, with those whom they limit."""
    preempt: set[str] = field(default_factory=set)
    """Requests for which leases were told to end."""
    placed: dict[str, int] = field(default_factory=dict)
    """By lease without a job, or by job: the event since which it has its place in the queue."""
    nodes: Nodes = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = Nodes(self.seen)
        keys: dict[str, float] = {}
        for line in self.seen.of["asked"]:
            keys[line["key"]] = min(keys.get(line["key"], NEVER), line["sent_s"])
        answered = [lease for _, lease in self.seen.answers()]
        for lease in answered + [line["lease"] for line in self.seen.of["listed"]]:
            name, demand, holder = lease["id"], lease.get("demand"), lease.get("holder", {})
            self.users[name], self.tokens[name] = holder.get("user"), holder.get("token_id")
            if holder.get("label") in keys:
                self.sent[name] = keys[holder["label"]]
            if demand is None or demand.get("nodes", 1) > 1 or any(demand.get(one) for one in SPECIAL):
                continue
            if demand.get("selection", "count") == "count":
                self.demands[name] = demand
        for line in self.seen.of["asked"]:
            if line.get("lease") is not None:
                self.sent[line["lease"]["id"]] = keys[line["key"]]

    def rank(self, lease: str) -> int:
        """The rank of its priority, 0 is the highest."""
        return RANKS.index(self.demands.get(lease, {}).get("priority", "normal"))

    def may_keep_out(self, lease: str) -> bool:
        """True for a request that a limit may keep out."""
        most = max((line["interactive_gpus"] for line in self.seen.of["passes"]), default=0)
        whose = {self.users.get(lease), self.tokens.get(lease)}
        is_limited = any(not whose.isdisjoint(members) for members in self.limits.values())
        return is_limited or (most > 0 and self.rank(lease) == 0)

    def restarts(self, lease: str, now_s: float) -> int:
        """How often a daemon was started while it waited, at most."""
        since_s = min(self.seen.moments(self.since[lease]), default=0.0) - self.seen.tolerance_s
        return sum(since_s <= line["at_s"] <= now_s + self.seen.tolerance_s for line in self.seen.of["started"])

    def events(self) -> Iterator[tuple[Line, list[str]]]:
        """Each grant and each end of one that waits, and the requests that it passes."""
        for event in self.seen.log:
            kind, lease, reason = event["kind"], event["lease_id"], event["reason"] or ""
            self.nodes.take(event)
            if kind in ("lease.queued", "lease.granted"):
                place = self.placed.setdefault(event.get("job_id") or lease, event["seq"])
            if kind == "limits.set":
                name, _, what = reason.partition(": ")
                members = (re.findall(r"members ([\w, ]+), by ", what) or [name.partition(" ")[2]])[0]
                self.limits[name] = set(members.split(", "))
            elif kind == "limits.removed":
                self.limits.pop(reason.partition(", ")[0], None)
            elif kind == "lease.queued":
                self.since[lease] = event | {"seq": place}
            elif kind == "lease.preempting":
                self.preempt.add(reason.split(" ")[1])
            elif kind == "lease.granted":
                yield event, self._passed(event)
                self.since.pop(lease, None)
            elif kind == "lease.ended" and lease in self.since:
                yield event, []
                del self.since[lease]

    def _passed(self, event: Line) -> list[str]:
        granted, moments = event["lease_id"], self.seen.moments(event)
        if len(moments) != 1 or "runs ahead of" in (event["reason"] or "") or granted in self.preempt:
            return []
        serving, gpus = self.nodes.serving(event["node"], moments[0]), set(event["gpus"]) - self.nodes.closed
        if not gpus:
            return []
        return [
            lease
            for lease, queued in self.since.items()
            if lease in self.demands
            and len(serving) >= self.demands[lease]["count"]
            and self.sent.get(granted, 0.0) > max(self.seen.moments(queued), default=NEVER)
            and not self.may_keep_out(lease)
        ]


def newer_ones_pass_within_the_bound(seen: Seen) -> Iterator[str]:
    """A request is passed by newer ones of no higher priority `max_bypass` times on one node, and as often again each
    time that GPUs are held on twice as many; and once by each that goes first, which may be newer where this one did
    not wait for leases when that was chosen. After a restart of the daemon as many again."""
    waiting, times, grants = Waiting(seen), dict[str, int](), dict[str, int]()
    for bounds in seen.of["passes"]:
        for event, passed in waiting.events():
            granted, now_s = event["lease_id"], max(seen.moments(event), default=NEVER)
            for lease in waiting.since if event["kind"] == "lease.granted" else ():
                grants[lease] = grants.get(lease, 0) + 1
            for lease in passed:
                if waiting.rank(granted) < waiting.rank(lease):
                    continue
                times[lease] = times.get(lease, 0) + 1
                sets = 1 + math.ceil(math.log2(max(waiting.nodes.most(waiting.demands[lease]["count"]), 1)))
                most = bounds["max_bypass"] * sets * (waiting.restarts(lease, now_s) + 1)
                if bounds["priorities"]:
                    most += 1 + grants[lease] // (bounds["max_overtakes"] + 1)
                if times[lease] > most:
                    yield f"seq {event['seq']}: {granted} is the {times[lease]}th to pass {lease}, not {most} at most"
                    times[lease] = -1000


def no_request_starves(seen: Seen) -> Iterator[str]:
    """While a request waits and no older one is granted or leaves, few newer ones are granted what it could use,
    whatever their priority and whatever ends for them: those until the oldest goes first, and those that then pass it
    because they fit. As many again for each older one, and after each restart of the daemon."""
    waiting, times = Waiting(seen), dict[str, int]()
    for bounds in seen.of["passes"]:
        for event, passed in waiting.events():
            own, now_s = waiting.since.get(event["lease_id"]), max(seen.moments(event), default=NEVER)
            for lease, queued in waiting.since.items():
                if (own is not None and own["seq"] < queued["seq"]) or waiting.may_keep_out(lease):
                    times[lease] = 0
            for lease in passed:
                times[lease] = times.get(lease, 0) + 1
                sets = 1 + math.ceil(math.log2(max(waiting.nodes.most(waiting.demands[lease]["count"]), 1)))
                before = waiting.since[lease]["seq"]
                older = sum(one["seq"] < before for one in waiting.since.values())
                each = bounds["max_overtakes"] + 1 + bounds["max_bypass"] * sets
                if times[lease] > each * (waiting.restarts(lease, now_s) + 1 + older):
                    yield f"seq {event['seq']}: {times[lease]} newer ones were granted while {lease} waited"
                    times[lease] = -1000
