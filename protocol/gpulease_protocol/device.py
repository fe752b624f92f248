"""A GPU and what does not change of it: a noun of `gpulease_protocol.model`."""

from __future__ import annotations

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Noun):
    """One allocatable GPU: its properties that do not change while it is plugged in."""

    uuid: str
    """NVML UUID, `GPU-` and lower-case hex; the only identity of a GPU."""
    node: str
    """Name of the node that has it."""
    index: int
    """Position in PCI bus order on its node; may change at a reboot."""
    pci_bus_id: str | None = None
    """PCI bus id with the 8-digit domain, such as `00000000:1B:00.0`."""
    name: str | None = None
    """Product name, such as `NVIDIA H100 80GB HBM3`."""
    memory_total_bytes: int | None = None
    """Memory of the device."""
