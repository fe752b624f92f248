"""Reads the log files of one attempt of a job, from any offset to their current end. Blocks.

Output that was dropped from a file (`gpulease_protocol.host.log_files`) is skipped, with a note in its place. Several
files are merged by lines: a line, which ends with a line feed or carriage return, is sent when it is complete, after
the name of its rank. A line over `LINE_BYTES` is split. Lines of the launcher on one of several nodes follow the name
of that node.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.host.log_files import kept_from, names_in, open_beneath, open_directory, stat_beneath

CHUNK_BYTES = 2**16
LINE_BYTES = 2**16
"""The longest line that is sent whole when files are merged."""
TAIL_SCAN_BYTES = 2**24
"""How far back from the end of a file `tail` looks for lines."""
MAX_RANKS = 64
"""Ranks that are merged at most, the lowest ones: a job can make any number of log files, and each stays open."""
MAX_OPEN_FILES = 1024
"""Files of one user's jobs that a process has open at a time, for all who read them."""
LAUNCHER = "launcher.log"
RANK_LOG = re.compile(r"rank-(\d{1,4})\.log")
LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
COPIED_LINE = re.compile(rb"\[default\d+\]:")
"""Beginning of a line that torchrun or accelerate has copied from the file of a rank."""


def dropped_note(size_bytes: int) -> bytes:
    """The note in place of dropped output."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"[... {size:.{0 if unit == 'bytes' else 1}f} {unit} of older output was dropped]\n".encode()


class OpenFiles:
    """Counts the files that are open, by the user who owns them. For all threads of a process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._count = Counter[int]()

    def add(self, uid: int) -> None:
        """Count one more. Raises Unavailable where its user has as many as one may."""
        with self._lock:
            if self._count[uid] >= self._most:
                raise Unavailable(f"{self._most} log files of one user are being read.", remedy="Ask again later.")
            self._count[uid] += 1

    def remove(self, uid: int) -> None:
        """Count one less."""
        with self._lock:
            self._count[uid] -= 1
            self._count += Counter()  # drops users without any


OPEN_FILES = OpenFiles(MAX_OPEN_FILES)


