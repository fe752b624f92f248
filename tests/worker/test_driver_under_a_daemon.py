"""A daemon with a worker on the stand-in for NVML: how each driver fault changes the GPUs' states."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.client.stand_in_cuda import Card, Cuda, machine, no_cuda
from tests.daemon import PATIENT, DaemonProcess, eventually
from tests.worker.build import python
from tests.worker.stand_in import (
    DRIVER_NOT_LOADED,
    EVERY,
    GPU_IS_LOST,
    HANGS,
    MISMATCH,
    NO_PERMISSION,
    NOT_SUPPORTED,
    POOR,
    RESET_REQUIRED,
    THIRD,
    WHOLE,
    Driver,
)

THREE = (("count", EVERY, 3), ("idle", 0, 1))
"""Three idle GPUs: the poor one is prohibited, the others are free."""
NVITOP = (
    "import json; from nvitop import Device; print(json.dumps([{'uuid': one.uuid().lower(), 'name': one.name(), "
    "'memory_used_bytes': one.memory_used(), 'memory_total_bytes': one.memory_total(), "
    "'pids': sorted(one.processes())} for one in Device.all()]))"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    found = Driver(tmp_path_factory.mktemp("driver"))
    no_cuda(found.directory)
    return found


@contextmanager
def reading_often(driver: Driver, place: Path, **deadlines: str) -> Iterator[DaemonProcess]:
    lists_only = ("count", EVERY, 3), ("gone", 0, 1)
    driver.says(*lists_only)
    paces = {"GPULEASE_PROCESSES_S": "0.05", "GPULEASE_HEALTH_S": "0.5", "GPULEASE_POLL_S": "0.2"} | deadlines
    process = DaemonProcess(place / "d", "--node", "n", environment={**driver.environment, **paces})
    try:
        yield process.start()
    finally:
        process.stop()


@pytest.fixture(scope="module")
def running(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Patient with a driver that is slow because the machine is busy."""
    patient = {"GPULEASE_CALL_DEADLINE_S": "20", "GPULEASE_PROBE_DEADLINE_S": "25"}
    with reading_often(driver, tmp_path_factory.mktemp("daemon"), **patient) as process:
        yield process


