"""docs/states.md has every state that the program has, in its order, and no other."""

from __future__ import annotations

import re
from enum import StrEnum

import pytest

from gpulease_protocol.events import KINDS
from gpulease_protocol.states import Activity, EndReason, GpuState, JobState, LeaseState, NodeMode, PartState
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "states.md").read_text()
TABLES = [
    re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    for table in re.split(r"^\|[-|]+\|$", PAGE, flags=re.MULTILINE)[1:]
]


@pytest.mark.parametrize(
    ("place", "kind"), list(enumerate([GpuState, Activity, LeaseState, EndReason, JobState, PartState, NodeMode]))
)
def test_a_table_has_the_words_of_the_program(place: int, kind: type[StrEnum]) -> None:
    assert TABLES[place] == list(kind)


def test_every_next_state_is_a_state() -> None:
    for states, kind in ((TABLES[2], LeaseState), (TABLES[4], JobState)):
        for state in states:
            (line,) = re.findall(
                rf"^\| `{state}` \|[^|]*\|([^|]*)\|$", PAGE.split(f"## {kind.__name__[:-5]}")[1], re.MULTILINE
            )[:1]
            assert set(re.findall(r"`(\w+)`", line)) <= {*kind, "retries"}


def test_every_kind_of_event_has_a_meaning() -> None:
    kinds = re.findall(r"`([a-z]+\.[a-z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)))
    assert sorted(kinds) == sorted(f"{noun}.{verb}" for noun, verbs in KINDS.items() for verb in verbs)
