"""`usable_cuda_devices`, `on_gpus` and `free_cuda_devices`, against a real daemon with four simulated GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpulease
from gpulease import Client, LeaseState
from tests.cli.programs import Program, environ, wait_until
from tests.device_trials import RUNNERS, TRIAL, TRIALS, check_no_overlap


def lines(program: str, python: Program, *arguments: str, **more: str) -> list[str]:
    result = python(program, *arguments, **more)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().split("\n")


@pytest.mark.budget(20)
@pytest.mark.parametrize("kind", RUNNERS)
def test_more_workers_than_gpus_never_share_one_and_all_are_served(
    client: Client, url: str, tmp_path: Path, kind: str
) -> None:
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-c", TRIAL + RUNNERS[kind], str(log), "0"]
    result = subprocess.run(
        command, env=environ(GPULEASE_URL=url), capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    check_no_overlap(log.read_text(), TRIALS)
    assert not client.leases(LeaseState.ACTIVE)


CUDA_IS_USED = """
import gpulease, sys, threading, time
from gpulease import device_block, find_devices
device_block.uses_cuda = lambda visible: True
held = lambda: sorted(len(lease.gpus) for lease in gpulease.Client().leases("active"))
"""
"""A process that has used CUDA, whose GPUs would drain until it ends."""


@pytest.mark.budget(20)
@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_in_a_process_that_has_used_cuda_blocks_take_over_what_earlier_ones_had(
    client: Client, url: str, tmp_path: Path, kind: str
) -> None:
    log = tmp_path / "log"
    log.touch()
    seq = max((event.seq for event in client.events()), default=0)
    command = [sys.executable, "-c", CUDA_IS_USED + TRIAL + RUNNERS[kind], str(log), "0"]
    result = subprocess.run(
        command, env=environ(GPULEASE_URL=url), capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    check_no_overlap(log.read_text(), TRIALS)
    granted = [event for event in client.events(after=seq) if event.kind == "lease.granted"]
    assert len(granted) <= 4, "each GPU was leased once"
    wait_until(lambda: not client.leases(LeaseState.ACTIVE))


def test_what_is_kept_is_shared_out_in_other_numbers(client: Client, python: Program) -> None:
    program = """
with gpulease.usable_cuda_devices(2):
    pass
print(held(), gpulease.free_cuda_devices())
with gpulease.usable_cuda_devices(1) as one, gpulease.usable_cuda_devices(1) as two:
    print(one, two, held())
with gpulease.usable_cuda_devices(3) as three:
    print(three, held())
with gpulease.usable_cuda_devices(-1) as all:
    print(all, held())
print(sorted(len(lease.gpus) for lease in gpulease.release()), held())
"""
    assert lines(CUDA_IS_USED + program, python) == [
        "[2] [0, 1, 2, 3]",
        "[0] [1] [2]",
        "[0, 1, 2] [1, 2]",
        "[0, 1, 2] [1, 2]",
        "[1, 2] []",
    ]


def test_a_block_that_waits_gets_what_another_one_of_its_process_leaves(client: Client, python: Program) -> None:
    program = """
def wait():
    with gpulease.usable_cuda_devices(2) as devices:
        print(devices, held(), flush=True)
client, outer, thread = gpulease.Client(), gpulease.usable_cuda_devices(2), threading.Thread(target=wait)
outer.__enter__()
thread.start()
while not client.leases("queued"):
    time.sleep(0.01)
outer.__exit__(None, None, None)
thread.join()
with gpulease.usable_cuda_devices(1) as devices:
    print(devices, len(client.leases("queued")))
try:
    gpulease.usable_cuda_devices(3, wait_s=0).__enter__()
except gpulease.NotNow as error:
    print(gpulease.free_cuda_devices())
"""
    with client.lease(devices=[2, 3], wait_s=60):
        said = lines(CUDA_IS_USED + program, python)
    assert said == ["[0, 1] [2, 2]", "[0] 0", "[0, 1]"]


def test_a_block_gives_back_at_its_end_and_after_an_exception(client: Client, python: Program) -> None:
    program = """
import gpulease
held = lambda: len(gpulease.Client().leases("active"))
block = gpulease.usable_cuda_devices(2)
print(block.gpus)
with block as devices:
    print(devices, held(), len(block.gpus), block.lost)
print(held(), block.gpus)
try:
    with gpulease.usable_cuda_devices(1):
        1 / 0
except ZeroDivisionError:
    print(held())
with gpulease.usable_cuda_devices(0) as devices:
    print(devices, held())
"""
    assert lines(program, python) == ["()", "[0, 1] 1 2 False", "0 ()", "0", "[] 0"]


def test_find_in_a_block_returns_its_gpus_and_outside_it_others(client: Client, python: Program) -> None:
    program = """
