"""Arrays: so many at once, and no one waits because of those that may not begin yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulease_protocol import job_arrays
from gpulease_protocol.errors import NeverFits, OverQuota
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.model import Demand, Holder, Job, JobSpec, JobState, Lease, LeaseState, Liveness
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_protocol.requests import ArrayRequest, JobRequest
from gpulease_server.core.explain.dry_run import dry_run
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import JobSubmitted, SubmittedJob
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import JobRecord
from gpulease_server.core.turn import Answer
from tests.core.build import World


def array_of_jobs(count: int, at_most: int | None = None, gpus: int = 1, name: str = "array") -> JobSubmitted:
    """A request for an array whose jobs and leases are named after it and their index."""
    jobs = tuple(
        SubmittedJob(
            job_id=f"{name}-job-{index}",
            lease_id=f"{name}-lease-{index}",
            index=index,
            spec=JobSpec(command=("train.py",), gpus=gpus),
        )
        for index in range(count)
    )
    return JobSubmitted(
        cause=f"submit-{name}",
        jobs=jobs,
        name="",
        demand=Demand(count=gpus),
        holder=Holder(),
        array_id=name,
        array_at_most=at_most,
    )


def submit(world: World, *, count: int, at_most: int | None, gpus: int = 1, name: str = "array") -> Answer:
    asked = array_of_jobs(count, at_most, gpus, name)
    world.turn(asked)
    world.answer_wanted()
    world.report()
    return world.answers.get(asked.cause)


def states(world: World, name: str = "array") -> dict[int, str]:
    """What every job of an array does, by index."""
    return {
        job.array_index or 0: job.state.value
        for job in (r.job for r in world.ledger.jobs.values())
        if job.array_id == name
    }


def ended(world: World, index: int, code: int = 0) -> None:
    """The worker reports the end of a job of the array, and then a clean GPU."""
    world.jobs["a"] = [JobReport(job_id=f"array-job-{index}", state=RunState.EXITED, exit_code=code)]
    world.report()
    world.report()


def test_at_most_so_many_run_at_once_and_each_end_lets_the_next_begin() -> None:
    world = World().node("a", gpus=8)
    answer = submit(world, count=5, at_most=2)
    assert isinstance(answer, Job)
    assert (answer.array_id, answer.array_index, answer.array_at_most) == ("array", 0, 2)
    assert states(world) == {0: "starting", 1: "starting", 2: "queued", 3: "queued", 4: "queued"}
    ended(world, 1)
    assert states(world) == {0: "starting", 1: "succeeded", 2: "starting", 3: "queued", 4: "queued"}


def test_an_array_without_a_limit_takes_what_is_free() -> None:
    world = World().node("a", gpus=4)
    submit(world, count=6, at_most=None)
    assert list(states(world).values()).count("starting") == 4


def test_an_array_at_its_limit_holds_no_one_back() -> None:
    world = World().node("a", gpus=3)
    submit(world, count=10, at_most=1)
    newer = world.submit(2)
    assert world.ledger.jobs[newer].job.state is JobState.STARTING


def test_a_job_of_a_lost_node_makes_way_for_the_next_of_its_array() -> None:
    world = World(policy=Policy(node_lost_after_s=60.0)).node(gpus=1)
    submit(world, count=2, at_most=1)
    world.node("b", gpus=1)
    world.jobs["a"] = [JobReport(job_id="array-job-0", state=RunState.RUNNING, log_directory="/j")]
    world.report()
    world.pass_time(59, silent=("a",))
    assert states(world) == {0: "running", 1: "queued"}
    world.pass_time(6, silent=("a",))
    assert states(world) == {0: "lost", 1: "starting"}


def test_explain_names_the_limit_of_an_array_to_its_own_jobs_only() -> None:
    world = World().node("a", gpus=2)
    submit(world, count=3, at_most=1)
    waiting = world.ledger.leases["array-lease-1"]
    said = explain(world.ledger, waiting, world.now, world.policy)
    assert said.sentence == ("Not now: array array runs as many jobs as it may at once (1); number 1 in the queue.")
    newer = world.submit(2)
    lease = world.ledger.leases[world.ledger.jobs[newer].job.lease_id]
    assert "array-lease-1" not in explain(world.ledger, lease, world.now, world.policy).sentence


def test_an_array_is_recorded_whole_with_its_first_job_or_not_at_all() -> None:
    world = World().node("a", gpus=2)
    assert isinstance(submit(world, count=3, at_most=1, gpus=5), NeverFits)
    assert (world.ledger.jobs, world.ledger.leases, world.ledger.queue) == ({}, {}, [])
    world.changes.clear()
    submit(world, count=3, at_most=1)
    recorded = [change.job.array_index for change in world.changes if isinstance(change, JobRecord)]
    assert recorded[:3] == [0, 1, 2]
    numbers = [record.number for record in world.ledger.jobs.values()]
    assert len(set(numbers)) == 3
    assert world.ledger.next_number > max(numbers)


def test_an_array_that_would_overfill_the_queue_is_refused() -> None:
    world = World(policy=Policy(max_queued=4)).node("a", gpus=2)
    assert isinstance(submit(world, count=6, at_most=1), OverQuota)
    assert world.ledger.jobs == {}
    world.policy = Policy(limits=UserLimits(queued=4))
    refused = submit(world, count=6, at_most=1)
    assert isinstance(refused, OverQuota)
    assert "has 0 requests in the queue and asks for at least 5 more; the limit is 4." in refused.detail


@pytest.mark.parametrize("policy", [Policy(limits=UserLimits(queued=5)), Policy(max_queued=5)])
def test_a_dry_run_says_fits_now_only_of_an_array_whose_others_may_wait(policy: Policy) -> None:
    world = World(policy=policy).node("a", gpus=1)
    holder = Holder(user="ann")
    one = Lease(
        id="",
        state=LeaseState.QUEUED,
        holder=holder,
        demand=Demand(count=1),
        ttl_s=0.0,
        liveness=Liveness.JOB,
        created_at=world.now.at,
    )
    assert isinstance(dry_run(world.ledger, one, world.now, policy, further_jobs=6), OverQuota)
    found = dry_run(world.ledger, one, world.now, policy, further_jobs=5)
    assert isinstance(found, Explanation)
    assert found.sentence.startswith("Fits now: the first of 6 jobs would get GPU 0")


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("policy", [Policy(limits=UserLimits(queued=5)), Policy(max_queued=5)])
def test_arrays_that_are_decided_together_do_not_overfill_the_queue_together(policy: Policy, gpus: int) -> None:
    """Whether the first job of each waits, or is granted."""
    world = World(policy=policy).node("a", gpus=2)
    for _ in range(2 - gpus):
        world.lease(user="bob")
    arrays = [array_of_jobs(4, 1, name=name) for name in ("first", "second")]
    world.turn(*arrays)
    world.answer_wanted()
    world.report()
    assert isinstance(world.answers["submit-first"], Job)
    refused = world.answers["submit-second"]
    assert isinstance(refused, OverQuota)
    assert f"has {3 if gpus else 4} requests" in refused.detail
    assert states(world, "second") == {}
    assert len(world.ledger.queue) == (3 if gpus else 4)
    world.check()


def test_an_array_whose_first_job_is_granted_keeps_no_more_memory_than_its_user_may() -> None:
    world = World(policy=Policy(limits=UserLimits(queued_bytes=600_000))).node("a", gpus=2)
    answers = []
    for name in ("first", "second"):
        asked = array_of_jobs(4, 1, name=name)
        spec = JobSpec(command=("train.py",), gpus=1, environment={"A": "x" * 100_000})
        world.turn(replace(asked, jobs=tuple(replace(one, spec=spec) for one in asked.jobs)))
        world.answer_wanted()
        world.report()
        answers.append(world.answers[asked.cause])
    assert [isinstance(answer, OverQuota) for answer in answers] == [False, True]
    assert sum(world.ledger.queued_bytes.values()) <= 600_000


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-3", (0, 1, 2, 3)), ("5", (5,)), ("1,4,9", (1, 4, 9)), ("0-10:5", (0, 5, 10)), ("7, 0-1", (7, 0, 1))],
)
def test_indices_are_numbers_and_ranges(text: str, found: tuple[int, ...]) -> None:
    assert job_arrays.parse_indices(text) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be like"),
        ("a", "must be like"),
        ("-1", "must be like"),
        ("3-1", "must go upwards"),
        ("0-4:0", "must go upwards"),
        ("0-1000", "at most 1000"),
        ("0-999999999", "at most 1000"),
        ("1,1", "twice"),
        ("0-99999999999999", "must be like"),
    ],
)
def test_indices_that_mean_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ArrayRequest(indices=text)


def test_commands_and_environments_that_are_too_large_together_are_refused() -> None:
    array = ArrayRequest(indices="0-999", at_most=None)
    for asked in ({"environment": {"A": "x" * 100_000}}, {"command": ["t.py", "x" * 100_000]}):
        with pytest.raises(ValueError, match=r"^array: 1000 commands and environments"):
            JobRequest(**{"command": ["t.py"], "array": array, **asked})


def test_the_index_goes_into_the_command_and_nothing_else_of_it_changes() -> None:
    assert job_arrays.member_command(("t.py", "--seed={index}", "{other}"), 7) == ("t.py", "--seed=7", "{other}")
    assert job_arrays.parse_array("0-19%3") == ("0-19", 3)
    assert job_arrays.parse_array("4") == ("4", None)
