"""Tells someone of a job's end (`JobSpec.notify`): a POST of the job as JSON to a URL, or a command. Both as its user.

The supervisor forks a process for it once `exit.json` is on disk (`notification_process`), and ends: neither the job's
end nor its GPUs wait for a slow mail server. It is no part of the job: it has none of its descriptors, cgroup or
marker, sees no GPU, and is over after DEADLINE_S, with everything that it has started. What goes on the network goes
as the job's user, who may do the same in a job: gpulease lends no one its own rights, or root's.

| what happens | who is told |
|---|---|
| the attempt failed and is to be tried again; it was preempted, made way for more nodes, or its node leaves | no one: \
only the last one counts |
| the job was cancelled, or its node forgotten, before a supervisor had it | no one |
| its supervisor was killed, its worker cannot run it, or its node is gone | no one; the events of the daemon have it |
| too many such processes of its user are at work already | no one |
| a command fails, or a URL does not answer 2xx in ATTEMPTS attempts | no one; `notify.log` in the job's logs says why |
| a URL answers with a redirect | no one: it is not followed |
"""

from __future__ import annotations

import json
import os
import select
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpulease_protocol.codec import to_json
from gpulease_protocol.host import process_tree
from gpulease_protocol.host.log_files import open_beneath
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.job_checks import is_notify_url
from gpulease_protocol.launchers import LEASE_VARIABLES
from gpulease_protocol.model import Job, JobState
from gpulease_protocol.node_protocol import JobReport, final_state
from gpulease_worker.jobs import inherited_state, job_records, spawn
from gpulease_worker.jobs.job_records import StopRecord
from gpulease_worker.jobs.launch_plan import LaunchPlan
from gpulease_worker.jobs.local_job import LocalJob
from gpulease_worker.jobs.pam_session import LoginLimits

DEADLINE_S = 60.0
"""How long a command, or all attempts with a URL, may take."""
KEPT_BYTES = 65536
"""Output that is kept."""
ATTEMPTS, ATTEMPT_S, PAUSES_S = 3, 10.0, (2.0, 8.0)
"""Attempts with a URL, how long each may wait for an answer, and the pauses between them."""
KILL_S = 5.0


def tell_of_end(directory: Path, plan: LaunchPlan, login: LoginLimits | None) -> None:
    """Tell of the end that is recorded in the job's directory. Call it in a process of its own: it ends everything that
    this process has started."""
    inherited_state.reset_signals()
    local = LocalJob(directory=directory)
    local.read()
    job = None if plan.job is None else job_at_end(plan.job, local.report(), local.stop)
    if job is None or plan.notify is None:
        return
    said = _run(_plan_of_notice(plan, job), login, job)
    with suppress(OSError, ValueError):  # its user has removed the file, or the whole directory is gone
        log = open_beneath(directory / job_records.LOGS, job_records.NOTIFY_LOG, flags=os.O_WRONLY | os.O_APPEND)
        os.write(log, f"{job_records.now():%Y-%m-%d %H:%M:%S} {plan.notify[:200]!a}\n{said}\n".encode(errors="replace"))


def job_at_end(job: Job, report: JobReport, stop: StopRecord | None) -> Job | None:
    """The job as the daemon will have it after this report; None if it is tried again. `stop`: the order to stop that
    it has had."""
    node_left, again, failure = (False, False, None) if stop is None else (stop.node_left, stop.again, stop.failure)
    state, reason = final_state(report, cancelled=stop is not None and not node_left)
    if failure is not None and not report.timed_out:
        state, reason = JobState.FAILED, failure
    has_run = report.started_at is not None or failure is not None
    is_tried_again = node_left or (has_run and report.attempt <= (job.retries or 0))
    if (state is JobState.CANCELLED and again) or (state is JobState.FAILED and is_tried_again):
        return None
    return replace(
        job,
        state=state,
        reason=reason,
        attempts=report.attempt,
        exit_code=report.exit_code,
        traceback=report.traceback,
        started_at=report.started_at,
        ended_at=report.ended_at,
        log_directory=report.log_directory,
    )


