"""ProbeClient with real probe processes: deadlines, replacement, and output of the driver."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.node_protocol import PAUSED, DesiredState
from gpulease_worker.loop import WorkerLoop
from gpulease_worker.probe import probe_client
from gpulease_worker.probe.probe_client import ProbeClient
from gpulease_worker.probe.probe_protocol import Pace, Reading
from gpulease_worker.processes import procfs
from gpulease_worker.settings import WorkerSettings
from tests.worker.build import GPUS, python, until

DEADLINE_S = 2.0


async def reading_that(probe: ProbeClient, problem: bool, deadline_s: float = 60.0) -> Reading:
    """The first reading with a problem, or without one."""
    end = time.monotonic() + deadline_s
    while True:
        reading = await probe.read(())
        if (reading.problem is not None) == problem and reading.problem != "The probe is starting.":
            return reading
        assert time.monotonic() < end, reading
        await asyncio.sleep(0.02)


def machine(path: Path, **members: object) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"gpus": [{"uuid": uuid} for uuid in GPUS], **members}))
    temporary.rename(path)


def probe_pids() -> list[int]:
    """Probes that this process started itself, as opposed to those of daemons that it started."""
    found = psutil.Process().children()
    return [one.pid for one in found if "gpulease_worker.probe.main" in (procfs.command_of(one.pid) or "")]


def test_a_hung_probe_is_a_problem_within_its_deadline_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine(path)

    async def story() -> None:
        probe = ProbeClient("n", str(path), DEADLINE_S)
        try:
            assert [gpu.uuid for gpu in (await reading_that(probe, problem=False)).gpus] == list(GPUS)
            (first,) = probe_pids()
            machine(path, hang_s=3600)
            begun = time.monotonic()
            reading = await probe.read(())
            assert time.monotonic() - begun < DEADLINE_S + 30
            assert reading.problem is not None
            assert "did not answer within 2 s" in reading.problem
            assert not reading.gpus
            async with asyncio.timeout(60):
                while ProcessId.of(first) is not None:  # noqa: ASYNC110 - it was killed
                    await asyncio.sleep(0.01)
            machine(path)
            assert len((await reading_that(probe, problem=False)).gpus) == 2
            assert first not in probe_pids()
        finally:
            await probe.close()
        until(lambda: not probe_pids(), "none is left")

    asyncio.run(story())


def test_a_probe_that_dies_is_replaced_at_most_once_a_second(tmp_path: Path) -> None:
    async def story() -> None:
        probe = ProbeClient("n", "2", 20.0)
        try:
            await reading_that(probe, problem=False)
            seen = set()
            begun = time.monotonic()
            while time.monotonic() - begun < 2.5:
                seen.update(alive := probe_pids())
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                reading = await probe.read(())
                assert reading.problem is not None or not alive
                await asyncio.sleep(0.01)
            assert len(seen) <= 4
            assert len((await reading_that(probe, problem=False)).gpus) == 2
        finally:
            await probe.close()

    asyncio.run(story())


def test_a_probe_ends_without_a_word_where_its_worker_has_died_before_it_is_ready() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = python("-m", "gpulease_worker.probe.main", "{}", "n", "1")
    with open(writing, "wb") as answers:
        ended = subprocess.run(words, input=b"", stdout=answers, stderr=subprocess.PIPE, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_driver_that_hangs_tells_the_probe_which_call_it_was(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine(path)

    async def story() -> None:
        probe = ProbeClient("n", str(path), 20.0, Pace(call_deadline_s=1.5))
        try:
            await reading_that(probe, problem=False)
            machine(path, hang_s=3600)
            reading = await probe.read(())
            assert reading.problem == (
                "the simulated driver did not answer within 1.5 s; the GPU driver hangs. See `dmesg` for Xid lines."
            )
            machine(path)
            assert len((await reading_that(probe, problem=False)).gpus) == 2
        finally:
            await probe.close()

    asyncio.run(story())


def test_a_probe_that_ends_by_itself_says_so_unasked() -> None:
    async def story() -> None:
        ended = asyncio.Event()
        probe = ProbeClient("n", "2", 20.0, ended=ended.set)
        try:
            await reading_that(probe, problem=False)
            assert not ended.is_set()
            os.kill(*probe_pids(), signal.SIGKILL)
            async with asyncio.timeout(60):
                await ended.wait()
        finally:
            await probe.close()

    asyncio.run(story())


def test_probes_that_no_signal_reaches_are_not_started_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP instead of SIGKILL: the probes stay, as in an uninterruptible driver call."""
    monkeypatch.setattr(probe_client, "MIN_START_INTERVAL_S", 0.01)

    async def story() -> None:
        probe = ProbeClient("n", "2", 20.0)
        monkeypatch.setattr(
            asyncio.subprocess.Process, "kill", lambda process: os.kill(process.pid, signal.SIGSTOP), raising=True
        )
        try:
            for _ in range(probe_client.MAX_UNKILLABLE):
                await reading_that(probe, problem=False)
                await probe._kill()
            probe._deadline_s = 0.1
            assert "3 probes hang in the driver and cannot be killed" in ((await probe.read(())).problem or "")
            stuck = probe_pids()
            assert len(stuck) == probe_client.MAX_UNKILLABLE
            os.kill(stuck[0], signal.SIGKILL)
            probe._deadline_s = 20.0
            assert len((await reading_that(probe, problem=False)).gpus) == 2, "one has ended, so another may start"
        finally:
            monkeypatch.undo()
            for pid in probe_pids():
                os.kill(pid, signal.SIGKILL)
            for end in list(probe._ends.values()):
                await asyncio.wait({end}, timeout=60)
            await probe.close()

    asyncio.run(story())


def test_a_node_is_not_said_to_be_paused_while_a_probe_that_was_killed_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP instead of SIGKILL: as with a driver's last client, which tears down every GPU before it ends."""
    settings = WorkerSettings(url="http://127.0.0.1:1", node="n", data_dir=tmp_path, simulate="2")

    async def story() -> None:
        exchange, active, paused = WorkerLoop(settings), DesiredState(ticket=1), DesiredState(ticket=2, paused=True)
        try:
            async with asyncio.timeout(60):
                while (await exchange._read(active)).reading.problem is not None:
                    pass
            (stuck,) = probe_pids()
            monkeypatch.setattr(
                asyncio.subprocess.Process, "kill", lambda process: os.kill(process.pid, signal.SIGSTOP), raising=True
            )
            for _ in range(2):
                problem = (await exchange._read(paused)).reading.problem
                assert probe_pids() == [stuck]
                assert problem != PAUSED, "NVML is still open"
                assert problem == f"{PAUSED}, but a probe that was killed has not ended yet"
            monkeypatch.undo()
            os.kill(stuck, signal.SIGKILL)
            async with asyncio.timeout(60):
                while (await exchange._read(paused)).reading.problem != PAUSED:
                    pass
            assert not probe_pids()
        finally:
            monkeypatch.undo()
            for pid in probe_pids():
                os.kill(pid, signal.SIGKILL)
            await exchange._readings.close()

    asyncio.run(story())


def test_a_broken_file_is_the_problem_and_the_probe_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text("{")

    async def story() -> None:
        probe = ProbeClient("n", str(path), 20.0)
        try:
            problem = (await reading_that(probe, problem=True)).problem
            assert problem is not None
            assert str(path) in problem
            before = probe_pids()
            machine(path)
            assert len((await probe.read(())).gpus) == 2
            assert probe_pids() == before
        finally:
            await probe.close()

    asyncio.run(story())
