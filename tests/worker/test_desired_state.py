"""Answers of a daemon that is newer than the worker: one job that it cannot read is refused alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.codec import to_json
from gpulease_protocol.node_protocol import DesiredState, RunState
from gpulease_worker.desired_state import UnreadableOrder, read_desired_state
from tests.worker.build import order, spec
from tests.worker.play import Worker, play

SLEEP = spec("/bin/sleep", "60")


def answer(*orders: dict[str, Any]) -> dict[str, Any]:
    return to_json(DesiredState(ticket=1)) | {"jobs": list(orders), "of_tomorrow": {"a": 1}}


def newer(job_id: str, **spec_members: object) -> dict[str, Any]:
    """An order with words in its spec that this worker does not know."""
    document = to_json(order(job_id, SLEEP, lease="lease-1"))
    return document | {"spec": document["spec"] | spec_members}


def test_an_answer_of_the_same_version_is_read_whole() -> None:
    known = order("job-1", SLEEP)
    assert read_desired_state(answer(to_json(known))) == DesiredState(ticket=1, jobs=(known,))


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (newer("job-1", launcher="rayrun"), "it does not know launcher 'rayrun'; upgrade gpulease on this node"),
        (newer("job-1", mask="names"), "it does not know mask 'names'; upgrade"),
        (newer("job-1", launcher="rayrun", mask="names"), "launcher 'rayrun' and mask 'names'"),
        (newer("job-1") | {"spec": {"steps": []}}, "its order is not a JobOrder"),
    ],
)
def test_what_can_be_read_of_an_order_is_read(document: dict[str, Any], problem: str) -> None:
    known = order("job-2", SLEEP)
    (first, second) = read_desired_state(answer(document | {"stop": True, "grace_s": 3.0}, to_json(known))).jobs
    assert second == known
    assert isinstance(first, UnreadableOrder)
    assert problem in first.problem
    assert (first.job_id, first.attempt, first.lease_id, first.stop, first.grace_s) == ("job-1", 1, "lease-1", True, 3)


@pytest.mark.parametrize(
    "document", [[], "ok", None, {}, {"ticket": 1, "jobs": [{"spec": {}}]}, {"ticket": 1, "jobs": 3}]
)
def test_an_answer_that_is_none_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match="not a "):
        read_desired_state(document)


def test_one_job_that_cannot_be_read_is_refused_alone(tmp_path: Path) -> None:
    orders = read_desired_state(answer(newer("job-1", launcher="rayrun"), to_json(order("job-2", SLEEP)))).jobs

    async def story(worker: Worker) -> None:
        worker.jobs.reconcile(orders)
        by_id = {report.job_id: report for report in worker.jobs.reports()}
        assert by_id["job-1"].state is RunState.EXITED
        assert "it does not know launcher 'rayrun'" in (by_id["job-1"].reason or "")
        assert by_id["job-2"].state is not RunState.EXITED
        (stopped,) = [one for one in orders if one.job_id == "job-2"]
        await worker.end_of(order("job-2", SLEEP, lease=stopped.lease_id, stop=True, grace_s=0.1))

    play(tmp_path, story)


def test_a_job_that_runs_goes_on_when_its_order_can_no_longer_be_read(tmp_path: Path) -> None:
    """The daemon was upgraded under it: dropping the order would end the job."""
    known = order("job-1", SLEEP, lease="lease-1")
    (unreadable,) = read_desired_state(answer(newer("job-1", launcher="rayrun"))).jobs
    (to_stop,) = read_desired_state(answer(newer("job-1", launcher="rayrun") | {"stop": True, "grace_s": 0.1})).jobs

    async def story(worker: Worker) -> None:
        await worker.until([known], RunState.RUNNING)
        for _ in range(3):
            worker.jobs.reconcile([unreadable])
            assert [report.state for report in worker.jobs.reports()] == [RunState.RUNNING]
        assert (await worker.end_of(to_stop)).exit_code == 143

    play(tmp_path, story)
