"""The stand-in machine itself: what its driver shows of real processes is what a real driver shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.daemon import eventually
from tests.driver.machine import FABRIC_IN_PROGRESS, GPUS, UUIDS, DriverMachine

pytestmark = pytest.mark.slow

CONTEXT_BYTES = 512 * 2**20
ASK = (
    "import json, sys, pynvml as n; n.nvmlInit(); out = []\n"
    "for i in range(n.nvmlDeviceGetCount()):\n"
    "  h = n.nvmlDeviceGetHandleByIndex(i)\n"
    "  m = n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used\n"
    "  out.append([m, sorted(p.pid for p in n.nvmlDeviceGetComputeRunningProcesses_v3(h))])\n"
    "print(json.dumps(out))"
)


def shown(machine: DriverMachine) -> list[tuple[int, list[int]]]:
    """Memory in use and pids on each GPU, through the real binding."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | machine.environment, capture_output=True, check=True
    )
    return [tuple(one) for one in json.loads(asked.stdout)]


def open_files(pid: int) -> set[str]:
    """The device files that a process has open."""
    links = (os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd"))
    return {Path(link).name for link in links if Path(link).name.startswith("nvidia")}


def lease(gpu: int, *others: int) -> dict[str, str]:
    """The variables of a lease on these GPUs."""
    uuids = [UUIDS[each] for each in (gpu, *others)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "GPULEASE_LEASE_ID": f"lease-on-{gpu}"}


def test_masked_cuda_opens_its_own_and_unmasked_cuda_and_nccl_open_all(machine: DriverMachine) -> None:
    everything = {f"nvidia{number}" for number in range(GPUS)}
    assert open_files(machine.start(env=lease(2)).pid) == {"nvidia3"}
    assert open_files(machine.start("-n", env=lease(4)).pid) == everything
    assert open_files(machine.start("-x").pid) == everything
    assert open_files(machine.start().pid) == everything


def test_a_context_is_listed_and_has_its_memory_until_a_while_after_its_process(machine: DriverMachine) -> None:
    training = machine.start("-b", "1024", env=lease(3))
    used = CONTEXT_BYTES + 2**30
    assert shown(machine) == [(used, [training.pid]) if gpu == 3 else (0, []) for gpu in range(GPUS)]
    training.kill()
    training.wait()
    gone_s = time.monotonic()
    eventually(lambda: machine.gone_at_s("lease-on-3", 3) is not None, 60)
    assert shown(machine)[3] == (0, [])
    (context,) = (one for one in machine.ended if one.gpu == 3)
    assert context.dead_at_s is not None
    assert context.freed_at_s is not None
    assert abs(context.dead_at_s - gone_s) < 5
    assert 0.04 < context.freed_at_s - context.dead_at_s < 5


def test_a_dead_rank_stays_listed_as_long_as_a_worker_that_it_forked_lives(machine: DriverMachine) -> None:
    training = machine.start("-w", "1", "-e", "60", env=lease(0))
    eventually(lambda: len(children(training.pid)) == 1, 60)
    (worker,) = children(training.pid)
    training.kill()
    training.wait()
    assert shown(machine)[0] == (CONTEXT_BYTES, [training.pid])
    assert machine.left_of("lease-on-0", 0)
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: not machine.left_of("lease-on-0", 0), 60)
    assert shown(machine)[0] == (0, [])


def children(pid: int) -> list[int]:
    """Pids of a process's children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_ranks_have_a_context_each_and_every_device_file_open(machine: DriverMachine) -> None:
    job = machine.start("-r", "-n", env=lease(5, 6), wait=True)
    eventually(lambda: [len(pids) for _, pids in shown(machine)] == [0, 0, 0, 0, 0, 1, 1, 0], 60)
    job.terminate()
    assert job.wait(30) == 0, "as a launcher it passes SIGTERM on, and waits for its ranks"
    eventually(lambda: not machine.entries, 60)


def test_a_list_waits_while_a_context_is_made(machine: DriverMachine) -> None:
    machine.slow_lists(0.001)
    machine.state.context_us = 1_000_000
    begun_s = time.monotonic()
    training = machine.start(env=lease(1), wait=False)
    eventually(lambda: bool(machine.left_of("lease-on-1", 1)), 60)
    shown(machine)
    assert time.monotonic() - begun_s > 0.6, "eight lists, each behind a call of a tenth of a second"
    assert training.stdout is not None
    assert training.stdout.readline() == f"ready {training.pid}\n"


def test_the_machine_testifies_against_two_leases_on_one_gpu(machine: DriverMachine) -> None:
    machine.start(env=lease(0))
    machine.start(env=lease(0))
    assert machine.violations() == [], "two processes of one lease may"
    other = machine.start(env=lease(0) | {"GPULEASE_LEASE_ID": "another"})
    (before, after) = machine.violations()
    assert before.startswith(f"GPU 0: pid {other.pid} of lease another beside pid ")
    assert before == after


def test_cuda_fails_until_the_fabric_is_up_and_moves_up_past_a_lost_gpu(machine: DriverMachine) -> None:
    machine.fabric(FABRIC_IN_PROGRESS)
    failed = machine.start(env=lease(0), wait=False)
    assert failed.wait(30) == 2
    assert failed.stdout is not None
    assert failed.stdout.read() == "failed 802\n"
    machine.fabric(3)
    machine.lose(0)
    first = machine.start(env={"CUDA_VISIBLE_DEVICES": "0"})
    assert [entry.gpu for entry in machine.entries if entry.pid == first.pid and entry.gpu is not None] == [1]


def test_calls_on_a_blocked_gpu_come_back_when_that_is_over(machine: DriverMachine) -> None:
    machine.block(1.0, gpu=7)
    begun_s = time.monotonic()
    shown(machine)
    assert time.monotonic() - begun_s > 0.9
