"""Real GPUs: the ordinal from `find_usable_cuda_devices` is the leased GPU, for CUDA and for torch."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from gpulease.cuda import libcuda
from gpulease_protocol.model import GpuReading
from tests.daemon import DaemonProcess
from tests.gpu.subjects import MASK, Subject, SubjectFailed, once

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")


def is_the_leased_one(found: dict[str, Any]) -> bool:
    """True if one ordinal was returned, and CUDA shows the leased GPU there."""
    return len(found["ordinals"]) == 1 and found["shown"] == found["leased"]


def test_cuda_takes_the_uuid_of_a_lease_as_its_mask(gpu: GpuReading) -> None:
    assert libcuda.query_devices({**os.environ, MASK: gpu.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 60) == [gpu.uuid]
    with Subject(mask=gpu.uuid) as subject:
        assert subject.do("devices") is None, "nothing has initialized CUDA there"
        subject.do("init")
        assert subject.do("devices") == [gpu.uuid]


@pytest.mark.usefixtures("torch_with_cuda")
def test_torch_and_gpulease_see_the_same_devices_under_the_same_numbers(gpu: GpuReading) -> None:
    with Subject(mask=gpu.uuid) as subject:
        assert subject.do("torch_uuids") == subject.do("devices") == [gpu.uuid]
    with Subject() as subject:
        assert subject.do("torch_uuids") == subject.do("devices")


@pytest.mark.parametrize("steps", [("find",), ("init", "find")], ids=["fresh", "after cuInit"])
def test_a_process_finds_the_number_of_the_gpu_that_it_holds(running: DaemonProcess, steps: tuple[str, ...]) -> None:
    assert is_the_leased_one(once(*steps, within_s=60, GPULEASE_URL=running.url)[-1])


def test_a_fork_of_a_process_that_uses_cuda_finds_a_number_for_the_programs_that_it_starts(
    running: DaemonProcess,
) -> None:
    *_, found = once("init", "find_in_fork", within_s=60, GPULEASE_URL=running.url)
    assert len(found["ordinals"]) == len(found["leased"]) == 1


@pytest.mark.parametrize("step", ["find", "find_in_fork"])
def test_a_gpu_on_which_the_asker_has_a_context_already_is_not_given_to_it(running: DaemonProcess, step: str) -> None:
    with Subject(GPULEASE_URL=running.url) as subject:
        subject.do("context")
        itself = f"in use by this process itself (pid {subject.pid}), without a lease"
        named = re.escape(itself if step == "find" else f"in use without a lease by pid {subject.pid} ")
        with pytest.raises(SubjectFailed, match=named):
            subject.do(step, 1, 0)


@pytest.mark.usefixtures("torch_with_cuda")
@pytest.mark.parametrize(
    ("steps", "launcher"),
    [
        pytest.param(("torch_init", "find"), (), id="after torch.cuda.init"),
        pytest.param(("find",), TORCHRUN, id="under torchrun"),
    ],
)
def test_a_training_finds_the_number_of_the_gpu_that_it_holds(
    running: DaemonProcess, steps: tuple[str, ...], launcher: tuple[str, ...]
) -> None:
    assert is_the_leased_one(once(*steps, launcher=launcher, within_s=120, GPULEASE_URL=running.url)[-1])
