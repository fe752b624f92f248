"""Administrators by group: who counts, for how long, and what a directory of users that hangs delays."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gpulease_server.api.access_settings import AccessSettings
from gpulease_server.api.auth.callers import caller_from_peer
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.runtime import group_members
from gpulease_server.runtime.group_members import ANSWER_TTL_S, PATIENCE_S, GroupMembers
from gpulease_server.setting_checks import checked_admins

NUMBERS = {"users": 100, "sudo": 27, "gpu-admins": 600}


class Directory:
    """A directory of users that the test changes; all of them are in `users` first."""

    def __init__(self) -> None:
        self.further: dict[str, list[str]] = {}
        self.hangs: Callable[[], object] = lambda: None
        self.now_s = 0.0

    def groups(self, name: str, first: int) -> list[int]:
        self.hangs()
        return [first, *(NUMBERS[group] for group in self.further.get(name, []))]


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Directory:
    made = Directory()
    account = SimpleNamespace(getpwuid=lambda uid: SimpleNamespace(pw_name=f"u{uid}", pw_gid=100))
    monkeypatch.setattr(group_members, "pwd", account)
    monkeypatch.setattr(group_members, "os", SimpleNamespace(getgrouplist=made.groups))
    monkeypatch.setattr(
        group_members, "grp", SimpleNamespace(getgrnam=lambda name: SimpleNamespace(gr_gid=NUMBERS[name]))
    )
    monkeypatch.setattr(group_members, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


def test_a_first_group_counts_and_so_does_a_further_one(directory: Directory) -> None:
    directory.further = {"u1": ["sudo"]}

    async def members(*groups: str) -> list[bool]:
        asked = GroupMembers(set(groups))
        return [await asked.include(uid) for uid in (1, 2)]

    assert asyncio.run(members("sudo", "gpu-admins")) == [True, False]
    assert asyncio.run(members("users")) == [True, True]
    assert asyncio.run(members("no-such-group")) == [False, False]
    assert asyncio.run(members()) == [False, False]


def test_who_leaves_the_group_is_an_administrator_no_longer_than_an_answer_counts(directory: Directory) -> None:
    async def told() -> list[bool]:
        members, answers = GroupMembers({"sudo"}), []
        for at_s, groups in ((0.0, ["sudo"]), (5.0, []), (ANSWER_TTL_S + 1, [])):
            directory.now_s, directory.further = at_s, {"u1": groups}
            answers.append(await members.include(1))
        return answers

    assert asyncio.run(told()) == [True, True, False]


def test_a_directory_that_hangs_makes_no_administrators_and_delays_one_request(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_members, "PATIENCE_S", 0.05)
    released = threading.Event()
    directory.further, directory.hangs = {"u1": ["sudo"]}, lambda: released.wait(60)

    async def told() -> list[bool]:
        members = GroupMembers({"sudo"})
        first = await members.include(1)
        directory.now_s += PATIENCE_S
        before_s = time.monotonic()
        later = [await members.include(1) for _ in range(1000)]
        assert time.monotonic() - before_s < 20, "they waited, all together for 50 s"
        released.set()
        await members._answers[1].asked
        await asyncio.sleep(0)  # what notes the answer runs next
        return [first, *set(later), await members.include(1)]

    assert asyncio.run(told()) == [False, False, True]


def test_a_member_of_long_ago_is_no_administrator_while_the_directory_hangs(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    directory.further = {"u1": ["sudo"]}

    async def told() -> list[bool]:
        members = GroupMembers({"sudo"})
        before = await members.include(1)
        monkeypatch.setattr(group_members, "PATIENCE_S", 0.05)
        directory.now_s, directory.hangs = ANSWER_TTL_S + 1, lambda: released.wait(60)
        after = await members.include(1)
        released.set()
        await members._answers[1].asked
        return [before, after]

    assert asyncio.run(told()) == [True, False]


@pytest.mark.parametrize(("user", "admin"), [("ada", True), ("bob", False)])
def test_a_user_who_is_named_is_an_administrator_and_no_directory_is_asked(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, user: str, admin: bool
) -> None:
    monkeypatch.setattr("gpulease_server.api.auth.callers.user_name", lambda uid: user)
    peer = PeerCredentials(uid=54321, gid=1, connection=ConnectionType.SOCKET)
    access = AccessSettings(admins=frozenset({"ada"}))
    caller = asyncio.run(caller_from_peer(peer, access, GroupMembers(frozenset())))
    assert caller.is_admin is admin


@pytest.mark.parametrize("name", ["", "@", "a b", "@a,b"])
def test_what_names_neither_a_user_nor_a_group_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="write it like ada or @sudo"):
        checked_admins(["ada", name])
