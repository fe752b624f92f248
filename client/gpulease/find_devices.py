"""Finds usable GPUs and reserves them: the implementation of `find_usable_cuda_devices`.

Loads neither torch nor CUDA. It returns CUDA ordinals of the calling process (`gpulease.cuda.ordinals`).

One training takes one lease, however many of its processes call. With `reuse`, the result depends on the caller:

- Within a block of `usable_cuda_devices`: GPUs of that block.
- A process that called before, in any thread, or before execve replaced its program: the same GPUs again
  (`gpulease.device_reuse`).
- Its forked child: the same GPUs, while the lease is active. The parent stays the owner.
- A process that was started bound to a lease (by a job, `gpulease run`, `HeldLease.environ`): GPUs of that lease.
- A rank launched by the finder (Lightning, Fabric, `mp.spawn`): the finder's GPUs. The finder stays the owner.
- A rank of torchrun, accelerate, deepspeed or mpirun: one lease for all ranks, by a shared key (`gpulease.cuda.ranks`).
  The launcher is the owner.
- A rank that multiprocessing started (notebook_launcher) and that asks first: the same. The lease ends with the ranks.
- A rank after the end of its launcher, or the child of a pool after the end of its parent: LeaseLost.
- Any other process: a new lease, which the calling process owns.

A lease that is lost or was released is never returned again: the call takes a new one.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from gpulease.cuda import ranks
from gpulease.cuda.ordinals import VisibleDevices, mask_settings, set_mask
from gpulease.device_request import (
    DeviceClient,
    active_lease,
    is_bound,
    lease_arguments,
    remaining_s,
    resolved_wait_s,
    surrounding_lease,
    too_few_usable,
    visible_devices,
)
from gpulease.device_reuse import (
    LEASE_VARIABLE,
    REGISTRY,
    TOKEN_VARIABLE,
    DeviceRequirements,
    FoundDevices,
    blocks_around,
    reuse_devices,
)
from gpulease.kept_gpus import GpuKeeper
from gpulease.lease import HeldLease
from gpulease_protocol.errors import (
    IdempotencyMismatch,
    InUse,
    LeaseLost,
    NotFound,
    NotNow,
    StaleToken,
)
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import Lease, LeaseState

LOG = logging.getLogger("gpulease")

MAX_SHARED_KEYS, MAX_FORKED_KEYS = 8, 1000
"""How many leases the ranks of one launcher may take, one after the other; a notebook launches many runs."""
DRAIN_S = 2.0
"""How long a call that does not wait does so after this process gave GPUs back: they are not free before a reading."""


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
    wait_s = resolved_wait_s(wait_s, max(0.0, REGISTRY.gave_back_at_s + DRAIN_S - time.monotonic()))
    until_s = time.monotonic() + wait_s
    if not reuse:
        visible = visible_devices(num_devices, requirements, client, until_s)
        left_s = remaining_s(wait_s, until_s)
        return _reserve(num_devices, requirements, left_s, label, client, visible, shared=False)
    if around := _still_held(client, blocks_around()):
        return reuse_devices(num_devices, requirements, around[-1:])
    with REGISTRY.exclusive(wait_s):
        if found := _still_held(client, REGISTRY.active()):
            REGISTRY.warn_second_thread(found)
            return reuse_devices(num_devices, requirements, found)
        visible = visible_devices(num_devices, requirements, client, until_s)
        if (kept := _lease_kept_across_execve(client)) is not None:
            _register(kept, requirements, visible)
            return reuse_devices(num_devices, requirements, REGISTRY.active())
        inherited = _inherited_devices(num_devices, requirements, client, visible)
        left_s = remaining_s(wait_s, until_s)
        return inherited or _reserve(num_devices, requirements, left_s, label, client, visible, shared=True)


def reserved_leases() -> tuple[HeldLease, ...]:
    """The leases that `find_usable_cuda_devices` has taken in this process, without those released or lost.

    Their `lost` is set when the GPUs may no longer be used. `gpulease.release` gives them back.
    """
    return tuple(found.lease for found in REGISTRY.active() if found.lease.is_holder)


def release() -> tuple[HeldLease, ...]:
    """Give back now what `find_usable_cuda_devices` took in this process, for example in a notebook that continues.

        gpulease.release()

    Also gives back what blocks of `usable_cuda_devices` have left to later ones. Returns the leases that it gave back:
    none if nothing is held, in a forked child, and in the ranks of a launcher, which share one lease.
    CUDA_VISIBLE_DEVICES and the variables of the lease are as before, so that the next call of
    `find_usable_cuda_devices` may find the same GPUs, for which it waits 2 s at most, or others. If CUDA is
    initialized, it keeps memory on the GPUs, and no one else gets them before this process ends: a warning says so.

    If no daemon answers, this process repeats the release until one does.
    """
    given_back = [found for found in REGISTRY.active() if found.lease.is_holder and not found.lease.shared]
    kept = GpuKeeper.give_back()
    for lease in kept:
        lease.__exit__(None, None, None)
    in_use = [found for found in given_back if found.uses_cuda()]
    for found in given_back:
        found.lease.__exit__(None, None, None)
    if given_back and not reserved_leases():
        REGISTRY.restore_environment()
    if given_back or kept:
        REGISTRY.gave_back_at_s = time.monotonic()
    for found in in_use:
        LOG.warning(
            "CUDA is initialized in this process and may keep memory on %s: no one else gets them before it ends.",
            ", ".join(f"GPU {gpu.index} of {gpu.node}" for gpu in found.lease.gpus),
        )
    return (*(found.lease for found in given_back), *kept)


def _still_held(client: DeviceClient, found: list[FoundDevices]) -> list[FoundDevices]:
    """Those with an active lease; a forked child has to ask the daemon."""
    return [one for one in found if one.lease.is_holder or active_lease(client, one.lease.id)]


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
    lease = surrounding_lease(client)
    if lease is None:
        return None
    leased = {gpu.uuid for gpu in lease.gpus} & {gpu.uuid for gpu in visible.gpus}
    if not leased or not (is_bound(leased, visible) or _launched_by_finder()):
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
    if REGISTRY.ever_used or ranks.finder_process() != ProcessId.this_process() or ranks.launcher_process() is not None:
        return None  # ranks find their lease by its key
    lease, token = active_lease(client, os.environ.get(LEASE_VARIABLE, "")), os.environ.get(TOKEN_VARIABLE, "")
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
    request = lease_arguments(num_devices, requirements, label, visible) | {"on_queued": _OnQueued()}
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
        raise too_few_usable(num_devices, visible, wait_s, error) from None
    return _register(held, requirements, visible, shared=launched_by is not None or forked_by is not None)


class _OnQueued:
    """Called with a request that is queued: other threads of this process need not wait for it as well."""

    announces = True

    def __call__(self, lease: Lease) -> None:
        REGISTRY.waits()


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


def _fix_ordinals(visible: VisibleDevices, uuids: set[str], requirements: DeviceRequirements) -> list[int]:
    """The ordinals of these GPUs, which stay the same for the rest of this process."""
    if not requirements.set_visible:
        return visible.fix_ordinals(uuids)
    set_mask([gpu.uuid for gpu in visible.gpus if gpu.uuid in uuids])
    return list(range(len(uuids)))


def _register(
    held: HeldLease, requirements: DeviceRequirements, visible: VisibleDevices, *, shared: bool = False
) -> list[int]:
    try:
        REGISTRY.remember_environment()
        ordinals = _fix_ordinals(visible, {gpu.uuid for gpu in held.gpus}, requirements)
        if not reserved_leases():
            # For ranks that this process will launch. Only the first of several leases counts: there is one
            # environment.
            owner = ProcessId.this_process()
            os.environ[LEASE_VARIABLE], os.environ[TOKEN_VARIABLE] = held.id, str(held.fencing_token)
            os.environ[ranks.FINDER_VARIABLE] = f"{owner.pid}:{owner.start_ticks}"
        REGISTRY.add(FoundDevices(held, tuple(ordinals), requirements, visible, mask_settings()))
    except BaseException:  # Ctrl-C as well
        if shared:
            held.detach()  # the other ranks still use it
        else:
            held.release()
        if not reserved_leases():
            REGISTRY.restore_environment()
        raise
    return ordinals
