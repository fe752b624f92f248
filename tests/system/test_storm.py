"""Two hundred processes at once on eight GPUs, and a daemon that is killed in the middle of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import PATIENT, DaemonProcess, daemon, events, eventually
from tests.driver.machine import driver_machine

pytestmark = [pytest.mark.slow, pytest.mark.busy]

PROCESSES = 200


@contextmanager
def storm_over(
    running: DaemonProcess, directory: Path, count: int = 1, processes: int = PROCESSES, program: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """The processes, all of which are gone afterwards, whatever has failed; each runs `program` under its lease."""
    directory.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.system.storm",
        running.url,
        str(processes),
        str(count),
        "0.05",
        str(directory),
        *program,
    ]
    with subprocess.Popen(
        command, env=os.environ | running.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as storm:
        try:
            yield storm
        finally:
            with suppress(ProcessLookupError):
                os.killpg(storm.pid, signal.SIGKILL)


def told(directory: Path) -> list[dict[str, Any]]:
    """Everything that the processes were told, in order of time."""
    lines = [json.loads(line) for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["at_s"])


def check_clients(lines: list[dict[str, Any]]) -> None:
    """By the clients' own clock, no one held a GPU that another held."""
    holding: dict[str, str] = {}
    for line in lines:
        if "got" in line:
            for gpu in line["gpus"]:
                assert gpu not in holding, f"{gpu} was given to {line['got']} while {holding[gpu]} held it"
                holding[gpu] = line["got"]
        elif "releasing" in line:
            holding = {gpu: lease for gpu, lease in holding.items() if lease != line["releasing"]}


def check_events(log: list[dict[str, Any]]) -> None:
    """By the event log, no GPU was ever in two leases, and tokens only rose."""
    holding: dict[str, str] = {}
    draining: set[str] = set()
    tokens = [0]
    assert [event["seq"] for event in log] == list(range(1, len(log) + 1))
    for event in log:
        if event["kind"] == "lease.granted":
            assert event["token"] > tokens[-1]
            tokens.append(event["token"])
            for gpu in event["gpus"]:
                assert gpu not in holding, f"{gpu} was granted to {event['lease_id']} while {holding[gpu]} held it"
                assert gpu not in draining, f"{gpu} was granted before it was clean"
                holding[gpu] = event["lease_id"]
        elif event["kind"] == "lease.ended":
            for gpu in event["gpus"]:
                assert holding.pop(gpu) == event["lease_id"]
                draining.add(gpu)
        elif event["kind"] == "gpu.clean":
            draining -= set(event["gpus"])
    assert not holding


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1, 3])
def test_all_of_two_hundred_processes_are_served_and_none_twice(tmp_path: Path, count: int) -> None:
    with (
        daemon(tmp_path, "--simulate", "8") as running,
        storm_over(running, tmp_path / "storm", count) as storm,
    ):
        _, complaints = storm.communicate(timeout=420)
        assert storm.returncode == 0, f"{complaints}\n{running.story()}"
        lines = told(tmp_path / "storm")
        assert sum("got" in line for line in lines) == PROCESSES
        assert sum("released" in line for line in lines) == PROCESSES
        check_clients(lines)
        log = events(running)
        check_events(log)
        assert sum(event["kind"] == "lease.granted" for event in log) == PROCESSES


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [40, pytest.param(PROCESSES, marks=pytest.mark.soak)])
def test_a_storm_of_trainings_that_open_every_gpu_is_served_on_a_driver_that_takes_its_time(
    tmp_path: Path, processes: int
) -> None:
    """By the machine's own witness, too, no two leases ever had anything of one GPU."""
    with driver_machine() as machine, daemon(tmp_path, "--node", "n", **machine.environment) as running:
        program = [machine.program, "-n"]
        with storm_over(running, tmp_path / "storm", processes=processes, program=program) as storm:
            _, complaints = storm.communicate(timeout=420)
        assert storm.returncode == 0, f"{complaints}\n{running.story()}"
        lines = told(tmp_path / "storm")
        assert sum("released" in line for line in lines) == processes
        check_clients(lines)
        check_events(events(running))
        assert machine.violations() == []
        eventually(lambda: all(entry.gpu is None for entry in machine.entries), 30)
        assert len({entry.lease_id for entry in machine.ended if entry.gpu is not None}) == processes


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))])
def test_a_daemon_killed_in_the_storm_loses_nothing_it_said(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    running = DaemonProcess(tmp_path / "d", "--simulate", "8", environment=PATIENT).start()
    directory = tmp_path / "storm"
    try:
        with storm_over(running, directory) as storm:
            for kill in range(3):
                so_far = 10 + 40 * kill + chance.randrange(30)
                eventually(
                    lambda so_far=so_far: (
                        sum("got" in line for line in told_safely(directory)) >= so_far or storm.poll() is not None
                    ),
                    240,
                    running.story,
                )
                running.kill()
                running.start()
            _, complaints = storm.communicate(timeout=420)
            assert storm.returncode == 0, f"{complaints}\n{running.story()}"
        lines = told(directory)
        check_clients(lines)
        # A grant whose answer was lost in a long outage ends by itself, after the process that it was meant for.
        live = "/v1/leases?state=active&state=queued"
        eventually(lambda: not running.call("GET", live).json["items"], 90, running.story)
        log = events(running)
        check_events(log)
        granted = {event["lease_id"]: event for event in log if event["kind"] == "lease.granted"}
        ended = {event["lease_id"]: event for event in log if event["kind"] == "lease.ended"}
        for line in lines:
            if "got" in line:
                event = granted[line["got"]]
                assert (event["token"], event["gpus"]) == (line["token"], line["gpus"])
            if "released" in line:
                assert ended[line["released"]]["reason"] == "released"
        assert sum("got" in line for line in lines) == PROCESSES
    finally:
        running.stop()


def told_safely(directory: Path) -> list[dict[str, Any]]:
    """`told`, while lines are being written."""
    found = []
    for path in directory.glob("*.jsonl"):
        found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return found
