"""Supervisors that a fork server has started: as those that are started as programs, whatever happens to it."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import gpulease
import gpulease_protocol
import gpulease_worker
from gpulease_protocol.host.process_id import ProcessId, stat
from gpulease_protocol.node_protocol import RunState
from gpulease_worker.jobs import job_records, supervisor_start
from gpulease_worker.jobs.supervisor_start import StartedSupervisor, SupervisorStarter
from tests.worker.build import furnished, kill, living, order, spec, until
from tests.worker.play import DEADLINE_S, Worker, play, soon

LINES = re.compile(r"(Umask|[RG]?[ug]id|Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp|Sig(Blk|Ign|Cgt)|\w+_allowed_list)\b")


def starting(story: Callable[[SupervisorStarter], Awaitable[None]]) -> None:
    """Run a story with a starter whose fork server is ready, and end what it has started."""

    async def act() -> None:
        starter = SupervisorStarter()
        try:
            starter._prepare(supervisor_start.start_conditions.current(environment()), environment(), 4096)
            await soon(lambda: starter.is_ready, "the fork server is ready")
            await story(starter)
        finally:
            starter.close()

    def environment() -> dict[str, str]:
        return {
            name: value for name, value in os.environ.items() if name not in ("GPULEASE_LEASE_ID", "GPULEASE_TOKEN")
        }

    asyncio.run(act())


def server_of(starter: SupervisorStarter) -> ProcessId:
    assert starter._server is not None
    server = ProcessId.of(starter._server._pid)
    assert server is not None
    return server


def words_of(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    return []


def was_forked(started: StartedSupervisor) -> bool:
    status = stat(started.pid)
    assert status is not None
    return status.parent != os.getpid()


def ended(started: StartedSupervisor, deadline_s: float = DEADLINE_S) -> bool:
    """Whether a supervisor ends in time. Its pidfd is closed."""
    try:
        return bool(select.select([started.pidfd], [], [], deadline_s)[0])
    finally:
        os.close(started.pidfd)


def sleeping(directory: Path, name: str) -> Path:
    return furnished(directory / name, order(name, spec("sleep", "60")))


@contextmanager
def ending(*started: StartedSupervisor) -> Iterator[None]:
    try:
        yield
    finally:
        for one in started:
            signal.pidfd_send_signal(one.pidfd, signal.SIGTERM)
            assert ended(one)


def launched(directory: Path) -> bool:
    start = job_records.read(directory, job_records.START, job_records.StartRecord)
    return start is not None and start.launcher is not None


def facts(pid: int) -> dict[str, Any]:
    """Everything that a process has got from those that started it."""
    place = Path(f"/proc/{pid}")
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    lines = [line for line in (place / "status").read_text().splitlines() if LINES.match(line)]
    return {
        "environment": sorted((place / "environ").read_bytes().split(b"\0")),
        "limits": (place / "limits").read_text(),
        "status": lines,
        "session, group and terminal": (fields[3] == str(pid), fields[2] == str(pid), fields[4]),
        "nice and policy": (fields[16], fields[38]),
        "oom": (place / "oom_score_adj").read_text(),
        "cgroup": (place / "cgroup").read_text(),
        "directory": os.readlink(place / "cwd"),
        "input": os.readlink(place / "fd/0"),
        "descriptors": len(os.listdir(place / "fd")),
        "command line": words_of(pid)[:-1],
    }


def test_a_forked_supervisor_has_what_a_program_has_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULEASE_TOKEN", "secret")
    monkeypatch.setenv("GPULEASE_LEASE_ID", "of another")

    async def story(starter: SupervisorStarter) -> None:
        forked = starter.start(sleeping(tmp_path, "forked"))
        starter._retired, starter._server = [starter._server], None  # type: ignore[list-item]
        program = starter.start(sleeping(tmp_path, "program"))
        with ending(forked, program):
            assert was_forked(forked)
            assert not was_forked(program)
            until(lambda: launched(tmp_path / "forked") and launched(tmp_path / "program"), "both have launched")
            of_forked, of_program = facts(forked.pid), facts(program.pid)
            assert of_forked["descriptors"] <= of_program.pop("descriptors")
            assert {name: of_forked[name] for name in of_program} == of_program
            assert not any(b"secret" in variable for variable in of_forked["environment"])
            assert words_of(forked.pid)[-1] == str(tmp_path / "forked")
            for pid, name in ((forked.pid, "forked"), (program.pid, "program")):
                assert os.readlink(f"/proc/{pid}/fd/2") == str(tmp_path / name / "supervisor.log")

    starting(story)


def test_a_limit_that_the_worker_has_got_meanwhile_is_the_next_jobs_too(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    note = tmp_path / "limit"

    async def story(starter: SupervisorStarter) -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (4 * 2**20, hard))
        try:
            for name in ("program", "forked"):
                job = order(name, spec("sh", "-c", f"ulimit -S -s >> {note}"))
                started = starter.start(furnished(tmp_path / name, job))
                assert was_forked(started) == (name == "forked")
                assert ended(started)
                await soon(lambda: starter.is_ready, "another fork server is ready")
        finally:
            resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))

    starting(story)
    assert note.read_text() == "4096\n4096\n"


UPGRADE = """
import asyncio, sys
from pathlib import Path
from gpulease_worker.jobs import failure_cause
from tests.worker.build import order, spec
from tests.worker.play import Worker

