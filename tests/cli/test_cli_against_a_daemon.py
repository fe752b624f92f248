from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from gpulease import Client, JobRequest, JobState, LeaseState
from gpulease_cli import completion, id_completion
from gpulease_cli.program import PROGRAM
from tests.cli.programs import Program, environ, wait_until


def lines(stderr: str) -> list[str]:
    """What, why, what to do: exactly three lines, no traceback."""
    said = stderr.strip().split("\n")
    assert len(said) == 3, stderr
    assert (said[0][:10], said[1][:7], said[2][:7]) == ("gpulease: ", "  why: ", "  do:  ")
    return said


def test_run_binds_the_command_passes_on_its_exit_code_and_releases(client: Client, gpulease: Program) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER; exit 7"
    result = gpulease("run", "-n", "2", "--wait", "60s", "--label", "mine", "--", "sh", "-c", show, LOCAL_RANK="3")
    assert result.returncode == 7, result.stderr
    mask, order = result.stdout.split()
    assert mask.split(",") == [gpu.uuid for gpu in client.gpus() if gpu.index < 2]
    assert order == "PCI_BUS_ID"
    assert not client.leases(LeaseState.ACTIVE)


def test_run_reports_the_signal_that_ended_the_command(client: Client, gpulease: Program) -> None:
    assert gpulease("run", "--wait", "60s", "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_run_forwards_signals(client: Client, url: str, number: signal.Signals) -> None:
    command = f"trap 'exit 9' {number.name[3:]}; echo up; while :; do sleep 0.05; done"
    program = subprocess.Popen(
        [sys.executable, "-m", "gpulease_cli", "run", "--wait", "60s", "--", "bash", "-c", command],
        env=environ(GPULEASE_URL=url),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        program.send_signal(number)
        assert program.wait(60) == 9
    finally:
        program.kill()
        program.wait()
        assert program.stdout is not None
        program.stdout.close()
    assert not client.leases(LeaseState.ACTIVE)


def test_run_ends_the_command_and_exits_4_when_the_lease_is_lost(client: Client, url: str, tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "gpulease_cli", "run", "--wait", "60s", "--ttl", "1s", "--", "sleep", "100"],
        env=environ(GPULEASE_URL=url),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: client.leases(LeaseState.ACTIVE))
        (lease,) = client.leases(LeaseState.ACTIVE)
        client.release(lease.id, lease.fencing_token)
        stderr = program.communicate(timeout=60)[1]
        assert program.returncode == 4
        assert "gpulease: lease lost" in stderr
    finally:
        program.kill()
        program.wait()


def test_run_leases_nothing_for_a_command_that_does_not_exist(client: Client, gpulease: Program) -> None:
    before = len(client.leases())
    result = gpulease("run", "--wait", "10m", "--", "no-such-program")
    assert result.returncode == 127
    assert "no-such-program" in lines(result.stderr)[1]
    assert len(client.leases()) == before


def test_run_without_free_gpus_says_who_holds_them(client: Client, gpulease: Program) -> None:
    with client.lease(4, wait_s=60, label="sweep 12"):
        for wait in ("0", "0.2s"):
            result = gpulease("run", "--wait", wait, "--", "true")
            assert result.returncode == 75
            # A slow machine has time to show that it waits.
            error = "\n".join(line for line in result.stderr.splitlines() if " waits" not in line)
            assert "GPUs 0-3: " in lines(error)[1]
            assert "(sweep 12) for " in lines(error)[1]
    assert not client.leases(LeaseState.QUEUED)


def test_run_with_more_gpus_than_exist_is_refused_at_once(client: Client, gpulease: Program) -> None:
    result = gpulease("run", "-n", "5", "--wait", "1h", "--", "true")
    assert result.returncode == 125
    assert lines(result.stderr)[0] == "gpulease: never fits"
    assert lines(result.stderr)[1].startswith("  why: Asked for 5 GPUs.")


def test_a_lease_from_acquire_to_release(client: Client, gpulease: Program) -> None:
    acquired = gpulease("acquire", "-n", "2", "--wait", "60s", "--ttl", "1h", "--label", "by hand")
    assert acquired.returncode == 0, acquired.stderr
    shell = f'{acquired.stdout}\necho "$GPULEASE_LEASE_ID $GPULEASE_LEASE_TOKEN $CUDA_VISIBLE_DEVICES"'
    told = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True, env=environ())
    lease_id, token, mask = told.stdout.split()
    assert f"gpulease release {lease_id}" in acquired.stderr
    assert {line.split()[0] for line in acquired.stdout.splitlines()} == {"export"}
    lease = client.lease_by_id(lease_id)
    assert (lease.ttl_s, lease.fencing_token, len(mask.split(","))) == (3600, int(token), 2)

    stale = gpulease("release", lease_id, "--token", "999999")
    assert (stale.returncode, lines(stale.stderr)[0]) == (1, "gpulease: stale token")
    inherited = {"GPULEASE_LEASE_ID": lease_id, "GPULEASE_LEASE_TOKEN": "999999"}
    assert gpulease("release", lease_id, **inherited).returncode == 1
    assert gpulease("renew", lease_id).returncode == 0
    assert json.loads(gpulease("release", lease_id, "--json").stdout)["end_reason"] == "released"
    lost = gpulease("renew", lease_id)
    assert (lost.returncode, lines(lost.stderr)[0]) == (4, "gpulease: lease lost")
    assert gpulease("explain", lease_id).stdout == gpulease("explain", GPULEASE_LEASE_ID=lease_id).stdout
    assert "this shell has no lease" in gpulease("explain").stderr


