"""Who is in a group of this host, for administrators by group (`--admin @sudo`).

The directory of groups (LDAP, SSSD) may be slow or hang, so it is asked in threads of its own. An answer counts for
`ANSWER_TTL_S`: who leaves a group is an administrator no longer than that. A user who asks all the time waits
for no answer, because the next one is fetched in time. Where none comes, no one is in the group.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import time
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor

from gpulease_protocol.lazy_dataclass import dataclass

ANSWER_TTL_S = 60.0
REFRESH_AFTER_S = 30.0
"""The age of an answer at which the next one is fetched."""
PATIENCE_S = 2.0
"""How long a request waits for an answer. While none comes, later requests wait for none."""
MAX_USERS = 10_000
"""Users of whom the answer is kept."""


@dataclass(slots=True)
class _Answer:
    asked: asyncio.Future[frozenset[str]]
    """The last question."""
    asked_at_s: float
    groups: frozenset[str] = frozenset()
    """The last answer: names of the groups, of those asked about."""
    until_s: float = float("-inf")
    """Until when it counts, on the monotonic clock."""


class GroupMembers:
    """Members of some groups. Used from one event loop."""

    def __init__(self, groups: Set[str]) -> None:
        self.groups = frozenset(groups)
        self._threads = ThreadPoolExecutor(2, "groups")
        self._answers: dict[int, _Answer] = {}

    async def include(self, uid: int) -> bool:
        """True if the user is in one of the groups."""
        if not self.groups:
            return False
        now_s, answer = time.monotonic(), self._answers.get(uid)
        if answer is None or (answer.asked.done() and now_s - answer.asked_at_s > REFRESH_AFTER_S):
            answer = self._ask(uid, answer, now_s)
        if now_s < answer.until_s:
            return bool(answer.groups)
        if now_s - answer.asked_at_s <= PATIENCE_S:
            await asyncio.wait([answer.asked], timeout=PATIENCE_S)
        return bool(answer.groups) and time.monotonic() < answer.until_s

    def _ask(self, uid: int, before: _Answer | None, now_s: float) -> _Answer:
        if before is None and len(self._answers) >= MAX_USERS:
            self._answers.clear()
        asked = asyncio.get_running_loop().run_in_executor(self._threads, groups_of, uid, self.groups)
        answer = before or _Answer(asked, now_s)
        answer.asked, answer.asked_at_s = asked, now_s

        def note(done: asyncio.Future[frozenset[str]]) -> None:
            if not done.cancelled() and done.exception() is None:
                answer.groups, answer.until_s = done.result(), time.monotonic() + ANSWER_TTL_S

        asked.add_done_callback(note)
        self._answers[uid] = answer
        return answer


def groups_of(uid: int, groups: Set[str]) -> frozenset[str]:
    """Which of these groups a user is in, as their first group or any other. Blocks."""
    try:
        account = pwd.getpwuid(uid)
        numbers = {*os.getgrouplist(account.pw_name, account.pw_gid)}
    except (KeyError, OSError):
        return frozenset()
    return frozenset(group for group in groups if (known := find_group(group)) is not None and known in numbers)


def find_group(name: str) -> int | None:
    """The number of a group of this host; None if there is none of that name. Blocks."""
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, OSError):
        return None
