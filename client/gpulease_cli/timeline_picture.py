"""A timeline in a terminal: a line for each GPU, a letter for each user, a mark for what kept a GPU from being used."""

from __future__ import annotations

import string
from collections.abc import Iterable
from datetime import datetime

from gpulease_protocol.status_table import format_duration, printable
from gpulease_protocol.timeline import QueueStep, Span, SpanKind, Timeline

WIDTH = 80
FREE, NOT_KEPT, MANY = "·", " ", "+"
MARKS = {
    SpanKind.UNHEALTHY: "!",
    SpanKind.FOREIGN: "%",
    SpanKind.CORDONED: "-",
    SpanKind.UNKNOWN: "?",
    SpanKind.DRAINING: "~",
}
"""What is drawn for a band; a lease is drawn over it."""
LETTERS = string.ascii_uppercase + string.ascii_lowercase
LABEL = 16
"""Most columns of a GPU's name."""


def picture(timeline: Timeline, width: int = WIDTH) -> list[str]:
    """The lines: times, each GPU, the queue, and what the letters and marks mean. Each has at most `width` columns."""
    several = len({gpu.node for gpu in timeline.gpus}) > 1
    names = {gpu.uuid: _name(gpu.node if several else "", gpu.index) for gpu in timeline.gpus}
    room = max([len(name) for name in names.values()] + [len("queue")]) + 2
    columns = max(10, width - room)
    letters = letters_of({span.user or "?" for span in timeline.spans if span.kind is SpanKind.LEASE})
    lines = [" " * room + _axis(timeline, columns)]
    drawn: set[str] = set()
    for uuid, name in names.items():
        cells = _row(timeline, uuid, letters, columns)
        drawn.update(cells)
        lines.append(f"{name:<{room}}{cells}")
    if any(step.length for step in timeline.queue):
        lines.append(f"{'queue':<{room}}{_queue(timeline, columns)}")
    said = [f"{letter} {printable(user)}" for user, letter in letters.items() if letter in drawn]
    said += [f"{mark} {kind.value}" for kind, mark in MARKS.items() if mark in drawn]
    said += [f"{FREE} free"] if FREE in drawn else []
    return [*lines, "", *_wrapped(said, width)]


def letters_of(users: Iterable[str]) -> dict[str, str]:
    """A letter for each user, by name: that with which the name begins where no other has it, else one that is left."""
    found: dict[str, str] = {}
    for user in sorted(users):
        free = [letter for letter in (user[:1].upper(), user[:1].lower()) if letter in LETTERS and letter]
        found[user] = next((letter for letter in free if letter not in found.values()), "")
    left = [letter for letter in LETTERS if letter not in found.values()]
    return {user: letter or (left.pop(0) if left else MANY) for user, letter in found.items()}


def _name(node: str, index: int | None) -> str:
    place = "?" if index is None else str(index)
    return f"{printable(node)[: LABEL - len(place) - 1]}:{place}" if node else place


def _row(timeline: Timeline, uuid: str, letters: dict[str, str], columns: int) -> str:
    """A character for each piece of the period: what took most of it; of equal shares, a lease."""
    bounds = _bounds(timeline, columns)
    seconds: list[dict[str, float]] = [{} for _ in range(columns)]
    piece = bounds[1] - bounds[0]
    for span in timeline.spans:
        if uuid not in span.gpus:
            continue
        mark = letters[span.user or "?"] if span.kind is SpanKind.LEASE else MARKS.get(span.kind, "?")
        begin, end = _times(timeline, span)
        first, last = int((begin - bounds[0]) // piece), int((end - bounds[0]) // piece)
        for at in range(max(0, first), min(columns - 1, last) + 1):
            covered = min(end, bounds[at + 1]) - max(begin, bounds[at])
            seconds[at][mark] = seconds[at].get(mark, 0.0) + max(0.0, covered)
    kept = (timeline.complete_since or timeline.from_at).timestamp()
    return "".join(
        _most(cell, piece, FREE if bounds[at + 1] > kept else NOT_KEPT) for at, cell in enumerate(seconds)
    ).rstrip()


def _most(seconds: dict[str, float], piece: float, otherwise: str) -> str:
    leases = {mark: took for mark, took in seconds.items() if mark.isalpha() or mark == MANY}
    for found in (leases, seconds):
        if found and 2 * sum(found.values()) >= piece:
            return max(found, key=lambda mark: found[mark])
    return otherwise


def _queue(timeline: Timeline, columns: int) -> str:
    """The greatest length of the queue in each piece, as a digit; `+` for ten and more."""
    bounds = _bounds(timeline, columns)
    cells = []
    for at in range(columns):
        most = max(_lengths(timeline.queue, bounds[at], bounds[at + 1]), default=0)
        cells.append(" " if most == 0 else str(most) if most < 10 else MANY)
    return "".join(cells).rstrip()


def _lengths(steps: tuple[QueueStep, ...], begin: float, end: float) -> Iterable[int]:
    for at, step in enumerate(steps):
        until = steps[at + 1].at.timestamp() if at + 1 < len(steps) else end
        if step.at.timestamp() < end and until > begin:
            yield step.length


def _bounds(timeline: Timeline, columns: int) -> list[float]:
    begin, end = timeline.from_at.timestamp(), timeline.to_at.timestamp()
    return [begin + (end - begin) * at / columns for at in range(columns + 1)]


def _times(timeline: Timeline, span: Span) -> tuple[float, float]:
    begin, end = timeline.from_at, timeline.to_at
    return (max(span.from_at or begin, begin).timestamp(), min(span.to_at or end, end).timestamp())


def _axis(timeline: Timeline, columns: int) -> str:
    """The times at both ends and in the middle, in local time."""
    begin, end = timeline.from_at.astimezone(), timeline.to_at.astimezone()
    length_s = (end - begin).total_seconds()

    def written(at: datetime) -> str:
        return f"{at:%a %H:%M}" if length_s > 86_400 / 2 else f"{at:%H:%M}"

    middle = written(begin + (end - begin) / 2)
    first, last = written(begin), written(end)
    line = first + middle.rjust(columns // 2 - len(first) + len(middle) // 2)
    return f"{line}{last.rjust(columns - len(line))}" if len(line) + len(last) < columns else f"{first} {last}"


def _wrapped(words: list[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 3 + len(word) > width:
            lines.append("")
        lines[-1] += f"   {word}" if lines[-1] else word
    return lines


def period(timeline: Timeline) -> str:
    """How long the picture is, and when it ends."""
    length_s = (timeline.to_at - timeline.from_at).total_seconds()
    return f"{format_duration(length_s)} until {timeline.to_at.astimezone():%Y-%m-%d %H:%M}"
