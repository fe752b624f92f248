"""Tokens of jobs: what a training on another host shows to be the holder of its lease.

On the daemon's host the kernel shows whose process asks; elsewhere nothing does. So each attempt of a job there has a
bearer token in its environment: the id of its lease, and a MAC of that id under a key of the daemon. Nothing is stored
for it. It is made again for each order until the job has started, also by the next daemon of this database, and is as
valid as the lease is active: it ends with the attempt. What it allows is in `api.auth.access_rules`.

| who has | can |
|---|---|
| the token of a job that runs | look at that lease and job, renew the lease; take, end or submit nothing |
| the token of one that has ended | nothing |
| the database or a backup, and so the key | the same for each job that runs on another host |
"""

from __future__ import annotations

import hmac
import secrets

from sqlalchemy import Connection, select, update

from gpulease_server.store import tables
from gpulease_server.store.ledger_store import Store

LEASE = "lease-"
"""How the id of every lease begins."""


class JobTokens:
    """Makes and recognizes them. Knows nothing before it has read the key."""

    def __init__(self) -> None:
        self._key: bytes | None = None

    def load(self, store: Store) -> None:
        """Read the key, if there is one. Blocks. Raises SQLAlchemyError."""
        with store.engine.connect() as connection:
            self._key = _read(connection) or self._key

    def restore(self, store: Store) -> None:
        """Read the key, or make one, as the writer. Blocks. Raises SQLAlchemyError, StoreFailed."""
        self.load(store)
        if self._key is None:
            key = secrets.token_hex(32)
            with store.writing() as connection:
                connection.execute(update(tables.writer).where(tables.writer.c.id == 1).values(job_token_key=key))
            self._key = key.encode()

    def bearer(self, lease_id: str) -> str | None:
        """The token of the job under a lease; None before the key is known."""
        return None if self._key is None else f"{lease_id}.{self._mac(lease_id)}"

    def lease_id(self, bearer: str) -> str | None:
        """The lease of the job that has this token; None for any other text."""
        lease_id, dot, _ = bearer.partition(".")
        if self._key is None or not dot or not lease_id.startswith(LEASE):
            return None
        expected = f"{lease_id}.{self._mac(lease_id)}".encode(errors="surrogatepass")
        return lease_id if hmac.compare_digest(bearer.encode(errors="surrogatepass"), expected) else None

    def _mac(self, lease_id: str) -> str:
        assert self._key is not None
        return hmac.digest(self._key, lease_id.encode(errors="surrogatepass"), "sha256").hex()


def _read(connection: Connection) -> bytes | None:
    key = connection.execute(select(tables.writer.c.job_token_key).where(tables.writer.c.id == 1)).scalar_one_or_none()
    return None if key is None else str(key).encode()
