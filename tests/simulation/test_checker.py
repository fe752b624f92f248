"""The checker finds what it is there for: a good log passes, and for each rule a log that is bad in that alone."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.checker import RULES, check

Line = dict[str, Any]
NOON_S = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC).timestamp()


def at(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(NOON_S + seconds, datetime.UTC).isoformat()


def event(kind: str, at_s: float, **what: Any) -> Line:
    return {"seq": 0, "at": at(at_s), "kind": kind, "lease_id": None, "node": "a", "gpus": [], "token": None} | {
        "reason": None,
        **what,
    }


def lease(name: str, state: str = "active", token: int | None = 1, *gpus: str, **what: Any) -> Line:
    shown = [{"uuid": gpu, "node": "a"} for gpu in gpus]
    return {"id": name, "state": state, "token": token, "gpus": shown, "ttl_s": 5.0, "end_reason": None} | {
        "demand": {"count": what.pop("count", len(gpus) or 1)},
        **what,
    }


def numbered(log: list[Line]) -> list[Line]:
    return [one | {"seq": seq} for seq, one in enumerate(log, 1)]


class Run:
    """Lease A holds g1 and g2, is renewed and released; then B, which has waited, gets g1."""

    def __init__(self) -> None:
        self.log = numbered(
            [
                event("node.ready", 0.5),
                event("lease.granted", 1.0, lease_id="A", gpus=["g1", "g2"], token=1),
                event("lease.queued", 2.0, lease_id="B"),
                event("lease.ended", 4.0, lease_id="A", gpus=["g1", "g2"], token=1, reason="released"),
                event("gpu.clean", 4.1, lease_id="A", gpus=["g1"]),
                event("gpu.clean", 4.1, lease_id="A", gpus=["g2"]),
                event("lease.granted", 4.1, lease_id="B", gpus=["g1"], token=2),
                event("lease.ended", 9.2, lease_id="B", gpus=["g1"], token=2, reason="expired"),
            ]
        )
        released = lease("A", "ended", 1, "g1", "g2", end_reason="released")
        self.lines: list[Line] = [
            {"what": "clock", "at_s": 0.0, "wall_s": NOON_S},
            {"what": "started", "at_s": 0.0},
            {"what": "reading", "node": "a", "begun_s": 0.8, "at_s": 0.9, "free": ["g1", "g2"]},
            {"what": "asked", "key": "a", "sent_s": 0.9, "at_s": None},
            {"what": "asked", "key": "a", "sent_s": 1.2, "at_s": 1.3, "status": 201}
            | {"lease": lease("A", "active", 1, "g1", "g2")},
            {"what": "asked", "key": "b", "sent_s": 1.9, "at_s": 2.1, "status": 202}
            | {"lease": lease("B", "queued", None)},
            {"what": "renewed", "lease_id": "A", "token": 1, "sent_s": 3.0, "at_s": 3.1, "status": 200}
            | {"lease": lease("A", "active", 1, "g1", "g2")},
            {"what": "released", "lease_id": "A", "token": 1, "sent_s": 3.9, "at_s": 4.2, "status": 200}
            | {"lease": released},
            {"what": "reading", "node": "a", "begun_s": 4.05, "at_s": 4.08, "free": ["g1", "g2"]},
            {"what": "shown", "lease_id": "B", "sent_s": 2.2, "at_s": 4.3, "status": 200, "waited": True}
            | {"lease": lease("B", "active", 2, "g1")},
            {"what": "event", "at_s": 5.0, "event": self.log[1]},
            {"what": "over", "at_s": 20.0},
        ]

    def find(self, **what: Any) -> Line:
        """The one event or line with these values."""
        (found,) = (one for one in [*self.log, *self.lines] if what.items() <= one.items())
        return found

    def renumber(self) -> None:
        self.log[:] = numbered(self.log)


def judge(run: Run) -> set[str]:
    return {sentence.partition(": ")[0] for sentence in check(run.log, run.lines)}


def gap(run: Run) -> None:
    run.log[-1]["seq"] += 1


def event_undone(run: Run) -> None:
    run.lines.append({"what": "event", "at_s": 9.0, "event": event("gpu.clean", 8.0, gpus=["g1"]) | {"seq": 9}})


def two_holders(run: Run) -> None:
    run.log.insert(7, event("lease.granted", 4.15, lease_id="C", gpus=["g1"], token=3))
    run.renumber()


def not_drained(run: Run) -> None:
    run.log.remove(run.find(kind="gpu.clean", gpus=["g1"]))
    run.renumber()


def granted_twice(run: Run) -> None:
    run.log.append(event("lease.granted", 4.15, lease_id="B", gpus=["g2"], token=3))
    run.renumber()


def half_a_gang(run: Run) -> None:
    run.find(kind="lease.granted", lease_id="A")["gpus"] = ["g1"]


def as_gang(run: Run) -> list[Line]:
    """A is a gang, with g1 on node a and g2 on node b; its lines."""
    found = [line["lease"] for line in run.lines if line.get("lease", {}).get("id") == "A"]
    for one in found:
        one["demand"] = {"count": 1, "nodes": 2}
        one["gpus"] = [{"uuid": "g1", "node": "a"}, {"uuid": "g2", "node": "b"}]
        env = {"GPULEASE_LEASE_TOKEN": "1", "MASTER_ADDR": "10.0.0.1"}
        one["members"] = [
            {"rank": rank, "node": gpu["node"], "address": f"10.0.0.{rank + 1}", "gpus": [gpu], "env": env}
            for rank, gpu in enumerate(one["gpus"])
        ]
    return found


def a_gang_on_one_node(run: Run) -> None:
    as_gang(run)[0]["gpus"][1]["node"] = "a"


def a_member_missing(run: Run) -> None:
    as_gang(run)[0]["members"].pop()


def a_member_with_another_token(run: Run) -> None:
    member = as_gang(run)[0]["members"][1]
    member["env"] = member["env"] | {"GPULEASE_LEASE_TOKEN": "2"}


def ends_on_one_node(run: Run) -> None:
    run.find(kind="lease.ended", lease_id="A")["gpus"] = ["g1"]


def second_node_drained(run: Run) -> None:
    as_gang(run)
    run.log.insert(1, event("node.drained", 0.6, node="b"))
    run.renumber()


def token_again(run: Run) -> None:
    run.find(kind="lease.granted", lease_id="B")["token"] = 1


def grant_lost(run: Run) -> None:
    run.log.remove(run.find(kind="lease.granted", lease_id="A"))
    run.renumber()


def release_lost(run: Run) -> None:
    run.find(kind="lease.ended", lease_id="A")["reason"] = "expired"


def lease_not_found(run: Run) -> None:
    run.lines.append({"what": "renewed", "lease_id": "A", "token": 1, "sent_s": 3.5, "at_s": 3.6, "status": 404})
    run.lines[-1]["code"] = "not_found"


def right_token_refused(run: Run) -> None:
    run.lines.append({"what": "renewed", "lease_id": "A", "token": 1, "sent_s": 3.5, "at_s": 3.6, "status": 412})
    run.lines[-1]["code"] = "stale_token"


def released_revives(run: Run) -> None:
    run.log.append(event("lease.revived", 4.12, lease_id="A", gpus=["g2"], token=1))
    run.renumber()


def key_lost(run: Run) -> None:
    again = {"what": "asked", "key": "b", "sent_s": 2.5, "at_s": 2.6, "status": 202}
    run.lines.append(again | {"lease": lease("C", "queued", None)})
    run.log.append(event("lease.queued", 2.5, lease_id="C"))
    run.renumber()


def lease_of_no_one(run: Run) -> None:
    run.lines.append({"what": "listed", "at_s": 20.0, "lease": {"id": "X", "holder": {"label": "a"}, "state": "ended"}})


def early(run: Run) -> None:
    run.find(kind="lease.ended", lease_id="B")["at"] = at(8.9)


def early_after_a_start(run: Run) -> None:
    run.lines.append({"what": "started", "at_s": 6.0})


def early_by_the_wall_clock(run: Run) -> None:
    run.lines.append({"what": "clock", "at_s": 5.0, "wall_s": NOON_S + 3605.0})
    run.find(kind="lease.ended", lease_id="B")["at"] = at(3606.0)


def two_trust(run: Run) -> None:
    shared = {"what": "renewed", "lease_id": "C", "token": 3, "sent_s": 3.5, "at_s": 3.6, "status": 200}
    run.lines.append(shared | {"lease": lease("C", "active", 3, "g2")})


def old_reading(run: Run) -> None:
    run.find(what="reading", at_s=0.9)["begun_s"] = 0.3


def reading_before_the_end(run: Run) -> None:
    run.find(what="reading", at_s=4.08)["begun_s"] = 3.9


def occupied(run: Run) -> None:
    run.find(what="reading", at_s=4.08)["free"] = ["g2"]


def cordoned(run: Run) -> None:
    run.log.insert(1, event("gpu.cordoned", 0.6, gpus=["g2"]))
    run.renumber()


def drained_node(run: Run) -> None:
    run.log.insert(1, event("node.drained", 0.6))
    run.renumber()


def unknown_node(run: Run) -> None:
    run.log.insert(1, event("node.unknown", 0.6))
    run.renumber()


def revives_on_a_paused_node(run: Run) -> None:
    run.log.insert(8, event("node.paused", 9.3))
    run.log.insert(9, event("lease.revived", 9.4, lease_id="B", gpus=["g1"], token=2))
    run.renumber()


def never_served(run: Run) -> None:
    run.lines.append({"what": "asked", "key": "c", "sent_s": 2.5, "at_s": None})


def drains_on(run: Run) -> None:
    run.lines.append({"what": "over", "at_s": 100.0})


def owned_by_process(run: Run, *, until_s: float | None) -> None:
    """B is of process 7, which lives until then."""
    run.find(what="shown", lease_id="B")["lease"]["holder"] = {"owner_pid": 7}
    run.lines.append({"what": "owned", "at_s": 4.3, "lease_id": "B", "pid": 7, "liveness": "process"})
    if until_s is not None:
        run.lines.append({"what": "died", "at_s": until_s, "pid": 7})
        run.lines.append({"what": "let_go", "at_s": until_s, "lease_id": "B"})


def living_taken_for_dead(run: Run) -> None:
    owned_by_process(run, until_s=9.9)
    run.find(kind="lease.ended", lease_id="B")["reason"] = "holder_died"


def living_expired(run: Run) -> None:
    owned_by_process(run, until_s=None)


def released_by_another(run: Run) -> None:
    run.lines.append({"what": "attacked", "at_s": 3.0, "call": "POST /v1/leases/A/release", "status": 200})


def too_many_wait(run: Run) -> None:
    run.lines.append({"what": "limit", "at_s": 0.0, "user": "eve", "queued": 1})
    for name in ("E1", "E2"):
        holder = {"label": name, "user": "eve"}
        run.lines.append({"what": "listed", "at_s": 20.0, "lease": {"id": name, "holder": holder, "state": "ended"}})
        run.log.append(event("lease.queued", 9.3, lease_id=name))
    run.renumber()


def over_a_limit(run: Run) -> None:
    reason = "group all: 1 GPUs, members ada, bob, by root"
    run.log.insert(0, event("limits.set", 0.1, reason=reason))
    for name in ("A", "B"):
        holder = {"label": name.lower(), "user": "ada"}
        run.lines.append({"what": "listed", "at_s": 20.0, "lease": {"id": name, "holder": holder, "state": "ended"}})
    run.renumber()


def over_a_limit_of_a_token(run: Run) -> None:
    """A and B are asked for with one token. A ends after B is granted."""
    run.log.insert(0, event("limits.set", 0.1, reason="token T: 1 leases, by root"))
    ended = run.find(kind="lease.ended", lease_id="A")
    run.log.remove(ended)
    run.log.append(ended)
    for name, user in (("A", "ann"), ("B", "bob")):
        holder = {"label": "", "user": user, "token_id": "T"}
        run.lines.append({"what": "listed", "at_s": 20.0, "lease": {"id": name, "holder": holder, "state": "ended"}})
    run.renumber()


def budget_of_hours(run: Run, most_s: float, window_s: int = 60) -> None:
    """A has two GPUs for 3 s when B is granted, 0.1 s after its end; both are of one user."""
    limits = f"{most_s / 3600:g} GPU-hours in {window_s} s"
    run.log.insert(0, event("limits.set", 0.1, reason=f"user ada: {limits}, by root"))
    for name in ("A", "B"):
        holder = {"label": "", "user": "ada"}
        run.lines.append({"what": "listed", "at_s": 20.0, "lease": {"id": name, "holder": holder, "state": "ended"}})
    run.lines = [line for line in run.lines if line["what"] != "event"]
    run.renumber()


def over_gpu_hours(run: Run) -> None:
    budget_of_hours(run, 5.9)


def crosses_a_reservation(run: Run) -> None:
    """g1 is reserved for bob when B is granted, which declares a time that is too long."""
    reason = f"R for user bob, {at(30.0)} to {at(90.0)}, by root"
    run.log.insert(0, event("reservation.created", 0.1, gpus=["g1"], reason=reason))
    for name, time_s in (("A", 20.0), ("B", 60.0)):
        holder = {"label": name.lower(), "user": "ada"}
        shown = {"id": name, "holder": holder, "state": "ended", "demand": {"count": 1, "time_s": time_s}}
        run.lines.append({"what": "listed", "at_s": 20.0, "lease": shown})
    run.renumber()


def held_on(run: Run) -> None:
    run.lines.append(
        {"what": "listed", "at_s": 20.0, "lease": {"id": "B", "holder": {"label": "b"}, "state": "active"}}
    )


def waits_on(run: Run) -> None:
    run.lines.append(
        {"what": "listed", "at_s": 20.0, "lease": {"id": "B", "holder": {"label": "b"}, "state": "queued"}}
    )


def with_order(run: Run, count: int) -> None:
    """Z, of higher priority, waits as well."""
    run.lines.append({"what": "order", "at_s": 0.0, "max_overtakes": 1, "max_bypasses": 0})
    waits = lease("Z", "queued", None, count=count)
    waits["demand"]["priority"] = "interactive"
    run.lines.append({"what": "shown", "lease_id": "Z", "sent_s": 2.2, "at_s": 2.4, "status": 200, "lease": waits})
    run.log.insert(3, event("lease.queued", 2.1, lease_id="Z"))
    run.log.append(event("lease.ended", 9.9, lease_id="Z", reason="cancelled"))
    run.renumber()


def preempts(run: Run, at_s: float = 3.5) -> None:
    """A is told to end for B, and does."""
    run.lines.append({"what": "preemption", "at_s": 0.0, "after_s": 2.0})
    for line in run.lines:
        if line.get("lease", {}).get("id") == "A":
            line["lease"]["demand"]["preemptible"] = True
    reason = "for B of user ada, whose priority is normal"
    told = event("lease.preempting", at_s, lease_id="A", gpus=["g1", "g2"], reason=f"{reason}, by noon")
    ended = run.log.index(run.find(kind="lease.ended", lease_id="A"))
    run.log.insert(ended + 1, event("lease.preempted", 4.0, lease_id="A", reason=reason))
    run.log.insert(ended, told)
    run.renumber()


def preempts_what_did_not_opt_in(run: Run) -> None:
    preempts(run)
    for line in run.lines:
        if line.get("lease", {}).get("id") == "A":
            line["lease"]["demand"]["preemptible"] = False


def preempts_for_what_opted_in(run: Run) -> None:
    preempts(run)
    for line in run.lines:
        if line.get("lease", {}).get("id") == "B" and "demand" in line["lease"]:
            line["lease"]["demand"]["preemptible"] = True


def preempts_too_soon(run: Run) -> None:
    preempts(run, 2.5)


def preempts_for_someone_else(run: Run) -> None:
    preempts(run)
    at = run.log.index(run.find(kind="lease.granted", lease_id="B"))
    run.log.insert(at, event("lease.granted", 4.1, lease_id="N", gpus=["g1", "g2"], token=2))
    run.renumber()


def reclaims(run: Run, told_s: float = 2.5, waits: str = "B") -> None:
    """A is told that its idle GPUs are taken back for B, and they are."""
    run.lines.append({"what": "reclaim", "at_s": 0.0, "after_s": 1.0, "notice_s": 1.0, "priority": "interactive"})
    for line in run.lines:
        if line.get("lease", {}).get("id") == "A":
            line["lease"]["demand"]["priority"] = "interactive"
    gpus, ended = ["g1", "g2"], run.log.index(run.find(kind="lease.ended", lease_id="A"))
    taken = event("lease.reclaimed", 4.0, lease_id="A", gpus=gpus, reason=f"for {waits}: 9 readings")
    told = event("lease.reclaim_notice", told_s, lease_id="A", gpus=gpus, reason=f"at noon, for {waits}: 5 readings")
    run.log[ended:ended] = [told, taken]
    run.renumber()


def reclaims_what_did_not_agree(run: Run) -> None:
    reclaims(run)
    for line in run.lines:
        if line.get("lease", {}).get("id") == "A":
            line["lease"]["demand"]["priority"] = "normal"


def reclaims_too_soon(run: Run) -> None:
    reclaims(run, 3.5)


def reclaims_after_a_restart(run: Run) -> None:
    reclaims(run)
    run.lines.append({"what": "started", "at_s": 3.5})


def reclaims_what_has_worked(run: Run) -> None:
    reclaims(run)
    run.lines.append({"what": "worked", "gpus": ["g2"], "begun_s": 1.8, "at_s": 1.9})


def reclaims_what_is_kept(run: Run) -> None:
    reclaims(run)
    run.lines.append({"what": "kept", "lease_id": "A", "sent_s": 3.0, "at_s": 3.1, "for_s": 2.0})


def reclaims_for_no_one(run: Run) -> None:
    reclaims(run, waits="Z")


def reclaims_more_than_is_asked_for(run: Run) -> None:
    reclaims(run)
    more = event("lease.reclaimed", 4.0, lease_id="C", gpus=["g3"], reason="for B: 9 readings")
    run.log.insert(run.log.index(run.find(kind="lease.reclaimed")) + 1, more)
    run.renumber()


def passes_a_higher_priority(run: Run) -> None:
    with_order(run, 1)
    run.log.remove(run.find(kind="lease.queued", lease_id="B"))
    run.renumber()


def oldest_never_goes_first(run: Run) -> None:
    with_order(run, 1)
    at = run.log.index(run.find(kind="lease.queued", lease_id="Z"))
    for number in range(6):
        run.log.insert(at + 1, event("lease.granted", 2.2, lease_id=f"N{number}", gpus=[f"n{number}"], token=9))
    run.renumber()


def limit_never_in_turn(run: Run) -> None:
    """Z, of the lowest priority, waits for a limit of one lease, which others have one after the other."""
    with_order(run, 1)
    waits = next(line["lease"] for line in run.lines if line.get("lease_id") == "Z")
    waits["demand"]["priority"] = "scavenge"
    names = [f"N{number}" for number in range(8)]
    for name in ("Z", *names):
        holder = {"label": "", "user": "ada"}
        run.lines.append({"what": "listed", "at_s": 20.0, "lease": {"id": name, "holder": holder, "state": "ended"}})
    at = run.log.index(run.find(kind="lease.queued", lease_id="Z"))
    for name in names:
        run.log.insert(at + 1, event("lease.ended", 2.2, lease_id=name, gpus=["n"], token=9, reason="released"))
        run.log.insert(at + 1, event("lease.granted", 2.2, lease_id=name, gpus=["n"], token=9))
    run.log.insert(0, event("limits.set", 0.1, reason="user ada: 1 leases, by root"))
    run.renumber()


def held_gpu_goes_to_another(run: Run, *, had: int = 3) -> None:
    """H, of ann, waits for four GPUs, of which w9 is held for it. Bob had some of the others then, and gets w9."""
    names = [f"W{number}" for number in range(had)]
    for name, user in (("H", "ann"), ("W9", "bob"), *((name, "bob") for name in names)):
        holder = {"label": "", "user": user}
        run.lines.append({"what": "listed", "at_s": 20.0, "lease": {"id": name, "holder": holder, "state": "ended"}})
    waits = lease("H", "queued", None, count=4)
    run.lines.append({"what": "shown", "lease_id": "H", "sent_s": 0.1, "at_s": 0.2, "status": 200, "lease": waits})
    run.lines.append({"what": "held", "at_s": 0.4, "gpus": {"w9": "H"}})
    run.lines.append({"what": "held", "at_s": 0.7, "gpus": {name.lower(): "H" for name in names}})
    held = [event("lease.granted", 0.1, lease_id=name, gpus=[name.lower()], token=9) for name in names]
    ends = [event("lease.ended", 0.5, lease_id=one["lease_id"], gpus=one["gpus"], token=9) for one in held]
    run.log[:0] = [*held, *ends, event("lease.granted", 0.6, lease_id="W9", gpus=["w9"], token=9)]
    run.renumber()


def usage_orders(run: Run) -> None:
    """A is of ann, who is in a group; B of bob."""
    rules = {"half_life_s": 20.0, "entry_s": 2.0, "lowest_s": 2.0, "step": 0.07, "recount_s": 0.5}
    run.lines.append({"what": "usage order", "at_s": 0.0, "groups": {"vision": 2.0}, **rules})
    for name, user in (("A", "ann"), ("B", "bob"), ("C", "cleo")):
        holder, demand = {"label": "", "user": user}, {"count": 1}
        told = {"id": name, "holder": holder, "state": "ended", "demand": demand}
        run.lines.append({"what": "listed", "at_s": 20.0, "lease": told})
    run.log.insert(0, event("limits.set", 0.1, reason="group vision: 100 GPUs, members ann, cleo, by root"))


def each_lease_counts_alike(run: Run) -> None:
    usage_orders(run)
    run.lines.append({"what": "used", "whose": "group vision", "sent_s": 4.0, "at_s": 4.0, "used_s": 4.7})
    run.renumber()


def a_group_that_has_used_more_goes_first(run: Run) -> None:
    """C waits longer than B, and is of the group of A. B is granted a second later."""
    usage_orders(run)
    granted = run.find(kind="lease.granted", lease_id="B")
    place = run.log.index(granted)
    granted["at"] = event("", 5.1)["at"]
    run.log.insert(place, event("lease.granted", 4.1, lease_id="C", gpus=["g2"], token=2))
    run.log.insert(3, event("lease.queued", 1.5, lease_id="C"))
    run.renumber()


def usage_was_explained(run: Run, place: int = 2) -> None:
    """B, whose user has used less, is told its place; C is of the group of A and has the other one."""
    usage_orders(run)
    run.find(what="usage order")["groups"] = {"vision": 0.5}
    run.log.insert(3, event("lease.queued", 1.5, lease_id="C"))
    run.log.append(event("lease.ended", 9.9, lease_id="C", reason="cancelled"))
    run.lines = [line for line in run.lines if line["what"] != "event"]
    said = {"B": {"position": place, "behind": []}, "C": {"position": 3 - place, "behind": []}}
    run.lines.append({"what": "explained", "sent_s": 21.5, "at_s": 21.5, "said": said})
    run.renumber()


def was_told_to_come_after_a_group_that_has_used_more(run: Run) -> None:
    usage_was_explained(run)


def _run_ahead(run: Run, time_s: float, *, a_time_s: float | None, users: str = "abz") -> None:
    """A has g1 for so long, and B waits for two GPUs. Z gets g2 meanwhile. `users`: whose A, B and Z are."""
    asks: dict[str, Line] = {"A": {"time_s": a_time_s}, "B": {"count": 2}, "Z": {"time_s": time_s}}
    ahead = lease("Z", "active", 7, "g2")
    run.lines.append({"what": "asked", "key": "z", "sent_s": 2.4, "at_s": 2.6, "status": 201, "lease": ahead})
    for line in run.lines:
        if "lease" in line:
            line["lease"]["demand"] |= asks[line["lease"]["id"]]
            line["lease"]["holder"] = {"user": users["ABZ".index(line["lease"]["id"])]}
    run.find(kind="lease.granted", lease_id="A")["gpus"] = ["g1"]
    granted = event("lease.granted", 2.5, lease_id="Z", gpus=["g2"], token=7, reason="runs ahead of B, with no delay")
    run.log.insert(3, granted)
    run.renumber()


def runs_ahead_for_too_long(run: Run) -> None:
    _run_ahead(run, 2.0, a_time_s=3.0)


def runs_ahead_beside_a_free_gpu(run: Run) -> None:
    """B needs nothing but that one and what Z has."""
    _run_ahead(run, 1.0, a_time_s=3.0)
    for line in run.lines:
        if line["what"] == "reading":
            line["free"].append("g3")


def runs_ahead_because_of_a_lease_without_a_time(run: Run) -> None:
    _run_ahead(run, 1.0, a_time_s=None)


def runs_ahead_because_of_its_own_lease(run: Run) -> None:
    _run_ahead(run, 1.0, a_time_s=3.0, users="zbz")


def newer_ones_pass(run: Run, times: int = 1, priority: str = "normal") -> None:
    """B could use what others get that have asked later."""
    order = {"max_bypass": 0, "max_overtakes": 1, "priorities": False, "interactive_gpus": 0}
    run.lines.append({"what": "passes", "at_s": 0.0, **order})
    for number in range(times):
        name = f"N{number}"
        newer = lease(name, "active", 9, f"n{number}")
        newer["demand"]["priority"] = priority
        run.lines.append({"what": "asked", "key": name, "sent_s": 2.2, "at_s": 2.6, "status": 201, "lease": newer})
        run.log.insert(3, event("lease.granted", 2.5, lease_id=name, gpus=[f"n{number}"], token=9))
    run.renumber()


def starves_behind_higher_priorities(run: Run) -> None:
    newer_ones_pass(run, 3, "interactive")


def token_budget(run: Run, **what: float) -> None:
    """A and B are of a token with this budget; a day ends between the two."""
    whole = {"max_gpus": 4, "max_lease_s": 60.0, "most_s": 1000.0, "least_s": 1.0, "midnight_s": 4.05}
    run.lines.append({"what": "token budget", "at_s": 0.0, "token_id": "t", **whole, **what})
    for name in ("A", "B"):
        holder = {"label": name.lower(), "user": "root", "token_id": "t"}
        run.lines.append({"what": "listed", "at_s": 20.0, "lease": lease(name, "ended", 1, holder=holder)})


def over_the_gpus_of_a_budget(run: Run) -> None:
    token_budget(run, max_gpus=1)


def over_the_hours_of_a_day(run: Run) -> None:
    token_budget(run, most_s=6.5, midnight_s=100.0)


def a_lease_goes_on_without_a_budget(run: Run) -> None:
    token_budget(run, max_lease_s=1.0)
    run.log[2:2] = [event("gpu.foreign", 1.5 + number / 2, gpus=["g9"]) for number in range(6)]
    run.renumber()


def order_was_explained(run: Run, behind: tuple[str, ...] = ("Z",), place: int = 1) -> None:
    """B is told that Z, which asks for two GPUs, is before it; then B gets one of the two that are free."""
    order = {"max_bypass": 0, "max_overtakes": 1, "priorities": False, "interactive_gpus": 0}
    said = {"B": {"position": 2, "behind": [*behind]}, "Z": {"position": place, "behind": []}}
    run.lines.append({"what": "passes", "at_s": 0.0, **order})
    run.lines.append({"what": "explained", "sent_s": 3.0, "at_s": 3.0, "said": said})
    waits = lease("Z", "queued", None, count=1 if place == 1 else 2)
    run.lines.append({"what": "shown", "lease_id": "Z", "sent_s": 2.2, "at_s": 2.4, "status": 200, "lease": waits})
    run.log.insert(3, event("lease.queued", 2.1, lease_id="Z"))
    run.log.append(event("lease.ended", 9.9, lease_id="Z", reason="cancelled"))
    run.renumber()


def goes_before_whom_it_was_said_to_be_behind(run: Run) -> None:
    order_was_explained(run, place=3)


def goes_before_who_was_said_to_be_before_it(run: Run) -> None:
    order_was_explained(run, behind=())


def job_is_preempted(run: Run, times: int = 1, who: str = "C", priority: str = "normal") -> None:
    """Job J, whose lease Z was granted before B was asked for, is preempted, and waits as Zr; then another gets g1."""
    order = {"max_bypass": 0, "max_overtakes": 1000, "priorities": True, "interactive_gpus": 0}
    run.lines.append({"what": "passes", "at_s": 0.0, **order})
    run.lines.append({"what": "submitted", "at_s": 0.6, "sent_s": 0.5, "job_id": "J"})
    of_job = {"holder": {"label": "", "user": "zoe"}, "demand": {"count": 1, "priority": priority}}
    run.lines.append({"what": "listed", "at_s": 20.0, "lease": lease("Zr", "ended", 3, **of_job)})
    run.lines.append({"what": "asked", "key": "c", "sent_s": 3.3, "at_s": 3.4, "status": 202})
    run.lines[-1]["lease"] = lease("C", "queued", None)
    run.log[1:1] = [event("lease.granted", 0.9, lease_id="Z", gpus=["z"], token=0, job_id="J")]
    preempted = [event("job.preempted", 2.5, lease_id="Zr", job_id="J")] * times
    waits = [event("lease.queued", 2.5, lease_id="Zr", job_id="J"), event("lease.queued", 3.4, lease_id="C")]
    run.log[4:4] = [*preempted, *waits]
    granted = next(one for one in run.log if one["kind"] == "lease.granted" and one["lease_id"] == "B")
    granted["lease_id"] = who
    run.log.append(event("lease.granted", 11.0, lease_id="Zr", gpus=["z"], token=3, job_id="J"))
    run.renumber()


def passes_a_preempted_job(run: Run) -> None:
    job_is_preempted(run)


def passes_a_job_that_was_preempted_twice(run: Run) -> None:
    job_is_preempted(run, times=2, priority="scavenge")


def preempts_a_third_time(run: Run) -> None:
    job_is_preempted(run, times=2, who="B")
    run.log.append(event("lease.preempting", 15.0, lease_id="Zr", job_id="J", reason="for B of user root, whose"))
    run.renumber()


def preempted_and_forgotten(run: Run) -> None:
    job_is_preempted(run)
    run.log.pop()


BAD: list[tuple[str, Callable[[Run], None]]] = [
    ("usage is what was held, however it was asked for (8)", each_lease_counts_alike),
    ("groups and users that have used less go first (8)", a_group_that_has_used_more_goes_first),
    ("the order is as explained (8)", goes_before_whom_it_was_said_to_be_behind),
    ("the order is as explained (8)", goes_before_who_was_said_to_be_before_it),
    ("the order is as explained (8)", was_told_to_come_after_a_group_that_has_used_more),
    ("seq without gap or repeat", gap),
    ("what readers were shown stays (6)", event_undone),
    ("a GPU has one holder (1)", two_holders),
    ("a GPU drains before it is granted again (5)", not_drained),
    ("queued, granted, ended, in that order", granted_twice),
    ("all or none (2)", half_a_gang),
    ("all or none (2)", a_gang_on_one_node),
    ("a gang is one lease on all of its nodes (2)", a_member_missing),
    ("a gang is one lease on all of its nodes (2)", a_member_with_another_token),
    ("all or none in the end, too (2)", ends_on_one_node),
    ("out of use is out of use (4)", second_node_drained),
    ("tokens rise and are never used twice", token_again),
    ("what was told is kept (6)", grant_lost),
    ("what was told is kept (6)", release_lost),
    ("what was told of is found again (6)", lease_not_found),
    ("what was told of is found again (6)", right_token_refused),
    ("what was released stays released (6)", released_revives),
    ("one key, one lease", key_lost),
    ("one key, one lease", lease_of_no_one),
    ("nothing ends early (7)", early),
    ("nothing ends early (7)", early_after_a_start),
    ("nothing ends early (7)", early_by_the_wall_clock),
    ("two holders never trust at once (1, 7)", two_trust),
    ("nothing is granted unseen (3, 4, 5, 13)", old_reading),
    ("nothing is granted unseen (3, 4, 5, 13)", reading_before_the_end),
    ("nothing is granted unseen (3, 4, 5, 13)", occupied),
    ("out of use is out of use (4)", cordoned),
    ("out of use is out of use (4)", drained_node),
    ("out of use is out of use (4)", unknown_node),
    ("out of use is out of use (4)", revives_on_a_paused_node),
    ("all are served in the end (8)", never_served),
    ("nothing drains forever (5)", drains_on),
    ("a living owner keeps its lease (7, 12)", living_taken_for_dead),
    ("a living owner keeps its lease (7, 12)", living_expired),
    ("nothing is held forever (11, 12)", held_on),
    ("nothing is held forever (11, 12)", waits_on),
    ("no one acts for another user (15)", released_by_another),
    ("one user's queue is bounded (15)", too_many_wait),
    ("higher priorities go first (8)", passes_a_higher_priority),
    ("who has waited longest has a turn (8)", oldest_never_goes_first),
    ("newer ones pass within the bound (8)", newer_ones_pass),
    ("no request starves (8)", starves_behind_higher_priorities),
    ("limits are shared in turn (8)", limit_never_in_turn),
    ("limits are never passed (15)", over_a_limit),
    ("limits are never passed (15)", over_a_limit_of_a_token),
    ("limits are never passed (15)", over_gpu_hours),
    ("budgets of tokens are never passed (15)", over_the_gpus_of_a_budget),
    ("budgets of tokens are never passed (15)", over_the_hours_of_a_day),
    ("budgets of tokens are never passed (15)", a_lease_goes_on_without_a_budget),
    ("reservations are never crossed (4)", crosses_a_reservation),
    ("only what opted in is preempted (7)", preempts_what_did_not_opt_in),
    ("only what opted in is preempted (7)", preempts_for_what_opted_in),
    ("nothing is preempted before the minimum (7)", preempts_too_soon),
    ("who preempts starts (7, 8)", preempts_for_someone_else),
    ("a job that was preempted keeps its place (8)", passes_a_preempted_job),
    ("a job that was preempted keeps its place (8)", passes_a_job_that_was_preempted_twice),
    ("a job is preempted twice at most (7)", preempts_a_third_time),
    ("a job that was preempted starts again (8)", preempted_and_forgotten),
    ("only what agreed is taken back (7)", reclaims_what_did_not_agree),
    ("nothing is taken back before its moment (7)", reclaims_too_soon),
    ("nothing is taken back before its moment (7)", reclaims_after_a_restart),
    ("what works is not taken back (7)", reclaims_what_has_worked),
    ("what is kept is not taken back (7)", reclaims_what_is_kept),
    ("idle GPUs are taken back for who waits, and no more than they need (8)", reclaims_for_no_one),
    ("idle GPUs are taken back for who waits, and no more than they need (8)", reclaims_more_than_is_asked_for),
    ("what GPUs are held for keeps its place (8)", held_gpu_goes_to_another),
    ("no one is delayed by who runs ahead (8)", runs_ahead_for_too_long),
    ("no one is delayed by who runs ahead (8)", runs_ahead_beside_a_free_gpu),
    ("no one is delayed by who runs ahead (8)", runs_ahead_because_of_a_lease_without_a_time),
    ("no one is delayed by who runs ahead (8)", runs_ahead_because_of_its_own_lease),
]


def test_a_good_log_passes() -> None:
    run = Run()

    assert check(run.log, run.lines) == []


def test_a_gang_passes() -> None:
    run = Run()
    as_gang(run)

    assert check(run.log, run.lines) == []


def test_usage_that_was_held_passes() -> None:
    run = Run()
    usage_orders(run)
    run.lines = [line for line in run.lines if line["what"] != "event"]
    run.renumber()
    run.lines.append({"what": "used", "whose": "group vision", "sent_s": 3.0, "at_s": 3.0, "used_s": 7.865})

    assert check(run.log, run.lines) == []


def test_places_by_usage_pass() -> None:
    run = Run()
    usage_was_explained(run, place=1)

    assert check(run.log, run.lines) == []


def test_a_preemption_passes() -> None:
    run = Run()
    preempts(run)

    assert check(run.log, run.lines) == []


@pytest.mark.parametrize(("times", "priority"), [(1, "scavenge"), (0, "normal")])
def test_a_higher_priority_goes_before_a_job_that_was_preempted_once(times: int, priority: str) -> None:
    run = Run()
    job_is_preempted(run, times, priority=priority)

    assert "a job that was preempted keeps its place (8)" not in judge(run)


@pytest.mark.parametrize("what", [{"most_s": 6.5}, {"max_lease_s": 1.0}])
def test_each_day_has_its_own_gpu_hours_and_a_lease_may_go_on_while_no_daemon_records_anything(
    what: dict[str, float],
) -> None:
    run = Run()
    token_budget(run, **what)

    assert check(run.log, run.lines) == []


def test_a_reclaim_passes() -> None:
    run = Run()
    reclaims(run)
    run.lines.append({"what": "worked", "gpus": ["g2"], "begun_s": 1.2, "at_s": 1.3})
    run.lines.append({"what": "kept", "lease_id": "A", "sent_s": 1.5, "at_s": 1.6, "for_s": 2.0})

    assert check(run.log, run.lines) == []


@pytest.mark.parametrize("count", [1, 2])
def test_the_oldest_request_may_go_before_one_of_higher_priority_which_may_also_ask_for_more(count: int) -> None:
    run = Run()
    with_order(run, count)

    assert not {rule for rule in judge(run) if rule.endswith("(8)") and "served" not in rule}


def test_who_was_not_behind_may_get_what_is_held() -> None:
    run = Run()
    held_gpu_goes_to_another(run, had=1)

    assert "what GPUs are held for keeps its place (8)" not in judge(run)


@pytest.mark.parametrize("users", ["abz", "zzz"])
def test_who_ends_before_the_one_that_waits_can_start_may_run_ahead(users: str) -> None:
    """Where only one user waits, that may be because of a lease of their own."""
    run = Run()
    _run_ahead(run, 1.0, a_time_s=3.0, users=users)

    assert "no one is delayed by who runs ahead (8)" not in judge(run)


def test_who_was_said_to_come_later_may_be_passed_and_what_was_said_before_a_restart_counts_no_more() -> None:
    later, restarted = Run(), Run()
    order_was_explained(later, behind=(), place=3)
    order_was_explained(restarted)
    restarted.lines.append({"what": "started", "at_s": 3.5})

    assert "the order is as explained (8)" not in judge(later) | judge(restarted)


@pytest.mark.parametrize(("most_s", "window_s"), [(6.1, 60), (5.9, 2)])
def test_what_is_left_of_gpu_hours_may_be_had_and_what_has_left_the_window_counts_no_more(
    most_s: float, window_s: int
) -> None:
    run = Run()
    budget_of_hours(run, most_s, window_s)

    assert check(run.log, run.lines) == []


def test_the_wall_clock_may_be_set_without_harm() -> None:
    run = Run()
    run.lines.append({"what": "clock", "at_s": 6.0, "wall_s": NOON_S - 3594.0})
    run.find(kind="lease.ended", lease_id="B")["at"] = at(-3590.8)

    assert check(run.log, run.lines) == []


def test_the_lease_of_a_process_may_end_when_that_is_dead() -> None:
    run = Run()
    owned_by_process(run, until_s=9.1)
    run.find(kind="lease.ended", lease_id="B")["reason"] = "holder_died"

    assert check(run.log, run.lines) == []


@pytest.mark.parametrize(("rule", "spoil"), BAD, ids=[spoil.__name__ for _, spoil in BAD])
def test_a_bad_log_is_caught(rule: str, spoil: Callable[[Run], None]) -> None:
    run = Run()
    run.log, run.lines = copy.deepcopy((run.log, run.lines))
    spoil(run)

    assert rule in judge(run), check(run.log, run.lines)


def test_each_rule_has_a_log_that_breaks_it() -> None:
    assert {rule for rule, _ in BAD} == set(RULES)
