"""Slurm on one node with eight GPUs, in a directory of its own: munged, slurmctld, slurmd; no accounting, no cgroups.

Slurm wants a device file for each GPU. They are made in that directory, for a driver that this host need not have, and
nothing opens them. It needs root, as Slurm's own daemons do.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.peers import NotInstalled, listens, program, running
from tests.ports import free_port

GPUS = 8
NVIDIA_MAJOR = 195
TUNED = (
    "sched_min_interval=1000,sched_interval=1,batch_sched_delay=0,bf_interval=1,bf_continue,default_queue_depth=1000"
)
"""`SchedulerParameters` for many short jobs."""
CONFIGURATION = """
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldPort={control_port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters={parameters}
SlurmdParameters=config_overrides
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
GresTypes=gpu
MaxArraySize=10001
NodeName=bench NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=16 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=16 ThreadsPerCore=1 RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=bench Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running cluster of one node."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.environment = os.environ | {"SLURM_CONF": str(place / "slurm.conf")}

    def call(self, *words: str) -> str:
        """Run one of its commands; what it printed."""
        ran = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == 0, (words, ran.stderr)
        return ran.stdout

    def is_idle(self) -> bool:
        """True when its node takes jobs."""
        ran = subprocess.run(["sinfo", "-h", "-o", "%T"], env=self.environment, capture_output=True, check=False)
        return ran.stdout.strip() == b"idle"

    def array_s(self, jobs: int) -> float:
        """Seconds from the submission of an array of jobs with one GPU each to the end of the last."""
        done = self.place / "done"
        done.write_bytes(b"")
        begun_s = time.perf_counter()
        command = f"printf x >> {done}"
        self.call("sbatch", f"--array=0-{jobs - 1}", "--gres=gpu:1", "-o", "/dev/null", "--wrap", command)
        while done.stat().st_size < jobs:  # squeue would take CPU time from it
            assert time.perf_counter() - begun_s < 300, self.call("squeue")
            time.sleep(0.02)
        while self.call("squeue", "-h"):
            time.sleep(0.02)
        return time.perf_counter() - begun_s


@contextmanager
def slurm(directory: Path, parameters: str = "") -> Iterator[Slurm]:
    """A cluster of one node with eight GPUs. Raises NotInstalled."""
    control, node = program("slurmctld", "slurm-wlm"), program("slurmd", "slurm-wlm")
    munged = program("munged", "munge")
    if os.geteuid() != 0:
        raise NotInstalled("needs root")
    place = directory / f"slurm-{'tuned' if parameters else 'default'}"
    configure(place, parameters)
    found = Slurm(place)
    munge = place / "munge"
    munge_command = [munged, "-F", f"--key-file={munge}/key", f"--socket={munge}/munge.socket"]
    munge_command += [f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
    port = int((place / "port").read_text())
    with ExitStack() as stack:
        stack.enter_context(running(munge_command, place / "munged.out", (munge / "munge.socket").exists, user="munge"))
        command = [control, "-D", "-c"]
        stack.enter_context(running(command, place / "control.out", lambda: listens(port), found.environment))
        stack.enter_context(running([node, "-D", "-N", "bench"], place / "node.out", found.is_idle, found.environment))
        yield found


def configure(place: Path, parameters: str) -> None:
    """Write what Slurm and munge read. Raises NotInstalled where no device files can be made."""
    for name in ("munge", "state", "spool", "dev"):
        (place / name).mkdir(parents=True)
    for path in (place, place.parent):
        path.chmod(0o711)  # munged is another user
    key = place / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for path in (place / "munge", key):
        shutil.chown(path, "munge", "munge")
    try:
        for number in range(GPUS):
            device = os.makedev(NVIDIA_MAJOR, 100 + number)
            os.mknod(place / "dev" / f"nvidia{number}", stat.S_IFCHR | 0o000, device)
    except PermissionError:
        raise NotInstalled("needs the right to make device files") from None
    port = free_port()
    (place / "port").write_text(str(port))
    text = CONFIGURATION.format(
        host=socket.gethostname(), place=place, control_port=port, node_port=free_port(), parameters=parameters,
        gpus=GPUS,
    )  # fmt: skip
    (place / "slurm.conf").write_text(text.replace("SchedulerParameters=\n", ""))
    (place / "gres.conf").write_text(f"NodeName=bench Name=gpu File={place}/dev/nvidia[0-{GPUS - 1}]\n")
