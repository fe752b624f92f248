"""Everything that `status`, `queue` and `top` show, fetched at one time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from gpulease.client import Client
from gpulease_protocol.model import Gpu, Job, JobState, Lease, LeaseState, Node
from gpulease_protocol.status_table import render_status

LIVE_JOBS = tuple(state for state in JobState if not state.final)
LIVE_LEASES = (LeaseState.QUEUED, LeaseState.ACTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """GPUs, nodes, and what has not ended."""

    gpus: tuple[Gpu, ...]
    leases: tuple[Lease, ...]
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]
    at: datetime
    """When it was fetched."""
    as_of: str | None = None
    """When a copy that may be stale was current."""

    @classmethod
    def fetch(cls, client: Client) -> Snapshot:
        """The present state. Raises GpuleaseError."""
        gpus, leases, jobs = client.gpus(), client.leases(LIVE_LEASES), client.jobs(LIVE_JOBS)
        nodes = client.nodes()
        return cls(gpus=gpus, leases=leases, jobs=jobs, nodes=nodes, at=datetime.now(UTC), as_of=client.as_of)

    @property
    def several_nodes(self) -> bool:
        """True where a GPU needs the name of its node."""
        return len({gpu.node for gpu in self.gpus}) > 1

    @property
    def queue(self) -> list[Lease]:
        """Waiting requests, the next one first."""
        waiting = (lease for lease in self.leases if lease.state is LeaseState.QUEUED)
        return sorted(waiting, key=lambda lease: lease.position or 0)

    @property
    def job_of_lease(self) -> dict[str, Job]:
        """Live jobs by the id of their lease."""
        return {job.lease_id: job for job in self.jobs}

    def table(self, width: int | None) -> str:
        """The text of `gpulease status`."""
        return render_status(self.gpus, self.leases, self.jobs, self.at, self.nodes, width=width)
