"""Judges a run by what can be seen from outside. Imports nothing of the product.

It reads the event log, as `GET /v1/events` gives it, and lines that were written down by each witness. All
lines carry `at_s`, when it was seen, on one monotonic clock; a call also has `sent_s`, and `at_s` is null where no
answer came. `what` says which kind of line it is:

    clock     wall_s                            from at_s on the daemon's wall clock shows wall_s + (now - at_s)
    started                                     a daemon was started
    asked     key, count, status, lease|code    POST /v1/leases under an Idempotency-Key
    shown     lease_id, status, lease|code, waited, trusted_from (null: not to be trusted)
    renewed   lease_id, token, status, lease|code
    released  lease_id, token, status, lease|code
    event     event                             a client that follows the log saw it
    reading   node, begun_s, free               a node sent a reading, begun at begun_s, that shows these GPUs clean
    listed    lease                             GET /v1/leases had it in the end; its label is its key
    gave_up   key                               the client died or no longer wants it
    owned     lease_id, pid, liveness           a process that never renews knows that it holds the lease
    let_go    lease_id                          it no longer trusts it, or is dead
    died      pid                               an owner of leases died
    attacked  call, status                      a user tried to act for another
    limit     user, queued                      how many requests of this user may wait at once
    order     max_overtakes, max_bypasses,      so many are granted by priority until the oldest goes first, and
              interactive_gpus                  so many pass it then; GPUs of a user by interactive requests, 0: any
    passes    max_bypass, max_overtakes,        as often newer ones pass on one node, and so many are granted by
              priorities, interactive_gpus      priority until the oldest goes first; not where usage orders
    token budget  token_id, max_gpus, ...       what may be held with a bearer token: see `budget_rules.py`
    preemption  after_s                         leases end for others after so many seconds at least
    submitted   job_id, sent_s                  a job was made, that was first asked for then: see `job_rules.py`
    reclaim   after_s, notice_s, priority       leases of this priority give GPUs back that were idle for so long, at
                                                least so long after they were told; those of no other one do
    worked    gpus, begun_s                     a node has told, and was answered, that these GPUs work
    kept      lease_id, sent_s, for_s           the daemon has confirmed that its idle GPUs are kept for so long
    held      gpus                              by free GPU, the lease that it is held for, where users share by usage
    explained   sent_s, said                    what requests were told of the order, see `explained_rules.py`
    used        whose, sent_s, used_s           what is said that a user or group has used, in GPU-seconds; and `usage
                                                order`: see `usage_rules.py`
    over                                        the run has ended, and everyone had time to be served

`RULES` names each rule with the promise of the design that it guards. A rule returns sentences; none means kept.
"""

from __future__ import annotations

import bisect
import datetime
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.budget_rules import budgets_are_never_passed
from tests.simulation.explained_rules import order_is_as_explained
from tests.simulation.hour_rules import hours_are_never_passed
from tests.simulation.job_rules import (
    preempted_jobs_keep_their_place,
    preempted_jobs_start_again,
    preempted_twice_and_no_more,
)
from tests.simulation.rules_starvation import newer_ones_pass_within_the_bound, no_request_starves
from tests.simulation.usage_rules import less_used_goes_first, usage_is_what_was_held

Line = dict[str, Any]
TOLERANCE_S = 0.06
"""How far a daemon's wall clock may be off the one it was read from: it follows at 0.05 s."""
MAX_AGE_S = 0.5
"""Promise 3: no grant rests on an older reading."""
DRAINED_S = 60.0
"""A GPU on which nothing of its lease is left drains no longer than this, whatever process has its device file open."""
NEVER = float("inf")
LAST_READINGS_S = 3.0
"""What the daemon knows of a GPU is of a reading that is no older, if it grants others of that node."""
MOST_ASKED = 4
"""GPUs that one request asks for, at most."""


@dataclass
class Seen:
    """Everything that is known from outside, sorted by kind."""

    log: list[Line]
    lines: list[Line]
    tolerance_s: float = TOLERANCE_S
    of: dict[str, list[Line]] = field(default_factory=lambda: defaultdict(list))
    owners: dict[str, int | None] = field(default_factory=dict)
    """By lease: the pid of the process that owns it."""
    end_s: float = 0.0
    """When the last thing was seen."""

    def __post_init__(self) -> None:
        for line in self.lines:
            self.of[line["what"]].append(line)
            if (lease := line.get("lease")) is not None and "holder" in lease:
                self.owners[lease["id"]] = lease["holder"].get("owner_pid")
        self.end_s = max((line["at_s"] for line in self.lines if line["at_s"] is not None), default=0.0)

    def events(self, *kinds: str) -> Iterator[Line]:
        """Events of these kinds, in order."""
        return (event for event in self.log if event["kind"] in kinds)

    def answers(self) -> Iterator[tuple[Line, Line]]:
        """Every lease that a client was shown, with the line of the call."""
        for kind in ("asked", "shown", "renewed", "released"):
            for line in self.of[kind]:
                if line["at_s"] is not None and line.get("lease") is not None:
                    yield line, line["lease"]

    def moments(self, event: Line) -> list[float]:
        """When an event was decided, on the monotonic clock: several moments if the wall clock was set back."""
        wall_s = datetime.datetime.fromisoformat(event["at"]).timestamp()
        clocks = sorted(self.of["clock"], key=lambda line: line["at_s"])
        ends = [line["at_s"] for line in clocks[1:]] + [self.end_s]
        found = [
            (line["at_s"] + wall_s - line["wall_s"], line["at_s"], until_s)
            for line, until_s in zip(clocks, ends, strict=True)
        ]
        slack_s = self.tolerance_s
        return [at_s for at_s, since_s, until_s in found if since_s - slack_s <= at_s <= until_s + slack_s]

    def told_end_s(self, line: Line) -> float:
        """When the lease of an answer ends however often it is renewed, as the answer says."""
        told = (line["lease"].get(name) for name in ("ends_at", "preempt_at", "reclaim_at"))
        ends_at = [datetime.datetime.fromisoformat(one).timestamp() for one in told if one is not None]
        if not ends_at:
            return NEVER
        wall_s = min(ends_at)
        clocks = sorted(self.of["clock"], key=lambda one: one["at_s"])
        ends = [one["at_s"] for one in clocks[1:]] + [NEVER]
        found = [
            clock["at_s"] + wall_s - clock["wall_s"]
            for clock, until_s in zip(clocks, ends, strict=True)
            if clock["at_s"] <= line["at_s"] and line["sent_s"] <= until_s
        ]
        return min(found, default=NEVER) - self.tolerance_s


def check(log: Iterable[Line], lines: Iterable[Line], tolerance_s: float = TOLERANCE_S) -> list[str]:
    """Every broken promise, one sentence each, with the rule's name."""
    seen = Seen(list(log), list(lines), tolerance_s)
    return [f"{name}: {sentence}" for name, rule in RULES.items() for sentence in rule(seen)]


def numbered_without_gap(seen: Seen) -> Iterator[str]:
    for place, event in enumerate(seen.log, 1):
        if event["seq"] != place:
            yield f"event {place} of the log has seq {event['seq']}"
            return


def shown_events_stay(seen: Seen) -> Iterator[str]:
    log = {event["seq"]: event for event in seen.log}
    for line in seen.of["event"]:
        if log.get(line["event"]["seq"]) != line["event"]:
            yield f"{line['event']} was shown at {line['at_s']}, and the log says {log.get(line['event']['seq'])}"


