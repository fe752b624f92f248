"""What both HTTP libraries below the transports share: headers, waits, and failures in words."""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Mapping
from typing import Any

from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import InvalidRequest, shortened

MAX_RESPONSE_BYTES = 2**26
"""Largest body of a response."""
MAX_TIMEOUT_S = 86400.0
"""Longest time limit for a response."""


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

    Raises InvalidRequest, naming the field, for what JSON or UTF-8 cannot say.
    """
    if call.body is None:
        return None
    try:
        return _encoded(call.body)
    except UnicodeEncodeError as error:
        raise not_utf_8(error, call) from error
    except (TypeError, ValueError) as error:
        name, value = next((field for field in call.body.items() if not _is_encodable(field[1])), ("request", None))
        shown = shortened(f"{type(value).__name__} {value!r}")
        raise InvalidRequest(
            f"{name}: must be text, a number, or a list of them, not the {shown}.", remedy="Correct it and try again."
        ) from error


def check_wait(wait_s: Any, name: str = "wait_s") -> None:
    """Raise InvalidRequest for a time that is below 0 or no number; infinity waits forever."""
    try:
        is_time = wait_s >= 0
    except TypeError:
        is_time = False
    if not is_time:
        raise InvalidRequest(f"{name}: must be 0 or more seconds, not {wait_s!r}.")


def check_timeout(timeout_s: Any) -> None:
    """Raise InvalidRequest for a time limit that no response could keep, or that is longer than sockets take."""
    try:
        is_limit = 0 < timeout_s <= MAX_TIMEOUT_S
    except TypeError:
        is_limit = False
    if not is_limit:
        raise InvalidRequest(f"timeout_s: must be above 0 and at most {MAX_TIMEOUT_S:g} seconds, not {timeout_s!r}.")


def not_utf_8(error: UnicodeEncodeError, call: ApiCall[Any]) -> InvalidRequest:
    """The error for text that UTF-8 cannot encode; names the field that has it, and shows that text alone."""
    fields: dict[str, Any] = {**dict(call.query), **(call.body or {})}
    name, value = next(((name, value) for name, value in fields.items() if not _is_encodable(value)), ("request", ""))
    if isinstance(value, Mapping):
        name, value = next((f"{name}, {key}", own) for key, own in value.items() if not _is_encodable([key, own]))
    elif isinstance(value, list | tuple):
        value = next(entry for entry in value if not _is_encodable(entry))
    shown = shortened(ascii(value))
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


def _encoded(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=operator.index)
    return text.encode()  # operator.index: the whole numbers of numpy and torch are not of Python's class


def _is_encodable(value: object) -> bool:
    try:
        _encoded(value)
    except (TypeError, ValueError):
        return False
    return True
