"""Against a real daemon with GPUs of several kinds: what CUDA shows under the numbers is what was leased."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.stand_in_cuda import Card, Cuda, machine
from tests.daemon import DaemonProcess, daemon, eventually

CARDS = tuple(Card(f"{'abacd'[index]}{index}" + "0" * 30, speed) for index, speed in enumerate((1, 9, 5, 9, 2)))
"""In PCI order; CUDA's own order is 1, 3, 2, 4, 0."""
PROGRAM = """
import json, os, sys, using_cuda
from pathlib import Path
import gpulease
case = json.loads(sys.argv[1])
if case["initialised"]:
    using_cuda.init()
using_cuda.put(case["changed"])
before = using_cuda.calls_of(os.getpid())
told = {}
try:
    numbers = gpulease.find_usable_cuda_devices(case["count"], wait_s=60)
except (RuntimeError, ValueError) as error:
    told["refused"] = f"{type(error).__name__}: {error}"
else:
    lease = gpulease.Client().lease_by_id(os.environ["GPULEASE_LEASE_ID"])
    told["leased"] = sorted(gpu.uuid for gpu in lease.gpus)
    told["loaded"] = using_cuda.loaded()
    told["called"] = using_cuda.calls_of(os.getpid())[len(before):]
    told["order"] = os.environ.get("CUDA_DEVICE_ORDER")
    if not case["initialised"]:
        child = os.fork()
        if not child:
            os._exit(using_cuda.init())
        told["forked"] = os.waitpid(child, 0)[1]
    shown = using_cuda.shown()
    told["numbers"], told["cuda"] = numbers, sorted(shown[number] for number in numbers)
told["leases"] = len(gpulease.Client().leases("active"))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Cuda:
    return Cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    place: Path = tmp_path_factory.mktemp("daemon")
    hardware = {"gpus": [{"uuid": card.uuid, "name": f"Speed {card.speed}"} for card in CARDS]}
    (place / "machine.json").write_text(json.dumps(hardware))
    with daemon(place, "--simulate", str(place / "machine.json")) as process:
        yield process


def everything_is_free(running: DaemonProcess) -> None:
    """Wait for it."""
    with running.client() as client:
        eventually(lambda: {gpu.state for gpu in client.gpus()} == {"free"}, 60, running.story)


def ask(
    running: DaemonProcess,
    cuda: Cuda,
    count: int,
    mask: str | None = None,
    order: str | None = None,
    *,
    initialised: bool = False,
    changed: dict[str, str | None] | None = None,
) -> dict[str, Any]:
    """What a script of its own comes to. All GPUs are free before."""
    everything_is_free(running)
    variables = {"CUDA_VISIBLE_DEVICES": mask, "CUDA_DEVICE_ORDER": order}
    given = {name: value for name, value in variables.items() if value is not None}
    how = json.dumps({"count": count, "initialised": initialised, "changed": changed or {}})
    ran = cuda.python(PROGRAM, how, GPULEASE_URL=running.url, STAND_IN_CUDA=machine(*CARDS), **given)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


@pytest.mark.parametrize(
    ("mask", "order", "initialised", "changed", "leased"),
    [
        (None, None, False, None, {0, 1, 2, 3, 4}),
        (None, None, True, None, {0, 1, 2, 3, 4}),
        ("4,0", None, False, None, {4, 0}),
        ("0,2", "FASTEST_FIRST", False, None, {1, 2}),
        ("0,2", None, True, {"CUDA_VISIBLE_DEVICES": "4"}, {1, 2}),
        ("0,2", "PCI_BUS_ID", True, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {0, 2}),
        ("4,3", None, False, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {3}),
        (f"{CARDS[3].uuid},GPU-b", "FASTEST_FIRST", True, {"CUDA_VISIBLE_DEVICES": ""}, {3, 1}),
    ],
)
def test_cuda_shows_leased_gpus_under_the_ordinals(running, cuda, mask, order, initialised, changed, leased) -> None:
    told = ask(running, cuda, len(leased), mask, order, initialised=initialised, changed=changed)
    assert told["leased"] == sorted(CARDS[index].uuid for index in leased)
    assert told["cuda"] == told["leased"]


def test_a_new_process_loads_no_cuda_can_fork_and_uses_pci_order(running, cuda) -> None:
    told = ask(running, cuda, 2)
    assert told["loaded"] == {"torch": False, "libcuda": False}
    assert told["called"] == []
    assert told["forked"] == 0
    assert told["order"] == "PCI_BUS_ID"


def test_a_process_that_uses_cuda_gets_no_new_context_and_keeps_its_order(running, cuda) -> None:
    told = ask(running, cuda, 2, initialised=True)
    assert (told["called"], told["order"]) == ([], None)


GIVEN_BACK = """
import gpulease, using_cuda
gpulease.find_usable_cuda_devices(1, set_visible=True)
using_cuda.init()
gpulease.release()
try:
    gpulease.find_usable_cuda_devices(2)