import gpulease
find = lambda n: gpulease.find_usable_cuda_devices(n, wait_s=60)
with gpulease.usable_cuda_devices(2) as outer:
    with gpulease.usable_cuda_devices(1) as inner:
        print(outer, inner, find(1), find(-1))
    print(find(-1), find(1), len(gpulease.reserved_leases()))
    try:
        find(3)
    except gpulease.InUse:
        print("InUse")
"""
    assert lines(program, python) == ["[0, 1] [2] [2] [2]", "[0, 1] [0] 0", "InUse"]


@pytest.mark.parametrize("reserve", ["outer.__enter__()", "gpulease.find_usable_cuda_devices(3, wait_s=60)"])
def test_a_block_that_would_wait_for_itself_is_refused(client: Client, python: Program, reserve: str) -> None:
    program = f"""
import gpulease
outer = gpulease.usable_cuda_devices(3)
{reserve}
try:
    gpulease.usable_cuda_devices(2).__enter__()
except gpulease.InUse as error:
    print(error)
"""
    (refused,) = lines(program, python)
    assert refused.startswith("The devices [0, 1, 2] are held until after this block")
    assert "wait for itself" in refused


def test_a_mask_limits_a_block(client: Client, python: Program) -> None:
    program = """
import gpulease
print(gpulease.free_cuda_devices())
with gpulease.usable_cuda_devices(2) as devices:
    print(devices, [gpu.index for gpu in gpulease.Client().leases("active")[-1].gpus], gpulease.free_cuda_devices())
try:
    gpulease.usable_cuda_devices(4).__enter__()
except ValueError as error:
    print(error)
"""
    assert lines(program, python, CUDA_VISIBLE_DEVICES="3,1,0") == [
        "[0, 1, 2]",
        "[1, 2] [0, 1] [0]",
        "You requested to find 4 devices but this machine only has 3 GPUs.",
    ]


def test_looking_for_free_gpus_reserves_none(client: Client, python: Program) -> None:
    with client.lease(devices=[0, 2], wait_s=60):
        assert lines("import gpulease; print(gpulease.free_cuda_devices())", python) == ["[1, 3]"]
        assert len(client.leases(LeaseState.ACTIVE)) == 1
    assert lines("import gpulease; print(gpulease.free_cuda_devices())", python, CUDA_VISIBLE_DEVICES="") == ["[]"]


def test_a_child_that_is_forked_in_a_block_does_not_end_it(client: Client, python: Program) -> None:
    program = """
import gpulease, os
with gpulease.usable_cuda_devices(1) as devices:
    child = os.fork()
    if not child:
        with gpulease.usable_cuda_devices(1) as own:
            print(devices, own, gpulease.find_usable_cuda_devices(1), flush=True)
    if child:
        os.waitpid(child, 0)
        print(len(gpulease.Client().leases("active")), flush=True)
"""
    assert lines(program, python) == ["[0] [1] [1]", "1"]


def test_a_program_that_is_killed_in_a_block_gives_back(client: Client, url: str) -> None:
    program = "import gpulease, os\nwith gpulease.usable_cuda_devices(2): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program], env=environ(GPULEASE_URL=url), check=False, timeout=60)
    wait_until(lambda: not client.leases(LeaseState.ACTIVE))
    assert client.leases(LeaseState.ENDED)[0].end_reason == "holder_died"


def test_a_cancelled_task_takes_its_request_back(client: Client, python: Program) -> None:
    program = """
import asyncio, gpulease
async def block():
    async with gpulease.usable_cuda_devices(4):
        pass
async def main():
    task = asyncio.create_task(block())
    async with gpulease.AsyncClient() as client:
        while not await client.leases("queued"):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        print(task.cancelled(), len(await client.leases("queued")))
asyncio.run(main())
"""
    with client.lease(1, wait_s=60):
        assert lines(program, python) == ["True 0"]


def test_a_task_that_is_cancelled_just_after_the_grant_holds_nothing(client: Client, python: Program) -> None:
    program = """
import asyncio, gpulease
from gpulease.kept_gpus import GpuKeeper
done = GpuKeeper.done
async def block():
    async with gpulease.usable_cuda_devices(1):
        print("entered")
async def main():
    task, loop = asyncio.create_task(block()), asyncio.get_running_loop()
    def cancel(*arguments):
        print(len(gpulease.Client().leases("active")))
        loop.call_soon_threadsafe(task.cancel)
        GpuKeeper.done = done
        done(*arguments)
    GpuKeeper.done = cancel
    await asyncio.wait([task])
    print(task.cancelled(), len(gpulease.Client().leases(["queued", "active"])))
asyncio.run(main())
"""
    assert lines(program, python) == ["1", "True 0"]


def test_a_second_thread_that_gets_the_gpus_of_the_first_is_warned_once(client: Client, python: Program) -> None:
    program = """
