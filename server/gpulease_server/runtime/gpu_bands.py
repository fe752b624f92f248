"""In which times GPUs were unhealthy, cordoned, foreign or unknown, from the events that tell of it. Pure.

What was told is in the memory of a daemon, so one that restarts tells again what still holds, and does not tell what
was over meanwhile. So a band also ends where its node was ready again after a restart without having told of it again,
and where the ledger shows that it has ended. Time in which no daemon ran belongs to what held before and after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from datetime import datetime, timedelta

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.timeline import Span, SpanKind
from gpulease_server.store.timeline import StateEvent

BEGINS = {
    "gpu.unhealthy": SpanKind.UNHEALTHY,
    "gpu.foreign": SpanKind.FOREIGN,
    "gpu.cordoned": SpanKind.CORDONED,
    "node.drained": SpanKind.CORDONED,
    "node.paused": SpanKind.CORDONED,
    "node.unknown": SpanKind.UNKNOWN,
}
ENDS = {
    "gpu.recovered": SpanKind.UNHEALTHY,
    "gpu.foreign_over": SpanKind.FOREIGN,
    "gpu.uncordoned": SpanKind.CORDONED,
    "node.resumed": SpanKind.CORDONED,
    "node.ready": SpanKind.UNKNOWN,
}
TOLD_AGAIN_AFTER = {SpanKind.UNHEALTHY: timedelta(0), SpanKind.FOREIGN: timedelta(seconds=20)}
"""How long after its node is ready a daemon that has restarted tells again of what still holds, at most."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A GPU, or all of a node where `uuid` is empty."""

    node: str
    uuid: str = ""


@dataclass(slots=True)
class Bands:
    """The bands of each subject while events are gone through."""

    spans: list[tuple[Subject, SpanKind, datetime | None, datetime | None, str | None]] = field(default_factory=list)
    """Subject, kind, begin, end, reason."""
    began: dict[tuple[Subject, SpanKind], tuple[datetime, str | None]] = field(default_factory=dict)
    """What has begun and has not ended."""
    ready_at: dict[str, datetime] = field(default_factory=dict)
    """By node: when it was last ready after anything on it had begun."""

    def begin(self, subject: Subject, kind: SpanKind, at: datetime, reason: str | None) -> None:
        known = self.began.get((subject, kind))
        if known is not None:
            ready_at = self.ready_at.get(subject.node)
            again_after = TOLD_AGAIN_AFTER.get(kind)
            if again_after is None or ready_at is None or ready_at < known[0] or at - ready_at <= again_after:
                return  # it is told again, and was never over
            self.end(subject, kind, ready_at)
        self.began[subject, kind] = (at, reason)

    def end(self, subject: Subject, kind: SpanKind, at: datetime | None) -> None:
        from_at, reason = self.began.pop((subject, kind), (None, None))
        if from_at is None and kind is SpanKind.UNKNOWN:
            return  # a daemon has started
        if from_at is not None and at is not None:
            at = max(at, from_at)  # the clock was set back
        self.spans.append((subject, kind, from_at, at, reason))

    def forget(self, subject: Subject, at: datetime) -> None:
        """The GPU or the node is gone, with all that was true of it."""
        for known, kind in list(self.began):
            if known == subject or (not subject.uuid and known.node == subject.node):
                self.end(known, kind, at)

    def take(self, event: StateEvent) -> None:
        node = event.node or ""
        subjects = [Subject(node, uuid) for uuid in event.gpus] or [Subject(node)]
        for subject in subjects:
            if event.kind in BEGINS:
                self.begin(subject, BEGINS[event.kind], event.at, event.reason)
            elif event.kind in ENDS:
                self.end(subject, ENDS[event.kind], event.at)
            elif event.kind in ("gpu.gone", "node.forgotten"):
                self.forget(subject, event.at)
        if event.kind == "node.ready":
            self.ready_at[node] = event.at


@dataclass(frozen=True, slots=True)
class CurrentStates:
    """What the ledger shows of GPUs at this moment."""

    gpus_of_node: Mapping[str, Collection[str]]
    true_of: Mapping[SpanKind, Mapping[Subject, str | None]]
    """By kind: of which GPUs and nodes it is true, and why."""
    not_known: Collection[str]
    """Nodes of which no reading counts."""


def gpu_bands(events: Iterable[StateEvent], current: CurrentStates) -> list[Span]:
    """The bands, by begin. `events`: oldest first; of all nodes, and up to now."""
    bands, gpus_of_node = Bands(), {node: dict.fromkeys(uuids) for node, uuids in current.gpus_of_node.items()}
    for event in events:
        gpus_of_node.setdefault(event.node or "", {}).update(dict.fromkeys(event.gpus))
        bands.take(event)
    _compare(bands, current)
    found = []
    for subject, kind, from_at, to_at, reason in bands.spans:
        uuids = (subject.uuid,) if subject.uuid else tuple(gpus_of_node.get(subject.node, ()))
        if uuids:
            found.append(Span(kind=kind, gpus=uuids, from_at=from_at, to_at=to_at, reason=reason))
    return found


def _compare(bands: Bands, current: CurrentStates) -> None:
    """End what has ended by now, although no event tells of it; and add what holds although none tells of that."""
    for (subject, kind), (began_at, _) in list(bands.began.items()):
        holds = subject in current.true_of.get(kind, {})
        if not holds and not (subject.node in current.not_known and kind in TOLD_AGAIN_AFTER):
            bands.end(subject, kind, bands.ready_at.get(subject.node, began_at))
    for kind, subjects in current.true_of.items():
        for subject, reason in subjects.items():
            from_at, why = bands.began.pop((subject, kind), (None, reason))
            bands.spans.append((subject, kind, from_at, None, why))
    bands.spans += [(subject, kind, at, None, reason) for (subject, kind), (at, reason) in bands.began.items()]
