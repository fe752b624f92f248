"""Hundreds of pilots on a real cluster of Slurm, several at once, each of which ends in another way.

`python -m tests.fleet.soak 200` prints a table and a verdict, and ends with 1 when something was wrong. SIGTERM ends
the faults, and the rest follows. It needs root, slurm-wlm and munge. See `tests.fleet.books` for what is looked at all
the time.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from gpulease_protocol.host.process_id import ProcessId
from tests.daemon import daemon, events, eventually
from tests.fleet.books import LEFT_S, Books, watched_books
from tests.fleet.faults import WITHIN_S, Faults, trainings
from tests.fleet.fleet import Fleet
from tests.fleet.slurm_cluster import SlurmCluster, leftovers, slurm_cluster, until

NODES, STRIKERS, GPUS = 6, 4, 8
TRAINING = "98766"
"""Argument of the `sleep` that stands for a training; the tests have another one."""
ENDS = {"scancel": 0.31, "kill_stepd": 0.27, "down": 0.27, "kill_slurmd": 0.08, "time_limit": 0.07}
"""Shares of the faults after which a pilot is gone."""
SURVIVED = {"kill_worker": 0.06, "requeue": 0.04}
"""Of those after which it goes on, so many for each pilot that ends."""
SLOW = ("time_limit", "kill_slurmd")
AWAY, AWAY_S, PARTS = "slurmctld away", 60.0, 3
"""How long slurmctld is away, which happens between two parts."""
OTHERS_S = 12
"""How long a job of another user has the node of a pilot that has just ended."""
MOST_WRONG = 8
"""So many violations end the run early."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one fault. Seconds since it; None where it does not apply."""

    fault: str
    knew_s: float | None = None
    """Until the ledger knew that the attempt had ended."""
    next_s: float | None = None
    """Until the next grant: of the job's next attempt."""
    gone_s: float | None = None
    """Until no process of the pilot was left."""
    left: int = 0
    """Processes that were left after `LEFT_S`."""

    @property
    def seconds(self) -> tuple[float | None, float | None, float | None]:
        """The three durations."""
        return self.knew_s, self.next_s, self.gone_s


class CalmFleet(Fleet):
    """With workers that look less often: many run at once here."""

    worker_options = (f"--simulate={GPUS}", "--allocation-poll-s=3", "--poll-s=1")


class SoakFaults(Faults):
    """With an end of time that comes sooner."""

    def time_limit(self, node: str, handle: str) -> None:
        """An administrator makes the allocation shorter: its minute may already be over."""
        self.cluster.run("scontrol", "update", f"JobId={handle}", "TimeLimit=1")


