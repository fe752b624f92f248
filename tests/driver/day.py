"""A day on the machine, in ten minutes: many people, and everything that a driver does to them.

`python -m tests.driver.day [SECONDS]` prints the figures of one; `tests/driver/test_day.py` judges them. What is asked
of it: no GPU drains for longer than what its own lease has left on it lasts, nobody is refused for an old reading, and
no two leases ever have a GPU at once.
"""

from __future__ import annotations

import json
import math
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
from tests.driver.machine import GPUS, UUIDS, DriverMachine, driver_machine
from tests.driver.watch import monotonic_s, states

USERS = (54321, 54322, 54323, 54324)
OLD_READING = "fresh reading"
"""What every refusal says that rests on the age of a reading."""
QUICK = {"GPULEASE_HEALTH_S": "0.5"}
"""How often NVML is asked again for a GPU that was lost, in seconds."""
STRANGER = "an-exporter"
"""A monitor of that name is known to nobody."""
BELIEVED_S = 4.0
"""How soon a GPU that was lost is believed to be back: NVML is opened anew, and its Xid has settled."""
LEARNT_S = 2.0
"""A lease began, for its worker, after the last answer that did not name it: up to a poll before its grant."""
RETAINED_S = 30.0
"""`Policy.retained_memory_s`: how long the open files of a process that belongs to nobody may delay."""


@dataclass(frozen=True, slots=True)
class Delay:
    """How long a GPU drained for longer than anything of its lease was on it."""

    lease_id: str
    gpu: int
    drained_s: float
    """From the end of the lease, or of the last of it on the GPU, until the GPU was clean; negative when before."""
    late_s: float
    """From when the driver let anybody know until the GPU was clean."""
    trouble: str = ""
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
    unclean: list[str] = field(default_factory=list)
    """GPUs that never became clean."""

    @property
    def late_s(self) -> float:
        """The longest that any GPU drained although the driver would have told that it was clean."""
        return max((one.late_s for one in self.delays), default=0.0)

    def __str__(self) -> str:
        lines = [
            f"{self.leases} leases, {self.jobs} jobs, {self.seconds:.0f} s on {GPUS} GPUs",
            f"two leases on one GPU: {len(self.violations)}",
            f"refused for an old reading: {len(self.refused_for_age)} of {self.refusals} refusals",
            "from the last of a lease gone to its GPU clean, in seconds:",
        ]
        for trouble in sorted({one.trouble for one in self.delays}):
            delays = sorted(one.drained_s for one in self.delays if one.trouble == trouble)
            late_s = max(one.late_s for one in self.delays if one.trouble == trouble)
            middle, slow, most = delays[len(delays) // 2], delays[int(len(delays) * 0.95)], delays[-1]
            figures = f"{len(delays):4} times  p50 {middle:.2f}  p95 {slow:.2f}  most {most:.2f}"
            lines.append(f"  {trouble or 'nothing wrong':20} {figures}  most after the trouble {late_s:.2f}")
        return "\n".join([*lines, *self.unclean, *self.failed, *self.violations, *self.refused_for_age[:5]])


def plan(seconds: float, leases: int, jobs: int, seed: int) -> list[Use]:
    """Who asks for what when: a few trainings that last, and many that come and go."""
    chance = random.Random(seed)
    last = seconds * 0.85
    uses = [
        Use(at_s=0.0, uid=USERS[n], label="long", hold_s=last, options=("-n", "-w", "2", "-e", "1")) for n in (0, 1)
    ]
    # Two that end while calls are blocked, whatever chance has the others do.
    blocked = Use(
        at_s=0.38 * seconds, uid=USERS[2], label="blocked", hold_s=0.03 * seconds, ends="kill", options=("-n",)
    )
    uses += [blocked, blocked]
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


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which something was wrong."""

    what: str
    gpu: int | None
    """On this GPU; None: on all."""
    since_s: float
    until_s: float
    """When whatever the driver held back is told again."""


@dataclass
class Trouble:
    """What goes wrong during a day, at fixed parts of it, and when it did."""

    machine: DriverMachine
    seconds: float
    blocked_s: float
    strange: bool
    """An exporter that nobody knows is started, once."""
    windows: list[Window] = field(default_factory=list)
    """When it did."""
    lost_at_s: float = 0.0
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
        self.machine.start("-x", name=STRANGER, wait=False)
        self.windows.append(Window(STRANGER, None, time.monotonic(), math.inf))

    def block(self) -> None:
        """A teardown that hangs. A reading that asks every GPU in turn waits for it."""
        now_s = time.monotonic()
        self.machine.block(self.blocked_s, gpu=3)
        self.windows.append(Window("blocked calls", None, now_s, now_s + self.blocked_s))

    def lose(self) -> None:
        """A GPU falls off."""
        self.lost_at_s = time.monotonic()
        self.machine.lose(6)

    def restore(self) -> None:
        """It comes back, and is believed to have after a while."""
        self.machine.restore(6)
        self.windows.append(Window("a lost GPU", 6, self.lost_at_s, time.monotonic() + BELIEVED_S))

    def delay(self, lease_id: str, gpu: int, granted_s: float, gone_s: float, clean_s: float) -> Delay:
        """How long a GPU drained, and for how much of that nothing was in the way."""
        could_s, trouble = gone_s, ""
        for window in self.windows:
            if window.gpu not in (None, gpu) or clean_s < window.since_s or gone_s > window.until_s:
                continue
            if window.what == STRANGER:
                if granted_s < window.since_s + LEARNT_S:  # a later lease finds it there already
                    could_s, trouble = gone_s + RETAINED_S, window.what
            else:
                could_s, trouble = max(could_s, window.until_s), window.what
        return Delay(lease_id, gpu, clean_s - gone_s, clean_s - could_s, trouble)


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
    found.failed += [line for line in said.stderr.splitlines() if line.startswith("Use(")]
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
    granted: dict[str, float] = {}
    log = events(running)
    for event in log:
        if event["kind"] == "gpu.clean":
            clean |= {(event["lease_id"], uuid): monotonic_s(event["at"]) for uuid in event["gpus"]}
        elif event["kind"] == "lease.granted":
            granted[event["lease_id"]] = monotonic_s(event["at"])
    for event in log:
        if event["kind"] != "lease.ended":
            continue
        for uuid in event["gpus"]:
            index, lease_id = UUIDS.index(uuid), event["lease_id"]
            clean_s = clean.get((lease_id, uuid))
            if clean_s is None:
                found.unclean.append(f"GPU {index} never became clean after lease {lease_id}")
                continue
            gone_s = max(machine.gone_at_s(lease_id, index) or 0.0, monotonic_s(event["at"]))
            found.delays.append(trouble.delay(lease_id, index, granted[lease_id], gone_s, clean_s))


def main() -> int:
    """One day; its figures on stdout."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    part = seconds / 600
    with driver_machine() as machine, tempfile.TemporaryDirectory(prefix="gpulease-day-") as scratch:
        place = Path(scratch)
        place.chmod(0o711)  # jobs run in there as their users
        (place / "notes").mkdir()
        running = DaemonProcess(place / "d", "--node", "n", environment=machine.environment | QUICK)
        leases, jobs, blocked_s = int(200 * part), int(20 * part), 45 * min(1.0, part * 2)
        try:
            running.start()
            notes = place / "notes"
            print(spend(running, machine, notes, seconds=seconds, leases=leases, jobs=jobs, blocked_s=blocked_s))
        finally:
            running.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