def one_holder(seen: Seen) -> Iterator[str]:
    holding: dict[str, str] = {}
    for event in seen.events("lease.granted", "lease.revived", "lease.ended"):
        lease = event["lease_id"]
        for gpu in event["gpus"]:
            if event["kind"] != "lease.ended":
                if holding.get(gpu, lease) != lease:
                    yield f"seq {event['seq']}: {gpu} goes to {lease} while {holding[gpu]} holds it"
                holding[gpu] = lease
            elif holding.get(gpu) == lease:
                del holding[gpu]


def drained_first(seen: Seen) -> Iterator[str]:
    draining: dict[str, str] = {}
    for event in seen.events("lease.granted", "lease.revived", "lease.ended", "gpu.clean", "gpu.gone"):
        for gpu in event["gpus"]:
            if event["kind"] == "lease.ended":
                draining[gpu] = event["lease_id"]
            elif event["kind"] == "lease.granted" and gpu in draining:
                lease = event["lease_id"]
                yield f"seq {event['seq']}: {gpu} is granted to {lease} before it is clean of {draining[gpu]}"
            else:
                draining.pop(gpu, None)


def lives_in_order(seen: Seen) -> Iterator[str]:
    after = {
        "lease.queued": ("",),
        "lease.granted": ("", "lease.queued"),
        "lease.revived": ("lease.ended",),
        "lease.ended": ("lease.queued", "lease.granted", "lease.revived"),
    }
    last: dict[str, str] = {}
    for event in seen.events(*after):
        before = last.get(event["lease_id"], "")
        if before not in after[event["kind"]]:
            yield f"seq {event['seq']}: {event['kind']} of {event['lease_id']} after {before or 'nothing'}"
        last[event["lease_id"]] = event["kind"]


def granted_whole(seen: Seen) -> Iterator[str]:
    wanted = {lease["id"]: lease["demand"]["count"] * _nodes_wanted(lease) for _, lease in seen.answers()}
    for event in seen.events("lease.granted"):
        gpus, count = event["gpus"], wanted.get(event["lease_id"], len(event["gpus"]))
        if not gpus or len(set(gpus)) != len(gpus) or len(gpus) != count:
            yield f"seq {event['seq']}: {event['lease_id']} asked for {count} GPUs and got {gpus}"
    for line, lease in seen.answers():
        on_node: dict[str, set[str]] = defaultdict(set)
        for gpu in lease["gpus"]:
            on_node[gpu["node"]].add(gpu["uuid"])
        counts = [len(gpus) for gpus in on_node.values()]
        if lease["state"] == "active" and counts != [lease["demand"]["count"]] * _nodes_wanted(lease):
            yield f"{lease['id']} was shown at {line['at_s']} with {[gpu['uuid'] for gpu in lease['gpus']]}"


def _nodes_wanted(lease: Line) -> int:
    nodes: int = lease["demand"].get("nodes", 1)
    return nodes


def members_are_one(seen: Seen) -> Iterator[str]:
    """The members of an active gang have all of its GPUs, each once and by rank, and its token."""
    for line, lease in seen.answers():
        if lease["state"] != "active" or _nodes_wanted(lease) == 1:
            continue
        members = lease["members"]
        gpus = [gpu["uuid"] for member in members for gpu in member["gpus"]]
        if gpus != [gpu["uuid"] for gpu in lease["gpus"]] or [one["rank"] for one in members] != list(
            range(_nodes_wanted(lease))
        ):
            yield f"{lease['id']} was shown at {line['at_s']} with members {members}"
        said = {(one["env"]["GPULEASE_LEASE_TOKEN"], one["env"]["MASTER_ADDR"]) for one in members}
        if said != {(str(lease["token"]), members[0]["address"])}:
            yield f"the members of {lease['id']} were told {said} at {line['at_s']}"


def ends_whole(seen: Seen) -> Iterator[str]:
    """A lease ends and revives with every GPU that it was granted."""
    granted = {event["lease_id"]: set(event["gpus"]) for event in seen.events("lease.granted")}
    for event in seen.events("lease.ended", "lease.revived"):
        if event["gpus"] and set(event["gpus"]) != granted.get(event["lease_id"], set()):
            yield f"seq {event['seq']}: {event['kind']} of {event['lease_id']} with {event['gpus']} alone"


def tokens_rise(seen: Seen) -> Iterator[str]:
    last, mine = 0, {}
    for event in seen.events("lease.granted"):
        if event["token"] <= last:
            yield f"seq {event['seq']}: token {event['token']} after {last}"
        last = max(last, event["token"])
        mine[event["lease_id"]] = event["token"]
    for event in seen.events("lease.revived", "lease.ended"):
        if event["token"] != mine.get(event["lease_id"]):
            yield f"seq {event['seq']}: {event['kind']} of {event['lease_id']} with token {event['token']}"


def told_is_kept(seen: Seen) -> Iterator[str]:
    """Grants, queued requests, releases and cancellations that a client was told of are in the log as it was told."""
    granted = {event["lease_id"]: event for event in seen.events("lease.granted")}
    queued = {event["lease_id"] for event in seen.events("lease.queued")}
    ended = {(event["lease_id"], event["reason"]) for event in seen.events("lease.ended")}
    for line, lease in seen.answers():
        event = granted.get(lease["id"])
        if lease["token"] is not None:
            uuids = [gpu["uuid"] for gpu in lease["gpus"]]
            if event is None or (event["token"], sorted(event["gpus"])) != (lease["token"], sorted(uuids)):
                yield f"{lease['id']} with token {lease['token']} and {uuids} was told at {line['at_s']}; log: {event}"
        elif lease["id"] not in queued:
            yield f"{lease['id']} was told to be {lease['state']} at {line['at_s']}, and was never queued"
        if lease["state"] == "ended" and (lease["id"], lease["end_reason"]) not in ended:
            yield f"{lease['id']} was told to have ended ({lease['end_reason']}) at {line['at_s']}, and has not"
    for line in seen.of["released"]:
        over = {(line["lease_id"], "released"), (line["lease_id"], "cancelled")}
        if line.get("status") == 200 and not over & ended:
            yield f"the release of {line['lease_id']} was confirmed at {line['at_s']}, and it has not ended so"


def known_is_found(seen: Seen) -> Iterator[str]:
    """A lease that was told of is found again, its own token is never wrong, and only what has ended is lost."""
    told: dict[str, float] = {}
    tokens = {}
    for line, lease in seen.answers():
        told[lease["id"]] = min(told.get(lease["id"], NEVER), line["at_s"])
        if lease["token"] is not None:
            tokens[lease["id"]] = lease["token"]
    ended = {event["lease_id"] for event in seen.events("lease.ended")}
    for kind in ("shown", "renewed", "released"):
        for line in seen.of[kind]:
            lease, code = line["lease_id"], line.get("code")
            if code == "not_found" and told.get(lease, NEVER) < line["sent_s"]:
                yield f"{lease} was not found at {line['at_s']}, and was told of at {told[lease]}"
            if code == "stale_token" and line.get("token") is not None and line.get("token") == tokens.get(lease):
                yield f"token {line['token']} of {lease} was refused as stale at {line['at_s']}"
            if code == "lease_lost" and lease not in ended:
                yield f"{lease} was called lost at {line['at_s']}, and has never ended"


def released_stays(seen: Seen) -> Iterator[str]:
    """Nothing that a client was told to have released or cancelled lives again."""
    over = {line["lease_id"] for line in seen.of["released"] if line["at_s"] is not None and line["status"] == 200}
    gone: set[str] = set()
    for event in seen.events("lease.ended", "lease.granted", "lease.revived"):
        if event["kind"] == "lease.ended":
            if event["lease_id"] in over and event["reason"] in ("released", "cancelled"):
                gone.add(event["lease_id"])
        elif event["lease_id"] in gone:
            yield f"seq {event['seq']}: {event['kind']} of {event['lease_id']}, whose release was confirmed"


