"""Finds usable GPUs and reserves them: the implementation of `find_usable_cuda_devices`.

Loads neither torch nor CUDA. It returns CUDA ordinals of the calling process (`gpulease.cuda.ordinals`).

One training takes one lease, however many of its processes call. With `reuse`, the result depends on the caller:

- A process that called before, in any thread, or before execve replaced its program: the same GPUs again
  (`gpulease.device_reuse`).
- Its forked child: the same GPUs, while the lease is active. The parent stays the owner.
- A process that was started bound to a lease (by a job, `gpulease run`, `HeldLease.environ`): GPUs of that lease.
- A rank launched by the finder (Lightning, Fabric, `mp.spawn`): the finder's GPUs. The finder stays the owner.
- A rank of torchrun, accelerate, deepspeed or mpirun: one lease for all ranks, by a shared key (`gpulease.cuda.ranks`).
  The launcher is the owner.
- A rank that multiprocessing started (notebook_launcher) and that asks first: the same. The lease ends with the ranks.
- A rank whose launcher has ended, or the child of a pool whose parent has: LeaseLost.
- Any other process: a new lease, which the calling process owns.

A lease that is lost or was released is never returned again: the call takes a new one.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

from gpulease.cuda import ranks
from gpulease.cuda.ordinals import MASK, VisibleDevices, check_mask_changeable, mask_settings, set_mask, visible_gpus
from gpulease.device_reuse import (
    LEASE_VARIABLE,
    TOKEN_VARIABLE,
    DeviceRegistry,
    DeviceRequirements,
    FoundDevices,
    reuse_devices,
)
from gpulease.lease import HeldLease, LeaseClient
from gpulease_protocol.durations import LONGEST_S, parse_duration
from gpulease_protocol.errors import (
    DaemonUnavailable,
    IdempotencyMismatch,
    InUse,
    InvalidRequest,
    LeaseLost,
    MaskLatched,
    NeverFits,
    NotFound,
    NotNow,
    StaleToken,
    Unavailable,
)
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import Gpu, Lease, LeaseState, Node
from gpulease_protocol.obstacle_groups import obstacle_groups
from gpulease_protocol.status_table import format_duration

LOG = logging.getLogger("gpulease")

WAIT_VARIABLE = "GPULEASE_WAIT_S"
"""How long to wait for GPUs by default: `600`, `90s`, `10m`."""
TTL_S = 60.0
"""How soon the GPUs are free again if this process dies unseen by the daemon."""
MAX_SHARED_KEYS, MAX_FORKED_KEYS = 8, 1000
"""How many leases the ranks of one launcher may take, one after the other; a notebook launches many runs."""
DAEMON_POLL_S = 1.0
"""How often to look for a daemon that is not up yet."""

_registry = DeviceRegistry()


class DeviceClient(LeaseClient, Protocol):
    """The part of `Client` that is needed to find devices."""

    def gpus(self) -> tuple[Gpu, ...]:
        """As `Client.gpus`."""

    def lease_by_id(self, lease_id: str) -> Lease:
        """As `Client.lease_by_id`."""

    def renew(self, lease_id: str, fencing_token: int | None) -> Lease:
        """As `Client.renew`."""

    def lease(self, *args: Any, **kwargs: Any) -> HeldLease:
        """As `Client.lease`."""


def find_devices(
    num_devices: int,
    client: DeviceClient,
    requirements: DeviceRequirements,
    *,
    wait_s: float | None,
    label: str,
    reuse: bool,
) -> list[int]:
    """Reserve usable GPUs and return their CUDA ordinals, as `gpulease.find_usable_cuda_devices` documents."""
    wait_s = _default_wait_s() if wait_s is None else wait_s
    until_s = time.monotonic() + wait_s
    if not reuse:
        visible = _visible_devices(num_devices, requirements, client, until_s)
        left_s = _left_s(wait_s, until_s)
        return _reserve(num_devices, requirements, left_s, label, client, visible, shared=False)
    with _registry.exclusive(wait_s):
        found = [
            found for found in _registry.active() if found.lease.is_holder or _active_lease(client, found.lease.id)
        ]
        if found:
            return reuse_devices(num_devices, requirements, found)
        visible = _visible_devices(num_devices, requirements, client, until_s)
        if (kept := _lease_kept_across_execve(client)) is not None:
            _register(kept, requirements, visible)
            return reuse_devices(num_devices, requirements, _registry.active())
        inherited = _inherited_devices(num_devices, requirements, client, visible)
        left_s = _left_s(wait_s, until_s)
        return inherited or _reserve(num_devices, requirements, left_s, label, client, visible, shared=True)


def reserved_leases() -> tuple[HeldLease, ...]:
    """The leases that `find_usable_cuda_devices` has taken in this process, without those released or lost.

    Their `lost` is set when the GPUs may no longer be used. `gpulease.release` gives them back.
    """
    return tuple(found.lease for found in _registry.active() if found.lease.is_holder)


def release() -> tuple[HeldLease, ...]:
    """Give back now what `find_usable_cuda_devices` took in this process, as in a notebook that goes on without GPUs.

        gpulease.release()

    Returns the leases that it gave back: none if nothing is held, in a forked child, and in the ranks of a launcher,
    whose lease is that of all. CUDA_VISIBLE_DEVICES and the variables of the lease are as before, so that the next call
    of `find_usable_cuda_devices` may find other GPUs. If CUDA is initialized, it keeps memory on the GPUs, and no one
    else gets them before this process ends: a warning says so.

    If no daemon answers, this process repeats the release until one does.
    """
    given_back = [found for found in _registry.active() if found.lease.is_holder and not found.lease.shared]
    in_use = [found for found in given_back if found.uses_cuda()]
    for found in given_back:
        found.lease.__exit__(None, None, None)
    if given_back and not reserved_leases():
        _registry.restore_environment()
    for found in in_use:
        LOG.warning(
            "CUDA is initialized in this process and may keep memory on %s: no one else gets them before it ends.",
            ", ".join(f"GPU {gpu.index} of {gpu.node}" for gpu in found.lease.gpus),
        )
    return tuple(found.lease for found in given_back)


def _left_s(wait_s: float, until_s: float) -> float:
    """What is left of a wait; 0 only for a call that does not wait."""
    return max(0.001, until_s - time.monotonic()) if wait_s > 0 else 0.0


def _visible_devices(
    num_devices: int, requirements: DeviceRequirements, client: DeviceClient, until_s: float
) -> VisibleDevices:
    """What CUDA shows this process. Raises ValueError if it shows too few GPUs, MaskLatched if it is too late."""
    if requirements.set_visible:
        check_mask_changeable()
    _await_daemon(client, until_s)
    gpus = client.gpus()
    local_node = _local_node(client, {gpu.node for gpu in gpus})
    in_pci_order = sorted(
        (gpu for gpu in gpus if local_node and gpu.node == local_node.name), key=lambda gpu: gpu.index
    )
    visible = visible_gpus(in_pci_order, simulated=local_node is None or local_node.simulated)
    if visible.initialized and _registry.restored_mask and num_devices > len(visible.gpus):
        raise MaskLatched(
            f"CUDA was initialized while {MASK} named GPUs that were given back since, and shows no others here.",
            remedy="Start the process again, in a notebook the kernel.",
        )
    _check_count(num_devices, visible.gpus)
    return visible


def _await_daemon(client: DeviceClient, until_s: float) -> None:
    """Return when a daemon answers and knows a node, as after the start of the machine, or when no time is left."""
    announced = not ranks.is_first_rank()
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            if client.nodes():
                return
            why = "No worker has reported to it yet."
        except (DaemonUnavailable, Unavailable) as error:
            if isinstance(error, DaemonUnavailable) and not error.may_come:
                raise
            why = error.detail
        if not announced:
            LOG.warning("gpulease waits for its daemon, for at most %s. %s Ctrl-C gives up.", _length(left_s), why)
            announced = True
        time.sleep(min(DAEMON_POLL_S, left_s))


def _length(seconds: float) -> str:
    return format_duration(round(seconds)) if seconds < LONGEST_S else "as long as it takes"


def _active_lease(client: DeviceClient, lease_id: str) -> Lease | None:
    """The lease, if it is active."""
    try:
        lease = client.lease_by_id(lease_id)
    except NotFound:
        return None
    return lease if lease.state is LeaseState.ACTIVE else None


def _has_ended(client: DeviceClient, lease_id: str) -> bool:
    """True if the lease has ended."""
    try:
        return client.lease_by_id(lease_id).state is LeaseState.ENDED
    except NotFound:
        return False


def _inherited_devices(
    num_devices: int, requirements: DeviceRequirements, client: DeviceClient, visible: VisibleDevices
) -> list[int] | None:
    """The devices of the lease that this process was started under; None if there is none."""
    lease_id = os.environ.get(LEASE_VARIABLE)
    lease = _active_lease(client, lease_id) if lease_id else None
    if lease is None:
        return None
    leased = {gpu.uuid for gpu in lease.gpus} & {gpu.uuid for gpu in visible.gpus}
    bound = MASK in os.environ and len(leased) == len(visible.gpus)
    if not leased or not (bound or _launched_by_finder()):
        return None
    ordinals = visible.ordinals(leased)
    if num_devices > len(ordinals):
        raise InUse(
            f"The process that launched this one has reserved the devices {ordinals}, and this asks for {num_devices}.",
            remedy="Ask for as many there, or pass reuse=False to reserve more.",
        )
    chosen = ordinals if num_devices == -1 else ordinals[:num_devices]
    return _fix_ordinals(visible, {gpu.uuid for ordinal in chosen if (gpu := visible.devices[ordinal])}, requirements)


def _launched_by_finder() -> bool:
    finder = ranks.finder_process()
    return finder is not None and ranks.is_rank() and ranks.descends_from(finder)


def _lease_kept_across_execve(client: DeviceClient) -> HeldLease | None:
    """The lease that this process took before execve replaced its program; this program renews it from now on."""
    if (
        _registry.ever_used
        or ranks.finder_process() != ProcessId.this_process()
        or ranks.launcher_process() is not None
    ):
        return None  # ranks find their lease by its key
    lease, token = _active_lease(client, os.environ.get(LEASE_VARIABLE, "")), os.environ.get(TOKEN_VARIABLE, "")
    if lease is None or token != str(lease.fencing_token):
        return None
    sent_at = time.monotonic()
    try:
        return HeldLease(client, client.renew(lease.id, lease.fencing_token), trusted_from=sent_at)
    except (LeaseLost, NotFound, StaleToken):
        return None


def _reserve(
    num_devices: int,
    requirements: DeviceRequirements,
    wait_s: float,
    label: str,
    client: DeviceClient,
    visible: VisibleDevices,
    *,
    shared: bool,
) -> list[int]:
    """Take a lease: that of all ranks if `shared` and this process is a rank of a launcher."""
    request: dict[str, Any] = {
        "count": None if num_devices == -1 else num_devices,
        "devices": "auto" if num_devices == -1 else None,
        "ttl_s": TTL_S,
        "label": label,
        "min_free_memory_bytes": requirements.min_free_memory_bytes,
        "gpu_model": requirements.gpu_model,
        "node": visible.gpus[0].node,
        # Sorted, so that ranks with different ordinals make the same request.
        "among": sorted(gpu.uuid for gpu in visible.gpus),
    }
    ranks.check_not_orphaned()
    launched_by = ranks.launcher_process() if shared else None
    forked_by = ranks.forking_launcher() if shared and launched_by is None else None
    try:
        if launched_by is not None:
            held = _shared_lease(client, launched_by, request, wait_s)
        elif forked_by is not None:
            # The launcher may outlive the training, so the lease ends with its ranks: they renew it.
            request["watch_owner"] = False
            held = _shared_lease(client, forked_by, request, wait_s, MAX_FORKED_KEYS)
            _release_at_exit_of_rank_0(held)
        else:
            held = client.lease(**request, wait_s=wait_s)
    except NotNow as error:
        if num_devices == -1:
            return []
        raise _too_few_usable(num_devices, visible, wait_s, error) from None
    return _register(held, requirements, visible, shared=launched_by is not None or forked_by is not None)


def _release_at_exit_of_rank_0(held: HeldLease) -> None:
    """A child of multiprocessing ends without `atexit`. The other ranks end with rank 0, or their GPUs drain."""
    if os.environ.get("LOCAL_RANK") == "0":
        from multiprocessing import util  # noqa: PLC0415 - loads slowly, and only its own children need it

        util.Finalize(None, held.__exit__, (None, None, None), exitpriority=0)


def _shared_lease(
    client: DeviceClient,
    launched_by: ProcessId,
    request: dict[str, Any],
    wait_s: float,
    max_leases: int = MAX_SHARED_KEYS,
) -> HeldLease:
    """The one lease of all ranks of a launcher. If it has ended, all ranks take the next one.

    Raises InUse if another rank asked for something else, because each would then go on with its own GPUs.
    """
    until_s = time.monotonic() + wait_s
    for generation in range(max_leases):
        key = ranks.shared_key(launched_by, generation)
        left_s = max(0.001, until_s - time.monotonic()) if wait_s > 0 else 0.0
        try:
            return client.lease(**request, wait_s=left_s, owner=launched_by, shared_key=key)
        except (LeaseLost, NotFound):
            continue
        except IdempotencyMismatch as error:
            if _has_ended(client, str(error.extra.get("made", ""))):
                continue
            raise InUse(
                f"Another rank launched by process {launched_by.pid} made a different request (GPUs, label, or"
                " whether to wait), and all ranks of a training run share one lease.",
                remedy="Ask for the same in every rank, or pass reuse=False to reserve more.",
            ) from None
    raise LeaseLost(
        f"The ranks launched by process {launched_by.pid} have lost {max_leases} leases, one after the other.",
        remedy="Start the training again; `gpulease leases` says why they ended.",
    )


def _local_node(client: DeviceClient, names: set[str]) -> Node | None:
    host = socket.gethostname()
    local = {node.name: node for node in client.nodes() if node.host == host and node.name in names}
    return local[host if host in local else min(local)] if local else None


def _check_count(num_devices: int, visible: Sequence[Gpu]) -> None:
    if not visible:
        raise NeverFits(
            f"You requested to find {num_devices} devices but there are no visible CUDA devices on this machine."
        )
    if num_devices > len(visible):
        raise NeverFits(f"You requested to find {num_devices} devices but this machine only has {len(visible)} GPUs.")
    if num_devices < -1:
        raise InvalidRequest(f"num_devices must be -1 for every usable device, or 0 or more, not {num_devices}")


def _too_few_usable(num_devices: int, visible: VisibleDevices, wait_s: float, error: NotNow) -> NotNow:
    """Lightning's sentence, and who is in the way of the GPUs that this process can see."""
    obstacles = error.explanation.obstacles if error.explanation else ()
    shown = {gpu.uuid for gpu in visible.gpus}
    in_the_way = [obstacle for obstacle in obstacles if obstacle.uuid in shown]
    usable = len(shown) - len(in_the_way)
    requested = f"You requested to find {num_devices} devices but only {usable} are currently available."
    reasons = [f"{group}." for group in obstacle_groups(in_the_way)] or [error.detail]
    how = "Wait longer with" if wait_s > 0 else "To wait for them, set"
    return NotNow(" ".join([requested, *reasons]), remedy=f"{how} {WAIT_VARIABLE}=10m.", extra=error.extra)


