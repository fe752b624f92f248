"""Step E: who opens which device file, under which mask."""

from __future__ import annotations

from typing import Any

from bench.hardware.machine import Machine
from gpulease_worker.probe.process_attribution import device_file
from tests.gpu.subjects import Subject, SubjectFailed


def openers(machine: Machine) -> None:
    """E: run a program for each way to touch a GPU, and have it say which device files it has open then."""
    report = machine.report
    if (why := machine.taken()) is not None:
        report.not_run("who opens which device file", why)
        return
    gpu, lines = machine.used(), []
    cases: list[tuple[str, str | None, tuple[str, ...], bool | None]] = [
        ("cuInit", gpu.uuid, ("init",), None),
        ("a context", gpu.uuid, ("context",), True),
        ("a context", None, ("context",), True),
        ("cuInit, the GPU masked away", "", ("init",), False),
        ("cuInit, the GPU masked away", "-1", ("init",), False),
        ("nvmlInit alone", gpu.uuid, ("nvml init",), None),
        ("NVML, a handle of every GPU, the GPU masked away", "", ("nvml",), True),
    ]
    if machine.torch is None:
        cases += [("torch.cuda.device_count()", mask, ("torch_count",), None) for mask in (gpu.uuid, "0", "")]
    else:
        report.not_run("torch.cuda.device_count(): does it open the device file?", machine.torch)
    for what, mask, steps, expected in cases:
        asked = f"{what}, mask {'not set' if mask is None else repr(mask)}: is the GPU's device file open?"
        with report.asking(asked):
            found = _files(mask, steps)
            lines.append((what, "not set" if mask is None else mask, *map(_listed, found.values())))
            is_open = machine.file() in (*found["open"], *found["mapped"])
            if expected is None:
                report.note(asked, "yes" if is_open else "no")
            else:
                told, wanted = ("yes" if one else "no" for one in (is_open, expected))
                report.judge(asked, told, wanted, holds=is_open == expected)
    _after_shutdown(machine)
    _of_another(machine)
    report.times("Who opens which device file", ("program", "mask", "open", "mapped"), lines)


def _files(mask: str | None, steps: tuple[str, ...]) -> dict[str, list[str]]:
    """Device files of a program after these steps; that CUDA finds no device is no failure."""
    with Subject(mask=mask) as subject:
        for step in steps:
            try:
                subject.do(*step.split())
            except SubjectFailed as failed:
                if "error 100" not in str(failed):  # CUDA_ERROR_NO_DEVICE, as it should be under an empty mask
                    raise
        found: dict[str, list[str]] = subject.do("files")
        return found


def _listed(paths: Any) -> str:
    return ", ".join(paths) or "none"


def _after_shutdown(machine: Machine) -> None:
    asked = "after nvmlShutdown: is the GPU's device file open?"
    with machine.report.asking(asked), Subject(mask=machine.used().uuid) as subject:
        subject.do("nvml")
        subject.do("nvml_shutdown")
        found = subject.do("files")
        is_open = machine.file() in (*found["open"], *found["mapped"])
        machine.report.judge(
            asked,
            "yes" if is_open else "no",
            "no",
            holds=not is_open,
            relies="a paused node, and a session that is renewed, have let go of the GPU",
        )


def _of_another(machine: Machine) -> None:
    asked = "masked CUDA with a context on one GPU: does it open the device file of another?"
    other = machine.another()
    if other is None:
        machine.report.not_run(asked, "it needs a second unused GPU")
        return
    for mask, what in ((machine.used().uuid, "masked"), (None, "unmasked")):
        with machine.report.asking(asked):
            found = _files(mask, ("context",))
            is_open = (device_file(other) or "") in (*found["open"], *found["mapped"])
            machine.report.judge(
                asked.replace("masked", what, 1),
                "yes" if is_open else "no",
                "no" if mask else "yes",
                holds=is_open == (mask is None),
            )
