"""Parts of a lease: the members of a gang, and what was said of idle GPUs."""

from __future__ import annotations

from dataclasses import field
from datetime import datetime

from gpulease_protocol.device import Device
from gpulease_protocol.lazy_dataclass import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKeep(Noun):
    """Idle GPUs of a lease are kept on purpose until a moment."""

    until: datetime
    """Until when, by the clock of the daemon when that was said."""
    reason: str
    """Why, in the words of who said so."""
    by: str | None = None
    """Their login name; null where it is not known."""
    at: datetime
    """When that was said."""
