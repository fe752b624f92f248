"""Parts of a lease: the members of a gang."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpulease_protocol.device import Device
from gpulease_protocol.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseMember(Noun):
    """One node of a gang: a lease over several nodes."""

    rank: int
    """Its rank among the nodes of the gang, 0 to N-1: NODE_RANK of torch.distributed. Rank 0 has the rendezvous."""
    node: str
    """Its name."""
    address: str
    """IP address at which the other members reach it."""
    gpus: tuple[Device, ...]
    """Its GPUs, in PCI order; those of all members are in `gpus` of the lease."""
    env: dict[str, str] = field(default_factory=dict)
    """Every variable that the part of a training run on this node needs in its environment."""
