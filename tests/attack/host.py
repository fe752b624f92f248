"""A host for the standing attack: a network and mount namespace with a daemon as root and two ordinary users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from tests.daemon import PATIENT, Answer, DaemonProcess, eventually
from tests.http_as_user import call

REPOSITORY = Path(__file__).parents[2]
UIDS = {"root": 0, "eve": 54321, "ada": 54322, "bob": 54323}
PATIENCE_S = 60.0
"""How long a program of a user may take to do what it is for."""
UUIDS = tuple(f"GPU-00000000-0000-0000-0000-00000000000{index}" for index in range(4))
DATA_DIR = "/var/lib/gpulease"
"""Where the daemon of this host has its files, as seen on the host: the default for root."""
SET_UP = """
set -e
place=$1; shift
ip link set lo up
for file in passwd group hosts; do mount --bind "$place/etc/$file" "/etc/$file"; done
number=0
for word; do case $word in show:*)
    mkdir "$place/kept/$number"; mount --bind "${word#*:}" "$place/kept/$number"; number=$((number + 1))
esac; done
for word; do case $word in hide:*) mount -t tmpfs -o mode=755 none "${word#*:}"; esac; done
number=0
for word; do case $word in show:*)
    mkdir -p "${word#*:}"; mount --bind "$place/kept/$number" "${word#*:}"; number=$((number + 1))
