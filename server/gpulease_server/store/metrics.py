"""What is kept of the GPUs of jobs: a row for each lease of a job, written over as the series grows.

Beside the ledger and not of it: no turn writes here and no decision rests on it. The content of a row is the runtime's
(`runtime.recorder`); here it is bytes, packed.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection

from sqlalchemy import Engine, select

from ..core.ledger import LeaseRecord
from . import rows, tables
from .dialects import upsert
from .store import Store

ATTEMPTS_SHOWN = 1000
"""Leases of one job that are looked at, at most: more than it can have attempts."""
FAST = 1
"""zlib's level: a quarter to a half of the size, in 4 ms for 8 GPUs; a slower one gains a few per cent."""


def save(store: Store, lease_id: str, content: bytes) -> None:
    """Keep the series of one lease in place of what was kept of it. Blocks. Raises `StoreFailed`."""
    row = {"lease_id": lease_id, "series": zlib.compress(content, FAST)}
    with store.writing() as connection:
        connection.execute(upsert(connection, tables.job_metrics, "lease_id"), row)


def load(engine: Engine, lease_ids: Collection[str]) -> dict[str, bytes]:
    """What is kept of these leases, by lease. A row that cannot be unpacked is empty bytes. Blocks."""
    kept = tables.job_metrics
    with engine.connect() as connection:
        found = connection.execute(select(kept).where(kept.c.lease_id.in_(lease_ids)))
        return {row.lease_id: _unpacked(row.series) for row in found}


def live_leases(engine: Engine) -> list[str]:
    """Leases of jobs that hold GPUs. Blocks."""
    query = select(tables.lease.c.id).where(tables.lease.c.state == "active", tables.lease.c.job_id.is_not(None))
    with engine.connect() as connection:
        return list(connection.scalars(query))


def leases_of(engine: Engine, job_id: str) -> list[LeaseRecord]:
    """The leases of a job's attempts, the first one first; empty if there is no such job. Blocks."""
    table = tables.lease
    query = select(table).where(table.c.job_id == job_id).order_by(table.c.number).limit(ATTEMPTS_SHOWN)
    with engine.connect() as connection:
        return [rows.lease_record(row) for row in connection.execute(query)]


def _unpacked(series: bytes) -> bytes:
    try:
        return zlib.decompress(series)
    except zlib.error:
        return b""
