"""The one module that makes ids."""

from __future__ import annotations

import secrets


def make(kind: str) -> str:
    """A new id such as `lease-9f86d081884c7d65`: 64 random bits, so that none is guessed or made twice."""
    return f"{kind}-{secrets.token_hex(8)}"


def first_ticket() -> int:
    """Where this process begins to count tickets, so that one of another process is not taken for its own."""
    return secrets.randbits(48)


def bearer(token_id: str) -> str:
    """A new bearer token: its id, and 256 random bits."""
    return f"{token_id}.{secrets.token_urlsafe(32)}"