esac; done
mount -t tmpfs -o mode=755 none /var/lib
mkdir /var/lib/gpulease
mount --bind "$place/data" /var/lib/gpulease
echo ready
exec cat
"""
"""What makes the namespace: loopback, names for the users, an interpreter that they may run, and a data directory."""


def closed_places() -> list[str]:
    """`hide:CLOSED` and `show:PLACE` for what programs need and what lies below a directory closed to users."""
    places = dict.fromkeys((REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)))
    closed = {
        place: [above for above in reversed(place.parents) if not above.stat().st_mode & 0o001] for place in places
    }
    hidden = dict.fromkeys(above[0] for above in closed.values() if above)
    return [f"hide:{above}" for above in hidden] + [f"show:{place}" for place, above in closed.items() if above]


class Program:
    """A program of one of the users; what it prints is kept in a file. Ended with all that it has forked."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id, the same on the host as here."""
        return self._process.pid

    def output(self) -> str:
        """What it has printed until now."""
        return self._output.read_text(errors="replace")

    def alive(self) -> bool:
        """True while it runs."""
        return self._process.poll() is None

    def wait_for(self, text: str) -> None:
        """Wait until it has printed this."""
        eventually(lambda: text in self.output() or not self.alive(), PATIENCE_S, self.output)
        assert text in self.output(), f"it has ended with {self._process.returncode}: {self.output()}"

    def wait(self) -> int:
        """Wait until it has ended; its exit code."""
        return self._process.wait(PATIENCE_S)

    def end(self) -> None:
        """SIGKILL to it and to what it has forked, until it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class HostDaemon(DaemonProcess):
    """`gpulease serve` as root on that host, with its default directory and port; asked over its socket."""

    def __init__(self, host: Host, *options: str, before: Sequence[str] = (), environment: Mapping[str, str]) -> None:
        super().__init__(host.data, *options, environment=environment)
        self.service = [*host.program, "serve", *options]
        self._words = [*host.entering("root"), *before, *self.service]

    @property
    def command(self) -> list[str]:
        return self._words

    def call(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Answer:
        """One request of root."""
        return call(self.socket, method, path, body, raw=raw, **headers)


class Host:
    """The namespace, its users and their programs. Everything ends with it."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="gpulease-attack-"))
        self.directory.chmod(0o755)
        self.data = self.directory / "data"
        self.socket = self.data / "gpulease.sock"
        self.simulation = self.directory / "simulation.json"
        self.program = (sys.executable, "-m", "gpulease_cli")
        self._holder: subprocess.Popen[str] | None = None
        self._programs: list[Program] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            pytest.skip("only root can be several users, in a namespace")
        try:
            self._make_files()
            words = ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", SET_UP, "sh"]
            words += [str(self.directory), *closed_places()]
            self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._holder.stdout is not None
            assert self._holder.stdout.readline() == "ready\n", "the namespace could not be made"
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _make_files(self) -> None:
        for name in ("etc", "data", "kept", "output", "home", "device"):
            (self.directory / name).mkdir(mode=0o700 if name == "data" else 0o755)
        for name, line in (("passwd", "{name}:x:{uid}:{uid}::{home}:/bin/sh\n"), ("group", "{name}:x:{uid}:\n")):
            lines = [line.format(name=user, uid=uid, home=self.home(user)) for user, uid in UIDS.items() if uid]
            (self.directory / "etc" / name).write_text(Path("/etc", name).read_text() + "".join(lines))
        (self.directory / "etc" / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        for user, uid in UIDS.items():
            self.home(user).mkdir(mode=0o700)
            os.chown(self.home(user), uid, uid)
        for index in range(len(UUIDS)):
            (self.directory / "device" / f"nvidia{index}").touch()
            (self.directory / "device" / f"nvidia{index}").chmod(0o666)
        self.show_on_gpus({})

    def _close(self) -> None:
        for program in self._programs:
            program.end()
        if self._holder is not None:
            self.end_all()
            self._holder.communicate("", timeout=PATIENCE_S)
        shutil.rmtree(self.directory)

    def end_all(self) -> None:
        """SIGKILL to what is left in the network namespace: no ordinary user's process leaves it."""

        def end() -> bool:
            left = [pid for pid in self.processes() if pid != self._pid]
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        eventually(end, PATIENCE_S, lambda: f"still there: {self.processes()}")

    @property
    def _pid(self) -> int:
        assert self._holder is not None
        return self._holder.pid

    def processes(self) -> list[int]:
        """Every living process of the host."""
        place = os.readlink(f"/proc/{self._pid}/ns/net")
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/net") == place:
                    found.append(pid)
        return found

    def home(self, user: str) -> Path:
        """The home of a user, closed to the others."""
        return self.directory / "home" / user

    def entering(self, user: str) -> list[str]:
        """The beginning of a command that runs as this user on the host."""
        words = ["nsenter", "--target", str(self._pid), "--mount", "--net"]
        words += ["--setuid", str(UIDS[user]), "--setgid", str(UIDS[user])] if user != "root" else []
        return [*words, "--"]

    def environ(self, user: str, more: Mapping[str, str]) -> dict[str, str]:
        """The environment of a login of this user."""
        plain = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "USER": user, "HOME": str(self.home(user))}
        return plain | {"PYTHONDONTWRITEBYTECODE": "1"} | dict(more)

    def start(self, user: str, *command: str, **environment: str) -> Program:
        """Start a program as this user; it is ended with the host at the latest."""
        output = self.directory / "output" / str(len(self._programs))
        program = Program([*self.entering(user), *command], self.environ(user, environment), output)
        self._programs.append(program)
        return program

    @contextmanager
    def running(self, user: str, *command: str, **environment: str) -> Iterator[Program]:
        """A program of this user, ended at the close."""
        program = self.start(user, *command, **environment)
        try:
            yield program
        finally:
            program.end()

    def completed(self, user: str, *command: str, **environment: str) -> tuple[int, str]:
        """Run a program to its end; its exit code and what it has printed."""
        with self.running(user, *command, **environment) as program:
            return program.wait(), program.output()

    def gpulease(self, user: str, *words: str, **environment: str) -> tuple[int, str]:
        """Run the program `gpulease` to its end; its exit code and what it has printed."""
        return self.completed(user, *self.program, *words, **environment)

    def daemon(self, *options: str, before: Sequence[str] = (), **environment: str) -> HostDaemon:
        """The daemon of this host, not started yet. It simulates the GPUs of `show_on_gpus`."""
        environment = PATIENT | {"GPULEASE_DEVICE_FILES": str(self.directory / "device" / "nvidia")} | environment
        words = ("--simulate", str(self.simulation), *options)
        return HostDaemon(self, *words, before=before, environment=environment)

    def call(self, user: str, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """One request of this user over the socket of the daemon."""
        return call(self.socket, method, path, body, uid=UIDS[user], **more)

    def show_on_gpus(self, pids: Mapping[str, Sequence[int]]) -> None:
        """Have the driver list these processes on GPUs, by UUID."""
        gpus = [
            {"uuid": uuid, "processes": [{"pid": pid, "memory_bytes": 2**28} for pid in pids.get(uuid, ())]}
            for uuid in UUIDS
        ]
        written = self.simulation.with_suffix(".new")
        written.write_text(json.dumps({"gpus": gpus}))
        written.replace(self.simulation)


def python(source: str, *arguments: str) -> list[str]:
    """A command that runs a snippet with nothing but the standard library."""
    return [sys.executable, "-I", "-S", "-c", source, *arguments]
