"""Jobs whose processes hang in the kernel, where no signal reaches them: in a file system that answers no one.

Such a job is stopping, with the reason, for as long as the process lives; its GPU is granted to no one meanwhile, and
nothing else hangs: not the daemon, not its worker, and not those that come after them.
"""

from __future__ import annotations

import http.client
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from gpulease_worker.jobs import job_records
from gpulease_worker.processes import lease_claims
from tests.daemon import DaemonProcess, daemon, events, eventually
from tests.hanging_filesystem import Hanging, hanging, in_time
from tests.http_as_user import OWNER, call
from tests.worker.strangers import passable

pytestmark = pytest.mark.slow

READ = {"x86_64": "0", "aarch64": "63"}[platform.machine()]
"""The number of read(2). Opening a file asks the file system, too, and is answered: only a read hangs."""
READS = "import sys; print('up', flush=True); open(sys.argv[1], 'rb', 0).read()"
READS_IN_A_THREAD = (
    f"import sys, threading, time\nthreading.Thread(target=lambda: exec({READS!r})).start()\ntime.sleep(600)"
)
LEAVES_A_READER = (
    f"import subprocess, sys, time\nreader = subprocess.Popen([sys.executable, '-c', {READS!r}, sys.argv[1]])\n"
    f"while open(f'/proc/{{reader.pid}}/wchan').read() != 'request_wait_answer'"
    f" or open(f'/proc/{{reader.pid}}/syscall').read().split()[0] != '{READ}': time.sleep(0.01)\nsys.exit(4)"
)

LOCKS_ITS_MEMORY = """
import ctypes, mmap, os, sys, threading, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
place = libc.mmap(None, 4096, 3, mmap.MAP_SHARED, os.open(sys.argv[1], os.O_RDWR), 0)
ctypes.memset(place, 66, 10)
# What was changed is written before another mapping takes its place, with the lock of the memory held.
MAP_FIXED = 0x10
threading.Thread(target=libc.mmap, args=(place, 4096, 3, MAP_FIXED | 0x22, -1, 0)).start()
time.sleep(0.5)
libc.mmap(None, 4096, 3, 0x22, -1, 0)
"""

HANGS_IN_ITS_LOG = """
import ctypes, mmap, os, sys
print("up", flush=True)
page = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 4096, mmap.MAP_PRIVATE)
# The lock of the log file is held while what is to be written to it is fetched.
ctypes.CDLL(None).write(1, ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), 4096)
"""


@pytest.fixture
def system(tmp_path: Path) -> Iterator[Hanging]:
    with hanging(tmp_path / "fuse") as mounted:
        yield mounted


@pytest.fixture
def running(tmp_path: Path, system: Hanging) -> Iterator[DaemonProcess]:
    with daemon(tmp_path, "--simulate", "1") as started:
        yield started
        system.abort()  # before the daemon ends, so that nothing of the jobs outlives the test
        eventually(lambda: started.gpu_states() == ["free"], 60, started.story)


def job(running: DaemonProcess, job_id: str) -> dict[str, Any]:
    begun = time.monotonic()
    found: dict[str, Any] = running.call("GET", f"/v1/jobs/{job_id}").json
    assert time.monotonic() - begun < 30, "the daemon hangs"
    return found


def hung(lease_id: str) -> set[int]:
    """Processes of a lease of which a thread waits in the kernel for the answer to a read."""
    found = set()
    for process in lease_claims.claimants({lease_id: None}):
        with suppress(OSError):  # it ends at this moment
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                reads = (task / "syscall").read_text().split()[0] == READ
                if reads and (task / "wchan").read_text() == "request_wait_answer":
                    found.add(process.pid)
    return found


