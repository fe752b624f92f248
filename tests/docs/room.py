"""A room for one page: a network, a host name and a /var/lib/gpulease of its own, and a shell in it."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.docs.pages import ROOT

HOST = "gpubox"
WITHIN_S = 120.0
MARK = "end-of-command"
ENTER = """
set -e
ip link set lo up && hostname "$2" && mkdir -p /var/lib/gpulease && mount --bind "$1" /var/lib/gpulease
exec bash --norc --noprofile
"""


class Room:
    """A shell that can do what a page says. Close it: everything that it has started ends."""

    def __init__(self, place: Path) -> None:
        self.place, self.log = place, place / "terminals.log"
        state, self.home = place / "state", place / "home"
        for directory in (state, self.home):
            directory.mkdir()
        state.chmod(0o711)
        (self.home / ".curlrc").write_text("no-progress-meter\n")  # as on a terminal
        (self.home / "examples").symlink_to(ROOT / "examples")
        unshare = ["unshare", "--net", "--mount", "--uts", *(() if os.geteuid() == 0 else ("--map-root-user",))]
        self.shell = subprocess.Popen(
            [*unshare, "bash", "-c", ENTER, "room", str(state), HOST],
            cwd=self.home, env=self._environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.network: int | None = None
        """Open until all has ended: else the kernel gives the number of this network to the next that is made."""

    def _environment(self) -> dict[str, str]:
        places = os.pathsep.join(str(ROOT / folder) for folder in ("protocol", "client", "worker", "server"))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        return kept | {
            "HOME": str(self.home),
            "USER": "root",
            "PATH": path,
            "PYTHONPATH": places,
            "LC_ALL": "C.UTF-8",
            "TERM": "dumb",
            "COLUMNS": "160",
            "OMP_NUM_THREADS": "1",
            # A machine that is busy with other tests is no broken driver.
            "GPULEASE_PROBE_DEADLINE_S": "50",
            "GPULEASE_CALL_DEADLINE_S": "40",
        }

    def run(self, command: str) -> tuple[str, int]:
        """What a command prints, on both its outputs, and its exit code."""
        assert self.shell.stdin is not None
        (self.place / "command").write_text(command + "\n")
        typed = f". {shlex.quote(str(self.place / 'command'))} </dev/null; printf '\\n{MARK} %s\\n' $?\n"
        self.shell.stdin.write(typed.encode())
        self.shell.stdin.flush()
        printed = self._read_until_mark(command)
        if self.network is None:
            self.network = os.open(f"/proc/{self.shell.pid}/ns/net", os.O_RDONLY)
        output, _, code = printed.rpartition(f"\n{MARK} ")
        return output, int(code)

    def _read_until_mark(self, command: str) -> str:
        assert self.shell.stdout is not None
        said, end = b"", time.monotonic() + WITHIN_S
        while not re.search(rf"\n{MARK} \d+\n$".encode(), said):
            ready, _, _ = select.select([self.shell.stdout], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self.shell.stdout.fileno(), 65536) if ready else b""
            why = "the shell has ended" if ready else f"not within {WITHIN_S} s"
            assert piece, f"{why}: {command}\n{said.decode(errors='replace')}\n{self.story()}"
            said += piece
        return said.decode()

    def start(self, command: str) -> None:
        """Run a command in a terminal of its own; if it is the daemon, until it can grant."""
        output, code = self.run(f"{{ {command.rstrip()}\n}} >>{shlex.quote(str(self.log))} 2>&1 &")
        assert code == 0, output
        if "gpulease serve" in command:
            ready = "for n in {1..600}; do curl -sf 127.0.0.1:8750/readyz >/dev/null && break; sleep 0.1; done"
            output, code = self.run(f"{ready}; curl -sS 127.0.0.1:8750/readyz >/dev/null")
            assert code == 0, f"{output}\n{self.story()}"

    def story(self) -> str:
        """What the other terminals show."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def close(self) -> None:
        """End whatever runs in this room's network."""
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self._send(signal.SIGTERM)
        with suppress(BrokenPipeError):
            self.shell.stdin.close()
        kill_from = time.monotonic() + 15.0
        while time.monotonic() < kill_from + 15.0 and (self.shell.poll() is None or self._inside()):
            if time.monotonic() > kill_from:
                # Again and again: what is killed may just have started another process.
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        self.shell.kill()
        self.shell.wait()
        self.shell.stdout.close()
        assert not self._inside(), self._names()
        if self.network is not None:
            os.close(self.network)
            self.network = None

    def _send(self, number: signal.Signals) -> None:
        for pid in self._inside():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _names(self) -> list[str]:
        """The command lines of what runs in this room's network, for who asks what was left."""
        found = []
        for pid in self._inside():
            with suppress(OSError):
                found.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
        return found

    def _inside(self) -> list[int]:
        if self.network is None:
            return []
        found, own = [], os.fstat(self.network).st_ino
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and os.stat(entry / "ns/net").st_ino == own:
                    found.append(int(entry.name))
        return found
