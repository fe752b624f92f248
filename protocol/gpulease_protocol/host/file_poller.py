"""Notices changes of followed log files: one poller for all followers calls fstat(2) on each file every `POLL_S`.

Polling works on every file system, also where other hosts write. It costs one system call for each file and poll, in a
thread, because a file system may hang; while no one follows a log, nothing runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection

POLL_S = 0.1
"""Time between two polls."""
Signature = tuple[int, int] | None
"""Size and time of the last modification; None for a file that has been closed."""
NEVER_POLLED: Signature = (-1, -1)
Signatures = dict[int, Signature]
"""By file descriptor."""
RunInThread = Callable[[Callable[[Collection[int]], Signatures], Collection[int]], Awaitable[Signatures]]


class FilePoller:
    """Polls the files of all followers. For one event loop."""

    def __init__(self, run_in_thread: RunInThread) -> None:
        self._run_in_thread = run_in_thread
        self._followers: set[FileFollower] = set()
        self._task: asyncio.Task[None] | None = None

    def follow(self, changed: asyncio.Event) -> FileFollower:
        """A follower of no files yet; `changed` is set whenever one of its files changes."""
        return FileFollower(self, changed)

    def add(self, follower: FileFollower) -> None:
        """Poll the files of this follower."""
        self._followers.add(follower)
        if self._task is None:
            self._task = asyncio.create_task(self._poll())

    def remove(self, follower: FileFollower) -> None:
        """Undo `add`."""
        self._followers.discard(follower)

    async def _poll(self) -> None:
        try:
            while self._followers:
                descriptors = {descriptor for follower in self._followers for descriptor in follower.descriptors}
                signatures = await self._run_in_thread(_signatures, descriptors)
                for follower in self._followers:
                    follower.compare(signatures)
                await asyncio.sleep(POLL_S)
        finally:
            self._task = None


class FileFollower:
    """One follower's files, which it may open and close as it goes on."""

    def __init__(self, poller: FilePoller, changed: asyncio.Event) -> None:
        self._poller = poller
        self._changed = changed
        self._signatures: Signatures = {}

    @property
    def descriptors(self) -> Collection[int]:
        """The files and directories that it follows. A directory changes when a file appears in it."""
        return self._signatures.keys()

    def set_files(self, descriptors: Collection[int]) -> None:
        """Follow exactly these. A new one counts as changed at the next poll: it may have changed before."""
        self._signatures = {descriptor: self._signatures.get(descriptor, NEVER_POLLED) for descriptor in descriptors}
        if descriptors:
            self._poller.add(self)
        else:
            self._poller.remove(self)

    def close(self) -> None:
        """Follow nothing any more."""
        self.set_files(())

    def compare(self, signatures: Signatures) -> None:
        """Set the event if a file has another signature than at the last poll."""
        for descriptor, former in self._signatures.items():
            current = signatures.get(descriptor, former)
            if current != former:
                self._signatures[descriptor] = current
                self._changed.set()


def _signatures(descriptors: Collection[int]) -> Signatures:
    """The signature of each file. Blocks."""
    return {descriptor: _signature(descriptor) for descriptor in descriptors}


def _signature(descriptor: int) -> Signature:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
