"""The watch on owners of leases, with real processes that are killed, stopped and replaced."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease_protocol.host.process_id import ProcessId, stat
from gpulease_protocol.node_protocol import LeaseOwner, OwnerState
from gpulease_worker.processes import owner_watch as module
from gpulease_worker.processes.owner_watch import OwnerWatcher
from tests.worker.build import until

ALIVE, GONE, UNKNOWN = OwnerState.ALIVE, OwnerState.GONE, OwnerState.UNKNOWN
ONLY_THE_MAIN_THREAD_ENDS = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.readline(), os._exit(0))).start()
ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)
"""


@contextmanager
def process(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], LeaseOwner]]:
    """A real process and its name as an owner; killed and reaped at the close."""
    with subprocess.Popen(command or ("sleep", "60"), stdin=subprocess.PIPE) as started:
        try:
            yield started, named(started.pid)
        finally:
            started.kill()


def named(pid: int) -> LeaseOwner:
    """A living process as an owner."""
    owner = ProcessId.of(pid)
    assert owner is not None
    assert owner.start_ticks is not None
    return LeaseOwner(pid=pid, start_ticks=owner.start_ticks)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Watch:
    """`Owners` in a loop of the test's own, with every call of `changed`."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.owners = OwnerWatcher(self.changed.set)

    def states(self) -> dict[int, OwnerState]:
        return {one.owner.pid: one.state for one in self.owners.reports()}

    async def news(self) -> dict[int, OwnerState]:
        """What is seen after the next change."""
        await asyncio.wait_for(self.changed.wait(), 60)
        self.changed.clear()
        return self.states()


def test_the_end_of_an_owner_is_reported_at_once_and_again() -> None:
    async def run() -> None:
        watch, before = Watch(), open_files()
        with process() as (first, one), process() as (_, two):
            watch.owners.watch([one, two])
            assert watch.states() == {one.pid: ALIVE, two.pid: ALIVE}
            first.kill()  # not reaped: a zombie is gone
            assert await watch.news() == {one.pid: GONE, two.pid: ALIVE}
            watch.owners.watch([one, two])
            assert watch.states() == {one.pid: GONE, two.pid: ALIVE}, "reported until the daemon no longer names it"
            watch.owners.watch([two])
            assert watch.states() == {two.pid: ALIVE}
            watch.owners.close()
            assert watch.states() == {}
        assert open_files() <= before + 1, "a watch leaves no descriptor behind"

    asyncio.run(run())


def test_an_owner_that_was_gone_before_the_watch_began_is_gone() -> None:
    async def run() -> None:
        watch = Watch()
        with process() as (child, owner), process() as (other, zombie):
            child.kill()
            child.wait()
            other.kill()
            until(lambda: ProcessId.of(zombie.pid) is None, "it is a zombie")
            watch.owners.watch([owner, zombie])
            assert watch.states() == {owner.pid: GONE, zombie.pid: GONE}

    asyncio.run(run())


def test_a_process_with_an_owners_reused_pid_is_not_the_owner() -> None:
    async def run() -> None:
        watch, before = Watch(), open_files()
        own = named(os.getpid())
        earlier = LeaseOwner(pid=own.pid, start_ticks=own.start_ticks - 1)
        watch.owners.watch([earlier])
        assert watch.states() == {own.pid: GONE}
        assert open_files() == before + 0

    asyncio.run(run())


def test_a_stopped_owner_is_alive() -> None:
    async def run() -> None:
        watch = Watch()
        with process() as (child, owner):
            child.send_signal(signal.SIGSTOP)
            watch.owners.watch([owner])
            assert watch.states() == {owner.pid: ALIVE}
            child.kill()
            assert await watch.news() == {owner.pid: GONE}

    asyncio.run(run())


def test_an_owner_that_executes_another_program_is_alive() -> None:
    async def run() -> None:
        watch = Watch()
        with process("sh", "-c", "read line; exec sleep 60") as (child, owner):
            watch.owners.watch([owner])
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
            until(lambda: b"sleep" in Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")[0], "it is sleep")
            assert watch.states() == {owner.pid: ALIVE}
            watch.owners.close()
            again = Watch()
            again.owners.watch([owner])
            assert again.states() == {owner.pid: ALIVE}, "a restarted worker finds the same process"
            again.owners.close()

    asyncio.run(run())


def test_an_owner_that_forks_and_exits_has_ended() -> None:
    async def run() -> None:
        watch = Watch()
        with process("sh", "-c", "read line; sleep 2 & exit 0") as (child, owner):
            watch.owners.watch([owner])
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
            assert await watch.news() == {owner.pid: GONE}

    asyncio.run(run())


def test_an_owner_whose_main_thread_alone_has_ended_is_alive() -> None:
    async def run() -> None:
        watch = Watch()
        with process(sys.executable, "-c", ONLY_THE_MAIN_THREAD_ENDS) as (child, owner):
            until(lambda: (seen := stat(child.pid)) is not None and seen.leader_ended, "its main thread is a zombie")
            watch.owners.watch([owner])
            assert watch.states() == {owner.pid: ALIVE}
            assert child.stdin is not None
            child.stdin.write(b"end\n")
            child.stdin.flush()
            assert await watch.news() == {owner.pid: GONE}

    asyncio.run(run())


def test_without_file_descriptors_an_owner_is_unknown_and_not_gone() -> None:
    async def run() -> None:
        watch, limits = Watch(), resource.getrlimit(resource.RLIMIT_NOFILE)
        with process() as (_, owner):
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                watch.owners.watch([owner])
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            (report,) = watch.owners.reports()
            assert report.state is UNKNOWN
            assert "Too many open files" in (report.reason or "")

    asyncio.run(run())


def test_an_owner_hidden_from_proc_is_unknown_and_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `hidepid`: the kernel gives a pidfd, /proc says that there is no such process."""

    async def run() -> None:
        watch, before = Watch(), open_files()
        with process() as (_, owner):
            monkeypatch.setattr(module, "Path", lambda path: Path(f"/nowhere{path}"))
            watch.owners.watch([owner])
            assert watch.states() == {owner.pid: UNKNOWN}
        assert open_files() <= before + 1

    asyncio.run(run())


def test_the_number_of_watched_owners_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(module, "MAX_OWNERS", 1)
        watch = Watch()
        with process() as (_, one), process() as (_, two):
            watch.owners.watch([one, two])
            assert watch.states() == {one.pid: ALIVE, two.pid: UNKNOWN}
            watch.owners.close()

    asyncio.run(run())


def test_a_process_that_the_daemon_could_not_confirm_must_run_as_the_holders_user() -> None:
    with process() as (_, owner):
        mine, others = replace(owner, user=str(os.getuid())), replace(owner, user="nobody-of-that-name")
        watch = Watch()

        async def story() -> None:
            watch.owners.watch([mine, others])
            states = {report.owner: report.state for report in watch.owners.reports()}
            assert states == {mine: ALIVE, others: UNKNOWN}
            assert any("nobody-of-that-name" in (report.reason or "") for report in watch.owners.reports())
            watch.owners.close()

        asyncio.run(story())
