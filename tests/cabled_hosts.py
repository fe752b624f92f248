"""Hosts for tests: namespaces with a network, a name, processes and disks of their own, and a cable between two.

Private processes and disks matter: with a namespace of the network alone all hosts would see each other's files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import pytest

from tests.network_namespace import ip

INIT = """
import os, socket, subprocess, sys
socket.sethostname(sys.argv[1])
for place in ("/var/lib", "/srv", "/etc/gpulease"):
    os.makedirs(place, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
print("up", flush=True)
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        if not sys.stdin.buffer.read(1):
            break
"""
"""The first process of a host: when it ends, so does everything there."""


class Host:
    """A host that is root's; needs root. Its disks are empty."""

    def __init__(self, name: str) -> None:
        self.name = name
        if os.geteuid() != 0:
            pytest.skip("namespaces take root")
        kinds = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["unshare", *kinds, sys.executable, "-c", INIT, name]
        self._outer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == "up\n"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text()
        self.pid = int(children.split()[0])
        """Pid of its first process, as seen by the test."""
        self.started: list[subprocess.Popen[bytes]] = []
        self._words("ip", "link", "set", "lo", "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._outer.kill()
        self._outer.communicate()
        for process in self.started:
            process.kill()
            process.wait()

    def inside(self, *words: str) -> list[str]:
        """The command line that runs a program there."""
        return ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--net", "--pid", "--", *words]

    def _words(self, *words: str) -> None:
        subprocess.run(self.inside(*words), check=True, timeout=60)

    def run(self, *words: str, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program there, until it ends."""
        return subprocess.run(
            self.inside(*words),
            input=text,
            env=environment(variables),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def gpulease(self, *words: str, text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command line there."""
        return self.run(sys.executable, "-m", "gpulease_cli", *words, text=text, **variables)

    def start(self, output: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start the command line there, and let it run."""
        return self.launch(output, sys.executable, "-m", "gpulease_cli", *words, **variables)

    def launch(self, output: Path, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program there, and let it run."""
        with output.open("ab") as log:
            process = subprocess.Popen(
                self.inside(*words),
                env=environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's variables, without those of gpulease, and these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPULEASE_", "XDG_"))}
    return kept | {"PYTHONPATH": str(Path(__file__).parents[1])} | dict(variables)


def connect(first: Host, second: Host, addresses: tuple[str, str], interface: str = "wire0") -> None:
    """A cable between two hosts, with an address at each end."""
    ends = ("netns", str(first.pid), "type", "veth", "peer", "name", interface, "netns", str(second.pid))
    ip("link", "add", interface, *ends)
    for host, address in zip((first, second), addresses, strict=True):
        host._words("ip", "address", "add", f"{address}/24", "dev", interface)
        host._words("ip", "link", "set", interface, "up")