def one_key_one_lease(seen: Seen) -> Iterator[str]:
    """One Idempotency-Key makes at most one lease, also where the answer was lost."""
    made: dict[str, str] = {}
    for line in seen.of["asked"]:
        if line["at_s"] is not None and line.get("lease") is not None:
            first = made.setdefault(line["key"], line["lease"]["id"])
            if first != line["lease"]["id"]:
                yield f"key {line['key']} was answered with {first}, and with {line['lease']['id']} at {line['at_s']}"
    for line in seen.of["listed"]:
        key, found = line["lease"]["holder"]["label"], line["lease"]["id"]
        if key and made.setdefault(key, found) != found:
            yield f"key {key} made {made[key]}, and {found} too"


def not_early(seen: Seen) -> Iterator[str]:
    """Nothing expires before `ttl_s` after the last sign of life that was answered, or after the daemon's start."""
    lives: dict[str, list[tuple[float, float]]] = defaultdict(list)  # (begun, known to have been heard)
    ttl: dict[str, float] = {}
    first_asked = _first_asked(seen)
    for line, lease in seen.answers():
        ttl[lease["id"]] = lease["ttl_s"]
        waits = line["what"] == "shown" and line.get("waited") and lease["state"] == "queued"
        if line["what"] == "renewed" or waits:
            lives[lease["id"]].append((line["sent_s"], line["at_s"]))
        elif line["what"] == "asked":
            lives[lease["id"]].append((first_asked[line["key"]], line["at_s"]))
    for event in seen.events("lease.granted"):
        moment = min(seen.moments(event), default=0.0)
        lives[event["lease_id"]].append((moment, moment))
    starts = [(line["at_s"], line["at_s"]) for line in seen.of["started"]]
    first_seen = {line["event"]["seq"]: line["at_s"] for line in reversed(seen.of["event"])}
    for event in seen.events("lease.ended"):
        if event["reason"] not in ("expired", "holder_died") or event["lease_id"] not in ttl:
            continue
        if event["reason"] == "holder_died" and _owner_died(seen, event):
            continue
        shown_s = first_seen.get(event["seq"], NEVER)
        early_s = NEVER
        for at_s in [at_s for at_s in seen.moments(event) if at_s <= shown_s] or [shown_s]:
            signs = [begun_s for begun_s, heard_s in [*lives[event["lease_id"]], *starts] if heard_s <= at_s]
            early_s = min(early_s, max(signs, default=0.0) + ttl[event["lease_id"]] - at_s)
        if early_s > seen.tolerance_s:
            yield f"seq {event['seq']}: {event['lease_id']} ended as {event['reason']}, {early_s:.3f} s early"


def _owner_died(seen: Seen, event: Line) -> bool:
    """True if the process that owned the lease was dead by then."""
    owner = seen.owners.get(event["lease_id"])
    at_s = max(seen.moments(event), default=NEVER) + seen.tolerance_s
    return any(line["pid"] == owner and line["at_s"] <= at_s for line in seen.of["died"])


def _first_asked(seen: Seen) -> dict[str, float]:
    """When each key was first sent: what was made for it may be as old as that, whichever answer tells of it."""
    first: dict[str, float] = {}
    for line in seen.of["asked"]:
        first[line["key"]] = min(first.get(line["key"], NEVER), line["sent_s"])
    return first


def trusted_by_one(seen: Seen) -> Iterator[str]:
    """By the clients' own clocks: while one may trust that it holds a GPU, no other may."""
    on: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for since_s, until_s, lease in _trusts(seen):
        for gpu in lease["gpus"]:
            on[gpu["uuid"]].append((since_s, until_s, lease["id"]))
    for gpu, held in on.items():
        last: tuple[float, float, str] = (0.0, 0.0, "")
        for since_s, end_s, lease_id in sorted(held):
            if since_s < last[1] and lease_id != last[2]:
                yield f"{gpu}: {lease_id} trusts from {since_s:.3f}, and {last[2]} until {last[1]:.3f}"
            last = max(last, (since_s, end_s, lease_id), key=lambda span: span[1])


def _trusts(seen: Seen) -> Iterator[tuple[float, float, Line]]:
    """From when until when a client may trust which lease: until `ttl_s` after it asked, or until the end that it was
    told, or until it gives back."""
    first_asked, let_go = _first_asked(seen), dict[str, float]()
    for line in seen.of["released"]:
        let_go[line["lease_id"]] = min(let_go.get(line["lease_id"], NEVER), line["sent_s"])
    for line in seen.of["let_go"]:
        let_go[line["lease_id"]] = min(let_go.get(line["lease_id"], NEVER), line["at_s"])
    for line, lease in seen.answers():
        begun_s = first_asked[line["key"]] if line["what"] == "asked" else line.get("trusted_from", line["sent_s"])
        if lease["state"] == "active" and begun_s is not None:
            until_s = min(begun_s + lease["ttl_s"], seen.told_end_s(line), let_go.get(lease["id"], NEVER))
            if line["at_s"] < until_s:
                yield line["at_s"], until_s, lease


def looked_at_first(seen: Seen) -> Iterator[str]:
    """Each granted GPU was shown clean by a reading begun at most 0.5 s before, and after the end of its last lease."""
    if not seen.of["reading"]:
        return
    clean: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in sorted(seen.of["reading"], key=lambda line: line["begun_s"]):
        for gpu in line["free"]:
            clean[gpu].append((line["begun_s"], line["at_s"]))
    ended: dict[str, list[float]] = {}
    for event in seen.events("lease.granted", "lease.ended"):
        moments = seen.moments(event)
        if event["kind"] == "lease.ended":
            ended |= dict.fromkeys(event["gpus"], moments)
            continue
        for gpu in event["gpus"]:
            since_s = min(ended.get(gpu, [0.0]), default=0.0)
            if not any(_clean_at(clean[gpu], at_s, since_s, seen.tolerance_s) for at_s in moments):
                yield f"seq {event['seq']}: {gpu} is granted to {event['lease_id']}, not shown clean just before"


def _clean_at(clean: list[tuple[float, float]], at_s: float, since_s: float, slack_s: float) -> bool:
    """True when one of the readings (begun, sent), in order, was begun late enough and sent by then."""
    first = bisect.bisect_left(clean, (max(at_s - MAX_AGE_S, since_s) - slack_s, 0.0))
    last = bisect.bisect_right(clean, (at_s + slack_s, NEVER))
    return any(sent_s <= at_s + slack_s for _, sent_s in clean[first:last])


def the_living_keep(seen: Seen) -> Iterator[str]:
    """Only the dead are taken for dead. A watched owner loses nothing by silence, its own or its worker's."""
    owned = {line["lease_id"]: line["at_s"] for line in seen.of["owned"] if line["liveness"] == "process"}
    let_go = {line["lease_id"]: line["at_s"] for line in seen.of["let_go"]}
    unwatched: set[str] = set()
    for event in seen.events("lease.unwatched", "lease.ended"):
        lease, reason = event["lease_id"], event["reason"]
        if event["kind"] == "lease.unwatched":
            unwatched.add(lease)
            continue
        at_s = max(seen.moments(event), default=NEVER) + seen.tolerance_s
        if reason == "holder_died" and event["gpus"] and not _owner_died(seen, event):
            yield f"seq {event['seq']}: {lease} ended as holder_died, and process {seen.owners.get(lease)} lived"
        if reason == "expired" and lease not in unwatched and owned.get(lease, NEVER) < at_s < let_go.get(lease, NEVER):
            yield f"seq {event['seq']}: {lease} expired, and its owner lived"


