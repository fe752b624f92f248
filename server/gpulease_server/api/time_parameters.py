"""Times and periods in query parameters."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Query
from pydantic import BeforeValidator

from gpulease_protocol.errors import InvalidRequest


def _no_number(moment: str) -> str:
    """A time as text; pydantic would take a number for seconds since 1970. Raises ValueError."""
    if moment.replace(".", "").lstrip("-").isdigit():
        raise ValueError("must be a time in ISO 8601, such as 2026-11-23T18:00:00Z")
    return moment


Moment = Annotated[datetime, BeforeValidator(_no_number)]
"""A time in ISO 8601. One without an offset is UTC: see `in_utc`."""
PeriodEnd = Annotated[
    Moment | None, Query(alias="to", description="End of the period, ISO 8601; if absent or in the future, now.")
]


def in_utc(moment: datetime) -> datetime:
    """The moment in UTC. Raises InvalidRequest at the ends of the calendar."""
    try:
        return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except OverflowError:
        raise InvalidRequest("from, to: must be after the year 1 and before the year 9999.") from None


def begin_and_end(
    from_at: datetime | None, to_at: datetime | None, now: datetime, default: timedelta
) -> tuple[datetime, datetime]:
    """Begin and end of a period, in UTC. It ends now at the latest, and begins `default` before its end unless the
    query says when. Raises InvalidRequest if the period is empty."""
    end = min(in_utc(to_at) if to_at else now, now)
    try:
        begin = in_utc(from_at) if from_at else end - default
    except OverflowError:
        begin = end
    if begin >= end:
        raise InvalidRequest("from: must be before to, and before now.")
    return begin, end
