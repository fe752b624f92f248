"""What happened to each GPU in a period: leases, the times in which it could not be used, and the length of the queue.

All of it is read from the database in one snapshot, and compared with the ledger where events do not tell of an end. So
it is the same after a restart. What is pruned, or older than the ledger, is missing, and `complete_since` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from gpulease_protocol.codec import from_json
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Device, EndReason, NodeMode
from gpulease_protocol.timeline import MAX_STEPS, QueueStep, Span, SpanKind, Timeline, TimelineGpu
from gpulease_server.core.gpu import node_problem, reading_of
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant
from gpulease_server.runtime.gpu_bands import CurrentStates, Subject, gpu_bands
from gpulease_server.store import timeline as stored
from gpulease_server.store.dialects import snapshot
from gpulease_server.store.held_gpus import held_gpus
from gpulease_server.store.ledger_store import Store
from gpulease_server.store.timeline import KeptDevice, KeptLease, Scope, StateEvent

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SLOW_DRAIN = timedelta(seconds=1)
"""A drain that took less is left out: nearly all do."""


@dataclass(frozen=True, slots=True)
class Present:
    """What the ledger shows at the time of the answer."""

    gpus: Mapping[str, Device]
    """By UUID."""
    states: CurrentStates
    draining: tuple[Span, ...]


def copy_of(ledger: Ledger) -> Ledger:
    """What `look` needs of a ledger, as it is at this moment."""
    return Ledger(
        leases=ledger.leases.copy(),
        gpus=ledger.gpus.copy(),
        nodes=ledger.nodes.copy(),
        node_observations=ledger.node_observations.copy(),
    )


def look(ledger: Ledger, now: Instant, policy: Policy) -> Present:
    """What the ledger shows now."""
    problems = {node: node_problem(ledger, node, now, policy) for node in ledger.nodes}
    unknown: dict[Subject, str | None] = {Subject(node): why for node, why in problems.items() if why is not None}
    cordoned: dict[Subject, str | None] = {
        Subject(node.name): node.mode_reason for node in ledger.nodes.values() if node.mode is not NodeMode.ACTIVE
    }
    unhealthy: dict[Subject, str | None] = {}
    foreign: dict[Subject, str | None] = {}
    draining, of_node = [], dict[str, list[str]]()
    for uuid, gpu in ledger.gpus.items():
        node, subject = gpu.device.node, Subject(gpu.device.node, uuid)
        of_node.setdefault(node, []).append(uuid)
        if gpu.cordoned:
            cordoned[subject] = None
        if gpu.draining and gpu.lease_id is not None:
            record = ledger.leases.get(gpu.lease_id)
            from_at = None if record is None else record.lease.ended_at
            span = Span(kind=SpanKind.DRAINING, gpus=(uuid,), from_at=from_at, to_at=None, lease_id=gpu.lease_id)
            draining.append(span)
        reading, observation = reading_of(ledger, gpu), ledger.node_observations.get(node)
        if problems.get(node) is not None or observation is None or reading is None:
            continue
        if reading.health != "ok":
            unhealthy[subject] = reading.health
        watch = observation.gpus.get(uuid)
        if watch is not None and watch.foreign:
            foreign[subject] = None
    return Present(
        gpus={uuid: gpu.device for uuid, gpu in ledger.gpus.items()},
        states=CurrentStates(
            gpus_of_node=of_node,
            true_of={
                SpanKind.UNHEALTHY: unhealthy,
                SpanKind.CORDONED: cordoned,
                SpanKind.FOREIGN: foreign,
                SpanKind.UNKNOWN: unknown,
            },
            not_known=[subject.node for subject in unknown],
        ),
        draining=tuple(draining),
    )


def read_timeline(
    store: Store, scope: Scope, present: Present, limit: int, after: tuple[datetime, int] | None
) -> Timeline:
    """A page of the timeline. Blocks."""
    bands: list[Span] = []
    events: list[StateEvent] = []
    queue: tuple[QueueStep, ...] = ()
    with snapshot(store.engine) as connection:
        limits = list(stored.kept_since(connection))
        page, last = stored.leases(connection, scope, limit, after)
        if after is None:
            events, read_since = stored.state_events(connection)
            drains, drained_since = stored.drains(connection, scope, SLOW_DRAIN)
            waits, waited_since = stored.waits(connection, scope)
            limits += [moment for moment in (read_since, drained_since, waited_since) if moment is not None]
            bands = gpu_bands(events, present.states)
            bands += [
                Span(kind=SpanKind.DRAINING, gpus=one.gpus, from_at=one.from_at, to_at=one.to_at, lease_id=one.lease_id)
                for one in drains
            ]
            bands += present.draining
            queue = tuple(queue_steps(waits, scope.from_at, scope.to_at))
    spans = [span for kept in page for span in lease_spans(kept)] + bands
    known = _gpus_of(spans, present, page, events)
    spans = list(_within(spans, scope, known))
    named = {uuid for span in spans for uuid in span.gpus}
    gpus = [gpu for gpu in known.values() if (gpu.present or gpu.uuid in named) and _is_meant(gpu, scope)]
    complete_since = max((moment for moment in limits if moment > scope.from_at), default=None)
    return Timeline(
        from_at=scope.from_at,
        to_at=scope.to_at,
        complete_since=complete_since,
        gpus=tuple(sorted(gpus, key=lambda gpu: (gpu.node, gpu.index or 0, gpu.uuid))),
        spans=tuple(spans),
        queue=queue,
        next=None if last is None else write_cursor(*last),
    )


def _gpus_of(
    spans: Iterable[Span], present: Present, page: Iterable[KeptLease], events: Iterable[StateEvent]
) -> dict[str, TimelineGpu]:
    """By UUID, the GPUs that there are, and those that spans name."""
    known = {uuid: _gpu(device) for uuid, device in present.gpus.items()}
    devices = (device for kept in page for device in kept.gpus if device.uuid not in known)
    gone = {device.uuid: _gpu(device, present=False) for device in devices}
    told = [(one.node, one.gpus) for one in events] + [(one.node, one.uuids) for kept in page for one in kept.changes]
    node_of = {uuid: node for node, uuids in told for uuid in uuids}
    for uuid in (uuid for span in spans for uuid in span.gpus if uuid not in known):
        known[uuid] = gone.get(uuid) or TimelineGpu(uuid=uuid, node=node_of.get(uuid) or "", present=False)
    return known


def lease_spans(kept: KeptLease) -> Iterator[Span]:
    """The lease as one span; an elastic one as one for each set of GPUs that came and went together."""
    reason = None if kept.end_reason is None else from_json(EndReason, kept.end_reason)
    whole = Span(
        kind=SpanKind.LEASE,
        gpus=tuple(device.uuid for device in kept.gpus),
        from_at=kept.granted_at,
        to_at=None if kept.ended_at is None else max(kept.ended_at, kept.granted_at),
        lease_id=kept.id,
        job_id=kept.job_id,
        user=kept.user,
        label=kept.label,
        end_reason=reason,
    )
    if not kept.changes:
        yield whole
        return
    last: dict[str, list[str]] = {}
    for device in kept.gpus:
        last.setdefault(device.node, []).append(device.uuid)
    together: dict[tuple[datetime, datetime | None], list[str]] = {}
    for part in held_gpus(last, kept.granted_at, whole.to_at, kept.changes):
        to_at = part.to_at if part.to_at is None else max(part.to_at, part.from_at)
        together.setdefault((part.from_at, to_at), []).extend(part.uuids)
    for (from_at, to_at), uuids in together.items():
        ended = reason if to_at == whole.to_at else None
        yield replace(whole, gpus=tuple(uuids), from_at=from_at, to_at=to_at, end_reason=ended)


def queue_steps(
    waits: Iterable[tuple[datetime, datetime | None]], from_at: datetime, to_at: datetime
) -> list[QueueStep]:
    """How many waited, from the begin of the period on; at most `MAX_STEPS`. `waits`: from when until when."""
    changes: dict[datetime, int] = {from_at: 0}
    for made_at, end in waits:
        begin = max(made_at, from_at)
        if begin < to_at and (end is None or end > begin):
            changes[begin] = changes.get(begin, 0) + 1
            if end is not None and end < to_at:
                changes[end] = changes.get(end, 0) - 1
    length = 0
    steps: list[QueueStep] = []
    for at in sorted(changes):
        length += changes[at]
        if not steps or length != steps[-1].length:
            steps.append(QueueStep(at=at, length=length))
    return steps if len(steps) <= MAX_STEPS else list(_coarse(steps, from_at, (to_at - from_at) / (MAX_STEPS // 2)))


def _coarse(steps: Iterable[QueueStep], from_at: datetime, width: timedelta) -> Iterator[QueueStep]:
    """The steps with the greatest length of each part that has any, and where it ends the last one."""
    highest: dict[int, int] = {0: 0}
    length_after: dict[int, int] = {}
    length = 0
    for step in steps:
        place = (step.at - from_at) // width
        highest[place] = max(highest.get(place, length), step.length)
        length = length_after[place] = step.length
    told = -1
    for place, high in highest.items():
        for at, of in ((place, high), (place + 1, length_after[place])):
            if of != told and (at == place or at not in highest) and at < MAX_STEPS // 2:
                yield QueueStep(at=from_at + width * at, length=of)
                told = of


def _within(spans: Iterable[Span], scope: Scope, known: dict[str, TimelineGpu]) -> Iterator[Span]:
    """The spans that are meant, with those of their GPUs that are; GPUs that are not known yet are added."""
    narrow = scope.gpu is not None or scope.node is not None
    for span in spans:
        is_over = span.to_at is not None and span.to_at < scope.from_at
        if is_over or (span.from_at is not None and span.from_at >= scope.to_at):
            continue
        if not narrow:
            yield span
        elif uuids := tuple(uuid for uuid in span.gpus if uuid in known and _is_meant(known[uuid], scope)):
            yield replace(span, gpus=uuids)


def _is_meant(gpu: TimelineGpu, scope: Scope) -> bool:
    return scope.gpu in (None, gpu.uuid) and scope.node in (None, gpu.node)


def _gpu(device: Device | KeptDevice, *, present: bool = True) -> TimelineGpu:
    return TimelineGpu(
        uuid=device.uuid, node=device.node, index=device.index, name=device.name or None, present=present
    )


def write_cursor(ended_at: datetime, number: int) -> str:
    """Where the next page begins."""
    return f"{(ended_at - EPOCH) // timedelta(microseconds=1)}-{number}"


def read_cursor(cursor: str) -> tuple[datetime, int]:
    """What `write_cursor` wrote. Raises ValueError or OverflowError."""
    micros, number = cursor.split("-")
    return EPOCH + timedelta(microseconds=int(micros)), int(number)
