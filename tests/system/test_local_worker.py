"""The worker of the daemon's own host: started before the daemon serves, started again, and ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from gpulease_server import local_worker
from gpulease_server.local_worker import LocalWorker
from tests.daemon import DaemonProcess, daemon, eventually, workers_of


def test_the_first_report_waits_until_the_daemon_serves(tmp_path: Path) -> None:
    # Executed, not forked: the worker has read its GPUs before the daemon has imported what serves.
    started = DaemonProcess(tmp_path / "d", "--simulate", "1", environment={"PYTHONUNBUFFERED": "1"})
    started.start()
    try:
        assert started.process is not None
        pid = started.process.pid
        (first,) = workers_of(pid)
        first.kill()
        eventually(lambda: [one.pid for one in workers_of(pid)] not in ([], [first.pid]), 60, started.story)
        (second,) = workers_of(pid)
    finally:
        started.stop()
    assert not second.is_running()
    before, restarted, _ = started.output.read_text().partition("ended with code -9; starting it again")
    assert restarted
    assert "cannot report" not in before


def test_its_socket_may_be_a_relative_path(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1", "--socket", os.path.relpath(tmp_path / "s.sock")) as running:
        assert running.gpu_states() == ["free"], "its worker reports"
    assert not (tmp_path / "s.sock").exists()


@pytest.fixture
def worker(tmp_path: Path) -> LocalWorker:
    """A worker whose daemon does not serve."""
    return LocalWorker((f"unix://{tmp_path / 'none.sock'}",), tmp_path / "worker", "n", "1")


def test_it_ends_with_a_daemon_that_does_not_come_to_serve(worker: LocalWorker) -> None:
    with worker:
        worker.start()
        eventually(lambda: bool(workers_of(os.getpid())), 30)  # at first it has this process's command line
        (process,) = workers_of(os.getpid())
    assert not process.is_running()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_its_end_is_noticed(monkeypatch: pytest.MonkeyPatch, worker: LocalWorker, has_pidfd: bool) -> None:
    def forbidden(*_: int) -> int:
        raise PermissionError

    monkeypatch.setattr(local_worker, "RESTART_S", 0.01)
    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", forbidden)
    started: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen

    def start(*_: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(begin(["sleep", "600"]))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)

    async def main() -> None:
        supervising = asyncio.create_task(worker.supervise())
        for number in range(3):
            while len(started) == number:  # noqa: ASYNC110 - no one signals to a test
                await asyncio.sleep(0.001)
            os.kill(started[number].pid, signal.SIGKILL)
        while len(started) == 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising

    asyncio.run(asyncio.wait_for(main(), 60))
    assert [one.poll() for one in started] == [-signal.SIGKILL] * 3 + [-signal.SIGTERM]