def test_acquire_json_is_the_rest_noun(client: Client, gpulease: Program) -> None:
    noun = json.loads(gpulease("acquire", "--wait", "60s", "--json").stdout)
    assert noun["state"] == "active"
    assert {"id", "token", "gpus", "env", "holder", "expires_at"} <= set(noun)
    listed = json.loads(gpulease("leases", "--json").stdout)
    assert [lease["id"] for lease in listed["items"]] == [noun["id"]]
    assert listed["next"] is None
    assert gpulease("release", noun["id"]).returncode == 0
    assert noun["id"] not in gpulease("leases").stdout
    assert noun["id"] in gpulease("leases", "--all").stdout


def test_status_shows_holders_and_the_queue(client: Client, gpulease: Program, url: str) -> None:
    with client.lease(3, wait_s=60, label="night run"):
        waiting = subprocess.Popen(
            [sys.executable, "-m", "gpulease_cli", "run", "-n", "2", "--wait", "30s", "--", "true"],
            env=environ(GPULEASE_URL=url),
        )
        wait_until(lambda: client.leases(LeaseState.QUEUED))
        table = gpulease("status").stdout
        explained = gpulease("explain", client.leases(LeaseState.QUEUED)[0].id).stdout
    assert waiting.wait(60) == 0
    assert table.count("(night run)") == 3
    assert "1 of 4 GPUs free, 1 waiting" in table
    assert "2 GPUs" in table.split("QUEUE")[1]
    assert "night run" in explained


def test_explain_names_each_obstacle_once_and_takes_the_id_of_a_job(client: Client, gpulease: Program) -> None:
    with client.lease(3, wait_s=60, label="night run"):
        job_id = gpulease("submit", "--launcher", "plain", "-n", "2", "--", "true").stdout.strip()
        waiting = gpulease("explain", job_id)
        asked = gpulease("explain", client.job(job_id).lease_id or "")
        noun = json.loads(gpulease("explain", job_id, "--json").stdout)
    assert waiting.returncode == 0, waiting.stderr
    head, *same = waiting.stdout.splitlines()
    assert head == f"{job_id} queued: waiting for its GPUs"
    for said in (same, asked.stdout.splitlines()):
        assert said[0] == "Not now: asked for 2 GPUs; number 1 in the queue."
        (line,) = said[1:]
        assert re.fullmatch(r"  GPUs 0-2 of [^ ]+: held by lease-[0-9a-f]+ \(user .*, \"night run\"\)\.", line), line
    assert len(noun["obstacles"]) == 3
    assert noun["verdict"] == "not_now"
    assert gpulease("wait", job_id).returncode == 0
    assert gpulease("explain", job_id).stdout.startswith(f"{job_id} succeeded")


