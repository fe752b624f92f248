"""A writer on a database of its own, for test bodies that run beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease_server.store.database import upgrade
from tests.runtime.faults import Body, writing


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Body], None]:
    """Runs a body beside a writer."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    upgrade(url)

    async def main(body: Body) -> None:
        async with asyncio.timeout(60), writing(url) as (writer, store):
            await body(writer, store)

    return lambda body: asyncio.run(main(body))
