"""Why one GPU is not granted to one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from gpulease_protocol.durations import LONGEST_S
from gpulease_protocol.explanation import Obstacle
from gpulease_protocol.model import Demand, GpuState, Lease, Liveness
from gpulease_server.core.declared_ends import spec_of_attempt
from gpulease_server.core.explain.gpu_reasons import on_node_out_of_use, why_not_free, why_reserved
from gpulease_server.core.gpu import ends_too_soon, is_cordoned, observed_at, reading_of, state_of
from gpulease_server.core.gpu_state import occupants
from gpulease_server.core.kept_leases import describe_kept, kept_now
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import find_candidates, grant_size, lacks_memory, mismatch
from gpulease_server.core.policy import Policy
from gpulease_server.core.reclaim_rule import describe_reclaim
from gpulease_server.core.records import GpuRecord, Instant, LeaseRecord
from gpulease_server.core.timestamps import wall_clock
from gpulease_server.core.token_budgets import last_moment_s
from gpulease_server.core.wording import count_gpus, duration

MISMATCHES = {
    "other_node": "is not on the requested node",
    "not_listed": "is not one of the requested GPUs",
    "other_model": "is of another model",
    "too_little_memory": "has too little memory",
}
MAX_LISTED = 256
"""GPUs that an explanation goes into: each takes some 15 us, and 10,000 took as long as hundreds of grants."""
SLOW_S = 0.5
"""A reading that takes longer is mentioned to users who wait for it."""


def listed_gpus(ledger: Ledger, demand: Demand) -> Mapping[str, GpuRecord]:
    """The GPUs that an explanation goes into, by UUID: all of them, or, where these are over `MAX_LISTED`, those of
    whole nodes by name, of nodes that could serve the demand first; of these, for a gang, those that are all free last,
    because they alone may be more."""
    if len(ledger.gpus) <= MAX_LISTED:
        return ledger.gpus
    could, found = find_candidates(ledger, demand).by_node, dict[str, GpuRecord]()
    free, of_node = ledger.fleet.free, ledger.fleet.gpus_of_node
    all_free = {node for node in could if demand.nodes > 1 and len(free.get(node, ())) == len(of_node[node])}
    for node in [*sorted(could.keys() - all_free), *sorted(all_free), *sorted(of_node)]:
        more = {uuid: ledger.gpus[uuid] for uuid in could.get(node, ()) or of_node[node]}
        if found and len(found | more) > MAX_LISTED:
            break
        found |= more
    return found


def obstacle(
    ledger: Ledger,
    demand: Demand,
    gpu: GpuRecord,
    reserved_for: dict[str, str],
    unread: set[str],
    now: Instant,
    policy: Policy,
) -> Obstacle | None:
    """Why this GPU is not granted to this demand; None when nothing is wrong with it, and there are too few.

    `reserved_for`: the lease that a GPU is held for, by UUID; `unread`: GPUs that lack only a recent reading.
    """
    name = f"GPU {gpu.device.index} of {gpu.device.node}"
    code = mismatch(demand, gpu)
    if code is not None:
        unknown = code == "too_little_memory" and gpu.device.memory_total_bytes is None
        return _obstacle(
            gpu, code, f"{name} {'does not report how much memory it has' if unknown else MISMATCHES[code]}."
        )
    if ends_too_soon(ledger, demand, gpu.device.node, now):  # it waits for no holder there
        return _obstacle(gpu, "ends_too_soon", _why_too_soon(ledger, demand, gpu.device.node, now))
    state = state_of(ledger, gpu, now, policy)
    if state is not GpuState.FREE:
        why = why_not_free(ledger, gpu, state, now, policy)
        if state is not GpuState.LEASED or gpu.lease_id not in ledger.leases:
            return _held_or_worse(ledger, gpu, state, f"{name} is {why}{_cordoned_later(ledger, gpu)}.")
        record, cordoned = ledger.leases[gpu.lease_id], _cordoned_later(ledger, gpu)
        lease, (until, ends) = record.lease, _end(ledger, record, now)
        idle = describe_kept(record, now) or describe_reclaim(ledger, lease.id, now)
        sentence = f"{name} is {why}{ends}{cordoned}{idle}".rstrip(".")
        more = {"since": lease.granted_at, "until": until, "job_id": lease.job_id, "kept": kept_now(record, now)}
        return _held_or_worse(ledger, gpu, state, f"{sentence}.", **more)
    if lacks_memory(ledger, demand, gpu):
        reading = reading_of(ledger, gpu)
        unknown = reading is None or reading.memory_used_bytes is None or reading.memory_total_bytes is None
        why = "does not report how much of its memory is free" if unknown else "has too little free memory"
        return _obstacle(gpu, "too_little_memory", f"{name} {why}.")
    older_lease = reserved_for.get(gpu.device.uuid)
    if older_lease is not None:
        holder, why = ledger.leases[older_lease].lease.holder, why_reserved(ledger, older_lease, "the earlier ")
        return _obstacle(gpu, "claimed", f"{name} is {why}.", lease_id=older_lease, holder=holder)
    if gpu.device.uuid in unread:
        return _obstacle(gpu, "unread", f"{name} looked free, but {_awaited(ledger, gpu, policy)}.")
    return None


def limit_obstacles(
    ledger: Ledger, lease: Lease, most_gpus: int | None, listed: Mapping[str, GpuRecord]
) -> dict[str, Obstacle]:
    """By UUID, those GPUs of nodes on which the lease would take more GPUs than its user's limit leaves."""
    if most_gpus is None:
        return {}
    could, found = find_candidates(ledger, lease.demand).by_node, dict[str, Obstacle]()
    for node in dict.fromkeys(gpu.device.node for gpu in listed.values()):
        uuids = could.get(node, ())
        if not uuids or grant_size(lease.demand, uuids) <= most_gpus:
            continue
        user, takes = lease.holder.user, _taken(lease.demand, node, uuids)
        said = f"{takes}, and user {user} may have {most_gpus} more{_with_token(lease)}."
        found |= {uuid: _obstacle(listed[uuid], "over_limit", said) for uuid in uuids if uuid in listed}
    return found


