"""The probe's messages, and the interface of what it reads: NVML or a simulation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field, replace
from typing import Protocol

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import ComputeMode, Device, GpuLink, GpuReading, Noun, Process
from gpulease_protocol.node_protocol import NodeLease
from gpulease_worker.processes import procfs

IDLE_BYTES = 16 * 2**20
"""Memory in use on an idle GPU beyond what the driver reserves: a few megabytes at most."""


class ReadingFailed(Exception):
    """There is no reading. The text says in one sentence what happened, why, and what to do.

    Args:
        text: The sentence.
        over: True if this process can never read again and must be replaced.
    """

    def __init__(self, text: str, *, over: bool = False) -> None:
        super().__init__(text)
        self.over = over


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often the probe reads what, and how long one driver call may take.

    Memory, utilization, temperature, power and compute mode are part of every reading.
    """

    processes_s: float = 5.0
    """Interval between reads of process lists and of what decides health; also read on request."""
    health_s: float = 30.0
    """Interval between reads of ECC counts, throttle reasons and links; how long a critical Xid outlasts its cause."""
    call_deadline_s: float = 60.0
    """How long one driver call may take before the probe gives up. A driver that tears a GPU down, or handles a storm
    of errors, blocks calls for 45 s; a new probe would have to wait as well."""


class ComputeModeNotSet(Exception):
    """A compute mode was not changed. The text says why. `refused`: the driver refused, and would do so again."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModeChange(Noun):
    """A request to change a GPU's compute mode, unless someone else has changed it."""

    pci_bus_id: str
    """The GPU; the bus id resolves even while another GPU is lost."""
    expected: ComputeMode
    """The mode is changed only if it is this one."""
    mode: ComputeMode
    """The mode to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModeResult(Noun):
    """The result of a `ComputeModeChange`."""

    found: ComputeMode | None = None
    """The mode before the change; null if the driver does not tell, and then nothing was changed."""
    problem: str | None = None
    """Why the mode could not be changed."""
    refused: bool = False
    """True if the driver refused, and would do so again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A node's GPUs at one moment, in PCI bus order."""

    gpus: tuple[GpuReading, ...] = ()
    """All GPUs of the node."""
    links: tuple[GpuLink, ...] = ()
    """How they are connected."""
    driver_version: str | None = None
    """NVIDIA driver version."""
    simulated: bool = False
    """True if it comes from a simulation."""
    problem: str | None = None
    """Why there is no reading; null if there is one."""
    whole: bool = True
    """True if everything that a grant rests on was read after the request; false if processes and health are those of
    an earlier reading, except for the GPUs in `reread`."""
    reread: tuple[str, ...] = ()
    """UUIDs of the GPUs whose processes and health were read again in a reading that is not complete."""
    over: bool = False
    """True if this is the probe's last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSetup:
    """What a probe needs at its start: its settings, and what the probe before it knew."""

    pace: Pace = field(default_factory=Pace)
    """How often what is read, and how long one call may take."""
    xids: dict[str, int] = field(default_factory=dict)
    """By UUID: critical Xids that the previous probe saw; the driver reports each only once."""
    idle_bytes: int = IDLE_BYTES
    """Memory in use that an administrator allows an idle GPU where other users' processes are not visible."""
    least_bytes: dict[str, int] = field(default_factory=dict)
    """By UUID: the least memory in use that previous probes saw."""
    gpus: tuple[GpuReading, ...] = ()
    """Identities of the GPUs that the previous probe knew: one that no longer answers is reported as lost."""


class GpuReader(Protocol):
    """Reads the GPUs of one node, and changes their compute modes."""

    @property
    def under_way(self) -> tuple[str, float] | None:
        """The driver call that has not returned yet, and its monotonic start time."""

    def read(self, leases: Sequence[NodeLease], complete: bool = True, reread: Collection[str] = ()) -> Reading:
        """Read every GPU: completely if `complete`, else completely at least the GPUs that `reread` names by UUID.

        `leases`: those with GPUs on this node. Raises ReadingFailed.
        """

    def read_some(self, uuids: Collection[str], leases: Sequence[NodeLease]) -> Reading:
        """Read these GPUs completely, and no other: for a quick answer between two readings of all.

        `leases`: those with GPUs on this node. One that does not answer is left out. Raises ReadingFailed.
        """

    def change_compute_mode(self, change: ComputeModeChange) -> ComputeMode | None:
        """Change a GPU's mode if it is as expected. Returns the mode before.

        Raises ComputeModeNotSet, ReadingFailed.
        """


def identity_of(gpu: GpuReading) -> GpuReading:
    """The part of a reading that remains when the GPU does not answer: its identity."""
    fields = (*Device.__dataclass_fields__, "minor_number")
    return GpuReading(**{name: getattr(gpu, name) for name in fields})


def with_proc_details(process: Process) -> Process:
    """The process with its user and command line from /proc, as far as /proc shows them."""
    return replace(
        process,
        user=procfs.user_of(process.pid) or process.user,
        command=procfs.command_of(process.pid) or process.command,
    )
