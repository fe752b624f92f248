"""Steps G and H: what the driver lists, and when a killed process is off its list and its memory is back."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from bench.hardware.machine import LOOK_S, MIB, Look, Machine, look, spelled, until
from gpulease_server.core.policy import Policy
from gpulease_worker.probe import open_file_scanner
from gpulease_worker.processes import procfs
from tests.gpu.subjects import Subject

TOLERANCE = Policy().memory_tolerance_bytes
BACK_S = 20.0
"""How long memory may take to come back when no process holds it."""
WATCHED_S = 8.0
"""How long a GPU is watched while a forked worker of a killed process lives."""
SEEN_S = 2.0
TAKEN, TAKEN_QUICK = 16 * 1024**3, 1024**3


def lists(machine: Machine) -> None:
    """G: who is on the driver's list: a client of NVML, cuInit alone, a context, memory."""
    report = machine.report
    if (why := machine.taken()) is not None:
        report.not_run("whom does the driver list?", why)
        return
    gpu = machine.used()
    with look(gpu) as seen, Subject(mask=gpu.uuid) as subject:
        before = seen.used_bytes()
        listed = seen.lists(os.getpid())
        report.judge(
            "a client of NVML alone: is it listed?",
            _word(listed),
            "no",
            holds=not listed,
            relies="the probe would make every GPU foreign",
        )
        asked = "cuInit without a context: is it listed?"
        with report.asking(asked):
            subject.do("init")
            report.judge(asked, _word(seen.lists(subject.pid)), "no", holds=not seen.lists(subject.pid))
        asked = "a context: does it show at once?"
        with report.asking(asked):
            subject.do("context")
            _judge_shows(machine, asked, seen, subject.pid, before)
            own = seen.used_bytes() - before
            report.judge(
                "memory of a context that holds nothing",
                f"{own // MIB} MiB",
                f"over {TOLERANCE // MIB} MiB, so that one that is left over is seen",
                holds=own > TOLERANCE,
            )
        asked = "1 GiB in that context: does it show at once?"
        with report.asking(asked):
            subject.do("memory", 1024**3)
            rose = seen.used_bytes() - before
            report.judge(
                asked, f"{rose // MIB} MiB more", "1024 MiB or more", holds=rose >= 1024**3, relies="core/draining.py"
            )


