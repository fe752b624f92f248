"""The daemon that is measured: executed as an installed program is, and the CPU time of its processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.table.load import cpu_s, pss_bytes
from gpulease_protocol.host import process_tree
from tests.daemon import DaemonProcess

PARTS = ("daemon", "worker", "probe")


class InstalledDaemon(DaemonProcess):
    """`gpulease serve` as people run it: executed. A forked one, as in tests, shares memory with where it came from."""

    @property
    def command(self) -> list[str]:
        options = ["serve", "--port", str(self.port), "--data-dir", str(self.data_dir), *self.options]
        return [str(Path(sys.executable).with_name("gpulease")), *options]

    @property
    def pid(self) -> int:
        """Of the daemon itself."""
        assert self.process is not None
        return self.process.pid

    def cpu_s(self) -> float:
        """CPU seconds of the daemon itself so far."""
        return cpu_s(self.pid)

    def parts(self) -> dict[str, int]:
        """Process ids of the daemon, its worker and its probe."""
        found = {"daemon": self.pid}
        for process in process_tree.descendants(self.pid):
            command = Path(f"/proc/{process.pid}/cmdline").read_text().replace("\0", " ")
            found["probe" if "probe" in command else "worker"] = process.pid
        return found

    def pss_bytes(self) -> int:
        """Memory of the daemon itself."""
        return pss_bytes(self.pid)


@contextmanager
def installed(directory: Path, *options: str) -> Iterator[InstalledDaemon]:
    """A ready daemon of its own with free GPUs, ended at the close."""
    running = InstalledDaemon(directory / "d", *options)
    try:
        running.start()
        if "--no-worker" not in options:
            running.wait_free()
        yield running
    finally:
        if running.process is not None:
            running.stop()
