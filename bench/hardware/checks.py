"""The steps, in order. None of them sets or resets anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.hardware import calls, clean, facts, finder, lifecycle, openers
from bench.hardware.machine import Machine


@dataclass(frozen=True, slots=True)
class Check:
    """One step."""

    letter: str
    """Its name for `--only`."""
    title: str
    """Its subject."""
    measure: Callable[[Machine], None]
    """Takes the measurements, in a process of its own."""
    deadline_s: float
    """That process is killed after this time."""
    told_only: bool = False
    """Whether it is taken only on request."""


CHECKS = (
    Check("A", "what this machine is", facts.facts, 40),
    Check("B", "gpulease doctor", facts.doctor, 70),
    Check("F", "fabric and health", facts.fabric, 60),
    Check("C", "times of NVML's calls", calls.idle, 60),
    Check("D", "the same under load", calls.loaded, 90),
    Check("E", "who opens which device file", openers.openers, 90),
    Check("G", "whom the driver lists", clean.lists, 40),
    Check("H", "after SIGKILL", clean.remains, 70),
    Check("I", "leases from end to end", lifecycle.lifecycle, 150),
    Check("J", "a paused node; ordinals", lifecycle.paused, 80),
    Check("K", "what a daemon costs a training", lifecycle.steps, 120),
    Check("L", "find_usable_cuda_devices", finder.finder, 150),
    Check("M", "an application's Xid", clean.stray, 40, told_only=True),
)
