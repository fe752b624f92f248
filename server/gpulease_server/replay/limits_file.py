"""Reads limits to try from a file, as `gpulease limits list --json` prints them:

    {"items": [{"kind": "group", "name": "vision", "members": ["ada", "bob"], "max_gpus": 8}]}

What is used of a limit, and what the configuration says, is in that list as well, and is passed over.
"""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.limits import LimitKind, LimitsRequest, LimitUse
from gpulease_server.core.limit_records import LimitRecord

MAX_BYTES = 64 * 2**20
SHOWN = frozenset(field.name for field in fields(LimitUse))
SET = frozenset(field.name for field in fields(LimitsRequest))
REMEDY = 'Write it as `gpulease limits list --json` does: {"items": [{"kind": "user", "name": "ada", "max_gpus": 4}]}.'
LIMITS: TypeAdapter[LimitsRequest] = TypeAdapter(LimitsRequest)


class LimitsFileRefused(InvalidRequest):
    """The file of limits cannot be read. Correct it."""


def read_limits(file: Path) -> tuple[LimitRecord, ...]:
    """The limits that a file says. Raises `LimitsFileRefused`."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise LimitsFileRefused(f"{file}: {error.strerror or error}.", remedy="Check the path.") from error
    if len(raw) > MAX_BYTES:
        raise LimitsFileRefused(f"{file} has more than {MAX_BYTES >> 20} MiB.", remedy="Leave some limits out.")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise LimitsFileRefused(f"{file} is not JSON: {error}.", remedy=REMEDY) from error
    entries = found.get("items") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise LimitsFileRefused(f"{file} has no list `items`.", remedy=REMEDY)
    records = []
    for number, entry in enumerate(entries, start=1):
        try:
            records.append(_record(entry))
        except ValueError as error:
            raise LimitsFileRefused(f"{file}, item {number}: {_reason(error)}.", remedy=REMEDY) from error
    if len({one.key for one in records}) < len(records):
        raise LimitsFileRefused(f"{file} names a user, a group or a token twice.", remedy="Leave one of the two out.")
    return tuple(records)


def _record(entry: Any) -> LimitRecord:
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    if unknown := sorted(entry.keys() - SHOWN):
        raise ValueError(f"{unknown[0]} is not known")
    kind, name = entry.get("kind"), entry.get("name")
    if kind not in list(LimitKind) or not isinstance(name, str) or not name:
        raise ValueError("kind must be user, group or token, and name must say which")
    configured = entry.get("defaults") or []
    if not isinstance(configured, list):
        raise ValueError("defaults must be a list")
    values = {key: value for key, value in entry.items() if key in SET and key not in configured}
    body = LIMITS.validate_json(json.dumps(values), strict=True)
    if body.members and kind != LimitKind.GROUP:
        raise ValueError("members are for a group")
    return LimitRecord(
        kind=LimitKind(kind),
        name=name,
        limits=body.limits(),
        members=tuple(body.members),
        set_at=datetime.now(UTC),
    )


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    said = first["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
