"""Lightning's table, against a real daemon with four simulated GPUs."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpulease import Client, GpuState, LeaseState
from tests.cli.programs import Program, environ, wait_until

FIND = """
import gpulease
try:
    print(gpulease.find_usable_cuda_devices({}))
except Exception as error:
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    print(f"{{kinds[0]}}: {{error}}")
"""

NONE_VISIBLE = "ValueError: You requested to find {} devices but there are no visible CUDA devices on this machine."
TOO_FEW = (
    "RuntimeError: You requested to find {} devices but only {} are currently available."
    " The devices {} are occupied by other processes: {}: "
)
NEGATIVE = (
    "RuntimeError: You requested to find -2 devices but only 4 are currently available. The devices [] are occupied by"
    " other processes and can't be used at the moment. num_devices must be -1 for every usable device, or 0 or more."
)


def found(python: Program, asked: str, mask: str | None) -> str:
    """What a program prints that asks so. On an overloaded machine unread GPUs may count as busy for a while."""
    result = python(FIND.format(asked), **({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}))
    return result.stdout.strip() or result.stderr


@pytest.mark.parametrize(
    ("asked", "mask", "answer"),
    [
        ("0", None, "[]"),
        ("1", None, "[0]"),
        ("4", None, "[0, 1, 2, 3]"),
        ("-1", None, "[0, 1, 2, 3]"),
        ("", None, "[0, 1, 2, 3]"),
        ("5", None, "ValueError: You requested to find 5 devices but this machine only has 4 GPUs."),
        ("3", "1,2", "ValueError: You requested to find 3 devices but this machine only has 2 GPUs."),
        ("1", "", NONE_VISIBLE.format(1)),
        ("-1", "-1", NONE_VISIBLE.format(-1)),
        ("1", "7", NONE_VISIBLE.format(1)),
        ("0", "", "[]"),
        ("-1", "3,1", "[0, 1]"),
        ("-1", "3,9,1", "[0]"),
        ("-1", "1,1", NONE_VISIBLE.format(-1)),
        ('"2"', None, "TypeError: num_devices must be an integer, not '2'"),
        ("None", None, "TypeError: num_devices must be an integer, not None"),
        ("-2", None, NEGATIVE),
    ],
)
def test_with_every_gpu_free(client: Client, python: Program, asked: str, mask: str | None, answer: str) -> None:
    wait_until(lambda: found(python, asked, mask) == answer, story=lambda: found(python, asked, mask))


@pytest.mark.parametrize(
    ("asked", "mask", "answer"),
    [
        ("2", None, "[1, 3]"),
        ("-1", None, "[1, 3]"),
        ("3", None, TOO_FEW.format(3, 2, [0, 2], "GPUs 0, 2")),
        ("2", "2,1", TOO_FEW.format(2, 1, [0], "GPU 2")),
        ("1", "2,3", "[1]"),
        ("-1", "0,2", "[]"),
    ],
)
def test_with_gpus_0_and_2_busy(client: Client, python: Program, asked: str, mask: str | None, answer: str) -> None:
    with client.lease(devices=[0, 2], wait_s=60):
        wait_until(lambda: found(python, asked, mask).startswith(answer), story=lambda: found(python, asked, mask))


def test_what_lightning_expects_of_its_own_function(client: Client, python: Program) -> None:
    """`test_find_usable_cuda_devices_error_handling` of Lightning 2.6, with GPUs and no mocks."""
    program = """
import os, re
from gpulease import find_usable_cuda_devices

def raises(kind, text, mask):
    os.environ["CUDA_VISIBLE_DEVICES"] = mask
    try:
        find_usable_cuda_devices(2)
    except kind as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError(text)

