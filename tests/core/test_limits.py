"""Limits that an administrator sets: of users, groups and tokens; over the configuration's; at each grant."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.errors import InvalidRequest, LeaseLost, NotFound, OverQuota
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import EndReason, Holder, Lease, LeaseState, Liveness, Priority, Selection
from gpulease_server.core.explain.dry_run import dry_run
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.limit_changes import limit_use
from gpulease_server.core.limit_records import LimitKey, UserLimits
from gpulease_server.core.pending import PendingRequest, PendingRequests
from gpulease_server.core.policy import Policy
from gpulease_server.core.user_limits import valid_limits
from gpulease_server.runtime.outage import copy_ledger, reset_deadlines
from tests.core.build import World

LONG_S = 1e6


def world(size: int = 8, max_bypass: int = 10, **limits: int) -> World:
    return World(policy=Policy(limits=UserLimits(**limits), max_bypass=max_bypass)).node(gpus=size)


def ask(here: World, count: int = 1, **what: Any) -> Lease:
    lease = here.lease(count, **{"ttl_s": LONG_S, **what})
    here.check()
    return lease


def refused(here: World, count: int = 1, **what: Any) -> OverQuota:
    call = here.ask(count, **what)
    here.answer_wanted()
    answer = here.answers[call]
    assert isinstance(answer, OverQuota), answer
    return answer


def is_active(here: World, lease: Lease) -> bool:
    return here.now_of(lease).state is LeaseState.ACTIVE


def why(here: World, lease: Lease) -> str:
    return explain(here.ledger, here.ledger.leases[lease.id], here.now, here.policy).sentence


def give_back(here: World, lease: Lease) -> None:
    here.release(here.now_of(lease))
    here.report()


def events(here: World, kind: str) -> list[str]:
    return [one.reason or "" for one in here.events(kind)]


# What limits a request


def test_a_user_waits_at_their_own_limit_and_delays_no_one() -> None:
    here = world()
    here.limit("ada", max_gpus=4)
    held = ask(here, 4, user="ada")
    waits = ask(here, 2, user="ada")
    assert not is_active(here, waits)
    assert "user ada has 4 GPUs and asks for 2 more; the limit is 4 at a time" in why(here, waits)
    assert is_active(here, ask(here, 4, user="bob"))
    give_back(here, held)
    assert is_active(here, waits)


def test_a_limit_that_is_set_stands_in_the_place_of_the_configurations_whether_less_or_more() -> None:
    here = world(gpus=2)
    here.limit("ada", max_gpus=3)
    here.limit("eve", max_gpus=1)
    assert [is_active(here, ask(here, user=user)) for user in ("ada",) * 4] == [True] * 3 + [False]
    assert [is_active(here, ask(here, user=user)) for user in ("eve",) * 2] == [True, False]
    assert [is_active(here, ask(here, user=user)) for user in ("bob",) * 3] == [True] * 2 + [False]


def test_a_limit_of_leases_alone_leaves_the_configurations_limit_of_gpus() -> None:
    here = world(gpus=2)
    here.limit("ada", max_leases=1)
    found = valid_limits(here.ledger.limits, LimitKey(LimitKind.USER, "ada"), here.policy.limits)
    assert (found.max_gpus, found.max_leases) == (2, 1)


def test_a_group_counts_all_of_its_members() -> None:
    here = world()
    here.limit("vision", "group", members=("ada", "bob"), max_gpus=4)
    ask(here, 3, user="ada")
    waits = ask(here, 2, user="bob")
    assert "group vision has 3 GPUs and user bob asks for 2 more; the limit is 4 at a time" in why(here, waits)
    assert is_active(here, ask(here, 1, user="bob")), "what fits"
    assert is_active(here, ask(here, 4, user="cleo")), "who is in no group"


def test_a_token_counts_what_is_held_with_it_beside_its_budget() -> None:
    here = world()
    here.limit("t", "token", max_leases=2)
    for budget in (None, Budget(max_gpus=8)):
        held = [ask(here, user="ada", token="t", budget=budget) for _ in range(2)]
        waits = ask(here, user="ada", token="t", budget=budget)
        assert "token t has 2 leases; the limit is 2 at a time" in why(here, waits)
        assert is_active(here, ask(here, user="ada")), "without the token"
        newer = ask(here, user="ada", token="t", budget=budget)
        assert not is_active(here, newer)
        for lease in held:
            give_back(here, lease)
        assert is_active(here, waits)
        assert is_active(here, newer)
        for lease in (waits, newer):
            give_back(here, lease)


def test_of_several_limits_the_tightest_decides() -> None:
    here = world()
    here.limit("ada", max_gpus=6)
    here.limit("vision", "group", members=("ada",), max_gpus=5)
    here.limit("t", "token", max_gpus=3)
    assert len(ask(here, selection=Selection.AUTO, user="ada", token="t").gpus) == 3
    assert len(ask(here, selection=Selection.AUTO, user="ada").gpus) == 2


def test_a_gang_counts_on_all_of_its_nodes() -> None:
    here = world(2).node("b", gpus=2)
    here.limit("ada", max_gpus=3)
    assert "may have 3 at a time" in refused(here, 2, nodes=2, user="ada").detail
    held = ask(here, 1, nodes=2, user="ada")
    assert is_active(here, held)
    assert not is_active(here, ask(here, 2, user="ada"))


# Refused at once


def test_what_never_fits_is_refused_at_once_and_names_whose_limit_it_is() -> None:
    here = world()
    here.limit("vision", "group", members=("ada",), max_gpus=4)
    for what in ({"count": 5}, {"selection": Selection.ALL}):
        answer = refused(here, **what, user="ada")  # type: ignore[arg-type]
        assert (answer.status, answer.code) == (422, "over_quota")
        assert "group vision may have 4 at a time" in answer.detail


def test_a_longer_lease_than_allowed_is_refused_though_gpus_are_free() -> None:
    here = world()
    here.limit("ada", max_lease_s=3600.0)
    detail = refused(here, user="ada", time_s=7200.0).detail
    assert "time_s is 7200 s, and a lease of user ada may last 60 min (3600 s)" in detail
    job = here.submit(user="ada", timeout_s=7200.0)
    assert job not in here.ledger.jobs
    answer = here.answers[f"submit-{job.removeprefix('job-')}"]
    assert isinstance(answer, OverQuota)
    assert "timeout_s is 7200 s" in answer.detail
    assert ask(here, user="bob").demand.time_s is None


def test_a_lease_ends_when_it_has_lasted_as_long_as_its_user_may_have_one() -> None:
    here = world()
    here.limit("ada", max_lease_s=3600.0)
    lease = ask(here, user="ada", ttl_s=7200.0)
    here.at_s += 3590.0
    assert isinstance(here.renew(lease), Lease)
    here.pass_time(5.0)
    assert is_active(here, lease)
    here.pass_time(6.0)
    assert here.now_of(lease).end_reason is EndReason.TIME_OVER
    assert isinstance(here.renew(lease), LeaseLost)


def test_a_job_without_a_timeout_gets_the_longest_that_its_user_may_have() -> None:
    here = world()
    here.limit("vision", "group", members=("ada",), max_lease_s=100.0)
    here.limit("ada", max_lease_s=200.0)
    spec = here.ledger.jobs[here.submit(user="ada")].spec
    assert spec.timeout_s == 100.0
    assert here.ledger.jobs[here.submit(user="ada", timeout_s=7.0)].spec.timeout_s == 7.0


@pytest.mark.parametrize(("kind", "name"), [("user", "ada"), ("group", "vision"), ("token", "t")])
def test_more_in_the_queue_than_allowed_is_refused_for_now(kind: str, name: str) -> None:
    here = world(1)
    here.limit(name, kind, max_queued=2, members=("ada", "bob") if kind == "group" else ())
    ask(here)
    waiting = [ask(here, user="ada", token="t") for _ in range(2)]
    answer = refused(here, user="ada", token="t")
    assert answer.status == 429
    assert f"{kind.capitalize()} {name} has 2 requests in the queue; the limit is 2" in answer.detail
    others = ask(here, user="cleo")
    assert not is_active(here, others)
    here.release(waiting[0])
    assert not is_active(here, ask(here, user="ada", token="t"))


def test_requests_of_one_turn_are_counted_one_by_one() -> None:
    here = world(4)
    here.limit("vision", "group", members=("ada", "bob"), max_gpus=3, max_queued=2)
    calls = [here.ask(user=user, token="t") for user in ("ada", "bob") * 3]
    here.answer_wanted()
    answers = [here.answers[call] for call in calls]
    assert [getattr(answer, "state", None) for answer in answers] == ["active"] * 3 + ["queued"] * 2 + [None]
    here.check()


def test_a_dry_run_says_what_the_request_would_be_told() -> None:
    here = world()
    here.limit("vision", "group", members=("ada",), max_gpus=2)
    lease = Lease(
        id="",
        state=LeaseState.QUEUED,
        holder=Holder(user="ada"),
        demand=ask(here, 3, user="bob").demand,
        ttl_s=1,
        liveness=Liveness.JOB,
        created_at=here.now.at,
    )
    here.report()
    assert isinstance(dry_run(here.ledger, lease, here.now, here.policy), OverQuota)
    here.limit("vision", "group")
    assert getattr(dry_run(here.ledger, lease, here.now, here.policy), "verdict", None) == "fits_now"


# Changes while leases are held


def test_a_limit_below_what_is_held_ends_nothing_and_grants_nothing_more() -> None:
    here = world()
    held = [ask(here, 2, user="ada") for _ in range(3)]
    here.limit("ada", max_gpus=2, max_leases=1, max_lease_s=1.0)
    here.pass_time(5)
    assert all(is_active(here, lease) for lease in held)
    newer = ask(here, 1, user="ada", ttl_s=1.0)
    assert not is_active(here, newer)
    for lease in held:
        assert not is_active(here, newer)
        give_back(here, lease)
    assert is_active(here, newer)


def test_a_limit_below_what_waits_is_the_reason_also_where_another_is_reached() -> None:
    here = world(4)
    here.limit("ada", max_leases=1)
    ask(here, 1, user="ada")
    waits = ask(here, 2, user="ada")
    assert "user ada has 1 lease; the limit is 1 at a time" in why(here, waits)
    here.limit("vision", "group", members=("ada",), max_gpus=1)
    never = "group vision has 1 GPU and user ada asks for 2 more; the limit is 1 at a time, so it waits until"
    assert never in why(here, waits)
    here.limit("vision", "group", members=("ada",))
    here.limit("ada", max_leases=1, max_gpus=1)
    assert "user ada has 1 GPU and asks for 2 more; the limit is 1 at a time, so it waits until" in why(here, waits)


def test_a_limit_below_what_waits_keeps_it_waiting_and_says_that_it_never_fits() -> None:
    here = world(4)
    held = ask(here, 4)
    waits = ask(here, 4, user="ada")
    here.limit("ada", max_gpus=2)
    assert "the limit is 2 at a time, so it waits until that limit is raised" in why(here, waits)
    give_back(here, held)
    assert not is_active(here, waits)
    assert is_active(here, ask(here, 2, user="ada")), "it keeps nothing from newer ones"
    here.limit("ada", max_gpus=8)
    assert not is_active(here, waits), "2 are held"


@pytest.mark.parametrize("to", [{"max_gpus": 4}, {}])
def test_what_a_limit_kept_out_is_granted_in_the_turn_in_which_it_is_raised_or_removed(to: dict[str, int]) -> None:
    here = world()
    here.limit("ada", max_gpus=2)
    ask(here, 2, user="ada")
    waits = ask(here, 2, user="ada")
    here.report()
    here.limit("ada", **to)
    assert is_active(here, waits)
    here.check()


def test_who_joins_a_group_counts_for_it_with_all_that_they_have_and_who_leaves_no_longer() -> None:
    here = world()
    here.limit("vision", "group", members=("ada",), max_gpus=3)
    ask(here, 2, user="bob")
    here.limit("vision", "group", members=("ada", "bob"), max_gpus=3)
    waits = ask(here, 2, user="ada")
    assert "group vision has 2 GPUs and user ada asks for 2 more" in why(here, waits)
    here.limit("vision", "group", members=("ada",), max_gpus=3)
    assert is_active(here, waits)
    here.check()


def test_a_late_renewal_revives_only_within_the_limit_of_the_moment() -> None:
    here = world()
    lease = here.lease(2, user="ada", ttl_s=5.0)
    here.pass_time(6.0)
    assert here.now_of(lease).end_reason is EndReason.EXPIRED
    here.limit("ada", max_gpus=1)
    assert isinstance(here.renew(lease), LeaseLost)
    here.limit("ada")
    assert isinstance(here.renew(lease), Lease)


def test_who_changed_which_limit_is_recorded_once() -> None:
    here = world()
    for _ in range(2):
        here.limit("vision", "group", members=("ada", "bob"), max_gpus=4, max_lease_s=86400.0, gpu_hours=100.0)
    here.limit("vision", "group")
    told = "group vision: 4 GPUs, 24 h for a lease, 100 GPU-hours in 7 d, members ada, bob, by root"
    assert events(here, "limits.set") == [told]
    assert events(here, "limits.removed") == ["group vision, by root"]
    assert isinstance(here.limit("vision", "group"), NotFound)


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    here = world()
    here.limit("vision", "group", members=("ada",))
    for answer, said in (
        (here.limit("nlp", "group", members=("ada",)), "user ada is in group vision"),
        (here.limit("ada", members=("bob",)), "members: are for limits of a group"),
    ):
        assert isinstance(answer, InvalidRequest)
        assert said in answer.detail
    assert list(here.ledger.limits.records) == [LimitKey(LimitKind.GROUP, "vision")]


# No one starves


def sweep(here: World, older: Lease, running: list[Lease], users: list[str], members: int = 40) -> int:
    """Members of a sweep come, and each time one that runs ends. How many started before `older` was granted."""
    waiting: list[Lease] = []
    started = 0
    for number in range(members):
        waiting.append(ask(here, user=users[number % len(users)]))
        if running:
            give_back(here, running.pop(0))
        if is_active(here, older):
            return started
        begun = [lease for lease in waiting if is_active(here, lease)]
        started += len(begun)
        running += begun
        waiting = [lease for lease in waiting if lease not in begun]
    return started


def test_small_requests_of_a_group_do_not_starve_a_large_one_of_another_member() -> None:
    here = world(max_bypass=3)
    here.limit("vision", "group", members=("ada", "bob", "cleo"), max_gpus=4)
    running = [ask(here, user="bob") for _ in range(4)]
    older = ask(here, 4, user="ada")
    assert sweep(here, older, running, ["bob", "cleo"]) == 3
    assert is_active(here, older)


def test_a_limit_of_leases_does_not_starve_one_that_waits_for_many_gpus() -> None:
    """Each time that the one lease ends the newer small request would take its place."""
    here = world(4, max_bypass=2, leases=1)
    other = ask(here, 1, user="bob")
    running = [ask(here, user="ada")]
    older = ask(here, 4, user="ada")
    started = sweep(here, older, running, ["ada"], members=12)
    assert started <= 2, "then the lease is kept for it"
    give_back(here, other)
    assert is_active(here, older)


def test_a_request_that_its_users_own_sweep_keeps_out_does_not_hold_back_the_rest_of_the_group() -> None:
    here = world(max_bypass=1)
    here.limit("vision", "group", members=("ada", "bob"), max_gpus=8)
    here.limit("ada", max_gpus=4)
    running = [ask(here, user="ada") for _ in range(4)]
    older = ask(here, 4, user="ada")
    give_back(here, running.pop())
    assert is_active(here, ask(here, user="ada")), "the one that may pass"
    blocked = ask(here, user="ada")
    assert "kept for the older request" not in why(here, blocked)
    give_back(here, running.pop())
    assert not is_active(here, blocked)
    assert f"4 of the 4 that one user may have are kept for the older request {older.id}" in why(here, blocked)
    assert is_active(here, ask(here, 4, user="bob"))


def test_who_may_have_to_wait_for_a_limit_is_known_after_any_changes() -> None:
    chance, here, users = random.Random(5), world(), ["ada", "bob", "cleo", "dan"]
    for number in range(300):
        kind = chance.choice(list(LimitKind))
        names = {LimitKind.GROUP: ["vision", "text"], LimitKind.TOKEN: ["t", "ada"], LimitKind.USER: users}[kind]
        numbers: dict[str, Any] = chance.choice([{}, {"max_gpus": 2}, {"max_queued": 5}, {"gpu_hours": 1.0}])
        members = tuple(chance.sample(users, 2)) if kind is LimitKind.GROUP and chance.random() < 0.7 else ()
        here.limit(chance.choice(names), kind, members=members, **numbers)
        if number % 3 == 0:
            here.ask(user=chance.choice(users), ttl_s=1.0, token=chance.choice(["t", "ada", None]))
            here.answer_wanted()
        here.check()


def test_limits_that_leave_the_limited_users_the_same_leave_their_set_the_same_object() -> None:
    """Else the whole queue is grouped again."""
    here = world()
    here.limit("ada", max_gpus=2)
    known = here.ledger.limits.limited_users
    here.limit("ada", max_gpus=3)
    here.limit("vision", "group", members=("ada",), max_gpus=3)
    here.limit("bob", max_queued=3)
    assert here.ledger.limits.limited_users is known
    here.limit("bob", max_gpus=3)
    assert here.ledger.limits.limited_users == {"ada", "bob"}


def test_a_limit_of_a_token_below_what_waits_holds_up_no_newer_request_of_it() -> None:
    here = world()
    here.limit("t", "token", max_gpus=4)
    held = ask(here, 3, user="ada", token="t")
    older = ask(here, 4, user="ada", token="t")
    assert not is_active(here, ask(here, user="ada", token="t")), "it waits behind the older one"
    here.limit("t", "token", max_gpus=2)
    give_back(here, held)
    assert "waits until that limit is raised" in why(here, older)
    assert is_active(here, ask(here, user="ada", token="t"))
    assert "the limit is 2 at a time" in why(here, ask(here, 1, user="ada", token="t"))
    here.limit("t", "token", max_gpus=6)
    assert is_active(here, older)


def test_a_limit_of_its_user_below_what_waits_holds_up_no_newer_request_of_a_token() -> None:
    here = world()
    budget = Budget(max_gpus=4)
    held = ask(here, 3, user="ada", token="t", budget=budget)
    ask(here, 4, user="ada", token="t", budget=budget)
    assert not is_active(here, ask(here, user="ada", token="t", budget=budget))
    here.limit("ada", max_gpus=3)
    give_back(here, held)
    assert is_active(here, ask(here, 2, user="ada", token="t", budget=budget))


def test_a_request_that_no_node_can_serve_any_more_holds_up_no_newer_request_of_its_token() -> None:
    here = world(4).node("b", gpus=2)
    here.limit("t", "token", max_gpus=2)
    held = ask(here, 1, user="ada", token="t", node="a")
    older = ask(here, 2, user="ada", token="t", node="b")
    newer = ask(here, 1, user="ada", token="t", node="a")
    assert not is_active(here, newer)
    here.pass_time(4.0, silent=("b",))
    assert here.forget("b") is None
    here.nodes.pop("b")
    here.pass_time(0.5)
    assert is_active(here, newer)
    assert is_active(here, held)
    assert not is_active(here, older)


def test_a_lower_limit_of_interactive_requests_holds_up_no_newer_one() -> None:
    here = world()
    held = ask(here, 1, user="ada", priority=Priority.INTERACTIVE)
    older = ask(here, 2, user="ada", priority=Priority.INTERACTIVE)
    here.policy = replace(here.policy, limits=replace(here.policy.limits, interactive_gpus=1))
    newer = ask(here, 1, user="ada", priority=Priority.INTERACTIVE)
    assert not is_active(here, newer)
    give_back(here, held)
    assert is_active(here, newer)
    assert not is_active(here, older)


def test_the_undecided_requests_of_a_group_are_counted_while_users_join_and_leave_it() -> None:
    chance, users, undecided = random.Random(7), ["ada", "bob", "cleo", "dan"], PendingRequests()
    groups: dict[str, tuple[str, ...]] = {"vision": ("ada",), "text": ()}
    for number in range(2000):
        what = chance.random()
        if what < 0.05:
            cut = chance.randrange(5)
            mixed = chance.sample(users, 4)
            groups = {"vision": tuple(mixed[:cut]), "text": tuple(mixed[cut : chance.randrange(5)])}
        elif what < 0.6 or not undecided:
            holder = Holder(user=chance.choice(users), token_id=chance.choice(["t", None]))
            undecided[f"lease-{number}"] = PendingRequest(
                causes=[], queue=True, changes=(), key=None, since_s=0.0, holder=holder, size_bytes=1
            )
        else:
            del undecided[chance.choice(list(undecided))]
        for name in chance.sample(list(groups), chance.randrange(3)):
            expected = sum(one.holder.user in groups[name] for one in undecided.values())
            assert undecided.count_of_group(LimitKey(LimitKind.GROUP, name), groups[name]) == expected


def test_who_waits_in_a_large_group_is_not_counted_again_for_each_verdict() -> None:
    class Members(tuple[str, ...]):
        walks = 0

        def __iter__(self) -> Iterator[str]:
            Members.walks += 1
            return super().__iter__()

    here, members = world(1), Members(f"user-{number}" for number in range(100))
    here.limit("vision", "group", members=members, max_queued=60)
    ask(here)
    Members.walks = 0
    for user in members[:60]:
        here.lease(user=user)
    assert refused(here, user=members[70]).status == 429
    assert Members.walks <= 2


# GPU-hours


def skip(here: World, seconds: float) -> None:
    here.at_s += seconds
    here.report()
    here.pass_time(0.5)


def used(here: World, kind: str, name: str) -> float:
    found = limit_use(here.ledger.limits, LimitKey(LimitKind(kind), name), here.policy.limits, here.now)
    assert found.gpu_hours_used is not None
    return found.gpu_hours_used


@pytest.mark.parametrize(
    ("hours", "held_s", "said"),
    [(0.05, 180, "0.050 of the 0.05 GPU-hours"), (0.00001, 36, "0.010 of the 0.00001 GPU-hours")],
)
def test_a_small_limit_of_gpu_hours_and_its_use_are_not_rounded(hours: float, held_s: int, said: str) -> None:
    here = world()
    here.limit("ada", gpu_hours=hours, window_s=3600.0)
    held = ask(here, user="ada")
    skip(here, held_s - 0.5)
    give_back(here, held)
    assert said in why(here, ask(here, user="ada"))
    assert f"ada: {said.split()[3]} GPU-hours in 60 min, by root" in events(here, "limits.set")[0]


def test_gpu_hours_that_are_used_make_requests_wait_until_they_leave_the_window_and_end_nothing() -> None:
    here = world()
    here.limit("ada", gpu_hours=4.0, window_s=86400.0)
    held = ask(here, 2, user="ada")
    skip(here, 2 * 3600)
    assert abs(used(here, "user", "ada") - 4.0) < 0.01
    assert is_active(here, held), "a limit ends nothing"
    waits = ask(here, 1, user="ada")
    assert "4.00 of the 4 GPU-hours in 24 h that user ada may have are used" in why(here, waits)
    assert "and 2 GPUs held count on" in why(here, waits)
    assert is_active(here, ask(here, 1, user="bob"))
    give_back(here, held)
    skip(here, 21 * 3600)
    assert not is_active(here, waits)
    skip(here, 3 * 3600)
    assert is_active(here, waits)
    here.check()


def test_gpu_hours_are_told_to_be_there_again_when_they_are() -> None:
    here = world()
    here.limit("ada", gpu_hours=1.0, window_s=86400.0)
    give_back_after = ask(here, 1, user="ada")
    skip(here, 3700)
    give_back(here, give_back_after)
    waits = ask(here, 1, user="ada")
    told = why(here, waits).partition("leave the window at ")[2][:16]
    while not is_active(here, waits):
        assert f"{here.now.at:%Y-%m-%d %H:%M}" <= told
        skip(here, 600)
    assert f"{here.now.at:%Y-%m-%d %H}" == told[:13]


def test_gpu_hours_of_a_group_and_a_token_count_what_is_held_under_them() -> None:
    here = world()
    here.limit("vision", "group", members=("ada", "bob"), gpu_hours=100.0)
    here.limit("t", "token", gpu_hours=100.0)
    ask(here, 2, user="ada", token="t")
    skip(here, 3600)
    ask(here, 1, user="bob")
    skip(here, 3600)
    assert (round(used(here, "group", "vision"), 1), round(used(here, "token", "t"), 1)) == (5.0, 4.0)


@pytest.mark.parametrize("jump_s", [-1e5, 1e5])
def test_gpu_time_is_counted_by_the_time_that_passes(jump_s: float) -> None:
    here = world()
    here.limit("ada", gpu_hours=100.0, window_s=86400.0)
    ask(here, 1, user="ada")
    skip(here, 3600)
    here.wall_jump_s = jump_s
    skip(here, 3600)
    assert abs(used(here, "user", "ada") - 2.0) < 0.01


def test_what_was_counted_stays_when_the_length_of_the_window_changes() -> None:
    here = world()
    here.limit("ada", gpu_hours=100.0, window_s=86400.0)
    ask(here, 1, user="ada")
    skip(here, 5 * 3600)
    here.limit("ada", gpu_hours=100.0, window_s=7 * 86400.0)
    skip(here, 3600)
    assert abs(used(here, "user", "ada") - 6.0) < 0.02
    here.limit("ada", gpu_hours=100.0, window_s=2 * 3600.0)
    assert 2.0 <= used(here, "user", "ada") <= 6.02, "never too little"


def test_the_time_in_which_the_daemon_was_away_counts_for_what_is_held() -> None:
    here = world()
    here.limit("ada", gpu_hours=100.0, window_s=86400.0)
    ask(here, 1, user="ada")
    again = copy_ledger(here.ledger)
    (record,) = again.limits.gpu_time.values()
    again.apply(replace(record, counted_at_s=None))
    here.ledger = again
    here.at_s += 3600
    reset_deadlines(again, here.now)
    assert abs(used(here, "user", "ada") - 1.0) < 0.01


# At every grant


@pytest.mark.parametrize("seed", range(6))
def test_no_grant_passes_a_limit_of_the_moment(seed: int) -> None:
    """Random requests, releases, expiries and changes of limits; the sums are taken from the leases alone."""
    draw = random.Random(seed)
    here = World(policy=Policy(max_bypass=draw.choice([0, 2]), max_bypass_s=50.0)).node(gpus=6).node("b", gpus=3)
    users, groups = ["ada", "bob", "cleo"], {"vision": ("ada", "bob")}
    leases: list[Lease] = []
    for _ in range(120):
        before = {one.lease.id for one in here.ledger.leases.values() if one.lease.state is LeaseState.ACTIVE}
        what = draw.random()
        if what < 0.5:
            count, token = draw.randint(1, 3), draw.choice([None, "t"])
            call = here.ask(count, user=draw.choice(users), token=token, ttl_s=draw.choice([3.0, LONG_S]))
            here.answer_wanted()
            if isinstance(answer := here.answers.get(call), Lease):
                leases.append(answer)
        elif what < 0.75 and leases:
            lease = here.now_of(leases.pop(draw.randrange(len(leases))))
            (here.renew if draw.random() < 0.3 else here.release)(lease)
        elif what < 0.9:
            kind, name = draw.choice([("user", "ada"), ("user", "bob"), ("group", "vision"), ("token", "t")])
            numbers = {"max_gpus": draw.randint(1, 6), "max_leases": draw.randint(1, 4)}
            chosen = dict(draw.sample(sorted(numbers.items()), draw.randint(0, 2)))
            here.limit(name, kind, members=groups.get(name, ()), **chosen)
        else:
            here.pass_time(draw.choice([1.0, 4.0]))
        for node in "ab":
            here.report(node)
        here.check()
        active = [one.lease for one in here.ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]
        new = [lease for lease in active if lease.id not in before]
        for key, record in here.ledger.limits.records.items():
            under = [lease for lease in active if key in keys(lease, record.members)]
            if any(lease in new for lease in under):
                assert sum(len(lease.gpus) for lease in under) <= (record.limits.max_gpus or 99), key
                assert len(under) <= (record.limits.max_leases or 99), key


def keys(lease: Lease, members: tuple[str, ...]) -> list[LimitKey]:
    found = [LimitKey(LimitKind.USER, lease.holder.user), LimitKey(LimitKind.TOKEN, lease.holder.token_id)]
    return found + ([LimitKey(LimitKind.GROUP, "vision")] if lease.holder.user in members else [])
