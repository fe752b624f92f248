"""Any sequence of requests and faults: what was acknowledged is recorded, once, and memory says what is recorded."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.core.ledger import Ledger
from gpulease_server.runtime import writer as writer_module
from gpulease_server.runtime.writer import Writer
from gpulease_server.store.database import upgrade
from gpulease_server.store.ledger_store import Store
from tests.runtime.faults import Fate, FaultyStore, ask, recovered, release, renew, report, writing

KEYS = ["k1", "k2", "k3", "k4", "k5", "k6"]
REQUESTS = st.tuples(st.sampled_from(["ask", "renew", "release"]), st.sampled_from(KEYS))
STEPS = st.lists(
    st.tuples(st.lists(REQUESTS, min_size=1, max_size=5), st.lists(st.sampled_from(Fate), max_size=3)),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def empty() -> Iterator[Path]:
    """A database of the newest schema, to be copied."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "empty.db"
        upgrade(f"sqlite:///{file}")
        yield file


@dataclass
class Told:
    """What the callers know."""

    refusals: set[int] = field(default_factory=set)
    """Statuses."""
    granted: dict[str, Lease] = field(default_factory=dict)
    """By key, as first answered."""
    released: set[str] = field(default_factory=set)
    """Keys whose release was acknowledged."""

    async def one(self, writer: Writer, what: str, key: str) -> None:
        """One request, and what becomes of it."""
        lease = self.granted.get(key)
        try:
            if what == "ask":
                answer = await writer.submit(ask(key))
                assert isinstance(answer, Lease)
                known = self.granted.setdefault(key, answer)
                assert known.id == answer.id, "the same key was granted a second lease"
            elif lease is not None and what == "renew":
                await writer.submit(renew(lease.id, lease.fencing_token))
            elif lease is not None:
                await writer.submit(release(lease.id, lease.fencing_token))
                self.released.add(key)
        except GpuleaseError as error:
            self.refusals.add(error.status)


def lasting(ledger: Ledger) -> dict[str, object]:
    """The parts of a ledger that are recorded."""
    return {name: getattr(ledger, name) for name in ("leases", "gpus", "nodes", "keys", "queue", "next_seq")}


def check(told: Told, writer: Writer, store: FaultyStore) -> None:
    """Memory and database agree with each other and with what the callers were told."""
    recorded = Store.load(store)
    assert lasting(writer.committed) == lasting(recorded)
    assert lasting(writer._ledger) == lasting(recorded)
    for key, lease in told.granted.items():
        found = recorded.leases[lease.id].lease
        if lease.state is LeaseState.ACTIVE:
            assert found.fencing_token == lease.fencing_token
        if key in told.released:
            assert found.state is LeaseState.ENDED
    by_key = [record.result_id for record in recorded.keys.values()]
    assert set(by_key) == set(recorded.leases), "a lease that no one asked for"
    active = [
        gpu.uuid for record in recorded.leases.values() if record.lease.state == "active" for gpu in record.lease.gpus
    ]
    assert len(active) == len(set(active))
    seqs = [event.seq for event in store.history(0, 1000)[0]]
    assert seqs == list(range(1, len(seqs) + 1))
    tokens = [event.fencing_token for event in store.history(0, 1000)[0] if event.kind == "lease.granted"]
    assert len(tokens) == len(set(tokens))


@pytest.mark.timeout(300)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_whatever_fails_callers_database_and_memory_agree(empty: Path, steps: list[tuple[list, list[Fate]]]) -> None:
    async def play(file: Path) -> None:
        async with asyncio.timeout(60), writing(f"sqlite:///{file}") as (writer, store):
            told = Told()
            for requests, fates in steps:
                await recovered(writer)
                await report(writer)
                store.fates = list(fates)
                await asyncio.gather(*(told.one(writer, *request) for request in requests))
                await recovered(writer)
                store.fates = []
                await report(writer)
                await recovered(writer)
                check(told, writer, store)

    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "FIRST_PAUSE_S", 0.001)
        file = Path(place) / "ledger.db"
        shutil.copy(empty, file)
        asyncio.run(play(file))
