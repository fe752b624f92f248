"""What a request asks for of a job's logs: by rank, by node, from an offset."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.model import Device, Job, JobAttempt, JobMember, JobSpec, JobState, Launcher
from gpulease_server.api.streams.log_query import LogQuery, by_file, by_node, record_of_attempt
from gpulease_server.core.records import JobRecord


def job(nodes: int = 2, gpus: int = 2) -> Job:
    """A job with so many GPUs on each of its nodes `n0`, `n1` and so on."""
    return Job(
        id="job-1",
        state=JobState.RUNNING,
        lease_id="lease-1",
        launcher=Launcher.PLAIN,
        command=("true",),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        gpus=tuple(
            Device(
                uuid=f"GPU-{node}{index}", node=f"n{node}", index=index, pci_bus_id="", name="", memory_total_bytes=1
            )
            for node in range(nodes)
            for index in range(gpus)
        ),
        members=tuple(JobMember(rank=rank, node=f"n{rank}", address="10.0.0.1") for rank in range(nodes))
        if nodes > 1
        else (),
    )


@pytest.mark.parametrize(
    ("rank", "node", "member"),
    [(None, None, None), ("all", None, None), ("all", "n1", 1), (None, "n0", 0), ("1", None, 0), ("2", "n1", 1)],
)
def test_a_rank_or_a_node_names_a_part(rank: str | None, node: str | None, member: int | None) -> None:
    query = LogQuery.parse(rank, node, None, None, False)
    query.check(job())
    assert query.member_rank(job()) == member


@pytest.mark.parametrize(
    ("rank", "node", "offset", "said"),
    [
        (None, "n7", None, "not on node 'n7', but on n0, n1"),
        ("4", None, None, "0 to 1 on n0, 2 to 3 on n1"),
        ("0", "n1", None, "0 to 1 on n0, 2 to 3 on n1"),
        (None, None, "12", "no offset"),
        (None, "n1", "0/12;1/3", "no offset"),
    ],
)
def test_what_a_job_on_several_nodes_does_not_have_is_named(
    rank: str | None, node: str | None, offset: str | None, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        LogQuery.parse(rank, node, offset, None, False).check(job())


def test_a_job_on_one_node_has_no_other_and_no_offsets_of_several() -> None:
    LogQuery.parse(None, "n0", "12", None, False).check(job(nodes=1))
    for node, offset in (("n1", None), (None, "0/12;1/3")):
        with pytest.raises(InvalidRequest):
            LogQuery.parse(None, node, offset, None, False).check(job(nodes=1))


@pytest.mark.parametrize(
    ("rank", "offset", "is_one"),
    [
        (None, "0", True),
        (None, "2@17", True),
        (None, "0:17", False),
        ("all", "1@0", True),
        ("all", "1@0:17,launcher:3", True),
        ("all", "17", False),
        ("all", "2@0/0:17,launcher:3;1/0", True),
        (None, "0/17;12/3", True),
        ("3", "0/17", False),
        (None, "0/17;", False),
        (None, "0/17;x/3", False),
        (None, "-1", False),
    ],
)
def test_offsets(rank: str | None, offset: str, is_one: bool) -> None:
    if is_one:
        assert LogQuery.parse(rank, None, offset, None, False).offset == offset.rpartition("@")[2]
    else:
        with pytest.raises(InvalidRequest, match="offset"):
            LogQuery.parse(rank, None, offset, None, False)


def tried_again(job: Job) -> JobRecord:
    """It waits for its third attempt; the second one could not start."""
    begun = job.created_at
    attempts = (
        JobAttempt(number=1, lease_id="lease-1", node="n0", ended_at=begun, log_directory="n0:/d/jobs/job-1/logs"),
        JobAttempt(number=2, lease_id="lease-1r2", node="n0", ended_at=begun),
    )
    again = replace(job, state=JobState.QUEUED, gpus=(), members=(), attempts=2, attempt_history=attempts)
    return JobRecord(job=again, spec=JobSpec(command=("true",), gpus=1), number=1)


@pytest.mark.parametrize(("number", "directory"), [(1, "n0:/d/jobs/job-1/logs"), (2, None)])
def test_an_earlier_attempt_has_its_own_directory_and_number(number: int, directory: str | None) -> None:
    shown = record_of_attempt(tried_again(job()), number, None)
    assert (shown.log_directory, shown.job.attempts) == (directory, number)
    LogQuery.parse("all", "n0", None, None, False, number).check(shown.job)


def test_an_attempt_that_was_not_made_and_a_node_without_its_log_are_named() -> None:
    record = tried_again(job())
    with pytest.raises(NotFound, match="no attempt 3 of job job-1"):
        record_of_attempt(record, 3, None)
    with pytest.raises(InvalidRequest, match="the log on n0 is kept, and none on 'n1'"):
        record_of_attempt(record, 1, "n1")
    with pytest.raises(InvalidRequest, match="attempt: cannot be combined with follow"):
        LogQuery.parse(None, None, None, None, True, 1)


def test_the_last_attempt_is_the_job_as_it_is() -> None:
    record = tried_again(job())
    runs = replace(record, job=replace(job(), attempts=3), log_directory="/d/jobs/job-1.3/logs")
    assert record_of_attempt(runs, 3, None) is runs


def test_an_offset_is_taken_apart_by_node_and_by_file() -> None:
    assert by_node("0/0:17,launcher:3;1/0") == {0: "0:17,launcher:3", 1: "0"}
    assert by_node("0") == {}
    assert by_file(None, "0:17,launcher:3") == {"0": 17, "launcher": 3}
    assert by_file("rank-3.log", "17") == {"3": 17}
    assert by_file(None, "0") == {}