def test_explain_says_until_when_a_lease_with_a_declared_time_is_in_the_way(client: Client, gpulease: Program) -> None:
    with client.lease(4, wait_s=60, time_s=3600) as lease:
        job_id = gpulease("submit", "--", "true").stdout.strip()
        said = gpulease("explain", job_id).stdout
        refused = gpulease("run", "--", "true").stderr
        ends_at = client.lease_by_id(lease.id).ends_at
    assert ends_at is not None
    ends = f"{ends_at.astimezone():%H:%M}"
    assert re.search(rf"until ([\d-]+ )?{ends}:\d\d at the latest\.", said), said
    assert re.search(rf", until (\w+ \d+ )?{ends}\.", refused), refused
    assert gpulease("wait", job_id).returncode == 0


def test_a_refusal_says_not_now_only_once(client: Client, gpulease: Program) -> None:
    with client.lease(4, wait_s=60):
        what, why, _ = lines(gpulease("acquire").stderr)
    assert (what, why[:26]) == ("gpulease: not now", "  why: Asked for 1 GPU. GP")


def test_jobs_can_be_limited_and_filtered(client: Client, gpulease: Program) -> None:
    ids = [gpulease("submit", "--launcher", "plain", "--", end).stdout.strip() for end in ("true", "false", "true")]
    for job_id in ids:
        client.wait_job(job_id, 30)
    limited = gpulease("jobs", "--limit", "2")
    assert [line.split()[0] for line in limited.stdout.splitlines()[1:]] == [ids[2], ids[1]]
    assert "newest 2" in limited.stderr
    page = json.loads(gpulease("jobs", "--limit", "2", "--json").stdout)
    assert [job["id"] for job in page["items"]] == [ids[2], ids[1]]
    assert page["next"] is not None
    failed = gpulease("jobs", "--state", "failed", "--state", "lost", "--limit", "1")
    assert ids[1] in failed.stdout
    none = gpulease("jobs", "--state", "queued")
    assert (none.returncode, none.stdout, none.stderr) == (0, "", "No job matches.\n")
    mine = gpulease("jobs", "--user", getpass.getuser(), "--state", "succeeded", "--limit", "1").stdout
    assert mine.splitlines()[1].split()[:4] == [ids[2], "-", getpass.getuser(), "succeeded"]
    assert gpulease("jobs", "--mine", "-s", "succeeded", "--limit", "1").stdout == mine
    assert gpulease("jobs", "--user", "another-user").stdout == ""


