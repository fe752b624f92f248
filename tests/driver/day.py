"""A day on the machine, in ten minutes: many people, and everything that a driver does to them.

`python -m tests.driver.day [SECONDS]` prints the figures of one; `tests/driver/test_day.py` judges them. What is asked
of it: no GPU drains for longer than what its own lease has left on it lasts, nobody is refused for an old reading, and
no two leases ever have a GPU at once.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.daemon import DaemonProcess, events, eventually
from tests.driver.holder import Use
from tests.driver.machine import GPUS, UUIDS, DriverMachine, build
from tests.driver.watch import monotonic_s, states

USERS = (54321, 54322, 54323, 54324)
OLD_READING = "fresh reading"
"""What every refusal says that rests on the age of a reading."""
RETAINED_S = 30.0
"""`Policy.retained_memory_s`: how long the open files of a process that belongs to nobody may delay."""


@dataclass(frozen=True, slots=True)
class Delay:
    """How long a GPU drained for longer than anything of its lease was on it."""

    lease_id: str
    gpu: int
    begun_s: float
    """When the lease had ended, and the last of it was gone."""
    delay_s: float
    """From then on until the GPU was clean; negative when it was clean before."""
    excuse: str = ""
    """What was wrong with the driver meanwhile."""


@dataclass(slots=True)
class Figures:
    """What came of a day."""

    seconds: float = 0.0
    leases: int = 0
    jobs: int = 0
    failed: list[str] = field(default_factory=list)
    """What went wrong for those who used it, in words."""
    refusals: int = 0
    """Of those who do not queue."""
    refused_for_age: list[str] = field(default_factory=list)
    """Refusals that rest on the age of a reading."""
    violations: list[str] = field(default_factory=list)
    delays: list[Delay] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    """From asking, on GPUs of which some were free all the while, to the grant."""
    unclean: list[str] = field(default_factory=list)
    """GPUs that never became clean."""

    def of(self, excuse: str) -> list[float]:
        """The delays, sorted, while one thing was wrong; with "" those while nothing was."""
        return sorted(one.delay_s for one in self.delays if one.excuse == excuse)

    def __str__(self) -> str:
        lines = [
            f"{self.leases} leases, {self.jobs} jobs, {self.seconds:.0f} s on {GPUS} GPUs",
            f"two leases on one GPU: {len(self.violations)}",
            f"refused for an old reading: {len(self.refused_for_age)} of {self.refusals} refusals",
            "from the last of a lease gone to its GPU clean, in seconds:",
        ]
        for excuse in sorted({one.excuse for one in self.delays}):
            delays = self.of(excuse)
            middle, late = delays[len(delays) // 2], delays[int(len(delays) * 0.95)]
            what = excuse or "nothing wrong"
            lines.append(f"  {what:24} {len(delays):4} times  p50 {middle:.2f}  p95 {late:.2f}  most {delays[-1]:.2f}")
        return "\n".join([*lines, *self.unclean, *self.failed, *self.violations, *self.refused_for_age[:5]])


def plan(seconds: float, leases: int, jobs: int, seed: int) -> list[Use]:
    """Who asks for what when: a few trainings that last, and many that come and go."""
    chance = random.Random(seed)
    last = seconds * 0.85
    uses = [
        Use(at_s=0.0, uid=USERS[n], label="long", hold_s=last, options=("-n", "-w", "2", "-e", "1")) for n in (0, 1)
    ]
    for _ in range(leases - len(uses)):
        options = [] if chance.random() < 0.3 else ["-n"]
        ends = chance.choices(("exit", "kill", "die", "nothing"), (4, 4, 1, 1))[0]
        if chance.random() < 0.4:
            options += ["-w", str(chance.randint(1, 3)), "-e", "1"]
        elif ends == "exit" and chance.random() < 0.3:
            options += ["-o", "1.5"]
        count = 2 if chance.random() < 0.15 else 1
        uses.append(
            Use(
                at_s=chance.uniform(0, last),
                uid=chance.choice(USERS),
                label="short",
                count=count,
                waits=chance.random() < 0.6,
                hold_s=chance.uniform(0.2, max(1.0, seconds / 60)),
                ends=ends,
                options=tuple(options),
                masked=count > 1 or chance.random() < 0.8,
            )
        )
    for _ in range(jobs):
        uses.append(
            Use(
                at_s=chance.uniform(0, last),
                uid=chance.choice(USERS),
                label="job",
                count=2,
                hold_s=chance.uniform(1, max(2.0, seconds / 40)),
                ends="cancel" if chance.random() < 0.3 else "job",
                options=("-n", "-w", "1", "-e", "1"),
            )
        )
    return uses


@dataclass
class Trouble:
    """What goes wrong during a day, at fixed parts of it, and when it did."""

    machine: DriverMachine
    seconds: float
    blocked_s: float
    strange: bool
    """An exporter that nobody knows is started, once."""
    windows: list[tuple[str, int | None, float, float]] = field(default_factory=list)
    """What, on which GPU (None: on all), from when until when."""
    closing: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Let it all happen, until it is over or `closing` is set."""
        begun_s = time.monotonic()
        for part, act in self.acts():
            if self.closing.wait(max(0.0, begun_s + part * self.seconds - time.monotonic())):
                return
            act()

    def acts(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """What is done, and after what part of the day."""
        acts: list[tuple[float, Callable[[], None]]] = [(part / 12, self.restart_exporter) for part in range(12)]
        acts += [(0.15, lambda: self.machine.slow_lists(0.015)), (0.3, lambda: self.machine.slow_lists(0.005))]
        acts += [(0.4, self.block), (0.7, self.lose), (0.75, self.restore)]
        if self.strange:
            acts.append((0.8, self.start_stranger))
        yield from sorted(acts, key=lambda one: one[0])

    def restart_exporter(self) -> None:
        """A monitor that administrators know."""
        for process in self.machine.started("dcgm-exporter"):
            process.kill()
        self.machine.start("-x", name="dcgm-exporter", wait=False)

    def start_stranger(self) -> None:
        """One that opens every GPU, and that nobody knows."""
        self.machine.start("-x", name="an-exporter", wait=False)
        self.window("an unknown exporter", None, RETAINED_S)

    def block(self) -> None:
        """A teardown that hangs."""
        self.machine.block(self.blocked_s, gpu=3)
        self.window("blocked calls", None, self.blocked_s)

    def lose(self) -> None:
        """A GPU falls off."""
        self.machine.lose(6)
        self.window("a lost GPU", 6, self.seconds)

    def restore(self) -> None:
        """It comes back."""
        self.machine.restore(6)
        self.windows = [one for one in self.windows if one[1] is None]
        self.windows.append(("a lost GPU", 6, time.monotonic() - 0.05 * self.seconds, time.monotonic() + 3))

    def window(self, what: str, gpu: int | None, seconds: float) -> None:
        """From now on."""
        self.windows.append((what, gpu, time.monotonic(), time.monotonic() + seconds + 3))

    def excuse(self, gpu: int, begun_s: float, ended_s: float) -> str:
        """What was wrong with a GPU in this time; empty for nothing."""
        for what, which, since_s, until_s in self.windows:
            if which in (None, gpu) and begun_s < until_s and ended_s > since_s:
                return what
        return ""


@contextmanager
def troubled(trouble: Trouble) -> Iterator[None]:
    """Let it happen meanwhile."""
    thread = threading.Thread(target=trouble.run)
    thread.start()
    try:
        yield
    finally:
        trouble.closing.set()
        thread.join()


def spend(
    running: DaemonProcess,
    machine: DriverMachine,
    directory: Path,
    *,
    seconds: float = 600.0,
    leases: int = 200,
    jobs: int = 20,
    blocked_s: float = 45.0,
    strange: bool = True,
    seed: int = 1,
) -> Figures:
    """A day, and what came of it. `directory`: where people note what they were told."""
    (directory / "plan.json").write_text(json.dumps([asdict(one) for one in plan(seconds, leases, jobs, seed)]))
    command = [sys.executable, "-m", "tests.driver.holder", running.url, str(directory / "plan.json"), str(directory)]
    trouble, begun_s = Trouble(machine, seconds, blocked_s, strange), time.monotonic()
    with troubled(trouble):
        said = subprocess.run(
            command,
            env=os.environ | machine.environment,
            stderr=subprocess.PIPE,
            text=True,
            timeout=seconds * 3 + 120,
            check=False,
        )
    with suppress(AssertionError):  # what never becomes clean is a figure
        eventually(lambda: {"draining", "leased"}.isdisjoint(states(running)), RETAINED_S + 10)
    found = Figures(seconds=time.monotonic() - begun_s, violations=machine.violations())
    found.failed += said.stderr.splitlines()
    for path in directory.glob("*.jsonl"):
        note(found, [json.loads(line) for line in path.read_text().splitlines()])
    measure(found, running, machine, trouble)
    return found


def note(found: Figures, lines: list[dict[str, str]]) -> None:
    """What one of them was told."""
    for line in lines:
        found.leases += "got" in line
        found.jobs += "submitted" in line
        if line.get("trains", "ready").startswith("failed"):
            found.failed.append(f"a training under a lease: {line['trains']}")
        if line.get("ended") == "failed":
            found.failed.append(f"job {line['job']}: {line['reason']}")
        if "refused" in line:
            found.refusals += 1
            if OLD_READING in line["refused"] + line["why"]:
                found.refused_for_age.append(line["refused"])


def measure(found: Figures, running: DaemonProcess, machine: DriverMachine, trouble: Trouble) -> None:
    """When each GPU was clean, beside when it could have been."""
    clean: dict[tuple[str, str], float] = {}
    log = events(running)
    for event in log:
        if event["kind"] == "gpu.clean":
            clean |= {(event["lease_id"], uuid): monotonic_s(event["at"]) for uuid in event["gpus"]}
    for event in log:
        if event["kind"] != "lease.ended":
            continue
        for uuid in event["gpus"]:
            index, lease_id = UUIDS.index(uuid), event["lease_id"]
            at_s = clean.get((lease_id, uuid))
            if at_s is None:
                found.unclean.append(f"GPU {index} never became clean after lease {lease_id}")
                continue
            gone_s = max(machine.gone_at_s(lease_id, index) or 0.0, monotonic_s(event["at"]))
            excuse = trouble.excuse(index, gone_s, at_s)
            found.delays.append(Delay(lease_id, index, gone_s, at_s - gone_s, excuse))


def main() -> int:
    """One day; its figures on stdout."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    part = seconds / 600
    with tempfile.TemporaryDirectory(prefix="gpulease-day-") as scratch:
        place = Path(scratch)
        (place / "built").mkdir()
        (place / "notes").mkdir()
        build(place / "built")
        machine = DriverMachine(place / "built")
        running = DaemonProcess(place / "d", "--node", "n", environment=machine.environment)
        try:
            running.start()
            print(
                spend(
                    running,
                    machine,
                    place / "notes",
                    seconds=seconds,
                    leases=int(200 * part),
                    jobs=int(20 * part),
                    blocked_s=45 * min(1.0, part * 2),
                )
            )
        finally:
            running.stop()
            machine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
