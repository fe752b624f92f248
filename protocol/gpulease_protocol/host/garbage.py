"""When Python looks for garbage in a program: not while it starts, since nearly all that imports make stays, and
seldom while it serves.

Python's default is a search for each 700 objects that are made and kept, and through all objects after some 80,000. A
daemon of 10,000 GPUs keeps that many for a second in each two seconds, and its searches took a seventh of its CPU time,
60 ms at once. What it makes is without cycles, so its searches find next to nothing.
"""

from __future__ import annotations

import gc

STARTING = 100_000
"""So many objects are made before the first search. A short command ends before; a long one uses a few MiB more."""
SERVING = (20_000, *gc.get_threshold()[1:])
"""The same for a program that goes on, which may keep some MiB of garbage for longer."""


def starting() -> None:
    """Put searches off. The searches during a daemon's imports took an eighth of its start and found nothing."""
    gc.set_threshold(STARTING)


def started() -> None:
    """Search again, and never among the objects that are there now."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(*SERVING)