def is_beyond_signals(pid: int) -> bool:
    """True when a process was sent SIGKILL, and a thread of it sleeps on all the same, uninterruptibly."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = (task / "stat").read_text()
        if status[status.rindex(")") + 2] == "D":
            return True
    return False


def quarantined(running: DaemonProcess, job_id: str, waiting: str, pid: int) -> None:
    """The job stops, and says why; its GPU is its own, and who waits for it is told why."""
    shown = job(running, job_id)
    assert (shown["state"], shown["ended_at"]) == ("stopping", None), shown
    assert f"SIGKILL does not end: {pid} (hangs in the kernel, in request_wait_answer)" in shown["reason"]
    # A busy machine may be late with a reading, and the GPU is unknown then, to everyone.
    eventually(lambda: running.gpu_states() != ["unknown"], 60, running.story)
    (gpu,) = running.call("GET", "/v1/gpus").json["items"]
    assert (gpu["state"], gpu["lease_id"]) == ("leased", shown["lease_id"])
    assert f"SIGKILL does not end: {pid}" in gpu["reason"]
    assert job(running, waiting)["state"] == "queued"
    explained = f"/v1/leases/{job(running, waiting)['lease_id']}/explain"
    eventually(lambda: "is unknown" not in running.call("GET", explained).json["sentence"], 60, running.story)
    why = running.call("GET", explained).json
    assert why["verdict"] == "not_now"
    assert f", {job_id}) and its job is stopping: " in why["sentence"]
    assert f"{pid} (hangs in the kernel" in why["sentence"]


def says_why(running: DaemonProcess, job_id: str) -> bool:
    return "SIGKILL does not end" in (job(running, job_id)["reason"] or "")


@pytest.mark.parametrize("script", [READS, READS_IN_A_THREAD], ids=["its only thread", "one thread of two"])
def test_a_job_that_hangs_in_the_kernel_stops_until_it_has_ended_and_keeps_its_gpu(
    running: DaemonProcess, system: Hanging, script: str
) -> None:
    job_id = running.submit(sys.executable, "-c", script, str(system.file))
    lease_id = job(running, job_id)["lease_id"]
    eventually(lambda: bool(hung(lease_id)), 60, running.story)
    (pid,) = hung(lease_id)
    waiting = running.submit("true")
    running.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 0.2})
    eventually(lambda: is_beyond_signals(pid), 60)
    eventually(lambda: says_why(running, job_id), 60, running.story)
    quarantined(running, job_id, waiting, pid)
    running.kill()
    assert is_beyond_signals(pid)
    running.start()
    eventually(lambda: says_why(running, job_id), 60, running.story)
    quarantined(running, job_id, waiting, pid)
    assert is_beyond_signals(pid)
    system.abort()
    eventually(lambda: job(running, waiting)["state"] == "succeeded", 60, running.story)
    done = job(running, job_id)
    assert (done["state"], done["reason"], done["exit_code"]) == ("cancelled", "cancelled", 143)
    assert not lease_claims.claimants({lease_id: None})
    kinds = [event["kind"] for event in events(running) if event["job_id"] == job_id]
    assert (kinds.count("job.stuck"), kinds.count("job.ended")) == (1, 1)


def test_a_job_whose_directory_does_not_answer_can_be_cancelled_before_it_has_begun(
    running: DaemonProcess, system: Hanging
) -> None:
    job_id = running.submit("true", working_directory=str(system.nowhere))
    eventually(lambda: hangs_before_it_has_begun(running, job_id), 60, running.story)
    waiting = running.submit("true")
    running.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 0.2})
    eventually(lambda: says_why(running, job_id), 60, running.story)
    assert job(running, job_id)["state"] == "stopping"
    assert job(running, waiting)["state"] == "queued"
    system.abort()
    eventually(lambda: job(running, waiting)["state"] == "succeeded", 60, running.story)
    assert (job(running, job_id)["state"], job(running, job_id)["started_at"]) == ("cancelled", None)


@pytest.mark.parametrize("whose", ["somebody's", "the job's"])
def test_who_hangs_with_the_lock_of_its_memory_hangs_no_one_who_looks_for_processes(
    running: DaemonProcess, system: Hanging, whose: str
) -> None:
    command = [sys.executable, "-c", LOCKS_ITS_MEMORY, str(system.written)]
    with subprocess.Popen(command) if whose == "somebody's" else nullcontext() as stranger:
        try:
            if stranger is None:
                job_id = running.submit(*command)
                pid = launcher_of(running, job_id)
            else:
                pid = stranger.pid
            eventually(lambda: cannot_be_read(pid), 60)
            if stranger is None:
                running.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 0.2})
                eventually(lambda: says_why(running, job_id), 60, running.story)
                assert (job(running, job_id)["state"], running.gpu_states()) == ("stopping", ["leased"])
            else:
                job_id = running.submit("sh", "-c", "setsid sleep 600 & exit 3")
                eventually(lambda: job(running, job_id)["state"] == "failed", 60, running.story)
                eventually(lambda: running.gpu_states() == ["free"], 60, running.story)
            running.kill()
            running.start()
            waiting = running.submit("true")
            if stranger is None:
                eventually(lambda: running.gpu_states() == ["leased"], 60, running.story)
                assert job(running, waiting)["state"] == "queued"
                system.abort()
            eventually(lambda: job(running, waiting)["state"] == "succeeded", 60, running.story)
        finally:
            system.abort()
            if stranger is not None:
                stranger.kill()
    assert job(running, job_id)["state"] == ("cancelled" if stranger is None else "failed")


def start_of(running: DaemonProcess, job_id: str) -> job_records.StartRecord | None:
    directory = running.data_dir / "worker" / "jobs" / job_id
    return job_records.read(directory, job_records.START, job_records.StartRecord)


def hangs_before_it_has_begun(running: DaemonProcess, job_id: str) -> bool:
    """True once the child that becomes the job waits for its directory: a stop before that finds nothing to end."""
    start = start_of(running, job_id)
    if start is None:
        return False
    children = Path(f"/proc/{start.supervisor.pid}/task/{start.supervisor.pid}/children").read_text().split()
    return any(waits_for_an_answer(int(child)) for child in children)


def waits_for_an_answer(pid: int) -> bool:
    """True when a process waits in the kernel for its file system. False for one that ends at this moment."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text() == "request_wait_answer"
    return False


