"""Arrays through the command: submitted at once, so many at a time, listed, awaited and ended together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, eventually

RECORD = """
import os, sys, time
place, index = sys.argv[1:]
assert os.environ["GPULEASE_ARRAY_INDEX"] == index
name = f"{place}/{os.environ['GPULEASE_ARRAY_ID']}-{index}"
with open(name, "w") as file:
    file.write(f"{time.monotonic()} ")
    while not os.path.exists(f"{place}/go"):
        time.sleep(0.01)
    time.sleep(0.3)
    file.write(f"{time.monotonic()}")
sys.exit(3 if index == "4" else 0)
"""

OPTIONS = ("--simulate", "8")


def submit(running: DaemonProcess, array: str, *command: str) -> str:
    said = running.gpulease("submit", "--launcher", "plain", "--name", "sweep", "--array", array, "--", *command)
    assert said.returncode == 0, said.stderr
    return said.stdout.strip()


def most_at_once(directory: Path, array: str) -> int:
    """The greatest number of spans, in the files that the jobs wrote, that have a moment in common."""
    spans = [tuple(map(float, path.read_text().split())) for path in directory.glob(f"{array}-*")]
    assert len(spans) == 20
    return max(sum(begun <= at < ended for begun, ended in spans) for at, _ in spans)


@pytest.mark.budget(20)
@pytest.mark.timeout(300)
def test_twenty_jobs_run_three_at_a_time_and_wait_passes_on_the_code_of_the_one_that_failed(
    running: DaemonProcess, tmp_path: Path
) -> None:
    array = submit(running, "0-19%3", sys.executable, "-c", RECORD, str(tmp_path), "{index}")
    assert array.startswith("array-")
    eventually(lambda: len(list(tmp_path.glob(f"{array}-*"))) == 3, 60, running.story)
    (tmp_path / "go").touch()  # the command has not stayed for them
    waited = running.gpulease("wait", array)
    assert waited.returncode == 3, waited.stderr
    first, *further = waited.stderr.splitlines()
    assert first.startswith(f"{array}: ")
    assert len(further) == 1, "one line says which job has failed, and how"
    assert most_at_once(tmp_path, array) == 3
    listed = running.gpulease("jobs", "--array", array).stdout.splitlines()
    assert len(listed) == 21
    assert all(f"sweep[{index}]" in line for index, line in enumerate(listed[1:]))


def test_an_array_is_cancelled_whole_and_none_of_it_begins_meanwhile(running: DaemonProcess) -> None:
    array = submit(running, "1-9%2", "sleep", "60")
    path = f"/v1/jobs?array={array}&state="
    eventually(lambda: len(running.call("GET", path + "running").json["items"]) == 2, 60, running.story)
    said = running.gpulease("cancel", array, "--grace", "1s")
    assert len(said.stdout.splitlines()) == 9, said.stderr
    eventually(lambda: len(running.call("GET", path + "cancelled").json["items"]) == 9, 60, running.story)
    begun = [job for job in running.call("GET", path + "cancelled").json["items"] if job["attempts"]]
    assert len(begun) == 2
    assert running.gpulease("cancel", array).stdout == f"all jobs of {array} have already ended\n"
    assert running.gpulease("wait", "array-none").returncode == 1


def test_one_request_sent_twice_makes_one_array(running: DaemonProcess) -> None:
    body = {"command": ["true"], "launcher": "plain", "array": {"indices": "0-2", "at_most": 1}}
    twice = [running.call("POST", "/v1/jobs", body, **{"Idempotency-Key": "sweep"}) for _ in range(2)]
    assert [answer.status for answer in twice] == [201, 201]
    assert twice[0].json["id"] == twice[1].json["id"]
    listed = running.call("GET", f"/v1/jobs?array={twice[0].json['array_id']}").json["items"]
    assert sorted(job["array_index"] for job in listed) == [0, 1, 2]


@pytest.mark.parametrize("array", [{"indices": "0-1000"}, {"indices": "x"}, {"indices": "0-3", "at_most": 0}])
def test_an_array_that_means_nothing_is_refused(running: DaemonProcess, array: dict[str, object]) -> None:
    answer = running.call("POST", "/v1/jobs", {"command": ["true"], "launcher": "plain", "array": array})
    assert (answer.status, answer.json["code"]) == (422, "invalid_request")
    assert "array" in answer.json["detail"]


def test_an_array_outlives_the_daemon_with_its_limit(running: DaemonProcess) -> None:
    array = submit(running, "0-4%1", "sleep", "60")
    path = f"/v1/jobs?array={array}&state="
    eventually(lambda: len(running.call("GET", path + "running").json["items"]) == 1, 60, running.story)
    running.kill()
    running.start()
    queued = running.call("GET", path + "queued").json["items"]
    assert len(queued) == 4
    said = running.call("GET", f"/v1/leases/{queued[0]['lease_id']}/explain").json["sentence"]
    assert f"array {array} runs as many jobs as it may at once (1)" in said
