"""Step L: `find_usable_cuda_devices` in the processes that trainings call it from."""

from __future__ import annotations

from typing import Any

from bench.hardware.machine import Machine, serving, spelled
from tests.gpu.subjects import once

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
CASES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], bool], ...] = (
    ("in a fresh process", ("find",), (), False),
    ("after cuInit", ("init", "find"), (), False),
    ("in a forked child of that", ("init", "find_in_fork"), (), False),
    ("after torch.cuda.init()", ("torch_init", "find"), (), True),
    ("in a forked child of that", ("torch_init", "find_in_fork"), (), True),
    ("under torchrun --nproc-per-node 1", ("find",), TORCHRUN, True),
    ("and Lightning's Fabric on what it gives", ("lightning",), (), True),
)
"""What it is called, the steps of the process, what starts it, and whether that needs torch."""


def finder(machine: Machine) -> None:
    """L: the ordinals that it gives must be, in CUDA's numbers, the GPUs that it has leased."""
    report = machine.report
    if (why := machine.taken()) is not None:
        report.not_run("find_usable_cuda_devices(1)", why)
        return
    with serving(machine) as running:
        for where, steps, launcher, needs_torch in CASES:
            asked = f"find_usable_cuda_devices(1) {where}"
            if needs_torch and machine.torch is not None:
                report.not_run(asked, machine.torch)
                continue
            with report.asking(asked):
                found = once(*steps, launcher=launcher, within_s=60, GPULEASE_URL=running.url)[-1]
                _judge(machine, asked, found, in_fork=steps[-1] == "find_in_fork")


def _judge(machine: Machine, asked: str, found: dict[str, Any], *, in_fork: bool) -> None:
    """In a fork there is no CUDA any more to tell which GPU an ordinal is; only programs that it starts have one."""
    shown = "CUDA cannot be used there" if in_fork and not found["shown"] else f"CUDA shows {found['shown']} there"
    machine.report.judge(
        asked,
        f"{found['ordinals']}, leased {found['leased']}, {shown}, {spelled(found['took_s'], 0)}",
        "one ordinal, and CUDA shows the leased GPU there",
        holds=len(found["ordinals"]) == 1 and (found["shown"] == found["leased"] or (in_fork and not found["shown"])),
        relies="find_devices.py, cuda/ordinals.py",
    )
