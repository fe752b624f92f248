"""What `pip install` of a built wheel gives: a daemon that migrates and serves, with no checkout in sight."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(command: list[str], cwd: Path, **more: str) -> str:
    env = environment() | more
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def environment() -> dict[str, str]:
    """Nothing that could lead Python or the program back to the checkout."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GPULEASE_", "VIRTUAL_ENV"))
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an empty venv with nothing but the wheel in it; its requirements come by a path of their own."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place)]
    run([*build, "--sdist", str(ROOT)], place)
    (sdist,) = place.glob("gpulease-*.tar.gz")
    # The wheel is built from the sdist, so a file that the sdist lacks is missing here; and without a registry of npm.
    with tarfile.open(sdist) as packed:
        packed.extractall(place / "sdist", filter="data")
    run([*build, "--wheel", *map(str, (place / "sdist").iterdir())], place, npm_config_registry="http://127.0.0.1:1/")
    (wheel,) = place.glob("gpulease-*.whl")
    venv = place / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)], place)
    python = str(venv / "bin" / "python")
    run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q", str(wheel)], place
    )
    (packages,) = venv.glob("lib/python*/site-packages")
    # A directory named in a .pth has none of its own .pth read, so the editable checkout stays out.
    (packages / "requirements.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return venv / "bin"


@pytest.fixture
def daemon(installed: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a daemon of the wheel, with four simulated GPUs."""
    log = tmp_path / "daemon.log"
    command = [
        str(installed / "gpulease"),
        "serve",
        "--port",
        "0",
        "--data-dir",
        str(tmp_path / "d"),
        "--simulate",
        "4",
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=file, stderr=subprocess.STDOUT)
    try:
        yield address(process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        finally:
            process.kill()


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where the daemon says that it listens, once it is ready with its GPUs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        said = re.search(r"http://[\d.]+:\d+", log.read_text())
        try:
            if said and get(said.group() + "/v1/gpus")["items"]:
                return said.group()
        except urllib.error.URLError:
            pass  # Announced and not yet listening.
        time.sleep(0.1)
    raise AssertionError(f"no GPUs after 60 s: {log.read_text()}")


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON at an address; with a body, what a POST of it answers."""
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=sent, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_code_comes_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    names = ("gpulease", "gpulease_worker", "gpulease_server")
    question = f"import {', '.join(names)}; print({', '.join(f'{name}.__file__' for name in names)})"
    files = run([str(installed / "python"), "-c", question], tmp_path).split()

    assert [file for file in files if not file.startswith(str(installed.parent))] == []


def test_it_migrates_an_empty_database(installed: Path, tmp_path: Path) -> None:
    run([str(installed / "gpulease"), "db", "upgrade", "--database-url", f"sqlite:///{tmp_path / 'new.db'}"], tmp_path)

    with sqlite3.connect(tmp_path / "new.db") as database:
        tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
    database.close()
    assert {"alembic_version", "lease", "job", "event"} <= tables


def test_it_serves_and_leases(daemon: str) -> None:
    gpus = get(daemon + "/v1/gpus")["items"]
    lease = get(daemon + "/v1/leases?wait_s=30", {"count": 2})

    assert len(gpus) == 4
    assert lease["state"] == "active"
    assert len(lease["gpus"]) == 2
    assert lease["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(gpu["uuid"] for gpu in lease["gpus"])


def test_it_has_the_page_and_its_libraries(daemon: str, installed: Path) -> None:
    asked = urllib.request.Request(daemon + "/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(asked, timeout=60) as page:
        assert page.status == 200
    with urllib.request.urlopen(daemon + "/dashboard/vendor/preact.js", timeout=60) as library:
        assert library.status == 200
    (vendor,) = installed.parent.glob("lib/python*/site-packages/gpulease_server/dashboard/page/vendor")
    assert {"preact.LICENSE", "htm.LICENSE", "uplot.LICENSE"} <= {path.name for path in vendor.iterdir()}
