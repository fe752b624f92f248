"""What eve can do to the files of the daemon, of its worker and of a job of ada: all of them, as they are on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.attack.attacked import Attacked
from tests.attack.host import DATA_DIR, UIDS, python

pytestmark = pytest.mark.slow

ATTEMPTS = """
import json, os, stat, sys
done = {}
def tried(path, what, attempt):
    try:
        attempt()
    except OSError:
        return
    done.setdefault(path, []).append(what)
def read(path):
    with open(path, "rb") as file:
        if not file.read(1):
            raise OSError("it says nothing")
def planted(path):
    os.symlink("/etc/passwd", path + "/planted-by-eve")
for path in json.load(open(sys.argv[1])):
    directory = os.path.isdir(path)
    tried(path, "list" if directory else "read", lambda: os.listdir(path) if directory else read(path))
    tried(path, "write", lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)))
    tried(path, "chmod", lambda: os.chmod(path, 0o777))
    tried(path, "rename", lambda: os.rename(path, path + "-by-eve"))
    tried(path, "remove", lambda: os.rmdir(path) if directory else os.unlink(path))
    if directory:
        tried(path, "plant", lambda: planted(path))
print(json.dumps(done))
"""


def owner(path: Path) -> int | None:
    """Uid of a file's owner; None where it is gone, as a temporary one that was renamed."""
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return None


def test_eve_can_read_write_and_replace_no_file_but_those_of_eves_own_jobs(attacked: Attacked) -> None:
    script = "echo canary-in-the-log; echo canary > in-the-directory; sleep 1000"
    ada = attacked.running_job("ada", "sh", "-c", script)
    attacked.completed_job("ada", "sh", "-c", "echo canary-in-a-log-that-has-ended")
    eve = attacked.running_job("eve", "sh", "-c", script)
    every = [attacked.host.data, *attacked.host.data.rglob("*")]
    found = {path: uid for path in every if (uid := owner(path)) is not None}
    assert {ada["id"], eve["id"]} <= {path.name for path in found}
    assert len(found) > 20
    foreign = [path for path, uid in found.items() if uid != UIDS["eve"]]
    assert len(foreign) < len(found), "eve's own files were not found"
    asked = attacked.host.directory / "paths.json"
    asked.write_text(json.dumps([str(path) for path in foreign]))
    code, printed = attacked.host.completed("eve", *python(ATTEMPTS, str(asked)))
    assert code == 0, printed
    assert json.loads(printed) == {}
    assert not [path for path in attacked.host.data.rglob("*") if "by-eve" in path.name]


def test_a_link_that_eve_plants_is_not_followed_by_the_reader_of_logs(attacked: Attacked) -> None:
    """The log of eve's own job is a link to that of ada, to a file of root, and a pipe that no one fills."""
    ada, _ = attacked.completed_job("ada", "echo", "canary-in-the-log-of-ada")
    secret = attacked.host.directory / "secret-of-root"
    secret.write_text("canary-of-root")
    secret.chmod(0o600)
    for target in (f"{DATA_DIR}/worker/jobs/{ada['id']}/logs/launcher.log", str(secret), None):
        plant = f"ln -s {target}" if target else "mkfifo"
        job, _ = attacked.completed_job(
            "eve", "sh", "-c", f"cd ../logs; rm launcher.log; {plant} launcher.log; echo done"
        )
        for query in ("", "?rank=launcher", "?tail=5"):
            answer = attacked.call("eve", "GET", f"/v1/jobs/{job['id']}/logs{query}")
            assert b"canary" not in answer.content
    # It does not keep the logs of others from being read.
    assert attacked.daemon.job_log(ada["id"]) == "canary-in-the-log-of-ada\n"


def test_the_directory_of_the_daemon_is_closed_to_listing(attacked: Attacked) -> None:
    assert os.stat(attacked.host.data).st_mode & 0o077 == 0o011
    assert Path(attacked.host.socket).stat().st_uid == 0