def _fix_ordinals(visible: VisibleDevices, uuids: set[str], requirements: DeviceRequirements) -> list[int]:
    """The ordinals of these GPUs, which stay the same for the rest of this process."""
    if not requirements.set_visible:
        return visible.fix_ordinals(uuids)
    set_mask([gpu.uuid for gpu in visible.gpus if gpu.uuid in uuids])
    return list(range(len(uuids)))


def _register(
    held: HeldLease, requirements: DeviceRequirements, visible: VisibleDevices, *, shared: bool = False
) -> list[int]:
    _registry.remember_environment()
    try:
        ordinals = _fix_ordinals(visible, {gpu.uuid for gpu in held.gpus}, requirements)
    except BaseException:
        if shared:
            held.detach()  # the other ranks still use it
        else:
            held.release()
        raise
    if not reserved_leases():
        # For ranks that this process will launch. Only the first of several leases counts: there is one environment.
        owner = ProcessId.this_process()
        os.environ[LEASE_VARIABLE], os.environ[TOKEN_VARIABLE] = held.id, str(held.fencing_token)
        os.environ[ranks.FINDER_VARIABLE] = f"{owner.pid}:{owner.start_ticks}"
    _registry.add(FoundDevices(held, tuple(ordinals), requirements, visible, mask_settings()))
    return ordinals


def _default_wait_s() -> float:
    text = os.environ.get(WAIT_VARIABLE) or "0"
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InvalidRequest(f"{WAIT_VARIABLE}: {error}.", remedy="Set it to a time, 0 or more.") from None
