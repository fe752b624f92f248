"""Faults that were put into the daemon by hand, to see whether they are caught. `tests/RECORD.md` says by what.

Each is a function that gives what to patch: (target, replacement). A mutation is the code of the daemon with one
promise left out, never a fault that no programmer would make. `python -m tests.simulation.mutations NAME serve ...` is
the `gpulease` program with that fault in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from sqlalchemy import Engine

from gpulease_cli import main
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import EndReason, Event, Lease, LeaseState, Liveness
from gpulease_server.api import report_body
from gpulease_server.core import (
    backfill,
    gpu_observation,
    gpu_state,
    grant,
    group_usage,
    job,
    lease,
    node,
    placement,
    queue,
    reclaim,
    records,
    usage,
)
from gpulease_server.core import decide as deciding
from gpulease_server.core.draining import observe_draining
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order_records import Overtakes
from gpulease_server.core.place import place
from gpulease_server.core.placement import Placed
from gpulease_server.core.records import Deadline, Instant, JobRecord, KeyRecord, LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import UserUsage
from gpulease_server.runtime import clock, writer
from gpulease_server.runtime.wakeups import wakeup_keys
from gpulease_server.store.event_pages import EventFilter, FoundEvents, find_events
from gpulease_server.store.ledger_store import Store, is_stored

CORE, RUNTIME = "gpulease_server.core", "gpulease_server.runtime"
Patches = list[tuple[str, Any]]


def reply_before_commit() -> Patches:
    """The answer is given first, and the commit comes after it."""

    async def take_turn(self: writer.Writer, calls: list[writer.Submission]) -> bool:
        turn = Turn(self._ledger, clock.now(), self.policy, self._pending, self.reading_requests)
        for call in calls:
            if call.future is not None:
                self._futures[call.happening.cause] = call.future
            deciding.decide(turn, call.happening)
        queue.settle(turn)
        for cause, answer in turn.answers:
            future = self._futures.pop(cause, None)
            if future is not None:
                future.set_result(answer)
        await asyncio.sleep(0)
        stored = [change for change in turn.changes if is_stored(change)]
        if stored:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self.store.write, stored, self._ledger)
        keys = wakeup_keys(turn.changes, self.committed)
        for change in turn.changes:
            self.committed.apply(change)
        self.wakeups.wake(keys)
        self.wakeups.wake(f"node:{node}" for node in self.reading_requests)
        return True

    return [(f"{RUNTIME}.writer.Writer._take_turn", take_turn)]


def lose_keys() -> Patches:
    """Idempotency-Keys are not stored."""
    return [(f"{RUNTIME}.writer.is_stored", lambda change: is_stored(change) and not isinstance(change, KeyRecord))]


def lose_releases() -> Patches:
    """The row of a lease that was released is not written; its event is."""
    write = Store.write

    def without(self: Store, changes: list[Any], ledger: Ledger) -> None:
        write(self, [one for one in changes if not _is_release(one)], ledger)

    def _is_release(change: Any) -> bool:
        return isinstance(change, LeaseRecord) and change.lease.end_reason == "released"

    return [("gpulease_server.store.ledger_store.Store.write", without)]


def token_from_the_living() -> Patches:
    """After a restart tokens go on from the greatest of the active leases."""
    load = Store.load

    def forgetful(self: Store) -> Ledger:
        ledger = load(self)
        live = [one.lease.fencing_token or 0 for one in ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]
        ledger.next_token = max(live, default=0) + 1
        return ledger

    return [("gpulease_server.store.ledger_store.Store.load", forgetful)]


def skip_draining() -> Patches:
    """A GPU is free the moment its lease ends."""
    end = lease.end_lease

    def at_once(turn: Turn, record: LeaseRecord, why: Any) -> None:
        end(turn, record, why)
        for held in turn.ledger.held_by(record.lease):
            turn.put(replace(held, lease_id=None, draining=False))

    return [(f"{CORE}.lease.end_lease", at_once)]


def clean_by_an_old_reading() -> Patches:
    """A draining GPU is freed by any reading, also by one begun before the end of its lease."""
    end = lease.end_lease

    def long_ago(turn: Turn, record: LeaseRecord, why: Any) -> None:
        end(turn, record, why)
        for held in turn.ledger.held_by(record.lease):
            turn.ledger.draining_since[held.device.uuid] = float("-inf")

    return [(f"{CORE}.lease.end_lease", long_ago)]


def clean_with_leftovers() -> Patches:
    """Processes that the lease left behind do not keep a GPU from being clean, nor from being free."""

    def without_lease(reading: Any) -> tuple[Any, ...]:
        return tuple(one for one in gpu_occupants(reading) if one.lease_id is None)

    gpu_occupants = gpu_state.occupants

    def unused(reading: Any) -> bool:
        return is_unused(replace(reading, processes=without_lease(reading)))

    is_unused = records.is_unused
    occupants = [(f"{CORE}.draining.occupants", without_lease), (f"{CORE}.gpu_state.occupants", without_lease)]
    return [*occupants, (f"{CORE}.records.is_unused", unused)]


def strangers_keep() -> Patches:
    """Any process that has its device file open keeps a draining GPU, without a bound."""

    def without_bound(turn: Turn, record: Any, reading: Any, seen: Any, observed_at_s: float) -> Any:
        return replace(observe_draining(turn, record, reading, seen, observed_at_s), clean_since_s=None)

    return [(f"{CORE}.gpu_observation.observe_draining", without_bound)]


def any_reading_will_do() -> Patches:
    """No age is too great for a reading."""

    def fresh(sighting: Any, uuid: str, now: Instant, policy: Any, since_s: float = 0.0) -> bool:
        return sighting is not None and sighting.problem is None

    return [(f"{CORE}.placement.is_recent", fresh)]


def ignore_strangers() -> Patches:
    """A foreign process does not keep a GPU from being granted."""

    def unused(reading: Any) -> bool:
        return is_unused(replace(reading, processes=(), hidden_use=False))

    is_unused = records.is_unused
    return [
        (f"{CORE}.gpu_state.occupants", lambda reading: ()),
        *[(f"{CORE}.{place}.awaits_memory", lambda *_: False) for place in ("gpu_state", "records")],
        (f"{CORE}.records.is_unused", unused),
    ]


def grant_what_another_has() -> Patches:
    """A GPU that another daemon's worker has claimed keeps its last reading."""
    observe = node._observe

    def kept(turn: Turn, reported: Any, report: Any, before: Any) -> Any:
        found = observe(turn, reported, report, before)
        last = {} if before is None else before.readings
        old = {uuid: last[uuid] for uuid in found.claimed_elsewhere if uuid in last}
        return replace(found, readings={**found.readings, **old})

    return [(f"{CORE}.node._observe", kept)]


