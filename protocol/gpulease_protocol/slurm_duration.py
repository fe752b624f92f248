"""Durations as Slurm writes them: `[days-][hours:]minutes:seconds`."""

from __future__ import annotations

import re

SLURM_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


def parse_slurm_duration(text: str) -> float | None:
    """The duration in seconds; None if there is none, as in `UNLIMITED`."""
    found = SLURM_DURATION.fullmatch(text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
