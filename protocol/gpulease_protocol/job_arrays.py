"""Arrays: one submission for many jobs that differ in an index, with a limit on how many run at once."""

from __future__ import annotations

import re

MAX_JOBS = 1000
"""Jobs in one array, at most."""
MAX_INDEX = 10**9
"""The greatest index."""
INDEX_PLACEHOLDER = "{index}"
"""What stands for the index in a command."""
EXAMPLES = '"0-19", "1,4,9" or "0-100:10"'
_PART = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?")
_TEXT = re.compile(r"([^%]*)(?:%([0-9]{1,10}))?")
PATTERN = rf"^\s*{_PART.pattern}\s*(?:,\s*{_PART.pattern}\s*)*$"
"""What `indices` takes, for JSON Schema; not every text of this form goes upwards."""


def parse_indices(text: str) -> tuple[int, ...]:
    """The indices that a text names, in its order. Raises ValueError for one that means nothing, or over 1000 indices.

    Numbers and ranges with a comma between: both ends of a range belong to it, and `:N` takes every Nth of it.
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"indices: must be like {EXAMPLES}, not {text[:100]!r}")
        first = int(match[1])
        last, step = int(match[2] or first), int(match[3] or 1)
        if last < first or step < 1 or last > MAX_INDEX:
            raise ValueError(f"indices: {part.strip()!r} must go upwards, by 1 or more, to {MAX_INDEX} at most")
        if len(found) + (last - first) // step + 1 > MAX_JOBS:
            raise ValueError(f"indices: must name at most {MAX_JOBS}; submit several arrays")
        for index in range(first, last + 1, step):
            if index in found:
                raise ValueError(f"indices: names {index} twice")
            found[index] = None
    return tuple(found)


def parse_array(text: str) -> tuple[str, int | None]:
    """Indices and limit of the short form `0-19%3`; None without a limit. Raises ValueError."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"array: must be like {EXAMPLES}, with %N after it for N at once, not {text[:100]!r}")
    return match[1], None if match[2] is None else int(match[2])


def member_command(command: tuple[str, ...], index: int) -> tuple[str, ...]:
    """The command of one job of an array."""
    return tuple(word.replace(INDEX_PLACEHOLDER, str(index)) for word in command)


def member_environment(array_id: str, index: int) -> dict[str, str]:
    """What one job of an array finds in its environment."""
    return {"GPULEASE_ARRAY_ID": array_id, "GPULEASE_ARRAY_INDEX": str(index)}