def ignore_cordons() -> Patches:
    """A cordon is written down and not obeyed."""
    return [(f"{CORE}.{place}.is_cordoned", lambda *_: False) for place in ("gpu_state", "fleet")]


def half_a_gang() -> Patches:
    """Where fewer GPUs are free than were asked for, those are granted."""

    def fewer(*where: Any, **how: Any) -> Any:
        placed = place(*where, **how)
        if isinstance(placed, Placed) or where[1].count < 2:
            return placed
        less = place(where[0], replace(where[1], count=where[1].count - 1), *where[2:], **how)
        return less if isinstance(less, Placed) else placed

    return [(f"{CORE}.queue.place", fewer)]


def one_node_fewer() -> Patches:
    """Where fewer nodes are ready than a gang asks for, it is granted on those."""

    def fewer(*where: Any, **how: Any) -> Any:
        placed = place(*where, **how)
        if isinstance(placed, Placed) or where[1].nodes < 2:
            return placed
        less = place(where[0], replace(where[1], nodes=where[1].nodes - 1), *where[2:], **how | {"rankings": None})
        return less if isinstance(less, Placed) else placed

    return [(f"{CORE}.queue.place", fewer)]


def look_at_one_node() -> Patches:
    """A gang is granted on a recent reading of one of its nodes."""
    recent = placement.Search._all_recent
    asked: list[str] = []

    def of_first(self: placement.Search, node: str, gpus: Any) -> bool:
        asked.append(node)
        return recent(self, node, gpus) or (self.demand.nodes > 1 and len(asked) % 2 == 0)

    return [(f"{CORE}.placement.Search._all_recent", of_first)]


