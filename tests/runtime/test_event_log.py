"""The decision log: what may need attention is a warning."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import gpulease_server.core
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_server.runtime import event_log
from gpulease_server.runtime.event_log import WARNING_EVENTS, log_turn
from tests.core.build import World


def test_a_lost_job_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    world = World().node(gpus=1)
    job_id = world.submit(1)
    world.jobs["a"] = [JobReport(job_id=job_id, attempt=1, state=RunState.RUNNING, started_at=world.now.at)]
    world.report()
    world.jobs["a"] = []
    caplog.set_level(logging.INFO)
    world.changes.clear()
    world.report()  # the worker no longer knows the job
    log_turn(world.changes, [])
    (ended,) = [record for record in caplog.records if record.message == "job.ended"]
    assert ended.levelno == logging.WARNING
    assert ended.name == event_log.log.name == "gpulease.decisions"


def test_a_job_that_succeeds_is_not_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    world = World().node(gpus=1)
    job_id = world.submit(1)
    exited = JobReport(job_id=job_id, attempt=1, state=RunState.EXITED, exit_code=0, ended_at=world.now.at)
    world.jobs["a"] = [exited]
    world.report()
    caplog.set_level(logging.INFO)
    log_turn(world.changes, [])
    (ended,) = [record for record in caplog.records if record.message == "job.ended"]
    assert ended.levelno == logging.INFO


def test_the_core_emits_every_event_that_is_logged_as_a_warning() -> None:
    source = "".join(path.read_text() for path in Path(gpulease_server.core.__path__[0]).rglob("*.py"))
    assert set(re.findall(r'"([a-z]+\.[a-z_]+)"', source)) >= WARNING_EVENTS