raises(ValueError, "You requested to find 2 devices but there are no visible CUDA", "")
raises(ValueError, "this machine only has 1 GPUs", "0")
raises(RuntimeError, re.escape("The devices [0, 1] are occupied by other processes"), "0,1")
del os.environ["CUDA_VISIBLE_DEVICES"]
print(find_usable_cuda_devices(-1))
"""
    with client.lease(devices=[0, 1], wait_s=60):
        assert python(program).stdout.strip() == "[2, 3]", "those that are usable"


def test_a_refusal_names_the_holders(client: Client, python: Program) -> None:
    with client.lease(devices=[0], wait_s=60), client.lease(devices=[1, 2, 3], wait_s=60, label="evening run"):
        said = found(python, "4", None)
    assert f"GPU 0: {getpass.getuser()} (pid {os.getpid()}) for " in said
    assert f"GPUs 1-3: {getpass.getuser()} (evening run) for " in said
    assert said.strip().endswith("To wait for them, set GPULEASE_WAIT_S=10m.")


def test_a_mask_of_uuids_or_prefixes_is_respected(client: Client, python: Program) -> None:
    uuids = [gpu.uuid for gpu in sorted(client.gpus(), key=lambda gpu: gpu.index)]
    mask = f"{uuids[3]},{uuids[0][:13]},{uuids[2]}"
    with client.lease(devices=[uuids[3]], wait_s=60):
        wait_until(lambda: found(python, "-1", mask) == "[1, 2]", story=lambda: found(python, "-1", mask))


def test_0_needs_no_daemon(python: Program) -> None:
    assert python(FIND.format("0"), GPULEASE_URL="http://127.0.0.1:9").stdout.strip() == "[]"


def test_found_gpus_stay_reserved_until_the_program_ends(client: Client, python: Program) -> None:
    program = """
import gpulease
find = gpulease.find_usable_cuda_devices
print(find(3, wait_s=60), find(1, wait_s=60, reuse=False), find(-1, reuse=False))
print(sum(gpu.state == "leased" for gpu in gpulease.Client().gpus()))
"""
    assert python(program).stdout.split("\n")[:2] == ["[0, 1, 2] [3] []", "4"]
    assert not client.leases(LeaseState.ACTIVE)


def test_six_programs_at_once_never_find_the_same_gpu(client: Client, python: Program) -> None:
    program = FIND.format("1, wait_s=30") + "\nprint(gpulease.reserved_leases()[0].gpus[0].uuid)\n"
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: python(program), range(6)))
    assert [result.returncode for result in results] == [0] * 6, results
    holding: dict[str, str] = {}
    for event in client.events():
        for uuid in event.gpus:
            if event.kind == "lease.granted":
                assert uuid not in holding, f"{uuid} was granted twice"
                holding[uuid] = event.lease_id or ""
            elif event.kind == "lease.ended":
                holding.pop(uuid, None)


def test_the_wait_may_be_set_in_the_environment(client: Client, url: str) -> None:
    held = client.lease(4, wait_s=60)
    finder = subprocess.Popen(
        [sys.executable, "-c", FIND.format("1")],
        env=environ(GPULEASE_URL=url, GPULEASE_WAIT_S="0.5m"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: client.leases(LeaseState.QUEUED))
        held.release()
        assert finder.communicate(timeout=60)[0].strip() == "[0]"
    finally:
        finder.kill()
        finder.wait()
        held.release()


def test_a_wait_that_is_not_a_number_is_refused(client: Client, python: Program) -> None:
    result = python(FIND.format("1"), GPULEASE_WAIT_S="soon")
    assert result.stdout.startswith("ValueError: GPULEASE_WAIT_S: 'soon' is not a duration; write it like 90s")


def test_a_program_that_dies_frees_its_gpus(client: Client, url: str) -> None:
    program = "import gpulease, os; gpulease.find_usable_cuda_devices(1, wait_s=60); os._exit(9)"
    subprocess.run([sys.executable, "-c", program], env=environ(GPULEASE_URL=url), check=False, timeout=60)
    wait_until(lambda: not client.leases(LeaseState.ACTIVE))
    lease = client.leases(LeaseState.ENDED)[0]
    assert (lease.end_reason, lease.ttl_s) == ("holder_died", 60), "long before its time was over"
    wait_until(lambda: all(gpu.state is GpuState.FREE for gpu in client.gpus()))


def test_neither_torch_nor_cuda_is_loaded(client: Client, python: Program) -> None:
    program = (
        FIND.format("1, wait_s=60")
        + "\nimport sys; print([name for name in sys.modules if name in ('torch', 'ctypes')])"
    )
    assert python(program).stdout.split("\n")[:2] == ["[0]", "[]"]


def test_the_gpus_are_free_again(client: Client) -> None:
    assert {gpu.state for gpu in client.gpus()} == {GpuState.FREE}
    assert "GPULEASE_FOUND_BY" not in os.environ
