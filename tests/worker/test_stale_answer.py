"""A worker or a host that was stopped starts nothing that the daemon ordered before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpulease_protocol.node_protocol import DesiredState, JobOrder, NodeReport
from gpulease_worker import loop as worker_loop
from gpulease_worker.loop import STALE_ANSWER_S, WorkerLoop
from gpulease_worker.settings import WorkerSettings
from tests.worker.build import order, spec


@pytest.mark.parametrize(
    ("stopped_s", "starts"), [(0.0, True), (STALE_ANSWER_S - 1, True), (STALE_ANSWER_S + 1, False)]
)
def test_an_answer_from_before_a_worker_was_stopped_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_s: float, starts: bool
) -> None:
    since_boot_s, followed = [100.0], list[Sequence[JobOrder]]()

    async def report() -> NodeReport:
        return NodeReport(worker_id="w", host="h")

    async def answer(_: NodeReport) -> DesiredState:
        since_boot_s[0] += stopped_s  # SIGSTOP, or the host is suspended, after the answer was sent
        return DesiredState(ticket=7, jobs=(order("job-1", spec("true")),))

    async def turn() -> None:
        worker = WorkerLoop(WorkerSettings(url="http://127.0.0.1:1", node="n", data_dir=tmp_path, simulate="1"))
        monkeypatch.setattr(worker_loop, "since_boot_s", lambda: since_boot_s[0])
        monkeypatch.setattr(worker, "_report", report)
        monkeypatch.setattr(worker, "_send", answer)
        monkeypatch.setattr(worker._jobs, "reconcile", lambda orders, _: followed.append(orders))
        assert await worker._turn()
        assert (worker._desired is not None) is starts, "the next report must not answer to it either"

    asyncio.run(turn())
    assert bool(followed) is starts
