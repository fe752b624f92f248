"""What is replayed: requests with the time that each held its GPUs, and the nodes that there are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Demand, Device, Priority, Selection
from gpulease_server.core.limit_records import LimitRecord

MAX_REQUESTS = 1_000_000
"""That one replay takes: a few minutes, and some hundred MiB."""
EVERYONE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request for GPUs that was granted."""

    id: str
    asked_at_s: float
    """When it was made, in seconds since the beginning of the recording."""
    duration_s: float
    """How long it held its GPUs."""
    demand: Demand
    user: str | None = None
    token_id: str | None = None
    """The bearer token that it was made with."""
    part_of: tuple[str, ...] = ()
    """Its job and its array."""
    after: tuple[str, ...] = ()
    """Requests, jobs and arrays that must have ended first."""
    array_id: str | None = None
    """Its array, if `array_at_most` of that may be asked for or run at once."""
    array_at_most: int = 0
    waited_s: float | None = None
    """How long it waited as recorded; None where that is not known."""
    counted: bool = True
    """False for one that only holds GPUs at the beginning of the period."""


@dataclass(frozen=True, slots=True)
class ReplayedNode:
    """A node and its GPUs."""

    name: str
    host: str
    gpus: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Everything that a replay needs."""

    requests: list[RecordedRequest]
    nodes: tuple[ReplayedNode, ...]
    limits: tuple[LimitRecord, ...] = ()
    """The limits of users, groups and tokens that are set."""
    begin_at: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    """The time of second 0."""
    left_out: int = 0
    """Requests of the period that were never granted: how long they would have held GPUs is not known."""

    @property
    def gpus(self) -> int:
        """How many GPUs the nodes have."""
        return sum(len(node.gpus) for node in self.nodes)


def uniform_nodes(nodes: int, gpus: int, model: str = "NVIDIA H100") -> tuple[ReplayedNode, ...]:
    """So many nodes of so many GPUs each."""
    width = len(str(nodes))
    return tuple(
        ReplayedNode(
            name := f"node{number:0{width}d}",
            name,
            tuple(
                Device(uuid=f"GPU-{number:08x}-0000-0000-0000-{index:012x}", node=name, index=index, name=model)
                for index in range(gpus)
            ),
        )
        for number in range(1, nodes + 1)
    )


def on_nodes(recording: Recording, nodes: tuple[ReplayedNode, ...]) -> Recording:
    """The recording as if there had been these nodes: nothing is asked for by the name of a node or GPU."""
    requests = []
    for request in recording.requests:
        demand = replace(request.demand, node=None, among=None)
        if demand.selection is Selection.LISTED:
            demand = replace(
                demand,
                selection=Selection.COUNT,
                count=max(1, len(demand.indices) + len(demand.uuids)),
                indices=(),
                uuids=(),
            )
        requests.append(replace(request, demand=demand))
    return replace(recording, requests=requests, nodes=nodes)


def over_nodes(gpus: int, nodes: Iterable[ReplayedNode]) -> tuple[int, int]:
    """(GPUs of each node, number of nodes) for a request of so many GPUs: more than a node has take whole nodes."""
    most = max((len(node.gpus) for node in nodes), default=gpus)
    if gpus <= most:
        return gpus, 1
    return most, math.ceil(gpus / most)


def with_priorities(requests: Iterable[RecordedRequest], of_user: dict[str, Priority]) -> list[RecordedRequest]:
    """The requests as if these users had asked with these priorities; `*` stands for all others."""
    if not of_user:
        return list(requests)
    everyone = of_user.get(EVERYONE)
    changed = []
    for request in requests:
        priority = of_user.get(request.user or "", everyone)
        demand = request.demand
        if priority is not None:
            # A consent by priority goes with that; one of its own stays.
            own = demand.preemptible and demand.priority is not Priority.SCAVENGE
            demand = replace(demand, priority=priority, preemptible=own)
        changed.append(replace(request, demand=demand))
    return changed
