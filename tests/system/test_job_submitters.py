"""A root daemon and another user's client: over the Unix socket the job belongs to that user, and runs as that user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, daemon, eventually

USER, GROUP = 54321, 54322
ROOT = os.geteuid() == 0
SUBMIT = """
import json, os, socket, sys
path, body, uid, gid = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3]), int(sys.argv[4])
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
head = ["POST /v1/jobs HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}", "", ""]
connection.sendall("\\r\\n".join(head).encode() + body)
answer = b""
while part := connection.recv(65536):
    answer += part
sys.stdout.write(answer.partition(b"\\r\\n\\r\\n")[2].decode())
"""
"""What a user runs: it becomes that user before it connects, as the kernel tells the daemon who connected."""


@pytest.fixture
def running() -> Iterator[DaemonProcess]:
    """A daemon whose directory and socket other users reach."""
    place = Path(tempfile.mkdtemp(prefix="gpulease-submitters-"))
    place.chmod(0o711)
    try:
        with daemon(place, "--simulate", "2") as started:
            started.socket.chmod(0o666)
            yield started
    finally:
        shutil.rmtree(place)


def test_a_job_over_the_socket_runs_as_the_user_who_connected(running: DaemonProcess) -> None:
    uid, gid = (USER, GROUP) if ROOT else (os.geteuid(), os.getegid())
    command = ["sh", "-c", "id -u; id -g; id -G; pwd; grep CapEff /proc/self/status"]
    body = json.dumps({"command": command, "launcher": "plain"})
    said = subprocess.run(
        [sys.executable, "-I", "-c", SUBMIT, str(running.socket), body, str(uid), str(gid)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",
    )
    job = json.loads(said.stdout)
    path = f"/v1/jobs/{job['id']}"
    eventually(lambda: running.call("GET", path).json["state"] in ("succeeded", "failed"), 60, running.story)
    assert running.call("GET", path).json["reason"] is None
    printed = running.call("GET", f"{path}/logs").content.decode().splitlines()
    if ROOT:
        assert printed[:3] == [str(USER), str(GROUP), str(GROUP)]
        assert printed[3].endswith(f"/jobs/{job['id']}/work")
        assert printed[4].split() == ["CapEff:", "0" * 16]
        holder = running.call("GET", f"/v1/leases/{job['lease_id']}").json["holder"]
        assert holder["user"] == str(USER)
    else:
        assert printed[:2] == [str(uid), str(gid)]
