"""One training takes one lease, however many of its processes call; independent programs never share one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpulease import Client, LeaseState
from tests.cli.programs import Program, environ


def lines(program: str, python: Program, **more: str) -> list[str]:
    result = python(program, **more)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().split("\n")


def test_the_same_call_gives_the_same_in_one_process_and_in_its_threads(client: Client, python: Program) -> None:
    program = """
import gpulease
from concurrent.futures import ThreadPoolExecutor
find = lambda *wanted, **more: gpulease.find_usable_cuda_devices(*wanted, **more, wait_s=60)
with ThreadPoolExecutor(8) as pool:
    print(*pool.map(find, [2] * 8))
print(find(2), find(1), find(-1), find())
try:
    find(3)
except RuntimeError as error:
    print(error)
print(find(1, reuse=False), find(2), find(-1), find(3, reuse=True) if False else "")
print(len(gpulease.Client().leases("active")))
for held in gpulease.reserved_leases():
    held.release()
print(find(4), len(gpulease.Client().leases("active")))
"""
    said = lines(program, python)
    assert said[0] == " ".join(["[0, 1]"] * 8)
    assert said[1] == "[0, 1] [0] [0, 1] [0, 1]"
    assert said[2].startswith("This process has reserved the devices [0, 1]")
    assert said[2].endswith("pass reuse=False to reserve more.")
    assert said[3].strip() == "[2] [0, 1] [0, 1, 2]"
    assert said[4] == "2"
    assert said[5] == "[0, 1, 2, 3] 1"
    assert not client.leases(LeaseState.ACTIVE)


def test_threads_that_do_not_reuse_get_different_gpus(client: Client, python: Program) -> None:
    program = """
import gpulease
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    print(sorted(sum(pool.map(lambda _: gpulease.find_usable_cuda_devices(1, wait_s=60, reuse=False), range(4)), [])))
"""
    assert lines(program, python) == ["[0, 1, 2, 3]"]


def test_a_call_waits_as_long_as_it_says_while_another_thread_waits_longer(client: Client, python: Program) -> None:
    program = """
import threading, time, gpulease
find = gpulease.find_usable_cuda_devices
daemon = gpulease.Client()
held = daemon.lease(count=4)
found = []
first = threading.Thread(target=lambda: found.extend(find(1, wait_s=60)))
first.start()
while not daemon.leases("queued"):
    time.sleep(0.01)
for wait_s in (0, 0.5):
    began_at = time.monotonic()
    try:
        find(1, wait_s=wait_s)
    except RuntimeError as error:
        print(type(error).__name__, "soon" if time.monotonic() - began_at < 20 else "late")
held.release()
first.join()
print(len(found), find(1) == found)
"""
    assert lines(program, python) == ["NotNow soon", "NotNow soon", "1 True"]


def test_a_call_with_other_requirements_is_not_the_same_call(client: Client, python: Program) -> None:
    program = """
import gpulease
find = gpulease.find_usable_cuda_devices
print(find(1, wait_s=60, gpu_model="H100"), find(1), find(1, gpu_model="H100"))
try:
    find(1, min_free_memory_bytes=1)
except RuntimeError as error:
    print(type(error).__name__)
"""
    assert lines(program, python) == ["[0] [0] [0]", "InUse"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_multiprocessing_child_gets_the_gpus_that_its_parent_found(client, tmp_path: Path, url: str, method) -> None:
    program = tmp_path / "train.py"
    program.write_text("""
import multiprocessing, os, sys, gpulease
found = gpulease.find_usable_cuda_devices(2, wait_s=60)  # at module level: spawn runs this again in each child

def train(rank, queue):
    queue.put((found, gpulease.find_usable_cuda_devices(-1), len(gpulease.reserved_leases())))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    children = [context.Process(target=train, args=(rank, queue)) for rank in range(2)]
    for child in children:
        child.start()
    print(*(queue.get() for _ in children))
    for child in children:
        child.join()
    print(len(gpulease.Client().leases("active")), [child.exitcode for child in children])
""")
    command, environment = [sys.executable, program, method], environ(GPULEASE_URL=url)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.split("\n")[:2] == [" ".join(["([0, 1], [0, 1], 0)"] * 2), "1 [0, 0]"], result.stderr
    assert not client.leases(LeaseState.ACTIVE)


def test_a_forked_child_does_not_rely_on_an_ended_lease(client: Client, python: Program) -> None:
    program = """
import os, gpulease
print(gpulease.find_usable_cuda_devices(1, wait_s=60), flush=True)
read, write = os.pipe()
if os.fork() == 0:
    os.read(read, 1)
    print(gpulease.find_usable_cuda_devices(4, wait_s=60), len(gpulease.reserved_leases()), flush=True)
    for held in gpulease.reserved_leases():
        held.release()
    os._exit(0)
gpulease.reserved_leases()[0].release()
os.write(write, b"x")
os.wait()
"""
    assert lines(program, python) == ["[0]", "[0, 1, 2, 3] 1"]


def test_a_rank_that_the_finder_launches_gets_the_same_by_its_own_mask(client: Client, python: Program) -> None:
    program = """
