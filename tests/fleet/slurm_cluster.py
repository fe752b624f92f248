"""A real cluster of Slurm on this host: munged, slurmctld and several slurmd, each a node with eight GPUs of its own.

Needs root: munged runs as its own user, and `proctrack/cgroup` makes cgroups.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.daemon import eventually
from tests.ports import free_port

GPUS = 8
START_S = 120.0
CONFIG = """
ClusterName=gpuleasetest
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool/%n
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdLogFile={place}/log/slurmd-%n.log
SlurmctldPidFile={place}/log/slurmctld.pid
SlurmdPidFile={place}/log/slurmd-%n.pid
SlurmctldPort={port}
SlurmdDebug=info
SlurmctldDebug=info
ProctrackType={proctrack}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
KillWait=20
UnkillableStepTimeout=60
JobRequeue=1
InactiveLimit=0
MessageTimeout=60
GresTypes=gpu
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO DefMemPerCPU=10
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=16 ThreadsPerCore=1 RealMemory=16000 Gres=gpu:8 State=UNKNOWN\n"
)
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\nConstrainDevices=no\n"


@dataclass
class SlurmCluster:
    """The cluster. `place` holds all of its files."""

    place: Path
    nodes: tuple[str, ...]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By name: `munged`, `slurmctld`, and each node's slurmd."""

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need to find it."""
        return {"SLURM_CONF": str(self.place / "slurm.conf")}

    def run(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm prints."""
        environment = os.environ | self.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}{done.stdout}"
        return done.stdout + done.stderr

    def start(self, name: str) -> None:
        """Start one of its daemons."""
        commands = {
            "munged": [
                *("setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", "-F"),
                *(f"--{what}-file={self.place}/munge/{what}" for what in ("key", "pid", "log", "seed")),
                f"--socket={self.place}/munge/socket",
            ],
            "slurmctld": ["slurmctld", "-D"],
        }
        command = commands.get(name, ["slurmd", "-D", "-N", name])
        log = (self.place / "log" / f"{name}.out").open("ab")
        path = f"{os.environ['PATH']}:/usr/sbin"
        self.processes[name] = subprocess.Popen(
            command, env=os.environ | self.environment | {"PATH": path}, stdout=log, stderr=log
        )
        log.close()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send one of its daemons a signal, and wait until it has ended."""
        process = self.processes[name]
        process.send_signal(number)
        process.wait(60)

    def kill_controller(self, handle: str) -> None:
        """SIGKILL for slurmctld, once it has written to disk all that it knew; `handle`: any job that it has.

        It writes at most every five seconds. Killed earlier it comes back with a job of the last seconds as PENDING,
        takes the one that runs for a second copy, kills it, and drains its node for good.
        """
        mark, saved = f"saved-{time.time_ns()}", self.place / "state/job_state"

        def written() -> bool:
            with suppress(FileNotFoundError):  # it is being replaced
                return mark.encode() in saved.read_bytes()
            return False

        self.run("scontrol", "update", f"JobId={handle}", f"Comment={mark}")
        eventually(written, START_S, self.story)
        self.kill("slurmctld")

    def answers(self) -> bool:
        """True when slurmctld answers."""
        return "is UP" in self.run("scontrol", "ping", check=False)

    def states(self) -> dict[str, str]:
        """By node: what Slurm says of it."""
        lines = self.run("sinfo", "--noheader", "-N", "-o", "%N %T", check=False).splitlines()
        return dict(line.split() for line in lines if len(line.split()) == 2)

    def jobs(self) -> dict[str, tuple[str, str, str]]:
        """By id of a job that has not ended: its name, its state and its node. Fails where Slurm does not answer: that
        says nothing of its jobs."""
        lines = self.run("squeue", "--noheader", "--format=%i|%j|%T|%N").splitlines()
        parts = (line.split("|") for line in lines if line.count("|") == 3)
        return {one[0]: (one[1], one[2], one[3]) for one in parts}

    def story(self) -> str:
        """The end of its logs."""
        logs = sorted((self.place / "log").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


def missing() -> str | None:
    """What this host lacks for a cluster; None where it has everything."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    programs = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=path) is None]
    if programs:
        return f"not installed: {', '.join(programs)} (slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "not root"


def has_freezer() -> bool:
    """True where `proctrack/cgroup` of a Slurm with cgroups of version 1 works."""
    return os.access("/sys/fs/cgroup/freezer", os.W_OK)


@contextmanager
def slurm_cluster(
    place: Path, nodes: int = 3, *, proctrack: str = "proctrack/cgroup", prefix: str = "n"
) -> Iterator[SlurmCluster]:
    """A cluster whose nodes are idle. Everything of it is gone afterwards. `prefix`: of the names of its nodes, which
    no other cluster of this host may have."""
    place.mkdir(mode=0o755)
    cluster = SlurmCluster(place, tuple(f"{prefix}{number}" for number in range(1, nodes + 1)))
    _write(cluster, proctrack)
    try:
        cluster.start("munged")
        eventually((place / "munge/socket").exists, START_S, cluster.story)
        cluster.start("slurmctld")
        for node in cluster.nodes:
            cluster.start(node)
        eventually(lambda: list(cluster.states().values()) == ["idle"] * nodes, START_S, cluster.story)
        yield cluster
    finally:
        _end(cluster)


def _write(cluster: SlurmCluster, proctrack: str) -> None:
    place, host = cluster.place, socket.gethostname().split(".")[0]
    for name in ("state", "spool", "log", "dev", "munge"):
        (place / name).mkdir()
    shutil.chown(place / "munge", "munge", "munge")
    (place / "munge").chmod(0o755)
    key = place / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    shutil.chown(key, "munge", "munge")
    for number in range(GPUS):
        os.mknod(place / f"dev/nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(195, number))
    config = CONFIG.format(host=host, place=place, port=free_port(), proctrack=proctrack)
    config += "".join(NODE.format(name=name, host=host, port=free_port()) for name in cluster.nodes)
    # Partitions come after the nodes that they name.
    lines = config.strip().splitlines()
    ordered = [line for line in lines if not line.startswith("PartitionName")]
    ordered += [line for line in lines if line.startswith("PartitionName")]
    (place / "slurm.conf").write_text("\n".join(ordered) + "\n")
    (place / "gres.conf").write_text(
        f"NodeName={','.join(cluster.nodes)} Name=gpu File={place}/dev/nvidia[0-{GPUS - 1}]\n"
    )
    (place / "cgroup.conf").write_text(CGROUP)
    for directory in (place, *place.parents):
        with suppress(PermissionError):
            directory.chmod(directory.stat().st_mode | 0o011)  # munge must reach its socket


def _end(cluster: SlurmCluster) -> None:
    slurmctld = cluster.processes.get("slurmctld")
    if slurmctld is not None and slurmctld.poll() is None:
        cluster.run("scancel", "--user=root", check=False)
        until(lambda: cluster.answers() and not cluster.jobs(), 40)
    for name in (*cluster.nodes, "slurmctld", "munged"):
        process = cluster.processes.get(name)
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait(60)
    for pid in leftovers(cluster.place):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for node in cluster.nodes:
        for directory, _, _ in os.walk(f"/sys/fs/cgroup/freezer/slurm_{node}", topdown=False):
            with suppress(OSError):
                os.rmdir(directory)


def until(condition: Callable[[], bool], within_s: float) -> bool:
    """Wait for a condition; False when it does not become true in time."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def leftovers(place: Path) -> dict[int, str]:
    """By pid: living processes whose command line or environment names this place."""
    found, needle = {}, str(place).encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if needle in command or needle in (entry / "environ").read_bytes():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")[:200]
    return found
