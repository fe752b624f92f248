"""A wait is announced: once, again when it changes, by one request of a process and one rank of a training."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpulease import AsyncClient, Client, NotNow, find_usable_cuda_devices, release
from gpulease.device_request import WAIT_VARIABLE
from gpulease.sansio import wait_announcement
from gpulease_protocol.explanation import Explanation, Obstacle
from gpulease_protocol.host.variables import KNOWN, unknown_variables
from gpulease_protocol.model import Gpu, GpuState, Holder, Node, NodeState
from gpulease_protocol.obstacle_groups import describe_wait, obstacle_groups
from tests.client.fake_daemon import BUSY, FakeDaemon

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_announcement, "ANNOUNCE_AFTER_S", 0.05)
    monkeypatch.setattr(wait_announcement, "REPEAT_AFTER_S", 0.0)
    monkeypatch.setattr(wait_announcement, "LOOK_AFTER_S", 0.0)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of waiting; a machine under load may lose a lease besides."""
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in said if line.startswith("gpulease ")]


def test_a_wait_is_announced_once_and_again_when_it_changes(
    daemon: FakeDaemon, client: Client, caplog: pytest.LogCaptureFixture, until: Callable[..., None]
) -> None:
    daemon.free = False
    waiting = threading.Thread(target=lambda: client.lease(1, wait_s=60, ttl_s=0.3).release())
    waiting.start()
    until(lambda: daemon.count("explain") > 2)
    assert lines(caplog) == [
        "gpulease waits for 1 GPU: GPU 0 is leased to ada until 14:00 (lease L-9). Ctrl-C gives up."
    ]
    daemon.explanation = replace(BUSY, position=2)
    until(lambda: len(lines(caplog)) > 1)
    assert lines(caplog)[1].startswith("gpulease waits for 1 GPU, 2nd in the queue: GPU 0 is")
    daemon.grant("L-1")
    waiting.join()
    assert len(lines(caplog)) == 2


@pytest.mark.parametrize("silenced", ["by its rank", "by on_queued", "by its level"])
def test_a_wait_is_silent_for_who_wants_that(
    daemon: FakeDaemon,
    client: Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    silenced: str,
) -> None:
    daemon.free = False
    if silenced == "by its rank":
        monkeypatch.setenv("LOCAL_RANK", "3")
    if silenced == "by its level":
        caplog.set_level(logging.ERROR, "gpulease")
    queued = (lambda lease: None) if silenced == "by on_queued" else None
    with pytest.raises(NotNow, match=r"within 0\.3 s"):
        client.lease(1, wait_s=0.3, on_queued=queued)
    assert lines(caplog) == []


def test_of_many_tasks_that_wait_one_announces_it(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, until: Callable[..., None]
) -> None:
    daemon.free = False

    async def wait() -> None:
        async def acquire() -> None:
            await client.lease(1, wait_s=60)

        async with AsyncClient(daemon.url) as client:
            tasks = [asyncio.create_task(acquire()) for _ in range(5)]
            await asyncio.to_thread(until, lambda: daemon.count("wait_while=queued") > 30)  # each several times
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(wait())
    assert [line.split(":")[0] for line in lines(caplog)] == ["gpulease waits for 1 GPU", "gpulease gave up"]


