"""Databases for tests that need one; and with CI=true a test that was skipped is a test that failed, unless it is
marked `gpu`.

A skip is how a missing compiler or package turns a suite green that has checked nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.databases import PostgresServer

pytest_plugins = ["tests.lanes"]
SERVER = pytest.StashKey["PostgresServer"]()
NOTHING_SKIPPED = os.environ.get("CI") == "true"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into its failure, and show with a failure what PostgreSQL has said."""
    report = yield
    if report.failed and SERVER in item.session.stash:
        report.sections.append(("Log of PostgreSQL", item.session.stash[SERVER].story()))
    expected_failure = hasattr(report, "wasxfail")
    if NOTHING_SKIPPED and report.skipped and not expected_failure and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI=true forbids: {why(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole module into an error; a module cannot be marked before it is read."""
    report = yield
    if NOTHING_SKIPPED and report.skipped and collector.path.parent.name != "gpu":
        report.outcome = "failed"
        report.longrepr = f"module skipped, which CI=true forbids: {why(report.longrepr)}"
    return report


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A PostgreSQL server, one for each process of tests. No one may stop it; make one of your own for that."""
    from tests.databases import PostgresServer  # noqa: PLC0415 - only where it is used

    server = PostgresServer()
    request.session.stash[SERVER] = server
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """A fresh database on PostgreSQL with the schema of this version."""
    url = postgres.database()
    yield url
    postgres.drop(url)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite database with the schema of this version, which is copied: all its migrations take long."""
    from gpulease_server.store.database import upgrade  # noqa: PLC0415 - needs the server

    template = tmp_path_factory.mktemp("template") / "ledger.db"
    upgrade(f"sqlite:///{template}")
    return template


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A fresh SQLite database with the schema of this version."""
    return f"sqlite:///{shutil.copy(sqlite_template, tmp_path / 'ledger.db')}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A fresh database of either kind: the test runs on both. For the conformance tests of store and runtime alone."""
    return str(request.getfixturevalue("postgres_url" if request.param == "postgresql" else "sqlite_url"))


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of either kind in which there is nothing yet."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    server = request.getfixturevalue("postgres")
    url = server.database(empty=True)
    yield url
    server.drop(url)


def why(longrepr: object) -> str:
    """The reason that the skip gave."""
    return str(longrepr[-1]) if isinstance(longrepr, tuple) else str(longrepr)


def pytest_configure() -> None:
    """Programs that a test interrupts must not have inherited from a shell in the background that SIGINT is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
