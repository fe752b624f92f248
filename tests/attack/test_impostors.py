"""eve listens where a client or a worker expects the daemon: it must neither be told a token nor obeyed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.attack.host import UIDS, UUIDS, Host, HostDaemon, Program, python
from tests.daemon import START_S, eventually

pytestmark = pytest.mark.slow

SECRET = "token-0000000000000000.canary-of-ada"
OF_EVE = "LD_PRELOAD=/home/eve/library.so"
"""With this variable in it, a program of ada's is eve's."""
ROOTS_FILE = "made-by-root-for-eve"
DEFAULT, V4, V6, LOCALHOST = "", "http://127.0.0.1:8750", "http://[::1]:8750", "http://localhost:8750"
HOLDS_SOCKETS = """
import os, socket, sys, time
start, *command = sys.argv[1:]
port, path = socket.socket(), socket.socket(socket.AF_UNIX)
port.bind(("127.0.0.1", 8750))
path.bind("/var/lib/gpulease/gpulease.sock")
os.chmod("/var/lib/gpulease/gpulease.sock", 0o666)
for one in (port, path):
    one.listen(128)
print("holds", flush=True)
while not os.path.exists(start):
    time.sleep(0.05)
pid = os.fork()
if pid == 0:
    for number, one in ((13, port), (14, path)):
        os.dup2(one.fileno(), number)
    for number in (13, 14):
        os.dup2(number, number - 10)
        os.close(number)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}
    os.execv(command[0], command)
print("ended", os.waitpid(pid, 0)[1], flush=True)
"""
"""systemd with a socket unit: it holds port and socket (sd_listen_fds(3)) whether or not the service runs."""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host on which a daemon runs only where a test starts it."""
    with Host() as made:
        made.data.chmod(0o711)  # as a daemon has left it
        yield made


@contextmanager
def impostor(host: Host, *addresses: str) -> Iterator[Program]:
    """eve's daemon at these addresses: it grants a lease, and has a job for a worker."""
    lease = {
        "id": "lease-of-eve", "state": "active", "holder": {"user": "ada"}, "demand": {"count": 1}, "token": 1,
        "gpus": [{"uuid": UUIDS[0], "node": "n", "index": 0}], "ttl_s": 300.0, "liveness": "heartbeat",
        "created_at": "2026-01-01T00:00:00+00:00", "granted_at": "2026-01-01T00:00:00+00:00",
        "expires_at": "2099-01-01T00:00:00+00:00", "items": [], "next": None,
        "env": dict([OF_EVE.split("=")], CUDA_VISIBLE_DEVICES=UUIDS[0], PATH="/home/eve/bin:/usr/bin:/bin"),
    }  # fmt: skip
    job = {
        "job_id": "job-of-eve", "lease_id": "lease-of-eve", "uid": 0, "gid": 0, "gpus": [UUIDS[0]], "env": {},
        "spec": {"command": ["touch", str(host.directory / "output" / ROOTS_FILE)], "gpus": 1, "launcher": "plain"},
    }  # fmt: skip
    desired: dict[str, Any] = {
        "ticket": 1,
        "jobs": [job],
        "leases": [{"id": "lease-of-eve", "state": "active", "gpus": []}],
    }
    answers = []
    for name, answer in (("lease", lease), ("desired", desired)):
        answers.append(host.home("eve") / f"{name}.json")
        answers[-1].write_text(json.dumps(answer))
        answers[-1].chmod(0o644)
    source = Path(__file__).with_name("impostor.py").read_text()
    with host.running("eve", *python(source, *addresses, *map(str, answers))) as eve:
        eventually(lambda: len(eve.output().splitlines()) >= len(addresses), 60, eve.output)
        yield eve


