"""Points in time as options take them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from gpulease_cli.option_types import MOMENT


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("tokyo")
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


@pytest.mark.usefixtures("tokyo")
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