def token_for_each_node() -> Patches:
    """Each member of a gang gets a token of its own."""
    members_of = grant.gang_members

    def numbered(*about: Any) -> Any:
        def with_token(member: Any) -> Any:
            token = str(int(member.env["GPULEASE_LEASE_TOKEN"]) + member.rank)
            return replace(member, env=member.env | {"GPULEASE_LEASE_TOKEN": token})

        return tuple(map(with_token, members_of(*about)))

    return [(f"{CORE}.grant.gang_members", numbered)]


def end_on_the_first_node() -> Patches:
    """A gang that ends gives back the GPUs of its first node alone."""
    end = lease.end_lease

    def there(turn: Turn, record: LeaseRecord, why: Any) -> None:
        end(turn, record, why)
        for held in turn.ledger.held_by(record.lease):
            if held.device.node != record.lease.gpus[0].node:
                turn.put(replace(held, draining=False))

    return [(f"{CORE}.lease.end_lease", there)]


def hold_halves() -> Patches:
    """Gangs that wait take free GPUs as they come, some here and others there, and keep them until they have all."""
    kept: dict[str, str] = {}
    reservations = backfill.Reservations

    def with_halves(ledger: Ledger, *about: Any, **how: Any) -> Any:
        made = reservations(ledger, *about, **how)
        gangs = [one.lease for one in ledger.queued() if one.lease.demand.nodes > 1]
        ids = {one.id for one in gangs}
        for uuid in [uuid for uuid, owner in kept.items() if owner not in ids or uuid not in ledger.gpus]:
            del kept[uuid]
        for number, (_, uuids) in enumerate(sorted(ledger.fleet.free.items())):
            if gangs:
                kept.update(dict.fromkeys(set(uuids) - set(kept), gangs[number % len(gangs)].id))
        made.by_uuid.update(kept)
        return made

    def own_too(ledger: Ledger, demand: Any, reserved: Any, *about: Any, **how: Any) -> Any:
        first = next((one.lease.id for one in ledger.queued() if one.lease.demand == demand), None)
        others = {uuid for uuid in reserved if first is None or kept.get(uuid) != first}
        return place(ledger, demand, others, *about, **how | {"rankings": None})

    return [(f"{CORE}.queue.Reservations", with_halves), (f"{CORE}.queue.place", own_too)]


def revive_over_another() -> Patches:
    """A late renewal revives without checking who holds the GPUs by now."""
    return [(f"{CORE}.lease.can_revive", lambda turn, old: all(d.uuid in turn.ledger.gpus for d in old.gpus))]


def short_after_restart() -> Patches:
    """After a restart a lease has half of its ttl_s."""

    def half(ledger: Ledger, now: Instant) -> None:
        whole(ledger, now)
        for lease_id in list(ledger.deadlines):
            ledger.apply(Deadline(lease_id, now.mono_s + ledger.leases[lease_id].lease.ttl_s / 2))

    whole = writer.reset_deadlines
    return [(f"{RUNTIME}.writer.reset_deadlines", half)]


def measure_by_the_wall() -> Patches:
    """Deadlines are measured by the wall clock."""
    honest = clock._Clocks.now

    def by_wall(self: Any) -> Instant:
        now = honest(self)
        return Instant(at=now.at, mono_s=now.at.timestamp())

    return [(f"{RUNTIME}.clock._Clocks.now", by_wall)]


