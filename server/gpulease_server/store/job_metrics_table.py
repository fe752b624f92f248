"""The table of job metrics: one row for each lease of a job, overwritten as the series grows.

Not part of the ledger: no turn writes here and no decision rests on it. Rows contain compressed bytes; their format is
that of `runtime.job_metrics.recorder`. One row for each bucket could be read with SQL and would take 15 times the
disk: 1 MB instead of 70 kB for ten minutes on 8 GPUs.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection

from sqlalchemy import Engine, select

from gpulease_server.core.records import LeaseRecord
from gpulease_server.store import rows, tables
from gpulease_server.store.ledger_store import Store

MAX_ATTEMPTS = 1000
"""Leases of one job that are read, at most; more than it can have attempts."""
ZLIB_LEVEL = 1
"""Compresses to a quarter to a half of the size, in 4 ms for 8 GPUs; higher levels gain a few per cent."""


def save(store: Store, lease_id: str, content: bytes) -> None:
    """Store the series of one lease, replacing its row. Blocks. Raises `StoreFailed`."""
    row = {"lease_id": lease_id, "series": zlib.compress(content, ZLIB_LEVEL)}
    with store.writing() as connection:
        store.statements.upsert(connection, tables.job_metrics, [row])


def load(engine: Engine, lease_ids: Collection[str]) -> dict[str, bytes]:
    """The series of these leases, by lease id; empty bytes for a row that cannot be decompressed. Blocks."""
    kept = tables.job_metrics
    with engine.connect() as connection:
        found = connection.execute(select(kept).where(kept.c.lease_id.in_(lease_ids)))
        return {row.lease_id: _decompress(row.series) for row in found}


def active_job_leases(engine: Engine) -> list[str]:
    """Ids of the leases of jobs that hold GPUs. Blocks."""
    query = select(tables.lease.c.id).where(tables.lease.c.state == "active", tables.lease.c.job_id.is_not(None))
    with engine.connect() as connection:
        return list(connection.scalars(query))


def leases_of_job(engine: Engine, job_id: str) -> list[LeaseRecord]:
    """The leases of a job's attempts, the first one first; empty if there is no such job. Blocks."""
    table = tables.lease
    query = select(table).where(table.c.job_id == job_id).order_by(table.c.number).limit(MAX_ATTEMPTS)
    with engine.connect() as connection:
        return [rows.lease_record(row) for row in connection.execute(query)]


def _decompress(series: bytes) -> bytes:
    try:
        return zlib.decompress(series)
    except zlib.error:
        return b""
