"""One user, however hostile, costs the daemon bounded memory and processor time (promise 15)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gpulease_protocol.errors import OverQuota
from gpulease_protocol.model import Demand, EndReason, Holder, Job, JobSpec, JobState, Lease, LeaseState, Selection
from gpulease_server.core import ledger as ledger_module
from gpulease_server.core.footprint import RECORD_BYTES, job_bytes
from gpulease_server.core.happenings import IdempotencyKey, JobSubmitted, SubmittedJob
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.pending import PendingRequests
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord, JobRecord
from tests.core.build import World, uuid

KIB, MIB = 2**10, 2**20
NUMBERS = itertools.count()


def world(gpus: int = 1, **limits: int) -> World:
    return World(policy=Policy(limits=UserLimits(**limits))).node(gpus=gpus)


def submit(here: World, size_bytes: int, jobs: int = 1, user: str = "ann", answer: bool = True) -> Any:
    """The answer to a submission of jobs with an environment of so many bytes each."""
    number, spec = next(NUMBERS), JobSpec(command=("train.py",), gpus=1, environment={"DATA": "x" * size_bytes})
    cause = f"submission-{number}"
    members = tuple(
        SubmittedJob(job_id=f"job-{number}-{member}", lease_id=f"lease-of-job-{number}-{member}", spec=spec)
        for member in range(jobs)
    )
    here.turn(JobSubmitted(cause=cause, jobs=members, name="", demand=Demand(count=1), holder=Holder(user=user)))
    if answer:
        here.answer_wanted()
    here.check()
    return here.answers.get(cause)


def test_the_bytes_that_wait_are_counted_by_user() -> None:
    here = world(queued_bytes=4 * MIB)
    here.lease(user="carl")
    for _ in range(3):
        assert isinstance(submit(here, MIB), Job)
    refused = submit(here, MIB)
    assert isinstance(refused, OverQuota)
    assert (refused.status, refused.detail) == (
        429,
        "The waiting requests of user ann would take more memory than the limit of 4 MiB.",
    )
    assert isinstance(submit(here, KIB), Job), "a small one still has room"
    assert isinstance(submit(here, MIB, user="bob"), Job), "and another user has a limit of their own"
    assert here.ledger.queued_bytes_by_user["ann"] <= 4 * MIB


def test_what_no_longer_waits_is_not_counted() -> None:
    here = world(queued_bytes=2 * MIB)
    held = here.lease(user="carl")
    first = submit(here, MIB)
    assert isinstance(submit(here, MIB), OverQuota)
    here.cancel(first.id)
    here.check()
    second = submit(here, MIB)
    assert isinstance(second, Job)
    here.release(held)
    here.pass_time(1.0)
    assert here.ledger.jobs[second.id].job.state is JobState.STARTING
    assert isinstance(submit(here, MIB), Job), "one that has started does not wait"
    here.check()


def test_an_array_is_counted_whole_and_refused_whole() -> None:
    here = world(queued_bytes=4 * MIB)
    assert isinstance(submit(here, MIB, jobs=5), OverQuota)
    assert not here.ledger.jobs
    assert not here.ledger.queue
    assert isinstance(submit(here, MIB, jobs=4), OverQuota), "the records themselves take room, too"
    assert isinstance(submit(here, MIB // 2, jobs=4), Job)
    here.check()


def test_many_short_variables_count_as_what_they_take() -> None:
    short = JobSpec(command=("train.py",), gpus=1, environment={f"{number:05}": "" for number in range(2**17)})
    assert job_bytes(short) > 12 * MIB, "of 1 MiB in JSON"
    assert job_bytes(JobSpec(command=("train.py",), gpus=1)) < RECORD_BYTES + KIB


def test_a_request_for_many_named_gpus_is_counted() -> None:
    here = world(queued_bytes=200 * KIB)
    here.lease(user="carl")
    names = tuple(uuid(number) for number in range(1000))
    assert here.lease(among=names).state is LeaseState.QUEUED
    call = here.ask(among=names)
    here.answer_wanted()
    assert isinstance(here.answers[call], OverQuota)
    assert isinstance(here.lease(), Lease)


def test_what_has_no_verdict_yet_is_bounded_too() -> None:
    here = world(gpus=8, queued_bytes=2 * MIB)
    here.at_s += 1.0  # the reading is old, so that nothing is decided
    answers = [submit(here, MIB // 2, answer=False) for _ in range(6)]
    assert [isinstance(answer, OverQuota) for answer in answers] == [False] * 3 + [True] * 3
    assert "new requests of user ann" in answers[-1].detail


def test_all_users_together_have_a_bound() -> None:
    here = World(policy=Policy(max_queued_bytes=2 * MIB)).node(gpus=1)
    here.lease(user="carl")
    answers = [submit(here, MIB // 2, user=f"user-{number}") for number in range(5)]
    assert sum(isinstance(answer, Job) for answer in answers) == 3
    assert "of all users" in answers[-1].detail


def test_a_limit_of_zero_is_none() -> None:
    here = world(queued_bytes=0)
    here.lease(user="carl")
    assert all(isinstance(submit(here, MIB), Job) for _ in range(5))


def test_the_environment_of_a_job_that_has_ended_is_kept_nowhere() -> None:
    here = world()
    here.lease(user="carl")
    job = submit(here, MIB)
    here.cancel(job.id)
    assert here.ledger.jobs[job.id].job.state is JobState.CANCELLED
    assert here.ledger.jobs[job.id].spec.environment == {}
    last = [change for change in here.changes if isinstance(change, JobRecord)][-1]
    assert last.spec.environment == {}, "nor in the database"


def test_large_ended_jobs_leave_memory_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ENDED_BYTES", MIB)
    here = world()
    here.lease(user="carl")
    for _ in range(20):
        job_id = here.submit(1)
        here.cancel(job_id)
    assert len(here.ledger.ended_jobs) == 20, "small ones stay"
    for _ in range(20):
        spec = JobSpec(command=("train.py", "x" * 128 * KIB), gpus=1)
        cause = f"large-{next(NUMBERS)}"
        member = SubmittedJob(job_id=cause, lease_id=f"lease-of-{cause}", spec=spec)
        here.turn(JobSubmitted(cause=cause, jobs=(member,), name="", demand=Demand(count=1), holder=Holder()))
        here.answer_wanted()
        here.cancel(cause)
    assert 6 <= len(here.ledger.ended_jobs) <= 8
    assert here.ledger.ended_bytes["jobs"] <= MIB
    assert set(here.ledger.ended_jobs) == {key for key, record in here.ledger.jobs.items() if record.job.state.final}


def test_the_last_lease_of_a_gpu_stays_and_goes_with_its_next_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ENDED_IN_MEMORY", 3)
    here = world(gpus=2)
    first = here.lease(uuids=(uuid(0),), selection=Selection.LISTED)
    here.release(first)
    here.pass_time(1.0)
    for _ in range(10):
        here.release(here.lease(uuids=(uuid(1),), selection=Selection.LISTED))
        here.pass_time(1.0)
        here.check()
    assert first.id in here.ledger.leases, "a late renewal of an expired one would revive it"
    assert len(here.ledger.leases) <= 5
    again = here.lease(uuids=(uuid(0),), selection=Selection.LISTED)
    assert again.state is LeaseState.ACTIVE
    here.release(again)
    here.pass_time(1.0)
    for _ in range(4):
        here.release(here.lease(uuids=(uuid(1),), selection=Selection.LISTED))
        here.pass_time(1.0)
    assert first.id not in here.ledger.leases
    assert here.ledger.leases[again.id].lease.end_reason is EndReason.RELEASED
    here.check()


class Counted(PendingRequests):
    """Undecided requests that count how often they are gone through."""

    walked = 0

    def __iter__(self) -> Any:
        type(self).walked += 1
        return super().__iter__()


def test_a_key_is_looked_up_and_not_searched_for_among_undecided_requests() -> None:
    here = world(gpus=64)
    here.pending = Counted()
    here.at_s += 1.0  # the reading is old, so that nothing is decided
    calls = [here.ask(key=IdempotencyKey(key=f"k{number}", fingerprint="f")) for number in range(50)]
    again = here.ask(key=IdempotencyKey(key="k7", fingerprint="f"))
    assert len(here.pending) == 50
    assert Counted.walked == 0
    here.answer_wanted()
    assert here.answers[again] == here.answers[calls[7]]
    assert len(here.pending) == 0
    assert here.pending.with_key("k7") is None
    assert not here.pending.count
    assert not here.pending.bytes_by_user


class Unwalked(dict[str, GpuRecord]):
    """GPUs that are looked up, and never gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("all GPUs are walked over")

    keys = values = items = __iter__  # type: ignore[assignment]


def test_ended_leases_beyond_the_bound_cost_no_walk_over_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 GPUs were walked over at each end."""
    here = world(gpus=64)
    monkeypatch.setattr(ledger_module, "MAX_ENDED_IN_MEMORY", 4)
    leases = [here.lease() for _ in range(64)]
    for lease in leases:
        here.release(lease)
    assert len(here.ledger.ended_leases) <= 4
    assert len(here.ledger.last_leases) >= 60, "each is the last one of a GPU"
    assert len(here.ledger.leases) == 64
    here.ledger.gpus = Unwalked(here.ledger.gpus)
    for lease in leases:
        here.ledger.apply(here.ledger.leases[lease.id])
    assert len(here.ledger.ended_leases) <= 4
