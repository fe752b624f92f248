"""A workload of many users on the stand-in machine, while the driver fails in every way it can.

`python -m tests.driver.workload [SECONDS]` runs one and prints its figures; `tests/driver/test_workload.py` judges it.
The requirements: a GPU drains no longer than its own lease's processes stay on it, no request is refused because of a
stale reading, and no two leases ever have the same GPU at once.
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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.daemon import DaemonProcess, events, eventually
from tests.driver.daemon_view import monotonic_s, states
from tests.driver.machine import GPUS, UUIDS, DriverMachine, driver_machine
from tests.driver.workload_user import Use

USERS = (54321, 54322, 54323, 54324)
STALE_READING = "recent reading is still awaited"
"""Part of every refusal that is due to the age of a reading."""
FAST_SETTINGS = {"GPULEASE_HEALTH_S": "0.5"}
"""How often NVML is reopened for a lost GPU, in seconds."""
UNKNOWN_EXPORTER = "an-exporter"
"""The name of a monitor that is not on the list of known ones."""
RECOVERY_S = 4.0
"""How soon a lost GPU counts as recovered: NVML is reopened, and its Xid has settled."""
GRANT_SEEN_S = 2.0
"""A worker may date a lease to the last answer that did not name it: up to a poll before its grant."""
RETAINED_S = 30.0
"""`Policy.retained_memory_s`: how long the open files of a stranger may delay."""


@dataclass(frozen=True, slots=True)
class Delay:
    """How long a GPU drained after the last process of its lease was gone."""

    lease_id: str
    gpu: int
    drained_s: float
    """From the end of the lease or of its last process on the GPU until the GPU was clean; negative if before."""
    late_s: float
    """From the moment when the driver could show it until the GPU was clean."""
    fault: str = ""
    """What was wrong with the driver meanwhile."""


@dataclass(slots=True)
class Figures:
    """The result of a workload."""

    seconds: float = 0.0
    leases: int = 0
    jobs: int = 0
    failed: list[str] = field(default_factory=list)
    """What went wrong for its users, in words."""
    refusals: int = 0
    """Refusals of requests that do not queue."""
    refused_for_age: list[str] = field(default_factory=list)
    """Refusals due to the age of a reading."""
    violations: list[str] = field(default_factory=list)
    delays: list[Delay] = field(default_factory=list)
    unclean: list[str] = field(default_factory=list)
    """GPUs that never became clean."""

    @property
    def late_s(self) -> float:
        """The longest that any GPU drained although the driver could show that it was clean."""
        return max((one.late_s for one in self.delays), default=0.0)

    def __str__(self) -> str:
        lines = [
            f"{self.leases} leases, {self.jobs} jobs, {self.seconds:.0f} s on {GPUS} GPUs",
            f"two leases on one GPU: {len(self.violations)}",
            f"refused for an old reading: {len(self.refused_for_age)} of {self.refusals} refusals",
            "from the last of a lease gone to its GPU clean, in seconds:",
        ]
        for fault in sorted({one.fault for one in self.delays}):
            delays = sorted(one.drained_s for one in self.delays if one.fault == fault)
            late_s = max(one.late_s for one in self.delays if one.fault == fault)
            middle, slow, most = delays[len(delays) // 2], delays[int(len(delays) * 0.95)], delays[-1]
            figures = f"{len(delays):4} times  p50 {middle:.2f}  p95 {slow:.2f}  most {most:.2f}"
            lines.append(f"  {fault or 'nothing wrong':20} {figures}  most after the fault {late_s:.2f}")
        return "\n".join([*lines, *self.unclean, *self.failed, *self.violations, *self.refused_for_age[:5]])


def plan(seconds: float, leases: int, jobs: int, seed: int) -> list[Use]:
    """The users of a workload: a few long trainings, and many short ones."""
    chance = random.Random(seed)
    last = seconds * 0.85
    uses = [
        Use(at_s=0.0, uid=USERS[n], label="long", hold_s=last, options=("-n", "-w", "2", "-e", "1")) for n in (0, 1)
    ]
    # Two that end while calls are blocked, regardless of the random ones.
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
class FaultWindow:
    """A period with a fault."""

    what: str
    gpu: int | None
    """On this GPU; None: on all."""
    since_s: float
    until_s: float
    """When the driver shows again what it held back."""


@dataclass
class Faults:
    """The faults injected during a workload, at fixed fractions of it, and when each occurred."""

    machine: DriverMachine
    seconds: float
    blocked_s: float
    strange: bool
    """Whether to start an unknown exporter, once."""
    windows: list[FaultWindow] = field(default_factory=list)
    """When they occurred."""
    lost_at_s: float = 0.0
    closing: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Inject all faults, until the end or until `closing` is set."""
        begun_s = time.monotonic()
        for part, act in self.acts():
            if self.closing.wait(max(0.0, begun_s + part * self.seconds - time.monotonic())):
                return
            act()

    def acts(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Each fault, and the fraction of the workload after which it occurs."""
        acts: list[tuple[float, Callable[[], None]]] = [(part / 12, self.restart_exporter) for part in range(12)]
        acts += [(0.15, lambda: self.machine.slow_lists(0.015)), (0.3, lambda: self.machine.slow_lists(0.005))]
        acts += [(0.4, self.block), (0.7, self.lose), (0.75, self.restore)]
        if self.strange:
            acts.append((0.8, self.start_stranger))
        yield from sorted(acts, key=lambda one: one[0])

    def restart_exporter(self) -> None:
        """Restart a monitor that is on the list of known ones."""
        for process in self.machine.started("dcgm-exporter"):
            process.kill()
        self.machine.start("-x", name="dcgm-exporter", wait=False)

    def start_stranger(self) -> None:
        """Start a monitor that opens every GPU and is not on the list."""
        self.machine.start("-x", name=UNKNOWN_EXPORTER, wait=False)
        self.windows.append(FaultWindow(UNKNOWN_EXPORTER, None, time.monotonic(), math.inf))

    def block(self) -> None:
        """Let a teardown hang. A reading, which reads one GPU after another, waits for it."""
        now_s = time.monotonic()
        self.machine.block(self.blocked_s, gpu=3)
        self.windows.append(FaultWindow("blocked calls", None, now_s, now_s + self.blocked_s))

    def lose(self) -> None:
        """Let a GPU fall off the bus."""
        self.lost_at_s = time.monotonic()
        self.machine.lose(6)

    def restore(self) -> None:
        """Let it come back. It counts as recovered after a while."""
        self.machine.restore(6)
        self.windows.append(FaultWindow("a lost GPU", 6, self.lost_at_s, time.monotonic() + RECOVERY_S))

    def lost(self, gpus: Collection[int], at_s: float) -> bool:
        """Whether one of these GPUs was lost then."""
        return any(
            window.what == "a lost GPU" and window.gpu in gpus and window.since_s <= at_s <= window.until_s
            for window in self.windows
        )

    def delay(self, lease_id: str, gpu: int, granted_s: float, gone_s: float, clean_s: float) -> Delay:
        """How long a GPU drained, and how much of that no fault explains."""
        possible_s, fault = gone_s, ""
        for window in self.windows:
            if window.gpu not in (None, gpu) or clean_s < window.since_s or gone_s > window.until_s:
                continue
            if window.what == UNKNOWN_EXPORTER:
                if granted_s < window.since_s + GRANT_SEEN_S:  # it is there before any later lease
                    possible_s, fault = gone_s + RETAINED_S, window.what
            else:
                possible_s, fault = max(possible_s, window.until_s), window.what
        return Delay(lease_id, gpu, clean_s - gone_s, clean_s - possible_s, fault)


@contextmanager
def injecting(faults: Faults) -> Iterator[None]:
    """Inject the faults meanwhile."""
    thread = threading.Thread(target=faults.run)
    thread.start()
    try:
        yield
    finally:
        faults.closing.set()
        thread.join()


def run_workload(
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
    """Run a workload and return its figures. `directory`: where the users log their answers."""
    (directory / "plan.json").write_text(json.dumps([asdict(one) for one in plan(seconds, leases, jobs, seed)]))
    command = [
        sys.executable,
        "-m",
        "tests.driver.workload_user",
        running.url,
        str(directory / "plan.json"),
        str(directory),
    ]
    faults, begun_s = Faults(machine, seconds, blocked_s, strange), time.monotonic()
    with injecting(faults):
        users = subprocess.run(
            command,
            env=os.environ | machine.environment,
            stderr=subprocess.PIPE,
            text=True,
            timeout=seconds * 3 + 120,
            check=False,
        )
    with suppress(AssertionError):  # a GPU that never becomes clean is counted
        eventually(lambda: {"draining", "leased"}.isdisjoint(states(running)), RETAINED_S + 10)
    figures = Figures(seconds=time.monotonic() - begun_s, violations=machine.violations())
    figures.failed += [line for line in users.stderr.splitlines() if line.startswith("Use(")]
    for path in directory.glob("*.jsonl"):
        count_answers(figures, [json.loads(line) for line in path.read_text().splitlines()], faults)
    measure_delays(figures, running, machine, faults)
    return figures


def count_answers(figures: Figures, lines: list[dict[str, Any]], faults: Faults) -> None:
    """Count the answers that one user logged. A training fails rightly if its GPU is lost just before it starts."""
    gpus: list[int] = []
    for line in lines:
        figures.leases += "got" in line
        figures.jobs += "submitted" in line
        gpus = [UUIDS.index(uuid) for uuid in line["gpus"]] if "got" in line else gpus
        if line.get("trains", "ready").startswith("failed") and not faults.lost(gpus, line["at_s"]):
            figures.failed.append(f"a training under a lease: {line['trains']}")
        if line.get("ended") == "failed":
            figures.failed.append(f"job {line['job']}: {line['reason']}")
        if "refused" in line:
            figures.refusals += 1
            if STALE_READING in line["refused"] + line["why"]:
                figures.refused_for_age.append(line["refused"])


def measure_delays(figures: Figures, running: DaemonProcess, machine: DriverMachine, faults: Faults) -> None:
    """Compare when each GPU was clean with when it could have been."""
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
                figures.unclean.append(f"GPU {index} never became clean after lease {lease_id}")
                continue
            gone_s = max(machine.gone_at_s(lease_id, index) or 0.0, monotonic_s(event["at"]))
            figures.delays.append(faults.delay(lease_id, index, granted[lease_id], gone_s, clean_s))


def main() -> int:
    """Run one workload and print its figures."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    part = seconds / 600
    with driver_machine() as machine, tempfile.TemporaryDirectory(prefix="gpulease-workload-") as scratch:
        place = Path(scratch)
        place.chmod(0o711)  # jobs run in there as their users
        (place / "notes").mkdir()
        running = DaemonProcess(place / "d", "--node", "n", environment=machine.environment | FAST_SETTINGS)
        leases, jobs, blocked_s = int(200 * part), int(20 * part), 45 * min(1.0, part * 2)
        try:
            running.start()
            notes = place / "notes"
            print(run_workload(running, machine, notes, seconds=seconds, leases=leases, jobs=jobs, blocked_s=blocked_s))
        finally:
            running.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
