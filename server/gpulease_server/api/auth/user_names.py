"""Login names by user id, cached, because the directory of users (LDAP, SSSD) may be slow or hang."""

from __future__ import annotations

import asyncio
import pwd
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from gpulease_protocol.lazy_dataclass import dataclass

MAX_CACHED_NAMES = 10_000
NAME_TTL_S = 60.0
"""How long a name is used before it is looked up again; also how long a uid is known to have none."""


@dataclass(frozen=True, slots=True)
class CachedName:
    """The last answer of the directory for one uid."""

    name: str
    until_s: float
    """When to look it up again, on the monotonic clock."""


_cache: dict[int, CachedName] = {}
_threads = ThreadPoolExecutor(4, "users")
"""Threads of its own, so that a directory that hangs delays nothing else."""


def user_name(uid: int) -> str:
    """Login name of a user as `refresh_user_name` last found it; the number if there is none."""
    cached = _cache.get(uid)
    return str(uid) if cached is None else cached.name


async def refresh_user_name(uid: int) -> None:
    """Look up a user's name if it is not cached, or if the cached one is older than `NAME_TTL_S`.

    A slow directory delays only users without a cached name; an old name is refreshed in the background. A name
    that was found once stays while the directory does not answer, so that users keep the right to their own leases.
    """
    cached = _cache.get(uid)
    if cached is not None and time.monotonic() < cached.until_s:
        return
    lookup = asyncio.get_running_loop().run_in_executor(_threads, _look_up, uid)
    if cached is None:
        await lookup
    else:
        _cache[uid] = replace(cached, until_s=time.monotonic() + NAME_TTL_S)


def _look_up(uid: int) -> None:
    """Ask the directory. Blocks; runs in a thread."""
    cached = _cache.get(uid)
    try:
        name = pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        name = str(uid) if cached is None else cached.name
    if cached is None and len(_cache) >= MAX_CACHED_NAMES:
        _make_room()
    _cache[uid] = CachedName(name, time.monotonic() + NAME_TTL_S)


def _make_room() -> None:
    """Forget a tenth, oldest first, and those without a name before all others: one user may have tens of thousands of
    such uids (`/etc/subuid`), and must cost no one else their name."""
    named_last = sorted(list(_cache.items()), key=lambda item: item[1].name != str(item[0]))
    for uid, _ in named_last[: MAX_CACHED_NAMES // 10]:
        _cache.pop(uid, None)
