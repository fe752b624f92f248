"""The one module that makes ids."""

from __future__ import annotations

import os
import secrets

_DIGITS = 16
_unused: list[str] = []
"""Random digits for further ids: to ask the kernel for many costs hardly more than for one."""
os.register_at_fork(after_in_child=_unused.clear)


def new_id(kind: str) -> str:
    """A new id such as `lease-9f86d081884c7d65`: 64 random bits, so that none is guessed or made twice. Thread-safe."""
    while True:
        try:
            return f"{kind}-{_unused.pop()}"
        except IndexError:
            digits = secrets.token_hex(_DIGITS // 2 * 128)
            _unused.extend(digits[place : place + _DIGITS] for place in range(0, len(digits), _DIGITS))


def first_ticket() -> int:
    """A random first ticket, so that tickets of another process are not mistaken for this one's."""
    return secrets.randbits(48)


def new_bearer_token(token_id: str) -> str:
    """A new bearer token: its id, and 256 random bits."""
    return f"{token_id}.{secrets.token_urlsafe(32)}"
