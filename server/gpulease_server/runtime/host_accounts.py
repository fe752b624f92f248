"""The accounts of the daemon's host: whom a login name means, and whether there is such a user by now.

The directory of users (LDAP, SSSD) may be slow or hang, so it is asked in threads of its own, once at a time for each
name, and its answers are kept for `ANSWER_TTL_S`.
"""

from __future__ import annotations

import asyncio
import pwd
from concurrent.futures import Future, ThreadPoolExecutor

from gpulease_protocol.errors import Unavailable
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.runtime import clock

ANSWER_TTL_S = 60.0
PATIENCE_S = 5.0
"""How long to wait for the first answer about a name."""
MAX_NAMES = 10_000
"""Names of which the answer is kept; tokens have no more."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """The account on this host that a user name means."""

    user: str
    """The login name as the host spells it; an unknown name as it was given."""
    uid: int | None = None
    """None if the host does not know the user."""
    gid: int | None = None


def find_account(user: str) -> TokenAccount:
    """The account on this host that a login name or a number means. Blocks."""
    numeric = user.isascii() and user.isdecimal()
    try:
        known = pwd.getpwuid(int(user)) if numeric else pwd.getpwnam(user)
    except (KeyError, ValueError, OverflowError):
        return TokenAccount(str(int(user)) if numeric else user)
    return TokenAccount(known.pw_name, known.pw_uid, known.pw_gid)


class HostAccounts:
    """Which names are users of this host. Used from one event loop at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "accounts")
        self._answers: dict[str, tuple[bool, float]] = {}
        """Whether the user exists, and until when that answer is used, by name."""
        self._asked: dict[str, Future[bool]] = {}
        """The last question about a name."""

    def was_found(self, user: str) -> bool:
        """True if the last answer was that the user exists. Asks no one."""
        return self._answers.get(user, (False, 0.0))[0]

    def was_asked(self, user: str) -> bool:
        """True if there is an answer about this name."""
        return user in self._answers

    async def exists(self, user: str) -> bool:
        """True if the user exists. An old answer is used while a new one is fetched. Raises `Unavailable` if there is
        no answer in time."""
        answer = self._answers.get(user)
        if answer is not None and clock.now().mono_s < answer[1]:
            return answer[0]
        asked = self._asked.get(user)
        if asked is None or asked.done():
            if len(self._asked) >= MAX_NAMES:
                self._asked, self._answers = {}, {}
            asked = self._asked[user] = self._threads.submit(self._ask, user)
        if answer is not None:
            return answer[0]
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.shield(asyncio.wrap_future(asked))
        except TimeoutError:
            detail = f"This host does not say whether it has a user {user}, as its directory of users does not answer."
            raise Unavailable(detail, remedy="Ask again.") from None

    def _ask(self, user: str) -> bool:
        found = find_account(user).uid is not None
        self._answers[user] = (found, clock.now().mono_s + ANSWER_TTL_S)
        return found
