"""Names and ids of users, from a user database that may be on a network and not answer. No lookup blocks for long."""

from __future__ import annotations

import pwd
import threading
import time
from typing import Generic, TypeVar

Key = TypeVar("Key", int, str)
Value = TypeVar("Value")

NAME_WAIT_S, NAME_KEPT_S = 0.1, 60.0
"""How long to wait for an answer, short compared with a reading's deadline; how long an answer is cached."""


class _LookupCache(Generic[Key, Value]):
    """Answers of the user database. It is asked one question at a time, however long that takes."""

    def __init__(self) -> None:
        self._answers: dict[Key, tuple[Value, float]] = {}
        """By key: the answer, and when it expires."""
        self._lookup: threading.Thread | None = None

    def _answer(self, key: Key, unknown: Value) -> Value:
        """The answer; while the database does not answer, the last one known, or else `unknown`."""
        answer, until_s = self._answers.get(key, (unknown, 0.0))
        if time.monotonic() < until_s or (self._lookup is not None and self._lookup.is_alive()):
            return answer
        lookup = threading.Thread(target=self._look_up, args=(key, unknown), daemon=True)
        try:
            lookup.start()
        except RuntimeError:  # no further thread is possible
            return answer
        self._lookup = lookup
        lookup.join(NAME_WAIT_S)
        return self._answers.get(key, (answer, 0.0))[0]

    def _look_up(self, key: Key, unknown: Value) -> None:
        try:
            answer = self._ask(key)
        except (KeyError, OSError, ValueError):
            answer = unknown
        self._answers[key] = (answer, time.monotonic() + NAME_KEPT_S)

    def _ask(self, key: Key) -> Value:
        raise NotImplementedError


class UserNameCache(_LookupCache[int, str]):
    """Login names by user id."""

    def name_of(self, uid: int) -> str:
        """The login name; the number where there is none, or none is known yet."""
        return self._answer(uid, str(uid))

    def _ask(self, key: int) -> str:
        return pwd.getpwuid(key).pw_name


class UserIdCache(_LookupCache[str, int | None]):
    """User ids by login name."""

    def uid_of(self, user: str) -> int | None:
        """The user id of a login name on this node, or of a number that no account has as its name; None if there is
        none, or none is known yet."""
        return self._answer(user, None)

    def _ask(self, key: str) -> int | None:
        try:
            return pwd.getpwnam(key).pw_uid
        except KeyError:
            return int(key) if key.isascii() and key.isdigit() else None


USERS = UserNameCache()
USER_IDS = UserIdCache()
