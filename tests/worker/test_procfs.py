"""Process identity: a pid alone identifies no process, and a zombie is dead."""

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
from typing import Any

import pytest

from gpulease_protocol.host import process_id, process_tree
from gpulease_protocol.host.process_id import ProcessId, Stat, stat
from gpulease_worker.probe.open_file_scanner import scan
from gpulease_worker.processes import lease_claims
from gpulease_worker.processes.user_names import UserNameCache
from tests.worker.build import living, python, under, until


def test_a_zombie_counts_as_dead() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = ProcessId.of(process.pid)
        assert identity is not None
        assert identity.alive()
        process.kill()
        until(lambda: not identity.alive(), "it counts as dead although it was not reaped")
        seen = stat(process.pid)
        assert seen is not None
        assert seen.dead
        assert ProcessId.of(process.pid) is None


WITHOUT_ITS_FIRST_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_is_alive_until_its_last_thread_has_ended(tmp_path: Path) -> None:
    device, lease = tmp_path / "nvidia0", "lease-leader-ended"
    device.touch()
    script = f"held = open({str(device)!r})\n{WITHOUT_ITS_FIRST_THREAD}"
    with under(lease, *python("-c", script)) as process:
        try:
            until(lambda: (seen := stat(process.pid)) is not None and seen.leader_ended, "its first thread has ended")
            identity = ProcessId.of(process.pid)
            assert identity is not None
            assert identity.alive()
            assert lease_claims.claimants({lease: None}) == {identity: lease}
            assert identity in process_tree.descendants(os.getpid())
            assert scan({str(device)}).by_path == {str(device): [identity]}
        finally:
            process.kill()
        until(lambda: not identity.alive(), "it is dead")
    assert not lease_claims.claimants({lease: None})


def test_a_signal_does_not_reach_a_process_with_a_reused_pid() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = ProcessId.of(process.pid)
        assert identity is not None
        earlier = replace(identity, start_ticks=identity.start_ticks - 1)
        assert not earlier.send_signal(signal.SIGKILL)
        assert earlier.pidfd() is None
        assert identity.alive()
        assert identity.send_signal(signal.SIGKILL)
        until(lambda: not identity.alive(), "it is dead")


def test_a_process_with_a_reused_pid_does_not_inherit_the_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = "lease-reused"
    ended: list[int] = []
    with under(lease) as process:
        try:
            until(lambda: living(lease), "it is up")
            marker = lease_claims._marker

            def marker_of_one_that_then_ends(pid: int, *more: Any) -> str | None:
                found = marker(pid, *more)
                if pid == process.pid:
                    ended.append(pid)
                return found

            def stat_with_a_later_start(pid: int) -> Stat | None:
                seen = stat(pid)
                return seen._replace(start_ticks=seen.start_ticks + 1) if seen and pid in ended else seen

            monkeypatch.setattr(lease_claims, "_marker", marker_of_one_that_then_ends)
            monkeypatch.setattr(process_id, "stat", stat_with_a_later_start)
            assert lease_claims.claimants({lease: None}) == {}
            assert ended
        finally:
            process.kill()


def test_a_user_database_that_hangs_blocks_no_reading_and_gets_one_query_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where names come over a network: a reading that waited would miss its deadline, and every GPU be unknown."""
    answers, asked = threading.Event(), []

    def getpwuid(uid: int) -> SimpleNamespace:
        asked.append(uid)
        assert answers.wait(60)
        if uid == 2:
            raise KeyError(uid)
        return SimpleNamespace(pw_name=f"user{uid}")

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    names = UserNameCache()
    begun_s = time.monotonic()
    assert [names.name_of(uid) for uid in (1, 2, 3, 1)] == ["1", "2", "3", "1"]
    assert time.monotonic() - begun_s < 30
    assert asked == [1]
    answers.set()
    until(lambda: [names.name_of(uid) for uid in (1, 2, 3)] == ["user1", "2", "user3"], "it answers")
    assert [names.name_of(uid) for uid in (1, 2, 3)] == ["user1", "2", "user3"]
    assert sorted(asked) == [1, 2, 3], "what is known is not asked for again and again"