@pytest.mark.parametrize(
    ("url", "squatted"),
    [
        (DEFAULT, "127.0.0.1:8750"),
        (V4, "127.0.0.1:8750"),
        (V6, "[::1]:8750"),
        (LOCALHOST, "[::1]:8750"),
        ("unix", "unix"),
    ],
    ids=["no address", "127.0.0.1", "[::1]", "localhost", "socket"],
)
def test_a_client_believes_no_listener_of_another_user(host: Host, url: str, squatted: str) -> None:
    path = host.home("eve") / "gpulease.sock"
    host.home("eve").chmod(0o711)
    path.unlink(missing_ok=True)
    address = {"unix": str(path)}.get(squatted, squatted)
    told = {"GPULEASE_URL": {"unix": f"unix://{path}"}.get(url, url)} if url else {}
    with impostor(host, address) as eve:
        eve.wait_for(f"listens {address}")
        if squatted == "unix":
            host.completed("eve", "chmod", "666", address)
        _, printed = host.gpulease("ada", "run", "-n", "1", "--", "env", GPULEASE_TOKEN=SECRET, **told)
        assert SECRET not in eve.output(), "eve has the token of ada"
        assert OF_EVE not in printed, "ada runs what eve says"


@pytest.mark.parametrize("url", [V4, LOCALHOST])
def test_a_worker_of_root_obeys_no_listener_of_another_user(host: Host, url: str) -> None:
    ran = host.directory / "output" / ROOTS_FILE
    words = ["worker", "--url", url, "--simulate", "1", "--data-dir", str(host.directory / "worker" / str(len(url)))]
    program = (*host.program, *words)
    with (
        impostor(host, "127.0.0.1:8750", "[::1]:8750") as eve,
        host.running("root", *program, GPULEASE_TOKEN=SECRET) as worker,
    ):

        def decided() -> bool:
            named = "eve" in worker.output() or str(UIDS["eve"]) in worker.output()
            refused = named or eve.output().count("connected") > 3
            return ran.exists() or SECRET in eve.output() or refused or not worker.alive()

        eventually(decided, 60, lambda: f"{worker.output()}\n{eve.output()}")
        assert SECRET not in eve.output(), "eve has the token of a worker"
        eventually(lambda: ran.exists() or "asked" not in eve.output(), 10, lambda: "a worker asks eve what to do")
        assert not ran.exists(), "root ran a job of eve"


@pytest.fixture
def daemon(host: Host) -> Iterator[HostDaemon]:
    """The daemon of this host, started."""
    made = host.daemon()
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_beside_a_running_daemon_eve_is_no_daemon_for_localhost(host: Host, daemon: HostDaemon) -> None:
    with impostor(host, "[::1]:8750") as eve:
        _, printed = host.gpulease("ada", "run", "-n", "1", "--", "env", GPULEASE_TOKEN=SECRET, GPULEASE_URL=LOCALHOST)
        assert (SECRET in eve.output(), OF_EVE in printed) == (False, False)
    code, printed = host.gpulease("ada", "run", "-n", "1", "--", "env")
    assert code == 0, printed
    assert f"CUDA_VISIBLE_DEVICES={UUIDS[0]}" in printed
    assert daemon.get("/v1/leases").status == 200


def test_a_client_finds_no_one_while_the_daemon_restarts(host: Host, daemon: HostDaemon) -> None:
    """The socket is gone meanwhile, and eve has the port."""
    daemon.stop()
    with impostor(host, "127.0.0.1:8750", "[::1]:8750") as eve:
        eve.wait_for("listens 127.0.0.1:8750")
        _, printed = host.gpulease("ada", "run", "-n", "1", "--", "env", GPULEASE_TOKEN=SECRET)
        assert (SECRET in eve.output(), OF_EVE in printed) == (False, False)
    daemon.start()


def test_a_restart_under_systemd_leaves_eve_no_gap(host: Host) -> None:
    """The port is taken whether or not the daemon runs, and the daemon serves on what systemd holds."""
    made, begin = host.daemon(), host.directory / "output" / "start"
    with host.running("root", *python(HOLDS_SOCKETS, str(begin), *made.service), **made.environment) as system:
        system.wait_for("holds")
        with impostor(host, "127.0.0.1:8750", "[::1]:8750") as eve:
            assert "refused 127.0.0.1:8750" in eve.output()
        begin.touch()
        eventually(lambda: ready(made, system), START_S, system.output)
        code, printed = host.gpulease("ada", "status", GPULEASE_URL=V4)
        assert code == 0, printed
    host.end_all()


def ready(made: HostDaemon, system: Program) -> bool:
    """True when a daemon answers on the socket that another process has made."""
    assert "ended" not in system.output(), f"the daemon does not serve on the sockets of systemd: {system.output()}"
    try:
        return made.call("GET", "/readyz").status == 200
    except OSError:
        return False
