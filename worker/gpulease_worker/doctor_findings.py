"""What `gpulease doctor` knows of a host, and what it says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import GpuReading, Node, Noun


class Outcome(StrEnum):
    """The outcome of a check."""

    FINE = "fine"
    WARNING = "warning"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Noun):
    """The result of one check."""

    check: str
    """What was checked."""
    health: Outcome
    """`fine`, `wrong`, `warning` for what does not prevent work, or `unknown` if it cannot be told."""
    sentence: str
    """What was found."""
    remedy: str = ""
    """What to do; empty if nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The certificate with which the daemon of this host serves TLS."""

    file: str
    problem: str | None = None
    """Why it cannot be read; None if it can."""
    expires_s: float = 0.0
    """When it expires, seconds since 1970."""
    names: tuple[str, ...] = ()
    """The names and addresses that it is for."""
    host_names: tuple[str, ...] = ()
    """The names of this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The daemon elsewhere that has this host as a node."""

    url: str
    """Where that daemon is."""
    node: str
    """Name of the node."""
    own_host: str
    """Name of this host."""
    worker_host: str | None = None
    """Host of the worker that reports for the node; None if none does."""
    problem: str | None = None
    """Why the daemon does not take this host's worker; None if it does."""
    remedy: str = ""
    """What to do about that."""

    def failed(self, problem: str, remedy: str) -> Joined:
        """The same with a problem."""
        return replace(self, problem=problem, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What was found on a host. None: it could not be determined."""

    kernel_driver: str | None = None
    """Version of the loaded kernel driver (`/proc/driver/nvidia/version`)."""
    library: str | None = None
    """Version of `libnvidia-ml.so.1`, from the name of the file that it links to."""
    nvml_problem: str | None = None
    """Why NVML gave no reading; None if it gave one."""
    gpus: tuple[GpuReading, ...] = ()
    """What NVML read."""
    cuda: tuple[str, ...] | None = None
    """UUIDs of the GPUs that CUDA shows; None if it did not start or was not asked."""
    cuda_problem: str | None = None
    """Why CUDA did not start."""
    cuda_code: int | None = None
    """The error code of CUDA."""
    cuda_absent: bool = False
    """True if there is no libcuda."""
    pid_namespace: int | None = None
    """Inode of this process's PID namespace."""
    network_of_host: bool | None = None
    """Whether this process is in the host's network namespace; None if that cannot be told."""
    claims: tuple[str | None, ...] = ()
    """Which process has claimed each GPU that NVML read, such as "pid 4242, user ada"; None: no process has."""
    wsl: bool = False
    """True under WSL2: the GPUs are those of Windows, through /dev/dxg."""
    persistence: tuple[bool, ...] | None = None
    """Whether each GPU is in persistence mode, in PCI order."""
    binding: str | None = None
    """The file that `import pynvml` would load; None if there is none."""
    socket: str = ""
    """Where the daemon's Unix socket should be."""
    socket_mode: int | None = None
    """Its permissions; None if it does not exist."""
    socket_opens: bool = False
    """Whether this user may connect to it."""
    port_strangers: tuple[str, ...] = ()
    """Other users who listen where browsers and curl look for the daemon, such as "127.0.0.1:8750 (user eve)"."""
    wall_s: float = 0.0
    """The wall clock, seconds since 1970."""
    newest_s: float | None = None
    """When anything in the data directory was last written, by the wall clock at that time."""
    daemon_problem: str | None = None
    """Why the daemon cannot be reached or cannot grant; None if it can."""
    daemon_remedy: str = ""
    """What to do about that."""
    daemon_has_gpus: bool = False
    """Whether the daemon knows GPUs that need no driver here: simulated ones, those of other hosts, or those that it
    has readings of."""
    daemon_version: str | None = None
    """Version of the daemon; None where it is not known."""
    program_version: str = ""
    """Version of this program."""
    nodes: tuple[Node, ...] | None = ()
    """The nodes that the daemon knows; None if it does not answer."""
    without_worker: str | None = None
    """That no worker reports to the daemon, in its words; None if one does."""
    units: Mapping[str, tuple[bool, bool]] | None = None
    """By unit that is installed: whether it starts with the host, and whether it runs. None where systemd is not."""
    certificate: Certificate | None = None
    """The daemon's; None if its configuration names none."""
    joined: Joined | None = None
    """The daemon elsewhere that has this host as a node; None if it has not joined one."""
    joined_hidden: bool = False
    """Whether it has joined one, and this user may not read which."""
    stands_by_for: str | None = None
    """The address of the writer, if the daemon is a standby."""
    data_dir: str = ""
    """The daemon's data directory."""
    free_bytes: int | None = None
    """Free space there."""


def fine(check: str, sentence: str) -> Finding:
    """What is as it should be."""
    return Finding(check=check, health=Outcome.FINE, sentence=sentence)


def unknown(check: str, sentence: str) -> Finding:
    """What cannot be told."""
    return Finding(check=check, health=Outcome.UNKNOWN, sentence=sentence)


def wrong(check: str, sentence: str, remedy: str) -> Finding:
    """What keeps someone from working."""
    return Finding(check=check, health=Outcome.WRONG, sentence=sentence, remedy=remedy)


def warning(check: str, sentence: str, remedy: str) -> Finding:
    """What is worth knowing."""
    return Finding(check=check, health=Outcome.WARNING, sentence=sentence, remedy=remedy)
