"""Jobs that wait for other jobs: none starts too early, twice or never, and none is in another's way."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

import pytest

from gpulease_protocol.errors import InvalidRequest, NeverFits, OverQuota, Unavailable
from gpulease_protocol.model import Demand, Holder, Job, JobDependency, JobSpec, JobState, LeaseState
from gpulease_protocol.node_protocol import JobReport, NodeReport, RunState
from gpulease_server.core.explain.dry_run import dry_run
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import JobSubmitted, NodeReported, SubmittedJob
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.order import position
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import JobRecord, LeaseRecord
from gpulease_server.runtime.outage import copy_ledger
from tests.core.build import World
from tests.core.test_arrays import submit as submit_array


def job(world: World, job_id: str) -> Job:
    world.check()
    return world.ledger.jobs[job_id].job


def answer(world: World, job_id: str) -> object:
    return world.answers[job_id.replace("job", "submit")]


def sentence(world: World, job_id: str) -> str:
    record = world.ledger.leases[world.ledger.jobs[job_id].job.lease_id]
    return explain(world.ledger, record, world.now, world.policy).sentence


def test_a_job_waits_beside_free_gpus_until_the_one_before_it_has_succeeded() -> None:
    world = World().node(gpus=2)
    first = world.submit()
    second = world.submit(after={first: "succeeded"})
    assert (job(world, second).state, job(world, second).reason) == (
        JobState.QUEUED,
        f"waits until {first} has succeeded",
    )
    assert sentence(world, second) == f"Not now: it waits until {first} has succeeded; then it joins the queue."
    world.pass_time(5)
    assert job(world, second).state is JobState.QUEUED
    world.ended(first)
    assert job(world, second).state is JobState.STARTING
    assert job(world, second).after == (JobDependency(job=first, when="succeeded"),)


@pytest.mark.parametrize(
    ("code", "when", "state"),
    [
        (0, "succeeded", JobState.STARTING),
        (3, "succeeded", JobState.CANCELLED),
        (0, "ended", JobState.STARTING),
        (3, "ended", JobState.STARTING),
    ],
)
def test_how_a_job_ends_decides_what_becomes_of_the_next(
    code: int, when: Literal["succeeded", "ended"], state: JobState
) -> None:
    world = World().node(gpus=2)
    first = world.submit()
    second = world.submit(after={first: when})
    world.ended(first, code)
    assert job(world, second).state is state
    if state is JobState.CANCELLED:
        reason = f"{first} failed, and this job was to start only after its success"
        assert job(world, second).reason == reason


@pytest.mark.parametrize(("reason", "state"), [("It was stopped on request.", "cancelled"), (None, "succeeded")])
def test_a_job_that_has_saved_what_it_had_when_it_was_cancelled_has_not_succeeded(
    reason: str | None, state: str
) -> None:
    """Its program ended with 0 after SIGTERM; or before that, and was done."""
    world = World().node(gpus=2)
    first = world.submit()
    second = world.submit(after={first: "succeeded"})
    world.run_job(first)
    world.cancel(first)
    world.jobs["a"] = [JobReport(job_id=first, state=RunState.EXITED, exit_code=0, reason=reason)]
    world.report()
    assert job(world, first).state == state
    assert job(world, second).state is (JobState.CANCELLED if reason else JobState.STARTING)


def test_a_chain_of_thousands_is_cancelled_with_its_first_job() -> None:
    """Longer than Python's stack."""
    world = World(policy=Policy(max_waiting_for_jobs=3000)).node(gpus=1)
    names = [world.submit()]
    for _ in range(3000):
        names.append(world.submit(after={names[-1]: "succeeded"}))
    world.cancel(names[0])
    assert job(world, names[0]).state is JobState.STOPPING
    world.ended(names[0], 143)
    assert {world.ledger.jobs[name].job.state for name in world.ledger.jobs} == {JobState.CANCELLED}
    assert not world.ledger.live_jobs
    world.check()