def forget_renewals() -> Patches:
    """Renewals are answered and move no deadline."""
    extend_deadline = lease.extend_deadline

    def only_first(turn: Turn, renewed: Any) -> None:
        if renewed.id not in turn.ledger.deadlines or renewed.liveness is Liveness.JOB:
            extend_deadline(turn, renewed)

    return [(f"{CORE}.lease.extend_deadline", only_first)]


def show_before_commit() -> Patches:
    """The events of a turn are shown before it is committed."""
    write, load = Store.write, Store.load
    ahead: list[Event] = []

    def noted(change: Any) -> bool:
        if isinstance(change, Event):
            ahead.append(change)
        return is_stored(change)

    def written(self: Store, changes: list[Any], ledger: Ledger) -> None:
        ahead.clear()
        write(self, changes, ledger)

    def loaded(self: Store) -> Ledger:
        ahead.clear()
        return load(self)

    def early(engine: Engine, wanted: EventFilter, limit: int, *, after: int = 0, **place: Any) -> FoundEvents:
        found = find_events(engine, wanted, limit, after=after, **place)
        return replace(found, events=[*found.events, *(one for one in ahead if one.seq > after)])

    store = "gpulease_server.store.ledger_store.Store"
    return [
        (f"{store}.write", written),
        (f"{store}.load", loaded),
        ("gpulease_server.api.routes.events.find_events", early),
        (f"{RUNTIME}.writer.is_stored", noted),
    ]


def refuse_unknown_words() -> Patches:
    """A report with a word that the daemon does not know is refused."""
    return [("gpulease_server.api.report_body.replace_unknown_words", lambda *_: False)]


def trust_unknown_words() -> Patches:
    """A compute mode that the daemon does not know passes for none."""
    trusting = dict(report_body.REPLACEMENTS) | {("gpus", "compute_mode"): lambda _: {"compute_mode": None}}
    return [("gpulease_server.api.report_body.REPLACEMENTS", trusting)]


def forget_debts() -> Patches:
    """A client that gets no answer to a release, or to a request that it takes back, says it no more."""
    return [("gpulease.sansio.release_retries.Debts.add", lambda *_: None)]


def wait_for_lost_nodes() -> Patches:
    """A node that is silent is waited for without a bound."""
    return [(f"{CORE}.decide.lose_silent_nodes", lambda *_: None)]


def end_what_a_silent_worker_watches() -> Patches:
    """A lease ends at its ttl_s also while the worker that watches its owner is away."""
    return [(f"{CORE}.lease.is_spared", lambda *_: False)]


def queue_without_limit() -> Patches:
    """The limit of requests of one user that wait is not applied."""
    return [(f"{CORE}.queue.queue_is_full", lambda *_, **__: None)]


def grant_over_limits() -> Patches:
    """A limit that an administrator has set keeps no request out."""
    usage = f"{CORE}.user_limits.UserUsage"
    return [(f"{usage}.keeps_out", lambda *_, **__: False), (f"{usage}.limit_reached", lambda *_: None)]


def grant_what_is_reserved() -> Patches:
    """The calendar is written down and closes no GPU to anyone."""
    return [(f"{CORE}.calendar.Calendar.closed_to", lambda *_: frozenset())]


def interactive_without_limit() -> Patches:
    """What a user has by interactive requests is counted and does not matter."""
    applied = UserUsage.applied

    def of_others(self: UserUsage, lease: Lease) -> Any:
        return tuple(one for one in applied(self, lease) if not one.key.interactive)

    return [(f"{CORE}.user_limits.UserUsage.applied", of_others)]


def ignore_gpu_hours() -> Patches:
    """GPU-hours are counted, and keep no request out."""
    return [(f"{CORE}.user_limits.UserUsage._is_spent", lambda *_: False)]


def ignore_limits_of_tokens() -> Patches:
    """A limit of a token is shown and not obeyed."""
    return _without_limits_of(LimitKind.TOKEN)


