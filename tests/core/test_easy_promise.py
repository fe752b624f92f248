"""What runs ahead makes no request start later: judged by playing on without it, see `easy_worlds`."""

from __future__ import annotations

import pytest

from gpulease_server.core import easy_backfill
from tests.core.easy_worlds import KINDS, judge

COMBINED = (("jobs", "early", "faults"), ("jobs", "limits", "reservations"), ("jobs", "budgets", "restarts"))
EVERY = ((), *((kind,) for kind in KINDS), *COMBINED)


@pytest.fixture(autouse=True)
def _short_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that some declare more than may run ahead."""
    monkeypatch.setattr(easy_backfill, "MAX_AHEAD_S", 4000.0)


def names(kinds: tuple[str, ...]) -> str:
    return " ".join(kinds) or "plain"


@pytest.mark.parametrize(
    ("seed", "kinds"), [(24, ()), (22, ("jobs", "early")), (23, ("faults", "limits", "reservations", "priorities"))]
)
def test_no_one_starts_later_because_of_what_runs_ahead(seed: int, kinds: tuple[str, ...]) -> None:
    judged, late = judge(seed, kinds, most=2)

    assert judged == 2
    assert late == []


def test_what_does_make_someone_start_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(easy_backfill, "serves_s", lambda *_: float("inf"))

    assert judge(24, most=2)[1]


@pytest.mark.soak
@pytest.mark.parametrize("kinds", EVERY, ids=names)
@pytest.mark.parametrize("seed", range(104, 110))
def test_no_one_ever_starts_later_because_of_what_runs_ahead(seed: int, kinds: tuple[str, ...]) -> None:
    assert judge(seed, kinds)[1] == []
