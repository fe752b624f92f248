"""Steps C and D: what each call of NVML takes on an idle machine, and while contexts are made and dropped."""

from __future__ import annotations

import contextlib
import io

from bench import probe
from bench.hardware.findings import Report
from bench.hardware.machine import Machine
from gpulease_worker.probe.nvml_binding import Nvml
from gpulease_worker.settings import WorkerSettings
from tests.gpu.subjects import churners

COLUMNS = ("what", "median us", "p99 us", "max us")
QUICK_S = 0.3
SETTINGS = WorkerSettings()
"""What a worker is given that is told nothing else."""


def idle(machine: Machine) -> None:
    """C: on the machine as it is."""
    _measure(machine, "as the machine is")


def loaded(machine: Machine) -> None:
    """D: while processes make a context and end, over and over."""
    report, count = machine.report, 4 if machine.quick else probe.CHURNERS
    if (why := machine.taken()) is not None:
        report.not_run("the same while contexts are made and dropped", why)
        return
    when = f"while {count} processes make and drop contexts"
    with report.asking(f"the same {when}"), churners(count, machine.used().uuid) as busy:
        _measure(machine, when)
        for one in busy:
            one.tell("stop")
        report.note("contexts made and dropped meanwhile", sum(int(one.answer("stop")) for one in busy))


def _measure(machine: Machine, when: str) -> None:
    report, within_s = machine.report, QUICK_S if machine.quick else probe.WITHIN_S
    with report.asking(f"calls of NVML {when}"):
        said = io.StringIO()
        nvml = Nvml()
        nvml.open()
        with contextlib.redirect_stdout(said):
            parts = probe.by_call(nvml, nvml.handle(0), within_s / 4)
        nvml.close()
        readings, calls = probe.by_reading(within_s)
        rows = [(f"one GPU: {name}", *probe.figures(found)) for name, found in parts.items()]
        rows += [
            (f"all {len(machine.reading.gpus)}: {name}", *probe.figures(found)) for name, found in readings.items()
        ]
        rows += [(f"`{name}`", *probe.figures(found)) for name, found in sorted(calls.items())]
        report.times(f"Calls of NVML {when}", COLUMNS, rows)
        if said.getvalue():
            report.note("Xids", said.getvalue())
        _judge(report, when, readings["a whole reading"], calls)


def _judge(report: Report, when: str, whole: list[float], calls: dict[str, list[float]]) -> None:
    """The longest of each against what a node is given."""
    name, longest = max(((name, max(found)) for name, found in calls.items()), key=lambda one: one[1])
    limit_s = SETTINGS.call_deadline_s
    report.judge(
        f"longest call of NVML {when}",
        f"{name}: {longest / 1e3:.1f} ms of {sum(map(len, calls.values()))} calls",
        f"under {limit_s:g} s",
        holds=longest < limit_s * 1e6,
        relies="--call-deadline-s: beyond it the probe is killed",
    )
    limit_s = SETTINGS.probe_deadline_s
    report.judge(
        f"longest whole reading of all GPUs {when}",
        f"{max(whole) / 1e3:.1f} ms of {len(whole)}",
        f"under {limit_s:g} s",
        holds=max(whole) < limit_s * 1e6,
        relies="--probe-deadline-s: beyond it the node's GPUs are unknown",
    )
