"""The checks of `tests/tools/sweep.py` find what they are for."""

from __future__ import annotations

import pytest

from tests.tools.sweep import Stay, Trial, busy_ratio, granted_beside_foreign, held_times, overlaps


def trial(gpu: str, begun_s: float, ended_s: float) -> Trial:
    return Trial(number=0, gpus=frozenset({gpu}), pid=1, begun_s=begun_s, ended_s=ended_s)


def lease(gpu: str, begun_s: int, ended_s: int) -> list[dict[str, object]]:
    stamps = {"granted": f"1970-01-01T00:00:{begun_s:02}Z", "ended": f"1970-01-01T00:00:{ended_s:02}Z"}
    return [
        {"kind": f"lease.{kind}", "at": at, "lease_id": f"{gpu}-{begun_s}", "gpus": [gpu]}
        for kind, at in stamps.items()
    ]


def test_two_trials_on_one_gpu_overlap_only_at_the_same_time() -> None:
    one, later, other = trial("0", 1, 3), trial("0", 3, 4), trial("1", 1, 9)
    assert overlaps([one, later, other]) == []
    killed = trial("0", 2, float("inf"))
    assert overlaps([one, killed, other]) == [(one, killed)]


def test_the_time_of_a_foreign_process_is_not_idle_unless_a_lease_had_the_gpu() -> None:
    log = [*lease("a", 0, 10), *lease("b", 0, 5)]
    assert busy_ratio(log, "ab") == pytest.approx(15 / 20)
    assert busy_ratio(log, "ab", [Stay("b", 5, 8)]) == pytest.approx(15 / 17)
    assert busy_ratio(log, "ab", [Stay("b", 3, 8)]) == pytest.approx(15 / 17)
    assert busy_ratio(log, "ab", [Stay("a", 3, 8), Stay("b", 9, float("inf"))]) == pytest.approx(15 / 19)


def test_a_lease_that_never_ended_is_not_overlooked() -> None:
    with pytest.raises(AssertionError):
        held_times(lease("a", 0, 10)[:1])


def test_a_grant_beside_a_foreign_process_is_found() -> None:
    log = lease("a", 5, 10)
    assert granted_beside_foreign(log, [Stay("b", 0, 9), Stay("a", 0, 5), Stay("a", 4.5, 9)]) == []
    assert granted_beside_foreign(log, [Stay("a", 3, 9)]) == log[:1]
