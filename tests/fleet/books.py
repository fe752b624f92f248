"""Compares the processes of a host, the ledger and Slurm's list, all the time while a pool of pilots is struck.

| what must hold | how it is seen |
|---|---|
| a GPU has one training | its UUID is in the environment of trainings of one lease |
| a GPU is in one active lease | the daemon's list |
| a training ends with its lease | it is gone `LEFT_S` after the lease at the latest |
| a grant is on a node that Slurm has given to a pilot | Slurm listed one there `GRANT_S` before at the latest |
| no grant is on a node that Slurm has given to another user's job | that job began `GRANT_S` before at the latest |

`GRANT_S` is what a pool with short rounds needs until the ledger knows that Slurm has taken a node back.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from gpulease_fleet.carrier import PilotName
from tests.fleet.faults import trainings
from tests.fleet.fleet import Fleet
from tests.fleet.slurm_cluster import SlurmCluster

LOOK_S = 0.5
LEFT_S, GRANT_S = 90.0, 15.0


@dataclass
class SlurmView:
    """Which job Slurm has on each node. Times are on the monotonic clock."""

    cluster: SlurmCluster
    answered_at: float = 0.0
    carried_at: dict[str, float] = field(default_factory=dict)
    """By node: when Slurm last said that a pilot has it."""
    others_at: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By node: the other user's job that has it, and when that was first seen."""

    def look(self) -> None:
        """Ask Slurm. While it does not answer, what it said last stays."""
        command = ("squeue", "--noheader", "--format=%i|%j|%T|%N")
        environment = os.environ | self.cluster.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            return
        now, others = time.monotonic(), {}
        for line in done.stdout.splitlines():
            handle, name, state, node = (line.split("|") + [""] * 4)[:4]
            if not node or state == "PENDING":
                continue
            if PilotName.parse(name) is not None:
                self.carried_at[node] = now
            else:
                known, since = self.others_at.get(node, ("", now))
                others[node] = (handle, since if known == handle else now)
        self.others_at, self.answered_at = others, now

    def carried_s(self, node: str) -> float:
        """For how long no pilot has had a node when Slurm last answered."""
        return self.answered_at - self.carried_at.get(node, float("-inf"))


@dataclass
class Books:
    """The ledger beside the processes and beside Slurm's list."""

    fleet: Fleet
    slurm: SlurmView
    training: str
    """Argument of the `sleep` that stands for a training."""
    looks: int = 0
    grants: int = 0
    longest: dict[str, float] = field(default_factory=dict)
    """Seconds, by what took them."""
    wrong: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _orphans: dict[int, float] = field(default_factory=dict)
    """By pid of a training whose lease has ended: since when."""
    _left: set[int] = field(default_factory=set)
    """Those that were told to be wrong."""

    def look(self) -> None:
        """Compare once."""
        running, active = trainings(self.training), self.fleet.running.leases("active")
        now = time.monotonic()
        self.looks += 1
        by_gpu: dict[str, set[str]] = defaultdict(set)
        for lease_id, gpus in running.values():
            for uuid in gpus:
                by_gpu[uuid].add(lease_id)
        self.wrong += [f"{uuid} is used by {sorted(leases)}" for uuid, leases in by_gpu.items() if len(leases) > 1]
        held = Counter(gpu["uuid"] for lease in active for gpu in lease["gpus"])
        self.wrong += [f"{uuid} is in {times} leases" for uuid, times in held.items() if times > 1]
        self._look_at_orphans(running, {lease["id"] for lease in active}, now)
        for lease in active:
            if lease["id"] not in self._seen:
                self._seen.add(lease["id"])
                self.grants += 1
                for node in {gpu["node"] for gpu in lease["gpus"]}:
                    self._look_at_grant(str(lease["id"]), node)

    def _look_at_orphans(self, running: dict[int, tuple[str, frozenset[str]]], active: set[str], now: float) -> None:
        orphans = {pid: lease_id for pid, (lease_id, _) in running.items() if lease_id not in active}
        self._orphans = {pid: self._orphans.get(pid, now) for pid in orphans}
        for pid, since in self._orphans.items():
            self._note("a training outlived its lease for", now - since)
            if now - since > LEFT_S and pid not in self._left:
                self._left.add(pid)
                self.wrong.append(f"training {pid} is left of lease {orphans[pid]}")

    def _look_at_grant(self, lease_id: str, node: str) -> None:
        if self.slurm.carried_s(node) > LOOK_S:
            self.slurm.look()  # it may have given the node to the next pilot meanwhile
        last, carried_s = self.slurm.answered_at, self.slurm.carried_s(node)
        self._note("a grant came after Slurm had taken back the node", carried_s)
        if carried_s > GRANT_S:
            self.wrong.append(f"{lease_id} was granted on {node}, {carried_s:.1f} s after Slurm had taken it back")
        handle, since = self.slurm.others_at.get(node, ("", last))
        self._note("a grant came after Slurm had given the node to another user", last - since)
        if last - since > GRANT_S:
            self.wrong.append(f"{lease_id} was granted on {node}, which job {handle} has for {last - since:.1f} s")

    def _note(self, what: str, seconds: float) -> None:
        self.longest[what] = max(self.longest.get(what, 0.0), seconds)

    def summary(self) -> str:
        """What it has seen."""
        longest = "; ".join(f"{what} {seconds:.1f} s" for what, seconds in self.longest.items())
        return f"{self.looks} looks, {self.grants} grants; at most: {longest}"


@contextmanager
def watched_books(cluster: SlurmCluster, fleet: Fleet, training: str) -> Iterator[Books]:
    """Books that are compared beside the block."""
    stopped, slurm = threading.Event(), SlurmView(cluster)
    books = Books(fleet, slurm, training)

    def again(look: Callable[[], None]) -> None:
        while not stopped.wait(LOOK_S):
            with suppress(OSError, subprocess.TimeoutExpired):
                look()

    slurm.look()
    threads = [threading.Thread(target=again, args=(look,)) for look in (slurm.look, books.look)]
    for thread in threads:
        thread.start()
    try:
        yield books
    finally:
        books.wrong += [f"nothing was looked at any more: {thread}" for thread in threads if not thread.is_alive()]
        stopped.set()
        for thread in threads:
            thread.join()
