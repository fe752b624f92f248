"""The JSON of a lease that is renewed again and again: what a renewal does not change is encoded once."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter, is_
from typing import Any

from pydantic import TypeAdapter

from gpulease_protocol.model import Lease

LEASE: TypeAdapter[Lease] = TypeAdapter(Lease)
MAX_KEPT, MAX_KEPT_BYTES = 4096, 4096
"""Leases of which the beginning is kept, and the length of each: 16 MiB at most, and mostly a tenth of that."""

_NAMES = [field.name for field in fields(Lease)]
_LASTING, _CHANGING = _NAMES[: _NAMES.index("expires_at")], _NAMES[_NAMES.index("expires_at") :]
_LASTING_VALUES = attrgetter(*_LASTING)
_ONLY_LASTING, _ONLY_CHANGING = set(_LASTING), set(_CHANGING)


class LeaseEncoder:
    """Encodes leases as `LEASE.dump_json` does, in half the time where a lease was encoded before."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[Any, ...], bytes]] = {}
        """By lease id, oldest first: the values of the first fields, and their JSON."""

    def encode(self, lease: Lease) -> bytes:
        """The JSON of a lease."""
        to_json = LEASE.serializer.to_json
        values, kept = _LASTING_VALUES(lease), self._kept.get(lease.id)
        # The same objects, not equal ones: 60 and 60.0 are equal, and may differ in JSON.
        if kept is not None and all(map(is_, kept[0], values)):
            begin = kept[1]
        else:
            begin = to_json(lease, include=_ONLY_LASTING)[:-1]
            self._keep(lease.id, values, begin)
        return b"%b,%b" % (begin, to_json(lease, include=_ONLY_CHANGING)[1:])

    def _keep(self, lease_id: str, values: tuple[Any, ...], begin: bytes) -> None:
        self._kept.pop(lease_id, None)
        if len(begin) <= MAX_KEPT_BYTES:
            self._kept[lease_id] = values, begin
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]
