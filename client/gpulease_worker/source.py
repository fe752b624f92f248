"""What the probe reads from: NVML or a simulation, behind one small protocol."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gpulease.exchange import NodeLease
from gpulease.model import ComputeMode, Device, GpuLink, GpuReading, Noun, Process
from gpulease_worker import processes

IDLE_BYTES = 16 * 2**20
"""What a driver has in use on an idle GPU, beside what it reserves; some megabytes at most."""


class ReadingFailed(Exception):
    """There is no reading. The text is one sentence: what happened, why, what to do.

    Args:
        text: The sentence.
        over: True when this process can never read again, so that another must take its place.
    """

    def __init__(self, text: str, *, over: bool = False) -> None:
        super().__init__(text)
        self.over = over


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often what is read, and how long one call may take.

    Memory, utilization, temperature, power and compute mode are read at every reading.
    """

    processes_s: float = 5.0
    """Time between two reads of process lists and of what decides health; they are also read whenever that is asked."""
    health_s: float = 30.0
    """Time between two reads of ECC counts, throttle reasons and links; how long a critical Xid outlasts its cause."""
    call_deadline_s: float = 60.0
    """How long one call into the driver may take before the probe gives up on it. A driver that tears a GPU down, or
    that a storm of errors keeps busy, blocks calls for three quarters of a minute; a new probe would wait as well."""


class ModeNotSet(Exception):
    """A compute mode was not changed. The text says why; `refused`: the driver said no, and would say so again."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChange(Noun):
    """An order to change a GPU's compute mode, unless somebody else has done so."""

    pci_bus_id: str
    """The GPU, by what resolves it even while another GPU is lost."""
    expected: ComputeMode
    """The mode from which it is changed; in any other it stays."""
    mode: ComputeMode
    """The mode to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFound(Noun):
    """What came of a `ModeChange`."""

    found: ComputeMode | None = None
    """The mode before the change; null if the driver does not tell, and then nothing was changed."""
    problem: str | None = None
    """Why the mode could not be changed."""
    refused: bool = False
    """The driver said no, and would say so again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a source showed of a node's GPUs at one moment, in PCI bus order."""

    gpus: tuple[GpuReading, ...] = ()
    """Every GPU of the node."""
    links: tuple[GpuLink, ...] = ()
    """How they are connected."""
    driver_version: str | None = None
    """NVIDIA driver version."""
    simulated: bool = False
    """True when it comes from a simulation."""
    problem: str | None = None
    """Why there is no reading; null when there is one."""
    whole: bool = True
    """True when all that a grant rests on was begun after the reading was asked for; false when processes and health
    are those of an earlier one, but for the GPUs in `reread`."""
    reread: tuple[str, ...] = ()
    """UUIDs of the GPUs whose processes and health were read anew in a reading that is not whole."""
    over: bool = False
    """True when this is the last that the probe will say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a probe is told at its start."""

    pace: Pace = field(default_factory=Pace)
    """How often what is read, and how long one call may take."""
    xids: dict[str, int] = field(default_factory=dict)
    """By UUID: critical Xids that the probe before this one saw, which the driver tells only once."""
    idle_bytes: int = IDLE_BYTES
    """So much memory in use is that of an idle GPU, by an administrator's word, where the processes of others cannot be
    seen."""
    least_bytes: dict[str, int] = field(default_factory=dict)
    """By UUID: the least memory in use that the probe before this one saw."""
    gpus: tuple[GpuReading, ...] = ()
    """The GPUs that the probe before this one knew, by name: one that does not answer any more is lost, not nothing."""


class Source(Protocol):
    """Reads the GPUs of one node."""

    @property
    def under_way(self) -> tuple[str, float] | None:
        """The call into the driver that has not come back yet, and since when on the monotonic clock."""

    def read(self, leases: Sequence[NodeLease], fresh: bool = True, anew: Collection[str] = ()) -> Reading:
        """A reading; with `fresh` a whole one, else whole of the GPUs that `anew` names by UUID, at least. `leases` are
        those with GPUs on this node. Raises ReadingFailed."""

    def change_compute_mode(self, change: ModeChange) -> ComputeMode | None:
        """Change a GPU's mode if it is as expected. What it was before. Raises ModeNotSet, ReadingFailed."""


def name_of(gpu: GpuReading) -> GpuReading:
    """What is left of a reading when the GPU does not answer."""
    names = (*Device.__dataclass_fields__, "minor_number")
    return GpuReading(**{name: getattr(gpu, name) for name in names})


def attribute(process: Process) -> Process:
    """The process with user, command line and lease filled in from /proc, as far as /proc knows it."""
    return replace(
        process,
        user=processes.user_of(process.pid) or process.user,
        command=processes.command_of(process.pid) or process.command,
        lease_id=processes.lease_of(process.pid) or process.lease_id,
    )