@dataclass
class Soak:
    """The pool, what strikes it, and what came of it."""

    cluster: SlurmCluster
    fleet: Fleet
    books: Books
    outcomes: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    expected: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """By id of a job: the state in which it must end, and its exit code where that is known."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when no more faults are to come."""

    @property
    def goes_on(self) -> bool:
        """False when the next fault is not to come."""
        return len(self.wrong) < MOST_WRONG and not self.stopped.is_set()

    def strike(self, fault: str, with_other: bool) -> None:
        """A training that has a node alone, whose pilot meets with a fault. `with_other`: another user's job of Slurm
        waits for that node."""
        with self._noted(fault), self._job() as job_id:
            outcome = self._struck(fault, self.train(job_id), with_other)
            self.outcomes.append(outcome)
            times = [f"{value:.1f} s" if value is not None else "-" for value in outcome.seconds]
            print(f"{self.submitted()} pilots, {fault}: {', '.join(times)}", flush=True)

    @contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Note what goes wrong in the block, and go on."""
        try:
            yield
        except (AssertionError, OSError, LookupError, subprocess.SubprocessError) as error:
            self.wrong.append(f"{what}: {type(error).__name__} {str(error)[:3000]}")
            print(f"WRONG {self.wrong[-1]}", flush=True)

    @contextmanager
    def _job(self) -> Iterator[str]:
        """A training that is cancelled at the end of the block; its id."""
        job_id = self.fleet.running.submit("sleep", TRAINING, gpus=GPUS, launcher="plain", retries=9)
        self.expected[job_id] = ("cancelled", None)
        try:
            yield job_id
        finally:
            self.fleet.running.call("POST", f"/v1/jobs/{job_id}/cancel", {"grace_s": 1})
            self.fleet.running.wait_job(job_id, "cancelled", within_s=WITHIN_S)

    def train(self, job_id: str) -> dict[str, Any]:
        """A job that has a node alone, once it runs; its process is `pid`, its pilot `handle`."""
        found: dict[str, Any] = {}

        def runs() -> bool:
            job = self.fleet.running.job(job_id)
            assert job["attempts"] <= 1, f"it has moved, and nothing has struck it: {job['attempt_history']}"
            if job["state"] != "running":
                return False
            node = job["gpus"][0]["node"]
            pilot, pid = self.pilot(node), self.pid(job["lease_id"])
            if pilot is None or pid is None:
                return False
            found.update(job | {"node": node, "handle": pilot["handle"], "pid": pid})
            return True

        eventually(runs, 2 * WITHIN_S, self.fleet.story)
        return found

    def pilot(self, node: str) -> dict[str, Any] | None:
        """The pilot that carries a node, once its worker has reported. Slurm knows which one it is: where the pool has
        two on a node for a moment, one has ended, and to end it again would be no fault."""
        carries = {handle for handle, (_, _, where) in self.cluster.jobs().items() if where == node}
        pilots = (one for one in self.fleet.pilots() if one["handle"] in carries and one["state"] == "running")
        return next((one for one in pilots if one["was_ready"]), None)

    def pid(self, lease_id: str) -> int | None:
        """The training of a lease."""
        return next((pid for pid, (lease, _) in trainings(TRAINING).items() if lease == lease_id), None)

    def submitted(self) -> int:
        """How many pilots were ever submitted."""
        return sum(int(str(pilot["generation"])) for pilot in self.fleet.pilots())

    def _struck(self, fault: str, job: dict[str, Any], with_other: bool) -> Outcome:
        self._small_jobs()
        own = self._processes(job)
        if with_other:
            words = ("--exclusive", f"--gres=gpu:{GPUS}", "--job-name=other", "--output=/dev/null")
            self.cluster.run("sbatch", f"--nodelist={job['node']}", *words, f"--wrap=sleep {OTHERS_S}")
        faults, began = SoakFaults(self.cluster, self.fleet), time.time()
        getattr(faults, fault)(job["node"], job["handle"])
        if fault in SURVIVED:
            return self._survived(fault, job, began)
        return self._ended(fault, job, began, own)

    def _small_jobs(self) -> None:
        """Jobs beside it, whose end is known."""
        for code, state in ((0, "succeeded"), (3, "failed")):
            small = self.fleet.running.submit("sh", "-c", f"exit {code}", gpus=1, launcher="plain")
            self.expected[small] = (state, code)

    def _processes(self, job: dict[str, Any]) -> list[ProcessId]:
        """All processes of a job's pilot, and of the job."""
        needles = {f"SLURM_JOB_ID={job['handle']}".encode(), f"GPULEASE_LEASE_ID={job['lease_id']}".encode()}
        directory, found = f"{self.fleet.place}/workers/{job['node']}/".encode(), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                own = needles & set((entry / "environ").read_bytes().split(b"\0"))
                if own or directory in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        found += SoakFaults(self.cluster, self.fleet).stepds(job["handle"])
        return [one for pid in found if (one := ProcessId.of(pid)) is not None]

    def _survived(self, fault: str, job: dict[str, Any], began: float) -> Outcome:
        running = self.fleet.running
        eventually(lambda: job["node"] in self.fleet.ready(), WITHIN_S, self.fleet.story)
        took_s = time.time() - began
        now = running.job(job["id"])
        assert (now["state"], now["attempts"]) == ("running", 1), now
        assert self.pid(job["lease_id"]) == job["pid"], "it runs on"
        return Outcome(fault=fault, knew_s=took_s)

    def _ended(self, fault: str, job: dict[str, Any], began: float, own: Sequence[ProcessId]) -> Outcome:
        running = self.fleet.running
        is_gone = until(lambda: not any(one.alive() for one in own), LEFT_S)
        gone_s = time.time() - began
        eventually(lambda: running.job(job["id"])["attempts"] == 2, WITHIN_S, lambda: self._story(job["id"]))
        again = running.wait_job(job["id"], "running", within_s=WITHIN_S)
        assert again["attempts"] == 2, f"it was started {again['attempts']} times"
        ended_at = datetime.fromisoformat(again["attempt_history"][0]["ended_at"])
        granted_at = datetime.fromisoformat(running.lease(again["lease_id"])["granted_at"])
        left = 0 if is_gone else sum(one.alive() for one in own)
        if left:
            self.wrong.append(f"{fault}: {left} processes of pilot {job['handle']} are left after {LEFT_S:g} s")
        return Outcome(
            fault=fault,
            knew_s=ended_at.timestamp() - began,
            next_s=granted_at.timestamp() - began,
            gone_s=gone_s,
            left=left,
        )

    def _story(self, job_id: str) -> str:
        """What became of a job, then of the pool."""
        told = [one["reason"] for one in events(self.fleet.running) if one["job_id"] == job_id]
        return f"{self.fleet.running.job(job_id)}, {told}; {self.fleet.story()}"

    def away(self) -> None:
        """For a minute no one can ask Slurm anything: what runs goes on, and the ledger grants."""
        with self._noted(AWAY), self._job() as first, self._job() as second:
            self._away([self.train(first), self.train(second)])

    def _away(self, jobs: Sequence[dict[str, Any]]) -> None:
        eventually(lambda: len(self.fleet.ready()) == NODES, WITHIN_S, self.fleet.story)
        before = self.submitted()
        tokens = len(self.fleet.running.call("GET", "/v1/tokens").json["items"])
        self.cluster.kill_controller(jobs[0]["handle"])
        began = time.time()
        lease = self.fleet.running.request_lease(GPUS, wait_s=100)
        next_s = time.time() - began
        assert lease["state"] == "active", lease
        self.fleet.running.release(lease)
        SoakFaults(self.cluster, self.fleet).kill_worker(jobs[0]["node"], jobs[0]["handle"])
        while time.time() - began < AWAY_S:
            assert self.submitted() == before, "a pilot was submitted while Slurm was away"
            time.sleep(1.0)  # the minute itself
        self.cluster.start("slurmctld")
        eventually(self.cluster.answers, WITHIN_S, self.cluster.story)
        eventually(lambda: all(job["handle"] in self.cluster.jobs() for job in jobs), WITHIN_S, self.cluster.story)
        eventually(lambda: len(self.fleet.ready()) == NODES, WITHIN_S, self.fleet.story)
        knew_s = time.time() - began - AWAY_S
        for job in jobs:
            now = self.fleet.running.job(job["id"])
            assert (now["state"], now["attempts"]) == ("running", 1), now
            assert self.pid(job["lease_id"]) == job["pid"], "it runs on"
        assert self.submitted() == before, "a pilot was replaced that had not ended"
        assert len(self.fleet.running.call("GET", "/v1/tokens").json["items"]) == tokens
        self.outcomes.append(Outcome(fault=AWAY, knew_s=knew_s, next_s=next_s))
        print(f"slurmctld was killed and away for {AWAY_S:g} s; all is well {knew_s:.1f} s later", flush=True)

    def settle(self) -> None:
        """Take the pool down, and look at what is left."""
        with self._noted("before the end"):
            assert "paused" not in (shown := self.fleet.type("status").stdout), shown
            eventually(lambda: not self._untrue(), WITHIN_S, lambda: f"jobs: {self._untrue()}")
            self.fleet.running.wait_free(WITHIN_S)
        down = self.fleet.type("down", "--tick", "1s")
        if down.returncode != 0:
            self.wrong.append(f"down ended with {down.returncode}: {down.stderr}")
        until(lambda: not self.cluster.jobs() and not leftovers(self.fleet.place / "workers"), LEFT_S)
        facts = {
            "processes left": leftovers(self.fleet.place / "workers"),
            "trainings left": trainings(TRAINING),
            "jobs that Slurm still has": self.cluster.jobs(),
            "nodes that the ledger still knows": self.fleet.nodes(),
            "tokens that are not revoked": self.fleet.running.call("GET", "/v1/tokens").json["items"],
            "jobs in an untrue state": self._untrue(),
        }
        self.wrong += [f"{what}: {found}" for what, found in facts.items() if found]

    def _untrue(self) -> dict[str, object]:
        """Jobs that the ledger says to be in another state than they must be."""
        with self.fleet.running.client() as client:
            jobs = {job.id: job for job in client.jobs()}
        assert set(jobs) == set(self.expected), "every job is known, and no other"
        return {
            job.id: f"{job.state}, {job.exit_code}, {job.reason}: not {state}"
            for job, (state, code) in ((jobs[job_id], end) for job_id, end in self.expected.items())
            if job.state != state or (code is not None and job.exit_code != code)
        }


