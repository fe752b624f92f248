"""A line of the table, and the table as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The bound of a figure."""

    bound: float
    """In the unit of the figure."""
    at_least: bool = False
    """True where more is better. Otherwise the figure must stay below the bound."""

    def met(self, figure: float) -> bool:
        """True when the figure keeps the bound."""
        return figure >= self.bound if self.at_least else figure < self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure beside what it is compared with."""

    question: str
    """What was measured."""
    formerly: str = ""
    """The figure that the target was set for: of commit 2cf596f, on another day."""
    target: Target | None = None
    """None where a row is only shown for comparison."""
    figure: float | None = None
    """The figure in `unit`; None if it could not be measured, and `beside` says why."""
    unit: str = "x"
    """`x` is a multiple of the limit or peer of the same run."""
    beside: str = ""
    """The absolute figures: of gpulease, and of the limit or peer."""

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or nothing."""
        if self.target is None or self.figure is None:
            return ""
        return "met" if self.target.met(self.figure) else "missed"


HEADINGS = ("question", "formerly", "target", "measured", "beside it, in the same run", "verdict")


def cells(row: Row) -> tuple[str, ...]:
    """What the row has under each heading."""
    target = ""
    if row.target is not None:
        bound = number(row.target.bound, row.unit)
        target = f"{bound} or more" if row.target.at_least else f"under {bound}"
    measured = "not measured" if row.figure is None else number(row.figure, row.unit)
    verdict = f"**{row.verdict}**" if row.verdict == "missed" else row.verdict
    return (row.question, row.formerly, target, measured, row.beside, verdict)


def markdown(rows: Sequence[Row], *, heading: bool = True) -> str:
    """The rows as a Markdown table; without its heading to continue one."""
    lines = [HEADINGS, ("---",) * len(HEADINGS)] if heading else []
    return "\n".join(f"| {' | '.join(words)} |" for words in [*lines, *map(cells, rows)])


def number(figure: float, unit: str) -> str:
    """Three digits that matter, and the unit."""
    size = abs(figure)
    digits = 0 if size >= 99.5 else 1 if size >= 9.95 else 2 if size >= 0.0995 else 3
    text = f"{figure:,.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text + (unit if unit.startswith("/") else f" {unit}")
