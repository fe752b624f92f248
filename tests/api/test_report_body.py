"""Reports of a worker that is newer than the daemon: one word that it does not know costs one field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from gpulease_protocol.codec import to_json
from gpulease_protocol.model import ComputeMode, GpuReading, Process, ProcessType
from gpulease_protocol.node_protocol import (
    JobReport,
    LeaseOwner,
    NodeReport,
    OwnerReport,
    OwnerState,
    RunState,
)
from gpulease_server.api.report_body import COMPUTE_MODE_UNKNOWN, ReportBody, with_trusted_logs

USED = GpuReading(uuid="GPU-0", node="n", index=0, compute_mode=ComputeMode.DEFAULT, processes=(Process(pid=7),))
OWNER = OwnerReport(owner=LeaseOwner(pid=7, start_ticks=8), state=OwnerState.ALIVE)
REPORT = NodeReport(
    worker_id="w",
    host="n",
    gpus=(USED, replace(USED, uuid="GPU-1", health="lost")),
    owners=(OWNER,),
    jobs=(JobReport(job_id="job-1", state=RunState.RUNNING),),
)


def read(document: dict[str, Any]) -> NodeReport:
    return ReportBody().parse(json.dumps(document).encode())


def test_a_report_of_the_same_version_is_read_whole() -> None:
    assert read(to_json(REPORT)) == REPORT
    assert read(to_json(REPORT) | {"of_tomorrow": 1}) == REPORT


def test_a_gpu_in_an_unknown_compute_mode_is_not_granted() -> None:
    document = to_json(REPORT)
    for gpu in document["gpus"]:
        gpu["compute_mode"] = "exclusive_thread"
    first, second = read(document).gpus
    assert (first.compute_mode, first.health) == (None, COMPUTE_MODE_UNKNOWN)
    assert (second.compute_mode, second.health) == (None, "lost")
    assert first.processes == USED.processes


def test_a_process_of_an_unknown_type_uses_the_gpu() -> None:
    document = to_json(replace(REPORT, gpus=(replace(USED, opened_by=(Process(pid=9),)),)))
    document["gpus"][0]["processes"][0]["type"] = document["gpus"][0]["opened_by"][0]["type"] = "video"
    (gpu,) = read(document).gpus
    assert [(one.pid, one.type) for one in (*gpu.processes, *(gpu.opened_by or ()))] == [
        (7, ProcessType.COMPUTE),
        (9, ProcessType.COMPUTE),
    ]


def test_of_an_owner_in_an_unknown_state_nothing_is_known() -> None:
    document = to_json(REPORT)
    document["owners"][0]["state"] = "frozen"
    (owner,) = read(document).owners
    assert (owner.owner, owner.state) == (OWNER.owner, OwnerState.UNKNOWN)
    assert owner.reason == "its worker says 'frozen', which this daemon does not know"


@pytest.mark.parametrize(
    ("times", "state"),
    [
        ({}, RunState.STARTING),
        ({"started_at": "2026-11-22T00:00:00Z"}, RunState.RUNNING),
        ({"started_at": "2026-11-22T00:00:00Z", "ended_at": "2026-11-22T00:01:00Z"}, RunState.EXITED),
    ],
)
def test_a_job_in_an_unknown_state_is_never_missing(times: dict[str, str], state: RunState) -> None:
    document = to_json(REPORT)
    document["jobs"][0] |= {"state": "checkpointing", **times}
    (job,) = read(document).jobs
    assert (job.job_id, job.state) == ("job-1", state)


def test_everything_else_is_refused_as_before() -> None:
    document = to_json(REPORT)
    document["gpus"][0] |= {"compute_mode": "exclusive_thread", "index": "0"}
    with pytest.raises(ValidationError):
        read(document)
    with pytest.raises(ValidationError):
        read(to_json(REPORT) | {"jobs": [{"job_id": "job-1", "state": 3}]})


def test_an_unknown_word_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    document = to_json(REPORT)
    document["owners"][0]["state"] = "frozen"
    body = ReportBody()
    for _ in range(3):
        body.parse(json.dumps(document).encode())
    assert [record.getMessage() for record in caplog.records] == [
        "a worker reports state 'frozen', which this daemon does not know; upgrade the daemon"
    ]


def logs(job: JobReport, on_this_host: bool) -> str | None:
    (kept,) = with_trusted_logs("n1", replace(REPORT, jobs=(job,)), on_this_host).jobs
    return kept.log_directory


@pytest.mark.parametrize(
    ("attempt", "directory", "trusted"),
    [
        (1, "/var/lib/gpulease/worker/jobs/job-1/logs", True),
        (2, "/d/jobs/job-1.2/logs", True),
        (1, "/d/jobs/job-1.2/logs", False),
        (1, "/d/jobs/job-2/logs", False),
        (1, "/root/secrets", False),
        (1, "/d/jobs/job-1/logs/", False),
        (1, "/d/jobs/job-1/../../etc/jobs/job-1/logs", False),
        (1, "d/jobs/job-1/logs", False),
        (1, "", False),
    ],
)
def test_no_path_that_a_worker_sends_is_opened_unless_it_is_its_jobs_own(
    attempt: int, directory: str, trusted: bool
) -> None:
    job = JobReport(job_id="job-1", attempt=attempt, state=RunState.RUNNING, log_directory=directory)
    assert logs(job, on_this_host=True) == (directory if trusted else f"n1:{directory}")
    assert logs(job, on_this_host=False) == f"n1:{directory}"
    assert logs(replace(job, log_directory=None), on_this_host=False) is None
