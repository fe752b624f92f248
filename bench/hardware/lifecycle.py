"""Steps I, J and K: leases from end to end, a paused node, and what a daemon costs a training."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

from bench.hardware.machine import NODE, Machine, await_readings, leased, release, serving, spelled, state, until
from gpulease.cuda import libcuda
from gpulease_server.core.policy import Policy
from gpulease_worker.probe.process_attribution import device_file
from tests.daemon import DaemonProcess
from tests.gpu.subjects import MASK, Subject, processes_with_driver

FREE_S = 5.0
"""How long a GPU without any process may drain."""
LATE_S = 10.0
"""How much longer than promised is waited for it, to tell late from never."""
RETAINED_S = Policy().retained_memory_s
GIB = 1024**3
ALONE, BESIDE, DRAINING = "no daemon", "daemon", "daemon, the GPU drains"
"""Beside what step K takes the time of a training's step."""
CLEAN = "promise of clean: core/draining.py, probe/process_attribution.py"


def lifecycle(machine: Machine) -> None:
    """I: how long a GPU drains after its lease, and whether others who have its device file open keep it."""
    if (why := machine.taken()) is not None:
        machine.report.not_run("from release to free", why)
        return
    with serving(machine) as running:
        for step in (_idle_gpu, _holder, _earlier_stranger, _later_stranger, _under_another_lease):
            step(machine, running)


def _drains(machine: Machine, running: DaemonProcess, asked: str, expected_s: float) -> None:
    """The row of a GPU whose lease has just been released."""
    uuid = machine.used().uuid
    took_s = until(lambda: state(running, uuid) == "free", expected_s + LATE_S)
    reason = "" if took_s is not None else f": {running.call('GET', f'/v1/gpus/{uuid}').json['reason']}"
    machine.report.judge(
        asked,
        spelled(took_s, expected_s + LATE_S) + reason,
        f"within {expected_s:g} s",
        holds=took_s is not None and took_s <= expected_s,
        relies=CLEAN,
    )


def _idle_gpu(machine: Machine, running: DaemonProcess) -> None:
    asked = "from release to free, when no process used the GPU"
    with machine.report.asking(asked):
        with leased(running, machine.used().uuid):
            pass
        _drains(machine, running, asked, FREE_S)


def _holder(machine: Machine, running: DaemonProcess) -> None:
    asked, uuid = "from the holder's end to free, after its lease was released under it", machine.used().uuid
    with machine.report.asking(asked):
        with leased(running, uuid) as held, Subject(mask=uuid, lease=held["id"]) as holder:
            holder.do("memory", GIB)
            release(running, held)
            drained = until(lambda: state(running, uuid) == "draining", FREE_S) is not None
            free = until(lambda: state(running, uuid) == "free", 1.0) is not None
            machine.report.judge(
                "a holder that has not ended at release: is the GPU held back?",
                "yes" if drained and not free else f"no: it is {state(running, uuid)}",
                "yes",
                holds=drained and not free,
                relies=CLEAN,
            )
        _drains(machine, running, asked, FREE_S)


def _stranger() -> Subject:
    """A process with the GPU masked away that opens NVML, like an exporter or a rank on another GPU."""
    return Subject(mask="")


def _opens(machine: Machine, stranger: Subject) -> str:
    """Have it open NVML; a word for the row when that does not open the device file."""
    stranger.do("nvml")
    found = stranger.do("files")
    is_open = machine.file() in (*found["open"], *found["mapped"])
    return "" if is_open else " (here that does not open the device file)"


def _earlier_stranger(machine: Machine, running: DaemonProcess) -> None:
    asked = "from release to free, while a process from before the lease has NVML open, the GPU masked away"
    with machine.report.asking(asked), _stranger() as stranger:
        asked += _opens(machine, stranger)
        # A process that began within one exchange before the lease counts as later: the order is not known.
        await_readings(running, machine.used().uuid, 3)
        with leased(running, machine.used().uuid):
            pass
        _drains(machine, running, asked, FREE_S)


def _later_stranger(machine: Machine, running: DaemonProcess) -> None:
    asked = "the same with a process that began during the lease, and works under none"
    with machine.report.asking(asked), leased(running, machine.used().uuid) as held, _stranger() as stranger:
        asked += _opens(machine, stranger)
        release(running, held)
        _drains(machine, running, asked, RETAINED_S + FREE_S)


def _under_another_lease(machine: Machine, running: DaemonProcess) -> None:
    asked = "the same with a process that began during the lease, and works under another on a second GPU"
    other = machine.another()
    if other is None:
        machine.report.not_run(asked, "it needs a second unused GPU")
        return
    with (
        machine.report.asking(asked),
        leased(running, machine.used().uuid) as held,
        leased(running, other.uuid) as elsewhere,
        Subject(mask=other.uuid, lease=elsewhere["id"]) as stranger,
    ):
        stranger.do("context")
        asked += _opens(machine, stranger)
        release(running, held)
        _drains(machine, running, asked, FREE_S)


