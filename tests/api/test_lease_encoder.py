"""Leases of which a part was encoded before are the same JSON as those that are encoded as a whole."""

from __future__ import annotations

import random
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from gpulease_protocol.model import (
    Demand,
    Device,
    EndReason,
    ExpectedBasis,
    Holder,
    Lease,
    LeaseKeep,
    LeaseMember,
    LeaseState,
    Liveness,
)
from gpulease_server.api import lease_encoder
from gpulease_server.api.lease_encoder import LEASE, LeaseEncoder
from gpulease_server.core.fast_replace import replace

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TIMES = (None, NOON, NOON + timedelta(microseconds=123_456), NOON.astimezone(timezone(timedelta(hours=2))))
FLOATS = (None, 0.0, -0.0, 60, 60.0, 0.1, 1e16, 1.5e300, 5e-324)
TEXTS = ("", 'a "quoted" one', ',"expires_at":null', "\x00\x1f\x7f\u2028é😀", "}")
GPUS = tuple(Device(uuid=f"GPU-{one}", node="a", index=one, name=TEXTS[1]) for one in range(3))
VALUES: dict[str, tuple[Any, ...]] = {
    "id": ("lease-1", "lease-2", "lease-3"),
    "state": tuple(LeaseState),
    "end_reason": (None, *EndReason),
    "holder": (Holder(), *(Holder(user=text, label=text) for text in TEXTS)),
    "demand": (Demand(), Demand(time_s=60), Demand(time_s=60.0), Demand(time_s=1e16), Demand(node=TEXTS[2])),
    "gpus": ((), GPUS[:1], GPUS),
    "members": ((), (LeaseMember(rank=0, node="a", address=None, gpus=GPUS, env={"expires_at": "1"}),)),
    "env": ({}, {"expires_at": TEXTS[2]}, {text: text for text in TEXTS}),
    "fencing_token": (None, 0, 1, 2**63 - 1),
    "ttl_s": FLOATS[1:],
    "liveness": tuple(Liveness),
    "job_id": (None, *TEXTS),
    "created_at": TIMES[1:],
    "position": (None, 1, 10**6),
    "expected_basis": (None, *ExpectedBasis),
    "expected_samples": (None, 20),
    "held_for_s": FLOATS,
    "idle_s": FLOATS,
    "kept": (None, *(LeaseKeep(until=NOON, reason=text, by=text, at=NOON) for text in TEXTS)),
    "ends_in_s": FLOATS,
    "problems": ((), TEXTS),
}
"""What the fields of leases are in turns. Fields that are not here are times."""


def value(chance: random.Random, name: str) -> Any:
    return chance.choice(VALUES.get(name, TIMES))


@pytest.mark.parametrize("most_bytes", [4096, 0])
@pytest.mark.parametrize("most", [4096, 2])
def test_a_lease_is_the_same_json_whatever_was_encoded_before(
    most_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_encoder, "MAX_KEPT", most)
    monkeypatch.setattr(lease_encoder, "MAX_KEPT_BYTES", most_bytes)
    chance, encoder = random.Random(7), LeaseEncoder()
    names = [field.name for field in fields(Lease)]
    shown = {id: Lease(**{name: value(chance, name) for name in names} | {"id": id}) for id in VALUES["id"]}
    for _ in range(2000):
        lease = shown[value(chance, "id")]
        changed = {name: value(chance, name) for name in chance.sample(names[1:], chance.randrange(4))}
        shown[lease.id] = lease = replace(lease, **changed)
        assert encoder.encode(lease) == LEASE.dump_json(lease), changed
        assert len(encoder._kept) <= most


def test_what_a_renewal_leaves_as_it_is_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, lease = LeaseEncoder(), Lease(**{field.name: VALUES.get(field.name, TIMES)[-1] for field in fields(Lease)})
    first = encoder.encode(lease)
    kept = encoder._kept[lease.id]
    renewed = replace(lease, expires_at=NOON + timedelta(1), held_for_s=1.0, idle_s=2.0, problems=())
    assert encoder.encode(renewed) != first
    assert encoder._kept[lease.id] is kept