@pytest.fixture(scope="module")
def impatient(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """With deadlines that leave time to show within two seconds that they have passed."""
    place = tmp_path_factory.mktemp("impatient")
    short = {"GPULEASE_CALL_DEADLINE_S": "0.6", "GPULEASE_PROBE_DEADLINE_S": "0.9"}
    with reading_often(driver, place, **short, **other_gpus(place)) as process:
        yield process


def other_gpus(tmp_path: Path) -> dict[str, str]:
    """For a daemon beside `running`, whose worker has claimed the GPUs: they are other GPUs of the same UUIDs."""
    return {"GPULEASE_DEVICE_FILES": str(tmp_path / "nvidia")}


def gpus(running: DaemonProcess) -> dict[str, dict[str, Any]]:
    return {gpu["uuid"]: gpu for gpu in running.call("GET", "/v1/gpus").json["items"]}


def states(running: DaemonProcess) -> dict[str, str]:
    return {uuid: gpu["state"] for uuid, gpu in gpus(running).items()}


def ask(running: DaemonProcess, uuid: str) -> int:
    """The HTTP status of a request for this GPU that does not queue; a lease is released immediately."""
    answer = running.call("POST", "/v1/leases?wait_s=10", {"devices": [uuid], "queue": False})
    if answer.status == 201:
        running.call("POST", f"/v1/leases/{answer.json['id']}/release", {"token": answer.json["token"]})
        eventually(lambda: states(running)[uuid] != "draining", 30, lambda: str(gpus(running)))
    return answer.status


@pytest.mark.parametrize(
    ("matters", "state", "words"),
    [
        pytest.param((), "free", "", id="sound"),
        pytest.param((("idle", 0, 0),), "foreign", "4194305", id="in use by another user"),
        pytest.param(
            (("nvmlDeviceGetComputeRunningProcesses_v3", 0, NO_PERMISSION),), "unhealthy", "processes", id="lists"
        ),
        pytest.param((("nvmlDeviceGetHandleByIndex_v2", 0, GPU_IS_LOST),), "unhealthy", "lost", id="lost"),
        pytest.param((("nvmlDeviceGetHandleByIndex_v2", 0, NO_PERMISSION),), "unhealthy", "unreadable", id="refused"),
        pytest.param((("nvmlDeviceGetTemperature", 0, RESET_REQUIRED),), "unhealthy", "reset_required", id="reset"),
        pytest.param((("action", 0, 7),), "unhealthy", "reboot_required", id="reboot"),
        pytest.param((("remap", 0, 1),), "free", "", id="row remap pending"),
        pytest.param((("remap", 0, 2),), "unhealthy", "row_remap_failed", id="row remap failed"),
        pytest.param((("mig", 0, 1),), "unhealthy", "mig", id="MIG"),
        pytest.param((("fabric", 0, 2),), "unhealthy", "fabric_not_ready", id="fabric late"),
        pytest.param((("fabric", 0, 3), ("fabric_status", 0, 999)), "unhealthy", "fabric_not_ready", id="fabric fails"),
        pytest.param(
            (("nvmlDeviceGetMemoryInfo", 0, NOT_SUPPORTED), ("nvmlDeviceGetMemoryInfo_v2", 0, NOT_SUPPORTED)),
            "free",
            "",
            id="integrated memory",
        ),
    ],
)
def test_a_fault_of_one_gpu_concerns_only_that_gpu_and_passes_by_itself(
    running: DaemonProcess, driver: Driver, matters: tuple[tuple[str, int, object], ...], state: str, words: str
) -> None:
    driver.says(*THREE, *matters)
    eventually(lambda: states(running).get(WHOLE.uuid) == state, 30, lambda: str(gpus(running)))
    if ("remap", 0, 1) in matters:
        eventually(
            lambda: gpus(running)[WHOLE.uuid]["warnings"] == ["row_remap_pending"], 30, lambda: str(gpus(running))
        )
    elif state == "free" and matters:
        # Otherwise a lease could begin with memory that is known and end with memory that is not.
        eventually(lambda: gpus(running)[WHOLE.uuid]["memory_used_bytes"] is None, 30, lambda: str(gpus(running)))
    assert states(running) == {POOR.uuid: "prohibited", WHOLE.uuid: state, THIRD.uuid: "free"}
    assert words in (gpus(running)[WHOLE.uuid]["reason"] or "")
    assert ask(running, WHOLE.uuid) == (201 if state == "free" else 409)
    assert ask(running, THIRD.uuid) == 201
    driver.says(*THREE)
    eventually(lambda: states(running)[WHOLE.uuid] == "free", 30, lambda: str(gpus(running)))
    assert ask(running, WHOLE.uuid) == 201


@pytest.mark.alone
@pytest.mark.parametrize(
    ("matters", "words"),
    [
        pytest.param(("nvmlDeviceGetTemperature", EVERY, DRIVER_NOT_LOADED), "Driver Not Loaded", id="unloaded"),
        pytest.param(("nvmlDeviceGetTemperature", EVERY, MISMATCH), "changed under the running system", id="upgraded"),
        pytest.param(("nvmlDeviceGetPowerUsage", 2, HANGS), "nvmlDeviceGetPowerUsage did not answer", id="hung"),
    ],
)
def test_a_driver_that_fails_as_a_whole_makes_every_gpu_unknown_within_two_seconds(
    impatient: DaemonProcess, driver: Driver, matters: tuple[str, int, object], words: str
) -> None:
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 2 and len(took_s) < 3):  # the machine may keep the daemon from running
        driver.says(*THREE)
        eventually(lambda: states(impatient)[THIRD.uuid] == "free", 60, lambda: str(gpus(impatient)))
        begun = time.monotonic()
        driver.says(*THREE, matters)
        eventually(lambda: set(states(impatient).values()) == {"unknown"}, 60, lambda: str(gpus(impatient)))
        took_s.append(time.monotonic() - begun)
    assert took_s[-1] < 2, took_s
    eventually(lambda: words in (gpus(impatient)[WHOLE.uuid]["reason"] or ""), 60, lambda: str(gpus(impatient)))
    assert ask(impatient, THIRD.uuid) == 409
    driver.says(*THREE)
    eventually(lambda: states(impatient)[THIRD.uuid] == "free", 30, lambda: str(gpus(impatient)))
    eventually(lambda: ask(impatient, THIRD.uuid) == 201, 30, lambda: str(gpus(impatient)))


