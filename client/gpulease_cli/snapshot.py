"""Everything that `status`, `queue` and `top` show, fetched at one time."""

from __future__ import annotations

from datetime import UTC, datetime

from gpulease.client import Client
from gpulease_protocol.errors import NotFound, Unavailable
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Gpu, Job, JobState, Lease, LeaseState, Node, NodeState
from gpulease_protocol.reservations import Reservation
from gpulease_protocol.status_table import printable, render_status, wrapped

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
    reservations: tuple[Reservation, ...] = ()
    """Those that have not ended, as they begin."""
    as_of: str | None = None
    """When a copy that may be stale was current."""
    problem: str = ""
    """Why the daemon is not ready, where that is more than a silent node: on a full disk it takes no reports."""

    @classmethod
    def fetch(cls, client: Client) -> Snapshot:
        """The present state. Raises GpuleaseError."""
        gpus, leases, jobs = client.gpus(), client.leases(LIVE_LEASES), client.jobs(LIVE_JOBS)
        nodes, as_of, problem = client.nodes(), client.as_of, ""
        silent = [node.reason or "" for node in nodes if node.state is NodeState.UNKNOWN]
        if silent and as_of is None:
            problem = _problem(client)
            problem = "" if any(reason and reason in problem for reason in silent) else problem
        return cls(
            gpus=gpus,
            leases=leases,
            jobs=jobs,
            nodes=nodes,
            at=datetime.now(UTC),
            reservations=_reservations(client),
            as_of=as_of,
            problem=problem,
        )

    @property
    def several_nodes(self) -> bool:
        """True where a GPU needs the name of its node."""
        return len({gpu.node for gpu in self.gpus}) > 1

    @property
    def queue(self) -> list[Lease]:
        """Waiting requests, the next one first; those that are not in the queue yet, because they wait for other jobs,
        last."""
        waiting = (lease for lease in self.leases if lease.state is LeaseState.QUEUED)
        return sorted(waiting, key=lambda lease: (lease.position is None, lease.position or 0))

    @property
    def job_of_lease(self) -> dict[str, Job]:
        """Live jobs by the id of their lease."""
        return {job.lease_id: job for job in self.jobs}

    def table(self, width: int | None) -> str:
        """The text of `gpulease status`."""
        note = wrapped(printable(self.problem, 500), width) + "\n" if self.problem else ""
        shown = self.gpus, self.leases, self.jobs, self.at, self.nodes
        return note + render_status(*shown, width=width, reservations=self.reservations)


def _reservations(client: Client) -> tuple[Reservation, ...]:
    """The reservations; none of a daemon that is too old to have any."""
    try:
        return client.reservations()
    except NotFound:
        return ()


def _problem(client: Client) -> str:
    """Why the daemon is not ready; empty if it is."""
    try:
        client.ready()
    except Unavailable as error:
        return error.detail
    return ""
