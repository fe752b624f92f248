"""Who a process is: a pid alone names nobody, and a zombie is dead."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulease.owner import Stat, stat
from gpulease_worker import processes
from gpulease_worker.open_files import openers
from tests.worker.build import living, python, under, until


def test_a_zombie_counts_as_dead() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = processes.Identity.of(process.pid)
        assert identity is not None
        assert identity.alive()
        process.kill()
        until(lambda: not identity.alive(), "it counts as dead although nobody has reaped it")
        seen = stat(process.pid)
        assert seen is not None
        assert seen.dead
        assert processes.Identity.of(process.pid) is None


WITHOUT_ITS_FIRST_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_lives_until_its_last_thread_has_ended(tmp_path: Path) -> None:
    device, lease = tmp_path / "nvidia0", "lease-headless"
    device.touch()
    script = f"held = open({str(device)!r})\n{WITHOUT_ITS_FIRST_THREAD}"
    with under(lease, *python("-c", script)) as process:
        try:
            until(lambda: (seen := stat(process.pid)) is not None and seen.headless, "its first thread has ended")
            identity = processes.Identity.of(process.pid)
            assert identity is not None
            assert identity.alive()
            assert processes.marked({lease}) == {identity: lease}
            assert identity in processes.descendants(os.getpid())
            assert openers({str(device)}).by_path == {str(device): [identity]}
        finally:
            process.kill()
        until(lambda: not identity.alive(), "it is dead")
    assert not processes.marked({lease})


def test_a_signal_does_not_reach_another_process_that_has_the_pid_now() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = processes.Identity.of(process.pid)
        assert identity is not None
        earlier = replace(identity, start_ticks=identity.start_ticks - 1)
        assert not earlier.send(signal.SIGKILL)
        assert earlier.pidfd() is None
        assert identity.alive()
        assert identity.send(signal.SIGKILL)
        until(lambda: not identity.alive(), "it is dead")


def test_a_stranger_that_gets_the_pid_of_a_marked_process_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = "lease-reused"
    ended: list[int] = []
    with under(lease) as process:
        try:
            until(lambda: living(lease), "it is up")
            marker = processes._marker

            def marker_of_one_that_then_ends(pid: int) -> str | None:
                found = marker(pid)
                if pid == process.pid:
                    ended.append(pid)
                return found

            def stat_of_whoever_has_the_pid(pid: int) -> Stat | None:
                seen = stat(pid)
                return seen._replace(start_ticks=seen.start_ticks + 1) if seen and pid in ended else seen

            monkeypatch.setattr(processes, "_marker", marker_of_one_that_then_ends)
            monkeypatch.setattr(processes, "stat", stat_of_whoever_has_the_pid)
            assert processes.marked({lease}) == {}
            assert ended
        finally:
            process.kill()


def test_a_user_database_that_does_not_answer_holds_nobody_up_and_is_asked_once_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where names come over a network: a reading that waited would miss its deadline, and every GPU be unknown."""
    answers, asked = threading.Event(), []

    def getpwuid(uid: int) -> SimpleNamespace:
        asked.append(uid)
        assert answers.wait(20)
        if uid == 2:
            raise KeyError(uid)
        return SimpleNamespace(pw_name=f"user{uid}")

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    names = processes.UserNames()
    begun_s = time.monotonic()
    assert [names.name_of(uid) for uid in (1, 2, 3, 1)] == ["1", "2", "3", "1"]
    assert time.monotonic() - begun_s < 5
    assert asked == [1]
    answers.set()
    until(lambda: [names.name_of(uid) for uid in (1, 2, 3)] == ["user1", "2", "user3"], "it answers")
    assert [names.name_of(uid) for uid in (1, 2, 3)] == ["user1", "2", "user3"]
    assert sorted(asked) == [1, 2, 3], "what is known is not asked for again and again"