def ignore_limits_of_groups() -> Patches:
    """The same of a group."""
    return _without_limits_of(LimitKind.GROUP)


def _without_limits_of(kind: LimitKind) -> Patches:
    applied = UserUsage.applied

    def of_others(self: UserUsage, lease: Lease) -> Any:
        return tuple(one for one in applied(self, lease) if one.key.kind is not kind)

    return [(f"{CORE}.user_limits.UserUsage.applied", of_others)]


def ignore_gpus_of_tokens() -> Patches:
    """How many GPUs are held with a token keeps no request out."""
    return [(f"{CORE}.token_budgets.held_gpus", lambda *_: 0)]


def ignore_hours_of_the_day() -> Patches:
    """The GPU-hours a day of a token are counted, and keep no request out."""
    return [(f"{CORE}.token_budgets._left_s", lambda _: None)]


def forget_hours_of_the_day() -> Patches:
    """After a restart nothing of a token's GPU-hours a day is used."""
    load = Store.load

    def unused(self: Store) -> Ledger:
        ledger = load(self)
        for record in list(ledger.budgets.values()):
            ledger.apply(replace(record, used_s=0.0))
        return ledger

    return [("gpulease_server.store.ledger_store.Store.load", unused)]


def outlast_budgets() -> Patches:
    """The budget of a token keeps requests out, and ends no lease."""
    return [(f"{CORE}.decide.spent_leases", lambda *_: ())]


def any_order() -> Patches:
    """Priorities are written down and not obeyed."""
    return [(f"{CORE}.demand_classes.rank_of", lambda *_: 1), (f"{CORE}.order.choose_first", lambda *_: None)]


def never_the_oldest() -> Patches:
    """No request ever goes first because it has waited longest."""
    return [(f"{CORE}.queue.choose_first", lambda *_: None)]


def no_bypass_counts() -> Patches:
    """Newer requests pass an older one that does not fit as often as they fit."""
    return [(f"{CORE}.backfill.BlockedRequests.count_bypass", lambda *_: None)]


def no_place_is_kept() -> Patches:
    """GPUs are held for a request, and its place follows from what everyone has used at each moment."""
    return [(f"{CORE}.queue.keep_places", lambda *_: None)]


def charge_each_lease_alike() -> Patches:
    """A lease counts as one GPU, however many it has."""

    def one(devices: Any, policy: Any) -> float:
        return float(bool(devices))

    return [(f"{CORE}.{place}.weight_of", one) for place in ("usage_changes", "fair_share")]


def forget_short_leases() -> Patches:
    """What was held since the last change of a user's usage is not added to it at the next."""

    def without(ledger: Ledger, user: str | None, now: Instant, policy: Any) -> Any:
        counted, known = usage.usage_of(ledger, user, now, policy), ledger.usage.get(user or "")
        return counted if known is None else replace(counted, used_s=known.used_s)

    return [(f"{CORE}.usage_changes.usage_of", without)]


def keep_entry_charges() -> Patches:
    """What counts for a lease beside the time that it is held stays when it ends."""
    charged_s = usage.entry_time_s

    def without_end(lease: Lease) -> float:
        return charged_s(lease) if lease.state is LeaseState.ACTIVE else 0.0

    return [(f"{CORE}.usage_changes.entry_time_s", without_end)]


def asked_again_keeps_its_place() -> Patches:
    """A request that is withdrawn leaves its place to the next one of its user."""
    end, enqueue, places = lease.end_lease, lease.enqueue, dict[str | None, int]()

    def leave(turn: Turn, record: LeaseRecord, why: EndReason) -> None:
        if record.lease.state is LeaseState.QUEUED and why is EndReason.CANCELLED:
            places[record.lease.holder.user] = record.arrival
        end(turn, record, why)

    def join(turn: Turn, asked: Lease, *about: Any, **how: Any) -> None:
        enqueue(turn, asked, *about, **how)
        record, place = turn.ledger.leases.get(asked.id), places.pop(asked.holder.user, None)
        if record is not None and place is not None:
            turn.ledger.withdraw(record)
            turn.ledger.apply(replace(record, place=place))

    return [(f"{CORE}.lease.end_lease", leave), (f"{CORE}.lease.enqueue", join)]


