"""Limits of users, groups and tokens in a replay: the core's own, under a virtual clock."""

from __future__ import annotations

import pytest

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.limits import LimitKind
from gpulease_server.core.fair_share import RECOUNT_S
from tests.replay.build import granted, limit, request, run

HOUR_S = 3600.0
USER, GROUP, TOKEN = LimitKind.USER, LimitKind.GROUP, LimitKind.TOKEN


def test_members_of_a_group_share_its_gpus_and_delay_no_one_else() -> None:
    requests = [
        request("ada", 0, 100, 2, user="ada"),
        request("bob", 1, 50, user="bob"),
        request("cy", 2, 50, 2, user="cy"),
    ]

    found = run(requests, gpus=4, records=[limit(GROUP, "vision", "ada", "bob", max_gpus=2)])

    assert granted(run(requests, gpus=4)) == {"ada": 0, "bob": 1, "cy": 50 + 1}
    assert granted(found) == {"ada": 0, "bob": 100, "cy": 2}


@pytest.mark.parametrize(("shares", "order"), [((), ["bob", "cy"]), ((("vision", 1.0),), ["cy", "bob"])])
def test_a_share_of_a_group_orders_its_members_by_what_the_group_has_used(
    shares: tuple[tuple[str, float], ...], order: list[str]
) -> None:
    requests = [
        request("ada", 0, 9 * HOUR_S, user="ada"),
        request("full", 9.1 * HOUR_S, HOUR_S, user="zoe"),
        request("bob", 9.2 * HOUR_S, HOUR_S, user="bob"),
        request("cy", 9.3 * HOUR_S, HOUR_S, user="cy"),
    ]

    found = granted(run(requests, records=[limit(GROUP, "vision", "ada", "bob")], fair_share=True, group_shares=shares))

    assert sorted(("bob", "cy"), key=lambda name: found[name] or 0.0) == order


def test_gpu_hours_that_are_used_keep_a_request_until_they_have_left_the_window() -> None:
    requests = [
        request("first", 0, 2 * HOUR_S),
        request("next", 2.5 * HOUR_S, 60),
        request("bob", 3 * HOUR_S, 60, user="bob"),
    ]
    hours = limit(USER, "ann", gpu_hours=2.0, window_s=24 * HOUR_S)

    found = granted(run(requests, gpus=4, records=[hours]))

    assert found == {"first": 0, "next": 25 * HOUR_S, "bob": 3 * HOUR_S}


def test_a_request_that_waits_for_gpu_hours_starts_when_the_daemon_would_look_beside_others_that_come_and_go() -> None:
    others = [request(f"bob{number}", number * 1000.0, 700, user="bob") for number in range(100)]
    requests = [request("first", 0, 2 * HOUR_S), request("next", 2.5 * HOUR_S, 60), *others]
    hours = limit(USER, "ann", gpu_hours=2.0, window_s=24 * HOUR_S)

    found = granted(run(requests, gpus=4, records=[hours]))

    assert 25 * HOUR_S <= (found["next"] or 0) <= 25 * HOUR_S + RECOUNT_S


def test_a_request_that_a_limit_never_lets_start_ends_no_replay_late() -> None:
    hours = limit(USER, "ann", gpu_hours=1.0, window_s=90 * 24 * HOUR_S)
    requests = [request("first", 0, 2 * HOUR_S), request("next", 1, 60)]

    both = granted(run(requests, records=[hours]))

    assert both["first"] == 0
    assert 90 * 24 * HOUR_S < (both["next"] or 0) < 100 * 24 * HOUR_S


def test_the_longest_time_ends_a_lease_that_declares_none_and_refuses_one_that_declares_more() -> None:
    requests = [request("open", 0, 100), request("over", 0, 100, time_s=90.0), request("within", 0, 30, time_s=50.0)]

    found = run(requests, gpus=4, records=[limit(USER, "ann", max_lease_s=60.0)])

    assert found["open"].ended_at_s == pytest.approx(60, abs=0.1)
    assert found["open"].lost_s == pytest.approx(60, abs=0.1)
    assert found["over"].refused == "over_quota"
    assert found["within"].lost_s == 0


def test_a_limit_of_a_token_counts_what_is_held_with_it() -> None:
    requests = [request("a", 0, 50, token_id="token-1"), request("b", 1, 50, token_id="token-1"), request("c", 2, 50)]

    found = granted(run(requests, gpus=4, records=[limit(TOKEN, "token-1", max_leases=1)]))

    assert found == {"a": 0, "b": 50, "c": 2}


def test_a_user_in_two_groups_is_refused_before_anything_is_played() -> None:
    groups = [limit(GROUP, "vision", "ada", max_gpus=1), limit(GROUP, "speech", "ada", max_gpus=1)]

    with pytest.raises(InvalidRequest, match="user ada is in group vision"):
        run([request("a", 0, 50)], records=groups)


def test_once_a_limit_keeps_an_earlier_request_out_the_next_one_starts_at_once() -> None:
    wants = [("held", "ann", 1, 900.0), ("ends", "dan", 2, 60.0), ("large", "dan", 3, 60.0), ("small", "dan", 1, 600.0)]
    found = run(
        [request(name, at, lasts_s, count, user=user) for at, (name, user, count, lasts_s) in enumerate(wants)]
        + [request("last", 9.0, 60.0, user="cid")],
        gpus=3,
        records=[limit(LimitKind.USER, "dan", max_gpus=3)],
        max_bypass=1,
    )
    assert (granted(found)["small"], granted(found)["last"]) == (61.0, 61.0)
