"""Tells when files change: one inotify instance for all who follow logs, read in the event loop.

Where inotify is not to be had (its limits are reached, `/proc` is not mounted), and on file systems that other hosts
write to, nobody is told, and whoever follows looks every LOOK_S.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import struct
from collections.abc import Collection
from contextlib import suppress

LOOK_S = 0.5
"""How often a file is looked at in any case."""
LOOK_UNTOLD_S = 0.1
"""The same where inotify is not to be had."""
MODIFIED, CREATED, MOVED_IN = 0x2, 0x100, 0x80
"""IN_MODIFY, IN_CREATE and IN_MOVED_TO of linux/inotify.h."""
EVENT = struct.Struct("iIII")

log = logging.getLogger("gpulease.api")


class Watching:
    """Who waits for which files. For one event loop."""

    def __init__(self) -> None:
        self._instance: int | None = None
        self._waiting: dict[int, set[asyncio.Event]] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._troubled = False

    def told(self, changed: asyncio.Event) -> Told:
        """Somebody whose `changed` is set when one of his files changes."""
        return Told(self, changed)

    def close(self) -> None:
        """Watch nothing any more."""
        if self._instance is not None:
            with suppress(RuntimeError):  # the loop is closed
                asyncio.get_running_loop().remove_reader(self._instance)
            os.close(self._instance)
        self._instance = None
        self._waiting = {}

    def add(self, descriptor: int, changed: asyncio.Event) -> int | None:
        """Have `changed` set when this file or directory changes; the mark to remove, None if that cannot be."""
        # By its descriptor: the path may lead elsewhere by now.
        path = f"/proc/self/fd/{descriptor}".encode()
        try:
            mark: int = self._libc.inotify_add_watch(self._open(), path, MODIFIED | CREATED | MOVED_IN)
            if mark < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        except OSError as error:
            if not self._troubled:
                self._troubled = True
                log.warning("logs are looked at every %g s instead of watched: %s", LOOK_UNTOLD_S, error)
            return None
        self._waiting.setdefault(mark, set()).add(changed)
        return mark

    def _open(self) -> int:
        if self._instance is None:
            instance = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if instance < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            self._instance = instance
            asyncio.get_running_loop().add_reader(instance, self._read)
        return self._instance

    def remove(self, mark: int, changed: asyncio.Event) -> None:
        """Undo `add`."""
        waiting = self._waiting.get(mark)
        if waiting is None:
            return  # the file is gone, and its mark with it
        waiting.discard(changed)
        if not waiting:
            del self._waiting[mark]
            if self._instance is not None:
                self._libc.inotify_rm_watch(self._instance, mark)

    def _read(self) -> None:
        assert self._instance is not None
        with suppress(BlockingIOError):
            events = os.read(self._instance, 2**16)
            place = 0
            while place < len(events):
                mark, mask, _, name_bytes = EVENT.unpack_from(events, place)
                place += EVENT.size + name_bytes
                # An overflow (mark -1) has lost somebody's event: all look.
                told = [self._waiting.get(mark, set())] if mark >= 0 else list(self._waiting.values())
                for waiting in told:
                    for changed in waiting:
                        changed.set()
                if mask & 0x8000:  # IN_IGNORED: the kernel has removed the mark
                    self._waiting.pop(mark, None)


class Told:
    """One who is told of changes to files, which he may open and close as he goes on."""

    def __init__(self, watching: Watching, changed: asyncio.Event) -> None:
        self._watching = watching
        self._changed = changed
        self._marks: dict[int, int | None] = {}

    @property
    def everything(self) -> bool:
        """False where some of his files cannot be watched."""
        return None not in self._marks.values()

    def of(self, descriptors: Collection[int]) -> bool:
        """Be told of exactly these. True if there are new ones, which may have changed before."""
        for gone in [known for known in self._marks if known not in descriptors]:
            self._forget(gone)
        new = [descriptor for descriptor in descriptors if descriptor not in self._marks]
        for descriptor in new:
            self._marks[descriptor] = self._watching.add(descriptor, self._changed)
        return bool(new)

    def close(self) -> None:
        """Be told of nothing any more."""
        for descriptor in list(self._marks):
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        mark = self._marks.pop(descriptor)
        if mark is not None and mark not in self._marks.values():
            self._watching.remove(mark, self._changed)
