"""All questions of the table, by name. Each is imported by the process that asks it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence

from bench.table.rows import Row

Question = Callable[[bool], Sequence[Row]]
"""Measures, with fewer and shorter rounds where the argument is true."""

QUESTIONS: Mapping[str, str] = {
    "renew": "bench.requests:renew",
    "acquire": "bench.requests:acquire_and_release",
    "postgresql": "bench.databases:postgresql",
    "handover": "bench.handover:handover",
    "decisions": "bench.decisions:decisions",
    "nodes": "bench.node_reports:node_reports",
    "jobs": "bench.jobs:jobs",
    "idle": "bench.idle:idle",
    "long-polls": "bench.long_polls:long_polls",
    "startup": "bench.startup:startup",
}

DETAILS = ("first_call", "grants", "decisions", "jobs", "probe", "metrics", "restart")
"""Modules of this folder that print a table of their own, most of them for questions without a target."""


def question(name: str) -> Question:
    """The function that measures."""
    found: Question = pkgutil.resolve_name(QUESTIONS[name])
    return found


def print_details() -> None:
    """Print the tables of `DETAILS`."""
    for name in DETAILS:
        pkgutil.resolve_name(f"bench.{name}:main")()
