"""Why a request waits, from the facts that `settle` went by."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from gpulease.explanation import Explanation, Obstacle
from gpulease.model import (
    Demand,
    GpuReading,
    GpuState,
    JobState,
    LeaseState,
    NodeMode,
    Selection,
)

from .array import at_limit, under_way
from .bypass import Claims, claims_before, nodes_to_hold
from .gpu import is_cordoned, mode_of, node_problem, occupants, reading_of, state_of, strangers
from .ledger import GpuRecord, Instant, LeaseRecord, Ledger
from .modes import mode_notes
from .never import why_never
from .placement import NeedsReading, candidates, lacks_memory, least, mismatch, place
from .quota import had
from .remains import left_words, named
from .turn import Policy

NEVER = {
    "other_node": "is on another node than was asked for",
    "not_listed": "is not among the GPUs that were asked for",
    "other_model": "is of another model",
    "too_little_memory": "has too little memory",
}

SLOW_S = 0.5
"""A reading that takes longer is worth a word to whoever waits for it."""
_MODES = {NodeMode.DRAINING: "drains", NodeMode.PAUSED: "has paused", NodeMode.ACTIVE: "uses"}


def is_never(ledger: Ledger, demand: Demand) -> bool:
    """True when no known node has such GPUs. While no GPU is known at all, nobody can say never."""
    return bool(ledger.gpus) and not candidates(ledger, demand)


def explain(
    ledger: Ledger,
    record: LeaseRecord,
    now: Instant,
    policy: Policy,
    *,
    claims: Claims | None = None,
    stays: bool = True,
) -> Explanation:
    """The answer to "why does this wait", or to "why did it end".

    `claims`: what is kept for elders, where that is known already; `stays` is false for a request that is refused.
    """
    lease = record.lease
    if lease.state is LeaseState.ENDED:
        return Explanation(verdict="ended", sentence=f"The lease has ended: {lease.end_reason}.")
    if lease.state is LeaseState.ACTIVE:
        notes = mode_notes(ledger, ledger.held_by(lease))
        granted = f"Granted: {describe([gpu.index for gpu in lease.gpus])}.{notes}"
        return Explanation(verdict="granted", sentence=granted)
    limit = _limit_met(ledger, record, policy)
    if limit is not None:
        position = ledger.position(record) if stays else None
        queued = f"; number {position} in the queue" if stays else ""
        return Explanation(verdict="not_now", sentence=f"Not now: {limit}{queued}.", position=position)
    claims = claims_before(ledger, record, now, policy) if claims is None else claims
    held = claims.held_for(record)
    elders = {uuid: lease_id for uuid, lease_id in claims.by_uuid.items() if lease_id != lease.id}
    placed = place(ledger, lease.demand, elders.keys(), now, policy)
    unread = {gpu.device.uuid for gpu in placed.gpus} if isinstance(placed, NeedsReading) else set()
    found = (obstacle(ledger, lease.demand, gpu, elders, unread, now, policy) for gpu in ledger.gpus.values())
    obstacles = tuple(sorted((item for item in found if item), key=lambda item: (item.node, item.index)))
    position = ledger.position(record) if stays else None
    queued = f"; number {position} in the queue" if stays else ""
    asked = asked_for(lease.demand)
    if is_never(ledger, lease.demand):
        sentence = f"Never: asked for {asked}. {why_never(ledger, lease.demand)} {size_of(ledger)}"
        return Explanation(verdict="never", sentence=sentence, position=position, obstacles=obstacles)
    # By the GPU and not by the code: too little memory may be a matter of now or of ever.
    in_the_way = [item for item in obstacles if mismatch(lease.demand, ledger.gpus[item.uuid]) is None]
    details = " ".join(item.sentence for item in in_the_way[:16]) or "No node has reported its GPUs yet."
    notes = mode_notes(ledger, (gpu for gpu in ledger.gpus.values() if mismatch(lease.demand, gpu) is None))
    times, since_s = ledger.passed.get(lease.id, (0, now.mono_s))
    passed = passed_words(ledger, times, now.mono_s - since_s, held, policy) if stays else ""
    sentence = f"Not now: asked for {asked}{queued}.{passed} {details}{notes}"
    return Explanation(
        verdict="not_now",
        sentence=sentence,
        position=position,
        passed=times if stays else None,
        passed_s=now.mono_s - since_s if times and stays else None,
        held=held,
        behind=tuple(dict.fromkeys(item.lease_id for item in obstacles if item.code == "claimed" and item.lease_id)),
        obstacles=obstacles,
    )


def _limit_met(ledger: Ledger, record: LeaseRecord, policy: Policy) -> str | None:
    """The limit, of its array or of its user, that keeps a request out of the queue, in words."""
    limited = at_limit(ledger, record, under_way(ledger))
    if limited is not None:
        return f"array {limited.array_id} has as many jobs running as it may at once, {limited.array_at_most}"
    if is_never(ledger, record.lease.demand):
        return None
    return had(ledger, policy.limits).limit_met(record.lease, least(ledger, record.lease.demand))


def passed_words(ledger: Ledger, times: int, for_s: float, held: tuple[str, ...], policy: Policy) -> str:
    """How often younger requests went first, and what is held for the elder now; empty when neither is so."""
    went = f" Younger requests have passed it {_times(times)}, the first {for_s:.0f} s ago." if times else ""
    if held:
        indices: dict[str, list[int]] = {}
        for gpu in (ledger.gpus[uuid].device for uuid in held):
            indices.setdefault(gpu.node, []).append(gpu.index)
        places = ", ".join(f"{describe(sorted(found))} of {node}" for node, found in sorted(indices.items()))
        return f"{went} Held for it: {places}."
    if times and not nodes_to_hold(times, for_s, policy):
        return f"{went} After {_times(policy.max_bypass)} or {policy.max_bypass_s:g} s GPUs are held for it."
    return went


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def obstacle(
    ledger: Ledger,
    demand: Demand,
    gpu: GpuRecord,
    elders: dict[str, str],
    unread: set[str],
    now: Instant,
    policy: Policy,
) -> Obstacle | None:
    """Why this GPU is not granted to this demand; None when nothing is wrong with it and there are just too few such.

    `elders`: the lease that a GPU is held for, by UUID; `unread`: the GPUs that only a fresh reading is missing of.
    """
    name = f"GPU {gpu.device.index} of {gpu.device.node}"
    code = mismatch(demand, gpu)
    if code is not None:
        unknown = code == "too_little_memory" and gpu.device.memory_total_bytes is None
        return _obstacle(gpu, code, f"{name} {'does not tell how much memory it has' if unknown else NEVER[code]}.")
    state = state_of(ledger, gpu, now, policy)
    if state is not GpuState.FREE:
        until = _until(ledger, gpu, now) if state is GpuState.LEASED else None
        why = why_not_free(ledger, gpu, state, now, policy)
        found = _held_or_worse(ledger, gpu, state, f"{name} {why}{_afterwards(ledger, gpu, until)}.")
        return replace(found, until=until)
    if lacks_memory(ledger, demand, gpu):
        reading = reading_of(ledger, gpu)
        unknown = reading is None or reading.memory_used_bytes is None or reading.memory_total_bytes is None
        why = "does not tell how much of its memory is free" if unknown else "has too little free memory"
        return _obstacle(gpu, "too_little_memory", f"{name} {why}.")
    elder = elders.get(gpu.device.uuid)
    if elder is not None:
        found = _obstacle(gpu, "claimed", f"{name} {why_kept(ledger, elder, 'the earlier ')}.")
        return replace(found, lease_id=elder, holder=ledger.leases[elder].lease.holder)
    if gpu.device.uuid in unread:
        return _obstacle(gpu, "unread", f"{name} looked free, and {_awaited(ledger, gpu)}.")
    return None


def _awaited(ledger: Ledger, gpu: GpuRecord) -> str:
    """That a fresh reading of a GPU is awaited, and whether that takes its node too long."""
    sighting = ledger.sightings.get(gpu.device.node)
    read_s = None if sighting is None else sighting.read_s
    if sighting is None or read_s is None or read_s <= SLOW_S:
        return "a fresh reading of it is awaited"
    takes = f"a fresh reading of it is awaited; the last one took its node {read_s:.1f} s"
    if read_s <= sighting.reading_limit_s:
        return takes
    return f"{takes}, too long to grant on: at most {sighting.reading_limit_s:g} s count (worker --probe-deadline-s)"


def why_not_free(ledger: Ledger, gpu: GpuRecord, state: GpuState, now: Instant, policy: Policy) -> str | None:
    """The end of a sentence that begins with the GPU; None when it is free."""
    reading = reading_of(ledger, gpu)
    who = _who(ledger, gpu.lease_id)
    match state:
        case GpuState.UNKNOWN:
            problem = node_problem(ledger, gpu.device.node, now, policy)
            return f"is unknown: {problem or 'its node shows it no more'}"
        case GpuState.UNHEALTHY:
            return f"is unhealthy: {reading.health if reading else 'lost'}"
        case GpuState.PROHIBITED:
            return "is in compute mode PROHIBITED: nvidia-smi -c DEFAULT allows processes again"
        case GpuState.LEASED:
            others = named(strangers(ledger, gpu)[:4], policy)
            used = f", and used outside that lease by {others}" if others else ""
            return f"is held by {who}{_stopping(ledger, gpu.lease_id)}{used}"
        case GpuState.DRAINING:
            return f"is being cleaned of {who}{left_words(ledger, gpu, policy)}"
        case GpuState.CORDONED:
            if gpu.cordoned:
                return "is cordoned by an administrator"
            return f"is on node {gpu.device.node}, which an administrator {_MODES[mode_of(ledger, gpu.device.node)]}"
        case GpuState.FOREIGN if reading and not occupants(reading):
            return (
                "is used, by its memory or utilization, by processes that its worker cannot see; start the worker in"
                " the host's PID namespace (docker run --pid=host); docs/operations.md says more, also of WSL2"
            )
        case GpuState.FOREIGN:
            return f"is used outside any lease by {_processes(reading, policy)}"
        case _:
            return None


def why_kept(ledger: Ledger, lease_id: str, which: str = "") -> str:
    """The end of a sentence that begins with a free GPU: the request it is held for."""
    return f"is held for {which}{_who(ledger, lease_id)}"


def _until(ledger: Ledger, gpu: GpuRecord, now: Instant) -> datetime | None:
    """When the lease that holds the GPU ends unless it is renewed; None where no time limit runs."""
    deadline_s = ledger.deadlines.get(gpu.lease_id or "")
    return None if deadline_s is None else now.at + timedelta(seconds=deadline_s - now.mono_s)


def _afterwards(ledger: Ledger, gpu: GpuRecord, until: datetime | None) -> str:
    """What becomes of a GPU that somebody has."""
    ends = f" until {until:%Y-%m-%d %H:%M:%S} UTC unless it is renewed" if until is not None else ""
    held = gpu.lease_id is not None and is_cordoned(ledger, gpu)
    return f"{ends}, and is cordoned after that" if held else ends


def asked_for(demand: Demand) -> str:
    """A demand in words."""
    if demand.selection is Selection.ALL:
        what = "every GPU of a node"
    elif demand.selection is Selection.LISTED:
        what = "GPU " + ", ".join([*map(str, demand.indices), *demand.uuids])
    else:
        what = f"{'at least ' if demand.selection is Selection.AUTO else ''}{_gpus(demand.count)}"
    limits = [
        f"of model {demand.gpu_model}" if demand.gpu_model is not None else "",
        f"with {demand.min_free_memory_bytes / 2**30:.1f} GiB free" if demand.min_free_memory_bytes else "",
        f"on node {demand.node}" if demand.node is not None else "",
        f"among {len(demand.among)} named ones" if demand.among is not None else "",
    ]
    return " ".join([what, *filter(None, limits)])


def size_of(ledger: Ledger) -> str:
    """How many GPUs each node has, in words."""
    counts: dict[str, int] = {}
    for gpu in ledger.gpus.values():
        counts[gpu.device.node] = counts.get(gpu.device.node, 0) + 1
    return " ".join(f"Node {node} has {_gpus(count)}." for node, count in sorted(counts.items()))


def describe(indices: list[int]) -> str:
    """GPU indices in words."""
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _who(ledger: Ledger, lease_id: str | None) -> str:
    record = ledger.leases.get(lease_id or "")
    if record is None:
        return lease_id or "nobody"
    holder = record.lease.holder
    parts = [
        f"user {holder.user}" if holder.user else "",
        f"pid {holder.owner_pid}" if holder.owner_pid else "",
        f"job {record.lease.job_id}" if record.lease.job_id else "",
        f'"{holder.label}"' if holder.label else "",
    ]
    known = ", ".join(filter(None, parts))
    return f"{lease_id}{f' ({known})' if known else ''}"


def _stopping(ledger: Ledger, lease_id: str | None) -> str:
    """That the job of a lease stops, and what keeps it; empty where it does not."""
    record = ledger.leases.get(lease_id or "")
    known = ledger.jobs.get(record.lease.job_id or "") if record is not None else None
    if known is None or known.job.state is not JobState.STOPPING:
        return ""
    return f", whose job stops: {(known.job.reason or 'nobody says why').rstrip('.')}"


def _processes(reading: GpuReading | None, policy: Policy) -> str:
    if reading is None:
        return ""
    return named(occupants(reading)[:4], policy)


def _held_or_worse(ledger: Ledger, gpu: GpuRecord, state: GpuState, sentence: str) -> Obstacle:
    reading = reading_of(ledger, gpu)
    holder = ledger.leases[gpu.lease_id].lease.holder if gpu.lease_id in ledger.leases else None
    pids = tuple(process.pid for process in occupants(reading)) if reading else ()
    return replace(_obstacle(gpu, state.value, sentence), lease_id=gpu.lease_id, holder=holder, pids=pids)


def _obstacle(gpu: GpuRecord, code: str, sentence: str) -> Obstacle:
    return Obstacle(uuid=gpu.device.uuid, node=gpu.device.node, index=gpu.device.index, code=code, sentence=sentence)