def out_of_use_is_left_alone(seen: Seen) -> Iterator[str]:  # noqa: C901 - one case for each kind of event
    """No grant on a cordoned GPU, nor on a node that is drained, paused or unknown; none revives on a paused one."""
    node_of = {gpu["uuid"]: gpu["node"] for _, lease in seen.answers() for gpu in lease["gpus"]}
    cordoned: set[str] = set()
    modes: dict[str, str] = {}
    unknown: set[str] = set()
    for event in seen.log:
        kind = event["kind"]
        if kind == "gpu.cordoned":
            cordoned |= set(event["gpus"])
        elif kind == "gpu.uncordoned":
            cordoned -= set(event["gpus"])
        elif kind in ("node.drained", "node.paused", "node.resumed"):
            modes[event["node"]] = kind
        elif kind in ("node.unknown", "node.ready"):
            (unknown.add if kind == "node.unknown" else unknown.discard)(event["node"])
        elif kind == "lease.granted":
            if cordoned & set(event["gpus"]):
                yield f"seq {event['seq']}: {event['lease_id']} is given a cordoned GPU of {event['gpus']}"
            out = {node for node, mode in modes.items() if mode != "node.resumed"} | unknown
            for node in sorted(out & _nodes_of(event, node_of)):
                yield f"seq {event['seq']}: {event['lease_id']} is granted on {node}, which is out of use"
        elif kind == "lease.revived":
            paused = {node for node, mode in modes.items() if mode == "node.paused"}
            for node in sorted(paused & _nodes_of(event, node_of)):
                yield f"seq {event['seq']}: {event['lease_id']} revives on {node}, which is paused"


def _nodes_of(event: Line, node_of: dict[str, str]) -> set[str]:
    """The nodes of an event: the one that it names, and those that have its GPUs."""
    return {event["node"], *(node_of[gpu] for gpu in event["gpus"] if gpu in node_of)}


def all_are_served(seen: Seen) -> Iterator[str]:
    """Once everything is calm, everyone who still wants GPUs has had them."""
    if not seen.of["over"]:
        return
    made = {line["key"]: line["lease"]["id"] for line in seen.of["asked"] if line.get("lease")}
    refused = {line["key"] for line in seen.of["asked"] if line.get("final")}
    given_up = {line["key"] for line in seen.of["gave_up"]}
    granted = {event["lease_id"] for event in seen.events("lease.granted")}
    for key in dict.fromkeys(line["key"] for line in seen.of["asked"]):
        if key not in refused | given_up and made.get(key) not in granted:
            yield f"key {key} ({made.get(key)}) was never served"


def clean_in_the_end(seen: Seen) -> Iterator[str]:
    """Once everything is calm, no GPU drains on: nothing of any holder is left then."""
    if not seen.of["over"]:
        return
    left: dict[str, Line] = {}
    for event in seen.events("lease.ended", "lease.revived", "gpu.clean", "gpu.gone"):
        for gpu in event["gpus"]:
            left[gpu] = event
    for gpu, event in left.items():
        since_s = max(seen.moments(event), default=NEVER)
        if event["kind"] == "lease.ended" and since_s < seen.end_s - DRAINED_S:
            yield f"seq {event['seq']}: {gpu} drains of {event['lease_id']} to the end, {seen.end_s - since_s:.0f} s"


def nothing_is_held_in_the_end(seen: Seen) -> Iterator[str]:
    """Once everything is calm and everyone has given up or given back, nothing is held and nothing waits."""
    if not seen.of["over"]:
        return
    for line in seen.of["listed"]:
        lease = line["lease"]
        if lease["state"] != "ended":
            yield f"{lease['id']} of {lease['holder']['label']} is {lease['state']} in the end, and no one wants it"


def no_one_acts_for_another(seen: Seen) -> Iterator[str]:
    for line in seen.of["attacked"]:
        if line["status"] < 300:
            yield f"{line['call']} of another user was answered with {line['status']} at {line['at_s']}"


def queue_is_bounded(seen: Seen) -> Iterator[str]:
    for limit in seen.of["limit"]:
        theirs = {line["lease"]["id"] for line in seen.of["listed"] if line["lease"]["holder"]["user"] == limit["user"]}
        waiting: set[str] = set()
        for event in seen.events("lease.queued", "lease.granted", "lease.ended"):
            (waiting.add if event["kind"] == "lease.queued" else waiting.discard)(event["lease_id"])
            if len(waiting & theirs) > limit["queued"]:
                yield f"seq {event['seq']}: {len(waiting & theirs)} requests of {limit['user']} wait"
                return


@dataclass
class LimitsInForce:
    """What limits are set, and what users hold, as the log goes on."""

    seen: Seen
    limits: dict[str, tuple[set[str], dict[str, int]]] = field(default_factory=dict)
    """By whose they are: the users or the token that they limit, and how many `GPUs` and `leases` these may have."""
    held: dict[str, int] = field(default_factory=dict)
    """By active lease, how many GPUs it has."""
    users: dict[str, str | None] = field(default_factory=dict)
    """By lease."""
    tokens: dict[str, str | None] = field(default_factory=dict)
    """By lease, the id of the bearer token that it was asked for with."""
    interactive: set[str] = field(default_factory=set)
    """The leases of that priority."""

    def __post_init__(self) -> None:
        for line in self.seen.of["listed"]:
            lease = line["lease"]
            self.users[lease["id"]] = lease["holder"].get("user")
            self.tokens[lease["id"]] = lease["holder"].get("token_id")
            if lease.get("demand", {}).get("priority") == "interactive":
                self.interactive.add(lease["id"])

    def is_under(self, lease: str, members: set[str]) -> bool:
        """True for a lease of one of these users, or of this token."""
        return self.users.get(lease) in members or self.tokens.get(lease) in members

    def events(self, *kinds: str) -> Iterator[Line]:
        """Events of these kinds, each before it counts."""
        for event in self.seen.log:
            if event["kind"] in kinds:
                yield event
            self._take(event)

    def _take(self, event: Line) -> None:
        lease, reason = event["lease_id"], event["reason"] or ""
        match event["kind"]:
            case "limits.set":
                name, _, what = reason.partition(": ")
                members = set((re.findall(r"members ([\w, ]+), by ", what) or [name.partition(" ")[2]])[0].split(", "))
                self.limits[name] = members, {unit: int(n) for n, unit in re.findall(r"(\d+) (GPUs|leases)", what)}
            case "limits.removed":
                self.limits.pop(reason.partition(", ")[0], None)
            case "lease.granted" | "lease.revived":
                self.held[lease] = len(event["gpus"])
            case "lease.ended":
                self.held.pop(lease, None)

    @property
    def interactive_gpus(self) -> int:
        """GPUs that each user may have by interactive requests; 0: any number."""
        return max((line.get("interactive_gpus", 0) for line in self.seen.of["order"]), default=0)

    def held_interactively(self, user: str | None) -> int:
        """GPUs that a user holds by interactive requests."""
        theirs = (gpus for lease, gpus in self.held.items() if lease in self.interactive and self.users[lease] == user)
        return sum(theirs)

    def leaves_nothing(self, lease: str, granted: str, gpus: int) -> bool:
        """True where a grant of so many GPUs, which does not count yet, is under the limit that leaves nothing for this
        lease then: that of its user if there is one, else that of the group."""
        held = self.held | {granted: gpus}
        for _, (members, most) in sorted(self.limits.items(), key=lambda item: len(item[1][0])):
            theirs = [number for other, number in held.items() if self.is_under(other, members)]
            has = {"GPUs": sum(theirs), "leases": len(theirs)}
            if self.is_under(lease, members) and any(has[unit] >= number for unit, number in most.items()):
                return self.is_under(granted, members)
        return False

    def may_keep_out(self, lease: str, count: int) -> bool:
        """True for a request that a limit may keep out at this moment. The log does not say what is kept for older
        requests and for those without a verdict: so a user who has a limit may be at it. Of that of interactive
        requests no more can be kept than one of them asks for."""
        if any(self.is_under(lease, members) for members, _ in self.limits.values()):
            return True
        if not self.interactive_gpus or lease not in self.interactive:
            return False
        return self.held_interactively(self.users.get(lease)) + count + MOST_ASKED > self.interactive_gpus


