"""What surrounds the nouns: who may ask, what is documented, one daemon per directory."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import resource
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import httpx2
import pytest

from gpulease_server.api.auth.peer_credentials import PeerCredentials
from tests.daemon import DaemonProcess, daemon, events, eventually
from tests.imported_program import completed

GONE = 2**22 + 1
"""A pid that no kernel hands out: over the highest pid_max."""


def gpulease(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program; what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
    return completed(words, kept | environment, 60)


def refused(started: DaemonProcess) -> subprocess.CompletedProcess[str]:
    """The end of a daemon that does not start."""
    return gpulease(*started.command[3:])


def test_the_openapi_document_describes_every_field(api: DaemonProcess) -> None:
    document = api.call("GET", "/openapi.json").json
    schemas = document["components"]["schemas"]
    for name, noun in schemas.items():
        for field, schema in noun.get("properties", {}).items():
            assert schema.get("description"), f"{name}.{field} has no description"
    references = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert references == set(schemas), "each is used, and each that is used is there"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for status, answer in operation["responses"].items():
                if status == "default":
                    assert answer == {"$ref": "#/components/responses/Error"}, (path, method)
                elif int(status) >= 400:
                    assert "application/problem+json" in answer["content"], (path, method, status)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "[x"},
        {"Origin": "http://[x"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:6006"},
        {"Origin": "null"},
    ],
)
def test_a_web_page_cannot_reach_the_daemon(api: DaemonProcess, headers: dict[str, str]) -> None:
    answer = api.call("POST", "/v1/leases", {"count": 1}, **headers)
    assert answer.problem() == (403, "not_allowed")


def status_of(running: DaemonProcess, version: str, *lines: str) -> int:
    """The status of the answer to a GET with exactly these header lines."""
    request = "\r\n".join([f"GET /v1/gpus HTTP/{version}", *lines, "Connection: close", "", ""])
    with socket.create_connection(("127.0.0.1", running.port), 60) as connection:
        connection.sendall(request.encode("latin-1"))
        with connection.makefile("rb") as answer:
            return int(answer.readline().split()[1])


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8750",
        "127.0.0.1",
        "127.0.0.1:1",
        "127.0.0.1:65535",
        "[::1]",
        "[::1]:8750",
        "  127.0.0.1:8750",
    ],
)
def test_a_host_that_names_this_host_is_answered_on_any_port(api: DaemonProcess, host: str) -> None:
    """`ssh -L` and containers have other ports than the daemon."""
    assert status_of(api, "1.1", f"Host: {host}") == 200
    assert status_of(api, "1.1", f"Host: {host}", f"Origin: http://{host.strip()}") == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil@127.0.0.1",
        "evil:secret@127.0.0.1:8750",
        "127.0.0.1:8750@evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1.",
        "localhost.",
        "localhost.localdomain",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:8750:8750",
        "127.0.0.1 ",
        "127.0.0.1:123456",
        "127.0.0.1 evil.example",
        "127.0.0.1,evil.example",
        "127.0.0.1/evil",
        "127.0.0.1?evil",
        "127.0.0.1#evil",
        "http://127.0.0.1",
        "127.1",
        "127.0.0.2",
        "0x7f.1",
        "0177.0.0.1",
        "2130706433",
        "0.0.0.0",
        "::1",
        "[::1",
        "[::1].evil.example",
        "[::1%lo]",
        "[::ffff:127.0.0.1]",
        "[0:0:0:0:0:0:0:1]",
        "[::]",
        "\xb1\xb2\xb7.0.0.1",
    ],
)
def test_a_host_in_any_other_spelling_is_refused(api: DaemonProcess, host: str) -> None:
    assert status_of(api, "1.1", f"Host: {host}") == 403


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        ("1.0", []),
        ("1.1", []),
        ("1.1", ["Host: 127.0.0.1", "Host: evil.example"]),
        ("1.1", ["Host: evil.example", "Host: 127.0.0.1"]),
        ("1.1", ["Host: 127.0.0.1", "Origin: "]),
        ("1.1", ["Host: 127.0.0.1", "Origin: null"]),
        ("1.1", ["Host: 127.0.0.1", "Origin: 127.0.0.1"]),
        ("1.1", ["Host: 127.0.0.1", "Origin: http://evil@127.0.0.1"]),
        ("1.1", ["Host: 127.0.0.1", "Origin: http://127.0.0.1/"]),
        ("1.1", ["Host: 127.0.0.1", "Origin: ftp://127.0.0.1"]),
        ("1.1", ["Host: 127.0.0.1", "Origin: http://127.0.0.1:8750"]),
        ("1.1", ["Host: 127.0.0.1", "Origin: http://127.0.0.1 http://evil.example"]),
        ("1.1", ["Host: 127.0.0.1", "Origin: http://127.0.0.1", "Origin: http://evil.example"]),
    ],
)
def test_one_host_and_no_other_origin_is_required(api: DaemonProcess, version: str, lines: list[str]) -> None:
    assert status_of(api, version, *lines) in (400, 403)


def test_the_holder_is_the_owner_of_the_connection(api: DaemonProcess) -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    over_tcp = api.call("POST", "/v1/leases", {"count": 1}).json
    assert over_tcp["holder"]["user"] == me
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(api.socket))) as client:
        over_socket = client.post("http://localhost/v1/leases", json={"count": 1}).json()
    assert (over_socket["holder"]["user"], over_socket["holder"]["owner_pid"]) == (me, os.getpid())
    assert over_socket["holder"]["host"] == socket.gethostname()


def test_everyone_may_open_the_socket_and_only_its_owner_the_files_beside_it(api: DaemonProcess) -> None:
    assert api.socket.stat().st_mode & 0o777 == 0o666
    # Under root the users of jobs pass through it; only its owner can open what is in it.
    assert api.data_dir.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)
    assert (api.data_dir / "gpulease.db").stat().st_mode & 0o777 == 0o600


def test_an_address_other_than_loopback_is_refused(tmp_path: Path) -> None:
    running = DaemonProcess(tmp_path / "d", "--no-worker", "--host", "0.0.0.0")
    ended = refused(running)
    assert ended.returncode == 1
    assert "not a loopback address" in ended.stderr
    assert "--tls-cert" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not running.data_dir.exists()


def test_a_second_daemon_on_the_same_directory_is_refused(api: DaemonProcess) -> None:
    second = DaemonProcess(api.data_dir)
    ended = refused(second)
    assert api.process is not None
    assert ended.returncode == 1
    assert f"pid {api.process.pid}" in ended.stderr
    assert "--data-dir" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert api.answers("/readyz"), "the first one was harmed"
    assert api.socket.is_socket()


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        second = DaemonProcess(tmp_path / "d", "--no-worker")
        second.port = taken.getsockname()[1]
        ended = refused(second)
    assert ended.returncode == 1
    assert f"Port {second.port}" in ended.stderr
    assert "--port" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_socket_left_by_a_killed_daemon_is_taken_over(tmp_path: Path) -> None:
    running = DaemonProcess(tmp_path / "d", "--no-worker").start()
    running.kill()
    assert running.socket.exists()
    try:
        assert running.start().answers("/readyz")
    finally:
        running.stop()
    assert not running.socket.exists()


def test_a_daemon_stops_at_once_although_clients_wait(tmp_path: Path) -> None:
    with daemon(tmp_path, "--no-worker") as running:
        lease = running.call("POST", "/v1/leases", {"count": 1}).json
        request = urllib.request.Request(f"{running.url}/v1/leases/{lease['id']}?wait_s=600")
        with socket.create_connection(("127.0.0.1", running.port)) as waiting:
            waiting.sendall(f"GET {request.selector} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            both = b"\ngpulease_http_requests_in_flight 2.0\n"  # the long poll, and the request for the metrics
            eventually(lambda: both in running.get("/metrics").content, 30)
            assert running.stop() == 0
            assert b"200 OK" in waiting.recv(4096), "the long poll was cut off and not answered"


def test_leases_outlive_a_restart(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "2", "--max-bypass", "0") as running:
        kept = running.call("POST", "/v1/leases", {"count": 1}).json
        waiting = running.call("POST", "/v1/leases", {"count": 2}).json
        running.stop()
        running.start()
        again = running.call("GET", f"/v1/leases/{kept['id']}").json
        times = dict.fromkeys(("expires_at", "held_for_s", "idle_s"))
        assert again | times == kept | times
        assert again["expires_at"] > kept["expires_at"], "no full ttl_s after the restart"
        assert running.call("GET", f"/v1/leases/{waiting['id']}").json["position"] == 1
        other = running.call("POST", "/v1/leases", {"count": 1, "queue": False})
        assert other.problem() == (409, "not_now")
        running.call("POST", f"/v1/leases/{kept['id']}/release", {"token": kept["token"]})
        granted = running.call("GET", f"/v1/leases/{waiting['id']}?wait_s=60&wait_while=queued").json
        assert granted["token"] > kept["token"]
        assert [event["seq"] for event in events(running)] == list(range(1, len(events(running)) + 1))


def test_a_daemon_that_can_open_no_more_files_shows_its_metrics(tmp_path: Path) -> None:
    with daemon(tmp_path, "--no-worker") as running:
        assert running.process is not None
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        soft, hard = resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (0, hard))
        answers = {}
        for path in ("/metrics", "/v1"):
            connection.request("GET", path)
            response = connection.getresponse()
            answers[path] = response.status, response.read()
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        connection.close()
    assert {path: status for path, (status, _) in answers.items()} == {"/metrics": 200, "/v1": 200}
    assert b"\ngpulease_ready 1.0\n" in answers["/metrics"][1]


def test_a_daemon_without_a_worker_is_ready_says_so_and_grants_nothing(tmp_path: Path) -> None:
    with daemon(tmp_path, "--no-worker") as running:
        ready = running.call("GET", "/readyz")
        assert (ready.status, ready.json["status"]) == (200, "ready"), "else a proxy keeps its workers away"
        assert "No worker has reported since this daemon started: nothing can be granted." in ready.json["detail"]
        assert "no worker has reported" in running.call("GET", "/").content.decode()
        assert "no worker has reported" in gpulease("status", GPULEASE_URL=running.url).stdout
        examined = gpulease("doctor", GPULEASE_URL=running.url).stdout
        assert "No worker has reported since this daemon started: nothing can be granted." in examined
        assert "It answers and can grant" not in examined
        answer = running.call("POST", "/v1/leases", {"count": 1})
        assert (answer.status, answer.json["state"]) == (202, "queued")
        assert running.call("POST", "/v1/leases", {"count": 1, "queue": False}).problem() == (409, "not_now")


def test_a_second_daemon_on_the_same_database_is_refused(api: DaemonProcess, tmp_path: Path) -> None:
    second = DaemonProcess(tmp_path / "d", "--no-worker", "--database-url", f"sqlite:///{api.data_dir / 'gpulease.db'}")
    ended = refused(second)
    assert ended.returncode == 1
    assert "--database-url" in ended.stderr


@pytest.mark.parametrize("url", ["mysql://localhost/x", "nonsense", "sqlite://", "sqlite:////no/such/directory/x.db"])
def test_a_database_that_cannot_be_used_is_refused(tmp_path: Path, url: str) -> None:
    running = DaemonProcess(tmp_path / "d", "--no-worker", "--database-url", url)
    ended = refused(running)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "Use sqlite" in ended.stderr or "--database-url" in ended.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can send requests as another user")
def test_users_with_the_same_idempotency_key_do_not_share_a_lease(api: DaemonProcess) -> None:
    key = f"trial-{time.monotonic_ns()}"
    mine = api.call("POST", "/v1/leases", {"count": 1}, **{"Idempotency-Key": key}).json
    curl = ["curl", "-s", "-XPOST", f"{api.url}/v1/leases", "-H", f"Idempotency-Key: {key}", "-d", '{"count": 1}']
    theirs = json.loads(
        subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", *curl], check=True, capture_output=True).stdout
    )
    assert theirs["id"] != mine["id"]
    assert theirs["holder"]["user"] == "nobody"


@pytest.mark.parametrize(
    ("peer", "asked", "owner"),
    [
        (PeerCredentials(uid=os.getuid(), pid=os.getpid(), local=True), None, os.getpid()),
        (PeerCredentials(uid=os.getuid(), pid=os.getpid(), local=True), os.getppid(), os.getppid()),
        (PeerCredentials(uid=os.getuid(), pid=os.getpid(), local=True), GONE, os.getpid()),
        (PeerCredentials(uid=54321, pid=os.getpid(), local=True), os.getppid(), os.getpid()),
        (PeerCredentials(uid=54321, local=True), os.getpid(), None),
        (PeerCredentials(local=True), os.getpid(), None),
        (PeerCredentials(), GONE, GONE),
    ],
    ids=["not named", "own", "gone", "another user's", "another user's over TCP", "unknown peer", "other host"],
)
def test_an_owner_is_accepted_only_if_it_can_be_the_callers(
    peer: PeerCredentials, asked: int | None, owner: int | None
) -> None:
    assert peer.check_owner(asked).pid == owner
