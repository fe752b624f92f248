"""The table of what GPUs showed: a row for each lease, and rows of the history of each GPU.

Not part of the ledger: no turn writes here and no decision rests on it. Rows contain compressed bytes; their formats
are those of `runtime.gpu_metrics`. One row for each bucket could be read with SQL and would take 15 times the disk: 1
MB instead of 70 kB for ten minutes of a lease of 8 GPUs."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Engine, Row, select

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.core.records import LeaseRecord
from gpulease_server.store import rows, tables
from gpulease_server.store.ledger_store import Store

MAX_ATTEMPTS = 1000
"""Leases of one job that are read, at most; more than it can have attempts."""
ZLIB_LEVEL = 1
"""Compresses to a quarter to a half of the size, in 4 ms for 8 GPUs; higher levels gain a few per cent."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """How finely, and for how long, readings are kept."""

    width_s: int
    """Length of a bucket. Divides that of the next resolution."""
    buckets: int
    """Buckets in a block; a block holds whole buckets of the next resolution."""
    keep_s: float | None
    """For how long; None for as long as ended leases."""
    save_s: float
    """Time between two writes of a block that is not full: what a killed daemon loses of it."""

    @property
    def block_s(self) -> int:
        """Time that a block covers."""
        return self.width_s * self.buckets


SECONDS, MINUTES = Resolution(1, 600, 3600.0, 600.0), Resolution(60, 60, 86400.0, 60.0)
QUARTERS, HOURS = Resolution(900, 96, 7 * 86400.0, 600.0), Resolution(3600, 168, None, 600.0)
RESOLUTIONS = (SECONDS, MINUTES, QUARTERS, HOURS)
BY_WIDTH = {one.width_s: one for one in RESOLUTIONS}


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block of the history of a GPU."""

    gpu_uuid: str
    width_s: int
    """Length of its buckets."""
    start_s: int
    """Begin of its time, in seconds since 1970."""
    content: bytes = b""
    """Empty if it cannot be decompressed."""

    @property
    def id(self) -> str:
        """The key of its row."""
        return f"{self.gpu_uuid}/{self.width_s}/{self.start_s}"


def save(store: Store, contents: Mapping[str, bytes]) -> None:
    """Store the series of leases, by lease id, replacing their rows, all or none. Blocks. Raises `StoreFailed`."""
    no_block = {"gpu_uuid": None, "width_s": None, "start_s": None}
    packed = [
        {"id": lease_id, "series": zlib.compress(content, ZLIB_LEVEL)} | no_block
        for lease_id, content in contents.items()
    ]
    with store.writing() as connection:
        store.statements.upsert(connection, tables.gpu_metrics, packed)


def load(engine: Engine, lease_ids: Collection[str]) -> dict[str, bytes]:
    """The series of these leases, by lease id; empty bytes for a row that cannot be decompressed. Blocks."""
    kept = tables.gpu_metrics
    with engine.connect() as connection:
        found = connection.execute(select(kept.c.id, kept.c.series).where(kept.c.id.in_(lease_ids)))
        return {row.id: _decompress(row.series) for row in found}


def save_blocks(store: Store, blocks: Iterable[BlockRow]) -> None:
    """Store blocks of the history of GPUs, replacing their rows, all or none. Blocks. Raises `StoreFailed`."""
    packed = [
        {
            "id": block.id,
            "gpu_uuid": block.gpu_uuid,
            "width_s": block.width_s,
            "start_s": block.start_s,
            "series": zlib.compress(block.content, ZLIB_LEVEL),
        }
        for block in blocks
    ]
    with store.writing() as connection:
        store.statements.upsert(connection, tables.gpu_metrics, packed)


def load_blocks(engine: Engine, blocks: Iterable[BlockRow]) -> list[BlockRow]:
    """Those of these blocks that are stored. Blocks. Raises SQLAlchemyError."""
    kept = tables.gpu_metrics
    with engine.connect() as connection:
        found = connection.execute(select(kept).where(kept.c.id.in_([block.id for block in blocks])))
        return [_block(row) for row in found]


def blocks_between(
    engine: Engine, gpu_uuids: Collection[str] | None, width_s: int, from_s: int, to_s: int
) -> list[BlockRow]:
    """The blocks of these GPUs (of all when None) that begin in a period, the oldest first. Blocks. Raises
    SQLAlchemyError."""
    kept = tables.gpu_metrics
    query = select(kept).where(kept.c.width_s == width_s, kept.c.start_s.between(from_s, to_s))
    if gpu_uuids is not None:
        query = query.where(kept.c.gpu_uuid.in_(gpu_uuids))
    with engine.connect() as connection:
        return [_block(row) for row in connection.execute(query.order_by(kept.c.start_s))]


def has_history(engine: Engine, gpu_uuid: str) -> bool:
    """Whether anything is stored of a GPU. Blocks. Raises SQLAlchemyError."""
    kept = tables.gpu_metrics
    with engine.connect() as connection:
        return connection.execute(select(kept.c.id).where(kept.c.gpu_uuid == gpu_uuid).limit(1)).first() is not None


def active_leases(engine: Engine) -> list[str]:
    """Ids of the leases that hold GPUs. Blocks."""
    query = select(tables.lease.c.id).where(tables.lease.c.state == "active")
    with engine.connect() as connection:
        return list(connection.scalars(query))


def leases_of_job(engine: Engine, job_id: str) -> list[LeaseRecord]:
    """The leases of a job's attempts, the first one first; empty if there is no such job. Blocks."""
    table = tables.lease
    query = select(table).where(table.c.job_id == job_id).order_by(table.c.number).limit(MAX_ATTEMPTS)
    with engine.connect() as connection:
        return [rows.lease_record(row) for row in connection.execute(query)]


def _block(row: Row[Any]) -> BlockRow:
    return BlockRow(row.gpu_uuid, row.width_s, row.start_s, _decompress(row.series))


def _decompress(series: bytes) -> bytes:
    try:
        return zlib.decompress(series)
    except zlib.error:
        return b""
