"""`AsyncClient`: `Client` for programs that run in an event loop. What it says and how it waits is `talk`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from gpulease import calls
from gpulease.access import BearerToken, NewBearerToken, TokenRequest
from gpulease.async_lease import AskedLease, AsyncLease, OnLost
from gpulease.async_transport import AsyncTransport
from gpulease.client import Client
from gpulease.explanation import Explanation
from gpulease.metrics import JobMetrics
from gpulease.model import Event, Gpu, Job, Lease, Node
from gpulease.owner import Owner
from gpulease.route import Destination
from gpulease.talk import Talk, lease_request, several
from gpulease.wire import JobRequest, LeaseRequest

Answer = TypeVar("Answer")


class AsyncClient:
    """A connection to a daemon for one event loop at a time, with the methods and arguments of `Client`.

    Every method raises the `GpuleaseError` that the daemon answers, and DaemonUnavailable when none answers: within 2 s
    if nobody listens.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        token: str | None = None,
        timeout_s: float = 10.0,
        *,
        retry_s: float = 30.0,
    ) -> None:
        self._connect(Destination.of(url, token, timeout_s), retry_s)

    @classmethod
    def to(cls, destination: Destination, retry_s: float = 30.0) -> Self:
        """A client of the daemon that another client talks to."""
        client = cls.__new__(cls)
        client._connect(destination, retry_s)
        return client

    def _connect(self, destination: Destination, retry_s: float) -> None:
        self.destination = destination
        self._talk = Talk(destination, retry_s)
        self._transport = AsyncTransport(destination)
        self._renewing = Client.to(destination, retry_s)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(address.shown for address in self.destination.addresses)}>"

    async def close(self) -> None:
        """Close the connections. Leases stay held."""
        await self._transport.close()
        self._renewing.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(
        self, call: calls.Call[Answer], *, patience_s: float | None = None, timeout_s: float | None = None
    ) -> Answer:
        """The answer to any call; the other methods are short for this."""
        return await self._transport.run(self._talk.send(call, patience_s, timeout_s))

    # What there is

    async def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU, with its last reading and who holds it."""
        return await self._transport.run(self._talk.every(calls.gpus))

    async def gpu(self, uuid: str) -> Gpu:
        """One GPU. Raises NotFound."""
        return await self.send(calls.gpu(uuid))

    async def nodes(self) -> tuple[Node, ...]:
        """Every node."""
        return await self._transport.run(self._talk.every(calls.nodes))

    async def node(self, name: str) -> Node:
        """One node. Raises NotFound."""
        return await self.send(calls.node(name))

    async def drain_node(self, name: str) -> Node:
        """The node, of which nothing is granted any more; what runs there goes on. Raises NotFound."""
        return await self.send(calls.drain_node(name))

    async def pause_node(self, name: str, force: bool = False) -> Node:
        """The node, drained and about to close NVML; its `reason` says when that is done. Raises NotFound, and InUse
        while a lease is active there, unless with `force`."""
        return await self.send(calls.pause_node(name, force))

    async def resume_node(self, name: str) -> Node:
        """The node, in use again once it has reported. Raises NotFound."""
        return await self.send(calls.resume_node(name))

    async def cordon_gpu(self, uuid: str, cordoned: bool = True) -> Gpu:
        """The GPU, granted to nobody from now on; or with `cordoned` false, in use again. Raises NotFound."""
        return await self.send(calls.cordon_gpu(uuid, cordoned))

    @property
    def as_of(self) -> str | None:
        """When the last answer was true (ISO 8601), where the daemon could not say that it still is: it stands by, or
        has lost its lock. Else null."""
        return self._talk.route.as_of

    async def ready(self) -> Mapping[str, Any]:
        """What `/readyz` says. Raises Unavailable while the daemon cannot grant."""
        return await self.send(calls.ready())

    async def alive(self) -> Mapping[str, Any]:
        """What `/healthz` says: the daemon's process answers."""
        return await self.send(calls.alive())

    async def front_page(self) -> str:
        """GPUs, holders and the queue as a text table."""
        return await self.send(calls.front_page())

    async def events(self, after: int = 0, limit: int | None = None) -> AsyncIterator[Event]:
        """Events with a `seq` over `after`, oldest first, up to the newest there is; fetched page by page.

        After 0 they begin with the oldest that is kept. Raises EventsPruned when some after another `seq` are gone.
        """
        while items := (await self.send(calls.events(after, limit))).items:
            for event in items:
                yield event
            after = items[-1].seq

    def watch_events(self, after: int | None = None) -> AsyncIterator[Event]:
        """Each event as it is recorded, for ever, as in `Client`."""
        return self._transport.emitted(self._talk.events(after))

    # Leases

    async def leases(self, state: str | Iterable[str] = ()) -> tuple[Lease, ...]:
        """Leases of this state or these states, else of every state."""
        return await self._transport.run(self._talk.every(lambda cursor: calls.leases(several(state), cursor)))

    async def lease_by_id(self, lease_id: str) -> Lease:
        """One lease. Raises NotFound."""
        return await self.send(calls.lease(lease_id))

    async def explain(self, lease_id: str) -> Explanation:
        """Why the lease has no GPUs: not now, or never."""
        return await self.send(calls.explain(lease_id))

    def lease(
        self,
        count: int | None = None,
        devices: int | str | list[int | str] | None = None,
        *,
        wait_s: float = 0.0,
        ttl_s: float = 60.0,
        label: str = "",
        min_free_memory_bytes: int | None = None,
        gpu_model: str | None = None,
        node: str | None = None,
        among: list[str] | None = None,
        on_lost: OnLost | None = None,
        on_queued: Callable[[Lease], None] | None = None,
        owner: Owner | None = None,
        shared_key: str | None = None,
    ) -> AskedLease:
        """A lease that is renewed in the background: `async with client.lease(2) as lease`, or `await` it.

        As `Client.lease`, except that `on_lost` is called in the event loop and may be a coroutine function. A task
        that is cancelled while it waits takes its request back.
        """
        request = lease_request(
            count=count,
            devices=devices,
            ttl_s=ttl_s,
            label=label,
            min_free_memory_bytes=min_free_memory_bytes,
            gpu_model=gpu_model,
            node=node,
            among=among,
            **((owner or Owner.this_process()).named() if self.destination.local else {}),
        )
        return AskedLease(lambda: self._granted(request, wait_s, on_lost, on_queued, shared_key))

    async def _granted(
        self,
        request: LeaseRequest,
        wait_s: float,
        on_lost: OnLost | None,
        on_queued: Callable[[Lease], None] | None,
        shared_key: str | None,
    ) -> AsyncLease:
        lease, sent_at = await self._transport.run(self._talk.granted(request, wait_s, shared_key, on_queued))
        return AsyncLease(self._renewing, lease, sent_at, on_lost, shared=shared_key is not None)

    async def request_lease(
        self,
        request: LeaseRequest,
        wait_s: float | None = None,
        on_queued: Callable[[Lease], None] | None = None,
    ) -> Lease:
        """A lease as it is granted, which the caller must renew and release.

        With `wait_s` null the answer comes at once, and the lease may be queued. Otherwise it waits for at most
        `wait_s` and raises NotNow, with the request taken back, when the GPUs were not granted; `on_queued` is called
        once if it must wait.
        """
        return await self._transport.run(self._talk.requested(request, wait_s, on_queued))

    async def renew(self, lease_id: str, token: int | None) -> Lease:
        """The lease, with a full `ttl_s` before it. Raises LeaseLost, StaleToken."""
        return await self.send(calls.renew(lease_id, token))

    async def release(self, lease_id: str, token: int | None) -> Lease:
        """The lease, ended; a queued one is cancelled. Raises LeaseLost, StaleToken."""
        return await self.send(calls.release(lease_id, token))

    # Who may ask

    async def create_token(self, request: TokenRequest) -> NewBearerToken:
        """A new bearer token; its `bearer` is shown this once. For administrators."""
        return await self.send(calls.create_token(request))

    async def tokens(self) -> tuple[BearerToken, ...]:
        """Every bearer token that was not revoked, without its secret. For administrators."""
        return await self._transport.run(self._talk.every(calls.tokens))

    async def revoke_token(self, token_id: str) -> BearerToken:
        """The bearer token, which is refused from now on. For administrators. Raises NotFound."""
        return await self.send(calls.revoke_token(token_id))

    # Jobs

    async def submit(self, request: JobRequest) -> Job:
        """The job, queued or already starting."""
        return await self.send(calls.submit(request, uuid.uuid4().hex))

    async def jobs(
        self, state: str | Iterable[str] = (), *, array: str | None = None, user: str | None = None
    ) -> tuple[Job, ...]:
        """Jobs of this state or these states, else of every state; of one array and one user, or of any."""
        return await self._transport.run(
            self._talk.every(lambda cursor: calls.jobs(several(state), cursor, array=array, user=user))
        )

    async def job(self, job_id: str) -> Job:
        """One job. Raises NotFound."""
        return await self.send(calls.job(job_id))

    async def wait_job(
        self, job_id: str, wait_s: float | None = None, *, until: Callable[[Job], bool] = lambda job: job.state.final
    ) -> Job:
        """The job once it has ended (or `until` says so), or as it is after `wait_s`; null waits for ever."""
        return await self._transport.run(self._talk.job(job_id, wait_s, until))

    async def cancel_job(self, job_id: str, grace_s: float | None = None) -> Job:
        """The job, stopping or cancelled. `grace_s` lies between SIGTERM and SIGKILL."""
        return await self.send(calls.cancel_job(job_id, grace_s))

    async def job_metrics(self, job_id: str, points: int | None = None) -> JobMetrics:
        """What the job's GPUs showed, in at most `points` buckets each (1 to 600), and GPU-hours. Raises NotFound."""
        return await self.send(calls.job_metrics(job_id, points))

    async def job_metrics_csv(self, job_id: str, points: int | None = None) -> str:
        """The same as CSV, a line for each bucket of each GPU; what is not known is `nan`. Raises NotFound."""
        return await self.send(calls.job_metrics_csv(job_id, points))

    def job_logs(
        self,
        job_id: str,
        follow: bool = False,
        rank: int | str | None = None,
        tail: int | None = None,
        offset: str | int | None = None,
    ) -> AsyncIterator[str]:
        """Text of the job's log in pieces: of one rank, of the launcher, or with `rank` "all" of all, each line after
        its rank; with `follow` until the job has ended. Begins with the `tail` last lines, or at `offset` in bytes."""
        return self._transport.emitted(self._talk.log(partial(calls.job_logs, job_id, follow, rank), tail, offset))