def environment_of_notice(environment: Mapping[str, str], job: Job) -> dict[str, str]:
    """The job's environment without its lease and its GPUs, and with how it ended."""
    kept = {name: value for name, value in environment.items() if not LEASE_VARIABLES.fullmatch(name)}
    told = {
        "GPULEASE_JOB_ID": job.id,
        "GPULEASE_JOB_NAME": job.name,
        "GPULEASE_JOB_STATE": job.state.value,
        "GPULEASE_JOB_REASON": job.reason or "",
        "GPULEASE_JOB_EXIT_CODE": "" if job.exit_code is None else str(job.exit_code),
    }
    if job.array_id is not None:
        told |= {"GPULEASE_ARRAY_ID": job.array_id, "GPULEASE_ARRAY_INDEX": str(job.array_index)}
    return kept | {"CUDA_VISIBLE_DEVICES": ""} | told


def post(url: str, body: bytes, environment: Mapping[str, str]) -> None:
    """POST to a URL, with the proxies and certificates of this environment. Prints why it was not told, if it was not.

    It ends with an answer that another attempt would not change.
    """
    os.environ.clear()
    os.environ.update(environment)
    opener = urllib.request.build_opener(_NoRedirect)
    headers = {"Content-Type": "application/json", "User-Agent": "gpulease"}
    for number in range(ATTEMPTS):
        try:
            request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - http and https only
            opener.open(request, timeout=ATTEMPT_S).close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            _print(f"attempt {number + 1}: it answered {error.code}")
            if error.code < 500:
                return
        except (OSError, ValueError) as error:
            _print(f"attempt {number + 1}: {error}")
        if number < len(PAUSES_S):
            time.sleep(PAUSES_S[number])


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would lead to where the user did not say."""

    def redirect_request(self, *_: Any) -> None:
        """None: not followed."""


def _plan_of_notice(plan: LaunchPlan, job: Job) -> LaunchPlan:
    memory = plan.settings.memory_bytes
    return replace(
        plan,
        argv=("/bin/sh", "-c", plan.notify or ""),
        environment=environment_of_notice(plan.environment, job),
        modules=(),
        script=None,
        indexed_gpus=(),
        limits=plan.limits | ({"as": (memory, memory)} if memory else {}),
    )


def _run(plan: LaunchPlan, login: LoginLimits | None, job: Job) -> str:
    """Run the command, or call the URL, as the job's user; what it printed, and how it ended if not well."""
    call: Callable[[], None] | None = None
    if plan.notify is not None and is_notify_url(plan.notify):
        import encodings.idna  # noqa: F401, PLC0415 - its user may not be able to read this Python's files
        import ssl  # noqa: F401, PLC0415

        call = partial(post, plan.notify, json.dumps(to_json(job)).encode(), plan.environment)
    process_tree.adopt_orphans()
    reading, writing = os.pipe()
    try:
        child = spawn.spawn(plan, writing, None, login, call)
    except spawn.LaunchError as error:
        return str(error)
    finally:
        os.close(writing)
    kept, status = _await(child.pid, reading)
    said = kept.decode(errors="replace").rstrip("\n")
    try:
        child.has_executed()
    except spawn.LaunchError as error:
        return str(error)
    if status is None:
        return f"{said}\nIt was ended after {DEADLINE_S:g} s.".lstrip()
    code = os.waitstatus_to_exitcode(status)
    return said if code == 0 else f"{said}\nIt ended with status {code}.".lstrip()


def _await(pid: int, reading: int) -> tuple[bytes, int | None]:
    """The output of a process and its wait status, None if it had to be ended; nothing that it started is left."""
    until_s, kept, status = time.monotonic() + DEADLINE_S, b"", None
    os.set_blocking(reading, False)
    is_open = True
    while time.monotonic() < until_s:
        if is_open and select.select([reading], [], [], 0.05)[0]:
            part = os.read(reading, KEPT_BYTES)
            is_open = bool(part)
            kept = (kept + part)[:KEPT_BYTES]
        elif not is_open:
            time.sleep(0.05)
        ended, found = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = found
            break
    with suppress(BlockingIOError):
        kept = (kept + os.read(reading, KEPT_BYTES))[:KEPT_BYTES]
    process_tree.kill_all(lambda: _left_below(os.getpid()), KILL_S)
    return kept, status


def _left_below(root: int) -> set[ProcessId]:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return process_tree.descendants(root)


def _print(line: str) -> None:
    os.write(1, f"{line}\n".encode(errors="replace"))
