"""`find_usable_cuda_devices`: Lightning's function of that name, except that it reserves what it returns.

Loads neither torch nor CUDA. The numbers are CUDA ordinals of the calling process (`gpulease.ordinals`).

One training takes one lease, however many processes call. Who calls, with `reuse`, and what is given:

- A process that has called before, in whatever thread, or before it has replaced its program by execve: the same again
  (`gpulease.finds`).
- Its forked child: the same, while the lease is active. The owner stays the parent.
- A process that was started bound to a lease (by a job, `gpulease run`, `HeldLease.environ`): GPUs of that lease.
- A rank that the finder has launched, by Lightning, Fabric or `mp.spawn`: the finder's GPUs. Their owner is the finder.
- A rank of torchrun, accelerate, deepspeed or mpirun: one lease for all ranks, by a shared key (`gpulease.ranks`).
  Its owner is the launcher.
- Anyone else: a lease of its own, whose owner is the calling process.

A lease that is lost, or was released, is not given again: the call takes another.
"""

from __future__ import annotations

import operator
import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Any

from gpulease import ranks
from gpulease.client import Client
from gpulease.errors import IdempotencyMismatch, InUse, InvalidRequest, LeaseLost, NotFound, NotNow, StaleToken
from gpulease.finds import Find, Finds, Wishes, again
from gpulease.lease import HeldLease
from gpulease.model import Gpu, Lease, LeaseState, Node
from gpulease.ordinals import MASK, Visible, check_narrow, narrow, settings, visible_gpus
from gpulease.owner import Owner

FOUND_BY = "GPULEASE_FOUND_BY"
"""`pid:start_ticks` of the process that found the devices of GPULEASE_LEASE_ID, for the ranks that it launches."""
LEASE = "GPULEASE_LEASE_ID"
TOKEN = "GPULEASE_LEASE_TOKEN"  # noqa: S105 - no secret
WAIT = "GPULEASE_WAIT_S"
"""How long to wait for GPUs unless the caller says, in seconds."""
TTL_S = 60.0
"""How soon the GPUs are free again if this process dies where the daemon cannot see it."""
COMMON_KEYS = 8
"""Leases that the ranks of one launcher may come to, one after the other ended."""
NAMED = 8
"""GPUs of which a refusal says who is in the way."""

_finds = Finds()


def find_usable_cuda_devices(
    num_devices: int = -1,
    *,
    wait_s: float | None = None,
    min_free_memory_bytes: int | None = None,
    gpu_model: str | None = None,
    label: str = "",
    reuse: bool = True,
    set_visible: bool = False,
    client: Client | None = None,
) -> list[int]:
    """CUDA ordinals of `num_devices` usable GPUs, which stay reserved until this process ends.

    Takes the place of `lightning.fabric.accelerators.find_usable_cuda_devices`, with its results and messages: -1 finds
    every GPU that is usable now, and `[]` if none is. Only GPUs that this process can see are looked at.

    `wait_s` waits in the queue for so long (default: GPULEASE_WAIT_S, else 0). `min_free_memory_bytes` and `gpu_model`
    (a part of the product name) narrow the choice; `label` is shown to whoever waits. With `reuse` a second call gives
    what the first has found, also in the ranks of one training; without, every call reserves further GPUs. With
    `set_visible` CUDA_VISIBLE_DEVICES is narrowed to the reserved GPUs, whose ordinals then are 0, 1, 2 and so on; that
    must come before CUDA is used.

    Raises TypeError unless `num_devices` is an integer; ValueError when there are no, or not so many, visible GPUs;
    NotNow (a RuntimeError that names who is in the way) when too few are usable; InUse (another) when an earlier call
    has found something else; UnknownOrdinals (another) when it cannot be told which GPUs CUDA's numbers mean, see
    docs/ordinals.md; MaskLatched (another) when it is too late for `set_visible`; DaemonUnavailable (another) when no
    daemon answers.
    """
    wanted = _integer(num_devices)
    if wanted == 0:
        return []
    client = client or Client()
    wishes = Wishes(min_free_memory_bytes, gpu_model, set_visible)
    wait_s = _default_wait_s() if wait_s is None else wait_s
    if not reuse:
        return _reserve(wanted, wishes, wait_s, label, client, _visible(wanted, wishes, client), shared=False)
    with _finds.one_at_a_time(wait_s):
        finds = [find for find in _finds.living() if find.held.mine or _active(client, find.held.id)]
        if finds:
            return again(wanted, wishes, finds)
        visible = _visible(wanted, wishes, client)
        if (kept := _kept_over_execve(client)) is not None:
            _keep(kept, wishes, visible)
            return again(wanted, wishes, _finds.living())
        given = _given(wanted, wishes, client, visible)
        return given or _reserve(wanted, wishes, wait_s, label, client, visible, shared=True)


