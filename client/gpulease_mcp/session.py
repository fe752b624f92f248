"""The leases of one agent's session: kept while the server lives and the agent wants them, and released with it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from gpulease.client import Client
from gpulease_protocol import endpoints
from gpulease_protocol.errors import (
    GpuleaseError,
    LeaseLost,
    NotAllowed,
    NotFound,
    OverQuota,
    StaleToken,
)
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Job, Lease, LeaseState
from gpulease_protocol.requests import JobRequest, LeaseRequest
from gpulease_protocol.tokens import Identity

log = logging.getLogger("gpulease.mcp")

TTL_S = 60.0
"""How long a lease lasts after the server was last heard, where no worker watches the server."""
KEEP_S = TTL_S / 4
"""Time between two renewals."""
MAX_LEASES = 32
"""Leases of one session at a time."""
RELEASE_S = 5.0
"""How long a release may delay the end of the server."""


@dataclass(slots=True)
class SessionLease:
    """A lease that the agent asked for."""

    lease: Lease
    hold_s: float
    """For how long it is held from its grant, or from a renewal by the agent."""
    until_s: float | None = None
    """When it is released, on the monotonic clock; None while it waits."""

    def update(self, lease: Lease) -> None:
        """Take in how the daemon shows it now."""
        if lease.state is LeaseState.ACTIVE and self.until_s is None:
            self.until_s = time.monotonic() + self.hold_s
        self.lease = lease

    def left_s(self) -> float | None:
        """Seconds until it is released; None while it waits, and once it has ended."""
        if self.until_s is None or self.lease.state is not LeaseState.ACTIVE:
            return None
        return max(0.0, self.until_s - time.monotonic())


class AgentSession:
    """What one agent has asked for. Used from several threads."""

    def __init__(self, client: Client, agent: str | None, session: str, max_hold_s: float) -> None:
        self.client = client
        self.agent = agent
        self.session = session
        self.max_hold_s = max_hold_s
        self._lock = threading.Lock()
        self._leases: dict[str, SessionLease] = {}
        self._stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="gpulease-mcp-keep", daemon=True)
        self._me: Identity | None = None

    def start(self) -> None:
        """Begin to renew."""
        self._keeper.start()

    def close(self) -> None:
        """Release what is held, and withdraw what waits."""
        self._stopped.set()
        for held in self.open_leases():
            with contextlib.suppress(GpuleaseError):
                self._release(held, timeout_s=RELEASE_S)
        self.client.close()

    def me(self) -> Identity:
        """Who the daemon takes this server for, with the budget of its token as it is now."""
        self._me = self.client.me()
        return self._me

    def open_leases(self) -> list[SessionLease]:
        """The leases that have not ended, oldest first."""
        with self._lock:
            return [held for held in self._leases.values() if held.lease.state is not LeaseState.ENDED]

    def own(self, lease_id: str) -> SessionLease:
        """A lease of this session. Raises `NotAllowed` for any other."""
        with self._lock:
            held = self._leases.get(lease_id)
        if held is None:
            detail = f"{lease_id} is not a lease of this session."
            raise NotAllowed(detail, remedy="gpu_status lists those that are. Others are not for you to touch.")
        return held

    def own_job(self, job_id: str) -> Job:
        """A job of this server's user. Raises `NotAllowed` for any other, also where the user is an administrator."""
        job, me = self.client.job(job_id), self._me or self.me()
        if job.user != me.user:
            raise NotAllowed(f"{job_id} is {job.user}'s, and you act for {me.user}.", remedy="Leave it alone.")
        return job

    def request(self, request: LeaseRequest, hold_s: float, key: str) -> SessionLease:
        """Ask for a lease. The same key and request is the same lease."""
        if len(self.open_leases()) >= MAX_LEASES:
            raise OverQuota(f"This session has {MAX_LEASES} leases.", remedy="Release some with release_lease.")
        lease = self.client.send(endpoints.request_lease(request, f"mcp-{self.session}-{key}"))
        with self._lock:
            held = self._leases.setdefault(lease.id, SessionLease(lease, hold_s))
            held.update(lease)
            for old in [one for one, other in self._leases.items() if other.lease.state is LeaseState.ENDED][
                :-MAX_LEASES
            ]:
                del self._leases[old]
        return held

    def owner_fields(self) -> dict[str, object]:
        """The fields of a request by which its lease ends with this process."""
        return ProcessId.this_process().owner_fields(local=self.client.destination.local)

    def refresh(self, held: SessionLease, wait_s: float = 0.0) -> SessionLease:
        """See how a lease is now; with `wait_s` once its state has changed, or after that time."""
        lease = self.client.send(endpoints.lease(held.lease.id, wait_s, held.lease.state if wait_s > 0 else None))
        with self._lock:
            held.update(lease)
        return held

    def renew(self, held: SessionLease, hold_s: float) -> SessionLease:
        """Hold a lease for so long from now."""
        lease = self.client.renew(held.lease.id, self.refresh(held).lease.fencing_token)
        with self._lock:
            held.hold_s, held.until_s = hold_s, None
            held.update(lease)
        return held

    def release(self, held: SessionLease) -> SessionLease:
        """Give a lease back."""
        self.refresh(held)
        self._release(held, timeout_s=None)
        return held

    def submit(self, request: JobRequest, key: str) -> Job:
        """Submit a job. The same key and request is the same job."""
        return self.client.send(endpoints.submit(request, f"mcp-{self.session}-{key}"))

    def _release(self, held: SessionLease, timeout_s: float | None) -> None:
        try:
            lease = self.client.release(held.lease.id, held.lease.fencing_token, retry_s=timeout_s, timeout_s=timeout_s)
        except (LeaseLost, StaleToken):
            # It was granted, or has ended, in this moment.
            if self.refresh(held).lease.state is LeaseState.ENDED:
                return
            lease = self.client.release(held.lease.id, held.lease.fencing_token, retry_s=timeout_s)
        with self._lock:
            held.update(lease)

    def _keep(self) -> None:
        """Body of the thread that renews."""
        while not self._stopped.wait(KEEP_S):
            for held in self.open_leases():
                try:
                    self._keep_one(held)
                except GpuleaseError as error:
                    log.warning("lease %s could not be renewed: %s", held.lease.id, error)
                except Exception:
                    log.exception("lease %s could not be renewed", held.lease.id)

    def _keep_one(self, held: SessionLease) -> None:
        try:
            self.refresh(held)
            if held.lease.state is LeaseState.ENDED:
                return
            if held.left_s() == 0:
                log.warning("lease %s is released: the agent has not renewed it", held.lease.id)
                self._release(held, timeout_s=RELEASE_S)
            else:
                lease = self.client.renew(held.lease.id, held.lease.fencing_token)
                with self._lock:
                    held.update(lease)
        except (LeaseLost, StaleToken, NotFound):
            self.refresh(held)
