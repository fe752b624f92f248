"""What a job starts with: nothing of what its worker was given by a service, a login or `nohup`."""

from __future__ import annotations

import ctypes
import os
import pty
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpulease_worker.jobs import inherited_state
from gpulease_worker.jobs.job_settings import JobSettings
from tests.worker.strangers import ROOT, STRANGER, end_of, in_a_process, log_of, passable

UID = STRANGER if ROOT else os.getuid()
CAP_NET_ADMIN, CAP_AUDIT_CONTROL = 12, 30
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2
NO_SETUID_FIXUP = 1 << 2
OF_THE_C_LIBRARY = 0b11 << 31
"""Signals 32 and 33, which no program can send or handle; posix_spawn(3) ignores them."""
BEST_EFFORT_7 = 2 << 13 | 7
SCRIPT = """
grep -E '^(Cap(Inh|Prm|Eff|Amb)|SigBlk|SigIgn|NoNewPrivs)' /proc/self/status
echo "umask $(umask)"
echo "core $(ulimit -S -c)"
echo "terminal $(cut -d ' ' -f 7 /proc/self/stat)"
echo "nice $(cut -d ' ' -f 19 /proc/self/stat)"
echo "policy $(cut -d ' ' -f 41 /proc/self/stat)"
echo "io $(ionice -p $$ | cut -d : -f 1)"
echo "oom $(cat /proc/self/oom_score_adj)"
echo "processors $(nproc)"
echo "login $(cat /proc/self/loginuid 2>/dev/null)"
echo "secret $SECRET"
echo "$(setpriv --dump | grep Securebits)"
"""


@pytest.fixture
def public() -> Iterator[Path]:
    with passable() as directory:
        yield directory


def look(public: str, uid: int) -> None:
    """Print what a job sees whose worker has everything that a job should not have."""
    library = ctypes.CDLL(None)
    os.setsid()
    terminal = os.ttyname(pty.openpty()[1])
    os.close(os.open(terminal, os.O_RDWR))  # is the controlling terminal from here on
    os.umask(0)
    os.environ["SECRET"] = "of the worker"
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    if ROOT:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(5)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        library.syscall(inherited_state.IOPRIO_SET[os.uname().machine], 1, 0, BEST_EFFORT_7)
        inherited_state.OOM_SCORE.write_text("300")
        with suppress(OSError):
            inherited_state.LOGIN_UID.write_text("4242")
        # As with AmbientCapabilities= and SecureBits= of a unit.
        header, sets = (ctypes.c_uint32 * 2)(inherited_state.CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        library.capget(header, sets)
        sets[2] = 1 << CAP_NET_ADMIN
        assert library.capset(header, sets) == 0
        assert library.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_NET_ADMIN, 0, 0) == 0
        assert library.prctl(inherited_state.PR_SET_SECUREBITS, NO_SETUID_FIXUP, 0, 0, 0) == 0
    print(log_of(end_of(Path(public), "sh", "-c", SCRIPT, uid=uid)), end="")


def test_a_job_inherits_nothing_that_its_worker_was_given(public: Path) -> None:
    said = in_a_process(look, str(public), UID).replace(":\t", " ").splitlines()
    seen = {name: value for name, _, value in (line.partition(" ") for line in said)}
    seen["SigIgn"] = f"{int(seen['SigIgn'], 16) & ~OF_THE_C_LIBRARY:016x}"
    nothing = "0" * 16
    expected = {name: nothing for name in ("CapInh", "CapPrm", "CapEff", "CapAmb", "SigBlk", "SigIgn")}
    expected |= {"NoNewPrivs": "0", "terminal": "0", "secret": ""}
    if ROOT:
        processors = len(os.sched_getaffinity(0))
        expected |= {"umask": "0022", "core": "0", "nice": "0", "policy": "0", "io": "none", "oom": "0"}
        expected["Securebits:"] = "[none]"
        expected["processors"] = str(processors)
        if has_capability(CAP_AUDIT_CONTROL) and inherited_state.LOGIN_UID.exists():
            expected["login"] = str(UID)
    assert {name: seen[name] for name in expected} == expected


def has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> number & 1)


@pytest.mark.parametrize("no_new_privs", [False, True])
def test_programs_of_a_job_gain_no_privileges_if_the_worker_says_so(public: Path, no_new_privs: bool) -> None:
    settings = JobSettings(no_new_privs=no_new_privs)
    report = end_of(public, "grep", "NoNewPrivs", "/proc/self/status", uid=UID, settings=settings)
    assert log_of(report).split()[1] == ("1" if no_new_privs else "0")
