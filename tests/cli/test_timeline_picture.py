"""A timeline in 80 columns: a letter for each user where they held a GPU."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from gpulease_cli.timeline_picture import FREE, letters_of, picture
from gpulease_protocol.timeline import QueueStep, Span, SpanKind, Timeline, TimelineGpu

BEGIN = datetime(2026, 11, 25, tzinfo=UTC)
END = BEGIN + timedelta(days=1)


def hour(hours: float) -> datetime:
    return BEGIN + timedelta(hours=hours)


def lease(user: str, gpus: tuple[str, ...], begin: float, end: float | None) -> Span:
    to_at = None if end is None else hour(end)
    return Span(kind=SpanKind.LEASE, gpus=gpus, from_at=hour(begin), to_at=to_at, lease_id="lease-1", user=user)


def timeline(*spans: Span, **more: Any) -> Timeline:
    gpus = tuple(TimelineGpu(uuid=f"GPU-{index}", node="n1", index=index) for index in range(2))
    given: dict[str, Any] = {"from_at": BEGIN, "to_at": END, "gpus": gpus, "spans": spans, "queue": ()} | more
    return Timeline(**given)


def test_a_lease_is_the_letter_of_its_user_from_grant_to_end() -> None:
    bad = Span(kind=SpanKind.UNHEALTHY, gpus=("GPU-1",), from_at=hour(12), to_at=hour(18), reason="xid:79")
    shown = picture(timeline(lease("ada", ("GPU-0", "GPU-1"), -5, 6), lease("bram", ("GPU-0",), 18, None), bad), 55)
    assert shown[1] == "0      " + "A" * 12 + FREE * 24 + "B" * 12
    assert shown[2] == "1      " + "A" * 12 + FREE * 12 + "!" * 12 + FREE * 12
    assert shown[-1] == f"A ada   B bram   ! unhealthy   {FREE} free"


def test_a_line_has_at_most_the_columns_of_the_terminal() -> None:
    gpus = tuple(TimelineGpu(uuid=f"GPU-{index}", node="n" * 40, index=index) for index in range(3))
    far = TimelineGpu(uuid="GPU-9", node="far", index=0)
    spans = [lease(f"user{number}", ("GPU-0",), number / 4, number / 4 + 0.25) for number in range(90)]
    steps = (QueueStep(at=BEGIN, length=3), QueueStep(at=hour(12), length=14), QueueStep(at=hour(13), length=0))
    for width in (40, 80, 160):
        shown = picture(timeline(*spans, gpus=(*gpus, far), queue=steps), width)
        assert max(map(len, shown)) <= width
        assert shown[4].startswith("far:0")
        queue = shown[5]
        assert queue.startswith("queue")
        assert set(queue[5:].replace(" ", "")) == {"3", "+"}


def test_what_is_no_longer_kept_is_left_out() -> None:
    shown = picture(timeline(lease("ada", ("GPU-0",), 18, 24), complete_since=hour(12)), 55)
    assert shown[1] == "0      " + " " * 24 + FREE * 12 + "A" * 12


def test_users_have_different_letters() -> None:
    found = letters_of(["ada", "Alice", "anna", "bram", "1st"])
    assert found == {"1st": "C", "Alice": "A", "ada": "a", "anna": "D", "bram": "B"}
    assert letters_of([f"u{number}" for number in range(60)])["u9"] == "+"
