"""How the libraries of the page get into a build, and what the page says where they are missing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.server
import importlib.util
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from starlette.requests import Request

from gpulease_server import dashboard

ROOT = Path(__file__).parents[2]
SOURCE = b'import { h } from "pact"; export const x = h;\n'
EDITED = b'import { h } from "./pact.js"; export const x = h;\n'


def packed(**files: bytes) -> bytes:
    """A tarball as npm makes them."""
    packed_bytes = io.BytesIO()
    with tarfile.open(fileobj=packed_bytes, mode="w:gz") as tarball:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            tarball.addfile(member, io.BytesIO(content))
    return packed_bytes.getvalue()


TARBALL = packed(**{"x.js": SOURCE, "LICENSE": b"free\n"})


def sha256(content: bytes) -> str:
    """In hex."""
    return hashlib.sha256(content).hexdigest()


def pins() -> list[dict[str, Any]]:
    """A `libraries.json` of one package."""
    files = [
        {"path": "x.js", "as": "x.js", "edits": [['"pact"', '"./pact.js"']], "sha256": sha256(EDITED)},
        {"path": "LICENSE", "as": "x.LICENSE", "sha256": sha256(b"free\n")},
    ]
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(TARBALL).digest()).decode()
    return [{"name": "@lab/x", "version": "1.2.3", "integrity": integrity, "files": files}]


class Registry(http.server.BaseHTTPRequestHandler):
    """Answers with the tarball, and notes what it was asked for."""

    asked: list[tuple[str, str | None]]
    tarball = TARBALL

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.tarball)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def registry() -> Iterator[tuple[str, type[Registry]]]:
    """A registry under a path, as mirrors have one, and its class."""
    answering = type("Answering", (Registry,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answering) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/npm", answering
        server.shutdown()
        thread.join()


@pytest.fixture
def hook() -> ModuleType:
    """hatch_build.py."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path, hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with nothing but pins, of a user without settings of npm."""
    root = tmp_path / "checkout"
    (root / hook.PINS).parent.mkdir(parents=True)
    (root / hook.PINS).write_text(json.dumps(pins()))
    monkeypatch.setenv("npm_config_userconfig", str(tmp_path / "npmrc"))
    monkeypatch.delenv("npm_config_registry", raising=False)
    return root


def test_a_build_fetches_what_is_missing_and_only_that(
    hook: ModuleType, checkout: Path, registry: tuple[str, type[Registry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answering = registry
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", url)

    hook.fetch_missing(checkout)
    assert (checkout / hook.VENDOR / "x.js").read_bytes() == EDITED
    assert (checkout / hook.VENDOR / "x.LICENSE").read_bytes() == b"free\n"
    hook.fetch_missing(checkout)
    assert answering.asked == [("/npm/@lab/x/-/x-1.2.3.tgz", None)]
    (checkout / hook.VENDOR / "x.js").write_bytes(b"of another version")
    hook.fetch_missing(checkout)
    assert (checkout / hook.VENDOR / "x.js").read_bytes() == EDITED


def test_the_registry_is_configured_as_for_npm(
    hook: ModuleType, checkout: Path, registry: tuple[str, type[Registry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answering = registry
    monkeypatch.setenv("LAB_SECRET", "s3cret")
    monkeypatch.setenv("npm_config_userconfig", str(checkout / "mine"))
    (checkout / "mine").write_text("# mine\nregistry=http://127.0.0.1:1/\n")
    host = url.removeprefix("http:")
    (checkout / ".npmrc").write_text(f"; the lab's\nregistry = {url}/\n{host}/:_authToken=${{LAB_SECRET}}\n")

    hook.fetch_missing(checkout)
    assert answering.asked == [("/npm/@lab/x/-/x-1.2.3.tgz", "Bearer s3cret")]


def test_without_a_setting_npm_is_asked_for_its_registry(
    hook: ModuleType, checkout: Path, registry: tuple[str, type[Registry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answering = registry
    npm = checkout / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\n[ "$*" = "config get registry" ] && echo {url}/\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent))
    build = hook.LibrariesHook(str(checkout), {}, None, None, str(checkout), "wheel")
    assert build.dependencies() == []

    hook.fetch_missing(checkout)
    assert answering.asked == [("/npm/@lab/x/-/x-1.2.3.tgz", None)]
    npm.unlink()
    assert build.dependencies() == [], "nothing is to be fetched"
    (checkout / hook.VENDOR / "x.js").unlink()
    assert build.dependencies() == [hook.NPM_FROM_PYPI], "which has an npm"
    monkeypatch.setattr(hook, "ASK_IT", "raise SystemExit(1)")
    with pytest.raises(hook.CannotFetch, match=r"not the URL of an npm registry\. Install npm"):
        hook.fetch_missing(checkout)


def test_another_tarball_is_refused(
    hook: ModuleType, checkout: Path, registry: tuple[str, type[Registry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, answering = registry
    answering.tarball = packed(**{"x.js": SOURCE, "LICENSE": b"changed\n"})
    monkeypatch.setenv("npm_config_registry", url)

    with pytest.raises(hook.CannotFetch, match=r"is not @lab/x 1\.2\.3 as npm published it.* npm_config_registry"):
        hook.fetch_missing(checkout)
    assert not (checkout / hook.VENDOR).exists()


def test_without_a_registry_the_build_says_what_to_do(
    hook: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:1/")

    with pytest.raises(hook.CannotFetch, match=r"needs @lab/x 1\.2\.3.*npm_config_registry.*copy its folder"):
        hook.fetch_missing(checkout)


def test_the_libraries_of_this_checkout_are_those_that_are_pinned(hook: ModuleType) -> None:
    """Nothing is fetched: there is nothing at this address."""
    for library in json.loads((ROOT / hook.PINS).read_text()):
        for file in library["files"]:
            content = (ROOT / hook.VENDOR / file["as"]).read_bytes()
            assert hook.sha256(content) == file["sha256"], "make setup, or python hatch_build.py"
    assert dashboard.missing_libraries(dashboard.ASSETS) == []


def test_a_page_without_its_libraries_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {name: asset for name, asset in dashboard.ASSETS.items() if name != "vendor/preact.js"}
    monkeypatch.setattr(dashboard, "ASSETS", rest)
    answer = asyncio.run(dashboard.serve_page(Request({"type": "http", "headers": []})))

    assert answer.status_code == 503
    assert answer.media_type == "text/html; charset=utf-8"
    text = bytes(answer.body).decode()
    assert "vendor/preact.js is missing. Install gpulease again, in a checkout with `make setup`" in text
