"""`after`, and what would become of a request, over plain HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.requests import JobRequest, LeaseRequest
from tests.api.conftest import states
from tests.daemon import Answer, DaemonProcess, eventually


def submit(api: DaemonProcess, *command: str, query: str = "", **fields: Any) -> Answer:
    return api.call("POST", f"/v1/jobs{query}", {"command": list(command), **fields})


def test_a_job_starts_when_the_one_before_it_has_ended_well(api: DaemonProcess) -> None:
    first = submit(api, "sleep", "60").json["id"]
    answer = submit(api, "true", after=[{"job": first}])
    assert answer.status == 201, answer.content
    second = answer.json
    assert (second["state"], second["after"]) == ("queued", [{"job": first, "when": "succeeded"}])
    lease = api.call("GET", f"/v1/leases/{second['lease_id']}").json
    assert (lease["state"], lease["position"]) == ("queued", None)
    why = api.call("GET", f"/v1/leases/{second['lease_id']}/explain").json
    assert (why["verdict"], why["after"]) == ("not_now", [first])
    third = submit(api, "true", after=[{"job": second["id"], "when": "ended"}]).json["id"]
    api.call("POST", f"/v1/jobs/{first}/cancel", {"grace_s": 0})
    assert api.wait_job(second["id"])["state"] == "cancelled"
    assert first in api.job(second["id"])["reason"]
    assert api.wait_job(third)["state"] == "succeeded", "it asked for any end"


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ([{"job": "job-0000"}], "after: there is no job job-0000"),
        ([{"job": "array-0000"}], "after: there is no array array-0000"),
        ([{"job": "lease-1"}], "job: must be the id of a job or an array"),
        ([{"job": "job-1", "when": "failed"}], "after"),
        ([{"job": "job-1", "wen": "ended"}], "after"),
        ([{"job": "job-1"}, {"job": "job-1", "when": "ended"}], "after: names a job twice"),
        ([{"job": f"job-{number}"} for number in range(101)], "after: must name at most 100 jobs"),
        (["job-1"], "after"),
    ],
)
def test_what_cannot_be_waited_for_is_refused(api: DaemonProcess, after: list[Any], why: str) -> None:
    answer = submit(api, "true", after=after)
    assert (answer.status, answer.json["code"]) == (422, "invalid_request")
    assert why in answer.json["detail"]


def test_the_success_of_what_has_failed_is_not_waited_for(api: DaemonProcess) -> None:
    failed = submit(api, "false").json["id"]
    array = submit(api, "sh", "-c", "exit {index}", array={"indices": "0-1"}).json["array_id"]
    api.wait_job(failed)
    path = f"/v1/jobs?array={array}"
    eventually(lambda: all(job["ended_at"] for job in api.call("GET", path).json["items"]), 60, api.story)
    for name in (failed, array):
        refused = submit(api, "true", after=[{"job": name}])
        assert refused.problem() == (422, "invalid_request")
        assert "only its success would let this job start" in refused.json["detail"]
    after = [{"job": failed, "when": "ended"}, {"job": array, "when": "ended"}]
    assert api.wait_job(submit(api, "true", after=after).json["id"])["state"] == "succeeded"


def test_the_same_key_gets_the_same_job_although_what_it_waited_for_has_failed(api: DaemonProcess) -> None:
    first = submit(api, "sleep", "60").json["id"]
    body = {"command": ["true"], "after": [{"job": first}]}
    key = {"Idempotency-Key": f"after {first}"}
    made = api.call("POST", "/v1/jobs", body, **key).json["id"]
    api.call("POST", f"/v1/jobs/{first}/cancel", {"grace_s": 0})
    api.wait_job(made)
    again = api.call("POST", "/v1/jobs", body, **key)
    assert (again.status, again.json["id"], again.json["state"]) == (201, made, "cancelled")


def test_a_dry_run_answers_and_takes_nothing(api: DaemonProcess) -> None:
    before = api.call("GET", "/v1/events?limit=1000").json["last_seq"]
    fits = api.call("POST", "/v1/leases/explain", {"count": 2})
    assert (fits.status, fits.json["verdict"]) == (200, "fits_now")
    assert submit(api, "train.py", gpus=4, query="/explain").json["verdict"] == "fits_now"
    never = submit(api, "train.py", gpus=5, query="/explain")
    assert (never.status, never.json["verdict"]) == (200, "never")
    wrong = submit(api, "train.py", after=[{"job": "job-0000"}], query="/explain")
    assert wrong.problem() == (422, "invalid_request")
    assert api.call("GET", "/v1/events?limit=1000").json["last_seq"] == before
    assert states(api) == ["free"] * 4
    job = submit(api, "sleep", "60").json
    waits = submit(api, "train.py", gpus=4, query="/explain").json
    assert waits["verdict"] == "not_now"
    assert job["id"] in waits["sentence"]
    after = submit(api, "true", after=[{"job": job["id"]}], query="/explain").json
    assert (after["verdict"], after["after"]) == ("not_now", [job["id"]])


def test_the_client_asks_without_submitting(api: DaemonProcess) -> None:
    with api.client() as client:
        assert client.explain_request(JobRequest(command=["train.py"], gpus=2)).verdict == "fits_now"
        assert client.explain_request(LeaseRequest(count=9)).verdict == "never"


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["train.py", "--lr", "1"], "torchrun"),
        (["-m", "pkg.train"], "torchrun"),
        (["python", "train.py"], "plain"),
        (["./train.sh"], "plain"),
        (["bash", "-c", "exit"], "plain"),
    ],
)
def test_the_launcher_follows_from_the_command(api: DaemonProcess, command: list[str], launcher: str) -> None:
    hold = submit(api, "sleep", "60", gpus=4).json["id"]
    assert submit(api, *command).json["launcher"] == launcher
    assert submit(api, *command, launcher="accelerate" if command[0] == "-m" else "plain").status in (201, 422)
    api.call("POST", f"/v1/jobs/{hold}/cancel", {"grace_s": 0})


def test_a_job_says_what_its_attempts_were_and_tells_of_its_end_once(api: DaemonProcess, tmp_path: Path) -> None:
    told = tmp_path / "told"
    notify = f"echo $GPULEASE_JOB_STATE $GPULEASE_JOB_EXIT_CODE >>{told}"
    job = api.wait_job(submit(api, "sh", "-c", "exit 3", retries=1, notify=notify).json["id"], within_s=120)
    (first,) = job["attempt_history"]
    assert (first["number"], first["exit_code"], first["node"]) == (1, 3, "n1")
    assert job["attempts"] == 2
    assert job["log_directory"].endswith(f"{job['id']}.2/logs")
    assert first["log_directory"].endswith(f"{job['id']}/logs")
    eventually(lambda: told.exists() and told.read_text() == "failed 3\n", 60, api.story)


@pytest.mark.parametrize(
    "notify", ["ftp://host/x", "https://", "http:// /", "", "a\0b", pytest.param("x" * 4097, id="long")]
)
def test_what_cannot_be_told_is_refused(api: DaemonProcess, notify: str) -> None:
    assert submit(api, "true", notify=notify).problem() == (422, "invalid_request")
