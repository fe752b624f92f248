"""Times and periods in query parameters."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Query
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from gpulease_protocol.errors import InvalidRequest

PLUS_OF_OFFSET = re.compile(r"(?<=\d) (?=\d\d:?\d\d$)")
"""The `+` of `08:00:00+01:00`, as `date -Is` prints it: a `+` in a query is a space, unless it is sent as `%2B`."""


def _time_text(moment: str) -> str:
    """A time as text; pydantic would take a number for seconds since 1970. Raises ValueError."""
    if ":" in moment.partition(" ")[0]:
        moment = PLUS_OF_OFFSET.sub("+", moment)
    if moment.replace(".", "").lstrip("-").isdigit():
        raise ValueError("must be a time in ISO 8601, such as 2026-11-23T18:00:00Z")
    return moment


Moment = Annotated[datetime, BeforeValidator(_time_text)]
"""A time in ISO 8601. One without an offset is UTC: see `in_utc`."""
PeriodEnd = Annotated[
    Moment | None, Query(alias="to", description="End of the period, ISO 8601; if absent or in the future, now.")
]

_moment: TypeAdapter[datetime] = TypeAdapter(Moment)


def in_utc(moment: datetime) -> datetime:
    """The moment in UTC. Raises InvalidRequest at the ends of the calendar."""
    try:
        return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except OverflowError:
        raise InvalidRequest("A time in the query must be after the year 1 and before the year 9999.") from None


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


def parse_interval(parameter: str, interval: str) -> tuple[datetime | None, datetime | None]:
    """Begin and end of an interval `FROM/TO` of ISO 8601, in UTC; None for an end that is open (`..`). Raises
    InvalidRequest unless it begins before it ends."""
    begin, slash, end = interval.partition("/")
    try:
        from_at, to_at = (None if one == ".." else in_utc(_moment.validate_python(one)) for one in (begin, end))
    except ValidationError:
        slash = ""
    if not slash or (from_at and to_at and from_at >= to_at):
        raise InvalidRequest(
            f"{parameter}: must be two times in ISO 8601 with a slash between, the earlier one first.",
            remedy="Write 2026-11-23T18:00:00Z/2026-11-24T18:00:00Z, and `..` for an open end: 2026-11-23/..",
        )
    return from_at, to_at
