"""Reservations in the calendar: no lease of anyone else may last into a window, and who waits is told."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from types import FrameType
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.errors import InUse, InvalidRequest, NeverFits, NotFound
from gpulease_protocol.model import Device, GpuState, Holder, JobState, Lease, LeaseState, Liveness, Selection
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.calendar import END_MARGIN_S, MAX_RESERVATIONS, ReservationRemoved
from gpulease_server.core.calendar import Calendar as Entries
from gpulease_server.core.explain.dry_run import dry_run
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import CancelRequested
from gpulease_server.core.policy import Policy
from gpulease_server.runtime.outage import copy_ledger, reset_deadlines
from tests.core.build import World, gpu, uuid

HOUR_S = 3600.0
FITS_S = HOUR_S - END_MARGIN_S - 1.0
"""A time that ends early enough before a window that begins in an hour."""
LONG_S = 1e6


def world(gpus: int = 2, **policy: Any) -> World:
    return World(policy=Policy(**policy)).node(gpus=gpus)


def ask(here: World, count: int = 1, **what: Any) -> Lease:
    lease = here.lease(count, **{"ttl_s": LONG_S, **what})
    here.check()
    return lease


def is_active(here: World, lease: Lease) -> bool:
    return here.now_of(lease).state is LeaseState.ACTIVE


def indices(lease: Lease) -> list[int]:
    return [device.index for device in lease.gpus]


def why(here: World, lease: Lease) -> str:
    return explain(here.ledger, here.ledger.leases[lease.id], here.now, here.policy).sentence


def entries(here: World) -> list[Reservation]:
    return list(here.ledger.calendar.entries.values())


def test_others_get_a_reserved_gpu_only_for_a_time_that_ends_before_the_window() -> None:
    here = world(gpus=1)
    assert here.reserve(uuid(0), user="ada") is None
    open_end = ask(here, user="bob")
    assert not is_active(here, open_end)
    assert "reserved for user ada from" in why(here, open_end)
    assert "with `time_s` (`--time`) of at most 31" in why(here, open_end)
    here.release(open_end)
    too_long = ask(here, user="bob", time_s=FITS_S + 10)
    assert not is_active(here, too_long)
    here.release(too_long)
    assert is_active(here, ask(here, user="bob", time_s=FITS_S - 10))


@pytest.mark.parametrize(("what", "said"), [("lease", "is held by lease-"), ("process", "by pid 4242")])
def test_who_has_a_reserved_gpu_is_named_beside_the_reservation_until_its_window_begins(what: str, said: str) -> None:
    here = world(gpus=1)
    if what == "lease":
        ask(here, user="eve", time_s=60.0)
    assert here.reserve(uuid(0), user="ada") is None
    if what == "process":
        here.node(gpus=[gpu(0, pids=(4242,))])
    waits = ask(here, user="bob")
    assert said in why(here, waits)
    assert "It is reserved for user ada from" in why(here, waits)
    here.at_s += HOUR_S
    here.report()
    assert said not in why(here, waits)
    assert "GPU 0 of a is reserved for user ada from" in why(here, waits)


def test_the_one_whom_it_is_for_needs_no_time_and_passes_who_asked_for_the_same_before() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada")
    waits = ask(here, user="bob")
    own = ask(here, user="ada")
    assert (is_active(here, waits), is_active(here, own)) == (False, True)


def test_those_who_may_not_have_it_hold_up_no_one_behind_them_who_may() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada")
    held = ask(here, user="ada")
    others = [ask(here, user=user) for user in ("bob", "eve", "bob")]
    waits = ask(here, user="ada")
    here.release(held)
    here.report()
    assert is_active(here, waits)
    assert not any(is_active(here, one) for one in others)


def test_a_group_is_all_of_its_members() -> None:
    here = world(gpus=1)
    assert isinstance(here.reserve(uuid(0), group="vision"), NotFound)
    here.limit("vision", "group", members=("ada", "eve"), max_gpus=4)
    assert here.reserve(uuid(0), group="vision") is None
    assert not is_active(here, ask(here, user="bob"))
    assert is_active(here, ask(here, user="eve"))


def test_a_group_is_not_removed_while_gpus_are_reserved_for_it() -> None:
    here = world(gpus=1)
    here.limit("vision", "group", members=("ada",), max_gpus=4)
    here.limit("other", "group", members=("eve",), max_gpus=4)
    here.reserve(uuid(0), group="vision")
    (kept,) = entries(here)
    refused = here.limit("vision", "group")
    assert isinstance(refused, InUse)
    assert kept.id in str(refused)
    assert here.limit("other", "group") is None
    here.unreserve(kept.id)
    assert here.limit("vision", "group") is None


def test_a_window_that_has_begun_is_closed_until_its_end() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada", after_s=0.0, for_s=60.0)
    waits = ask(here, user="bob", time_s=1.0)
    here.pass_time(59.0)
    assert not is_active(here, waits)
    here.pass_time(2.0)
    here.answer_wanted()
    assert is_active(here, waits)
    assert not entries(here)
    assert [one.gpus for one in here.events("reservation.ended")] == [(uuid(0),)]


def test_what_is_cancelled_is_granted_in_the_same_turn() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada")
    waits = ask(here, user="bob")
    assert isinstance(here.unreserve("reservation-none"), NotFound)
    here.report()
    assert here.unreserve(entries(here)[0].id) is None
    assert is_active(here, waits)
    assert str(here.events("reservation.cancelled")[0].reason).endswith(", by root")


def test_a_lease_that_may_last_into_the_window_is_in_the_way_of_making_one() -> None:
    here = world(gpus=2)
    held = ask(here, user="bob")
    refused = here.reserve(uuid(0), user="ada")
    assert isinstance(refused, InUse)
    assert "leased to bob" in str(refused)
    assert "declares no time" in str(refused)
    assert here.reserve(uuid(0), user="bob") is None, "it is for the holder"
    assert isinstance(here.reserve(uuid(0), user="ada"), InUse), "two windows never share a GPU"
    assert "reserved for user bob" in str(here.reserve(uuid(0), user="ada"))
    assert here.reserve(uuid(0), user="bob", after_s=2 * HOUR_S) is None, "one begins as the other ends"
    here.release(held)


@pytest.mark.parametrize(("time_s", "fits"), [(HOUR_S - END_MARGIN_S - 1, True), (HOUR_S - END_MARGIN_S + 1, False)])
def test_a_lease_with_a_time_is_in_the_way_only_if_it_may_last_so_long(time_s: float, fits: bool) -> None:
    here = world(gpus=1)
    ask(here, user="bob", time_s=time_s)
    assert (here.reserve(uuid(0), user="ada") is None) is fits


def test_a_number_of_gpus_of_a_node_are_chosen_of_those_that_no_one_is_in_the_way_of() -> None:
    here = world(gpus=4)
    held = ask(here, user="bob")
    assert here.reserve(node="a", count=3, user="ada") is None
    assert {device.index for device in entries(here)[0].gpus} == {0, 1, 2, 3} - set(indices(held))
    refused = here.reserve(node="a", count=2, user="eve")
    assert isinstance(refused, InUse)
    assert "2 GPUs of node a cannot be reserved: 0 of 4" in str(refused)


def test_more_gpus_than_a_node_has_can_never_be_reserved() -> None:
    here = world(gpus=4)
    refused = here.reserve(node="a", count=5, user="ada")
    assert isinstance(refused, NeverFits)
    assert str(refused.detail) == "5 GPUs of node a cannot be reserved: it has 4."
    assert here.reserve(node="a", count=4, user="ada") is None


@pytest.mark.parametrize(("count", "chosen"), [(2, {2, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3})])
def test_of_the_gpus_of_a_node_those_that_work_are_chosen_first(count: int, chosen: set[int]) -> None:
    here = World().node(gpus=[gpu(0), gpu(1, pids=(99,)), gpu(2), gpu(3)])
    here.cordon(0)
    assert here.state(1) is GpuState.FOREIGN
    assert here.reserve(node="a", count=count, user="ada") is None
    assert {device.index for device in entries(here)[0].gpus} == chosen


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ({"after_s": -20.0, "for_s": 10.0}, InvalidRequest),
        ({"after_s": 366 * 86400.0}, InvalidRequest),
        ({"gpus": ("GPU-none",)}, NotFound),
    ],
)
def test_what_makes_no_sense_is_refused(what: dict[str, Any], error: type[Exception]) -> None:
    here = world(gpus=1)
    assert isinstance(here.reserve(*what.pop("gpus", (uuid(0),)), user="ada", **what), error)
    assert not entries(here)


def test_there_are_so_many_at_most() -> None:
    here = world(gpus=1)
    made = here.ledger.calendar
    assert here.reserve(uuid(0), user="ada", after_s=0.0, for_s=1.0) is None
    one = entries(here)[0]
    for number in range(MAX_RESERVATIONS - 1):
        made.entries[f"more-{number}"] = one
    assert isinstance(here.reserve(uuid(0), user="ada", after_s=HOUR_S), InvalidRequest)


def test_other_gpus_go_to_who_comes_and_nothing_is_held_on_reserved_ones() -> None:
    here = world(gpus=3, max_bypass=0)
    here.reserve(uuid(0), user="ada")
    both = ask(here, 2, user="bob")
    assert sorted(indices(both)) == [1, 2]
    waits = ask(here, 1, user="bob")
    assert not is_active(here, waits)
    assert is_active(here, ask(here, 1, user="eve", time_s=FITS_S)), "GPU 0 is not held for who may not have it"


def test_a_listed_gpu_or_a_whole_node_is_closed_too() -> None:
    here = world(gpus=2)
    here.reserve(uuid(0), user="ada")
    assert not is_active(here, ask(here, user="bob", selection=Selection.LISTED, indices=(0,)))
    assert not is_active(here, ask(here, 2, user="bob", selection=Selection.ALL))


def test_a_gang_gets_none_of_them_and_is_told() -> None:
    here = World().node("a", gpus=1).node("b", gpus=1)
    here.reserve(uuid(0, "b"), user="ada")
    job = here.submit(user="bob", nodes=2)
    lease = here.ledger.leases[here.ledger.jobs[job].job.lease_id].lease
    assert lease.state is LeaseState.QUEUED
    assert "1 of 2 nodes are ready: a." in why(here, lease)
    own = here.submit(user="ada", nodes=2)
    assert here.ledger.jobs[own].job.state.value == "starting"


def test_a_short_request_is_told_that_no_time_fits_before_a_window_that_begins_soon() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada", after_s=120.0)
    waits = ask(here, user="bob", time_s=30.0)
    assert "What others run there must end 7 min before that: it is too late for any." in why(here, waits)
    here.pass_time(121.0)
    assert "must end" not in why(here, waits)


def test_a_job_is_closed_out_unless_its_time_fits() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada")
    waits = here.submit(user="bob")
    lease = here.ledger.leases[here.ledger.jobs[waits].job.lease_id].lease
    assert "with `timeout_s` (`--timeout`) of at most" in why(here, lease)
    fits = here.submit(user="bob", timeout_s=FITS_S - 10)
    states = [here.ledger.jobs[one].job.state.value for one in (waits, fits)]
    assert states == ["queued", "starting"]


def test_the_longest_lease_of_a_token_counts_as_a_declared_time() -> None:
    here = world(gpus=2)
    here.reserve(uuid(0), uuid(1), user="ada")
    budget = Budget(max_lease_s=FITS_S - 10)
    assert is_active(here, ask(here, user="bob", token="token-1", budget=budget))
    assert not is_active(here, ask(here, user="bob", token="token-2", budget=Budget(max_gpus=4)))


def skip(here: World, seconds: float) -> None:
    here.at_s += seconds
    here.report()
    here.pass_time(0.5)


def started_late(by_s: float) -> tuple[World, str]:
    """A job of bob whose time just fits before ada's window in an hour, and that starts so much later."""
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada")
    job = here.submit(user="bob", timeout_s=FITS_S - 10, retries=3)
    here.at_s += by_s
    here.run_job(job)
    return here, job