def _why_too_soon(ledger: Ledger, demand: Demand, node: str, now: Instant) -> str:
    until_s = ledger.node_observations[node].available_until_s or 0.0
    until, left_s = now.at + timedelta(seconds=until_s - now.mono_s), max(0.0, until_s - now.mono_s)
    return (
        f"Node {node} goes at {until:%Y-%m-%d %H:%M:%S} UTC, in {duration(left_s)}, and this may take"
        f" {duration(demand.time_s or 0.0)}."
    )


def _taken(demand: Demand, node: str, uuids: Sequence[str]) -> str:
    size = count_gpus(grant_size(demand, uuids))
    return f"Node {node} has {size} for it" if demand.nodes == 1 else f"The request takes {size}"


def _with_token(lease: Lease) -> str:
    return "" if lease.holder.token_id is None else f" with token {lease.holder.token_id}"


def _awaited(ledger: Ledger, gpu: GpuRecord, policy: Policy) -> str:
    """That a recent reading of a GPU is awaited, and whether its node, or the way to it, takes too long for one."""
    observation = ledger.node_observations.get(gpu.device.node)
    read_s = None if observation is None else observation.read_s
    at_s = observed_at(observation, gpu.device.uuid)
    if (
        observation is not None
        and at_s is not None
        and observation.answers_request
        and observation.reported_at_s - at_s > (policy.max_observation_age_s + (read_s or 0.0))
    ):
        old_s, took = observation.reported_at_s - at_s, f", of which its node read for {read_s:.1f} s" if read_s else ""
        limit = f"{policy.max_observation_age_s:g} s on the way (serve --max-observation-age-s)"
        return f"a recent reading is still awaited; the last one arrived {old_s:.1f} s old{took}, and may be {limit}"
    if observation is None or read_s is None or read_s <= SLOW_S:
        return "a recent reading is still awaited"
    takes = f"a recent reading is still awaited; the last one took its node {read_s:.1f} s"
    if read_s <= observation.reading_limit_s:
        return takes
    limit = f"{observation.reading_limit_s:g} s"
    return f"{takes}, more than the {limit} that count for a grant (worker --probe-deadline-s)"


def _end(ledger: Ledger, record: LeaseRecord, now: Instant) -> tuple[datetime | None, str]:
    """When a lease ends, None without a time limit; and the same in words, empty where the holder says enough: one
    with a watched process is renewed for as long as that lives, and its time lasts."""
    lease, last_s = record.lease, last_moment_s(ledger, record, now)
    last = None if last_s is None else wall_clock(now, last_s)
    job = ledger.live_jobs.get(lease.job_id or "")
    left_s = None if job is None else spec_of_attempt(job, lease).timeout_s
    if job is not None and left_s is not None and job.job.started_at is not None:
        # Releases before this one let a job last longer than a calendar reaches.
        over = job.job.started_at + timedelta(seconds=min(left_s, LONGEST_S))
        last = over if last is None else min(last, over)
    deadline_s = ledger.deadlines.get(lease.id)
    until = None if deadline_s is None else wall_clock(now, deadline_s)
    is_watched = lease.liveness is Liveness.PROCESS
    if last is not None and (until is None or last <= until or is_watched):
        return last, f" until {last:%Y-%m-%d %H:%M:%S} UTC at the latest"
    if until is None or is_watched:
        return until, ""
    return until, f" until {until:%Y-%m-%d %H:%M:%S} UTC unless it is renewed"


def _cordoned_later(ledger: Ledger, gpu: GpuRecord) -> str:
    """Why a GPU cannot be had after its lease either; empty where it can."""
    if gpu.lease_id is None or not is_cordoned(ledger, gpu):
        return ""
    return ", and cordoned after that" if gpu.cordoned else f", and {on_node_out_of_use(ledger, gpu.device.node)}"


def _held_or_worse(ledger: Ledger, gpu: GpuRecord, state: GpuState, sentence: str, **more: Any) -> Obstacle:
    reading = reading_of(ledger, gpu)
    holder = ledger.leases[gpu.lease_id].lease.holder if gpu.lease_id in ledger.leases else None
    pids = tuple(process.pid for process in occupants(reading)) if reading else ()
    return _obstacle(gpu, state.value, sentence, lease_id=gpu.lease_id, holder=holder, pids=pids, **more)


def _obstacle(gpu: GpuRecord, code: str, sentence: str, **more: Any) -> Obstacle:
    device = gpu.device
    return Obstacle(uuid=device.uuid, node=device.node, index=device.index, code=code, sentence=sentence, **more)
