"""What a job of eve has of root, of the daemon and of a job of ada, who are all on the same host."""

from __future__ import annotations

import pytest

from tests.attack.attacked import Attacked
from tests.attack.conftest import CANARY_OF_ROOT, JOB_PIDS, SECRET_KEY
from tests.attack.host import UIDS, python
from tests.attack.kernel_keys import KEYS
from tests.daemon import eventually

pytestmark = pytest.mark.slow

KEEP = f"""
{KEYS}
import time
print(add(sys.argv[1].encode(), b"SECRET") >= 0, flush=True)
time.sleep(1000)
"""
FORKS = """
import os, sys, time
for number in range(int(sys.argv[1])):
    try:
        pid = os.fork()
    except BlockingIOError:
        print("refused", flush=True)
        break
    if pid == 0:
        time.sleep(1000)
print("forked", number, flush=True)
"""


def test_a_job_finds_no_key_of_root_who_started_the_daemon(attacked: Attacked) -> None:
    job, printed = attacked.completed_job("eve", *python(f"{KEYS}\nprint(take(b'{SECRET_KEY}'))"))
    assert (job["state"], printed) == ("succeeded", "no key\n")


def test_jobs_of_two_users_share_no_keyring(attacked: Attacked) -> None:
    """Each leaves a key in its session keyring, as kinit does, and looks for the other's."""
    kept = {user: attacked.running_job(user, *python(KEEP, f"key-of-{user}")) for user in ("ada", "eve")}
    for user, job in kept.items():
        eventually(lambda job=job: attacked.daemon.job_log(job["id"]) != "", 60)  # type: ignore[misc]
        assert attacked.daemon.job_log(job["id"]) == "True\n", f"the job of {user} cannot keep a key of its own"
    for user, other in (("eve", "ada"), ("ada", "eve")):
        _, printed = attacked.completed_job(user, *python(f"{KEYS}\nprint(take(b'key-of-{other}'))"))
        assert printed == "no key\n", f"{user} has a key of {other}"


def test_a_job_that_forks_without_end_has_a_limit(attacked: Attacked) -> None:
    job, printed = attacked.completed_job("eve", *python(FORKS, str(5 * JOB_PIDS)))
    assert "refused" in printed, "one job may have any number of processes"
    assert job["state"] == "succeeded"
    _, printed = attacked.completed_job("ada", "echo", "runs")
    assert printed == "runs\n"


def test_a_job_has_nothing_of_the_daemons_environment_groups_or_descriptors(attacked: Attacked) -> None:
    script = "env; id -u; id -G; ls -l /proc/self/fd; cat /proc/self/status"
    _, printed = attacked.completed_job("eve", "sh", "-c", script)
    assert CANARY_OF_ROOT not in printed
    lines = printed.splitlines()
    assert str(UIDS["eve"]) in lines
    assert [line.split()[1] for line in lines if line.startswith("CapEff")] == ["0" * 16]
    assert [line.split()[1:] for line in lines if line.startswith("Groups:")] in ([[]], [[str(UIDS["eve"])]])
    assert not [line for line in lines if "socket:" in line], "a job has a socket of root"


def test_a_url_that_a_job_of_eve_notifies_is_called_as_eve(attacked: Attacked) -> None:
    """Not as root, who starts the job: the URL is the daemon's own, where only an administrator may do this."""
    node = attacked.daemon.get("/v1/nodes").json["items"][0]["name"]
    job, _ = attacked.completed_job("eve", "true", notify=f"http://127.0.0.1:8750/v1/nodes/{node}/drain")
    (log,) = attacked.host.data.rglob(f"jobs/{job['id']}/logs/notify.log")
    eventually(lambda: "it answered 403" in log.read_text(), 60, log.read_text)
    assert attacked.daemon.get(f"/v1/nodes/{node}").json["mode"] == "active"
