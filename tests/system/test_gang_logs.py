"""Logs of jobs on several nodes: of all of them, merged, live and from wherever they are; or of one node or rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.system.test_gang_jobs import running
from tests.system.test_job_logs import Following
from tests.system.test_relayed_logs import UNHURRIED, BehindProxy

__all__ = ["running"]

SAYS = "echo up $NODE_RANK; until test -e {gate}; do sleep 0.05; done; echo end $NODE_RANK"


def told(running: DaemonProcess, job: str, query: str = "") -> list[str]:
    """The lines of a log, sorted: the order of the nodes' lines is not fixed."""
    return sorted(running.job_log(job, query).splitlines())


def measured(running: DaemonProcess, job: str) -> set[str]:
    """The GPUs of a job of which its metrics have readings."""
    gpus = running.get(f"/v1/jobs/{job}/metrics").json["attempts"][-1]["gpus"]
    return {gpu["uuid"] for gpu in gpus if gpu["start_at"]}


@pytest.mark.budget(30)
def test_the_logs_of_all_nodes_come_live_with_the_names_of_the_nodes(running: DaemonProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = running.submit("sh", "-c", SAYS.format(gate=gate), gpus=2, nodes=2)
    with running.client() as client:
        following = Following(client.job_logs(job, follow=True))
        eventually(lambda: "[n1] up 0\n" in following.text and "[n2] up 1\n" in following.text, 60, running.story)
        eventually(lambda: len(measured(running, job)) == 4, 60, running.story)
        gate.touch()
        whole = sorted(following.whole().splitlines())
    assert whole == ["[n1] end 0", "[n1] up 0", "[n2] end 1", "[n2] up 1"]
    assert told(running, job) == whole
    assert running.job_log(job, "?node=n2") == "up 1\nend 1\n"
    assert running.job_log(job, "?rank=2&tail=1") == "end 1\n"
    assert told(running, job, "?rank=all&tail=1") == ["[rank 0] end 0", "[rank 2] end 1"]
    refused = running.get(f"/v1/jobs/{job}/logs?node=n3")
    assert refused.problem() == (422, "invalid_request")
    assert "not on node 'n3', but on n1, n2" in refused.json["detail"]
    shown = running.gpulease("logs", job)
    assert sorted(shown.stdout.splitlines()) == whole, shown.stderr
    assert running.gpulease("logs", "--node", "n1", job).stdout == "up 0\nend 0\n"
    assert running.gpulease("logs", "--rank", "2", "-n", "1", job).stdout == "end 1\n"


def test_who_follows_goes_on_exactly_where_each_node_was(running: DaemonProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = running.submit("sh", "-c", SAYS.format(gate=gate), gpus=2, nodes=2)
    with running.client() as client:
        following = Following(client.job_logs(job, follow=True))
        eventually(lambda: following.text.count("up") == 2, 60, running.story)
        running.kill()
        running.start(ready=False)
        gate.touch()
        whole = sorted(following.whole().splitlines())
    assert whole == ["[n1] end 0", "[n1] up 0", "[n2] end 1", "[n2] up 1"]


class TwoNodes(BehindProxy):
    """A daemon that knows its callers by token alone, with the workers of two nodes."""

    second: subprocess.Popen[bytes]

    def start_worker(self) -> None:
        super().start_worker()
        self.second = self.worker_of("away")
        eventually(lambda: len(self.gpus()) == 8, 120, self.story)

    def worker_of(self, node: str) -> subprocess.Popen[bytes]:
        words = ["worker", "--url", self.url, "--node", node, "--simulate", "4"]
        words += ["--data-dir", str(self.data_dir / node)]
        environment = os.environ | UNHURRIED | {"GPULEASE_TOKEN": self.token(role="worker", node=node)}
        return subprocess.Popen([sys.executable, "-m", "gpulease_cli", *words], env=environment)

    def end(self) -> None:
        self.second.kill()
        self.second.wait()
        super().end()


@contextmanager
def two_nodes(place: Path) -> Iterator[TwoNodes]:
    started = TwoNodes(place / "d", "--no-worker", "--behind-proxy")
    try:
        started.start()
        yield started
    finally:
        started.end()


@pytest.mark.slow
@pytest.mark.busy
def test_logs_that_are_relayed_name_a_node_that_does_not_send_and_go_on_with_the_others(tmp_path: Path) -> None:
    with two_nodes(tmp_path) as made:
        job = made.submit("sh", "-c", "echo up $NODE_RANK", gpus=2, nodes=2)
        assert made.wait_job(job)["state"] == "succeeded"
        assert told(made, job) == ["[away] up 0", "[far] up 1"]
        made.second.kill()
        made.second.wait()
        eventually(lambda: sum(gpu["state"] == "unknown" for gpu in made.gpus()) == 4, 60, made.story)
        note, line = told(made, job)
        assert line == "[far] up 1"
        assert note.startswith(f"[away] [... The log of job {job} is on node away, in ")
        assert "cannot be read now: node away has been silent" in note
        assert made.get(f"/v1/jobs/{job}/logs?node=away").problem() == (503, "unavailable")
        made.call("POST", "/v1/nodes/away/forget")
        eventually(lambda: len(made.gpus()) == 4, 60, made.story)
        note, line = told(made, job)
        assert line == "[far] up 1"
        assert "and that node is gone: it has left, or was forgotten." in note
        assert made.get(f"/v1/jobs/{job}/logs?node=away").problem() == (404, "not_found")