import os, subprocess, sys, gpulease
def rank(program, **more):
    subprocess.run([sys.executable, "-c", "import gpulease; find = gpulease.find_usable_cuda_devices; " + program],
                   env=os.environ | {"LOCAL_RANK": "1"} | more, check=False, stderr=subprocess.STDOUT)
print(gpulease.find_usable_cuda_devices(2, wait_s=60), flush=True)
rank("print(find(2), find(-1), find(1))")
rank("print(find(2))", CUDA_VISIBLE_DEVICES="3,1,0")
rank("print(len(gpulease.Client().leases('active')))")
rank("find(3)")
print(os.environ["CUDA_DEVICE_ORDER"])
"""
    said = lines(program, python)
    assert said[:4] == ["[0, 1]", "[0, 1] [0, 1] [0]", "[1, 2]", "1"]
    assert "InUse: The process that launched this one has reserved the devices [0, 1], and this asks for 3." in said[-2]
    assert said[-1] == "PCI_BUS_ID"


def test_an_independent_program_gets_gpus_of_its_own(client: Client, python: Program) -> None:
    """A sweep that holds a GPU itself starts its trials as programs, with its environment."""
    program = """
import os, subprocess, sys, gpulease
trial = "import gpulease; print(gpulease.find_usable_cuda_devices(1, wait_s=60), flush=True); input()"
print(gpulease.find_usable_cuda_devices(1, wait_s=60), flush=True)
trials = []
for _ in range(2):
    trials.append(subprocess.Popen([sys.executable, "-c", trial], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    print(trials[-1].stdout.readline().decode().strip(), flush=True)
for one in trials:
    one.communicate(b"\\n")
"""
    assert lines(program, python) == ["[0]", "[1]", "[2]"]


def test_variables_of_another_users_process_give_no_access(client: Client, python: Program) -> None:
    """As in a terminal that was opened from a notebook which has found GPUs, or where a user was debugging."""
    with client.lease(1, wait_s=60) as lease:
        left = {"GPULEASE_LEASE_ID": lease.id, "GPULEASE_FOUND_BY": "1:1", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        program = "import gpulease; print(gpulease.find_usable_cuda_devices(1, wait_s=60))"
        assert lines(program, python, **left) == ["[1]"]


@pytest.mark.parametrize(("asked", "found"), [("2", "[0, 1]"), ("-1", "[0, 1]"), ("1", "[0]")])
def test_a_program_under_a_lease_finds_the_gpus_of_that_lease(
    client, gpulease: Program, asked: str, found: str
) -> None:
    program = f"import gpulease; print(gpulease.find_usable_cuda_devices({asked}))"
    with client.lease(devices=[0], wait_s=60):
        result = gpulease("run", "-n", "2", "--wait", "60s", "--", sys.executable, "-c", program)
    assert result.stdout.strip() == found, result.stderr
    assert [len(event.gpus) for event in client.events() if event.kind == "lease.granted"][-1] == 2


def test_a_program_under_a_lease_never_finds_more_than_that(client: Client, gpulease: Program) -> None:
    program = "import gpulease; gpulease.find_usable_cuda_devices(3)"
    result = gpulease("run", "-n", "2", "--wait", "60s", "--", sys.executable, "-c", program)
    assert "You requested to find 3 devices but this machine only has 2 GPUs." in result.stderr
    assert "This process runs under lease-" in result.stderr
    assert ", and sees no GPUs but those of that lease." in result.stderr
    masked = gpulease(
        "run", "-n", "2", "--wait", "60s", "--", "env", "-u", "GPULEASE_LEASE_ID", sys.executable, "-c", program
    )
    assert "so this process sees no other GPUs." in masked.stderr


def test_the_mask_can_be_narrowed_to_what_was_reserved(client: Client, python: Program) -> None:
    program = """
import os, subprocess, sys, gpulease
find = gpulease.find_usable_cuda_devices
print(find(2, wait_s=60, set_visible=True), find(2, set_visible=True), find(2), flush=True)
index = {gpu.uuid: gpu.index for gpu in gpulease.reserved_leases()[0].gpus}
mask = [index[uuid] for uuid in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
print(mask, os.environ["CUDA_DEVICE_ORDER"], flush=True)
rank = "import gpulease; print(gpulease.find_usable_cuda_devices(2), gpulease.find_usable_cuda_devices(1))"
subprocess.run([sys.executable, "-c", rank], env=os.environ | {"LOCAL_RANK": "1"})
"""
    with client.lease(devices=[0], wait_s=60):
        said = lines(program, python, CUDA_VISIBLE_DEVICES="0,3,1")
    assert said == ["[0, 1] [0, 1] [0, 1]", "[3, 1] PCI_BUS_ID", "[0, 1] [0]"]


def test_a_later_call_does_not_narrow_a_mask_that_was_left_wide(client: Client, python: Program) -> None:
    program = """
import os, gpulease
gpulease.find_usable_cuda_devices(1, wait_s=60)
try:
    gpulease.find_usable_cuda_devices(1, set_visible=True)
except RuntimeError as error:
    print(type(error).__name__, "CUDA_VISIBLE_DEVICES" in os.environ)
"""
    assert lines(program, python) == ["InUse False"]
