"""How long is a daemon that was restarted without its ledger?

10,000 GPUs, 5,000 active leases, 50,000 ended ones. Beside it, in the same run: the plain `sqlite3` module fetching the
same rows, by the same queries, and making nothing of them.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from gpulease_server.runtime import clock
from gpulease_server.runtime.outage import copy_ledger, reset_deadlines
from gpulease_server.store.ledger_store import Store
from tests.store.large_ledger import large_ledger

ROUNDS = 5
SAME_ROWS = (
    "SELECT * FROM node",
    "SELECT * FROM gpu",
    "SELECT * FROM lease WHERE state IN ('queued', 'active') ORDER BY number",
    "SELECT * FROM lease WHERE number IN (SELECT number FROM lease WHERE state NOT IN ('queued', 'active')"
    " ORDER BY ended_at DESC, number DESC LIMIT 1000) ORDER BY ended_at DESC",
)


def rebuild(store: Store) -> None:
    """What a writer does at its start: one ledger to decide on, one to show."""
    ledger = store.load()
    reset_deadlines(ledger, clock.now())
    copy_ledger(ledger)


def fetch(file: Path) -> None:
    """The limit."""
    with closing(sqlite3.connect(file)) as connection:
        for query in SAME_ROWS:
            connection.execute(query).fetchall()


def best(action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """CPU seconds of the fastest run, which other load disturbs least."""
    found = []
    for _ in range(rounds):
        begun_s = time.process_time()
        action()
        found.append(time.process_time() - begun_s)
    return min(found)


def main() -> None:
    """Print the table of bench/README.md."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "great.db"
        store = Store(large_ledger(file))
        limit_s, took_s = best(lambda: fetch(file)), best(lambda: rebuild(store))
        twin_s = best(lambda loaded=store.load(): copy_ledger(loaded))  # type: ignore[misc]
        store.close()
    print(f"{'plain SELECT of the same rows (limit)':<46}{limit_s * 1e3:>9.0f} ms")
    print(f"{'the ledger, rebuilt and copied for the readers':<46}{took_s * 1e3:>9.0f} ms {took_s / limit_s:>6.1f} x")
    print(f"{'of that, the copy':<46}{twin_s * 1e3:>9.0f} ms")


if __name__ == "__main__":
    main()
