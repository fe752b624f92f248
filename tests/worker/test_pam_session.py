"""The PAM session of a job: PAM's own modules say who may run jobs, and with which limits."""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_protocol.node_protocol import RunState
from gpulease_worker.jobs import job_records
from gpulease_worker.jobs.job_settings import JobSettings
from tests.worker.build import kill, order, spec, until
from tests.worker.play import Worker, play
from tests.worker.strangers import ROOT, end_of, in_a_process, log_of, passable

USER = pwd.getpwnam("nobody")
SERVICE, CLONE_NEWNS = "gpulease-test", 0x20000
SETTINGS = JobSettings(pam_service=SERVICE)
LIMITS = """
{name} hard nofile 300
{name} soft nofile 200
{name} hard nproc 4000
{name} soft nproc 4000
{name} - priority 3
"""
SESSION = """
account required pam_permit.so
session required pam_limits.so conf={public}/limits.conf
session required pam_env.so conffile={public}/environment
session required pam_exec.so {public}/note
"""
SCRIPT = """
echo "$(ulimit -S -n) $(ulimit -H -n)"
grep "Max processes" /proc/self/limits
cut -d " " -f 19 /proc/self/stat
echo "${FROM_PAM-none}"
"""
NOTE = '"$PAM_TYPE $PAM_USER $PAM_TTY $FROM_PAM"'
OPENED_AND_CLOSED = [f"{what}_session {USER.pw_name} gpulease yes" for what in ("open", "close")]


@pytest.fixture
def public() -> Iterator[Path]:
    with passable() as directory:
        (directory / "limits.conf").write_text(LIMITS.format(name=USER.pw_name))
        (directory / "environment").write_text("FROM_PAM DEFAULT=yes\n")
        (directory / "note").write_text(
            f'#!/bin/sh\necho "$PAM_TYPE $PAM_USER $PAM_TTY $FROM_PAM" >> {directory}/notes\n'
        )
        (directory / "note").chmod(0o755)
        yield directory


def configure(public: Path, service: str) -> None:
    """Give this process, and what it starts, the file of a PAM service, in a mount namespace of their own."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    (public / "pam.d").mkdir()
    (public / "pam.d" / SERVICE).write_text(service.format(public=public))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", public / "pam.d", "/etc/pam.d"], check=True)


def run_a_job(public: str, service: str, *command: str) -> None:
    configure(Path(public), service)
    # More than the login has; what is not submitted is the login's.
    limits = {"nofile": (250, 5000)}
    report = end_of(Path(public), *command, uid=USER.pw_uid, limits=limits, settings=SETTINGS)
    print(json.dumps([report.exit_code, report.reason, log_of(report)]))


def notes(public: Path) -> list[str]:
    """What the session's module was called for."""
    return (public / "notes").read_text().splitlines() if (public / "notes").exists() else []


def test_a_job_has_no_more_than_its_users_login(public: Path) -> None:
    if not ROOT:  # a worker of an ordinary user asks PAM nothing
        assert end_of(public, "true", uid=os.getuid(), settings=SETTINGS).exit_code == 0
        return
    code, reason, said = json.loads(in_a_process(run_a_job, str(public), SESSION, "sh", "-c", SCRIPT))
    assert (code, reason) == (0, None)
    files, processes, nice, environment = said.splitlines()
    assert files == "250 300"
    assert processes.split()[2:4] == ["4000", "4000"]
    assert nice == "3"
    assert environment == "none"
    until(lambda: notes(public) == OPENED_AND_CLOSED, "the session is closed")


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        ("account required pam_deny.so", "pam_acct_mgmt): Authentication failure."),
        ("account required pam_permit.so\nsession required pam_deny.so", "pam_open_session): Cannot make/remove an"),
    ],
    ids=["account", "session"],
)
def test_a_user_whom_pam_refuses_gets_no_job(public: Path, service: str, reason: str) -> None:
    if not ROOT:
        return
    code, said, _ = json.loads(in_a_process(run_a_job, str(public), service, "true"))
    assert code is None
    assert said.startswith(f"PAM refuses {USER.pw_name} (service {SERVICE}, {reason}")


def kill_a_supervisor(public: str) -> None:
    configure(Path(public), SESSION)
    job = order("j", spec("sleep", "600"), uid=USER.pw_uid, gid=USER.pw_gid)

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        start = job_records.read(Path(public) / "jobs" / "j", job_records.START, job_records.StartRecord)
        assert start is not None
        kill(start.supervisor.pid)
        await worker.end_of(job)

    play(Path(public), story, settings=SETTINGS)


def test_a_session_is_closed_although_the_supervisor_was_killed(public: Path) -> None:
    if not ROOT:
        return
    in_a_process(kill_a_supervisor, str(public))
    until(lambda: notes(public) == OPENED_AND_CLOSED, "the session is closed")


def stop_a_job_that_waits_for_pam(public: str) -> None:
    configure(Path(public), SESSION)
    job = order("j", spec("true"), uid=USER.pw_uid, gid=USER.pw_gid)

    async def story(worker: Worker) -> None:
        worker.jobs.reconcile([job])
        until((Path(public) / "hangs").exists, "PAM hangs")
        stopped = order("j", job.spec, lease=job.lease_id, uid=USER.pw_uid, gid=USER.pw_gid, stop=True, grace_s=1.0)
        report = await worker.end_of(stopped)
        assert report.reason == "It was stopped before it started."

    play(Path(public), story, settings=SETTINGS)


def test_a_module_that_hangs_keeps_only_its_own_job(public: Path) -> None:
    if not ROOT:
        return
    (public / "note").write_text(f"#!/bin/sh\necho $$ > {public}/hangs\nexec sleep 600\n")
    in_a_process(stop_a_job_that_waits_for_pam, str(public))
    os.kill(int((public / "hangs").read_text()), signal.SIGKILL)
