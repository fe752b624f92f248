"""What `find_usable_cuda_devices` and `usable_cuda_devices` share: which GPUs a process can ask for, the request that
it makes, and the words of a refusal.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

from gpulease.cuda import ranks
from gpulease.cuda.libcuda import CudaTimeout
from gpulease.cuda.ordinals import MASK, VisibleDevices, check_mask_changeable, visible_gpus
from gpulease.device_reuse import LEASE_VARIABLE, REGISTRY, DeviceRequirements, check_no_blocks
from gpulease.lease import HeldLease, LeaseClient, own_lease_ids
from gpulease.own_node import own_node
from gpulease.sansio.http_requests import check_wait
from gpulease_protocol.durations import LONGEST_S, parse_duration
from gpulease_protocol.errors import (
    DaemonUnavailable,
    InvalidRequest,
    MaskLatched,
    NeverFits,
    NotFound,
    NotNow,
    Unavailable,
    UnknownOrdinals,
)
from gpulease_protocol.model import Gpu, GpuState, Lease, LeaseState, Node
from gpulease_protocol.obstacle_groups import obstacle_groups
from gpulease_protocol.status_table import format_duration

LOG = logging.getLogger("gpulease")

WAIT_VARIABLE = "GPULEASE_WAIT_S"
"""How long to wait for GPUs by default: `600`, `90s`, `10m`."""
TTL_S = 60.0
"""How soon the GPUs are free again if this process dies unseen by the daemon."""
DAEMON_POLL_S = 1.0
"""How often to look for a daemon that is not up yet."""


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


def resolved_wait_s(wait_s: float | None, otherwise_s: float) -> float:
    """The wait of a call; where that is None, the one that GPULEASE_WAIT_S sets, or another where it is not set. Raises
    InvalidRequest."""
    if wait_s is not None:
        check_wait(wait_s)
        return wait_s
    text = os.environ.get(WAIT_VARIABLE) or ""
    if not text:
        return otherwise_s
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InvalidRequest(f"{WAIT_VARIABLE}: {error}.", remedy="Set it to a time, 0 or more.") from None


def remaining_s(wait_s: float, until_s: float) -> float:
    """What is left of a wait; 0 only for a call that does not wait."""
    return max(0.001, until_s - time.monotonic()) if wait_s > 0 else 0.0


def visible_devices(
    num_devices: int, requirements: DeviceRequirements, client: DeviceClient, until_s: float
) -> VisibleDevices:
    """What CUDA shows this process. Raises ValueError if it shows too few GPUs, MaskLatched if it is too late."""
    if requirements.set_visible:
        check_mask_changeable()
        check_no_blocks()
    _await_daemon(client, until_s)
    visible = _look_again(client, until_s)
    if visible.initialized and REGISTRY.restored_mask and num_devices > len(visible.gpus):
        raise MaskLatched(
            f"CUDA was initialized while {MASK} named GPUs that were given back since, and shows no others here.",
            remedy="Start the process again, in a notebook the kernel.",
        )
    _check_count(num_devices, visible)
    return visible


def look(client: DeviceClient) -> VisibleDevices:
    """What CUDA shows this process of the daemon's GPUs, if anything. Raises UnknownOrdinals."""
    gpus = client.gpus()
    here = local_node(client, {gpu.node for gpu in gpus})
    in_pci_order = sorted((gpu for gpu in gpus if here and gpu.node == here.name), key=lambda gpu: gpu.index)
    return visible_gpus(in_pci_order, simulated=here is None or here.simulated)


def _look_again(client: DeviceClient, until_s: float) -> VisibleDevices:
    """As `look`; while time is left, it repeats a query that CUDA was too slow for, as on a machine under load.

    A query that hangs in the driver cannot be killed. It is not repeated, so that no more than one process hangs.
    """
    while True:
        try:
            return look(client)
        except UnknownOrdinals as error:
            slow = isinstance(error.__cause__, CudaTimeout) and error.__cause__.process.poll() is not None
            if not slow or time.monotonic() >= until_s:
                raise
            LOG.warning("gpulease asks CUDA again: %s", error.detail)


