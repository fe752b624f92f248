"""Bearer tokens on either database: kept by their hash, known to every daemon on it, and while the database is away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, timedelta
from types import SimpleNamespace
from typing import TypeVar

import pytest
from sqlalchemy import Engine, select, text

from gpulease_protocol.errors import NotFound, Unavailable
from gpulease_protocol.limits import LimitKind, Limits
from gpulease_protocol.tokens import Role, TokenRequest
from gpulease_server.core.happenings import LimitsChanged
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.core.policy import Policy
from gpulease_server.runtime import bearer_tokens as bearer_tokens_module
from gpulease_server.runtime import clock, host_accounts
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.writer import Writer
from gpulease_server.store import bearer_tokens as stored
from gpulease_server.store import tables
from gpulease_server.store.ledger_store import Store

Result = TypeVar("Result")


@contextmanager
def daemon(url: str, *, writer: bool = True) -> Iterator[tuple[BearerTokens, Store]]:
    """The tokens of one daemon; of one that stands by unless it is the writer."""
    with daemon_with_turns(url, writer=writer) as (bearers, store, _):
        yield bearers, store


@contextmanager
def daemon_with_turns(url: str, *, writer: bool = True) -> Iterator[tuple[BearerTokens, Store, Writer]]:
    """The same, with what makes its turns."""
    store = Store(url)
    turns = Writer(store, Policy())
    bearers = BearerTokens(store, turns)
    if writer:
        bearers.restore()
    try:
        yield bearers, store, turns
    finally:
        turns.close()
        store.close()


async def eventually(look: Callable[[], Awaitable[Result]], wanted: Callable[[Result], bool]) -> Result:
    until_s = time.monotonic() + 60
    while not wanted(found := await look()) and time.monotonic() < until_s:  # noqa: ASYNC110 - it asks the database
        await asyncio.sleep(0.05)
    assert wanted(found)
    return found


def test_the_limits_of_a_revoked_token_go_with_the_last_that_was_asked_for_with_it(database_url: str) -> None:
    async def story(bearers: BearerTokens, store: Store, turns: Writer) -> None:
        running = asyncio.create_task(turns.run())
        await eventually(lambda: asyncio.sleep(0, turns.problem), lambda problem: problem is None)
        unused, used, kept = [await bearers.create(TokenRequest(user="nobody"), "root") for _ in range(3)]
        for made in (unused, used, kept):
            key = LimitKey(LimitKind.TOKEN, made.id)
            limits = Limits(max_gpus=2, gpu_hours=5.0)
            await turns.submit(LimitsChanged(cause=f"set-{made.id}", key=key, limits=limits, by="root"))
        turns.committed.leases_of_tokens[used.id] = {"lease-1": 0}

        def limited() -> set[str | None]:
            index = store.load().limits
            assert index.records.keys() == index.gpu_time.keys()
            return {key.name for key in index.records}

        for made in (unused, used):
            await bearers.revoke(made.id, "root")
        assert limited() == {used.id, kept.id}, "what waits keeps to its limits"
        del turns.committed.leases_of_tokens[used.id]
        await bearers.remove_limits()
        assert limited() == {kept.id}
        assert len(told(store, "limits.removed")) == 2
        running.cancel()

    with daemon_with_turns(database_url) as (bearers, store, turns):
        asyncio.run(story(bearers, store, turns))


def test_every_daemon_on_the_database_knows_a_token_and_that_it_is_revoked(database_url: str) -> None:
    async def story(writer: BearerTokens, standby: BearerTokens) -> None:
        assert await standby.authenticate("token-0.x") is None
        made = await writer.create(TokenRequest(user="nobody", role=Role.VIEWER, note="n"), "root")
        known = await eventually(lambda: standby.authenticate(made.bearer), lambda found: found is not None)
        assert known is not None
        assert (known.user, known.uid, known.role) == ("nobody", 65534, Role.VIEWER)
        assert await writer.authenticate(made.bearer) == known
        (listed,) = await standby.all()
        assert (listed.id, listed.note, listed.created_by) == (made.id, "n", "root")
        await writer.revoke(made.id, "root")
        assert await writer.authenticate(made.bearer) is None
        await eventually(lambda: standby.authenticate(made.bearer), lambda found: found is None)
        with pytest.raises(NotFound):
            await writer.revoke(made.id, "root")

    with daemon(database_url) as (writer, _), daemon(database_url, writer=False) as (standby, _):
        asyncio.run(story(writer, standby))


def test_a_restarted_daemon_knows_the_tokens_before_its_first_request(database_url: str) -> None:
    with daemon(database_url) as (before, _):
        made = asyncio.run(before.create(TokenRequest(user="ann"), None))
    with daemon(database_url) as (after, store):
        store.engine.dispose()
        assert asyncio.run(after.authenticate(made.bearer)) is not None


def test_only_the_whole_token_counts(database_url: str) -> None:
    with daemon(database_url) as (bearers, store):
        made = asyncio.run(bearers.create(TokenRequest(user="ann"), None))
        token_id, secret = made.bearer.split(".")
        assert token_id == made.id
        for wrong in (made.id, f"{made.id}.", secret, f"{made.id}.{secret}x", f"{made.id}.{secret[:-1]}", "", "."):
            assert asyncio.run(bearers.authenticate(wrong)) is None, wrong
        with store.engine.connect() as connection:
            row = connection.execute(select(tables.bearer_token)).one()
        assert secret not in str(row)
        assert asyncio.run(bearers.authenticate(f"{made.id}.{row.hash}")) is None


def test_a_token_that_could_not_be_kept_is_not_shown_and_the_others_are_known_meanwhile(database_url: str) -> None:
    with daemon(database_url) as (bearers, store):
        made = asyncio.run(bearers.create(TokenRequest(user="ann"), None))
        with store.engine.begin() as connection:
            connection.execute(text("ALTER TABLE bearer_token RENAME TO away"))
        for _ in range(2):
            with pytest.raises(Unavailable):
                asyncio.run(bearers.create(TokenRequest(user="bob"), None))
            assert asyncio.run(bearers.authenticate(made.bearer)) is not None
        with store.engine.begin() as connection:
            connection.execute(text("ALTER TABLE away RENAME TO bearer_token"))
        assert len(asyncio.run(bearers.all())) == 1


class SlowReading:
    """The next reading of the tokens gets what is in the database, and does not come back before it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.let = threading.Event(), threading.Event()
        self._load = stored.load
        monkeypatch.setattr(stored, "load", self.load)
        monkeypatch.setattr(bearer_tokens_module, "MAX_AGE_S", 0.0)

    def load(self, engine: Engine) -> dict[str, stored.BearerTokenRecord]:
        found = self._load(engine)
        if not self.read.is_set():
            self.read.set()
            assert self.let.wait(60)
        return found