def test_a_job_that_starts_too_late_is_ended_before_the_window() -> None:
    here, job = started_late(1200.0)
    skip(here, HOUR_S - 1200.0 - 110.0)
    assert here.ledger.jobs[job].job.state is JobState.RUNNING, "its GPU is of use until then"
    skip(here, 15.0)
    stopping = here.ledger.jobs[job]
    assert (stopping.job.state, stopping.grace_s) == (JobState.STOPPING, 35.0)
    assert "started too late to end by itself before that: GPU 0 of a is reserved for user ada" in str(
        stopping.job.reason
    )
    skip(here, 5.0)
    assert [one.job_id for one in here.events("job.ended_for_reservation")] == [job], "it is told once"
    here.ended(job, 143)
    ended = here.ledger.jobs[job].job
    assert (ended.state, ended.reason) == (JobState.CANCELLED, stopping.job.reason)


def test_a_late_job_that_was_cancelled_with_a_long_grace_is_ended_too() -> None:
    here, job = started_late(1200.0)
    here.turn(CancelRequested(cause="cancel", job_id=job, grace_s=HOUR_S))
    skip(here, HOUR_S - 1200.0 - 90.0)
    assert here.ledger.jobs[job].grace_s == 35.0


def test_no_other_job_is_ended_for_a_reservation() -> None:
    here, job = started_late(140.0)
    skip(here, HOUR_S - 140.0 - 300.0)
    assert here.ledger.jobs[job].job.state is JobState.RUNNING
    own = world(gpus=1)
    own.limit("vision", "group", members=("ada",), max_gpus=4)
    own.reserve(uuid(0), group="vision")
    held = own.submit(user="ada")
    own.run_job(held)
    own.limit("vision", "group", members=("eve",), max_gpus=4)
    skip(own, HOUR_S + 10.0)
    assert own.ledger.jobs[held].job.state is JobState.RUNNING, "what a former member holds goes on"


