"""Parts of a node."""

from __future__ import annotations

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLink(Noun):
    """How two GPUs of a node are connected."""

    first: str
    """UUID of one."""
    second: str
    """UUID of the other."""
    path: str
    """`nvlink`, else the PCIe way between them, nearest first: `same_board`, `one_switch`, `several_switches`,
    `host_bridge`, `numa_node`, `system`; `pcie` where only that is known."""
    peer_to_peer: bool | None = None
    """True when each can read the other's memory; null where the driver cannot tell."""
    nvlinks: int | None = None
    """How many NVLinks there are between them; null for none, behind an NVSwitch, and where the driver cannot tell."""
