"""Content negotiation: whether a client prefers HTML to plain text (RFC 9110, 12.5.1)."""

from __future__ import annotations

from collections.abc import Iterable

REFUSED = (0.0, -1)


def prefers_html(accept: Iterable[str]) -> bool:
    """True if the lines of an `Accept` header rank `text/html` over `text/plain`.

    Of two types with the same weight, one that is named ranks over one that a wildcard allows. So the header of a
    browser prefers HTML; `*/*`, `text/*`, an empty header, and one that names both equally do not.
    """
    ranges = [_range(part) for line in accept for part in line.split(",")]
    return _rank("text/html", ranges) > _rank("text/plain", ranges)


def _rank(media_type: str, ranges: list[tuple[str, float]]) -> tuple[float, int]:
    """Weight, and how exactly it is named; the most specific range counts."""
    for exactness, name in ((2, media_type), (1, "text/*"), (0, "*/*")):
        weights = [weight for range_name, weight in ranges if range_name == name]
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
