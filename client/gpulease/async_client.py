"""`AsyncClient`: `Client` for event loops. Generated from `client.py` by `tests/client/test_async_client_source.py`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from gpulease.agent_fields import agent_fields
from gpulease.async_lease import AsyncLease, OnLost, PendingLease
from gpulease.brief_errors import brief_errors_of
from gpulease.client import Client
from gpulease.cuda import ranks
from gpulease.reservation_methods import AsyncReservationMethods
from gpulease.sansio.async_transport import AsyncTransport
from gpulease.sansio.failover import Destination
from gpulease.sansio.flows import Flows, as_tuple, lease_request
from gpulease_protocol import endpoints
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import Event, Gpu, Job, Lease, Node

if TYPE_CHECKING:
    from gpulease_protocol.event_choice import EventChoice
    from gpulease_protocol.gpu_history import FleetHistory, GpuHistory, HistoryChoice
    from gpulease_protocol.job_metrics import JobMetrics, LeaseMetrics
    from gpulease_protocol.requests import JobRequest, LeaseRequest
    from gpulease_protocol.timeline import Timeline, TimelineChoice
    from gpulease_protocol.tokens import BearerToken, Identity, NewBearerToken, TokenRequest
    from gpulease_protocol.usage import Usage

Answer = TypeVar("Answer")


@brief_errors_of
class AsyncClient(AsyncReservationMethods):
    """`Client` for event loops: the same methods with the same arguments. For one event loop at a time.

        async with gpulease.AsyncClient() as client:
            free = [gpu for gpu in await client.gpus() if gpu.state == "free"]
            async with client.lease(count=2, wait_s=600) as lease:
                process = await asyncio.create_subprocess_exec(*command, env=lease.environ())
                await process.wait()

    `url` is `http://host:port` or `unix:///path`, and `token` a bearer token. They default to GPULEASE_URL and
    GPULEASE_TOKEN, else to the configuration file; without any address the client tries the local sockets and then
    http://127.0.0.1:8750. Several URLs, as a list or separated by commas, lead to one service: the client stays with
    the one that responds until it fails. `timeout_s` limits the wait for a response, beyond what a long poll takes;
    `retry_s` is how long a wait survives an outage of the daemon.

    Every method raises the daemon's `GpuleaseError`, and DaemonUnavailable if no daemon responds: within 2 s if none is
    listening.
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
    def for_destination(cls, destination: Destination, retry_s: float = 30.0) -> Self:
        """A client of the same daemon as another client's `destination`."""
        client = cls.__new__(cls)
        client._connect(destination, retry_s)
        return client

    def _connect(self, destination: Destination, retry_s: float) -> None:
        self.destination = destination
        self._flows = Flows(destination, retry_s)
        self._transport = AsyncTransport(destination)
        self._renewing = Client.for_destination(destination, retry_s)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(address.shown for address in self.destination.addresses)}>"

    async def close(self) -> None:
        """Close the connections. Leases are still held."""
        await self._transport.close()
        self._renewing.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(
        self, call: endpoints.ApiCall[Answer], *, retry_s: float | None = None, timeout_s: float | None = None
    ) -> Answer:
        """The answer to any API call. The other methods are shortcuts for this one."""
        return await self._transport.run(self._flows.send(call, retry_s, timeout_s))

    async def me(self) -> Identity:
        """Who the daemon takes the caller for: user, role, and how it knows."""
        return await self.send(endpoints.me())

    # GPUs, nodes and events

    async def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs, with their last readings and holders."""
        return await self._transport.run(self._flows.all_pages(endpoints.gpus))

    async def gpu(self, uuid: str) -> Gpu:
        """One GPU. Raises NotFound."""
        return await self.send(endpoints.gpu(uuid))

    async def nodes(self) -> tuple[Node, ...]:
        """All nodes."""
        return await self._transport.run(self._flows.all_pages(endpoints.nodes))

    async def node(self, name: str) -> Node:
        """One node. Raises NotFound."""
        return await self.send(endpoints.node(name))

    async def drain_node(self, name: str, reason: str | None = None) -> Node:
        """Stop granting GPUs of the node; what runs there continues. Users who wait see `reason`. Raises NotFound."""
        return await self.send(endpoints.drain_node(name, reason))

    async def pause_node(self, name: str, force: bool = False, reason: str | None = None) -> Node:
        """Drain the node and have its worker close NVML; the node's `reason` says when that is done.

        Raises NotFound; InUse if a lease is active there, unless with `force`.
        """
        return await self.send(endpoints.pause_node(name, force, reason))

    async def resume_node(self, name: str) -> Node:
        """Put the node back into use, once it has reported. Raises NotFound."""
        return await self.send(endpoints.resume_node(name))

    async def forget_node(self, name: str) -> Node:
        """Forget a node that is switched off. Its jobs and leases end; jobs with a retry left start elsewhere.

        Returns the node as it last was. Raises NotFound, also where an earlier try was not answered; InUse while it
        reports.
        """
        return await self.send(endpoints.forget_node(name))

    async def cordon_gpu(self, uuid: str, cordoned: bool = True) -> Gpu:
        """Stop granting the GPU; with `cordoned=False` put it back into use. Raises NotFound."""
        return await self.send(endpoints.cordon_gpu(uuid, cordoned))

    @property
    def as_of(self) -> str | None:
        """When the last answer was current (ISO 8601), if it may be stale, as that of a standby is; else None."""
        return self._flows.failover.as_of

    async def ready(self) -> Mapping[str, Any]:
        """The content of `/readyz`; `detail` says that no worker reports. Raises Unavailable while it is not ready."""
        return await self.send(endpoints.ready())

    async def alive(self) -> Mapping[str, Any]:
        """The content of `/healthz`: the daemon's process is alive."""
        return await self.send(endpoints.alive())

    async def front_page(self) -> str:
        """GPUs, holders and the queue as a text table."""
        return await self.send(endpoints.front_page())

    def events(
        self, after: int = 0, limit: int | None = None, *, newest_first: bool = False, **choice: Unpack[EventChoice]
    ) -> AsyncIterator[Event]:
        """The events with a `seq` over `after`, oldest first, fetched in pages of `limit`.
        With `after=0` they begin with the oldest that is kept; else this raises EventsPruned if any of them is gone.
        `choice`: see `EventChoice`, as in `client.events(kinds=["lease.ended"], user="ada")`."""
        return self._transport.emitted(self._flows.events(after, limit, newest_first, choice))

    def watch_events(self, after: int | None = None) -> AsyncIterator[Event]:
        """Each event as it is recorded, forever: those with a `seq` over `after`, or new ones if `after` is None.

        After an outage, or at another address, it resumes where it broke off. Raises EventsPruned if events in between
        are gone, DaemonUnavailable if an outage lasts `retry_s`."""
        return self._transport.emitted(self._flows.watch_events(after))

    async def gpu_history(self, uuid: str, **choice: Unpack[HistoryChoice]) -> GpuHistory:
        """What a GPU showed in the last hour, or as `HistoryChoice` says, leased or not. Raises NotFound."""
        return await self.send(endpoints.gpu_history(uuid, choice))

    async def gpu_histories(self, **choice: Unpack[HistoryChoice]) -> FleetHistory:
        """The same of every GPU: the means of `measures`, of utilization if none is named."""
        return await self.send(endpoints.gpu_histories(choice))

    async def usage(
        self,
        from_at: datetime | None = None,
        to_at: datetime | None = None,
        by: str | None = None,
        user: str | None = None,
    ) -> Usage:
        """GPU-hours held and used in a period (by default the last week), by `user`, or see `UsageKey`."""
        return await self.send(endpoints.usage(from_at, to_at, by, user))

    async def timeline(self, **choice: Unpack[TimelineChoice]) -> Timeline:
        """What happened to each GPU in a period, by default the last day: one page. `choice`: see `TimelineChoice`."""
        return await self.send(endpoints.timeline(**choice))

    # Leases

    async def leases(
        self,
        state: str | Iterable[str] = (),
        *,
        user: str | None = None,
        label: str | None = None,
        node: str | None = None,
    ) -> tuple[Lease, ...]:
        """The leases in these states, by default in any; of one user, exactly one label, one node, by default all."""
        page = partial(endpoints.leases, as_tuple(state), user=user, label=label, node=node)
        return await self._transport.run(self._flows.all_pages(page))

    async def lease_by_id(self, lease_id: str) -> Lease:
        """One lease. Raises NotFound."""
        return await self.send(endpoints.lease(lease_id))

    async def lease_metrics(self, lease_id: str, points: int | None = None) -> LeaseMetrics:
        """Readings of the lease's GPUs, in at most `points` buckets each (1 to 600), and GPU-hours. Raises NotFound."""
        return await self.send(endpoints.lease_metrics(lease_id, points))

    async def explain(self, lease_id: str) -> Explanation:
        """Why the lease has no GPUs, and whether it can ever get them."""
        return await self.send(endpoints.explain(lease_id))

    async def explain_request(self, request: LeaseRequest | JobRequest) -> Explanation:
        """What would become of a request now: `fits_now`, `not_now` or `never`. Takes and records nothing."""
        return await self.send(endpoints.explain_request(request))

    def lease(
        self,
        count: int | None = None,
        devices: int | str | list[int | str] | None = None,
        *,
        nodes: int = 1,
        wait_s: float = 0.0,
        ttl_s: float = 60.0,
        label: str = "",
        min_free_memory_bytes: int | None = None,
        gpu_model: str | None = None,
        topology: Literal["required", "preferred", "any"] = "preferred",
        priority: Literal["interactive", "normal", "scavenge"] = "normal",
        preemptible: bool | None = None,
        time_s: float | None = None,
        reclaim_idle_after_s: float | None = None,
        node: str | None = None,
        among: list[str] | None = None,
        on_lost: OnLost | None = None,
        on_queued: Callable[[Lease], None] | None = None,
        owner: ProcessId | None = None,
        watch_owner: bool = True,
        shared_key: str | None = None,
    ) -> PendingLease:
        """Acquire a lease, which is renewed in the background until the end of the block.

            async with client.lease(count=2, wait_s=600) as lease:
                process = await asyncio.create_subprocess_exec(*command, env=lease.environ())
                await process.wait()

        With `nodes` it is a gang: `count` GPUs on each of so many nodes, and an environment for each of its `members`.
        Waits in the queue for at most `wait_s` seconds, forever if it is `math.inf`; 0 takes only GPUs that are free
        now. The logger `gpulease` tells who is in the way, or `on_queued` is called once instead; Ctrl-C ends a wait.
        `on_lost` is called once if the lease is lost, in the event loop, and may be a coroutine function.
        The GPUs are freed when `owner` exits, by default this process; with `watch_owner=False` when not renewed.
        Processes with the same `shared_key` share one lease while its owner lives. The others are in LeaseRequest.
        Raises NotNow, with `explanation`, if the GPUs are not granted in time; NeverFits if waiting would be useless;
        InvalidRequest; LeaseLost once the owner has ended, or if this is a rank or pool child and its parent has.
        """
        ranks.check_not_orphaned()
        request = lease_request(
            count=count,
            devices=devices,
            nodes=nodes,
            ttl_s=ttl_s,
            label=label,
            min_free_memory_bytes=min_free_memory_bytes,
            gpu_model=gpu_model,
            topology=topology,
            priority=priority,
            preemptible=preemptible,
            time_s=time_s,
            reclaim_idle_after_s=reclaim_idle_after_s,
            node=node,
            among=among,
            watch_owner=watch_owner,
            **agent_fields(),
            **(owner or ProcessId.this_process()).owner_fields(local=self.destination.local),
        )
        return PendingLease(lambda: self._acquire(request, wait_s, on_lost, on_queued, shared_key, owner))

    async def _acquire(
        self,
        request: LeaseRequest,
        wait_s: float,
        on_lost: OnLost | None,
        on_queued: Callable[[Lease], None] | None,
        shared_key: str | None,
        owner: ProcessId | None,
    ) -> AsyncLease:
        hold = partial(AsyncLease, self._renewing, on_lost=on_lost, shared=shared_key is not None, owner=owner)
        return await self._transport.run(self._flows.acquire(request, wait_s, hold, shared_key, on_queued))

    async def request_lease(
        self, request: LeaseRequest, wait_s: float | None = None, on_queued: Callable[[Lease], None] | None = None
    ) -> Lease:
        """A lease that the caller renews and releases. If `wait_s` is None, it may be queued. Else this waits for at
        most `wait_s`, and withdraws the request and raises NotNow if it got no GPUs. `on_queued` as for `lease`."""
        return await self._transport.run(self._flows.request_lease(request, wait_s, on_queued))

    async def renew(self, lease_id: str, fencing_token: int | None) -> Lease:
        """Extend the lease by a full `ttl_s` from now. Raises LeaseLost, StaleToken."""
        return await self.send(endpoints.renew(lease_id, fencing_token))

    async def release(
        self, lease_id: str, fencing_token: int | None, *, retry_s: float | None = None, timeout_s: float | None = None
    ) -> Lease:
        """End the lease, or cancel it if it is queued. Raises LeaseLost, StaleToken; DaemonUnavailable or Unavailable
        if no daemon answers, and this process then repeats it until one does."""
        return await self._transport.run(self._flows.release(lease_id, fencing_token, retry_s, timeout_s))

    # Bearer tokens
    async def create_token(self, request: TokenRequest) -> NewBearerToken:
        """Create a bearer token; only this answer shows its `bearer`. For administrators."""
        return await self.send(endpoints.create_token(request))

    async def tokens(self) -> tuple[BearerToken, ...]:
        """All bearer tokens that are not revoked, without their secrets. For administrators."""
        return await self._transport.run(self._flows.all_pages(endpoints.tokens))

    async def revoke_token(self, token_id: str) -> BearerToken:
        """Revoke the bearer token. For administrators. Raises NotFound."""
        return await self.send(endpoints.revoke_token(token_id))

    # Jobs

    async def submit(self, request: JobRequest) -> Job:
        """Submit a job, which is then queued or already starting.

        job = await client.submit(gpulease.JobRequest(command=["train.py"], gpus=2))
        print((await client.wait_job(job.id)).exit_code)
        """
        return await self.send(endpoints.submit(request, uuid.uuid4().hex))

    async def jobs(
        self,
        state: str | Iterable[str] = (),
        *,
        array: str | None = None,
        user: str | None = None,
        name: str | None = None,
    ) -> tuple[Job, ...]:
        """The jobs in this state or in these states, by default in any; of one array, user or name, by default all."""
        page = partial(endpoints.jobs, as_tuple(state), array=array, user=user, name=name)
        return await self._transport.run(self._flows.all_pages(page))

    async def job(self, job_id: str) -> Job:
        """One job. Raises NotFound."""
        return await self.send(endpoints.job(job_id))

    async def wait_job(
        self, job_id: str, wait_s: float | None = None, *, until: Callable[[Job], bool] = lambda job: job.ended
    ) -> Job:
        """The job once it has ended (or `until` returns true), or as it is after `wait_s`; None waits forever."""
        return await self._transport.run(self._flows.wait_job(job_id, wait_s, until))

    async def cancel_job(self, job_id: str, grace_s: float | None = None) -> Job:
        """Cancel the job. `grace_s` is the time between SIGTERM and SIGKILL."""
        return await self.send(endpoints.cancel_job(job_id, grace_s))

    async def job_metrics(self, job_id: str, points: int | None = None) -> JobMetrics:
        """Readings of the job's GPUs, in at most `points` buckets each (1 to 600), and GPU-hours. Raises NotFound."""
        return await self.send(endpoints.job_metrics(job_id, points))

    async def job_metrics_csv(self, job_id: str, points: int | None = None) -> str:
        """The same as CSV, one line for each bucket of each GPU; unknown values are `nan`. Raises NotFound."""
        return await self.send(endpoints.job_metrics_csv(job_id, points))

    def job_logs(
        self,
        job_id: str,
        follow: bool = False,
        rank: int | str | None = None,
        tail: int | None = None,
        offset: str | int | None = None,
        node: str | None = None,
        attempt: int | None = None,
        errors: str = "replace",
    ) -> AsyncIterator[str]:
        """The text of the job's log, in pieces; with `follow` until the job has ended.

        It is that of the launcher, of one `rank`, or with `rank="all"` of all ranks, by lines; of all nodes or one
        `node`; of the last or this `attempt`; from the last `tail` lines or `offset` bytes; `errors` as in `decode`."""
        call_at = partial(endpoints.job_logs, job_id, follow, rank, node=node, attempt=attempt)
        return self._transport.emitted(self._flows.job_log(call_at, tail, offset, errors))
