"""Standard streams that were closed when the program started, as by `>&-` or some daemons: they lead nowhere.

Otherwise the next file or pipe that is opened would get their number, and the command of `gpulease run` would write its
output into it.
"""

from __future__ import annotations

import os
import sys


def open_closed() -> None:
    """Open /dev/null in place of each standard stream that is closed, also for programs that this one starts."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - until the end