def test_the_time_of_a_job_in_the_way_counts_from_its_start() -> None:
    here = world(gpus=1)
    job = here.submit(user="bob", timeout_s=600.0)
    here.at_s += 300.0
    here.report()
    assert isinstance(here.reserve(uuid(0), user="ada", after_s=600.0 + END_MARGIN_S - 1.0), InUse), "all is to come"
    here.run_job(job)
    skip(here, 100.0)
    assert isinstance(here.reserve(uuid(0), user="ada", after_s=500.0 + END_MARGIN_S - 2.0), InUse)
    assert here.reserve(uuid(0), user="ada", after_s=500.0 + END_MARGIN_S + 1.0) is None


def test_restarts_give_a_lease_no_time_within_the_window() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada")
    lease = ask(here, user="bob", time_s=FITS_S - 10)
    here.at_s += FITS_S - 11
    for _ in range(3):
        here.ledger.apply(replace(here.ledger.leases[lease.id], granted_at_s=None))
        reset_deadlines(here.ledger, here.now)
        ends_at = here.now.at + timedelta(seconds=here.ledger.ends_s[lease.id] - here.at_s)
        assert here.now.at < ends_at <= entries(here)[0].from_at
        here.at_s += 140.0


def test_a_late_renewal_revives_no_lease_into_a_window() -> None:
    here = world(gpus=1)
    lost = here.lease(user="bob", ttl_s=5.0)
    here.pass_time(6.0)
    assert here.now_of(lost).state is LeaseState.ENDED
    assert here.reserve(uuid(0), user="ada") is None
    assert not isinstance(here.renew(lost), Lease)


