"""A sweep through a tool, on a daemon of simulated GPUs: how it is started, and what its log and the events say of it.

    sweep = Sweep(running, tmp_path)
    sweep.run(SCRIPT)                 # the script calls `trial.hold(number, devices)`
    sweep.check(20)                   # all have ended, no two had a GPU at once, and each lease was given back

`freed` measures a kill. `ForeignProcess` comes and goes on simulated GPUs; `busy_ratio` says how well they were used.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from tests.daemon import DaemonProcess, events, eventually
from tests.sweep_events import most_at_once
from tests.system.hardware import GIB, Hardware

TOOLS = Path(sys.prefix) / "tools" / "bin"
"""The programs of the tools' environment (`tests/tools/install.sh`)."""
RUN_S = 280.0
SETTLED_S = 5.0
FREED_WITHIN_S = 20.0
"""How long the GPUs of what was killed may remain its: some seconds, and what a machine takes that does not let the
daemon run. If no one watched their holder, they would remain for its TTL, which is a minute or more."""
FOREIGN_PID = 3999999
"""More than Linux gives out by default: no process of this host."""
OBSERVED_WITHIN_S = 1.0
"""How long a grant may lag behind a change of the hardware: the age of a reading, and time to decide."""


@dataclass(frozen=True)
class Trial:
    """One trial by its log."""

    number: int
    gpus: frozenset[str]
    """Indices."""
    pid: int
    begun_s: float
    ended_s: float
    """Unix time; infinite if it was killed, or still runs."""


