"""Why a request waits, from the facts that `settle` went by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpulease_protocol.explanation import Explanation, Obstacle
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.core import dependencies
from gpulease_server.core.backfill import Reservations, nodes_to_reserve
from gpulease_server.core.eligibility import array_at_limit
from gpulease_server.core.explain.compute_modes import mode_notes
from gpulease_server.core.explain.connections import describe_connections, describe_unconnected
from gpulease_server.core.explain.declared_times import describe_run_ahead, describe_times
from gpulease_server.core.explain.gang_nodes import describe_readiness, node_readiness
from gpulease_server.core.explain.never_fits import describe_nodes, is_never, why_never
from gpulease_server.core.explain.obstacles import limit_obstacles, listed_gpus, obstacle
from gpulease_server.core.explain.order_reasons import describe_place, recent_usage
from gpulease_server.core.explain.preemptions import describe_preemption, describe_victim, preempted_for
from gpulease_server.core.explain.reserved_gpus import calendar_obstacles
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order import position as place_in_queue
from gpulease_server.core.place import place
from gpulease_server.core.placement import NeedsReading, min_gpus, mismatch
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord, Instant, LeaseRecord
from gpulease_server.core.reservation_view import reservations_before
from gpulease_server.core.user_order import UserOrder
from gpulease_server.core.wording import describe_demand, describe_gpus, describe_places

NONE_REPORTED = "No node has reported its GPUs yet."
JUST_FREE = "GPUs for it have just become free; they are granted when the queue is processed next."


def explain(
    ledger: Ledger,
    record: LeaseRecord,
    now: Instant,
    policy: Policy,
    *,
    reservations: Reservations | None = None,
    stays_queued: bool = True,
    start_known: bool = False,
) -> Explanation:
    """The answer to "why does this wait", or to "why did it end".

    `reservations`: what is kept for older requests, where that is known already; `stays_queued` is false for a request
    that is refused; `start_known`: it is told when the request is expected to start.
    """
    lease = record.lease
    if lease.state is LeaseState.ENDED:
        return Explanation(verdict="ended", sentence=f"The lease has ended: {str(lease.end_reason).replace('_', ' ')}.")
    if lease.state is LeaseState.ACTIVE:
        return _granted(ledger, record, policy)
    if unmet := dependencies.waits_for(ledger, record):
        sentence = f"Not now: {dependencies.describe(unmet)}; then it joins the queue."
        return Explanation(verdict="not_now", sentence=sentence, after=tuple(one.job for one in unmet))
    reservations = reservations_before(ledger, record, now, policy) if reservations is None else reservations
    if (limit := _limit_met(ledger, record, reservations, stays_queued=stays_queued)) is not None:
        return limit
    held = reservations.reserved_for(record)
    reserved_for_older = {uuid: lease_id for uuid, lease_id in reservations.by_uuid.items() if lease_id != lease.id}
    gpus_left, closed = reservations.users.gpus_left(lease), reservations.users.closed_to(lease)
    placed = place(ledger, lease.demand, reserved_for_older, now, policy, most_gpus=gpus_left, closed=closed)
    unread = {gpu.device.uuid for gpu in placed.gpus} if isinstance(placed, NeedsReading) else set()
    listed = listed_gpus(ledger, lease.demand)
    found = _in_the_way(reservations, lease, listed, reserved_for_older, unread)
    obstacles = tuple(sorted(found.values(), key=lambda item: (item.node, item.index)))
    nodes = node_readiness(ledger, lease.demand, reserved_for_older, unread, now, policy, closed)
    of_gpus: dict[str, Any] = {"obstacles": obstacles, "unlisted_gpus": len(ledger.gpus) - len(listed), "nodes": nodes}
    position = place_in_queue(ledger, record) if stays_queued else None
    usage = recent_usage(ledger, record, now, policy) if stays_queued else ()
    queued, asked = describe_place(ledger, record, usage) if stays_queued else "", describe_demand(lease.demand)
    if is_never(ledger, lease.demand):
        sentence = f"Never: asked for {asked}. {why_never(ledger, lease.demand)} {describe_nodes(ledger)}"
        return Explanation(verdict="never", sentence=sentence, position=position, **of_gpus)
    # Asks the GPU, not `item.code`: `too_little_memory` may be for now or for good.
    in_the_way = [item.sentence for item in obstacles if mismatch(lease.demand, ledger.gpus[item.uuid]) is None]
    unconnected = describe_unconnected(ledger, lease.demand, listed.keys() - found.keys())
    said = [unconnected, *list(dict.fromkeys(in_the_way))[:16]]
    details = " ".join(filter(None, said)) or (JUST_FREE if ledger.gpus else NONE_REPORTED)
    notes = mode_notes(ledger, (gpu for gpu in listed.values() if mismatch(lease.demand, gpu) is None))
    bypass_count, first_bypass_s = ledger.bypasses.get(lease.id, (0, now.mono_s))
    bypassed = describe_bypass(ledger, bypass_count, now.mono_s - first_bypass_s, held, policy)
    bypassed = bypassed + describe_times(reservations, record, position, start_known) if stays_queued else ""
    preempts = preempted_for(reservations, record)
    ready = describe_readiness(lease.demand, nodes) + describe_preemption(ledger, record, preempts)
    return Explanation(
        verdict="not_now",
        sentence=f"Not now: asked for {asked}{queued}.{bypassed}{ready} {details}{notes}",
        position=position,
        passed=bypass_count if stays_queued else None,
        passed_s=now.mono_s - first_bypass_s if bypass_count and stays_queued else None,
        held=held,
        preempts=preempts,
        recent_usage=usage,
        behind=tuple(dict.fromkeys(item.lease_id for item in obstacles if item.code == "claimed" and item.lease_id)),
        **of_gpus,
    )


def _in_the_way(
    reservations: Reservations,
    lease: Lease,
    listed: Mapping[str, GpuRecord],
    reserved_for_older: dict[str, str],
    unread: set[str],
) -> dict[str, Obstacle]:
    """By UUID, why those of the listed GPUs that cannot be granted to a request are not."""
    ledger, now, policy, users = reservations.ledger, reservations.now, reservations.policy, reservations.users
    each = (obstacle(ledger, lease.demand, gpu, reserved_for_older, unread, now, policy) for gpu in listed.values())
    found = {item.uuid: item for item in each if item is not None}
    reserved = calendar_obstacles(users, lease, ledger, users.closed_to(lease) & listed.keys(), found)
    return found | limit_obstacles(ledger, lease, users.gpus_left(lease), listed) | reserved


def _granted(ledger: Ledger, record: LeaseRecord, policy: Policy) -> Explanation:
    """The explanation for an active lease: which GPUs it has, and on which node where there are several."""
    lease, several = record.lease, len(ledger.fleet.gpus_of_node) > 1
    notes = mode_notes(ledger, ledger.held_by(lease)) + describe_victim(ledger, record, policy)
    named = describe_places(lease.gpus) if several else describe_gpus([gpu.index for gpu in lease.gpus])
    connected = describe_connections(ledger, lease.demand, lease.gpus) + describe_run_ahead(ledger, record)
    return Explanation(verdict="granted", sentence=f"Granted: {named}.{connected}{notes}")


def _limit_met(
    ledger: Ledger, record: LeaseRecord, reservations: Reservations, *, stays_queued: bool
) -> Explanation | None:
    """The explanation for a request that takes no part in the queue: it pauses before a retry, or its array or user is
    at a limit; None for any other."""
    lease, now = record.lease, reservations.now
    why, passes, whose = _pause_or_array_limit(ledger, record, now.mono_s), (0, now.mono_s), LimitKind.USER
    behind: tuple[str, ...] = ()
    if why is None and not is_never(ledger, lease.demand):
        users = reservations.users
        why = users.limit_reached(lease, min_gpus(ledger, lease.demand))
        within = ((kind, found.get(lease.id, passes)) for kind, found in ledger.limit_bypasses.items())
        whose, passes = max(within, key=lambda item: item[1][0])
        behind = users.kept_for(lease)
    if why is None:
        return None
    times, for_s = passes[0], now.mono_s - passes[1]
    position = place_in_queue(ledger, record) if stays_queued else None
    usage = recent_usage(ledger, record, now, reservations.policy) if stays_queued else ()
    queued = describe_place(ledger, record, usage) if stays_queued else ""
    claims = UserOrder(reservations).waits_for_leases(record)
    passed = describe_limit_bypass(whose, times, for_s, reservations.policy, claims=claims) if stays_queued else ""
    return Explanation(
        verdict="not_now",
        sentence=f"Not now: {why}{queued}.{passed}",
        position=position,
        passed=times if stays_queued else None,
        passed_s=for_s if times and stays_queued else None,
        behind=behind,
        recent_usage=usage,
    )


def _pause_or_array_limit(ledger: Ledger, record: LeaseRecord, now_s: float) -> str | None:
    pause_s = ledger.not_before.get(record.lease.id, now_s) - now_s
    if pause_s > 0:
        return f"job {record.lease.job_id} pauses for another {max(pause_s, 1):.0f} s before its next attempt"
    limited = array_at_limit(ledger, record)
    if limited is not None:
        return f"array {limited.array_id} runs as many jobs as it may at once ({limited.array_at_most})"
    return None


def describe_limit_bypass(whose: LimitKind, times: int, for_s: float, policy: Policy, *, claims: bool) -> str:
    """How many newer requests of the same user or group started first, and when no more may; empty where none did.
    `claims`: whether the request claims its limits after that, see `UserOrder.claim_if_due`."""
    if not times:
        return ""
    first = _started_first(times, for_s, f" of this {whose}")
    if not claims:
        return f" {first}"
    if nodes_to_reserve(times, for_s, policy):
        return f" {first} No more do, unless the limit has room for both."
    return f" {first} After {policy.max_bypass} such requests, or {policy.max_bypass_s:g} s, no more do."


def describe_bypass(ledger: Ledger, times: int, for_s: float, held: tuple[str, ...], policy: Policy) -> str:
    """How many newer requests started first, and what is held for this one now; empty when neither applies."""
    went = f" {_started_first(times, for_s)}" if times else ""
    if held:
        indices: dict[str, list[int]] = {}
        for gpu in (ledger.gpus[uuid].device for uuid in held):
            indices.setdefault(gpu.node, []).append(gpu.index)
        places = ", ".join(f"{describe_gpus(sorted(found))} of {node}" for node, found in sorted(indices.items()))
        return f"{went} Held for it: {places}."
    if times and not nodes_to_reserve(times, for_s, policy):
        return f"{went} After {policy.max_bypass} such requests, or {policy.max_bypass_s:g} s, GPUs are held for it."
    return went


def _started_first(times: int, for_s: float, whose: str = "") -> str:
    if times == 1:
        return f"1 newer request{whose} started first, {for_s:.0f} s ago."
    return f"{times} newer requests{whose} started first, the first of them {for_s:.0f} s ago."