def paused(machine: Machine) -> None:
    """J: whether a paused node has released the driver; and which ordinal is which GPU, according to CUDA."""
    asked = "a paused node: does any of its processes have the driver open?"
    with machine.report.asking(asked), serving(machine) as running:
        assert running.process is not None
        pid, files = running.process.pid, {device_file(gpu) for gpu in machine.reading.gpus}
        before = processes_with_driver(pid, files)
        running.call("POST", f"/v1/nodes/{NODE}/pause")
        took_s = until(lambda: not processes_with_driver(pid, files), LATE_S)
        machine.report.judge(
            asked,
            f"before: {', '.join(before) or 'none'}; after: {', '.join(processes_with_driver(pid, files)) or 'none'}, "
            f"{spelled(took_s, LATE_S)}",
            "before the probe alone, after none",
            holds=before == ["gpulease_worker.probe.main"] and took_s is not None,
            relies="gpulease node pause, before a GPU reset",
        )
        running.call("POST", f"/v1/nodes/{NODE}/resume")
        took_s = until(lambda: running.call("GET", f"/v1/nodes/{NODE}").json["state"] == "ready", 30)
        machine.report.judge("resumed: when is the node ready?", spelled(took_s, 30), "within 30 s", holds=bool(took_s))
    _numbers(machine)


def _numbers(machine: Machine) -> None:
    """UUIDs by ordinal: as gpulease finds them, as torch does, as a process that was asked does."""
    report = machine.report
    if (why := machine.taken()) is not None:
        report.not_run("libcuda.initialized_devices in a process that uses CUDA", why)
        return
    uuid = machine.used().uuid
    for asked, step, word in (
        ("libcuda.initialized_devices in a process that uses CUDA", "init", "CUDA's"),
        ("libcuda.initialized_devices beside torch's own word", "torch_uuids", "torch's"),
    ):
        if word == "torch's" and machine.torch is not None:
            report.not_run(asked, machine.torch)
            continue
        with report.asking(asked), Subject(mask=uuid) as subject:
            other = subject.do(step)
            found, wanted = subject.do("devices"), other if word == "torch's" else [uuid]
            report.judge(asked, f"{found}", f"{wanted}", holds=found == wanted, relies="cuda/ordinals.py")
    asked = "libcuda.query_devices, in PCI order and without a mask: are CUDA's numbers the daemon's?"
    sound = [gpu.uuid for gpu in machine.reading.gpus]
    begun = time.monotonic()
    try:
        environment = {name: value for name, value in os.environ.items() if name != MASK}
        found = libcuda.query_devices({**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 30)
    except libcuda.CudaError as failed:
        report.not_run(asked, failed)
        return
    took = spelled(time.monotonic() - begun, 30)
    report.judge(asked, f"{'yes' if found == sound else f'no: {found}'}, in {took}", "yes", holds=found == sound)


def steps(machine: Machine) -> None:
    """K: a loop of bf16 products alone, beside a daemon, and on a GPU that the daemon sees drain. In rounds, of which
    every second begins with the daemon: a GPU is slower when it is warm, which must not count for what comes last."""
    report, asked = machine.report, "what a daemon costs a training: time of a step"
    why = machine.taken() or machine.torch
    if why is not None:
        report.not_run(asked, why)
        return
    found: dict[str, list[dict[str, Any]]] = {ALONE: [], BESIDE: [], DRAINING: []}
    with report.asking(asked):
        for turn in range(2 if machine.quick else 4):
            for measure in (_alone, _beside) if turn % 2 == 0 else (_beside, _alone):
                measure(machine, found)
        for name in (BESIDE, DRAINING):
            ratios = [one["median"] / alone["median"] for one, alone in zip(found[name], found[ALONE], strict=True)]
            ratio, each = median(ratios), ", ".join(f"{one:.3f}" for one in ratios)
            report.judge(
                f"median step, {name}",
                f"{ratio:.3f} of it alone ({each})",
                "at most 1.02 of it alone",
                holds=ratio <= 1.02,
            )
    rows = [
        (
            name,
            *(f"{median(one[word] for one in rounds):.3f}" for word in ("median", "p99")),
            f"{max(one['max'] for one in rounds):.3f}",
            str(sum(one["steps"] for one in rounds)),
        )
        for name, rounds in found.items()
        if rounds
    ]
    report.times("Step of a bf16 product of 8192 x 8192", ("beside", "median ms", "p99 ms", "max ms", "steps"), rows)


def _alone(machine: Machine, found: dict[str, list[dict[str, Any]]]) -> None:
    with Subject(mask=machine.used().uuid) as subject:
        found[ALONE].append(subject.do("torch_steps", _seconds(machine), within_s=60))


def _beside(machine: Machine, found: dict[str, list[dict[str, Any]]]) -> None:
    uuid = machine.used().uuid
    with (
        serving(machine, f"daemon {len(found[BESIDE])}") as running,
        leased(running, uuid) as held,
        Subject(mask=uuid, lease=held["id"]) as subject,
    ):
        found[BESIDE].append(subject.do("torch_steps", _seconds(machine), within_s=60))
        release(running, held)
        found[DRAINING].append(subject.do("torch_steps", _seconds(machine), within_s=60))


def _seconds(machine: Machine) -> int:
    return 1 if machine.quick else 4