def test_a_late_renewal_revives_what_ends_before_the_window() -> None:
    here = world(gpus=1)
    lost = here.lease(user="bob", ttl_s=5.0, time_s=600.0)
    here.pass_time(6.0)
    assert here.reserve(uuid(0), user="ada") is None
    revived = here.renew(lost)
    assert isinstance(revived, Lease)
    assert revived.state is LeaseState.ACTIVE


def test_a_dry_run_knows_the_calendar() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada")
    asked = Lease(
        id="dry",
        state=LeaseState.QUEUED,
        demand=ask(here, user="bob").demand,
        holder=Holder(user="eve"),
        liveness=Liveness.HEARTBEAT,
        ttl_s=60.0,
        created_at=here.now.at,
    )
    found = dry_run(here.ledger, asked, here.now, here.policy)
    assert getattr(found, "verdict", None) == "not_now"
    assert {one.code for one in getattr(found, "obstacles", ())} == {"reserved"}


def test_a_copy_of_the_ledger_has_a_calendar_of_its_own() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada")
    copy = copy_ledger(here.ledger)
    assert copy.calendar == here.ledger.calendar
    here.unreserve(entries(here)[0].id)
    assert copy.calendar.closed_to("bob", None, None) == {uuid(0)}
    assert not here.ledger.calendar.closed_to("bob", None, None)