def reserved_leases() -> tuple[HeldLease, ...]:
    """The leases that `find_usable_cuda_devices` has taken in this process and that are neither released nor lost.

    Release them to give the GPUs back before the process ends, for instance in a notebook.
    """
    return tuple(find.held for find in _finds.living() if find.held.mine)


def _integer(num_devices: object) -> int:
    try:
        return operator.index(num_devices)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"num_devices must be an integer, not {num_devices!r}") from None


def _visible(num_devices: int, wishes: Wishes, client: Client) -> Visible:
    """What CUDA shows this process. Raises ValueError if there can never be so many, MaskLatched if it is too late."""
    if wishes.set_visible:
        check_narrow()
    gpus = client.gpus()
    here = _node_of_this_host(client, {gpu.node for gpu in gpus})
    in_pci_order = sorted((gpu for gpu in gpus if here and gpu.node == here.name), key=lambda gpu: gpu.index)
    visible = visible_gpus(in_pci_order, simulated=here is None or here.simulated)
    _check(num_devices, visible.gpus)
    return visible


def _active(client: Client, lease_id: str) -> Lease | None:
    """The lease, if it is active."""
    try:
        lease = client.lease_by_id(lease_id)
    except NotFound:
        return None
    return lease if lease.state is LeaseState.ACTIVE else None


def _over(client: Client, lease_id: str) -> bool:
    """True if the lease has ended."""
    try:
        return client.lease_by_id(lease_id).state is LeaseState.ENDED
    except NotFound:
        return False


def _given(num_devices: int, wishes: Wishes, client: Client, visible: Visible) -> list[int] | None:
    """The devices of a lease that this process was started under; None if there is none."""
    lease_id = os.environ.get(LEASE)
    lease = _active(client, lease_id) if lease_id else None
    if lease is None:
        return None
    theirs = {gpu.uuid for gpu in lease.gpus} & {gpu.uuid for gpu in visible.gpus}
    bound = MASK in os.environ and len(theirs) == len(visible.gpus)
    if not theirs or not (bound or _launched_by_finder()):
        return None
    ordinals = visible.ordinals(theirs)
    if num_devices > len(ordinals):
        raise InUse(
            f"The process that launched this one reserves the devices {ordinals}, and {num_devices} are asked for.",
            remedy="Ask for the same number there, or pass reuse=False to reserve further devices.",
        )
    chosen = ordinals if num_devices == -1 else ordinals[:num_devices]
    return _settled(visible, {gpu.uuid for ordinal in chosen if (gpu := visible.devices[ordinal])}, wishes)


def _finder() -> Owner | None:
    """The process that found the devices of GPULEASE_LEASE_ID."""
    found_by = re.fullmatch(r"([0-9]+):([0-9]+)", os.environ.get(FOUND_BY, ""))
    return Owner(*map(int, found_by.groups())) if found_by else None


def _launched_by_finder() -> bool:
    finder = _finder()
    return finder is not None and ranks.is_rank() and ranks.descends_from(finder)


def _kept_over_execve(client: Client) -> HeldLease | None:
    """The lease that this very process took before it replaced its program, renewed by this one from now on."""
    if _finds.any_yet or _finder() != Owner.this_process() or ranks.launcher() is not None:
        return None  # ranks find theirs by its key
    lease, token = _active(client, os.environ.get(LEASE, "")), os.environ.get(TOKEN, "")
    if lease is None or token != str(lease.token):
        return None
    sent_at = time.monotonic()
    try:
        return HeldLease(client, client.renew(lease.id, lease.token), trusted_from=sent_at)
    except (LeaseLost, NotFound, StaleToken):
        return None


def _reserve(
    num_devices: int, wishes: Wishes, wait_s: float, label: str, client: Client, visible: Visible, *, shared: bool
) -> list[int]:
    """Take a lease, one with the other ranks if `shared` and this process is a rank of a launcher."""
    request: dict[str, Any] = {
        "count": None if num_devices == -1 else num_devices,
        "devices": "auto" if num_devices == -1 else None,
        "ttl_s": TTL_S,
        "label": label,
        "min_free_memory_bytes": wishes.min_free_memory_bytes,
        "gpu_model": wishes.gpu_model,
        "node": visible.gpus[0].node,
        # Sorted, because ranks that count differently ask for the same.
        "among": sorted(gpu.uuid for gpu in visible.gpus),
    }
    launched_by = ranks.launcher() if shared else None
    try:
        if launched_by is None:
            held = client.lease(**request, wait_s=wait_s)
        else:
            held = _lease_with_others(client, launched_by, request, wait_s)
    except NotNow as error:
        if num_devices == -1:
            return []
        raise _too_few(num_devices, visible, error) from error
    return _keep(held, wishes, visible, shared=launched_by is not None)


