"""A pool on a real cluster of Ray, see `tests.fleet.ray_rig`: what a user types, and what a test kills."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpulease_protocol.host.process_id import ProcessId, stat
from gpulease_protocol.host.process_tree import all_pids, descendants
from tests.daemon import DaemonProcess, eventually
from tests.fleet.fleet import Fleet
from tests.ports import free_port
from tests.tools.sweep import TOOLS

GPUS = 8
WITHIN_S = 240.0
CONFIG = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "agent_register_timeout_ms": 300_000}
"""Settings of Ray, by which it soon sees that a raylet has ended, and waits for slow starts."""
VARIABLES = {"RAY_raylet_start_wait_time_s": "300", "RAY_USAGE_STATS_ENABLED": "0"}


def missing() -> str | None:
    """What this host lacks for a cluster; None where it has everything."""
    return None if (TOOLS / "ray").exists() else "no Ray: make tools"


class RayCluster:
    """The cluster, and everything that it has started. `place` needs a short path, since Ray makes sockets in it."""

    def __init__(self, place: Path, config: Mapping[str, object]) -> None:
        self.variables = {"RAY_TMPDIR": str(place), **VARIABLES}
        self._log = place / "rig.log"
        settings = json.dumps(CONFIG | dict(config))
        command = [str(TOOLS / "python"), "-m", "tests.fleet.ray_rig", str(free_port()), settings]
        with self._log.open("ab") as log:
            self._rig = subprocess.Popen(
                command,
                env=os.environ | self.variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parents[2],
            )
        self._shown: dict[str, Any] = {}

    def answer(self) -> None:
        """Wait until the rig has done what it was asked for; at first, until the cluster has one node."""
        assert self._rig.stdout is not None
        line = self._rig.stdout.readline()
        assert line, self._log.read_text(errors="replace")[-3000:]
        self._shown = dict(json.loads(line))

    def ask(self, word: str) -> None:
        """Have the rig do something, see there, and wait until that is done."""
        assert self._rig.stdin is not None
        self._rig.stdin.write(f"{word}\n")
        self._rig.stdin.flush()
        self.answer()

    @property
    def address(self) -> str:
        """Where its GCS listens."""
        return str(self._shown["address"])

    @property
    def gcs(self) -> int:
        """The pid of its GCS."""
        return int(self._shown["gcs"])

    @property
    def raylets(self) -> list[int]:
        """The pids of its raylets. Pools talk to the first."""
        return list(self._shown["raylets"])

    def close(self) -> None:
        """End it, and see that nothing of it is left."""
        everything = descendants(self._rig.pid)
        self._rig.communicate()
        left = [process for process in everything if process.alive()]
        assert not left, left


@contextmanager
def ray_cluster(**config: object) -> Iterator[RayCluster]:
    """A cluster of two nodes, with further settings of Ray."""
    place = Path(tempfile.mkdtemp(prefix="glr-"))
    try:
        cluster = RayCluster(place, config)
        try:
            cluster.answer()
            cluster.ask("raylet")
            yield cluster
        finally:
            cluster.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)


class RayFleet(Fleet):
    """What a user of the cluster types, in a Python that has Ray."""

    def __init__(self, running: DaemonProcess, place: Path, cluster: RayCluster) -> None:
        at = ("--address", cluster.address, "--gpus", str(GPUS), "--shared")
        super().__init__(running, place, cluster.variables, *at)
        self.engine, self.python, self.cluster = "ray", str(TOOLS / "python"), cluster

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command."""
        command = [self.python, "-m", "gpulease_cli", "fleet", self.engine, *words]
        environment = os.environ | {"HOME": str(self.place), "GPULEASE_URL": self.running.url} | self.variables
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    def worker(self, node: str) -> int:
        """The pid of the worker of a node, once there is one."""
        return self._pid(lambda: _pid_of(b"worker", f"--node={node}".encode()))

    def actor(self, node: str) -> int:
        """The pid of the actor that carries it: it has started a shell, and that the worker."""
        return _parent(_parent(self.worker(node)))

    def raylet(self, node: str) -> int:
        """The pid of the raylet of that actor."""
        return _parent(self.actor(node))

    def _pid(self, find: Callable[[], int | None]) -> int:
        found: list[int] = []
        eventually(lambda: bool(found.extend(filter(None, [find()])) or found), WITHIN_S, self.story)
        return found[0]


def _parent(pid: int) -> int:
    status = stat(pid)
    assert status is not None, f"process {pid} has ended"
    return status.parent


def _pid_of(*words: bytes) -> int | None:
    """The oldest living process with these words in its command line: a worker forks its supervisors."""
    found = []
    for pid in all_pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if all(word in command for word in words) and (process := ProcessId.of(pid)) is not None:
            found.append((process.start_ticks, pid))
    return min(found)[1] if found else None