def test_users_apart_are_the_same_object_while_they_are_the_same() -> None:
    here = world(gpus=1)
    here.reserve(uuid(0), user="ada")
    limited, calendar, index = frozenset({"eve"}), here.ledger.calendar, here.ledger.limits
    apart = calendar.users_apart(limited, index)
    assert apart == {"eve", "ada"}
    assert calendar.users_apart(frozenset(limited), index) is apart
    here.limit("vision", "group", members=("ann",), max_gpus=9)
    here.reserve(uuid(0), group="vision", after_s=3 * HOUR_S)
    assert calendar.users_apart(limited, index) == {"eve", "ada", "ann"}
    assert Entries().closed_to("bob", None, None) == frozenset()


def _random_entries(pick: random.Random, number: int) -> list[Reservation]:
    """Reservations of GPUs `g0` to `g9`, at any time of an hour, for users and groups."""
    begin, made = World().now.at, list[Reservation]()
    for one in range(number):
        from_at = begin + timedelta(minutes=pick.randrange(60))
        user, group = pick.choice([("ada", None), ("bob", None), (None, "vision")])
        indices = pick.sample(range(10), pick.choice([1, 3]))
        gpus = [Device(uuid=f"g{index}", node="n", index=index) for index in indices]
        made.append(
            Reservation(
                id=f"reservation-{one}",
                gpus=tuple(gpus),
                from_at=from_at,
                to_at=from_at + timedelta(minutes=pick.randrange(1, 30)),
                user=user,
                group=group,
                made_at=begin,
            )
        )
    return made


@pytest.mark.parametrize("seed", range(6))
def test_the_calendar_answers_as_a_walk_through_all_entries_does(seed: int) -> None:
    pick, calendar, kept = random.Random(seed), Entries(), dict[str, Reservation]()
    for entry in _random_entries(pick, 60):
        calendar.put(entry)
        kept[entry.id] = entry
        if pick.random() < 0.3:
            gone = pick.choice(list(kept))
            calendar.put(ReservationRemoved(gone))
            del kept[gone]
        user, group = pick.choice([("ada", None), ("ada", "vision"), ("eve", "vision"), ("eve", None), (None, None)])
        until = pick.choice([None, entry.from_at, entry.to_at])
        now, uuid = entry.from_at, f"g{pick.randrange(10)}"
        every = sorted(kept.values(), key=lambda one: (one.from_at, one.id))
        others = [
            one for one in every if (one.group != group if one.group is not None else one.user != user or user is None)
        ]
        before = [one for one in others if until is None or one.from_at < until]

        def first(entries: list[Reservation], uuid: str = uuid) -> Reservation | None:
            return next((one for one in entries if uuid in {gpu.uuid for gpu in one.gpus}), None)

        assert list(calendar.in_order()) == every
        assert calendar.closed_to(user, group, until) == {gpu.uuid for one in before for gpu in one.gpus}
        assert calendar.first_in_the_way(uuid, user, group, until) == first(before)
        assert calendar.next_of_others({uuid}, user, group, now) == first([one for one in others if one.to_at > now])
        shares = [one for one in every if one.from_at < entry.to_at and entry.from_at < one.to_at]
        assert calendar.within(uuid, entry.from_at, entry.to_at) == first(shares)


def test_a_calendar_is_filled_at_the_same_cost_for_each_reservation() -> None:
    def calls(number: int) -> int:
        entries, calendar, found = _random_entries(random.Random(1), number), Entries(), 0

        def count(_: FrameType, event: str, __: Any) -> None:
            nonlocal found
            found += event == "call"

        sys.setprofile(count)
        try:
            for entry in entries:
                calendar.put(entry)
        finally:
            sys.setprofile(None)
        return found

    assert calls(800) < 16 * calls(100), "more only by the logarithm of their number"


