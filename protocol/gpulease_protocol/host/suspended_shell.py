"""What the guard of `gpulease run` does for a shell in which `suspend` was typed: it stops too, as `su` does.

Otherwise the shell above would wait for `gpulease`, which goes on, and the terminal would belong to no one who reads
it. `fg` continues this process, which gives the terminal back to the suspended shell.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def stop_with(shell: int, parent: int) -> None:
    """Stop the group of this process, a child of `parent` in it, until it is continued; then continue the shell.

    Does nothing for a command that is no shell with jobs of its own, off a terminal, or where no shell could continue
    this process.
    """
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            group, own = os.getpgid(shell), os.getpgrp()
            is_in_foreground = os.tcgetpgrp(terminal) in (group, own)
            if group == own or own == os.getsid(0) or not is_in_foreground or os.getppid() != parent:
                return
            os.killpg(own, signal.SIGSTOP)  # all at once, so that `fg` finds none of them that is yet to stop
            if os.tcgetpgrp(terminal) == own:  # by `fg`, and not by `bg`
                os.tcsetpgrp(terminal, group)
            os.killpg(group, signal.SIGCONT)
        finally:
            os.close(terminal)
