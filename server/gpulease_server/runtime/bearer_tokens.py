"""Bearer tokens: created, authenticated, revoked.

Authority: the database. Only the writer changes tokens, so its copy in memory is complete, and it authenticates callers
while the database is down: no one loses a lease because a token cannot be looked up. A standby's copy is at most
`MAX_AGE_S` old, and is read again when it takes over.

| what happens | what follows |
|---|---|
| a token is revoked | refused once the revocation is answered; by a standby, `MAX_AGE_S` later |
| one is created or revoked, or this daemon takes over, while tokens are read | what was read is dropped as stale |
| a daemon restarts, or takes over | the tokens are read before the first request |
| the database is down when one is created or revoked | 503; the outcome is read once the database is back |
| the database is down for a standby | its copy stays, as its ledger does |
| the wall clock jumps | tokens expire by it, so sooner or later than they should |
| a token is used | the day is in memory at once, and in the database within `SAVE_USES_S`, once a day per token |
| it is used on a standby | the day is written when that takes over |
| the daemon is killed | days of use of the last `SAVE_USES_S` are missing |
| a worker's token without a node reports | it is bound to that node, in the database, before the report counts |
| the same token reports for two nodes at once, unbound | the first is its node; the other is refused |
| killed, or the database is down, between a change and its event | the change holds; only the log shows it |
| a user gets a name on the host for which a token was made before | such a token is revoked: another has it |
| the host's directory of users does not answer | the last answer counts; if there is none, 503 |
| a join token is sent twice | one gets the worker's token, the other 401: its row is gone in the same transaction |
| the answer to a join is lost | the join token is used up; the worker's is listed, and worth nothing to anyone |
| someone reads the database or a backup | they find hashes of 256 random bits, which are useless to them |
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import date, datetime, timedelta

from sqlalchemy.exc import SQLAlchemyError

from gpulease_protocol.budgets import Budget
from gpulease_protocol.errors import NotFound, Unavailable
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.tokens import BearerToken, NewBearerToken, Role, TokenRequest
from gpulease_server.core.happenings import BearerTokenChanged, LimitsChanged
from gpulease_server.runtime import clock, ids
from gpulease_server.runtime.host_accounts import HostAccounts, TokenAccount, find_account
from gpulease_server.runtime.job_tokens import JobTokens
from gpulease_server.runtime.writer import Writer
from gpulease_server.store import bearer_tokens
from gpulease_server.store.bearer_tokens import BearerTokenRecord
from gpulease_server.store.dialects import error_message
from gpulease_server.store.ledger_store import Store, StoreFailed

log = logging.getLogger("gpulease.access")

SAVE_USES_S = 60.0
"""Time between two writes of which tokens were used today for the first time."""
MAX_AGE_S = 1.0
"""How old the tokens may be on a daemon that is not the writer."""
MAX_BEARER = 200
"""Characters in a bearer token, at most; those that are made have half of that."""
NO_TOKEN_HASH = "0" * 64
"""Compared with the token that is sent under an unknown id, so that timing does not reveal which ids exist."""


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """The user and role that a token stands for."""

    token_id: str
    user: str
    uid: int | None
    gid: int | None
    role: Role
    node: str | None = None
    """The node that a worker's token reports for; None until its first report."""
    budget: Budget | None = None
    """What may be held with it."""