class Sweep:
    """The trials that one test brings through a daemon."""

    def __init__(self, running: DaemonProcess, place: Path) -> None:
        self.running = running
        self.place = place
        self.log = place / "trials.jsonl"
        self.seq = max((event["seq"] for event in events(running)), default=0)

    def environment(self, **further: str) -> dict[str, str]:
        """What a script needs: the daemon, `import trial`, and where it logs."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPULEASE_", "CUDA_"))}
        path = f"{TOOLS}:{Path(sys.executable).parent}:{kept['PATH']}"
        own = {"GPULEASE_URL": self.running.url, "GPULEASE_WAIT_S": "120", "TRIAL_LOG": str(self.log), "PATH": path}
        modules = os.pathsep.join([str(Path(__file__).parent), *filter(None, [kept.get("PYTHONPATH")])])
        # schemathesis is installed for tests of ours, and each pytest that loads it takes 0.4 CPU s longer to start.
        own |= {"PYTEST_ADDOPTS": "-p no:schemathesis"}
        return kept | own | {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1"} | further

    def start(self, script: str, *arguments: str, name: str = "sweep.py", **environment: str) -> subprocess.Popen[str]:
        """Start a script with the Python of the tools, in this test's directory; its output is a file."""
        (self.place / name).write_text(script)
        return self.start_command([str(TOOLS / "python"), name, *arguments], **environment)

    def start_command(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a program in this test's directory."""
        with (self.place / "output").open("a") as output:
            return subprocess.Popen(
                command, cwd=self.place, env=self.environment(**environment), stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def run(self, script: str, *arguments: str, timeout_s: float = RUN_S, **environment: str) -> str:
        """Run a script until it ends, with success; what it printed."""
        return self.wait(self.start(script, *arguments, **environment), timeout_s)

    def run_command(self, command: Sequence[str], timeout_s: float = RUN_S, **environment: str) -> str:
        """Run a program until it ends, with success; what it printed."""
        return self.wait(self.start_command(command, **environment), timeout_s)

    def wait(self, process: subprocess.Popen[str], timeout_s: float = RUN_S) -> str:
        """Wait until a program has ended, with success; what it printed."""
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
            self.close()
        assert code == 0, f"exit code {code}\n{self.output()}\n{self.running.story()}"
        return self.output()

    def close(self) -> None:
        """End every process that has come from this sweep."""
        marker = f"TRIAL_LOG={self.log}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and marker in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)

    def output(self) -> str:
        """What the programs of this sweep have printed."""
        return (self.place / "output").read_text(errors="replace")[-20000:]

    def events(self) -> list[dict[str, Any]]:
        """The daemon's events since this sweep began."""
        return events(self.running, after=self.seq)

    def trials(self) -> list[Trial]:
        """The trials that have begun, in that order."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        index = {gpu["uuid"]: str(gpu["index"]) for gpu in self.running.gpus()}
        ended = {
            (line["trial"], line["pid"], line["thread"]): line["at_s"] for line in lines if line["what"] == "ended"
        }
        return [
            Trial(
                number=line["trial"],
                gpus=frozenset(index.get(gpu, gpu) for gpu in line["gpus"]),
                pid=line["pid"],
                begun_s=line["at_s"],
                ended_s=ended.get((line["trial"], line["pid"], line["thread"]), float("inf")),
            )
            for line in lines
            if line["what"] == "begun"
        ]

    def wait_for_trials(self, count: int, within_s: float = 120) -> list[Trial]:
        """Wait until this many trials run at once; those."""
        eventually(lambda: len(running_now(self.trials())) >= count, within_s, self.output)
        return running_now(self.trials())

    def wait_for_trial(self, number: int, within_s: float = 120) -> Trial:
        """Wait until the trial of this number runs; that one."""

        def found() -> list[Trial]:
            return [trial for trial in running_now(self.trials()) if trial.number == number]

        eventually(lambda: bool(found()), within_s, self.output)
        (trial,) = found()
        return trial

    def check(self, trials: int, *, gpus_each: int = 1, at_once: int | None = None) -> None:
        """All trials have ended, none shared a GPU by the log or by the events, and every lease was given back.

        `at_once`: how many leases were active at the same time, at the most.
        """
        found = self.trials()
        assert sorted(trial.number for trial in found) == list(range(trials)), self.output()
        assert {len(trial.gpus) for trial in found} == {gpus_each}, found
        assert overlaps(found) == []
        eventually(lambda: not self.running.leases("active"), 60, self.output)
        most = most_at_once(self.events())
        assert at_once in (None, most), most
        ended = [event for event in self.events() if event["kind"] == "lease.ended"]
        assert {event["reason"] for event in ended} <= {"released", "holder_died", "job_finished"}, ended


def running_now(trials: Iterable[Trial]) -> list[Trial]:
    """Those that have not ended."""
    return [trial for trial in trials if trial.ended_s == float("inf") and is_alive(trial.pid)]


def overlaps(trials: Sequence[Trial]) -> list[tuple[Trial, Trial]]:
    """Pairs of trials that had a GPU at the same time."""
    return [
        (one, two)
        for one, two in combinations(trials, 2)
        if one.gpus & two.gpus and one.begun_s < two.ended_s and two.begun_s < one.ended_s
    ]


@dataclass(frozen=True)
class AfterKill:
    """What became of the GPUs of leases after a kill."""

    seconds: float
    """Until each was free, in a new lease, or drained and named the process that keeps it."""
    draining: Mapping[int, str]
    """By index, the reason of each GPU that still drains after `SETTLED_S`."""


def freed(
    running: DaemonProcess, leases: Collection[str], kill: Callable[[], object], within_s: float = 60
) -> AfterKill:
    """Kill, and measure how long the GPUs of these active leases remain theirs. See `AfterKill`."""
    held = {gpu["uuid"] for lease in leases for gpu in running.lease(lease)["gpus"]}
    assert held, leases
    begun_s = time.monotonic()
    kill()

    def kept(*, by_no_one: bool) -> list[dict[str, Any]]:
        """The GPUs that are not free again; only those that name no process of which they drain."""
        gpus = [gpu for gpu in running.gpus() if gpu["uuid"] in held and not is_freed(gpu, leases)]
        return [gpu for gpu in gpus if not (by_no_one and is_kept_by_a_process(gpu))]

    eventually(lambda: not kept(by_no_one=True), within_s, lambda: f"{kept(by_no_one=True)}\n{running.story()}")
    seconds = time.monotonic() - begun_s
    with suppress(AssertionError):
        eventually(lambda: not kept(by_no_one=False), SETTLED_S)
        return AfterKill(time.monotonic() - begun_s, {})
    return AfterKill(seconds, {gpu["index"]: gpu["reason"] for gpu in kept(by_no_one=False)})


def is_freed(gpu: Mapping[str, Any], leases: Collection[str]) -> bool:
    """True if a GPU is free, or in another lease than these."""
    return gpu["state"] == "free" or (gpu["state"] == "leased" and gpu["lease_id"] not in leases)


def is_kept_by_a_process(gpu: Mapping[str, Any]) -> bool:
    """True if a GPU drains and names a process that lives and keeps it."""
    after_the_holder = (gpu["reason"] or "").partition("): ")[2] if gpu["state"] == "draining" else ""
    return any(is_alive(int(pid)) for pid in re.findall(r"pid (\d+)", after_the_holder))


def is_alive(pid: int) -> bool:
    """True unless there is no such process, or only its remains."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def leases_of(running: DaemonProcess, *pids: int) -> list[str]:
    """The active leases that these processes own; without any, all active leases."""
    active = running.leases("active")
    return [lease["id"] for lease in active if not pids or lease["holder"]["owner_pid"] in pids]


@dataclass
class Stay:
    """A foreign process on a GPU, in Unix time."""

    uuid: str
    from_s: float
    until_s: float = float("inf")


class ForeignProcess:
    """A process of no lease that comes to one GPU after the other, and goes. `stays` is where it was when."""

    def __init__(self, hardware: Hardware, *, stays_s: float = 2.0, away_s: float = 1.0) -> None:
        self.hardware = hardware
        self.stays: list[Stay] = []
        self._stays_s, self._away_s = stays_s, away_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._visit, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.hardware.set_wrong({})

    def _visit(self) -> None:
        while not self._stop.wait(self._away_s):
            index = len(self.stays) % len(self.hardware.uuids)
            self.hardware.set_wrong({index: {"processes": [{"pid": FOREIGN_PID, "memory_bytes": GIB}]}})
            self.stays.append(Stay(self.hardware.uuids[index], time.time()))
            self._stop.wait(self._stays_s)
            self.stays[-1].until_s = time.time()
            self.hardware.set_wrong({})


def held_times(log: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By UUID, from when to when a GPU was in a lease. Every lease must have ended."""
    times: dict[str, list[tuple[float, float]]] = {}
    granted: dict[str, tuple[float, Sequence[str]]] = {}
    for event in log:
        at_s = datetime.fromisoformat(event["at"]).timestamp()
        if event["kind"] == "lease.granted":
            granted[event["lease_id"]] = (at_s, event["gpus"])
        elif event["kind"] == "lease.ended" and event["lease_id"] in granted:
            since_s, gpus = granted.pop(event["lease_id"])
            for gpu in gpus:
                times.setdefault(gpu, []).append((since_s, at_s))
    assert granted == {}, "every lease was given back"
    return times


def busy_ratio(log: Iterable[Mapping[str, Any]], gpus: Collection[str], stays: Iterable[Stay] = ()) -> float:
    """The part of the GPUs' time that was spent in leases, from the first grant to the last end, by the events.

    The time that a GPU drains, or is looked at, between two leases counts as idle. The time for which a foreign process
    kept a GPU, without a lease on it, is no time of that GPU: no one could have had it.
    """
    held = held_times(log)
    first_s = min(since_s for times in held.values() for since_s, _ in times)
    last_s = max(until_s for times in held.values() for _, until_s in times)
    leased_s = sum(until_s - since_s for times in held.values() for since_s, until_s in times)
    foreign_s = 0.0
    for stay in stays:
        begun_s, ended_s = max(stay.from_s, first_s), min(stay.until_s, last_s)
        in_leases_s = sum(overlap_s(begun_s, ended_s, *time_) for time_ in held.get(stay.uuid, ()))
        foreign_s += max(0.0, ended_s - begun_s - in_leases_s)
    return leased_s / (len(gpus) * (last_s - first_s) - foreign_s)


def overlap_s(from_s: float, until_s: float, since_s: float, end_s: float) -> float:
    """For how long two spans of time overlap."""
    return max(0.0, min(until_s, end_s) - max(from_s, since_s))


def granted_beside_foreign(log: Iterable[Mapping[str, Any]], stays: Iterable[Stay]) -> list[Mapping[str, Any]]:
    """Grants of a GPU while a foreign process was on it, long enough for the daemon to have seen it."""
    return [
        event
        for event in log
        if event["kind"] == "lease.granted"
        for stay in stays
        if stay.uuid in event["gpus"]
        and stay.from_s + OBSERVED_WITHIN_S < datetime.fromisoformat(event["at"]).timestamp() < stay.until_s
    ]
