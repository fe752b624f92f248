"""Shows another command line for a process than it was started with: supervisors are found by theirs.

The kernel reads a command line from the memory of its process. So the process writes other words there, if they fit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_MM, PR_SET_MM_ARG_END = 35, 9
BEGIN, END = 45, 46
"""The places of `arg_start` and `arg_end` in /proc/PID/stat, counted from the state (proc(5) has 48 and 49)."""


def room(size_bytes: int) -> str:
    """A word that keeps room on the command line of a program that is to show another one."""
    return "-" * size_bytes


def show(words: Sequence[str]) -> None:
    """Show these words as the command line of this process. Where they do not fit, it stays as it is.

    Without the right to say where it ends (CAP_SYS_RESOURCE), empty words follow.
    """
    content = b"\0".join(word.encode(errors="surrogateescape") for word in words) + b"\0"
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/self/stat").read_text(errors="replace")
        fields = text[text.rindex(")") + 2 :].split()
        begin, end = int(fields[BEGIN]), int(fields[END])
        if 0 < len(content) <= end - begin:
            ctypes.memmove(begin, content.ljust(end - begin, b"\0"), end - begin)
            library, zero = ctypes.CDLL(None), ctypes.c_ulong(0)
            library.prctl(
                PR_SET_MM, ctypes.c_ulong(PR_SET_MM_ARG_END), ctypes.c_ulong(begin + len(content)), zero, zero
            )