async def story():
    worker = Worker(Path(sys.argv[1]))
    for name in ("program", "forked", "upgraded", "upgraded-and-forked"):
        if name == "upgraded":
            source = Path(failure_cause.__file__)
            new = source.with_name("new")
            new.write_text(source.read_text().replace("The command", "The upgraded command"))
            new.rename(source)
        print((await worker.end_of(order(name, spec("sh", "-c", "exit 3")))).reason)
        while not worker.jobs._supervisors._starter.is_ready:
            await asyncio.sleep(0.01)

asyncio.run(story())
"""


def test_jobs_run_the_package_that_is_installed_when_they_start(tmp_path: Path) -> None:
    for package in (gpulease, gpulease_protocol, gpulease_worker):
        (source,) = package.__path__
        shutil.copytree(source, tmp_path / "lib" / package.__name__)
    path = os.pathsep.join([str(tmp_path / "lib"), str(Path(__file__).parents[2])])
    command = [sys.executable, "-P", "-c", UPGRADE, str(tmp_path / "data")]
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    old, new = "The command exited with code 3.\n", "The upgraded command exited with code 3.\n"
    assert ran.stdout == 2 * old + 2 * new, ran.stderr


def test_jobs_outlive_their_fork_server_and_the_next_ones_do_without_until_there_is_another(tmp_path: Path) -> None:
    async def story(starter: SupervisorStarter) -> None:
        server = server_of(starter)
        first = starter.start(sleeping(tmp_path, "first"))
        kill(server.pid)
        await soon(lambda: not Path(f"/proc/{server.pid}").exists(), "it is reaped")
        second = starter.start(sleeping(tmp_path, "second"))
        await soon(lambda: starter.is_ready, "another is ready")
        third = starter.start(sleeping(tmp_path, "third"))
        with ending(first, second, third):
            assert not was_forked(second)
            assert was_forked(third)
            until(lambda: all(launched(tmp_path / name) for name in ("first", "second", "third")), "all run")

    starting(story)


def test_a_fork_server_that_does_not_answer_delays_a_job_briefly_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_start, "ANSWER_S", 0.1)

    async def story(starter: SupervisorStarter) -> None:
        server = server_of(starter)
        os.kill(server.pid, signal.SIGSTOP)
        started = starter.start(sleeping(tmp_path, "j"))
        with ending(started):
            assert not was_forked(started)
            until(lambda: launched(tmp_path / "j"), "it runs")
        await soon(lambda: not Path(f"/proc/{server.pid}").exists(), "it is ended and reaped")

    starting(story)


def test_a_job_starts_without_a_fork_server_where_none_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_start, "FORK_SERVER", "gpulease_worker.no_such_module")
    tried: list[object] = []
    connect = supervisor_start._ForkServerConnection.__init__
    note = lambda *words: tried.append(words) or connect(*words)  # type: ignore[func-returns-value] # noqa: E731
    monkeypatch.setattr(supervisor_start._ForkServerConnection, "__init__", note)

    async def story(worker: Worker) -> None:
        for name in ("first", "second", "third"):
            assert (await worker.end_of(order(name, spec("sh", "-c", "exit 3")))).exit_code == 3
        starter = worker.jobs._supervisors._starter
        await soon(lambda: starter._server is not None and starter._server.has_ended, "its end is noticed")
        assert (await worker.end_of(order("fourth", spec("sh", "-c", "exit 3")))).exit_code == 3

    play(tmp_path, story)
    assert len(tried) == 1, "it is not tried again for every job"


def test_a_supervisor_that_cannot_be_forked_is_started_as_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(starter: SupervisorStarter) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(supervisor_start.socket, "send_fds", refuse)
        started = starter.start(sleeping(tmp_path, "j"))
        with ending(started):
            assert not was_forked(started)

    starting(story)


def test_a_job_is_found_again_by_the_next_worker_when_fork_server_and_worker_are_gone(tmp_path: Path) -> None:
    first, job = order("first", spec("true")), order("j", spec("sleep", "60"))

    async def story(worker: Worker) -> None:
        await worker.end_of(first)
        await soon(lambda: worker.jobs._supervisors._starter.is_ready, "the fork server is ready")
        await worker.until([job], RunState.RUNNING)
        server = server_of(worker.jobs._supervisors._starter)
        worker.jobs.close()
        assert server.alive(), "it stays to reap the supervisor"
        kill(server.pid)
        again = Worker(tmp_path)
        stop = order("j", job.spec, lease=job.lease_id, stop=True, grace_s=1.0)
        assert (await again.end_of(stop)).reason == "It was stopped on request."
        assert not living(job.lease_id)

    play(tmp_path, story)


@contextmanager
def server_alone(*lines: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A fork server of this process, with something that is changed in it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = "\n".join(["from gpulease_worker.jobs import fork_server", *lines, "fork_server.main([{}])"])
    command = [sys.executable, "-c", program.format(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as server:
        theirs.close()
        assert ours.recv(64) == b"ready"
        try:
            yield server, ours
        finally:
            server.kill()


IDLE_AFTER_THE_FIRST_REQUEST = (
    "serve = fork_server.ForkServer._serve",
    "def first(server, worker):",
    "    fork_server.IDLE_S = 0.2",
    "    return serve(server, worker)",
    "fork_server.ForkServer._serve = first",
)
"""A server that has been used once ends soon after; but it waits for its first request however busy this machine is."""


def forked_by(connection: socket.socket, directory: Path) -> StartedSupervisor:
    with (directory / "supervisor.log").open("ab") as log:
        socket.send_fds(connection, [os.fsencode(directory)], [log.fileno()])
    answer, (pidfd,), _, _ = socket.recv_fds(connection, 1024, 1)
    return StartedSupervisor(int(answer), pidfd)


def test_a_fork_server_ends_when_no_one_has_used_it_for_long(tmp_path: Path) -> None:
    with server_alone(*IDLE_AFTER_THE_FIRST_REQUEST) as (server, connection):
        started = forked_by(connection, sleeping(tmp_path, "j"))
        with ending(started), pytest.raises(subprocess.TimeoutExpired):
            server.wait(1.0)  # not while a supervisor of it is alive
        assert server.wait(60) == 0


def test_a_fork_server_that_is_retired_ends_after_its_last_supervisor(tmp_path: Path) -> None:
    with server_alone() as (server, connection):
        started = forked_by(connection, sleeping(tmp_path, "j"))
        connection.shutdown(socket.SHUT_WR)
        until(lambda: launched(tmp_path / "j"), "it runs")
        assert server.poll() is None
        with ending(started):
            pass
        assert server.wait(60) == 0


def test_a_fork_server_ends_with_its_worker_and_the_jobs_go_on(tmp_path: Path) -> None:
    directory = sleeping(tmp_path, "j")
    program = (
        "import asyncio, pathlib, sys, time\n"
        "from gpulease_worker.jobs.supervisor_start import SupervisorStarter\n"
        "async def act():\n"
        "    starter = SupervisorStarter()\n"
        "    starter._prepare((), dict(__import__('os').environ), 4096)\n"
        "    while not starter.is_ready: await asyncio.sleep(0.01)\n"
        "    starter._server.conditions = __import__('gpulease_worker.jobs.start_conditions',"
        " fromlist=['x']).current(dict(__import__('os').environ))\n"
        f"    print(starter.start(pathlib.Path({str(directory)!r})).pid, starter._server._pid, flush=True)\n"
        "    time.sleep(60)\n"
        "asyncio.run(act())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pid, server = (ProcessId.of(int(word)) for word in worker.stdout.readline().split())
        assert pid is not None
        assert server is not None
        worker.kill()
    until(lambda: not server.alive(), "the fork server has ended")
    until(lambda: launched(directory), "the job runs")
    start = job_records.read(directory, job_records.START, job_records.StartRecord)
    assert start is not None
    assert start.supervisor == pid
    assert pid.send_signal(signal.SIGTERM)
    until((directory / job_records.EXIT).exists, "it has ended")