def test_answers_of_the_calendar_are_kept_for_so_many_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease_server.core.calendar.MAX_KNOWN_GPUS", 40)
    calendar, entries = Entries(), _random_entries(random.Random(2), 60)
    for entry in entries:
        calendar.put(entry)
    for entry in entries:
        for user in ("ada", "bob", "eve"):
            calendar.closed_to(user, None, entry.from_at)
            assert sum(map(len, calendar._closed.values())) <= 40


def bypassed(ends_s: float | None, **policy: Any) -> tuple[World, Lease, Lease]:
    """One of three GPUs is leased, which ends so. A request for all of them fits before the window of the next hour
    now, and has been bypassed as often as it may be. The last to pass has a GPU."""
    here = world(gpus=3, **{"max_bypass": 1, "max_bypass_s": 1e9, **policy})
    here.reserve(uuid(0), uuid(1), uuid(2), user="ada")
    here.lease(user="ada", time_s=ends_s, ttl_s=LONG_S)
    waits = ask(here, 3, user="bob", time_s=900.0)
    passes = ask(here, user="eve", time_s=60.0)
    return here, waits, passes


def held_for(here: World, lease: Lease) -> int:
    return len(explain(here.ledger, here.ledger.leases[lease.id], here.now, here.policy).held)


@pytest.mark.parametrize(
    ("ends_s", "is_held"),
    [
        (HOUR_S - 900.0 - END_MARGIN_S - 60.0, True),
        (HOUR_S - 900.0 - END_MARGIN_S + 60.0, False),
        (None, True),
    ],
)
def test_nothing_is_held_for_one_that_is_closed_out_before_it_can_start(ends_s: float | None, is_held: bool) -> None:
    here, waits, passes = bypassed(ends_s)
    assert is_active(here, passes)
    assert held_for(here, waits) == is_held
    assert ("No GPUs are held for it" in why(here, waits)) is not is_held
    assert is_active(here, ask(here, user="eve", time_s=60.0)) is not is_held


def test_what_is_free_sooner_than_was_declared_still_goes_to_the_oldest() -> None:
    here = world(gpus=2, max_bypass=1, max_bypass_s=1e9)
    here.reserve(uuid(0), uuid(1), user="ada")
    lasts = here.lease(user="ada", time_s=3000.0, ttl_s=LONG_S)
    waits = ask(here, 2, user="bob", time_s=900.0)
    passes = [ask(here, user="eve", time_s=60.0)]
    here.release(lasts)
    here.release(passes[0])
    here.report()
    assert is_active(here, waits)


def test_a_job_that_is_being_stopped_is_given_back_and_keeps_no_one_out_until_its_time_is_over() -> None:
    here = world(gpus=2, max_bypass=1, max_bypass_s=1e9)
    here.reserve(uuid(0), uuid(1), user="ada")
    job = here.submit(user="ada", timeout_s=3000.0)
    here.run_job(job)
    waits = ask(here, 2, user="bob", time_s=900.0)
    here.release(ask(here, user="eve", time_s=60.0))
    here.report()
    assert held_for(here, waits) == 0
    here.cancel(job)
    assert held_for(here, waits) == 1
    assert not is_active(here, ask(here, user="eve", time_s=60.0))


def test_after_a_day_they_are_held_for_it_all_the_same() -> None:
    """Holders may declare more time than they take, and windows follow each other: it must not wait forever."""
    here = world(gpus=2, max_bypass=1, max_bypass_s=1e9)
    here.reserve(uuid(0), uuid(1), user="ada", after_s=40 * HOUR_S)
    here.lease(user="ada", time_s=30 * HOUR_S, ttl_s=LONG_S)
    waits = ask(here, 2, user="bob", time_s=15 * HOUR_S)
    here.release(ask(here, user="eve", time_s=60.0))
    here.report()
    skip(here, 23.9 * HOUR_S)
    assert held_for(here, waits) == 0
    skip(here, 0.2 * HOUR_S)
    assert held_for(here, waits) == 1
    assert not is_active(here, ask(here, user="eve", time_s=60.0))


