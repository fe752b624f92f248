"""What both HTTP libraries below the transports share: headers, and failures in words."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import InvalidRequest

MAX_RESPONSE_BYTES = 2**26
"""Largest body of a response."""


def headers(call: ApiCall[Any], bearer_token: str | None) -> dict[str, str]:
    """The HTTP headers of a call."""
    values = {"Accept": call.accept}
    if bearer_token:
        values["Authorization"] = f"Bearer {bearer_token}"
    if call.idempotency_key:
        values["Idempotency-Key"] = call.idempotency_key
    if call.body is not None:
        values["Content-Type"] = "application/json"
    return values


def encoded_body(call: ApiCall[Any]) -> bytes | None:
    """The body of a call, the same bytes from every library and release: a daemon knows a repeated request by them.

    Raises UnicodeEncodeError for text that UTF-8 cannot encode.
    """
    if call.body is None:
        return None
    return json.dumps(call.body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def not_utf_8(error: UnicodeEncodeError, call: ApiCall[Any]) -> InvalidRequest:
    """The error for text that UTF-8 cannot encode; names the field that has it."""
    fields: dict[str, Any] = {**dict(call.query), **(call.body or {})}
    name = next((name for name, value in fields.items() if not _is_unicode(value)), "request")
    shown = ascii(error.object[max(0, error.start - 40) : error.end + 40])
    return InvalidRequest(f"{name}: must be text in UTF-8, not {shown}.", remedy="Rename it, or leave it out.")


def retry_after_s(header: str) -> float | None:
    """`Retry-After` in seconds. Only a whole number counts, not a date."""
    text = header.strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def error_reason(error: Exception) -> str:
    """The reason, in the words of the operating system."""
    number = error.errno or 0 if isinstance(error, OSError) else 0
    if number > 0:
        return os.strerror(number)
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)).rstrip(".") or type(error).__name__


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