import gpulease, threading
found = []
find = lambda: found.append(gpulease.find_usable_cuda_devices(1, wait_s=60))
def in_thread():
    thread = threading.Thread(target=find, name="second")
    thread.start()
    thread.join()
in_thread()
in_thread()     # after the first has ended: one trial after the other, each in a thread, is right
print(found, flush=True)
gpulease.release()
find()
in_thread()
in_thread()
"""
    result = python(program)
    assert result.stdout.strip() == "[[0], [0]]"
    assert result.stderr.count("find_usable_cuda_devices was called in thread 'second'") == 1
    assert "write `with gpulease.usable_cuda_devices(1) as devices:`" in result.stderr


def test_a_refusal_by_ones_own_process_says_so(client: Client, python: Program) -> None:
    program = """
import gpulease, os
gpulease.find_usable_cuda_devices(2, wait_s=60, reuse=False)
try:
    gpulease.find_usable_cuda_devices(3, reuse=False)
except gpulease.NotNow as error:
    print(str(error).replace(str(os.getpid()), "PID"))
"""
    with client.lease(devices=[3], wait_s=60, label="theirs"):
        (refused,) = lines(program, python)
    assert "The devices [0, 1] are held by this process itself (pid PID), by other calls." in refused
    assert "The devices [3] are occupied by other processes: GPU 3: " in refused
    assert refused.endswith("write `with gpulease.usable_cuda_devices(3) as devices:`.")


def test_the_mask_is_not_narrowed_while_a_block_is_open(client: Client, python: Program) -> None:
    program = """
import gpulease, os, threading
def narrow():
    try:
        gpulease.find_usable_cuda_devices(1, set_visible=True)
    except gpulease.InUse as error:
        print(error)
with gpulease.usable_cuda_devices(1):
    thread = threading.Thread(target=narrow)
    thread.start()
    thread.join()
print(gpulease.find_usable_cuda_devices(1, set_visible=True, wait_s=60))
"""
    refused, found = lines(program, python)
    assert "their numbers would change with CUDA_VISIBLE_DEVICES" in refused
    assert found == "[0]"


def test_an_empty_mask_names_who_sets_it(python: Program) -> None:
    result = python("import gpulease; gpulease.find_usable_cuda_devices(1)", CUDA_VISIBLE_DEVICES="")
    assert "there are no visible CUDA devices on this machine.\n" in result.stderr
    assert "CUDA_VISIBLE_DEVICES is '', which hides every GPU from this process." in result.stderr
    assert "gpus_per_node=" in result.stderr


@pytest.mark.parametrize("mask", ["0,0", "GPU-ABCDEF12", "9"])
def test_a_mask_that_hides_every_gpu_by_its_spelling_is_named(python: Program, mask: str) -> None:
    result = python("import gpulease; gpulease.find_usable_cuda_devices(1)", CUDA_VISIBLE_DEVICES=mask)
    assert "there are no visible CUDA devices on this machine.\n" in result.stderr
    assert f"CUDA_VISIBLE_DEVICES is {mask!r}, under which CUDA shows no GPU: " in result.stderr


def test_a_process_that_sees_only_the_gpus_of_its_lease_is_told_what_to_do(client: Client, gpulease: Program) -> None:
    program = "import gpulease; gpulease.usable_cuda_devices(1).__enter__()"
    result = gpulease("run", "-n", "1", "--wait", "60s", "--", sys.executable, "-c", program)
    assert "This process was started under lease" in result.stderr


def generator() -> object:
    yield


async def async_generator() -> object:  # type: ignore[misc]
    yield


@pytest.mark.parametrize("function", [generator, async_generator])
def test_a_generator_function_is_not_decorated(function: object) -> None:
    with pytest.raises(TypeError, match="is a generator function"):
        gpulease.on_gpus(1)(function)  # type: ignore[type-var]


def test_the_decorator_needs_its_number() -> None:
    with pytest.raises(TypeError, match="num_devices must be an integer"):
        gpulease.on_gpus(lambda: None)  # type: ignore[arg-type]
    assert "CUDA_DEVICE_ORDER" not in os.environ


def test_a_rank_that_opens_a_block_of_several_gpus_is_told_that_it_shares_them_with_no_other(
    client: Client, url: str
) -> None:
    program = "import gpulease\nfor count in (%s):\n    with gpulease.usable_cuda_devices(count): pass"
    rank = environ(GPULEASE_URL=url, LOCAL_RANK="1", RANK="1", WORLD_SIZE="2", MASTER_PORT="29500")
    said = [
        subprocess.run(
            [sys.executable, "-c", program % counts], env=environment, capture_output=True, text=True, check=True
        ).stderr.count("is one of the ranks of a training")
        for counts, environment in (("2, 2", rank), ("1, 1", rank), ("2, 2", environ(GPULEASE_URL=url)))
    ]
    assert said == [1, 0, 0]