def deck(pilots: int, drawn: random.Random) -> list[tuple[str, bool]]:
    """So many faults that end a pilot and some that do not, in a random order; every fourth with another user's job
    that waits for the node."""
    counts = {name: max(1, round(pilots * share)) for name, share in (ENDS | SURVIVED).items()}
    faults = [name for name, count in counts.items() for _ in range(count)]
    drawn.shuffle(faults)
    return [(name, name in ("scancel", "kill_stepd") and drawn.random() < 0.25) for name in faults]


def first_grants(fleet: Fleet, times: int = 3) -> list[float]:
    """A request waits, and a pool of one node comes up: seconds from the submission of the pilot to the grant."""
    took = []
    for _ in range(times):
        lease = fleet.running.request_lease(1)
        with fleet.up("--nodes", "1"):
            active = fleet.running.wait_active(lease["id"], WITHIN_S)
            took.append(datetime.fromisoformat(active["granted_at"]).timestamp() - fleet.submitted_at(0))
        fleet.running.release(active)
        assert fleet.type("down", "--tick", "1s").returncode == 0
    return took


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The outcomes by fault."""
    by_fault: dict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        by_fault[one.fault].append(one)
    lines = [
        "| fault | times | until the ledger knew | until the next grant | until its last process was gone | left |",
        "|---|---|---|---|---|---|",
    ]
    for fault, found in by_fault.items():
        cells = [_cell(values) for values in zip(*(one.seconds for one in found), strict=True)]
        lines.append(f"| {fault} | {len(found)} | {' | '.join(cells)} | {sum(one.left for one in found)} |")
    return lines


def verdict(outcomes: Sequence[Outcome], planned: int, submitted: int, wrong: Sequence[str]) -> str:
    """One line that tells the whole: how many pilots met with what, and whether all held.

    `planned`: faults of pilots that were to come, of which a run that ends early has not seen all.
    """
    times = Counter(one.fault for one in outcomes if one.fault != AWAY)
    away = sum(one.fault == AWAY for one in outcomes)
    kinds = ", ".join(f"{fault} {count}" for fault, count in times.most_common())
    seen = f"{times.total()} of {planned} faults of pilots ({kinds}), slurmctld away {away} times"
    held = f"{len(wrong)} violations" if wrong else "no GPU granted twice, no process left, every job true"
    return f"verdict: {submitted} pilots, {seen}: {held}"


def _cell(values: Sequence[float | None]) -> str:
    known = [one for one in values if one is not None]
    return f"{median(known):.1f} s, at most {max(known):.1f} s" if known else "-"


@contextmanager
def installation() -> Iterator[tuple[SlurmCluster, Fleet]]:
    """A cluster, and a daemon without nodes."""
    place = Path(tempfile.mkdtemp(prefix="gpulease-slurm-"))
    place.chmod(0o755)
    try:
        with slurm_cluster(place / "slurm", NODES, prefix="soak") as cluster, daemon(place, "--no-worker") as running:
            yield cluster, CalmFleet(running, place, cluster.environment, "--gres", f"gpu:{GPUS}", "--time", "24h")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def play(soak: Soak, faults: Sequence[tuple[str, bool]]) -> None:
    """All faults, in some parts, several at once; between two parts slurmctld is away."""
    with soak.fleet.up("--nodes", str(NODES)):
        for part in range(PARTS):
            # What takes long comes first, so that the others need not wait for it at the end of a part.
            waiting = sorted(faults[part::PARTS], key=lambda one: one[0] not in SLOW)
            _strike_all(soak, waiting)
            if part < PARTS - 1 and soak.goes_on:
                soak.away()
        soak.settle()


def _strike_all(soak: Soak, waiting: list[tuple[str, bool]]) -> None:
    taken = threading.Lock()

    def strike() -> None:
        while soak.goes_on:
            with taken:
                if not waiting:
                    return
                fault, with_other = waiting.pop(0)
            soak.strike(fault, with_other)

    with ThreadPoolExecutor(STRIKERS) as pool:
        for done in [pool.submit(strike) for _ in range(STRIKERS)]:
            done.result()


def main(pilots: int, seed: int) -> int:
    """Run it, and print what came of it. 1 when something was wrong."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    faults, began = deck(pilots, random.Random(seed)), time.monotonic()
    with installation() as (cluster, fleet):
        grants = first_grants(fleet)
        print(f"from sbatch to the first grant: {', '.join(f'{took:.1f} s' for took in grants)}", flush=True)
        with watched_books(cluster, fleet, TRAINING) as books:
            soak = Soak(cluster, fleet, books, stopped=stopped)
            play(soak, faults)
            submitted = soak.submitted()
    wrong = [*books.wrong, *soak.wrong]
    print(f"{submitted} pilots in {time.monotonic() - began:.0f} s, seed {seed}; {len(soak.expected)} jobs")
    print("\n".join(table(soak.outcomes)))
    print(books.summary())
    for one in wrong:
        print(f"WRONG: {one}")
    print(verdict(soak.outcomes, len(faults), submitted, wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, int(sys.argv[2]) if len(sys.argv) > 2 else 1))
