"""Pilots on a real cluster of Slurm, each of which ends in another way; what must hold is looked at all the time.

`tests.fleet.soak` does it for hundreds of pilots.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.daemon import eventually
from tests.fleet.fleet import Fleet
from tests.fleet.slurm_cluster import SlurmCluster

TRAINING = "98765"
"""Argument of the `sleep` that stands for a training."""
WITHIN_S = 240.0


def trainings(argument: str = TRAINING) -> dict[int, tuple[str, frozenset[str]]]:
    """By pid: the lease and the GPUs of each training that runs, a `sleep` with that argument."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if (entry / "cmdline").read_bytes().split(b"\0")[:2] != [b"sleep", argument.encode()]:
                continue
            pairs = (one.partition(b"=") for one in (entry / "environ").read_bytes().split(b"\0"))
            own = {name.decode(): value.decode() for name, _, value in pairs}
            gpus = frozenset(own.get("CUDA_VISIBLE_DEVICES", "").split(",")) - {""}
            found[int(entry.name)] = (own.get("GPULEASE_LEASE_ID", ""), gpus)
    return found


@dataclass
class Watch:
    """Looks at the processes of trainings, the ledger and Slurm, until it is stopped."""

    fleet: Fleet
    looks: int = 0
    wrong: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Look again and again."""
        while not self.stopped.wait(0.3):
            with suppress(OSError):
                self.look()

    def look(self) -> None:
        """No GPU has two trainings, and none is in two active leases."""
        self.looks += 1
        by_gpu: dict[str, set[str]] = defaultdict(set)
        for lease_id, gpus in trainings().values():
            for uuid in gpus:
                by_gpu[uuid].add(lease_id)
        self.wrong += [f"{uuid} is used by {sorted(leases)}" for uuid, leases in by_gpu.items() if len(leases) > 1]
        held = Counter(gpu["uuid"] for lease in self.fleet.running.leases("active") for gpu in lease["gpus"])
        self.wrong += [f"{uuid} is in {times} leases" for uuid, times in held.items() if times > 1]


@contextmanager
def watched(fleet: Fleet) -> Iterator[Watch]:
    """A watch beside the block. Fails at its end when something was wrong."""
    watch = Watch(fleet)
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        yield watch
    finally:
        looked = thread.is_alive()
        watch.stopped.set()
        thread.join()
    assert looked, "nothing was looked at any more"
    assert watch.wrong == [], watch.wrong[:5]


@dataclass
class Faults:
    """The ways in which a pilot ends, or does not."""

    cluster: SlurmCluster
    fleet: Fleet

    def processes(self, handle: str, *words: str) -> list[int]:
        """Processes of a job of Slurm with these words in their command line."""
        found, needle = [], f"SLURM_JOB_ID={handle}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if all(word in command for word in words) and needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def stepds(self, handle: str) -> list[int]:
        """The `slurmstepd` of a job."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                if command.startswith(f"slurmstepd: [{handle}."):
                    found.append(int(entry.name))
        return found

    def _kill(self, pids: Collection[int]) -> None:
        assert pids, "there is nothing to kill: it would be no fault"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def scancel(self, node: str, handle: str) -> None:
        """As a user does it."""
        assert handle in self.cluster.jobs(), "there is nothing to cancel: it would be no fault"
        self.cluster.run("scancel", handle)

    def time_limit(self, node: str, handle: str) -> None:
        """An administrator makes the allocation shorter: it ends in a minute."""
        self.cluster.run("scontrol", "update", f"JobId={handle}", "TimeLimit=2")

    def kill_worker(self, node: str, handle: str) -> None:
        """The batch script starts it again."""
        killed = set(self.processes(handle, "gpulease worker"))
        self._kill(killed)
        eventually(lambda: bool(set(self.processes(handle, "gpulease worker")) - killed), WITHIN_S, self.fleet.story)

    def kill_stepd(self, node: str, handle: str) -> None:
        """And then scancel: Slurm ends the job, and none of its processes."""
        self._kill(self.stepds(handle))
        time.sleep(1.0)  # not in time for anything: so that Slurm notices, as it would
        self.cluster.run("scancel", handle)

    def kill_slurmd(self, node: str, handle: str) -> None:
        """Slurm takes the node for down, and its job for failed; then slurmd is back."""
        self.cluster.kill(node)
        eventually(lambda: handle not in self.cluster.jobs(), WITHIN_S, self.cluster.story)
        self.cluster.start(node)

    def down(self, node: str, handle: str) -> None:
        """An administrator says that the node is down, and later that it is not."""
        self.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        eventually(lambda: handle not in self.cluster.jobs(), WITHIN_S, self.cluster.story)
        self.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def requeue(self, node: str, handle: str) -> None:
        """Slurm refuses it: pilots are submitted with --no-requeue. So the pilot goes on, or is cancelled."""
        answer = self.cluster.run("scontrol", "requeue", handle, check=False)
        assert "disabled" in answer, answer

    def controller_away(self, node: str, handle: str) -> None:
        """For some seconds no one can ask Slurm anything."""
        self.cluster.kill_controller(handle)
        time.sleep(6.0)  # several rounds in which nothing is known
        self.cluster.start("slurmctld")
        eventually(self.cluster.answers, WITHIN_S, self.cluster.story)
        eventually(lambda: handle in self.cluster.jobs(), WITHIN_S, self.cluster.story)

    @property
    def ends(self) -> dict[str, Callable[[str, str], None]]:
        """Those after which the pilot is gone."""
        names = ("scancel", "kill_stepd", "down", "kill_slurmd", "time_limit")
        return {name: getattr(self, name) for name in names}

    @property
    def survived(self) -> dict[str, Callable[[str, str], None]]:
        """Those after which it goes on."""
        return {name: getattr(self, name) for name in ("kill_worker", "requeue", "controller_away")}


def pilot_of(fleet: Fleet, node: str) -> dict[str, object]:
    """The pilot that carries a node now, once its worker reports."""

    def found() -> dict[str, object] | None:
        pilots = (one for one in fleet.pilots() if one["state"] == "running" and one["node"] == node)
        return next(pilots, None)

    eventually(lambda: found() is not None and node in fleet.ready(), WITHIN_S, fleet.story)
    pilot = found()
    assert pilot is not None
    return pilot


def strike(faults: Faults, name: str, node: str) -> float:
    """A job on a node, whose pilot meets with a fault: it goes on, here or elsewhere, and runs once. Seconds until it
    runs again."""
    fleet = faults.fleet
    handle = str(pilot_of(fleet, node)["handle"])
    before = set(trainings())
    job = fleet.running.submit("sleep", TRAINING, gpus=2, launcher="plain", node=None, retries=3)
    first = fleet.running.wait_job(job, "running", within_s=WITHIN_S)
    node = first["gpus"][0]["node"]
    handle = str(pilot_of(fleet, node)["handle"])
    eventually(lambda: len(set(trainings()) - before) == 1, WITHIN_S, fleet.story)
    pid = next(iter(set(trainings()) - before))
    began = time.monotonic()
    {**faults.ends, **faults.survived}[name](node, handle)
    if name in faults.survived:
        eventually(lambda: node in fleet.ready(), WITHIN_S, fleet.story)
        assert fleet.running.job(job)["state"] == "running"
        assert pid in trainings(), "it runs on"
    else:
        eventually(lambda: pid not in trainings(), WITHIN_S, fleet.story)
        eventually(lambda: fleet.running.job(job)["attempts"] == 2, WITHIN_S, fleet.story)
        fleet.running.wait_job(job, "running", within_s=WITHIN_S)
    took_s = time.monotonic() - began
    fleet.running.call("POST", f"/v1/jobs/{job}/cancel", {"grace_s": 1})
    fleet.running.wait_job(job, "cancelled", within_s=WITHIN_S)
    return took_s
