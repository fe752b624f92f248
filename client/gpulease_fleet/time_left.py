"""How Slurm writes a duration: `[days-][hours:]minutes:seconds`."""

from __future__ import annotations

import re

TIME_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


def parse_time_left(text: str) -> float | None:
    """Seconds; None where no limit is known, as for `UNLIMITED`."""
    found = TIME_LEFT.fullmatch(text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
