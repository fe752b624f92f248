"""A driver that is slow but works: grants continue, and waiting clients are informed."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpulease_protocol.host import process_tree
from gpulease_worker.probe import probe_reader
from gpulease_worker.probe.probe_client import ProbeClient
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.probe.probe_reader import ProbeReader
from gpulease_worker.processes import procfs
from tests.daemon import USUAL, DaemonProcess, daemon, eventually

UUID = "GPU-00000000-0000-0000-0000-000000000000"


def machine(path: Path, **members: Any) -> None:
    """A simulated machine with 1 GPU; `hang_s` is the duration of each reading."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"gpus": [{"uuid": UUID}], **members}))
    new.rename(path)


def state(running: DaemonProcess) -> str:
    return str(running.call("GET", f"/v1/gpus/{UUID}").json["state"])


def reason(running: DaemonProcess) -> str:
    return str(running.call("GET", f"/v1/gpus/{UUID}").json["reason"])


def probes(running: DaemonProcess) -> list[int]:
    """The probes that the daemon's worker has now."""
    assert running.process is not None
    below = process_tree.descendants(running.process.pid)
    return [one.pid for one in below if "gpulease_worker.probe.main" in (procfs.command_of(one.pid) or "")]


def test_a_node_is_granted_on_though_each_reading_takes_over_half_a_second(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine(path, hang_s=0.6)
    with daemon(tmp_path, "--simulate", str(path), "--node", "n") as running:
        eventually(lambda: state(running) == "free", 60, running.story)
        for _ in range(3):
            answer = running.call("POST", "/v1/leases", {"count": 1, "queue": False})
            assert answer.status == 201, answer.content
            body = {"token": answer.json["token"]}
            assert running.call("POST", f"/v1/leases/{answer.json['id']}/release", body).status == 200
            eventually(lambda: state(running) == "free", 60, running.story)


def test_a_driver_that_is_blocked_for_a_while_makes_its_gpus_unknown_and_then_is_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    machine(path)
    with daemon(tmp_path, "--simulate", str(path), "--node", "n", **USUAL) as running:
        eventually(lambda: state(running) == "free", 60, running.story)
        machine(path, hang_s=45)
        eventually(lambda: "the simulated driver did not answer within 2 s" in reason(running), 60, running.story)
        assert state(running) == "unknown"
        waiting = running.call("POST", "/v1/leases", {"count": 1}).json
        assert waiting["state"] == "queued"
        before = probes(running)
        machine(path)
        lease = running.call("GET", f"/v1/leases/{waiting['id']}?wait_s=60").json
        assert lease["state"] == "active"
        assert probes(running) == before, "no new probe had to be started"


def test_how_old_a_reading_may_be_is_a_setting(tmp_path: Path) -> None:
    """With 60 s the node is not asked again: a driver that hangs meanwhile does not matter."""
    path = tmp_path / "machine.json"
    machine(path)
    options = ("--simulate", str(path), "--node", "n", "--max-observation-age-s", "60")
    with daemon(tmp_path, *options, GPULEASE_PROBE_DEADLINE_S="30") as running:
        eventually(lambda: state(running) == "free", 60, running.story)
        machine(path, hang_s=25)
        eventually(lambda: running.call("GET", "/v1/nodes/n").json["state"] == "ready", 60)
        answer = running.call("POST", "/v1/leases", {"count": 1, "queue": False})
        assert answer.status == 201, answer.content


class HeldProbe:
    """Stands in for a ProbeClient: its readings wait until they are let go."""

    simulated, starting, under_way = False, False, None

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.go = asyncio.Event()
        self.begun = 0

    async def read(self, *_: object) -> Reading:
        self.begun += 1
        await self.go.wait()
        return self.reading

    read_some = read


@pytest.mark.parametrize("problem", [None, "the driver is gone"])
def test_a_late_reading_counts_with_the_ticket_with_which_it_began(problem: str | None) -> None:
    async def story() -> None:
        probe, arrived = HeldProbe(Reading(problem=problem)), asyncio.Event()
        reader = ProbeReader(cast("ProbeClient", probe), 0.05, arrived.set)
        late = await reader.read(1, (), True)
        assert (late.ticket, late.took_s) == (None, None)
        assert "did not answer within 0.05 s" in (late.reading.problem or "")
        assert not arrived.is_set()
        probe.go.set()
        await asyncio.wait_for(arrived.wait(), 60)
        taken = await reader.read(2, (), True)
        assert (taken.reading, taken.ticket, probe.begun) == (probe.reading, 1, 1)
        assert (taken.took_s is None) is (problem is not None)
        assert (await reader.read(3, (), True)).ticket == 3

    asyncio.run(story())


def test_a_late_reading_of_some_gpus_is_taken_for_no_reading_of_all() -> None:
    async def story() -> None:
        probe = HeldProbe(Reading(driver_version="some"))
        reader = ProbeReader(cast("ProbeClient", probe), 0.05, lambda: None)
        assert await reader.read_some({"GPU-1"}, ()) is None
        assert "did not answer within" in ((await reader.read(1, (), True)).reading.problem or "")
        assert await reader.read_some({"GPU-1"}, ()) is None, "the probe is busy"
        probe.go.set()
        await asyncio.sleep(0)
        probe.reading = Reading(driver_version="all")
        taken = await reader.read(2, (), True)
        assert (taken.reading.driver_version, taken.ticket, probe.begun) == ("all", 2, 2)
        assert await reader.read_some({"GPU-1"}, ()) is probe.reading

    asyncio.run(story())


def test_the_reading_of_all_may_begin_before_it_is_waited_for() -> None:
    async def story() -> None:
        probe = HeldProbe(Reading())
        reader = ProbeReader(cast("ProbeClient", probe), 60.0, lambda: None)
        reader.begin(1, (), True)
        probe.go.set()
        taken = await reader.read(2, (), True)
        assert (taken.reading, taken.ticket, probe.begun) == (probe.reading, 1, 1)

    asyncio.run(story())


def test_a_reading_that_waits_to_be_asked_for_did_not_take_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it shows would seem to be younger than it is."""
    now_s = 0.0
    monkeypatch.setattr(probe_reader, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def story() -> None:
        nonlocal now_s
        probe, ended = HeldProbe(Reading()), asyncio.Event()
        reader = ProbeReader(cast("ProbeClient", probe), 60.0, lambda: None)
        reader.begin(1, (), True)
        assert reader._task is not None
        reader._task.add_done_callback(lambda _: ended.set())
        now_s = 1.0
        probe.go.set()
        await asyncio.wait_for(ended.wait(), 60)
        now_s = 5.0  # an answer of the daemon was slow
        assert (await reader.read(2, (), True)).took_s == 1.0

    asyncio.run(story())


def test_a_reading_took_the_time_of_the_one_before_it_under_the_same_ticket_too() -> None:
    async def story() -> None:
        probe = HeldProbe(Reading())
        probe.go.set()
        reader = ProbeReader(cast("ProbeClient", probe), 60.0, lambda: None)
        reader.begin(1, (), True, since_s=time.monotonic() - 5.0)
        assert ((await reader.read(2, (), True)).took_s or 0.0) >= 5.0

    asyncio.run(story())


def test_while_a_reading_of_some_gpus_is_late_no_other_begins_and_its_end_is_told() -> None:
    """A probe answers one request after another; two at once would end the worker."""

    async def story() -> None:
        probe, arrived = HeldProbe(Reading()), asyncio.Event()
        reader = ProbeReader(cast("ProbeClient", probe), 0.05, arrived.set)
        assert await reader.read_some({"GPU-1"}, ()) is None
        reader.begin(1, (), True)
        assert probe.begun == 1
        probe.go.set()
        await asyncio.wait_for(arrived.wait(), 60)
        assert (await reader.read(2, (), True)).ticket == 2
        assert probe.begun == 2

    asyncio.run(story())
