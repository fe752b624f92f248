"""The capabilities that docker-compose.yml leaves to daemon and worker are enough for the jobs of other users."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.daemon import DaemonProcess, eventually
from tests.http_as_user import OWNER, call
from tests.worker.strangers import passable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root gives capabilities up"),
]
COMPOSE = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text())
WITHIN_S = 60.0

LEAVES_WHAT_ONLY_ROOT_REMOVES = """
id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status
umask 077; mkdir -p closed/sticky; touch closed/sticky/file; chmod 1777 closed/sticky; chmod 0 closed
setsid sleep 600 &
wait
"""


def confined(service: str) -> list[str]:
    """The beginning of a command line that has the rights of a service only."""
    wanted = COMPOSE["services"][service]
    assert (wanted["cap_drop"], wanted["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    kept = ",".join(["-all", *(f"+{name.lower()}" for name in wanted["cap_add"])])
    return ["setpriv", "--no-new-privs", "--inh-caps", "-all", "--bounding-set", kept, "--"]


class ConfinedDaemon(DaemonProcess):
    """The daemon with the rights of its service."""

    @property
    def command(self) -> list[str]:
        return [*confined("daemon"), *super().command]


@pytest.fixture
def running() -> Iterator[DaemonProcess]:
    with passable() as place:
        daemon = ConfinedDaemon(place / "d", "--no-worker")
        worker = [sys.executable, "-m", "gpulease_cli", "worker", "--url", f"unix://{daemon.socket}"]
        options = ["--data-dir", str(place / "worker"), "--simulate", "1", "--keep-jobs", "1"]
        daemon.start(ready=False)
        with (place / "worker.log").open("wb") as log:
            process = subprocess.Popen([*confined("worker"), *worker, *options], stdout=log, stderr=log)
        try:
            eventually(lambda: daemon.answers("/readyz"), WITHIN_S, (place / "worker.log").read_text)
            yield daemon
        finally:
            process.terminate()
            process.wait(WITHIN_S)
            daemon.stop()


def test_a_job_of_another_user_runs_is_read_is_ended_and_is_removed(running: DaemonProcess) -> None:
    def job(*command: str) -> str:
        body = {"command": list(command), "launcher": "plain"}
        return str(call(running.port, "POST", "/v1/jobs", body, uid=OWNER).json["id"])

    def state(job_id: str) -> str:
        return str(running.job(job_id)["state"])

    def log(job_id: str) -> list[str]:
        return call(running.port, "GET", f"/v1/jobs/{job_id}/logs", uid=OWNER).content.decode().split()

    first = job("sh", "-c", LEAVES_WHAT_ONLY_ROOT_REMOVES)
    directory = running.data_dir.parent / "worker" / "jobs" / first
    eventually(lambda: (directory / "work" / "closed").exists() and len(log(first)) == 7, WITHIN_S, running.story)
    assert log(first)[:3] == [str(OWNER), "CapEff:", "0" * 16]
    assert log(first)[-2:] == ["NoNewPrivs:", "1"]
    call(running.port, "POST", f"/v1/jobs/{first}/cancel", {"grace_s": 0.2}, uid=OWNER)
    eventually(lambda: state(first) == "cancelled", WITHIN_S, running.story)
    for _ in range(2):
        later = job("true")
        eventually(lambda later=later: state(later) == "succeeded", WITHIN_S, running.story)
    eventually(lambda: not directory.exists(), WITHIN_S, running.story)
    eventually(lambda: [one.name for one in directory.parent.iterdir()] == [later], WITHIN_S, running.story)
