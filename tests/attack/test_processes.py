"""What eve can do to the processes of others, through signals and /proc: all of them, as they are found on the host."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.attack.attacked import Attacked
from tests.attack.host import python

pytestmark = pytest.mark.slow

ATTEMPTS = """
import ctypes, json, os, resource, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
def through_libc(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
PRIVATE = ("environ", "mem", "maps", "smaps", "auxv", "stack", "syscall", "io", "fd", "fdinfo", "map_files", "root",
           "cwd", "exe", "personality", "pagemap", "timers")
WRITTEN = ("mem", "oom_score_adj", "comm", "clear_refs", "coredump_filter", "autogroup", "timerslack_ns")
class Piece(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
HERE = ctypes.byref(Piece(4096, 1))
def change(pid, name):
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
    if name != "mem":
        os.write(descriptor, b"1")
def look(pid, name):
    path = f"/proc/{pid}/{name}"
    if os.path.islink(path):
        os.readlink(path)
    elif os.path.isdir(path):
        os.listdir(path)
    else:
        with open(path, "rb") as file:
            file.read(1)
def pidfd(pid):
    got = libc.syscall(438, os.pidfd_open(pid), 0, 0)
    if got < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
attempts = {
    "kill": lambda pid: os.kill(pid, 0),
    "stop": lambda pid: os.kill(pid, signal.SIGSTOP),
    "pidfd_send_signal": lambda pid: signal.pidfd_send_signal(os.pidfd_open(pid), 0),
    "pidfd_getfd": pidfd,
    "ptrace": lambda pid: through_libc("ptrace", 0x4206, pid, 0, 0),
    "prlimit": lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)),
    "setaffinity": lambda pid: os.sched_setaffinity(pid, {0}),
    "setpriority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "setscheduler": lambda pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
    "setpgid": lambda pid: os.setpgid(pid, 0),
    "process_vm_readv": lambda pid: through_libc("process_vm_readv", pid, HERE, 1, HERE, 1, 0),
}
attempts |= {f"read {name}": lambda pid, name=name: look(pid, name) for name in PRIVATE}
attempts |= {f"write {name}": lambda pid, name=name: change(pid, name) for name in WRITTEN}
done = {}
for pid in json.loads(sys.argv[1]):
    for what, attempt in attempts.items():
        try:
            attempt(pid)
        except OSError:
            continue
        done.setdefault(str(pid), []).append(what)
print(json.dumps([len(attempts), done]))
"""
"""Everything that a process may do to another through its pid; prints what was possible."""
CGROUPS = """
import json, os, sys
found, done = 0, []
def tried(what, attempt):
    try:
        attempt()
    except OSError:
        return
    done.append(what)
for place in sys.argv[1:]:
    names = os.listdir(place)
    found += "cgroup.procs" in names
    tried(f"mkdir {place}", lambda: os.mkdir(place + "/of-eve"))
    tried(f"enter {place}", lambda: open(place + "/cgroup.procs", "w").write("0"))
    for name in names:
        path = os.path.join(place, name)
        if not os.path.isdir(path):
            tried(f"write {path}", lambda: os.close(os.open(path, os.O_WRONLY)))
print(json.dumps([found, done]))
"""


def files_of(attacked: Attacked, name: str, *users: str) -> dict[int, str]:
    """A file of /proc of each process of users, by pid; without those that end before it is read."""
    found = {}
    for pid in (pid for user in users for pid in attacked.pids(user)):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = Path(f"/proc/{pid}/{name}").read_text()
    return found


def test_eve_can_neither_signal_stop_slow_trace_nor_read_a_process_of_others(attacked: Attacked) -> None:
    job = attacked.running_job("ada", "sh", "-c", "sleep 1000; true")
    commands = {pid: text.replace("\0", " ") for pid, text in files_of(attacked, "cmdline", "root", "ada").items()}
    for word in ("serve", "worker", "supervisor", "sleep 1000"):
        assert [line for line in commands.values() if word in line], f"{word} is not among {commands}"
    code, printed = attacked.host.completed("eve", *python(ATTEMPTS, json.dumps(list(commands))))
    assert code == 0, printed
    attempts, done = json.loads(printed)
    assert attempts > 30
    assert {commands[int(pid)]: what for pid, what in done.items()} == {}
    assert attacked.daemon.job(job["id"])["state"] == "running"


def test_the_attempts_are_possible_on_a_process_of_eves_own(attacked: Attacked) -> None:
    """Otherwise they would show nothing."""
    with attacked.host.running("eve", "sleep", "1000") as own:
        _, printed = attacked.host.completed("eve", *python(ATTEMPTS, json.dumps([own.pid])))
        _, done = json.loads(printed)
        assert {"kill", "prlimit", "setpriority", "read environ", "read fd", "write mem"} <= set(done[str(own.pid)])


def test_eve_changes_no_cgroup_in_which_others_run(attacked: Attacked) -> None:
    """Their files stop processes, end them, take their processor and memory, and let them in."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    places = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    if not places:
        pytest.skip("there is no cgroup2")
    attacked.running_job("ada")
    own = set(files_of(attacked, "cgroup", "ada", "root").values())
    names = {line.removeprefix("0::") for text in own for line in text.splitlines() if line.startswith("0::")}
    code, printed = attacked.host.completed("eve", *python(CGROUPS, *(places[0] + name for name in names)))
    assert code == 0, printed
    found, done = json.loads(printed)
    assert found >= len(names) > 0
    assert done == []


def test_no_command_line_of_a_program_of_root_has_a_secret(attacked: Attacked) -> None:
    """Command lines are public."""
    made = attacked.daemon.call("POST", "/v1/tokens", {"user": "ada"}).json["bearer"]
    attacked.running_job("ada", environment={"SECRET_OF_ADA": "canary-in-the-environment-of-a-job"})
    secrets = [made, "canary-in-the-environment", "SECRET_OF_ADA"]
    lines = list(files_of(attacked, "cmdline", "root").values())
    assert sys.executable in "".join(lines)
    assert [line for line in lines if any(secret in line for secret in secrets)] == []
