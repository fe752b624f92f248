"""Points in time as options take them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import click
import pytest

from gpulease_cli import option_types
from gpulease_cli.option_types import END_OF_PERIOD, MOMENT, MOMENT_AHEAD, Moment


@pytest.fixture
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This computer is where the parameter says, else in Tokyo."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", getattr(request, "param", "Asia/Tokyo"))
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-23T18:00", datetime(2026, 11, 23, 9, tzinfo=UTC)),
        ("2026-11-23 18:00:30", datetime(2026, 11, 23, 9, 0, 30, tzinfo=UTC)),
        ("2026-11-23T18:00+01:00", datetime(2026, 11, 23, 17, tzinfo=UTC)),
        ("2026-11-23", datetime(2026, 11, 22, 15, tzinfo=UTC)),
    ],
)
def test_a_date_is_of_this_time_zone(text: str, at: datetime) -> None:
    assert MOMENT.convert(text, None, None) == at


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("text", ["03:00", "3:00", "23:59:59", "00:00"])
def test_a_time_of_day_is_the_last_one(text: str) -> None:
    at = MOMENT.convert(text, None, None)
    hour, minute = map(int, text.split(":")[:2])
    assert (at.astimezone().hour, at.astimezone().minute) == (hour, minute)
    assert timedelta(0) <= datetime.now(UTC) - at < timedelta(days=1, minutes=1)


def test_a_duration_is_so_long_ago() -> None:
    ago = datetime.now(UTC) - MOMENT.convert("2h", None, None)
    assert timedelta(hours=1, minutes=59) < ago <= timedelta(hours=2)
    assert MOMENT.convert("30000d", None, None) == datetime(1970, 1, 1, tzinfo=UTC)


def test_ahead_it_is_the_next_time_or_in_so_long() -> None:
    now = datetime.now(UTC)
    assert timedelta(0) <= MOMENT_AHEAD.convert("03:00", None, None) - now <= timedelta(days=1, hours=1)
    assert timedelta(0) <= MOMENT_AHEAD.convert("2h", None, None) - now - timedelta(hours=2) < timedelta(minutes=1)


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize(
    ("begin", "text", "end"),
    [
        ("2099-12-03T08:00", "18:00", "2099-12-03T18:00"),
        ("2099-12-03T22:00", "06:00", "2099-12-04T06:00"),
        ("2099-12-03T22:00", "2099-12-03T23:00", "2099-12-03T23:00"),
        ("2001-12-03T22:00", "2099-12-03T23:00", "2099-12-03T23:00"),
    ],
)
def test_the_end_of_a_period_is_the_first_such_time_after_its_beginning(begin: str, text: str, end: str) -> None:
    kept, begins = END_OF_PERIOD.convert(text, None, None), MOMENT.convert(begin, None, None)
    assert END_OF_PERIOD.after(kept, begins) == MOMENT.convert(end, None, None)


def test_the_end_of_a_period_that_is_no_time_is_refused_at_once() -> None:
    with pytest.raises(click.BadParameter, match="is no time"):
        END_OF_PERIOD.convert("at eight", None, None)


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("zone", ["Europe/Berlin"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "now", "at"),
    [
        (MOMENT_AHEAD, datetime(2027, 3, 27, 20, tzinfo=UTC), datetime(2027, 3, 28, 6, tzinfo=UTC)),
        (MOMENT_AHEAD, datetime(2027, 10, 30, 20, tzinfo=UTC), datetime(2027, 10, 31, 7, tzinfo=UTC)),
        (MOMENT, datetime(2027, 3, 28, 4, tzinfo=UTC), datetime(2027, 3, 27, 7, tzinfo=UTC)),
    ],
)
def test_eight_is_eight_on_the_wall_when_the_clocks_change(
    kind: Moment, now: datetime, at: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return now

    monkeypatch.setattr(option_types, "datetime", Clock)
    assert kind.convert("08:00", None, None) == at


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("zone", ["Europe/Berlin"], indirect=True)
@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2027-03-28T01:59", datetime(2027, 3, 28, 0, 59, tzinfo=UTC)),
        ("2027-03-28T02:00", datetime(2027, 3, 28, 1, tzinfo=UTC)),
        ("2027-03-28T02:30", datetime(2027, 3, 28, 1, 30, tzinfo=UTC)),
        ("2027-03-28T02:30+01:00", datetime(2027, 3, 28, 1, 30, tzinfo=UTC)),
        ("2027-10-31T02:30", datetime(2027, 10, 31, 0, 30, tzinfo=UTC)),
    ],
)
def test_an_hour_that_the_clocks_leave_out_is_the_one_after_it(text: str, at: datetime) -> None:
    assert MOMENT.convert(text, None, None) == at
    assert END_OF_PERIOD.after(text.replace("T", " "), at) == at


@pytest.mark.usefixtures("zone")
@pytest.mark.parametrize("zone", ["Europe/Berlin"], indirect=True)
def test_a_time_of_day_that_the_clocks_leave_out_ends_a_period_after_it_begins() -> None:
    begin = datetime(2099, 3, 29, 0, 45, tzinfo=UTC)  # 01:45
    assert END_OF_PERIOD.after("02:30", begin) == datetime(2099, 3, 29, 1, 30, tzinfo=UTC)