def ignore_groups() -> Patches:
    """Shares of groups are shown and not obeyed."""
    return [(f"{CORE}.group_usage.group_of", lambda *_: None)]


def members_before_groups() -> Patches:
    """What a user has used is compared first, and what the group has used where that is alike."""
    joined = group_usage._joined

    def turned(of_group: int, own: int, policy: Any) -> int:
        return joined(own, of_group, policy)

    return [(f"{CORE}.group_usage._joined", turned)]


def explain_by_arrival() -> Patches:
    """The place in the queue that is told is that by arrival, also where priorities or usage order."""
    return [(f"{CORE}.explain.explain.place_in_queue", Ledger.position_by_arrival)]


def explain_without_usage() -> Patches:
    """The place in the queue that is told leaves out what users and groups have used, which orders all the same."""
    return [(f"{CORE}.explain.explain.place_in_queue", Ledger.position_by_arrival)]


def explain_behind_by_arrival() -> Patches:
    """Who waits is said to be behind all who have waited longer."""

    def by_arrival(ledger: Ledger, record: LeaseRecord, *about: Any, **how: Any) -> Any:
        older = (one.lease.id for one in ledger.queued() if one.arrival < record.arrival)
        return replace(explain(ledger, record, *about, **how), behind=tuple(older))

    return [("gpulease_server.api.routes.leases.explain", by_arrival)]


def always_by_age() -> Patches:
    """Each grant by priority lets the oldest request go first, not only one of so many."""
    put = Turn.put

    def at_once(self: Turn, change: Any) -> None:
        put(self, replace(change, times=self.policy.max_overtakes) if isinstance(change, Overtakes) else change)

    return [(f"{CORE}.turn.Turn.put", at_once)]


def run_ahead_of_all() -> Patches:
    """Who declares a time is taken to delay no one, however long it is."""
    return [(f"{CORE}.easy_backfill.serves_s", lambda *_: float("inf"))]


def run_ahead_of_own_ends() -> Patches:
    """Who runs ahead counts on ends of leases that they could give back at once."""
    return [(f"{CORE}.easy_backfill.EasyBackfill._at_once", lambda *_: ())]


def preempt_anyone() -> Patches:
    """Leases end for others that have not opted in."""
    return [(f"{CORE}.ledger.is_preemptible", lambda _: True)]


def preempt_in_turns() -> Patches:
    """Leases end for requests that have opted in themselves."""
    return [(f"{CORE}.preemption.is_preemptible", lambda _: False)]


def preempt_at_once() -> Patches:
    """Leases end for others however short a time they have held their GPUs."""
    return [(f"{CORE}.victim_choice.held_s", lambda *_: 1e9)]


def preempt_for_others() -> Patches:
    """The GPUs of what has ended for a request are held for no one: the first that comes gets them."""
    return [(f"{CORE}.queue._start_preempting", lambda *_: None)]


def preempted_job_loses_its_place() -> Patches:
    """A job that was preempted goes to the end of the queue."""
    queue_next = job._queue_next

    def at_the_end(turn: Turn, record: JobRecord, attempt: Any, said: str, end: Any, pause_s: float | None) -> None:
        queue_next(turn, record, attempt, said, end, pause_s or 0.0)

    return [(f"{CORE}.job._queue_next", at_the_end)]


def twice_preempted_is_not_first() -> Patches:
    """A job that was preempted twice has its old place, and others go before it."""
    return [(f"{CORE}.ledger.goes_first", lambda _: False)]


def preempt_again_and_again() -> Patches:
    """A job ends for others as often as there are some."""
    return [(f"{CORE}.victim_choice.MAX_PREEMPTED", 1000)]