def limits_are_never_passed(seen: Seen) -> Iterator[str]:
    """With each grant, what a user, a group or a token has is within the limits that were last set, and what it had in
    a window of time. Nothing else is bounded."""
    yield from hours_are_never_passed(seen, LimitsInForce(seen))
    now = LimitsInForce(seen)
    for event in now.events("lease.granted", "lease.revived"):
        lease, held = event["lease_id"], now.held | {event["lease_id"]: len(event["gpus"])}
        user = now.users.get(lease)
        for name, (members, most) in now.limits.items():
            theirs = [gpus for other, gpus in held.items() if now.is_under(other, members)]
            has = {"GPUs": sum(theirs), "leases": len(theirs)}
            if now.is_under(lease, members) and any(has[unit] > number for unit, number in most.items()):
                yield f"seq {event['seq']}: with {lease} {name} has {has}, and may have {most}"
        others = now.held_interactively(user) - (now.held.get(lease, 0) if lease in now.interactive else 0)
        if now.interactive_gpus and lease in now.interactive and others + held[lease] > now.interactive_gpus:
            has_all = others + held[lease]
            yield f"seq {event['seq']}: with {lease} {user} has {has_all} interactively, not {now.interactive_gpus}"


def reservations_are_never_crossed(seen: Seen) -> Iterator[str]:
    """With each grant, no reservation of one of its GPUs for someone else begins before the lease must have ended. What
    is told of a reservation says when it is, on the clock that the grant was made by."""
    leases = {line["lease"]["id"]: line["lease"] for line in seen.of["listed"]}
    calendar: dict[str, tuple[set[str], str, datetime.datetime]] = {}
    for event in seen.log:
        name, _, what = (event["reason"] or "").partition(" for user ")
        if event["kind"] == "reservation.created":
            user, from_at = what.split(", ")[0], what.split(", ")[1].partition(" to ")[0]
            calendar[name] = (
                set(event["gpus"]),
                user,
                datetime.datetime.fromisoformat(from_at.replace(" UTC", "+00:00")),
            )
        elif event["kind"].startswith("reservation."):
            calendar.pop(name, None)
        lease = leases.get(event["lease_id"])
        if lease is None or event["kind"] not in ("lease.granted", "lease.revived"):
            continue
        time_s = lease.get("demand", {}).get("time_s")
        if time_s is not None and event["kind"] == "lease.revived":
            continue  # how long it has lasted by then follows from no clock that is seen
        at = datetime.datetime.fromisoformat(event["at"])
        for reservation, (gpus, user, from_at) in calendar.items():
            ends_before = time_s is not None and at + datetime.timedelta(seconds=time_s) <= from_at
            if not (ends_before or user == lease["holder"].get("user") or gpus.isdisjoint(event["gpus"])):
                yield f"seq {event['seq']}: {event['lease_id']} crosses {reservation}, which is for {user}"


RANKS = ("interactive", "normal", "scavenge")


@dataclass
class Queued:
    """The requests that wait, as the log goes on: by lease, the event that said so, in order of arrival."""

    seen: Seen
    demands: dict[str, Line] = field(default_factory=dict)
    """Of those that any GPUs of one node serve."""
    waiting: dict[str, Line] = field(default_factory=dict)
    limits: LimitsInForce = field(init=False)

    def __post_init__(self) -> None:
        self.limits = LimitsInForce(self.seen)
        for _, lease in self.seen.answers():
            demand = lease["demand"]
            special = [demand.get(name) for name in ("node", "gpu_model", "min_free_memory_bytes", "among")]
            if demand.get("selection", "count") == "count" and demand.get("nodes", 1) == 1 and not any(special):
                self.demands[lease["id"]] = demand

    def grants(self, *, ends: bool = False) -> Iterator[tuple[Line, Line | None]]:
        """Each grant, and each end of one that waits if `ends`, with the event that had said that it waits. Meanwhile
        `waiting` has the others."""
        for event in self.limits.events("lease.queued", "lease.granted", "lease.ended"):
            if event["kind"] == "lease.queued":
                self.waiting[event["lease_id"]] = event
                continue
            queued = self.waiting.pop(event["lease_id"], None)
            if event["kind"] == "lease.granted" or (ends and queued is not None):
                yield event, queued

    def restarts(self, waits: Line, event: Line) -> int:
        """How often a daemon was started while a request waited, at most."""
        seen = self.seen
        since_s, now_s = min(seen.moments(waits), default=0.0), max(seen.moments(event), default=NEVER)
        starts = (line["at_s"] for line in seen.of["started"])
        return sum(since_s - seen.tolerance_s <= at_s <= now_s + seen.tolerance_s for at_s in starts)

    def older(self, waits: Line) -> int:
        """How many older requests wait."""
        return sum(one["seq"] < waits["seq"] for one in self.waiting.values())

    def rank(self, lease: str) -> int:
        """The rank of a lease's priority."""
        return RANKS.index(self.demands[lease].get("priority", "normal"))


def higher_priorities_go_first(seen: Seen) -> Iterator[str]:
    """A grant passes no request of higher priority that it would have served, but for those that have waited longest:
    that is one grant of `max_overtakes + 1`, and one more for each limit, which may be granted later. Requests that a
    limit may keep out are passed by all."""
    if not seen.of["order"]:
        return
    queue, most = Queued(seen), seen.of["order"][0]["max_overtakes"] + 1
    grants, turns, passes = 0, 0, 0
    for event, queued in queue.grants():
        granted, grants = event["lease_id"], grants + 1
        if grants % most == 0:
            turns += 1 + len(queue.limits.limits)
        if granted not in queue.demands:
            continue
        rank, count = queue.rank(granted), queue.demands[granted]["count"]
        passed = [
            lease
            for lease in queue.waiting
            if lease in queue.demands
            and queue.rank(lease) < rank
            and queue.demands[lease]["count"] <= count
            and not queue.limits.may_keep_out(lease, queue.demands[lease]["count"])
        ]
        if not passed:
            continue
        passes += 1
        if queued is None or passes > turns + 1:
            yield f"seq {event['seq']}: {granted} is granted while {passed} of higher priority wait"


def longest_waiting_goes_first(seen: Seen) -> Iterator[str]:
    """While a request for one GPU waits and no older one is granted or ends, few newer ones are granted: those until
    the oldest goes first, and those that then pass it because they fit. After a restart of the daemon as many again,
    and for each older one, which goes first before it. For one that a limit may keep out see
    `limits_are_shared_in_turn`."""
    if not seen.of["order"]:
        return
    most = seen.of["order"][0]["max_overtakes"] + seen.of["order"][0]["max_bypasses"] + 1
    queue, times = Queued(seen), dict[str, int]()
    for event, queued in queue.grants(ends=True):
        place = NEVER if queued is None else queued["seq"]
        for lease, waits in queue.waiting.items():
            if place < waits["seq"] or queue.limits.may_keep_out(lease, 1):
                times[lease] = 0
            elif event["kind"] == "lease.granted":
                times[lease] = times.get(lease, 0) + 1
            if times.get(lease, 0) <= most or queue.demands.get(lease, {}).get("count") != 1:
                continue
            if times[lease] > most * (queue.restarts(waits, event) + 1 + queue.older(waits)):
                yield f"seq {event['seq']}: {times[lease]} newer ones were granted while {lease} waited"
                return


