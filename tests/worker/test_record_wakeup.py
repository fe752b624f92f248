"""News of a job's records: the worker learns of a start at once, whatever else reaches its socket."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from gpulease_protocol.node_protocol import RunState
from gpulease_worker.jobs import record_wakeup, supervisor_watch
from tests.worker.build import order, spec
from tests.worker.play import Worker, play, soon


@pytest.fixture(autouse=True)
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that looks for itself would look much too late."""
    monkeypatch.setattr(supervisor_watch, "START_POLL_S", (600.0, 600.0))


def test_a_start_is_told_and_not_looked_for(tmp_path: Path) -> None:
    job = order("j", spec("sleep", "60"))

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        await worker.end_of(order("j", job.spec, lease=job.lease_id, stop=True, grace_s=1.0))

    play(tmp_path, story)


def test_the_next_worker_hears_of_a_start_too_and_a_former_one_does_not_take_that_away(tmp_path: Path) -> None:
    job = order("j", spec("sleep", "60"))

    async def story(first: Worker) -> None:
        second = Worker(tmp_path / "d")
        first.jobs.close()
        await second.until([job], RunState.RUNNING)
        await second.end_of(order("j", job.spec, lease=job.lease_id, stop=True, grace_s=1.0))

    play(tmp_path / "d", story)


def test_a_path_longer_than_the_address_of_a_socket_will_do(tmp_path: Path) -> None:
    job = order("j", spec("sleep", "60"))

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        await worker.end_of(order("j", job.spec, lease=job.lease_id, stop=True, grace_s=1.0))

    long = tmp_path / ("x" * 120)
    long.mkdir()
    play(long, story)


def test_only_the_workers_user_may_write_and_what_is_written_is_only_a_hint(tmp_path: Path) -> None:
    job = order("j", spec("sleep", "60"))

    async def story(worker: Worker) -> None:
        place = tmp_path / record_wakeup.SOCKET
        assert os.stat(place).st_mode & 0o777 == 0o600
        await worker.until([job], RunState.RUNNING)
        changed = worker.jobs.reports()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for message in (b"j", b"no such job", b"\xff" * record_wakeup.NAME_BYTES, b"../j", b""):
                sender.sendto(message, str(place))
        assert worker.jobs._news is not None
        received = worker.jobs._news._socket
        await soon(lambda: not is_readable(received), "all are taken in")
        assert worker.jobs.reports() == changed
        await worker.end_of(order("j", job.spec, lease=job.lease_id, stop=True, grace_s=1.0))

    play(tmp_path, story)


def is_readable(one: socket.socket) -> bool:
    try:
        return bool(one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) or True)
    except BlockingIOError:
        return False


def test_a_supervisor_without_a_listener_goes_on(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "j").mkdir(parents=True)
    record_wakeup.tell(tmp_path / "jobs" / "j")

    async def listen() -> None:
        record_wakeup.NewsListener(tmp_path, lambda _: None).close()

    asyncio.run(listen())
    record_wakeup.tell(tmp_path / "jobs" / "j")


def test_a_worker_that_cannot_listen_looks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_watch, "START_POLL_S", (0.01, 0.01))
    (tmp_path / record_wakeup.SOCKET).mkdir()
    job = order("j", spec("sleep", "60"))

    async def story(worker: Worker) -> None:
        await worker.until([job], RunState.RUNNING)
        await worker.end_of(order("j", job.spec, lease=job.lease_id, stop=True, grace_s=1.0))

    play(tmp_path, story)
