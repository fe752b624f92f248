"""A daemon dies or is stopped under load, and the one that stands by takes over, with real processes on PostgreSQL."""

from __future__ import annotations

import json
import signal
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease import Client
from tests.daemon import DaemonProcess, events, eventually
from tests.failover_pair import WITHIN_S, Load, Pair, check, pair
from tests.prometheus_scrape import ROOT, promtool, scrape
from tests.system.test_databases import gpulease

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GAP_S = 5.0
LOADED_S = 20.0
"""What one round may take on a machine that others use; the figures are printed."""
SOAK = pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])


def takes_over(two: Pair, load: Load, fault: Callable[[], object]) -> float:
    """Do harm to the writer; how long no one was answered. The two change places, and everyone is served again."""
    since_s = time.monotonic()
    fault()
    eventually(lambda: two.standby.answers("/readyz"), WITHIN_S, two.story)
    two.swap()
    load.everyone_goes_on(two.story)
    gap_s = load.seen.gap_s(since_s, time.monotonic())
    print(f"nobody was answered for {gap_s:.2f} s", flush=True)
    return gap_s


def told(gaps: list[float], rounds: int) -> None:
    """Print the figures, and judge them: of several rounds the median is the machine's, not the neighbours'."""
    print(f"{len(gaps)} takeovers: gap median {statistics.median(gaps):.2f} s, longest {max(gaps):.2f} s")
    assert max(gaps) < LOADED_S, gaps
    if rounds > 1:
        assert statistics.median(gaps) < GAP_S, gaps


@pytest.mark.parametrize("rounds", [1, SOAK])
def test_when_the_writer_is_killed_the_standby_takes_over(tmp_path: Path, postgres_url: str, rounds: int) -> None:
    gaps = []
    with pair(tmp_path, postgres_url) as two:
        with Load(two.urls) as load:
            for _ in range(rounds):
                load.everyone_goes_on(two.story)
                killed = two.writer
                gaps.append(takes_over(two, load, killed.kill))
                killed.start(ready=False)
                assert stands_by(killed), killed.story()
        check(events(two.writer), load)
    told(gaps, rounds)


@pytest.mark.parametrize("rounds", [1, SOAK])
def test_when_the_writer_is_stopped_the_standby_takes_over_and_it_steps_down(
    tmp_path: Path, postgres_url: str, rounds: int
) -> None:
    gaps = []
    with pair(tmp_path, postgres_url) as two:
        with Load(two.urls) as load:
            for _ in range(rounds):
                load.everyone_goes_on(two.story)
                stopped = two.writer
                assert stopped.process is not None
                gaps.append(takes_over(two, load, lambda: stopped.process.send_signal(signal.SIGSTOP)))  # noqa: B023
                steps_down_unheard(stopped, load)
                stopped.start(ready=False)
                assert stands_by(stopped), stopped.story()
        check(events(two.writer), load)
    told(gaps, rounds)


def steps_down_unheard(stopped: DaemonProcess, load: Load) -> None:
    """It goes on: what it was asked meanwhile it does not answer as if it were the writer, and it ends."""
    assert stopped.process is not None
    proof = json.dumps({"token": load.keeper.fencing_token})
    asked = [
        plain(stopped.port, "GET", f"/v1/leases/{load.keeper.id}"),
        plain(stopped.port, "GET", "/v1/gpus"),
        plain(stopped.port, "POST", f"/v1/leases/{load.keeper.id}/renew", proof),
        plain(stopped.port, "POST", "/v1/leases", '{"count": 1, "queue": false}'),
        plain(stopped.port, "POST", "/v1/nodes/n1/exchange", '{"worker_id": "w", "host": "h", "hold_s": 0.0}'),
    ]
    stopped.process.send_signal(signal.SIGCONT)
    for connection in asked:
        with connection:
            said = heard(connection)
            assert not said or said.startswith(b"HTTP/1.1 503 "), said
    assert stopped.process.wait(WITHIN_S) == 1
    printed = stopped.output.read_text().lower()
    assert "another daemon has taken over" in printed
    assert "traceback" not in printed, printed[-4000:]


