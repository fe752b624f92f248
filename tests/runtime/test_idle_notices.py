"""The command for idle leases: once for each idle time, bounded in time and number, and no shell."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease_protocol.model import Lease
from gpulease_server.core.happenings import KeepRequested
from gpulease_server.core.reclaim_records import ReclaimNotice
from gpulease_server.runtime import clock, idle_notices
from gpulease_server.runtime.idle_notices import MAX_RUNNING, IdleNotices
from tests.core.build import World

AFTER_S = 1800.0
ODD = "$(touch never); `touch never` \\ \" '"


class Lab:
    """A ledger, and since when each GPU has done nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int = 8) -> None:
        self.world = World().node(gpus=gpus)
        self.held: dict[str, Any] = {}
        usage = SimpleNamespace(usage=SimpleNamespace(held=self.held))
        self.writer: Any = SimpleNamespace(committed=self.world.ledger, policy=self.world.policy, metrics=usage)
        monkeypatch.setattr(clock, "now", lambda: self.world.now)

    def lease(self, count: int = 1, **what: Any) -> Lease:
        lease = self.world.lease(count, ttl_s=1e6, **what)
        for gpu in lease.gpus:
            self.works(lease, gpu.uuid)
        return lease

    def works(self, lease: Lease, uuid: str) -> None:
        """A kernel runs on this GPU at this moment."""
        self.held[uuid] = SimpleNamespace(read=True, lease_id=lease.id, idle_since_s=self.world.at_s)

    def wait(self, seconds: float) -> None:
        self.world.at_s += seconds
        self.world.report()


async def settled(notices: IdleNotices) -> None:
    """Look once, and wait for every command."""
    notices.check()
    await asyncio.gather(*notices._running)


def test_it_runs_once_for_each_idle_time_and_only_while_no_gpu_of_the_lease_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lab, told = Lab(monkeypatch), tmp_path / "told"
    lease = lab.lease(2, user="ada", label=ODD)
    script = 'echo "$GPULEASE_IDLE_USER $GPULEASE_IDLE_GPUS $GPULEASE_IDLE_S $GPULEASE_IDLE_LABEL" >> "$0"'

    def lines() -> list[str]:
        return told.read_text().splitlines() if told.exists() else []

    async def story() -> None:
        notices = IdleNotices(lab.writer, ["sh", "-c", script, str(told)], AFTER_S)
        lab.wait(AFTER_S / 2)
        lab.works(lease, lease.gpus[1].uuid)
        lab.wait(AFTER_S / 2 + 1)
        await settled(notices)
        assert lines() == [], "one of its GPUs worked a while ago"
        lab.wait(AFTER_S / 2)
        for _ in range(3):
            await settled(notices)
            lab.wait(10)
        assert lines() == [f"ada 2 1801 {ODD}"]
        held = dict(lab.held)
        lab.held.clear()  # a gap in the readings is not work
        await settled(notices)
        lab.held.update(held)
        await settled(notices)
        assert len(lines()) == 1
        lab.works(lease, lease.gpus[0].uuid)
        lab.works(lease, lease.gpus[1].uuid)
        await settled(notices)
        lab.wait(AFTER_S)
        await settled(notices)
        assert len(lines()) == 2

    asyncio.run(story())
    assert not list(tmp_path.glob("never"))


def test_few_run_at_once_one_that_hangs_is_killed_and_all_have_their_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(idle_notices, "TIMEOUT_S", 0.5)
    lab = Lab(monkeypatch)
    leases = [lab.lease() for _ in range(6)]
    lab.wait(AFTER_S)
    start, pids = asyncio.create_subprocess_exec, {}

    async def noted(*command: str, env: dict[str, str], **options: Any) -> asyncio.subprocess.Process:
        process = await start(*command, env=env, **options)
        pids[env["GPULEASE_IDLE_LEASE_ID"]] = process.pid  # here, because a busy machine may kill it before it runs
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)

    async def story() -> None:
        notices = IdleNotices(lab.writer, ["sh", "-c", "sleep 1000; true"], AFTER_S)
        notices.check()
        notices.check()
        assert len(notices._running) == MAX_RUNNING
        await asyncio.gather(*notices._running)
        await settled(notices)

    asyncio.run(story())
    assert pids.keys() == {lease.id for lease in leases}
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]
    assert caplog.text.count("is killed") == 6


def test_a_program_that_is_not_there_is_logged_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab = Lab(monkeypatch)
    lab.lease()
    lab.wait(AFTER_S)

    async def story() -> None:
        notices = IdleNotices(lab.writer, ["/no/such/program"], AFTER_S)
        await settled(notices)
        await settled(notices)

    asyncio.run(story())
    assert caplog.text.count("cannot be run") == 1


def test_what_runs_ends_with_the_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(idle_notices, "CHECK_S", 0.01)
    lab, pid = Lab(monkeypatch), tmp_path / "pid"
    lab.lease()
    lab.wait(AFTER_S)

    async def story() -> None:
        notices = IdleNotices(
            lab.writer, ["sh", "-c", 'echo $$ > "$0.new"; mv "$0.new" "$0"; sleep 1000', str(pid)], AFTER_S
        )
        running = asyncio.create_task(notices.run())
        async with asyncio.timeout(20):
            while not pid.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_it_does_not_run_for_a_lease_that_is_kept_and_runs_once_that_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lab, told = Lab(monkeypatch), tmp_path / "told"
    lease = lab.lease()

    def keep() -> None:
        asked = {"lease_id": lease.id, "fencing_token": lease.fencing_token, "reason": "slow copy", "for_s": 3600.0}
        lab.world.turn(KeepRequested(cause="keep", **asked))

    def runs() -> int:
        return len(told.read_text().splitlines()) if told.exists() else 0

    async def story() -> None:
        notices = IdleNotices(lab.writer, ["sh", "-c", 'echo told >> "$0"', str(told)], AFTER_S)
        keep()
        lab.wait(AFTER_S + 1)
        await settled(notices)
        assert runs() == 0
        lab.wait(3600.0 - AFTER_S)
        await settled(notices)
        assert runs() == 1
        keep()
        await settled(notices)
        lab.wait(3601.0)
        await settled(notices)
        assert runs() == 2, "who kept them is told again once that has ended"

    asyncio.run(story())


def test_it_runs_once_more_when_the_gpus_are_to_be_taken_back_and_says_when(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lab, told = Lab(monkeypatch), tmp_path / "told"
    lease = lab.lease(reclaim_idle_after_s=60.0)
    script = 'echo "at $GPULEASE_IDLE_RECLAIM_AT" >> "$0"'

    def lines() -> list[str]:
        return told.read_text().splitlines() if told.exists() else []

    async def story() -> None:
        notices = IdleNotices(lab.writer, ["sh", "-c", script, str(told)], AFTER_S)
        lab.wait(AFTER_S)
        await settled(notices)
        assert lines() == ["at "], "it is idle"
        at = lab.world.now.at + timedelta(seconds=300)
        lab.world.ledger.apply(ReclaimNotice(lease.id, lab.world.at_s + 300.0))
        for _ in range(2):
            await settled(notices)
        assert lines() == ["at ", f"at {at:%Y-%m-%dT%H:%M:%SZ}"]
        lab.world.ledger.apply(ReclaimNotice(lease.id, None))
        await settled(notices)
        lab.world.ledger.apply(ReclaimNotice(lease.id, lab.world.at_s + 600.0))
        await settled(notices)
        assert len(lines()) == 3, "it was withdrawn, and told again"

    asyncio.run(story())
