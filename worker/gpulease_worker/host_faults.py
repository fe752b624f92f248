"""Errors of the host, such as no free file descriptor, thread or space on disk: the worker reports them and goes on.

What reads or writes in a place where a failure has a meaning of its own handles it there (a job is refused, an owner is
`unknown`, a GPU is not claimed). This is for all the rest. A worker that ended would help no one: its jobs would go on
unseen, and the next worker would meet the same error.

| where it happens | what follows |
|---|---|
| while the node is read | the report says so instead, and its GPUs are unknown |
| while a report is sent | it is logged, as for any daemon that does not answer; the next one follows |
| while a part of an answer is followed | the other parts are followed; the next report says so, without a reading |

Each is logged once until the node is read and the answer is followed without one. Meanwhile the worker pauses between
two reports as it does while the daemon is away, 2 s at most.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

NO_THREAD = "can't start new thread"
"""Message of the RuntimeError that `Thread.start` raises where the host has no thread left."""

log = logging.getLogger(__name__)


def is_of_host(error: BaseException) -> bool:
    """True for an error of the operating system; false for one of the program."""
    return isinstance(error, (OSError, MemoryError)) or (isinstance(error, RuntimeError) and NO_THREAD in str(error))


class HostFaults:
    """The errors of the host that the worker's loop meets."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """The first one since `take`, as a sentence; None where there is none."""
        self._logged: set[tuple[str, type[Exception], int | None]] = set()
        """What failed, and by which error; not its message, which may have a number that changes."""

    @contextmanager
    def noted(self, doing: str) -> Iterator[None]:
        """Note an error of the host instead of raising it. `doing`: what fails by it, as after "while"."""
        try:
            yield
        except Exception as error:
            if not is_of_host(error):
                raise
            what = f"This host does not let its worker go on while {doing}: {str(error) or type(error).__name__}."
            self.problem = self.problem or what
            key = doing, type(error), error.errno if isinstance(error, OSError) else None
            if key not in self._logged:
                self._logged.add(key)
                log.error("%s It tries again.", what, exc_info=error)

    def take(self) -> str | None:
        """The problem, and forget it."""
        problem, self.problem = self.problem, None
        return problem

    def end_turn(self, *problems: str | None) -> bool:
        """True if a turn has met no problem; what was logged is then logged again when it comes back."""
        if any(problems):
            return False
        if self._logged:
            self._logged.clear()
            log.info("this host lets its worker go on again")
        return True
