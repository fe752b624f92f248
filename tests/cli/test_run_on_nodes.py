"""`gpulease run --nodes`: a command on several nodes in the foreground, which does not outlive what was typed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease import Client, JobState
from gpulease_protocol.model import Job
from tests.cli.programs import Program, environ, wait_until
from tests.cli.test_gangs_cli import url

__all__ = ["url"]

ENDED = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}


def newest(client: Client) -> Job | None:
    return next(iter(client.jobs()), None)


@contextmanager
def typed(client: Client, url: str, tmp_path: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], Job]]:
    """The program while its job runs on both nodes, and the job."""
    before = {job.id for job in client.jobs()}
    command = [sys.executable, "-m", "gpulease_cli", "run", "--nodes", "2", "--wait", "60s", "--", *words]
    with (tmp_path / "output").open("wb") as output:
        program = subprocess.Popen(command, env=environ(GPULEASE_URL=url), stdout=output, stderr=output, cwd=tmp_path)

    def running() -> bool:
        job = newest(client)
        return job is not None and job.id not in before and job.state is JobState.RUNNING

    try:
        wait_until(running, 60, (tmp_path / "output").read_text)
        job = newest(client)
        assert job is not None
        yield program, job
    finally:
        program.kill()
        program.wait()


def test_the_output_of_all_nodes_is_shown_and_the_exit_code_is_the_jobs(gpulease: Program, client: Client) -> None:
    ran = gpulease("run", "--nodes", "2", "-n", "2", "--wait", "60s", "--", "sh", "-c", "echo rank $NODE_RANK")
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["[n1] rank 0", "[n2] rank 1"]
    fails = "test $NODE_RANK = 1 && exit 7; exec sleep 600"
    failed = gpulease("run", "--nodes", "2", "--wait", "60s", "--", "sh", "-c", fails)
    assert failed.returncode == 7, failed.stderr
    assert "On node n2: The command exited with code 7." in failed.stderr


def test_ctrl_c_ends_it_on_all_nodes(client: Client, url: str, tmp_path: Path) -> None:
    with typed(client, url, tmp_path, "sh", "-c", "echo up; exec sleep 600") as (program, job):
        output = tmp_path / "output"
        wait_until(lambda: output.read_text().count("up\n") == 2, 60, output.read_text)
        program.send_signal(signal.SIGINT)
        code = program.wait(60)
        said = output.read_text()
        assert code in (128 + signal.SIGINT, 128 + signal.SIGTERM), said
        assert f"cancelling {job.id}" in said
        assert client.job(job.id).state is JobState.CANCELLED


def test_a_job_ends_when_the_program_is_killed(client: Client, url: str, tmp_path: Path) -> None:
    with typed(client, url, tmp_path, "sleep", "600") as (program, job):
        program.kill()
        wait_until(lambda: client.job(job.id).ended, 60)
        assert client.job(job.id).state is JobState.CANCELLED


GUARDED = """
import os, sys
from gpulease_cli.commands import foreground_job
from gpulease_protocol import errors

class Client:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def cancel_job(self, job_id, grace_s):
        with open(sys.argv[1], "a") as calls:
            print(job_id, file=calls)
        if os.path.getsize(sys.argv[1]) < 15:
            raise getattr(errors, sys.argv[2])("no", remedy="none")

foreground_job.Client, foreground_job.RETRY_S = Client, 0.01
reader, writer = os.pipe()
os.write(writer, b"submitting job-1")
os.close(writer)
foreground_job._guard(reader, None, "key")
"""


@pytest.mark.parametrize(
    ("error", "calls"), [("OverQuota", 3), ("DaemonUnavailable", 3), ("GpuleaseError", 3), ("NotFound", 1)]
)
def test_the_guard_tries_again_unless_that_is_useless(tmp_path: Path, error: str, calls: int) -> None:
    subprocess.run([sys.executable, "-c", GUARDED, str(tmp_path / "calls"), error], check=True, timeout=60)
    assert (tmp_path / "calls").read_text().splitlines() == ["job-1"] * calls


def test_what_is_not_free_is_not_waited_for_and_leaves_nothing_in_the_queue(client: Client, gpulease: Program) -> None:
    with client.lease(1, wait_s=60):
        refused = gpulease("run", "--nodes", "2", "-n", "2", "--", "true")
    assert refused.returncode == 75, refused.stderr
    assert "--wait" in refused.stderr
    assert all(job.ended for job in client.jobs())
    assert gpulease("run", "--nodes", "3", "--", "true").returncode == 125


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "2:4"), "--nodes: run takes one number of nodes."),
        (("--nodes", "2", "--devices", "auto"), "--devices: names GPUs of one node."),
        (("--nodes", "2", "--node", "n1"), "--node: --nodes takes nodes that are free."),
        (("--nodes", "2", "--ttl", "5s"), "--ttl: a job has none"),
        (("--launcher", "plain"), "--launcher: is for a command on several nodes."),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(gpulease: Program, words: tuple[str, ...], said: str) -> None:
    refused = gpulease("run", *words, "--", "true")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert said in refused.stderr


def test_under_a_lease_it_says_that_it_needs_another(gpulease: Program) -> None:
    refused = gpulease("run", "--nodes", "2", "--", "true", GPULEASE_LEASE_ID="lease-1")
    assert refused.returncode == 2
    assert "this shell has lease-1" in refused.stderr
    assert "--new" in refused.stderr


def test_a_script_that_is_not_there_is_not_submitted(gpulease: Program, client: Client) -> None:
    before = len(client.jobs())
    refused = gpulease("run", "--nodes", "2", "--", "no-such-script.py")
    assert refused.returncode == 127, refused.stderr
    assert "no-such-script.py" in refused.stderr
    assert len(client.jobs()) == before