def test_status_watch_continues_until_ctrl_c(client: Client, url: str) -> None:
    # Tests that run in the background of a script inherit an ignored SIGINT, which no terminal would.
    program = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "gpulease_cli", "status", "--watch"],
        env=environ(GPULEASE_URL=url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        first = [program.stdout.readline() for _ in range(5)]
        with client.lease(1, wait_s=60, label="night run"):
            while "night run" not in program.stdout.readline():
                pass
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 0
        assert (first[0][:3], program.communicate()[1]) == ("GPU", "")
    finally:
        program.kill()
        program.communicate()


def test_status_json_is_the_rest_noun(client: Client, gpulease: Program) -> None:
    page = json.loads(gpulease("status", "--json").stdout)
    assert [gpu["uuid"] for gpu in page["items"]] == [gpu.uuid for gpu in client.gpus()]
    assert set(page) == {"items", "next"}


def test_a_job_from_submit_to_its_exit_code(client: Client, gpulease: Program) -> None:
    program = ["sh", "-c", "echo $GREETING from $PWD; exit 5"]
    submitted = gpulease(
        "submit", "--launcher", "plain", "--env", "GREETING=hello", "--name", "greeter", "--", *program
    )
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    waited = gpulease("wait", job_id)
    assert waited.returncode == 5
    assert job_id in waited.stderr
    assert gpulease("logs", job_id).stdout == f"hello from {os.getcwd()}\n"
    assert "greeter" in gpulease("jobs").stdout
    assert json.loads(gpulease("jobs", "--json").stdout)["items"][0]["id"] == job_id


def test_submit_follow_shows_the_log_and_exits_with_the_code(client: Client, gpulease: Program) -> None:
    command = ("sh", "-c", "echo one; sleep 0.3; echo two; exit 6")
    result = gpulease("submit", "--launcher", "plain", "--follow", "--", *command)
    assert result.returncode == 6
    assert result.stdout.split("\n", 1)[1] == "one\ntwo\n"


def test_submit_follow_of_a_program_that_does_not_exist_says_so(client: Client, gpulease: Program) -> None:
    result = gpulease("submit", "--launcher", "plain", "--follow", "--", "no-such-program")
    assert result.returncode == 1
    assert "no-such-program" in result.stderr


def test_cancel_ends_a_job(client: Client, gpulease: Program) -> None:
    job_id = gpulease("submit", "--launcher", "plain", "--", "sleep", "100").stdout.strip()
    client.wait_job(job_id, 30, until=lambda job: job.state is JobState.RUNNING)
    assert gpulease("cancel", job_id, "--grace", "5s").returncode == 0
    assert gpulease("wait", job_id).returncode == 128 + 15
    assert client.job(job_id).state is JobState.CANCELLED


@pytest.mark.parametrize("command", ["logs", "cancel", "wait", "renew", "release", "explain"])
def test_an_unknown_id_is_refused_in_three_lines(gpulease: Program, command: str) -> None:
    result = gpulease(command, "no-such-id")
    assert (result.returncode, lines(result.stderr)[0]) == (1, "gpulease: not found")
    assert "no-such-id" in lines(result.stderr)[1]


def test_db_upgrade_makes_a_database_and_can_be_repeated(gpulease: Program, tmp_path: Path) -> None:
    for _ in range(2):
        result = gpulease("db", "upgrade", "--data-dir", str(tmp_path))
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "gpulease.db").exists()


