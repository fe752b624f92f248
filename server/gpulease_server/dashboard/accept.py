"""Whether somebody would rather have a page than text (RFC 9110, 12.5.1)."""

from __future__ import annotations

from collections.abc import Iterable

REFUSED = (0.0, -1)


def prefers_html(accept: Iterable[str]) -> bool:
    """True when the lines of an `Accept` header rank `text/html` over `text/plain`.

    Of two with the same weight the one that is named counts more than one that a wildcard allows. So a browser's header
    prefers it; `*/*`, `text/*`, an empty header, and one that names both alike do not.
    """
    ranges = [_range(part) for line in accept for part in line.split(",")]
    return _rank("text/html", ranges) > _rank("text/plain", ranges)


def _rank(wanted: str, ranges: list[tuple[str, float]]) -> tuple[float, int]:
    """Weight, and how exactly it is named: the most exact range is the one that counts."""
    for exactness, name in ((2, wanted), (1, "text/*"), (0, "*/*")):
        weights = [weight for spelled, weight in ranges if spelled == name]
        if weights:
            return (max(weights), exactness) if max(weights) > 0 else REFUSED
    return REFUSED


def _range(part: str) -> tuple[str, float]:
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                return name, min(max(float(value), 0.0), 1.0)
            except ValueError:
                return name, 0.0
    return name, 1.0
