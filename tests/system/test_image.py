"""The container image, built from the Dockerfile with buildah, serves.

The base image is made by mmdebstrap from the Debian release of this machine and tagged as the Dockerfile's. Mirrors,
indexes, proxies and certificates are those that apt and pip of this machine are configured with.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon import eventually
from tests.http_as_user import call
from tests.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.busy("image"),
    pytest.mark.budget(300),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a root file system"),
]

ROOT = Path(__file__).parents[2]
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates,passwd"
POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'
"""Of images that are built here and never fetched."""
IMAGE = "gpulease-under-test"
START_S = 120.0


class Builder:
    """buildah with a storage of its own."""

    def __init__(self, directory: Path) -> None:
        policy = directory / "policy.json"
        policy.write_text(POLICY)
        self.policy = ["--signature-policy", str(policy)]
        # vfs copies every layer; overlay mounts them, but not on top of another overlay, as in a container.
        self.command = self.stored(directory, "overlay")
        if subprocess.run([*self.command, "info"], capture_output=True, timeout=100, check=False).returncode != 0:
            self.command = self.stored(directory, "vfs")

    @staticmethod
    def stored(directory: Path, driver: str) -> list[str]:
        """buildah with a driver, and a storage of that driver."""
        places = ["--root", str(directory / driver), "--runroot", str(directory / "run")]
        return ["buildah", *places, "--storage-driver", driver]

    def run(self, subcommand: str, *arguments: str) -> str:
        """Run one of buildah's commands; what it prints."""
        signed = self.policy if subcommand in ("build", "commit", "from") else []
        return output([*self.command, subcommand, *signed, *arguments])

    def base(self, root: Path, name: str) -> None:
        """Make a base image from a root file system."""
        container = self.run("from", "scratch")
        self.run("add", "--quiet", container, str(root), "/")
        self.run("commit", "--quiet", "--rm", container, name)

    def build(self, name: str, volumes: list[str]) -> None:
        """Build the Dockerfile."""
        mounted = [word for volume in volumes for word in ("--volume", f"{volume}:ro")]
        options = ["--isolation", "chroot", "--pull-never", "--layers=false", "--format", "docker"]
        self.run("build", *options, *mounted, "--tag", name, str(ROOT))

    def config(self, name: str) -> dict[str, Any]:
        """What the image says about how it is run."""
        found: dict[str, Any] = json.loads(self.run("inspect", "--type", "image", name))["Docker"]["config"]
        return found

    def start(self, container: str, *command: str) -> list[str]:
        """The command line that runs a command in a container."""
        return [*self.command, "run", "--isolation", "chroot", container, "--", *command]


def output(command: list[str]) -> str:
    """What a command prints; it must succeed."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert ran.returncode == 0, f"{command}: {ran.stdout[-4000:]}{ran.stderr[-4000:]}"
    return ran.stdout.strip()


def make_root(directory: Path) -> Path:
    """A Debian root file system with Python, from the mirror that apt uses."""
    release = dict(
        re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.MULTILINE),
    )["VERSION_CODENAME"]
    targets = ["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {release}"]
    mirror = output(["apt-get", *targets]).split("\n")[0]
    root = directory / "base"
    output(["mmdebstrap", "--quiet", "--variant=essential", f"--include={PACKAGES}", release, str(root), mirror])
    return root


def pip_volumes(directory: Path) -> list[str]:
    """The configuration of this machine's pip, and the files and directories that it names, as `SOURCE:TARGET`."""
    listed = output([sys.executable, "-m", "pip", "config", "list"])
    settings = dict(re.findall(r"^[\w:.-]*?([\w-]+)='(.*)'$", listed, re.MULTILINE))
    file = directory / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    volumes = [f"{file}:/etc/pip.conf"]
    for is_url, named in re.findall(r"(file://)?(/[^\s']+)", " ".join(settings.values())):
        path = Path(named).parent if is_url else Path(named)  # an index links to files beside it
        if path.exists():
            volumes.append(f"{path}:{path}")
    return list(dict.fromkeys(volumes))


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """buildah, with the image built."""
    directory = tmp_path_factory.mktemp("image")
    made = Builder(directory)
    (base,) = set(re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    try:
        made.base(make_root(directory), base)
        made.build(IMAGE, pip_volumes(directory))
        yield made
    finally:
        # A container whose buildah was killed is still mounted, and pytest could not remove what is mounted.
        subprocess.run([*made.command, "rm", "--all"], timeout=100, check=False)
        subprocess.run(["rm", "-rf", str(directory)], timeout=600, check=False)  # a gigabyte, which pytest would keep


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A container's process, ended at the close with all its descendants."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield process
    finally:
        descendants = psutil.Process(process.pid).children(recursive=True)
        for descendant in descendants:
            with suppress(psutil.NoSuchProcess):
                descendant.send_signal(signal.SIGTERM)
        psutil.wait_procs(descendants, 20)
        process.kill()
        process.wait()


def test_the_image_serves_as_its_own_user_and_is_healthy(builder: Builder, tmp_path: Path) -> None:
    port, config = free_port(), builder.config(IMAGE)
    container = builder.run("from", "--pull-never", IMAGE)
    words = [*config["Entrypoint"], *config["Cmd"], "--simulate", "4", "--port", str(port)]
    log = tmp_path / "container.log"
    with running(builder.start(container, *words), log) as process:

        def serves() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return call(port, "GET", "/readyz").status == 200
            except OSError:
                return False

        eventually(serves, START_S, log.read_text)
        assert call(port, "POST", "/v1/leases?wait_s=30", {"count": 4}).json["state"] == "active"
        daemons = []
        for one in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ends at this moment
                daemons += [one] if "serve" in one.cmdline() else []
        assert {one.uids().real for one in daemons if "python" in one.name() or "gpulease" in one.name()} == {1000}
        kind, *health = config["Healthcheck"]["Test"]
        assert kind == "CMD"
        output(builder.start(container, *health))  # at a port that it was not told
    ended = subprocess.run(builder.start(container, *health), capture_output=True, timeout=100, check=False)
    assert ended.returncode != 0, "it is healthy without a daemon"
