"""From the end of a lease to a clean GPU, on a realistic driver: processes that others have keep no GPU, and those of
the former holder do."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.driver.daemon_view import RETAINED_S, clean_events, drains, gpu, reason, release, states, take
from tests.driver.machine import GPUS, UUIDS, DriverMachine
from tests.driver.test_machine import children

pytestmark = pytest.mark.alone


def masked(*gpus: int) -> dict[str, str]:
    """The mask of a user without a lease."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(UUIDS[gpu] for gpu in gpus)}


def test_a_training_that_began_later_on_another_gpu_keeps_nothing(
    running: DaemonProcess, machine: DriverMachine
) -> None:
    first = take(running, 1)
    mine = machine.start("-n", env=first["env"])
    other = take(running, 0)
    machine.start("-n", env=other["env"])
    mine.kill()
    release(running, first)
    drains(running, machine, first, 1)
    assert machine.left_of(other["id"], 1), "the other has its device file open all the while"


def test_nor_one_that_began_earlier_and_forks_workers_in_every_epoch(
    running: DaemonProcess, machine: DriverMachine
) -> None:
    other = take(running, 0)
    training = machine.start("-n", "-w", "2", "-e", "0.5", env=other["env"])
    first = take(running, 1)
    mine = machine.start(env=first["env"])
    born_s = time.monotonic()
    eventually(lambda: len(children(training.pid)) == 2 and time.monotonic() - born_s > 0.5, 10)
    mine.kill()
    release(running, first)
    drains(running, machine, first, 1)


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        pytest.param(("-g", UUIDS[5]), {}, id="CUDA without a mask"),
        pytest.param(("-n",), masked(5), id="NCCL"),
        pytest.param(("-n", "-w", "2", "-e", "0.5"), masked(5), id="forked workers"),
    ],
)
def test_nor_a_kernel_on_another_gpu_without_any_lease(
    running: DaemonProcess, machine: DriverMachine, options: tuple[str, ...], mask: dict[str, str]
) -> None:
    first = take(running, 1)
    mine = machine.start("-n", env=first["env"])
    machine.start(*options, env=mask)
    eventually(lambda: states(running)[5] == "foreign", 10, running.story)
    mine.kill()
    release(running, first)
    drains(running, machine, first, 1)


def test_a_known_monitor_that_starts_during_a_lease_keeps_nothing(
    running: DaemonProcess, machine: DriverMachine
) -> None:
    first = take(running, 1)
    mine = machine.start("-n", env=first["env"])
    for _ in range(2):
        machine.start("-x", name="dcgm-exporter").kill()
    machine.start("-x", name="dcgm-exporter")
    mine.kill()
    release(running, first)
    drains(running, machine, first, 1)


def test_an_unknown_one_delays_for_a_while_once_and_is_named(running: DaemonProcess, machine: DriverMachine) -> None:
    first = take(running, 1)
    exporter = machine.start("-x", name="an-exporter")
    release(running, first)
    begun_s = time.monotonic()
    eventually(lambda: str(exporter.pid) in reason(running, 1), 10, lambda: str(gpu(running, 1)))
    eventually(lambda: (first["id"], 1) in clean_events(running), RETAINED_S + 5, lambda: str(gpu(running, 1)))
    assert time.monotonic() - begun_s > RETAINED_S - 1, (
        "it may be a process of the former holder that has lost its marker"
    )
    assert f"pid {exporter.pid}" in clean_events(running)[first["id"], 1]["reason"]
    second = take(running, 1)
    release(running, second)
    drains_at_once(running, second, 1)


def drains_at_once(running: DaemonProcess, held: dict[str, object], index: int) -> None:
    """A lease that never used its GPU."""
    eventually(lambda: (held["id"], index) in clean_events(running), 4, lambda: reason(running, index))


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "without a marker"])
def test_an_orphaned_worker_keeps_the_gpu_for_as_long_as_it_lives(
    running: DaemonProcess, machine: DriverMachine, marked: bool
) -> None:
    """The worker itself is not listed. Its dead parent is, and the memory stays in use."""
    first = take(running, 1)
    env = first["env"] if marked else masked(1)
    training = machine.start("-n", "-w", "1", "-e", "100", env=env)
    eventually(lambda: len(children(training.pid)) == 1, 10)
    (worker,) = children(training.pid)
    eventually(lambda: bool(gpu(running, 1)["processes"]), 10, running.story)
    training.kill()
    training.wait()
    release(running, first)
    try:
        eventually(lambda: f"pid {training.pid}" in reason(running, 1) or str(worker) in reason(running, 1), 10)
        for _ in range(20):
            assert states(running)[1] in ("draining", "unknown"), gpu(running, 1)
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    if marked:
        drains(running, machine, first, 1)
    else:
        eventually(lambda: states(running)[1] == "free", 10, lambda: reason(running, 1))


def test_a_process_that_dies_slowly_keeps_the_gpu_until_its_memory_is_back(
    running: DaemonProcess, machine: DriverMachine
) -> None:
    machine.unlist_s, machine.free_s = (1.0, 1.0), (2.5, 2.5)
    first = take(running, 1)
    training = machine.start("-b", "2048", env=first["env"])
    training.kill()
    release(running, first)
    drains(running, machine, first, 1)
    second = take(running, 1)
    machine.start(env=second["env"])
    assert machine.violations() == []


def test_a_gpu_that_falls_off_drains_when_it_is_back_and_the_others_are_granted_meanwhile(
    running: DaemonProcess, machine: DriverMachine
) -> None:
    first = take(running, 2)
    training = machine.start("-n", env=first["env"])
    machine.lose(2)
    eventually(lambda: states(running)[2] == "unhealthy", 10, running.story)
    training.kill()
    release(running, first)
    for index in range(GPUS):
        if index != 2:
            release(running, take(running, index))
    assert states(running)[2] == "unhealthy"
    assert (first["id"], 2) not in clean_events(running)
    eventually(lambda: not machine.left_of(first["id"], 2), 10)
    machine.restore(2)
    eventually(lambda: states(running)[2] == "free", 20, lambda: str(gpu(running, 2)))
    take(running, 2)