class _File:
    """One log file while it is read."""

    def __init__(self, name: str, prefix: bytes | None, offset: int, chunk_bytes: int) -> None:
        self.name = name
        self._chunk_bytes = chunk_bytes
        self.prefix = prefix
        """Beginning of every line; None passes the bytes on unchanged."""
        self.offset = offset
        """Where the bytes begin that have not been returned yet."""
        self.descriptor: int | None = None
        self._uid = 0
        """Who owns it, while it is open."""
        self.skip_copies: bool = False
        """True if lines that are copies from another file are left out."""
        self._pending = b""
        self._ready = b""
        """Notes to return before what is read next."""
        self._at_line_start = True
        self._size = 0

    def open(self, logs: Path, tail: int | None) -> None:
        """Open it, unless it is open or does not exist yet; with `tail`, begin with that number of last lines. Raises
        Unavailable where too many of its user are open."""
        if self.descriptor is not None:
            return
        # The directory belongs to the job's user: a link in it must not give access to what only this daemon may read.
        with suppress(OSError):
            self._open(logs)
            assert self.descriptor is not None
            if tail is not None:
                self.offset = _tail_offset(self.descriptor, tail)
            self._skip()

    def _open(self, logs: Path) -> None:
        descriptor = open_beneath(logs, self.name)
        try:
            uid = os.fstat(descriptor).st_uid
            OPEN_FILES.add(uid)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor, self._uid = descriptor, uid

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            OPEN_FILES.remove(self._uid)
        self.descriptor = None

    def sizes(self) -> tuple[int, int]:
        """Its length, and how much of that has not been dropped."""
        if self.descriptor is None:
            return 0, 0
        size = os.fstat(self.descriptor).st_size
        return size, size - min(size, kept_from(self.descriptor, 0))

    def take(self, logs: Path, last: bool) -> bytes:
        """The next bytes; empty if there are none now."""
        if self.descriptor is None:
            return b""
        while True:
            content, more = self._chunk()
            if content or not more:
                break
        if not content and self._replaced(logs):
            content = self._lines(b"", True) + self._note(b"[... it was started again; its new log begins]\n")
            former, uid, self.descriptor = self.descriptor, self._uid, None
            self.offset = 0
            OPEN_FILES.remove(uid)
            try:
                self.open(logs, None)
            finally:
                os.close(former)  # last, so that the new one has another number: the poller tells files apart by it
            return content
        return content or (self._lines(b"", True) if last else b"")

    def _chunk(self) -> tuple[bytes, bool]:
        """The next bytes, and whether there is more to read."""
        assert self.descriptor is not None
        self._skip()
        if self._ready:
            ready, self._ready = self._ready, b""
            return ready, True
        start = self.offset + len(self._pending)
        hole = start + self._chunk_bytes
        with suppress(OSError):
            hole = os.lseek(self.descriptor, start, os.SEEK_HOLE)
        read = os.pread(self.descriptor, min(self._chunk_bytes, max(hole - start, 0)), start)
        if not read:
            return b"", False
        if kept_from(self.descriptor, start) != start:
            return b"", True  # it was dropped during the read
        return self._lines(read, False), True

    def _skip(self) -> None:
        """Skip output that was dropped before it was read."""
        assert self.descriptor is not None
        size = os.fstat(self.descriptor).st_size
        start = self.offset + len(self._pending)
        if size < self._size and size < start:  # it was truncated
            self.offset, self._pending, start = 0, b"", 0
            self._ready += self._note(b"[... the log was truncated and begins again]\n")
        self._size = size
        kept = kept_from(self.descriptor, start) if start < size else start
        if kept > start:
            self._ready += self._lines(b"", True) + self._note(dropped_note(kept - start))
            self.offset = kept

    def _replaced(self, logs: Path) -> bool:
        """True if another file has its name now: the launcher has started its ranks again."""
        assert self.descriptor is not None
        try:
            return stat_beneath(logs, self.name).st_ino != os.fstat(self.descriptor).st_ino
        except OSError:
            return False

    def _note(self, note: bytes) -> bytes:
        line = (b"" if self._at_line_start else b"\n") + (self.prefix or b"") + note
        self._at_line_start = True
        return line

    def _lines(self, read: bytes, everything: bool) -> bytes:
        """The complete lines of `read` and of what was kept back before it."""
        available = self._pending + read
        if self.prefix is None:
            cut = len(available)
        else:
            # A carriage return at the very end may be the first half of a CRLF.
            cut = max(available.rfind(b"\n"), available.rfind(b"\r", 0, -1)) + 1
            if everything or len(available) - cut > LINE_BYTES:
                cut = len(available)
        self._pending = available[cut:]
        self.offset += cut
        if not cut:
            return b""
        if self.prefix is None:
            self._at_line_start = available.endswith(b"\n")
            return available
        prefix = self.prefix
        lines = [line for line in LINE.findall(available[:cut]) if not (self.skip_copies and COPIED_LINE.match(line))]
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            lines[-1] += b"\n"
        return b"".join(prefix + line for line in lines)


