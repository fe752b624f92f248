"""The one module that makes ids."""

from __future__ import annotations

import secrets


def new_id(kind: str) -> str:
    """A new id such as `lease-9f86d081884c7d65`: 64 random bits, so that none is guessed or made twice."""
    return f"{kind}-{secrets.token_hex(8)}"


def first_ticket() -> int:
    """A random first ticket, so that tickets of another process are not mistaken for this one's."""
    return secrets.randbits(48)


def new_bearer_token(token_id: str) -> str:
    """A new bearer token: its id, and 256 random bits."""
    return f"{token_id}.{secrets.token_urlsafe(32)}"
