"""Reports of a worker that is newer than the daemon: one word that it does not know costs one field."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from gpulease_protocol.codec import to_json
from gpulease_protocol.model import ComputeMode, Device, GpuReading, Process, ProcessType
from gpulease_protocol.node_protocol import (
    ClaimedGpu,
    JobReport,
    LeaseOwner,
    NodeReport,
    OwnerReport,
    OwnerState,
    RunState,
)
from gpulease_server.api.report_body import COMPUTE_MODE_UNKNOWN, DECODER, ReportBody, with_trusted_logs
from gpulease_server.api.request_body import JsonBody

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


ODD_VALUES = (
    *("null", "true", "0", "1", "-1", "1.0", "1e3", "1e400", "NaN", "-0", "9223372036854775808", "1" + "0" * 30),
    *('""', '"x"', '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', "[]", "{}", "[1]", '["a"]', "[null]", "[1.0]"),
    *('"2026-01-01T00:00:00Z"', '"2026-01-01T00:00Z"', '"2026-01-01"', '"2026-02-30T00:00:00Z"', "1767225600"),
    *('"running"', '"default"', '"compute"', '"alive"', '"frozen"'),
)
"""JSON that stands where something else is expected."""


def places(part: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The place of every value in a document."""
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [place] * bool(place) + [found for key, value in inner for found in places(value, (*place, key))]


def with_odd_value(place: tuple[str | int, ...], value: str) -> bytes:
    """A whole report with this JSON at one place."""
    process = Process(pid=9, user="ann", command="python")
    gpu = replace(USED, opened_by=(process,), unreadable_process=process, throttle_reasons=("sw_power_cap",))
    elsewhere = ClaimedGpu(device=Device(uuid="GPU-1", node="n", index=1), reason="of another")
    job = JobReport(job_id="job-1", state=RunState.RUNNING, unkillable=(7,))
    whole = replace(REPORT, gpus=(gpu,), claimed_elsewhere=(elsewhere,), jobs=(job,), ports_in_use=(21000,))
    document: Any = to_json(whole)
    if place:
        part = document
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = "HERE"
    return json.dumps(document).replace('"HERE"', value).encode()


@pytest.mark.parametrize("value", ODD_VALUES)
def test_whatever_is_read_the_fast_way_is_what_the_strict_way_reads(value: str) -> None:
    strict, read_so = JsonBody(NodeReport), []
    for place in places(json.loads(with_odd_value((), ""))):
        raw = with_odd_value(place, value)
        with suppress(ValueError):
            found = DECODER.decode(raw)
            read_so.append((place, found))
    for place, found in read_so:
        assert found == strict.parse(with_odd_value(place, value)), (place, value)


@pytest.mark.parametrize("end", [', "host": "twice"}', ', "host": 5}', ",}", "", '} {"host": 1}', ', "ticket": 01}'])
def test_a_body_that_is_no_plain_object_is_read_as_the_strict_way_reads_it(end: str) -> None:
    raw, strict = with_odd_value((), "")[:-1] + end.encode(), JsonBody(NodeReport)
    try:
        expected = strict.parse(raw)
    except ValidationError:
        with pytest.raises(ValidationError):
            ReportBody().parse(raw)
    else:
        assert ReportBody().parse(raw) == expected


def test_bytes_that_are_no_text_are_refused() -> None:
    raw = with_odd_value(("worker_id",), '"x"').replace(b'"x"', b'"\xff"')
    with pytest.raises(ValidationError):
        ReportBody().parse(raw)
