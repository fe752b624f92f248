"""Plots curves in a terminal, with braille dots: two by four in each character."""

from __future__ import annotations

from collections.abc import Sequence

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The dot of each row and column of a character."""
BLANK = 0x2800
LABEL = 8
"""Columns of the numbers beside a plot."""
WIDTH, HEIGHT = 80, 6
"""Characters of a plot, its numbers included."""

Curve = Sequence[float | None]


def plot(
    curves: Sequence[Curve],
    low: float,
    high: float,
    labels: tuple[str, str],
    *,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> list[str]:
    """The lines of a plot of curves over the same time, overlaid; where a value is None, a curve has a gap.

    Args:
        curves: Values at equal intervals.
        low: Value of the lowest row of dots.
        high: Value of the highest; more than `low`.
        labels: What is written beside the highest and the lowest row.
        width: Characters of a line, with `LABEL` for the labels.
        height: Number of lines.
    """
    columns, rows = width - LABEL - 1, height
    cells = [[0] * columns for _ in range(rows)]
    for curve in curves:
        before: int | None = None
        for x in range(2 * columns):
            value = _value(curve, x, 2 * columns)
            if value is None:
                before = None
                continue
            share = min(max((value - low) / (high - low), 0.0), 1.0)
            y = round((1 - share) * (4 * rows - 1))
            # A steep curve is a line and not two dots far apart.
            for dot in range(min(y, y if before is None else before), max(y, y if before is None else before) + 1):
                cells[dot // 4][x // 2] |= DOTS[dot % 4][x % 2]
            before = y
    beside = [labels[0], *[""] * (rows - 2), labels[1]] if rows > 1 else [labels[0]]
    return [
        f"{label:>{LABEL}} {''.join(chr(BLANK + cell) for cell in line)}".rstrip(f" {chr(BLANK)}")
        for label, line in zip(beside, cells, strict=True)
    ]


def _value(curve: Curve, x: int, columns: int) -> float | None:
    """The value at a column of dots: the mean of those that fall into it, or the one that it falls into."""
    first, last = x * len(curve) // columns, (x + 1) * len(curve) // columns
    known = [value for value in curve[first : max(last, first + 1)] if value is not None]
    return sum(known) / len(known) if known else None


def axis(begin: str, end: str) -> str:
    """The line below a plot: when it begins and ends."""
    room = WIDTH - LABEL - 1
    return " " * (LABEL + 1) + begin + end.rjust(max(len(end) + 1, room - len(begin)))
