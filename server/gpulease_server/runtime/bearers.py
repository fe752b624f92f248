"""The bearer tokens in force: made, found, revoked.

Authority: the database. The writer is the only one who changes them, so what it has in memory is all there is, and it
knows callers also while the database is away: nobody loses a lease because his token cannot be looked up. A daemon that
stands by has them no older than `READ_S`, and reads them whole again when it takes over.

| what happens | what follows |
|---|---|
| a token is revoked | refused from the answer to the revocation on; where another daemon stands by, `READ_S` later |
| one is made or revoked, or this daemon takes over, while they are read | what was read is dropped: it may be older |
| a daemon is restarted, or takes over | the tokens are read before the first request |
| the database is away when one is made or revoked | 503; whether it was done is read once the database is back |
| the database is away on a daemon that stands by | the copy stays, as its ledger does |
| the wall clock jumps | a token expires by it, so sooner or later than it should |
| a token is used | the day is in memory at once, and in the database within `NOTE_S`, once a day for each token |
| it is used on a daemon that stands by | the day is written when that takes over |
| the daemon is killed | the days of the last `NOTE_S` are missing |
| it is killed, or the database is away, between a change and its event | the change holds; only the log tells of it |
| somebody reads the database or a backup | he finds hashes of 256 random bits, which are of no use to him |
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import pwd
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta

from sqlalchemy.exc import SQLAlchemyError

from gpulease.access import BearerToken, NewBearerToken, Role, TokenRequest
from gpulease.errors import NotFound, Unavailable

from ..core.happenings import TokenChanged
from ..store import bearers
from ..store.bearers import BearerRecord
from ..store.dialects import why
from ..store.store import Store, StoreFailed
from . import clock, ids
from .writer import Writer

log = logging.getLogger("gpulease.access")

NOTE_S = 60.0
"""Time between two looks at which tokens were used today for the first time."""
READ_S = 1.0
"""How old the tokens may be where this daemon is not their only writer."""
UNKNOWN = "0" * 64
"""Compared with what is sent under an id that there is not."""


@dataclass(frozen=True, slots=True)
class Account:
    """Whom the name of a user means on this host."""

    user: str
    """His login name as the host spells it; a name that it does not know as it was given."""
    uid: int | None = None
    """None where the host does not know him."""
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """Whom a token names."""

    token_id: str
    user: str
    uid: int | None
    gid: int | None
    role: Role


class Bearers:
    """All bearer tokens. For one event loop.

    Args:
        store: The ledger's database.
        writer: Commits changes between two turns.
    """

    def __init__(self, store: Store, writer: Writer) -> None:
        self._store = store
        self._writer = writer
        self._records: dict[str, BearerRecord] = {}
        self._read_s: float | None = None
        self._complete = False
        """True while nobody else can have changed what is in memory."""
        self._writes = False
        """True from the moment at which this daemon became the writer."""
        self._used: dict[str, date] = {}
        """Days of use that are not in the database yet, by token."""
        self._reading = asyncio.Lock()
        self._changes = 0
        """How often they were changed but by reading them again."""
        self._changing = threading.Lock()

    def restore(self) -> None:
        """Read them, as the writer, before the first request. Blocks; from any thread. Raises SQLAlchemyError."""
        records = bearers.load(self._store.engine)
        with self._changing:
            self._changes += 1
            self._records, self._complete, self._writes = records, True, True

    async def find(self, bearer: str) -> Known | None:
        """Whose token this is; None if it is none that is in force. Raises `Unavailable`."""
        await self._refresh()
        record = self._records.get(bearer.partition(".")[0])
        expected = UNKNOWN if record is None else record.hash
        matches = hmac.compare_digest(_hash(bearer), expected)
        if record is None or not matches or _expired(record.token, clock.now().at):
            return None
        token, today = record.token, clock.now().at.date()
        if token.last_used_on is None or token.last_used_on < today:
            self._used[token.id] = today
        return Known(token.id, token.user, token.uid, record.gid, token.role)

    def in_force(self, token_id: str) -> bool:
        """True while a token is neither revoked nor expired, as far as is known here."""
        record = self._records.get(token_id)
        return record is not None and not _expired(record.token, clock.now().at)

    async def still_in_force(self, token_id: str) -> bool:
        """The same, read again first where somebody else may have revoked it. Raises `Unavailable`."""
        await self._refresh()
        return self.in_force(token_id)

    async def all(self) -> tuple[BearerToken, ...]:
        """Every token that was not revoked, oldest first. Raises `Unavailable`."""
        await self._refresh()
        return tuple(self._shown(record.token) for record in self._records.values())

    async def note_uses(self) -> None:
        """Write now and then on which day each token was last used, until cancelled."""
        while True:
            await asyncio.sleep(NOTE_S)
            await self.save_uses()

    async def save_uses(self) -> None:
        """Write it now, where this daemon is the writer. What cannot be written is tried again the next time."""
        self._used = {token_id: day for token_id, day in self._used.items() if token_id in self._records}
        days = dict(self._used)
        if not days or not self._writes:
            return
        try:
            await self._writer.between_turns(bearers.note_use, self._store, days)
        except StoreFailed as error:
            log.debug("the last use of tokens cannot be written: %s", error.detail)
            return
        with self._changing:
            for token_id, day in days.items():
                record = self._records.get(token_id)
                if record is not None:
                    self._records[token_id] = replace(record, token=replace(record.token, last_used_on=day))
                if self._used.get(token_id) == day:
                    del self._used[token_id]

    async def create(self, asked: TokenRequest, by: str | None, account: Account | None = None) -> NewBearerToken:
        """A new token, kept before it is shown; `account` is that of its user, looked up when left out. Raises
        `Unavailable`, `OverQuota`."""
        owner = await asyncio.to_thread(account_of, asked.user) if account is None else account
        now, token_id = clock.now().at, ids.make("token")
        bearer = ids.bearer(token_id)
        token = BearerToken(
            id=token_id,
            user=owner.user,
            uid=owner.uid,
            role=asked.role,
            note=asked.note,
            created_at=now,
            created_by=by,
            expires_at=None if asked.expires_s is None else now + timedelta(seconds=asked.expires_s),
        )
        record = BearerRecord(token=token, hash=_hash(bearer), gid=owner.gid)
        await self._change(lambda: bearers.add(self._store, record, now))
        with self._changing:
            self._changes += 1
            self._records[token_id] = record
        log.info("%s made token %s of %s with role %s", by, token_id, token.user, token.role)
        await self._record("token.created", token, by)
        return NewBearerToken(**{name: getattr(token, name) for name in BearerToken.__slots__}, bearer=bearer)

    async def revoke(self, token_id: str, by: str | None) -> BearerToken:
        """The token, which is in force no more. Raises `NotFound`, `Unavailable`."""
        await self._refresh()
        record = self._records.get(token_id)
        if record is None:
            detail = f"There is no token {token_id}."
            raise NotFound(detail, remedy="gpulease token list shows those there are; one is revoked only once.")
        await self._change(lambda: bearers.remove(self._store, token_id))
        with self._changing:
            self._changes += 1
            self._records.pop(token_id, None)
        log.info("%s revoked token %s of %s", by, token_id, record.token.user)
        await self._record("token.revoked", record.token, by)
        return self._shown(record.token)

    def _shown(self, token: BearerToken) -> BearerToken:
        """The token with a use that is not written yet."""
        day = self._used.get(token.id)
        return token if day is None else replace(token, last_used_on=day)

    async def _record(self, kind: str, token: BearerToken, by: str | None) -> None:
        """Have it in the history before anybody is answered. What was done to the token is not undone without that."""
        reason = f"{token.id} of user {token.user}, role {token.role}, by {by or 'nobody who is known'}"
        try:
            await self._writer.submit(TokenChanged(cause=ids.make("request"), kind=kind, reason=reason))
        except Unavailable as error:
            log.warning("%s is not in the history: %s", kind, error.detail)

    async def _change(self, work: Callable[[], None]) -> None:
        try:
            await self._writer.between_turns(work)
        except StoreFailed:
            self._complete, self._read_s = False, clock.now().mono_s  # it may have been written all the same
            raise

    async def _refresh(self) -> None:
        """Read them again where somebody else may have changed them."""
        if self._complete:
            return
        async with self._reading:
            while not self._complete:
                now_s, changes = clock.now().mono_s, self._changes
                if self._read_s is not None and now_s - self._read_s < READ_S:
                    return
                try:
                    records = await asyncio.to_thread(bearers.load, self._store.engine)
                except SQLAlchemyError as error:
                    if self._read_s is None and not self._complete:
                        detail = f"The tokens cannot be read now: {why(error)}."
                        raise Unavailable(detail, remedy="Ask again.") from error
                    log.debug("the tokens cannot be read: %s", error)
                    self._read_s = now_s
                    return
                with self._changing:
                    if changes == self._changes:
                        self._records, self._read_s = records, now_s
                        return


def _hash(bearer: str) -> str:
    return hashlib.sha256(bearer.encode(errors="surrogatepass")).hexdigest()


def _expired(token: BearerToken, now: datetime) -> bool:
    return token.expires_at is not None and token.expires_at <= now


def account_of(user: str) -> Account:
    """The account on this host that a login name or a number means. Blocks."""
    numeric = user.isascii() and user.isdecimal()
    try:
        known = pwd.getpwuid(int(user)) if numeric else pwd.getpwnam(user)
    except (KeyError, ValueError, OverflowError):
        return Account(str(int(user)) if numeric else user)
    return Account(known.pw_name, known.pw_uid, known.pw_gid)