def _word(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _judge_shows(machine: Machine, asked: str, seen: Look, pid: int, before: int) -> None:
    """The first look must show it, for the first reading after a grant is what finds strangers."""
    listed = seen.sees(pid, before + TOLERANCE)
    took_s = 0.0 if listed else until(lambda: seen.sees(pid, before + TOLERANCE), SEEN_S)
    found = "yes" if listed else f"no; {spelled(took_s, SEEN_S)} later"
    where = "" if procfs.sees_the_host() else " (outside the host's pid namespace memory counts as well)"
    machine.report.judge(
        asked, found + where, "yes", holds=listed, relies="a GPU in use is never granted: core/gpu.py, core/draining.py"
    )


@dataclass
class Killed:
    """What was seen after a SIGKILL, in seconds."""

    off_s: float | None = None
    back_s: float | None = None
    kept_bytes: int = 0


def remains(machine: Machine) -> None:
    """H: times after SIGKILL, of a process alone and of one whose forked worker lives on."""
    report = machine.report
    if (why := machine.taken()) is not None:
        report.not_run("after SIGKILL: when is the list empty, when is memory back?", why)
        return
    lines = []
    with look(machine.used()) as seen:
        before = seen.used_bytes()
        with report.asking("after SIGKILL of a process with memory"):
            killed = _alone(machine, seen, before)
            lines.append(("a process with memory", spelled(killed.off_s, BACK_S), spelled(killed.back_s, BACK_S), ""))
        with report.asking("after SIGKILL of a process with a forked worker"):
            killed = _forked(machine, seen, before)
            kept = f"{killed.kept_bytes // MIB} MiB"
            off, back = spelled(killed.off_s, WATCHED_S), spelled(killed.back_s, WATCHED_S)
            lines.append(("one whose forked worker lives on", off, back, kept))
    report.times("After SIGKILL", ("of", "off the list", "memory back", "kept meanwhile"), lines)


def _size(machine: Machine) -> int:
    total = machine.used().memory_total_bytes or 0
    return min(TAKEN_QUICK if machine.quick else TAKEN, total // 2)


def _watch(seen: Look, pid: int, before: int, within_s: float) -> Killed:
    """Poll until the process is off the list and its memory is free, or the time is up."""
    begun, killed = time.monotonic(), Killed()
    while (killed.off_s is None or killed.back_s is None) and time.monotonic() - begun < within_s:
        if killed.off_s is None and not seen.lists(pid):
            killed.off_s = time.monotonic() - begun
        killed.kept_bytes = max(0, seen.used_bytes() - before)
        if killed.back_s is None and killed.kept_bytes <= TOLERANCE:
            killed.back_s = time.monotonic() - begun
        time.sleep(LOOK_S)
    return killed


def _alone(machine: Machine, seen: Look, before: int) -> Killed:
    with Subject(mask=machine.used().uuid) as subject:
        subject.do("memory", _size(machine))
        subject.kill()
        killed = _watch(seen, subject.pid, before, BACK_S)
    for what, took_s in (("is it off the list", killed.off_s), ("is its memory back", killed.back_s)):
        machine.report.judge(
            f"after SIGKILL of a process with memory: when {what}?",
            spelled(took_s, BACK_S),
            f"within {BACK_S:g} s",
            holds=took_s is not None,
            relies="a draining GPU becomes free: core/draining.py",
        )
    return killed


def _forked(machine: Machine, seen: Look, before: int) -> Killed:
    report, path = machine.report, machine.file()
    with Subject(mask=machine.used().uuid) as subject:
        subject.do("memory", _size(machine))
        worker = subject.do("fork")
        subject.kill()
        killed = _watch(seen, subject.pid, before, WATCHED_S)
        opened = [one.pid for one in open_file_scanner.scan({path}).by_path.get(path, ())]
        report.judge(
            "a forked worker of a killed process: is the dead process's memory kept while it lives?",
            f"{killed.kept_bytes // MIB} MiB are; the dead process is {'off' if killed.off_s is not None else 'on'} "
            f"the list; the worker is {'' if seen.lists(worker) else 'not '}listed",
            "it is",
            holds=killed.back_s is None,
        )
        report.judge(
            "the same worker: does the GPU look clean while memory is kept?",
            f"memory {'back' if killed.back_s is not None else 'kept'}, device file open by the worker: "
            f"{_word(worker in opened)}",
            "no: memory says so, or the open file does",
            holds=killed.back_s is not None or killed.kept_bytes > TOLERANCE,
            relies="core/draining.py: clean in every sense",
        )
        os.kill(worker, signal.SIGKILL)
        took_s = until(lambda: seen.used_bytes() <= before + TOLERANCE, BACK_S)
        report.judge(
            "once that worker is killed too: when is memory back?",
            spelled(took_s, BACK_S),
            f"within {BACK_S:g} s",
            holds=took_s is not None,
            relies="--kill-leftovers frees the GPU",
        )
    return killed


def stray(machine: Machine) -> None:
    """M, only on request: an illegal access, which is an Xid 31 of an application and does not make a GPU unhealthy."""
    asked = "a kernel that writes where it may not: which Xid is told, and what is the GPU's health then?"
    if (why := machine.taken()) is not None:
        machine.report.not_run(asked, why)
        return
    gpu = machine.used()
    told: list[int] = []
    with machine.report.asking(asked), look(gpu) as seen, Subject(mask=gpu.uuid) as subject:
        events = seen.nvml.register_xids([seen.handle])
        if events is not None:
            seen.nvml.wait_for_xid(events, 0.0)
        error = subject.do("stray")
        until_s = time.monotonic() + 5
        while events is not None and not told and time.monotonic() < until_s:
            one = seen.nvml.wait_for_xid(events, 0.25)
            told += [] if one is None else [one[1]]
        action = seen.nvml.health_facts(seen.handle)[0].recovery_action
        machine.report.judge(
            asked,
            f"CUDA: {error}; Xid {told[0] if told else 'not told'}; recovery action {action}",
            "Xid 31, and no recovery action",
            holds=told == [31] and action in (None, "none"),
            relies="xid_catalog.HARMLESS" if told else "",
        )
