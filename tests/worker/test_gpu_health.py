"""What makes a GPU unhealthy, what is a warning, and how long an Xid counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpulease_server.api.report_body import COMPUTE_MODE_UNKNOWN
from gpulease_worker.probe import gpu_health, xid_catalog
from gpulease_worker.probe.gpu_health import ActiveXids, HealthFacts, health_of, warnings_of

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"
SETTLE_S = 30.0
UUID = "GPU-1"


@pytest.mark.parametrize(
    ("facts", "word", "warned"),
    [
        (HealthFacts(), "ok", ()),
        (HealthFacts(remap_pending=True), "ok", ("row_remap_pending",)),
        (HealthFacts(remap_pending=True, recovery_action="gpu_reset"), "reset_required", ("row_remap_pending",)),
        (HealthFacts(remap_failed=True), "row_remap_failed", ()),
        (HealthFacts(pages_pending=True), "ok", ("retired_pages_pending",)),
        (HealthFacts(recovery_action="drain_p2p"), "ok", ("drain_p2p",)),
        (HealthFacts(fabric="completed"), "ok", ()),
        (HealthFacts(fabric="in_progress"), "fabric_not_ready", ()),
        (HealthFacts(fabric="not_started", cuda_starts=False), "fabric_not_ready", ()),
        (HealthFacts(fabric="failed", cuda_starts=True), "ok", ("fabric_not_ready",)),
        (HealthFacts(fabric="state_9"), "fabric_not_ready", ()),
        (HealthFacts(fabric="not_started", mig=True), "mig", ()),
        (
            HealthFacts(fabric="in_progress", cuda_starts=True, processes_known=False),
            "processes_unknown",
            ("fabric_not_ready",),
        ),
    ],
)
def test_a_gpu_is_judged_by_what_the_driver_told(facts: HealthFacts, word: str, warned: tuple[str, ...]) -> None:
    assert (health_of(facts), warnings_of(facts)) == (word, warned)
    assert {health_of(facts)} <= {*gpu_health.HEALTH_WORDS}
    assert {*warned} <= {*gpu_health.WARNINGS}


def test_every_word_is_in_the_glossary() -> None:
    text = GLOSSARY.read_text()
    _, of_health, of_warnings = re.split(r"^(?:The )?`(?:health|warnings)` of a GPU", text, flags=re.MULTILINE)
    assert {*re.findall(r"^\| `(\w+)` \|", of_health, re.MULTILINE)} == {*gpu_health.HEALTH_WORDS, COMPUTE_MODE_UNKNOWN}
    assert {*re.findall(r"^\| `(\w+)` \|", of_warnings, re.MULTILINE)} == {*gpu_health.WARNINGS}


def standing(xid: int, action: str | None, after_s: float) -> int | None:
    xids = ActiveXids(SETTLE_S)
    xids.record(UUID, xid, 100.0)
    return xids.active(UUID, action, 100.0 + after_s)


@pytest.mark.parametrize("xid", [8, 13, 31, 43, 45, 63, 69, 72, 94, 154])
@pytest.mark.parametrize("action", [None, "none"])
def test_a_programs_own_fault_and_a_notice_never_count(xid: int, action: str | None) -> None:
    assert standing(xid, action, 0.0) is None


@pytest.mark.parametrize("xid", [46, 48, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158])
def test_one_that_asks_for_a_reset_counts_until_the_driver_has_had_time_to_say_so(xid: int) -> None:
    assert standing(xid, "none", SETTLE_S - 1) == xid
    assert standing(xid, "none", SETTLE_S) is None
    assert standing(xid, "gpu_reset", 10 * SETTLE_S) == xid
    assert standing(xid, None, 10 * SETTLE_S - 1) == xid
    assert standing(xid, None, 10 * SETTLE_S) is None


@pytest.mark.parametrize("xid", [74, 144, 150, 171, 999])
def test_of_any_other_the_drivers_verdict_decides_at_once_and_where_there_is_none_it_counts(xid: int) -> None:
    assert standing(xid, "none", 0.0) is None
    assert standing(xid, "gpu_reset", 0.0) == xid
    assert standing(xid, None, 10 * SETTLE_S - 1) == xid
    assert standing(xid, None, 10 * SETTLE_S) is None


def test_a_lesser_xid_does_not_make_one_that_asks_for_a_reset_forgotten() -> None:
    xids = ActiveXids(SETTLE_S)
    for xid in (119, 13, 145):
        xids.record(UUID, xid, 100.0)
    assert xids.active(UUID, "none", 101.0) == 119
    assert xids.active("GPU-2", "none", 101.0) is None


def test_no_xid_is_in_the_catalogue_twice() -> None:
    numbers = [xid for listed in xid_catalog.ACTIONS.values() for xid in listed]
    assert len(numbers) == len(set(numbers))
    assert not xid_catalog.HARMLESS & xid_catalog.RESETS
