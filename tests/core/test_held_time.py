"""For how long a lease holds its GPUs: what it declared, and what its limits and the budget of its token leave it."""

from __future__ import annotations

from typing import Any

import pytest

from gpulease_protocol.limits import LimitsRequest
from gpulease_protocol.model import Lease, LeaseState
from gpulease_protocol.requests import JobRequest, LeaseRequest
from gpulease_protocol.tokens import TokenRequest
from tests.core.build import World

YEAR_S = 366 * 24 * 3600


@pytest.mark.parametrize(
    ("body", "name", "what"),
    [
        (LeaseRequest, "time_s", {}),
        (JobRequest, "timeout_s", {"command": ["train.py"]}),
        (LimitsRequest, "max_lease_s", {}),
        (TokenRequest, "max_lease_s", {"user": "ann"}),
    ],
)
def test_a_time_to_hold_gpus_is_a_year_at_most(body: Any, name: str, what: dict[str, Any]) -> None:
    body(**what, **{name: YEAR_S})
    for wrong in (0, YEAR_S + 1, 1e300, float("nan")):
        with pytest.raises(ValueError, match=f"{name}: must be over 0 and at most 31622400 seconds"):
            body(**what, **{name: wrong})


def test_a_time_beyond_the_calendar_harms_no_turn_and_no_list() -> None:
    world = World().node()
    lease = world.lease(time_s=1e300)
    assert lease.state is LeaseState.ACTIVE
    assert lease.ends_at is not None
    assert lease.ends_at.year == world.now.at.year + 100
    assert isinstance(world.renew(lease), Lease)