def test_the_wait_includes_that_for_a_daemon_that_is_not_up_yet(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setenv(WAIT_VARIABLE, "2m")
    monkeypatch.setattr("gpulease.device_request.DAEMON_POLL_S", 0.05)
    for name in ("GPULEASE_LEASE_ID", "GPULEASE_LEASE_TOKEN", "GPULEASE_FOUND_BY", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
    daemon.stop()
    daemon.gpus = [Gpu(uuid="GPU-0", node="a", index=0, state=GpuState.FREE)]
    found: list[list[int]] = []

    def find() -> None:
        with Client(daemon.url) as client:
            found.append(find_usable_cuda_devices(1, client=client, reuse=False))
            assert len(release()) == 1

    finding = threading.Thread(target=find)
    finding.start()
    until(lambda: bool(lines(caplog)))
    assert "gpulease waits for its daemon, for at most 2m 00s. No daemon answers at " in lines(caplog)[0]
    daemon.start()
    until(lambda: daemon.count("/v1/nodes") > 2)
    assert found == [], "no worker has reported yet"
    host = socket.gethostname()
    daemon.nodes = [Node(name="a", state=NodeState.READY, host=host, gpu_count=1, simulated=True)]
    finding.join(60)
    assert found == [[0]]
    assert daemon.only_lease()["end_reason"] == "released"


def obstacle(index: int, code: str = "leased", sentence: str = "", **more: object) -> Obstacle:
    return Obstacle(uuid=f"GPU-{index}", node="a", index=index, code=code, sentence=sentence, **more)  # type: ignore[arg-type]


def test_obstacles_are_grouped_by_who_is_in_the_way() -> None:
    ada, bob = Holder(user="ada", owner_pid=7), Holder(user="bob", label="resnet")
    since, until = NOW - timedelta(minutes=5), NOW + timedelta(hours=1)
    obstacles = [
        obstacle(0, holder=ada, since=since, until=until),
        obstacle(1, sentence="Held until then.", holder=bob, since=since, until=until, job_id="job-1"),
        obstacle(2, "foreign", "GPU 2 of a is in use without a lease by pid 9 of eve."),
        *(obstacle(index, holder=ada, since=since) for index in (3, 4, 5)),
        obstacle(6, "other_model", "GPU 6 of a is of another model."),
        obstacle(
            7, sentence="Held until then.", holder=Holder(user="carl", owner_pid=8), lease_id="lease-1", until=until
        ),
    ]
    local = f"{until.astimezone():%H:%M}"
    assert obstacle_groups(obstacles, NOW) == [
        "GPUs 0, 3-5: ada (pid 7) for 5m 00s",
        f"GPU 1: bob (resnet) for 5m 00s, until {local}",
        "GPU 2: in use without a lease by pid 9 of eve",
        f"GPU 7: carl (lease-1), until {local} unless renewed",
    ]
    far = [replace(one, node=f"node-{number}") for number, one in enumerate(obstacles[:2])]
    assert [group.split(":")[0] for group in obstacle_groups(far, NOW)] == ["GPU 0 of node-0", "GPU 1 of node-1"]
    many = [obstacle(index, holder=Holder(user=f"user-{index}")) for index in range(12)]
    assert obstacle_groups(many, NOW)[8:] == ["and 4 more"]


def test_gpus_that_an_explanation_does_not_list_are_counted() -> None:
    listed = Explanation(
        verdict="not_now", sentence="", obstacles=(obstacle(0, holder=Holder(user="ada", label="sweep")),)
    )
    assert describe_wait(listed) == ": GPU 0: ada (sweep)"
    assert describe_wait(replace(listed, unlisted_gpus=44)) == ": GPU 0: ada (sweep); and 44 more GPUs"


def test_a_reservation_is_told_to_its_end_which_says_what_to_do() -> None:
    why = (
        "reserved for user games from 2026-11-27 23:27 to 2026-11-28 03:27 UTC (course; reservation-171314615b7f2929). "
        "The request declares no time; with `time_s` (`--time`) of at most 6749 s it could use the GPU before that"
    )
    obstacles = [obstacle(index, "reserved", f"GPU {index} of a is {why}.") for index in (0, 1)]
    assert obstacle_groups(obstacles, NOW) == [f"GPUs 0, 1: {why}"]


def test_the_variables_that_the_code_reads_are_known() -> None:
    read: set[str] = set()
    for package in ("client", "protocol", "server", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            read |= set(re.findall(r"\bGPULEASE_([A-Z0-9_]*[A-Z0-9])(?![A-Z0-9_])", path.read_text(encoding="utf-8")))
    set_by_leases = {name for name in read if re.match("(LEASE|JOB|ARRAY|MEMBER)_", name)} - KNOWN
    assert read - set_by_leases == KNOWN
    environ = dict.fromkeys((f"GPULEASE_{name}" for name in read), "") | {"GPULEASE_MAX_BYPAS": "1", "GPULEASE_XY": ""}
    assert unknown_variables(environ) == [
        "GPULEASE_MAX_BYPAS is no variable of gpulease and has no effect. Did you mean GPULEASE_MAX_BYPASS?",
        "GPULEASE_XY is no variable of gpulease and has no effect.",
    ]
