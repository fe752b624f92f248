"""Hosts on this machine's kernel, as far as programs see: each has a network, a name, process ids, a boot id and a
private disk of its own.

A host is the pid 1 of a pid namespace, with a mount, a UTS and a network namespace. Its one network card is plugged
into a switch, which is a bridge in a network namespace of its own; so is one of the machine that runs the tests.
`cut` unplugs it there: packets are lost and nothing is refused. `power_off` kills its pid 1, and so everything on it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.network_namespace import ip

DISK = "/srv"
"""Where each host has a disk of its own, which no other host sees."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"
BOOT = f"""
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs private {DISK}
printf '%s\\n' "$2" > {DISK}/boot_id
mount --bind {DISK}/boot_id {BOOT_ID}
hostname "$1"
ip link set lo up
echo up
exec >/dev/null
trap : CHLD TERM
while :; do sleep infinity & wait; done
"""


class Switch:
    """The network between hosts. Needs root."""

    def __init__(self) -> None:
        command = ["unshare", "--net", "sh", "-c", "echo up; exec sleep infinity >/dev/null"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        _await_up(self._process)
        self.net = f"198.19.{os.getpid() % 251}"
        self._names = 0
        self._hosts: list[Host] = []
        self.card = f"glh{os.getpid() % 100_000}"
        """Of the machine that runs the tests."""
        self.address = f"{self.net}.254"

    def start(self) -> None:
        self.inside("link", "add", "br0", "type", "bridge")
        self.inside("link", "set", "br0", "up")
        ip("link", "add", self.card, "type", "veth", "peer", "name", "p254", "netns", str(self._process.pid))
        ip("address", "add", f"{self.address}/24", "dev", self.card)
        ip("link", "set", self.card, "up")
        self.inside("link", "set", "p254", "master", "br0", "up")

    def boot(self, name: str, *, boot_id: str | None = None) -> Host:
        """A host that is up."""
        self._names += 1
        host = Host(self, name, self._names, boot_id or str(uuid.uuid4()))
        self._hosts.append(host)
        return host

    def inside(self, *words: str) -> str:
        return ip(*words, before=("nsenter", "--target", str(self._process.pid), "--net"))

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        for host in self._hosts:
            host.power_off()
        self._process.kill()
        self._process.wait()
        subprocess.run(["ip", "link", "delete", self.card], check=False, capture_output=True)


class Host:
    """One host. Its name and boot id are its own; its directory `/srv` is, too."""

    def __init__(self, switch: Switch, name: str, number: int, boot_id: str) -> None:
        self._switch, self._port = switch, f"p{number}"
        self.name, self.address = name, f"{switch.net}.{number}"
        enter = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "bash", "-c", BOOT]
        self._process = subprocess.Popen([*enter, "host", name, boot_id], stdout=subprocess.PIPE, text=True)
        _await_up(self._process)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.init = int(children[0])
        card = f"c{number}"
        switch.inside("link", "add", self._port, "type", "veth", "peer", "name", card, "netns", str(self.init))
        switch.inside("link", "set", self._port, "master", "br0", "up")
        self._inside("link", "set", card, "name", "eth0")
        self._inside("address", "add", f"{self.address}/24", "dev", "eth0")
        self._inside("link", "set", "eth0", "up")

    def _inside(self, *words: str) -> str:
        return ip(*words, before=("nsenter", "--target", str(self.init), "--net"))

    def command(self, *words: str, **environment: str) -> list[str]:
        """What runs a command on this host, in its own disk."""
        settings = [f"{name}={value}" for name, value in environment.items()]
        enter = ["nsenter", "--target", str(self.init), "--mount", "--uts", "--net", "--pid", "--wd=/srv"]
        return [*enter, "env", *settings, *words]

    def popen(self, *words: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command here; what it prints goes to a log that the tests see."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(*words, **environment), stdout=output, stderr=output, env=clean(), start_new_session=True
            )

    def run(self, *words: str, timeout_s: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command here to its end."""
        command = self.command(*words, **environment)
        return subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=timeout_s, check=False)

    def gpulease(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the program here."""
        return self.run(sys.executable, "-P", "-m", "gpulease_cli", *words, **environment)

    def sh(self, text: str) -> str:
        """What a line of shell prints here; it must succeed."""
        done = self.run("sh", "-c", text)
        assert done.returncode == 0, (shlex.quote(text), done.stderr)
        return done.stdout

    def cut(self) -> None:
        """Unplug its card at the switch: packets are lost, in both directions."""
        self._switch.inside("link", "set", self._port, "nomaster")

    def repair(self) -> None:
        """Plug it in again."""
        self._switch.inside("link", "set", self._port, "master", "br0")

    def power_off(self) -> None:
        """Everything on it ends at once, and nothing is said."""
        self._process.kill()
        self._process.wait()


def _await_up(process: subprocess.Popen[str]) -> None:
    """Return when it is in its own namespaces, and no command for it would reach this machine's."""
    assert process.stdout is not None
    with process.stdout as printed:
        assert printed.readline() == "up\n"


def clean() -> Mapping[str, str]:
    """This process's variables, without those of gpulease."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}


@contextmanager
def switch() -> Iterator[Switch]:
    """A network for hosts, which are gone afterwards. Skips the test without root."""
    if os.geteuid() != 0:
        pytest.skip("hosts as namespaces take root")
    network = Switch()
    try:
        network.start()
        yield network
    finally:
        network.close()
