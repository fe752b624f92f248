"""Reads a trace of requests: CSV with a line of column names.

    asked_at_s,user,count,duration_s[,time_s][,priority][,nodes]

Comments begin with `#`. Values are checked as strictly as those of a request, because a slip of the pen in one line
would change the result and not show.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.model import Demand, Priority
from gpulease_server.replay.recorded_requests import (
    MAX_REQUESTS,
    RecordedRequest,
    Recording,
    ReplayedNode,
    over_nodes,
)

REQUIRED = ("asked_at_s", "user", "count", "duration_s")
OPTIONAL = ("time_s", "priority", "nodes")
MAX_S = 10 * 366 * 24 * 3600.0
MAX_COUNT = 1_000_000


class TraceRefused(InvalidRequest):
    """The trace cannot be read. Correct it."""


def read_trace(file: Path, nodes: Sequence[ReplayedNode]) -> Recording:
    """The requests of a trace, on these nodes. Raises `TraceRefused`."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            return Recording(requests=list(_requests(_without_comments(lines), nodes, file)), nodes=tuple(nodes))
    except OSError as error:
        raise TraceRefused(f"{file}: {error.strerror or error}.", remedy="Check the path.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceRefused(f"{file} is not a CSV file in UTF-8: {error}.", remedy=_shape()) from error


def _without_comments(lines: Iterable[str]) -> Iterator[str]:
    """The same lines, comments as empty ones, so that numbers of lines stay."""
    return ("\n" if line.startswith("#") else line for line in lines)


def _requests(lines: Iterator[str], nodes: Sequence[ReplayedNode], file: Path) -> Iterator[RecordedRequest]:
    rows = csv.reader(lines)
    names = next((row for row in rows if row), [])
    unknown = [name for name in names if name not in (*REQUIRED, *OPTIONAL)]
    missing = [name for name in REQUIRED if name not in names]
    if unknown or missing or len(set(names)) < len(names):
        what = f"there is no column {missing[0]}" if missing else f"the columns are {', '.join(names)}"
        raise TraceRefused(f"{file}: {what}.", remedy=_shape())
    for number, row in enumerate((row for row in rows if row), start=1):
        if number > MAX_REQUESTS:
            raise TraceRefused(f"{file} has more than {MAX_REQUESTS} requests.", remedy="Take a shorter period.")
        try:
            if len(row) != len(names):
                raise ValueError(f"it has {len(row)} values for {len(names)} columns")
            yield _request(number, dict(zip(names, row, strict=True)), nodes)
        except ValueError as error:
            raise TraceRefused(f"{file}, line {rows.line_num}: {error}.", remedy=_shape()) from error


def _request(number: int, values: dict[str, str], nodes: Sequence[ReplayedNode]) -> RecordedRequest:
    count, on_nodes = _whole("count", values["count"]), 1
    if values.get("nodes"):
        on_nodes = _whole("nodes", values["nodes"])
    else:
        count, on_nodes = over_nodes(count, nodes)
    demand = Demand(
        count=count,
        nodes=on_nodes,
        time_s=_seconds("time_s", values["time_s"], above=0.0) if values.get("time_s") else None,
        priority=_priority(values.get("priority") or Priority.NORMAL.value),
    )
    return RecordedRequest(
        id=f"request-{number}",
        asked_at_s=_seconds("asked_at_s", values["asked_at_s"]),
        duration_s=_seconds("duration_s", values["duration_s"]),
        demand=demand,
        user=values["user"] or None,
    )


def _seconds(name: str, text: str, above: float = -1.0) -> float:
    try:
        found = float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a number") from None
    if not math.isfinite(found) or not above < found or not 0.0 <= found <= MAX_S:
        raise ValueError(f"{name} is {text}; it must be a number of seconds from 0 to {MAX_S:.0f}")
    return found


def _whole(name: str, text: str) -> int:
    try:
        found = int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a whole number") from None
    if not 1 <= found <= MAX_COUNT:
        raise ValueError(f"{name} is {found}; it must be from 1 to {MAX_COUNT}")
    return found


def _priority(text: str) -> Priority:
    try:
        return Priority(text)
    except ValueError:
        raise ValueError(f"priority is {text!r}; it must be one of {', '.join(Priority)}") from None


def _shape() -> str:
    return (
        f"The first line is {','.join(REQUIRED)}, perhaps with {', '.join(OPTIONAL)}; docs/policy-replay.md has more."
    )