def lease_arguments(
    num_devices: int, requirements: DeviceRequirements, label: str, visible: VisibleDevices
) -> dict[str, Any]:
    """The arguments of `Client.lease` for this many of the visible GPUs."""
    return {
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


def active_lease(client: DeviceClient, lease_id: str) -> Lease | None:
    """The lease, if it is active."""
    try:
        lease = client.lease_by_id(lease_id)
    except NotFound:
        return None
    return lease if lease.state is LeaseState.ACTIVE else None


def surrounding_lease(client: DeviceClient) -> Lease | None:
    """The lease that this process was started under, if it is active and names itself in the environment."""
    lease_id = os.environ.get(LEASE_VARIABLE)
    return active_lease(client, lease_id) if lease_id else None


def is_bound(leased: set[str], visible: VisibleDevices) -> bool:
    """True if the mask shows this process only GPUs of a lease: `leased` are those of its GPUs that it shows."""
    return MASK in os.environ and bool(leased) and len(leased) == len(visible.gpus)


def too_few_usable(num_devices: int, visible: VisibleDevices, wait_s: float, error: NotNow) -> NotNow:
    """Lightning's sentences, and who is in the way of the GPUs that this process can see."""
    obstacles = error.explanation.obstacles if error.explanation else ()
    shown, own_leases = {gpu.uuid for gpu in visible.gpus}, own_lease_ids()
    in_the_way = [obstacle for obstacle in obstacles if obstacle.uuid in shown]
    usable, pid = len(shown) - len(in_the_way), os.getpid()
    sentences = [f"You requested to find {num_devices} devices but only {usable} are currently available."]
    remedy = f"{'Wait longer with' if wait_s > 0 else 'To wait for them, set'} {WAIT_VARIABLE}=10m."
    if own := {obstacle.uuid for obstacle in in_the_way if obstacle.lease_id in own_leases}:
        sentences.append(
            f"The devices {visible.ordinals(own)} are held by this process itself (pid {pid}), by other calls."
        )
        remedy = f"To give GPUs back after each use, write {use_block(num_devices)}."
    if unleased := {one.uuid for one in in_the_way if one.code == "foreign" and pid in one.pids}:
        sentences.append(
            f"The devices {visible.ordinals(unleased)} are in use by this process itself (pid {pid}), without a lease."
        )
        remedy = f"Ask before anything uses CUDA, or lease what is in use: `gpulease adopt {pid}`."
    if others := [obstacle for obstacle in in_the_way if obstacle.uuid not in own | unleased]:
        ordinals = visible.ordinals(obstacle.uuid for obstacle in others)
        sentences.append(f"{occupied(ordinals)}: {'; '.join(obstacle_groups(others))}.")
    if not in_the_way:
        sentences.append(error.detail)
    return NotNow(" ".join(sentences), remedy=remedy, extra=error.extra)


def occupied(ordinals: Sequence[int]) -> str:
    """As Lightning says it."""
    return f"The devices {list(ordinals)} are occupied by other processes"


def use_block(num_devices: int) -> str:
    """What to write for GPUs that are given back at the end of a block."""
    return f"`with gpulease.usable_cuda_devices({num_devices}) as devices:`"


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
        REGISTRY.waits()
        if not announced:
            LOG.warning("gpulease waits for its daemon, for at most %s. %s Ctrl-C gives up.", _length(left_s), why)
            announced = True
        time.sleep(min(DAEMON_POLL_S, left_s))


def _length(seconds: float) -> str:
    return format_duration(round(seconds)) if seconds < LONGEST_S else "as long as it takes"


def local_node(client: DeviceClient, names: set[str]) -> Node | None:
    """The node of this host, of those with these names; None if there is none."""
    return own_node(node for node in client.nodes() if node.name in names)


def _check_count(num_devices: int, visible: VisibleDevices) -> None:
    gpus = visible.gpus
    if not gpus:
        raise _none_visible(num_devices)
    if num_devices > len(gpus):
        error = NeverFits(f"You requested to find {num_devices} devices but this machine only has {len(gpus)} GPUs.")
        if lease_id := os.environ.get(LEASE_VARIABLE):
            error.add_note(f"This process runs under {lease_id}, and sees no GPUs but those of that lease.")
        elif mask := os.environ.get(MASK):
            error.add_note(f"{MASK} is {mask!r}, so this process sees no other GPUs.")
        raise error
    if num_devices < -1:  # Lightning tries all GPUs, and finds another number
        busy = visible.ordinals(gpu.uuid for gpu in gpus if gpu.state != GpuState.FREE)
        usable = len(gpus) - len(busy)
        raise NotNow(
            f"You requested to find {num_devices} devices but only {usable} are currently available. {occupied(busy)} "
            "and can't be used at the moment.",
            remedy="num_devices must be -1 for every usable device, or 0 or more.",
        )


def _none_visible(num_devices: int) -> NeverFits:
    error = NeverFits(
        f"You requested to find {num_devices} devices but there are no visible CUDA devices on this machine."
    )
    mask = os.environ.get(MASK)
    if mask is not None and mask.strip() in ("", "-1", "NoDevFiles"):
        error.add_note(
            f"{MASK} is {mask!r}, which hides every GPU from this process. Who started it has set that: submitit and"
            " Slurm do for a task without GPUs (ask with gpus_per_node=, --gpus), Ray for num_gpus=0."
        )
    elif mask is not None:
        error.add_note(
            f"{MASK} is {mask!r}, under which CUDA shows no GPU: the first entry that names none hides the rest, and"
            " so does one in other letters than `nvidia-smi -L` prints; a GPU that is named twice hides all."
        )
    return error
