"""Reads the log files of one attempt of a job, from any place on, as far as they go now. It blocks.

What was dropped of a file (`gpulease.log_files`) is skipped, with a note in its place. Several files are merged line by
line: a line, which a line feed or a carriage return ends, is sent when it is whole and under the name of its rank; one
over LINE_BYTES is cut.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from gpulease.log_files import kept_from, names_in, open_beneath

CHUNK_BYTES = 2**16
LINE_BYTES = 2**16
"""How much of a line is waited for when files are merged."""
TAIL_SCAN_BYTES = 2**24
"""How far back from the end of a file `tail` looks for lines."""
LAUNCHER = "launcher.log"
RANK_LOG = re.compile(r"rank-(\d{1,4})\.log")
LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
COPIED = re.compile(rb"\[default\d+\]:")
"""Begins a line that torchrun or accelerate has copied from a rank's file."""


def dropped(size_bytes: int) -> bytes:
    """The note in place of what was dropped."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"[... {size:.{0 if unit == 'bytes' else 1}f} {unit} of older output was dropped]\n".encode()


class _File:
    """One log file while it is read."""

    def __init__(self, name: str, prefix: bytes | None, offset: int) -> None:
        self.name = name
        self.prefix = prefix
        """What every line begins with; None passes the bytes on as they are."""
        self.offset = offset
        """Where what was not handed out yet begins."""
        self.descriptor: int | None = None
        self.copies: bool = False
        """True where lines that are copies of another file's are left out."""
        self._pending = b""
        self._ready = b""
        """Notes that come before what is read next."""
        self._fresh = True
        self._size = 0

    def open(self, logs: Path, tail: int | None) -> None:
        """Open it, unless it is open or not there yet; begin with its last lines where `tail` says how many."""
        if self.descriptor is not None:
            return
        # The directory is the job's user's: a link in it must not show him what this daemon may read.
        with suppress(OSError):
            self.descriptor = open_beneath(logs, self.name)
            if tail is not None:
                self.offset = _last_lines(self.descriptor, tail)
            self._skip()

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = None

    def sizes(self) -> tuple[int, int]:
        """Its length, and how much of that is still there."""
        if self.descriptor is None:
            return 0, 0
        size = os.fstat(self.descriptor).st_size
        return size, size - min(size, kept_from(self.descriptor, 0))

    def take(self, logs: Path, last: bool) -> bytes:
        """What comes next; empty when that is nothing now."""
        if self.descriptor is None:
            return b""
        while True:
            content, more = self._chunk()
            if content or not more:
                break
        if not content and self._replaced(logs):
            content = self._lines(b"", True) + self._note(b"[... it was started again; its new log begins]\n")
            former, self.descriptor = self.descriptor, None
            self.offset = 0
            self.open(logs, None)
            os.close(former)  # last, so that the new one has another number: by that it is known who is watched
            return content
        return content or (self._lines(b"", True) if last else b"")

    def _chunk(self) -> tuple[bytes, bool]:
        """A piece to hand out, and whether there is more to read."""
        assert self.descriptor is not None
        self._skip()
        if self._ready:
            ready, self._ready = self._ready, b""
            return ready, True
        start = self.offset + len(self._pending)
        hole = start + CHUNK_BYTES
        with suppress(OSError):
            hole = os.lseek(self.descriptor, start, os.SEEK_HOLE)
        read = os.pread(self.descriptor, min(CHUNK_BYTES, max(hole - start, 0)), start)
        if not read:
            return b"", False
        if kept_from(self.descriptor, start) != start:
            return b"", True  # it was dropped while it was read
        return self._lines(read, False), True

    def _skip(self) -> None:
        """Pass over what was dropped before it could be read."""
        assert self.descriptor is not None
        size = os.fstat(self.descriptor).st_size
        start = self.offset + len(self._pending)
        if size < self._size and size < start:  # somebody has cut it
            self.offset, self._pending, start = 0, b"", 0
            self._ready += self._note(b"[... the log was cut and begins anew]\n")
        self._size = size
        kept = kept_from(self.descriptor, start) if start < size else start
        if kept > start:
            self._ready += self._lines(b"", True) + self._note(dropped(kept - start))
            self.offset = kept

    def _replaced(self, logs: Path) -> bool:
        """True when another file has its name: the launcher has started its ranks again."""
        assert self.descriptor is not None
        try:
            return os.stat(logs / self.name, follow_symlinks=False).st_ino != os.fstat(self.descriptor).st_ino
        except OSError:
            return False

    def _note(self, note: bytes) -> bytes:
        line = (b"" if self._fresh else b"\n") + (self.prefix or b"") + note
        self._fresh = True
        return line

    def _lines(self, read: bytes, everything: bool) -> bytes:
        """What can be handed out of `read` and what was kept back before it."""
        found = self._pending + read
        if self.prefix is None:
            cut = len(found)
        else:
            # A carriage return at the very end may be half of a line's end.
            cut = max(found.rfind(b"\n"), found.rfind(b"\r", 0, -1)) + 1
            if everything or len(found) - cut > LINE_BYTES:
                cut = len(found)
        self._pending = found[cut:]
        self.offset += cut
        if not cut:
            return b""
        if self.prefix is None:
            self._fresh = found.endswith(b"\n")
            return found
        prefix = self.prefix
        lines = [line for line in LINE.findall(found[:cut]) if not (self.copies and COPIED.match(line))]
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            lines[-1] += b"\n"
        return b"".join(prefix + line for line in lines)