def plain(port: int, method: str, path: str, body: str = "") -> socket.socket:
    """A request that is sent, and not yet answered."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def heard(connection: socket.socket) -> bytes:
    said = b""
    try:
        while piece := connection.recv(65536):
            said += piece
    except ConnectionError:
        pass
    return said


def stands_by(running: DaemonProcess) -> bool:
    """True when `/readyz` says so, while `/healthz` is well."""
    ready = running.call("GET", "/readyz")
    return ready.status == 503 and "stands by; the writer is" in ready.json["detail"] and running.answers("/healthz")


def tells_of_itself_alone(standby: DaemonProcess) -> None:
    """Its metrics say that it stands by, and nothing that the writer's say, too: sums over both daemons stay right."""
    told = scrape(standby)
    assert {name for name, is_so in told.by("standing", "gpulease_standing").items() if is_so} == {"standby"}
    assert told.value("gpulease_ready") == 0
    assert 0 <= told.value("gpulease_copy_age_seconds") < WITHIN_S
    own = {"build", "standing", "ready", "copy_age", "http"}
    assert [name for name in told.rows() if not name.startswith(tuple(f"gpulease_{one}" for one in own))] == []
    row = told.rows()["gpulease_copy_age_seconds"]
    assert row in (ROOT / "docs" / "monitoring.md").read_text().splitlines()
    checked = promtool("check", "metrics", stdin=told.text)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_standby_reads_out_its_copy_says_so_and_refuses_all_else(tmp_path: Path, postgres_url: str) -> None:
    with pair(tmp_path, postgres_url) as two:
        writer, standby = two.writer, two.standby
        assert stands_by(standby)
        assert writer.process is not None
        lease = writer.call("POST", "/v1/leases?wait_s=60", {"count": 1, "ttl_s": 600, "label": "x"}).json
        queued = writer.call("POST", "/v1/leases", {"count": 5, "ttl_s": 600}).json

        def holders() -> list[str]:
            return [gpu["lease_id"] for gpu in standby.call("GET", "/v1/gpus").json["items"] if gpu["lease_id"]]

        eventually(lambda: holders() == [lease["id"]], WITHIN_S, standby.story)
        for path in (f"/v1/leases/{lease['id']}", "/v1/leases", "/v1/gpus", "/v1/nodes", "/v1/events", "/v1/jobs", "/"):
            answer = standby.call("GET", path)
            assert answer.status == 200, (path, answer.content)
            assert f"pid {writer.process.pid} on " in answer.headers["gpulease-standby"]
            assert answer.headers["gpulease-as-of"].endswith("Z")
            assert "gpulease-standby" not in writer.call("GET", path).headers
            assert "gpulease-as-of" not in writer.call("GET", path).headers
        assert standby.call("GET", "/").content.startswith(b"stands by; the writer is ")
        gpus = standby.call("GET", "/v1/gpus").json["items"]
        assert {gpu["state"] for gpu in gpus} == {"unknown"}, "it has no readings"
        assert any("this daemon is a standby" in gpu["reason"] for gpu in gpus)
        proof = {"token": lease["token"]}
        for method, path, body in (
            ("POST", "/v1/leases", {"count": 1}),
            ("POST", f"/v1/leases/{lease['id']}/renew", proof),
            ("POST", f"/v1/leases/{lease['id']}/release", proof),
            ("POST", "/v1/jobs", {"command": ["true"], "launcher": "plain"}),
            ("POST", "/v1/nodes/n1/drain", None),
            ("POST", "/v1/nodes/n1/exchange", {"worker_id": "w", "host": "h", "hold_s": 0.0}),
            ("GET", f"/v1/leases/{queued['id']}?wait_s=60&wait_while=queued", None),
        ):
            refused = standby.call(method, path, body)
            assert refused.problem() == (503, "unavailable"), path
            assert "the writer is pid" in refused.json["detail"]
            assert refused.headers["retry-after"] == "0"
            assert "outcome" not in refused.json, "nothing was done, and clients may know"
        with Client([standby.url, writer.url]) as both:
            assert {gpu.state for gpu in both.gpus()} >= {"free"}, (
                "of a copy and the original the client takes the copy"
            )
            assert both.lease_by_id(lease["id"]).id == lease["id"]
            with both.lease(count=1, wait_s=60) as other:
                assert other.fencing_token > lease["token"]
        tells_of_itself_alone(standby)
        assert scrape(writer).value("gpulease_standing", standing="writer") == 1
        for word, said in (("status", "this is a copy as of "), ("doctor", "It is a standby; the writer is pid ")):
            ran = gpulease(word, GPULEASE_URL=standby.url)
            assert said in ran.stdout + ran.stderr, ran
        with Client(standby.url) as only:
            assert only.as_of is None
            assert only.lease_by_id(lease["id"]).fencing_token == lease["token"]
            assert only.as_of is not None


def test_a_standby_is_the_writer_where_there_is_none_and_needs_postgresql(tmp_path: Path, postgres_url: str) -> None:
    alone = DaemonProcess(
        tmp_path / "alone", "--no-worker", "--standby", environment={"GPULEASE_DATABASE_URL": postgres_url}
    )
    try:
        alone.start()
        assert alone.call("GET", "/v1/leases").status == 200
    finally:
        assert alone.stop() == 0
    refused = gpulease("serve", "--standby", "--port", "0", "--data-dir", str(tmp_path / "sqlite"))
    assert refused.returncode == 1
    assert "needs PostgreSQL" in refused.stderr
    assert "--database-url postgresql://" in refused.stderr


def test_the_worker_of_a_stopped_daemon_follows_to_its_peer(tmp_path: Path, postgres_url: str) -> None:
    environment = {"GPULEASE_DATABASE_URL": postgres_url}
    second = DaemonProcess(tmp_path / "second", "--no-worker", "--standby", environment=environment)
    own = ("--simulate", "2", "--node", "n1", "--standby", "--peer", second.url)
    first = DaemonProcess(tmp_path / "first", *own, environment=environment)
    try:
        first.start()
        second.start(ready=False)
        assert stands_by(second)
        assert first.process is not None
        first.process.send_signal(signal.SIGSTOP)
        eventually(lambda: second.answers("/readyz"), WITHIN_S, second.story)
        asked = second.call("POST", "/v1/leases?wait_s=60", {"count": 2, "ttl_s": 600})
        assert asked.json["state"] == "active", asked.content
        first.process.send_signal(signal.SIGCONT)
        assert first.process.wait(WITHIN_S) == 1
    finally:
        for daemon in (first, second):
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGCONT)
                daemon.stop()
