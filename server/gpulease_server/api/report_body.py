"""Reading the report of a worker that is newer than this daemon.

A report is refused as a whole, and the node is unknown then. One word that this daemon does not know is no reason for
that. It is replaced by what is safe to believe, and no other part of the report is lost:

| the word is | what the daemon believes |
|---|---|
| the compute mode of a GPU | it is unknown, so the GPU is not granted: its health is `compute_mode_unknown` |
| the type of a process | it uses the GPU: `compute` |
| what became of an owner | nothing is known of it: `unknown`, so its lease lasts as long as it is renewed |
| how far a job is | it has ended where the report says when, else runs where that says since when, else starts |

Fields that it does not know are passed over. Everything else of another shape is refused.

The daemon opens no path just because a worker says so. It takes the log directory of a job only from a worker that the
kernel shows to be root or the daemon's own user on this host: these could read it without the daemon. It must also be
the directory that a worker makes for that job. Any other is kept for people, as `NODE:DIRECTORY`, and is never opened.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import msgspec
from pydantic import ValidationError

from gpulease_protocol.node_protocol import JobReport, NodeReport, attempt_name
from gpulease_server.api.request_body import MAX_LONG_BYTES, JsonBody

COMPUTE_MODE_UNKNOWN = "compute_mode_unknown"
DECODER = msgspec.json.Decoder(NodeReport)
"""Refuses whatever `JsonBody` refuses, but for what no field of a report takes in."""
MAX_WORDS = 100
"""Words that are logged, once each; they are those of one newer version."""

log = logging.getLogger(__name__)


class ReportBody(JsonBody[NodeReport]):
    """As `JsonBody`, but carries words of a newer worker, and as many parts as go into its bytes: only a worker sends
    it, and a job of 300 processes that are left on 8 GPUs, each with the files of all of them open, has 20,000."""

    max_commas = MAX_LONG_BYTES

    def __init__(self) -> None:
        super().__init__(NodeReport)
        self._logged: set[str] = set()

    def parse(self, raw: bytes) -> NodeReport:
        """The report. Raises ValidationError."""
        try:
            return DECODER.decode(raw)  # takes a third of the time
        except (ValueError, RecursionError):
            pass  # pydantic says what is wrong, and reads some spellings of a time that this does not
        try:
            return super().parse(raw)
        except ValidationError as error:
            only_words = all(item["type"] == "enum" and isinstance(item["input"], str) for item in error.errors())
            document = json.loads(raw) if only_words else None
            if document is None or not replace_unknown_words(document, [item["loc"] for item in error.errors()]):
                raise
            self._log(error)
            return super().parse(json.dumps(document).encode())

    def _log(self, error: ValidationError) -> None:
        for item in error.errors():
            word = f"{item['loc'][-1]} {item['input']!r:.64}"
            if word not in self._logged and len(self._logged) < MAX_WORDS:
                self._logged.add(word)
                log.warning("a worker reports %s, which this daemon does not know; upgrade the daemon", word)


def with_trusted_logs(node: str, report: NodeReport, on_this_host: bool) -> NodeReport:
    """The report, with each log directory that this daemon must not open as `NODE:DIRECTORY`."""
    if all(job.log_directory is None for job in report.jobs):
        return report
    jobs = (
        job
        if job.log_directory is None or (on_this_host and _is_own_directory(job))
        else replace(job, log_directory=f"{node}:{job.log_directory}")
        for job in report.jobs
    )
    return replace(report, jobs=tuple(jobs))


def _is_own_directory(job: JobReport) -> bool:
    """True for `.../jobs/ATTEMPT/logs` of this very job."""
    path = PurePosixPath(job.log_directory or "")
    plain = path.is_absolute() and ".." not in path.parts and str(path) == job.log_directory
    return plain and path.parts[-3:] == ("jobs", attempt_name(job.job_id, job.attempt), "logs")


def replace_unknown_words(report: dict[str, Any], places: Iterable[tuple[int | str, ...]]) -> bool:
    """Replace the words at these places of a report's JSON. False if one is in a place where none can be replaced."""
    for place in places:
        names = tuple(part for part in place if isinstance(part, str))
        replacement = REPLACEMENTS.get(names[-2:])
        if replacement is None:
            return False
        noun: Any = report
        for part in place[:-1]:
            noun = noun[part]
        noun |= replacement(noun)
    return True


def _compute_mode(gpu: dict[str, Any]) -> dict[str, Any]:
    health = gpu.get("health", "ok")
    return {"compute_mode": None, "health": COMPUTE_MODE_UNKNOWN if health == "ok" else health}


def _process_type(_: dict[str, Any]) -> dict[str, Any]:
    return {"type": "compute"}


def _owner_state(owner: dict[str, Any]) -> dict[str, Any]:
    return {"state": "unknown", "reason": f"its worker says {owner['state']!r:.64}, which this daemon does not know"}


def _run_state(job: dict[str, Any]) -> dict[str, Any]:
    return {"state": "exited" if job.get("ended_at") else "running" if job.get("started_at") else "starting"}


REPLACEMENTS: dict[tuple[str, ...], Callable[[dict[str, Any]], dict[str, Any]]] = {
    ("gpus", "compute_mode"): _compute_mode,
    ("processes", "type"): _process_type,
    ("opened_by", "type"): _process_type,
    ("owners", "state"): _owner_state,
    ("jobs", "state"): _run_state,
}
"""By the list that the word is in, and the name of its field: what to put in its place."""