class LogReader:
    """The files of one attempt, or one of them.

    Args:
        logs: Their directory, which may be another user's.
        name: The file that is wanted; None merges those of all ranks and what only the launcher says.
        places: Where to begin in each file, by its key: its rank, or `launcher`. At the start where it is not there.
        tail: Begin with so many of each file's last lines; None begins at its place.
    """

    def __init__(self, logs: Path, name: str | None, places: dict[str, int], tail: int | None = None) -> None:
        self.logs = logs
        self._places = places
        self._tail = tail
        self._merged = name is None
        self._directory: int | None = None
        self._files: dict[str, _File] = {}
        self._turn = 0
        self._lock = threading.Lock()
        self._closed = False
        if name is not None:
            self._files[name] = _File(name, None, places.get(key_of(name), 0))

    def open(self) -> None:
        """Open what is there by now."""
        with self._lock:
            if not self._closed:
                self._open()

    def _open(self) -> None:
        if self._directory is None:
            with suppress(OSError):
                self._directory = os.open(self.logs, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if self._merged:
            self._find()
        for file in self._files.values():
            file.open(self.logs, self._tail)

    def close(self) -> None:
        """Close everything, once a read that goes on in another thread is over. Nothing is read afterwards."""
        with self._lock:
            self._closed = True
            for file in self._files.values():
                file.close()
            if self._directory is not None:
                os.close(self._directory)
                self._directory = None

    def take(self, last: bool) -> bytes:
        """What comes next, of one file after the other in turn; empty when that is nothing now.

        With `last` nothing more will be written, and lines that were not ended are handed out too.
        """
        with self._lock:
            if self._closed:
                return b""
            self._open()
            files = list(self._files.values())
            for _ in files:
                self._turn = (self._turn + 1) % len(files)
                if content := files[self._turn - 1].take(self.logs, last):
                    return content
            return b""

    @property
    def place(self) -> str:
        """Where the reading goes on: an offset, or one for each file that is merged."""
        if not self._merged:
            return str(next(iter(self._files.values())).offset)
        return ",".join(f"{key_of(file.name)}:{file.offset}" for file in self._files.values()) or "0"

    @property
    def descriptors(self) -> list[int]:
        """What to watch: the directory, where files may appear, and the files."""
        found = [self._directory, *(file.descriptor for file in self._files.values())]
        return [descriptor for descriptor in found if descriptor is not None]

    def sizes(self) -> tuple[int, int]:
        """Length of the files together, and how much of that is still there. In bytes."""
        with self._lock:
            sizes = [file.sizes() for file in self._files.values()]
        return sum(size for size, _ in sizes), sum(kept for _, kept in sizes)

    def _find(self) -> None:
        """Take up the files of the ranks that have appeared, and the launcher's unless it is a rank's."""
        with suppress(OSError):
            for name in sorted(names_in(self.logs, RANK_LOG), key=lambda name: int(key_of(name))):
                if name not in self._files:
                    self._files[name] = self._file(name, f"[rank {key_of(name)}] ")
            if LAUNCHER not in self._files and not self._launcher_is_a_rank():
                self._files[LAUNCHER] = self._file(LAUNCHER, "[launcher] ")
                self._files[LAUNCHER].copies = True

    def _file(self, name: str, prefix: str) -> _File:
        return _File(name, prefix.encode(), self._places.get(key_of(name), 0))

    def _launcher_is_a_rank(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self.logs / LAUNCHER), os.lstat(self.logs / "rank-0.log"))
        except OSError:
            return False


def key_of(name: str) -> str:
    """The rank in a file's name, or `launcher`."""
    found = RANK_LOG.fullmatch(name)
    return str(int(found[1])) if found else "launcher"


def _last_lines(descriptor: int, lines: int) -> int:
    """Where the last so many lines of a file begin; at most TAIL_SCAN_BYTES before its end."""
    size = place = os.fstat(descriptor).st_size
    least = max(kept_from(descriptor, 0), size - TAIL_SCAN_BYTES)
    left = lines
    while place > least and left > 0:
        begin = max(least, place - CHUNK_BYTES)
        chunk = os.pread(descriptor, place - begin, begin)
        at = len(chunk)
        while left > 0:
            # The line feed at the very end ends the last line, and begins none.
            at = chunk.rfind(b"\n", 0, at if begin + at < size else at - 1)
            if at < 0:
                break
            left -= 1
            if left == 0:
                return begin + at + 1
        place = begin
    return min(least, size) if lines else size