def launcher_of(running: DaemonProcess, job_id: str) -> int:
    def launched() -> bool:
        start = start_of(running, job_id)
        return start is not None and start.launcher is not None

    eventually(launched, 60, running.story)
    start = start_of(running, job_id)
    assert start is not None
    assert start.launcher is not None
    return start.launcher.pid


def cannot_be_read(pid: int) -> bool:
    """True when reading a process's environment hangs."""
    with subprocess.Popen(["cat", f"/proc/{pid}/environ"], stdout=subprocess.DEVNULL) as reader:
        try:
            reader.wait(5)
        except subprocess.TimeoutExpired:
            reader.kill()
            return True
    return False


def test_what_a_job_that_failed_has_left_in_the_kernel_keeps_its_gpu_and_not_its_verdict(
    running: DaemonProcess, system: Hanging
) -> None:
    job_id = running.submit(sys.executable, "-c", LEAVES_A_READER, str(system.file))
    waiting = running.submit("true")
    eventually(lambda: says_why(running, job_id), 60, running.story)
    (pid,) = hung(job(running, job_id)["lease_id"])
    quarantined(running, job_id, waiting, pid)
    system.abort()
    eventually(lambda: job(running, waiting)["state"] == "succeeded", 60, running.story)
    assert (job(running, job_id)["state"], job(running, job_id)["exit_code"]) == ("failed", 4)


def test_the_worker_keeps_watch_where_the_supervisor_of_such_a_job_is_killed(
    running: DaemonProcess, system: Hanging
) -> None:
    job_id = running.submit(sys.executable, "-c", READS, str(system.file))
    lease_id = job(running, job_id)["lease_id"]
    eventually(lambda: bool(hung(lease_id)), 60, running.story)
    (pid,) = hung(lease_id)
    waiting = running.submit("true")
    start = start_of(running, job_id)
    assert start is not None
    os.kill(start.supervisor.pid, signal.SIGKILL)
    eventually(lambda: says_why(running, job_id), 60, running.story)
    quarantined(running, job_id, waiting, pid)
    assert is_beyond_signals(pid)
    running.kill()
    running.start()
    eventually(lambda: says_why(running, job_id), 60, running.story)
    quarantined(running, job_id, waiting, pid)
    system.abort()
    eventually(lambda: job(running, waiting)["state"] == "succeeded", 60, running.story)
    assert job(running, job_id)["state"] == "failed"
    assert "supervisor died" in job(running, job_id)["reason"]


