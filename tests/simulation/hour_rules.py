"""Limits of GPU-hours, judged by the event log alone. Imports nothing of the product."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.checker import LimitsInForce, Seen

Line = dict[str, Any]
GPU_HOURS = re.compile(r"(\S+) GPU-hours in (\d+) s")
"""What an event says of such a limit, with a window of less than 2 minutes."""
NEVER = float("inf")


@dataclass
class Window:
    """A limit of GPU-hours that is set."""

    most_s: float
    """GPU-seconds."""
    length_s: float
    since_s: float
    """Nothing that was held before counts for certain."""


def hours_are_never_passed(seen: Seen, now: LimitsInForce) -> Iterator[str]:
    """Nothing is granted while the GPU time that was held in the window of a limit is used. It counts from when the
    limit was set, for each GPU of a lease from its grant to its end. No one sets the clock."""
    windows, spans = dict[str, Window](), defaultdict[str, list[tuple[float, float, int]]](list)
    for event in now.events("limits.set", "limits.removed", "lease.granted", "lease.revived", "lease.ended"):
        kind, lease, at_s = event["kind"], event["lease_id"], max(seen.moments(event), default=0.0)
        if kind == "limits.set":
            name, _, what = event["reason"].partition(": ")
            before, found = windows.pop(name, None), GPU_HOURS.search(what)
            if found is not None:
                since_s = at_s if before is None else max(before.since_s, at_s - before.length_s)
                windows[name] = Window(float(found[1]) * 3600, float(found[2]), since_s)
        elif kind == "limits.removed":
            windows.pop(event["reason"].partition(", ")[0], None)
        elif kind == "lease.ended":
            spans[lease] = [(since_s, min(until_s, at_s), gpus) for since_s, until_s, gpus in spans[lease]]
        else:
            for name, window in windows.items():
                members, first_s = now.limits[name][0], max(window.since_s, at_s - window.length_s)
                if not now.is_under(lease, members):
                    continue
                held = [span for other, found in spans.items() if now.is_under(other, members) for span in found]
                used_s = sum(
                    gpus * max(0.0, min(until_s, at_s) - max(since_s, first_s)) for since_s, until_s, gpus in held
                )
                if used_s > window.most_s + 0.01 + 0.001 * len(held):
                    have = f"{used_s:.2f} GPU-seconds in {window.length_s:g} s"
                    yield f"seq {event['seq']}: {lease} is granted, and {name} has used {have}, of {window.most_s:g}"
            spans[lease].append((at_s, NEVER, len(event["gpus"])))