def limits_are_shared_in_turn(seen: Seen) -> Iterator[str]:
    """While a request for one GPU waits for a limit and no older one is granted or ends, few newer ones are granted
    that leave it nothing of that limit, of whatever priority: as many as with GPUs. Of a user's limit and that of their
    group the user's own counts where both leave nothing."""
    if not seen.of["order"]:
        return
    most = seen.of["order"][0]["max_overtakes"] + seen.of["order"][0]["max_bypasses"] + 1
    queue, times = Queued(seen), dict[str, int]()
    for event, queued in queue.grants(ends=True):
        place = NEVER if queued is None else queued["seq"]
        granted, gpus = event["lease_id"], len(event["gpus"]) if event["kind"] == "lease.granted" else 0
        for lease, waits in queue.waiting.items():
            if place < waits["seq"]:
                times[lease] = 0
            elif gpus and queue.demands.get(lease, {}).get("count") == 1 and queue.rank(lease) > 0:
                times[lease] = times.get(lease, 0) + queue.limits.leaves_nothing(lease, granted, gpus)
                if times[lease] > most * (queue.restarts(waits, event) + 1 + queue.older(waits)):
                    yield f"seq {event['seq']}: {times[lease]} newer ones had the limit that {lease} waited for"
                    return


@dataclass
class HeldPlace:
    """A request that has only a part of its GPUs, which are held for it."""

    most: int
    """GPUs that its user had at most when these were first seen to be held."""
    behind: set[str | None] = field(default_factory=set)
    """Users who have had so many more since that they were behind it, whatever they had used."""
    taken: list[str] = field(default_factory=list)
    """What speaks against it, if GPUs are held for it when that is looked at again."""


@dataclass
class HeldPlaces:
    """The requests that GPUs are held for, as time goes on."""

    seen: Seen
    places: dict[str, HeldPlace] = field(default_factory=dict)
    has: dict[str | None, int] = field(default_factory=lambda: defaultdict(int))
    """By user, the GPUs of their leases."""
    had: dict[str | None, int] = field(default_factory=dict)
    """The most of these since the last look."""

    def __post_init__(self) -> None:
        self.users = {line["lease"]["id"]: line["lease"]["holder"].get("user") for line in self.seen.of["listed"]}
        self.counts = {lease["id"]: lease["demand"]["count"] for _, lease in self.seen.answers()}

    def look(self, held: dict[str, str]) -> Iterator[str]:
        """What is held now. Gives what broke the rule since the last look."""
        waiting = set(held.values())
        by_user = [self.users.get(lease) for lease in waiting]
        for lease in {*waiting, *self.places}:
            is_part = 0 < list(held.values()).count(lease) < self.counts.get(lease, 0)
            user = self.users.get(lease)
            if lease not in waiting or not is_part or by_user.count(user) != 1:
                self.places.pop(lease, None)
            elif lease in self.places:
                yield from self.places[lease].taken
                self.places[lease].taken = []
            else:
                self.places[lease] = HeldPlace(max(self.has[user], self.had.get(user, 0)))
        self.had = dict(self.has)
        self._put_behind()

    def granted(self, event: Line) -> None:
        """Someone has got GPUs. One whose lease revives has them still: they were not clean since."""
        lease, user = event["lease_id"], self.users.get(event["lease_id"])
        self.places.pop(lease, None)
        for owner, place in self.places.items():
            ahead = "runs ahead of" in (event["reason"] or "")  # judged by `no_one_is_delayed_by_who_runs_ahead`
            passes = event["kind"] == "lease.granted" and user in place.behind and user != self.users.get(owner)
            if passes and not ahead:
                place.taken.append(f"seq {event['seq']}: {lease} is granted {event['gpus']}, needed by {owner}")
        self.has[user] += len(event["gpus"])
        self.had[user] = max(self.had.get(user, 0), self.has[user])
        self._put_behind()

    def ended(self, event: Line) -> None:
        """Someone has GPUs no more, or leaves the queue."""
        self.places.pop(event["lease_id"], None)
        self.has[self.users.get(event["lease_id"])] -= len(event["gpus"])

    def _put_behind(self) -> None:
        for place in self.places.values():
            place.behind |= {user for user, gpus in self.has.items() if gpus >= place.most + 2}


def held_places_are_kept(seen: Seen) -> Iterator[str]:
    """While GPUs are held for a request, a user who was behind it since then gets none, however much less they have by
    then: there is one node, of which all may have each GPU. Each lease counts for a GPU-hour while it is held, and all
    that was used for less than one: so a user with two GPUs more is behind. Not over a restart or the silence of a
    node, and not for a second request of a user."""
    now, happened = HeldPlaces(seen), list[tuple[float, int, str, Line]]()
    if not seen.of["held"]:
        return
    for number, event in enumerate(seen.events("lease.granted", "lease.revived", "lease.ended", "node.unknown")):
        moments = seen.moments(event)
        at_s = moments[0] if len(moments) == 1 else happened[-1][0] if happened else 0.0
        happened.append((at_s, number, event["kind"] if len(moments) == 1 else f"{event['kind']}, some time", event))
    lines = [*seen.of["held"], *seen.of["started"]]
    happened += [(line["at_s"], -1, line["what"], line) for line in lines]
    for _, _, what, line in sorted(happened, key=lambda one: one[:2]):
        if what == "held":
            yield from now.look(line["gpus"])
        elif what.startswith("lease.ended"):
            now.ended(line)
        elif what.startswith("lease."):
            now.granted(line)
        if what not in ("held", "lease.granted", "lease.revived", "lease.ended"):
            now.places.clear()