@pytest.fixture
def of_two_users(system: Hanging) -> Iterator[DaemonProcess]:
    """A daemon that other users than its own may have jobs with."""
    if os.geteuid() != 0:
        pytest.skip("only root runs jobs of two users")
    with passable() as place, daemon(place, "--simulate", "2") as running:
        try:
            yield running
        finally:
            system.abort()  # before the daemon ends, which has threads that hang


def hanging_log(running: DaemonProcess, system: Hanging) -> str:
    """A job of which no one can read the log."""
    job_id = running.submit(sys.executable, "-c", HANGS_IN_ITS_LOG, str(system.file))
    eventually(lambda: hung_in_write(job(running, job_id)["lease_id"]), 60, running.story)
    # The lock is held a moment after the process is seen to hang; until then the log can be read.
    eventually(lambda: call(running.port, "GET", f"/v1/jobs/{job_id}/logs").status == 503, 60, running.story)
    return job_id


def test_logs_that_hang_are_those_of_one_user_and_all_others_are_read(
    of_two_users: DaemonProcess, system: Hanging
) -> None:
    running, hanging_id = of_two_users, hanging_log(of_two_users, system)
    spoken = {"command": ["echo", "hello"], "launcher": "plain"}
    other_id = call(running.port, "POST", "/v1/jobs", spoken, uid=OWNER).json["id"]
    eventually(lambda: job(running, other_id)["state"] == "succeeded", 60, running.story)
    with ExitStack() as stack:
        readers = [http.client.HTTPConnection("127.0.0.1", running.port, timeout=60) for _ in range(40)]
        for reader in readers:
            stack.enter_context(closing(reader))
            reader.request("GET", f"/v1/jobs/{hanging_id}/logs")
        eventually(lambda: descriptors(running, hanging_id) > 1, 60, running.story)
        for _ in range(10):
            log = in_time(lambda: call(running.port, "GET", f"/v1/jobs/{other_id}/logs", uid=OWNER), 10)
            assert (log.status, log.content) == (200, b"hello\n")
        assert [reader.getresponse().status for reader in readers] == [503] * 40
    system.abort()
    eventually(lambda: call(running.port, "GET", f"/v1/jobs/{hanging_id}/logs").status == 200, 60, running.story)


def test_a_daemon_with_a_thread_that_hangs_can_be_stopped_and_the_next_one_serves(
    of_two_users: DaemonProcess, system: Hanging
) -> None:
    """The thread outlives the daemon; but the daemon has closed its sockets and the database before."""
    running, hanging_id = of_two_users, hanging_log(of_two_users, system)
    former = running.process
    assert former is not None
    former.send_signal(signal.SIGTERM)
    eventually(lambda: has_ended_but_for_threads(former.pid), 60, running.story)
    running.start()
    assert job(running, hanging_id)["state"] == "running"
    system.abort()
    former.wait(60)


def has_ended_but_for_threads(pid: int) -> bool:
    """True when the first thread of a process has ended; others may hang in the kernel."""
    status = Path(f"/proc/{pid}/stat").read_text()
    return status[status.rindex(")") + 2] == "Z"


def hung_in_write(lease_id: str) -> bool:
    """True when a process of a lease waits in the kernel for a page that it is to write to its log, file descriptor 1.

    To wait for the same file system with another call, as `open`, holds no lock of the log.
    """
    for process in lease_claims.claimants({lease_id: None}):
        with suppress(OSError):  # it ends at this moment
            call_of_it = Path(f"/proc/{process.pid}/syscall").read_text().split()
            if waits_for_an_answer(process.pid) and call_of_it[1:2] == ["0x1"]:
                return True
    return False


def descriptors(running: DaemonProcess, job_id: str) -> int:
    """How many files of a job's log directory the daemon has open."""
    assert running.process is not None
    logs, found = running.data_dir / "worker" / "jobs" / job_id / "logs", 0
    for file in Path(f"/proc/{running.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(file.readlink()).startswith(f"{logs}/")
    return found
