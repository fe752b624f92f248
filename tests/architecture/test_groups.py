"""Tests that load the machine, or measure times, run one at a time."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("machine")
def test_the_group_of_a_test_is_seen(request: pytest.FixtureRequest) -> None:
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@machine"), (
            "pytest-xdist passes groups over: what make setup installs does not"
        )
