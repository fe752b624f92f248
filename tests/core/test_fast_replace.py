"""Copies of records: equal to those of the standard function, and cheaper."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from gpulease_server.core.fast_replace import replace
from tests.core.build import World


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    first: int
    second: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Checked(Base):
    third: int = 3

    def __post_init__(self) -> None:
        if self.third < 0:
            raise ValueError("third is negative")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Derived(Base):
    third: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Remembering(Base):
    found: list[int] = dataclasses.field(init=False, default_factory=list)


@dataclasses.dataclass
class Plain:
    first: int
    second: int = 2


def test_a_copy_has_the_changed_fields_and_shares_the_others() -> None:
    before = Derived(1, [2])
    after = replace(before, first=5)
    assert after == dataclasses.replace(before, first=5) == Derived(5, [2])
    assert after.second is before.second
    assert before.first == 1
    assert replace(Plain(1), second=4) == Plain(1, 4)


def test_a_copy_is_of_the_same_class_and_frozen() -> None:
    for before in (Base(1, [2]), Derived(1, [2])):
        after = replace(before, first=5)
        assert type(after) is type(before)
        assert pickle.loads(pickle.dumps(after)) == after
        with pytest.raises(dataclasses.FrozenInstanceError):
            after.first = 6  # type: ignore[misc]
        assert hash(replace(before, second=())) == hash(type(before)(1, ()))  # type: ignore[arg-type]


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="'fourth'"):
        replace(Derived(1, []), fourth=4)  # type: ignore[call-arg]


def test_a_class_that_checks_its_values_still_does() -> None:
    with pytest.raises(ValueError, match="negative"):
        replace(Checked(1, []), third=-1)


def test_what_an_instance_has_found_out_for_itself_is_not_copied() -> None:
    before = Remembering(1, [])
    before.found.append(7)
    assert replace(before, first=2).found == []


def test_the_records_of_the_core_are_copied_as_by_the_standard_function() -> None:
    world = World()
    world.node("a")
    lease = world.lease(1)
    record = world.ledger.leases[lease.id]
    changed = replace(record, lease=replace(record.lease, ttl_s=7.0), port=1)
    assert changed == dataclasses.replace(record, lease=dataclasses.replace(record.lease, ttl_s=7.0), port=1)
    assert changed.lease.gpus is record.lease.gpus
    assert hash(changed.lease.id) == hash(lease.id)