def reclaim_anyone() -> Patches:
    """The administrator's rule covers requests of every priority."""

    def for_all(demand: Any, policy: Any) -> Any:
        return replace(demand, reclaim_idle_after_s=policy.reclaim_interactive_after_s)

    return [(f"{CORE}.lease.with_reclaim_rule", for_all)]


def reclaim_without_notice() -> Patches:
    """Idle leases end at once."""
    return [(f"{CORE}.reclaim._give_notice", reclaim._end)]


def reclaim_what_is_trusted() -> Patches:
    """Idle leases end after the notice, whether their holders have heard of it or not."""
    return [(f"{CORE}.reclaim._moment_s", lambda turn, _: turn.now.mono_s + turn.policy.reclaim_notice_s)]


def reclaim_what_works() -> Patches:
    """What readings show of the work of a GPU does not matter."""
    observe_idle = gpu_observation.observe_idle

    def idle(turn: Turn, gpu: Any, reading: Any, known: Any, begun_at_s: float) -> Any:
        return observe_idle(turn, gpu, replace(reading, utilization_ratio=0.0), known, begun_at_s)

    return [(f"{CORE}.gpu_observation.observe_idle", idle)]


def read_work_with_processes() -> Patches:
    """Work is not seen in a reading that repeats the processes of an earlier one."""
    observe_gpu = gpu_observation._observe_gpu

    def of_whole(turn: Turn, gpu: Any, reading: Any, known: Any, observed_at_s: float | None, begun_at_s: float) -> Any:
        if observed_at_s is not None and observed_at_s < begun_at_s:
            reading = replace(reading, utilization_ratio=0.0)
        return observe_gpu(turn, gpu, reading, known, observed_at_s, begun_at_s)

    return [(f"{CORE}.gpu_observation._observe_gpu", of_whole)]


def reclaim_what_is_kept() -> Patches:
    """What the holder has said of idle GPUs is written down and not obeyed."""
    return [(f"{CORE}.reclaim.kept_now", lambda *_: None)]


def reclaim_for_no_one() -> Patches:
    """Idle leases end while others wait, whom they would help or not."""
    return [(f"{CORE}.reclaim.leases_to_reclaim", lambda _, idle: dict.fromkeys(idle, "others"))]


def reclaim_all_for_one() -> Patches:
    """All idle leases end for a request that some of them would help."""
    choose = reclaim.leases_to_reclaim

    def everything(turn: Turn, idle: Any) -> dict[str, str]:
        chosen = choose(turn, idle)
        return dict.fromkeys(idle, next(iter(chosen.values()))) if chosen else {}

    return [(f"{CORE}.reclaim.leases_to_reclaim", everything)]


def anyone_may_release() -> Patches:
    """Whose a lease is does not matter."""
    return [("gpulease_server.api.auth.callers.Caller.owns", lambda *_: True)]


MUTATIONS: dict[str, Callable[[], Patches]] = {
    made.__name__: made
    for made in (
        reply_before_commit,
        lose_keys,
        lose_releases,
        token_from_the_living,
        skip_draining,
        clean_by_an_old_reading,
        clean_with_leftovers,
        strangers_keep,
        any_reading_will_do,
        ignore_strangers,
        grant_what_another_has,
        ignore_cordons,
        half_a_gang,
        one_node_fewer,
        look_at_one_node,
        token_for_each_node,
        end_on_the_first_node,
        hold_halves,
        revive_over_another,
        short_after_restart,
        measure_by_the_wall,
        forget_renewals,
        show_before_commit,
        refuse_unknown_words,
        trust_unknown_words,
        forget_debts,
        wait_for_lost_nodes,
        end_what_a_silent_worker_watches,
        queue_without_limit,
        grant_over_limits,
        interactive_without_limit,
        ignore_gpu_hours,
        ignore_limits_of_tokens,
        ignore_limits_of_groups,
        ignore_gpus_of_tokens,
        ignore_hours_of_the_day,
        forget_hours_of_the_day,
        outlast_budgets,
        grant_what_is_reserved,
        anyone_may_release,
        any_order,
        never_the_oldest,
        always_by_age,
        explain_by_arrival,
        explain_without_usage,
        explain_behind_by_arrival,
        no_bypass_counts,
        no_place_is_kept,
        charge_each_lease_alike,
        forget_short_leases,
        keep_entry_charges,
        asked_again_keeps_its_place,
        ignore_groups,
        members_before_groups,
        run_ahead_of_all,
        run_ahead_of_own_ends,
        preempt_anyone,
        preempt_in_turns,
        preempt_at_once,
        preempt_for_others,
        preempted_job_loses_its_place,
        twice_preempted_is_not_first,
        preempt_again_and_again,
        reclaim_anyone,
        reclaim_without_notice,
        reclaim_what_is_trusted,
        reclaim_what_works,
        read_work_with_processes,
        reclaim_what_is_kept,
        reclaim_for_no_one,
        reclaim_all_for_one,
    )
}