def test_db_current_and_check_print_what_they_find_as_json(gpulease: Program, tmp_path: Path) -> None:
    place = ("--data-dir", str(tmp_path), "--json")
    assert gpulease("db", "upgrade", *place[:2]).returncode == 0
    newest = gpulease("db", "current", *place)
    revision = json.loads(newest.stdout)
    assert (newest.returncode, revision) == (0, {"revision": revision["newest"], "newest": revision["newest"]})
    well = gpulease("db", "check", *place)
    assert (well.returncode, json.loads(well.stdout)) == (0, {"items": [], "next": None})
    with closing(sqlite3.connect(tmp_path / "gpulease.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '0001'")
    old = gpulease("db", "current", *place)
    assert (old.returncode, json.loads(old.stdout)) == (1, {"revision": "0001", "newest": revision["newest"]})
    wrong = gpulease("db", "check", *place)
    assert wrong.returncode == 1
    assert ["0001" in finding for finding in json.loads(wrong.stdout)["items"]] == [True]


def completions(*words: str, beginning: str = "") -> list[str]:
    """What a shell is offered after these words."""
    found = BashComplete(PROGRAM, {}, "gpulease", completion.VARIABLE).get_completions(list(words), beginning)
    return [item.value for item in found]


def test_names_that_the_daemon_knows_are_completed(client: Client, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_completion, "ANSWER_S", 30.0)  # for a busy machine
    monkeypatch.setenv("GPULEASE_URL", url)
    gpus = [f"{gpu.node}:{gpu.index}" for gpu in client.gpus()]
    with client.lease(wait_s=60) as lease:
        assert completions("gpu", "cordon") == gpus
        assert completions("node", "drain", "--json", beginning=gpus[0][0]) == [client.nodes()[0].name]
        assert lease.id in completions("release", beginning="lease-")
    job = client.submit(JobRequest(command=["true"], launcher="plain", name="completes.me"))
    assert completions("logs", beginning="compl") == ["completes.me"]
    assert job.id in completions("cancel", "completes.me", beginning="job-")


def test_completion_is_silent_and_soon_where_no_daemon_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        for port in (9, deaf.getsockname()[1]):
            monkeypatch.setenv("GPULEASE_URL", f"http://127.0.0.1:{port}")
            begun = time.monotonic()
            assert completions("gpu", "cordon") == []
            assert time.monotonic() - begun < 20


@pytest.mark.parametrize("words", [("run",), ("submit",), ("acquire",)])
def test_what_requires_nvlink_is_refused_where_there_is_none(
    client: Client, gpulease: Program, words: tuple[str]
) -> None:
    """The simulated GPUs are not connected."""
    command = ("--", "true") if words != ("acquire",) else ("--detach",)
    refused = gpulease(*words, "-n", "2", "--topology", "required", *command)
    said = lines(refused.stderr)
    assert refused.returncode == (125 if words == ("run",) else 1)
    assert "with NVLink between all of them" in said[1]
    assert "no two are. Of" in said[1]
    assert gpulease("run", "-n", "2", "--topology", "any", "--wait", "60s", "--", "true").returncode == 0


def test_a_lease_and_a_job_agree_to_end_for_others(client: Client, gpulease: Program) -> None:
    asked = ("acquire", "--wait", "60s", "--detach", "--json")
    lease = json.loads(gpulease(*asked, "--preemptible").stdout)
    assert lease["demand"]["preemptible"] is True
    assert "1 GPU, preemptible" in gpulease("show", lease["id"]).stdout
    client.release(lease["id"], lease["token"])
    with client.lease(count=4, wait_s=60, preemptible=True) as held:
        assert client.lease_by_id(held.id).demand.preemptible is True
        job = gpulease("submit", "--preemptible", "--launcher", "plain", "--", "true").stdout.strip()
        assert "1 GPU, preemptible" in gpulease("queue").stdout
        assert client.job(job).preemptible
        assert "may end for others" in gpulease("show", job).stdout
    assert client.wait_job(job).exit_code == 0
    seen = gpulease("run", "--wait", "60s", "--preemptible", "--", "sh", "-c", "echo $GPULEASE_LEASE_ID").stdout.strip()
    assert client.lease_by_id(seen).demand.preemptible is True


def test_a_lease_and_a_job_have_a_priority_and_a_time(client: Client, gpulease: Program) -> None:
    refused = gpulease("run", "-n", "3", "--priority", "interactive", "--", "true")
    assert refused.returncode == 125
    assert "may have 2 at a time" in refused.stderr
    with client.lease(count=4, wait_s=60):
        job = gpulease("submit", "--priority", "scavenge", "--launcher", "plain", "--", "true").stdout.strip()
        queue = gpulease("queue").stdout
        assert "1 GPU, scavenge" in queue
        assert client.job(job).priority == "scavenge"
    assert client.wait_job(job).exit_code == 0
    asked = ("--wait", "60s", "--detach", "--priority", "interactive", "--time", "20m", "--json")
    lease = json.loads(gpulease("acquire", *asked).stdout)
    assert (lease["demand"]["priority"], lease["demand"]["time_s"]) == ("interactive", 1200)
    client.release(lease["id"], lease["token"])
