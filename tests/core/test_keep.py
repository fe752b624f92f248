"""Idle GPUs that are kept on purpose: who may say it, for how long, and what others are told."""

from __future__ import annotations

from datetime import timedelta

from gpulease_protocol.errors import GpuleaseError, InvalidRequest, LeaseLost, NotAllowed, NotFound, StaleToken
from gpulease_protocol.model import Lease, LeaseKeep, LeaseState
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import KeepRequested
from gpulease_server.core.kept_leases import kept_now
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import lease_view
from gpulease_server.core.turn import Answer
from tests.core.build import World

HOUR_S = 3600.0


def keep(
    here: World,
    lease: Lease,
    for_s: float = HOUR_S,
    token: int | None = -1,
    *,
    admin: bool = False,
    why: str = "slow copy",
) -> Answer:
    """Say that its GPUs are kept, with its fencing token unless another one is given."""
    asked = KeepRequested(
        cause=f"keep-{next(here.ids)}",
        lease_id=lease.id,
        fencing_token=lease.fencing_token if token == -1 else token,
        reason=why,
        for_s=for_s,
        by="root" if admin else "ann",
        of_another=admin,
    )
    return here.turn(asked)[0]


def shown(here: World, lease: Lease) -> LeaseKeep | None:
    """What its view says."""
    return lease_view(here.ledger, here.ledger.leases[lease.id], here.now, here.policy).kept


def test_a_holder_keeps_gpus_until_a_moment_and_that_is_on_record() -> None:
    here = World().node(gpus=2)
    lease = here.lease(2, ttl_s=1e6)
    answer = keep(here, lease)
    assert isinstance(answer, Lease)
    assert answer.kept == LeaseKeep(
        until=here.now.at + timedelta(hours=1), reason="slow copy", by="ann", at=here.now.at
    )
    here.at_s += HOUR_S - 1
    assert shown(here, lease) == answer.kept
    here.at_s += 1
    assert shown(here, lease) is None
    [event] = here.events("lease.kept")
    assert (event.lease_id, event.fencing_token, len(event.gpus)) == (lease.id, lease.fencing_token, 2)
    assert event.reason == f"by user ann until {answer.kept.until:%Y-%m-%d %H:%M:%S} UTC: slow copy"
    here.check()


def test_the_last_word_counts_also_where_it_is_for_a_shorter_time() -> None:
    here = World().node(gpus=1)
    lease = here.lease(1, ttl_s=1e6)
    keep(here, lease)
    keep(here, lease, 60.0, why="a minute more")
    here.renew(lease)
    kept = shown(here, lease)
    assert kept is not None
    assert kept.reason == "a minute more"
    here.at_s += 61
    assert shown(here, lease) is None


def test_who_waits_is_told_until_when_and_why() -> None:
    here = World().node(gpus=1)
    lease = here.lease(1, ttl_s=1e6)
    waits = here.lease(1, ttl_s=1e6)

    def told() -> tuple[str, LeaseKeep | None]:
        found = explain(here.ledger, here.ledger.leases[waits.id], here.now, here.policy)
        return found.sentence, found.obstacles[0].kept

    assert "kept" not in told()[0]
    keep(here, lease, why="the copy is slow.")
    until = here.now.at + timedelta(hours=1)
    sentence, kept = told()
    assert f"kept idle on purpose until {until:%Y-%m-%d %H:%M:%S} UTC: the copy is slow." in sentence
    assert ".." not in sentence
    assert kept == shown(here, lease)
    here.at_s += HOUR_S
    here.report()
    assert told()[1] is None
    assert "kept" not in told()[0]


def test_who_may_not_and_what_is_not_kept() -> None:
    here = World(policy=Policy(max_keep_s=2 * HOUR_S)).node(gpus=1)
    lease = here.lease(1, ttl_s=1e6)
    waits = here.lease(1, ttl_s=1e6)

    def refused(answer: Answer) -> type[GpuleaseError]:
        assert isinstance(answer, GpuleaseError), answer
        return type(answer)

    assert refused(keep(here, lease, token=None)) is StaleToken
    assert refused(keep(here, lease, token=99)) is StaleToken
    assert refused(keep(here, lease, token=99, admin=True)) is StaleToken, "it may mean another grant"
    assert refused(keep(here, waits)) is InvalidRequest
    assert refused(keep(here, lease, 2 * HOUR_S + 1)) is InvalidRequest
    assert shown(here, lease) is None
    assert isinstance(keep(here, lease, 2 * HOUR_S), Lease)
    assert isinstance(keep(here, lease, token=None, admin=True), Lease)
    here.release(lease)
    assert refused(keep(here, lease)) is LeaseLost
    assert here.now_of(lease).state is LeaseState.ENDED
    assert shown(here, lease) is None
    nothing = KeepRequested(cause="k", lease_id="lease-none", fencing_token=1, reason="x", for_s=1.0)
    assert refused(here.turn(nothing)[0]) is NotFound


def test_an_administrator_may_permit_none() -> None:
    here = World(policy=Policy(max_keep_s=0.0)).node(gpus=1)
    assert isinstance(keep(here, here.lease(1), 1.0), NotAllowed)


def test_no_step_of_the_wall_clock_changes_how_long_gpus_are_kept() -> None:
    for jump_s in (-5 * HOUR_S, 5 * HOUR_S):
        here = World().node(gpus=1)
        lease = here.lease(1, ttl_s=1e6)
        keep(here, lease)
        here.wall_jump_s = jump_s
        here.at_s += HOUR_S - 1
        assert kept_now(here.ledger.leases[lease.id], here.now) is not None
        here.at_s += 1
        assert kept_now(here.ledger.leases[lease.id], here.now) is None


def test_a_kept_lease_ends_as_any_other() -> None:
    here = World().node(gpus=1)
    lease = here.lease(1, ttl_s=5.0)
    keep(here, lease)
    here.pass_time(6)
    assert here.now_of(lease).state is LeaseState.ENDED
