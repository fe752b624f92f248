"""`Client`: the REST API as Python calls. Thin: `calls` knows the endpoints, `transport` the wire."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from gpulease import calls
from gpulease.access import BearerToken, NewBearerToken, TokenRequest
from gpulease.explanation import Explanation
from gpulease.lease import HeldLease
from gpulease.metrics import JobMetrics
from gpulease.model import Event, Gpu, Job, Lease, Node
from gpulease.owner import Owner
from gpulease.route import Destination
from gpulease.talk import Talk, lease_request, several
from gpulease.transport import Transport
from gpulease.wire import JobRequest, LeaseRequest

Answer = TypeVar("Answer")


class Client:
    """A connection to a daemon; safe to use from several threads, and in a forked child.

    `url` (`http://host:port` or `unix:///path`) and `token` default to GPULEASE_URL and GPULEASE_TOKEN; without an
    address the local sockets are tried, then http://127.0.0.1:8750. Several URLs, as a list or with commas, are several
    ways to one service: the one that answers is kept until it fails. `timeout_s` bounds the wait for an answer, beyond
    what the call itself asks the daemon to hold; `retry_s` how long an outage is sat out while a wait goes on.

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
        self._transport = Transport(destination)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(address.shown for address in self.destination.addresses)}>"

    def close(self) -> None:
        """Close the connections. Leases stay held."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(
        self, call: calls.Call[Answer], *, patience_s: float | None = None, timeout_s: float | None = None
    ) -> Answer:
        """The answer to any call; the other methods are short for this."""
        return self._transport.run(self._talk.send(call, patience_s, timeout_s))

    # What there is

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU, with its last reading and who holds it."""
        return self._transport.run(self._talk.every(calls.gpus))

    def gpu(self, uuid: str) -> Gpu:
        """One GPU. Raises NotFound."""
        return self.send(calls.gpu(uuid))

    def nodes(self) -> tuple[Node, ...]:
        """Every node."""
        return self._transport.run(self._talk.every(calls.nodes))

    def node(self, name: str) -> Node:
        """One node. Raises NotFound."""
        return self.send(calls.node(name))

    def drain_node(self, name: str) -> Node:
        """The node, of which nothing is granted any more; what runs there goes on. Raises NotFound."""
        return self.send(calls.drain_node(name))

    def pause_node(self, name: str, force: bool = False) -> Node:
        """The node, drained and about to close NVML; its `reason` says when that is done. Raises NotFound, and InUse
        while a lease is active there, unless with `force`."""
        return self.send(calls.pause_node(name, force))

    def resume_node(self, name: str) -> Node:
        """The node, in use again once it has reported. Raises NotFound."""
        return self.send(calls.resume_node(name))

    def cordon_gpu(self, uuid: str, cordoned: bool = True) -> Gpu:
        """The GPU, granted to nobody from now on; or with `cordoned` false, in use again. Raises NotFound."""
        return self.send(calls.cordon_gpu(uuid, cordoned))

    @property
    def as_of(self) -> str | None:
        """When the last answer was true (ISO 8601), where the daemon could not say that it still is: it stands by, or
        has lost its lock. Else null."""
        return self._talk.route.as_of

    def ready(self) -> Mapping[str, Any]:
        """What `/readyz` says. Raises Unavailable while the daemon cannot grant."""
        return self.send(calls.ready())

    def alive(self) -> Mapping[str, Any]:
        """What `/healthz` says: the daemon's process answers."""
        return self.send(calls.alive())

    def front_page(self) -> str:
        """GPUs, holders and the queue as a text table."""
        return self.send(calls.front_page())

    def events(self, after: int = 0, limit: int | None = None) -> Iterator[Event]:
        """Events with a `seq` over `after`, oldest first, up to the newest there is; fetched page by page.

        After 0 they begin with the oldest that is kept. Raises EventsPruned when some after another `seq` are gone.
        """
        while items := self.send(calls.events(after, limit)).items:
            yield from items
            after = items[-1].seq

    # Leases

    def watch_events(self, after: int | None = None) -> Iterator[Event]:
        """Each event as it is recorded, for ever: those after `seq` number `after`, 0 for all that are kept, null for
        what comes from now on.

        After an outage, or at another address, it goes on where it broke off. Raises EventsPruned where events are
        missing, DaemonUnavailable when an outage lasts `retry_s`.
        """
        return self._transport.emitted(self._talk.events(after))

    def leases(self, state: str | Iterable[str] = ()) -> tuple[Lease, ...]:
        """Leases of this state or these states, else of every state."""
        return self._transport.run(self._talk.every(lambda cursor: calls.leases(several(state), cursor)))

    def lease_by_id(self, lease_id: str) -> Lease:
        """One lease. Raises NotFound."""
        return self.send(calls.lease(lease_id))

    def explain(self, lease_id: str) -> Explanation:
        """Why the lease has no GPUs: not now, or never."""
        return self.send(calls.explain(lease_id))

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
        on_lost: Callable[[HeldLease], None] | None = None,
        on_queued: Callable[[Lease], None] | None = None,
        owner: Owner | None = None,
        shared_key: str | None = None,
    ) -> HeldLease:
        """A lease that is renewed in the background, to be used as a context manager.

        Waits in the queue for at most `wait_s`, `math.inf` for ever; 0 takes what is free now. `on_lost` is called
        once, in a thread, if the lease is lost; `on_queued` once if the request must wait. `owner` is whose end frees
        the GPUs, this process by default. Processes that give the same `shared_key`, and otherwise the same, hold one
        lease together, which lasts as long as its owner; one that has ended already raises LeaseLost. The other
        arguments are the fields of `LeaseRequest`. Raises NotNow, whose `extra["explanation"]` says what is in the way;
        NeverFits when waiting is of no use; InvalidRequest.
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
        lease, sent_at = self._transport.run(self._talk.granted(request, wait_s, shared_key, on_queued))
        return HeldLease(self, lease, trusted_from=sent_at, on_lost=on_lost, shared=shared_key is not None)

    def request_lease(
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
        return self._transport.run(self._talk.requested(request, wait_s, on_queued))

    def renew(self, lease_id: str, token: int | None) -> Lease:
        """The lease, with a full `ttl_s` before it. Raises LeaseLost, StaleToken."""
        return self.send(calls.renew(lease_id, token))

    def release(self, lease_id: str, token: int | None) -> Lease:
        """The lease, ended; a queued one is cancelled. Raises LeaseLost, StaleToken."""
        return self.send(calls.release(lease_id, token))

    def find_usable_cuda_devices(self, num_devices: int = -1, **wishes: Any) -> list[int]:
        """`gpulease.find_usable_cuda_devices` with this client."""
        from gpulease.devices import find_usable_cuda_devices  # noqa: PLC0415 - which imports this module

        return find_usable_cuda_devices(num_devices, client=self, **wishes)

    # Who may ask

    def create_token(self, request: TokenRequest) -> NewBearerToken:
        """A new bearer token; its `bearer` is shown this once. For administrators."""
        return self.send(calls.create_token(request))

    def tokens(self) -> tuple[BearerToken, ...]:
        """Every bearer token that was not revoked, without its secret. For administrators."""
        return self._transport.run(self._talk.every(calls.tokens))

    def revoke_token(self, token_id: str) -> BearerToken:
        """The bearer token, which is refused from now on. For administrators. Raises NotFound."""
        return self.send(calls.revoke_token(token_id))

    # Jobs

    def submit(self, request: JobRequest) -> Job:
        """The job, queued or already starting."""
        return self.send(calls.submit(request, uuid.uuid4().hex))

    def jobs(
        self, state: str | Iterable[str] = (), *, array: str | None = None, user: str | None = None
    ) -> tuple[Job, ...]:
        """Jobs of this state or these states, else of every state; of one array and one user, or of any."""
        return self._transport.run(
            self._talk.every(lambda cursor: calls.jobs(several(state), cursor, array=array, user=user))
        )

    def job(self, job_id: str) -> Job:
        """One job. Raises NotFound."""
        return self.send(calls.job(job_id))

    def wait_job(
        self, job_id: str, wait_s: float | None = None, *, until: Callable[[Job], bool] = lambda job: job.state.final
    ) -> Job:
        """The job once it has ended (or `until` says so), or as it is after `wait_s`; null waits for ever."""
        return self._transport.run(self._talk.job(job_id, wait_s, until))

    def cancel_job(self, job_id: str, grace_s: float | None = None) -> Job:
        """The job, stopping or cancelled. `grace_s` lies between SIGTERM and SIGKILL."""
        return self.send(calls.cancel_job(job_id, grace_s))

    def job_metrics(self, job_id: str, points: int | None = None) -> JobMetrics:
        """What the job's GPUs showed, in at most `points` buckets each (1 to 600), and GPU-hours. Raises NotFound."""
        return self.send(calls.job_metrics(job_id, points))

    def job_metrics_csv(self, job_id: str, points: int | None = None) -> str:
        """The same as CSV, a line for each bucket of each GPU; what is not known is `nan`. Raises NotFound."""
        return self.send(calls.job_metrics_csv(job_id, points))

    def job_logs(
        self,
        job_id: str,
        follow: bool = False,
        rank: int | str | None = None,
        tail: int | None = None,
        offset: str | int | None = None,
    ) -> Iterator[str]:
        """Text of the job's log in pieces: of one rank, of the launcher, or with `rank` "all" of all, each line after
        its rank; with `follow` until the job has ended. Begins with the `tail` last lines, or at `offset` in bytes."""
        return self._transport.emitted(self._talk.log(partial(calls.job_logs, job_id, follow, rank), tail, offset))


def __getattr__(name: str) -> Any:
    # `from gpulease import client; client.find_usable_cuda_devices(2)`
    if name == "find_usable_cuda_devices":
        from gpulease.devices import find_usable_cuda_devices  # noqa: PLC0415 - which imports this module

        return find_usable_cuda_devices
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