class BearerTokens:
    """All bearer tokens. Used from one event loop.

    Args:
        store: The ledger's database.
        writer: Commits changes between two turns.
    """

    def __init__(self, store: Store, writer: Writer) -> None:
        self._store = store
        self._writer = writer
        self._records: dict[str, BearerTokenRecord] = {}
        self._read_s: float | None = None
        self._authoritative = False
        """True while no other process can have changed the tokens."""
        self._is_writer = False
        """True once this daemon is the writer."""
        self.of_jobs = JobTokens()
        """Those of jobs on other hosts, which are not among these."""
        self._accounts = HostAccounts()
        self._used: dict[str, date] = {}
        """Days of use that are not in the database yet, by token id."""
        self._read_lock = asyncio.Lock()
        self._bind_lock = asyncio.Lock()
        self._changes = 0
        """Counts changes other than reading the tokens again."""
        self._change_lock = threading.Lock()

    def restore(self) -> None:
        """Read the tokens, as the writer, before the first request. Blocks; thread-safe. Raises SQLAlchemyError."""
        records = bearer_tokens.load(self._store.engine)
        self.of_jobs.restore(self._store)
        with self._change_lock:
            self._changes += 1
            self._records, self._authoritative, self._is_writer = records, True, True

    async def authenticate(self, bearer: str) -> TokenIdentity | None:
        """The user and role of a token; None if it is not valid. Raises `Unavailable`."""
        await self._refresh()
        record = self._records.get(bearer.partition(".")[0])
        expected = NO_TOKEN_HASH if record is None else record.hash
        matches = hmac.compare_digest(_hash(bearer), expected)
        if record is None or not matches or _expired(record.token, clock.now().at):
            return None
        if _is_of_unknown_user(record.token) and await self._accounts.exists(record.token.user):
            await self._end(record.token)
            return None
        token, today = record.token, clock.now().at.date()
        if token.last_used_on is None or token.last_used_on < today:
            self._used[token.id] = today
        return TokenIdentity(token.id, token.user, token.uid, record.gid, token.role, token.node, token.budget)

    def known_id(self, bearer: str) -> str | None:
        """The id of the token, or of the job's lease, whose secret this is, as far as this daemon knows; None for any
        other text."""
        if len(bearer) > MAX_BEARER:
            return None
        if (lease_id := self.of_jobs.lease_id(bearer)) is not None:
            return lease_id
        record = self._records.get(bearer.partition(".")[0])
        return record.token.id if record is not None and hmac.compare_digest(_hash(bearer), record.hash) else None

    async def lease_of_job(self, bearer: str) -> str | None:
        """The lease of the job that has this token; None for a token of no job. Raises `Unavailable`."""
        await self._refresh()
        return self.of_jobs.lease_id(bearer)

    def is_valid(self, token_id: str) -> bool:
        """True while a token is neither revoked nor expired, as far as this daemon knows."""
        record = self._records.get(token_id)
        if record is None or _expired(record.token, clock.now().at):
            return False
        return not (_is_of_unknown_user(record.token) and self._accounts.was_found(record.token.user))

    async def is_still_valid(self, token_id: str) -> bool:
        """As `is_valid`, but a standby reads the tokens again first. Raises `Unavailable`."""
        await self._refresh()
        return self.is_valid(token_id)

    async def all(self) -> tuple[BearerToken, ...]:
        """Every token that was not revoked, oldest first. Raises `Unavailable`."""
        await self._refresh()
        return tuple(self._shown(record.token) for record in self._records.values())

    async def maintain(self) -> None:
        """Write every `SAVE_USES_S` on which day each token was last used, revoke those whose name is another's by now,
        and remove the limits of those that are gone, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_USES_S)
            await self.save_uses()
            await self.end_those_of_new_users()
            await self.remove_limits()

    async def end_those_of_new_users(self) -> None:
        """Revoke the tokens in use whose user this host did not have when they were created, and has now."""
        for token in [record.token for record in self._records.values()]:
            if _is_of_unknown_user(token) and self._accounts.was_asked(token.user):
                with suppress(Unavailable):
                    if await self._accounts.exists(token.user):
                        await self._end(token)

    async def remove_limits(self) -> None:
        """Remove the limits of tokens that there are not any more. While a lease of such a token is left, or a request
        waits, they go on."""
        if not self._is_writer:
            return
        ledger, by = self._writer.committed, "the daemon, because there is no such token any more"
        for key in list(ledger.limits.records):
            if key.kind is not LimitKind.TOKEN or key.name in self._records or key.name in ledger.leases_of_tokens:
                continue
            with suppress(Unavailable, NotFound):
                await self._writer.submit(LimitsChanged(cause=ids.new_id("request"), key=key, limits=None, by=by))

    async def _end(self, token: BearerToken) -> None:
        """Revoke a token because its name means another user now. A standby only refuses it."""
        if not self._is_writer or token.id not in self._records:
            return
        with self._change_lock:
            self._changes += 1
            del self._records[token.id]
        by = f"the daemon, because its host has a user {token.user} now, and had none when the token was made"
        try:
            await self._change(lambda: bearer_tokens.remove(self._store, token.id))
        except Unavailable as error:
            log.warning("token %s cannot be revoked, and is refused: %s", token.id, error.detail)
            return
        log.warning("token %s of %s is revoked by %s", token.id, token.user, by)
        await self._record("token.revoked", token, by)

    async def save_uses(self) -> None:
        """Write the days of last use now, if this daemon is the writer. A failed write is retried the next time."""
        self._used = {token_id: day for token_id, day in self._used.items() if token_id in self._records}
        days = dict(self._used)
        if not days or not self._is_writer:
            return
        try:
            await self._writer.between_turns(bearer_tokens.save_uses, self._store, days)
        except StoreFailed as error:
            log.debug("the last use of tokens cannot be written: %s", error.detail)
            return
        with self._change_lock:
            for token_id, day in days.items():
                record = self._records.get(token_id)
                if record is not None:
                    self._records[token_id] = replace(record, token=replace(record.token, last_used_on=day))
                if self._used.get(token_id) == day:
                    del self._used[token_id]

    async def join(self, token_id: str, node: str) -> NewBearerToken | None:
        """The token of a node's worker for a join token, which is used up in the same transaction: of two who send it,
        one gets an answer. None if it is no join token for this node, or not any more. Raises `Unavailable`."""
        async with self._bind_lock:
            record = self._records.get(token_id)
            if record is None or record.token.role is not Role.JOIN or record.token.node != node:
                return None
            used = record.token
            asked = TokenRequest(user=used.user, role=Role.WORKER, node=node, note=used.note)
            try:
                return await self.create(asked, used.created_by, instead_of=used)
            except NotFound:  # revoked in this very moment
                return None

    async def create(
        self,
        asked: TokenRequest,
        by: str | None,
        account: TokenAccount | None = None,
        instead_of: BearerToken | None = None,
    ) -> NewBearerToken:
        """A new token, stored before it is returned. `account`: of its user; looked up if None. `instead_of`: one that
        is used up by it. Raises `Unavailable`, `OverQuota`."""
        owner = await asyncio.to_thread(find_account, asked.user) if account is None else account
        now, token_id = clock.now().at, ids.new_id("token")
        bearer = ids.new_bearer_token(token_id)
        token = BearerToken(
            id=token_id,
            user=owner.user,
            uid=owner.uid,
            role=asked.role,
            node=asked.node,
            note=asked.note,
            created_at=now,
            created_by=by,
            max_gpus=asked.max_gpus,
            max_lease_s=asked.max_lease_s,
            gpu_hours_per_day=asked.gpu_hours_per_day,
            expires_at=None if asked.expires_s is None else now + timedelta(seconds=asked.expires_s),
        )
        record = BearerTokenRecord(token=token, hash=_hash(bearer), gid=owner.gid)
        used_id = None if instead_of is None else instead_of.id
        await self._change(lambda: bearer_tokens.add(self._store, record, now, used_id))
        with self._change_lock:
            self._changes += 1
            self._records[token_id] = record
            if used_id is not None:
                self._records.pop(used_id, None)
        log.info("%s made token %s of %s with role %s", by, token_id, token.user, token.role)
        await self._record("token.created", token, by)
        if instead_of is not None:
            await self._record("token.revoked", instead_of, f"its use: {token_id} is in its place")
        return NewBearerToken(**{name: getattr(token, name) for name in BearerToken.__slots__}, bearer=bearer)

    async def bind(self, token_id: str, node: str) -> bool:
        """Bind a worker's token to the node that it reports for. False if another is its node. Raises `Unavailable`."""
        async with self._bind_lock:
            record = self._records.get(token_id)
            if record is None or record.token.node is not None:
                return record is not None and record.token.node == node
            await self._change(lambda: bearer_tokens.bind(self._store, token_id, node))
            with self._change_lock:
                self._changes += 1
                if (record := self._records.get(token_id)) is not None:
                    self._records[token_id] = replace(record, token=replace(record.token, node=node))
            log.info("token %s is bound to node %s", token_id, node)
            return record is not None

    async def revoke(self, token_id: str, by: str | None) -> BearerToken:
        """Revoke a token and return it. Raises `NotFound`, `Unavailable`."""
        await self._refresh()
        record = self._records.get(token_id)
        if record is None:
            detail = f"There is no token {token_id}."
            raise NotFound(detail, remedy="`GET /v1/tokens` shows the valid ids; a token is revoked once.")
        await self._change(lambda: bearer_tokens.remove(self._store, token_id))
        with self._change_lock:
            self._changes += 1
            self._records.pop(token_id, None)
        log.info("%s revoked token %s of %s", by, token_id, record.token.user)
        await self._record("token.revoked", record.token, by)
        await self.remove_limits()
        return self._shown(record.token)

    def _shown(self, token: BearerToken) -> BearerToken:
        """The token with its last use, which may not be written yet."""
        day = self._used.get(token.id)
        return token if day is None else replace(token, last_used_on=day)

    async def _record(self, kind: str, token: BearerToken, by: str | None) -> None:
        """Record the change as an event before the caller is answered. If that fails, the change still holds."""
        reason = f"{token.id} of user {token.user}, role {token.role}, by {by or 'an unknown user'}"
        try:
            await self._writer.submit(BearerTokenChanged(cause=ids.new_id("request"), kind=kind, reason=reason))
        except Unavailable as error:
            log.warning("the event %s was not recorded: %s", kind, error.detail)

    async def _change(self, work: Callable[[], None]) -> None:
        try:
            await self._writer.between_turns(work)
        except StoreFailed:
            self._authoritative, self._read_s = False, clock.now().mono_s  # it may have been written anyway
            raise

    async def _refresh(self) -> None:
        """Read the tokens again if another process may have changed them."""
        if self._authoritative:
            return
        async with self._read_lock:
            while not self._authoritative:
                now_s, changes = clock.now().mono_s, self._changes
                if self._read_s is not None and now_s - self._read_s < MAX_AGE_S:
                    return
                try:
                    records = await asyncio.to_thread(bearer_tokens.load, self._store.engine)
                    await asyncio.to_thread(self.of_jobs.load, self._store)
                except SQLAlchemyError as error:
                    if self._read_s is None and not self._authoritative:
                        detail = f"The tokens cannot be read: {error_message(error)}."
                        raise Unavailable(detail, remedy="Ask again.") from error
                    log.debug("the tokens cannot be read: %s", error)
                    self._read_s = now_s
                    return
                with self._change_lock:
                    if changes == self._changes:
                        self._records, self._read_s = records, now_s
                        return


def _hash(bearer: str) -> str:
    return hashlib.sha256(bearer.encode(errors="surrogatepass")).hexdigest()


def _is_of_unknown_user(token: BearerToken) -> bool:
    """True for a token of a user whom the daemon's host did not have when it was made. A worker's is for a node."""
    return token.uid is None and token.role not in (Role.WORKER, Role.JOIN)


def _expired(token: BearerToken, now: datetime) -> bool:
    return token.expires_at is not None and token.expires_at <= now
