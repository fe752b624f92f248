"""When Python looks for garbage in a program: not while it starts, since nearly all that imports make stays."""

from __future__ import annotations

import gc

STARTING = 100_000
"""So many objects are made before the first search. A short command ends before; a long one uses a few MiB more."""
USUAL = gc.get_threshold()


def starting() -> None:
    """Put searches off. The searches during a daemon's imports took an eighth of its start and found nothing."""
    gc.set_threshold(STARTING)


def started() -> None:
    """Search as usual, and never again among the objects that are there now."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(*USUAL)