@dataclass
class KnownEnds:
    """From when on the GPUs of a node may serve a request, as the log goes on. Only what is certain is known."""

    seen: Seen
    users: dict[str, str | None] = field(default_factory=dict)
    times: dict[str, float | None] = field(default_factory=dict)
    """By lease, the time that it has declared."""
    held: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By GPU, the lease that has it, and since when."""
    passed: dict[str, set[str]] = field(default_factory=dict)
    """By lease, those that it ran ahead of."""
    nodes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By node, its GPUs that were ever clean."""
    out_of_use: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for line in self.seen.of["reading"]:
            self.nodes[line["node"]] |= set(line["free"])
        for lease in [lease for _, lease in self.seen.answers()] + [line["lease"] for line in self.seen.of["listed"]]:
            if "demand" in lease:
                self.times[lease["id"]] = lease["demand"].get("time_s")
                self.users[lease["id"]] = lease.get("holder", {}).get("user")

    def take(self, event: Line) -> None:
        """Go on by one event."""
        lease, kind = event["lease_id"], event["kind"]
        if kind in ("gpu.unhealthy", "gpu.prohibited", "gpu.cordoned"):
            self.out_of_use.update(event["gpus"])
        elif kind in ("lease.granted", "lease.revived", "lease.ended"):
            self.held = {gpu: one for gpu, one in self.held.items() if one[0] != lease}
            self.passed.pop(lease, None)
        if kind in ("lease.granted", "lease.revived"):
            now_s = max(self.seen.moments(event), default=NEVER)
            self.held |= dict.fromkeys(event["gpus"], (lease, now_s))
            self.passed[lease] = set(runs_ahead_of(event))

    def free_from(self, event: Line, older: str, now_s: float, waiting: Collection[str]) -> list[float]:
        """From when on GPUs of the node of a grant may serve an older request, but for those of the grant: now where
        they are clean, leased without a time or to one that ran ahead of it too, or to the user of the grant, while
        others wait. By its time alone a lease ends as long as no restart has given it more."""
        granted, found = event["lease_id"], list[float]()
        user = self.users.get(granted)
        others_wait = any(self.users.get(lease) not in (None, user) for lease in waiting)
        started_s = max((one["at_s"] for one in self.seen.of["started"] if one["at_s"] <= now_s), default=0.0)
        clean = self._surely_clean(event, now_s) - self.out_of_use
        for gpu in self.nodes[event["node"]] - set(event["gpus"]):
            lease, since_s = self.held.get(gpu, ("", 0.0))
            if not lease:
                found += [now_s] if gpu in clean else []
            elif lease in self.times and gpu not in self.out_of_use:
                time_s = self.times[lease]
                own = others_wait and user is not None and self.users.get(lease) == user
                if time_s is None or own or (since_s > started_s and older in self.passed.get(lease, ())):
                    found.append(now_s)
                elif since_s > started_s:
                    found.append(since_s + time_s)
        return sorted(found)

    def _surely_clean(self, event: Line, now_s: float) -> set[str]:
        """The GPUs that are clean by each reading that the daemon may have last had of the node."""
        if len(self.seen.moments(event)) != 1:
            return set()
        since_s = now_s - LAST_READINGS_S
        readings = [line for line in self.seen.of["reading"] if line["node"] == event["node"]]
        recent = [set(line["free"]) for line in readings if since_s <= line["begun_s"] <= now_s]
        return set.intersection(*recent) if recent else set()


def runs_ahead_of(event: Line) -> list[str]:
    """The requests that a grant runs ahead of, as the log says."""
    return re.findall(r"(lease-\w+|[A-Z])\b", (event["reason"] or "").partition("runs ahead of ")[2])


def no_one_is_delayed_by_who_runs_ahead(seen: Seen) -> Iterator[str]:
    """A grant that the log says runs ahead of others, and does not delay them, ends by its declared time before as many
    GPUs of its node may be free as they ask for."""
    queue, known = Queued(seen), KnownEnds(seen)
    for event in seen.log:
        granted, taken = event["lease_id"], set(event["gpus"])
        if event["kind"] == "lease.queued":
            queue.waiting[granted] = event
        elif event["kind"] in ("lease.granted", "lease.revived", "lease.ended"):
            queue.waiting.pop(granted, None)
        known.take(event)
        if event["kind"] not in ("lease.granted", "lease.revived"):
            continue
        now_s, time_s = max(seen.moments(event), default=NEVER), known.times.get(granted)
        for older in runs_ahead_of(event):
            count = queue.demands.get(older, {}).get("count")
            if older not in queue.waiting or time_s is None:
                yield f"seq {event['seq']}: {granted} is said to run ahead of {older}, with a time of {time_s}"
            elif count is not None and taken <= known.nodes[event["node"]]:
                free_s = sorted([now_s for _ in taken] + known.free_from(event, older, now_s, queue.waiting))
                served_s = free_s[count - 1] if count <= len(free_s) else NEVER
                if now_s + time_s > served_s + seen.tolerance_s:
                    in_s = served_s - now_s
                    yield f"seq {event['seq']}: {granted} of {time_s} s keeps GPUs that {older} may have in {in_s} s"


WAITS_FOR = re.compile(r"^(?:preempted )?for (\S+) of user ")


def only_what_opted_in_is_preempted(seen: Seen) -> Iterator[str]:
    """Only leases that are preemptible are told to end, for requests that are not."""
    listed = (line["lease"] for line in seen.of["listed"])
    demands = {lease["id"]: lease.get("demand", {}) for lease in [*listed, *(lease for _, lease in seen.answers())]}
    for event in seen.events("lease.preempting"):
        waits = WAITS_FOR.match(event["reason"])
        own, other = (
            demands.get(one, {}).get("preemptible") for one in (event["lease_id"], waits.group(1) if waits else "")
        )
        if own is False or other:
            yield f"seq {event['seq']}: {event['lease_id']}, preemptible: {own}, is to end for one with {other}"


def preempted_after_the_minimum(seen: Seen) -> Iterator[str]:
    """No lease is told to end before it has held its GPUs for as long as was promised."""
    granted = {event["lease_id"]: event for event in seen.events("lease.granted")}
    for line in seen.of["preemption"]:
        for event in seen.events("lease.preempting"):
            since_s = min(seen.moments(granted[event["lease_id"]]), default=0.0)
            held_s = max(seen.moments(event), default=NEVER) - since_s
            if held_s < line["after_s"] - seen.tolerance_s:
                yield f"seq {event['seq']}: {event['lease_id']} is to end after {held_s:.3f} s"


@dataclass
class GivenBack:
    """By request, and lease that ended for it, the GPUs that no one else has got since."""

    gpus: dict[str, dict[str, set[str]]] = field(default_factory=lambda: defaultdict(dict))
    _gone: set[str] = field(default_factory=set)
    """Requests for which nothing is held any more."""
    _waits_of: dict[str, str] = field(default_factory=dict)
    """By lease that is to end, the request for which it does."""
    _ended: dict[str, list[str]] = field(default_factory=dict)

    def take(self, event: Line) -> None:
        """Go on by one event."""
        lease, kind, waits = event["lease_id"], event["kind"], WAITS_FOR.match(event["reason"] or "")
        if kind in ("lease.granted", "lease.ended"):
            self._ended[lease] = event["gpus"]
            self._leave(lease)
        elif kind == "lease.preemption_withdrawn":
            self._leave(self._waits_of.get(lease, ""))
        elif kind == "lease.preempting" and waits is not None:
            self._waits_of[lease] = waits.group(1)
        elif kind == "lease.preempted" and waits is not None and waits.group(1) not in self._gone:
            self.gpus[waits.group(1)][lease] = set(self._ended.get(lease, ()))

    def _leave(self, request: str) -> None:
        self._gone.add(request)
        self.gpus.pop(request, None)


def who_preempts_starts(seen: Seen) -> Iterator[str]:
    """The request for which leases have ended is granted, or leaves; until then no one else gets all of the GPUs that a
    lease has given back for it, but for those that are reserved meanwhile. Jobs that were told to end do so also where
    it has left, or others keep their GPUs after all."""
    reserved, gave = set[str](), GivenBack()
    for event in seen.log:
        gave.take(event)
        if event["kind"] == "reservation.created":
            reserved |= set(event["gpus"])
        for waits_for, victims in gave.gpus.items() if event["kind"] == "lease.granted" else ():
            for victim, gpus in victims.items():
                if gpus and not (gpus := gpus - set(event["gpus"])) and reserved.isdisjoint(event["gpus"]):
                    yield f"seq {event['seq']}: {event['lease_id']} has what {victim} gave back for {waits_for}"
                victims[victim] = gpus
    if seen.of["over"]:
        yield from (
            f"{lease} never started, and {sorted(victims)} ended for it" for lease, victims in gave.gpus.items()
        )


RECLAIMED_FOR = re.compile(r"^for (\S+): ")


