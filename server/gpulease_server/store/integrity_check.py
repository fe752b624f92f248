"""`gpulease db check`: integrity of a database's file, its schema, and the consistency of the ledger in it.

Everything is read in one snapshot, so a daemon may write meanwhile.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Connection, exists, func, select
from sqlalchemy.exc import SQLAlchemyError

from gpulease_protocol.host.addresses import has_system_socket
from gpulease_server.store import tables
from gpulease_server.store.database import (
    DatabaseUnusable,
    connect,
    database_file,
    known_revisions,
    revision_of,
    unusable_error,
)
from gpulease_server.store.dialects import SQLITE, error_message, snapshot
from gpulease_server.store.file_guard import require_own_log
from gpulease_server.store.migrations import differences

MAX_FINDINGS = 50
"""Findings of one kind that are reported, at most."""


def revisions(url: str) -> tuple[str | None, str]:
    """The revision of the schema (None without a schema), and the newest. Raises `DatabaseUnusable`."""
    require_file(url)
    engine = connect(url)
    try:
        with engine.connect() as connection:
            return revision_of(connection), known_revisions()[-1]
    except SQLAlchemyError as error:
        raise unusable_error(url, error) from error
    finally:
        engine.dispose()


def require_file(url: str) -> None:
    """Raise `DatabaseUnusable` if the file is missing, since connecting would create it, or has the log of another."""
    file = database_file(url)
    if file is None:
        return
    if file.is_file():
        require_own_log(file)
        return
    if os.geteuid() != 0 and has_system_socket():
        detail = f"{file} does not exist: the daemon of this host is not yours."
        raise DatabaseUnusable(detail, remedy="This is for its administrator: sudo gpulease db ...")
    raise DatabaseUnusable(f"{file} does not exist.", remedy="Give the --database-url or --data-dir of the daemon.")


def check_database(url: str) -> list[str]:
    """All findings, one sentence each; empty if there are none. Raises `DatabaseUnusable` if it does not open."""
    found, newest = revisions(url)
    if found is not None and found not in known_revisions():
        return [f"the schema is {found}, which this version does not know; run the newer gpulease that wrote it"]
    if found != newest:
        return [f"the schema is {found or 'empty'}, but this version works with {newest}; run gpulease db upgrade"]
    return _findings(url, lambda connection: [*_files(connection), *differences(connection), *_ledger(connection)])


def check_file(url: str) -> list[str]:
    """The findings about the file alone, whatever the schema. Raises `DatabaseUnusable` if it does not open."""
    require_file(url)
    return _findings(url, lambda connection: list(_files(connection)))


def _findings(url: str, find: Callable[[Connection], list[str]]) -> list[str]:
    engine = connect(url)
    try:
        with snapshot(engine) as connection:
            return find(connection)
    except SQLAlchemyError as error:
        return [f"the database cannot be read: {error_message(error)}"]
    finally:
        engine.dispose()


def _files(connection: Connection) -> Iterator[str]:
    if connection.dialect.name == SQLITE:
        for (line,) in connection.exec_driver_sql(f"PRAGMA integrity_check({MAX_FINDINGS})"):
            if line != "ok":
                yield f"the file is damaged: {line}"
    elif connection.exec_driver_sql("SHOW fsync").scalar() == "off":
        yield "the server runs with fsync=off: a power failure loses committed data"


def _ledger(connection: Connection) -> Iterator[str]:
    lease, gpu = tables.lease, tables.gpu
    columns = (lease.c.id, lease.c.state, lease.c.gpus, lease.c.token)
    live = {row.id: row for row in connection.execute(select(*columns).where(lease.c.state != "ended"))}
    held: dict[str, list[str]] = {}
    for row in connection.execute(select(gpu.c.uuid, gpu.c.lease_id, gpu.c.draining, gpu.c.token)):
        if row.lease_id is not None and not row.draining:
            held.setdefault(row.lease_id, []).append(row.uuid)
            holder = live.get(row.lease_id)
            if holder is None or holder.state != "active":
                yield f"GPU {row.uuid} is held by lease {row.lease_id}, which is not active"
            elif holder.token != row.token:
                yield f"GPU {row.uuid} has token {row.token}, but its lease {row.lease_id} has {holder.token}"
    yield from _leases(live, held)
    yield from _numbers(connection)
    yield from _pruned(connection)
    for table in (tables.writer, tables.pruned):
        found = connection.execute(select(func.count()).select_from(table)).scalar_one()
        if found != 1:
            yield f"the table {table.name} has {found} rows instead of one"


def _leases(live: dict[str, Any], held: dict[str, list[str]]) -> Iterator[str]:
    """Active leases agree with the rows of their GPUs; no GPU is in two of them."""
    named: Counter[str] = Counter()
    for lease_id, row in live.items():
        gpus = sorted(device["uuid"] for device in row.gpus)
        active = row.state == "active"
        named.update(gpus if active else [])
        if active and gpus != sorted(held.get(lease_id, [])):
            yield f"lease {lease_id} is active on {', '.join(gpus) or 'no GPU'}, but holds {_list(held.get(lease_id))}"
        if active and row.token is None:
            yield f"lease {lease_id} is active without a token"
    for uuid, count in named.items():
        if count > 1:
            yield f"GPU {uuid} is in {count} active leases"


def _numbers(connection: Connection) -> Iterator[str]:
    """No number or token is used twice, now or later."""
    counters = {row.name: row.value for row in connection.execute(select(tables.counter))}
    used = {
        "token": (tables.lease.c.token, tables.gpu.c.token),
        "number": (tables.lease.c.number, tables.job.c.number),
        "seq": (tables.event.c.seq, tables.pruned.c.seq),
    }
    for name, columns in used.items():
        highest = max(connection.execute(select(func.max(column))).scalar() or 0 for column in columns)
        if highest and counters.get(name, 0) <= highest:
            yield f"the next {name} would be {counters.get(name, 'missing')}, but {highest} is in use already"
    token = tables.lease.c.token
    twice = select(token).where(token.is_not(None)).group_by(token).having(func.count() > 1).limit(MAX_FINDINGS)
    for value in connection.scalars(twice):
        yield f"token {value} is in several leases"


def _pruned(connection: Connection) -> Iterator[str]:
    """Pruning has deleted records with all that belongs to them, and nothing else."""
    lease, job, seq = tables.lease, tables.job, tables.event.c.seq
    lone = select(lease.c.id, lease.c.job_id).where(
        lease.c.job_id.is_not(None), ~exists().where(job.c.id == lease.c.job_id)
    )
    for row in connection.execute(lone.limit(MAX_FINDINGS)):
        yield f"lease {row.id} belongs to job {row.job_id}, which does not exist"
    bare = select(job.c.id, job.c.lease_id).where(~exists().where(lease.c.id == job.c.lease_id))
    for row in connection.execute(bare.limit(MAX_FINDINGS)):
        yield f"job {row.id} has lease {row.lease_id}, which does not exist"
    gone = connection.execute(select(func.max(tables.pruned.c.seq))).scalar() or 0
    for value in connection.scalars(select(seq).where(seq <= gone).order_by(seq).limit(1)):
        yield f"events are marked as pruned up to {gone}, but {value} exists"


def _list(uuids: list[str] | None) -> str:
    return ", ".join(sorted(uuids or ())) or "no GPU"
