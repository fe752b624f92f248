"""A daemon on PostgreSQL, one writer on one database, and `gpulease db`, all with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, daemon, events, eventually, workers_of
from tests.databases import PASSWORD, PostgresServer
from tests.worker.build import kill, living

pytestmark = pytest.mark.slow
WITHIN_S = 60
TIMES = dict.fromkeys(("expires_at", "held_for_s", "idle_s"))
"""Fields of a lease that time alone changes."""


@contextmanager
def ready(directory: Path, url: str) -> Iterator[DaemonProcess]:
    directory.mkdir(exist_ok=True)
    with daemon(directory, "--simulate", "2", "--node", "n1", GPULEASE_DATABASE_URL=url) as running:
        yield running


def gpulease(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpulease_cli", *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
    return subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=False, timeout=WITHIN_S
    )


def test_a_daemon_on_postgresql_keeps_everything_over_a_kill(tmp_path: Path, postgres: PostgresServer) -> None:
    url = postgres.database(empty=True)
    with ready(tmp_path, url) as running:
        kept = running.call("POST", "/v1/leases?wait_s=60", {"count": 1, "label": "über"}).json
        waiting = running.call("POST", "/v1/leases", {"count": 2}).json
        job = running.call("POST", "/v1/jobs", {"command": ["true"], "launcher": "plain"}).json
        running.kill()
        running.start()
        again = running.call("GET", f"/v1/leases/{kept['id']}").json
        assert again | TIMES == kept | TIMES
        assert running.call("GET", f"/v1/leases/{waiting['id']}").json["state"] == "queued"
        assert running.call("GET", f"/v1/jobs/{job['id']}").json["id"] == job["id"]
        running.call("POST", f"/v1/leases/{kept['id']}/release", {"token": kept["token"]})
        granted = running.call("GET", f"/v1/leases/{waiting['id']}?wait_s=30&wait_while=queued").json
        assert granted["token"] > kept["token"]
        assert [event["seq"] for event in events(running)] == list(range(1, len(events(running)) + 1))
        assert not (running.data_dir / "gpulease.db").exists()
        found = gpulease("db", "check", GPULEASE_DATABASE_URL=url)
        assert "lease" not in found.stdout, found.stdout
        assert PASSWORD not in running.output.read_text()
        (worker,) = workers_of(running.process.pid)
        assert PASSWORD not in str(worker.environ())
    postgres.drop(url)


def test_text_that_no_database_keeps_is_refused(tmp_path: Path, postgres_url: str) -> None:
    with ready(tmp_path, postgres_url) as running:
        for body in ({"label": "a\0b"}, {"gpu_model": "\0"}, {"node": "\0"}, {"among": ["GPU-\0"]}):
            answer = running.call("POST", "/v1/leases", body)
            assert answer.problem() == (422, "invalid_request"), body
            assert "NUL" in answer.json["detail"]
        assert running.call("POST", "/v1/leases", raw=b'{"label": "\\\\u0000"}').status == 201, "that is no NUL"
        for path in ("/v1/leases/%00", "/v1/jobs/x%00y", "/v1/jobs?array=%00", "/v1/nodes/%00", "/v1/gpus/%00"):
            assert running.call("GET", path).problem()[0] in (404, 422), path
        report = {"worker_id": "w", "host": "h" * 300}
        assert running.call("POST", "/v1/nodes/n2/exchange", report).problem() == (422, "invalid_request")
        report = {"worker_id": "w", "host": "h", "hold_s": 0.0}
        assert running.call("POST", f"/v1/nodes/{'n' * 300}/exchange", report).problem() == (404, "not_found")
        assert running.call("POST", "/v1/leases", {"label": "x"}).status == 201, "a bad request has harmed the next"


def test_a_second_daemon_on_the_same_database_is_refused_and_told_by_whom(tmp_path: Path, postgres_url: str) -> None:
    with ready(tmp_path / "first", postgres_url) as running:
        second = DaemonProcess(tmp_path / "second", "--no-worker", "--database-url", postgres_url)
        ended = subprocess.run(second.command, check=False, capture_output=True, text=True, timeout=WITHIN_S)
        assert running.process is not None
        assert ended.returncode == 1
        assert f"pid {running.process.pid} on " in ended.stderr
        assert "--database-url" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert PASSWORD not in ended.stderr
        assert running.answers("/readyz"), "the first one was harmed"


def test_a_daemon_that_was_stopped_steps_down_when_another_one_has_taken_over(
    tmp_path: Path, postgres_url: str
) -> None:
    with ready(tmp_path / "first", postgres_url) as first:
        assert first.process is not None
        kept = first.call("POST", "/v1/leases?wait_s=60", {"count": 1, "ttl_s": 600}).json
        first.process.send_signal(signal.SIGSTOP)
        second = DaemonProcess(tmp_path / "second", "--simulate", "2", "--node", "n1")
        second.environment = {"GPULEASE_DATABASE_URL": postgres_url}
        try:
            eventually(lambda: starts(second), WITHIN_S, second.story)
            before = [(event["seq"], event["kind"]) for event in events(second)]
            first.process.send_signal(signal.SIGCONT)
            assert first.process.wait(WITHIN_S) == 1
            assert "another daemon has taken over" in first.output.read_text().lower()
            assert "Traceback" not in first.output.read_text()
            held = second.call("GET", f"/v1/leases/{kept['id']}").json
            assert (held["state"], held["token"]) == ("active", kept["token"])
            assert [(event["seq"], event["kind"]) for event in events(second)][: len(before)] == before
            other = second.call("POST", "/v1/leases?wait_s=60", {"count": 1}).json
            assert other["token"] > kept["token"]
            assert other["gpus"][0]["uuid"] != kept["gpus"][0]["uuid"]
        finally:
            first.process.send_signal(signal.SIGCONT)
            second.stop()


def starts(running: DaemonProcess) -> bool:
    """Start a daemon; False if it was refused, because the database still takes the other one for alive."""
    try:
        running.start()
    except AssertionError:
        assert "Another gpulease daemon" in running.output.read_text()
        return False
    return True


def test_a_daemon_outlives_a_restart_of_the_server(tmp_path: Path) -> None:
    server = PostgresServer()
    try:
        url = server.start().database()
        with ready(tmp_path, url) as running:
            kept = running.call("POST", "/v1/leases?wait_s=60", {"count": 1, "ttl_s": 600}).json
            server.stop()
            refused = running.call("POST", "/v1/leases", {"count": 1})
            assert refused.problem() == (503, "unavailable")
            server.start()
            eventually(lambda: running.answers("/readyz"), WITHIN_S, running.story)
            assert running.call("GET", f"/v1/leases/{kept['id']}").json["token"] == kept["token"]
            eventually(lambda: running.call("POST", "/v1/leases", {"count": 1}).status == 201, WITHIN_S, running.story)
            eventually(lambda: "is held again" in running.output.read_text(), WITHIN_S, running.story)
    finally:
        server.close()


def test_a_backup_restores_to_a_working_daemon_with_the_leases_in_it(tmp_path: Path) -> None:
    file = tmp_path / "copy.db"
    with daemon(tmp_path, "--simulate", "2", "--node", "n1") as running:
        kept = running.call("POST", "/v1/leases?wait_s=60", {"count": 1, "ttl_s": 600}).json
        place = ("--data-dir", str(running.data_dir))
        made = gpulease("db", "backup", str(file), *place)
        assert (made.returncode, made.stderr) == (0, ""), made
        assert gpulease("db", "check", *place).stdout == "nothing is wrong\n"
        assert gpulease("db", "backup", str(file), *place).returncode == 1
        later = running.call("POST", "/v1/leases?wait_s=60", {"count": 1}).json
        seen = events(running)[-1]["seq"]
    (tmp_path / "new").mkdir()
    with daemon(tmp_path / "new", "--simulate", "2", "--node", "n1", "--database-url", f"sqlite:///{file}") as restored:
        again = restored.call("GET", f"/v1/leases/{kept['id']}").json
        assert again | TIMES == kept | TIMES
        assert restored.call("GET", f"/v1/leases/{later['id']}").status == 404
        other = restored.call("POST", "/v1/leases?wait_s=60", {"count": 1}).json
        assert other["token"] > later["token"], "a token of before is given out again"
        assert events(restored)[-1]["seq"] > seen
        renewed = restored.call("POST", f"/v1/leases/{kept['id']}/renew", {"token": kept["token"]})
        assert renewed.status == 200


@pytest.mark.parametrize("restored", [False, True], ids=["an empty one", "a backup"])
def test_a_job_outlives_the_database_that_it_was_ordered_from(tmp_path: Path, restored: bool) -> None:
    """Its GPU is leased to no one until it ends. A job that the backup knows is the restored daemon's own."""
    file, options = tmp_path / "other.db", ("--simulate", "3", "--node", "n1")
    (tmp_path / "d").mkdir()
    with daemon(tmp_path, *options) as running:
        known = running.submit("sleep", "600", gpus=1)
        first = running.wait_job(known, "running")
        if restored:
            assert gpulease("db", "backup", str(file), "--data-dir", str(running.data_dir)).returncode == 0
        job_id = running.submit("sleep", "600", gpus=1)
        job = running.wait_job(job_id, "running")
        running.stop()
        other = DaemonProcess(running.data_dir, *options, "--database-url", f"sqlite:///{file}")
        other.start()
        try:
            uuid = job["gpus"][0]["uuid"]

            def shown() -> dict[str, Any]:
                return next(one for one in other.gpus() if one["uuid"] == uuid)

            eventually(lambda: f"job {job_id} runs on it" in str(shown().get("reason")), WITHIN_S, other.story)
            assert shown()["state"] == "unknown"
            assert len(living(job["lease_id"])) == 1, other.story()
            mine = other.request_lease(1, wait_s=30)
            assert uuid not in {gpu["uuid"] for gpu in mine["gpus"]}
            waits = other.request_lease(3 if restored else 2)
            assert waits["state"] == "queued"
            if restored:
                assert other.call("POST", f"/v1/jobs/{known}/cancel").status == 200
                assert other.wait_job(known)["state"] == "cancelled"
            other.release(mine)
            (pid,) = living(job["lease_id"])
            kill(pid)
            other.wait_active(waits["id"])
            assert (shown()["state"], shown()["lease_id"]) == ("leased", waits["id"])
        finally:
            other.end_everything()
            other.stop()
            for pid in living(first["lease_id"]) | living(job["lease_id"]):
                kill(pid)


def test_current_says_whether_the_schema_is_the_newest(tmp_path: Path, postgres: PostgresServer) -> None:
    for url in (f"sqlite:///{tmp_path / 'x.db'}", postgres.database(empty=True)):
        assert gpulease("db", "upgrade", GPULEASE_DATABASE_URL=url).returncode == 0
        newest = gpulease("db", "current", GPULEASE_DATABASE_URL=url)
        assert (newest.returncode, newest.stdout.endswith("(the newest)\n")) == (0, True), newest
    empty = gpulease("db", "current", GPULEASE_DATABASE_URL=postgres.database(empty=True))
    assert empty.returncode == 1
    assert "gpulease db upgrade" in empty.stdout
    missing = gpulease("db", "check", "--data-dir", str(tmp_path))
    assert missing.returncode == 1
    assert "does not exist" in missing.stderr