def only_what_agreed_is_reclaimed(seen: Seen) -> Iterator[str]:
    """Only leases of the priority that an administrator's rule names are told that GPUs are taken back, and end so."""
    demands = {lease["id"]: lease["demand"] for _, lease in seen.answers()}
    for line in seen.of["reclaim"]:
        for event in seen.events("lease.reclaim_notice", "lease.reclaimed"):
            own = demands.get(event["lease_id"], {}).get("priority")
            if own not in (None, line["priority"]):
                yield f"seq {event['seq']}: {event['kind']} of {event['lease_id']}, of priority {own}"


def reclaimed_at_the_moment(seen: Seen) -> Iterator[str]:
    """A lease ends for being idle no sooner than was promised after it was told, by the daemon that ends it."""
    for line in seen.of["reclaim"]:
        told: dict[str, float] = {}
        for event in seen.events("lease.reclaim_notice", "lease.reclaim_withdrawn", "lease.reclaimed"):
            lease, at_s = event["lease_id"], max(seen.moments(event), default=NEVER)
            if event["kind"] == "lease.reclaim_notice":
                told[lease] = min(seen.moments(event), default=0.0)
            elif event["kind"] == "lease.reclaim_withdrawn":
                told.pop(lease, None)
            elif lease not in told or at_s - told[lease] < line["notice_s"] - seen.tolerance_s:
                yield f"seq {event['seq']}: {lease} is taken back at {at_s:.3f}, and was told at {told.get(lease)}"
            elif any(told[lease] < one["at_s"] <= at_s for one in seen.of["started"]):
                yield f"seq {event['seq']}: {lease} was told by a daemon that has ended since"


def only_idle_gpus_are_reclaimed(seen: Seen) -> Iterator[str]:
    """No reading has shown work on any GPU of a lease that ends for being idle: from so long before its notice as was
    promised, until its end."""
    worked: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in seen.of["worked"]:
        for gpu in line["gpus"]:
            worked[gpu].append((line["begun_s"], line["at_s"]))
    told: dict[str, float] = {}
    for line in seen.of["reclaim"]:
        for event in seen.events("lease.reclaim_notice", "lease.reclaimed"):
            lease, moments = event["lease_id"], seen.moments(event)
            if event["kind"] == "lease.reclaim_notice":
                told[lease] = max(moments, default=NEVER)
                continue
            since_s = told.get(lease, NEVER) - line["after_s"] + seen.tolerance_s
            until_s = min(moments, default=0.0) - seen.tolerance_s
            for gpu in event["gpus"]:
                found = [begun_s for begun_s, at_s in worked[gpu] if begun_s > since_s and at_s < until_s]
                if found:
                    yield f"seq {event['seq']}: {lease} is taken back, and {gpu} worked at {found[-1]:.3f}"


def what_is_kept_is_not_reclaimed(seen: Seen) -> Iterator[str]:
    kept = {line["lease_id"]: line for line in seen.of["kept"]}
    for event in seen.events("lease.reclaimed"):
        line = kept.get(event["lease_id"])
        if line is None:
            continue
        at_s = max(seen.moments(event), default=NEVER)
        if line["at_s"] + seen.tolerance_s < at_s < line["sent_s"] + line["for_s"] - seen.tolerance_s:
            yield f"seq {event['seq']}: {event['lease_id']} is taken back at {at_s:.3f}, and is kept until later"


def reclaimed_for_who_waits(seen: Seen) -> Iterator[str]:
    """Idle leases end for a request that waits then; of several at once for the same one none could have stayed."""
    counts = {lease["id"]: lease["demand"]["count"] for _, lease in seen.answers()}
    waiting: set[str] = set()
    at_once: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event in seen.events("lease.queued", "lease.granted", "lease.ended", "lease.reclaimed"):
        if event["kind"] == "lease.queued":
            waiting.add(event["lease_id"])
        elif event["kind"] != "lease.reclaimed":
            waiting.discard(event["lease_id"])
        else:
            named = RECLAIMED_FOR.match(event["reason"])
            waits = named.group(1) if named else ""
            sizes = at_once[waits, event["at"]]
            sizes.append(len(event["gpus"]))
            if waits not in waiting:
                yield f"seq {event['seq']}: {event['lease_id']} is taken back for {waits or 'no one'}, not in the queue"
            elif sum(sizes) - min(sizes) >= counts.get(waits, MOST_ASKED):
                yield f"seq {event['seq']}: {sizes} GPUs are taken back for {waits}, that asks for {counts.get(waits)}"


RULES: dict[str, Callable[[Seen], Iterator[str]]] = {
    "seq without gap or repeat": numbered_without_gap,
    "what readers were shown stays (6)": shown_events_stay,
    "a GPU has one holder (1)": one_holder,
    "a GPU drains before it is granted again (5)": drained_first,
    "queued, granted, ended, in that order": lives_in_order,
    "all or none (2)": granted_whole,
    "a gang is one lease on all of its nodes (2)": members_are_one,
    "all or none in the end, too (2)": ends_whole,
    "tokens rise and are never used twice": tokens_rise,
    "what was told is kept (6)": told_is_kept,
    "what was told of is found again (6)": known_is_found,
    "what was released stays released (6)": released_stays,
    "one key, one lease": one_key_one_lease,
    "nothing ends early (7)": not_early,
    "two holders never trust at once (1, 7)": trusted_by_one,
    "nothing is granted unseen (3, 4, 5, 13)": looked_at_first,
    "out of use is out of use (4)": out_of_use_is_left_alone,
    "higher priorities go first (8)": higher_priorities_go_first,
    "who has waited longest has a turn (8)": longest_waiting_goes_first,
    "limits are shared in turn (8)": limits_are_shared_in_turn,
    "newer ones pass within the bound (8)": newer_ones_pass_within_the_bound,
    "no request starves (8)": no_request_starves,
    "what GPUs are held for keeps its place (8)": held_places_are_kept,
    "usage is what was held, however it was asked for (8)": usage_is_what_was_held,
    "groups and users that have used less go first (8)": less_used_goes_first,
    "the order is as explained (8)": order_is_as_explained,
    "no one is delayed by who runs ahead (8)": no_one_is_delayed_by_who_runs_ahead,
    "all are served in the end (8)": all_are_served,
    "nothing drains forever (5)": clean_in_the_end,
    "a living owner keeps its lease (7, 12)": the_living_keep,
    "nothing is held forever (11, 12)": nothing_is_held_in_the_end,
    "no one acts for another user (15)": no_one_acts_for_another,
    "one user's queue is bounded (15)": queue_is_bounded,
    "limits are never passed (15)": limits_are_never_passed,
    "budgets of tokens are never passed (15)": budgets_are_never_passed,
    "reservations are never crossed (4)": reservations_are_never_crossed,
    "only what opted in is preempted (7)": only_what_opted_in_is_preempted,
    "nothing is preempted before the minimum (7)": preempted_after_the_minimum,
    "who preempts starts (7, 8)": who_preempts_starts,
    "a job that was preempted keeps its place (8)": preempted_jobs_keep_their_place,
    "a job is preempted twice at most (7)": preempted_twice_and_no_more,
    "a job that was preempted starts again (8)": preempted_jobs_start_again,
    "only what agreed is taken back (7)": only_what_agreed_is_reclaimed,
    "nothing is taken back before its moment (7)": reclaimed_at_the_moment,
    "what works is not taken back (7)": only_idle_gpus_are_reclaimed,
    "what is kept is not taken back (7)": what_is_kept_is_not_reclaimed,
    "idle GPUs are taken back for who waits, and no more than they need (8)": reclaimed_for_who_waits,
}
"""Each rule by what it says, with the number of the promise."""