OF_GANGS = ("one_node_fewer", "look_at_one_node", "token_for_each_node", "end_on_the_first_node", "hold_halves")
"""Faults that only show where there are gangs."""


OF_EXPLANATIONS = ("explain_by_arrival", "explain_without_usage", "explain_behind_by_arrival")
"""Faults that only show where someone has the order explained."""
OF_PRIORITIES = (
    "explain_by_arrival",
    "any_order",
    "never_the_oldest",
    "always_by_age",
    "interactive_without_limit",
    "run_ahead_of_all",
    "run_ahead_of_own_ends",
)
"""Faults that only show where there are requests of several priorities."""
OF_LIMITS = ("grant_over_limits", "interactive_without_limit", "run_ahead_of_own_ends")
"""Those that only show where limits are set."""
OF_BUDGETS = ("ignore_gpu_hours", "ignore_limits_of_tokens", "ignore_limits_of_groups")
"""Those that only show where GPU-hours are limited, or a token."""
OF_TOKEN_BUDGETS = ("ignore_gpus_of_tokens", "ignore_hours_of_the_day", "forget_hours_of_the_day", "outlast_budgets")
"""Those that only show where a token has a budget."""
OF_RESERVATIONS = ("grant_what_is_reserved",)
"""Those that only show where GPUs are reserved."""
OF_PREEMPTION = ("preempt_anyone", "preempt_in_turns", "preempt_at_once", "preempt_for_others")
"""Those that only show where leases end for others."""
OF_JOBS = ("preempted_job_loses_its_place", "twice_preempted_is_not_first", "preempt_again_and_again")
"""Those that only show where jobs end for others."""
OF_CROWDS = ("no_bypass_counts", "explain_behind_by_arrival")
"""Those that only show where many wait for few GPUs."""
OF_RECLAIM = (
    *("reclaim_anyone", "reclaim_without_notice", "reclaim_what_is_trusted", "reclaim_what_works"),
    *("read_work_with_processes", "reclaim_what_is_kept", "reclaim_for_no_one", "reclaim_all_for_one"),
)
"""Those that only show where idle GPUs are taken back."""
OF_FAIR_SHARE = ("no_place_is_kept",)
"""Those that only show where usage orders."""
OF_SHARES = (
    *("charge_each_lease_alike", "forget_short_leases", "keep_entry_charges", "asked_again_keeps_its_place"),
    *("ignore_groups", "members_before_groups", "explain_without_usage"),
)
"""Those that only show where groups share, or what is short counts."""


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """The daemon with this fault, for as long as it lasts; the sound one for None."""
    with contextlib.ExitStack() as stack:
        for target, replacement in MUTATIONS[name]() if name else ():
            stack.enter_context(mock.patch(target, replacement))
            if target == f"{CORE}.lease.end_lease":
                stack.enter_context(mock.patch(f"{CORE}.liveness.end_lease", replacement))
        yield


if __name__ == "__main__":
    with mutated(sys.argv.pop(1)):
        sys.exit(main())