def test_a_job_that_is_tried_again_has_not_ended() -> None:
    world = World().node(gpus=2)
    first = world.submit(retries=1)
    second = world.submit(after={first: "ended"})
    world.ended(first, 1)
    assert (job(world, first).attempts, job(world, second).state) == (1, JobState.QUEUED)
    world.pass_time(5)
    assert job(world, first).attempts == 2
    assert job(world, second).state is JobState.QUEUED
    world.ended(first, 0)
    assert job(world, second).state is JobState.STARTING


def test_the_attempts_before_the_last_are_told() -> None:
    world = World().node(gpus=1)
    first = world.submit(retries=2)
    world.ended(first, 3)
    world.pass_time(5)
    world.ended(first, 4)
    history = job(world, first).attempt_history
    assert [(one.number, one.exit_code, one.node, one.reason) for one in history] == [
        (1, 3, "a", "exit code 3"),
        (2, 4, "a", "exit code 4"),
    ]
    assert job(world, first).exit_code is None, "the next attempt has not ended"


def test_a_job_that_waits_holds_no_one_back_and_joins_at_the_end_of_the_queue() -> None:
    world = World().node(gpus=1)
    first = world.submit()
    waiting = world.submit(after={first: "ended"})
    newer = world.submit()
    assert position(world.ledger, world.ledger.leases[job(world, newer).lease_id]) == 1
    assert position(world.ledger, world.ledger.leases[job(world, waiting).lease_id]) is None
    world.ended(first)
    assert job(world, newer).state is JobState.STARTING
    assert job(world, waiting).state is JobState.QUEUED
    assert position(world.ledger, world.ledger.leases[job(world, waiting).lease_id]) == 1


def test_it_waits_for_all_of_several_and_says_what_is_left() -> None:
    world = World().node(gpus=4)
    first, second = world.submit(), world.submit()
    third = world.submit(after={first: "succeeded", second: "ended"})
    assert sentence(world, third).startswith(f"Not now: it waits until {first} has succeeded and {second} has ended;")
    world.ended(first)
    assert job(world, third).state is JobState.QUEUED
    assert sentence(world, third).startswith(f"Not now: it waits until {second} has ended;")
    world.ended(second, 9)
    assert job(world, third).state is JobState.STARTING


def test_an_array_is_waited_for_whole() -> None:
    world = World().node(gpus=4)
    submit_array(world, count=2, at_most=None)
    after = world.submit(after={"array": "succeeded"})
    world.ended("array-job-0")
    assert job(world, after).state is JobState.QUEUED
    world.ended("array-job-1")
    assert job(world, after).state is JobState.STARTING


def test_the_first_failure_in_an_array_cancels_at_once_who_needs_its_success() -> None:
    world = World().node(gpus=4)
    submit_array(world, count=3, at_most=None)
    needs, any_end = world.submit(after={"array": "succeeded"}), world.submit(after={"array": "ended"})
    world.ended("array-job-1", 5)
    assert job(world, needs).state is JobState.CANCELLED
    assert "array-job-1 failed, a job of array" in (job(world, needs).reason or "")
    assert isinstance(answer(world, world.submit(after={"array": "succeeded"})), InvalidRequest)
    world.ended("array-job-0")
    assert job(world, any_end).state is JobState.QUEUED
    world.ended("array-job-2")
    assert job(world, any_end).state is JobState.STARTING


def test_every_job_of_an_array_waits() -> None:
    world = World().node(gpus=4)
    first = world.submit()
    jobs = tuple(
        SubmittedJob(job_id=f"m-{n}", lease_id=f"l-{n}", index=n, spec=JobSpec(command=("t.py",), gpus=1))
        for n in range(3)
    )
    world.turn(
        JobSubmitted(
            cause="s",
            jobs=jobs,
            name="",
            demand=Demand(count=1),
            holder=Holder(),
            array_id="m",
            after=(JobDependency(job=first),),
            after_live=frozenset({first}),
        )
    )
    assert {job(world, f"m-{n}").state for n in range(3)} == {JobState.QUEUED}
    world.ended(first)
    assert {job(world, f"m-{n}").state for n in range(3)} == {JobState.STARTING}