except gpulease.MaskLatched as error:
    print(error)
"""


def test_cuda_that_began_with_gpus_given_back_since_shows_no_others(running, cuda) -> None:
    everything_is_free(running)
    ran = cuda.python(GIVEN_BACK, GPULEASE_URL=running.url, STAND_IN_CUDA=machine(*CARDS))
    assert ran.stdout.startswith("CUDA was initialized while CUDA_VISIBLE_DEVICES named GPUs that were given back")
    assert "Start the process again" in ran.stdout, ran.stderr


@pytest.mark.parametrize("mask", ["MIG-aa", "MIG-GPU-a0/1/0"])
def test_a_refusal_leases_nothing(running, cuda, mask: str) -> None:
    told = ask(running, cuda, 1, mask)
    assert told["refused"].startswith("UnknownOrdinals: CUDA_VISIBLE_DEVICES names the MIG slice")
    assert told["leases"] == 0


@pytest.mark.parametrize("mask", [None, "0,2,4"])
@pytest.mark.parametrize("initialised", [False, True])
def test_each_rank_has_its_own_ordinals_for_the_same_gpus(running, cuda, initialised: bool, mask: str | None) -> None:
    """The finder's CUDA may count in its own order, and with a mask that has changed since; the rank's does not."""
    rank = """
import os, gpulease, using_cuda
numbers = gpulease.find_usable_cuda_devices(2)
shown = using_cuda.shown()
print(sorted(shown[number] for number in numbers))
"""
    finder = f"""
import os, subprocess, sys, gpulease, using_cuda
if {initialised}:
    using_cuda.init()
using_cuda.put({{"CUDA_VISIBLE_DEVICES": {mask!r}}})
numbers = gpulease.find_usable_cuda_devices(2, wait_s=60)
subprocess.run([sys.executable, "-c", {rank!r}], env=os.environ | {{"LOCAL_RANK": "1"}}, check=True)
shown = using_cuda.shown()
print(sorted(shown[number] for number in numbers))
print(len(gpulease.Client().leases("active")))
"""
    everything_is_free(running)
    before = {"CUDA_VISIBLE_DEVICES": ",".join(card.uuid for card in (CARDS[4], CARDS[2], CARDS[0]))}
    told = cuda.python(finder, GPULEASE_URL=running.url, STAND_IN_CUDA=machine(*CARDS), **(before if mask else {}))
    by_rank, by_finder, leases = told.stdout.splitlines()
    assert (by_rank, leases) == (by_finder, "1"), told.stderr


@pytest.mark.parametrize("seed", range(12))
def test_the_ordinals_mean_leased_gpus_for_any_mask_and_order(running, cuda, seed: int) -> None:
    rng = random.Random(seed)
    orders = (None, "PCI_BUS_ID", "FASTEST_FIRST")

    def mask() -> str | None:
        chosen = rng.sample(range(5), rng.randrange(1, 6))
        by_index, by_uuid = [str(one) for one in chosen], [CARDS[one].uuid for one in chosen]
        return ",".join(rng.choice([by_index, by_uuid])) if rng.random() < 0.8 else None

    changed = {"CUDA_VISIBLE_DEVICES": mask(), "CUDA_DEVICE_ORDER": rng.choice(orders)}
    told = ask(running, cuda, 1, mask(), rng.choice(orders), initialised=rng.random() < 0.5, changed=changed)
    assert len(told["numbers"]) == 1
    assert told["cuda"] == told["leased"]
    assert told["called"] == []
