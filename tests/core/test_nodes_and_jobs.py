"""What a node's reports change, and a job's life."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from gpulease_protocol.errors import NeverFits, NotAllowed, NotFound
from gpulease_protocol.model import (
    Demand,
    EndReason,
    GpuState,
    Holder,
    Job,
    JobSpec,
    JobState,
    Launcher,
    Lease,
    LeaseState,
    NodeMode,
)
from gpulease_protocol.node_protocol import JUST_STARTED, PAUSED, JobElsewhere, JobReport, RunState
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import JobSubmitted, SubmittedJob
from gpulease_server.core.node import desired_state
from gpulease_server.core.policy import Policy
from gpulease_server.core.presentation import gpu_view, node_view
from tests.core.build import World, gpu, uuid


def order(world: World, job_id: str):
    return next((item for item in desired_state(world.ledger, "a", 1).jobs if item.job_id == job_id), None)


def test_a_renewal_changes_nothing_that_a_worker_is_told() -> None:
    """So it wakes no worker, see `runtime.wakeups`."""
    world = World().node()
    watched, other = world.lease(1, owner=7), world.lease(2)
    before = desired_state(world.ledger, "a", 0)
    for lease in (watched, other):
        world.at_s += 1
        world.renew(lease)
    assert desired_state(world.ledger, "a", 0) == before


def test_a_silent_node_is_unknown_and_says_so_once() -> None:
    world = World().node(gpus=1)
    world.pass_time(10, silent=("a",))
    assert world.state() is GpuState.UNKNOWN
    events = [change.kind for change in world.changes if hasattr(change, "kind")]
    assert events == ["node.ready", "node.unknown"]
    world.report()
    assert world.state() is GpuState.FREE


def test_a_node_with_a_problem_is_unknown_and_keeps_its_leases() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    world.report(problem="the probe did not answer within 1.5 s")
    assert world.state() is GpuState.UNKNOWN
    assert world.now_of(lease).state is LeaseState.ACTIVE
    node = node_view(world.ledger, world.ledger.nodes["a"], world.now, world.policy)
    assert node.reason == "the probe did not answer within 1.5 s"
    view = gpu_view(world.ledger, world.ledger.gpus[uuid(0)], world.now, world.policy)
    assert view.memory_used_bytes is None, "shows a reading that is no longer true"


def test_a_second_worker_for_one_node_is_refused_while_the_first_reports() -> None:
    world = World().node(gpus=1)
    refused = world.report(worker="other")
    assert isinstance(refused, NotAllowed)
    assert refused.detail == "Another worker, on host a (10.0.0.97), reports for node a."
    assert "After a restart this passes in seconds" in (refused.remedy or "")
    world.pass_time(4, silent=("a",))
    assert world.report(worker="other") is None


def test_a_worker_without_the_records_of_a_job_that_runs_there_is_refused() -> None:
    world = World().node()
    job_id = world.submit()
    world.run_job(job_id)
    world.jobs["a"] = []
    world.pass_time(10, silent=("a",))
    here = JobElsewhere(job_id=job_id, attempt=1, data_dir="/srv/old")
    strange = replace(here, job_id="job-of-another-daemon")
    refusal = world.report(worker="other", problem=JUST_STARTED, jobs_elsewhere=(strange, here))
    assert isinstance(refusal, NotAllowed)
    assert str(refusal) == (
        f"Job {job_id} runs on node a under another data directory, and would be lost."
        " Start the worker with --data-dir /srv/old, or wait until the job has ended."
    )
    assert (world.state(), world.ledger.jobs[job_id].job.state) == (GpuState.UNKNOWN, JobState.RUNNING)
    assert world.report(worker="other", jobs_elsewhere=(strange, replace(here, attempt=2))) is None
    assert world.ledger.jobs[job_id].job.state is JobState.LOST


def test_what_a_worker_has_records_of_is_its_own_wherever_it_runs() -> None:
    """As when its data directory has two names."""
    world = World().node()
    job_id = world.submit()
    world.run_job(job_id)
    here = JobElsewhere(job_id=job_id, attempt=1, data_dir="/srv/same")
    world.pass_time(10, silent=("a",))
    assert world.report(worker="other", jobs_elsewhere=(here,)) is None
    assert world.ledger.jobs[job_id].job.state is JobState.RUNNING


def test_a_gpu_that_its_node_shows_no_more_goes_in_the_end_unless_it_is_held() -> None:
    world = World(policy=Policy(gone_after_s=5.0)).node(gpus=2)
    lease = world.lease()
    world.node(gpus=[])
    world.pass_time(4.5)
    assert (world.state(0), world.state(1)) == (GpuState.UNKNOWN, GpuState.UNKNOWN)
    world.pass_time(1)
    assert set(world.ledger.gpus) == {uuid(0)}
    assert world.now_of(lease).state is LeaseState.ACTIVE
    gone = world.events("gpu.gone")
    assert [(event.gpus, event.lease_id) for event in gone] == [((uuid(1),), None)]


def test_a_gpu_that_one_reading_leaves_out_is_waited_for_and_never_called_never() -> None:
    world = World().node(gpus=2)
    world.node(gpus=[gpu(0)])
    call = world.ask(2)
    waiting = world.answers[call]
    assert isinstance(waiting, Lease), "refused for good, because a driver left a GPU out for a moment"
    assert waiting.state is LeaseState.QUEUED
    explanation = explain(world.ledger, world.ledger.leases[waiting.id], world.now, world.policy)
    assert "GPU 1 of a is unknown: its node no longer shows it" in explanation.sentence
    world.node(gpus=2)
    assert world.now_of(waiting).state is LeaseState.ACTIVE


def test_a_missing_gpu_is_waited_for_again_each_time_that_it_was_shown_in_between() -> None:
    world = World(policy=Policy(gone_after_s=5.0)).node(gpus=2)
    for _ in range(3):
        world.node(gpus=[gpu(0)])
        world.pass_time(4)
        assert set(world.ledger.gpus) == {uuid(0), uuid(1)}
        world.node(gpus=2)
    world.node(gpus=[gpu(0)])
    for _ in range(20):
        world.pass_time(1)
        world.report(problem="the driver is busy")
    assert set(world.ledger.gpus) == {uuid(0)}
    assert isinstance(world.answers[world.ask(2)], NeverFits)


def test_two_nodes_cannot_show_the_same_gpu() -> None:
    world = World().node("a", gpus=1)
    world.node("b", gpus=[gpu(0, "a")])
    assert world.ledger.gpus[uuid(0)].device.node == "a"
    assert world.lease().gpus[0].node == "a"


def test_a_process_of_no_one_on_a_leased_gpu_is_a_conflict() -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    for reading, activity in [
        (gpu(0), "starting"),
        (gpu(0, pids=(7,), lease=lease.id, utilization_ratio=0.5), "active"),
        (gpu(0, pids=(7,), lease=lease.id, utilization_ratio=0.0), "idle"),
        (gpu(0, pids=(7,)), "conflict"),
    ]:
        world.node(gpus=[reading])
        view = gpu_view(world.ledger, world.ledger.gpus[uuid(0)], world.now, world.policy)
        assert view.activity == activity


def test_a_job_is_ordered_once_its_gpus_are_granted_and_ends_with_its_lease() -> None:
    world = World().node(gpus=2)
    job_id = world.submit(2)
    assert world.ledger.jobs[job_id].job.state is JobState.STARTING
    ordered = order(world, job_id)
    assert ordered.gpus == (uuid(0), uuid(1))
    assert ordered.env["GPULEASE_LEASE_ID"] == ordered.lease_id
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.RUNNING)]
    world.report()
    assert world.ledger.jobs[job_id].job.state is JobState.RUNNING
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.EXITED, exit_code=0)]
    world.report()
    job = world.ledger.jobs[job_id].job
    assert (job.state, job.exit_code) == (JobState.SUCCEEDED, 0)
    assert world.ledger.leases[job.lease_id].lease.end_reason is EndReason.JOB_FINISHED
    assert order(world, job_id) is None
    assert world.state() is GpuState.DRAINING
    world.report()
    assert world.state() is GpuState.FREE


def test_a_job_lease_does_not_expire() -> None:
    world = World().node(gpus=1)
    job_id = world.submit()
    world.pass_time(3600)
    assert world.ledger.jobs[job_id].job.state is JobState.STARTING


@pytest.mark.parametrize(
    ("report", "state", "reason"),
    [
        ({"exit_code": 3}, JobState.FAILED, "exit code 3"),
        ({"exit_code": None, "reason": "script x.py not found"}, JobState.FAILED, "script x.py not found"),
        ({"exit_code": 143, "timed_out": True}, JobState.TIMED_OUT, "ran longer than its time limit"),
    ],
)
def test_how_a_job_ends(report: dict, state: JobState, reason: str) -> None:
    world = World().node(gpus=1)
    job_id = world.submit(timeout_s=5.0)
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.EXITED, **report)]
    world.report()
    job = world.ledger.jobs[job_id].job
    assert (job.state, job.reason, job.exit_code) == (state, reason, report["exit_code"])


@pytest.mark.parametrize("clock_s", [-400 * 86400.0, -1.0, 0.0, 86400.0])
def test_a_wrong_clock_of_its_node_makes_no_job_run_for_years_or_end_long_ago(clock_s: float) -> None:
    world = World().node(gpus=1)
    job_id = world.submit()
    wrong, submitted_at = timedelta(seconds=clock_s), world.now.at
    world.pass_time(0.5)
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.RUNNING, started_at=world.now.at + wrong)]
    world.report()
    world.pass_time(5.0)
    times = {"started_at": world.now.at - timedelta(seconds=5.0) + wrong, "ended_at": world.now.at + wrong}
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.EXITED, exit_code=0, **times)]
    world.report()
    job = world.ledger.jobs[job_id].job
    assert job.started_at is not None
    assert job.ended_at is not None
    assert submitted_at <= job.started_at <= world.now.at
    assert abs((job.ended_at - job.started_at).total_seconds() - 5.0) < 1.1


def fails(world: World, job_id: str, attempt: int, **what: Any) -> None:
    """The worker reports that an attempt ran and failed."""
    failed = {"exit_code": 3, "started_at": world.now.at, "reason": "Rank 0 failed first."} | what
    world.jobs["a"] = [JobReport(job_id=job_id, attempt=attempt, state=RunState.EXITED, **failed)]
    world.report()


def test_a_job_that_failed_is_tried_again_after_a_pause_under_a_new_lease_and_a_clean_gpu() -> None:
    world = World(policy=Policy(retry_pause_s=(2.0, 3.0))).node(gpus=1)
    job_id = world.submit(retries=2)
    first = world.ledger.jobs[job_id].job.lease_id
    fails(world, job_id, 1)
    job = world.ledger.jobs[job_id].job
    assert (job.state, job.attempts, job.started_at, job.gpus) == (JobState.QUEUED, 1, None, ())
    assert job.reason == "attempt 1 of 3 failed: Rank 0 failed first; the next one joins the queue after a pause of 2 s"
    assert world.ledger.leases[first].lease.end_reason is EndReason.JOB_FINISHED
    assert job.lease_id == f"{first}r2"
    world.pass_time(1.5)
    assert world.state() is GpuState.FREE, "in the pause others may have the GPU"
    assert order(world, job_id) is None
    world.pass_time(1.0)
    again = order(world, job_id)
    assert (again.attempt, again.lease_id) == (2, f"{first}r2")
    fails(world, job_id, 2)
    assert world.ledger.jobs[job_id].job.lease_id == f"{first}r3"
    assert "pause of 3 s" in str(world.ledger.jobs[job_id].job.reason), "the pause has its longest"
    world.pass_time(3.5)
    fails(world, job_id, 3)
    last = world.ledger.jobs[job_id].job
    assert (last.state, last.attempts, last.exit_code) == (JobState.FAILED, 3, 3)
    world.check()


@pytest.mark.parametrize(
    ("what", "state"),
    [
        ({"started_at": None, "exit_code": None, "reason": "no such script"}, JobState.FAILED),
        ({"timed_out": True}, JobState.TIMED_OUT),
        ({"exit_code": 0}, JobState.SUCCEEDED),
    ],
)
def test_what_trying_again_would_not_help_is_not_tried_again(what: dict[str, Any], state: JobState) -> None:
    world = World().node(gpus=1)
    job_id = world.submit(retries=5)
    fails(world, job_id, 1, **what)
    assert world.ledger.jobs[job_id].job.state is state


def test_a_job_that_waits_to_be_tried_again_can_be_cancelled() -> None:
    world = World().node(gpus=1)
    job_id = world.submit(retries=1)
    fails(world, job_id, 1)
    world.cancel(job_id)
    job = world.ledger.jobs[job_id].job
    assert (job.state, job.reason) == (JobState.CANCELLED, "cancelled before its next attempt started")
    assert world.ledger.leases[job.lease_id].lease.end_reason is EndReason.CANCELLED
    assert not world.ledger.queue
    assert not world.ledger.not_before


def test_the_report_of_an_earlier_attempt_does_not_end_the_next() -> None:
    world = World().node(gpus=1)
    job_id = world.submit(retries=1)
    fails(world, job_id, 1)
    world.pass_time(3)
    fails(world, job_id, 1)
    assert world.ledger.jobs[job_id].job.state is JobState.STARTING


def hangs(world: World, job_id: str, reason: str) -> None:
    """A worker reports a process of the job that does not die."""
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.RUNNING, unkillable=(7,), reason=reason)]
    world.report()


@pytest.mark.parametrize(
    ("cancelled", "shown", "end"),
    [
        ("before", "cancelled; 7 hangs in the kernel", JobState.CANCELLED),
        ("meanwhile", "cancelled; 7 hangs in the kernel", JobState.CANCELLED),
        ("never", "7 hangs in the kernel", JobState.FAILED),
    ],
)
def test_a_job_that_cannot_be_killed_stops_and_keeps_its_gpu_until_it_has_ended(
    cancelled: str, shown: str, end: JobState
) -> None:
    world = World().node(gpus=1)
    job_id = world.submit()
    waiting = world.submit()
    if cancelled == "before":
        world.cancel(job_id)
    hangs(world, job_id, "7 hangs in the kernel")
    if cancelled == "meanwhile":
        world.cancel(job_id)
        assert world.ledger.jobs[job_id].job.reason == "7 hangs in the kernel"
    hangs(world, job_id, "7 hangs in the kernel")
    world.pass_time(50)
    job = world.ledger.jobs[job_id].job
    assert (job.state, job.reason) == (JobState.STOPPING, shown)
    assert order(world, job_id).stop is (cancelled != "never")
    assert world.state() is GpuState.LEASED
    view = gpu_view(world.ledger, world.ledger.gpus[uuid(0)], world.now, world.policy)
    assert str(view.reason).endswith(f"and its job is stopping: {shown}")
    assert world.ledger.jobs[waiting].job.state is JobState.QUEUED
    fails(world, job_id, 1)
    assert world.ledger.jobs[job_id].job.state is end
    world.pass_time(1)
    assert world.ledger.jobs[waiting].job.state is JobState.STARTING


def told(world: World) -> list[str | None]:
    return [one.reason for one in world.events("job.stuck")]


def test_a_job_that_cannot_be_killed_is_told_of_once_whatever_is_seen_of_its_processes_until_they_have_ended() -> None:
    world = World().node(gpus=1)
    job_id = world.submit(retries=1)
    for seen in ("7 and 8 hang in the kernel", "8 hangs in the kernel, in read", "8 hangs in the kernel", "8 runs on"):
        hangs(world, job_id, seen)
        assert world.ledger.jobs[job_id].job.reason == seen
    world.cancel(job_id)
    hangs(world, job_id, "8 runs on")
    assert world.ledger.jobs[job_id].job.reason == "cancelled; 8 runs on"
    assert told(world) == ["7 and 8 hang in the kernel"]


def test_a_job_that_cannot_be_killed_is_told_of_in_each_attempt() -> None:
    world = World().node(gpus=1)
    job_id = world.submit(retries=1)
    hangs(world, job_id, "7 hangs")
    fails(world, job_id, 1)
    world.pass_time(60)
    assert world.ledger.jobs[job_id].job.state is JobState.STARTING
    world.jobs["a"] = [JobReport(job_id=job_id, attempt=2, state=RunState.RUNNING, unkillable=(9,), reason="9 hangs")]
    world.report()
    assert told(world) == ["7 hangs", "9 hangs"]


def test_a_job_that_cannot_be_killed_is_not_told_of_again_after_an_upgrade_of_the_daemon() -> None:
    world = World().node(gpus=1)
    job_id = world.submit()
    hangs(world, job_id, "7 hangs")
    world.ledger.apply(replace(world.ledger.jobs[job_id], stuck_on=()))
    hangs(world, job_id, "7 hangs")
    hangs(world, job_id, "7 runs on")
    assert told(world) == ["7 hangs"]


def test_a_job_whose_launcher_a_worker_had_is_lost_with_its_record_although_no_rank_was_up() -> None:
    world = World().node(gpus=1)
    job_id = world.submit()
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.STARTING, log_directory="/d/jobs/j/logs")]
    world.report()
    assert world.ledger.jobs[job_id].job.state is JobState.STARTING
    world.jobs["a"] = []
    world.report()
    assert world.ledger.jobs[job_id].job.state is JobState.LOST, "ordered again, it would run twice"


def test_a_job_runs_as_who_submitted_it() -> None:
    world = World().node(gpus=1)
    world.turn(
        JobSubmitted(
            cause="c",
            jobs=(SubmittedJob(job_id="job-u", lease_id="lease-u", spec=JobSpec(command=("t.py",), gpus=1)),),
            name="",
            demand=Demand(count=1),
            holder=Holder(user="ann"),
            uid=1005,
            gid=100,
        )
    )
    world.answer_wanted()
    ordered = order(world, "job-u")
    assert (ordered.uid, ordered.gid, ordered.indices) == (1005, 100, (0,))
    (leased,) = desired_state(world.ledger, "a", 1).leases
    assert (leased.id, leased.uid, leased.user) == ("lease-u", 1005, "ann"), "whose processes the worker believes"


def test_a_waiting_job_is_cancelled_at_once_and_leaves_the_queue() -> None:
    world = World().node(gpus=1)
    world.submit()
    waiting = world.submit()
    answer = world.cancel(waiting)
    assert isinstance(answer, Job)
    assert (answer.state, answer.reason) == (JobState.CANCELLED, "cancelled before it started")
    assert not world.ledger.queue


def test_a_running_job_is_told_to_stop_and_is_cancelled_when_it_has() -> None:
    world = World().node(gpus=1)
    job_id = world.submit()
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.RUNNING)]
    world.report()
    world.cancel(job_id)
    assert order(world, job_id).stop
    assert world.state() is GpuState.LEASED, "the GPU was let go before the job had stopped"
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.EXITED, exit_code=143)]
    world.report()
    assert world.ledger.jobs[job_id].job.state is JobState.CANCELLED
    assert isinstance(world.cancel("job-x"), NotFound)


def test_a_running_job_that_its_worker_lost_is_lost_and_its_gpu_drains() -> None:
    world = World().node(gpus=1)
    job_id = world.submit()
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.RUNNING)]
    world.report()
    world.jobs["a"] = []
    world.report()
    assert world.ledger.jobs[job_id].job.state is JobState.LOST
    world.check()


def test_jobs_are_submitted_with_the_launcher_they_name() -> None:
    world = World().node(gpus=1)
    job_id = world.submit(launcher=Launcher.PLAIN)
    assert order(world, job_id).spec.launcher is Launcher.PLAIN


def test_a_report_that_comes_late_changes_nothing() -> None:
    world = World().node(gpus=1)
    job_id = world.submit()
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.RUNNING)]
    world.report()
    world.jobs["a"] = []
    world.nodes["a"] = [gpu(0, pids=(9,))]
    world.report(age_s=3.0)
    assert world.ledger.jobs[job_id].job.state is JobState.RUNNING
    assert not world.ledger.node_observations["a"].readings[uuid(0)].processes


def test_a_job_that_was_ended_for_time_without_a_limit_is_taken_in() -> None:
    world = World().node(gpus=1)
    job_id = world.submit()
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.EXITED, timed_out=True, exit_code=143)]
    world.report()
    assert world.ledger.jobs[job_id].job.state is JobState.TIMED_OUT


def test_a_draining_gpu_follows_its_node_to_a_new_name() -> None:
    world = World().node("a", gpus=1)
    world.release(world.lease())
    readings = world.nodes.pop("a")
    world.pass_time(5)
    world.node("b", gpus=readings)
    world.report("b")
    assert world.state(0, "a") is GpuState.FREE


@pytest.mark.parametrize("problem", ["The driver hangs.", PAUSED])
def test_a_node_that_has_no_reading_is_not_asked_for_one_again_and_again(problem: str) -> None:
    world = World().node(gpus=2)
    lease = world.lease()
    if problem == PAUSED:
        world.set_mode(NodeMode.PAUSED, force=True)
    world.release(lease)
    assert "a" in world.wanted, "it is asked at once"
    world.report(problem=problem)
    assert "a" not in world.wanted
    assert world.lease().state is LeaseState.QUEUED
    assert "a" not in world.wanted
    if problem == PAUSED:
        world.set_mode(NodeMode.ACTIVE)
        assert "a" in world.wanted
    world.report()
    assert world.state() is not GpuState.UNKNOWN
    assert "a" not in world.wanted
