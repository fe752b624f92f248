"""What those who run ahead can do to the ones that they pass is bounded."""

from __future__ import annotations

import pytest

from gpulease_protocol.model import LeaseState
from tests.core.test_bypass import ask, explained, give_back, is_active, pass_by, world_of
from tests.core.test_easy_backfill import HOUR_S, listed, pass_time, withdraw


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_is_held_stays_where_it_is_while_others_run_ahead_there(nodes: int) -> None:
    """Else one without a time takes what moved, and the first waits for that one as long as it likes. `nodes`: a gang
    is served in the same way."""
    world = world_of(easy_backfill=True, max_bypass=2, **{name: 4 for name in "abcd"[: 2 * nodes]})
    near, far = "abcd"[:nodes], "abcd"[nodes : 2 * nodes]
    for name in near:
        listed(world, 3, node=name, time_s=HOUR_S, user="bob")
    for name in far:
        listed(world, 2, 3, node=name, time_s=10 * HOUR_S, user="bob")
    first = ask(world, 4, nodes=nodes)
    pass_by(world, 2, node=far[0], user="eve")
    held = set(explained(world, first).held)
    assert len(held) == 3 * nodes

    ahead = [ask(world, 2, node=name, time_s=HOUR_S / 2, user="eve") for name in near]
    without_time = ask(world, node=near[0], user="eve")
    assert is_active(world, *ahead, without_time) == [True] * nodes + [False]
    assert set(explained(world, first).held) == held - {gpu.uuid for one in ahead for gpu in one.gpus}
    withdraw(world, without_time)
    pass_time(world, HOUR_S + 1)

    assert is_active(world, first) == [True]


def test_what_has_run_ahead_is_kept_for_the_one_that_waits_longest() -> None:
    """Who waits behind it gets GPUs held elsewhere."""
    world = world_of(easy_backfill=True, max_bypass=2, a=4, b=4)
    listed(world, 3, node="a", time_s=HOUR_S, user="bob")
    listed(world, 2, 3, node="b", time_s=HOUR_S, user="bob")
    first, second = ask(world, 4), ask(world, 4)
    pass_by(world, 2, node="b", user="eve")
    assert is_active(world, first, second) == [False, False]

    ahead = ask(world, 3, node="a", time_s=HOUR_S / 2, user="eve")

    assert ahead.state is LeaseState.ACTIVE
    assert (len(explained(world, first).held), len(explained(world, second).held)) == (0, 2)
    give_back(world, ahead)
    assert (len(explained(world, first).held), len(explained(world, second).held)) == (3, 2)
    withdraw(world, first, second)
