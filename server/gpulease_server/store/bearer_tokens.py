"""Bearer tokens in the database. Not part of the ledger: no decision of a turn rests on them.

Only hashes are stored, so reading the database does not reveal a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, bindparam, delete, func, insert, select, update

from gpulease_protocol.errors import NotFound, OverQuota
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.tokens import BearerToken, Role
from gpulease_server.store import tables
from gpulease_server.store.ledger_store import Store

MAX_TOKENS = 10_000
"""Tokens at one time: all are in memory."""
EXPIRED_KEPT = timedelta(days=30)
"""For how long one that has expired is still listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerTokenRecord:
    """A bearer token as it is stored."""

    token: BearerToken
    hash: str
    """SHA-256 of the whole token, in hex."""
    gid: int | None = None
    """Its user's primary group on the daemon's host when it was created."""


def load(engine: Engine) -> dict[str, BearerTokenRecord]:
    """Every token that was not revoked, by id, oldest first. Blocks. Raises SQLAlchemyError."""
    table = tables.bearer_token
    with engine.connect() as connection:
        rows = connection.execute(select(table).order_by(table.c.created_at, table.c.id))
        # A newer daemon may have made some of a role that this one does not know: they are worth nothing here.
        return {row.id: _record(row) for row in rows if row.role in tuple(Role)}


def add(store: Store, record: BearerTokenRecord, now: datetime, instead_of: str | None = None) -> None:
    """Store a new token, and delete those that expired long ago. Blocks. Raises `StoreFailed`, `OverQuota`.

    `instead_of`: id of the token that is used up by it, in the same transaction. Raises `NotFound` where it is gone.
    """
    table, token = tables.bearer_token, record.token
    row = {
        "id": token.id,
        "hash": record.hash,
        "user_name": token.user,
        "uid": token.uid,
        "gid": record.gid,
        "role": token.role.value,
        "node": token.node,
        "note": token.note,
        "created_at": token.created_at,
        "created_by": token.created_by,
        "expires_at": token.expires_at,
        "last_used_on": token.last_used_on,
        "max_gpus": token.max_gpus,
        "max_lease_s": token.max_lease_s,
        "gpu_hours_per_day": token.gpu_hours_per_day,
    }
    with store.writing() as connection:
        connection.execute(delete(table).where(table.c.expires_at < now - EXPIRED_KEPT))
        if instead_of is not None:
            used = connection.execute(delete(table).where(table.c.id == instead_of))
            if used.rowcount != 1:
                raise NotFound(f"Token {instead_of} was used or revoked meanwhile.", remedy="Have another one made.")
        if (connection.execute(select(func.count()).select_from(table)).scalar() or 0) >= MAX_TOKENS:
            raise OverQuota(f"There are {MAX_TOKENS} tokens already.", remedy="Revoke tokens that are no longer used.")
        connection.execute(insert(table), row)


def remove(store: Store, token_id: str) -> None:
    """Delete a token. Blocks. Raises `StoreFailed`."""
    with store.writing() as connection:
        connection.execute(delete(tables.bearer_token).where(tables.bearer_token.c.id == token_id))


def bind(store: Store, token_id: str, node: str) -> None:
    """Store the node that a token reports for. Blocks. Raises `StoreFailed`."""
    table = tables.bearer_token
    with store.writing() as connection:
        connection.execute(update(table).where(table.c.id == token_id).values(node=node))


def save_uses(store: Store, days: Mapping[str, date]) -> None:
    """Store the day of last use of each of these tokens, by id. Blocks. Raises `StoreFailed`."""
    table = tables.bearer_token
    later = table.c.last_used_on.is_(None) | (table.c.last_used_on < bindparam("day"))
    change = update(table).where(table.c.id == bindparam("token_id"), later).values(last_used_on=bindparam("day"))
    with store.writing() as connection:
        connection.execute(change, [{"token_id": token_id, "day": day} for token_id, day in days.items()])


def _record(row: Any) -> BearerTokenRecord:
    token = BearerToken(
        id=row.id,
        user=row.user_name,
        uid=row.uid,
        role=Role(row.role),
        node=row.node,
        note=row.note,
        created_at=row.created_at,
        created_by=row.created_by,
        expires_at=row.expires_at,
        last_used_on=row.last_used_on,
        max_gpus=row.max_gpus,
        max_lease_s=row.max_lease_s,
        gpu_hours_per_day=row.gpu_hours_per_day,
    )
    return BearerTokenRecord(token=token, hash=row.hash, gid=row.gid)