def test_an_unmodified_nvitop_shows_the_same_gpus_as_gpulease_status(running: DaemonProcess, driver: Driver) -> None:
    driver.says(("count", EVERY, 3))
    eventually(lambda: states(running)[WHOLE.uuid] == "foreign", 30, lambda: str(gpus(running)))
    command = python("-m", "gpulease_cli", "status", "--json")
    said = subprocess.run(
        command, env={**driver.environment, "GPULEASE_URL": running.url}, capture_output=True, check=True
    )
    ours = {gpu["uuid"].lower(): gpu for gpu in json.loads(said.stdout)["items"]}
    asked = subprocess.run([sys.executable, "-c", NVITOP], env=driver.environment, capture_output=True, check=True)
    theirs = json.loads(asked.stdout.splitlines()[-1])
    assert {one["uuid"] for one in theirs} == set(ours)
    for one in theirs:
        mine = ours[one["uuid"]]
        assert (mine["name"], sorted(process["pid"] for process in mine["processes"])) == (one["name"], one["pids"])
        if mine["memory_total_bytes"] is not None:  # nvitop then shows the host's memory in its place
            keys = ("memory_used_bytes", "memory_total_bytes")
            assert [mine[key] for key in keys] == [one[key] for key in keys]
    table = subprocess.run(
        python("-m", "nvitop", "--once", "--ascii"), env=driver.environment, capture_output=True, check=True
    )
    assert all(gpu["name"] in table.stdout.decode() for gpu in ours.values())


def test_a_gpu_on_which_cuda_starts_is_granted_whatever_its_fabric_says(driver: Driver, tmp_path: Path) -> None:
    driver.says(*THREE, ("fabric", 0, 2))
    Cuda(driver.directory)
    cards = machine(*(Card(gpu.uuid[4:].replace("-", "")) for gpu in (POOR, WHOLE, THIRD)))
    more = {"GPULEASE_POLL_S": "0.2", "STAND_IN_CUDA": cards} | other_gpus(tmp_path)
    process = DaemonProcess(tmp_path / "d", "--node", "n", environment={**driver.environment, **PATIENT, **more})
    try:
        process.start()
        eventually(lambda: states(process).get(WHOLE.uuid) == "free", 60, lambda: str(gpus(process)))
        assert ask(process, WHOLE.uuid) == 201
        shown = gpus(process)[WHOLE.uuid]
        assert (shown["fabric"], shown["warnings"]) == ("in_progress", ["fabric_not_ready"])
    finally:
        process.stop()
        no_cuda(driver.directory)


def test_no_grant_rests_on_a_process_list_that_is_repeated(driver: Driver, tmp_path: Path) -> None:
    three = ("count", EVERY, 3)
    driver.says(three, ("gone", 0, 1))  # the memory stays the same all the while, so only the lists can tell
    paces = {"GPULEASE_PROCESSES_S": "60", "GPULEASE_POLL_S": "0.1"} | other_gpus(tmp_path)
    slow = DaemonProcess(tmp_path / "d", "--node", "n", environment={**driver.environment, **PATIENT, **paces})

    def is_old() -> bool:
        seen = datetime.fromisoformat(gpus(slow)[WHOLE.uuid]["observed_at"])
        return (datetime.now(UTC) - seen).total_seconds() > 1

    try:
        slow.start()
        assert ask(slow, WHOLE.uuid) == 201
        eventually(is_old, 30, lambda: str(gpus(slow)))
        driver.says(three)
        assert states(slow)[WHOLE.uuid] == "free", "as of the last reading"
        assert ask(slow, WHOLE.uuid) == 409, "the lists were read again for it"
        assert states(slow)[WHOLE.uuid] == "foreign"
    finally:
        slow.stop()