class LogReader:
    """The files of one attempt, or one of them.

    Args:
        logs: Their directory, which may belong to another user.
        name: The file to read; None merges those of all ranks and what only the launcher has printed.
        offsets: Where to begin in each file, by its key: its rank, or `launcher`. Default: at its start.
        tail: Begin with this number of last lines of each file; None: at its offset.
        label: The launcher's lines come after this name in brackets, also where no other file is read; None: after
            `[launcher]`, and unchanged where no other file is read.
        chunk_bytes: How much of a file is read at a time.
    """

    def __init__(
        self,
        logs: Path,
        name: str | None,
        offsets: dict[str, int],
        tail: int | None = None,
        *,
        label: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.logs = logs
        self._label = label
        self._offsets = offsets
        self._tail = tail
        self._merged = name is None
        self._chunk_bytes = chunk_bytes
        self._directory: int | None = None
        self._files: dict[str, _File] = {}
        self._turn = 0
        self._lock = threading.Lock()
        self._closed = False
        if name is not None:
            prefix = None if label is None or name != LAUNCHER else f"[{label}] ".encode()
            self._files[name] = _File(name, prefix, offsets.get(key_of(name), 0), chunk_bytes)

    def open(self) -> None:
        """Open the files that exist by now. Raises Unavailable, as `take`, where too many of their user are open."""
        with self._reading():
            if not self._closed:
                self._open()

    def _open(self) -> None:
        if self._directory is None:
            with suppress(OSError):
                self._directory = open_directory(self.logs)
        if self._merged:
            self._add_files()
        for file in self._files.values():
            file.open(self.logs, self._tail)

    def close(self) -> None:
        """Close all files; a read in another thread closes them when it ends. Nothing is read afterwards."""
        self._closed = True
        self._close_unless_read()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            if self._closed:
                self._close_unless_read()

    def _close_unless_read(self) -> None:
        """Close all files, unless a read holds the lock. Does not wait for that: it may hang."""
        if self._lock.acquire(blocking=False):
            try:
                for file in self._files.values():
                    file.close()
                if self._directory is not None:
                    os.close(self._directory)
                    self._directory = None
            finally:
                self._lock.release()

    def take(self, last: bool) -> bytes:
        """The next bytes, from the files in turn; empty if there are none now.

        With `last`, nothing more will be written, and incomplete lines are returned too.
        """
        with self._reading():
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
    def offset(self) -> str:
        """Where to continue reading: an offset, or one for each file that is merged."""
        if not self._merged:
            return str(next(iter(self._files.values())).offset)
        return ",".join(f"{key_of(file.name)}:{file.offset}" for file in self._files.values()) or "0"

    @property
    def descriptors(self) -> list[int]:
        """What to poll: the directory, where files may appear, and the files."""
        descriptors = [self._directory, *(file.descriptor for file in self._files.values())]
        return [descriptor for descriptor in descriptors if descriptor is not None]

    def sizes(self) -> tuple[int, int]:
        """Total length of the files, and how much of that has not been dropped. In bytes."""
        with self._reading():
            sizes = [file.sizes() for file in self._files.values()]
        return sum(size for size, _ in sizes), sum(kept for _, kept in sizes)

    def _add_files(self) -> None:
        """Add the files of ranks that have appeared, and the launcher's unless it is that of a rank."""
        with suppress(OSError):
            for name in sorted(names_in(self.logs, RANK_LOG), key=lambda name: int(key_of(name))):
                if name not in self._files and len(self._files) < MAX_RANKS:
                    self._files[name] = self._file(name, f"[rank {key_of(name)}] ")
            if LAUNCHER not in self._files and not self._launcher_is_a_rank():
                self._files[LAUNCHER] = self._file(LAUNCHER, f"[{self._label or 'launcher'}] ")
                self._files[LAUNCHER].skip_copies = True

    def _file(self, name: str, prefix: str) -> _File:
        return _File(name, prefix.encode(), self._offsets.get(key_of(name), 0), self._chunk_bytes)

    def _launcher_is_a_rank(self) -> bool:
        """True where it has the file of the first rank on this node, which is 0 on the first of several nodes."""
        ranks = [name for name in self._files if name != LAUNCHER]
        try:
            return bool(ranks) and os.path.samestat(
                stat_beneath(self.logs, LAUNCHER), stat_beneath(self.logs, ranks[0])
            )
        except OSError:
            return False


def key_of(name: str) -> str:
    """The rank in a file's name, or `launcher`."""
    match = RANK_LOG.fullmatch(name)
    return str(int(match[1])) if match else "launcher"


def _tail_offset(descriptor: int, lines: int) -> int:
    """Where the last `lines` lines of a file begin; at most `TAIL_SCAN_BYTES` before its end."""
    size = position = os.fstat(descriptor).st_size
    earliest = max(kept_from(descriptor, 0), size - TAIL_SCAN_BYTES)
    left = lines
    while position > earliest and left > 0:
        start = max(earliest, position - CHUNK_BYTES)
        chunk = os.pread(descriptor, position - start, start)
        at = len(chunk)
        while left > 0:
            # The line feed at the very end ends the last line, and begins none.
            at = chunk.rfind(b"\n", 0, at if start + at < size else at - 1)
            if at < 0:
                break
            left -= 1
            if left == 0:
                return start + at + 1
        position = start
    return min(earliest, size) if lines else size