def _lease_with_others(client: Client, launched_by: Owner, request: dict[str, Any], wait_s: float) -> HeldLease:
    """The one lease of all ranks of a launcher. One that has ended is followed by another, the same for all of them.

    Raises InUse if other ranks have asked for something else: each would go on with GPUs of its own.
    """
    until_s = time.monotonic() + wait_s
    for round_ in range(COMMON_KEYS):
        key = ranks.shared_key(launched_by, round_)
        left_s = max(0.001, until_s - time.monotonic()) if wait_s > 0 else 0.0
        try:
            return client.lease(**request, wait_s=left_s, owner=launched_by, shared_key=key)
        except (LeaseLost, NotFound):
            continue
        except IdempotencyMismatch as error:
            if _over(client, str(error.extra.get("made", ""))):
                continue
            raise InUse(
                f"Another rank that process {launched_by.pid} has launched asked for other GPUs, or with another label"
                " or wait, and all ranks of a training share one lease.",
                remedy="Ask for the same in every rank, or pass reuse=False for further devices.",
            ) from error
    raise LeaseLost(
        f"The ranks that process {launched_by.pid} has launched have lost {COMMON_KEYS} leases, one after the other.",
        remedy="Start the training again; `gpulease leases` says why they ended.",
    )


def _node_of_this_host(client: Client, names: set[str]) -> Node | None:
    host = socket.gethostname()
    here = {node.name: node for node in client.nodes() if node.host == host and node.name in names}
    return here[host if host in here else min(here)] if here else None


def _check(num_devices: int, visible: Sequence[Gpu]) -> None:
    if not visible:
        raise ValueError(
            f"You requested to find {num_devices} devices but there are no visible CUDA devices on this machine."
        )
    if num_devices > len(visible):
        raise ValueError(f"You requested to find {num_devices} devices but this machine only has {len(visible)} GPUs.")
    if num_devices < -1:
        raise ValueError(f"num_devices must be -1 for every usable device, or 0 or more, not {num_devices}")


def _too_few(num_devices: int, visible: Visible, error: NotNow) -> NotNow:
    obstacles = (error.extra.get("explanation") or {}).get("obstacles", ())
    in_the_way = {obstacle["uuid"]: obstacle.get("sentence", "") for obstacle in obstacles}
    shown = [(ordinal, gpu.uuid) for ordinal, gpu in enumerate(visible.devices) if gpu is not None]
    occupied = {ordinal: in_the_way[uuid] for ordinal, uuid in shown if uuid in in_the_way}
    why = " ".join(f"Device {ordinal}: {sentence}" for ordinal, sentence in list(occupied.items())[:NAMED] if sentence)
    return NotNow(
        f"You requested to find {num_devices} devices but only {len(shown) - len(occupied)} are currently available."
        f" The devices {list(occupied)} are occupied by other processes and can't be used at the moment.",
        remedy=f"{why} Set {WAIT} to wait for them.".strip(),
        extra=error.extra,
    )


def _settled(visible: Visible, uuids: set[str], wishes: Wishes) -> list[int]:
    """The ordinals of these GPUs for the rest of this process."""
    if not wishes.set_visible:
        return visible.settle(uuids)
    narrow([gpu.uuid for gpu in visible.gpus if gpu.uuid in uuids])
    return list(range(len(uuids)))


def _keep(held: HeldLease, wishes: Wishes, visible: Visible, *, shared: bool = False) -> list[int]:
    try:
        ordinals = _settled(visible, {gpu.uuid for gpu in held.gpus}, wishes)
    except BaseException:
        if shared:
            held.leave()  # the other ranks still use it
        else:
            held.release()
        raise
    if not reserved_leases():
        # For the ranks that this process will launch. Of several leases the first counts: they share one environment.
        owner = Owner.this_process()
        os.environ[LEASE], os.environ[TOKEN] = held.id, str(held.token)
        os.environ[FOUND_BY] = f"{owner.pid}:{owner.start_ticks}"
    _finds.add(Find(held, tuple(ordinals), wishes, visible, settings()))
    return ordinals


def _default_wait_s() -> float:
    text = os.environ.get(WAIT) or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidRequest(f"{WAIT}: {text!r} is not a time.", remedy="Give a number of seconds, 0 or more.")
    return seconds
