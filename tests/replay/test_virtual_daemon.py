"""The replay: the core decides, under a virtual clock."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from gpulease_protocol.model import Priority
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.replay.recorded_requests import uniform_nodes
from gpulease_server.replay.virtual_daemon import Outcome, replay
from tests.replay.build import BEGUN, GREEDY, MANY, STRICT, granted, request, run, scheduled, workload

SEEDS = range(5)


def held(outcomes: list[Outcome], at_s: float) -> int:
    return sum(
        one.gpus
        for one in outcomes
        if one.granted_at_s is not None and one.granted_at_s <= at_s and (one.ended_at_s or MANY) > at_s
    )


def test_requests_are_served_in_order_of_arrival_for_as_long_as_they_were_recorded() -> None:
    found = run([request("a", 0, 100), request("b", 10, 50), request("c", 20, 5)])

    assert granted(found) == {"a": 0, "b": 100, "c": 150}
    assert [round(one.ended_at_s or 0) for one in found.values()] == [100, 150, 155]


@pytest.mark.parametrize("seed", SEEDS)
def test_strict_order_is_that_of_a_small_model(seed: int) -> None:
    requests = workload(seed, 150, 8)

    found = granted(run(requests, gpus=8, **STRICT))

    assert found == {name: pytest.approx(at_s, abs=0.02) for name, at_s in scheduled(requests, 8, greedy=False).items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_bound_each_that_fits_starts_as_in_a_small_model(seed: int) -> None:
    requests = workload(seed, 150, 8)

    found = granted(run(requests, gpus=8, **GREEDY))

    assert found == {name: pytest.approx(at_s, abs=0.02) for name, at_s in scheduled(requests, 8, greedy=True).items()}


@pytest.mark.parametrize("rules", [{}, {"fair_share": True}, {"max_bypass": 2}], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_gpu_is_held_twice_and_every_request_is_served_whole(seed: int, rules: dict[str, bool]) -> None:
    requests = workload(seed, 200, 4, load=1.5)

    outcomes = list(run(requests, nodes=2, gpus=4, **rules).values())

    times = sorted(one.granted_at_s or 0.0 for one in outcomes)
    assert max(held(outcomes, at_s) for at_s in times) <= 8
    for one in outcomes:
        assert one.asked_at_s == one.request.asked_at_s
        assert one.gpus == one.request.demand.count
        assert one.ended_at_s is not None
        assert one.granted_at_s is not None
        assert one.granted_at_s >= one.asked_at_s
        assert one.ended_at_s - one.granted_at_s == pytest.approx(one.request.duration_s)


def test_priorities_go_first_and_a_limit_keeps_them_few() -> None:
    requests = [
        request("long", 0, 100, 2),
        request("sweep", 1, 10, 2, priority=Priority.SCAVENGE),
        request("train", 2, 10, 2),
        request("look", 3, 10, 1, priority=Priority.INTERACTIVE),
        request("more", 4, 10, 1, priority=Priority.INTERACTIVE),
    ]

    assert granted(run(requests, gpus=2)) == {"long": 0, "look": 100, "more": 100, "train": 110, "sweep": 120}
    limited = run(requests, gpus=2, limits=UserLimits(interactive_gpus=1))
    assert limited["more"].granted_at_s == pytest.approx(110, abs=0.1)


def test_fair_share_lets_the_one_go_first_who_has_used_less() -> None:
    sweep = [request(f"ann{number}", number, 3600, user="ann") for number in range(6)]
    requests = [*sweep, request("bob", 100, 60, user="bob")]

    by_arrival, by_usage = run(requests, gpus=2), run(requests, gpus=2, fair_share=True)

    assert round(by_arrival["bob"].granted_at_s or 0) == pytest.approx(3 * 3600, abs=5)
    assert round(by_usage["bob"].granted_at_s or 0) == pytest.approx(3600, abs=5)


def test_a_declared_time_ends_a_lease_and_what_it_held_counts_as_lost() -> None:
    found = run(
        [request("cut", 0, 100, time_s=40.0), request("done", 0, 30, time_s=40.0), request("next", 1, 5)], gpus=2
    )

    assert found["cut"].ended_at_s == pytest.approx(40, abs=0.1)
    assert found["cut"].lost_s == pytest.approx(40, abs=0.1)
    assert found["done"].lost_s == 0.0
    assert found["next"].granted_at_s == pytest.approx(30, abs=0.1)


def test_a_lease_that_ended_by_its_time_as_recorded_lost_nothing() -> None:
    found = run([request("cut", 0, 40.02, time_s=40.0)])

    assert found["cut"].lost_s == 0.0


def test_what_waited_for_others_arrives_when_they_have_ended_in_the_replay() -> None:
    requests = [
        request("a", 0, 100, part_of=("job-1",)),
        request("b", 0, 100, part_of=("job-2", "array")),
        request("c", 0, 30, part_of=("job-3", "array")),
        request("next", 5, 10, after=("job-1", "array")),
        request("again", 0, 1, after=("next",)),
        request("orphan", 7, 1, after=("job-that-was-pruned",)),
    ]

    found = run(requests)

    asked = {name: round(one.asked_at_s or 0, 2) for name, one in found.items()}
    assert asked == {"a": 0, "b": 0, "c": 0, "orphan": 7, "next": 230, "again": 241}


def test_an_array_asks_for_no_more_than_its_bound_at_once() -> None:
    requests = [request(f"r{number}", 0, 10, array_id="array", array_at_most=2) for number in range(6)]

    found = run(requests, gpus=8)

    assert [round(one.granted_at_s or 0, 1) for one in found.values()] == [0, 0, 10, 10, 20, 20]


def test_what_no_node_can_serve_is_refused_and_the_rest_goes_on() -> None:
    found = run([request("huge", 0, 10, 3), request("other", 1, 10, gpu_model="A100"), request("a", 2, 10)], gpus=2)

    assert (found["huge"].refused, found["other"].refused) == ("never_fits", "never_fits")
    assert granted(found)["a"] == 2


def test_a_request_over_several_nodes_gets_all_of_them_at_once() -> None:
    found = run([request("small", 0, 50), request("gang", 1, 10, 2, nodes=2), request("tiny", 2, 5)], nodes=2, gpus=2)

    assert granted(found) == {"small": 0, "gang": 50, "tiny": 2}
    assert found["gang"].gpus == 4


def test_a_long_calm_is_a_few_steps_and_what_waits_goes_on_after_it() -> None:
    year_s = 366 * 24 * 3600.0

    found = run([request("a", 0, year_s), request("b", 1, 1), request("c", 2 * year_s, 1)])

    assert granted(found) == {"a": 0, "b": pytest.approx(year_s), "c": 2 * year_s}


def test_the_same_requests_give_the_same_result_whatever_python_hashes() -> None:
    program = (
        "from tests.replay.build import *\n"
        "found = run(workload(7, 120, 4, load=2.0), nodes=3, gpus=4, fair_share=True)\n"
        "print([(name, one.granted_at_s, one.ended_at_s) for name, one in found.items()])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }

    assert len(printed) == 1


def test_progress_is_told_in_order() -> None:
    told: list[float] = []

    replay(uniform_nodes(1, 4), workload(1, 400, 4), Policy(), BEGUN, on_progress=told.append)

    assert told
    assert all(before <= after for before, after in pairwise(told))
    assert all(0.0 <= share <= 1.0 for share in told)
