"""Seeds that must keep every promise, and faults that must be caught; `make soak` has hundreds of longer runs."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import simulate
from tests.simulation.mutations import (
    MUTATIONS,
    OF_BUDGETS,
    OF_CROWDS,
    OF_EXPLANATIONS,
    OF_FAIR_SHARE,
    OF_GANGS,
    OF_JOBS,
    OF_LIMITS,
    OF_PREEMPTION,
    OF_PRIORITIES,
    OF_RECLAIM,
    OF_RESERVATIONS,
    OF_SHARES,
    OF_TOKEN_BUDGETS,
    mutated,
)

pytestmark = pytest.mark.busy("compute")

ENOUGH = {"daemon killed": 3, "answer lost": 3, "request lost": 3, "again >": 3, "wall clock": 2, "suffers": 20}
"""What must have happened in a run of some length, lest it shows nothing."""

LOOK_FIRST = {
    "preempt_anyone": 8,
    "preempt_in_turns": 2,
    "twice_preempted_is_not_first": 4,
    "preempt_again_and_again": 5,
    "reclaim_anyone": 3,
    "reclaim_what_is_kept": 5,
    "reclaim_what_is_trusted": 3,
    "token_from_the_living": 3,
    "end_on_the_first_node": 2,
    "grant_what_another_has": 4,
    "revive_over_another": 3,
    "never_the_oldest": 12,
    "no_bypass_counts": 21,
    "explain_behind_by_arrival": 4,
    "explain_without_usage": 3,
    "ignore_gpu_hours": 2,
    "ignore_hours_of_the_day": 2,
    "forget_hours_of_the_day": 2,
    "no_place_is_kept": 4,
    "measure_by_the_wall": 4,
    "show_before_commit": 6,
    "clean_by_an_old_reading": 4,
    "trust_unknown_words": 7,
    "ignore_strangers": 5,
    "forget_debts": 2,
    "strangers_keep": 4,
    "queue_without_limit": 3,
    "grant_over_limits": 3,
    "always_by_age": 2,
    "interactive_without_limit": 3,
    "run_ahead_of_own_ends": 3,
    "wait_for_lost_nodes": 4,
    "end_what_a_silent_worker_watches": 2,
    "any_reading_will_do": 4,
}
"""The seed that has caught a fault; the others are tried if it does so no longer."""


@pytest.mark.budget(30)
def test_every_promise_is_kept() -> None:
    outcomes = {seed: simulate(seed, steps=1500) for seed in (2, 5)}

    assert {seed: outcome.complaints for seed, outcome in outcomes.items()} == {2: [], 5: []}, "--steps 1500"
    happened = {part: sum(outcome.count(part) for outcome in outcomes.values()) for part in ENOUGH}
    assert {part for part, least in ENOUGH.items() if happened[part] < 2 * least} == set()
    kinds = {event["kind"] for outcome in outcomes.values() for event in outcome.log}
    assert kinds >= {"lease.granted", "lease.queued", "lease.ended", "gpu.clean", "node.ready", "node.unknown"}


@pytest.mark.budget(30)
def test_every_promise_is_kept_with_gangs() -> None:
    outcome = simulate(3, steps=1500, gangs=True)

    assert outcome.complaints == [], "--gangs --steps 1500"
    assert len({lease["demand"]["nodes"] for lease in outcome.gangs()}) > 1


@pytest.mark.budget(30)
def test_every_promise_is_kept_with_priorities() -> None:
    outcome = simulate(12, steps=1500, priorities=True)

    assert outcome.complaints == [], "--priorities --steps 1500"
    listed = (line["lease"] for line in outcome.lines if line["what"] == "listed")
    granted = [lease["demand"]["priority"] for lease in listed if lease["token"] is not None]
    assert min(granted.count(word) for word in ("interactive", "normal", "scavenge")) > 5


@pytest.mark.budget(30)
@pytest.mark.parametrize("priorities", [False, True])
def test_every_promise_is_kept_while_limits_are_set_and_removed(priorities: bool) -> None:
    seed, steps = 4 if priorities else 3, 2000
    outcome = simulate(seed, steps=steps, limits=True, priorities=priorities)

    assert outcome.complaints == [], f"{seed} --steps {steps} --limits, with priorities: {priorities}"
    kinds = [event["kind"] for event in outcome.log]
    assert min(kinds.count("limits.set"), kinds.count("limits.removed")) > 3


@pytest.mark.budget(30)
def test_every_promise_is_kept_while_gpu_hours_and_a_token_are_limited() -> None:
    outcome = simulate(10, steps=1500, budgets=True)

    assert outcome.complaints == [], "10 --steps 1500 --budgets"
    limits = [event["reason"] for event in outcome.log if event["kind"] == "limits.set"]
    assert min(sum(what in reason for reason in limits) for what in ("token ", "GPU-hours")) > 1
    listed = (line["lease"] for line in outcome.lines if line["what"] == "listed")
    assert sum(lease["holder"]["token_id"] is not None and lease["token"] is not None for lease in listed) > 5


@pytest.mark.budget(30)
def test_every_promise_is_kept_while_a_token_has_a_budget() -> None:
    outcome = simulate(32, steps=1000, token_budgets=True)

    assert outcome.complaints == [], "32 --steps 1000 --token-budgets"
    spent = [event["reason"] for event in outcome.log if event["kind"] == "lease.budget_spent"]
    assert all(any(what in reason for reason in spent) for what in ("may last are over", "GPU-hours a day"))


@pytest.mark.budget(30)
def test_every_promise_is_kept_while_gpus_are_reserved() -> None:
    outcome = simulate(2, steps=1000, reservations=True)

    assert outcome.complaints == [], "2 --steps 1000 --reservations"
    kinds = [event["kind"] for event in outcome.log]
    assert kinds.count("reservation.created") > 10
    assert {"reservation.cancelled", "reservation.ended"} <= set(kinds)


@pytest.mark.budget(30)
def test_every_promise_is_kept_while_leases_end_for_others() -> None:
    outcome = simulate(1, steps=3000, preemption=True)

    assert outcome.complaints == [], "1 --steps 3000 --preemption"
    kinds = [event["kind"] for event in outcome.log]
    assert min(kinds.count(f"lease.{kind}") for kind in ("preempting", "preempted", "preemption_withdrawn")) > 0
    failed = ("commit fails", "commit is said to have failed", "before the commit", "after the commit")
    assert min(outcome.count(part) for part in failed) > 0


@pytest.mark.budget(30)
def test_every_promise_is_kept_while_jobs_end_for_others() -> None:
    outcome = simulate(16, steps=1000, jobs=True)

    assert outcome.complaints == [], "16 --steps 1000 --jobs"
    kinds = [event["kind"] for event in outcome.log]
    assert kinds.count("job.preempted") > 3


@pytest.mark.budget(30)
def test_every_promise_is_kept_in_a_crowd() -> None:
    outcome = simulate(4, steps=1500, crowd=True, explains=True)

    assert outcome.complaints == [], "4 --steps 1500 --crowd --explains"
    kinds = [event["kind"] for event in outcome.log]
    assert {"lease.preempting", "reservation.created"} <= set(kinds)
    assert kinds.count("lease.queued") > 30
    assert any("runs ahead of" in (event["reason"] or "") for event in outcome.log)
    said = [one for line in outcome.lines if line["what"] == "explained" for one in line["said"].values()]
    assert len(said) > 50
    assert any(one["behind"] for one in said)


@pytest.mark.budget(30)
def test_every_promise_is_kept_while_idle_gpus_are_taken_back() -> None:
    outcome = simulate(3, steps=2000, reclaim=True)

    assert outcome.complaints == [], "3 --steps 2000 --reclaim"
    kinds = [event["kind"] for event in outcome.log]
    happened = ("reclaim_notice", "reclaim_withdrawn", "reclaimed", "kept")
    assert min(kinds.count(f"lease.{kind}") for kind in happened) > 0


@pytest.mark.budget(30)
def test_every_promise_is_kept_where_usage_orders() -> None:
    outcome = simulate(2, steps=600, fair_share=True)

    assert outcome.complaints == [], "2 --steps 600 --fair-share"
    assert sum(bool(line["gpus"]) for line in outcome.lines if line["what"] == "held") > 20


@pytest.mark.budget(30)
def test_every_promise_is_kept_where_groups_share() -> None:
    outcome = simulate(2, steps=600, shares=True, explains=True)

    assert outcome.complaints == [], "2 --steps 600 --shares --explains"
    assert sum(len(line["said"]) > 1 for line in outcome.lines if line["what"] == "explained") > 20
    whose = {line["whose"] for line in outcome.lines if line["what"] == "used"}
    assert whose == {"user root", "user zoe", "user eve", "group vision"}


def test_every_promise_is_kept_on_postgresql(postgres_url: str) -> None:
    outcome = simulate(4, steps=1250, url=postgres_url, limits=True)

    assert outcome.complaints == []
    assert min(outcome.count(part) for part in ("daemon killed", "answer lost", "request lost")) >= 3


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = simulate(7, steps=300), simulate(7, steps=300)

    assert first.digest == second.digest
    assert simulate(8, steps=300).digest != first.digest


def place_of(name: str) -> dict[str, bool]:
    """Where a fault can show."""
    return {
        "gangs": name in OF_GANGS,
        "limits": name in OF_LIMITS,
        "budgets": name in OF_BUDGETS,
        "token_budgets": name in OF_TOKEN_BUDGETS,
        "priorities": name in OF_PRIORITIES,
        "fair_share": name in OF_FAIR_SHARE,
        "shares": name in OF_SHARES,
        "reservations": name in OF_RESERVATIONS,
        "preemption": name in OF_PREEMPTION,
        "jobs": name in OF_JOBS,
        "reclaim": name in OF_RECLAIM,
        "crowd": name in OF_CROWDS,
        "explains": name in OF_EXPLANATIONS,
    }


@pytest.mark.parametrize("name", ["skip_draining", "half_a_gang"])
def test_a_fault_is_caught(name: str) -> None:
    with mutated(name):
        assert simulate(1, steps=300).complaints


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_caught_within_fifty_seeds(name: str) -> None:
    seeds = dict.fromkeys([LOOK_FIRST.get(name, 1), *range(1, 51)])
    with mutated(name):
        assert any(simulate(seed, steps=1000, **place_of(name)).complaints for seed in seeds)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2000, 2050))
def test_every_promise_is_kept_with_gangs_for_long(seed: int) -> None:
    outcome = simulate(seed, gangs=True)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --gangs"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2200, 2250))
def test_every_promise_is_kept_with_reservations_for_long(seed: int) -> None:
    outcome = simulate(seed, reservations=True)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --reservations"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2300, 2330))
def test_every_promise_is_kept_with_preemption_for_long(seed: int) -> None:
    outcome = simulate(seed, preemption=True)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --preemption"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2650, 2680))
def test_every_promise_is_kept_while_jobs_end_for_others_for_long(seed: int) -> None:
    outcome = simulate(seed, jobs=True)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --jobs"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2400, 2430))
def test_every_promise_is_kept_with_reclaim_for_long(seed: int) -> None:
    outcome = simulate(seed, reclaim=True)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --reclaim"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2500, 2530))
def test_every_promise_is_kept_in_a_crowd_for_long(seed: int) -> None:
    outcome = simulate(seed, crowd=True, explains=seed % 2 == 0)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --crowd, and --explains for even seeds"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_every_promise_is_kept_for_long(seed: int) -> None:
    outcome = simulate(seed)

    assert outcome.complaints == [], f"python -m tests.simulation {seed}"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2100, 2150))
def test_every_promise_is_kept_with_limits_for_long(seed: int) -> None:
    outcome = simulate(seed, limits=True, priorities=seed % 2 == 0)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --limits, and --priorities for even seeds"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2600, 2630))
def test_every_promise_is_kept_with_budgets_for_long(seed: int) -> None:
    outcome = simulate(seed, budgets=True)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --budgets"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2680, 2710))
def test_every_promise_is_kept_while_a_token_has_a_budget_for_long(seed: int) -> None:
    outcome = simulate(seed, token_budgets=True)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --token-budgets"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2200, 2230))
def test_every_promise_is_kept_where_usage_orders_for_long(seed: int) -> None:
    outcome = simulate(seed, fair_share=True)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --fair-share"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2500, 2530))
def test_every_promise_is_kept_where_groups_share_for_long(seed: int) -> None:
    outcome = simulate(seed, shares=True, explains=seed % 2 == 0)

    assert outcome.complaints == [], f"python -m tests.simulation {seed} --shares, and --explains for even seeds"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1300, 1320))
def test_every_promise_is_kept_for_long_on_postgresql(postgres_url: str, seed: int) -> None:
    assert simulate(seed, url=postgres_url).complaints == []
