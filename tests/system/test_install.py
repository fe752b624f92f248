"""docs/install.md as it is written, on a host of its own: its /etc, /opt, /var/lib, /usr/local/bin and network.

There is no systemd in it. What its units would start is started here, and `gpulease setup` says so.
"""

from __future__ import annotations

import configparser
import os
import pty
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.daemon import eventually
from tests.docs.pages import ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.budget(300), pytest.mark.timeout(900)]

SET_UP = """
set -e
place=$1
ip link set lo up
cp -a /etc/. "$place/etc" && cp -a /usr/local/bin/. "$place/bin"
rm -rf "$place/etc/gpulease" "$place/etc/systemd/system/"gpulease* "$place/bin/gpulease"
printf 'ada:x:54322:54322::/tmp:/bin/sh\\nbob:x:54323:54323::/tmp:/bin/sh\\n' >> "$place/etc/passwd"
printf 'ada:x:54322:\\nbob:x:54323:\\n' >> "$place/etc/group"
sed -i '/^sudo:/d' "$place/etc/group" && echo 'sudo:x:27:ada' >> "$place/etc/group"
printf '#!/bin/sh\\nexec "$@"\\n' > "$place/bin/sudo" && chmod 755 "$place/bin/sudo"
mkdir "$place/kept" && cp -a --no-dereference /run/systemd "$place/kept/systemd" 2>/dev/null || true
rm -rf "$place/kept/systemd/system"
names=$(find /opt -mindepth 1 -maxdepth 1 -type d -printf '%f ')
for name in $names; do mkdir "$place/kept/$name" && mount --bind "/opt/$name" "$place/kept/$name"; done
mount -t tmpfs -o mode=755 none /opt
for name in $names; do
    [ "$name" = gpulease ] || { mkdir "/opt/$name"; mount --move "$place/kept/$name" "/opt/$name"; }
done
mount --bind "$place/etc" /etc
mount --bind "$place/bin" /usr/local/bin
mount -t tmpfs -o mode=755 none /var/lib
[ ! -d /run/systemd ] || { mount -t tmpfs -o mode=755 none /run/systemd; cp -a "$place/kept/systemd/." /run/systemd; }
echo ready
exec cat
"""
USERS = {"ada": 54322, "bob": 54323}
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
SECTIONS = ("Set up the host", "For its users", "Upgrade", "Uninstall")


def page() -> dict[str, list[str]]:
    """The commands of docs/install.md, by section."""
    file = ROOT / "docs" / "install.md"
    lines = file.read_text().splitlines()
    found: dict[str, list[str]] = {}
    for block in blocks(file):
        if block.language == "bash" and block.note("not run") is None:
            heading = next(line for line in reversed(lines[: block.line]) if line.startswith("## "))
            found.setdefault(heading.removeprefix("## "), []).extend(block.text.splitlines())
    return found