def test_a_job_that_failed_before_the_turn_is_seen_although_the_api_saw_it_run() -> None:
    world = World().node(gpus=2)
    first = world.submit()
    world.ended(first, 1)
    request = submitted(after=first, live=True)
    refused = world.turn(request)[0]
    assert isinstance(refused, InvalidRequest)
    assert f"after: {first} failed" in refused.detail
    assert not world.ledger.live_jobs


def test_one_that_ended_and_left_memory_before_the_turn_is_asked_for_again() -> None:
    world = World().node(gpus=2)
    assert isinstance(world.turn(submitted(after="job-gone", live=True))[0], Unavailable)
    world.turn(submitted(after="job-old", live=False))
    world.report()
    assert job(world, "job-next").state is JobState.STARTING, "the API found it met in the database"


def test_the_end_of_a_job_in_the_turn_of_a_submission_is_not_missed() -> None:
    """Whichever of the two the turn decides first."""
    for code, order in ((0, 1), (0, -1), (7, 1), (7, -1)):
        world = World().node(gpus=2)
        first = world.submit()
        end = JobReport(job_id=first, state=RunState.EXITED, exit_code=code, started_at=world.now.at)
        report = NodeReport(worker_id="w", host="a", gpus=tuple(world.nodes["a"]), jobs=(end,))
        reported = NodeReported(cause="r", node="a", report=report, observed_at_s=world.at_s)
        world.turn(*[submitted(after=first, live=True), reported][::order])
        world.report()
        made = world.ledger.jobs.get("job-next")
        if code:
            assert made is None or made.job.state is JobState.CANCELLED
        else:
            assert made is not None
            assert made.job.state is JobState.STARTING
        world.check()


def submitted(*, after: str, live: bool) -> JobSubmitted:
    spec = JobSpec(command=("t.py",), gpus=1)
    return JobSubmitted(
        cause="s",
        jobs=(SubmittedJob(job_id="job-next", lease_id="lease-next", spec=spec),),
        name="",
        demand=Demand(count=1),
        holder=Holder(),
        after=(JobDependency(job=after),),
        after_live=frozenset({after} if live else ()),
    )


def test_what_can_never_be_granted_is_refused_at_once_although_it_waits() -> None:
    world = World(policy=Policy(limits=UserLimits(queued=1))).node(gpus=2)
    first = world.submit()
    assert isinstance(answer(world, world.submit(3, after={first: "ended"})), NeverFits)
    assert isinstance(answer(world, world.submit(after={first: "ended"})), Job)
    assert isinstance(answer(world, world.submit(after={first: "ended"})), OverQuota)
    world.check()


def test_a_user_has_so_many_jobs_that_wait_for_others_and_no_more() -> None:
    """All of them may have to be decided on in one turn."""
    world = World(policy=Policy(max_waiting_for_jobs=2)).node(gpus=2)
    first = world.submit()
    second = world.submit(after={first: "succeeded"})
    world.submit(after={second: "succeeded"})
    refused = answer(world, world.submit(after={first: "succeeded"}))
    assert isinstance(refused, OverQuota)
    assert "2 jobs that wait for other jobs already; the limit is 2" in refused.detail
    assert isinstance(answer(world, world.submit()), Job)
    world.cancel(second)
    assert isinstance(answer(world, world.submit(after={first: "succeeded"})), Job)
    world.check()


def test_a_job_that_waits_is_cancelled_at_once() -> None:
    world = World().node(gpus=2)
    first = world.submit()
    second = world.submit(after={first: "ended"})
    third = world.submit(after={second: "succeeded"})
    world.cancel(second)
    assert (job(world, second).state, job(world, third).state) == (JobState.CANCELLED, JobState.CANCELLED)
    assert not world.ledger.unmet


def test_what_a_lost_node_ran_has_not_succeeded() -> None:
    world = World(policy=Policy(node_lost_after_s=10.0)).node(gpus=1)
    first = world.submit()
    needs, any_end = world.submit(after={first: "succeeded"}), world.submit(after={first: "ended"})
    world.pass_time(20, silent=("a",))
    assert job(world, first).state is JobState.LOST
    assert job(world, needs).state is JobState.CANCELLED
    assert f"{first} is lost" in (job(world, needs).reason or "")
    assert any_end not in world.ledger.unmet


