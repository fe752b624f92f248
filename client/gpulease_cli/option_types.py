"""Types of options: what a user may write, and the error in words that name it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, time, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from gpulease_protocol.durations import parse_duration

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic before 8.5

CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?")
OLDEST = datetime(1970, 1, 1, tzinfo=UTC)


class Duration(ParamType):
    """A duration such as `10m`, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds; a default that is already a number passes through."""
        if isinstance(value, float | int):
            return float(value)
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Moment(ParamType):
    """A point in time: `03:00` (the last time that it was so late), `2026-11-23T18:00`, or how long ago as a duration.

    In this computer's time zone, unless an offset is given. With `ahead`, the next time that it is so late, or in how
    long.
    """

    name = "time"

    def __init__(self, *, ahead: bool = False) -> None:
        self.ahead = ahead

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """The point in time in UTC."""
        if isinstance(value, datetime):
            return value
        now = datetime.now(UTC)
        try:
            if CLOCK.fullmatch(value):
                return self._at_clock(value, now)
            if re.fullmatch(r"[0-9.]+[smhd]?", value):
                length = timedelta(seconds=parse_duration(value))
                return now + length if self.ahead else max(now - length, OLDEST)
            return _in_utc(datetime.fromisoformat(value))
        except (ValueError, OverflowError, OSError):
            hours = "2h for in two hours" if self.ahead else "2h for two hours ago"
            self.fail(f"{value!r} is no time; write it like 03:00, 2026-11-23T18:00, or {hours}", param, ctx)

    def _at_clock(self, value: str, now: datetime) -> datetime:
        clock, today = time.fromisoformat(value.zfill(5)), now.astimezone().date()
        days = (today + timedelta(days=number) for number in ((0, 1) if self.ahead else (0, -1)))
        at, other = (_in_utc(datetime.combine(day, clock)) for day in days)  # by the clock on the wall
        return at if (at >= now if self.ahead else at <= now) else other


def _in_utc(at: datetime) -> datetime:
    """A point in time of this time zone, or with an offset. An hour that is left out when the clocks are put forward is
    the one after it."""
    found = at.astimezone(UTC)
    is_left_out = at.tzinfo is None and found.astimezone().replace(tzinfo=None) != at
    return at.replace(fold=1).astimezone(UTC) if is_left_out else found


class EndOfPeriod(Moment):
    """The end of a period that begins ahead: a time of day is the first one after the beginning. The text is checked,
    and kept until the beginning is known."""

    def __init__(self) -> None:
        super().__init__(ahead=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text. Fails for what is no time."""
        super().convert(value, param, ctx)
        return value

    def after(self, text: str, begin: datetime) -> datetime:
        """The point in time in UTC."""
        if CLOCK.fullmatch(text):
            return self._at_clock(text, max(begin, datetime.now(UTC)))
        return super().convert(text, None, None)


class Number(ParamType):
    """An integer or a float (`kind`) from `minimum` to `maximum`, both included."""

    name = "n"

    def __init__(self, kind: type[Any] = int, minimum: float | None = None, maximum: float | None = None) -> None:
        self.kind, self.minimum, self.maximum = kind, minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Fails for anything else, for infinity, and for a number out of bounds."""
        try:
            number = self.kind(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a {'whole number' if self.kind is int else 'number'}", param, ctx)
        if not math.isfinite(number):
            self.fail(f"must be a finite number, not {value}", param, ctx)
        low = self.minimum is not None and number < self.minimum
        high = self.maximum is not None and number > self.maximum
        if low or high:
            self.fail(f"must be {self._bounds()}, not {value}", param, ctx)
        return number

    def _bounds(self) -> str:
        if self.minimum is None or self.maximum is None:
            return f"at most {self.maximum:g}" if self.minimum is None else f"at least {self.minimum:g}"
        return f"{self.minimum} to {self.maximum}"


class NodeRange(ParamType):
    """A number of nodes, or the fewest and the most of an elastic job: `2`, `2:4`."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int | None]:
        """The fewest nodes, and the most; None for one number, which does not change while the job runs."""
        if isinstance(value, tuple):
            return value
        from gpulease_protocol.requests import JobRequest  # noqa: PLC0415 - for commands that ask for GPUs

        least, found, most = str(value).partition(":")
        count = Field(Number(), JobRequest, "nodes")
        first = count.convert(least, param, ctx)
        if not found:
            return first, None
        last = count.convert(most, param, ctx)
        if not 2 <= first <= last:
            self.fail(f"must be MIN:MAX with MIN from 2 to MAX, not {value}", param, ctx)
        return first, last


class OneOf(ParamType):
    """A member of an enumeration, or one of some of its members, by its value."""

    name = "choice"

    def __init__(self, members: Iterable[Enum]) -> None:
        self.members = {member.value: member for member in members}

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The values, with bars between."""
        return "|".join(self.members)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The member. Fails for any other text."""
        try:
            return self.members[value]
        except KeyError:
            self.fail(f"{value!r} is not one of {', '.join(self.members)}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The values that begin with what was typed."""
        values = [value for value in self.members if value.startswith(incomplete)]
        return [click.shell_completion.CompletionItem(value) for value in values]


DeviceForm: TypeAlias = "int | str | list[int | str]"
"""What `LeaseRequest.devices` takes."""


class Devices(ParamType):
    """GPUs in any form that `LeaseRequest.devices` takes: as text, or as a JSON list."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DeviceForm:
        """The value of that field. Fails for what means nothing."""
        from gpulease_protocol.requests import parse_devices  # noqa: PLC0415 - for commands that ask for GPUs

        form: DeviceForm = value
        try:
            if value.startswith("["):
                form = json.loads(value)
            parse_devices(form)
        except (ValueError, TypeError) as error:
            what = str(error).removeprefix("devices: ")
            hint = f"; GPU 0 alone is {value.strip()}," if value.strip() == "0" else ""
            self.fail(f"{'is no list' if isinstance(error, json.JSONDecodeError) else what}{hint}", param, ctx)
        return form


class Field(ParamType):
    """A value for one field of a request body, within the bounds that are declared there.

    So what is wrong is said of the option that was typed, and not of the field.
    """

    def __init__(self, base: ParamType, body: type[Any] | Callable[[], type[Any]], field: str) -> None:
        """`body` is the class, or a function that imports it."""
        self.base, self._body, self.field = base, body, field
        self.name = base.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as the base type has it. Fails where it is out of the field's bounds."""
        converted = self.base.convert(value, param, ctx)
        from gpulease_protocol.bounds import bounds_of  # noqa: PLC0415 - most options have no bounds

        body = self._body if isinstance(self._body, type) else self._body()
        for bounds in bounds_of(body, self.field):
            if rule := bounds.broken_rule(self.field, converted):
                shown = f", not {value}" if isinstance(converted, int | float) else ""
                self.fail(f"{rule}{shown}", param, ctx)
        return converted


DURATION = Duration()
MOMENT = Moment()
MOMENT_AHEAD = Moment(ahead=True)
END_OF_PERIOD = EndOfPeriod()
DEVICE_FORM = Devices()