class Host:
    """The namespaces, in which commands run as root or as a user."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.programs: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for name in ("etc", "bin"):
            (self.place / name).mkdir()
        words = [
            "unshare",
            "--mount",
            "--net",
            "--propagation",
            "private",
            "bash",
            "-c",
            SET_UP,
            "bash",
            str(self.place),
        ]
        self.holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs:
            program.terminate()
        for program in self.programs:
            program.wait(60)
        self.holder.communicate("", timeout=60)

    def words(self, command: str, user: str = "root") -> list[str]:
        # pip reaches its index by the network of this machine, everything else is in the host's own.
        namespaces = ["--mount"] if re.search("/pip (install|wheel)", command) else ["--mount", "--net"]
        entering = ["nsenter", "--target", str(self.holder.pid), *namespaces]
        if user != "root":
            entering += ["setpriv", f"--reuid={USERS[user]}", f"--regid={USERS[user]}", "--init-groups"]
        return [*entering, "sh", "-c", f"cd {shlex.quote(str(ROOT if user == 'root' else '/tmp'))} && {command}"]

    def environment(self, more: str = "") -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
        lines = [line.partition("=") for line in more.splitlines() if "=" in line]
        return kept | {"PATH": PATH, "HOME": "/tmp", "LC_ALL": "C.UTF-8"} | {name: value for name, _, value in lines}

    def run(self, command: str, user: str = "root", code: int = 0) -> str:
        """What a command prints, typed at a terminal on which every question is answered with yes."""
        ours, theirs = pty.openpty()
        try:
            os.write(ours, b"y\n")
            done = subprocess.run(
                self.words(command, user),
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                text=True,
                timeout=600,
                check=False,
            )
        finally:
            os.close(ours)
            os.close(theirs)
        assert done.returncode == code, f"{command}: {done.stdout}"
        return done.stdout

    def start(self, unit: str) -> None:
        """Start what a unit starts, as it would: with its state directory and its environment."""
        parsed = configparser.ConfigParser(interpolation=None, strict=False)
        parsed.optionxform = str  # type: ignore[assignment, method-assign]
        parsed.read_string(self.run(f"cat /etc/systemd/system/{unit}"))
        service = parsed["Service"]
        directory = f"/var/lib/{service['StateDirectory']}"
        self.run(f"mkdir -p {directory} && chmod {service['StateDirectoryMode']} {directory}")
        file = service["EnvironmentFile"].removeprefix("-")
        environment = self.environment(self.run(f"cat {file} 2>/dev/null || true"))
        with (self.place / f"{unit}.log").open("wb") as log:
            words = self.words(f"exec {service['ExecStart']}")
            self.programs.append(subprocess.Popen(words, stdout=log, stderr=log, env=environment))

    def story(self) -> str:
        """What the daemon and the worker say."""
        return "".join(f"{file.name}: {file.read_text()}\n" for file in self.place.glob("*.log"))

    def stop(self) -> None:
        """Stop what the units have started."""
        for program in reversed(self.programs):
            program.terminate()
            program.wait(60)
        self.programs.clear()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    if os.geteuid() != 0:
        pytest.skip("only root makes a host of its own")
    with Host(tmp_path) as made:
        yield made


def test_the_page_installs_upgrades_and_uninstalls(host: Host) -> None:
    commands = page()
    assert tuple(commands) == SECTIONS
    *install, status = commands["Set up the host"]
    printed = [host.run(command) for command in install][-1]
    wheel = re.findall("For training environments: pip install (.*)", printed)
    assert wheel == host.run("ls /opt/gpulease/wheel/*").splitlines()
    (client,) = commands["For its users"]
    host.run(f"/usr/bin/python3 -m venv /opt/training && /opt/training/bin/{client}")
    assert "gpulease" in host.run("cd / && /opt/training/bin/gpulease --version", "bob")
    done = re.findall(r"done: (\w+ \S+)", printed)
    assert [word for word in done if "systemd" in word] == [
        f"write /etc/systemd/system/{unit}"
        for unit in ("gpulease.socket", "gpulease.service", "gpulease-worker.service")
    ]
    assert "systemd does not run here" in printed
    assert 'admins = ["@sudo"]' in host.run("gpulease config check && cat /etc/gpulease/config.toml", "bob")

    host.run("echo GPULEASE_SIMULATE=4 > /etc/gpulease/worker-environment")
    host.start("gpulease.service")
    host.start("gpulease-worker.service")
    eventually(lambda: host.run(f"{status}; true", "ada").count("free") >= 4, 120, host.story)
    assert host.run(status, "bob").count("free") >= 4
    assert "as the user bob" in host.run("gpulease run -n 1 -- sh -c 'echo as the user $(id -un)'", "bob")
    node = host.run("gpulease node list | awk 'END {print $1}'", "ada").strip()
    host.run(f"gpulease node drain {node}", "bob", code=1)
    host.run(f"gpulease node drain {node} && gpulease node resume {node}", "ada")  # of the group sudo

    host.run("echo '# mine' >> /etc/gpulease/config.toml")
    host.run("cd /opt/gpulease/wheel && mv gpulease-*.whl gpulease-0.0.9-py3-none-any.whl")
    printed = [host.run(command) for command in commands["Upgrade"]][-1]
    assert host.run("ls /opt/gpulease/wheel/*").splitlines() == wheel, "pip refuses two versions at once"
    daemon, worker = re.findall(r"a (?:daemon|worker) \(pid (\d+) of root\)", printed)
    assert "Restart the programs that were started before this version was installed" in printed
    assert host.run("tail -n 1 /etc/gpulease/config.toml") == "# mine\n"

    job = host.run("gpulease submit -n 1 --launcher plain -- sleep 600", "bob").strip()
    (uninstall,) = commands["Uninstall"]
    assert f"1 job has not ended: {job}." in host.run(uninstall, code=1)
    # Also without a daemon that knows of it.
    os.kill(int(daemon), signal.SIGTERM)
    host.programs[0].wait(60)
    refused = host.run(uninstall, code=1)
    assert f"cannot uninstall\n  why: 1 job has not ended: {job}." in refused
    (supervisor,) = re.findall(r"kill (\d+)", refused)
    host.run(f"kill {supervisor}")
    eventually(lambda: f"kill {worker}" in host.run(uninstall, code=1), 60, host.story)
    host.stop()
    host.run(f"{uninstall} --purge")
    left = host.run(
        "ls -d /opt/gpulease /etc/gpulease /var/lib/gpulease /usr/local/bin/gpulease /etc/systemd/system/gpulease*"
        " 2>/dev/null; true"
    )
    assert left == ""