def test_daemons_that_restart_each_night_do_not_begin_that_day_again() -> None:
    here = world(gpus=2, max_bypass=1, max_bypass_s=1e9)
    here.reserve(uuid(0), uuid(1), user="ada", after_s=40 * HOUR_S)
    here.lease(user="ada", time_s=30 * HOUR_S, ttl_s=LONG_S)
    waits = ask(here, 2, user="bob", time_s=15 * HOUR_S)
    here.release(ask(here, user="eve", time_s=60.0))
    here.report()
    skip(here, 23.9 * HOUR_S)
    times, _ = here.ledger.bypasses[waits.id]
    here.ledger.bypasses[waits.id] = times, here.now.mono_s  # counted again from the leases, and its seconds from now
    skip(here, 0.2 * HOUR_S)
    assert held_for(here, waits) == 1


@pytest.mark.parametrize("policy", [{"max_bypass": 0}, {"max_bypass_s": 0.0}])
def test_where_no_one_may_pass_gpus_are_held_although_it_is_closed_out(policy: dict[str, Any]) -> None:
    here, waits, passes = bypassed(HOUR_S - 900.0, **policy)
    assert not is_active(here, passes)
    assert held_for(here, waits) == 2


def _crossed(here: World, lease: Lease, granted_at: datetime, calendar: list[Reservation]) -> Reservation | None:
    """A reservation that a grant of this moment crosses, found without the calendar's own code."""
    time_s, held = lease.demand.time_s, {device.uuid for device in lease.gpus}
    for entry in calendar:
        if entry.user == lease.holder.user or held.isdisjoint(device.uuid for device in entry.gpus):
            continue
        if time_s is None or granted_at + timedelta(seconds=time_s) > entry.from_at:
            return entry
    return None


@pytest.mark.parametrize("seed", range(8))
def test_no_grant_ever_crosses_a_reservation(seed: int) -> None:  # noqa: C901 - one case for each happening
    """Requests, reservations and ends at random; each grant is judged by the records alone. At the end everything that
    waits is served once no one is in its way."""
    pick = random.Random(seed)
    here = World(policy=Policy(max_bypass=pick.choice([0, 2, 10]), fair_share=pick.random() < 0.4))
    here.node("a", gpus=3).node("b", gpus=3)
    judged, users = set[str](), ("ada", "bob", "eve")
    crossings = refused = 0

    def judge() -> None:
        here.answer_wanted()
        for record in here.ledger.leases.values():
            if record.lease.state is LeaseState.ACTIVE and record.lease.id not in judged:
                judged.add(record.lease.id)
                assert record.lease.granted_at is not None
                assert _crossed(here, record.lease, record.lease.granted_at, entries(here)) is None
        here.check()

    for _ in range(150):
        kind = pick.random()
        if kind < 0.45:
            time_s = pick.choice([None, 100.0, 1000.0, 4000.0])
            here.ask(pick.choice([1, 1, 2, 3]), user=pick.choice(users), ttl_s=LONG_S, time_s=time_s)
        elif kind < 0.6:
            uuids = pick.sample([uuid(index, node) for node in "ab" for index in range(3)], pick.choice([1, 2]))
            window = {"after_s": pick.choice([0.0, 500.0, 1500.0]), "for_s": pick.choice([300.0, 2000.0])}
            refused += here.reserve(*uuids, user=pick.choice(users), **window) is not None
            crossings += 1
        elif kind < 0.65 and entries(here):
            here.unreserve(pick.choice(entries(here)).id)
        elif kind < 0.9:
            active = [one.lease for one in here.ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]
            if active:
                here.release(pick.choice(active))
        else:
            here.at_s += pick.choice([10.0, 400.0])
            here.pass_time(0.5)
        here.report("a")
        here.report("b")
        judge()
    assert 0 < refused < crossings, "some are made, and some are refused"
    for entry in entries(here):
        here.unreserve(entry.id)
    for _ in range(400):
        if not here.ledger.queue:
            return
        for one in [one.lease for one in here.ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]:
            here.release(one)
        here.pass_time(0.25)
        judge()
    raise AssertionError("requests wait that nothing is in the way of")
