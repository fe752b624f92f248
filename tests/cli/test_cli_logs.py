"""`gpulease logs`, `submit --follow`, `wait` and `run --wait`: what they show, and what they say while they wait."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease import Client, JobState
from gpulease_protocol.requests import JobRequest
from tests.cli.programs import Program, environ, wait_until

HELLO = """
import os, sys
print("hello of", os.environ["RANK"])
print("\\x1b[2J\\x1b]0;title\\x07\\x1b[35mviolet\\x1b[0m")
"""


class Running:
    """A `gpulease` command that goes on, and what it has written by now."""

    def __init__(self, url: str, *arguments: str, **more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpulease_cli", *arguments],
            env=environ(GPULEASE_URL=url, PYTHONUNBUFFERED="1") | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stdout = self.stderr = ""
        self._threads = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("stdout", "stderr")
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, name: str) -> None:
        stream = getattr(self.process, name)
        while letter := stream.read(1):
            setattr(self, name, getattr(self, name) + letter)

    def end(self) -> int:
        code = self.process.wait(60)
        for thread in self._threads:
            thread.join(30)
        self.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    @property
    def story(self) -> Callable[[], str]:
        return lambda: f"stdout: {self.stdout!r}\nstderr: {self.stderr!r}"


@pytest.fixture
def start(url: str) -> Iterator[Callable[..., Running]]:
    """Starts commands, and ends what is left of them."""
    started: list[Running] = []

    def begin(*arguments: str) -> Running:
        started.append(Running(url, *arguments))
        return started[-1]

    yield begin
    for command in started:
        command.close()


def on_a_terminal(url: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command writes to a terminal."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "gpulease_cli", *arguments]
    process = subprocess.Popen(command, env=environ(GPULEASE_URL=url, **(environment or {})), stdout=slave)
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(master, 4096):
            written += chunk
    except OSError:
        pass  # that is how a terminal without a writer ends
    os.close(master)
    assert process.wait(60) == 0
    return written.decode()


@contextmanager
def all_gpus_taken(client: Client) -> Iterator[None]:
    with client.lease(4, wait_s=60, label="in the way"):
        yield


@pytest.fixture(scope="module")
def trained(url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Id of a job of two ranks under torchrun that has ended."""
    place: Path = tmp_path_factory.mktemp("train")
    (place / "hello.py").write_text(HELLO)
    submitted = subprocess.run(
        [sys.executable, "-m", "gpulease_cli", "submit", "-n", "2", "hello.py"],
        env=environ(GPULEASE_URL=url, VIRTUAL_ENV=sys.prefix),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    job_id = submitted.stdout.strip()
    with Client(url) as client:
        assert client.wait_job(job_id, 90).state is JobState.SUCCEEDED
    return job_id


def test_all_ranks_are_plain_in_a_pipe_and_colored_on_a_terminal(url: str, trained: str, gpulease: Program) -> None:
    piped = gpulease("logs", trained).stdout
    assert "[rank 0] hello of 0\n" in piped
    assert "[rank 1] hello of 1\n" in piped
    assert "\x1b[36m" not in piped
    shown = on_a_terminal(url, "logs", "-f", trained)
    assert "\x1b[36m[rank 0]\x1b[0m hello of 0" in shown
    assert "\x1b[33m[rank 1]\x1b[0m hello of 1" in shown
    assert "\x1b[35mviolet\x1b[0m" in shown
    assert "\x1b[2J" not in shown
    assert "title" not in shown
    uncoloured = on_a_terminal(url, "logs", trained, environment={"NO_COLOR": "1"})
    assert "[rank 1] hello of 1" in uncoloured
    assert "\x1b[33m" not in uncoloured


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_a_pipe_gets_every_byte_of_a_log_whatever_the_locale(client: Client, url: str, encoding: str) -> None:
    written = b"\xff\xfe caf\xe9 \xe2\x80\xa6 \0 50%\r100%\r\nno end"
    command = ["sh", "-c", "printf " + shlex.quote("".join(f"\\{byte:03o}" for byte in written))]
    job = client.wait_job(client.submit(JobRequest(command=command)).id)
    shown = subprocess.run(
        [sys.executable, "-m", "gpulease_cli", "logs", job.id],
        env=environ(GPULEASE_URL=url, PYTHONIOENCODING=encoding),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, written, b"")


def test_a_label_is_shown_where_the_locale_does_not_have_its_letters(client: Client, url: str) -> None:
    with client.lease(1, wait_s=60, label="Größe 3"):
        shown = subprocess.run(
            [sys.executable, "-m", "gpulease_cli", "leases"],
            env=environ(GPULEASE_URL=url, PYTHONIOENCODING="ascii"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert "Gr??e 3" in shown.stdout, shown.stderr


def test_one_rank_and_its_last_lines(trained: str, gpulease: Program) -> None:
    assert gpulease("logs", "--rank", "1", trained).stdout.startswith("hello of 1\n")
    last = gpulease("logs", "--rank", "1", "--tail", "1", trained).stdout
    assert last.endswith("violet\x1b[0m\n")
    assert "hello" not in last


def test_a_rank_that_a_job_does_not_have_is_not_one_that_wrote_nothing(trained: str, gpulease: Program) -> None:
    assert gpulease("logs", "--rank", "2", trained).stderr == f"{trained} has no rank 2: its last one is 1\n"
    plain = gpulease("submit", "--", "echo", "hello").stdout.strip()
    assert gpulease("wait", plain).returncode == 0
    refused = gpulease("logs", "-f", "--rank", "3", plain)
    assert refused.returncode == 2
    assert f"--rank: {plain} has one log for all that it prints, because its launcher is plain." in refused.stderr


def test_submit_follow_prints_why_it_waits_once_then_the_log(client: Client, start: Callable[..., Running]) -> None:
    with all_gpus_taken(client):
        command = start(
            "submit", "-n", "2", "--launcher", "plain", "--follow", "--", "sh", "-c", "echo it runs; exit 7"
        )
        wait_until(lambda: "1st in the queue" in command.stderr, story=command.story)
        wait_until(lambda: "in the way" in command.stderr, story=command.story)  # it is read letter by letter
        wait_until(lambda: "\n" in command.stdout, story=command.story)
        job_id = command.stdout.strip()
        assert client.job(job_id).state is JobState.QUEUED
    assert command.end() == 7
    assert command.stdout == f"{job_id}\nit runs\n"
    said = command.stderr.splitlines()
    assert len(said) == len(set(said)), "it says the same again"


def test_a_job_that_waits_again_shows_its_last_attempt_that_has_a_log(client: Client, gpulease: Program) -> None:
    command = ["sh", "-c", "echo it fails; exit 3"]
    job = client.submit(JobRequest(command=command, launcher="plain", gpus=4, retries=1))
    with client.lease(4, wait_s=60, label="in the way"):  # the first attempt has ended, and the second one waits
        assert client.job(job.id).attempts == 1
        shown = gpulease("logs", job.id)
        assert shown.stderr == f"{job.id} waits again; this is the log of attempt 1:\n"
        assert shown.stdout == "it fails\n"
        assert gpulease("logs", "--attempt", "1", job.id).stdout == shown.stdout
        refused = gpulease("logs", "--attempt", "2", job.id).stderr
        assert "There is no attempt 2" in refused
        assert f"`gpulease show {job.id}` shows which there were" in refused
        assert gpulease("logs", "--attempt", "1", "-f", job.id).returncode == 2
        client.cancel_job(job.id)


def test_wait_says_what_it_waits_for(client: Client, start: Callable[..., Running], gpulease: Program) -> None:
    with all_gpus_taken(client):
        job_id = gpulease("submit", "--launcher", "plain", "--", "sleep", "100").stdout.strip()
        command = start("wait", job_id)
        wait_until(lambda: "1st in the queue" in command.stderr, story=command.story)
    wait_until(lambda: f"{job_id} is running on GPU" in command.stderr, story=command.story)
    client.cancel_job(job_id, 5)
    assert command.end() == 128 + 15


def test_run_says_why_it_waits(client: Client, start: Callable[..., Running]) -> None:
    with all_gpus_taken(client):
        command = start("run", "--wait", "60", "--", "echo", "it runs")
        wait_until(lambda: "1st in the queue" in command.stderr, story=command.story)
    assert command.end() == 0
    assert command.stdout == "it runs\n"


def test_ctrl_c_leaves_the_job_running_and_says_how_to_return(client: Client, start: Callable[..., Running]) -> None:
    command = start("submit", "--launcher", "plain", "--follow", "--", "sh", "-c", "echo it runs; sleep 100")
    wait_until(lambda: "it runs" in command.stdout, story=command.story)
    command.process.send_signal(signal.SIGINT)
    job_id = command.stdout.split()[0]
    assert command.end() == 130
    assert f"`gpulease logs -f {job_id}` returns to it, `gpulease cancel {job_id}` ends it" in command.stderr
    assert "Traceback" not in command.stderr
    assert client.job(job_id).state is JobState.RUNNING
    client.cancel_job(job_id, 5)
    assert client.wait_job(job_id, 60).state is JobState.CANCELLED
