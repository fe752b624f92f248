"""GPU-hours as people read them: without an exponent, and what is used of a limit as exactly as that limit needs."""

from __future__ import annotations

import math

MAX_DECIMALS = 9


def plain_hours(hours: float) -> str:
    """A limit of GPU-hours: `500`, `1500000`, `0.5`, `0.00001`."""
    return f"{hours:.{MAX_DECIMALS}f}".rstrip("0").rstrip(".") if 1e-9 <= hours < 1e15 else f"{hours:g}"


def used_hours(used: float, limit: float, decimals: int = 1) -> str:
    """GPU-hours that are used of a limit, to a hundredth of it and with so many decimals at least: `0.020` of 0.05."""
    needed = 1 - math.floor(math.log10(max(used, limit)))
    return f"{used:.{min(max(decimals, needed), MAX_DECIMALS)}f}"


def used_of(used: float, limit: float) -> str:
    """The same in a sentence: `0.050 of the 0.05 GPU-hours`."""
    return f"{used_hours(used, limit, 2)} of the {plain_hours(limit)} GPU-hours"
