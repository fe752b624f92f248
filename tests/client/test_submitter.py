"""What a job takes over from the process that submits it."""

from __future__ import annotations

import resource

import pytest

from gpulease.submitter import job_fields


@pytest.mark.parametrize("unlimited", [-1, 2**64 - 1], ids=["up to Python 3.14", "from Python 3.15"])
def test_no_limit_is_the_same_for_every_python(monkeypatch: pytest.MonkeyPatch, unlimited: int) -> None:
    monkeypatch.setattr(resource, "RLIM_INFINITY", unlimited)
    monkeypatch.setattr(resource, "getrlimit", lambda number: (number, unlimited))
    limits = job_fields()["limits"]
    assert limits["nofile"] == [resource.RLIMIT_NOFILE, -1]
    assert {hard for _, hard in limits.values()} == {-1}
