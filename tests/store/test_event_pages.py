"""Pages of the events: each filter beside a choice by hand, both ways, with a clock that was set back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gpulease_protocol.model import Event, Holder
from gpulease_server.core.ledger import Ledger
from gpulease_server.store import event_pages
from gpulease_server.store.event_pages import EventFilter, find_events
from gpulease_server.store.ledger_store import Store
from tests.core.build import World

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
KINDS = ("lease.granted", "lease.ended", "lease_x.granted", "gpu.unhealthy", "job.ended", "token.created")
USERS = {"lease-a": "ada", "lease-b": "bram", "lease-%": "ada"}


def some_events() -> list[Event]:
    """300 events of all sorts, with times that go back by two hours in the middle."""
    chosen = random.Random(7)
    events = []
    for seq in range(1, 301):
        at = NOON + timedelta(minutes=seq if seq < 150 else seq - 120)
        gpus = tuple(sorted(chosen.sample(["GPU-0", "GPU-01", "GPU_0", "MIG-GPU-0/1/0"], chosen.randint(0, 2))))
        events.append(
            Event(
                seq=seq,
                at=at,
                kind=chosen.choice(KINDS),
                cause="c",
                lease_id=chosen.choice([*USERS, None]),
                job_id=chosen.choice(["job-1", "job-2", None]),
                node=chosen.choice(["a", "b", None]),
                gpus=gpus,
            )
        )
    return events


EVENTS = some_events()


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = Store(database_url)
    world = World().node(gpus=3)
    records = [world.ledger.leases[world.lease().id] for _ in USERS]
    held = [
        replace(record, lease=replace(record.lease, id=lease_id, holder=Holder(user=user)))
        for record, (lease_id, user) in zip(records, USERS.items(), strict=True)
    ]
    store.write([*held, *EVENTS], Ledger())
    yield store
    store.close()


def read(store: Store, wanted: EventFilter, *, limit: int = 7, newest_first: bool = False) -> list[int]:
    """The numbers of all pages, as a client reads them."""
    seqs, after, before = [], 0, None
    while True:
        page = find_events(store.engine, wanted, limit, after=after, before=before, newest_first=newest_first)
        seqs += [event.seq for event in page.events]
        assert len(page.events) <= limit
        if page.next_seq is None:
            return seqs
        after, before = (0, page.next_seq) if newest_first else (page.next_seq, None)


FILTERS = {
    "all": (EventFilter(), lambda event: True),
    "kind": (EventFilter(kinds=("lease.granted",)), lambda event: event.kind == "lease.granted"),
    "noun": (EventFilter(kinds=("lease", "gpu.x")), lambda event: event.kind in ("lease.granted", "lease.ended")),
    "hidden": (
        EventFilter(hidden_kinds=("token.", "job.")),
        lambda event: not event.kind.startswith(("token.", "job.")),
    ),
    "user": (EventFilter(user="ada"), lambda event: USERS.get(event.lease_id or "") == "ada"),
    "gpu": (EventFilter(gpu="GPU_0"), lambda event: "GPU_0" in event.gpus),
    "mig": (EventFilter(gpu="MIG-GPU-0/1/0"), lambda event: "MIG-GPU-0/1/0" in event.gpus),
    "node": (EventFilter(node="b"), lambda event: event.node == "b"),
    "lease": (EventFilter(lease="lease-%"), lambda event: event.lease_id == "lease-%"),
    "job": (EventFilter(job="job-2"), lambda event: event.job_id == "job-2"),
    "since": (
        EventFilter(from_at=NOON + timedelta(minutes=100)),
        lambda event: event.at >= NOON + timedelta(minutes=100),
    ),
    "until": (EventFilter(to_at=NOON + timedelta(minutes=100)), lambda event: event.at < NOON + timedelta(minutes=100)),
    "hour": (
        EventFilter(from_at=NOON + timedelta(minutes=60), to_at=NOON + timedelta(minutes=120), kinds=("job",)),
        lambda event: 60 <= (event.at - NOON) / timedelta(minutes=1) < 120 and event.kind == "job.ended",
    ),
    "none": (EventFilter(from_at=NOON + timedelta(days=9)), lambda event: False),
    "all at once": (
        EventFilter(kinds=("lease",), user="ada", node="a", gpu="GPU-0"),
        lambda event: (
            event.kind in ("lease.granted", "lease.ended")
            and USERS.get(event.lease_id or "") == "ada"
            and event.node == "a"
            and "GPU-0" in event.gpus
        ),
    ),
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("examined", [event_pages.MAX_EXAMINED, 20], ids=["at-once", "in-windows"])
def test_each_filter_finds_its_events_both_ways(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, examined: int
) -> None:
    monkeypatch.setattr(event_pages, "MAX_EXAMINED", examined)
    wanted, is_meant = FILTERS[name]
    seqs = [event.seq for event in EVENTS if is_meant(event)]
    assert bool(seqs) == (name != "none")
    assert read(store, wanted) == seqs
    assert read(store, wanted, newest_first=True) == seqs[::-1]


def test_a_page_looks_through_few_events_and_says_where_the_next_one_begins(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_pages, "MAX_EXAMINED", 50)
    nothing = EventFilter(job="no-such-job")
    page = find_events(store.engine, nothing, 10, after=20)
    assert (page.events, page.next_seq, page.last_seq) == ([], 70, 300)
    page = find_events(store.engine, nothing, 10, newest_first=True)
    assert (page.events, page.next_seq) == ([], 251)
    page = find_events(store.engine, nothing, 10, after=20, before=60)
    assert (page.events, page.next_seq) == ([], None)


def test_a_gap_in_the_numbers_ends_no_history(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a backup was restored, which skips numbers. Clients of an older release end at an empty page."""
    monkeypatch.setattr(event_pages, "MAX_EXAMINED", 50)
    store.write([replace(EVENTS[0], seq=1000)], Ledger())
    assert [event.seq for event in store.history(290, 100)[0]] == [*range(291, 301), 1000]
    assert read(store, EventFilter(kinds=(EVENTS[0].kind,)))[-1] == 1000


def test_after_and_before_bound_a_page(store: Store) -> None:
    page = find_events(store.engine, EventFilter(), 100, after=10, before=14)
    assert [event.seq for event in page.events] == [11, 12, 13]
