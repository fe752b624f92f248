"""Durations as people write them: `90s`, `10m`, `1.5h`, `2d`, or a number of seconds."""

from __future__ import annotations

import re

LONGEST_S = 100 * 366 * 86400.0
"""A century: nothing here takes longer."""
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
EXAMPLES = "write it like 90s, 10m, 1.5h or 300 (seconds)"


def parse_duration(text: str) -> float:
    """Seconds in a duration; at most a century. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; {EXAMPLES}")
    length_s = float(match[1]) * UNITS_S[match[2]]
    if length_s > LONGEST_S:
        raise ValueError(f"{text!r} is longer than a century; {EXAMPLES}")
    return length_s
