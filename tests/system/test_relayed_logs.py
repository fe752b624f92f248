"""Logs of jobs on other nodes: as those of this host, through the daemon, which opens no file of them.

A daemon behind a proxy knows nothing of a worker but its token, as of one on another host. Here it is on this host, so
that the tests of local logs can look at the files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease import Client
from tests.daemon import DaemonProcess, eventually
from tests.http_as_user import call
from tests.system.test_job_logs import (
    BOUND,
    Following,
    gated,
    logs_of,
    open_files,
    test_a_log_begins_at_an_offset_or_with_its_last_lines,
    test_a_log_directory_that_is_gone_is_an_empty_log,
    test_a_reader_that_fell_behind_the_bound_is_told_what_it_missed,
    test_the_ranks_of_torchrun_are_merged_line_by_line,
    test_who_follows_goes_on_after_a_restart_of_the_daemon,
)

__all__ = [
    "test_a_log_begins_at_an_offset_or_with_its_last_lines",
    "test_a_log_directory_that_is_gone_is_an_empty_log",
    "test_a_reader_that_fell_behind_the_bound_is_told_what_it_missed",
    "test_the_ranks_of_torchrun_are_merged_line_by_line",
    "test_who_follows_goes_on_after_a_restart_of_the_daemon",
]

pytestmark = pytest.mark.slow


UNHURRIED = {"GPULEASE_PROBE_DEADLINE_S": "6"}
"""A worker that a busy machine keeps from running for some seconds is not silent, and sends logs."""


class BehindProxy(DaemonProcess):
    """A daemon that knows its callers by token alone, and the worker of its one node, `far`."""

    worker: subprocess.Popen[bytes]

    def start(self, *, ready: bool = True) -> DaemonProcess:
        super().start(ready=False)
        if not self.more_fields:
            self.more_fields["Authorization"] = f"Bearer {self.token(role='admin')}"
            self.start_worker()
        eventually(lambda: {gpu["state"] for gpu in self.gpus()} == {"free"}, 120, self.story)
        return self

    def token(self, **fields: str) -> str:
        made = call(self.socket, "POST", "/v1/tokens", {"user": "root"} | fields)
        assert made.status == 201, made.content
        return str(made.json["bearer"])

    def start_worker(self) -> None:
        words = ["worker", "--url", self.url, "--node", "far", "--simulate", "4", "--log-bytes", str(BOUND)]
        words += ["--data-dir", str(self.data_dir / "worker")]
        environment = os.environ | UNHURRIED | {"GPULEASE_TOKEN": self.token(role="worker", node="far")}
        self.worker = subprocess.Popen([sys.executable, "-m", "gpulease_cli", *words], env=environment)

    def client(self) -> Client:
        return Client(self.url, self.more_fields["Authorization"].partition(" ")[2])

    def end(self) -> None:
        self.worker.kill()
        self.worker.wait()
        self.stop()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BehindProxy]:
    started = BehindProxy(tmp_path_factory.mktemp("far") / "d", "--no-worker", "--behind-proxy")
    try:
        started.start()
        yield started
    finally:
        started.end()


def test_the_daemon_opens_no_file_of_it(running: BehindProxy, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job_id = running.submit(*gated(gate, "echo one", "echo two"))
    with running.client() as client:
        following = Following(client.job_logs(job_id, follow=True))
        Path(f"{gate}.0").touch()
        eventually(lambda: following.text == "one\n", 60, running.story)
        assert open_files(running, job_id) == []
        assert running.job(job_id)["log_directory"] == f"far:{logs_of(running, job_id)}"
        Path(f"{gate}.1").touch()
        assert following.whole() == "one\ntwo\n"


def test_a_second_attempt_is_followed_from_its_beginning(running: BehindProxy, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = f"echo first; until test -e {gate}; do sleep 0.01; done; exit 9"
    job_id = running.submit("sh", "-c", f'case "$PWD" in *.2*) echo better;; *) {first};; esac', retries=1)
    with running.client() as client:
        following = Following(client.job_logs(job_id, follow=True))
        eventually(lambda: following.text == "first\n", 60, running.story)
        gate.touch()
        assert following.whole() == "first\n[... attempt 2 begins]\nbetter\n"
        assert ["".join(client.job_logs(job_id, attempt=number)) for number in (1, 2)] == ["first\n", "better\n"]


def test_who_follows_goes_on_after_a_restart_of_the_worker(running: BehindProxy, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job_id = running.submit(*gated(gate, "echo one; printf two", "echo ' and a half'; echo three"))
    with running.client() as client:
        following = Following(client.job_logs(job_id, follow=True))
        merged = Following(client.job_logs(job_id, follow=True, rank="all"))
        Path(f"{gate}.0").touch()
        eventually(lambda: following.text == "one\ntwo", 60, running.story)
        eventually(lambda: merged.text == "[rank 0] one\n", 60, running.story)
        running.worker.kill()
        running.worker.wait()
        Path(f"{gate}.1").touch()
        eventually(lambda: b"three" in (logs_of(running, job_id) / "launcher.log").read_bytes(), 60)
        running.start_worker()
        assert following.whole() == "one\ntwo and a half\nthree\n"
        assert merged.whole() == "[rank 0] one\n[rank 0] two and a half\n[rank 0] three\n"


def test_a_reader_that_takes_nothing_holds_up_no_one_and_is_told_everything(running: BehindProxy) -> None:
    job_id = running.submit("sh", "-c", f"yes line | head -c {BOUND // 2}")
    assert running.wait_job(job_id)["state"] == "succeeded"
    with running.client() as client:
        slow = client.job_logs(job_id)
        first = next(slow)
        for _ in range(3):
            assert len(running.job_log(job_id)) == BOUND // 2
        assert len(first) + sum(map(len, slow)) == BOUND // 2


def test_a_node_that_is_silent_is_named_with_the_place_of_the_log(running: BehindProxy) -> None:
    job_id = running.submit("echo", "here")
    assert running.wait_job(job_id)["state"] == "succeeded"
    running.worker.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: {gpu["state"] for gpu in running.gpus()} == {"unknown"}, 60, running.story)
        refused = running.get(f"/v1/jobs/{job_id}/logs")
        assert refused.problem() == (503, "unavailable")
        assert f"is on node far, in {logs_of(running, job_id)}" in refused.json["detail"]
        said = running.gpulease("logs", job_id, GPULEASE_TOKEN=running.more_fields["Authorization"].split()[1])
        assert said.returncode != 0
        assert "node far" in said.stderr
    finally:
        running.worker.send_signal(signal.SIGCONT)
    eventually(lambda: running.get(f"/v1/jobs/{job_id}/logs").content == b"here\n", 60, running.story)


def test_what_a_node_is_asked_for_is_bounded(running: BehindProxy) -> None:
    job_id = running.submit("sleep", "600")
    running.wait_job(job_id, "running")
    streams = []
    with running.client() as client:
        try:
            for _ in range(16):
                streams.append(Following(client.job_logs(job_id, follow=True)))
            path = f"/v1/jobs/{job_id}/logs"

            def all_places_are_taken() -> bool:
                """By the streams. To ask takes a place, too, so that one of them may have been refused meanwhile."""
                for place, stream in enumerate(streams):
                    if stream.failure is not None:
                        streams[place] = Following(client.job_logs(job_id, follow=True))
                return running.get(path).status == 503

            eventually(all_places_are_taken, 60, running.story)
            assert "Node far sends 16 logs already, 16 of them to you" in running.get(path).json["detail"]
        finally:
            running.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 0})
    for stream in streams:
        assert stream.whole() == ""
