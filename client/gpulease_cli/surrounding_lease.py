"""The lease that this program was started under: in a shell that `acquire` bound, below `gpulease run`, or in a job.

`gpulease run` there uses its GPUs, as `srun` does inside `salloc`. It neither renews nor releases the lease, and ends
its command when the lease has ended, or the moment has come at which it ends however often it is renewed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from gpulease.client import Client
from gpulease.cuda import index_mask
from gpulease.device_reuse import LEASE_VARIABLE, TOKEN_VARIABLE
from gpulease_cli.option_types import DeviceForm
from gpulease_protocol import endpoints
from gpulease_protocol.errors import GpuleaseError, InvalidRequest, LeaseLost, NotFound
from gpulease_protocol.launchers import lease_variables, strip_launcher_variables
from gpulease_protocol.model import Device, Lease, LeaseState, Mask, Selection
from gpulease_protocol.requests import parse_devices

POLL_S, RETRY_S = 20.0, 2.0
"""How long a question about the lease may be held, and the pause after one that was not answered."""
NEW = 'Lease others with --new, or clean this shell: eval "$(gpulease release)".'


def surrounding_lease(client: Client) -> Lease | None:
    """The lease of this environment; None outside any. Raises LeaseLost if it has ended."""
    lease_id = os.environ.get(LEASE_VARIABLE)
    if not lease_id:
        return None
    try:
        lease = client.lease_by_id(lease_id)
    except NotFound:
        raise LeaseLost(f"The daemon knows nothing of {lease_id}, the lease of this shell.", remedy=NEW) from None
    if lease.state is not LeaseState.ACTIVE:
        raise LeaseLost(f"{lease_id}, the lease of this shell, has ended: {lease.end_reason}.", remedy=NEW)
    token = os.environ.get(TOKEN_VARIABLE)
    if token and lease.fencing_token is not None and token != str(lease.fencing_token):
        raise LeaseLost(f"{lease_id}, the lease of this shell, was granted again to another holder.", remedy=NEW)
    return lease


def chosen_gpus(lease: Lease, count: int | None, devices: DeviceForm | None) -> tuple[Device, ...]:
    """The GPUs of a surrounding lease that are asked for: the first `count`, those that `devices` names, else all.

    Raises InvalidRequest if it does not have them.
    """
    chosen = {} if devices is None else parse_devices(devices)
    if chosen.get("selection") is Selection.LISTED:
        names = (*chosen["indices"], *chosen["uuids"])
        known = {gpu.index: gpu for gpu in lease.gpus} | {gpu.uuid: gpu for gpu in lease.gpus}
        missing = [str(name) for name in names if name not in known]
        if missing:
            own = ", ".join(str(gpu.index) for gpu in lease.gpus)
            raise InvalidRequest(
                f"devices: {lease.id}, the lease of this shell, has GPU {own}, not {', '.join(missing)}.",
                remedy="Name some of its GPUs, or lease others with --new.",
            )
        return tuple(known[name] for name in names)
    count = chosen.get("count") if devices is not None else count
    if count is not None and count > len(lease.gpus):
        has = f"{len(lease.gpus)} GPU{'s' if len(lease.gpus) != 1 else ''}"
        field = "count" if devices is None else "devices"
        raise InvalidRequest(
            f"{field}: {lease.id}, the lease of this shell, has {has}, not {count}.",
            remedy="Ask for fewer, or lease others with --new.",
        )
    return lease.gpus[:count]


class BorrowedLease:
    """Some GPUs of a surrounding lease. As a context: while a command uses them."""

    def __init__(
        self,
        client: Client,
        lease: Lease,
        gpus: tuple[Device, ...],
        on_lost: Callable[[BorrowedLease], None],
        on_preempting: Callable[[BorrowedLease], None],
    ) -> None:
        """`on_lost` is called when the lease has ended, `on_preempting` when it is told to; not for the lease of a job:
        there the supervisor tells the processes."""
        self.id = lease.id
        self.gpus = gpus
        self.lost = threading.Event()
        """Set when the lease has ended."""
        self.preempt_at: datetime | None = None
        """When the lease ends for a request that waits; None unless it is preempted."""
        self._client, self._lease = client, lease
        self._on_lost, self._on_preempting = on_lost, on_preempting
        self._closed = threading.Event()

    def __enter__(self) -> BorrowedLease:
        threading.Thread(target=self._watch, name=f"gpulease-watch-{self.id}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def environ(self, mask: Mask) -> dict[str, str]:
        """The command's environment, as `HeldLease.environ`."""
        own = lease_variables(self._lease.env) or lease_variables(os.environ)
        bound = strip_launcher_variables(os.environ) | own
        bound["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in self.gpus)
        if mask is Mask.UUIDS:
            return bound
        nodes = {gpu.node for gpu in self.gpus}
        simulated = any(node.simulated for node in self._client.nodes() if node.name in nodes)
        return index_mask.with_index_mask(bound, self.gpus, simulated=simulated)

    def _watch(self) -> None:
        lease, ends_at_s = self._lease, _ends_at_s(self._lease)
        with Client.for_destination(self._client.destination) as client:
            while not self._closed.is_set() and lease.state is LeaseState.ACTIVE:
                before, self.preempt_at = self.preempt_at, None if lease.job_id is not None else lease.preempt_at
                if self.preempt_at not in (None, before):
                    self._on_preempting(self)
                if (left_s := ends_at_s - time.monotonic()) <= 0:
                    break
                call: Any = endpoints.lease(self.id, min(POLL_S, left_s / 2), LeaseState.ACTIVE)
                try:
                    lease = client.send(call, timeout_s=min(client.destination.timeout_s, left_s / 2))
                    ends_at_s = _ends_at_s(lease)
                except NotFound:
                    break
                except GpuleaseError:
                    self._closed.wait(min(RETRY_S, left_s / 2))
        if not self._closed.is_set():
            self.lost.set()
            self._on_lost(self)


def _ends_at_s(lease: Lease) -> float:
    """When a lease that has just been looked at ends however often it is renewed, on the monotonic clock."""
    return time.monotonic() + (float("inf") if lease.ends_in_s is None else lease.ends_in_s)


def lease_token(client: Client, lease_id: str, token: int | None) -> int | None:
    """The fencing token: as given, else that of the surrounding lease, else as the daemon shows it."""
    if token is not None:
        return token
    inherited = os.environ.get(TOKEN_VARIABLE, "")
    if os.environ.get(LEASE_VARIABLE) == lease_id and inherited.isascii() and inherited.isdigit():
        return int(inherited)
    return client.lease_by_id(lease_id).fencing_token
