"""In which times a GPU could not be used, from events, over restarts of the daemon and what is pruned."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpulease_protocol.timeline import SpanKind
from gpulease_server.runtime.gpu_bands import CurrentStates, Subject, gpu_bands
from gpulease_server.store.timeline import StateEvent

NOON = datetime(2027, 1, 1, 12, tzinfo=UTC)
GPUS = {"n1": ["GPU-1", "GPU-2"], "n2": ["GPU-3"]}
FINE = CurrentStates(GPUS, {}, ())


def at(minute: float) -> datetime:
    return NOON + timedelta(minutes=minute)


def event(minute: float, kind: str, gpu: str | None = None, reason: str | None = None, cause: str = "") -> StateEvent:
    node = "n2" if gpu == "GPU-3" else "n1"
    return StateEvent(at(minute), kind, cause or f"at-{minute}", node, (gpu,) if gpu else (), reason)


Told = tuple[SpanKind, tuple[str, ...], float | None, float | None]


def bands(*events: StateEvent, now: CurrentStates = FINE) -> list[Told]:
    def minute(moment: datetime | None) -> float | None:
        return None if moment is None else (moment - NOON).total_seconds() / 60

    return [(one.kind, one.gpus, minute(one.from_at), minute(one.to_at)) for one in gpu_bands(events, now)]


@pytest.mark.parametrize(
    ("begins", "ends", "kind", "gpu"),
    [
        ("gpu.unhealthy", "gpu.recovered", SpanKind.UNHEALTHY, "GPU-1"),
        ("gpu.foreign", "gpu.foreign_over", SpanKind.FOREIGN, "GPU-1"),
        ("gpu.cordoned", "gpu.uncordoned", SpanKind.CORDONED, "GPU-1"),
        ("node.drained", "node.resumed", SpanKind.CORDONED, None),
        ("node.paused", "node.resumed", SpanKind.CORDONED, None),
        ("node.unknown", "node.ready", SpanKind.UNKNOWN, None),
    ],
)
def test_a_band_is_from_its_event_to_the_one_that_ends_it(
    begins: str, ends: str, kind: SpanKind, gpu: str | None
) -> None:
    gpus = (gpu,) if gpu else ("GPU-1", "GPU-2")
    assert bands(event(1, begins, gpu), event(5, ends, gpu)) == [(kind, gpus, 1, 5)]


def test_a_band_that_goes_on_has_no_end_and_its_reason() -> None:
    now = CurrentStates(GPUS, {SpanKind.UNHEALTHY: {Subject("n1", "GPU-1"): "xid:79"}}, ())
    (span,) = gpu_bands([event(1, "gpu.unhealthy", "GPU-1", "xid:79")], now)
    assert (span.from_at, span.to_at, span.reason) == (at(1), None, "xid:79")


def test_what_began_before_the_oldest_event_has_no_begin() -> None:
    assert bands(event(5, "gpu.recovered", "GPU-1")) == [(SpanKind.UNHEALTHY, ("GPU-1",), None, 5)]
    now = CurrentStates(GPUS, {SpanKind.CORDONED: {Subject("n2"): "new cables"}}, ())
    assert bands(now=now) == [(SpanKind.CORDONED, ("GPU-3",), None, None)]


def test_a_start_of_the_daemon_ends_no_time_that_was_unknown() -> None:
    assert bands(event(1, "node.ready"), event(9, "node.ready")) == []


def test_a_daemon_that_restarts_and_tells_again_makes_no_second_band() -> None:
    told = bands(
        event(1, "gpu.unhealthy", "GPU-1"),
        event(20, "gpu.unhealthy", "GPU-1", cause="report"),  # as a report is taken in: before its node is ready
        event(20, "node.ready", cause="report"),
        event(30, "gpu.recovered", "GPU-1"),
        event(40, "gpu.foreign", "GPU-2"),
        event(50, "node.ready"),
        event(50.2, "gpu.foreign", "GPU-2"),
        event(60, "gpu.foreign_over", "GPU-2"),
    )
    assert told == [(SpanKind.UNHEALTHY, ("GPU-1",), 1, 30), (SpanKind.FOREIGN, ("GPU-2",), 40, 60)]


def test_what_was_over_while_no_daemon_ran_ends_where_its_node_is_ready_again() -> None:
    before = (event(1, "gpu.unhealthy", "GPU-1"), event(20, "node.ready"))
    assert bands(*before) == [(SpanKind.UNHEALTHY, ("GPU-1",), 1, 20)]
    later = bands(*before, event(40, "gpu.unhealthy", "GPU-1"), event(50, "gpu.recovered", "GPU-1"))
    assert later == [(SpanKind.UNHEALTHY, ("GPU-1",), 1, 20), (SpanKind.UNHEALTHY, ("GPU-1",), 40, 50)]


def test_of_a_silent_node_it_is_not_known_whether_its_gpu_has_recovered() -> None:
    now = CurrentStates(GPUS, {SpanKind.UNKNOWN: {Subject("n1"): "silent"}}, ["n1"])
    told = bands(event(1, "gpu.unhealthy", "GPU-1"), event(5, "node.unknown"), now=now)
    assert sorted(told) == [
        (SpanKind.UNHEALTHY, ("GPU-1",), 1, None),
        (SpanKind.UNKNOWN, ("GPU-1", "GPU-2"), 5, None),
    ]


def test_a_node_that_is_forgotten_ends_all_that_was_true_of_its_gpus() -> None:
    told = bands(
        event(1, "gpu.unhealthy", "GPU-9"),
        event(2, "node.drained"),
        event(8, "node.forgotten"),
        now=CurrentStates({}, {}, ()),
    )
    assert told == [(SpanKind.UNHEALTHY, ("GPU-9",), 1, 8), (SpanKind.CORDONED, ("GPU-9",), 2, 8)]


def test_a_clock_that_is_set_back_makes_no_band_that_ends_before_it_begins() -> None:
    assert bands(event(9, "gpu.cordoned", "GPU-1"), event(2, "gpu.uncordoned", "GPU-1")) == [
        (SpanKind.CORDONED, ("GPU-1",), 9, 9)
    ]
