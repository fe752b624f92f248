"""A real store whose commits fail, or succeed and seem to have failed, in the order that a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

from gpulease_protocol.model import Demand, Holder
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.happenings import (
    IdempotencyKey,
    LeaseRequested,
    NodeReported,
    ReleaseRequested,
    RenewalRequested,
)
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Change
from gpulease_server.runtime import clock, ids
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.ledger_store import Store, StoreFailed
from tests.core.build import gpu


class Fate(Enum):
    """What becomes of a commit."""

    DONE = "done"
    FAILED = "failed, nothing is written"
    LOST = "written, but its answer is lost"
    STUMBLED = "the program stumbles before it writes"
    STUMBLED_AFTER = "the program stumbles after it has written"


class FaultyStore(Store):
    """The real store. `fates` are taken by one commit each; afterwards all are well. `gate` holds commits up."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fates: list[Fate] = []
        self.unreadable = 0
        """Readings of the ledger that fail."""
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.writes = 0
        self.loads = 0

    def write(self, changes: list[Change], ledger: Ledger) -> None:  # type: ignore[override]
        self.writes += 1
        self.entered.set()
        assert self.gate.wait(60)
        fate = self.fates.pop(0) if self.fates else Fate.DONE
        if fate is Fate.FAILED:
            raise StoreFailed("the disk is full")
        if fate is Fate.STUMBLED:
            raise ZeroDivisionError("before")
        super().write(changes, ledger)
        if fate is Fate.LOST:
            raise StoreFailed("the connection broke")
        if fate is Fate.STUMBLED_AFTER:
            raise ZeroDivisionError("after")

    def load(self) -> Ledger:
        self.loads += 1
        if self.unreadable:
            self.unreadable -= 1
            raise OSError("the database is gone")
        return super().load()


Body = Callable[[Writer, FaultyStore], Coroutine[Any, Any, None]]
"""What a test does beside a writer."""


@asynccontextmanager
async def writing(url: str) -> AsyncIterator[tuple[Writer, FaultyStore]]:
    """A running writer on a database whose schema is up to date."""
    store = FaultyStore(url)
    writer = Writer(store, Policy(max_observation_age_s=3600))
    task = asyncio.create_task(writer.run())
    try:
        await recovered(writer)
        yield writer, store
    finally:
        store.gate.set()
        task.cancel()
        await asyncio.wait({task})
        writer.close()
        store.close()


async def recovered(writer: Writer) -> None:
    """Wait until the writer can decide; the caller bounds the wait."""
    while writer.problem is not None:  # noqa: ASYNC110 - the writer has no reason to signal this to anyone but a test
        await asyncio.sleep(0.001)


def ask(key: str | None = None, **what: Any) -> LeaseRequested:
    """A request for one GPU that waits."""
    return LeaseRequested(
        cause=ids.new_id("request"),
        lease_id=ids.new_id("lease"),
        demand=Demand(),
        holder=Holder(),
        key=None if key is None else IdempotencyKey(key=key, fingerprint="f"),
        **{"ttl_s": 60.0, "queue": True, **what},
    )


def renew(lease_id: str, token: int | None) -> RenewalRequested:
    return RenewalRequested(cause=ids.new_id("request"), lease_id=lease_id, fencing_token=token)


def release(lease_id: str, token: int | None) -> ReleaseRequested:
    return ReleaseRequested(cause=ids.new_id("request"), lease_id=lease_id, fencing_token=token)


async def report(writer: Writer, gpus: int = 4) -> None:
    """The node shows all its GPUs clean, by a reading begun now."""
    view = NodeReport(worker_id="w", host="a", gpus=tuple(gpu(index) for index in range(gpus)))
    now_s = clock.now().mono_s
    await writer.submit(NodeReported(cause=ids.new_id("report"), node="a", report=view, observed_at_s=now_s))
