"""The first hour, as three new users walked it, has no stumble of theirs any more."""

from __future__ import annotations

import pytest

from tests.walks.hour import walk_the_first_hour

pytestmark = pytest.mark.slow


@pytest.mark.budget(240)
def test_the_first_hour_has_the_stumbles_no_more() -> None:
    transcript: list[str] = []

    failures = walk_the_first_hour(transcript.append)

    assert failures == []