def test_a_ledger_that_is_loaded_again_knows_what_waits() -> None:
    """Jobs wait for jobs, arrays and each other, and end in any order and way; after each turn the records alone give
    the same ledger."""
    chance = random.Random(7)
    world = World().node(gpus=3)
    names = []
    for number in range(120):
        when: list[Literal["succeeded", "ended"]] = ["succeeded", "ended"]
        live = [name for name in names if name in world.ledger.live_jobs]
        after = {name: chance.choice(when) for name in chance.sample(live, min(len(live), chance.randrange(3)))}
        names.append(world.submit(after=after, retries=chance.randrange(2)))
        if number % 3 == 0:
            world.pass_time(3)
        started = [name for name in names if job(world, name).state is JobState.STARTING]
        for name in chance.sample(started, chance.randrange(len(started) + 1)):
            world.ended(name, chance.choice([0, 0, 1]))
        if number % 5 == 0 and live:
            world.cancel(chance.choice(live))
        assert again(world.ledger) == relevant(world.ledger)
    assert any(record.job.after for record in world.ledger.jobs.values())


def again(ledger: Ledger) -> dict[str, object]:
    """A ledger of the records alone, in the order in which the store loads them."""
    loaded = Ledger()
    leases = sorted(ledger.leases.values(), key=lambda one: (one.lease.state is not LeaseState.ENDED, one.number))
    jobs = sorted(ledger.jobs.values(), key=lambda one: (not one.job.state.final, one.number))
    for record in (*leases, *jobs):
        loaded.apply(record)
    return relevant(loaded)


def relevant(ledger: Ledger) -> dict[str, object]:
    names = ("queue", "waiting_for_jobs", "unmet", "dependents", "queued_bytes")
    counted = {"live": ledger.job_index.live_in_array, "queued": ledger.limits.queued}
    return {name: getattr(ledger, name) for name in names} | counted


def test_readers_see_the_same_after_each_turn() -> None:
    world = World().node(gpus=2)
    committed = copy_ledger(world.ledger)
    world.changes.clear()
    first = world.submit()
    second = world.submit(after={first: "succeeded"})
    world.submit(after={second: "ended"})
    world.ended(first)
    world.cancel(second)
    for change in world.changes:
        committed.apply(change)
    assert relevant(committed) == relevant(world.ledger)


def test_a_job_is_queued_once_in_all_that_is_recorded() -> None:
    world = World().node(gpus=2)
    first = world.submit()
    second = world.submit(after={first: "succeeded"})
    world.changes.clear()
    world.ended(first)
    jobs = [change.job.state for change in world.changes if isinstance(change, JobRecord) and change.job.id == second]
    leases = [change for change in world.changes if isinstance(change, LeaseRecord) and change.lease.job_id == second]
    assert jobs.count(JobState.STARTING) == 1
    assert [one.lease.state for one in leases].count(LeaseState.ACTIVE) == 1
    assert {one.number for one in leases} == {leases[-1].number}, "its place is that of when it joined"


def test_a_dry_run_takes_nothing_and_says_what_would_be() -> None:
    world = World().node(gpus=2)
    before = copy_ledger(world.ledger)
    assert said(world, 2) == (
        "fits_now",
        "Fits now: GPUs 0, 1 of a. How they are connected is not known: the driver does not tell, so the first free"
        " ones were taken. Nothing is reserved: another request may be first.",
    )
    assert said(world, 3)[0] == "never"
    assert replace(world.ledger) == before
    holder = world.submit()
    verdict, why = said(world, 2)
    assert verdict == "not_now"
    assert "number 1 in the queue" in why
    assert holder in why


def said(world: World, gpus: int) -> tuple[str, str]:
    lease = replace(World().node(gpus=8).lease(), demand=Demand(count=gpus), state=LeaseState.QUEUED, gpus=())
    found = dry_run(world.ledger, lease, world.now, world.policy)
    assert not isinstance(found, OverQuota)
    return found.verdict, found.sentence
