"""Every end reason and every kind of event that the core names can occur: in a simulated run, or as said here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpulease_server.core
from gpulease_protocol.model import EndReason
from tests.simulation.__main__ import simulate

pytestmark = pytest.mark.busy("compute")

KINDS_ELSEWHERE = {
    "gpu.conflict": "tests/core/test_whose_process.py",
    "gpu.conflict_over": "tests/core/test_whose_process.py",
    "gpu.foreign": "tests/core/test_whose_process.py",
    "gpu.foreign_over": "tests/core/test_whose_process.py",
    "gpu.gone": "tests/core/test_draining.py",
    "job.*": "tests/core/test_nodes_and_jobs.py; jobs are submitted with `jobs` alone",
    "lease.budget_spent": "tests/core/test_token_budgets.py; a simulated token has a budget with `token_budgets` alone",
    "lease.revoked": "tests/core/test_user_limits.py; the simulated administrator revokes nothing",
    "lease.kept": "tests/core/test_keep.py; the simulated clients keep nothing on purpose, but with `reclaim`",
    "lease.preempted": "tests/core/test_preemption.py",
    "lease.preempting": "tests/core/test_preemption.py",
    "lease.preemption_withdrawn": "tests/core/test_preemption.py",
    "lease.reclaim_notice": "tests/core/test_reclaim.py; idle GPUs are taken back with `reclaim` alone",
    "lease.reclaim_withdrawn": "tests/core/test_reclaim.py",
    "lease.reclaimed": "tests/core/test_reclaim.py",
    "lease.revived": "tests/core/test_leases.py",
    "lease.grown": "tests/core/test_elastic_growth.py; no simulated job is elastic",
    "lease.shrunk": "tests/core/test_elastic_jobs.py; no simulated job is elastic",
    "lease.unwatched": "tests/core/test_owners.py",
    "node.forgotten": "tests/core/test_forgotten_nodes.py: it takes 90 days",
    "gpu.recovered": "tests/core/test_whose_process.py",
    "node.drained": "tests/core/test_administration.py",
    "node.lost": "tests/core/test_node_loss.py",
}
"""Kinds of events that a short simulated run need not have, and the test that has them."""
REASONS_ELSEWHERE = {
    EndReason.REVOKED: "tests/core/test_user_limits.py",
    EndReason.JOB_FINISHED: "tests/core/test_nodes_and_jobs.py",
    EndReason.NODE_LOST: "tests/core/test_node_loss.py",
    EndReason.BUDGET_SPENT: "tests/core/test_token_budgets.py",
    EndReason.TIME_OVER: "tests/core/test_priorities.py",
    EndReason.PREEMPTED: "tests/core/test_preemption.py",
    EndReason.RECLAIMED_IDLE: "tests/core/test_reclaim.py",
}
"""The same for the end reasons of leases."""


def kinds_in_the_core() -> set[str]:
    sources = "\n".join(path.read_text() for path in Path(gpulease_server.core.__path__[0]).rglob("*.py"))
    named = set(re.findall(r'"((?:gpu|lease|node|job)\.[a-z_]+)"', sources))
    return {kind for kind in named if not kind.startswith("job.")}


@pytest.mark.slow
def test_each_kind_of_event_and_each_end_reason_occurs_or_is_named_here() -> None:
    kinds, reasons = kinds_in_the_core() - KINDS_ELSEWHERE.keys(), set(EndReason) - REASONS_ELSEWHERE.keys()
    for seed in range(1, 9):
        log = simulate(seed, steps=1000).log
        kinds -= {event["kind"] for event in log}
        reasons -= {event["reason"] for event in log if event["kind"] == "lease.ended"}
        if not kinds | reasons:
            break

    assert kinds | reasons == set(), "occurs in no run, and is not named here"
    for where in (*KINDS_ELSEWHERE.values(), *REASONS_ELSEWHERE.values()):
        path = Path(re.split(r"[;:]", where)[0])
        assert path.suffix != ".py" or path.is_file()