def test_what_was_read_before_a_takeover_does_not_bring_a_revoked_token_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(writer: BearerTokens, standby: BearerTokens) -> None:
        made = await writer.create(TokenRequest(user="ann"), "root")
        slow = SlowReading(monkeypatch)
        looking = asyncio.create_task(standby.authenticate(made.bearer))
        assert await asyncio.to_thread(slow.read.wait, 60)
        await writer.revoke(made.id, "root")
        await asyncio.to_thread(standby.restore)
        slow.let.set()
        assert await looking is None
        assert await standby.authenticate(made.bearer) is None
        assert await standby.all() == ()

    with daemon(database_url) as (writer, _), daemon(database_url, writer=False) as (standby, _):
        asyncio.run(story(writer, standby))


def test_what_is_made_or_revoked_while_the_tokens_are_read_stays_so(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(bearers: BearerTokens, store: Store) -> None:
        await bearers.create(TokenRequest(user="ann"), None)
        with store.engine.begin() as connection:
            connection.execute(text("ALTER TABLE bearer_token RENAME TO away"))
        with pytest.raises(Unavailable):
            await bearers.create(TokenRequest(user="bob"), None)
        with store.engine.begin() as connection:
            connection.execute(text("ALTER TABLE away RENAME TO bearer_token"))
        slow = SlowReading(monkeypatch)  # and each request reads them
        looking = asyncio.create_task(bearers.all())
        assert await asyncio.to_thread(slow.read.wait, 60)
        new = await bearers.create(TokenRequest(user="eve"), None)
        monkeypatch.setattr(bearer_tokens_module, "MAX_AGE_S", 3600.0)  # what is taken for true now stays
        slow.let.set()
        assert [token.user for token in await looking] == ["ann", "eve"]
        assert await bearers.authenticate(new.bearer) is not None

    with daemon(database_url) as (bearers, store):
        asyncio.run(story(bearers, store))


def last_used(store: Store) -> list[date | None]:
    with store.engine.connect() as connection:
        return list(connection.execute(select(tables.bearer_token.c.last_used_on)).scalars())


def test_the_day_of_a_tokens_last_use_is_written_once_a_day_and_not_with_each_request(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[dict[str, date]] = []
    note_use = stored.save_uses
    monkeypatch.setattr(stored, "save_uses", lambda store, days: noted.append(days) or note_use(store, days))
    moment = clock.now()
    today, tomorrow = moment.at.date(), moment.at.date() + timedelta(days=1)
    monkeypatch.setattr(clock, "now", lambda: moment)

    async def story(bearers: BearerTokens, store: Store) -> None:
        nonlocal moment
        made = await bearers.create(TokenRequest(user="ann"), "root")
        unused = await bearers.create(TokenRequest(user="bob"), "root")
        assert await bearers.authenticate(f"{made.id}.wrong") is None
        await bearers.save_uses()
        assert [token.last_used_on for token in await bearers.all()] == [None, None]
        for _ in range(3):
            assert await bearers.authenticate(made.bearer) is not None
        assert {token.id: token.last_used_on for token in await bearers.all()} == {made.id: today, unused.id: None}
        assert (noted, last_used(store)) == ([], [None, None]), "it was written with the request"
        for _ in range(2):
            await bearers.save_uses()
            await bearers.authenticate(made.bearer)
        assert noted == [{made.id: today}]
        assert set(last_used(store)) == {today, None}
        moment = replace(moment, at=moment.at + timedelta(days=1))
        await bearers.authenticate(made.bearer)
        await bearers.save_uses()
        moment = replace(moment, at=moment.at - timedelta(days=3))
        await bearers.authenticate(made.bearer)
        await bearers.save_uses()
        assert noted[1:] == [{made.id: tomorrow}], "a clock that goes back takes nothing back"
        assert set(last_used(store)) == {tomorrow, None}
        assert (await bearers.revoke(made.id, "root")).last_used_on == tomorrow

    with daemon(database_url) as (bearers, store):
        asyncio.run(story(bearers, store))
    with daemon(database_url) as (again, _):
        assert [token.last_used_on for token in asyncio.run(again.all())] == [None]


def test_a_use_on_a_daemon_that_stands_by_is_written_when_it_takes_over(database_url: str) -> None:
    async def story(writer: BearerTokens, standby: BearerTokens, store: Store) -> None:
        made = await writer.create(TokenRequest(user="ann"), "root")
        day = clock.now().at.date()
        await eventually(lambda: standby.authenticate(made.bearer), lambda found: found is not None)
        await standby.save_uses()
        assert last_used(store) == [None], "who stands by writes nothing"
        await asyncio.to_thread(standby.restore)
        await standby.save_uses()
        assert last_used(store) in ([day], [clock.now().at.date()]), "midnight may have passed"

    with daemon(database_url) as (writer, _), daemon(database_url, writer=False) as (standby, store):
        asyncio.run(story(writer, standby, store))


def test_a_use_that_cannot_be_written_is_written_later(database_url: str) -> None:
    async def story(bearers: BearerTokens, store: Store) -> None:
        made = await bearers.create(TokenRequest(user="ann"), "root")
        day = clock.now().at.date()
        await bearers.authenticate(made.bearer)
        with store.engine.begin() as connection:
            connection.execute(text("ALTER TABLE bearer_token RENAME TO away"))
        await bearers.save_uses()
        with pytest.raises(Unavailable):
            await bearers.create(TokenRequest(user="bob"), None)
        with store.engine.begin() as connection:
            connection.execute(text("ALTER TABLE away RENAME TO bearer_token"))
        assert last_used(store) == [None]
        await bearers.save_uses()
        assert last_used(store) in ([day], [clock.now().at.date()]), "midnight may have passed"

    with daemon(database_url) as (bearers, store):
        asyncio.run(story(bearers, store))


class Passwd:
    """The login names of the daemon's host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        self.answers = threading.Event()
        self.answers.set()
        monkeypatch.setattr(host_accounts.pwd, "getpwnam", self.look_up)
        monkeypatch.setattr(host_accounts, "ANSWER_TTL_S", 0.0)

    def look_up(self, name: str) -> SimpleNamespace:
        assert self.answers.wait(60)
        if name not in self.names:
            raise KeyError(name)
        return SimpleNamespace(pw_name=name, pw_uid=1234, pw_gid=1234)


@pytest.fixture
def passwd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passwd]:
    made = Passwd(monkeypatch)
    yield made
    made.answers.set()


def told(store: Store, kind: str) -> list[str]:
    with store.engine.connect() as connection:
        rows = connection.execute(select(tables.event.c.reason).where(tables.event.c.kind == kind))
        return [str(reason) for reason in rows.scalars()]


def test_a_token_made_for_a_name_ends_when_the_host_has_such_a_user(database_url: str, passwd: Passwd) -> None:
    """Its maker would act for a user who has never heard of it."""

    async def story(bearers: BearerTokens, store: Store, turns: Writer) -> None:
        running = asyncio.create_task(turns.run())
        roles = (Role.VIEWER, Role.USER, Role.ADMIN)
        before = [await bearers.create(TokenRequest(user="ann", role=role), "eve") for role in roles]
        worker = await bearers.create(TokenRequest(user="ann", role=Role.WORKER), "root")
        other = await bearers.create(TokenRequest(user="bob"), "eve")
        for made in (*before, worker, other):
            assert made.uid is None
            assert await bearers.authenticate(made.bearer) is not None
        passwd.names.add("ann")
        own = await bearers.create(TokenRequest(user="ann"), "root")
        for made in before:
            await eventually(lambda made=made: bearers.authenticate(made.bearer), lambda found: found is None)
            assert not bearers.is_valid(made.id)
        passwd.names.clear()
        for made in before:
            assert await bearers.authenticate(made.bearer) is None, "it comes back with no one"
        for made in (worker, other, own):
            assert await bearers.authenticate(made.bearer) is not None
        assert sorted(told(store, "token.revoked")) == sorted(
            f"{made.id} of user ann, role {made.role}, by the daemon, because its host has a user ann now, and had none"
            " when the token was made"
            for made in before
        )
        running.cancel()

    with daemon_with_turns(database_url) as (bearers, store, turns):
        asyncio.run(story(bearers, store, turns))


def test_what_a_token_has_open_ends_when_its_name_is_anothers(database_url: str, passwd: Passwd) -> None:
    """An event stream, or a long poll: they ask for nothing more."""

    async def story(bearers: BearerTokens) -> None:
        made = await bearers.create(TokenRequest(user="ann"), "eve")
        unused = await bearers.create(TokenRequest(user="bob"), "eve")
        assert await bearers.authenticate(made.bearer) is not None
        passwd.names |= {"ann", "bob"}

        async def valid() -> bool:
            await bearers.end_those_of_new_users()
            return bearers.is_valid(made.id)

        await eventually(valid, lambda found: not found)
        assert bearers.is_valid(unused.id), "that is asked at its first use"
        assert await bearers.authenticate(unused.bearer) is None

    with daemon(database_url) as (bearers, _):
        asyncio.run(story(bearers))


def test_a_standby_refuses_such_a_token_and_changes_nothing(database_url: str, passwd: Passwd) -> None:
    async def story(writer: BearerTokens, standby: BearerTokens) -> None:
        made = await writer.create(TokenRequest(user="ann"), "eve")
        passwd.names.add("ann")
        assert await standby.authenticate(made.bearer) is None
        assert [token.id for token in await writer.all()] == [made.id]

    with daemon(database_url) as (writer, _), daemon(database_url, writer=False) as (standby, _):
        asyncio.run(story(writer, standby))


def test_a_directory_of_users_that_hangs_keeps_known_tokens_valid_and_delays_no_one(
    database_url: str, passwd: Passwd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_accounts, "PATIENCE_S", 0.2)

    async def story(bearers: BearerTokens) -> None:
        known = await bearers.create(TokenRequest(user="ann"), "eve")
        new = await bearers.create(TokenRequest(user="bob"), "eve")
        assert await bearers.authenticate(known.bearer) is not None
        passwd.answers.clear()
        for _ in range(10):
            assert await bearers.authenticate(known.bearer) is not None
            with pytest.raises(Unavailable, match="does not say whether it has a user bob"):
                await bearers.authenticate(new.bearer)
        passwd.answers.set()
        monkeypatch.setattr(host_accounts, "PATIENCE_S", 60.0)
        assert await bearers.authenticate(new.bearer) is not None

    with daemon(database_url) as (bearers, _):
        asyncio.run(story(bearers))


def test_a_join_token_that_is_revoked_while_it_is_used_makes_none(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(database_url) as (bearers, store):

        async def work() -> None:
            asked = TokenRequest(user="root", role=Role.JOIN, node="n", expires_s=60)
            token_id = (await bearers.create(asked, "root")).id
            find = bearer_tokens_module.find_account

            def revoked_meanwhile(user: str) -> object:
                stored.remove(store, token_id)
                return find(user)

            monkeypatch.setattr(bearer_tokens_module, "find_account", revoked_meanwhile)
            assert await bearers.join(token_id, "n") is None
            assert stored.load(store.engine) == {}

        asyncio.run(work())
