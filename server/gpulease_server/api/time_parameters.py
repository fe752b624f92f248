"""Times in query parameters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BeforeValidator

from gpulease_protocol.errors import InvalidRequest


def _no_number(moment: str) -> str:
    """A time as text; pydantic would take a number for seconds since 1970. Raises ValueError."""
    if moment.replace(".", "").lstrip("-").isdigit():
        raise ValueError("must be a time in ISO 8601, such as 2026-11-23T18:00:00Z")
    return moment


Moment = Annotated[datetime, BeforeValidator(_no_number)]
"""A time in ISO 8601. One without an offset is UTC: see `in_utc`."""


def in_utc(moment: datetime) -> datetime:
    """The moment in UTC. Raises InvalidRequest at the ends of the calendar."""
    try:
        return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except OverflowError:
        raise InvalidRequest("from, to: must be after the year 1 and before the year 9999.") from None
