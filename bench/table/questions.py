"""All questions of the table, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench import databases, decisions, handover, idle, jobs, long_polls, node_reports, requests, startup
from bench.table.rows import Row

Question = Callable[[bool], Sequence[Row]]
"""Measures, with fewer and shorter rounds where the argument is true."""

QUESTIONS: Mapping[str, Question] = {
    "renew": requests.renew,
    "acquire": requests.acquire_and_release,
    "postgresql": databases.postgresql,
    "handover": handover.handover,
    "decisions": decisions.decisions,
    "nodes": node_reports.node_reports,
    "jobs": jobs.jobs,
    "idle": idle.idle,
    "long-polls": long_polls.long_polls,
    "startup": startup.startup,
}
